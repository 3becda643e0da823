"""Prefill on Hopper: boxes of pages, packed heads, ragged queries, masks, ranges of keys, what must not be read."""

import contextlib

import numpy as np
import pytest
from paged_pool import Paged, attend, close, forget_plans, queries, ragged_reference, run

import rawops
from rawops import _paged_kv_prefill, _paged_kv_prefill_sm90


def took(device) -> bool:
    """Tell whether the kernel has run, as far as the device reports it."""
    return not device.report or any("paged_prefill_sm90" in launch.kernel for launch in device.report)


@pytest.fixture
def force(monkeypatch):
    """Have the kernel take few rows too, with a tile of the test's choice and few blocks that walk over many tiles."""

    def fix(blocks: int = 3, **changes) -> None:
        def chosen(problem, sm_count, beside):
            return select(problem, blocks, beside)._replace(**changes)

        select = _paged_kv_prefill_sm90.select
        forget_plans(monkeypatch)
        monkeypatch.setattr(_paged_kv_prefill_sm90, "select", chosen)
        monkeypatch.setattr(_paged_kv_prefill, "_MIN_ROWS", 0)
        monkeypatch.setattr(_paged_kv_prefill, "_MIN_SMS", 0)

    return fix


def check(device, rng, lens, counts, *, heads=(2, 1), D=64, page=16, dtype="float16", layout="NHD", more=0, **options):
    """Compare with the reference; slots past a length are NaN, entries past the last page no page."""
    p = Paged(rng, lens, heads[1], D, page, dtype, layout)
    q = queries(rng, sum(counts) + more, heads[0], D, dtype)
    q[sum(counts) :] = np.nan
    cu = device.put(np.cumsum([0, *counts]).astype(np.int32))
    got = run(device, p, q, cu_seqlens_q=cu, **options)
    assert took(device)
    close(*got, *ragged_reference(q, p, counts, **options), dtype, max(lens))


@pytest.mark.parametrize(
    ("page", "layout"), [(8, "NHD"), (16, "NHD"), (64, "NHD"), (256, "NHD"), (8, "HND"), (32, "HND")]
)
def test_page_sizes(hopper, force, rng, page, layout):
    """Boxes of a page, and of parts of one."""
    force()
    dtype = "bfloat16" if page == 8 else "float16"
    check(hopper, rng, [150, 33], [20, 3], heads=(4, 2), page=page, layout=layout, dtype=dtype)


@pytest.mark.parametrize(("D", "page"), [(96, 32), (128, 128), (192, 16), (256, 64)])
def test_head_dims(hopper, force, rng, D, page):
    """Blocks of 112 and 80 keys, into which boxes of 16 go; heads that end inside a box."""
    force()
    check(hopper, rng, [140], [20], D=D, page=page)


@pytest.mark.parametrize("heads", [(2, 2), (3, 1), (8, 1)])
def test_groups(hopper, force, rng, heads):
    """Heads of a group side by side in a tile, and groups that do not divide it."""
    force()
    check(hopper, rng, [70, 90], [37, 20], heads=heads)


@pytest.mark.parametrize(
    "options", [{"causal": False}, {"window": (20, 0)}, {"window": (3, 5), "causal": False}], ids=str
)
def test_masks(hopper, force, rng, options):
    """Chunks, single queries and none, fewer keys than queries, rows of q past the last sequence."""
    force()
    check(hopper, rng, [200, 17, 8, 2, 0, 3], [33, 1, 0, 5, 1, 3], more=3, **options)


def test_sequences_longer_than_the_average(hopper, force, rng):
    """One row of tiles a sequence is counted on: blocks go on with what is left."""
    force(row_tiles=1)
    check(hopper, rng, [160, 9], [90, 1], heads=(4, 1))


@pytest.mark.parametrize("splits", [2, 5])
def test_ranges_of_keys(hopper, force, rng, splits):
    """Several blocks share a tile's keys, of a short sequence some have none."""
    force(splits=splits)
    check(hopper, rng, [400, 20], [30, 8], window=(380, 0))


