"""SparseMatrix: exact products in both directions, formats, dtypes, what is not read, views, checks."""

import ml_dtypes
import numpy as np
import pytest

import rawops
from rawops import SparseMatrix, _sparse_formats, _sparse_store
from rawops._sparse_spmv import ByRows

NAN = float("nan")


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


# --- products ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dual", [True, False])
@pytest.mark.parametrize("form", ["csr", "csc", "coo"])
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_both_directions(device, rng, dtype, form, dual):
    """N, T and H from every format, rectangular, with unsorted duplicates: a flip too many or too few shows."""
    made = Coordinates(rng, (37, 53), rng.integers(0, 12, 37), dtype)
    A, dense = made.put(device, form, dual), made.dense()
    x, u = integers(rng, 53, dtype), integers(rng, 37, dtype)
    assert A.shape == (37, 53) and A.T.shape == A.H.shape == (53, 37) and A.dtype == dtype
    same(device, A @ device.put(x), dense @ x)
    for view, matrix in ((A.T, dense.T), (A.H, dense.conj().T)):
        same(device, view @ device.put(u), matrix @ u)
        same(device, view.T @ device.put(x), matrix.T @ x)
        same(device, view.H @ device.put(x), matrix.conj().T @ x)
        same(device, view.rmatvec(device.put(x)), matrix.conj().T @ x)
    same(device, device.put(u) @ A, u @ dense)
    same(device, A.rmatvec(device.put(u)), dense.conj().T @ u)


@pytest.mark.parametrize("mean", [1, 3, 9, 24, 70])
def test_row_lengths(device, rng, mean):
    """Every number of threads a row, with empty and long rows beside those of the mean length."""
    lengths = np.minimum(rng.integers(0, 2 * mean + 1, 67), 150)
    lengths[:2], lengths[-1] = (0, 4 * mean + 33), 0
    made = Coordinates(rng, (67, 200), lengths)
    x, u = integers(rng, 200, "float32"), integers(rng, 67, "float32")
    A = made.put(device)
    same(device, A @ device.put(x), made.dense() @ x)
    same(device, A.T @ device.put(u), made.dense().T @ u)


VALUES = ["float16", ml_dtypes.bfloat16, "float32", "float64", "complex64", "complex128", "int8", "int32", "bool"]
VECTORS = ["float16", ml_dtypes.bfloat16, "float32", "float64", "complex64", "complex128", "int16"]


@pytest.mark.parametrize("dtype", VALUES, ids=str)
def test_promotion(device, rng, dtype):
    """The result has NumPy's type, and no bytes are taken for another type's."""
    made = Coordinates(rng, (9, 21), 5)
    made.data = integers(rng, 45, dtype) if dtype != "bool" else rng.integers(0, 2, 45).astype(bool)
    A = made.put(device)
    assert A.dtype == (np.result_type(dtype, "float32") if np.dtype(dtype).kind in "ib" else dtype)
    for vector in VECTORS:
        x = integers(rng, 21, vector)
        try:
            want = np.result_type(A.dtype, x.dtype)
        except TypeError:
            with pytest.raises(TypeError, match="promotes"):
                A @ device.put(x)
            continue
        y = A @ device.put(x)
        assert y.dtype == want
        wide = np.complex128 if want.kind == "c" else np.float64
        same(device, y, (made.dense() @ x.astype(wide)).astype(want))


@pytest.mark.parametrize("dual", [True, False])
def test_int64_pointers(device, rng, monkeypatch, dual):
    """As past 2^31 entries."""
    monkeypatch.setattr(_sparse_formats, "_WIDE_POINTERS", 10)
    made = Coordinates(rng, (19, 31), 7)
    A = made.put(device, dual=dual)
    assert A._store.values.indptr.dtype == np.int64
    x, u = integers(rng, 31, "float32"), integers(rng, 19, "float32")
    same(device, A @ device.put(x), made.dense() @ x)
    same(device, A.T @ device.put(u), made.dense().T @ u)
    same(device, A @ device.put(np.stack([x, 2 * x], 1)), made.dense() @ np.stack([x, 2 * x], 1))


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int64", "uint64"])
@pytest.mark.parametrize("form", ["csr", "coo"])
def test_indices_of_any_integer_type(device, rng, dtype, form):
    """Unsigned ones of 64 bits too, which NumPy adds to signed ones as floats."""
    made = Coordinates(rng, (11, 23), 4)
    made.row, made.indices, made.indptr = (x.astype(dtype) for x in (made.row, made.indices, made.indptr))
    x, u = integers(rng, 23, "float32"), integers(rng, 11, "float32")
    A = made.put(device, form)
    same(device, A @ device.put(x), made.dense() @ x)
    same(device, A.T @ device.put(u), made.dense().T @ u)


