"""Attention forward: values over shapes and options, what each query sees, layouts, precision, checks."""

import math

import ml_dtypes
import numpy as np
import pytest

import rawops
from rawops import _attention_config as config
from rawops.attention import flash_attention
from rawops.testing import references
from rawops.testing.tolerances import assert_close

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# Rounding the weights costs a unit roundoff of the type: as many of float32's.
ROUNDOFFS = {"float16": 2**13, "bfloat16": 2**16, "float32": 2**6}


def operands(rng, B=1, Sq=7, Sk=70, Hq=2, Hkv=1, D=64, Dv=None, dtype="float16") -> tuple:
    shapes = (B, Sq, Hq, D), (B, Sk, Hkv, D), (B, Sk, Hkv, Dv or D)
    return tuple(rng.standard_normal(shape).astype(BFLOAT16 if dtype == "bfloat16" else dtype) for shape in shapes)


def check(device, inputs: tuple, num_splits=None, **options) -> None:
    """Compare with the reference; arrays among the options go to the device."""
    q, _, v = inputs
    on_device = {n: device.put(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
    out = device.guarded((*q.shape[:-1], v.shape[-1]), q.dtype)
    got = flash_attention(*map(device.put, inputs), **on_device, num_splits=num_splits, return_lse=True, out=out)
    assert got[0] is out
    assert_result(device, got, inputs, **options)


def assert_result(device, got, inputs: tuple, **options) -> None:
    q, k, v = inputs
    out, lse = references.attention(q, k, v, **options)
    magnitude, _ = references.attention(q, k, np.abs(v.astype(np.float64)), **options)
    assert_close(device.get(got[0]), out, q.dtype, k=ROUNDOFFS[q.dtype.name], magnitude=magnitude)
    assert got[1].dtype == np.float32
    largest = np.max(np.abs(lse), where=np.isfinite(lse), initial=1.0)
    assert_close(device.get(got[1]), lse, np.float32, k=64, magnitude=largest)


def places(B=1, Sq=4, Sk=4, Hq=1, Hkv=1, D=64, dtype="float16") -> tuple:
    """Queries of zero and v[j] = j: the result is the mean of the places seen, lse the logarithm of their number."""
    v = np.broadcast_to(np.arange(Sk)[:, None, None], (B, Sk, Hkv, D))
    dtype = BFLOAT16 if dtype == "bfloat16" else dtype
    return np.zeros((B, Sq, Hq, D), dtype), np.ones((B, Sk, Hkv, D), dtype), v.astype(dtype)


def seen_by(device, inputs: tuple, **options) -> tuple[np.ndarray, np.ndarray]:
    """The mean of the places that each query sees and their number, exactly."""
    out, lse = flash_attention(*map(device.put, inputs), **options, return_lse=True)
    out, lse = device.get(out).astype(np.float64), device.get(lse)
    assert (out == out[..., :1]).all() and (out == out[:, :, :1]).all()
    return out[0, :, 0, 0], np.exp(lse[0, 0].astype(np.float64))


# --- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("size", [(1, 1), (1, 130), (5, 64), (65, 33)], ids=str)
def test_sizes(device, rng, size, dtype):
    Sq, Sk = size
    check(device, operands(rng, B=2, Sq=Sq, Sk=Sk, dtype=dtype))


@pytest.mark.parametrize(
    "head_dims", [(1, 3), (40, 40), (96, 96), (128, 64), (64, 128), (192, 128), (256, 250)], ids=str
)
def test_head_dims(device, rng, head_dims):
    D, Dv = head_dims
    check(device, operands(rng, Sq=3, Sk=40, D=D, Dv=Dv), causal=True)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256], ids=str)
