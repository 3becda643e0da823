"""A LoRA adapter added to its weight, and what rounding the sum costs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rawops._gemm_call import ONE, Product
from rawops._gemm_operands import Options
from rawops._runtime import arrays, checks

_BLOCK_ENTRIES = 1 << 24  # of the weight at a time: what the wider copies take


@dataclass(frozen=True)
class MergeError:
    """How far a weight is from the sum that it was rounded from, as float32 has it (float64 for float64).

    Attributes
    ----------
    largest : float
        The largest distance of an entry.
    relative : float
        The distance of all entries over the size of what was added, both in the Frobenius norm: 0.01 says that one per
        cent of the adapter is lost. 0 where nothing was added.
    """

    largest: float
    relative: float


def merge_into(
    function: str, c, pairs: list, slices: tuple, scaling: float, begin_writing: Callable[[], None]
) -> MergeError:
    """Add ``scaling * a @ b`` to the columns of c that belong to each slice; pairs are (a, b) or None.

    `begin_writing` is called before c changes: what fails after that, or is interrupted, leaves it half way.
    """
    (c,), _ = arrays.take(function, c=c)  # it may be NumPy's, of an emulator that is left
    checks.output(function, "c", c)
    with arrays.device_of(function, c=c).current():
        return _merge(function, c, pairs, slices, scaling, begin_writing)


def _merge(function: str, c, pairs: list, slices: tuple, scaling: float, begin_writing) -> MergeError:
    wide = "float32" if c.dtype.itemsize == 2 else c.dtype.name
    product = Product(function, Options(out_dtype=wide))
    largest, lost, added = 0.0, 0.0, 0.0
    step = max(_BLOCK_ENTRIES // max(c.shape[0], 1), 1)
    for pair, (start, stop) in zip(pairs, slices, strict=True):
        if pair is None or 0 in pair[0].shape:
            continue
        a, b = pair
        for begin in range(start, stop, step):
            end = min(begin + step, stop)
            columns = c[:, begin:end]
            before = columns.astype(wide)
            exact = product((a, b[:, begin - start : end - start], None, columns, None, None), (0, scaling, 0), ONE)
            rounded = exact.astype(c.dtype)
            begin_writing()
            columns[...] = rounded
            error = columns.astype(wide) - exact
            largest = float(np.maximum(largest, float(abs(error).max())))  # NaN stays NaN
            lost += float((error.astype("float64") ** 2).sum())
            added += float(((exact - before).astype("float64") ** 2).sum())
    return MergeError(largest, math.sqrt(lost / added) if added else 0.0)
