"""Sparse matrices in coordinates, as operands of the tests."""

import numpy as np

from rawops import SparseMatrix


class Coordinates:
    """A random matrix of small integers in coordinates, and densely in the widest type."""

    def __init__(self, rng, shape, lengths, dtype="float32", is_sorted=False) -> None:
        lengths = np.broadcast_to(np.asarray(lengths, np.int64), (shape[0],))
        self.shape, self.indptr = shape, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        self.row = np.repeat(np.arange(shape[0]), lengths)
        self.indices = rng.integers(0, max(shape[1], 1), self.row.size).astype(np.int32)
        self.data = integers(rng, self.row.size, dtype)
        if is_sorted:
            self.indices = self.indices[np.lexsort((self.indices, self.row))]

    def dense(self) -> np.ndarray:
        wide = np.complex128 if self.data.dtype.kind == "c" else np.float64
        a = np.zeros(self.shape, wide)
        np.add.at(a, (self.row, self.indices), self.data.astype(wide))
        return a

    def put(self, device, form: str = "csr", dual=True) -> SparseMatrix:
        data, row, col, indptr = map(device.put, (self.data, self.row, self.indices, self.indptr))
        if form == "csr":
            return SparseMatrix.from_csr(data, col, indptr, self.shape, dual=dual)
        if form == "coo":
            return SparseMatrix.from_coo(data, row, col, self.shape, dual=dual)
        order = np.argsort(self.indices, kind="stable")
        indptr = np.concatenate([[0], np.cumsum(np.bincount(self.indices, minlength=self.shape[1]))])
        arrays = map(device.put, (self.data[order], self.row[order].astype(np.int64), indptr))
        return SparseMatrix.from_csc(*arrays, self.shape, dual=dual)


def integers(rng, size, dtype) -> np.ndarray:
    x = rng.integers(-3, 4, size)
    if np.dtype(dtype).kind == "c":
        x = x + 1j * rng.integers(-3, 4, size)
    return x.astype(dtype)


def same(device, got, want) -> None:
    np.testing.assert_array_equal(device.get(got).astype(want.dtype), want)
