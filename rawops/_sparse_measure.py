"""One pass over the indices and one over the row pointers: checks, copies and the statistics of a matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rawops._runtime import arrays, dtypes
from rawops._runtime.kernel import KernelSpec

# As in sparse_measure.cu
_THREADS, _LENGTHS, _UNROLL = 256, 1024, 4
_BLOCKS_PER_SM = 8
_FIELDS = (
    *("outside", "jumps", "falls", "row_falls", "drops", "first", "last"),
    *("squares", "longest", "empty", "padded", "bandwidth"),
)
_INTEGERS = ("int32", "int64")

INDICES = KernelSpec(
    source="sparse_measure.cu",
    entry="rawops::measure_indices",
    template=("index", "pointer"),
    choices={"index": _INTEGERS, "pointer": _INTEGERS},
    smoke=({"index": "int32", "pointer": "int32"}, {"index": "int64", "pointer": "int64"}),
)
POINTERS = KernelSpec(
    source="sparse_measure.cu",
    entry="rawops::measure_rows",
    template=("index", "pointer", "copy"),
    choices={"index": _INTEGERS, "pointer": _INTEGERS, "copy": _INTEGERS},
    smoke=(
        {"index": "int32", "pointer": "int32", "copy": "int32"},
        {"index": "int64", "pointer": "int64", "copy": "int64"},
    ),
)


@dataclass(frozen=True)
class Measured:
    """Counts of a matrix in compressed rows, as in sparse_measure.cu; `lengths[i]` rows have i entries."""

    outside: int
    jumps: int
    falls: int
    row_falls: int
    drops: int
    first: int
    last: int
    squares: int
    longest: int
    empty: int
    padded: int
    bandwidth: int
    lengths: np.ndarray

    def quantile(self, place: int) -> int | None:
        """Return the length of a row by its place among the sorted, None where the histogram ends before."""
        found = int(np.searchsorted(np.cumsum(self.lengths), place, side="right"))
        return found if found < _LENGTHS - 1 else None


def module_of(x):
    """Return NumPy for an array of the emulator, else CuPy."""
    return np if isinstance(x, np.ndarray) else arrays.cupy_or_raise("SparseMatrix")


def measure(device, indices, indptr, cols: int, index_copy: Any = None, pointer_copy: Any = None) -> Measured:
    """Measure contiguous int32 or int64 arrays with a row and an entry at least; it synchronises once.

    The copies, int32 and of any of the two types, are written on the way.
    """
    rows = indptr.size - 1
    found = module_of(indices).zeros(len(_FIELDS) + _LENGTHS, np.int64)
    types = {"index": dtypes.name(indices.dtype), "pointer": dtypes.name(indptr.dtype)}
    most = _BLOCKS_PER_SM * device.sm_count
    sources = device.pointer(indices), device.pointer(indptr), rows, indices.size
    kernel = INDICES.kernel(device, **types)
    blocks = min(-(-indices.size // (_UNROLL * _THREADS)), most)
    values = (*sources, cols, device.pointer(index_copy), device.pointer(found))
    kernel.launch((blocks, 1, 1), (_THREADS, 1, 1), values)
    copied = indptr if pointer_copy is None else pointer_copy
    kernel = POINTERS.kernel(device, **types, copy=dtypes.name(copied.dtype))
    values = (*sources, device.pointer(pointer_copy), device.pointer(found))
    kernel.launch((min(-(-rows // _THREADS), most), 1, 1), (_THREADS, 1, 1), values)
    host = found if device.is_emulated else found.get()
    return Measured(*host[: len(_FIELDS)].tolist(), host[len(_FIELDS) :])
