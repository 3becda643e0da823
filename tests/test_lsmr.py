"""LSMR against SciPy's, and where SciPy has no answer against dense least squares."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import sparse
from scipy.sparse.linalg import LinearOperator as SciPyOperator
from scipy.sparse.linalg import lsmr as scipy_lsmr

import rawops
from rawops import _lsmr_packed, _lsmr_small
from rawops._lsmr_engine import Engine, Settings, _Reader
from rawops._lsmr_status import Status
from rawops.testing import has_gpu

NORMS = ("normr", "normar", "norma", "conda", "normx")
SHAPES = {"over": (40, 12), "under": (12, 40), "square": (16, 16), "one column": (9, 1), "one row": (1, 7)}


@pytest.fixture
def device(device):
    """Without the emulator's checks, which double the time of a solve; test_lsmr_kernels.py has them on."""
    if device.is_emulated:
        with rawops.emulate(check=False):
            yield device
    else:
        yield device


def system(rng, m, n, values=(1.0, 2.0, 4.0), rank=None, dtype="float64"):
    """A matrix with these singular values, in turn, which LSMR is done with after as many iterations, and some b."""

    def normal(*shape):
        x = rng.standard_normal(shape)
        return x + 1j * rng.standard_normal(shape) if np.dtype(dtype).kind == "c" else x

    rank = min(m, n) if rank is None else rank
    u, v = (np.linalg.qr(normal(size, rank))[0] for size in (m, n))
    a = (u * np.resize(values, rank)) @ v.conj().T
    return a.astype(dtype), normal(m).astype(dtype)


def assert_same(device, ours, expected, rtol=1e-7):
    """Everything that SciPy returns, with norms that are small by cancellation compared with those they cancel from."""
    x, istop, itn, *norms = expected
    assert (ours.istop, ours.itn) == (istop, itn)
    scale = {"normr": norms[0] + norms[2] * norms[4], "normar": norms[2] * (norms[0] + norms[2] * norms[4])}
    for name, value in zip(NORMS, norms, strict=True):
        np.testing.assert_allclose(getattr(ours, name), value, rtol=rtol, atol=rtol * scale.get(name, 0), err_msg=name)
    np.testing.assert_allclose(device.get(ours.x), x, rtol=rtol, atol=rtol * np.linalg.norm(x))


def put_all(device, **arguments):
    return {name: device.put(x) if isinstance(x, np.ndarray) else x for name, x in arguments.items()}


@pytest.mark.parametrize(
    ("shape", "damp", "starts"),
    [
        *(("over", damp, starts) for damp in (0.0, 0.7) for starts in (False, True)),
        *((shape, *other) for shape in SHAPES if shape != "over" for other in ((0.0, False), (0.7, True))),
    ],
)
def test_as_scipy(device, rng, shape, damp, starts):
    a, b = system(rng, *SHAPES[shape], (1.0, 2.0))
    options = {"damp": damp, "x0": rng.standard_normal(a.shape[1]) if starts else None}
    ours = rawops.lsmr(device.put(a), device.put(b), **put_all(device, **options))
    assert_same(device, ours, scipy_lsmr(a, b, **options))
    assert device.get(ours.x).shape == (a.shape[1],)


@pytest.mark.parametrize(
    "options",
    [
        {"conlim": 2.0},
        {"conlim": 0},
        {"maxiter": 2},
        {"maxiter": 0},
        {"maxiter": -1},
        {"atol": 1e-2, "btol": 1e-3},
        {"atol": 0.3, "btol": 0},
    ],
    ids=str,
)
def test_stopping_as_scipy(device, rng, options):
    a, b = system(rng, 30, 10, np.linspace(1, 9, 10))
    options = {"maxiter": 6, **options}
    ours = rawops.lsmr(device.put(a), device.put(b), **options)
    assert_same(device, ours, scipy_lsmr(a, b, **options), 1e-6)


def test_consistent_system_stops_with_1(device, rng):
    a, _ = system(rng, 30, 10)
    x = rng.standard_normal(10)
    ours = rawops.lsmr(device.put(a), device.put(a @ x))
    assert ours.istop == 1
    np.testing.assert_allclose(device.get(ours.x), x, rtol=1e-9)


def test_rank_deficient(device, rng):
    """The solution of least norm, as from a pseudo-inverse."""
    a, b = system(rng, 30, 12, rank=5)
    ours = rawops.lsmr(device.put(a), device.put(b), atol=1e-10, btol=1e-10)
    assert ours.istop == 2
    np.testing.assert_allclose(device.get(ours.x), np.linalg.pinv(a) @ b, atol=1e-9)


def test_unpacks_as_scipy(device, rng):
    a, b = system(rng, 8, 3)
    result = rawops.lsmr(device.put(a), device.put(b))
    x, istop, itn, normr, normar, norma, conda, normx = result
    assert x is result.x
    assert [istop, itn, normr, normar, norma, conda, normx] == [getattr(result, k) for k in result._fields[1:]]
    assert type(istop) is type(itn) is int
    assert isinstance(result, rawops.LSMRResult)
    assert result.history is None


# --- the ends of the range ------------------------------------------------------------------------------------------


