"""The gradients of a LoRA layer on Hopper: ranks, ragged sizes, more columns than a block, order, infinities."""

import ml_dtypes
import numpy as np
import pytest
from hopper_gemm import hopper as hopper
from hopper_gemm import padded, ran_on_hopper
from test_lora_grad import operands, reference

import rawops
from rawops.lora import lora_linear_backward
from rawops.testing import has_gpu
from rawops.testing.tolerances import assert_close

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def gradients(device, inputs: dict, **keywords) -> list:
    views = {name: padded(device, x, "row") for name, x in inputs.items()}
    return [device.get(x) for x in lora_linear_backward(**views, **keywords)]


# (M, N, K), rank: one block of rows, whole and ragged ones, several columns of blocks, groups of ranks
SIZES = [
    ((1, 72, 136), 1),
    ((64, 64, 64), 16),
    ((200, 136, 72), 5),
    ((328, 72, 200), 24),
    ((136, 40, 136), 48),
    ((72, 64, 72), 70),
]


@pytest.mark.parametrize("size, rank", SIZES, ids=str)
def test_sizes_and_ranks(hopper, rng, size, rank):
    inputs = operands(rng, *size, rank, "bfloat16")
    got = gradients(hopper, inputs, scaling=0.5)
    assert ran_on_hopper(hopper, "lora_grad_sm90")
    for one, want in zip(got, reference(**inputs, scaling=0.5), strict=True):
        np.testing.assert_array_equal(one.astype(np.float64), want.astype(BFLOAT16).astype(np.float64))


@pytest.mark.parametrize("rank", [16, 40])
def test_more_batch_axes_than_a_kernel_has(hopper, rng, rank):
    """dX is made in several products, each with a part of dO @ b^T: dA takes it in one piece."""
    batch, every = (2, 2, 2, 2), (slice(None, None, 2),) * 4
    inputs = operands(rng, 16 * 136, 40, 24, rank, "bfloat16")
    views = {name: hopper.put(inputs[name]) for name in "cab"}
    for name in ("dout", "x"):
        x = inputs[name].reshape(*batch, 136, -1)
        spread = np.full((4, 4, 4, 4, 137, x.shape[-1]), np.nan, BFLOAT16)
        spread[(*every, slice(136))] = x
        views[name] = hopper.put(spread)[(*every, slice(136))]
    got = lora_linear_backward(**views, scaling=0.5)
    for one, want in zip(got, reference(**inputs, scaling=0.5), strict=True):
        want = want.astype(BFLOAT16).astype(np.float64).reshape(one.shape)
        np.testing.assert_array_equal(hopper.get(one).astype(np.float64), want)


def test_intermediate_and_sums_are_float32(hopper, rng):
    """In float32 results, written to transposed arrays."""
    shapes = {"dout": (150, 72), "x": (150, 40), "c": (40, 72), "a": (40, 8), "b": (8, 72)}
    inputs = {name: rng.standard_normal(shape).astype(BFLOAT16) for name, shape in shapes.items()}
    out = [hopper.guarded(inputs[name].shape[::-1], np.float32).T for name in "xab"]
    got = lora_linear_backward(**{name: hopper.put(x) for name, x in inputs.items()}, scaling=0.7, out=out)
    magnitudes = reference(**{name: abs(x.astype(np.float64)) for name, x in inputs.items()}, scaling=0.7)
    for one, want, magnitude in zip(got, reference(**inputs, scaling=0.7), magnitudes, strict=True):
        assert_close(hopper.get(one), want, "float32", k=200, magnitude=magnitude)


@pytest.mark.parametrize("rank", [8, 40])
def test_intermediate_of_bfloat16_results_has_sixteen_bits(hopper, rank):
    """The difference of 32769 and 32768, which have one value in fewer bits."""
    shapes = {"dout": (2, 72), "x": (2, 40), "c": (40, 72), "a": (40, rank), "b": (rank, 72)}
    inputs = {name: np.zeros(shape, BFLOAT16) for name, shape in shapes.items()}
    inputs["dout"][:, :2], inputs["b"][:, :2], inputs["x"][:] = [[256, 1], [256, 0]], [128, 1], [[1], [-1]]
    np.testing.assert_array_equal(gradients(hopper, inputs)[1].astype(float), np.ones((40, rank)))


@pytest.mark.parametrize("rank", [3, 40])
def test_infinities(hopper, rng, rank):
    """An infinity in dO makes dB infinite with the sign of Y where that has few bits, and NaN where it is 0."""
    inputs = operands(rng, 100, 72, 72, rank, "bfloat16")
    inputs["dout"][70, 5] = np.inf
    inputs["x"][70] = 0
    inputs["x"][70, :3] = [1, 2, 0]
    inputs["a"][:3, :3] = [[1, -1, 0], [1, 0, 0], [1, 1, 1]]
    with np.errstate(invalid="ignore"):
        want = reference(**inputs)[2]
    got = gradients(hopper, inputs)[2].astype(np.float64)
    assert np.isposinf(want[0, 5]) and np.isneginf(want[1, 5]) and np.isnan(want[2, 5])
    np.testing.assert_array_equal(got, want.astype(BFLOAT16).astype(np.float64))


@pytest.mark.skipif(has_gpu(), reason="of the emulator alone")
@pytest.mark.parametrize("seed, rank", [(0, 16), (1, 40)])
def test_any_order_of_completion(rng, seed, rank):
    inputs = operands(rng, 330, 72, 40, rank, "bfloat16")
    for modes in ({"completion": "early"}, {"completion": "random", "seed": seed}, {"check": True}):
        with rawops.emulate(arch="sm_90a", **modes):
            got = lora_linear_backward(**inputs)
        for one, want in zip(got, reference(**inputs), strict=True):
            np.testing.assert_array_equal(one.astype(np.float64), want.astype(BFLOAT16).astype(np.float64))
