"""Conversions between number formats."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from ..rounding import DIRECTED, canonical_nans, directed, f64_to_bf16, flush, to_odd
from ..types import DTYPE, SIZE, f16_to_f32, f32_to_f16, is_float, narrow, widen
from . import Run, instruction, options, unsupported

if TYPE_CHECKING:
    from ..context import Context
    from ..program import Instruction

_TO_INTEGER: dict[str, Callable[[Any], Any]] = {
    "rni": np.rint,
    "rzi": np.trunc,
    "rmi": np.floor,
    "rpi": np.ceil,
}
_MODES = "rn rz rm rp rna rni rzi rmi rpi"
_FP8 = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
_FP8_MAX = {"e4m3": 448.0, "e5m2": 57344.0}
_FP8_NAN = np.uint8(0x7F)
_BF16_MAX = 3.3895313892515355e38


@instruction("cvt", kind="convert", fuses=True)
def cvt(ins: Instruction, ctx: Context) -> Run:
    """All conversions: integer and float, packed halves, float8."""
    if ins.opcode[1] == "pack":
        return _pack(ins, ctx)
    given = options(ins, f"{_MODES} ftz sat satfinite relu", DTYPE, SIZE)
    out, kind = ins.opcode[-2], ins.opcode[-1]
    if out[:4] in _FP8 or kind[:4] in _FP8:
        return _float8(ins, ctx, given)
    mode = next((m for m in _MODES.split() if m in given), "")
    if out.endswith("x2"):
        return _packed_halves(ins, ctx, given, mode)
    fn = _scalar(out, kind, mode, given)
    d, a = ins.operands
    target = "b32" if out == "tf32" else out
    return ctx.elementwise(fn, d, target, (a, kind))


def _scalar(out: str, kind: str, mode: str, given: set[str]) -> Callable[[Any], Any]:
    """The conversion of one value."""
    if not is_float(out):
        return _float_to_integer(out, kind, mode, given) if is_float(kind) else _integer(out, "sat" in given)
    if not is_float(kind):
        if "sat" in given:
            return lambda a: _saturated(_from_integer(np.asarray(a), out, mode), out)
        return lambda a: _from_integer(np.asarray(a), out, mode)
    return lambda a: _float_to_float(np.asarray(a), out, kind, mode, given)


def _integer(out: str, saturate: bool) -> Callable[[Any], Any]:
    dtype = DTYPE[out]
    if not saturate:
        return lambda a: np.asarray(a).astype(dtype)
    limits = np.iinfo(dtype)

    def clamp(a: Any) -> Any:
        a = np.asarray(a)
        own = np.iinfo(a.dtype)
        low, high = max(limits.min, own.min), min(limits.max, own.max)
        return np.clip(a, a.dtype.type(low), a.dtype.type(high)).astype(dtype)

    return clamp


def _float_to_integer(out: str, kind: str, mode: str, given: set[str]) -> Callable[[Any], Any]:
    """Out of range clamps; NaN gives 0, or the top bit alone where the source or the target has 64 bits."""
    round_to = _TO_INTEGER[mode]
    dtype = DTYPE[out]
    limits = np.iinfo(dtype)
    # Largest float64 inside the range: 2**63 and 2**64 themselves are outside.
    high = float(limits.max) if dtype.itemsize < 8 else np.nextafter(float(limits.max), 0)
    top = limits.min if out[0] == "s" else limits.max // 2 + 1
    nan = top if dtype.itemsize == 8 or kind == "f64" else 0

    def fn(a: Any) -> Any:
        a = flush(a) if "ftz" in given and kind == "f32" else np.asarray(a)
        whole = round_to(widen(a, kind).astype(np.float64))
        bad = np.isnan(whole)
        inside = np.clip(np.where(bad, 0, whole), float(limits.min), high)
        result = inside.astype(dtype)
        if dtype.itemsize == 8:
            result = np.where(whole > high, dtype.type(limits.max), result)
        return np.where(bad, np.array(nan, dtype), result) if bad.any() else result

    return fn


def _from_integer(a: np.ndarray, out: str, mode: str) -> Any:
    """Round an integer to a float, once."""
    if out == "f64" or (out == "f32" and mode in ("", "rn")):
        nearest = a.astype(DTYPE[out])
        if mode in ("", "rn") or a.itemsize < 8:
            return nearest
        return directed(nearest, _integer_residual(a, nearest), mode)
    if a.itemsize == 8:  # float64 cannot hold it: round that step to odd
        nearest = a.astype(np.float64)
        return _round_float(to_odd(nearest, _integer_residual(a, nearest)), out, mode)
    return _round_float(a.astype(np.float64), out, mode)


def _integer_residual(a: np.ndarray, nearest: np.ndarray) -> np.ndarray:
    """The sign of the integer minus its float."""
    return np.array(
        [(int(x) > int(y)) - (int(x) < int(y)) for x, y in zip(a.ravel(), nearest.ravel(), strict=True)],
        np.float64,
    ).reshape(a.shape)


def _float_to_float(a: np.ndarray, out: str, kind: str, mode: str, given: set[str]) -> Any:
    if "ftz" in given and kind == "f32":
        a = np.array(flush(a))
        canonical_nans(a)
    wide = np.atleast_1d(widen(a, kind))
    if mode in _TO_INTEGER:
        wide = _TO_INTEGER[mode](wide)
    result = _round_float(wide, out, mode, "satfinite" in given)
    if "sat" in given:
        result = _saturated(result, out)
    if "relu" in given:
        result = _relu(result, out)
    if "ftz" in given and out == "f32":
        result = flush(result)
    if out == "f32" and kind not in ("f64", "bf16"):  # from these two NaNs keep their payload
        result = np.array(result)
        canonical_nans(result)
    if out == "f16" and kind == "f64" and np.isnan(wide).any():
        bits = wide.view(np.uint64)
        kept = (bits >> np.uint64(48)) & np.uint64(0x8000) | (bits >> np.uint64(42)) & np.uint64(0x1FF)
        result = np.where(np.isnan(wide), (kept | np.uint64(0x7E00)).astype(np.uint16).view(np.float16), result)
    return result


def _saturated(result: np.ndarray, out: str) -> np.ndarray:
    """Values bounded to [0, 1], NaNs to 0."""
    bounded = np.clip(widen(result, out), 0, 1) + 0
    bounded = np.where(np.isnan(bounded), 0, bounded).astype(bounded.dtype)
    return narrow(bounded, out)


def _relu(result: np.ndarray, out: str) -> np.ndarray:
    """Negative values become +0, NaNs stay."""
    values = result.view(np.float32) if out == "tf32" else widen(result, out)
    return np.where((values < 0) | ((values == 0) & np.signbit(values)), result.dtype.type(0), result)


def _round_float(values: Any, out: str, mode: str, finite: bool = False) -> Any:
    """float32 or float64 to a float type by a rounding mode; 16-bit types as a writer takes them."""
    values = np.atleast_1d(values)
    if out == "f64":
        return values.astype(np.float64)
    if out == "f32":
        result = values.astype(np.float32)
        if mode in DIRECTED:
            return directed(result, np.where(np.isfinite(values), values - result, 0), mode)
        return result
    if out == "tf32":
        return to_tf32(values, mode)
    if out == "f16":
        result = f32_to_f16(values)
        if mode in DIRECTED:
            gap = values.astype(np.float64) - result.astype(np.float64)
            result = directed(result, np.where(np.isfinite(values), gap, 0), mode)
        return np.clip(result, np.float16(-65504), np.float16(65504)) if finite else result
    if mode in DIRECTED:
        return _bf16_directed(values, mode)
    if finite:
        values = np.clip(values, -_BF16_MAX, _BF16_MAX)
    return f64_to_bf16(values)


def _bf16_directed(values: np.ndarray, mode: str) -> np.ndarray:
    """bfloat16 bits, cut off and stepped away from zero where the mode says so."""
    exact = values.astype(np.float32)  # float64 sources are not converted by this form
    bits = exact.view(np.uint32)
    cut = (bits >> np.uint32(16)).astype(np.uint16)
    inexact = (bits & np.uint32(0xFFFF)) != 0
    negative = np.signbit(exact)
    away = inexact & (negative if mode == "rm" else ~negative if mode == "rp" else False)
    result = np.where(away, cut + np.uint16(1), cut)
    return np.where(np.isnan(exact), np.uint16(0x7FFF), result)


def to_tf32(values: np.ndarray, mode: str) -> np.ndarray:
    """float32 bits with 10 bits of mantissa: ties away (rna), to even (rn) or cut off (rz)."""
    values = values.astype(np.float32)
    bits = values.view(np.uint32)
    keep = np.uint32(0xFFFFE000)
    if mode == "rz":
        rounded = bits & keep
    elif mode == "rn":
        odd = (bits >> np.uint32(13)) & np.uint32(1)
        rounded = (bits + np.uint32(0xFFF) + odd) & keep
    else:
        rounded = (bits + np.uint32(0x1000)) & keep
    nan = bits & keep if mode == "rna" else np.uint32(0x7FFFE000)
    return np.where(np.isnan(values), nan, np.where(np.isinf(values), bits, rounded))


def _packed_halves(ins: Instruction, ctx: Context, given: set[str], mode: str) -> Run:
    """Two float32 to a packed pair: the first source becomes the high half."""
    out, kind = ins.opcode[-2], ins.opcode[-1]
    if kind != "f32" or len(ins.operands) != 3 or out not in ("f16x2", "bf16x2"):
        raise unsupported(ins)
    d, high, low = ins.operands
    half = out[:-2]

    def fn(high: Any, low: Any) -> Any:
        n = max(np.size(high), np.size(low))
        both = np.empty(2 * n, np.float32)
        both[0::2], both[1::2] = low, high
        if "ftz" in given:
            both = flush(both)
        result = _round_float(both, half, mode, "satfinite" in given)
        return _relu(result, half) if "relu" in given else result

    return ctx.elementwise(fn, d, out, (high, "f32"), (low, "f32"))


def to_float8(values: np.ndarray, name: str) -> np.ndarray:
    """Floats to float8 bits ("e4m3", "e5m2"), ties to even, saturating (satfinite); NaN to 0x7f."""
    values = np.asarray(values)
    limit = values.dtype.type(_FP8_MAX[name])
    bits = np.clip(values, -limit, limit).astype(_FP8[name]).view(np.uint8)
    return np.where(np.isnan(values), _FP8_NAN, bits)


def _float8(ins: Instruction, ctx: Context, given: set[str]) -> Run:
    """Pairs of float8 from float32 or float16 pairs, and back to float16 pairs."""
    out, kind = ins.opcode[-2], ins.opcode[-1]
    d, *sources = ins.operands
    if kind[:4] in _FP8:
        table = np.arange(256, dtype=np.uint8).view(_FP8[kind[:4]]).astype(np.float32)
        halves = f32_to_f16(table)

        def widen_pair(pair: Any) -> Any:
            octets = np.ascontiguousarray(np.atleast_1d(pair)).view(np.uint8)
            result = halves.take(octets)
            return _relu(result, "f16") if "relu" in given else result

        if out != "f16x2":
            raise unsupported(ins)
        return ctx.elementwise(widen_pair, d, "f16x2", (sources[0], "u16"))

    name = out[:4]

    def encode(both: np.ndarray) -> np.ndarray:
        if "relu" in given:
            both = np.where(both <= 0, both.dtype.type(0), both)
        return to_float8(both, name).view(np.uint16)

    if kind == "f32":

        def narrow_pair(high: Any, low: Any) -> Any:
            both = np.empty(2 * max(np.size(high), np.size(low)), np.float32)
            both[0::2], both[1::2] = low, high
            return encode(both)

        return ctx.elementwise(narrow_pair, d, "u16", (sources[0], "f32"), (sources[1], "f32"))
    if kind != "f16x2":
        raise unsupported(ins)
    return ctx.elementwise(lambda a: encode(f16_to_f32(a)), d, "u16", (sources[0], "f16x2"))


def _pack(ins: Instruction, ctx: Context) -> Run:
    """Saturate two integers and pack them, above the packed halfword or byte pair of a third."""
    _, _, sat, out, kind = ins.opcode[:5]
    if sat != "sat" or kind != "s32" or out[1:] not in ("16", "8"):
        raise unsupported(ins)
    d, a, b, *c = ins.operands
    clamp = _integer(out, True)
    bits = np.uint32(8 * SIZE[out])
    mask = np.uint32((1 << int(bits)) - 1)

    def fn(a: Any, b: Any, *c: Any) -> Any:
        high, low = (np.asarray(clamp(x)).astype(np.int64).astype(np.uint32) & mask for x in (a, b))
        pair = (high << bits) | low
        return pair | (c[0] << (bits + bits)) if c else pair

    sources = [(a, kind), (b, kind), *[(op, "u32") for op in c]]
    return ctx.elementwise(fn, d, "u32", *sources)
