"""Gradients of attention: the reference against finite differences, the kernels against the reference."""

import ml_dtypes
import numpy as np
import pytest

import rawops
from rawops import _attention_backward as gradients
from rawops import _attention_config as config
from rawops.attention import flash_attention, flash_attention_backward, flash_attention_varlen
from rawops.testing import references

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8}


def operands(rng, B=1, Sq=7, Sk=70, Hq=2, Hkv=1, D=64, Dv=None, dtype="float16") -> tuple:
    """dout, q, k and v."""
    shapes = (B, Sq, Hq, Dv or D), (B, Sq, Hq, D), (B, Sk, Hkv, D), (B, Sk, Hkv, Dv or D)
    return tuple(rng.standard_normal(shape).astype(BFLOAT16 if dtype == "bfloat16" else dtype) for shape in shapes)


def run(device, inputs: tuple, **options) -> tuple:
    """Forward and backward; returns dq, dk and dv in guarded arrays."""
    dout, *qkv = map(device.put, inputs)
    out, lse = flash_attention(*qkv, **options, return_lse=True)
    names = zip(("dq", "dk", "dv"), qkv, strict=True)
    targets = {name: device.guarded(x.shape, x.dtype) for name, x in names}
    got = flash_attention_backward(dout, *qkv, out, lse, **options, **targets)
    assert all(x is y for x, y in zip(got, targets.values(), strict=True))
    return got


def assert_gradients(device, got: tuple, want: tuple, dtype: str) -> None:
    """The inputs have a variance of 1, so the terms of each sum are of that order too, however much cancels in them."""
    for x, reference in zip(got, want, strict=True):
        error = np.abs(device.get(x).astype(np.float64) - reference)
        scale = max(np.sqrt(np.sum(reference**2) / max(reference.size, 1)), 0.25)
        assert (error <= ROUNDOFF[dtype] * (8 * scale + 2 * np.abs(reference))).all(), error.max() / scale


def check(device, inputs: tuple, **options) -> None:
    on_device = {n: device.put(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
    got = run(device, inputs, **on_device)
    assert_gradients(device, got, references.attention_backward(*inputs, **options), inputs[1].dtype.name)


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (9, 3)},
    "softcap": {"softcap": 1.5, "causal": True},
    "scale 0": {"softmax_scale": 0.0},
    "negative scale": {"softmax_scale": -0.2, "causal": True},
}


@pytest.mark.parametrize("options", [*OPTIONS, "alibi", "bias"])
def test_reference(rng, options):
    """The reference's gradients are what finite differences of its forward pass say."""
    dout, *qkv = (x.astype(np.float64) for x in operands(rng, Sq=3, Sk=5, D=4))
    extra = OPTIONS.get(options, {})
    if options == "alibi":
        extra = {"alibi_slopes": np.array([0.3, 0.7])}
    if options == "bias":
        extra = {"bias": rng.standard_normal((3, 5))}
    found = references.attention_backward(dout, *qkv, **extra)
    for which, x in enumerate(qkv):
        direction = rng.standard_normal(x.shape)
        moved = [[*qkv[:which], x + s * direction, *qkv[which + 1 :]] for s in (1e-6, -1e-6)]
        high, low = (np.sum(dout * references.attention(*m, **extra)[0]) for m in moved)
        np.testing.assert_allclose(np.sum(found[which] * direction), (high - low) / 2e-6, rtol=1e-6, atol=1e-8)


# --- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("size", [(1, 1), (70, 66), (5, 64), (65, 3)], ids=str)
def test_sizes(device, rng, size, dtype):
    Sq, Sk = size
    check(device, operands(rng, B=2, Sq=Sq, Sk=Sk, Hq=1, dtype=dtype), causal=True)


@pytest.mark.parametrize("options", OPTIONS)
def test_options(device, rng, options):
    check(device, operands(rng, B=2, Sq=9, Sk=20, Hq=2, Hkv=2), **OPTIONS[options])


@pytest.mark.parametrize("head_dims", [(40, 24), (96, 128), (192, 128), (256, 256)], ids=str)
def test_head_dims(device, rng, head_dims):
    D, Dv = head_dims
    check(device, operands(rng, Sq=5, Sk=20, Hq=1, D=D, Dv=Dv), causal=True)


def test_grouped_heads(device, rng):
    """The gradient of a KV head is the sum over its query heads, of which there are any number."""
    for heads in ((6, 2), (5, 1)):
        check(device, operands(rng, B=2, Sq=5, Sk=9, Hq=heads[0], Hkv=heads[1]), causal=True)


