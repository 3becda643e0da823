"""One launch over the indices and the row pointers: checks, copies and the statistics of a matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rawops._runtime import arrays, dtypes
from rawops._runtime.kernel import KernelSpec

# As in sparse_measure.cu
_THREADS, LENGTHS, _UNROLL = 256, 1024, 8
_BLOCKS_PER_SM = 8
_FIELDS = (
    *("outside", "jumps", "falls", "row_falls", "drops", "first", "last"),
    *("squares", "longest", "empty", "padded", "bandwidth", "listed"),
)
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


@dataclass(frozen=True)
class Measured:
    """Counts of a matrix in compressed rows, as in sparse_measure.cu.

    `lengths[i]` rows have i entries; those of LENGTHS - 1 and more are listed in `long`, on the device.
    """

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
    listed: int
    lengths: np.ndarray
    long: Any

    def quantiles(self, places: tuple) -> list[int]:
        """Return the lengths of rows by their places among the sorted; it synchronises where those are long."""
        ends = np.cumsum(self.lengths)
        short = int(ends[-1])
        if max(places) < short:
            return np.searchsorted(ends, places, side="right").tolist()
        rest = np.sort(_on_host(self.long[: self.listed]))
        return [int(rest[p - short] if p >= short else np.searchsorted(ends, p, side="right")) for p in places]

    @property
    def padding(self) -> float:
        """Entries of slices of 32 rows over those there are, of rows that the histogram holds, if any."""
        entries = int(self.lengths @ np.arange(LENGTHS))
        return self.padded / entries if entries else 1.0


def module_of(x):
    """Return NumPy for an array of the emulator, else CuPy."""
    return np if isinstance(x, np.ndarray) else arrays.cupy_or_raise("SparseMatrix")


def _on_host(x) -> np.ndarray:
    return x if isinstance(x, np.ndarray) else x.get()


def measure(device, indices, indptr, cols: int, index_copy: Any = None, pointer_copy: Any = None) -> Measured:
    """Measure contiguous int32 or int64 arrays with a row and an entry at least; it synchronises once.

    The copies, int32 and of any of the two types, are written on the way.
    """
    rows = indptr.size - 1
    listed = indices.size // (LENGTHS - 1) + 1
    found = module_of(indices).zeros(len(_FIELDS) + LENGTHS + listed, np.int64)
    copied = indptr if pointer_copy is None else pointer_copy
    types = {"index": dtypes.name(indices.dtype), "pointer": dtypes.name(indptr.dtype)}
    most = _BLOCKS_PER_SM * device.sm_count
    index_blocks = min(-(-indices.size // (_UNROLL * _THREADS)), most)
    row_blocks = min(-(-rows // _THREADS), most)
    sources = device.pointer(indices), device.pointer(indptr), rows, indices.size, cols
    values = *sources, *map(device.pointer, (index_copy, pointer_copy)), index_blocks, listed, device.pointer(found)
    kernel = MEASURE.kernel(device, **types, copy=dtypes.name(copied.dtype))
    kernel.launch((index_blocks + row_blocks, 1, 1), (_THREADS, 1, 1), values)
    counts, long = found[: len(_FIELDS) + LENGTHS], found[len(_FIELDS) + LENGTHS :]
    host = _on_host(counts)
    return Measured(*host[: len(_FIELDS)].tolist(), host[len(_FIELDS) :], long)