# --- special matrices ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dual", [True, False])
@pytest.mark.parametrize("shape", [(3, 0), (0, 3), (0, 0), (4, 4), (1, 7)], ids=str)
def test_nothing_stored(device, shape, dual):
    """Null pointers, no rows, no columns: the result is zeros, or beta * y."""
    none = device.put(np.zeros(0, np.float32)), device.put(np.zeros(0, np.int32))
    A = SparseMatrix.from_csr(*none, device.put(np.zeros(shape[0] + 1, np.int32)), shape, dual=dual)
    for view, (rows, cols) in ((A, shape), (A.T, shape[::-1])):
        x = device.put(np.full(cols, NAN, np.float32))
        out = device.guarded((rows,), np.float32)
        same(device, view.matvec(x, out=out), np.zeros(rows))
        out[...] = 3
        same(device, view.matvec(x, beta=2, out=out), np.full(rows, 6.0))
        assert (view @ device.put(np.zeros((cols, 2), np.float32))).shape == (rows, 2)
        assert (view @ device.put(np.zeros((cols, 0), np.float32))).shape == (rows, 0)
    assert A.nnz == 0 and A.profile.empty == shape[0] and A.T.profile.rows == shape[1]


def test_one_row_of_many(device):
    rows = 700 if device.is_emulated else 70000
    row = rows // 2 - 1
    indptr = np.zeros(rows + 1, np.int64)
    indptr[row + 1 :] = 3
    data, indices = np.array([1, 2, 3], np.float32), np.array([0, 4, 2])
    A = SparseMatrix.from_csr(*map(device.put, (data, indices, indptr)), (rows, 5))
    want = np.zeros(rows)
    want[row] = 1 * 1 + 2 * 16 + 3 * 4
    same(device, A @ device.put(np.array([1, 2, 4, 8, 16], np.float32)), want)
    assert A.profile.empty == rows - 1 and A.profile.max == 3
    same(device, A.T @ device.put(np.ones(rows, np.float32)), np.array([1.0, 0, 3, 0, 2]))


@pytest.mark.parametrize("form", ["csr", "csc", "coo"])
def test_duplicates_add_and_absent_entries_do_not_touch_x(device, form):
    made = Coordinates(np.random.default_rng(0), (2, 3), [0, 3])
    made.data, made.indices = np.array([1, 2, 3], np.float32), np.array([1, 1, 0], np.int32)
    made.indptr, made.row = np.array([0, 2, 3], np.int32), np.array([0, 0, 1])
    A = made.put(device, form)
    same(device, A @ device.put(np.array([10, 100, NAN], np.float32)), np.array([300.0, 30.0]))
    same(device, A.T @ device.put(np.array([1, 2], np.float32)), np.array([6.0, 3.0, 0.0]))


def test_forty_duplicates_of_three_columns(device, rng):
    made = Coordinates(rng, (3, 60), [2, 40, 1])
    made.indices[2:42] = np.array([50, 7, 31])[rng.integers(0, 3, 40)]
    for form in ("csr", "csc", "coo"):
        A, x = made.put(device, form), integers(rng, 60, "float32")
        same(device, A @ device.put(x), made.dense() @ x)
    assert A.nnz <= 6


def test_stored_zeros_multiply(device):
    data, indices, indptr = np.zeros(2, np.float32), np.array([0, 1]), np.array([0, 1, 2])
    A = SparseMatrix.from_csr(*map(device.put, (data, indices, indptr)), (2, 2))
    same(device, A @ device.put(np.array([NAN, 1], np.float32)), np.array([NAN, 0.0]))


def test_long_row_beside_short_ones(device):
    longest = 9000 if device.is_emulated else 100000
    lengths = np.array([longest, 0, 1, 0, 31, 32, 33, 0, 256, 512, 0, 255, 257])
    rng = np.random.default_rng(1)
    made = Coordinates(rng, (lengths.size, 300), lengths)
    made.data[:] = 1
    A = made.put(device)
    same(device, A @ device.put(np.ones(300, np.float32)), lengths.astype(float))
    same(device, A.T @ device.put(np.ones(lengths.size, np.float32)), made.dense().sum(0))


