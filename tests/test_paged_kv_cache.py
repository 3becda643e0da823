"""The cache: copy-on-write, out of pages, prefixes, steps, saving, and what is refused."""

import gc

import numpy as np
import pytest
from conftest import Device
from paged_loop import DIM, HEADS, Loop
from paged_pool import attend

import rawops
from rawops.errors import OutOfPagesError
from rawops.testing.tolerances import assert_close


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_append_and_decode(device, rng, layout):
    loop = Loop(device, rng, layout=layout)
    a, b, c = loop.add(3), loop.add(), loop.add(5)
    loop.append([a, c])
    loop.check()
    loop.append([c, b, a], [4, 1, 0])
    loop.check([b, c, a])
    for _ in range(3):
        loop.append([a, b, c])
        loop.check([a, b, c])
    assert loop.cache.seq_lens([c, a]).tolist() == [13, 7]
    table = device.get(loop.cache.block_table([c, a]))
    assert table.shape == (2, 12) and (table[0, 4:] == -1).all() and (table[1, 2:] == -1).all()
    assert len({*table[0, :4], *table[1, :2]}) == 6 and loop.cache.num_free_pages == 12 - 4 - 2 - 1


def test_fork_copies_the_last_page_when_it_is_written(device, rng):
    """Parent and child append different tokens behind a page that both have."""
    loop = Loop(device, rng)
    parent = loop.add(6)
    child = loop.fork(parent)
    before = device.get(loop.cache.block_table([parent, child])).copy()
    np.testing.assert_array_equal(before[0], before[1])
    assert loop.cache.num_free_pages == 10
    loop.append([parent, child])
    after = device.get(loop.cache.block_table([parent, child]))
    assert after[0, 0] == after[1, 0] and after[0, 1] != after[1, 1] and loop.cache.num_free_pages == 9
    loop.check()
    grandchild = loop.fork(child)
    loop.append([grandchild], [3])
    loop.append([child])
    loop.check()
    for s in (parent, grandchild, child):
        loop.cache.free(s)
    assert loop.cache.num_free_pages == 12


def test_out_of_pages_changes_nothing(device, rng):
    loop = Loop(device, rng, num_pages=4)
    a, b = loop.add(7), loop.add(4)
    pages = device.get(loop.cache.pages).copy()
    k, v = map(device.put, loop.new(9))
    with pytest.raises(OutOfPagesError, match="2 more pages are needed and 1 of 4 are free"):
        loop.cache.append(k, v, [a, b], [1, 8])
    np.testing.assert_array_equal(device.get(loop.cache.pages), pages)
    assert (loop.cache.length(a), loop.cache.length(b), loop.cache.num_free_pages) == (7, 4, 1)
    with pytest.raises(OutOfPagesError):
        loop.cache.append(k[:8], v[:8], [a, b], [0, 8])
    loop.append([a, b], [1, 4])
    loop.check()
    loop.cache.free(a)
    del loop.kv[a]
    loop.append([b], [8])
    loop.check()


def test_what_is_refused_changes_nothing(device, rng):
    """Keys that lie in the pool itself, tokens that are none, a saved sequence that is too long."""
    loop = Loop(device, rng, prefix_sharing=True)
    cache, s = loop.cache, loop.add()
    loop.append([s], [4])
    saved = cache.save(loop.add(9))
    inside = cache.pages[int(cache.block_table([s])[0, 0])]
    with pytest.raises(ValueError, match="pages must not overlap k"):
        cache.append(inside[0], inside[1], [s], [4])
    k, v = map(device.put, loop.new(2))
    t = cache.add_sequence()
    for tokens in ([1, 2.0], [1, None], ["1", "2"], [1, 2**63]):
        kind = ValueError if tokens == [1, 2**63] else TypeError
        with pytest.raises(kind, match="tokens must be integers of 64 bits"):
            cache.append(k, v, [t], [2], tokens=[tokens])
        with pytest.raises(kind, match="tokens must be integers of 64 bits"):
            cache.add_sequence(tokens)
    assert (cache.length(s), cache.length(t), cache.num_free_pages) == (4, 0, 12 - 1 - 3)
    short = rawops.PagedKVCache(12, 4, HEADS, DIM, max_length=8)
    with pytest.raises(ValueError, match="at most 8 tokens"):
        short.restore(saved)
    with pytest.raises(ValueError, match="added and not freed"):
        short.free(0)
    assert short.num_free_pages == 12