def test_scores(device, rng):
    """Softcap, ALiBi and a bias that hides keys, all at once."""
    bias = rng.standard_normal((2, 1, 5, 9)).astype(np.float32)
    bias[0, 0, 2] = -np.inf
    bias[1, 0, 1, :4] = -np.inf
    slopes = rng.uniform(0.1, 1.0, (2, 2)).astype(np.float32)
    check(device, operands(rng, B=2, Sq=5, Sk=9), softcap=2.0, alibi_slopes=slopes, bias=bias)


def test_rows_with_one_key_or_none(device, rng):
    """No key: a gradient of exactly 0. One key: its weight is 1 whatever q and k are."""
    lengths_q, lengths_k = [76, 34, 46], [1, 1, 1]
    bounds_q, bounds_k = (np.concatenate([[0], np.cumsum(n)]).astype(np.int32) for n in (lengths_q, lengths_k))
    q, k, v = ((3 * rng.standard_normal((n, 1, 32))).astype(np.float16) for n in (156, 3, 3))
    arrays = [device.put(x) for x in (q, k, v)]
    bounds = {"cu_seqlens_q": device.put(bounds_q), "cu_seqlens_k": device.put(bounds_k)}
    bounds |= {"max_seqlen_q": 76, "max_seqlen_k": 1}
    out, lse = flash_attention_varlen(*arrays, **bounds, causal=True, return_lse=True)
    dout = device.put(np.ones((156, 1, 32), np.float16))
    dq, dk, dv = map(device.get, flash_attention_backward(dout, *arrays, out, lse, causal=True, **bounds))
    last = bounds_q[1:] - 1
    hidden = np.setdiff1d(np.arange(156), last)
    assert (dq[hidden] == 0).all()
    assert np.abs(dq[last].astype(np.float64)).max() < 0.05 and np.abs(dk.astype(np.float64)).max() < 0.05
    assert (dv == 1).all()


def test_equal_keys(device, rng):
    """Weights that are equal whatever q is: dv is the mean of dout over the keys, dq is 0."""
    dout, q, k, v = operands(rng, Sq=6, Sk=8, Hq=1)
    k[:] = k[:, :1]
    dq, _, dv = map(device.get, run(device, (dout, q, k, v)))
    assert np.abs(dq.astype(np.float64)).max() < 0.01
    want = dout.astype(np.float64).sum(1, keepdims=True) / 8
    np.testing.assert_allclose(dv.astype(np.float64), np.broadcast_to(want, dv.shape), rtol=2e-3, atol=1e-3)


# --- layouts --------------------------------------------------------------------------------------------------------


VIEWS = {
    "one number": lambda x: x[:1, :1, :1, :1],
    "heads first": lambda x: x.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3),
    "every other row": lambda x: x.repeat(2, axis=1)[:, ::2],
    "odd rows": lambda x: x.repeat(2, axis=3)[..., :67].copy()[..., 1:65],
    "reversed": lambda x: x[:, ::-1, :, ::-1].copy()[:, ::-1, :, ::-1],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("which", [0, 2], ids=["dout", "k"])
def test_views(device, rng, which, view):
    """A view gives the gradients of a contiguous copy: bit for bit, if the same kernel takes it."""
    inputs = operands(rng, B=2, Sq=5, Sk=20)
    arrays = [device.put(x) for x in inputs]
    whole = arrays[which]
    arrays[which] = device.xp.broadcast_to(VIEWS[view](whole), whole.shape)
    copies = [*arrays[:which], device.xp.ascontiguousarray(arrays[which]), *arrays[which + 1 :]]
    for mine, other in zip(gradients_of(arrays), gradients_of(copies), strict=True):
        assert_same(device, mine, other)


def assert_same(device, mine, other) -> None:
    mine, other = (device.get(x).astype(np.float64) for x in (mine, other))
    if device.is_emulated:
        np.testing.assert_array_equal(mine, other)
    else:
        np.testing.assert_allclose(mine, other, rtol=4e-3, atol=4e-3)


def gradients_of(arrays) -> tuple:
    out, lse = flash_attention(*arrays[1:], causal=True, return_lse=True)
    return flash_attention_backward(arrays[0], *arrays[1:], out, lse, causal=True, deterministic=True)


def test_targets_are_views(device, rng):
    inputs = [device.put(x) for x in operands(rng, B=2, Sq=5, Sk=9)]
    want = gradients_of(inputs)
    out, lse = flash_attention(*inputs[1:], causal=True, return_lse=True)
    targets = {}
    for name, x in zip(("dq", "dk", "dv"), inputs[1:], strict=True):
        targets[name] = device.xp.zeros((*x.shape[:2], 2 * x.shape[2], x.shape[3] + 3), x.dtype)[:, :, ::2, 3:]
    flash_attention_backward(inputs[0], *inputs[1:], out, lse, causal=True, deterministic=True, **targets)
    for got, reference in zip(targets.values(), want, strict=True):
        assert_same(device, got, reference)