# --- alpha, beta, out ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dual", [True, False])
def test_alpha_and_beta(device, rng, dual):
    made = Coordinates(rng, (23, 17), 4)
    A, dense = made.put(device, dual=dual), made.dense()
    for call, matrix in ((A.matvec, dense), (A.rmatvec, dense.T)):
        x, y = integers(rng, matrix.shape[1], "float32"), integers(rng, matrix.shape[0], "float32")
        for alpha, beta in ((2, -3), (np.float32(0.5), 1), (-1, 0)):
            out = device.put(y)
            if device.is_emulated:
                out = out.copy()
            assert call(device.put(x), alpha, beta, out) is out
            same(device, out, alpha * (matrix @ x) + beta * y)
            out = device.put(y.copy())
            scalars = [device.put(np.array(value, np.float64)) for value in (alpha, beta)]
            call(device.put(x), *scalars, out=out)
            same(device, out, alpha * (matrix @ x) + beta * y)


def test_a_matrix_of_another_emulation(rng):
    with rawops.emulate():
        A = SparseMatrix.from_csr(np.ones(1, np.float32), np.zeros(1, int), np.array([0, 1]), (1, 1))
        assert repr(A) == "SparseMatrix 1 x 1 float32: 1 entries"
    with (
        rawops.emulate(),
        pytest.raises(ValueError, match=r"belongs to another emulate\(\) block"),
    ):
        A @ np.ones(1, np.float32)


def test_complex_scalars(device, rng):
    made = Coordinates(rng, (6, 8), 3, "complex64")
    x, y = integers(rng, 8, "complex64"), integers(rng, 6, "complex64")
    out = device.put(y.copy())
    made.put(device).matvec(device.put(x), 1 + 2j, 3 - 1j, out)
    same(device, out, (1 + 2j) * (made.dense() @ x) + (3 - 1j) * y)


def test_inf_stays_out_of_the_other_part(device):
    data, indices, indptr = np.array([np.inf], np.complex64), np.zeros(1, np.int32), np.array([0, 1])
    A = SparseMatrix.from_csr(*map(device.put, (data, indices, indptr)), (1, 1))
    y = device.get(A @ device.put(np.array([1], np.complex64)))
    assert y.real[0] == np.inf


@pytest.mark.parametrize("dual", [True, False])
def test_what_a_factor_of_zero_leaves_unread(device, rng, dual):
    made = Coordinates(rng, (23, 17), 4)
    A = made.put(device, dual=dual)
    for call, rows, cols in ((A.matvec, 23, 17), (A.rmatvec, 17, 23)):
        out = device.guarded((rows,), np.float32)
        call(device.put(np.zeros(cols, np.float32)), out=out)
        same(device, out, np.zeros(rows))
    A.update_values(device.put(np.full(92, NAN, np.float32)))
    for call, rows, cols in ((A.matvec, 23, 17), (A.rmatvec, 17, 23)):
        for zero in (0, device.put(np.zeros(()))):
            out = device.put(np.ones(rows, np.float32))
            call(device.put(np.full(cols, NAN, np.float32)), zero, 2, out)
            same(device, out, np.full(rows, 2.0))


def test_views_and_misaligned_arrays(device, rng):
    """Strided and shifted operands, of the product and of the construction."""
    made = Coordinates(rng, (15, 22), rng.integers(0, 9, 15))
    shifted = [
        device.put(np.concatenate([np.zeros(1, x.dtype), x]))[1:] for x in (made.data, made.indices, made.indptr)
    ]
    A = SparseMatrix.from_csr(*shifted, made.shape)
    x, want = integers(rng, 22, "float32"), None
    want = made.dense() @ x
    same(device, A @ device.put(np.repeat(x, 2))[::2], want)
    same(device, A @ device.put(x[::-1].copy())[::-1], want)
    same(device, A @ device.put(np.concatenate([[0], x]).astype(np.float32))[1:], want)
    wide = device.put(np.full(30, 5, np.float32))
    A.matvec(device.put(x), beta=1, out=wide[::2])
    same(device, wide[::2], want + 5)
    same(device, wide[1::2], np.full(15, 5.0))


