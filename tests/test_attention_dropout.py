"""Dropout of attention's weights: the same ones by any kernel, forward and backward, as the reference has it."""

import numpy as np
import pytest
from hopper_gemm import ran_on_hopper

import rawops
from rawops.attention import FlashAttention, flash_attention, flash_attention_backward, flash_attention_varlen
from rawops.testing import references

SEED = 0x9E3779B97F4A7C15  # with bits in both halves
DROPS = {"dropout_p": 0.3, "dropout_seed": SEED, "dropout_offset": 5}


def test_philox():
    """The known answers of the algorithm's authors."""
    found = references.philox((0, 0, 0, 0), (0, 0))
    assert [int(x) for x in found] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    assert [int(x) for x in references.philox(*pi)] == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def test_share_kept():
    """Near to p on the whole, and in every column, row and head; other offsets, heads and sequences are others."""
    kept = references.attention_dropout((2, 3, 128, 160), 0.2, SEED) != 0
    assert abs(kept.mean() - 0.8) < 0.005
    for axis in (2, 3):
        assert np.abs(kept.mean(axis=axis) - 0.8).max() < 0.2
    masks = [*kept.reshape(6, -1), references.attention_dropout((1, 1, 128, 160), 0.2, SEED, 1)[0, 0].ravel() != 0]
    agreement = [np.mean(a == b) for i, a in enumerate(masks) for b in masks[:i]]
    assert np.abs(np.array(agreement) - 0.68).max() < 0.02  # 0.8^2 + 0.2^2


def one_hot(shape: tuple, dtype) -> np.ndarray:
    """Row i of each head has a 1 in column i: a product with it shows the weights."""
    x = np.zeros(shape, dtype)
    rows = np.arange(shape[1])
    x[:, rows, :, rows] = 1
    return x


def operands(rng, B=2, Sq=37, Sk=50, Hq=4, Hkv=2, D=64, dtype="float16") -> tuple:
    """q and k of moderate scores, so that no weight rounds to 0."""
    shapes = (B, Sq, Hq, D), (B, Sk, Hkv, D)
    return tuple((0.3 * rng.standard_normal(s)).astype(dtype) for s in shapes)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("splits", [1, 3])
def test_forward_mask(device, rng, dtype, splits):
    """Weight by weight, over tiles and split keys; lse is that of all weights."""
    q, k = operands(rng, Sk=130 if splits > 1 else 50, D=160 if splits > 1 else 64, B=1, dtype=dtype)
    v = one_hot(k.shape, dtype)
    arrays = [device.put(x) for x in (q, k, v)]
    out, lse = flash_attention(*arrays, **DROPS, num_splits=splits, return_lse=True)
    want, want_lse = references.attention(q, k, v, **DROPS)
    np.testing.assert_array_equal(device.get(out) != 0, want != 0)
    np.testing.assert_allclose(device.get(out).astype(float), want, rtol=4e-3)
    np.testing.assert_allclose(device.get(lse), want_lse, rtol=1e-3)


@pytest.mark.parametrize(("D", "options"), [(64, {"causal": True}), (192, {"softcap": 3.0}), (128, {"num_splits": 2})])
def test_forward_mask_on_hopper(hopper, rng, D, options):
    """Another kernel, other tiles, the same weights."""
    q, k = operands(rng, B=1 + (D == 64), Sq=66, Sk=D - 10, Hq=2, Hkv=1, D=D)
    v = one_hot(k.shape, k.dtype)
    out = flash_attention(*map(hopper.put, (q, k, v)), **DROPS, **options)
    assert ran_on_hopper(hopper, "attention_merge" if "num_splits" in options else "attention_sm90")
    options.pop("num_splits", None)
    want, _ = references.attention(q, k, v, **DROPS, **options)
    np.testing.assert_array_equal(hopper.get(out) != 0, want != 0)
    np.testing.assert_allclose(hopper.get(out).astype(float), want, rtol=4e-3)