def test_b_is_zero(device):
    ours = rawops.lsmr(device.put(np.ones((10, 1))), device.put(np.zeros(10)), x0=device.put(np.ones(1)))
    assert device.get(ours.x).tolist() == [0.0]
    assert (ours.istop, ours.itn) == (0, 0)
    ours = rawops.lsmr(device.put(np.ones((10, 3))), device.put(np.zeros(10)))
    assert device.get(ours.x).tolist() == [0.0, 0.0, 0.0]
    assert (ours.istop, ours.itn, *ours[3:]) == (0, 0, 0, 0, 0, 1, 0)


def test_x0_is_the_solution(device):
    ours = rawops.lsmr(device.put(np.eye(10)), device.put(np.ones(10)), x0=device.put(np.ones(10)))
    assert device.get(ours.x).tolist() == [1.0] * 10
    assert (ours.istop, ours.itn) == (0, 0)


def test_one_step(device):
    ours = rawops.lsmr(device.put(np.eye(10)), device.put(np.ones(10)))
    np.testing.assert_allclose(device.get(ours.x), np.ones(10))
    assert ours.itn == 1
    assert np.isfinite(ours[3:]).all()


def test_b_is_orthogonal_to_all_columns(device):
    a = np.vstack([np.eye(3), np.zeros((2, 3))])
    ours = rawops.lsmr(device.put(a), device.put(np.array([0.0, 0, 0, 3, 4])))
    assert (ours.istop, ours.itn, ours.normr, ours.normar) == (0, 0, 5, 0)
    assert not device.get(ours.x).any()


@pytest.mark.parametrize("shape", [(0, 4), (5, 0), (0, 0)])
def test_empty(device, shape):
    ours = rawops.lsmr(device.put(np.ones(shape)), device.put(np.full(shape[0], 2.0)), x0=device.put(np.ones(shape[1])))
    assert (ours.istop, ours.itn) == (0, 0)
    assert ours.normr == np.sqrt(4 * shape[0])
    assert device.get(ours.x).tolist() == [1.0] * shape[1]


@pytest.mark.parametrize("shape", [(6,), (6, 1)])
def test_inputs_are_kept(device, shape):
    a, b, x0 = np.diag([1.0, 2, 3, 1, 2, 3]), np.arange(6.0) + 1, np.full(shape, 10.0)
    arrays = [device.put(x.copy()) for x in (a, b, x0)]
    if device.is_emulated:
        arrays[2].flags.writeable = False
    ours = rawops.lsmr(arrays[0], arrays[1], x0=arrays[2])
    for before, after in zip((a, b, x0), arrays, strict=True):
        assert (device.get(after) == before).all()
    np.testing.assert_allclose(device.get(ours.x), b / np.diag(a), rtol=1e-6)


def test_damping_acts_on_x_minus_x0(device):
    a, b = device.put(np.diag([1.0, 2, 3])), device.put(np.array([1.0, 2, 3]))
    np.testing.assert_allclose(device.get(rawops.lsmr(a, b, 1).x), [0.5, 0.8, 0.9], rtol=1e-6)
    ours = rawops.lsmr(a, b, damp=1, x0=device.put(np.full(3, 10)))
    np.testing.assert_allclose(device.get(ours.x), [5.5, 2.8, 1.9], rtol=1e-6)


def test_maxiter_0_reports_the_residual(device):
    a, b = device.put(np.diag([1.0, 2, 3])), device.put(np.array([1.0, 2, 3]))
    ours = rawops.lsmr(a, b, maxiter=0)
    assert ours.normr == pytest.approx(14**0.5)
    ours = rawops.lsmr(a, b, maxiter=0, x0=device.put(np.array([1.0, 1, 0])))
    assert device.get(ours.x).tolist() == [1, 1, 0]
    assert ours.normr == pytest.approx(3)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["A", "b", "x0"])
def test_what_is_not_finite_is_never_solved(device, rng, bad, where):
    a, b = system(rng, 8, 4)
    x0 = np.zeros(4)
    {"A": a[2:3, 1], "b": b[2:3], "x0": x0[2:3]}[where][...] = bad
    ours = rawops.lsmr(device.put(a), device.put(b), x0=device.put(x0) if where == "x0" else None, maxiter=2)
    assert (ours.istop, ours.itn) == (7, 2)
    assert not ours.status.converged


@pytest.mark.parametrize("scale", [1e-12, 1e30])
def test_float32_far_from_1(device, rng, scale):
    """Vectors are not normalised: their size must not cost digits."""
    a, b = system(rng, 20, 6, dtype="float32")
    x = rawops.lsmr(device.put(a * np.float32(scale)), device.put(b), conlim=0).x
    expected = np.linalg.lstsq(a.astype(float), b.astype(float))[0] / scale
    np.testing.assert_allclose(device.get(x), expected, rtol=1e-4, atol=1e-5 * np.linalg.norm(expected))