def test_out_over_x(device, rng):
    made = Coordinates(rng, (16, 16), 5)
    x = integers(rng, 24, "float32")
    for place in (slice(0, 16), slice(4, 20), slice(15, None, -1)):
        whole = device.put(x.copy())
        made.put(device).matvec(whole[:16], 2, 1, out=whole[place])
        same(device, whole[place], 2 * (made.dense() @ x[:16]) + x[place])


def test_factors_in_the_place_of_the_result(device, rng):
    """Entries of out that one block writes and others read: the answer of numbers."""
    made = Coordinates(rng, (700, 30), 3, "float64")
    A, X = made.put(device), integers(rng, (30, 6), "float64")
    for product, x in ((A.matvec, X[:, 0].copy()), (A.matmat, X), (A.to_bsr(4).matmat, X)):
        want = 2 * made.dense() @ x + 2 * np.full((700, *x.shape[1:]), 2.0)
        out = device.put(np.full(want.shape, 2.0))
        factor = out.reshape(-1)[:1].reshape(())
        product(device.put(x), factor, factor, out)
        same(device, out, want)


def test_arguments_are_not_changed(device, rng):
    made = Coordinates(rng, (11, 13), 4)
    arrays = [device.put(x.copy()) for x in (made.data, made.indices, made.indptr)]
    A = SparseMatrix.from_csr(*arrays, made.shape)
    A.update_values(device.put(np.zeros(44, np.float32)))
    for x, want in zip(arrays, (made.data, made.indices, made.indptr), strict=True):
        same(device, x, want)
    A.update_values(arrays[0])
    for x in arrays:  # nor are they needed any more
        x[...] = 0
    ones = np.ones(13, np.float32)
    same(device, A @ device.put(ones), made.dense() @ ones)


# --- the solvers' interface ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dual", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_norm_of_the_result(device, rng, dtype, dual):
    made = Coordinates(rng, (300, 70), rng.integers(0, 9, 300), dtype)
    A, dense = made.put(device, dual=dual), made.dense()
    for view, matrix in ((A, dense), (A.H, dense.conj().T)):
        for transposed in (False, True):
            op = matrix.conj().T if transposed else matrix
            x, y = integers(rng, op.shape[1], dtype), integers(rng, op.shape[0], dtype)
            out = device.put(y.copy())
            count = view._num_partials(transposed)
            partials = device.guarded((count + 3,), np.float64)
            alpha, beta = device.put(np.array(2.0)), device.put(np.array(-1.0))
            view._apply(transposed, device.put(x), out, alpha, beta, partials)
            same(device, out, 2 * (op @ x) - y)
            host = device.get(partials)
            assert host[:count].sum() == (abs(2 * (op @ x) - y) ** 2).sum().round()
            assert np.isnan(host[count:]).all()


def test_same_bits_again(device, rng):
    made = Coordinates(rng, (90, 60), rng.integers(0, 40, 90))
    made.data = rng.standard_normal(made.data.size).astype(np.float32)
    x, u = (rng.standard_normal(n).astype(np.float32) for n in (60, 90))
    A, B = made.put(device), made.put(device)
    for _ in range(2):
        same(device, A @ device.put(x), device.get(B @ device.put(x)))
        same(device, A.T @ device.put(u), device.get(B.T @ device.put(u)))


# --- dense operands --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dual", [True, False])
def test_dense_operand_in_any_layout(device, rng, dual):
    made = Coordinates(rng, (5, 4), 3)
    A, dense = made.put(device, dual=dual), made.dense()
    big = integers(rng, (8, 80), "float32")
    views = {
        "C": lambda x: x[:4, :7],
        "F": lambda x: x[:4, :40].T[:4, :4].T,
        "every other column": lambda x: x[:4, ::2],
        "one column": lambda x: x[:4, 3:4],
        "reversed": lambda x: x[3::-1, ::-1],
    }
    for take in views.values():
        x = take(big)
        same(device, A @ take(device.put(big)), dense @ x)
        y = integers(rng, (x.shape[1], 5), "float32")
        out = device.put(y.copy()).T
        A.matmat(take(device.put(big)), 2, -1, out=out)
        same(device, out, 2 * (dense @ x) - y.T)
    same(device, A @ device.put(big)[:4, 0], dense @ big[:4, 0])
    same(device, A.T @ device.put(big)[:5], dense.T @ big[:5])
    same(device, device.put(big)[:, :5] @ A, big[:, :5] @ dense)


