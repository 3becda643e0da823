"""Attention over sequences of differing lengths, merging of states, and the plan."""

import math

import ml_dtypes
import numpy as np
import pytest
from conftest import Device

import rawops
from rawops import _attention_config as config
from rawops import config as settings
from rawops.attention import FlashAttention, flash_attention, flash_attention_varlen, merge_attention_states
from rawops.testing import references
from rawops.testing.tolerances import assert_close

ROUNDOFFS = {"float16": 2**13, "bfloat16": 2**16, "float32": 2**6}


def cumulated(lengths) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def varlen(rng, lengths_q, lengths_k, Hq=2, Hkv=1, D=64, Dv=None, dtype="float16", spare=0) -> dict:
    """Arguments for sequences of these lengths, with `spare` rows of NaN past the last one."""
    found = {}
    for name, lengths, heads, width in (
        ("q", lengths_q, Hq, D),
        ("k", lengths_k, Hkv, D),
        ("v", lengths_k, Hkv, Dv or D),
    ):
        x = rng.standard_normal((sum(lengths) + spare, heads, width))
        x[sum(lengths) :] = np.nan
        found[name] = x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    found |= {"cu_seqlens_q": cumulated(lengths_q), "cu_seqlens_k": cumulated(lengths_k)}
    return found | {"max_seqlen_q": max(lengths_q, default=0), "max_seqlen_k": max(lengths_k, default=0)}


def put(device, inputs: dict) -> dict:
    return {n: device.put(x) if isinstance(x, np.ndarray) else x for n, x in inputs.items()}


def reference(inputs: dict, **options) -> tuple[np.ndarray, np.ndarray]:
    """Each sequence for itself; the rows past all of them are zeros without a key."""
    q, k, v = (inputs[n].astype(np.float64) for n in "qkv")
    out, lse = np.zeros((*q.shape[:-1], v.shape[-1])), np.full(q.shape[1::-1], -np.inf)
    bounds_q, bounds_k = inputs["cu_seqlens_q"], inputs["cu_seqlens_k"]
    for b in range(len(bounds_q) - 1):
        rows, keys = slice(*bounds_q[b : b + 2]), slice(*bounds_k[b : b + 2])
        one = references.attention(q[None, rows], k[None, keys], v[None, keys], **options)
        out[rows], lse[:, rows] = one[0][0], one[1][0]
    return out, lse


def check(device, inputs: dict, num_splits=None, **options) -> None:
    q, v = inputs["q"], inputs["v"]
    out = device.guarded((*q.shape[:-1], v.shape[-1]), q.dtype)
    got = flash_attention_varlen(**put(device, inputs), **options, num_splits=num_splits, return_lse=True, out=out)
    want, lse = reference(inputs, **options)
    magnitude, _ = reference(inputs | {"v": np.abs(v)}, **options)
    assert_close(device.get(got[0]), want, q.dtype, k=ROUNDOFFS[q.dtype.name], magnitude=magnitude)
    assert_close(device.get(got[1]), lse, np.float32, k=64, magnitude=10.0)


