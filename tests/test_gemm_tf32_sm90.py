"""TF32 on Hopper's kernel: rounded by TMA, contiguous along K as it is or by a copy, with every epilogue."""

import numpy as np
import pytest
from hopper_gemm import padded, ran_on_hopper

from rawops import _gemm_repack
from rawops import _gemm_sm90 as sm90
from rawops.gemm import Gemm, gemm
from rawops.testing import references

FLOAT32 = np.dtype("float32")


def integers(rng, *shape: int) -> np.ndarray:
    return rng.integers(-3, 4, shape).astype(FLOAT32)


@pytest.mark.parametrize("tile", [(128, 64, 1), (64, 128, 2), (64, 48, 1)], ids=str)
@pytest.mark.parametrize("K", [36, 132])
def test_exact(hopper, force, rng, tile, K):
    block_m, block_n, cluster = tile
    force(block_n, block_m=block_m, cluster=cluster)
    a, b = integers(rng, 130, K), integers(rng, K, 72)
    out = hopper.guarded((130, 72), FLOAT32)
    gemm(padded(hopper, a, "row"), padded(hopper, b, "col"), out=out, precision="tf32")
    np.testing.assert_array_equal(hopper.get(out), a.astype(int) @ b.astype(int))
    assert ran_on_hopper(hopper)


@pytest.mark.parametrize("tile", [(128, 64, 1), (64, 128, 2), (64, 48, 1), (128, 80, 1)], ids=str)
@pytest.mark.parametrize("K", [36, 164])
def test_a_row_major_b_is_read_as_it_is(hopper, force, rng, tile, K):
    """The tile is one of D's transpose, for every row and column, and every epilogue."""
    block_m, block_n, cluster = tile
    force(block_n, block_m=block_m, cluster=cluster)
    a, b, c, bias = integers(rng, 2, 70, K), integers(rng, K, 140), integers(rng, 70, 140), integers(rng, 140)
    out = hopper.guarded((2, 70, 140), FLOAT32)
    options = {"alpha": 2.0, "beta": -3.0, "bias": hopper.put(bias), "activation": "relu", "precision": "tf32"}
    gemm(padded(hopper, a, "row"), padded(hopper, b, "row"), hopper.put(c), out=out, **options)
    want = np.maximum(2 * (a.astype(int) @ b.astype(int)) - 3 * c.astype(int) + bias.astype(int), 0)
    np.testing.assert_array_equal(hopper.get(out), want)
    assert ran_on_hopper(hopper)
    assert not hopper.report or len(hopper.report) == 1


@pytest.mark.parametrize("layouts", [("row", "row"), ("col", "row"), ("col", "col")], ids="-".join)
def test_other_layouts_are_copied(hopper, monkeypatch, rng, layouts):
    monkeypatch.setattr(_gemm_repack, "pays", lambda *_: True)
    a, b = integers(rng, 2, 66, 37), integers(rng, 2, 37, 41)
    out = hopper.guarded((2, 66, 41), FLOAT32)
    gemm(padded(hopper, a, layouts[0]), padded(hopper, b, layouts[1]), out=out, precision="tf32")
    np.testing.assert_array_equal(hopper.get(out), a.astype(int) @ b.astype(int))
    assert ran_on_hopper(hopper)


def test_operands_are_rounded_to_nearest(hopper, rng):
    """The tensor cores themselves would cut the bits off."""
    x = rng.standard_normal((64, 64)).astype(FLOAT32)
    got = hopper.get(gemm(hopper.put(x), hopper.put(np.eye(64, dtype=FLOAT32)).T, precision="tf32"))
    assert ran_on_hopper(hopper)
    assert (np.abs(got - x) <= 2.0**-11 * np.abs(x)).all()
    assert (got.view(np.uint32) % (1 << 13) == 0).all()
    assert np.mean(np.abs(got) > np.abs(x)) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_epilogue(hopper, rng, activation):
    a, b, c, bias = integers(rng, 70, 64), integers(rng, 64, 48), integers(rng, 70, 48), integers(rng, 48)
    op = Gemm(70, 48, 64, "float32", alpha=0.125, beta=0.5, activation=activation, precision="tf32")
    got = op(hopper.put(a), padded(hopper, b, "col"), hopper.put(c), bias=hopper.put(bias))
    want = references.gemm(
        *(x.astype(float) for x in (a, b, c)), alpha=0.125, beta=0.5, bias=bias, activation=activation
    )
    np.testing.assert_allclose(hopper.get(got), want, rtol=1e-5, atol=1e-5)
    assert ran_on_hopper(hopper)


def test_float32_stays_exact_unless_asked(hopper, rng):
    a, b = rng.standard_normal((64, 64)).astype(FLOAT32), rng.standard_normal((64, 64)).astype(FLOAT32)
    got = hopper.get(gemm(hopper.put(a), hopper.put(b.T.copy()).T)).astype(float)
    assert np.abs(got - a.astype(float) @ b.astype(float)).max() < 1e-5


def test_a_block_of_k_is_128_bytes():
    problem = sm90.TF32Problem(4096, 4096, 4096, finish=sm90.DIRECT)
    config = sm90.select_config(problem, 132, 232448)
    assert problem.k_blocks == 128 and (config.block_m, config.block_n) == (128, 256)


@pytest.mark.parametrize("size, expected", [((4096, 4096, 4096), True), ((64, 4096, 4096), False)])
def test_when_a_copy_pays(size, expected):
    M, N, K = size
    assert _gemm_repack.pays(2 * M * N * K, 16, 4 * N * K, "tf32") is expected