# --- sequences ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spare", [0, 80])
def test_varlen(device, rng, spare):
    """Each sequence for itself; rows past the last one hold NaN and have gradients of zero."""
    lengths_q, lengths_k = [3, 70, 1, 0, 5], [9, 66, 0, 4, 5]
    bounds_q, bounds_k = (np.concatenate([[0], np.cumsum(n)]).astype(np.int32) for n in (lengths_q, lengths_k))

    def rows(total, heads):
        x = rng.standard_normal((total + spare, heads, 64))
        x[total:] = np.nan
        return x.astype(np.float16)

    dout, q, k, v = rows(79, 2), rows(79, 2), rows(84, 1), rows(84, 1)
    bounds = {"cu_seqlens_q": device.put(bounds_q), "cu_seqlens_k": device.put(bounds_k)}
    bounds |= {"max_seqlen_q": 70, "max_seqlen_k": 66}
    arrays = [device.put(x) for x in (q, k, v)]
    out, lse = flash_attention_varlen(*arrays, **bounds, causal=True, return_lse=True)
    targets = {n: device.guarded(x.shape, x.dtype) for n, x in zip(("dq", "dk", "dv"), arrays, strict=True)}
    got = flash_attention_backward(device.put(dout), *arrays, out, lse, causal=True, **bounds, **targets)
    want = [np.zeros(x.shape) for x in (q, k, v)]
    for b in range(5):
        i, j = slice(*bounds_q[b : b + 2]), slice(*bounds_k[b : b + 2])
        one = references.attention_backward(dout[None, i], q[None, i], k[None, j], v[None, j], causal=True)
        for total, part, at in zip(want, one, (i, j, j), strict=True):
            total[at] = part[0]
    assert_gradients(device, got, tuple(want), "float16")
    for x, used in zip(got, (79, 84, 84), strict=True):
        assert (device.get(x)[used:] == 0).all()


@pytest.mark.parametrize("shape", [(0, 3, 4, 2), (2, 0, 4, 2), (2, 3, 0, 2), (2, 3, 4, 0)], ids=str)
def test_empty(device, rng, shape):
    B, Sq, Sk, H = shape
    inputs = operands(rng, B=B, Sq=Sq, Sk=Sk, Hq=H, Hkv=H)
    for x, like in zip(run(device, inputs), inputs[1:], strict=True):
        assert x.shape == like.shape and (device.get(x) == 0).all()


# --- checks ---------------------------------------------------------------------------------------------------------

