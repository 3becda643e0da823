"""What the cache reads: cascades, slopes, the checks of a decode."""

import numpy as np
import pytest
from paged_loop import DIM, HEADS, Loop
from paged_pool import forget_plans

import rawops
from rawops import config
from rawops.config import Config
from rawops.testing.tolerances import assert_close


@pytest.mark.parametrize("kernel", ["lines of tiles", "flash attention's tiles"])
def test_cascade_equals_plain(device, rng, monkeypatch, kernel):
    """A common prefix read once, by choice and by arithmetic; what follows differs, is shared in part, or is empty."""
    forget_plans(monkeypatch)
    if kernel == "flash attention's tiles":  # which leave partial results
        monkeypatch.setattr("rawops._paged_kv_prefill._MIN_ROWS", 0)
        monkeypatch.setattr("rawops._paged_kv_prefill._MIN_SMS", 0)
        monkeypatch.setattr("rawops._paged_kv_cache.merge_states", lambda *_: pytest.fail("merged apart"))
    loop = Loop(device, rng, num_pages=30)
    a = loop.add(10)
    b, c = loop.fork(a), loop.fork(a)
    d = loop.fork(c)
    loop.append([a, b, c], [3, 1, 6])
    q = device.put(rng.standard_normal((4, 2 * HEADS, DIM)).astype(np.float16))
    for sequences, shared in (([c, d, a, b], 2), ([a, a_too := loop.fork(a), b, d], 2)):
        out, lse = (device.get(x) for x in loop.cache.decode(q, sequences, cascade=True, return_lse=True))
        plain, plain_lse = (device.get(x) for x in loop.cache.decode(q, sequences, cascade=False, return_lse=True))
        assert_close(out, plain.astype(np.float64), np.float16, k=2**16, magnitude=1.0)
        np.testing.assert_allclose(lse, plain_lse, rtol=1e-5, atol=1e-5)
        assert loop.cache._batches[tuple(sequences)].shared_pages(loop.cache._allocator) == shared
        given = device.guarded(q.shape, np.float16)
        assert loop.cache.decode(q, sequences, cascade=True, softcap=5.0, out=given) is given
        plain = device.get(loop.cache.decode(q, sequences, softcap=5.0)).astype(np.float64)
        assert_close(device.get(given), plain, np.float16, k=2**16, magnitude=1.0)
    loop.cache.decode(q, sequences, cascade=True, window=[None, None])
    with pytest.raises(ValueError, match="decode: out must not overlap pages"):
        inside = loop.cache.pages.reshape(-1)[: q.size].reshape(q.shape)
        loop.cache.decode(q, sequences, cascade=True, softcap=5.0, out=inside)
    loop.check()
    monkeypatch.setattr("rawops._paged_kv_cascade_sm90.APART_BYTES", 0)
    monkeypatch.setattr("rawops._paged_kv_cache.attend_to_prefix", lambda *_: pytest.fail("a cascade"))
    loop.cache.decode(q, [a, a_too, b, d], window=(5, None))
    with pytest.raises(pytest.fail.Exception):
        loop.cache.decode(q, [a, a_too, b, d])
    with pytest.raises(ValueError, match="cascade must be False with any of window"):
        loop.cache.decode(q, [a, a_too, b, d], window=(5, None), cascade=True)


def test_cascade_under_rawops_check(device, rng, monkeypatch):
    """The checks look for the pages that the sequences have of their own, which are fewer than their lengths take."""
    loop = Loop(device, rng)
    a = loop.add(9)
    sequences = [a, loop.fork(a), loop.fork(a)]
    loop.append(sequences, [0, 2, 7])
    q = device.put(rng.standard_normal((3, 2 * HEADS, DIM)).astype(np.float16))
    want = device.get(loop.cache.decode(q, sequences, cascade=True))
    monkeypatch.setattr(config, "current", lambda: Config(check=True))
    np.testing.assert_array_equal(device.get(loop.cache.decode(q, sequences, cascade=True)), want)
    table = loop.cache.block_table(sequences)
    table[2, 3] = 12
    with pytest.raises(ValueError, match=r"block_table\[2\] must hold page ids"):
        loop.cache.decode(q, sequences, cascade=True)


def test_decode_with_slopes(device, rng):
    """They go without the cascade, whatever is shared."""
    loop = Loop(device, rng)
    a = loop.add(10)
    both = [a, loop.fork(a)]
    q = device.put(rng.standard_normal((2, 2 * HEADS, DIM)).astype(np.float16))
    slopes = device.put(np.array([0.5, 0.25] * HEADS, np.float32))
    table, lens = loop.cache.block_table(both), loop.cache.seq_lens(both)
    plain = rawops.paged_attention(q, loop.cache.pages, table, lens, alibi_slopes=slopes)
    out = loop.cache.decode(q, both, alibi_slopes=slopes)
    np.testing.assert_array_equal(device.get(out), device.get(plain))


def test_sequences_of_an_iterator(device, rng):
    loop = Loop(device, rng)
    a = loop.add(10)
    q = device.put(np.ones((1, HEADS, DIM), np.float16))
    np.testing.assert_array_equal(
        device.get(loop.cache.decode(q, iter([a]))), device.get(loop.cache.decode(q, [a], cascade=False))
    )


@pytest.mark.parametrize("cascade", [True, None])
def test_decode_checks_its_arrays(device, rng, cascade):
    loop = Loop(device, rng)
    a = loop.add(10)
    both = [a, loop.fork(a)]
    q = device.put(np.ones((2, HEADS, DIM), np.float16))
    rows = device.xp.lib.stride_tricks.as_strided(q[:1].copy(), q.shape, (0, 2 * DIM, 2))
    for message, kind, queries, out in [
        ("out must have shape", ValueError, q, device.put(np.zeros((2, HEADS, DIM + 1), np.float16))),
        ("out must have dtype float16", TypeError, q, device.put(np.zeros(q.shape, np.float32))),
        ("out must have entries of its own", ValueError, q, rows),
        ("q must have shape", ValueError, q[0, 0], None),
        ("q must be", TypeError, None, None),
        ("q must be", TypeError, None, q.copy()),
    ]:
        with pytest.raises(kind, match=f"decode: {message}"):
            loop.cache.decode(queries, both, cascade=cascade, out=out)
    with pytest.raises(TypeError, match="decode: causal must be True or False"):
        loop.cache.decode(q, both, cascade=cascade, causal="x")
