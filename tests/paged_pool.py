"""Page pools for tests: sequences scattered over pages, NaN wherever nothing may be read, and float64 attention."""

from __future__ import annotations

import ml_dtypes
import numpy as np

import rawops
from rawops._paged_kv_attention import OP
from rawops.testing.tolerances import assert_close

DTYPES = {"float16": np.dtype("float16"), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
NO_PAGE = 2**30  # in table entries that must not be read


class Paged:
    """Sequences of random keys and values, and the pool that holds them.

    Attributes
    ----------
    k, v : list of array (length, num_kv_heads, head_dim)
    pages, table, lens : array
        On the host. Pages are in random order and page 0 is in use.
    """

    def __init__(self, rng, lens, num_kv_heads, head_dim, page_size, dtype="float16", layout="NHD", make=None) -> None:
        make = make or (lambda shape: rng.standard_normal(shape))
        dtype = DTYPES[dtype]
        counts = [-(-n // page_size) for n in lens]
        ids = rng.permutation(sum(counts))
        self.page_size, self.layout = page_size, layout
        self.table = np.full((len(lens), max([*counts, 0]) + 2), NO_PAGE, np.int32)
        nhd = np.full((sum(counts) + 1, 2, page_size, num_kv_heads, head_dim), np.nan).astype(dtype)
        self.pages = nhd if layout == "NHD" else np.ascontiguousarray(nhd.swapaxes(2, 3))
        self.lens = np.array(lens, np.int32)
        self.k, self.v = ([make((n, num_kv_heads, head_dim)).astype(dtype) for n in lens] for _ in "kv")
        start = 0
        for b, count in enumerate(counts):
            self.table[b, :count] = ids[start : start + count]
            start += count
            self.fill(b)

    def tokens(self, array, b: int) -> np.ndarray:
        """Where sequence b lies in a pool: a list of views (2, num_kv_heads, head_dim), one a token."""
        slots = []
        for t in range(self.lens[b]):
            page, slot = self.table[b, t // self.page_size], t % self.page_size
            slots.append(array[page, :, slot] if self.layout == "NHD" else array[page, :, :, slot])
        return slots

    def fill(self, b: int) -> None:
        """Write the keys and values of sequence b where its table says."""
        for t, slot in enumerate(self.tokens(self.pages, b)):
            slot[0], slot[1] = self.k[b][t], self.v[b][t]


def attend(q, k, v, *, scale=None, causal=True, window=(None, None), softcap=0.0, slopes=None):
    """Attention of the last queries of one sequence, in float64.

    Parameters
    ----------
    q : array (n, num_heads, head_dim)
    k, v : array (length, num_kv_heads, head_dim)

    Returns
    -------
    out : array (n, num_heads, head_dim)
    lse : array (num_heads, n)
    """
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    (n, heads, head_dim), length = q.shape, len(k)
    group = heads // max(k.shape[1], 1)
    own = np.arange(n)[:, None] + length - n
    keys = np.arange(length)[None]
    seen = np.ones((n, length), bool)
    if causal:
        seen &= keys <= own
    if window[0] is not None:
        seen &= keys >= own - window[0]
    if window[1] is not None:
        seen &= keys <= own + window[1]
    out, lse = np.zeros(q.shape), np.full((heads, n), -np.inf)
    for h in range(heads):
        for i in range(n):
            used = seen[i]
            if not used.any():
                continue
            score = k[used, h // group] @ q[i, h] * (scale if scale is not None else head_dim**-0.5)
            if softcap:
                score = softcap * np.tanh(score / softcap)
            if slopes is not None:
                score -= float(slopes[h]) * np.abs(own[i] - keys[0, used])
            top = score.max()
            weight = np.exp(score - top)
            out[i, h] = weight @ v[used, h // group] / weight.sum()
            lse[h, i] = top + np.log(weight.sum())
    return out, lse


def ragged_reference(q, p: Paged, counts, **options):
    out, lse = np.zeros(q.shape), np.full((q.shape[1], len(q)), -np.inf)
    start = 0
    for b, n in enumerate(counts):
        out[start : start + n], lse[:, start : start + n] = attend(q[start : start + n], p.k[b], p.v[b], **options)
        start += n
    return out, lse


def run(device, p: Paged, q, **options):
    """Run paged_attention on a host's q: out and lse on the host."""
    q = device.put(q)
    out = device.guarded(q.shape, p.pages.dtype)
    arrays = (device.put(x) for x in (p.pages, p.table, p.lens))
    result, lse = rawops.paged_attention(q, *arrays, out=out, return_lse=True, layout=p.layout, **options)
    assert result is out
    return device.get(out), device.get(lse)


def close(got, lse, want, want_lse, dtype, tokens) -> None:
    """Weights are rounded to the 16-bit type before they multiply the values."""
    k = tokens * 2.0 ** (24 - 8 - (3 if dtype == "float16" else 0)) / 8
    assert_close(got, want, DTYPES[dtype], k=int(k) + 8, magnitude=1.0)
    finite = np.isfinite(want_lse)
    np.testing.assert_array_equal(np.isneginf(lse), ~finite)
    np.testing.assert_allclose(lse[finite], want_lse[finite], rtol=2e-6, atol=4e-6)


def decode_reference(q, p: Paged, **options):
    found = [attend(q[b : b + 1], p.k[b], p.v[b], **options) for b in range(len(q))]
    return np.concatenate([out for out, _ in found]), np.concatenate([lse for _, lse in found], axis=1)


def queries(rng, rows, heads, head_dim, dtype="float16"):
    return rng.standard_normal((rows, heads, head_dim)).astype(DTYPES[dtype])


def forget_plans(monkeypatch) -> None:
    """Have calls plan anew, by what a test has changed, and leave no such plan behind."""
    monkeypatch.setattr(OP, "_plans", {})
    monkeypatch.setattr(OP, "_last", (None, None, None, None))
