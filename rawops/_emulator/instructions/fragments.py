"""Element formats and register fragments of the matrix instructions (mma, wgmma).

Every fragment follows one rule. A 32-bit register holds ``e`` elements side by side (one for tf32; a 64-bit
register holds one f64), and lane ``l`` of a warp stands at ``g = l // 4``, ``t = l % 4``:

* A: register ``r``, element ``i`` is row ``g + 8 * (r % 2)``, column ``t * e + i + 4 * e * (r // 2)``;
* B: register ``r``, element ``i`` is row ``t * e + i + 4 * e * r``, column ``g``;
* C and D: the element ``4 * j + 2 * h + c`` is row ``g + 8 * h``, column ``8 * j + 2 * t + c``.

So a fragment becomes a matrix by a reshape and a transpose, for all warps at once. Values are float64, in
which the product of two elements of any format below is exact.
"""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np

from ..types import CANONICAL_NAN, DTYPE, bf16_to_f32, f16_to_f32

# As what a reader takes the accumulators: pairs of float16 come as one 32-bit register.
AS_READ = {"f16": "b32"}


def _float8(dtype) -> Callable[[np.ndarray], np.ndarray]:
    table = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float64)
    return lambda raw: table[raw]


def _nibbles(signed: bool) -> Callable[[np.ndarray], np.ndarray]:
    def decode(raw: np.ndarray) -> np.ndarray:
        pairs = np.stack([raw & 15, raw >> 4], axis=-1).reshape(*raw.shape[:-1], -1).astype(np.float64)
        return pairs - 16.0 * (pairs >= 8) if signed else pairs

    return decode


def _tf32(raw: np.ndarray) -> np.ndarray:
    """Read float32 bits as the tensor core does: the 13 low bits of the mantissa do not take part."""
    return (raw.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)


BITS = {"f64": 64, "tf32": 32, "f16": 16, "bf16": 16, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8,
        "s4": 4, "u4": 4, "b1": 1}  # fmt: skip

_DECODE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "f64": lambda raw: raw.view(np.float64),
    "tf32": _tf32,
    "f16": lambda raw: f16_to_f32(raw.view(np.uint16)).astype(np.float64),
    "bf16": lambda raw: bf16_to_f32(raw.view(np.uint16)).astype(np.float64),
    "e4m3": _float8(ml_dtypes.float8_e4m3fn),
    "e5m2": _float8(ml_dtypes.float8_e5m2),
    "s8": lambda raw: raw.view(np.int8).astype(np.float64),
    "u8": lambda raw: raw.astype(np.float64),
    "s4": _nibbles(signed=True),
    "u4": _nibbles(signed=False),
    "b1": lambda raw: np.unpackbits(raw, axis=-1, bitorder="little").astype(np.float64),
}


def decode(raw: np.ndarray, fmt: str) -> np.ndarray:
    """Turn the bytes of the last axis (C-contiguous uint8) into the float64 values they stand for."""
    return _DECODE[fmt](raw)


def _elements(registers: np.ndarray, fmt: str) -> np.ndarray:
    """Return the elements of registers (count, warps, 32) as (count, warps, 8, 4, elements a register)."""
    count, warps = registers.shape[:2]
    raw = np.ascontiguousarray(registers).view(np.uint8)
    return decode(raw, fmt).reshape(count, warps, 8, 4, -1)


def a_matrix(registers: np.ndarray, fmt: str, rows: int) -> np.ndarray:
    """Return the A operands (warps, rows, K) of fragment registers (count, warps, 32)."""
    elements = _elements(registers, fmt)
    halves = elements.reshape(-1, rows // 8, *elements.shape[1:])
    return halves.transpose(2, 1, 3, 0, 4, 5).reshape(registers.shape[1], rows, -1)


def b_matrix(registers: np.ndarray, fmt: str) -> np.ndarray:
    """Return the B operands (warps, K, 8) of fragment registers (count, warps, 32)."""
    return _elements(registers, fmt).transpose(1, 0, 3, 4, 2).reshape(registers.shape[1], -1, 8)


def accumulators(registers: np.ndarray, rows: int) -> np.ndarray:
    """Return the accumulators (warps, rows, N) of registers (count, warps, 32), in their own dtype.

    The registers come as float32, int32 or float64, or as uint32 for packed pairs of float16.
    """
    count, warps = registers.shape[:2]
    halves = rows // 8
    if registers.dtype == np.uint32:
        pairs = np.ascontiguousarray(registers).view(np.float16)
        tiles = pairs.reshape(count // halves, halves, warps, 8, 4, 2).transpose(2, 1, 3, 0, 4, 5)
    else:
        tiles = registers.reshape(count // (2 * halves), halves, 2, warps, 8, 4).transpose(3, 1, 4, 0, 5, 2)
    return tiles.reshape(warps, rows, -1)


def accumulator_registers(matrices: np.ndarray) -> np.ndarray:
    """Return the registers (count, warps, 32) of accumulators (warps, rows, N): `accumulators` undone."""
    warps, rows, columns = matrices.shape
    tiles = matrices.reshape(warps, rows // 8, 8, columns // 8, 4, 2)
    if matrices.dtype == np.float16:
        return np.ascontiguousarray(tiles.transpose(3, 1, 0, 2, 4, 5)).view(np.uint32).reshape(-1, warps, 32)
    return tiles.transpose(3, 1, 5, 0, 2, 4).reshape(-1, warps, 32)


def accumulate(a: np.ndarray, b: np.ndarray, c: np.ndarray, d_type: str, saturate: bool = False) -> np.ndarray:
    """Return ``a @ b + c`` as `d_type`: exact products, one rounding of the float64 sum.

    Hardware aligns the products of a k step and truncates, so its last bit may differ; sums that fit the
    accumulator exactly do not. Integers wrap, or saturate on request; NaN comes out canonical.
    """
    exact = a @ b
    exact += c
    if d_type == "s32":
        if saturate:
            return np.clip(exact, -(2.0**31), 2.0**31 - 1).astype(np.int32)
        return exact.astype(np.int64).astype(np.int32)
    result = exact.astype(DTYPE[d_type], copy=False)
    if d_type in CANONICAL_NAN:
        nan = CANONICAL_NAN[d_type]
        result.view(nan.dtype)[np.isnan(result)] = nan
    return result
