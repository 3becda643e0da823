"""alpha and beta as 0-d arrays on the device: the bits of plain numbers, in every kernel; what zero leaves unread."""

import ml_dtypes
import numpy as np
import pytest
from test_gemm_w4 import Weights

import rawops
from rawops.gemm import gemm

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SCALARS = {"float32": 0.1, "float64": 0.1, "float16": -1.5, BFLOAT16: 2.5}

# Kernels of all cards: dtype, M, keywords.
KERNELS = {
    "16-bit": ("float16", 70, {}),
    "16-bit, split": ("float16", 70, {"split_k": 3}),
    "one row": (BFLOAT16, 1, {}),
    "float32": ("float32", 70, {}),
    "tf32, split": ("float32", 70, {"precision": "tf32", "split_k": 2}),
    "float64": ("float64", 70, {}),
    "swiglu": ("float16", 20, {"activation": "swiglu"}),
}
# Tiles of the Hopper kernel and the dtype of the result, which says how it leaves the registers.
HOPPER = {
    "through TMA": ({"block_n": 64}, "float16"),
    "by the threads": ({"block_n": 64}, "float32"),
    "taking turns": ({"block_n": 64, "ping_pong": True}, "float16"),
    "cluster": ({"block_n": 64, "block_m": 64, "cluster": 2}, "float16"),
}


def check(device, rng, M: int, dtype, keywords: dict, product=None, types=("float64",)) -> None:
    """`product(a, b, c, alpha=, beta=)` with scalars of these types, and with zeros."""
    N, K = 48, 264
    a, b, c = (device.put(rng.standard_normal(s).astype(dtype)) for s in ((M, K), (K, N), (M, N)))
    nan = {name: device.put(np.full(x.shape, np.nan, dtype)) for name, x in (("a", a), ("b", b), ("c", c))}

    def run(a, b, c, **scalars):
        return device.get((product or gemm)(a, b, c, **scalars, **keywords)).astype(float)

    for name in types:
        scalar = np.asarray(SCALARS[name], name)
        want = run(a, b, c, alpha=float(scalar), beta=-2 * float(scalar))
        got = run(a, b, c, alpha=device.put(scalar), beta=device.put(np.asarray(-2 * scalar, name)))
        np.testing.assert_array_equal(got, want)
        assert np.isfinite(want).all() and np.abs(want).max() > 0
    one, zero = device.put(np.ones((), np.float32)), device.put(np.zeros((), "float64"))
    np.testing.assert_array_equal(run(a, b, nan["c"], alpha=one, beta=zero), run(a, b, None))
    if product is None:
        got = run(nan["a"], nan["b"], c, alpha=zero, beta=one)
        np.testing.assert_array_equal(got, run(nan["a"], nan["b"], c, alpha=0.0, beta=1.0))
        assert np.isfinite(got).all()
        assert (run(nan["a"], nan["b"], nan["c"], alpha=zero, beta=zero) == 0).all()


@pytest.mark.parametrize("dtype, M, keywords", KERNELS.values(), ids=KERNELS)
def test_kernels_of_all_cards(device, rng, dtype, M, keywords):
    check(device, rng, M, dtype, keywords, types=SCALARS if M == 1 else ("float64",))


@pytest.mark.parametrize("tile, out_dtype", HOPPER.values(), ids=HOPPER)
def test_hopper(hopper, force, rng, tile, out_dtype):
    force(**tile)
    types = SCALARS if len(tile) == 1 else ("float64",)
    check(hopper, rng, 70, "float16", {"out_dtype": out_dtype}, types=types)


@pytest.mark.parametrize("split_k", [1, 3])
def test_packed_weights(device, rng, split_k):
    weights = Weights(device, rng, 384, 48, 128, "int4")
    a = device.put(rng.standard_normal((20, 384)).astype("float16"))
    check(device, rng, 20, "float16", {"split_k": split_k}, lambda _a, _b, c, **rest: weights.gemm(a, c, **rest))
    nan = device.put(np.full((20, 384), np.nan, "float16"))
    zero, c = device.put(np.zeros((), "float32")), device.put(rng.standard_normal((20, 48)).astype("float16"))
    np.testing.assert_array_equal(device.get(weights.gemm(nan, c, alpha=zero, beta=1.0)), device.get(c))


def test_a_plan_reads_them_at_every_call(device, rng):
    a, b = (device.put(rng.integers(-3, 4, (40, 40)).astype("float16")) for _ in range(2))
    alpha, beta = device.put(np.array(1.0)), device.put(np.array(0.0))
    plan, c = rawops.Gemm(40, 40, 40, "float16", alpha=alpha, beta=beta), device.put(np.ones((40, 40), "float16"))
    product = device.get(a).astype(float) @ device.get(b)
    for x, y in ((1.0, 0.0), (0.5, 3.0), (0.0, 2.0)):
        alpha[...], beta[...] = x, y
        np.testing.assert_array_equal(device.get(plan(a, b, c)).astype(float), x * product + y)


@pytest.mark.parametrize("role", ["alpha", "beta"])
def test_a_scalar_between_elements(device, role):
    """A kernel that read it there would end the CUDA context."""
    a = device.put(np.ones((8, 8), np.float32))
    scalar = device.between(device.put(np.zeros((), np.float32)))
    with pytest.raises(ValueError, match=f"gemm: {role} must lie on whole elements, got address"):
        gemm(a, a, a, **{"alpha": 1.0, "beta": 1.0, role: scalar})


@pytest.mark.parametrize("role", ["alpha", "beta"])
def test_a_scalar_in_the_place_of_the_result(device, rng, role):
    """An entry of out that the first tile writes, and tiles of a later round read: the answer of numbers."""
    M, N = (64, 3000) if device.is_emulated else (2048, 8192)
    a, b, c = (rng.integers(-3, 4, shape).astype("float32") for shape in ((M, 8), (8, N), (M, N)))
    out = device.put(np.full((M, N), 2, np.float32))
    scalars = {"alpha": 1.0, "beta": 1.0, role: out[:1, :1].reshape(())}
    gemm(*map(device.put, (a, b, c)), **scalars, out=out)
    factors = {"alpha": 1.0, "beta": 1.0, role: 2.0}
    np.testing.assert_array_equal(device.get(out), factors["alpha"] * a @ b + factors["beta"] * c)
