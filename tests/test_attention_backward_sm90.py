"""The Hopper kernels of the gradients of attention: masks, edges, groups, orders of completion, what runs elsewhere."""

import ml_dtypes
import numpy as np
import pytest
from hopper_gemm import ran_on_hopper

import rawops
from rawops import _attention_backward_sm90 as sm90
from rawops.attention import flash_attention, flash_attention_backward
from rawops.testing import has_gpu, references

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT16 = np.dtype("float16")
ROUNDOFF = {FLOAT16: 2.0**-11, BFLOAT16: 2.0**-8}


def operands(rng, B=1, Sq=70, Sk=70, Hq=1, Hkv=1, D=64, Dv=None, dtype=FLOAT16) -> tuple:
    """dout, q, k and v."""
    shapes = (B, Sq, Hq, Dv or D), (B, Sq, Hq, D), (B, Sk, Hkv, D), (B, Sk, Hkv, Dv or D)
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


def forward(inputs: tuple, **options) -> tuple:
    out, lse = references.attention(*inputs[1:], **options)
    return out.astype(inputs[1].dtype), np.ascontiguousarray(lse.astype(np.float32))


def check(device, inputs: tuple, **options) -> None:
    targets = {n: device.guarded(x.shape, x.dtype) for n, x in zip(("dq", "dk", "dv"), inputs[1:], strict=True)}
    arrays = map(device.put, (*inputs, *forward(inputs, **options)))
    on_device = {name: device.put(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    got = flash_attention_backward(*arrays, **on_device, **targets)
    assert ran_on_hopper(device, "attention_backward_dq_sm90")
    assert_gradients(device, got, references.attention_backward(*inputs, **options), inputs[1].dtype)


def assert_gradients(device, got: tuple, want: tuple, dtype: np.dtype) -> None:
    for x, reference in zip(got, want, strict=True):
        error = np.abs(device.get(x).astype(np.float64) - reference)
        scale = max(np.sqrt(np.mean(reference**2)), 0.25)
        assert (error <= ROUNDOFF[dtype] * (8 * scale + 2 * np.abs(reference))).all(), error.max() / scale


MASKS = {
    "none": (70, 150, {}),
    "causal": (150, 150, {"causal": True}),
    "causal, rows without keys": (150, 70, {"causal": True}),
    "window": (140, 200, {"window": (60, 5)}),
}


@pytest.mark.parametrize(("D", "mask"), [*((d, m) for d in (64, 128) for m in MASKS), (256, "none"), (256, "window")])
def test_masks(hopper, rng, D, mask):
    """Tiles of queries that are skipped, cut and whole, from either side."""
    Sq, Sk, options = MASKS[mask]
    Sq, Sk = (n // (1 + D // 256) for n in (Sq, Sk))  # tiles of wide heads are half as long
    check(hopper, operands(rng, Sq=Sq, Sk=Sk, D=D, dtype=BFLOAT16 if D == 128 else FLOAT16), **options)


def test_groups(hopper, rng):
    """The query heads of a group add up in their KV head, in every sequence."""
    check(hopper, operands(rng, B=2, Sq=66, Sk=66, Hq=4, Hkv=2), causal=True, softmax_scale=0.3)


DROPS = {"dropout_p": 0.3, "dropout_seed": 2**40 + 3, "dropout_offset": 2}
SCORES = {
    "alibi": {"alibi_slopes": np.array([0.2, 0.4], np.float32), "window": (30, None)},
    "negative scale": {"softmax_scale": -0.2, "causal": True},
    "dropout": DROPS,
    "all": {"softcap": 2.0, "alibi_slopes": np.array([0.2, 0.4], np.float32), "causal": True, **DROPS},
}


@pytest.mark.parametrize(("D", "scores"), [*((64, name) for name in SCORES), (128, "dropout"), (256, "all")])
def test_scores(hopper, rng, D, scores):
    check(hopper, operands(rng, Sq=40, Sk=70, Hq=2, D=D), **SCORES[scores])


@pytest.mark.parametrize("head_dims", [(96, 96), (40, 72), (192, 128)], ids=str)
def test_head_dims(hopper, rng, head_dims):
    """Others are padded inside, those of v for themselves."""
    D, Dv = head_dims
    check(hopper, operands(rng, Sq=20, Sk=30, D=D, Dv=Dv, dtype=BFLOAT16))


@pytest.mark.parametrize("D", [64, 256])
def test_varlen(hopper, rng, D):
    """Each sequence for itself, one longer than stated; around them NaN, in rows that have gradients of zero."""
    lengths_q, lengths_k = [3, 150, 0, 70, 5], [9, 66, 4, 0, 140]
    bounds_q, bounds_k = (np.concatenate([[0], np.cumsum(n)]).astype(np.int32) for n in (lengths_q, lengths_k))

    def rows(bounds, heads):
        x = rng.standard_normal((bounds[-1] + 40, heads, D))
        x[bounds[-1] :] = np.nan
        return x.astype(np.float16)

    inputs = [rows(b, 1) for b in (bounds_q, bounds_q, bounds_k, bounds_k)]
    out, lse = (np.zeros(inputs[0].shape, FLOAT16), np.full((1, len(inputs[0])), -np.inf, np.float32))
    want = [np.zeros(x.shape) for x in inputs[1:]]
    for b in range(5):
        i, j = slice(*bounds_q[b : b + 2]), slice(*bounds_k[b : b + 2])
        dout, *qkv = (x[None, at] for x, at in zip(inputs, (i, i, j, j), strict=True))
        out[i], lse[:, i] = (x[0] for x in references.attention(*qkv, causal=True))
        for total, part, at in zip(
            want, references.attention_backward(dout, *qkv, causal=True), (i, j, j), strict=True
        ):
            total[at] = part[0]
    layout = {"cu_seqlens_q": hopper.put(bounds_q), "cu_seqlens_k": hopper.put(bounds_k)}
    layout |= {"max_seqlen_q": 100, "max_seqlen_k": 100}
    targets = {n: hopper.guarded(x.shape, x.dtype) for n, x in zip(("dq", "dk", "dv"), inputs[1:], strict=True)}
    arrays = map(hopper.put, (*inputs, out, lse))
    got = flash_attention_backward(*arrays, causal=True, **layout, **targets)
    assert ran_on_hopper(hopper, "attention_backward_dq_sm90")
    assert_gradients(hopper, got, want, FLOAT16)
    for x, used in zip(got, (bounds_q[-1], bounds_k[-1], bounds_k[-1]), strict=True):
        assert (hopper.get(x)[used:] == 0).all()


@pytest.mark.parametrize(("queries", "keys"), [(5, 0), (0, 5), (0, 0)])
def test_packed_sequences_that_are_empty(hopper, rng, queries, keys):
    """On one side or both, where the caller states the longest that others have."""
    dout, q, k, v = (hopper.put(x[0]) for x in operands(rng, Sq=5, Sk=5))
    bounds = [hopper.put(np.array([0, n], np.int32)) for n in (queries, keys)]
    layout = dict(zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), (*bounds, 5, 5), strict=True))
    lse = hopper.put(np.full((1, queries), -np.inf, np.float32))
    arrays = (dout[:queries], q[:queries], k[:keys], v[:keys], dout[:queries], lse)
    for x in flash_attention_backward(*arrays, **layout):
        assert (hopper.get(x) == 0).all()


@pytest.mark.parametrize("kernels", ["hopper", "device"])
@pytest.mark.parametrize("longest", [6, 300])
@pytest.mark.parametrize("bounds", [[0, 3, 2**31 - 1], [-5, 4, 2]], ids=str)
def test_bounds_outside_the_storage(request, rng, kernels, bounds, longest):
    """Nothing is read or written there, and all that is in the storage is written."""
    device = request.getfixturevalue(kernels)
    dout, q, k, v = (x[0] for x in operands(rng, Sq=6, Sk=6))
    cu_seqlens = device.put(np.array(bounds, np.int32))
    layout = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "max_seqlen_q": longest, "max_seqlen_k": longest}
    arrays = map(device.put, (dout, q, k, v, dout, np.zeros((1, 6), np.float32)))
    targets = {n: device.guarded(x.shape, x.dtype) for n, x in zip(("dq", "dk", "dv"), (q, k, v), strict=True)}
    for x in flash_attention_backward(*arrays, **layout, **targets):
        assert np.isfinite(device.get(x).astype(float)).all()


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


