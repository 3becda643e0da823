"""The Hopper kernels of the gradients of attention: masks, edges, groups, orders of completion, what runs elsewhere."""

import ml_dtypes
import numpy as np
import pytest
from hopper_gemm import ran_on_hopper

import rawops
from rawops import _attention_backward_sm90 as sm90
from rawops.attention import flash_attention_backward
from rawops.testing import has_gpu, references

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT16 = np.dtype("float16")
ROUNDOFF = {FLOAT16: 2.0**-11, BFLOAT16: 2.0**-8}


def operands(rng, B=1, Sq=70, Sk=70, Hq=1, Hkv=1, D=64, dtype=FLOAT16) -> tuple:
    """dout, q, k and v."""
    shapes = (B, Sq, Hq, D), (B, Sq, Hq, D), (B, Sk, Hkv, D), (B, Sk, Hkv, D)
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


def forward(inputs: tuple, **options) -> tuple:
    out, lse = references.attention(*inputs[1:], **options)
    return out.astype(inputs[1].dtype), np.ascontiguousarray(lse.astype(np.float32))


def check(device, inputs: tuple, **options) -> None:
    targets = {n: device.guarded(x.shape, x.dtype) for n, x in zip(("dq", "dk", "dv"), inputs[1:], strict=True)}
    arrays = map(device.put, (*inputs, *forward(inputs, **options)))
    got = flash_attention_backward(*arrays, **options, **targets)
    assert ran_on_hopper(device, "attention_backward_dq_sm90")
    for x, want in zip(got, references.attention_backward(*inputs, **options), strict=True):
        error = np.abs(device.get(x).astype(np.float64) - want)
        scale = max(np.sqrt(np.mean(want**2)), 0.25)
        assert (error <= ROUNDOFF[inputs[1].dtype] * (8 * scale + 2 * np.abs(want))).all(), error.max() / scale


MASKS = {
    "none": (70, 150, {}),
    "causal": (150, 150, {"causal": True}),
    "causal, rows without keys": (150, 70, {"causal": True}),
    "window": (140, 200, {"window": (60, 5)}),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("D", [64, 128])
def test_masks(hopper, rng, D, mask):
    """Tiles of queries that are skipped, cut and whole, from either side."""
    Sq, Sk, options = MASKS[mask]
    check(hopper, operands(rng, Sq=Sq, Sk=Sk, D=D, dtype=BFLOAT16 if D == 128 else FLOAT16), **options)


def test_groups(hopper, rng):
    """The query heads of a group add up in their KV head, in every sequence."""
    check(hopper, operands(rng, B=2, Sq=66, Sk=66, Hq=4, Hkv=2), causal=True, softmax_scale=0.3)


@pytest.mark.skipif(has_gpu(), reason="the emulator's orders of completion")
def test_any_order_of_completion(rng):
    """Copies and products that land late, early or with the warps in another order: the same gradients."""
    inputs = operands(rng, Sq=130, Sk=130)
    results = []
    for completion in ("late", "early", "random"):
        with rawops.emulate(arch="sm_90a", completion=completion, seed=2):
            results.append(flash_attention_backward(*inputs, *forward(inputs, causal=True), causal=True))
    for other in results[1:]:
        for x, y in zip(results[0], other, strict=True):
            np.testing.assert_allclose(x.astype(float), y.astype(float), atol=2e-3)


def test_deterministic_runs_elsewhere(rng):
    inputs = operands(rng, Sq=5, Sk=9)
    with rawops.emulate(arch="sm_90a") as emu:
        flash_attention_backward(*inputs, *forward(inputs), deterministic=True)
    assert not any("sm90" in run.kernel for run in emu.report)


def test_shared_memory_fits():
    assert all(sm90.shared_bytes(head_dim) <= 232448 for head_dim in (64, 128))