def test_dense_operand_over_its_own_result(device, rng):
    made = Coordinates(rng, (6, 6), 3)
    x = integers(rng, (6, 9), "float32")
    whole = device.put(x.copy())
    made.put(device).matmat(whole, out=whole)
    same(device, whole, made.dense() @ x)


# --- values, formats, profile ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["csr", "csc", "coo"])
def test_update_values(device, rng, form):
    made = Coordinates(rng, (14, 9), 6)
    A = made.put(device, form)
    for _ in range(2):
        made.data = integers(rng, made.data.size, "float32")
        given = made.data[np.argsort(made.indices, kind="stable")] if form == "csc" else made.data
        A.update_values(device.put(given))
        x, u = integers(rng, 9, "float32"), integers(rng, 14, "float32")
        same(device, A @ device.put(x), made.dense() @ x)
        same(device, A.T @ device.put(u), made.dense().T @ u)


@pytest.mark.parametrize(("step", "good"), [("column_order", 0), ("gather", 0), ("gather", 1)])
def test_update_values_that_fails_changes_neither_direction(device, rng, monkeypatch, step, good):
    """The order by column, which the first call makes, or the values in it may not fit into memory."""
    made = Coordinates(rng, (14, 9), 6)
    A = made.put(device, "coo")
    real, calls = getattr(_sparse_formats, step), []

    def fail(*arguments):
        calls.append(1)
        if len(calls) > good:
            raise MemoryError
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(_sparse_formats, step, fail)
        with pytest.raises(MemoryError):
            A.update_values(device.put(2 * made.data))
    x, u = integers(rng, 9, "float32"), integers(rng, 14, "float32")
    same(device, A @ device.put(x), made.dense() @ x)
    same(device, A.T @ device.put(u), made.dense().T @ u)


@pytest.mark.parametrize("form", ["csr", "csc"])
def test_update_values_of_arrays_with_a_tail(device, rng, form):
    """Entries past the last row, which constructors take and do not read, are among those given."""
    made = Coordinates(rng, (14, 9), 6)
    made.data, made.indices = np.append(made.data, NAN), np.append(made.indices, 99)
    make, shape = (SparseMatrix.from_csr, (14, 9)) if form == "csr" else (SparseMatrix.from_csc, (9, 14))
    A = make(*map(device.put, (made.data, made.indices, made.indptr)), shape)
    A.update_values(device.put(2 * made.data))
    x = integers(rng, 9, "float32")
    made.data, made.indices = made.data[:-1], made.indices[:-1]
    same(device, A @ device.put(x) if form == "csr" else A.T @ device.put(x), 2 * made.dense() @ x)


def test_to_and_from_scipy(device, rng):
    sparse = pytest.importorskip("scipy.sparse")
    made = Coordinates(rng, (12, 8), 3, "complex64")
    matrix = sparse.csr_array((made.data, made.indices, made.indptr), shape=made.shape)
    for kind in ("csr", "csc", "coo", "lil"):
        A = SparseMatrix.from_scipy(matrix.copy().asformat(kind))
        for view, want in ((A, made.dense()), (A.T, made.dense().T), (A.H, made.dense().conj().T)):
            back = view.to_scipy()
            assert back.shape == want.shape
            np.testing.assert_array_equal(back.toarray(), want.astype(np.complex64))
    for dtype in ("float16", ml_dtypes.bfloat16):
        made = Coordinates(rng, (12, 8), 3, dtype)
        back = made.put(device).to_scipy()
        assert back.dtype == np.float32
        np.testing.assert_array_equal(back.toarray(), made.dense())


def test_from_cupy_takes_what_is_on_the_device(device, rng):
    """In the emulator that is SciPy's; outside, SciPy's is refused by name, not by the first of its arrays."""
    sparse = pytest.importorskip("scipy.sparse")
    matrix = sparse.csr_array(np.eye(3, dtype=np.float32))
    if device.is_emulated:
        same(device, SparseMatrix.from_cupy(matrix) @ np.arange(3, dtype=np.float32), np.arange(3.0))
    else:
        with pytest.raises(TypeError, match=r"from_cupy: matrix must be on the GPU, got SciPy's .*from_scipy"):
            SparseMatrix.from_cupy(matrix)