# --- dtypes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "b_dtype", "result"),
    [
        ("float32", "float32", "float32"),
        ("float32", "float64", "float64"),
        ("float64", "float32", "float64"),
        ("complex64", "complex64", "complex64"),
        ("complex128", "complex128", "complex128"),
        ("float32", "complex64", "complex64"),
        ("complex64", "float32", "complex64"),
        ("int32", "int64", "float64"),
        ("int64", "float32", "float64"),
        ("float32", "int64", "float32"),
        ("float16", "float16", "float32"),
    ],
)
def test_dtypes(device, rng, dtype, b_dtype, result):
    kind = "complex128" if "complex" in dtype + b_dtype else "float64"
    a, b = system(rng, 12, 4, dtype=kind)
    if "int" in dtype:
        a, b = np.rint(3 * a), np.rint(3 * b)
    a, b = (x.astype(t) if "complex" in t else x.real.astype(t) for x, t in ((a, dtype), (b, b_dtype)))
    ours = rawops.lsmr(device.put(a), device.put(b), atol=1e-6, btol=1e-6, maxiter=8)
    assert ours.x.dtype == result
    expected = np.linalg.lstsq(a.astype(kind), b.astype(kind))[0]
    tolerance = 1e-3 if result in ("float32", "complex64") else 1e-5
    np.testing.assert_allclose(device.get(ours.x), expected, atol=tolerance * np.linalg.norm(expected))


def test_complex_uses_the_adjoint(device):
    a, b = np.array([[1, 1j], [0, 2]]), np.array([1 + 1j, 2])
    np.testing.assert_allclose(device.get(rawops.lsmr(device.put(a), device.put(b)).x), [1, 1], rtol=1e-10)


def test_float64_vectors_with_a_float32_matrix(device, rng):
    a, b = system(rng, 20, 5, (1, 3, 9, 27, 81), dtype="float32")
    ours = rawops.lsmr(device.put(a), device.put(b), vectors="float64", atol=1e-12, btol=1e-12, maxiter=9)
    assert ours.x.dtype == np.float64
    expected = np.linalg.lstsq(a.astype(float), b.astype(float))[0]
    np.testing.assert_allclose(device.get(ours.x), expected, rtol=1e-10)


# --- sparse matrices ------------------------------------------------------------------------------------------------


def scattered(rng, m, n, dtype="float64"):
    """A sparse matrix that LSMR is done with in a few iterations, in SciPy's and in our form."""
    a = sparse.random_array((m, n), density=0.05, rng=rng, dtype=np.float64)
    a = (a + sparse.diags_array(np.full(min(m, n), 3.0), shape=(m, n))).tocsr()
    return (a + 1j * a.copy().multiply(0.3)).tocsr() if np.dtype(dtype).kind == "c" else a


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize("shape", [(90, 30), (30, 90)])
def test_sparse(device, rng, shape, dtype):
    a, b = scattered(rng, *shape, dtype), rng.standard_normal(shape[0]).astype(dtype)
    expected = scipy_lsmr(a, b, damp=0.1, maxiter=4)
    assert_same(device, rawops.lsmr(rawops.SparseMatrix.from_scipy(a), device.put(b), 0.1, maxiter=4), expected)


def test_views_of_a_sparse_matrix(device, rng):
    a = scattered(rng, 40, 20, "complex128")
    matrix, b = rawops.SparseMatrix.from_scipy(a), rng.standard_normal(20) + 0j
    for view, expected in ((matrix.T, a.T), (matrix.H, a.conj().T)):
        assert_same(device, rawops.lsmr(view, device.put(b), maxiter=3), scipy_lsmr(expected, b, maxiter=3))


@pytest.mark.parametrize(
    ("most", "dtype", "vectors", "preconditioner"),
    [(16, "float64", None, None), (1 << 16, "float32", "float64", None), (24, "float64", None, "column")],
)
def test_packed(device, rng, monkeypatch, most, dtype, vectors, preconditioner):
    """The same x, from one block of columns and from several, with rows of all lengths."""
    monkeypatch.setattr(_lsmr_packed, "_MOST_ENTRIES", most)
    monkeypatch.setattr(_lsmr_packed, "_FEWEST", 0)
    a = np.where(rng.random((40, 24)) < rng.random((40, 1)), rng.standard_normal((40, 24)), 0).astype(dtype)
    a[7], a[39], a[:, 5] = 0, 0, 0
    b = rng.standard_normal(40)
    matrix = rawops.SparseMatrix.from_scipy(sparse.csr_array(a).T).T
    options = {"maxiter": 2, "damp": 0.1, "preconditioner": preconditioner}
    solver = rawops.LSMR(matrix, pack=True, vectors=vectors, **options)
    b, x0 = device.put(b), device.put(np.ones(24))
    expected = rawops.LSMR(matrix, vectors="float64", **options).solve(b, x0)
    ours = solver.solve(b, x0)
    assert_same(device, ours, [device.get(expected.x), *expected[1:]])
    assert ours.status.normar == pytest.approx(expected.status.normar, rel=1e-6)
    if preconditioner:
        many = solver.solve_many(b[:, None], x0[:, None])  # goes without
        np.testing.assert_allclose(device.get(many.x)[:, 0], device.get(ours.x), rtol=1e-7)


