"""The kernels of LSMR one by one, with all checks of the emulator on: exact on small integers."""

import numpy as np
import pytest
from scipy import sparse
from scipy.sparse.linalg import lsmr as scipy_lsmr

import rawops
from rawops import _lsmr_columns, _lsmr_small, _sparse_spmm, _sparse_store
from rawops._lsmr_kernels import Pair, Vectors
from rawops._lsmr_operators import product_of
from rawops._runtime import arrays
from rawops._sparse_profile import Choice
from rawops._sparse_spmm import Layout


def vectors_of(device, dtype, columns):
    array = device.put(np.zeros(1))
    return Vectors(arrays.device_of("test", array=array), dtype, columns)


def integers(rng, shape, dtype):
    x = rng.integers(-4, 5, shape)
    return (x + 1j * rng.integers(-4, 5, shape) if np.dtype(dtype).kind == "c" else x).astype(dtype)


def squares(x):
    return (x.real.astype("float64") ** 2 + x.imag.astype("float64") ** 2).sum(axis=0)


@pytest.mark.parametrize("columns", [1, 3, 8, 33])
@pytest.mark.parametrize("dtype", ["float32", "complex128"])
def test_load(device, rng, dtype, columns):
    vectors, rows = vectors_of(device, dtype, columns), 77
    wide = integers(rng, (2 * rows, 2 * columns), dtype)
    source, target = device.put(wide)[::2, 1::2], device.guarded((rows, columns), dtype)
    partials = device.guarded((vectors.blocks(rows), columns), "float64")
    vectors.load(source, target, partials)
    assert (device.get(target) == wide[::2, 1::2]).all()
    assert (device.get(partials).sum(axis=0) == squares(wide[::2, 1::2])).all()


@pytest.mark.parametrize("columns", [1, 3, 33])
@pytest.mark.parametrize("dtype", ["float64", "complex64"])
@pytest.mark.parametrize(("alpha", "beta"), [(2, 3), (2, 0), (0, 3), (0, 0)])
def test_combine(device, rng, dtype, columns, alpha, beta):
    """What a factor of 0 leaves out is NaN here."""
    vectors, rows, slices = vectors_of(device, dtype, columns), 70, 2
    shape = (rows,) if columns == 1 else (rows, columns)
    w = integers(rng, (slices, *shape), dtype) if alpha else np.full((slices, *shape), np.nan, dtype)
    y = integers(rng, shape, dtype) if beta else np.full(shape, np.nan, dtype)
    scale = np.arange(rows) % 3
    scalars = [device.put(np.full(2 * columns, value, float))[::2] for value in (alpha, beta)]
    result = device.guarded(shape, dtype)
    result[...] = device.put(y)
    partials = device.guarded((vectors.blocks(rows), columns), "float64")
    pair = Pair(*scalars, 2)
    given = device.put(scale.astype(vectors.dtype.char.lower() if dtype == "float64" else "float32"))
    vectors.combine(pair, device.put(w), result, partials, slices, given)
    factor = scale.reshape(-1, *(1,) * (len(shape) - 1))
    expected = (alpha * factor * w.sum(axis=0) if alpha else 0) + (beta * y if beta else np.zeros_like(y))
    assert (device.get(result) == expected).all()
    assert (device.get(partials).sum(axis=0) == squares(expected)).all()


def test_combine_leaves_stopped_columns_alone(device, rng):
    vectors, y = vectors_of(device, "float32", 2), np.full((9, 2), np.nan, "float32")
    y[:, 1] = 1
    alpha, beta = device.put(np.array([0.0, 2])), device.put(np.array([1.0, 3]))
    result, w = device.put(y), device.put(np.ones((9, 2), "float32"))
    vectors.combine(Pair(alpha, beta, 1), w, result)
    assert np.isnan(device.get(result)[:, 0]).all()
    assert (device.get(result)[:, 1] == 5).all()