@pytest.mark.skipif(has_gpu(), reason="the emulator's orders of completion")
@pytest.mark.parametrize(("D", "options"), [(64, {"causal": True}), (128, {"window": (90, 70)}), (256, {})])
def test_deterministic(rng, D, options):
    """Blocks wait for their turn to add to dq: the same bits in any order of completion."""
    inputs = operands(rng, Sq=34, Sk=140 if D < 256 else 70, D=D)
    results = []
    for completion in ("late", "random"):
        with rawops.emulate(arch="sm_90a", completion=completion, seed=3) as emu:
            arguments = (*inputs, *forward(inputs, **options))
            results.append(flash_attention_backward(*arguments, **options, deterministic=True))
            assert emu.report[-1].kernel.startswith("rawops::attention_backward_dq_sm90")
    for x, y, want in zip(*results, references.attention_backward(*inputs, **options), strict=True):
        np.testing.assert_array_equal(x, y)
        np.testing.assert_allclose(x.astype(float), want, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_deterministic_on_gpu(device, rng, D, causal):
    """More tiles than the GPU holds; some of the sums come out in another order without."""
    inputs = [device.put(x) for x in operands(rng, B=2, Sq=2048, Sk=2048, Hq=8, Hkv=4, D=D)]
    out, lse = flash_attention(*inputs[1:], causal=causal, return_lse=True)
    first, *others = (
        flash_attention_backward(*inputs, out, lse, causal=causal, deterministic=deterministic)
        for deterministic in (True, True, True, False)
    )
    for other in others[:-1]:
        assert all((x == y).all() for x, y in zip(first, other, strict=True))
    assert not (first[0] == others[-1][0]).all()
    for x, y in zip(first, others[-1], strict=True):
        np.testing.assert_allclose(device.get(x).astype(float), device.get(y).astype(float), atol=4e-3)


def test_shared_memory_fits():
    assert all(sm90.shared_bytes(head_dim) <= 232448 for head_dim in (64, 128, 256))
