"""SparseMatrix: exact products in both directions, dtypes, what is not read, views, checks."""

import sys

import ml_dtypes
import numpy as np
import pytest
from coordinates import Coordinates, integers, same
from scipy import sparse

import rawops
from rawops import SparseMatrix, _sparse_formats

NAN = float("nan")


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


# --- errors ----------------------------------------------------------------------------------------------------------


def test_construction_is_checked(device):
    good = {"data": np.ones(3, np.float32), "indices": np.array([0, 2, 1]), "indptr": np.array([0, 2, 3])}
    for name, bad, kind, message in [
        ("indices", np.array([0, 3, 1]), ValueError, "indices must be between 0 and 2, got 0 to 3"),
        ("indices", np.array([0, 2**63, 1], "uint64"), ValueError, f"between 0 and 2, got 0 to {2**63}"),
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
    with pytest.raises(TypeError, match=r"SparseMatrix: store must come from from_csr, .* or from_cupy, got ndarray"):
        SparseMatrix(np.eye(3))


@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2])
def test_factors_of_narrow_types(device, rng, kind):
    made = Coordinates(rng, (8, 12), 3)
    A, x, out = made.put(device), integers(rng, (12, 2), np.float32), integers(rng, (8, 2), np.float32)
    want = 2 * (made.dense() @ x) - out
    factors = kind(2), kind(-1)
    for matrix in (A, A.to_bsr(4)):
        same(device, matrix.matmat(device.put(x), *factors, out=device.put(out.copy())), want)
    same(device, A.matvec(device.put(x[:, 0].copy()), *factors, out=device.put(out[:, 0].copy())), want[:, 0])


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
        (lambda: A.matvec(x, True, out=y), TypeError, r"alpha must be a number, got True \(bool\)"),
        (lambda: A.matvec(x, 10**400, out=y), ValueError, "alpha must fit a float, got a larger int"),
        (lambda: [1.0] @ A, TypeError, "x must be an? (GPU )?array, got list"),
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


def test_to_scipy_without_scipy(device, monkeypatch):
    A = SparseMatrix.from_scipy(sparse.eye_array(3))
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(ImportError, match=r"SparseMatrix\.to_scipy: needs SciPy: pip install scipy"):
        A.to_scipy()
