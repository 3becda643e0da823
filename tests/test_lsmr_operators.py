"""LinearOperator: its own products, and LSMR with it and with operators of other kinds."""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from lsmr_systems import assert_same, counted, system, unchecked
from scipy.sparse.linalg import LinearOperator as SciPyOperator
from scipy.sparse.linalg import lsmr as scipy_lsmr

import rawops
from rawops.testing import has_gpu


@pytest.fixture
def device(device):
    yield from unchecked(device)


def test_operator_of_python_functions(device, rng):
    a, b = system(rng, 20, 6, dtype="complex128")
    operator, calls = counted(device.put(a))
    ours = rawops.lsmr(operator, device.put(b))
    assert_same(device, ours, scipy_lsmr(a, b))
    assert calls["matvec"] <= ours.itn + 3  # two ahead, one for the true residual
    assert calls["rmatvec"] <= ours.itn + 4


def test_operator_of_integers(device):
    operator = rawops.LinearOperator((3, 3), lambda x: 2 * x, lambda u: 2 * u, int)
    ours = rawops.lsmr(operator, device.put(np.ones(3, np.float32)))
    assert ours.x.dtype == "float64"
    np.testing.assert_allclose(device.get(ours.x), [0.5] * 3, rtol=1e-15)


def test_linear_operator_itself(device):
    a = device.put(np.arange(6.0).reshape(2, 3))
    operator, _ = counted(a)
    x, out = device.put(np.ones(3)), device.put(np.array([10.0, np.nan]))
    assert device.get(operator.matvec(x)).tolist() == [3, 12]
    assert operator.matvec(x, 2.0, 0.0, out) is out
    assert device.get(out).tolist() == [6, 24]
    assert device.get(operator.rmatvec(device.put(np.ones(2)), 1.0, 1.0, device.put(np.ones(3)))).tolist() == [4, 6, 8]


def test_products_with_nothing_of_an_operator(device):
    """A factor of 0 reads nothing, as with a `SparseMatrix`: a number does not even call the function."""
    a = device.put(np.arange(6.0, dtype=np.float32).reshape(2, 3))
    operator, calls = counted(a)
    nan = device.put(np.full(3, np.nan, np.float32))
    for beta, want in ((0, [0, 0]), (1, [4, 8]), (device.put(np.array(0.5)), [2, 4])):
        out = device.put(np.array([4, 8], np.float32))
        assert operator.matvec(nan, 0, beta, out) is out
        assert device.get(out).tolist() == want
    assert device.get(operator.matvec(nan, 0)).tolist() == [0, 0]
    assert calls["matvec"] == 0
    zero, out = device.put(np.array(0.0)), device.put(np.full(2, np.nan, np.float32))
    assert device.get(operator.matvec(nan, zero, zero, out)).tolist() == [0, 0]
    empty = rawops.LinearOperator((2, 0), abs, abs, "float32")
    assert device.get(empty.matvec(nan[:0])).tolist() == [0, 0]


@pytest.mark.parametrize("dtype", ["float16", "float32", "complex64"])
def test_results_of_an_operator(device, dtype):
    """They have NumPy's type whatever the function gives, also over the vector itself."""
    a = np.array([[1, 2], [3, 4]], dtype)
    wide = device.put(a.astype("complex128" if dtype == "complex64" else "float64"))
    operator = rawops.LinearOperator((2, 2), lambda x: wide @ x, lambda u: wide.conj().T @ u, dtype)
    x = device.put(np.array([1, 10], dtype))
    assert operator.matvec(x, np.float32(2)).dtype == operator.rmatvec(x).dtype == dtype
    assert operator.matvec(x.astype("complex64")).dtype == "complex64"
    assert device.get(operator.matvec(x, -1, ml_dtypes.bfloat16(2), x)).tolist() == [2 - 21, 20 - 43]
    turned, x = rawops.LinearOperator((3, 3), lambda x: x[::-1], abs, dtype), device.put(np.arange(4, dtype=dtype))
    turned.matvec(x[:3], out=x[1:])
    assert device.get(x).tolist() == [0, 2, 1, 0]
    same = rawops.LinearOperator((3, 3), lambda x: x, abs, dtype).matvec(x[:3])
    same[...] = 7
    assert device.get(x).tolist() == [0, 2, 1, 0]


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16])
def test_terms_of_an_operator_of_16_bits_add_up_in_float32(device, dtype):
    a, x, large = (device.put(np.array(x, dtype)) for x in ([[30000, 30000]], [1, 2], [40000]))
    wide = a.astype("float32")
    operator = rawops.LinearOperator((1, 2), lambda x: wide @ x.astype("float32"), abs, dtype)
    want, c = (float(device.get(y).flat[0]) for y in (wide, large))
    got = operator.matvec(x, 0.5), operator.matvec(x, device.put(np.array(-1.0)), 2, large.copy())
    assert [float(device.get(y)[0]) for y in got] == pytest.approx([1.5 * want, 2 * c - 3 * want], rel=5e-3)