def test_packed_mistakes(device):
    with pytest.raises(ValueError, match=r"^LSMR: pack must be False but for sparse matrices, got True"):
        rawops.LSMR(device.put(np.eye(3)), pack=True)
    for dtype, dual, got in ((float, False, "float64 in one format"), (complex, True, "complex128 in both formats")):
        matrix = rawops.SparseMatrix.from_scipy(sparse.eye_array(3, dtype=dtype).tocsr(), dual=dual)
        with pytest.raises(ValueError, match=f"pack must be False but for .*, got {got}"):
            rawops.LSMR(matrix, pack=True)
    matrix = rawops.SparseMatrix.from_scipy(sparse.eye_array(3).tocsr())
    with pytest.raises(ValueError, match=r"pack must be False below 4 entries a row and block, got 1\.0 in A"):
        rawops.LSMR(matrix, pack=True).solve(device.put(np.ones(3)))


def test_sparse_matrix_of_the_library_at_hand(device, rng):
    a, b = scattered(rng, 40, 20), rng.standard_normal(40)
    if device.is_emulated:
        theirs = a
    else:
        import cupyx.scipy.sparse

        theirs = cupyx.scipy.sparse.csr_matrix(a)
        with pytest.raises(TypeError, match=r"A must be on the GPU, got SciPy's .*SparseMatrix\.from_scipy"):
            rawops.lsmr(a, device.put(b))
    assert_same(device, rawops.lsmr(theirs, device.put(b), maxiter=3), scipy_lsmr(a, b, maxiter=3))


def test_sparse_b(device, rng):
    a, dense = system(rng, 20, 5)
    dense[rng.random(20) < 0.7] = 0
    b = sparse.csc_array(dense[:, None])
    if not device.is_emulated:
        import cupyx.scipy.sparse

        b = cupyx.scipy.sparse.csc_matrix(b)
    assert_same(device, rawops.lsmr(device.put(a), b), scipy_lsmr(a, dense))


# --- operators ------------------------------------------------------------------------------------------------------


def strided(device, a):
    """Views of one matrix that lie in memory in every way."""
    m, n = a.shape
    wide = np.full((2 * m, 3 * n), np.nan, a.dtype)
    wide[::2, 1::3] = a
    yield device.put(wide)[::2, 1::3]
    yield device.put(np.ascontiguousarray(a.T)).T
    yield device.put(np.ascontiguousarray(a[::-1, ::-1]))[::-1, ::-1]


def test_dense_of_any_strides(device, rng):
    a, b = system(rng, 20, 7, (1.0, 2.0))
    expected = scipy_lsmr(a, b)
    padded = np.full((20, 3), np.nan)
    padded[:, 1] = b
    b_strided = device.put(padded)[:, 1]
    for view in strided(device, a):
        assert_same(device, rawops.lsmr(view, b_strided), expected)
        assert_same(device, rawops.lsmr(view, device.put(padded)[:, 1:2]), expected)


@pytest.mark.parametrize("shape", [(3, 1500), (1500, 3), (300, 40)])
def test_dense_in_several_slices_and_blocks(device, rng, shape):
    a, b = system(rng, *shape, (1.0, 2.0))
    for matrix in (a, np.asfortranarray(a)):
        view = device.put(np.ascontiguousarray(matrix.T)).T if matrix is not a else device.put(a)
        assert_same(device, rawops.lsmr(view, device.put(b)), scipy_lsmr(a, b))


def counted(a):
    """An operator that says how often it was called."""
    calls = {"matvec": 0, "rmatvec": 0}

    def matvec(x):
        calls["matvec"] += 1
        return a @ x

    def rmatvec(u):
        calls["rmatvec"] += 1
        return a.conj().T @ u

    return rawops.LinearOperator(a.shape, matvec, rmatvec, a.dtype), calls


def test_operator_of_python_functions(device, rng):
    a, b = system(rng, 20, 6, dtype="complex128")
    operator, calls = counted(device.put(a))
    ours = rawops.lsmr(operator, device.put(b))
    assert_same(device, ours, scipy_lsmr(a, b))
    assert calls["matvec"] <= ours.itn + 3  # two ahead, one for the true residual
    assert calls["rmatvec"] <= ours.itn + 4


def test_linear_operator_itself(device):
    a = device.put(np.arange(6.0).reshape(2, 3))
    operator, _ = counted(a)
    x, out = device.put(np.ones(3)), device.put(np.array([10.0, np.nan]))
    assert device.get(operator.matvec(x)).tolist() == [3, 12]
    assert operator.matvec(x, 2.0, 0.0, out) is out
    assert device.get(out).tolist() == [6, 24]
    assert device.get(operator.rmatvec(device.put(np.ones(2)), 1.0, 1.0, device.put(np.ones(3)))).tolist() == [4, 6, 8]


@pytest.mark.skipif(has_gpu(), reason="SciPy's operators multiply NumPy arrays")
def test_operator_of_scipy(device, rng):
    a, b = system(rng, 20, 6)
    operator = SciPyOperator(a.shape, matvec=lambda x: a @ x, rmatvec=lambda u: a.T @ u, dtype=a.dtype)
    assert_same(device, rawops.lsmr(operator, b), scipy_lsmr(a, b))


def test_operator_that_returns_nonsense_raises(device):
    operator = rawops.LinearOperator((3, 2), lambda x: x, lambda u: u[:2], "float64")
    with pytest.raises(ValueError, match=r"A must return an array of shape \(3,\) from matvec, got \(2,\)"):
        rawops.lsmr(operator, device.put(np.ones(3)))


