"""Floating-point arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..rounding import (
    DIRECTED,
    canonical_nans,
    directed,
    directed_sum,
    exact_sign,
    f64_to_bf16,
    flush,
    fma32,
    fma64,
    propagate_nans,
    to_odd,
    two_sum,
    zero_sign,
)
from ..types import DTYPE, f32_to_f16, is_float, narrow, widen
from . import Run, instruction, options, unsupported

if TYPE_CHECKING:
    from ..context import Context
    from ..operands import Operand
    from ..program import Instruction

Fn = Callable[..., Any]


def _lanewise(ins: Instruction, ctx: Context, kind: str, fn: Fn, sources: tuple[Operand, ...] | None = None) -> Run:
    """The closure for a function on float32, float64 or, for 16-bit types, on their float32 values.

    Adds what the modifiers ask for: .ftz, .sat, .relu; and the hardware's NaN.
    """
    modifiers = ins.opcode
    half = kind not in ("f32", "f64")
    ftz, sat, relu = "ftz" in modifiers, "sat" in modifiers, "relu" in modifiers
    operands = [(op, kind) for op in (sources or ins.operands[1:])]
    if kind == "f64":
        return ctx.elementwise(_keeping_nans(fn, ins.opcode[0]), ins.operands[0], kind, *operands)
    if not (half or ftz or sat or relu):
        return ctx.elementwise(fn, ins.operands[0], kind, *operands, finish=canonical_nans)

    def wrapped(*values: Any) -> Any:
        if half:
            values = tuple(widen(v, kind) for v in values)
        if ftz:
            values = tuple(flush(v, kind) for v in values)
        result = np.atleast_1d(fn(*values))
        if ftz and not half:
            result = flush(result)
        if sat or relu:
            low = np.fmax(result, 0) + 0  # a NaN becomes 0 with .sat, but stays one with .relu
            result = np.minimum(low, 1) if sat else np.where(np.isnan(result), result, low)
        if half:
            result = result if result.dtype == DTYPE[kind] else narrow(result.astype(np.float32), kind)
            return narrow(flush(widen(result, kind), kind), kind) if ftz else result
        result = result.astype(np.float32)
        canonical_nans(result)
        return result

    return ctx.elementwise(wrapped, ins.operands[0], kind, *operands)


def _keeping_nans(fn: Fn, name: str) -> Fn:
    """A float64 function with NaNs that come from its operands: division prefers the first, the others the last."""

    def wrapped(*values: Any) -> Any:
        order = values[::-1] if name == "div" else values
        return propagate_nans(np.atleast_1d(fn(*values)), *order)

    return wrapped


def _mode(ins: Instruction) -> str:
    return next((m for m in ins.opcode if m in DIRECTED), "rn")


def _add_sub(ins: Instruction, ctx: Context, kind: str) -> Run:
    options(ins, "rn rz rm rp ftz sat", DTYPE)
    mode = _mode(ins)
    ufunc = np.add if ins.opcode[0] == "add" else np.subtract
    if mode == "rn":
        return _lanewise(ins, ctx, kind, ufunc)
    sign = 1 if ins.opcode[0] == "add" else -1

    def fn(a: Any, b: Any) -> Any:
        x, y = np.asarray(a, np.float64), np.asarray(b * sign, np.float64)
        total, error = two_sum(x, y)
        if kind == "f32":
            return directed_sum(total, error, mode, x, y)
        return zero_sign(directed(total, error, mode), error, x, y, mode)

    return _lanewise(ins, ctx, kind, fn)


def _mul(ins: Instruction, ctx: Context, kind: str) -> Run:
    options(ins, "rn rz rm rp ftz sat", DTYPE)
    mode = _mode(ins)
    if mode == "rn":
        return _lanewise(ins, ctx, kind, np.multiply)

    def fn(a: Any, b: Any) -> Any:
        nearest = np.multiply(a, b)
        if kind == "f32":
            return directed(nearest, np.multiply(a, b, dtype=np.float64) - nearest, mode)
        return directed(nearest, exact_sign(a, b, 0.0, nearest), mode)

    return _lanewise(ins, ctx, kind, fn)


def _fma(ins: Instruction, ctx: Context, kind: str) -> Run:
    options(ins, "rn rz rm rp ftz sat relu", DTYPE)
    mode = _mode(ins)
    if kind == "f32":
        fn = fma32 if mode == "rn" else _directed_fma32(mode)
    elif kind == "f64":
        fn = fma64 if mode == "rn" else _directed_fma64(mode)
    else:
        fn = _fma_f16 if kind.startswith("f16") else _fma_bf16
        if "sat" in ins.opcode or "relu" in ins.opcode:
            rounded = fn

            def fn(a: Any, b: Any, c: Any) -> Any:
                return widen(rounded(a, b, c), kind)

    return _lanewise(ins, ctx, kind, fn)


def _fma_f16(a: Any, b: Any, c: Any) -> Any:
    # The float64 sum of a 22-bit product and an 11-bit term is exact wherever a float16 tie is near.
    return f32_to_f16(np.multiply(a, b, dtype=np.float64) + c)


def _fma_bf16(a: Any, b: Any, c: Any) -> Any:
    return f64_to_bf16(to_odd(*two_sum(np.multiply(a, b, dtype=np.float64), np.asarray(c, np.float64))))


def _directed_fma32(mode: str) -> Fn:
    def fn(a: Any, b: Any, c: Any) -> Any:
        product, addend = np.multiply(a, b, dtype=np.float64), np.asarray(c, np.float64)
        return directed_sum(*two_sum(product, addend), mode, product, addend)

    return fn


def _directed_fma64(mode: str) -> Fn:
    def fn(a: Any, b: Any, c: Any) -> Any:
        nearest = fma64(a, b, c)
        residual = exact_sign(a, b, c, nearest)
        return zero_sign(directed(nearest, residual, mode), residual, a * b, c, mode)

    return fn


def _div(ins: Instruction, ctx: Context, kind: str) -> Run:
    given = options(ins, "rn rz rm rp ftz approx full", DTYPE)
    if "approx" in given:
        return _lanewise(ins, ctx, kind, _approximate_quotient)
    return _lanewise(ins, ctx, kind, _quotient(kind, _mode(ins)))


def _approximate_quotient(a: Any, b: Any) -> Any:
    """a * (1 / b), where a reciprocal too small for a normal number counts as zero."""
    return np.where(np.abs(b) > np.float32(2.0**126), a * np.copysign(np.float32(0), b), np.divide(a, b))


def _quotient(kind: str, mode: str) -> Fn:
    if mode == "rn":
        return np.divide

    def fn(a: Any, b: Any) -> Any:
        nearest = np.divide(a, b)
        if kind == "f32":  # products of float32 are exact in float64
            residual = np.asarray(a, np.float64) - np.multiply(nearest, b, dtype=np.float64)
        else:
            residual = exact_sign(-nearest, b, a, 0.0)
        residual = np.where(np.isfinite(residual), residual * np.sign(b), 0)
        overflow = np.isinf(nearest) & np.isfinite(a) & (b != 0)
        return directed(nearest, np.where(overflow, -nearest, residual), mode)

    return fn


def _min_max(ins: Instruction, ctx: Context, kind: str) -> Run:
    given = options(ins, "ftz NaN xorsign abs", DTYPE)
    low = ins.opcode[0] == "min"
    ufunc = {(True, False): np.fmin, (False, False): np.fmax, (True, True): np.minimum}.get(
        (low, "NaN" in given), np.maximum
    )

    def fn(*values: Any) -> Any:
        if "abs" in given:
            result = ufunc(*(np.abs(v) for v in values))
            signs = np.signbit(values[0])
            for value in values[1:]:
                signs = signs ^ np.signbit(value)
            return np.where(signs, -result, result)
        result = np.atleast_1d(ufunc(values[0], values[1]))
        zero = (values[0] == 0) & (values[1] == 0)
        if zero.any():  # -0 counts as less than +0, which NumPy does not heed
            negative = [np.signbit(v) for v in values]
            sign = (negative[0] | negative[1]) if low else (negative[0] & negative[1])
            result = np.where(zero, np.where(sign, result.dtype.type(-0.0), result.dtype.type(0)), result)
        return result

    if len(ins.operands) != 3:
        raise unsupported(ins, "three sources")
    return _lanewise(ins, ctx, kind, fn)


def _sign(ins: Instruction, ctx: Context, kind: str) -> Run:
    """neg and abs are arithmetic: they make NaNs canonical too."""
    options(ins, "ftz", DTYPE)
    return _lanewise(ins, ctx, kind, np.negative if ins.opcode[0] == "neg" else np.abs)


FLOATING: dict[str, Callable[[Any, Any, str], Run]] = {
    "add": _add_sub,
    "sub": _add_sub,
    "mul": _mul,
    "mad": _fma,
    "fma": _fma,
    "div": _div,
    "abs": _sign,
    "neg": _sign,
    "min": _min_max,
    "max": _min_max,
}


def _in_double(fn: Fn) -> Fn:
    """An approximate function: float64 inside, so it is at least as good as the hardware's."""

    def wrapped(a: Any) -> Any:
        return np.asarray(fn(np.asarray(a, np.float64))).astype(np.float32)

    return wrapped


