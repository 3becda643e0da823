"""The Hopper kernel of attention: head sizes, masks, edges, layouts, orders of completion, the choice of tiles."""

import dataclasses
import itertools

import ml_dtypes
import numpy as np
import pytest
from hopper_gemm import ran_on_hopper

import rawops
from rawops import _attention_sm90 as sm90
from rawops._attention_config import UNLIMITED, Problem
from rawops.attention import FlashAttention, flash_attention, flash_attention_varlen
from rawops.testing import has_gpu, references
from rawops.testing.tolerances import assert_close

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT16 = np.dtype("float16")
ROUNDOFFS = {"float16": 2**13, "bfloat16": 2**16}  # of the weights
MAX_SHARED_BYTES = 232448


@pytest.fixture
def force(monkeypatch):
    """Fix the keys of a tile and the number of blocks: few blocks walk over many tiles, short rings wrap often."""

    def fix(block_n: int, blocks: int = 2, section: int = 1, counter: bool = True, **changes) -> None:
        def chosen(*arguments):
            return dataclasses.replace(select(*arguments), block_n=block_n, section=section, **changes)

        def planned(*arguments):
            found = plan(*arguments)
            return dataclasses.replace(found, grid=(min(blocks, found.grid[0]), 1, 1), wants_counter=counter)

        select, plan = sm90.select_config, sm90.plan
        monkeypatch.setattr(sm90, "select_config", chosen)
        monkeypatch.setattr(sm90, "plan", planned)

    return fix


def operands(rng, B=1, Sq=70, Sk=70, Hq=1, Hkv=1, D=64, Dv=None, dtype=FLOAT16) -> tuple:
    shapes = (B, Sq, Hq, D), (B, Sk, Hkv, D), (B, Sk, Hkv, Dv or D)
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