# --- the loop -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [2, 5])
@pytest.mark.parametrize("maxiter", [3, 50])
def test_iterations_past_the_stop_change_nothing(device, rng, monkeypatch, chunk, maxiter):
    """The same bits with a look at the state after every iteration and after several."""
    a, b = system(rng, 20, 6, (1, 2, 3, 4))
    results = []
    for size in (1, chunk):
        monkeypatch.setattr(Engine, "_chunk", lambda self, size=size: size)
        results.append(rawops.lsmr(device.put(a), device.put(b), maxiter=maxiter, history=True))
    first, second = results
    assert first[1:] == second[1:]
    assert (device.get(first.x) == device.get(second.x)).all()
    for name in NORMS:
        assert (first.history[name] == second.history[name]).all()


def test_history_and_callback(device, rng):
    a, b = system(rng, 20, 6, (1, 2, 3, 4))
    seen = []
    ours = rawops.lsmr(device.put(a), device.put(b), history=True, callback=seen.append)
    assert [iteration.itn for iteration in seen] == list(range(1, ours.itn + 1))
    for name in NORMS:
        assert ours.history[name].tolist() == [getattr(iteration, name) for iteration in seen]
        assert ours.history[name][-1] == getattr(ours, name)
    for itn in (1, 2):
        _, _, _, *norms = scipy_lsmr(a, b, maxiter=itn)
        np.testing.assert_allclose([ours.history[name][itn - 1] for name in NORMS], norms, rtol=1e-8)


def test_solver_is_used_again(device, rng):
    a, b = system(rng, 20, 6)
    solver = rawops.LSMR(device.put(a), damp=0.3)
    first = solver.solve(device.put(b))
    kept = device.get(first.x).copy()
    other = solver.solve(device.put(b + 1), device.put(np.ones(6)))
    assert_same(device, other, scipy_lsmr(a, b + 1, damp=0.3, x0=np.ones(6)))
    assert (device.get(first.x) == kept).all()
    again = solver.solve(device.put(b))
    assert again[1:] == first[1:]
    assert (device.get(again.x) == kept).all()


def test_show(device, rng, capsys):
    a, b = system(rng, 20, 6)
    rawops.lsmr(device.put(a), device.put(b), show=True)
    assert "istop 2: the least-squares solution to the tolerance atol" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["dense", "sparse", "sparse in one block"])
def test_iterations_neither_wait_nor_allocate(device, rng, monkeypatch, kind):
    """Ten times the iterations: no allocation more, a look at the state a chunk, and all of it in a graph."""
    import cupy

    class Count(cupy.cuda.MemoryHook):
        name, allocations = "count", 0

        def malloc_preprocess(self, **keywords):
            self.allocations += 1

    if kind == "sparse":
        monkeypatch.setattr(_lsmr_small, "_MOST_BYTES", 0)
    a, b = system(rng, 200, 80, np.linspace(1, 9, 80))
    a = device.put(a) if kind == "dense" else rawops.SparseMatrix.from_scipy(sparse.csr_array(a))
    b, waits, allocations = device.put(b), [], []
    wait = _Reader.wait
    monkeypatch.setattr(_Reader, "wait", lambda self, ticket: waits.append(1) or wait(self, ticket))
    for maxiter in (100, 1000):
        solver = rawops.LSMR(a, maxiter=maxiter, atol=0, btol=0, conlim=0, damp=1e-300)
        monkeypatch.setattr(solver, "_settings", solver._settings._replace(atol=-1.0, btol=-1.0, ctol=-1.0))
        solver.solve(b)
        solver.solve(b)
        waits.clear()
        with Count() as count:
            ours = solver.solve(b)
        allocations.append(count.allocations)
        engine = next(iter(solver._engines.values()))
        assert len(waits) <= ours.itn / engine.chunk + 3
        assert kind == "sparse in one block" or engine._graph is not None
    assert allocations[0] == allocations[1] <= 3


# --- several right-hand sides ---------------------------------------------------------------------------------------


def right_hand_sides(rng, a, columns):
    """Columns that stop at different iterations, two of them at once."""
    b = rng.standard_normal((a.shape[0], columns))
    b[:, 0] = a @ np.ones(a.shape[1])
    b[:, 1] = 0
    b[:, 2] = np.linalg.svd(a)[0][:, 0]
    return b


@pytest.mark.parametrize("kind", ["dense", "sparse", "operator"])
def test_solve_many(device, rng, kind):
    a, _ = system(rng, 24, 8, (1, 2, 3, 4))
    b, x0 = right_hand_sides(rng, a, 5), rng.standard_normal((8, 5))
    matrix = {
        "dense": lambda: device.put(a),
        "sparse": lambda: rawops.SparseMatrix.from_scipy(sparse.csr_array(a)),
        "operator": lambda: counted(device.put(a))[0],
    }[kind]()
    for options in ({"X0": device.put(x0)}, {}):
        ours = rawops.LSMR(matrix, damp=0.01).solve_many(device.put(b), history=True, **options)
        for j in range(5):
            expected = scipy_lsmr(a, b[:, j], damp=0.01, x0=x0[:, j] if options else None)
            column = [device.get(ours.x)[:, j], *(value[j] for value in ours[1:])]
            assert_same(device, rawops.LSMRResult(*column), expected)
            seen = ours.history["normr"][:, j]
            assert np.isnan(seen[expected[2] :]).all()
            assert (seen[: expected[2]][-1:] == ours.normr[j]).all()
            assert ours.status[j].converged


