"""One launch over the indices and the row pointers: checks, copies and the statistics of a matrix."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from rawops._runtime import arrays, dtypes
from rawops._runtime.kernel import KernelSpec
from rawops._sparse_memory import answers, kernel

# As in sparse_measure.cu
_THREADS, LENGTHS, _UNROLL = 256, 1024, 16
_BLOCKS_PER_SM = 3
_ROW_WORK = 8  # entries that a row costs as much as
_FIELDS, _RESULTS = 14, 21
LONGER = 32, 64, 128, 256, 512, LENGTHS - 2  # past which rows are counted
_INTEGERS = ("int32", "int64")

MEASURE = KernelSpec(
    source="sparse_measure.cu",
    entry="rawops::measure",
    template=("index", "pointer", "copy"),
    choices={"index": _INTEGERS, "pointer": _INTEGERS, "copy": _INTEGERS},
    smoke=(
        {"index": "int32", "pointer": "int32", "copy": "int32"},
        {"index": "int64", "pointer": "int64", "copy": "int64"},
    ),
)


class Measured(NamedTuple):
    """Counts of a matrix in compressed rows, as in sparse_measure.cu."""

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
    held: int
    unheld: int
    p95: int
    p99: int
    over_32: int
    over_64: int
    over_128: int
    over_256: int
    over_512: int

    @property
    def padding(self) -> float:
        """Entries of slices of 32 rows over those there are, of rows that the histogram holds, if any."""
        return self.padded / self.held if self.held else 1.0

    @property
    def longer(self) -> tuple[int, ...]:
        """How many rows are longer than each of LONGER."""
        return *self[-len(LONGER) + 1 :], self.unheld


def module_of(x):
    """Return NumPy for an array of the emulator, else CuPy."""
    return np if isinstance(x, np.ndarray) else arrays.cupy_or_raise("SparseMatrix")


def measure(device, indices, indptr, cols: int, index_copy: Any = None, pointer_copy: Any = None) -> Measured:
    """Measure contiguous int32 or int64 arrays with a row and an entry at least; it synchronises once.

    The copies, int32 and of any of the two types, are written on the way.
    """
    rows, nnz, pointer = indptr.size - 1, indices.size, device.pointer
    copied = indptr if pointer_copy is None else pointer_copy
    names = dtypes.name(indices.dtype), dtypes.name(indptr.dtype), dtypes.name(copied.dtype)
    measures = kernel(device, MEASURE, *names)
    most = _BLOCKS_PER_SM * device.sm_count
    row_blocks = min(-(-rows // _THREADS), max(most * _ROW_WORK * rows // (_ROW_WORK * rows + nnz), most // 8))
    index_blocks = min(-(-nnz // (_UNROLL * _THREADS)), most - row_blocks)
    listed = nnz // (LENGTHS - 1) + 1
    sources = pointer(indices), pointer(indptr), rows, nnz, cols, pointer(index_copy), pointer(pointer_copy)
    with answers(device) as answer:
        totals = answer.zeros(_FIELDS + LENGTHS + 1, listed)
        values = *sources, row_blocks, listed, totals, answer.address(_RESULTS)
        measures.launch((row_blocks + index_blocks, 1, 1), (_THREADS, 1, 1), values)
        return Measured._make(answer.wait(_RESULTS))