def test_products_of_an_operator_are_checked(device):
    operator, _ = counted(device.put(np.ones((2, 3), np.float32)))
    x, u, out, narrow = (device.put(np.ones(shape, np.float32)) for shape in (3, 2, 2, ()))
    wrong = rawops.LinearOperator((2, 3), lambda x: x, lambda u: 1j * x, "float32")
    for call, kind, message in [
        (lambda: operator.matvec(x, 2.0, 1.0), ValueError, "matvec: out must be given where beta is not 0, got None"),
        (lambda: operator.matvec(u), ValueError, r"matvec: x must have shape \(3,\), got shape \(2,\)"),
        (lambda: operator.rmatvec(x), ValueError, r"rmatvec: u must have shape \(2,\), got shape \(3,\)"),
        (lambda: operator.matvec(x, out=x), ValueError, r"matvec: out must have shape \(2,\)"),
        (lambda: operator.matvec(x.astype("float64"), out=out), TypeError, "matvec: out must have the result's dtype"),
        (lambda: operator.rmatvec([1.0, 1.0]), TypeError, "rmatvec: u must be an? (GPU )?array, got list"),
        (lambda: operator.matvec(x, 1j), TypeError, "matvec: alpha must be real for a result of float32"),
        (lambda: operator.matvec(x, True), TypeError, "matvec: alpha must be a number"),
        (lambda: operator.matvec(x, 1, narrow, out), TypeError, "matvec: beta must have dtype float64"),
        (
            lambda: wrong.matvec(x),
            ValueError,
            r"matvec: the operator must return an array of shape \(2,\) from matvec, got",
        ),
        (lambda: wrong.rmatvec(u), TypeError, "rmatvec: the operator must return real numbers from rmatvec"),
    ]:
        with pytest.raises(kind, match=f"^LinearOperator.{message}"):
            call()


@pytest.mark.skipif(has_gpu(), reason="SciPy's operators multiply NumPy arrays")
def test_operator_of_scipy(device, rng):
    a, b = system(rng, 20, 6)
    operator = SciPyOperator(a.shape, matvec=lambda x: a @ x, rmatvec=lambda u: a.T @ u, dtype=a.dtype)
    assert_same(device, rawops.lsmr(operator, b), scipy_lsmr(a, b))


def test_operator_that_returns_nonsense_raises(device):
    operator = rawops.LinearOperator((3, 2), lambda x: x, lambda u: u[:2], "float64")
    with pytest.raises(ValueError, match=r"A must return an array of shape \(3,\) from matvec, got \(2,\)"):
        rawops.lsmr(operator, device.put(np.ones(3)))
    operator = rawops.LinearOperator((2, 2), lambda x: x, lambda u: 1j * u, "float64")
    with pytest.raises(TypeError, match="A must return real numbers from rmatvec, as its dtype says, got complex128"):
        rawops.lsmr(operator, device.put(np.ones(2)))


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        (r"shape must be \(m, n\), got 3", (3, abs, abs)),
        (r"shape must be \(m, n\), got \(2, 3, 4\)", ((2, 3, 4), abs, abs)),
        ("shape must be an integer, got 2.5", ((2.5, 3), abs, abs)),
        ("rmatvec must be a function of a vector, got None", ((2, 3), abs, None)),
    ],
)
def test_mistakes_of_an_operator(message, arguments):
    with pytest.raises(TypeError, match=f"^LinearOperator: {message}"):
        rawops.LinearOperator(*arguments, "float64")


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("A must have shape, dtype, matvec and rmatvec, got SimpleNamespace without dtype", {"dtype": None}),
        ("shape of A must be an integer, got 4.0", {"shape": (4.0, 3)}),
        (r"shape of A must be \(m, n\), got 4", {"shape": 4}),
        ("A must have dtype float16, .* or an integer type, got float128", {"dtype": np.longdouble}),
        ("A must have dtype float16, .* or an integer type, got object", {"dtype": object}),
    ],
)
def test_mistakes_of_an_operator_of_another_kind(device, message, changes):
    given = {"shape": (4, 3), "dtype": float, "matvec": abs, "rmatvec": abs, **changes}
    operator = SimpleNamespace(**{name: value for name, value in given.items() if value is not None})
    with pytest.raises(TypeError, match=f"^lsmr: {message}"):
        rawops.lsmr(operator, device.put(np.ones(4)))