@pytest.mark.parametrize("count", [1, 63, 300])
def test_shorten(device, rng, count):
    vectors = vectors_of(device, "float32", 3)
    partials = integers(rng, (count, 3), "float64")
    for rows in (1, 64):
        shorter = device.guarded((rows, 3), "float64")
        vectors.shorten(device.put(partials), shorter)
        assert (device.get(shorter).sum(axis=0) == partials.sum(axis=0)).all()


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize(
    ("matrix", "dtype"), [("float32", "float32"), ("float32", "complex128"), ("complex64", "complex64")]
)
@pytest.mark.parametrize("shape", [(40, 9), (3, 700)])
def test_gemv(device, rng, matrix, dtype, shape, columns):
    """Both directions, both orders in memory, over several slices."""
    a = integers(rng, shape, matrix)
    one = device.put(np.ones(columns))
    for stored in (device.put(a), device.put(np.ascontiguousarray(a.T)).T):
        vectors = vectors_of(device, dtype, columns)
        product = product_of("test", stored).bind(vectors)
        for transposed, op in ((False, a), (True, a.conj().T)):
            x = integers(rng, (op.shape[1], columns), dtype)
            y = device.guarded((op.shape[0], columns), dtype)
            partials = vectors.partials(product.num_partials(transposed))
            product.apply(transposed, device.put(x), y, Pair(one, one * 0, 1), partials)
            expected = op.astype("complex128") @ x
            assert (device.get(y) == expected).all()
            assert (device.get(partials).sum(axis=0) == squares(expected)).all()


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("columns", [3, 4, 8, 32, 36])
@pytest.mark.parametrize(("matrix", "dtype"), [("float32", "float32"), ("float32", "float64"), ("complex64",) * 2])
def test_sparse_times_columns(device, rng, monkeypatch, matrix, dtype, columns, is_fused):
    """Rows long and short, a column that has stopped, one that starts anew, x that is NaN where A has no entry."""
    monkeypatch.setattr(_lsmr_columns, "_ROWS_A_PARTIAL", 0 if is_fused else 100)
    a = np.where(rng.random((30, 60)) < 0.2, integers(rng, (30, 60), matrix), 0)
    a[:, 7], a[5] = 0, 0
    a = sparse.csr_array(a)
    product = product_of("test", rawops.SparseMatrix.from_scipy(a))
    vectors = vectors_of(device, dtype, columns)
    bound = product.bind(vectors)
    alpha, beta = np.full((columns, 2), 2.0), np.full((columns, 2), 3.0)
    alpha[0], beta[0], beta[1] = 0, 1, 0
    for transposed, op in ((False, a.toarray()), (True, a.conj().T.toarray())):
        x, y = integers(rng, (op.shape[1], columns), dtype), integers(rng, (op.shape[0], columns), dtype)
        expected = alpha[:, 0] * (op.astype("complex128") @ x) + beta[:, 0] * y
        if not transposed:
            x[7] = np.nan
        y[:, 0], y[:, 1] = np.nan, np.nan
        result = device.guarded(y.shape, dtype)
        result[...] = device.put(y)
        assert (transposed in bound._ops) != is_fused
        partials = vectors.partials(bound.num_partials(transposed))
        pair = Pair(device.put(alpha)[:, 0], device.put(beta)[:, 0], 2)
        bound.apply(transposed, device.put(x), result, pair, partials)
        assert (device.get(result)[:, 1:] == expected[:, 1:]).all()
        assert np.isnan(device.get(result)[:, 0]).all()
        assert (device.get(partials).sum(axis=0)[1:] == squares(expected)[1:]).all()


