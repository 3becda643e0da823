"""IEEE arithmetic that NumPy lacks: fused multiply-add, directed rounding, canonical NaNs."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np

from .types import CANONICAL_NAN, f32_to_bf16

DIRECTED = ("rz", "rm", "rp")  # rounding modes other than to nearest

_F32_NAN = CANONICAL_NAN["f32"]
_F64_NAN = np.uint64(0xFFF8000000000000)
_F64_QUIET = np.uint64(0x0008000000000000)
_F16_TINY = np.finfo(np.float16).tiny
_SURPLUS = np.int64(35)  # shifts out of a float64 what fits a float32
_HALFWAY = -(1 << 63)
_EXPONENT = np.uint32(0x7F800000)
_SPLITTER = 134217729.0  # 2**27 + 1


def canonical_nans(values: np.ndarray) -> None:
    """Replace float32 NaNs by 0x7fffffff, which is what the hardware's arithmetic produces."""
    total = values.dot(values)  # NaN exactly if an element is: squares never cancel
    if total != total:
        values.view(np.uint32)[np.isnan(values)] = _F32_NAN


def propagate_nans(result: np.ndarray, *sources: Any) -> np.ndarray:
    """float64 NaNs as the hardware makes them: the last source that is one, made quiet, else 0xfff8000000000000."""
    total = result.dot(result)
    if total == total:
        return result
    bits = np.full(result.shape, _F64_NAN)
    for source in sources:
        source = np.asarray(source, np.float64)
        bits = np.where(np.isnan(source), source.view(np.uint64) | _F64_QUIET, bits)
    return np.where(np.isnan(result), bits.view(np.float64), result)


def flush(values: np.ndarray, kind: str = "f32") -> np.ndarray:
    """float32 with subnormals, of float16 if `kind` says so, replaced by zeros of their sign (.ftz)."""
    values = np.asarray(values, np.float32)
    if kind.startswith("f16"):
        return np.where(np.abs(values) < _F16_TINY, values * np.float32(0), values)
    bits = values.view(np.uint32)
    subnormal = (bits & _EXPONENT) == 0
    if not subnormal.any():
        return values
    return np.where(subnormal, bits & np.uint32(0x80000000), bits).view(np.float32)