WRONG = {
    "dtype": (TypeError, "q must have dtype float16 or bfloat16, got float32", {"dtype": "float32"}, {}),
    "dout": (ValueError, "dout must have shape", {}, {"dout": np.zeros((1, 3, 2, 32), np.float16)}),
    "none": (TypeError, "lse must be an array, got None", {}, {"lse": None}),
    "lse": (ValueError, "lse must have shape", {}, {"lse": np.zeros((1, 3, 2), np.float32)}),
    "lse order": (
        ValueError,
        "lse must be C-contiguous",
        {},
        {"lse": np.zeros((1, 3, 2), np.float32).transpose(0, 2, 1)},
    ),
    "dq": (ValueError, "dq must have shape", {}, {"dq": np.zeros((1, 3, 1, 64), np.float16)}),
    "dk": (ValueError, "dk must be writeable", {}, {"dk": np.broadcast_to(np.float16(0), (1, 5, 1, 64))}),
    "bounds": (TypeError, "cu_seqlens_k must be given, got None", {}, {"cu_seqlens_q": np.zeros(2, np.int32)}),
    "longest alone": (TypeError, "cu_seqlens_q must be given, got None", {}, {"max_seqlen_k": 5}),
    "longest": (
        TypeError,
        "max_seqlen_q must be given, got None",
        {},
        {"cu_seqlens_q": np.zeros(2, np.int32), "cu_seqlens_k": np.zeros(2, np.int32)},
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(rng, name):
    kind, message, sizes, changes = WRONG[name]
    dout, q, k, v = operands(rng, Sq=3, Sk=5, **sizes)
    arguments = {"dout": dout, "q": q, "k": k, "v": v, "out": dout, "lse": np.zeros((1, 2, 3), np.float32)} | changes
    with rawops.emulate(), pytest.raises(kind, match=f"^flash_attention_backward: {message}"):
        flash_attention_backward(**arguments)


@pytest.mark.parametrize("name", ["dout", "lse", "dk"])
def test_arrays_between_elements_are_refused(device, rng, name):
    dout, q, k, v = map(device.put, operands(rng, Sq=3, Sk=5))
    lse = device.put(np.zeros((1, q.shape[2], 3), np.float32))
    arguments = {"dout": dout, "q": q, "k": k, "v": v, "out": dout.copy(), "lse": lse, "dk": k.copy()}
    arguments[name] = device.between(arguments[name])
    with pytest.raises(ValueError, match=f"flash_attention_backward: {name} must lie on whole elements, got address"):
        flash_attention_backward(**arguments)


@pytest.mark.parametrize("varlen", [False, True])
def test_keys_without_query_heads(device, rng, varlen):
    """Nothing is added to their gradients, and nothing of the queries is read."""
    _, _, k, v = operands(rng, Sq=5, Sk=9, Hq=2, Hkv=2)
    q, dout, lse = np.zeros((1, 5, 0, 64), k.dtype), np.zeros((1, 5, 0, v.shape[3]), k.dtype), np.zeros((1, 0, 5), "f")
    packing = {}
    k, v = k[:1], v[:1]
    if varlen:
        q, dout, lse, k, v = (x[0] for x in (q, dout, lse, k, v))
        packing = {"cu_seqlens_q": np.array([0, 5], np.int32), "cu_seqlens_k": np.array([0, 9], np.int32)}
        packing = {name: device.put(x) for name, x in packing.items()} | {"max_seqlen_q": 5, "max_seqlen_k": 9}
    targets = {"dk": device.guarded(k.shape, k.dtype), "dv": device.guarded(v.shape, v.dtype)}
    dq, dk, dv = flash_attention_backward(*map(device.put, (dout, q, k, v, dout, lse)), **packing, **targets)
    assert dq.shape == q.shape
    assert not device.get(dk).any() and not device.get(dv).any()


@pytest.mark.parametrize(("gradient", "other"), [("dq", "q"), ("dv", "dout"), ("dk", "v"), ("dq", "dk")])
def test_gradients_have_memory_of_their_own(rng, gradient, other):
    dout, q, k, v = operands(rng, Sq=5, Sk=5, Hq=1)
    arguments = {"dout": dout, "q": q, "k": k, "v": v, "out": dout.copy(), "lse": np.zeros((1, 1, 5), np.float32)}
    arguments |= {"dk": np.zeros_like(k)}
    arguments[gradient] = arguments[other]
    with (
        rawops.emulate(),
        pytest.raises(ValueError, match=f"d. must not overlap {other}|d. must not overlap {gradient}"),
    ):
        flash_attention_backward(**arguments)


@pytest.mark.parametrize("first", [4, 5])
def test_gradients_among_other_heads_of_one_array(device, rng, first):
    """dk begins at head `first` of rows that also hold k, v (two heads each) and dv, the sixth and seventh."""
    dout, q, k, v = operands(rng, Sq=5, Sk=5, Hq=2, Hkv=2)
    whole = np.full((*k.shape[:2], 8, k.shape[3]), np.nan, k.dtype)
    whole[:, :, :2], whole[:, :, 2:4] = k, v
    whole, dout, q, lse = map(device.put, (whole, dout, q, np.zeros((k.shape[0], 2, 5), np.float32)))
    k, v, dk, dv = (whole[:, :, i : i + 2] for i in (0, 2, first, 6))
    arguments = {"dout": dout, "q": q, "k": k, "v": v, "out": dout.copy(), "lse": lse}
    if first == 5:
        with pytest.raises(ValueError, match=r"dk must not overlap dv, got .* bytes apart"):
            flash_attention_backward(**arguments, dk=dk, dv=dv)
        assert np.isnan(device.get(whole)[:, :, 4:]).all()
        return
    want = flash_attention_backward(**arguments)
    flash_attention_backward(**arguments, dk=dk, dv=dv)
    for got, expected in zip((dk, dv), want[1:], strict=True):
        np.testing.assert_array_equal(device.get(got), device.get(expected))


@pytest.mark.parametrize("shared_bytes", [101376, 166912, 232448])
def test_every_head_dim_fits(shared_bytes):
    for D in config.HEAD_DIMS:
        for Dv in config.HEAD_DIMS:
            tile = gradients.select_tile(D, Dv, 0, shared_bytes)
            assert gradients.shared_bytes(tile) <= shared_bytes