_APPROXIMATE: dict[str, Fn] = {
    "ex2": _in_double(np.exp2),
    "lg2": _in_double(np.log2),
    "sin": _in_double(np.sin),
    "cos": _in_double(np.cos),
    "tanh": _in_double(np.tanh),
    "rsqrt": _in_double(lambda a: 1 / np.sqrt(a)),
}


@instruction("ex2", "lg2", "sin", "cos", "tanh", "rsqrt", "rcp", "sqrt", kind="float", fuses=True)
def functions(ins: Instruction, ctx: Context) -> Run:
    """Functions of one float."""
    options(ins, "approx ftz rn rz rm rp", DTYPE)
    name, kind = ins.opcode[0], ins.opcode[-1]
    if kind == "f64":
        return _lanewise(ins, ctx, kind, _function64(ins, name))
    if name == "rcp":
        quotient = _quotient(kind, _mode(ins))
        return _lanewise(ins, ctx, kind, lambda a: quotient(np.float32(1), a))
    if name == "sqrt":
        return _lanewise(ins, ctx, kind, _root(kind, _mode(ins)))
    return _lanewise(ins, ctx, kind, _APPROXIMATE[name])


def _function64(ins: Instruction, name: str) -> Fn:
    if "approx" in ins.opcode and "ftz" not in ins.opcode:  # rsqrt alone has it, as a subroutine
        return lambda a: 1 / np.sqrt(a)
    if "approx" in ins.opcode:  # rcp and rsqrt give the high word, the low one is zero
        base: Fn = (lambda a: 1 / a) if name == "rcp" else (lambda a: 1 / np.sqrt(a))
        high = np.uint64(0xFFFFFFFF00000000)
        return lambda a: (np.asarray(base(a)).view(np.uint64) & high).view(np.float64)
    if name == "rcp":
        quotient = _quotient("f64", _mode(ins))
        return lambda a: quotient(np.float64(1), a)
    if name == "sqrt":
        return _root("f64", _mode(ins))
    raise unsupported(ins)


