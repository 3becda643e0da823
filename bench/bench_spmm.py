"""Sparse matrix times dense matrix of 8, 32 and 128 columns, row-major, float32; and matrices of dense blocks.

Bytes are 8 nnz + 4 (rows + 1) of matrix, x and the result once: the floor of memory. "L2" is the time that the rows of
x alone take, nnz of them, at 8 TB/s, which nothing but hits in the L1 can shorten. cuSPARSE is called directly, on
row-major operands. CuPy's `A @ x`, which copies to and from column-major ones, cannot be recorded in a graph: it is
timed as a loop.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from bench_sparse import MATRICES
from common import Case, cupy, main
from cupyx.scipy.sparse import csr_matrix

import rawops
from rawops import BSRMatrix, SparseMatrix
from rawops.testing import cusparse
from rawops.testing.timing import rotations

COLUMNS = 8, 32, 128
QUICK = "stencil100", "cant"
MAX_COPIES = 4
BLOCKS = [  # dtype, precision, block, share of the blocks
    *(("float16", None, 16, share) for share in (0.02, 0.1, 0.3)),
    *(("float16", None, block, 0.1) for block in (8, 32)),
    ("bfloat16", None, 16, 0.1),
    ("float32", "tf32", 16, 0.1),
    ("float32", None, 16, 0.1),
]


def cases(quick: bool) -> Iterator[Case]:
    """Blocks, then each matrix and number of columns; the quick ones take less than 20 seconds."""
    for case in BLOCKS[1:2] if quick else BLOCKS:
        yield blocked(*case)
    for name in QUICK if quick else MATRICES:
        make, both = MATRICES[name]
        csr = make()
        yield from (scattered(name, csr, columns) for columns in COLUMNS)
        if both and not quick:
            rows = csr_matrix(csr[:3], shape=csr.shape).T.tocsr()
            turned = type(csr)(rows.data, rows.indices, rows.indptr, rows.shape)
            yield from (scattered(f"{name}.T", turned, columns) for columns in COLUMNS)


def scattered(name: str, csr, columns: int) -> Case:
    """A @ x for compressed rows."""
    (rows, cols), nnz = csr.shape, csr.data.size
    traffic = 8 * nnz + 4 * (rows + 1) + 4 * columns * (rows + cols)
    sets = []
    for _ in range(min(rotations(traffic), MAX_COPIES)):
        given = [csr.data.copy(), csr.indices.copy(), csr.indptr.copy()]
        x = cupy.random.standard_normal((cols, columns), dtype="float32")
        out = cupy.empty((rows, columns), "float32")
        rival = cusparse.Spmm(cusparse.csr(*given, csr.shape), x, out, algorithm="CSR_ALG2")
        a = SparseMatrix.from_csr(*given, csr.shape, dual=False)
        sets.append((a, rival, csr_matrix(tuple(given), shape=csr.shape), x, out))
    label = f"{name} {rows} x {cols}, {nnz}: {columns}"
    floors = {"L2": 4e-6 * nnz * columns / 8}
    loops = {"CuPy": lambda _a, _rival, theirs, x, _out: theirs @ x}
    rivals = {"CSR_ALG2": lambda _a, rival, *_: rival()}
    return Case(label, "float32", 2.0 * nnz * columns, traffic, sets, ours, rivals, loops, floors)


def ours(a, *others) -> None:
    """One call of ours."""
    *_, x, out = others
    a.matmat(x, out=out)


def blocked(dtype: str, precision: str | None, block: int, share: float, size=4096, columns=1024) -> Case:
    """A matrix of random blocks beside our dense product, and cuSPARSE's Blocked-ELL where it has the type."""
    grid = size // block
    width = round(grid * share)
    places = cupy.sort(cupy.argsort(cupy.random.random((grid, grid)), axis=1)[:, :width], axis=1).astype("int32")
    values = cupy.random.standard_normal((size, width * block), dtype="float32").astype(dtype)
    a = BSRMatrix.from_blocked_ell(values, places, (size, size))
    dense = cupy.zeros((grid, block, grid, block), dtype)
    dense[cupy.arange(grid)[:, None], :, places] = values.reshape(grid, block, width, block).swapaxes(1, 2)
    dense = dense.reshape(size, size)
    itemsize = values.itemsize
    traffic = itemsize * (values.size + 2 * size * columns)
    sets = []
    for _ in range(rotations(traffic)):
        x = cupy.random.standard_normal((size, columns), dtype="float32").astype(dtype)
        out = cupy.empty((size, columns), dtype)
        rival = None
        if dtype in ("float16", "float32") and precision is None:
            rival = cusparse.Spmm(cusparse.blocked_ell(values, places, a.shape), x, out, algorithm="BLOCKED_ELL_ALG1")
        sets.append((a, rival, x, out))

    def call(a, _rival, x, out) -> None:
        a.matmat(x, out=out, precision=precision)

    rivals = {"dense": lambda _a, _rival, x, out: rawops.gemm(dense, x, out=out, precision=precision)}
    if sets[0][1] is not None:
        rivals["Blocked-ELL"] = lambda _a, rival, *_: rival()
    label = f"blocks of {block}, {100 * share:g} %: {size} x {size} x {columns}"
    return Case(label, precision or dtype, 2.0 * values.size * columns, traffic, sets, call, rivals)


if __name__ == "__main__":
    sys.exit(main("spmm", cases))
