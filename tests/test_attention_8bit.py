"""Attention of float8 on Hopper: values, scales, masks, lengths, ranges of keys, hidden NaN, what it refuses."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from hopper_gemm import ran_on_hopper

import rawops
from rawops import _attention_sm90 as sm90
from rawops import config as settings
from rawops._attention_config import UNLIMITED, Problem
from rawops.attention import FlashAttention, flash_attention, flash_attention_varlen
from rawops.errors import UnsupportedError
from rawops.testing import references
from rawops.testing.tolerances import assert_close

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
WEIGHTS = 2**20  # unit roundoffs of float32 that a weight of float8 is off by


@pytest.fixture
def force(monkeypatch):
    """Fix the keys of a tile and the number of blocks."""

    def fix(block_n: int, blocks: int = 2, **changes) -> None:
        def chosen(*arguments):
            return dataclasses.replace(select(*arguments), block_n=block_n, section=1, **changes)

        def planned(*arguments):
            found = plan(*arguments)
            return dataclasses.replace(found, grid=(min(blocks, found.grid[0]), 1, 1))

        select, plan = sm90.select_config, sm90.plan
        monkeypatch.setattr(sm90, "select_config", chosen)
        monkeypatch.setattr(sm90, "plan", planned)

    return fix


def operands(rng, B=1, Sq=70, Sk=70, Hq=1, Hkv=1, D=64, Dv=None) -> tuple:
    shapes = (B, Sq, Hq, D), (B, Sk, Hkv, D), (B, Sk, Hkv, Dv or D)
    return tuple(rng.standard_normal(shape).astype(FLOAT8) for shape in shapes)


def widened(inputs, scales=(None, None, None)) -> tuple:
    """Exact float64, with scales of KV heads given to every head."""
    found = []
    for x, scale in zip(inputs, scales, strict=True):
        factor = 1.0 if scale is None else np.asarray(scale, np.float64)
        factor = (
            factor if np.ndim(factor) < 1 else (factor[:, None] if np.ndim(factor) == 1 else factor[:, None, :, None])
        )
        found.append(x.astype(np.float64) * factor)
    return tuple(found)


def in_nan(device, x: np.ndarray):
    """x with rows on 16-byte boundaries, surrounded by NaN."""
    room = np.full((*x.shape[:1], x.shape[1] + 2, x.shape[2] + 1, x.shape[3] + 32), np.nan, x.dtype)
    room[:, 1:-1, 1:, 16 : 16 + x.shape[3]] = x
    return device.put(room)[:, 1:-1, 1:, 16 : 16 + x.shape[3]]


def check(device, inputs: tuple, scales=(None, None, None), dtype=BFLOAT16, k=WEIGHTS, **options) -> None:
    q, _, v = inputs
    out = device.guarded((*q.shape[:-1], v.shape[-1]), dtype)
    placed = {f"scale_{n}": None if s is None else device.put(s) for n, s in zip("qkv", scales, strict=True)}
    arrays = [in_nan(device, x) for x in inputs]
    _, lse = flash_attention(*arrays, **options, **placed, return_lse=True, out=out)
    splits = options.pop("num_splits", None) or 1
    assert ran_on_hopper(device, "attention_merge" if splits > 1 else "attention_sm90_8bit")
    exact = widened(inputs, scales)
    want, want_lse = references.attention(*exact, **options)
    magnitude, _ = references.attention(*exact[:2], np.abs(exact[2]), **options)
    assert_close(device.get(out), want, dtype, k=k, magnitude=magnitude)
    # the tensor cores drop bits of the products
    largest = np.max(np.abs(want_lse), where=np.isfinite(want_lse), initial=10.0)
    assert_close(device.get(lse), want_lse, np.float32, k=2**12, magnitude=largest)


HEADS = [(64, 64, 64), (96, 96, 64), (128, 128, 96), (192, 128, 64), (256, 256, 64), (48, 80, 160)]


@pytest.mark.parametrize(("D", "Dv", "block_n"), HEADS)
def test_head_sizes(hopper, force, rng, D, Dv, block_n):
    force(block_n)
    check(hopper, operands(rng, Sq=66, Sk=70, D=D, Dv=Dv), causal=True)


MASKS = {
    "none": (66, 70, {}),
    "causal, more keys": (66, 200, {"causal": True}),
    "causal, rows without keys": (200, 70, {"causal": True}),
    "window": (66, 200, {"window": (100, 5)}),
}


@pytest.mark.parametrize("mask", MASKS)
def test_masks(hopper, force, rng, mask):
    Sq, Sk, options = MASKS[mask]
    force(64, blocks=3)
    check(hopper, operands(rng, B=2, Sq=Sq, Sk=Sk), **options)


@pytest.mark.parametrize("scale", [0.3, 40.0])
def test_growing_scores(hopper, force, rng, scale):
    """Maxima that rise from block to block: weights that would be too large are made again.

    Of scores in the thousands, the bits that tensor cores drop, and the emulator does not, are a share of the weight.
    """
    force(64)
    k = WEIGHTS if hopper.is_emulated or scale < 1 else 4 * WEIGHTS
    q, keys, v = operands(rng, Sq=66, Sk=330)
    keys = (keys.astype(np.float32) * np.linspace(4, 0.1, 330)[:, None, None]).astype(FLOAT8)  # the last come first
    check(hopper, (q, keys, v), k=k, softmax_scale=scale)


def test_every_key_is_in_its_place(hopper, force, rng):
    """Equal weights, and values that tell their key and column: sums that come out exactly."""
    force(96)
    Sq, Sk = 40, 200
    q, k = np.zeros((1, Sq, 1, 64), FLOAT8), np.ones((1, Sk, 1, 64), FLOAT8)
    v = rng.integers(-8, 9, (1, Sk, 1, 64)).astype(FLOAT8)
    out = hopper.get(
        flash_attention(*map(hopper.put, (q, k, v)), window=(3, 0), out=hopper.put(np.empty(q.shape, "f2")))
    )
    for i in range(Sq):
        place = i + Sk - Sq
        np.testing.assert_array_equal(out[0, i, 0], v[0, place - 3 : place + 1, 0].astype(float).mean(0))


SCALES = {
    "one": ((), (), ()),
    "of heads": ((4,), (2,), (2,)),
    "of sequences": ((2, 4), (2, 2), (2, 2)),
    "k": (None, (2,), None),
}


@pytest.mark.parametrize("shapes", SCALES)
def test_scales(hopper, force, rng, shapes):
    force(64, blocks=3)
    scales = [None if s is None else np.asarray(rng.uniform(0.25, 2.0, s), np.float32) for s in SCALES[shapes]]
    inputs = operands(rng, B=2, Sq=5, Sk=60, Hq=4, Hkv=2)
    check(hopper, inputs, scales, dtype=np.dtype("float16"), causal=True)


def test_a_scale_of_zero(hopper, force, rng):
    """That of a head of zeros, say: the keys that its queries see count alike, hidden ones not at all."""
    force(64)
    check(hopper, operands(rng, Sq=66, Sk=150, Hq=2), (np.float32([0, 1]), None, None), window=(40, 0))


@pytest.mark.parametrize("mask", ["none", "causal, more keys"])
def test_ranges_of_keys(hopper, force, rng, mask):
    Sq, Sk, options = MASKS[mask]
    force(64, splits=2)
    check(hopper, operands(rng, Sq=Sq, Sk=Sk), **options, num_splits=2)


@pytest.mark.parametrize("cols", [(5, 8), (50, 17)])  # of the first of two warps that search, and of the second one
def test_nan_at_hidden_keys(hopper, force, rng, cols):
    """It reaches the rows that see it, and changes nothing in the others, to the bit."""
    force(64, blocks=1)
    late, early = cols
    q, k, v = operands(rng, Sq=130, Sk=130)
    v[0, 100, 0, late] = v[0, 3, 0, early] = 0
    clean = hopper.get(flash_attention(*map(hopper.put, (q, k, v)), causal=True)).astype(float)
    v[0, 100, 0, late] = v[0, 3, 0, early] = np.nan
    got = hopper.get(flash_attention(*map(hopper.put, (q, k, v)), causal=True)).astype(float)
    clean[0, 100:, 0, late] = clean[0, 3:, 0, early] = np.nan
    np.testing.assert_array_equal(got, clean)


@pytest.mark.parametrize("longest", [(70, 100), (0, 0)], ids=str)
def test_sequences(hopper, force, rng, longest):
    """Packed one after another in NaN, one of them empty; rows past the last one are zeros."""
    force(64, blocks=3)
    lengths_q, lengths_k = [3, 1, 0, 70], [9, 0, 4, 100]
    bounds = [np.concatenate([[0], np.cumsum(n)]).astype(np.int32) for n in (lengths_q, lengths_k)]
    q, k, v = (np.full((bounds[i][-1] + 7, heads, 64), np.nan, FLOAT8) for i, heads in ((0, 2), (1, 1), (1, 1)))
    for x in (q, k, v):
        x[:-7] = rng.standard_normal(x[:-7].shape)
    out = hopper.get(flash_attention_varlen(*map(hopper.put, (q, k, v, *bounds)), *longest, causal=True))
    for b in range(4):
        rows, keys = slice(*bounds[0][b : b + 2]), slice(*bounds[1][b : b + 2])
        want, _ = references.attention(*widened((q[None, rows], k[None, keys], v[None, keys])), causal=True)
        assert_close(out[rows], want[0], BFLOAT16, k=WEIGHTS, magnitude=4.0)
    assert (out[bounds[0][-1] :] == 0).all()


def test_no_keys(hopper, rng):
    q, k, v = (hopper.put(x) for x in operands(rng, Sq=70, Sk=9))
    bounds = [hopper.put(np.array([0, n], np.int32)) for n in (70, 0)]
    for out, lse in (
        flash_attention(q, k[:, :0], v[:, :0], return_lse=True),
        flash_attention_varlen(q[0], k[0, :0], v[0, :0], *bounds, 70, 9, return_lse=True),
    ):
        assert (hopper.get(out) == 0).all() and (hopper.get(lse) == -np.inf).all()


def test_checks_of_values(hopper, rng, monkeypatch):
    monkeypatch.setattr(settings, "current", lambda: settings.Config(check=True))
    x = hopper.put(np.ones((3, 1, 64), FLOAT8))
    right, wrong = (hopper.put(np.array([0, 1, last], np.int32)) for last in (3, 9))
    assert (hopper.get(flash_attention_varlen(x, x, x, right, right, 2, 2)) == 1).all()
    with pytest.raises(ValueError, match="cu_seqlens_k must rise from 0 to at most 3"):
        flash_attention_varlen(x, x, x, right, wrong, 2, 2)
    scale = hopper.put(np.float32([-2]))
    with pytest.raises(ValueError, match=r"flash_attention: scale_k must not be negative, got -2\.0"):
        flash_attention(x[None], x[None], x[None], scale_k=scale, scale_v=scale)
    flash_attention(x[None], x[None], x[None], scale_v=scale)


def test_plan(hopper, rng):
    """Three calls of one plan, with a scale that changes in between."""
    inputs = operands(rng, B=2, Sq=70, Sk=70)
    attend, arrays = FlashAttention(causal=True), [hopper.put(x) for x in inputs]
    for factor in (1.0, 2.0, 0.5):
        out = hopper.get(attend(*arrays, scale_v=hopper.put(np.float32([factor]))))
        want, _ = references.attention(*widened(inputs), causal=True)
        assert_close(out, factor * want, BFLOAT16, k=WEIGHTS, magnitude=8.0)


@pytest.mark.parametrize("layout", ["offset", "pitch", "columns"])
def test_out_off_16_bytes(hopper, rng, layout):
    """The kernel cannot write there: the result is made aside and copied, and nothing beside it changes."""
    inputs = operands(rng, B=2, Sq=3, Sk=40, Hq=2, Hkv=2)
    arrays = [hopper.put(x) for x in inputs]
    want, want_lse = flash_attention(*arrays, return_lse=True)
    width = 64 * 2 if layout == "columns" else 72 if layout == "offset" else 65
    whole = hopper.put(np.full((2, 3, 2, width), 7, BFLOAT16))
    out = {"offset": whole[..., 1:65], "pitch": whole[..., :64], "columns": whole[..., ::2]}[layout]
    got, lse = flash_attention(*arrays, out=out, return_lse=True)
    assert got is out
    assert (hopper.get(got) == hopper.get(want)).all() and (hopper.get(lse) == hopper.get(want_lse)).all()
    beside = {"offset": np.s_[..., [0, *range(65, 72)]], "pitch": np.s_[..., 64:], "columns": np.s_[..., 1::2]}[layout]
    assert (hopper.get(whole)[beside] == 7).all()


def test_what_it_refuses(rng):
    q, k, v = operands(rng)
    wide = q.astype(BFLOAT16)
    with rawops.emulate(arch="sm_90a"):
        with pytest.raises(ValueError, match=r"without softcap .*, got .* softcap 1\.0, dropout_p 0\.0"):
            flash_attention(q, k, v, softcap=1.0)
        with pytest.raises(ValueError, match="bias must be None with float8"):
            flash_attention(q, k, v, bias=np.zeros(1, np.float32))
        with pytest.raises(ValueError, match="16 bytes"):
            flash_attention(q[..., :60], k[..., :60], v)
        with pytest.raises(ValueError, match="q must have a head_dim and rows"):
            flash_attention(q, k, v[..., :60], out=np.empty((1, 70, 1, 60), BFLOAT16))
        with pytest.raises(ValueError, match="scale_q must have shape"):
            flash_attention(q, k, v, scale_q=np.ones(3, np.float32))
        with pytest.raises(ValueError, match="scale_k must be None"):
            flash_attention(wide, wide, wide, scale_k=np.ones(1, np.float32))
        with pytest.raises(TypeError, match="out must have dtype"):
            flash_attention(q, k, v, out=np.empty(q.shape, np.float32))
        with pytest.raises(TypeError, match="one dtype"):
            flash_attention(q, wide, wide)
    with rawops.emulate(arch="sm_80"), pytest.raises(UnsupportedError, match="compute capability"):
        flash_attention(q, k, v)


def test_every_choice_fits():
    for D, Dv in ((16, 64), (64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (64, 256)):
        config = sm90.select_config(Problem(FLOAT8.name, 2, 4096, 4096, 32, 8, D, Dv, window_right=UNLIMITED), 132)
        assert config.shared_bytes <= 232448
        for name in ("head_dim", "head_dim_v", "consumers", "block_n", "stages", "turns"):
            assert getattr(config, name) in sm90.SM90_8BIT.choices[name]
