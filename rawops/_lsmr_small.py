"""Small sparse systems: whole iterations in one block of threads, as `Engine` would launch them one by one."""

from __future__ import annotations

import numpy as np

from rawops._lsmr_kernels import real_and_parts
from rawops._lsmr_operators import SparseProduct
from rawops._runtime.kernel import KernelSpec

_THREADS = 512
_MOST_BYTES = 640 << 10  # of the matrix, in both directions: more is faster on many SMs
_TYPES = {"R": ("float32", "float64"), "PARTS": (1, 2)}

SMALL = KernelSpec(
    source="lsmr_small.cu",
    entry="rawops::lsmr_small",
    template=tuple(_TYPES),
    choices=_TYPES,
    smoke=[{"R": "float32", "PARTS": 1}, {"R": "float64", "PARTS": 1}, {"R": "float64", "PARTS": 2}],
)


class Small:
    """The iterations of one engine in one launch."""

    def __init__(self, engine, formats: tuple, shared_bytes: int, holds: bool) -> None:
        self._engine, self._formats, self._shared_bytes, self._holds = engine, formats, shared_bytes, holds
        real, parts = real_and_parts(engine.vectors.dtype)
        self._kernel = SMALL.kernel(engine.device, R=real, PARTS=parts)

    @classmethod
    def of(cls, engine, product) -> Small | None:
        """Return the iterations of an engine, None where they do not fit into one block or are better launched."""
        dtype, (m, n) = engine.vectors.dtype, engine.shape
        if not isinstance(product, SparseProduct) or engine.columns > 1 or product.dtype != dtype:
            return None
        matrix = product.matrix
        found = [matrix._store.rows.get(way) for way in (matrix._transposed, not matrix._transposed)]
        if matrix._conjugated or None in found or any(rows.indptr.dtype != np.int32 for rows in found):
            return None
        shared_bytes = (m + 4 * n) * dtype.itemsize
        room = engine.device.max_shared_bytes - 2048
        if product.nbytes > _MOST_BYTES or shared_bytes > room:
            return None
        matrix_bytes = sum(x.nbytes for rows in found for x in (rows.data, rows.indices, rows.indptr))
        holds = shared_bytes + matrix_bytes <= room
        return cls(engine, tuple(found), shared_bytes + matrix_bytes * holds, holds)

    def launch(self, iterations: int) -> None:
        """Launch some iterations."""
        engine, pointer = self._engine, self._engine.device.pointer
        values = [pointer(engine.states)]
        for rows in self._formats:
            values += [*map(pointer, (rows.data, rows.indices, rows.indptr)), _lanes(rows)]
        values += [self._formats[0].nnz, int(self._holds), *engine.shape]
        values += map(pointer, (engine.u, engine.v, engine.x, engine.h, engine.hbar))
        values += [iterations, pointer(engine.history), engine.chunk]
        self._kernel.launch((1, 1, 1), (_THREADS, 1, 1), tuple(values), self._shared_bytes)


def _lanes(rows) -> int:
    """Return how many threads share a row: about a quarter of its entries, and all threads where rows are few."""
    mean = rows.nnz / max(rows.shape[0], 1)
    wanted = max(mean / 4, min(_THREADS / max(rows.shape[0], 1), mean))
    return int(np.clip(2 ** round(np.log2(max(wanted, 1))), 1, 32))