def test_prefill_in_chunks_equals_all_at_once(device, rng):
    loop = Loop(device, rng, num_pages=20, page_size=8)
    a, b = loop.add(), loop.add(3)
    q = rng.standard_normal((20, 4, DIM)).astype(np.float16)
    got = []
    for n, others in ((9, 1), (4, 4), (2, 2), (5, 0)):
        loop.append([a, b], [n, others])
        start = len(loop.kv[a][0]) - n
        mixed = np.concatenate([q[start : start + n], q[:others]])
        cu = [0, n, n + others]
        cu = range(0, 3 * n, n) if n == others else cu if others else device.put(np.array(cu, np.int32))
        got.append(device.get(loop.cache.prefill(device.put(mixed), [a, b], cu))[:n])
    want, _ = attend(q, *loop.kv[a])
    assert_close(np.concatenate(got), want, np.float16, k=2**17, magnitude=1.0)


def test_steps_keep_their_buffers(device, rng):
    """What a captured graph would do: the same buffers at each step, for whichever sequences."""
    loop = Loop(device, rng)
    sequences = [loop.add(6), loop.add(3), loop.fork(0)]
    buffers = None
    for step in range(6):
        if step == 4:
            loop.cache.free(sequences[1])
            del loop.kv[sequences[1]]
            sequences = [sequences[2], sequences[0], loop.add(1)]
        table, lens, positions = now = loop.cache.step(sequences)
        buffers = buffers or now
        assert all(x is y for x, y in zip(buffers, now, strict=True))
        parts = [loop.new(1) for _ in sequences]
        k, v = (device.put(np.concatenate(x)) for x in zip(*parts, strict=True))
        rawops.append_paged_kv(k, v, loop.cache.pages, table, positions)
        loop.note(sequences, parts)
        assert lens.tolist() == [len(loop.kv[s][0]) for s in sequences]
        assert (device.get(positions) == device.get(lens) - 1).all()
        q = device.put(np.ones((3, 2, DIM), np.float16))
        direct = rawops.paged_attention(q, loop.cache.pages, table, lens)
        np.testing.assert_array_equal(device.get(direct), device.get(loop.cache.decode(q, sequences)))
        loop.check(sequences)