def two_sum(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The float64 sum and its exact error."""
    total = a + b
    virtual = total - a
    return total, (a - (total - virtual)) + (b - virtual)


def two_product(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The float64 product and its exact error, short of overflow and underflow."""
    product = a * b
    big_a, big_b = _SPLITTER * a, _SPLITTER * b
    high_a, high_b = big_a - (big_a - a), big_b - (big_b - b)
    low_a, low_b = a - high_a, b - high_b
    return product, low_a * low_b - (((product - high_a * high_b) - low_a * high_b) - high_a * low_b)


def to_odd(total: np.ndarray, error: np.ndarray) -> np.ndarray:
    """Round ``total + error`` to odd in float64: rounding that again to a shorter format is then right."""
    even = (np.asarray(total).view(np.uint64) & np.uint64(1)) == 0
    adjust = even & (error != 0) & np.isfinite(total)
    return np.where(adjust, np.nextafter(total, np.copysign(np.inf, error)), total) if adjust.any() else total


def fma32(a: Any, b: Any, c: Any) -> np.ndarray:
    """a * b + c in float32 with one rounding, ties to even."""
    total = np.multiply(a, b, dtype=np.float64)  # exact
    total = np.add(total, c, out=total if total.shape else None)
    result = np.asarray(total).astype(np.float32)
    # Two roundings differ from one only where the first lands halfway between two float32: where the bits of
    # float64 that float32 lacks are a one and zeros. Below the normal range "halfway" is elsewhere, so look at
    # all of those.
    low = np.asarray(total).view(np.int64) << _SURPLUS
    if low.min() == _HALFWAY or not (result.view(np.uint32) & _EXPONENT).all():
        _undo_double_rounding(result, total, np.multiply(a, b, dtype=np.float64), c)
    return result


def _undo_double_rounding(result: np.ndarray, total: np.ndarray, product: np.ndarray, c: Any) -> None:
    """Where float64 `total` is a tie between float32 values, let the error it lost decide, in place."""
    gap = total - result
    if not np.any(gap):
        return
    _, error = two_sum(product, np.asarray(c, np.float64))
    neighbour = np.nextafter(result, np.copysign(np.float32(np.inf), gap.astype(np.float32)))
    wrong = (gap != 0) & (neighbour - total == gap) & (error != 0) & ((error > 0) == (gap > 0))
    np.copyto(result, neighbour, where=wrong)


def fma64(a: Any, b: Any, c: Any) -> np.ndarray:
    """a * b + c in float64 with one rounding (Boldo and Melquiond's use of rounding to odd)."""
    a, b, c = np.broadcast_arrays(*(np.asarray(x, np.float64) for x in (a, b, c)))
    high, low = two_product(a, b)
    small, small_error = two_sum(c, low)
    head, head_error = two_sum(high, small)
    result = head + to_odd(*two_sum(small_error, head_error))
    plain = a * b + c
    simple = ~np.isfinite(plain) | (a == 0) | (b == 0)
    result = np.where(simple, plain, result)
    safe = _moderate(a, 480) & _moderate(b, 480) & (_moderate(c, 960) | (c == 0))
    awkward = ~(safe | (simple & np.isfinite(a) & np.isfinite(b) & ~np.isinf(plain))) & np.isfinite(a + b + c)
    for i in np.flatnonzero(awkward):
        result.flat[i] = _exact_fma(float(a.flat[i]), float(b.flat[i]), float(c.flat[i]))
    return result


def _moderate(values: np.ndarray, exponent: int) -> np.ndarray:
    magnitude = np.abs(values)
    return (magnitude < 2.0**exponent) & (magnitude > 2.0**-exponent)


def _exact_fma(a: float, b: float, c: float) -> float:
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return a * b + c
    try:
        return float(exact)
    except OverflowError:
        return float("inf") if exact > 0 else float("-inf")


def directed(nearest: np.ndarray, residual: np.ndarray, mode: str) -> np.ndarray:
    """Turn a nearest result into one rounded by a `DIRECTED` mode.

    `residual` has the sign of the exact result minus `nearest`.
    """
    infinity = nearest.dtype.type(np.inf)
    if mode == "rm":
        return np.where(residual < 0, np.nextafter(nearest, -infinity), nearest)
    if mode == "rp":
        return np.where(residual > 0, np.nextafter(nearest, infinity), nearest)
    away = ((nearest > 0) & (residual < 0)) | ((nearest < 0) & (residual > 0))
    return np.where(away, np.nextafter(nearest, nearest.dtype.type(0)), nearest)


def directed_sum(total: np.ndarray, error: np.ndarray, mode: str, x: Any, y: Any) -> np.ndarray:
    """float32 of the exact ``total + error`` = x + y (float64 each) by a directed mode."""
    nearest = np.asarray(total).astype(np.float32)
    gap = total - nearest
    residual = np.where(gap != 0, gap, error)
    return zero_sign(directed(nearest, residual, mode), residual, x, y, mode)


def zero_sign(result: np.ndarray, residual: np.ndarray, x: Any, y: Any, mode: str) -> np.ndarray:
    """An exact sum x + y of 0 is -0 when rounding down, unless both are +0."""
    if mode != "rm":
        return result
    negative = (result == 0) & (residual == 0) & (np.signbit(x) | np.signbit(y))
    return np.where(negative, result.dtype.type(-0.0), result)


def exact_sign(a: Any, b: Any, c: Any, result: Any) -> np.ndarray:
    """The sign of a * b + c - result for float64, exactly; 0 where one of them is infinite or NaN."""
    values = [v.tolist() for v in np.broadcast_arrays(*(np.atleast_1d(v) for v in (a, b, c, result)))]
    signs = np.zeros(len(values[0]))
    for i, (x, y, z, r) in enumerate(zip(*values, strict=True)):
        if math.isfinite(x) and math.isfinite(y) and math.isfinite(z) and not math.isnan(r):
            if math.isinf(r):
                signs[i] = -1 if r > 0 else 1
            else:
                rest = Fraction(x) * Fraction(y) + Fraction(z) - Fraction(r)
                signs[i] = (rest > 0) - (rest < 0)
    return signs


def odd_f32(values: np.ndarray) -> np.ndarray:
    """float64 to float32 rounded to odd."""
    result = values.astype(np.float32)
    inexact = (result != values) & np.isfinite(values)
    if not inexact.any():
        return result
    down = np.where(np.abs(result) > np.abs(values), np.nextafter(result, np.float32(0)), result)
    return np.where(inexact, (down.view(np.uint32) | np.uint32(1)).view(np.float32), result)


def f64_to_bf16(values: np.ndarray) -> np.ndarray:
    """float64 to bfloat16 bits with one rounding."""
    return f32_to_bf16(odd_f32(np.asarray(values)))
