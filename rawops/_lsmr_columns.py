"""A `SparseMatrix` times several vectors, each with its own scalars."""

from __future__ import annotations

from rawops._lsmr_kernels import Pair, Vectors

_ROWS_A_PARTIAL = 4  # of the result: with fewer, leaving squares takes longer than reading the result again


class SparseColumns:
    """Products as those with a dense matrix. Where rows are short the scalars are in them; else a pass over the result
    brings them in.
    """

    is_captured = True

    def __init__(self, product, vectors: Vectors) -> None:
        self._vectors, self._matrix, self.nbytes = vectors, product.matrix, product.nbytes
        sizes = dict(zip((False, True), product.shape, strict=True))
        self._parts = {way: self._count(way, sizes[not way], sizes[way]) for way in sizes}
        self._ops = {way: op for way, op in ((False, self._matrix), (True, self._matrix.H)) if not self._parts[way]}
        self._w = vectors.empty(max([0, *(sizes[way] for way in self._ops)]))
        for way, op in self._ops.items():  # a first product looks at the rows, which no graph records
            op.matmat(vectors.empty(sizes[not way]), 0.0, out=self._w[: sizes[way]])

    def _count(self, way: bool, length: int, rows: int) -> int:
        """Return the parts of sums of squares that a product leaves; 0 where it should not."""
        dense, _ = self._matrix._dense(way)
        if dense is None:
            return 0
        count = dense.num_partials(self._vectors.empty(length))
        return count if count * _ROWS_A_PARTIAL <= rows else 0

    def num_partials(self, transposed: bool) -> int:
        return self._parts[transposed] or self._vectors.blocks(self._matrix.shape[transposed])

    def apply(self, transposed: bool, x, y, scalars: Pair, partials) -> None:
        if self._parts[transposed]:
            dense, conjugate = self._matrix._dense(transposed)
            pointer = self._vectors.device.pointer
            alpha, beta = (0.0, 0.0, pointer(scalars.alpha)), (0.0, 0.0, pointer(scalars.beta))
            dense.run_columns(x, y, alpha, beta, scalars.stride, partials, conjugate, self._vectors.early)
            return
        w = self._w[: y.shape[0]]
        self._ops[transposed].matmat(x, *(scalars.gate or (1.0, 0.0)), out=w)
        self._vectors.combine(scalars, w, y, partials)