@pytest.mark.parametrize(
    ("dtype", "layout"), [("float32", (16, 2, 1)), ("float64", (16, 4, 2)), ("complex128", (16, 8, 1))]
)
def test_long_rows_times_columns(device, rng, monkeypatch, dtype, layout):
    """Rows of a team, of a warp, of a block and of several, each with its squares, twice."""
    monkeypatch.setattr(_lsmr_columns, "_ROWS_A_PARTIAL", 0)
    monkeypatch.setattr(_sparse_spmm, "_SEGMENT", 128)
    monkeypatch.setattr(_sparse_spmm, "layout_for", lambda *found: Layout(*layout, 32, 64, 4))
    a = np.zeros((60, 1024))
    for row, length in enumerate([20, 0, 50, 70, 128, 200, 900] + [3] * 53):
        a[row, rng.choice(1024, length, replace=False)] = rng.integers(1, 5, length)
    product = product_of("test", rawops.SparseMatrix.from_scipy(sparse.csr_array(a.astype(dtype))))
    vectors = vectors_of(device, dtype, 8)
    bound = product.bind(vectors)
    alpha, beta = np.arange(8.0), np.full(8, 2.0)
    alpha[3], beta[3] = 0, 1
    x, y = integers(rng, (1024, 8), dtype), integers(rng, (60, 8), dtype)
    partials = vectors.partials(bound.num_partials(False))
    x, pair = device.put(x), Pair(device.put(alpha), device.put(beta), 1)
    for _ in range(2):
        result = device.put(y.copy())
        bound.apply(False, x, result, pair, partials)
        expected = alpha * (a @ device.get(x)) + beta * y
        assert (device.get(result) == expected).all()
        assert (device.get(partials).sum(axis=0) == squares(expected)).all()
    pair = Pair(device.put(alpha * 0), device.put(beta * 0 + 1), 1)
    partials.fill(7)
    bound.apply(False, x, result, pair, partials)
    assert (device.get(result) == expected).all() and (device.get(partials) == 7).all()


@pytest.mark.parametrize("dtype", ["float32", "complex128"])
@pytest.mark.parametrize("kind", ["dense", "sparse in one block", "sparse"])
def test_whole_solve_passes_the_checks(device, rng, monkeypatch, dtype, kind):
    a, b = integers(rng, (20, 6), dtype), integers(rng, 20, dtype)
    matrix = device.put(a) if kind == "dense" else rawops.SparseMatrix.from_scipy(sparse.csr_array(a))
    if kind == "sparse":
        monkeypatch.setattr(_lsmr_small, "_MOST_BYTES", 0)
    ours = rawops.lsmr(matrix, device.put(b), damp=0.5, maxiter=8)
    stacked, zeros = np.vstack([a, 0.5 * np.eye(6)]), np.zeros(6)
    expected = np.linalg.lstsq(stacked.astype("complex128"), np.concatenate([b, zeros]))[0]
    np.testing.assert_allclose(device.get(ours.x), expected, atol=1e-4)


def test_one_block_whose_matrix_does_not_fit_into_shared_memory(device, rng):
    a, b = integers(rng, (150, 50), "complex128"), integers(rng, 150, "complex128")
    solver = rawops.LSMR(rawops.SparseMatrix.from_scipy(sparse.csr_array(a)), maxiter=3)
    ours = solver.solve(device.put(b))
    (engine,) = solver._engines.values()
    assert not engine._small._holds
    np.testing.assert_allclose(device.get(ours.x), scipy_lsmr(a, b, maxiter=3)[0], rtol=1e-8)


@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_sparse_product_that_has_nothing_to_do(device, rng, monkeypatch, dtype, in_blocks):
    """alpha = 0, beta = 1: y is not even read, so that a solver that has stopped costs launches alone."""
    if in_blocks:  # of columns, whose sums a second launch adds up
        monkeypatch.setattr(_sparse_store, "choose", lambda *found: Choice("packed", 1, 64, 30))
    wide, tall = sparse.random_array((40, 3000), density=0.2, rng=rng), sparse.random_array((3000, 40), rng=rng)
    for a in (wide, tall):
        matrix = rawops.SparseMatrix.from_scipy(sparse.csr_array(a).astype(dtype))
        for transposed in (False, True):
            x, y = (device.put(np.full(size, np.nan, dtype)) for size in a.shape[:: 1 if transposed else -1])
            partials = device.put(np.full(matrix._num_partials(transposed), 7.0))
            matrix._apply(transposed, x, y, *(device.put(np.array(value)) for value in (0.0, 1.0)), partials)
            assert (device.get(partials) == 7).all()
            assert np.isnan(device.get(y)).all()