def in_nan(device, x: np.ndarray):
    """x with rows on 16-byte boundaries, surrounded by NaN."""
    room = np.full((*x.shape[:1], x.shape[1] + 2, x.shape[2] + 1, -(-x.shape[3] // 8) * 8 + 16), np.nan, x.dtype)
    room[:, 1:-1, 1:, 8 : 8 + x.shape[3]] = x
    return device.put(room)[:, 1:-1, 1:, 8 : 8 + x.shape[3]]


def check(device, inputs: tuple, **options) -> None:
    """Compare with the reference; the output lies between guard bands, the operands in NaN."""
    q, k, v = inputs
    out = device.guarded((*q.shape[:-1], v.shape[-1]), q.dtype)
    _, lse = flash_attention(*(in_nan(device, x) for x in inputs), **options, return_lse=True, out=out)
    assert ran_on_hopper(device, "attention_merge" if options.pop("num_splits", 1) > 1 else "attention_sm90")
    assert not any("attention_sm80" in run.kernel for run in device.report)
    want, want_lse = references.attention(q, k, v, **options)
    magnitude, _ = references.attention(q, k, np.abs(v.astype(np.float64)), **options)
    assert_close(device.get(out), want, q.dtype, k=ROUNDOFFS[q.dtype.name], magnitude=magnitude)
    largest = np.max(np.abs(want_lse), where=np.isfinite(want_lse), initial=10.0)
    assert_close(device.get(lse), want_lse, np.float32, k=64, magnitude=largest)


HEADS = [(64, 64, 64), (96, 96, 48), (128, 128, 64), (192, 128, 48), (256, 256, 80), (40, 72, 16), (64, 192, 112)]


@pytest.mark.parametrize(("D", "Dv", "block_n"), HEADS)
def test_head_sizes(hopper, force, rng, D, Dv, block_n):
    """All widths of boxes, and heads that end inside one."""
    force(block_n)
    dtype = BFLOAT16 if D % 128 == 0 else FLOAT16
    check(hopper, operands(rng, Sq=70, Sk=100, D=D, Dv=Dv, dtype=dtype), causal=True)


MASKS = {
    "none": (66, 70, {}),
    "causal": (200, 200, {"causal": True}),
    "causal, more keys": (66, 200, {"causal": True}),
    "causal, rows without keys": (200, 70, {"causal": True}),
    "window": (130, 260, {"window": (100, 5)}),
    "narrow window": (200, 200, {"window": (3, 0)}),
    "right only": (70, 130, {"window": (None, 40)}),
}


@pytest.mark.parametrize("mask", MASKS)
def test_masks(hopper, force, rng, mask):
    """Blocks of keys that are skipped, cut and whole, from either side; three blocks take several tiles each."""
    Sq, Sk, options = MASKS[mask]
    force(64, blocks=3, section=2)
    check(hopper, operands(rng, B=2, Sq=Sq, Sk=Sk), **options)


@pytest.mark.parametrize("mask", ["none", "causal", "causal, rows without keys", "window"])
def test_three_consumers(hopper, force, rng, mask):
    """As heads of 128 with long rows take them; ends of tiles and of keys that differ for each consumer."""
    Sq, Sk, options = MASKS[mask]
    force(64, blocks=3, consumers=3, stages=3)
    check(hopper, operands(rng, B=2, Sq=Sq, Sk=Sk, D=128, dtype=BFLOAT16), **options)


def test_three_consumers_and_nonfinite_values(hopper, force, rng):
    """Consumers search values themselves; a hidden NaN changes no bit, one that is seen shows."""
    force(64, blocks=1, consumers=3, stages=3)
    q, k, v = operands(rng, Sq=200, Sk=200, D=128, dtype=BFLOAT16)
    v[0, 150, 0, 5] = v[0, 3, 0, 100] = 0
    clean = hopper.get(flash_attention(*map(hopper.put, (q, k, v)), causal=True)).astype(float)
    v[0, 150, 0, 5], v[0, 3, 0, 100] = np.nan, np.inf
    got = hopper.get(flash_attention(*map(hopper.put, (q, k, v)), causal=True)).astype(float)
    clean[0, 150:, 0, 5], clean[0, 3:, 0, 100] = np.nan, np.inf
    np.testing.assert_array_equal(got, clean)


@pytest.mark.parametrize("value", [6e4, -6e4, np.inf])
def test_large_keys_stay_hidden(hopper, force, rng, value):
    """A neighbour that sees a score far from its own leaves a row's bits alone."""
    force(64)
    q, k, v = operands(rng, Sq=200, Sk=200)
    q[..., 0] = 1
    clean = hopper.get(flash_attention(*map(hopper.put, (q, k, v)), causal=True))
    k[:, 197, :, 0] = value
    got = hopper.get(flash_attention(*map(hopper.put, (q, k, v)), causal=True))
    assert got[:, :197].tobytes() == clean[:, :197].tobytes()


@pytest.mark.parametrize(("consumers", "turns", "stages"), [(2, True, 3), (2, False, 2), (3, True, 2)])
def test_consumers(hopper, force, rng, consumers, turns, stages):
    """Without the counter, blocks go there and back over the tiles."""
    force(48, consumers=consumers, turns=turns, stages=stages, counter=False)
    check(hopper, operands(rng, B=3, Sq=130, Sk=140, dtype=BFLOAT16), causal=True)


def test_places(hopper, force):
    """Queries of zero and v[j] = j spell out what is seen: the mean of the places, and their number."""
    force(64)
    Sq, Sk = 150, 170
    q, k = np.zeros((1, Sq, 1, 64), FLOAT16), np.ones((1, Sk, 1, 64), FLOAT16)
    v = np.broadcast_to(np.arange(Sk)[:, None, None], (1, Sk, 1, 64)).astype(FLOAT16)
    out, lse = flash_attention(*map(hopper.put, (q, k, v)), window=(9, 3), return_lse=True)
    place = np.arange(Sq)[:, None] + Sk - Sq
    seen = (np.arange(Sk) >= place - 9) & (np.arange(Sk) <= place + 3)
    np.testing.assert_allclose(hopper.get(out)[0, :, 0, 0], seen @ np.arange(Sk) / seen.sum(1), rtol=2**-10)
    np.testing.assert_allclose(np.exp(hopper.get(lse)[0, 0]), seen.sum(1), rtol=1e-5)


def test_heads_of_groups(hopper, force, rng):
    """Every query head with its own KV head, three to one; out of head h is that head's number."""
    force(64, blocks=3, section=3)
    q, k, v = operands(rng, Sq=66, Sk=66, Hq=6, Hkv=2)
    check(hopper, (q, k, v))
    v[:] = np.arange(2)[:, None]
    out = hopper.get(flash_attention(*map(hopper.put, (q, k, v))))
    np.testing.assert_array_equal(out[0, 0, :, 0], [0, 0, 0, 1, 1, 1])


@pytest.mark.parametrize(("D", "dtype", "scale"), [(64, FLOAT16, 700.0), (64, BFLOAT16, 0.3), (256, FLOAT16, 0.3)])
def test_growing_scores(hopper, force, rng, D, dtype, scale):
    """Maxima that rise from block to block, by little and by much: earlier weights are brought to the new one."""
    force(48)
    q, k, v = operands(rng, Sq=66, Sk=200, D=D, dtype=dtype)
    k *= np.linspace(4, 0.1, 200)[:, None, None].astype(dtype)  # the last keys come first
    q *= dtype.type(0.5)
    check(hopper, (q, k, v), softmax_scale=scale)


@pytest.mark.parametrize("score", [-2e5, 2e5])
def test_far_scores(hopper, rng, score):
    """The weight of the only key is 1 to the bit, however large its score."""
    q, k, v = operands(rng, Sq=70, Sk=70)
    q[:], k[:] = 0, 0
    q[..., 0], k[..., 0] = 16, np.copysign(16, score)
    out = flash_attention(*map(hopper.put, (q, k, v)), causal=True, softmax_scale=abs(score) / 256)
    assert ran_on_hopper(hopper, "attention_sm90")
    np.testing.assert_array_equal(hopper.get(out)[:, 0], v[:, 0])


HIDDEN = {
    "causal": (130, 130, {"causal": True}, (100, 3)),
    "window": (70, 200, {"window": (40, 10)}, (100, 195)),
    "last": (70, 70, {"causal": True}, (69, 69)),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_values_that_are_not_finite(hopper, force, rng, name):
    """They reach the rows that see them, and change nothing in the others, to the bit."""
    Sq, Sk, options, (nan_at, inf_at) = HIDDEN[name]
    force(64, blocks=1)
    q, k, v = operands(rng, Sq=Sq, Sk=Sk)
    v[0, nan_at, 0, 5] = v[0, inf_at, 0, 7] = 0
    clean = hopper.get(flash_attention(*map(hopper.put, (q, k, v)), **options)).astype(float)
    v[0, nan_at, 0, 5], v[0, inf_at, 0, 7] = np.nan, np.inf
    got = hopper.get(flash_attention(*map(hopper.put, (q, k, v)), **options)).astype(float)
    _, lse = references.attention(q, k, np.zeros_like(v), **options)
    place, right = np.arange(Sq) + Sk - Sq, options.get("window", (None, 0))[1]
    left = options.get("window", (Sk, 0))[0]
    for column, key, value in ((5, nan_at, np.nan), (7, inf_at, np.inf)):
        clean[0, (key >= place - left) & (key <= place + right), 0, column] = value
    np.testing.assert_array_equal(got, clean)
    assert np.isfinite(lse).any()


def test_slices_of_packed_projections(hopper, rng):
    """q, k and v as slices of one array, three sequences: every one of them right."""
    packed = rng.standard_normal((3, 66, 6, 64)).astype(FLOAT16)
    q, k, v = (hopper.put(packed)[:, :, heads] for heads in (slice(0, 4), slice(4, 5), slice(5, 6)))
    out = flash_attention(q, k, v, causal=True)
    assert ran_on_hopper(hopper, "attention_sm90")
    want, _ = references.attention(*(packed[:, :, h] for h in (slice(0, 4), slice(4, 5), slice(5, 6))), causal=True)
    assert_close(hopper.get(out), want, FLOAT16, k=2**13, magnitude=4.0)


LENGTHS = {"ragged": ([3, 1, 0, 70], [9, 0, 4, 100]), "equal": ([66, 66], [64, 64])}


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("stated", [True, False])
@pytest.mark.parametrize("consumers", [2, 3])  # the results of two leave through shared memory
def test_sequences_of_differing_lengths(hopper, force, rng, lengths, stated, consumers):
    """Packed one after another in NaN: keys of a neighbour stay out, rows past the last one are zeros."""
    force(64, blocks=3, consumers=consumers)
    lengths_q, lengths_k = LENGTHS[lengths]
    bounds = [np.concatenate([[0], np.cumsum(n)]).astype(np.int32) for n in (lengths_q, lengths_k)]
    q, k, v = (np.full((bounds[i][-1] + 7, heads, 64), np.nan, FLOAT16) for i, heads in ((0, 2), (1, 1), (1, 1)))
    for x in (q, k, v):
        x[:-7] = rng.standard_normal(x[:-7].shape)
    most = [max(lengths_q), max(lengths_k)] if stated else [65, 0]
    arrays = map(hopper.put, (q, k, v, *bounds))
    out, lse = map(hopper.get, flash_attention_varlen(*arrays, *most, causal=True, return_lse=True))
    assert ran_on_hopper(hopper, "attention_sm90")
    for b in range(len(lengths_q)):
        rows, keys = slice(*bounds[0][b : b + 2]), slice(*bounds[1][b : b + 2])
        want, want_lse = references.attention(q[None, rows], k[None, keys], v[None, keys], causal=True)
        assert_close(out[rows], want[0], FLOAT16, k=2**13, magnitude=4.0)
        assert_close(lse[:, rows], want_lse[0], np.float32, k=64, magnitude=10.0)
    assert (out[bounds[0][-1] :] == 0).all() and (lse[:, bounds[0][-1] :] == -np.inf).all()


def test_packed_sequences_without_keys(hopper, rng):
    q, k = (hopper.put(rng.standard_normal((n, 1, 64)).astype(FLOAT16)) for n in (70, 4))
    bounds = [hopper.put(np.array([0, n], np.int32)) for n in (70, 0)]
    out, lse = map(hopper.get, flash_attention_varlen(q, k[:0], k[:0], *bounds, 70, 4, return_lse=True))
    assert (out == 0).all() and (lse == -np.inf).all()


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16])
def test_what_follows_a_sequence_changes_no_bit(hopper, rng, dtype):
    """Rows of the next sequence, or of none, lie in the tile of its last ones."""
    q, k, v = (rng.standard_normal((n, 1, 64)).astype(dtype) for n in (90, 400, 400))
    bounds = [hopper.put(np.array([0, n], np.int32)) for n in (70, 400)]
    results = []
    for after in (0.0, np.nan, np.inf, 3e4):
        q[70:] = after
        out, lse = flash_attention_varlen(*map(hopper.put, (q, k, v)), *bounds, 70, 400, return_lse=True)
        assert ran_on_hopper(hopper, "attention_sm90")
        results.append((hopper.get(out), hopper.get(lse)[:, :70]))
    for other in results[1:]:
        for x, y in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(x.view(np.uint8), y.view(np.uint8))


def test_plan_counts_anew_each_time(hopper, force, rng):
    """Blocks take tiles from a counter, which is 0 again for the next call of the same plan."""
    force(64, blocks=2)
    inputs = operands(rng, B=3, Sq=66, Sk=66)
    attend = FlashAttention(causal=True)
    results = [hopper.get(attend(*map(hopper.put, inputs))) for _ in range(3)]
    want, _ = references.attention(*inputs, causal=True)
    for out in results:
        assert_close(out, want, FLOAT16, k=2**13, magnitude=4.0)


@pytest.mark.skipif(has_gpu(), reason="the emulator's orders of completion")
@pytest.mark.parametrize("consumers", [2, 3])
def test_any_order_of_completion(force, rng, consumers):
    """Copies and products that land late, early or with the warps in another order: the same bits."""
    force(48, consumers=consumers)
    inputs, results = operands(rng, B=3, Sq=66, Sk=100), []
    for completion in ("late", "early", "random"):
        with rawops.emulate(arch="sm_90a", completion=completion, seed=2) as emu:
            results.append(flash_attention(*inputs, causal=True))
        assert "attention_sm90" in emu.report[0].kernel
    for other in results[1:]:
        np.testing.assert_array_equal(results[0].view(np.uint16), other.view(np.uint16))


# --- scores, ranges of keys -----------------------------------------------------------------------------------------

SCORES = {
    "softcap": {"softcap": 1.5},
    "softcap, scale": {"softcap": 30.0, "softmax_scale": 2.0},
    "scale 0": {"softmax_scale": 0.0},
    "negative scale": {"softmax_scale": -0.5},
    "slopes of heads": {"alibi_slopes": (2,)},
    "slopes of sequences": {"alibi_slopes": (2, 2)},
    "bias": {"bias": (2, 2, 66, 70)},
    "bias of keys, softcap": {"bias": (70,), "softcap": 3.0},
    "all": {"bias": (2, 1, 66, 1), "softcap": 3.0, "alibi_slopes": (2,)},
}


@pytest.mark.parametrize("name", SCORES)
def test_scores(hopper, force, rng, name):
    """Every kind of score under a mask, tiles that end past the last row, blocks that end past the last key."""
    force(48)
    options = dict(SCORES[name])
    for array in {"alibi_slopes", "bias"} & options.keys():
        dtype = np.float32 if array == "alibi_slopes" else FLOAT16
        options[array] = rng.uniform(-1.0, 1.0, options[array]).astype(dtype)
    inputs = operands(rng, B=2, Sq=66, Sk=70, Hq=2, Hkv=1)
    placed = {n: hopper.put(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
    out, lse = flash_attention(*map(hopper.put, inputs), causal=True, return_lse=True, **placed)
    assert ran_on_hopper(hopper, "attention_sm90")
    want, want_lse = references.attention(*inputs, causal=True, **options)
    assert_close(hopper.get(out), want, FLOAT16, k=2**13, magnitude=4.0)
    assert_close(hopper.get(lse), want_lse, np.float32, k=64, magnitude=10.0)


@pytest.mark.parametrize("dtype", [np.float32, FLOAT16])
def test_bias_that_hides(hopper, force, rng, dtype):
    """A bias of minus infinity hides keys, and whole rows; what lies round the bias is not read."""
    force(64)
    inputs = operands(rng, Sq=70, Sk=100)
    room = np.full((72, 104), np.nan, dtype)
    room[1:71, 2:102] = rng.standard_normal((70, 100))
    room[1:71, 2:102][:, 10:30] = -np.inf
    room[1:71, 2:102][5] = -np.inf
    bias = hopper.put(room)[1:71, 2:102]
    out, lse = map(hopper.get, flash_attention(*map(hopper.put, inputs), bias=bias, return_lse=True))
    want, want_lse = references.attention(*inputs, bias=room[1:71, 2:102])
    assert_close(out, want, FLOAT16, k=2**13, magnitude=4.0)
    assert_close(lse, want_lse, np.float32, k=64, magnitude=10.0)
    assert (out[0, 5] == 0).all() and (lse[0, 0, 5] == -np.inf).all()


@pytest.mark.parametrize("splits", [2, 5])
@pytest.mark.parametrize("mask", ["none", "causal, rows without keys", "window"])
def test_ranges_of_keys(hopper, force, rng, mask, splits):
    """Ranges that hold no key of a tile, too: what they leave is not read."""
    Sq, Sk, options = MASKS[mask]
    force(48, blocks=3, splits=splits)
    check(hopper, operands(rng, B=2, Sq=Sq, Sk=Sk, D=40, Dv=72), **options, num_splits=splits)


def test_ranges_of_keys_of_sequences(hopper, force, rng):
    """Each sequence in ranges of its own."""
    force(48)
    lengths, bounds = [66, 3, 70], np.array([0, 66, 69, 139], np.int32)
    q, k, v = (rng.standard_normal((139, 1, 64)).astype(FLOAT16) for _ in range(3))
    arrays = map(hopper.put, (q, k, v, bounds, bounds))
    out = hopper.get(flash_attention_varlen(*arrays, 70, 70, causal=True, num_splits=2))
    for b in range(len(lengths)):
        rows = slice(*bounds[b : b + 2])
        want, _ = references.attention(q[None, rows], k[None, rows], v[None, rows], causal=True)
        assert_close(out[rows], want[0], FLOAT16, k=2**13, magnitude=4.0)


def test_few_tiles_split_their_keys():
    """Ranges that leave waves of blocks nearly full; none where tiles do."""

    def splits(length_q, length_k, heads=8):
        return sm90.select_config(Problem("bfloat16", 1, length_q, length_k, heads, heads, 128, 128), 132).splits

    assert splits(128, 1 << 16) == 15
    assert splits(4096, 4096, 32) == splits(128, 128) == 1


# --- what runs elsewhere, and the choice of tiles -------------------------------------------------------------------


def test_what_the_kernel_cannot_do_runs_elsewhere(rng):
    """Rows that TMA cannot read, odd heads, few rows: the same answer."""
    q, k, v = operands(rng)
    odd = np.zeros((1, 70, 1, 65), FLOAT16)[..., :64]
    odd[...] = q
    with rawops.emulate(arch="sm_90a") as emu:
        for inputs in ((odd, k, v), (q[..., :60], k[..., :60], v), (q[:, :64], k, v)):
            count = len(emu.report)
            out = flash_attention(*inputs)
            assert not any("attention_sm90" in run.kernel for run in emu.report[count:])
            want, _ = references.attention(*inputs)
            assert_close(out, want, FLOAT16, k=2**13, magnitude=4.0)


def test_every_choice_fits():
    for D, Dv, right in itertools.product((8, 64, 96, 128, 136, 256), (40, 64, 128, 192), (0, UNLIMITED)):
        for dtype, Sk in itertools.product(("float16", "bfloat16"), (1, 4096, 1 << 20)):
            problem = Problem(dtype, 2, 4096, Sk, 32, 8, D, Dv, window_right=right)
            config = sm90.select_config(problem, 132)
            assert config.shared_bytes <= MAX_SHARED_BYTES
            assert config.section % problem.group == 0
            for name in ("head_dim", "head_dim_v", "consumers", "block_n", "stages", "turns"):
                assert getattr(config, name) in sm90.SM90.choices[name]


def test_heads_of_a_section_fit_the_l2():
    config = sm90.select_config(Problem("bfloat16", 2, 8192, 8192, 32, 32, 128, 128, window_right=0), 132)
    assert config.section == 8  # of 4 MB each


def test_few_keys_have_all_tiles_of_a_head_at_a_time():
    """As many heads as give every SM a tile, in whole groups; under a mask a KV head for two SMs."""
    problem = Problem("bfloat16", 8, 512, 512, 32, 32, 128, 128)
    assert sm90.select_config(problem, 132).section == 33
    assert sm90.select_config(dataclasses.replace(problem, kv_heads=8), 132).section == 36
    assert sm90.select_config(dataclasses.replace(problem, window_right=0), 132).section == 66
    assert sm90.select_config(dataclasses.replace(problem, kv_heads=8, window_right=0), 132).section == 264


def test_long_rows_take_three_consumers():
    """Not where that would leave most SMs without a tile at the end, nor where lengths are unknown or keys few."""

    def consumers(length, batches=1, **changes):
        problem = Problem("bfloat16", batches, length, length, 32, 32, 128, 128, **changes)
        config = sm90.select_config(problem, 132)
        assert config.block_n == {2: 128, 3: 64}[config.consumers]
        return config.consumers

    assert [consumers(n) for n in (1024, 2048, 4096, 6000, 8192, 16384)] == [2, 2, 2, 3, 3, 3]
    assert [consumers(4096, batches) for batches in (2, 3)] == [3, 3]  # 11 and 16 waves of 192 rows, 16 and 24 of 128
    assert [consumers(n, window_right=0) for n in (8192, 16384)] == [2, 3]
    assert consumers(16384, window_left=1024, window_right=0) == consumers(8192, varlen=True) == 2


def test_heads_of_no_columns(hopper, rng):
    """Views, whose strides TMA would take: every query sees all keys alike."""
    q, k, v = (hopper.put(rng.integers(-4, 5, (2, n, 4, 64)).astype(FLOAT16)) for n in (70, 100, 100))
    out = hopper.get(flash_attention(q[..., :0], k[..., :0], v))
    expected = hopper.get(v).astype("float64").mean(axis=1, keepdims=True)
    np.testing.assert_allclose(out, np.broadcast_to(expected, out.shape), atol=2e-3)
    assert flash_attention(q, k, v[..., :0]).shape == (2, 70, 4, 0)