def test_hidden_non_finite_values(hopper, force, rng):
    """A key or value that only later queries see leaves earlier ones as they were, bit for bit."""
    force()
    p = Paged(rng, [150], 1, 64, 16)
    q, cu = queries(rng, 6, 4, 64), hopper.put(np.array([0, 6], np.int32))
    clean = run(hopper, p, q, cu_seqlens_q=cu)[0]
    for value in (np.nan, np.inf):
        p.k[0][148], p.v[0][148] = value, value
        p.fill(0)
        got = run(hopper, p, q, cu_seqlens_q=cu)[0]
        np.testing.assert_array_equal(got[:4], clean[:4])
        assert np.isnan(got[4:]).all()
    assert took(hopper)


def test_pages_that_do_not_exist(hopper, force, rng):
    """They stand for keys and values of zero, and a length past the table is all of it."""
    force()
    p = Paged(rng, [40, 48], 1, 64, 16)
    p.table = np.ascontiguousarray(p.table[:, :3])
    p.table[0, 1], p.table[1, 2] = len(p.pages), -5
    p.lens[1] = 60
    for b, missing in ((0, slice(16, 32)), (1, slice(32, 48))):
        p.k[b][missing] = p.v[b][missing] = 0
    q, cu = queries(rng, 9, 2, 64), hopper.put(np.array([0, 4, 9], np.int32))
    got = run(hopper, p, q, cu_seqlens_q=cu)
    assert took(hopper)
    close(*got, *ragged_reference(q, p, [4, 5]), "float16", 48)


@pytest.mark.parametrize("case", ["small pages", "softcap", "an output with gaps"])
def test_what_it_leaves_to_others(device, force, rng, case):
    force()
    p, q = Paged(rng, [40], 2, 64, 4 if case == "small pages" else 16), queries(rng, 9, 4, 64)
    options = {"softcap": 3.0} if case == "softcap" else {}
    with rawops.emulate(arch="sm_90a") if device.is_emulated else contextlib.nullcontext() as emu:
        arrays = [device.put(x) for x in (q, p.pages, p.table, p.lens)]
        cu, out = device.put(np.array([0, 9], np.int32)), device.put(np.zeros((9, 4, 65), q.dtype))[..., :64]
        out = {"out": out} if case == "an output with gaps" else {}
        got = rawops.paged_attention(*arrays, cu_seqlens_q=cu, return_lse=True, **out, **options)
    close(*map(device.get, got), *ragged_reference(q, p, [9], **options), "float16", 40)
    assert emu is None or not any("sm90" in launch.kernel for launch in emu.report)


def test_partial_results_of_a_prefix(hopper, force, rng):
    """A cascade: the ranges of a shared prefix, then what each sequence has of its own, some nothing."""
    force(splits=3)
    cache = rawops.PagedKVCache(20, 16, 2, 64)
    k, v = (rng.standard_normal((207, 2, 64)).astype(np.float16) for _ in "kv")
    first = cache.add_sequence()
    cache.append(*(hopper.put(x[:192]) for x in (k, v)), [first], [192])
    sequences = [first, *(cache.fork(first) for _ in range(2))]
    cache.append(*(hopper.put(x[192:]) for x in (k, v)), sequences, [5, 0, 10])
    q = queries(rng, 3, 8, 64)
    out, lse = cache.decode(hopper.put(q), sequences, cascade=True, return_lse=True)
    assert took(hopper)
    for i, own in enumerate((slice(192, 197), slice(0, 0), slice(197, 207))):
        want, want_lse = attend(q[i : i + 1], *(np.concatenate([x[:192], x[own]]) for x in (k, v)))
        got = hopper.get(out)[i : i + 1], hopper.get(lse)[:, i : i + 1]
        close(*got, want, want_lse, "float16", 207)


def test_no_sequences(hopper):
    """Rows past all sequences see nothing."""
    q, pages = hopper.put(np.ones((1, 4, 64), "float16")), hopper.put(np.ones((4, 2, 16, 2, 64), "float16"))
    table, lens, cu = (hopper.put(np.zeros(shape, np.int32)) for shape in ((0, 3), 0, 1))
    out, lse = rawops.paged_attention(q, pages, table, lens, cu_seqlens_q=cu, return_lse=True)
    assert (hopper.get(out) == 0).all()
    assert (hopper.get(lse) == -np.inf).all()
