"""Sparse matrix times vector in both directions, on matrices like those of the public collections, beside cuSPARSE.

"cold" rotates copies of the matrix past the L2, "warm" reads one that fits there. Bytes are 8 nnz + 4 (rows + 1) +
4 (rows + columns), and for float64 their double but for the indices. Rivals: `cupyx.cusparse.spmv` on arrays that are
sorted and stored for the direction, and CuPy's operator: `A @ x`, and `A.T @ u` from A's own format.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from common import Case, cupy, main
from cupyx import cusparse
from cupyx.scipy.sparse import csr_matrix

from rawops import SparseMatrix
from rawops.testing import matrices
from rawops.testing.timing import rotations

# name: how it is made, and whether A and A.T differ
MATRICES = {
    "stencil160": (lambda: matrices.stencil(cupy, (160, 160, 160)), False),
    "rays 8kv": (lambda: matrices.rays(cupy), True),
    "webbase": (lambda: matrices.web(cupy), True),
    "kron16": (lambda: matrices.rmat(cupy), False),
    "cant": (lambda: matrices.elasticity(cupy), False),
    "stencil100": (lambda: matrices.stencil(cupy, (100, 100, 100)), False),
    "stencil100, full row": (lambda: matrices.dense_row(cupy), True),
    "ASIC_680k": (lambda: matrices.circuit(cupy), True),
    "rail4284": (lambda: matrices.set_cover(cupy), True),
    "sls": (lambda: matrices.hub_column(cupy), True),
    "rays 11kv": (lambda: matrices.rays(cupy, 936_063, 17.74, 21), True),
    "tomography": (lambda: matrices.tomography(cupy), True),
    "Ladybug-49": (lambda: matrices.bundle(cupy), True),
    "Dubrovnik-356": (lambda: matrices.bundle(cupy, 356, 226_730, 1_255_268), True),
    "power law 2M": (lambda: matrices.power_law(cupy), True),
}
QUICK = 4
L2_SHARE = 40e6  # bytes of a matrix that surely stays in an L2 of 50 MB or more
MAX_COPIES = 8


def cases(quick: bool) -> Iterator[Case]:
    """Each matrix in float32, cold and (where it fits the L2) warm; float64 of the first few."""
    for i, (name, (make, both)) in enumerate(MATRICES.items()):
        if quick and i >= QUICK:
            return
        csr = make()
        for dtype in ("float32", "float64") if i < QUICK and not quick else ("float32",):
            yield from directions(name, csr, dtype, both)


def directions(name: str, csr: matrices.Csr, dtype: str, both: bool) -> Iterator[Case]:
    """A @ x, and A.T @ u where that is another matrix."""
    (rows, cols), nnz, size = csr.shape, csr.data.size, cupy.dtype(dtype).itemsize
    for transposed in (False, True) if both else (False,):
        n, k = (cols, rows) if transposed else (rows, cols)
        traffic = (4 + size) * nnz + 4 * (n + 1) + size * (n + k)
        copies = min(rotations(traffic), MAX_COPIES)
        sets = [operands(csr, dtype, transposed) for _ in range(copies)]
        label = f"{name}{'.T' if transposed else ''} {n} x {k}, {nnz}"
        rivals = {"cusparse.spmv": rival, "CuPy": operator}
        yield Case(f"{label}, cold", dtype, 2.0 * nnz, traffic, sets, ours, rivals)
        if traffic < L2_SHARE:
            yield Case(f"{label}, warm", dtype, 2.0 * nnz, traffic, sets[:1], ours, rivals)


def operands(csr: matrices.Csr, dtype: str, transposed: bool) -> tuple:
    """Our matrix, the rival's for the same direction, CuPy's in A's own format, x and y; no arrays are shared."""
    data = csr.data.astype(dtype)
    a = SparseMatrix.from_csr(data, csr.indices, csr.indptr, csr.shape, dual=transposed)
    own = csr_matrix((data, csr.indices.copy(), csr.indptr.copy()), shape=csr.shape)
    direction = own
    if transposed:
        a, own, direction = a.T, own.T, own.T.tocsr()
    x = cupy.random.standard_normal(a.shape[1], dtype=dtype)
    return a, direction, own, x, cupy.empty(a.shape[0], dtype)


def ours(a, _direction, _own, x, out) -> None:
    """One call of ours."""
    a.matvec(x, out=out)


def rival(_a, direction, _own, x, out) -> None:
    """cuSPARSE on what is prepared for it."""
    cusparse.spmv(direction, x, y=out)


def operator(_a, _direction, own, x, _out) -> None:
    """CuPy's A @ x, or A.T @ x from the rows of A."""
    own @ x


if __name__ == "__main__":
    sys.exit(main("spmv", cases))