def test_backward_mask(device, rng):
    """dv of a one-hot dout is the transposed weights."""
    q, k = operands(rng, Hq=2)
    v, dout = (one_hot(x.shape, x.dtype) for x in (k, q))
    arrays = [device.put(x) for x in (q, k, v)]
    out, lse = flash_attention(*arrays, **DROPS, return_lse=True)
    _, _, dv = flash_attention_backward(device.put(dout), *arrays, out, lse, **DROPS)
    want = references.attention_backward(dout, q, k, v, **DROPS)[2]
    np.testing.assert_array_equal(device.get(dv) != 0, want != 0)


MASKS = {
    "full": {},
    "causal": {"causal": True},
    "softcap, window": {"softcap": 2.0, "window": (20, 8)},
    "negative scale": {"softmax_scale": -0.2},
}


@pytest.mark.parametrize(("D", "mask"), [*((64, mask) for mask in MASKS), (136, "causal")])
def test_gradients(device, rng, D, mask):
    """Those of the reference with the same weights dropped, for grouped heads; the seed and offset in memory."""
    q, k = operands(rng, B=1, Sq=20, Sk=40, Hq=2, Hkv=1, D=D)
    dout, v = rng.standard_normal(q.shape).astype(q.dtype), rng.standard_normal(k.shape).astype(k.dtype)
    arrays, options = [device.put(x) for x in (q, k, v)], {**MASKS[mask], **DROPS}
    in_memory = {"dropout_seed": device.put(np.array(SEED, np.uint64)), "dropout_offset": device.put(np.array([5]))}
    out, lse = flash_attention(*arrays, **options | in_memory, return_lse=True)
    want, _ = references.attention(q, k, v, **options)
    np.testing.assert_allclose(device.get(out).astype(float), want, atol=4e-3)
    got = flash_attention_backward(device.put(dout), *arrays, out, lse, **options | in_memory)
    for x, reference in zip(got, references.attention_backward(dout, q, k, v, **options), strict=True):
        error = np.abs(device.get(x).astype(float) - reference)
        scale = max(np.sqrt(np.mean(reference**2)), 0.25)
        assert (error <= 2.0**-11 * (8 * scale + 2 * np.abs(reference))).all(), error.max() / scale


def test_varlen(device, rng):
    """Queries and keys count from the start of their sequence, sequences from 0."""
    lengths = np.array([17, 0, 40])
    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    exists = np.arange(40) < lengths[:, None]
    padded = [rng.standard_normal((3, 40, 2, 64)).astype(np.float16) for _ in range(4)]
    dout, *arrays = (device.put(x[exists]) for x in padded)
    layout = {"cu_seqlens_q": device.put(bounds), "cu_seqlens_k": device.put(bounds)}
    layout |= {"max_seqlen_q": 40, "max_seqlen_k": 40}
    out, lse = flash_attention_varlen(*arrays, **layout, **DROPS, return_lse=True)
    hides = {"bias": np.where(exists, 0.0, -np.inf)[:, None, None]}
    want, _ = references.attention(*padded[1:], **hides, **DROPS)
    np.testing.assert_allclose(device.get(out).astype(float), want[exists], atol=4e-3)
    got = flash_attention_backward(dout, *arrays, out, lse, **layout, **DROPS)
    padded[0][~exists] = 0
    for x, reference in zip(got, references.attention_backward(*padded, **hides, **DROPS), strict=True):
        np.testing.assert_allclose(device.get(x).astype(float), reference[exists], atol=2e-2, rtol=4e-3)


def test_nothing_dropped(device, rng):
    """p = 0 is a call without dropout, bit for bit, whatever the seed; p near 0 drops nothing of these either."""
    q, k = operands(rng, Hq=2)
    arrays = [device.put(x) for x in (q, k, k)]
    plain = device.get(flash_attention(*arrays))
    np.testing.assert_array_equal(device.get(flash_attention(*arrays, dropout_p=0.0, dropout_seed=3)), plain)
    np.testing.assert_allclose(device.get(flash_attention(*arrays, dropout_p=1e-9, dropout_seed=3)), plain, atol=1e-3)


def test_seeds(device, rng):
    """Same seed and offset, same bits; another of either, another result. A plan does the same."""
    q, k = operands(rng, Hq=2)
    arrays = [device.put(x) for x in (q, k, k)]
    plan = FlashAttention(dropout_p=0.5)
    first, again, seed, offset = (
        device.get(plan(*arrays, dropout_seed=s, dropout_offset=o)) for s, o in ((1, 0), (1, 0), (2, 0), (1, 1))
    )
    np.testing.assert_array_equal(first, again)
    assert (first != seed).mean() > 0.9 and (first != offset).mean() > 0.9