def test_solve_many_complex_and_one_column(device, rng):
    a, _ = system(rng, 12, 5, dtype="complex128")
    b = rng.standard_normal((12, 3)) + 1j
    for columns in (b, b[:, :1]):
        ours = rawops.LSMR(device.put(a)).solve_many(device.put(np.asfortranarray(columns)))
        np.testing.assert_allclose(device.get(ours.x), np.linalg.lstsq(a, columns)[0], rtol=1e-8)
        assert ours.x.shape == (5, columns.shape[1])


def test_solve_many_of_no_columns(device):
    solver = rawops.LSMR(device.put(np.ones((4, 3), np.float32)))
    ours = solver.solve_many(device.put(np.ones((4, 0), np.float32)), history=True)
    assert (ours.x.shape, str(ours.x.dtype)) == ((3, 0), "float32")
    assert [value.shape for value in ours[1:]] == [(0,)] * 7
    assert (ours.status, ours.history["normr"].shape) == ([], (0, 0))


def test_solve_many_mistakes(device):
    solver = rawops.LSMR(device.put(np.ones((4, 3))))
    for options, message in (
        ({"B": np.ones(4)}, r"B must have shape \(4, any\), got shape \(4,\)"),
        ({"B": np.ones((3, 2))}, r"B must have shape \(4, 2\), got shape \(3, 2\)"),
        ({"B": np.ones((4, 2)), "X0": np.ones((3, 3))}, r"X0 must have shape \(3, 2\), got shape \(3, 3\)"),
    ):
        with pytest.raises(ValueError, match=f"^LSMR: {message}"):
            solver.solve_many(**put_all(device, **options))
    solver = rawops.LSMR(device.put(np.ones((4, 3))), reorthogonalize=2)
    with pytest.raises(ValueError, match="reorthogonalize must be None for solve_many, got 2"):
        solver.solve_many(device.put(np.ones((4, 2))))


# --- preconditioners and reorthogonalisation ------------------------------------------------------------------------


class Diagonal:
    """N = diag(d), with a phase that tells solve from its adjoint."""

    def __init__(self, device, d) -> None:
        self.d = device.put(d)

    def solve(self, y):
        return y / self.d

    def rsolve(self, z):
        return z / self.d.conj()


@pytest.mark.parametrize("kind", ["dense", "sparse", "sparse view", "one format"])
def test_column_scaling(device, rng, kind):
    """Columns of orthogonal matrices times anything are orthonormal again, which takes one step."""
    q, b = system(rng, 20, 6, (1.0,))
    a = q * np.array([1e-3, 1, 1e3, 1, 7, 0])
    scipy_matrix = sparse.csr_array(a)
    matrix = {
        "dense": lambda: device.put(a),
        "sparse": lambda: rawops.SparseMatrix.from_scipy(scipy_matrix),
        "sparse view": lambda: rawops.SparseMatrix.from_scipy(scipy_matrix.T).T,
        "one format": lambda: rawops.SparseMatrix.from_scipy(scipy_matrix, dual=False),
    }[kind]()
    x0 = rng.standard_normal(6) * [1, 1, 1e-3, 1, 1, 0]
    for start in (None, device.put(x0)):
        ours = rawops.lsmr(matrix, device.put(b), x0=start, preconditioner="column", atol=1e-12, btol=1e-12)
        assert ours.itn <= 2
        np.testing.assert_allclose(device.get(ours.x), np.linalg.pinv(a) @ b, rtol=1e-8, atol=1e-12)
        assert ours.status.converged
        assert ours.status.normr == pytest.approx(ours.normr)


def test_preconditioner_object(device, rng):
    d = np.exp(1j * np.arange(6)) * 10.0 ** np.arange(-3, 3)
    q, b = system(rng, 20, 6, (1.0, 2.0), dtype="complex128")
    ours = rawops.lsmr(
        device.put(q * d), device.put(b), preconditioner=Diagonal(device, d), damp=0.1, atol=1e-12, btol=1e-12
    )
    y = np.linalg.lstsq(np.vstack([q, 0.1 * np.eye(6)]), np.concatenate([b, np.zeros(6)]))[0]
    np.testing.assert_allclose(device.get(ours.x), y / d, rtol=1e-8)
    assert ours.normx == pytest.approx(np.linalg.norm(y))
    assert ours.itn <= 3


