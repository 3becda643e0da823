"""Products of a single row: every layout, tail, dtype and epilogue of the kernels that stream b."""

import itertools
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from rawops import _gemm_gemv
from rawops.gemm import gemm
from rawops.testing import references

DTYPES = [np.dtype(ml_dtypes.bfloat16), np.dtype("float32"), np.dtype("float64")]
# Aligned rows, rows off the 16-byte boundaries, neither axis contiguous; b lies in NaN.
VIEWS = {
    "rows": (lambda shape: (shape[0] + 1, shape[1] + 16), lambda x: x[1:, 16:]),
    "odd rows": (lambda shape: (shape[0], shape[1] + 3), lambda x: x[:, 3:]),
    "columns": (lambda shape: (shape[1] + 1, shape[0] + 16), lambda x: x[1:, 16:].swapaxes(-1, -2)),
    "odd columns": (lambda shape: (shape[1], shape[0] + 3), lambda x: x[:, 3:].swapaxes(-1, -2)),
    "both strided": (lambda shape: (2 * shape[0], 3 * shape[1]), lambda x: x[::2, ::3]),
    "reversed": (lambda shape: shape, lambda x: x[::-1, ::-1]),
}


def laid_out(device, x: np.ndarray, view: str):
    room, take = VIEWS[view]
    stored = np.full(room(x.shape), np.nan, x.dtype)
    take(stored)[...] = x
    return take(device.put(stored))


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exact(device, rng, dtype, view):
    """Tails of K and N, and whole steps before them."""
    for K, N in [(1, 1), (7, 66), (519, 37)]:
        a, b = (rng.integers(-2, 3, shape).astype(dtype) for shape in ((1, K), (K, N)))
        out = device.guarded((1, N), dtype)
        gemm(device.put(a), laid_out(device, b, view), out=out)
        np.testing.assert_array_equal(device.get(out).astype(int), a.astype(int) @ b.astype(int))


@pytest.mark.parametrize("view", ["rows", "columns", "both strided"])
@pytest.mark.parametrize("activation", [None, "gelu", "swiglu"])
def test_epilogue(device, rng, view, activation):
    K, N = 72, 76
    a, b, c = (rng.standard_normal(shape).astype(np.float16) for shape in ((1, K), (K, N), (1, N)))
    bias, residual = rng.standard_normal(N).astype(np.float32), rng.standard_normal((1, N // 2)).astype(np.float16)
    residual = residual if activation == "swiglu" else c
    options = {"alpha": 0.5, "beta": -2.0, "activation": activation}
    got = gemm(
        device.put(a), laid_out(device, b, view), device.put(c), bias=device.put(bias),
        residual=device.put(residual), out_dtype="float32", **options,
    )  # fmt: skip
    want = references.gemm(*(x.astype(float) for x in (a, b, c)), bias=bias, residual=residual.astype(float), **options)
    np.testing.assert_allclose(device.get(got), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("views", [*itertools.product(["rows", "columns"], ["even", "odd", "strided"])], ids="-".join)
def test_batches_and_views_of_a(device, rng, views):
    view, of_a = views
    a, b = rng.integers(-3, 4, (3, 1, 80)).astype(np.float16), rng.integers(-3, 4, (3, 80, 40)).astype(np.float16)
    stored = np.full((3, 1, 200), np.nan, np.float16)
    take = {"even": np.s_[..., 8:88], "odd": np.s_[..., 3:83], "strided": np.s_[..., 1:161:2]}[of_a]
    stored[take] = a
    b_device = device.put(b if view == "rows" else np.ascontiguousarray(b.swapaxes(1, 2)))
    got = gemm(device.put(stored)[take], b_device if view == "rows" else b_device.swapaxes(1, 2))
    np.testing.assert_array_equal(device.get(got).astype(int), a.astype(int) @ b.astype(int))


@pytest.mark.parametrize("view", ["rows", "columns"])
def test_alpha_of_zero_reads_nothing(device, view):
    a, b, c = np.full((1, 64), np.nan, np.float16), np.full((64, 40), np.nan, np.float16), np.ones((1, 40), np.float16)
    alpha = device.put(np.float32(0).reshape(()))
    got = gemm(device.put(a), laid_out(device, b, view), device.put(c), alpha=alpha, beta=3.0)
    np.testing.assert_array_equal(device.get(got), 3 * c)


def test_every_sm_has_enough_on_the_way(monkeypatch):
    """K is shared among eight warps, but for few groups of long columns, which one round of smaller ones takes."""
    monkeypatch.setattr(_gemm_gemv.GEMV, "kernel", lambda _, **choices: choices["split"])
    h200 = SimpleNamespace(sm_count=132)
    sizes = [(28672, 4096), (4096, 4096), (1, 64), (4096, 14336), (28672, 14336), (1024, 14336)]
    plans = [_gemm_gemv.plan(h200, "float16", "float16", 0, *size) for size in sizes]
    assert plans == [(8, 7168), (8, 1024), (8, 1), (2, 256), (8, 7168), (8, 256)]
