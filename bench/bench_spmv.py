"""Sparse matrix times vector in both directions, on matrices like those of the public collections, beside cuSPARSE.

"cold" rotates copies of the matrix past the L2, "warm" reads one that fits there. Bytes are 8 nnz + 4 (rows + 1) +
4 (rows + columns), for float64 12 nnz and 8 a row and column. The rivals run on compressed rows that are stored for the
direction; "preprocessed" lets cuSPARSE analyse them first. "one format" is cuSPARSE's transposed product, from the rows
of A.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from common import Case, cupy, main
from cupyx.scipy.sparse import csr_matrix

from rawops import SparseMatrix
from rawops.testing import matrices
from rawops.testing.cusparse import Spmv
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
        rivals = {"cuSPARSE": rival, "preprocessed": preprocessed, **({"one format": one_format} if transposed else {})}
        yield Case(f"{label}, cold", dtype, 2.0 * nnz, traffic, sets, ours, rivals)
        if traffic < L2_SHARE:
            yield Case(f"{label}, warm", dtype, 2.0 * nnz, traffic, sets[:1], ours, rivals)


def operands(csr: matrices.Csr, dtype: str, transposed: bool) -> tuple:
    """Our matrix and the rivals' products, none of which share arrays, x and y."""
    given = [csr.data.astype(dtype), csr.indices.copy(), csr.indptr.copy(), csr.shape]
    a = SparseMatrix.from_csr(*given, dual=transposed)
    stored = given
    if transposed:
        rows = csr_matrix(tuple(given[:3]), shape=csr.shape).T.tocsr()
        a, stored = a.T, [rows.data, rows.indices, rows.indptr, rows.shape]
    x = cupy.random.standard_normal(a.shape[1], dtype=dtype)
    y = cupy.empty(a.shape[0], dtype)
    rivals = [Spmv(*stored, x, y), Spmv(*stored, x, y, preprocessed=True)]
    if transposed:
        rivals.append(Spmv(*given, x, y, transposed=True))
    return a, rivals, x, y


def ours(a, _rivals, x, out) -> None:
    """One call of ours."""
    a.matvec(x, out=out)


def rival(_a, rivals, _x, _out) -> None:
    """cuSPARSE on rows stored for the direction."""
    rivals[0]()


def preprocessed(_a, rivals, _x, _out) -> None:
    """The same after its analysis."""
    rivals[1]()


def one_format(_a, rivals, _x, _out) -> None:
    """cuSPARSE's transposed product."""
    rivals[2]()


if __name__ == "__main__":
    sys.exit(main("spmv", cases))