def test_save_and_restore(device, rng):
    """Swapped out, its pages used by others, swapped in: what it reads, and out of pages on the way."""
    loop = Loop(device, rng, num_pages=4)
    a = loop.add(7)
    saved = loop.cache.save(a)
    loop.cache.free(a)
    kv = loop.kv.pop(a)
    b = loop.add(12)
    with pytest.raises(OutOfPagesError):
        loop.cache.restore(saved)
    assert loop.cache.num_free_pages == 1
    loop.check([b])
    loop.cache.free(b)
    del loop.kv[b]
    for _ in range(2):
        loop.kv[loop.cache.restore(saved)] = [x.copy() for x in kv]
    assert saved.length == 7 and saved.data.shape == (2, 2, 4, HEADS, DIM)
    waiting = [loop.cache.save(s) for s in loop.kv]
    waiting.remove(waiting[-1])
    assert len({*waiting, saved}) == 2
    loop.append(list(loop.kv))
    loop.check()


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_call_that_fails_half_way_changes_nothing(device, rng, monkeypatch, error):
    """A Ctrl-C in the first compile, no memory: no tokens that nobody wrote, in a sequence or under a known prefix."""
    loop = Loop(device, rng, prefix_sharing=True)
    text = list(range(10))
    a = loop.cache.add_sequence(text)
    loop.kv[a] = loop.new(0)
    loop.append([a], [6])
    b = loop.fork(a)
    loop.check()
    saved, free = loop.cache.save(a), loop.cache.num_free_pages
    for place, call in [
        ("rawops._paged_kv_cache.append", lambda: loop.append([a, b], [4, 5])),
        ("rawops._paged_kv_cache.append", lambda: loop.append([b, a])),
        ("rawops._paged_kv_batch.Batch.update", lambda: loop.cache.step([b, a])),
        ("rawops._paged_kv_swap.HostCopies.to_device", lambda: loop.cache.restore(saved)),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(place, failing(error))
            with pytest.raises(error):
                call()
        assert loop.cache.num_free_pages == free
        assert loop.cache.length(loop.cache.add_sequence(text)) == 4  # the page that was full before
        loop.check()
    loop.append([a, b], [4, 3])
    loop.check()


def failing(error):
    def call(*_, **__):
        raise error

    return call


def test_prefix_sharing_reads_the_shared_pages(device, rng):
    loop = Loop(device, rng, prefix_sharing=True)
    text = list(range(11))
    a = loop.cache.add_sequence(text)
    loop.kv[a] = loop.new(0)
    loop.append([a], [11])
    b = loop.cache.add_sequence([*text[:8], 99])
    assert loop.cache.length(b) == 8
    loop.kv[b] = [x[:8] for x in loop.kv[a]]
    loop.append([b])
    loop.check()
    k, v = map(device.put, loop.new(4))
    loop.cache.append(k, v, [b], [4], tokens=iter([iter([1, 2, 3, 4])]))
    assert loop.cache.length(loop.cache.add_sequence([*text[:8], 99, 1, 2, 3, 4])) == 12


def test_longest_length(device, rng):
    loop = Loop(device, rng, max_length=6)
    a = loop.add(6)
    assert loop.cache.block_table([a]).shape == (1, 2)
    loop.append([a], [2])  # to the end of the page
    with pytest.raises(ValueError, match=r"have at most 8 tokens \(max_length\), got 9"):
        loop.append([a])
    loop.check()


def test_empty_calls(device, rng):
    loop = Loop(device, rng)
    a = loop.add()
    loop.append([a], [0])
    loop.cache.append(*map(device.put, loop.new(0)), [])
    q = device.put(np.ones((1, 4, DIM), np.float16))
    assert (device.get(loop.cache.decode(q, [a])) == 0).all()
    assert loop.cache.decode(q[:0], []).shape == (0, 4, DIM)
    empty = rawops.PagedKVCache(0, 16, 1, 8)
    with pytest.raises(OutOfPagesError):
        empty.append(*(device.put(np.zeros((1, 1, 8), np.float16)) for _ in "kv"), [empty.add_sequence()])


def _saved_elsewhere(page_size, heads, **options):
    other = rawops.PagedKVCache(4, page_size, heads, DIM, **options)
    return other.save(other.add_sequence())


MISTAKES = {
    "page_size must be": (lambda c, x: rawops.PagedKVCache(4, 12, 1, 64), ValueError),
    "page_size must be .*got True": (lambda c, x: rawops.PagedKVCache(4, True, 1, 64), ValueError),
    "page_size must be .*got np.float32": (lambda c, x: rawops.PagedKVCache(4, np.float32(16), 1, 64), ValueError),
    "dtype must be": (lambda c, x: rawops.PagedKVCache(4, 16, 1, 64, "float32"), ValueError),
    "kv_dtype must be .*got 'float8'": (lambda c, x: rawops.PagedKVCache(4, 16, 1, 64, kv_dtype="float8"), ValueError),
    "head_dim must be between 1 and 256": (lambda c, x: rawops.PagedKVCache(4, 16, 1, 300), ValueError),
    "a sequence must be one that was added": (lambda c, x: c.append(x, x, [5]), ValueError),
    "sequences must all be different": (lambda c, x: c.append(x, x, [0, 0], [1, 0]), ValueError),
    "counts must be 1 numbers": (lambda c, x: c.append(x, x, [0], [1, 1]), ValueError),
    r"k must have shape \(2, 2, 64\)": (lambda c, x: c.append(x, x, [0], [2]), ValueError),
    "k must have dtype float16": (lambda c, x: c.append(x.astype(np.float32), x, [0]), TypeError),
    "tokens must have": (lambda c, x: c.append(x, x, [0], tokens=[[1, 2]]), ValueError),
    "counts must be an integer": (lambda c, x: c.append(x, x, [0], [1.5]), TypeError),
    "softcap must be finite": (lambda c, x: c.decode(x, [0], softcap=-1), ValueError),
    "return_lse must be True or False": (lambda c, x: c.decode(x, [0], return_lse="no"), TypeError),
    "prefix_sharing must be True or False": (
        lambda c, x: rawops.PagedKVCache(4, 16, 1, 64, prefix_sharing="no"),
        TypeError,
    ),
    "cascade must be True or False": (lambda c, x: c.decode(x, [0], cascade="x"), TypeError),
    "options must be among alibi_slopes, causal": (lambda c, x: c.decode(x, [0], slope=1), TypeError),
    "decode: sequences must be a sequence of int, got 3": (lambda c, x: c.decode(x, 3), TypeError),
    "prefill: sequences must be a sequence of int": (lambda c, x: c.prefill(x, [[0]], [0, 1]), TypeError),
    "append: sequences must be a sequence of int": (lambda c, x: c.append(x, x, 0), TypeError),
    "append: counts must be a sequence of int": (lambda c, x: c.append(x, x, [0], 1), TypeError),
    r"append: tokens\[i\] must be a sequence of int": (lambda c, x: c.append(x, x, [0], tokens=[1]), TypeError),
    "step: sequences must be a sequence of int": (lambda c, x: c.step(0), TypeError),
    r"step: tokens must have \[1\] ids": (lambda c, x: c.step([0], tokens=[]), ValueError),
    "block_table: sequences must be a sequence": (lambda c, x: c.block_table(0), TypeError),
    "seq_lens: sequences must be a sequence": (lambda c, x: c.seq_lens(None), TypeError),
    "cu_seqlens_q must rise from 0 to at most 1": (lambda c, x: c.prefill(x, [0], [0, 2]), ValueError),
    "cascade must be False with any of window": (
        lambda c, x: c.decode(x, [0], cascade=True, window=[3, None]),
        ValueError,
    ),
    "cu_seqlens_q must be an integer": (lambda c, x: c.prefill(x, [0], [0, "1"]), TypeError),
    r"a sequence must be one that was added and not freed, got \[0\]": (lambda c, x: c.fork([0]), ValueError),
    "a sequence must be .*, got False": (lambda c, x: c.length(False), ValueError),
    "a sequence must be .*, got 0.0": (lambda c, x: c.append(x, x, [0.0]), ValueError),
    "restore: saved must be a SavedSequence, got 3": (lambda c, x: c.restore(3), TypeError),
    "restore: saved must have pages of shape": (lambda c, x: c.restore(_saved_elsewhere(8, HEADS)), ValueError),
    "restore: saved must have .*, got .*'HND'": (
        lambda c, x: c.restore(_saved_elsewhere(HEADS, 4, layout="HND")),
        ValueError,
    ),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes(device, rng, message):
    call, kind = MISTAKES[message]
    loop = Loop(device, rng)
    loop.add(3)
    with pytest.raises(kind, match=message):
        call(loop.cache, device.put(np.ones((1, HEADS, DIM), np.float16)))
    assert loop.cache.length(0) == 3
    loop.check()


def test_a_number_that_equals_a_name_is_none(device):
    cache = rawops.PagedKVCache(4, 16, 1, 64)
    name = cache.add_sequence()
    for _ in range(2):  # without buffers for the name, and with them
        with pytest.raises(ValueError, match=r"a sequence must be .*, got 0\.0"):
            cache.seq_lens([float(name)])
        assert device.get(cache.seq_lens([name])).tolist() == [0]


@pytest.mark.gpu
def test_generation_under_one_graph(rng):
    """A thousand tokens by replays of one graph, against eager calls on a second cache: the same bits."""
    import cupy

    caches = [rawops.PagedKVCache(400, 16, HEADS, DIM) for _ in range(2)]
    sequences = [[c.add_sequence() for _ in range(4)] for c in caches]
    k, v = (cupy.zeros((4, HEADS, DIM), np.float16) for _ in "kv")
    q, out = (cupy.zeros((4, 4 * HEADS, DIM), np.float16) for _ in range(2))
    stream = cupy.cuda.Stream(non_blocking=True)

    def launch(cache, table, lens, positions):
        rawops.append_paged_kv(k, v, cache.pages, table, positions)
        rawops.paged_attention(q, cache.pages, table, lens, out=out)

    with stream:
        graph = None
        for step in range(1000):
            for x in (k, v, q):
                x[...] = cupy.random.standard_normal(x.shape, dtype=np.float32)
            buffers = caches[0].step(sequences[0])
            if graph is None:
                launch(caches[0], *buffers)  # compiles
                stream.begin_capture()
                launch(caches[0], *buffers)
                graph = stream.end_capture()
            graph.launch()
            caches[1].append(k, v, sequences[1])
            if step % 50 == 0 or step > 990:
                eager = rawops.paged_attention(
                    q, caches[1].pages, caches[1].block_table(sequences[1]), caches[1].seq_lens(sequences[1])
                )
                assert (eager == out).all(), step


slow = rawops.Kernel("__global__ void slow(long long n) { for (auto t = clock64(); clock64() - t < n;) {} }", "slow")


@pytest.mark.gpu
def test_host_memory_is_kept_until_it_is_copied(rng):
    """What was saved is dropped while the copies back wait behind a slow launch, and other arrays are uploaded."""
    import cupy

    loop = Loop(Device(cupy), rng, num_pages=96)
    s = loop.add(64)
    for _ in range(3):
        saved = loop.cache.save(s)
        cupy.cuda.Device().synchronize()
        size = saved.data.nbytes
        slow(1, 32, (100_000_000,))
        t = loop.cache.restore(saved)
        del saved
        others = [cupy.asarray(np.full(size, 0x41, np.uint8)) for _ in range(3)]
        loop.kv[t] = loop.kv[s]
        loop.check([t])
        loop.free(t)
        del others


@pytest.mark.gpu
def test_host_memory_is_kept_until_it_is_copied_when_the_cache_is_gone(rng):
    """A copy to the host waits behind a slow launch, and would land in what is uploaded after it."""
    import cupy

    slow(1, 32, (1,))
    for _ in range(3):
        loop = Loop(Device(cupy), rng, num_pages=96)
        s = loop.add(64)
        size = loop.cache.save(s).data.nbytes
        cupy.cuda.Device().synchronize()
        slow(1, 32, (100_000_000,))
        loop.cache.save(s)
        del loop
        gc.collect()
        uploaded = [cupy.asarray(np.full(size, 0x41, np.uint8)) for _ in range(3)]
        assert all((x.get() == 0x41).all() for x in uploaded)


@pytest.mark.gpu
def test_soak_of_the_cache(rng):
    """A thousand steps of a serving loop, with what every sequence reads looked at again and again."""
    import cupy

    loop = Loop(Device(cupy), rng, num_pages=96)
    saved: dict[int, list] = {}
    for step in range(1000):
        names = list(loop.kv)
        chosen = [names[i] for i in rng.permutation(len(names))[: rng.integers(1, 5)]]
        what = rng.integers(0, 12)
        try:
            if not names or what == 0:
                loop.add(int(rng.integers(0, 12)))
            elif what == 1:
                loop.fork(chosen[0])
            elif what == 2 or len(names) > 12:
                loop.free(chosen[0])
            elif what == 3:
                saved[step] = [loop.cache.save(chosen[0]), loop.kv[chosen[0]]]
                loop.free(chosen[0])
            elif what == 4 and saved:
                state, kv = saved.pop(next(iter(saved)))
                loop.kv[loop.cache.restore(state)] = kv
            elif what == 5:
                loop.append(chosen, rng.integers(0, 9, len(chosen)).tolist())
            else:
                loop.append(chosen)
        except OutOfPagesError:
            for name in list(loop.kv)[:3]:
                loop.free(name)
        if step % 10 == 0 and loop.kv:
            loop.check()
    for name in list(loop.kv):
        loop.free(name)
    assert loop.cache.num_free_pages == 96
