"""How close the emulator has to come: rules that take the GPU's bits and the emulator's and say which entries agree."""

from collections.abc import Callable
from functools import partial

import numpy as np

Rule = Callable[[np.ndarray, np.ndarray], np.ndarray]

_UINT = {2: np.uint16, 4: np.uint32, 8: np.uint64}


def exact(want: np.ndarray, got: np.ndarray) -> np.ndarray:
    """The same bits, those of NaN included."""
    return want == got


def ulps(dtype, near_zero: float = 0.0) -> Rule:
    """At most 2 units in the last place of `dtype`, or an absolute error of at most `near_zero`."""
    return partial(_compare, dtype=np.dtype(dtype), distance=2, absolute=near_zero)


def bfloat16_ulps(want: np.ndarray, got: np.ndarray) -> np.ndarray:
    """At most 2 units in the last place of bfloat16."""
    return _distance(want.view(np.uint16), got.view(np.uint16)) <= 2


def close(dtype, absolute: float = 0.0, relative: float = 0.0) -> Rule:
    """An error of at most ``absolute + relative * |value|``; infinities and NaN to the bit."""
    return partial(_compare, dtype=np.dtype(dtype), absolute=absolute, relative=relative)


def _compare(want, got, dtype, distance: int = 0, absolute: float = 0.0, relative: float = 0.0) -> np.ndarray:
    bits = _UINT[dtype.itemsize]
    agree = _distance(want.view(bits), got.view(bits)) <= distance
    x, y = want.view(dtype).astype(np.float64), got.view(dtype).astype(np.float64)
    with np.errstate(invalid="ignore"):
        return agree | (np.abs(x - y) <= absolute + relative * np.abs(x))


def _distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """How many representable numbers lie between two bit patterns (16 or 32 bits) or whether they differ (64)."""
    if a.itemsize == 8:
        return a != b
    sign = 1 << (8 * a.itemsize - 1)
    steps = []
    for bits in (a, b):
        wide = bits.astype(np.int64)
        steps.append(np.where(wide & sign, -(wide - sign), wide))
    return np.abs(steps[0] - steps[1])
