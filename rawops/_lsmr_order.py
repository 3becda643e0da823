"""Rows of a sparse matrix in an order in which neighbours are alike, for products with the adjoint.

A row of A^H gathers entries of u from all over where the rows of A come in no order. Sorted by where they begin and
end, rows that share columns are near each other, and so are the entries of u that are read together.
"""

from __future__ import annotations

import numpy as np


def sorted_rows(matrix) -> tuple:
    """Return a `SparseMatrix` with the rows of another in a new order, and that order, (m,) int64; both are copies.

    The key interleaves the bits of the first and the last column of a row: rows that begin and end near each other come
    near each other (a Morton curve).
    """
    rows = matrix._store.rows[matrix._transposed]
    xp = np if isinstance(rows.indptr, np.ndarray) else _cupy()
    starts = rows.indptr.astype("int64")
    lengths = xp.diff(starts)
    inside = xp.maximum(lengths, 1)
    last = max(rows.nnz - 1, 0)
    first_column = rows.indices[xp.minimum(starts[:-1], last)] if rows.nnz else xp.zeros(lengths.size, "int32")
    last_column = rows.indices[xp.minimum(starts[:-1] + inside - 1, last)] if rows.nnz else first_column
    order = xp.argsort(_spread(first_column) | _spread(last_column) << np.uint64(1))
    lengths = lengths[order]
    indptr = xp.concatenate([starts[:1], xp.cumsum(lengths)])
    place = xp.arange(rows.nnz)
    row = xp.searchsorted(indptr[1:], place, side="right")
    source = starts[:-1][order][row] + place - indptr[:-1][row]
    data = rows.data[source].conj() if matrix._conjugated else rows.data[source]
    indptr = indptr.astype(rows.indptr.dtype)
    return type(matrix).from_csr(data, rows.indices[source], indptr, rows.shape), order


def _spread(x):
    """Put a zero between any two of the lower 32 bits."""
    x = x.astype("uint64")
    for shift, mask in (
        (16, 0x0000FFFF0000FFFF),
        (8, 0x00FF00FF00FF00FF),
        (4, 0x0F0F0F0F0F0F0F0F),
        (2, 0x3333333333333333),
        (1, 0x5555555555555555),
    ):
        x = (x | x << np.uint64(shift)) & np.uint64(mask)
    return x


def _cupy():
    import cupy

    return cupy
