"""The float64 references against independent formulas, and the tolerances against errors of a known size."""

import math

import ml_dtypes
import numpy as np
import pytest
from scipy import special

from rawops.testing import references, tolerances

EDGES = np.array([-np.inf, -1e300, -1e4, -30.0, -2.5, -1e-8, -0.0, 0.0, 1e-8, 0.7, 2.5, 30.0, 1e4, 1e300, np.inf])


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("relu", lambda x: (x + abs(x)) / 2),
        ("gelu", lambda x: x * special.ndtr(x)),
        ("silu", lambda x: x * special.expit(x)),
        ("gelu_tanh", lambda x: x * special.expit(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    ],
)
def test_activation_matches_formula_and_limits(name, formula):
    activation = references.ACTIVATIONS[name]
    x = np.concatenate([np.linspace(-12, 12, 2001), [-0.0, 1e-300]])
    np.testing.assert_allclose(activation(x), formula(x), rtol=1e-12, atol=1e-15)
    ends = activation(EDGES)
    assert ends[0] == 0.0 and ends[-1] == np.inf
    assert np.all(np.isfinite(ends[1:-1])) and ends[1] == 0.0 and ends[-2] == 1e300
    assert np.isnan(activation(np.array([np.nan]))).all()


def test_swiglu_splits_gate_then_up():
    x = np.array([[1.0, -2.0, 3.0, 5.0]])
    np.testing.assert_allclose(references.swiglu(x), [[3 / (1 + math.exp(-1)), -10 / (1 + math.exp(2))]])


def test_gemm_by_hand(rng):
    a, b = rng.integers(-3, 4, (2, 1, 3, 5)), rng.integers(-3, 4, (4, 5, 7))
    c, bias, residual = rng.integers(-3, 4, (3, 7)), rng.integers(-3, 4, 7), rng.integers(-3, 4, (2, 4, 3, 7))
    got = references.gemm(a, b, c, alpha=2.0, beta=-0.5, bias=bias, residual=residual, activation="relu")
    product = np.einsum("xymk,ykn->xymn", a, b)
    np.testing.assert_array_equal(got, np.maximum(2 * product - c / 2 + bias, 0) + residual)


def test_gemm_reads_nothing_that_a_zero_factor_hides():
    nan = np.full((3, 3), np.nan)
    ones = np.ones((3, 3))
    np.testing.assert_array_equal(references.gemm(ones, ones, nan), 3 * ones)
    np.testing.assert_array_equal(references.gemm(nan, nan, ones, alpha=0.0, beta=2.0), 2 * ones)


@pytest.mark.parametrize(("m", "n", "k"), [(3, 2, 0), (0, 4, 3), (3, 0, 2)])
def test_gemm_of_empty_sizes(m, n, k):
    got = references.gemm(np.ones((m, k)), np.ones((k, n)), np.ones((m, n)), beta=0.5)
    np.testing.assert_array_equal(got, np.full((m, n), 0.5 + k))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_lora_equals_the_merged_weight(rng, dtype):
    x, c, a, b = (rng.standard_normal(shape).astype(dtype) for shape in ((5, 20), (20, 9), (20, 3), (3, 9)))
    merged = c.astype(float) + 0.25 * a.astype(float) @ b.astype(float)
    np.testing.assert_allclose(references.lora_linear(x, c, a, b, scaling=0.25), x.astype(float) @ merged, rtol=1e-12)
    np.testing.assert_array_equal(references.lora_linear(x, c, a[:, :0], b[:0]), references.gemm(x, c))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_one_rounding_passes_and_two_ulps_fail(rng, dtype):
    exact = rng.standard_normal(1000) * 10.0 ** rng.integers(-3, 4, 1000)
    rounded = exact.astype(dtype).astype(np.float64)
    tolerances.assert_close(rounded, exact, dtype, magnitude=0.0)
    eps = float(ml_dtypes.finfo(dtype).eps)
    rounded[137] *= 1 + 4 * eps
    with pytest.raises(AssertionError, match=r"entry \(137,\)"):
        tolerances.assert_close(rounded, exact, dtype, magnitude=0.0)