def _root(kind: str, mode: str) -> Fn:
    if mode == "rn":
        return np.sqrt

    def fn(a: Any) -> Any:
        nearest = np.sqrt(a)
        if kind == "f32":
            residual = np.asarray(a, np.float64) - np.multiply(nearest, nearest, dtype=np.float64)
        else:
            residual = exact_sign(-nearest, nearest, a, 0.0)
        return directed(nearest, np.where(np.isfinite(residual), residual, 0), mode)

    return fn


@instruction("copysign", kind="float")
def copysign(ins: Instruction, ctx: Context) -> Run:
    """The sign of the first source on the magnitude of the second."""
    kind = ins.opcode[-1]
    d, a, b = ins.operands
    return ctx.elementwise(lambda a, b: np.copysign(b, a), d, kind, (a, kind), (b, kind))


@instruction("testp", kind="float")
def testp(ins: Instruction, ctx: Context) -> Run:
    """Test what sort of number a float is."""
    kind = ins.opcode[-1]
    tiny = np.finfo(DTYPE[kind]).tiny
    tests: dict[str, Fn] = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda a: ~np.isnan(a),
        "notanumber": np.isnan,
        "normal": lambda a: np.isfinite(a) & (np.abs(a) >= tiny),
        "subnormal": lambda a: (np.abs(a) < tiny) & (a != 0),
    }
    if ins.opcode[1] not in tests or not is_float(kind):
        raise unsupported(ins)
    return ctx.elementwise(tests[ins.opcode[1]], ins.operands[0], "pred", (ins.operands[1], kind))