@pytest.mark.parametrize(
    ("preconditioner", "error", "message"),
    [
        ("row", ValueError, "preconditioner must be 'column', got 'row'"),
        (3, TypeError, "preconditioner must be 'column' or have solve and rsolve, got int"),
    ],
)
def test_preconditioner_mistakes(device, preconditioner, error, message):
    with pytest.raises(error, match=message):
        rawops.lsmr(device.put(np.eye(3)), device.put(np.ones(3)), preconditioner=preconditioner)
    operator, _ = counted(device.put(np.eye(3)))
    with pytest.raises(ValueError, match="not be 'column' for an operator"):
        rawops.lsmr(operator, device.put(np.ones(3)), preconditioner="column")


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_reorthogonalisation(device, rng, dtype):
    """Condition 4e6: v loses its orthogonality, and with it the solution, unless it is restored."""
    a = np.vander(np.linspace(0, 1, 20), 10).astype(dtype)
    _, b = system(rng, 20, 10, dtype=dtype)
    options = {"maxiter": 10, "atol": 0, "btol": 0, "conlim": 0}
    errors = {}
    for kept in (None, "full"):
        ours = rawops.lsmr(device.put(a), device.put(b), reorthogonalize=kept, **options)
        expected = np.linalg.lstsq(a, b)[0]
        errors[kept] = np.linalg.norm(device.get(ours.x) - expected) / np.linalg.norm(expected)
    assert errors["full"] < 1e-5 < 1e-3 < errors[None]
    assert ours.conda == pytest.approx(np.linalg.cond(a), rel=0.5)


def test_reorthogonalisation_in_a_ring(device, rng):
    """Against fewer vectors than there are iterations: the same solution of a system that needs none of it."""
    a, b = system(rng, 30, 10, np.linspace(1, 9, 5))
    for kept in (1, 3):
        ours = rawops.lsmr(device.put(a), device.put(b), reorthogonalize=kept)
        assert_same(device, ours, scipy_lsmr(a, b))


@pytest.mark.parametrize("kept", ["some", 0, -1, 1.5])
def test_reorthogonalisation_mistakes(device, kept):
    with pytest.raises((TypeError, ValueError), match=r"^lsmr: reorthogonalize must be"):
        rawops.lsmr(device.put(np.eye(3)), device.put(np.ones(3)), reorthogonalize=kept)


# --- several processes ----------------------------------------------------------------------------------------------


class Threads:
    """A communicator over threads that stand in for processes."""

    def __init__(self, count: int) -> None:
        self.arrays, self._barrier = [None] * count, threading.Barrier(count, timeout=60)

    def of(self, rank: int):
        def all_reduce(source, target) -> None:
            self.arrays[rank] = source.copy()
            self._barrier.wait()
            total = sum(self.arrays)
            self._barrier.wait()
            target[...] = total

        return SimpleNamespace(all_reduce=all_reduce)


@pytest.mark.skipif(has_gpu(), reason="threads stand in for processes in the emulator alone")
@pytest.mark.parametrize("options", [{"damp": 0.3, "x0": True}, {"preconditioner": "column"}], ids=str)
def test_rows_in_blocks(rng, options):
    """Three processes, one without rows: everywhere the answer of the whole system."""
    a, b = system(rng, 30, 6, (1, 2))
    options = {**options, "x0": np.ones(6)} if "x0" in options else options
    bounds, everyone, results = [0, 13, 13, 30], Threads(3), [None] * 3

    def solve(rank: int) -> None:
        part = slice(*bounds[rank : rank + 2])
        with rawops.emulate(check=False):
            operator = rawops.DistributedOperator(a[part], everyone.of(rank))
            results[rank] = rawops.lsmr(operator, b[part], **options)

    workers = [threading.Thread(target=solve, args=(rank,)) for rank in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    with rawops.emulate(check=False):
        expected = rawops.lsmr(a, b, **options)
    for ours in results:
        assert (ours.istop, ours.itn) == (expected.istop, expected.itn)
        np.testing.assert_allclose(ours.x, expected.x, rtol=1e-8)
        np.testing.assert_allclose(ours[3:], expected[3:], rtol=1e-8, atol=1e-12)
        assert ours.status.normr == pytest.approx(expected.status.normr)
        assert (ours.x == results[0].x).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "complex128"])
def test_one_process_with_nccl(device, rng, dtype):
    nccl = pytest.importorskip("cupy.cuda.nccl")
    if not nccl.available:
        pytest.skip("CuPy has no NCCL here")
    communicator = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
    a, b = system(rng, 30, 6, dtype=dtype)
    operator = rawops.DistributedOperator(device.put(a), communicator)
    ours, alone = (rawops.lsmr(x, device.put(b)) for x in (operator, device.put(a)))
    assert ours[1:3] == alone[1:3]
    np.testing.assert_allclose(device.get(ours.x), device.get(alone.x), rtol=1e-4)


def test_distributed_mistakes(device):
    with pytest.raises(TypeError, match=r"communicator must have all_reduce or be an NcclCommunicator, got int"):
        rawops.DistributedOperator(device.put(np.eye(3)), 3)


# --- the status -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("damp", "starts"), [(0.0, False), (0.7, False), (0.7, True)])
def test_status_holds_the_true_norms(device, rng, damp, starts):
    a, b = system(rng, 30, 8, np.linspace(1, 9, 8))
    x0 = rng.standard_normal(8) if starts else np.zeros(8)
    ours = rawops.lsmr(device.put(a), device.put(b), damp, maxiter=3, x0=device.put(x0) if starts else None)
    x = device.get(ours.x)
    r = b - a @ x
    assert ours.status.normr == pytest.approx(np.hypot(np.linalg.norm(r), damp * np.linalg.norm(x - x0)))
    assert ours.status.normar == pytest.approx(np.linalg.norm(a.T @ r - damp**2 * (x - x0)))
    assert ours.status.message == "maxiter reached"
    assert not ours.status.converged


