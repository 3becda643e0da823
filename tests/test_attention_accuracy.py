"""How far attention and its gradients are from float64, beside three-pass attention in the same precision."""

import ml_dtypes
import numpy as np
import pytest

from rawops.attention import flash_attention, flash_attention_backward
from rawops.testing import references

DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
OPTIONS = {"full": {}, "causal": {"causal": True}, "softcap": {"softcap": 5.0, "causal": True}}


def plain(dout, q, k, v, dtype, causal=False, softcap=0.0) -> tuple:
    """out, dq, dk and dv of attention as torch's math backend has it: each matrix rounded, sums in float32."""

    def rounded(x):
        return x.astype(dtype).astype(np.float32)

    def product(subscripts, *operands):
        return rounded(np.einsum(subscripts, *operands, dtype=np.float32))

    dout, q, k, v = (x.astype(np.float32) for x in (dout, q, k, v))
    scale = q.shape[-1] ** -0.5
    scores, slope = rounded(product("bihd,bjhd->bhij", q, k) * scale), 1.0
    if softcap:
        capped = rounded(np.tanh(scores / softcap))
        scores, slope = rounded(softcap * capped), rounded(1 - capped**2)
    if causal:
        Sq, Sk = scores.shape[-2:]
        scores = np.where(np.arange(Sk) <= np.arange(Sq)[:, None] + Sk - Sq, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = rounded(weights / weights.sum(-1, keepdims=True))
    by_weights = product("bihd,bjhd->bhij", dout, v)
    by_scores = rounded(weights * (by_weights - (weights * by_weights).sum(-1, keepdims=True)))
    by_products = rounded(rounded(by_scores * slope) * scale)
    dq, dk = product("bhij,bjhd->bihd", by_products, k), product("bhij,bihd->bjhd", by_products, q)
    return product("bhij,bjhd->bihd", weights, v), dq, dk, product("bhij,bihd->bjhd", weights, dout)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_error_beside_three_passes(device, rng, dtype, options):
    """At most twice its error in the 2-norm, in the result and all gradients."""
    B, Sq, Sk, H, D = (1, 40, 70, 1, 64) if device.is_emulated else (2, 200, 300, 2, 128)
    shapes = (B, Sq, H, D), (B, Sq, H, D), (B, Sk, H, D), (B, Sk, H, D)
    inputs, options = [rng.standard_normal(s).astype(DTYPES[dtype]) for s in shapes], OPTIONS[options]
    dout, *qkv = map(device.put, inputs)
    out, lse = flash_attention(*qkv, **options, return_lse=True)
    found = (out, *flash_attention_backward(dout, *qkv, out, lse, **options))
    exact = (references.attention(*inputs[1:], **options)[0], *references.attention_backward(*inputs, **options))
    for mine, other, want in zip(found, plain(*inputs, DTYPES[dtype], **options), exact, strict=True):
        mine, other = (np.linalg.norm(x.astype(np.float64) - want) for x in (device.get(mine), other))
        assert mine <= 2 * other, (mine, other)


@pytest.mark.parametrize("options", [*OPTIONS, "dropout"])
def test_finite_differences(device, rng, options):
    """The kernels' gradients along random directions, beside differences of the float64 forward pass."""
    options = OPTIONS.get(options, {"dropout_p": 0.25, "dropout_seed": 11, "dropout_offset": 3})
    shapes = (1, 9, 2, 64), (1, 9, 2, 64), (1, 18, 1, 64), (1, 18, 1, 64)
    inputs = [rng.standard_normal(s).astype(np.float16) for s in shapes]
    dout, *qkv = map(device.put, inputs)
    out, lse = flash_attention(*qkv, **options, return_lse=True)
    gradients = map(device.get, flash_attention_backward(dout, *qkv, out, lse, **options))
    dout, *qkv = (x.astype(np.float64) for x in inputs)
    for which, gradient in enumerate(gradients):
        direction = rng.standard_normal(gradient.shape)
        moved = [[*qkv[:which], qkv[which] + s * direction, *qkv[which + 1 :]] for s in (1e-6, -1e-6)]
        high, low = (np.sum(dout * references.attention(*m, **options)[0]) for m in moved)
        bound = 2.0**-8 * np.linalg.norm(gradient.astype(float))
        assert abs(np.sum(gradient * direction) - (high - low) / 2e-6) < bound
