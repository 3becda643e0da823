"""The element-wise reductions of bulk copies and red.async."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..types import DTYPE, SIZE, UINT, is_float, narrow, widen
from . import unsupported

_BITWISE = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
_ARITHMETIC = {
    "add": np.add,
    "min": np.fmin,
    "max": np.fmax,
    "inc": lambda old, limit: np.where(old >= limit, 0, old + 1),
    "dec": lambda old, limit: np.where((old == 0) | (old > limit), limit, old - 1),
}


def reduction(ins, ptx_type: str) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """``update(old, values) -> new`` on bits (``UINT[size]``), for the operation that the opcode names."""
    name = next((token for token in ins.opcode if token in _BITWISE or token in _ARITHMETIC), None)
    if name in _BITWISE:
        return _BITWISE[name]
    if name is None or (is_float(ptx_type) and name in ("inc", "dec")):
        raise unsupported(ins)
    function, dtype, bits = _ARITHMETIC[name], DTYPE[ptx_type], UINT[SIZE[ptx_type]]

    def update(old: np.ndarray, values: np.ndarray) -> np.ndarray:
        result = function(widen(old.view(dtype), ptx_type), widen(values.view(dtype), ptx_type))
        return narrow(result, ptx_type).astype(dtype, copy=False).view(bits)

    return update
