"""LSMR against SciPy's, and where SciPy has no answer against dense least squares."""

import numpy as np
import pytest
from lsmr_systems import assert_same, put_all, scattered, system, unchecked
from scipy import sparse
from scipy.sparse.linalg import lsmr as scipy_lsmr

import rawops
from rawops._runtime import dtypes

SHAPES = {"over": (40, 12), "under": (12, 40), "square": (16, 16), "one column": (9, 1), "one row": (1, 7)}


@pytest.fixture
def device(device):
    yield from unchecked(device)


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
    assert (ours.istop, ours.status.message, ours.status.converged) == (0, "maxiter reached", False)
    for solved in (rawops.lsmr(a, 0 * b, maxiter=0), rawops.lsmr(a, b, maxiter=0, x0=device.put(np.ones(3)))):
        assert solved.status.message == "x = x0 (or 0) is the solution" and solved.status.converged
    ours = rawops.lsmr(a, b, maxiter=0, x0=device.put(np.array([1.0, 1, 0])))
    assert device.get(ours.x).tolist() == [1, 1, 0]
    assert ours.normr == pytest.approx(3)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_maxiter_is_the_smaller_extent_unless_given(device, rng, dtype):
    """Case 62: ill-conditioned, and tolerances of 0 that nothing meets."""
    a, b = system(rng, 40, 10, np.logspace(0, -6, 10))
    options = {"atol": 0, "btol": 0, "conlim": 0}
    ours = rawops.lsmr(device.put(a.astype(dtype)), device.put(b.astype(dtype)), **options)
    assert (ours.istop, ours.itn) == (7, 10) == tuple(scipy_lsmr(a, b, **options)[1:3])


def test_matrix_of_zeros(device):
    a, b = np.zeros((6, 3)), np.arange(6.0)
    ours = rawops.lsmr(device.put(a), device.put(b), damp=0.5, x0=device.put(np.ones(3)))
    assert (ours.istop, ours.itn, ours.normar) == (0, 0, 0)
    assert device.get(ours.x).tolist() == [1.0] * 3 and ours.normr == pytest.approx(np.linalg.norm(b))


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
        ("bfloat16", "float16", "float32"),
        ("bfloat16", "float64", "float64"),
    ],
)
def test_dtypes(device, rng, dtype, b_dtype, result):
    kind = "complex128" if "complex" in dtype + b_dtype else "float64"
    a, b = system(rng, 12, 4, dtype=kind)
    if "int" in dtype:
        a, b = np.rint(3 * a), np.rint(3 * b)
    a, b = (x.astype(t) if "complex" in t else x.real.astype(dtypes.numpy(t)) for x, t in ((a, dtype), (b, b_dtype)))
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
    theirs, ones, b = theirs.astype(bool), a.astype(bool).astype(float), b.astype(np.float32)
    assert_same(device, rawops.lsmr(theirs, device.put(b), maxiter=3), scipy_lsmr(ones, b.astype(float), maxiter=3))


def test_sparse_b(device, rng):
    a, dense = system(rng, 20, 5)
    dense[rng.random(20) < 0.7] = 0
    b = sparse.csc_array(dense[:, None])
    if not device.is_emulated:
        import cupyx.scipy.sparse

        b = cupyx.scipy.sparse.csc_matrix(b)
    assert_same(device, rawops.lsmr(device.put(a), b), scipy_lsmr(a, dense))


# --- dense matrices -------------------------------------------------------------------------------------------------


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


# --- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (TypeError, "damp must be a real number, got None", {"damp": None}),
        (TypeError, r"damp must be a real number, got True \(bool\)", {"damp": True}),
        (ValueError, "damp must be finite, got inf", {"damp": np.inf}),
        (TypeError, "atol must be a real number, got 'x'", {"atol": "x"}),
        (ValueError, "btol must be a number, got nan", {"btol": np.nan}),
        (TypeError, "callback must be a function of an iteration, got 3", {"callback": 3}),
        (TypeError, "maxiter must be an integer, got 2.5", {"maxiter": 2.5}),
        (ValueError, "vectors must be None or 'float64', got 'float16'", {"vectors": "float16"}),
        (ValueError, r"b must have shape \(4,\) or \(4, 1\), got shape \(4, 2\)", {"b": np.ones((4, 2))}),
        (ValueError, r"b must have shape \(4,\) or \(4, 1\), got shape \(3,\)", {"b": np.ones(3)}),
        (ValueError, r"x0 must have shape \(3,\) or \(3, 1\), got shape \(4,\)", {"x0": np.ones(4)}),
        (TypeError, "b must be an array, got None", {"b": None}),
        (TypeError, "A must be a matrix or an operator, got int. Pass a SparseMatrix", {"A": 3}),
        (ValueError, r"A must have 2 dimensions, got shape \(3,\)", {"A": np.ones(3)}),
    ],
)
def test_mistakes(device, error, message, options):
    arguments = put_all(device, **{"A": np.ones((4, 3)), "b": np.ones(4), **options})
    with pytest.raises(error, match=f"^lsmr: {message}"):
        rawops.lsmr(**arguments)


@pytest.mark.parametrize("name", ["b", "x0"])
@pytest.mark.parametrize("dtype", ["longdouble", "U1"])
def test_vectors_without_a_kernel_are_refused(name, dtype):
    arguments = {"b": np.ones(3), "x0": np.ones(3), name: np.ones(3, dtype)}
    with rawops.emulate(), pytest.raises(TypeError, match=f"^lsmr: {name} must have dtype float16, .*, got "):
        rawops.lsmr(np.eye(3), **arguments)


@pytest.mark.parametrize("name", ["A", "b", "x0"])
def test_arrays_between_elements_are_refused(device, name):
    arguments = put_all(device, A=np.ones((4, 4)), b=np.ones(4), x0=np.ones(4))
    arguments[name] = device.between(arguments[name])
    with pytest.raises(ValueError, match=f"^lsmr: {name} must lie on whole elements"):
        rawops.lsmr(**arguments)


def test_a_solver_of_another_emulation():
    with rawops.emulate():
        solver = rawops.LSMR(np.eye(3))
    with rawops.emulate(), pytest.raises(ValueError, match=r"^LSMR: b must be on the matrix's device .* emulate\(\)"):
        solver.solve(np.ones(3))


def test_host_arrays_are_refused():
    with pytest.raises((TypeError, ImportError), match=r"cupy\.asarray|emulate"):
        rawops.lsmr(np.eye(3), np.ones(3))