@pytest.mark.parametrize("name", ["dropout_seed", "dropout_offset"])
def test_numbers_in_memory_that_is_written(device, rng, name):
    """The result is computed aside, as where it overlaps an input; what cannot be raises."""
    q, k = map(device.put, operands(rng, B=1, Sq=300))
    want, lse = flash_attention(q, k, k, **DROPS | {name: 5}, return_lse=True)
    out, log = device.xp.zeros_like(want), device.xp.zeros_like(lse)
    number = out.reshape(-1).view("int64")[-1:]
    number[...] = 5
    assert flash_attention(q, k, k, **DROPS | {name: number}, out=out) is out
    np.testing.assert_array_equal(device.get(out), device.get(want))
    drops = DROPS | {name: log.reshape(-1).view("int64")[:1]}
    plan = FlashAttention(dropout_p=drops.pop("dropout_p"), return_lse=True)
    with pytest.raises(ValueError, match=f"FlashAttention: lse must not overlap {name}"):
        plan(q, k, k, lse=log, **drops)
    dq = device.xp.zeros_like(q)
    with pytest.raises(ValueError, match=f"flash_attention_backward: dq must not overlap {name}"):
        flash_attention_backward(want, q, k, k, want, lse, dq=dq, **DROPS | {name: dq.reshape(-1).view("int64")[:1]})


@pytest.mark.gpu
def test_graph(device, rng):
    """A replay finds the offset that is in memory then."""
    cupy = device.xp
    q, k = (device.put(x) for x in operands(rng))
    v, out, lse = k, cupy.empty_like(q), cupy.empty((2, 4, 37), np.float32)
    targets = {name: cupy.empty_like(x) for name, x in (("dq", q), ("dk", k), ("dv", v))}
    offset, plan = cupy.zeros((), np.uint64), FlashAttention(dropout_p=0.5, return_lse=True)
    seeds = {"dropout_seed": 3, "dropout_offset": offset}

    def step():
        plan(q, k, v, out=out, lse=lse, **seeds)

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        step()
        stream.begin_capture()
        step()
        graph = stream.end_capture()
    for number in (0, 9):
        offset[...] = number
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        want = flash_attention(q, k, v, dropout_p=0.5, dropout_seed=3, dropout_offset=number)
        assert (out == want).all()
        got = flash_attention_backward(q, q, k, v, out, lse, dropout_p=0.5, **seeds, deterministic=True, **targets)
        seeds_now = {"dropout_seed": 3, "dropout_offset": number}
        want = flash_attention_backward(q, q, k, v, out, lse, dropout_p=0.5, **seeds_now, deterministic=True)
        assert all((x == y).all() for x, y in zip(got, want, strict=True))


WRONG = {
    "p": (ValueError, "dropout_p must be at least 0 and less than 1, got 1.0", {"dropout_p": 1, "dropout_seed": 0}),
    "nan": (ValueError, "dropout_p must be at least 0", {"dropout_p": float("nan"), "dropout_seed": 0}),
    "no seed": (TypeError, "dropout_seed must be an integer, got None", {"dropout_p": 0.5}),
    "kind of seed": (TypeError, "dropout_seed must be an integer, got 1.5", {"dropout_p": 0.5, "dropout_seed": 1.5}),
    "seed": (ValueError, "dropout_seed must be between 0 and", {"dropout_p": 0.5, "dropout_seed": -1}),
    "offset": (ValueError, "dropout_offset must be", {**DROPS, "dropout_offset": 2**32}),
    "dtype": (TypeError, "dropout_seed must have dtype", {"dropout_p": 0.5, "dropout_seed": np.zeros(1, np.int32)}),
    "shape": (
        ValueError,
        "dropout_seed must have one entry",
        {"dropout_p": 0.5, "dropout_seed": np.zeros(2, np.int64)},
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(rng, name):
    kind, message, options = WRONG[name]
    q, k = operands(rng)
    with rawops.emulate(), pytest.raises(kind, match=f"^flash_attention: {message}"):
        flash_attention(q, k, k, **options)