LENGTHS = {
    "ragged": ([3, 70, 1, 0, 5], [9, 66, 0, 4, 5]),
    "one": ([5], [7]),
    "empty": ([0, 0, 0], [0, 3, 0]),
    "decode": ([1, 1, 1], [3, 90, 5]),
}


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_lengths(device, rng, lengths, splits):
    check(device, varlen(rng, *LENGTHS[lengths], spare=3), splits, causal=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_dtypes(device, rng, dtype):
    check(device, varlen(rng, *LENGTHS["ragged"], Hq=4, Hkv=2, Dv=40, dtype=dtype, spare=2), window=(7, 3))


def test_scores(device, rng):
    slopes = rng.uniform(0.1, 1.0, (5, 2)).astype(np.float32)
    inputs = varlen(rng, *LENGTHS["ragged"])
    got = flash_attention_varlen(**put(device, inputs), softcap=3.0, alibi_slopes=device.put(slopes))
    q, k, v = (inputs[n] for n in "qkv")
    bounds_q, bounds_k = inputs["cu_seqlens_q"], inputs["cu_seqlens_k"]
    for b in range(5):
        rows, keys = slice(*bounds_q[b : b + 2]), slice(*bounds_k[b : b + 2])
        want, _ = references.attention(q[None, rows], k[None, keys], v[None, keys], softcap=3.0, alibi_slopes=slopes[b])
        assert_close(device.get(got)[rows], want[0], q.dtype, k=2**13, magnitude=4.0)


def test_many_rows_past_the_last_sequence(device, rng):
    """More of them than the longest sequence has: all zeros, out and lse."""
    inputs = varlen(rng, [2, 1], [2, 1], spare=200)
    check(device, inputs)


def test_no_sequences(device, rng):
    inputs = varlen(rng, [], [], spare=3)
    out, lse = flash_attention_varlen(**put(device, inputs), return_lse=True)
    assert (device.get(out) == 0).all() and (device.get(lse) == -np.inf).all()


def test_one_query_and_an_empty_sequence(device, rng):
    """Groups of heads packed where max_seqlen_q is 1: places still tell which keys were seen."""
    inputs = varlen(rng, [1, 0, 1], [3, 0, 5], Hq=9, Hkv=3)
    inputs["q"][:] = 0
    inputs["v"][:] = np.concatenate([np.arange(3), np.arange(5)])[:, None, None]
    out = device.get(flash_attention_varlen(**put(device, inputs), causal=True))
    assert (out[0] == 1).all() and (out[1] == 2).all()
    inputs = varlen(rng, [0, 0, 0, 1], [0, 0, 0, 1], Hq=21, Hkv=7, D=120)
    out = device.get(flash_attention_varlen(**put(device, inputs), causal=True))
    np.testing.assert_array_equal(out, np.repeat(inputs["v"], 3, axis=1))


def test_sequences_longer_than_stated(device, rng):
    """The grid is too small then, and the blocks that there are do the rest."""
    inputs = varlen(rng, [70, 9], [70, 9]) | {"max_seqlen_q": 1, "max_seqlen_k": 1}
    check(device, inputs)


def test_checks_of_values(device, rng, monkeypatch):
    monkeypatch.setattr(settings, "current", lambda: settings.Config(check=True))
    inputs = varlen(rng, [2, 1], [2, 1])
    flash_attention_varlen(**put(device, inputs))
    for bounds in ([0, 3, 2], [1, 2, 3], [0, 2, 9], [0, 3, 3]):
        wrong = inputs | {"cu_seqlens_q": np.array(bounds, np.int32)}
        with pytest.raises(
            ValueError, match="flash_attention_varlen: cu_seqlens_q must rise from 0 to at most 3 by at"
        ):
            flash_attention_varlen(**put(device, wrong))
    with pytest.raises(TypeError, match="k must be an array, got None"):
        flash_attention_varlen(**put(device, inputs) | {"k": None})


OUTSIDE = {
    "past the end": [0, 40, 900],
    "far past": [0, 40, 2**31 - 1],
    "negative": [-9, 40, 70],
    "falling": [0, 90, 40],
}


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("side", ["q", "k"])
def test_bounds_outside_the_storage(device, rng, name, side):
    """Without the check of values: what is in the storage is used, and nothing else is touched."""
    inputs = varlen(rng, [40, 30], [40, 30], D=64 if side == "q" else 40)
    wrong = np.array(OUTSIDE[name], np.int32)
    got = flash_attention_varlen(**put(device, inputs | {f"cu_seqlens_{side}": wrong}), causal=side == "k")
    kept = np.clip(wrong, 0, 70)
    want, _ = reference(inputs | {f"cu_seqlens_{side}": kept}, causal=side == "k")
    known = slice(None) if name != "falling" or side == "k" else slice(0, 40)  # sequences overlap there
    assert_close(device.get(got)[known], want[known], np.float16, k=ROUNDOFFS["float16"], magnitude=4.0)


WRONG = {
    "bounds": (TypeError, "cu_seqlens_k must be an array, got None", {"cu_seqlens_k": None}),
    "bounds dtype": (TypeError, "cu_seqlens_q must have dtype int32", {"cu_seqlens_q": np.zeros(3, np.int64)}),
    "bounds shape": (ValueError, "cu_seqlens_k must have shape", {"cu_seqlens_k": np.zeros(4, np.int32)}),
    "longest": (ValueError, "max_seqlen_q must be between 0", {"max_seqlen_q": -1}),
    "dimensions": (ValueError, "q must have 3 dimensions", {"q": np.zeros((1, 3, 2, 64), np.float16)}),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(rng, name):
    kind, message, changes = WRONG[name]
    with rawops.emulate(), pytest.raises(kind, match=f"^flash_attention_varlen: {message}"):
        flash_attention_varlen(**varlen(rng, [2, 1], [2, 1]) | changes)


# --- states ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_merge_equals_one_call(device, rng, dtype):
    q, k, v = (rng.standard_normal((2, 9, 2, 64)).astype(dtype) for _ in range(3))
    parts = [
        flash_attention(device.put(q), device.put(k[:, keys]), device.put(v[:, keys]), return_lse=True)
        for keys in (slice(0, 4), slice(4, 9))
    ]
    out, lse = merge_attention_states(*parts[0], *parts[1])
    want, want_lse = references.attention(q, k, v)
    assert_close(device.get(out), want, dtype, k=ROUNDOFFS[dtype], magnitude=4.0)
    assert_close(device.get(lse), want_lse, np.float32, k=64, magnitude=10.0)


def state(rng, device, dtype="float16", shape=(2, 3, 5, 40)) -> tuple:
    B, S, H, _ = shape
    lse = rng.standard_normal((B, H, S)).astype(np.float32)
    x = rng.standard_normal(shape).astype(dtype)
    x[0, 0, 0] = -0.0
    return device.put(x), device.put(lse)


def bits(device, x) -> np.ndarray:
    x = np.ascontiguousarray(device.get(x))
    return x.view(f"u{x.itemsize}")


NANS_AND_LARGEST = {"float16": (0x7D01, 0xFE03, 0x7BFF), "float32": (0x7FA00001, 0xFFC00003, 0x7F7FFFFF)}


@pytest.mark.parametrize("dtype", NANS_AND_LARGEST)
def test_an_empty_state_changes_no_bit(device, rng, dtype):
    out, lse = map(device.get, state(rng, device, dtype))
    out.view(f"u{out.itemsize}")[0, 1, 0, :3] = NANS_AND_LARGEST[dtype]
    lse[0, 0, :2] = np.inf, np.nan
    out, lse = device.put(out), device.put(lse)
    nothing = device.put(np.full(out.shape, np.nan, dtype)), device.put(np.full(lse.shape, -np.inf, np.float32))
    for pair in ((out, lse, *nothing), (*nothing, out, lse)):
        merged = merge_attention_states(*pair)
        np.testing.assert_array_equal(bits(device, merged[0]), bits(device, out))
        np.testing.assert_array_equal(bits(device, merged[1]), bits(device, lse))
    merged = merge_attention_states(*nothing, *nothing)
    assert (device.get(merged[0]) == 0).all() and (device.get(merged[1]) == -np.inf).all()


def test_merge_of_places(device):
    """2 keys of value 0 and 8 of value 1."""
    parts = [(np.zeros((1, 1, 1, 64), np.float32), math.log(2)), (np.ones((1, 1, 1, 64), np.float32), math.log(8))]
    states = [x for out, lse in parts for x in (device.put(out), device.put(np.full((1, 1, 1), lse, np.float32)))]
    out, lse = merge_attention_states(*states)
    np.testing.assert_allclose(device.get(out), 0.8, rtol=1e-6)
    np.testing.assert_allclose(device.get(lse), math.log(10), rtol=1e-6)


def test_merge_of_views(device, rng):
    """Ragged states (total, heads, head_dim) and transposed arrays."""
    a, b = state(rng, device), state(rng, device)
    want = merge_attention_states(*a, *b)

    def view(x):
        return x.T.copy().T

    got = merge_attention_states(*map(view, a), *map(view, b))
    np.testing.assert_array_equal(device.get(got[0]), device.get(want[0]))
    got = merge_attention_states(*(x[1] for x in (*a, *b)))
    np.testing.assert_array_equal(device.get(got[0]), device.get(want[0])[1])
    np.testing.assert_array_equal(device.get(got[1]), device.get(want[1])[1])


def test_wrong_states(rng):
    with rawops.emulate():
        out, lse = np.zeros((2, 3, 5, 8), np.float32), np.zeros((2, 5, 3), np.float32)
        with pytest.raises(ValueError, match="merge_attention_states: lse_b must have shape"):
            merge_attention_states(out, lse, out, lse.transpose(0, 2, 1))
        with pytest.raises(TypeError, match="merge_attention_states: out_b must have dtype float32, got float16"):
            merge_attention_states(out, lse, out.astype(np.float16), lse)
        with pytest.raises(ValueError, match="merge_attention_states: out_a must have 4 dimensions"):
            merge_attention_states(out[0, 0], lse, out, lse)
        with pytest.raises(ValueError, match="merge_attention_states: lse_b must lie on whole elements"):
            merge_attention_states(out, lse, out, Device.between(lse))


# --- plan -----------------------------------------------------------------------------------------------------------


def test_plan(device, rng):
    """Called with several shapes; results equal those of the function, to the bit."""
    slopes = device.put(np.array([0.5, 0.25], np.float32))
    plan = FlashAttention(causal=True, alibi_slopes=slopes, num_splits=2, return_lse=True)
    for Sk in (5, 70, 5):
        q, k, v = (device.put(rng.standard_normal((2, n, 2, 64)).astype(np.float16)) for n in (3, Sk, Sk))
        want = flash_attention(q, k, v, causal=True, alibi_slopes=slopes, num_splits=2, return_lse=True)
        out, lse = device.guarded((2, 3, 2, 64), np.float16), device.guarded((2, 2, 3), np.float32)
        got = plan(q, k, v, out=out, lse=lse)
        assert got[0] is out and got[1] is lse
        for x, y in zip(got, want, strict=True):
            np.testing.assert_array_equal(device.get(x), device.get(y))


@pytest.mark.gpu
def test_plan_in_a_graph(device, rng):
    """A captured plan, split keys and merge, replayed with other contents."""
    xp = device.xp
    arrays = [device.put(rng.standard_normal((2, n, 8, 64)).astype(np.float16)) for n in (1, 4000, 4000)]
    out, plan = xp.empty_like(arrays[0]), FlashAttention(num_splits=4)
    with xp.cuda.Stream(non_blocking=True) as stream:
        plan(*arrays, out=out)
        stream.begin_capture()
        plan(*arrays, out=out)
        graph = stream.end_capture()
        for _ in range(2):
            for x in arrays:
                x[...] = xp.asarray(rng.standard_normal(x.shape).astype(np.float16))
            graph.launch()
            stream.synchronize()
            xp.testing.assert_array_equal(out, flash_attention(*arrays, num_splits=4))


def test_wrong_plan():
    with pytest.raises(ValueError, match="FlashAttention: softcap must be 0"):
        FlashAttention(softcap=-1)
    with rawops.emulate():
        q = np.zeros((1, 2, 2, 64), np.float16)
        with pytest.raises(ValueError, match="FlashAttention: lse must be writeable"):
            FlashAttention(return_lse=True)(q, q, q, lse=np.broadcast_to(np.float32(0), (1, 2, 2)))
        with pytest.raises(ValueError, match="FlashAttention: lse must have shape"):
            FlashAttention(return_lse=True)(q, q, q, lse=np.zeros((1, 2, 3), np.float32))
        k = np.zeros((1, 2, 2, 64), np.float32)
        with pytest.raises(ValueError, match="FlashAttention: lse must not overlap k"):
            FlashAttention()(k + 1, k, k + 1, lse=k.reshape(-1)[:4].reshape(1, 2, 2))
        out = np.zeros((1, 2, 2, 64), np.float32)
        with pytest.raises(ValueError, match="FlashAttention: lse must not overlap out"):
            FlashAttention()(k, k, k, out=out, lse=out.reshape(-1)[:4].reshape(1, 2, 2))


def test_varlen_is_in_the_problem():
    sizes = {"batches": 3, "seqlen_q": 1, "seqlen_k": 900, "heads": 8, "kv_heads": 2, "head_dim": 64, "head_dim_v": 64}
    chosen = config.select_config(config.Problem(dtype="float16", **sizes, varlen=True), 132, 232448)
    assert chosen.packed == 4
