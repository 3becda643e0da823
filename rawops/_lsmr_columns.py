"""A `SparseMatrix` times several vectors, each with its own scalars."""

from __future__ import annotations

from rawops._lsmr_kernels import Pair, Vectors


class SparseColumns:
    """Both products as those with a dense matrix, and a pass over the result that brings the scalars in."""

    is_captured = True

    def __init__(self, product, vectors: Vectors) -> None:
        self._vectors, self.nbytes = vectors, product.nbytes
        self._ops = {False: product.matrix, True: product.matrix.H}
        m, n = product.shape
        self._w = vectors.empty(max(m, n))
        for op in self._ops.values():  # a first product looks at the rows, which no graph records
            op.matmat(vectors.empty(op.shape[1]), 0.0, out=self._w[: op.shape[0]])

    def num_partials(self, transposed: bool) -> int:
        return self._vectors.blocks(self._ops[transposed].shape[0])

    def apply(self, transposed: bool, x, y, scalars: Pair, partials) -> None:
        w = self._w[: y.shape[0]]
        self._ops[transposed].matmat(x, out=w)
        self._vectors.combine(scalars, w, y, partials)
