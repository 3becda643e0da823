"""Hopper's kernel on slices of K: exact sums, every epilogue after them, and when slices pay."""

import numpy as np
import pytest
from hopper_gemm import padded

from rawops import _gemm_sm90 as sm90
from rawops import _gemm_sm90_split as split
from rawops.gemm import Gemm, gemm
from rawops.testing import references

FLOAT16 = np.dtype("float16")
H200 = {"sm_count": 132, "max_shared_bytes": 232448}


@pytest.fixture
def four(monkeypatch):
    """Four slices, however small the product is."""
    monkeypatch.setattr(split, "slices", lambda problem, *_: 4)


def ran_in_slices(device) -> bool:
    kernels = [launch.kernel for launch in device.report[-2:]]
    return not device.report or ("gemm_sm90" in kernels[0] and "gemm_reduce" in kernels[1])


@pytest.mark.parametrize("layouts", [("row", "row"), ("row", "col"), ("col", "col")], ids="-".join)
@pytest.mark.parametrize("M, N, K", [(64, 72, 512), (130, 66, 256)])
def test_exact(hopper, four, rng, M, N, K, layouts):
    a, b = rng.integers(-3, 4, (M, K)).astype(FLOAT16), rng.integers(-3, 4, (K, N)).astype(FLOAT16)
    out = hopper.guarded((M, N), FLOAT16)
    gemm(padded(hopper, a, layouts[0]), padded(hopper, b, layouts[1]), out=out)
    np.testing.assert_array_equal(hopper.get(out), (a.astype(int) @ b.astype(int)).astype(FLOAT16))
    assert ran_in_slices(hopper)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_epilogue_comes_after_the_sum(hopper, four, rng, activation):
    a, b, c = (rng.standard_normal(shape).astype(FLOAT16) for shape in ((66, 256), (256, 80), (66, 80)))
    bias = rng.standard_normal(80).astype(FLOAT16)
    op = Gemm(66, 80, 256, "float16", alpha=0.25, beta=2.0, activation=activation, out_dtype="float32")
    for sign in (1, -1):  # the plan keeps its workspace
        got = op(hopper.put(a * FLOAT16.type(sign)), hopper.put(b), hopper.put(c), bias=hopper.put(bias))
        wide = [x.astype(float) for x in (sign * a, b, c)]
        want = references.gemm(*wide, alpha=0.25, beta=2.0, bias=bias.astype(float), activation=activation)
        np.testing.assert_allclose(hopper.get(got), want, rtol=1e-5, atol=1e-4)
    assert ran_in_slices(hopper)


def test_alpha_of_zero_reads_nothing(hopper, four):
    a, b = np.full((64, 256), np.nan, FLOAT16), np.full((256, 64), np.nan, FLOAT16)
    assert (hopper.get(gemm(hopper.put(a), hopper.put(b), alpha=0.0)) == 0).all()


@pytest.mark.parametrize(
    "sizes, expected",
    [
        ((128, 128, 32768), 32),
        ((64, 64, 65536), 64),
        ((128, 256, 16384), 16),
        ((64, 128, 16384), 32),
        ((16, 1024, 4096), 1),
        ((128, 128, 32760), 1),  # the last slice would be shorter
        ((4096, 4096, 4096), 1),
        ((64, 4096, 4096), 1),
        ((128, 128, 512), 1),
    ],
)
def test_when_it_pays(sizes, expected):
    problem = sm90.Problem(*sizes)
    assert split.slices(problem, sm90.select_config(problem, **H200).cost, **H200) == expected
    assert split.slices(sm90.Problem(*sizes, batches=2), 1 << 40, **H200) == 1
