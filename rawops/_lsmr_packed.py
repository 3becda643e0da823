"""A copy of a sparse matrix for the solver alone, whose products gather the vector from shared memory.

Rows are sorted by length, and b with them, so that 32 rows side by side are equally long. The columns (for A^H, the
rows) are cut into blocks whose part of the vector fits into shared memory: see lsmr_packed.cu for the layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rawops._lsmr_kernels import Pair, Vectors
from rawops._runtime.checks import fail
from rawops._runtime.kernel import KernelSpec

_THREADS = 1024
_MOST_ENTRIES = 1 << 16  # of the vector in a block: places are 16 bits
_KEPT_BYTES = 8 << 10  # of shared memory, for the kernel's own use
_FEWEST = 4  # entries of a row in a block, below which the layout does not pay
_RANGES = 3  # of rows, that share a block of the vector
_LONG = 16  # entries of a row in a block, above which more blocks cost little
_TYPES = {"V": ("float32", "float64"), "R": ("float32", "float64"), "kFused": (True, False)}

PACKED = KernelSpec(
    source="lsmr_packed.cu",
    entry="rawops::lsmr_packed",
    template=tuple(_TYPES),
    choices=_TYPES,
    smoke=[
        {"V": "float32", "R": "float32", "kFused": True},
        {"V": "float32", "R": "float32", "kFused": False},
        {"V": "float32", "R": "float64", "kFused": False},
        {"V": "float64", "R": "float64", "kFused": True},
    ],
)


@dataclass(frozen=True)
class _Slices:
    """One direction: data and indices by slice, where slices and blocks begin, and the row of each slot."""

    data: Any
    indices: Any
    starts: Any
    first_slices: Any
    rows: Any
    shape: tuple[int, int]
    blocks: int
    block_size: int


class PackedProduct:
    """Both products with a copy of a `SparseMatrix` with real values.

    Attributes
    ----------
    order : array (m,)
        The rows of A in the order in which u has them.
    """

    def __init__(self, function: str, product) -> None:
        self.shape, self.dtype, self.device = product.shape, product.dtype, product.device
        self.nbytes = 2 * product.matrix.nnz * (self.dtype.itemsize + 2)
        self._function, self._matrix = function, product.matrix
        self.column_squares = product.column_squares
        matrix, store = product.matrix, product.matrix._store
        rows, columns = (store.rows.get(way) for way in (matrix._transposed, not matrix._transposed))
        if rows is None or columns is None or self.dtype.name not in _TYPES["V"]:
            got = f"{self.dtype} in {'both formats' if rows is not None and columns is not None else 'one format'}"
            fail(ValueError, function, "pack", "be False but for float32 and float64 in both formats", got)
        xp = np if isinstance(rows.indptr, np.ndarray) else _cupy()
        lengths = xp.diff(rows.indptr)
        self.order = xp.argsort(-lengths.astype("int64"), kind="stable")
        place = xp.empty_like(self.order)
        place[self.order] = xp.arange(self.order.size)
        self._place, self._xp = place, xp
        self._formats, self._packed = {False: rows, True: columns}, {}

    def slices(self, transposed: bool, itemsize: int) -> _Slices:
        """Return one direction for vectors of this element size."""
        key = transposed, itemsize
        if key not in self._packed:
            rows, xp = self._formats[transposed], self._xp
            count = rows.shape[0]
            row = _row_of_entries(xp, rows)
            column = rows.indices
            if transposed:
                column = self._place[column]
            else:
                row = self._place[row]
            blocks, size = self._blocks(rows.shape[1], rows.nnz / max(count, 1), itemsize)
            if rows.nnz < _FEWEST * count * blocks:
                got = f"{rows.nnz / max(count * blocks, 1):.1f} in {'A^H' if transposed else 'A'}"
                fail(ValueError, self._function, "pack", f"be False below {_FEWEST} entries a row and block", got)
            self._packed[key] = _pack(xp, rows.data, row, column, (count, rows.shape[1]), blocks, size)
        return self._packed[key]

    def _blocks(self, length: int, entries: float, itemsize: int) -> tuple[int, int]:
        """Return how many blocks a vector comes in and their size, where a row has that many entries.

        Every range of rows loads its block anew: few ranges and many blocks, as long as rows stay long enough.
        """
        most = min(_MOST_ENTRIES, (self.device.max_shared_bytes - _KEPT_BYTES) // itemsize) // 4 * 4
        blocks, sms = max(1, ceil_div(length, most)), self.device.sm_count
        if blocks > 1:
            wanted = max(sms // _RANGES, 1)
            blocks = max(blocks, min(wanted, int(entries / _LONG)))
        return blocks, ceil_div(ceil_div(length, blocks), 4) * 4

    def bind(self, vectors: Vectors) -> BoundPacked:
        return BoundPacked(self, vectors)


class BoundPacked:
    """The products with their workspace."""

    is_captured = True

    def __init__(self, product: PackedProduct, vectors: Vectors) -> None:
        self.vectors, self.nbytes = vectors, product.nbytes
        device, real = vectors.device, vectors.dtype.name
        self._slices = {t: product.slices(t, vectors.dtype.itemsize) for t in (False, True)}
        self._fused = {t: s.blocks == 1 and not t for t, s in self._slices.items()}
        self._kernels = {
            t: PACKED.kernel(device, V=product.dtype.name, R=real, kFused=fused) for t, fused in self._fused.items()
        }
        self._ranges = {t: max(1, device.sm_count // s.blocks) for t, s in self._slices.items()}
        size = max(s.blocks * s.shape[0] for t, s in self._slices.items() if not self._fused[t])
        self._w = vectors.empty(size)

    def num_partials(self, transposed: bool) -> int:
        rows = self._slices[transposed].shape[0]
        return self._ranges[transposed] if self._fused[transposed] else self.vectors.blocks(rows)

    def apply(self, transposed: bool, x, y, scalars: Pair, partials) -> None:
        s, pointer, fused = self._slices[transposed], self.vectors.device.pointer, self._fused[transposed]
        values = (*map(pointer, (s.data, s.indices, s.starts, s.first_slices, s.rows, x)), x.shape[0], s.block_size)
        values += (pointer(y if fused else self._w), y.shape[0], pointer(scalars.alpha), pointer(scalars.beta))
        grid = (self._ranges[transposed], s.blocks, 1)
        shared_bytes = s.block_size * x.dtype.itemsize
        self._kernels[transposed].launch(grid, (_THREADS, 1, 1), (*values, pointer(partials)), shared_bytes)
        if not fused:
            self.vectors.combine(scalars, self._w, y, partials, s.blocks)


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def _row_of_entries(xp, rows):
    return xp.searchsorted(rows.indptr[1:].astype("int64"), xp.arange(rows.nnz), side="right")


def _pack(xp, data, row, column, shape: tuple[int, int], blocks: int, size: int) -> _Slices:
    """Lay entries out by block of columns, slice of 32 rows and place in the row."""
    count = shape[0]
    padded = ceil_div(count, 32) * 32  # slots of a block
    segment = column // size * count + row  # a row of a block
    lengths = xp.bincount(segment, minlength=blocks * count)
    block = xp.arange(blocks * count) // count
    order = xp.argsort(block * (int(lengths.max()) + 1 if lengths.size else 1) - lengths, kind="stable")
    rank = xp.arange(blocks * count)
    slot_of = xp.empty_like(order)
    slot_of[order] = rank // count * padded + rank % count
    slot_lengths = xp.zeros(blocks * padded, "int64")
    slot_lengths[slot_of] = lengths
    starts = xp.concatenate([xp.zeros(1, "int64"), xp.cumsum(slot_lengths.reshape(-1, 32).max(axis=1) * 32)])
    by_segment = xp.argsort(segment, kind="stable")
    begins = xp.cumsum(lengths) - lengths
    segment = segment[by_segment]
    slot = slot_of[segment]
    target = starts[slot // 32] + (xp.arange(segment.size) - begins[segment]) * 32 + slot % 32
    total = int(starts[-1])
    packed, indices = xp.zeros(total, data.dtype), xp.zeros(total, "uint16")
    packed[target], indices[target] = data[by_segment], (column % size)[by_segment].astype("uint16")
    rows = xp.full(blocks * padded, -1, "int32")
    rows[slot_of] = xp.arange(blocks * count) % count
    first_slices = xp.arange(blocks + 1, dtype="int32") * (padded // 32)
    return _Slices(packed, indices, starts, first_slices, rows, shape, blocks, size)


def _cupy():
    import cupy

    return cupy
