"""Several queries a sequence over pages, by both kernels of sm_80: ragged numbers, masks, scores, ranges of keys."""

import numpy as np
import pytest
from paged_pool import Paged, close, forget_plans, queries, ragged_reference, run

from rawops import _paged_kv_kernel, _paged_kv_prefill


@pytest.fixture(params=["lines of tiles", "flash attention's tiles"])
def kernel(request, monkeypatch):
    """Which kernel takes several queries a sequence."""
    forget_plans(monkeypatch)
    if request.param == "flash attention's tiles":
        monkeypatch.setattr(_paged_kv_prefill, "_MIN_ROWS", 0)
        monkeypatch.setattr(_paged_kv_prefill, "_MIN_SMS", 0)
        monkeypatch.setattr(_paged_kv_kernel, "Launch", None)  # of the other kernel: not to be made
    return request.param


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": False}, {"window": (7, 0)}, {"window": (3, 5), "causal": False}],
    ids=str,
)
def test_ragged_queries(device, rng, kernel, options):
    """Chunks, single queries and none, fewer keys than queries, rows of q past the last sequence."""
    counts, lens = [9, 1, 0, 5, 1, 3], [40, 17, 8, 2, 0, 3]
    p = Paged(rng, lens, 2, 64, 8)
    q = queries(rng, sum(counts) + 3, 6, 64)
    q[sum(counts) :] = np.nan
    cu = device.put(np.cumsum([0, *counts]).astype(np.int32))
    close(*run(device, p, q, cu_seqlens_q=cu, **options), *ragged_reference(q, p, counts, **options), "float16", 40)


def test_ragged_queries_in_splits(device, rng):
    p = Paged(rng, [40, 17], 2, 64, 8)
    q = queries(rng, 7, 6, 64)
    cu = device.put(np.array([0, 6, 7], np.int32))
    want = ragged_reference(q, p, [6, 1])
    close(*run(device, p, q, cu_seqlens_q=cu, num_splits=3), *want, "float16", 40)


def test_flash_attention_tiles_in_splits(device, rng, monkeypatch):
    """Few rows and many keys: their ranges go to several blocks, and of the short sequence one of them has none."""
    forget_plans(monkeypatch)
    monkeypatch.setattr(_paged_kv_prefill, "_MIN_SMS", 0)
    p = Paged(rng, [520, 20], 1, 64, 64)
    q = queries(rng, 70, 2, 64)
    cu = device.put(np.array([0, 60, 68], np.int32))
    merged = []
    merge_parts = _paged_kv_prefill.merge_parts
    monkeypatch.setattr(_paged_kv_prefill, "merge_parts", lambda *args: merged.append(args) or merge_parts(*args))
    close(*run(device, p, q, cu_seqlens_q=cu), *ragged_reference(q, p, [60, 8]), "float16", 520)
    assert merged


def test_flash_attention_tiles_of_a_long_sequence(device, rng, monkeypatch):
    """There are blocks for sequences of average length: a longer one's take several tiles each."""
    forget_plans(monkeypatch)
    monkeypatch.setattr(_paged_kv_prefill, "_MIN_SMS", 0)
    monkeypatch.setattr(_paged_kv_prefill, "_TILES_PER_SM", 0)
    p = Paged(rng, [230, 9, 5], 1, 64, 16)
    q = queries(rng, 212, 2, 64)
    q[209:] = np.nan
    cu = device.put(np.array([0, 205, 208, 209], np.int32))
    close(*run(device, p, q, cu_seqlens_q=cu), *ragged_reference(q, p, [205, 3, 1]), "float16", 230)


def test_scores_of_ragged_queries(device, rng, kernel):
    """softcap, slopes and a negative scale, in a pool of which one page does not exist and one length is too long."""
    p = Paged(rng, [40, 30], 1, 64, 16)
    q = queries(rng, 9, 2, 64)
    p.table = np.ascontiguousarray(p.table[:, :3])
    p.table[0, 1] = len(p.pages)
    p.k[0][16:32], p.v[0][16:32] = 0, 0
    p.table[1, 2], p.lens[1] = -5, 60  # all of the table: what lies past the 30 tokens is zero too
    for x in (p.k, p.v):
        x[1] = np.concatenate([x[1], np.zeros((18, 1, 64), np.float16)])
    p.pages[p.table[1, 1], :, 14:] = 0
    cu, slopes = device.put(np.array([0, 4, 9], np.int32)), np.array([0.5, 0.02], np.float32)
    for options in ({"softcap": 3.0, "alibi": slopes}, {"softmax_scale": -0.2}, {"softmax_scale": 1e-50}):
        given = {"alibi_slopes": device.put(slopes), "softcap": 3.0} if "alibi" in options else options
        want = {
            "scale": options.get("softmax_scale"),
            "slopes": options.get("alibi"),
            "softcap": options.get("softcap", 0),
        }
        got = run(device, p, q, cu_seqlens_q=cu, **given)
        close(*got, *ragged_reference(q, p, [4, 5], **want), "float16", 48)


def test_hidden_non_finite_values(device, rng, kernel):
    """A key or value that only later queries see leaves earlier ones as they were, bit for bit."""
    p = Paged(rng, [20], 1, 64, 16)
    q, cu = queries(rng, 6, 3, 64), device.put(np.array([0, 6], np.int32))
    clean = run(device, p, q, cu_seqlens_q=cu)[0]
    for value in (np.nan, np.inf, 1e4):
        p.k[0][18], p.v[0][18] = value, value
        p.fill(0)
        got = run(device, p, q, cu_seqlens_q=cu)[0]
        np.testing.assert_array_equal(got[:4], clean[:4])
        if value != 1e4:
            assert np.isnan(got[4:]).all()