@pytest.mark.parametrize("nan_in", ["result", "reference"])
def test_nan_on_one_side_fails(nan_in):
    plain, poisoned = np.ones(4), np.array([1.0, 1.0, np.nan, 1.0])
    got, reference = (poisoned, plain) if nan_in == "result" else (plain, poisoned)
    with pytest.raises(AssertionError, match=r"entry \(2,\)"):
        tolerances.assert_close(got, reference, "float16", k=10**9)
    tolerances.assert_close(poisoned, poisoned, "float16")


def test_overflow_is_infinite_and_not_a_clamp():
    reference = np.array([7e4, -7e4, 65500.0])
    tolerances.assert_close(np.array([np.inf, -np.inf, 65504.0]), reference, "float16")
    for wrong in ([65504.0, -np.inf, 65504.0], [-np.inf, -np.inf, 65504.0], [np.inf, -np.inf, 6e4]):
        with pytest.raises(AssertionError):
            tolerances.assert_close(np.array(wrong), reference, "float16")
    # As bfloat16 the same values are ordinary numbers.
    with pytest.raises(AssertionError):
        tolerances.assert_close(np.array([np.inf, -7e4, 65500.0]), reference, "bfloat16")


def test_cancelled_sums_are_measured_by_their_magnitude():
    """1e8 + 1 - 1e8 in float32 is 0: wrong against its value, right against what was added up."""
    a, b = np.array([[1e8, 1.0, -1e8]]), np.ones((3, 1))
    exact, lost = references.gemm(a, b), np.zeros((1, 1))
    tolerances.assert_close(lost, exact, "float32", k=3, magnitude=references.gemm_magnitude(a, b))
    with pytest.raises(AssertionError):
        tolerances.assert_close(lost, exact, "float32", k=3)


def test_a_missing_term_of_a_long_sum_is_found(rng):
    a, b = rng.standard_normal((8, 4096)).astype("float16"), rng.standard_normal((4096, 8)).astype("float16")
    exact = references.gemm(a, b)
    tolerances.assert_close(a.astype("float32") @ b.astype("float32"), exact, "float32", k=4096)
    with pytest.raises(AssertionError):
        tolerances.assert_close(references.gemm(a[:, 1:], b[1:]), exact, "float32", k=4096)


def test_plain_reference_widens_the_bound_twofold():
    exact, plain = np.ones(10), np.full(10, 1.01)
    tolerances.assert_close(np.full(10, 0.981), exact, "float32", plain=plain)
    with pytest.raises(AssertionError):
        tolerances.assert_close(np.full(10, 0.979), exact, "float32", plain=plain)


def test_zero_is_next_to_the_smallest_number():
    assert tolerances.errors(np.array([2.0**-24]), np.zeros(1), "float16", magnitude=0.0).within
    assert not tolerances.errors(np.array([2.0**-22]), np.zeros(1), "float16", magnitude=0.0).within


def test_errors_reports_size_and_shape():
    found = tolerances.errors(np.array([[1.0, 2.5]]), np.array([[1.0, 2.0]]), "float16")
    assert (found.max_abs, found.max_rel, found.worst, found.within) == (0.5, 0.25, (0, 1), False)
    assert tolerances.errors(np.empty((0, 3)), np.empty((0, 3)), "float16").within
    with pytest.raises(AssertionError, match="shape"):
        tolerances.assert_close(np.zeros(3), np.zeros((3, 1)), "float16")


def test_a_score_of_nan_is_a_key_that_is_seen():
    q, k = np.ones((1, 1, 1, 2)), np.ones((1, 2, 1, 2))
    q[0, 0, 0, 0] = np.nan
    out, lse = references.attention(q, k, k)
    assert np.isnan(out).all() and np.isnan(lse).all()


def test_complex_numbers_are_refused():
    whole, half = np.array([1 + 2j]), np.array([1.0])
    for got, reference in ((whole, half), (half, whole)):
        with pytest.raises(TypeError, match="Cannot cast"):
            tolerances.errors(got, reference, "float64")
    with pytest.raises(TypeError, match="Cannot cast"):
        references.gemm(whole[None], half[None])
