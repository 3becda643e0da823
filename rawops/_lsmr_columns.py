"""A `SparseMatrix` times several vectors, each with its own scalars."""

from __future__ import annotations

import numpy as np

from rawops._lsmr_kernels import THREADS, Pair, Vectors
from rawops._runtime.kernel import KernelSpec

_TYPES = {"V": ("float32", "float64"), "R": ("float32", "float64"), "VEC": (1, 2, 4)}
_TYPES |= {"LANES": (2, 8, 16, 32), "kShares": (True, False)}
SPMM = KernelSpec(
    source="lsmr_spmm.cu",
    entry="rawops::lsmr_spmm",
    template=tuple(_TYPES),
    choices=_TYPES,
    smoke=[
        dict(zip(_TYPES, values, strict=True))
        for values in (
            ("float32", "float32", 4, 8, False),
            ("float32", "float32", 4, 8, True),
            ("float32", "float64", 2, 16, True),
            ("float64", "float64", 1, 32, False),
        )
    ],
)
_SHORT = 8  # entries in a row, a group of threads, at which sharing the row does not pay
_LONGEST = 1 << 15  # entries in a row: one warp would keep all others waiting


class SparseColumns:
    """Both products by one kernel of ours, or where it does not take a matrix by its own and a pass over the result."""

    is_captured = True

    def __init__(self, product, vectors: Vectors) -> None:
        self.vectors, self.nbytes = vectors, product.nbytes
        ops = {False: product.matrix, True: product.matrix.H}
        self._products = {way: _fused(op, vectors) or _InTwoSteps(op, vectors) for way, op in ops.items()}

    def num_partials(self, transposed: bool) -> int:
        return self._products[transposed].blocks

    def apply(self, transposed: bool, x, y, scalars: Pair, partials) -> None:
        self._products[transposed].apply(x, y, scalars, partials)


def _fused(op, vectors: Vectors):
    """Return the product by `SPMM`, None where it does not take the matrix."""
    rows = op._store.rows.get(op._transposed)
    if rows is None or rows.indptr.dtype != np.int32 or op.dtype.kind != "f" or op.dtype.itemsize < 4:
        return None
    if vectors.dtype.kind != "f" or op.profile.max > _LONGEST:
        return None
    return _Fused(rows, vectors)


class _Fused:
    def __init__(self, rows, vectors: Vectors) -> None:
        self._rows, self._device, columns = rows, vectors.device, vectors.columns
        widest = 16 // vectors.dtype.itemsize
        vec = widest if columns % widest == 0 else 1
        tile = 8 if columns <= 8 and vec == 4 else 32
        lanes = tile // vec
        shares = rows.nnz > _SHORT * max(rows.shape[0], 1)
        self._kernel = SPMM.kernel(
            vectors.device, V=rows.data.dtype.name, R=vectors.dtype.name, VEC=vec, LANES=lanes, kShares=shares
        )
        at_once = THREADS // (32 if shares else lanes)
        self.blocks = max(1, min(-(-rows.shape[0] // at_once), 8 * vectors.device.sm_count))
        self._grid = (self.blocks, -(-columns // tile), 1)

    def apply(self, x, y, scalars: Pair, partials) -> None:
        pointer, rows = self._device.pointer, self._rows
        values = (*map(pointer, (rows.data, rows.indices, rows.indptr, x, y)), rows.shape[0], y.shape[1])
        values += (pointer(scalars.alpha), pointer(scalars.beta), scalars.stride, pointer(partials))
        self._kernel.launch(self._grid, (THREADS, 1, 1), values)


class _InTwoSteps:
    def __init__(self, op, vectors: Vectors) -> None:
        self._op, self._vectors, self.blocks = op, vectors, vectors.blocks(op.shape[0])
        self._w = vectors.empty(op.shape[0])

    def apply(self, x, y, scalars: Pair, partials) -> None:
        self._op.matmat(x, out=self._w)
        self._vectors.combine(scalars, self._w, y, partials)
