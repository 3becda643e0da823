"""Sparse matrix times vector in both directions, on matrices like those of the public collections, beside cuSPARSE.

"cold" rotates copies of the matrix past the L2, "warm" reads one that fits there. Bytes are 8 nnz + 4 (rows + 1) +
4 (rows + columns), for float64 12 nnz and 8 a row and column: those of compressed rows, whatever the kernel reads. The
rivals in graphs are cuSPARSE called directly, on compressed rows that are stored for the direction; "preprocessed"
lets it analyse them first. "one format" is its transposed product, from the rows of A. CuPy refuses its own cuSPARSE in
graphs: `cupyx.cusparse.spmv` and CuPy's `A @ x` are timed in loops of calls from Python, where a call of ours costs its
part of the host too.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import cupyx.cusparse
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
MAX_COPIES = 4


def cases(quick: bool) -> Iterator[Case]:
    """Each matrix in float32, cold and (where it fits the L2) warm; float64 of the first few."""
    for i, (name, (make, both)) in enumerate(MATRICES.items()):
        if quick and i >= QUICK:
            return
        csr = make()
        for dtype in ("float32", "float64") if i < QUICK and not quick else ("float32",):
            yield from directions(name, csr, dtype, both)
            cupy.get_default_memory_pool().free_all_blocks()


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
        loops = {"cupyx spmv": cupyx_spmv, "A @ x": product}
        if transposed:
            loops |= {"A.T @ x": transposed_product}
        kernel = sets[0][0].plan.matvec.kernel
        label += f", {kernel}"
        yield Case(f"{label}, cold", dtype, 2.0 * nnz, traffic, sets, ours, rivals, loops)
        if traffic < L2_SHARE:
            yield Case(f"{label}, warm", dtype, 2.0 * nnz, traffic, sets[:1], ours, rivals)


def operands(csr: matrices.Csr, dtype: str, transposed: bool) -> tuple:
    """Our matrix and the rivals' products, none of which share arrays, x and y."""
    given = [csr.data.astype(dtype), csr.indices.copy(), csr.indptr.copy(), csr.shape]
    a = SparseMatrix.from_csr(*given, dual=transposed)
    rows, stored = csr_matrix(tuple(given[:3]), shape=csr.shape), given
    of_cupy = [rows]
    if transposed:
        rows = rows.T.tocsr()
        a, stored, of_cupy = a.T, [rows.data, rows.indices, rows.indptr, rows.shape], [rows, of_cupy[0].T]
    x = cupy.random.standard_normal(a.shape[1], dtype=dtype)
    y = cupy.empty(a.shape[0], dtype)
    rivals = [Spmv(*stored, x, y), Spmv(*stored, x, y, preprocessed=True)]
    if transposed:
        rivals.append(Spmv(*given, x, y, transposed=True))
    return a, rivals, of_cupy, x, y


def ours(a, _rivals, _of_cupy, x, out) -> None:
    """One call of ours."""
    a.matvec(x, out=out)


def rival(_a, rivals, _of_cupy, _x, _out) -> None:
    """cuSPARSE on rows stored for the direction."""
    rivals[0]()


def preprocessed(_a, rivals, _of_cupy, _x, _out) -> None:
    """The same after its analysis."""
    rivals[1]()


def one_format(_a, rivals, _of_cupy, _x, _out) -> None:
    """cuSPARSE's transposed product."""
    rivals[2]()


def cupyx_spmv(_a, _rivals, of_cupy, x, out) -> None:
    """CuPy's call of cuSPARSE with all operands given."""
    cupyx.cusparse.spmv(of_cupy[0], x, out)


def product(_a, _rivals, of_cupy, x, _out) -> None:
    """CuPy's operator, which allocates its result."""
    of_cupy[0] @ x


def transposed_product(_a, _rivals, of_cupy, x, _out) -> None:
    """CuPy's operator on the transpose of the one format."""
    of_cupy[1] @ x


def plot(rows: list, file: str) -> None:
    """Draw the achieved bandwidth of ours and cuSPARSE for each cold float32 case."""
    from matplotlib.figure import Figure

    rows = [row for row in rows if row["dtype"] == "float32" and row["shape"].endswith("cold")]
    names = [re.split(r" \d+ x ", row["shape"], maxsplit=1)[0] for row in rows]
    figure = Figure(figsize=(10, 0.32 * len(rows) + 1.2), layout="constrained")
    axes = figure.subplots()
    places = range(len(rows))
    axes.barh([p - 0.2 for p in places], [row["GB/s"] for row in rows], 0.4, label="rawops")
    axes.barh([p + 0.2 for p in places], [row["GB/s"] / row["x cuSPARSE"] for row in rows], 0.4, label="cuSPARSE")
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set_xlabel("GB/s of compressed rows and vectors, float32, cold L2")
    axes.grid(axis="x", alpha=0.4)
    axes.legend(loc="lower right")
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    sys.exit(main("sparse", cases, plot=plot))