def test_profile_and_plan(device):
    lengths = np.concatenate([np.zeros(10, int), np.full(80, 2), np.full(9, 7), [30]])
    made = Coordinates(np.random.default_rng(2), (100, 40), lengths)
    A = made.put(device)
    found = A.profile
    assert (found.rows, found.cols, found.nnz, found.empty, found.max) == (100, 40, 253, 10, 30)
    assert (found.p95, found.p99) == (7, 30)
    assert found.mean == 2.53 and abs(found.cv - lengths.std() / 2.53) < 1e-12
    assert found.padding == 32 * sum(lengths[i : i + 32].max() for i in range(0, 100, 32)) / 253
    assert not found.rises and A.T.profile.rises
    columns = np.bincount(made.indices, minlength=40)
    one = made.put(device, dual=False)
    for transposed in (A.T.profile, one.T.profile):
        assert (transposed.rows, transposed.max, transposed.empty) == (40, columns.max(), (columns == 0).sum())
    assert A.plan.dual and not one.plan.dual and one.plan.rmatvec.kernel == "scatter"
    formats = 253 * 8 + 101 * 4, 253 * 8 + 41 * 4
    tiles = 16  # one tile of A; the columns need none
    assert one.plan.nbytes == formats[0] + tiles and A.plan.nbytes == sum(formats) + tiles
    assert (A.plan.matvec.kernel, A.plan.rmatvec.kernel) == ("stream", "rows")
    one.rmatvec(device.put(np.ones(100, np.float32)))
    assert one.plan.nbytes == formats[0] + tiles + 40 * 4  # the workspace of the first product
    assert A.T.plan.matvec == A.plan.rmatvec
    assert "scatter" in str(one.plan)


def test_auto_keeps_one_format_where_memory_is_short(device, rng, monkeypatch):
    made = Coordinates(rng, (12, 8), 3)
    assert made.put(device, dual="auto").plan.dual
    monkeypatch.setattr(_sparse_store, "_free_bytes", lambda device: 1000)
    assert not made.put(device, dual="auto").plan.dual


def test_tuning_keeps_the_fastest(device, rng, monkeypatch):
    made = Coordinates(rng, (40, 25), 4)
    A, x = made.put(device), integers(rng, 25, "float32")
    if device.is_emulated:
        with pytest.raises(rawops.UnsupportedError, match=r"SparseMatrix\.tune: needs a GPU, found emulated"):
            A.tune()

    def slow_but_for_rows(device, call):
        call()
        return 0.5 if isinstance(call.func.__self__, ByRows) else 2.0

    monkeypatch.setattr(_sparse_store, "_elapsed", slow_but_for_rows)
    plan = A.tune()
    for choice in (plan.matvec, plan.rmatvec):
        assert choice.kernel == "rows" and "fastest of" in choice.why and "0.5 ms" in choice.why
    same(device, A @ device.put(x), made.dense() @ x)


def test_tuning_that_fails_leaves_the_kernels_as_they_were(device, rng, monkeypatch):
    A = Coordinates(rng, (40, 25), 4).put(device)
    plan, products, timed = A.plan, dict(A._store.products), []

    def short_of_memory(device, call):
        timed.append(call)
        if len(timed) == 2:
            raise MemoryError
        return 1.0

    monkeypatch.setattr(_sparse_store, "_elapsed", short_of_memory)
    with pytest.raises(MemoryError):
        A.tune()
    assert A.plan == plan and A._store.products == products


# --- errors ----------------------------------------------------------------------------------------------------------


