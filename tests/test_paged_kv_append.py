"""Writing tokens into pages: boundaries, skipped tokens, what is not written, layouts of the arrays, the checks."""

import numpy as np
import pytest
from paged_pool import DTYPES

import rawops
from rawops import config
from rawops.config import Config

PATTERN = 7777.0  # what nothing was written over


def pool(device, num_pages, page_size, heads, head_dim, dtype="float16", layout="NHD"):
    """A pool full of the pattern, with guard bands whose check comes at the end of the test."""
    shape = (num_pages, 2, page_size, heads, head_dim)
    if layout == "HND":
        shape = (num_pages, 2, heads, page_size, head_dim)
    pages = device.guarded(shape, DTYPES[dtype])
    pages[...] = DTYPES[dtype].type(PATTERN)
    return pages


def tokens(rng, count, heads, head_dim, dtype="float16"):
    return [rng.integers(-99, 100, (count, heads, head_dim)).astype(DTYPES[dtype]) for _ in "kv"]


def expected(pages, k, v, places, layout="NHD"):
    """The pool after token i of k and v went to places[i] = (page, slot), or nowhere."""
    pages = np.array(pages)
    for i, place in enumerate(places):
        if place is not None:
            page, slot = place
            target = pages[page, :, slot] if layout == "NHD" else pages[page, :, :, slot]
            target[0], target[1] = k[i], v[i]
    return pages


def same(got, want) -> None:
    np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 4, 256])