@pytest.mark.parametrize(
    ("istop", "residual", "gradient", "is_false"),
    [
        (1, 1e-5, 1.0, False),
        (1, 1e-4, 9e-7, False),
        (1, 1e-4, 2e-6, True),
        (1, np.nan, np.nan, True),
        (2, 0.5, 4e-6, False),
        (2, 0.5, 1e-3, True),
        (7, 1.0, 1.0, False),
    ],
)
def test_status_tells_false_convergence(istop, residual, gradient, is_false):
    report = {"norma": 10.0, "normx": 0.1, "normb": 1.0, "normar": 1e-7, "maxrbar": 5.0}
    squares = np.array([residual**2, gradient**2, 0])
    status = Status(istop, report, squares, Settings(0.0, 1e-6, 1e-6, 0.0, 100))
    assert (status.normr, status.normar) == pytest.approx((residual, gradient), nan_ok=True)
    assert status.is_false == is_false
    assert status.converged == (istop != 7 and not is_false)
    assert ("False convergence" in str(status)) == is_false


# --- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (TypeError, "damp must be a real number, got None", {"damp": None}),
        (TypeError, "atol must be a real number, got 'x'", {"atol": "x"}),
        (ValueError, "btol must be a number, got nan", {"btol": np.nan}),
        (TypeError, "callback must be a function of an iteration, got 3", {"callback": 3}),
        (TypeError, "maxiter must be an integer, got 2.5", {"maxiter": 2.5}),
        (ValueError, "vectors must be None or 'float64', got 'float16'", {"vectors": "float16"}),
        (ValueError, r"b must have shape \(4,\) or \(4, 1\), got shape \(4, 2\)", {"b": np.ones((4, 2))}),
        (ValueError, r"b must have shape \(4,\) or \(4, 1\), got shape \(3,\)", {"b": np.ones(3)}),
        (ValueError, r"x0 must have shape \(3,\) or \(3, 1\), got shape \(4,\)", {"x0": np.ones(4)}),
        (TypeError, "b must be a GPU array, got None", {"b": None}),
        (TypeError, "A must be a matrix or an operator, got int. Pass a SparseMatrix", {"A": 3}),
        (ValueError, r"A must have 2 dimensions, got shape \(3,\)", {"A": np.ones(3)}),
    ],
)
def test_mistakes(device, error, message, options):
    arguments = put_all(device, **{"A": np.ones((4, 3)), "b": np.ones(4), **options})
    with pytest.raises(error, match=f"^lsmr: {message}"):
        rawops.lsmr(**arguments)


def test_host_arrays_are_refused():
    with pytest.raises((TypeError, ImportError), match=r"cupy\.asarray|emulate"):
        rawops.lsmr(np.eye(3), np.ones(3))


# --- the real systems -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real_systems():
    import gzip
    import io
    from pathlib import Path

    from scipy.io import mmread

    found = {}
    for name in ("well1033", "illc1033"):
        files = (Path(__file__).parent / "data" / f"{name}{part}.mtx.gz" for part in ("", "_rhs1"))
        matrix, rhs = (mmread(io.BytesIO(gzip.decompress(file.read_bytes())), spmatrix=False) for file in files)
        found[name] = matrix.toarray(), np.asarray(rhs).ravel()
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["well1033", "illc1033"])
@pytest.mark.parametrize("tolerance", [1e-6, 1e-12])
def test_well1033_and_illc1033(device, real_systems, name, tolerance):
    a, b = real_systems[name]
    conlim = 1e8 if tolerance == 1e-6 else 1e12
    options = {"atol": tolerance, "btol": tolerance, "conlim": conlim, "maxiter": 10000}
    expected = scipy_lsmr(a, b, **options)
    ours = rawops.lsmr(device.put(a), device.put(b), **options)
    assert ours.istop == expected[1] == 2
    assert ours.itn == pytest.approx(expected[2], rel=0.03)
    assert ours.normr == pytest.approx(expected[3], rel=2e-3)
    assert ours.status.converged
    if (name, tolerance) != ("illc1033", 1e-6):  # which stops far from the solution
        assert ours.normr == pytest.approx(0.7521579, rel=1e-6)


@pytest.mark.gpu
def test_full_reorthogonalisation_of_illc1033(device, real_systems):
    a, b = (device.put(x) for x in real_systems["illc1033"])
    ours = rawops.lsmr(a, b, reorthogonalize="full", maxiter=1000)
    assert ours.istop == 2
    assert 250 < ours.itn < 275


@pytest.mark.gpu
def test_false_convergence_in_float32_is_reported(device, real_systems):
    a, b = (device.put(x.astype(np.float32)) for x in real_systems["illc1033"])
    ours = rawops.lsmr(a, b, maxiter=10000)
    assert ours.status.normr == pytest.approx(0.79, rel=0.1)
    assert ours.status.is_false  # with istop 1: the residual seems to be within atol ||A|| ||x||
    assert not ours.status.converged
    mixed = rawops.lsmr(a, b, maxiter=10000, vectors="float64")
    assert mixed.istop == 2
    assert mixed.status.converged