def test_large_tiles(device, rng, monkeypatch, head_dim):
    """What long sequences take, at a size that the emulator can do: whole blocks of keys, and with two ends."""
    chosen = config.tiles_of(head_dim, head_dim)[0]
    one = config.Config(chosen, 1, -(-133 // chosen.block_m), 1)
    monkeypatch.setattr(config, "select_config", lambda *_: one)
    check(device, operands(rng, Sq=133, Sk=256, Hq=1, D=head_dim))
    check(device, operands(rng, Sq=133, Sk=140, Hq=1, D=head_dim), causal=True, window=(100, None))


OPTIONS = {
    "causal": {"causal": True},
    "window": {"window": (9, 3)},
    "window, causal": {"window": (5, 7), "causal": True},
    "softcap": {"softcap": 1.5},
    "softcap, scale": {"softcap": 30.0, "softmax_scale": 2.0, "causal": True},
    "scale 0": {"softmax_scale": 0.0, "causal": True},
    "scale that is 0 in float32": {"softmax_scale": 1e-50, "causal": True},
    "negative scale": {"softmax_scale": -0.5, "causal": True},
}


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("options", OPTIONS)
def test_options(device, rng, options, splits):
    check(device, operands(rng, B=2, Sq=9, Sk=70, Hq=2, Hkv=2), splits, **OPTIONS[options])


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("batched", [False, True], ids=["of heads", "of sequences and heads"])
def test_alibi(device, rng, batched, dtype):
    slopes = rng.uniform(0.1, 1.0, (2, 4) if batched else 4).astype(np.float32)
    check(device, operands(rng, B=2, Sq=9, Sk=20, Hq=4, Hkv=2, dtype=dtype), alibi_slopes=slopes, causal=True)
    check(device, operands(rng, B=2, Sq=9, Sk=20, Hq=4, Hkv=2, dtype=dtype), alibi_slopes=slopes)


BIASES = {"full": (2, 4, 5, 66), "of heads": (4, 1, 66), "of queries": (5, 1), "of keys": (66,), "one": ()}


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("shape", BIASES)
def test_bias(device, rng, shape, dtype):
    bias = np.asarray(rng.standard_normal(BIASES[shape])).astype(dtype)
    check(device, operands(rng, B=2, Sq=5, Sk=66, Hq=4, Hkv=2), bias=bias)


def test_all_of_scores(device, rng):
    """Softcap, then ALiBi, then bias, some of it -inf; the bias is a transposed view."""
    bias = rng.standard_normal((6, 5)).astype(np.float32)
    bias[3, :4] = -np.inf
    slopes = rng.uniform(0.1, 1.0, 2).astype(np.float32)
    inputs = operands(rng, Sq=5, Sk=6)
    options = {"softcap": 2.0, "alibi_slopes": device.put(slopes), "causal": True}
    got = flash_attention(*map(device.put, inputs), **options, bias=device.put(bias).T, return_lse=True)
    assert_result(device, got, inputs, **options | {"alibi_slopes": slopes}, bias=bias.T)


# --- what a query sees ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_causal_is_bottom_right(device, dtype, splits):
    mean, count = seen_by(device, places(Sq=2, Sk=5, dtype=dtype), causal=True, num_splits=splits)
    assert mean.tolist() == [1.5, 2.0]
    np.testing.assert_allclose(count, [4, 5], rtol=1e-6)
    mean, count = seen_by(device, places(Sq=5, Sk=2, dtype=dtype), causal=True, num_splits=splits)
    assert mean.tolist() == [0, 0, 0, 0, 0.5]
    np.testing.assert_allclose(count, [0, 0, 0, 1, 2], rtol=1e-6)


@pytest.mark.parametrize("splits", [1, 8])
def test_no_keys(device, splits):
    out, lse = flash_attention(*map(device.put, places(Sq=3, Sk=0)), return_lse=True, num_splits=splits)
    assert (device.get(out) == 0).all() and (device.get(lse) == -np.inf).all()


def test_windows(device):
    def means(window, **sizes):
        return seen_by(device, places(**sizes), window=window)[0].tolist()

    assert means((1, 0), Sq=6, Sk=6) == [0, 0.5, 1.5, 2.5, 3.5, 4.5]
    assert means((0, 0), Sq=6, Sk=6) == [0, 1, 2, 3, 4, 5]
    assert means((None, 2**31 - 1), Sq=8, Sk=3) == [1.0] * 8
    assert means((2**62, 2**62), Sq=8, Sk=3) == [1.0] * 8
    mean, count = seen_by(device, places(Sq=8, Sk=3), window=(0, 0))
    assert mean.tolist() == [0, 0, 0, 0, 0, 0, 1, 2]
    np.testing.assert_allclose(count, [0] * 5 + [1] * 3, rtol=1e-6)


def test_window_over_all_equals_causal(device, rng):
    inputs = [device.put(x) for x in operands(rng, Sq=90, Sk=90)]
    causal = flash_attention(*inputs, causal=True)
    window = flash_attention(*inputs, window=(89, 0))
    np.testing.assert_array_equal(device.get(causal), device.get(window))


@pytest.mark.parametrize("heads", [(28, 4), (15, 5), (48, 2), (17, 1)], ids=str)
@pytest.mark.parametrize("Sq", [1, 3])
def test_grouped_heads(device, heads, Sq):
    """Each query head reads its own KV head, packed into one tile or not."""
    Hq, Hkv = heads
    q, k, v = places(Sq=Sq, Sk=5, Hq=Hq, Hkv=Hkv)
    v[:] = np.arange(Hkv)[:, None]
    out = device.get(flash_attention(*map(device.put, (q, k, v))))
    np.testing.assert_array_equal(out[0, :, :, 0], np.broadcast_to(np.arange(Hq) // (Hq // Hkv), (Sq, Hq)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_hidden_values_stay_hidden(device, rng, dtype):
    """Keys and values that some rows do not see change nothing there, and everything where they are seen."""
    q, k, v = operands(rng, Sq=70, Sk=70, dtype=dtype)
    clean = device.get(flash_attention(*map(device.put, (q, k, v)), causal=True))
    for value in (np.nan, np.inf, -np.inf, 6e4):
        k[:, 66], v[:, 66] = value, value
        got = device.get(flash_attention(*map(device.put, (q, k, v)), causal=True)).astype(np.float64)
        np.testing.assert_array_equal(got[:, :66], clean[:, :66].astype(np.float64), str(value))
        if np.isnan(value):
            assert np.isnan(got[:, 66:]).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("keys", [16, 200])
def test_large_keys_stay_hidden(device, rng, dtype, keys):
    """A neighbour that sees a score far from its own, or none of its own size, leaves a row's bits alone."""
    q, k, v = operands(rng, Sq=keys, Sk=keys, Hq=4, dtype=dtype)
    q[..., 0] = 1
    hidden = keys - 3
    clean = flash_attention(*map(device.put, (q, k, v)), causal=True, return_lse=True)
    for value in (np.inf, -6e4, 6e4, 60.0):
        k[:, hidden, :, 0] = value
        got = flash_attention(*map(device.put, (q, k, v)), causal=True, return_lse=True)
        for x, y in zip(got, clean, strict=True):
            rows = (slice(None), slice(hidden)) if x.ndim == 4 else (Ellipsis, slice(hidden))
            assert device.get(x)[rows].tobytes() == device.get(y)[rows].tobytes(), value


def test_infinite_value_is_seen(device, rng):
    q, k, v = operands(rng, Sq=4, Sk=4, Hq=1)
    v[0, 2, 0, 5], v[0, 3, 0, 7] = np.inf, -np.inf
    got = device.get(flash_attention(*map(device.put, (q, k, v)), causal=True))
    want = np.zeros((4, 64))
    want[2:, 5], want[3:, 7] = np.inf, -np.inf
    np.testing.assert_array_equal(np.where(np.isinf(got[0, :, 0]), got[0, :, 0], 0), want)


# --- precision ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("score", [-2e5, -200.0, 200.0, 2e5])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_equal_keys_at_any_score(device, rng, dtype, score):
    """Scores far from 0: the weights are equal, and one key's value comes back to the bit."""
    inputs = operands(rng, Sq=70, Sk=70, dtype=dtype)
    inputs[0][:], inputs[1][:] = 0, 0
    inputs[0][..., 0], inputs[1][..., 0] = 16, math.copysign(16, score)
    q, k, v = map(device.put, inputs)
    out, lse = flash_attention(q, k, v, causal=True, softmax_scale=abs(score) / 256, return_lse=True)
    np.testing.assert_array_equal(device.get(out)[:, 0], np.repeat(inputs[2][:, 0], 2, axis=1))
    np.testing.assert_allclose(device.get(lse)[0, 0], score + np.log(np.arange(1, 71)), rtol=2e-7, atol=2e-5)
    means = np.cumsum(inputs[2].astype(np.float64), axis=1) / np.arange(1, 71)[:, None, None]
    assert_close(device.get(out)[:, :, :1], means, inputs[2].dtype, k=2**6)


@pytest.mark.parametrize("rise", [4.0, 60.0, -60.0, 300.0])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_scores_that_rise_from_block_to_block(device, rng, dtype, rise):
    """A little, so that the maximum of the first keys stays; more, so that it goes; and down. A row has none of it."""
    q, k, v = operands(rng, Sq=70, Sk=300, dtype=dtype)
    q[..., 0], q[0, 3], k[..., 0] = 1, 0, rise * (np.arange(300) // 64)[:, None]
    check(device, (q, k, v), 1, softmax_scale=1.0)
    check(device, (q, k, v), 1, softmax_scale=1.0, causal=True)


def test_lse_is_natural(device):
    _, lse = flash_attention(*map(device.put, places(Sq=1, Sk=10)), return_lse=True)
    np.testing.assert_allclose(device.get(lse), math.log(10), rtol=1e-6)


# --- layouts --------------------------------------------------------------------------------------------------------


def test_slices_of_packed_projections(device, rng):
    """q, k and v as slices of one array, three sequences: every one of them right."""
    B, S, Hq, Hkv, D = 3, 4, 8, 2, 64
    packed = rng.standard_normal((B, S, (Hq + 2 * Hkv) * D)).astype(np.float16)

    def split(x):
        q, k, v = x[..., : Hq * D], x[..., Hq * D : (Hq + Hkv) * D], x[..., (Hq + Hkv) * D :]
        return q.reshape(B, S, Hq, D), k.reshape(B, S, Hkv, D), v.reshape(B, S, Hkv, D)

    def views(x):
        item = x.itemsize
        strides = (S * packed.shape[2] * item, packed.shape[2] * item, D * item, item)
        as_strided = np.lib.stride_tricks.as_strided if device.is_emulated else device.xp.lib.stride_tricks.as_strided
        starts, heads = (0, Hq * D, (Hq + Hkv) * D), (Hq, Hkv, Hkv)
        return [as_strided(x[..., s:], (B, S, h, D), strides) for s, h in zip(starts, heads, strict=True)]

    got = flash_attention(*views(device.put(packed)), causal=True, return_lse=True)
    assert_result(device, got, split(packed), causal=True)


VIEWS = {
    "heads first": lambda x: x.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3),
    "last axis first": lambda x: x.transpose(3, 0, 1, 2).copy().transpose(1, 2, 3, 0),
    "8-byte rows": lambda x: _inside(x, 4, 68),
    "4-byte rows": lambda x: _inside(x, 2, 66),
    "odd rows": lambda x: _inside(x, 1, 67),
    "every other row": lambda x: x.repeat(2, axis=1)[:, ::2],
    "reversed": lambda x: x[:, ::-1, ::-1, ::-1].copy()[:, ::-1, ::-1, ::-1],
}


def _inside(x, start: int, width: int):
    """The same values in rows `width` apart, from element `start` on."""
    whole = x.repeat(2, axis=3)[..., :width].copy()
    whole[..., start : start + 64] = x
    return whole[..., start : start + 64]


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("which", [0, 1, 2, 3], ids=["q", "k", "v", "out"])
def test_views(device, rng, which, view):
    """One array at a time is a view: the answer is that of contiguous copies, bit for bit."""
    inputs = [device.put(x) for x in operands(rng, B=2, Sq=5, Sk=20)]
    want = flash_attention(*inputs, causal=True)
    arrays = [*inputs, device.xp.zeros_like(want)]
    arrays[which] = VIEWS[view](arrays[which])
    got = flash_attention(*arrays[:3], causal=True, out=arrays[3])
    np.testing.assert_array_equal(device.get(got), device.get(want))


def test_broadcast_keys(device, rng):
    """One key and value for all: strides of 0."""
    q, k, v = operands(rng, Sq=3, Sk=5)
    one = [device.xp.broadcast_to(device.put(x[:, :1]), x.shape) for x in (k, v)]
    out = flash_attention(device.put(q), *one)
    np.testing.assert_array_equal(device.get(out), np.broadcast_to(v[:, :1], out.shape))


def test_out_over_an_input(device, rng):
    inputs = operands(rng, Sq=20, Sk=20, Hq=1)
    want = device.get(flash_attention(*map(device.put, inputs)))
    for which in range(3):
        arrays = [device.put(x.copy()) for x in inputs]
        got = flash_attention(*arrays, out=arrays[which])
        assert got is arrays[which]
        np.testing.assert_array_equal(device.get(got), want)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("shared", ["q", "v"])
def test_out_in_strides_over_an_input(device, rng, shared, splits):
    """The result that is made aside has strides of its own."""
    q, k, v = operands(rng, B=2, Sq=6, Sk=6, Hq=2, Hkv=2)
    named = {name: device.put(x) for name, x in zip("qkv", (q, k, v), strict=True)}
    whole = device.put(np.concatenate([{"q": q, "v": v}[shared], np.full_like(q, np.nan)], axis=1))
    named[shared], out = whole[:, :6], whole[:, 1:7]
    got = flash_attention(**named, out=out, return_lse=True, num_splits=splits)
    assert got[0] is out
    assert_result(device, got, (q, k, v))
    assert (device.get(whole)[:, 0] == {"q": q, "v": v}[shared][:, 0]).all()
    assert np.isnan(device.get(whole)[:, 7:]).all()


def test_more_splits_than_keys(device, rng):
    inputs = operands(rng, Sq=3, Sk=5)
    check(device, inputs, 16)


@pytest.mark.parametrize("shape", [(0, 3, 4, 2), (2, 0, 4, 2), (2, 3, 4, 0), (2, 3, 0, 2)], ids=str)
def test_empty(device, shape):
    B, Sq, Sk, H = shape
    q, k, v = places(B, Sq, Sk, H, H)
    slopes = device.put(np.zeros((B, H), np.float32))
    out, lse = flash_attention(*map(device.put, (q, k, v)), alibi_slopes=slopes, return_lse=True)
    assert out.shape == q.shape and lse.shape == (B, H, Sq)
    assert (device.get(out) == 0).all()


def test_no_head_dim(device):
    """Scores of nothing are 0, a result of nothing is empty; lse is there in both cases."""
    q, k, v = places(Sq=2, Sk=4)
    out, lse = flash_attention(device.put(q[..., :0]), device.put(k[..., :0]), device.put(v), return_lse=True)
    assert (device.get(out) == 1.5).all()
    out, lse = flash_attention(device.put(q), device.put(k), device.put(v[..., :0]), return_lse=True)
    np.testing.assert_allclose(device.get(lse), math.log(4), rtol=1e-6)


# --- checks ---------------------------------------------------------------------------------------------------------


def call(**changes):
    q, k, v = places(B=2, Sq=3, Sk=5, Hq=4, Hkv=2)
    return flash_attention(**{"q": q, "k": k, "v": v} | changes)


WRONG = {
    "heads": (ValueError, "q must have a number of heads that those of k .* divide", {"q": np.zeros((2, 3, 3, 64))}),
    "head_dim": (ValueError, "k must have shape", {"q": np.zeros((2, 3, 4, 32))}),
    "wide": (ValueError, "at most 256", {"v": np.zeros((2, 5, 2, 257))}),
    "dimensions": (ValueError, "q must have 4 dimensions", {"q": np.zeros((3, 4, 64))}),
    "batch": (ValueError, "k must have shape .*q and k share batch and head_dim", {"q": np.zeros((3, 3, 4, 64))}),
    "none": (TypeError, "k must be an array, got None", {"k": None}),
    "window": (ValueError, "window must be between 0", {"window": (-3, None)}),
    "window kind": (TypeError, "window must be a pair", {"window": 3}),
    "causal kind": (TypeError, "causal must be True or False, got 'no'", {"causal": "no"}),
    "causal array": (TypeError, "causal must be True or False", {"causal": np.array([1, 2])}),
    "window type": (TypeError, "window must be an integer", {"window": (1.5, None)}),
    "scale": (ValueError, "softmax_scale must be finite", {"softmax_scale": math.inf}),
    "scale beyond float32": (ValueError, "softmax_scale must fit float32", {"softmax_scale": 3e38}),
    "softcap": (ValueError, "softcap must be 0", {"softcap": -1.0}),
    "softcap beyond float32": (ValueError, "softcap must fit float32", {"softcap": 3e38}),
    "softcap of next to nothing": (ValueError, "as must softmax_scale / softcap, got 1e-40", {"softcap": 1e-40}),
    "splits": (ValueError, "num_splits must be between", {"num_splits": 0}),
    "slopes": (ValueError, "alibi_slopes must have shape", {"alibi_slopes": np.zeros(3, np.float32)}),
    "slopes dtype": (TypeError, "alibi_slopes must have dtype float32", {"alibi_slopes": np.zeros(4)}),
    "bias": (ValueError, "bias must broadcast", {"bias": np.zeros((3, 4), np.float32)}),
    "out": (ValueError, "out must have shape", {"out": np.zeros((2, 3, 4, 32), np.float16)}),
    "out dtype": (TypeError, "out must have dtype float16", {"out": np.zeros((2, 3, 4, 64), np.float32)}),
    "out of one row": (
        ValueError,
        "out must have entries of its own",
        {"out": np.lib.stride_tricks.as_strided(np.zeros(64, np.float16), (2, 3, 4, 64), (0, 0, 0, 2))},
    ),
    "out read-only": (ValueError, "out must be writeable", {"out": np.broadcast_to(np.float16(0), (2, 3, 4, 64))}),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    kind, message, changes = WRONG[name]
    changes = {n: x.astype(np.float16) if isinstance(x, np.ndarray) and n in "qkv" else x for n, x in changes.items()}
    with rawops.emulate(), pytest.raises(kind, match=f"^flash_attention: .*{message}"):
        call(**changes)


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("num_splits", 1, 1.0),
        ("window", (9, None), (9.0, None)),
        ("softmax_scale", 1.0, 1 + 0j),
        ("softcap", 1.0, 1 + 0j),
        ("dropout_p", 0.0, 0j),
    ],
)
def test_what_equals_a_right_argument_is_still_wrong(name, right, wrong):
    with rawops.emulate():
        call(**{name: right})
        with pytest.raises(TypeError, match=f"{name} must be an? (integer|real number)"):
            call(**{name: wrong})


@pytest.mark.parametrize("name", ["q", "v", "bias", "out"])
def test_arrays_between_elements_are_refused(device, name):
    arrays = {"q": np.zeros((2, 3, 4, 64)), "v": np.zeros((2, 5, 2, 64)), "bias": np.zeros((3, 5))}
    x = device.between(arrays.get(name, arrays["q"]).astype(np.float16))
    message = f"flash_attention: {name} must lie on whole elements, got address"
    with rawops.emulate(), pytest.raises(ValueError, match=message):
        call(**{name: x})


def test_dtypes_differ():
    with rawops.emulate(), pytest.raises(TypeError, match="v must have dtype float16, got bfloat16"):
        call(v=np.zeros((2, 5, 2, 64), BFLOAT16))


# --- configurations -------------------------------------------------------------------------------------------------


def problem(**changes) -> config.Problem:
    sizes = {"batches": 1, "seqlen_q": 8192, "seqlen_k": 8192, "heads": 32, "kv_heads": 32}
    return config.Problem(**{"dtype": "float16", **sizes, "head_dim": 128, "head_dim_v": 128} | changes)


@pytest.mark.parametrize("shared_bytes", [101376, 166912, 232448])
def test_every_head_dim_fits(shared_bytes):
    for D in config.HEAD_DIMS:
        for Dv in config.HEAD_DIMS:
            chosen = config.select_config(problem(head_dim=D, head_dim_v=Dv), 132, shared_bytes)
            assert chosen.tile.shared_bytes <= shared_bytes
            assert chosen.tile.cpp in config.SM80.choices["tile"]


def test_short_queries_pack_and_split():
    decode = config.select_config(problem(seqlen_q=1, kv_heads=8), 132, 232448)
    assert decode.packed == 4 and decode.row_tiles == 1 and decode.splits > 8
    long = config.select_config(problem(), 132, 232448)
    assert (long.packed, long.row_tiles, long.splits) == (1, 64, 1)


@pytest.mark.parametrize("masked", [False, True])
def test_grid_has_each_tile_of_each_head_once(device, rng, monkeypatch, masked):
    """Sections of heads under a mask, and more row tiles than the grid may have."""
    monkeypatch.setattr(config, "L2_BYTES", 2 * 140 * 4 * 64)
    of_two_heads = problem(seqlen_k=140, head_dim=64, head_dim_v=64, window_right=0 if masked else config.UNLIMITED)
    assert config.grid_of(of_two_heads, 3, 6) == ((2, 3, 3) if masked else (1, 3, 6))
    inputs = operands(rng, B=2, Sq=150, Sk=140, Hq=3, Hkv=3)
    check(device, inputs, 1, causal=masked)
    monkeypatch.setattr(config, "_MAX_GRID", 2)
    assert config.grid_of(of_two_heads, 3, 6) == (6, 2, 1)
    check(device, inputs, 1, causal=masked)


def test_chosen_splits_are_used():
    assert config.select_config(problem(), 132, 232448, num_splits=7).splits == 7
    few = config.select_config(problem(seqlen_k=300), 132, 232448, num_splits=256)
    assert few.splits == -(-300 // few.tile.block_n)
    assert config.select_config(problem(seqlen_k=0), 132, 232448, num_splits=256).splits == 1