def test_construction_is_checked(device):
    good = {"data": np.ones(3, np.float32), "indices": np.array([0, 2, 1]), "indptr": np.array([0, 2, 3])}
    for name, bad, kind, message in [
        ("indices", np.array([0, 3, 1]), ValueError, "indices must be between 0 and 2, got 0 to 3"),
        ("indices", np.array([0, -1, 1]), ValueError, "got -1 to 1"),
        ("indices", np.array([0, 1]), ValueError, "entry for each of the 3"),
        ("indices", np.ones(3, np.float32), TypeError, "integer dtype"),
        ("indptr", np.array([0, 3]), ValueError, "one entry more than rows, 3, got 2"),
        ("indptr", np.array([0, 4, 3]), ValueError, "rise from 0 .* 0 to 3, with a fall"),
        ("indptr", np.array([1, 2, 3]), ValueError, "rise from 0"),
        ("indptr", np.array([0, 2, 4]), ValueError, "at most the 3 entries of data, got 0 to 4$"),
        ("data", np.ones((3, 1), np.float32), ValueError, "1 dimension"),
    ]:
        with pytest.raises(kind, match=message):
            SparseMatrix.from_csr(*map(device.put, (good | {name: bad}).values()), (2, 3))
    arrays = list(map(device.put, good.values()))
    for shape in (6, (2, 3, 1), (2, -1), (2.0, 3), (2, 2**31)):
        with pytest.raises((TypeError, ValueError), match=r"from_csr: shape must"):
            SparseMatrix.from_csr(*arrays, shape)
    with rawops.emulate() as emu, pytest.raises(ValueError, match="dual must be True, False or 'auto', got 'both'"):
        SparseMatrix.from_csr(*good.values(), (2, 3), dual="both")
    assert not emu.report
    with pytest.raises(ValueError, match="row must be between 0 and 1"):
        SparseMatrix.from_coo(arrays[0], device.put(np.array([0, 1, 2])), arrays[1], (2, 3))
    with pytest.raises(ValueError, match="col must be among 0 columns"):
        SparseMatrix.from_coo(arrays[0], device.put(np.array([0, 1, 1])), arrays[1], (2, 0))
    with pytest.raises(TypeError, match="sparse matrix"):
        SparseMatrix.from_scipy(np.eye(3))


def test_products_are_checked(device, rng):
    A = Coordinates(rng, (4, 6), 2).put(device)
    x = device.put(np.ones(6, np.float32))
    y = device.put(np.full(4, 7, np.float32))
    one = device.xp.lib.stride_tricks.as_strided(y[:1], (4,), (0,))
    between = device.between
    for call, kind, message in [
        (lambda: A @ y, ValueError, r"matvec: x must have shape \(6,\), got shape \(4,\)"),
        (lambda: A.rmatvec(x), ValueError, r"rmatvec: x must have shape \(4,\)"),
        (lambda: A.matvec(x, beta=1), ValueError, "out must be given where beta is not 0"),
        (lambda: A.matvec(x, out=x), ValueError, r"out must have shape \(4,\)"),
        (lambda: A.matvec(x, out=y.astype(np.float64)), TypeError, "result's dtype float32, got float64"),
        (lambda: A.matvec(x, out=one), ValueError, "out must have entries of its own"),
        (lambda: A.matvec(x, 1j, out=y), TypeError, "alpha must be real"),
        (lambda: A.matvec(x, "2", out=y), TypeError, "alpha must be a number"),
        (lambda: A.matvec(x, 10**400, out=y), ValueError, "alpha must fit a float, got a larger int"),
        (lambda: [1.0] @ A, TypeError, "x must be a GPU array, got list"),
        (lambda: A.matvec(x, device.put(np.ones(1)), out=y), ValueError, "alpha must have shape"),
        (lambda: A.matvec(x, device.put(np.ones((), np.float32)), out=y), TypeError, "dtype float64"),
        (lambda: A @ device.put(np.ones((4, 2), np.float32)), ValueError, r"matmat: x must have shape \(6, any\)"),
        (lambda: A @ between(x), ValueError, "matvec: x must lie on whole elements"),
        (lambda: A.matvec(x, out=between(y)), ValueError, "out must lie on whole elements"),
        (lambda: A.matvec(x, between(device.put(np.ones(()))), out=y), ValueError, "alpha must lie on whole"),
        (lambda: A.update_values(between(x)), ValueError, "data must lie on whole elements"),
        (lambda: A.update_values(x), ValueError, "data must have shape"),
        (lambda: A.update_values(device.put(np.ones(8))), TypeError, "float32 holds, got float64"),
    ]:
        with pytest.raises(kind, match=message):
            call()
    same(device, y, np.full(4, 7.0))


def test_host_arrays_outside_the_emulator_are_refused():
    if rawops._runtime.device.emulated() is not None:
        pytest.skip("RAWOPS_EMULATE is set")
    arrays = np.ones(1, np.float32), np.zeros(1, np.int32), np.array([0, 1])
    with pytest.raises((TypeError, ImportError), match="emulate"):
        SparseMatrix.from_csr(*arrays, (1, 1))
