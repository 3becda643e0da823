"""Cascades on Hopper: a shared prefix and what each sequence has of its own, in one launch."""

from types import SimpleNamespace

import numpy as np
import pytest
from paged_pool import DTYPES, attend, close, forget_plans, queries

import rawops
from rawops import _paged_kv_cascade_sm90, _paged_kv_prefill, _paged_kv_prefill_sm90


@pytest.fixture(params=["at the same time", "one after the other"])
def cascade(hopper, rng, monkeypatch, request):
    """A cache whose sequences begin alike, and its decode beside float64 attention."""
    forget_plans(monkeypatch)
    monkeypatch.setattr(_paged_kv_prefill, "_MIN_ROWS", 0)
    monkeypatch.setattr(_paged_kv_cascade_sm90, "MIN_ROWS", 0)
    monkeypatch.setattr(_paged_kv_prefill, "_MIN_SMS", 0)
    monkeypatch.setattr("rawops._paged_kv_cache.merge_states", lambda *_: pytest.fail("merged apart"))
    select = _paged_kv_prefill_sm90.select
    beside = request.param == "at the same time"
    monkeypatch.setattr(rawops.PagedKVCache, "_overlaps", lambda *_: beside)

    def check(common, owns, *, heads=(8, 2), D=64, page=16, splits=2, dtype="float16", layout="NHD", sms=0, scale=None):
        def chosen(problem, sm_count, beside):
            return select(problem, 3, beside)._replace(splits=splits)

        monkeypatch.setattr(_paged_kv_prefill_sm90, "select", chosen)
        pages = -(-common // page) + sum(-(-n // page) + 1 for n in owns)
        cache = rawops.PagedKVCache(pages, page, heads[1], D, dtype, layout=layout)
        cache.pages[...] = np.nan
        if sms:
            monkeypatch.setattr(cache._device, "sm_count", sms)
        make = lambda n: rng.standard_normal((n, heads[1], D)).astype(DTYPES[dtype])  # noqa: E731
        k, v = make(common + sum(owns)), make(common + sum(owns))
        first = cache.add_sequence()
        cache.append(*(hopper.put(x[:common]) for x in (k, v)), [first], [common])
        sequences = [first, *(cache.fork(first) for _ in owns[1:])]
        cache.append(*(hopper.put(x[common:]) for x in (k, v)), sequences, owns)
        q = queries(rng, len(owns), heads[0], D, dtype)
        out = hopper.guarded(q.shape, DTYPES[dtype])
        _, lse = cache.decode(hopper.put(q), sequences, cascade=True, return_lse=True, out=out, softmax_scale=scale)
        launches = [launch.kernel for launch in hopper.report]
        assert not launches or any("paged_cascade_sm90" in kernel for kernel in launches) == beside
        got, lse, begin = hopper.get(out), hopper.get(lse), common
        for i, count in enumerate(owns):
            own = slice(begin, begin + count)
            want = attend(q[i : i + 1], *(np.concatenate([x[:common], x[own]]) for x in (k, v)), scale=scale)
            begin += count
            close(got[i : i + 1], lse[:, i : i + 1], *want, dtype, common + count)
        again = cache.decode(hopper.put(q), sequences, cascade=True, softmax_scale=scale)  # counters are as they were
        np.testing.assert_array_equal(hopper.get(again), got)

    return check


@pytest.mark.parametrize(("D", "page", "layout"), [(128, 8, "NHD"), (64, 16, "HND"), (64, 64, "NHD"), (64, 256, "NHD")])
def test_pages_and_heads(cascade, D, page, layout):
    """Some sequences have nothing of their own, or end inside a page, of which the rest is no number."""
    cascade(256, (70, 0, 1, 130 if D == 64 else 9), D=D, page=page, layout=layout)


@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (8, 1)])
def test_groups(cascade, heads):
    cascade(48, (5, 17), heads=heads, dtype="bfloat16")


def test_many_items(cascade):
    """One block has all items, and its ring wraps."""
    cascade(64, (1, 2, 40, 0, 3) * 7, sms=1, splits=1)


def test_many_parts(cascade):
    """More than are loaded at once, some of them without keys."""
    cascade(640, (3, 9), splits=18, scale=0.3)


def test_what_comes_later_gives_way(cascade):
    """Many common keys: the last stage of a ring's first round waits for the first one."""
    cascade(512, (400, 9), splits=1)


@pytest.mark.parametrize("groups", [4, 8])
def test_pairs_of_blocks(cascade, groups):
    """Blocks with two tiles of the same keys each fetch half of them; some have more than one such pair."""
    cascade(330, (3, 9) * 17, heads=(2 * groups, 2), splits=3, sms=6)


@pytest.mark.parametrize(
    ("own", "rows", "head_dim", "overlaps"),
    [
        ([256] * 64, 256, 128, True),
        ([0, 500, 0, 0], 32, 64, True),
        ([8192] + [256] * 15, 64, 128, False),  # an item has one block
        ([256] * 4, 64, 128, False),  # groups of 16
        ([256] * 64, 256, 96, False),
        ([256] * 2, 8, 128, False),
    ],
)
def test_what_goes_at_the_same_time(own, rows, head_dim, overlaps):
    hopper, ampere = (SimpleNamespace(capability=c, sm_count=132) for c in (90, 80))
    assert _paged_kv_cascade_sm90.overlaps(hopper, own, 8, head_dim, rows) == overlaps
    assert not _paged_kv_cascade_sm90.overlaps(ampere, own, 8, head_dim, rows)


def test_one_sequence_shares_with_nobody():
    """However long it is; two do."""
    assert not any(
        _paged_kv_cascade_sm90.saves(1, rows, 1 << 40, together) for rows in (1, 8, 128) for together in (0, 1)
    )
    assert _paged_kv_cascade_sm90.saves(2, 8, 1 << 30, False)