def test_across_page_boundaries(device, rng, page_size, layout):
    """Lengths 3, 4 and 0, counts 6, 1 and 4, tokens of a packed QKV in a shuffled order: all else unchanged."""
    heads, head_dim = 3, 24
    lens, counts = [3, 4, 0], [6, 1, 4]
    pages = pool(device, 13, page_size, heads, head_dim, layout=layout)
    table = rng.permutation(13)[:12].reshape(3, 4) if page_size > 1 else rng.integers(0, 13, (3, 9))
    if page_size == 1:
        table[:] = [[0, 0, 0, 5, 1, 7, 3, 12, 9], [0, 0, 0, 0, 2, 0, 0, 0, 0], [4, 6, 8, 10, 0, 0, 0, 0, 0]]
    sequences = np.repeat(np.arange(3), counts).astype(np.int32)
    positions = np.concatenate([np.arange(n) + start for start, n in zip(lens, counts, strict=True)]).astype(np.int32)
    order = rng.permutation(11)
    sequences, positions = sequences[order], positions[order]
    packed = rng.integers(-99, 100, (11, 8 * heads, head_dim)).astype(np.float16)
    view = device.put(packed)
    places = [(table[b, p // page_size], p % page_size) for b, p in zip(sequences, positions, strict=True)]
    k, v = packed[:, 6 * heads : 7 * heads], packed[:, 7 * heads :]
    want = expected(device.get(pages), k, v, places, layout)
    rawops.append_paged_kv(
        *(view[:, 6 * heads : 7 * heads], view[:, 7 * heads :], pages),
        *(device.put(x) for x in (table.astype(np.int32), positions)),
        sequence_ids=device.put(sequences),
        layout=layout,
    )
    same(device.get(pages), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [1, 7, 20, 64, 128])
def test_one_token_a_sequence(device, rng, head_dim, dtype):
    """Rows with and without a whole number of 16-byte chunks."""
    pages = pool(device, 8, 4, 2, head_dim, dtype)
    table = np.array([[5, 2], [7, 0], [1, 3]], np.int32)
    positions = np.array([0, 5, 7], np.int32)
    k, v = tokens(rng, 3, 2, head_dim, dtype)
    want = expected(device.get(pages), k, v, [(5, 0), (0, 1), (3, 3)])
    rawops.append_paged_kv(*map(device.put, (k, v)), pages, *map(device.put, (table, positions)))
    same(device.get(pages), want)


def test_skipped_tokens(device, rng):
    """Negative positions, positions past the table, sequences and pages that are none: nothing is written."""
    pages = pool(device, 4, 16, 2, 8)
    table = np.array([[1, 4, -1, 2**31 - 1]], np.int32)
    positions = np.array([4, -1, 5, -(2**31), 6, 64, 2**31 - 1, 16, 32, 48, 7, 8], np.int32)
    sequences = np.array([0] * 10 + [1, -1], np.int32)
    k, v = tokens(rng, 12, 2, 8)
    k[1], v[3] = np.nan, np.nan
    want = expected(device.get(pages), k, v, [(1, 4), None, (1, 5), None, (1, 6)])
    args = [device.put(x) for x in (k, v)]
    places = [device.put(x) for x in (table, positions)]
    rawops.append_paged_kv(*args, pages, *places, sequence_ids=device.put(sequences))
    same(device.get(pages), want)


def test_queries_of_skipped_tokens(device, rng):
    """They are not written either, whatever it is that skips the token."""
    pages = pool(device, 4, 4, 1, 8)
    before = device.get(pages).copy()
    k, v = map(device.put, tokens(rng, 6, 1, 8))
    q, angles = device.put(tokens(rng, 6, 2, 8)[0]), device.put(np.ones((9, 4), np.float32))
    q_out = device.put(np.full((6, 2, 8), PATTERN, np.float16))
    table = device.put(np.array([[1, 4, -1]], np.int32))
    positions, sequences = np.array([-1, 4, 8, 12, 0, 0], np.int32), np.array([0, 0, 0, 0, 1, -1], np.int32)
    rotation = {"cos": angles, "sin": angles, "q": q, "q_out": q_out}
    rawops.append_paged_kv(k, v, pages, table, device.put(positions), sequence_ids=device.put(sequences), **rotation)
    assert (device.get(q_out) == PATTERN).all()
    same(device.get(pages), before)


def test_one_row_of_pages_for_all_tokens(device, rng):
    pages = pool(device, 4, 4, 1, 16)
    k, v = tokens(rng, 6, 1, 16)
    want = expected(device.get(pages), k, v, [(3, 2), (3, 3), (0, 0), None, (0, 1), (3, 0)])
    positions = np.array([2, 3, 4, -1, 5, 0], np.int32)
    rawops.append_paged_kv(*map(device.put, (k, v)), pages, *map(device.put, (np.array([3, 0], np.int32), positions)))
    same(device.get(pages), want)


def test_one_row_of_pages_is_one_sequence(device, rng):
    """Tokens that name another sequence are skipped."""
    pages = pool(device, 4, 4, 1, 16)
    k, v = tokens(rng, 4, 1, 16)
    want = expected(device.get(pages), k, v, [(3, 2), None, (0, 0), None])
    arrays = (np.array(x, np.int32) for x in ([3, 0], [2, 3, 4, 5], [0, 1, 0, -1]))
    table, positions, sequences = map(device.put, arrays)
    rawops.append_paged_kv(*map(device.put, (k, v)), pages, table, positions, sequence_ids=sequences)
    same(device.get(pages), want)


def test_awkward_arrays(device, rng):
    """Misaligned, every other element, reversed, one row or column repeated; a pool that is part of a larger one."""
    k, v = tokens(rng, 3, 2, 16)
    table, positions = (device.put(np.array(x, np.int32)) for x in ([[5, 2], [7, 0], [1, 3]], [0, 5, 7]))
    places = [(5, 0), (0, 1), (3, 3)]
    plain = pool(device, 8, 4, 2, 16)
    want = expected(device.get(plain), k, v, places)
    shifted = device.put(np.concatenate([np.zeros(1, k.dtype), k.reshape(-1)]))[1:].reshape(k.shape)
    sparse = device.put(np.repeat(k, 2, axis=-1))[..., ::2]
    reverse = device.put(np.ascontiguousarray(k[::-1, :, ::-1]))[::-1, :, ::-1]
    for key in (shifted, sparse, reverse):
        pages = pool(device, 8, 4, 2, 16)
        rawops.append_paged_kv(key, device.put(v), pages, table, positions)
        same(device.get(pages), want)
    pages = pool(device, 8, 4, 2, 16)
    rawops.append_paged_kv(device.xp.broadcast_to(device.put(k)[:1], k.shape), device.put(v), pages, table, positions)
    same(device.get(pages), expected(device.get(plain), np.broadcast_to(k[:1], k.shape), v, places))
    pages = pool(device, 8, 4, 2, 16)
    flat = device.xp.broadcast_to(device.put(k)[..., :1], k.shape)
    rawops.append_paged_kv(flat, device.put(v), pages, table, positions)
    same(device.get(pages), expected(device.get(plain), np.broadcast_to(k[..., :1], k.shape), v, places))
    layers = device.put(np.full((8, 2, 4, 3, 2, 18), PATTERN, np.float16))
    part = layers[:, :, :, 1, :, 1:17]
    rawops.append_paged_kv(*map(device.put, (k, v)), part, table, positions)
    same(device.get(part), want)
    assert (device.get(layers) == PATTERN).sum() == layers.size - 2 * k.size + (k == PATTERN).sum()


def test_values_are_checked_on_request(device, rng, monkeypatch):
    monkeypatch.setattr(config, "current", lambda: Config(check=True))
    k, v = map(device.put, tokens(rng, 2, 1, 8))
    pages = pool(device, 4, 16, 1, 8)
    before = device.get(pages).copy()

    def append(table, positions, sequences=None):
        sequences = None if sequences is None else device.put(np.array(sequences, np.int32))
        table, positions = (device.put(np.array(x, np.int32)) for x in (table, positions))
        rawops.append_paged_kv(k, v, pages, table, positions, sequence_ids=sequences)

    with pytest.raises(ValueError, match=r"positions\[1\] must be below 32 .*, got 32"):
        append([[0, 1], [2, 3]], [3, 32])
    with pytest.raises(ValueError, match=r"block_table\[1\] must hold page ids between 0 and 3, got 4"):
        append([[0, 1], [2, 4]], [3, 31])
    with pytest.raises(ValueError, match=r"sequence_ids\[0\] must be between 0 and 1, .* got 2"):
        append([[0, 1], [2, 3]], [3, 31], [2, 0])
    with pytest.raises(ValueError, match=r"sequence_ids\[0\] must be among 0 rows, a row of block_table, got 0"):
        append(np.zeros((0, 2)), [3, 31], [0, 0])
    with pytest.raises(ValueError, match=r"block_table\[0\] must hold page ids among 0 pages, got 0"):
        rawops.append_paged_kv(k, v, pages[:0], *(device.put(np.zeros(n, np.int32)) for n in ((2, 2), 2)))
    angles = device.put(np.ones((4, 2), np.float32))
    table, positions = (device.put(np.array(x, np.int32)) for x in ([[0, 1], [2, 3]], [3, 4]))
    with pytest.raises(ValueError, match=r"positions\[1\] must be between 0 and 3, a row of cos, got 4"):
        rawops.append_paged_kv(k, v, pages, table, positions, cos=angles, sin=angles)
    same(device.get(pages), before)
    append([[0, 1], [2, 3]], [-1, -7])
    same(device.get(pages), before)


def test_empty_sizes(device, rng):
    k, v = map(device.put, tokens(rng, 2, 1, 8))
    pages, table = pool(device, 4, 16, 1, 8), device.put(np.zeros((2, 1), np.int32))
    rawops.append_paged_kv(k[:0], v[:0], pages, table[:0], device.put(np.zeros(0, np.int32)))
    rawops.append_paged_kv(k, v, pages, table[:, :0], device.put(np.zeros(2, np.int32)))
    rawops.append_paged_kv(k, v, pages[:0], table, device.put(np.zeros(2, np.int32)))
    assert (device.get(pages) == PATTERN).all()


MISTAKES = {
    "k must have dtype float16": ({"k": lambda a: a["k"].astype(np.float32)}, TypeError),
    "v must have shape": ({"v": lambda a: a["v"][:1]}, ValueError),
    r"k must have shape \(tokens, 2, 8\)": ({"k": lambda a: a["k"][:, :1]}, ValueError),
    "positions must have shape": ({"positions": lambda a: a["positions"][:1]}, ValueError),
    "positions must have dtype int32": ({"positions": lambda a: a["positions"].astype(np.int64)}, TypeError),
    "k must have 1 rows, one a sequence, got 2": ({"block_table": lambda a: a["block_table"][:1]}, ValueError),
    "sequence_ids must have shape": ({"sequence_ids": lambda a: a["positions"][:1]}, ValueError),
    "layout must be": ({"layout": lambda a: None}, ValueError),
    "pages must be an array": ({"pages": lambda a: None}, TypeError),
    "pages must not overlap k": ({"k": lambda a: a["pages"][:2, 0, 0]}, ValueError),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes(device, rng, message):
    changes, kind = MISTAKES[message]
    k, v = map(device.put, tokens(rng, 2, 2, 8))
    arrays = {"k": k, "v": v, "pages": pool(device, 4, 16, 2, 8)}
    arrays |= {"block_table": device.put(np.zeros((2, 1), np.int32)), "positions": device.put(np.zeros(2, np.int32))}
    with pytest.raises(kind, match="append_paged_kv: " + message):
        rawops.append_paged_kv(**arrays | {name: change(arrays) for name, change in changes.items()})
    assert (device.get(arrays["pages"]) == PATTERN).all()


@pytest.mark.parametrize("name", ["k", "pages", "positions"])
def test_arrays_between_elements_are_refused(device, rng, name):
    k, v = map(device.put, tokens(rng, 2, 2, 8))
    arrays = {"k": k, "v": v, "pages": pool(device, 4, 16, 2, 8)}
    arrays |= {"block_table": device.put(np.zeros((2, 1), np.int32)), "positions": device.put(np.zeros(2, np.int32))}
    arrays[name] = device.between(arrays[name])
    with pytest.raises(ValueError, match=f"append_paged_kv: {name} must lie on whole elements, got address"):
        rawops.append_paged_kv(**arrays)


@pytest.mark.parametrize("written", ["pages", "q_out"])
def test_what_cannot_be_written(device, rng, written):
    k, v = map(device.put, tokens(rng, 2, 2, 8))
    arrays = {"k": k, "v": v, "pages": pool(device, 4, 16, 2, 8), "q": k.copy(), "q_out": v.copy()}
    arrays |= dict.fromkeys(("cos", "sin"), device.put(np.ones((4, 4), np.float32)))
    arrays |= {"block_table": device.put(np.zeros((2, 1), np.int32)), "positions": device.put(np.zeros(2, np.int32))}
    x = arrays[written]
    spread = device.xp.broadcast_to(x[:1], x.shape).view()
    if device.is_emulated:
        with pytest.raises(ValueError, match=f"append_paged_kv: {written} must be writeable"):
            rawops.append_paged_kv(**arrays | {written: spread})
        spread = np.lib.stride_tricks.as_strided(x, x.shape, spread.strides)
    with pytest.raises(ValueError, match=f"append_paged_kv: {written} must have entries of its own"):
        rawops.append_paged_kv(**arrays | {written: spread})
