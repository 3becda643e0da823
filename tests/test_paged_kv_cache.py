"""The cache: the allocator against a model, copy-on-write, out of pages, prefixes, steps, saving, and what is read."""

import threading
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_pool import attend

import rawops
from rawops._paged_kv_allocator import PageAllocator
from rawops.errors import OutOfPagesError
from rawops.testing.tolerances import assert_close


class Model:
    """An allocator beside the plainest account of it: what each sequence should read, and what each slot holds."""

    def __init__(self, num_pages: int, page_size: int, prefix_sharing: bool = False) -> None:
        self.allocator = PageAllocator(num_pages, page_size, num_pages, prefix_sharing)
        self.slots: dict[tuple[int, int], int] = {}
        self.texts: dict[int, list[int]] = {}

    def add(self, tokens=()) -> int:
        name = self.allocator.add(tokens)
        self.texts[name] = list(tokens[: self.allocator[name].length])
        return name

    def fork(self, name: int) -> None:
        self.texts[self.allocator.fork(name)] = self.texts[name][:]

    def free(self, name: int) -> None:
        self.allocator.free(name)
        del self.texts[name]

    def swap(self, name: int) -> bool:
        """Save, free, restore."""
        saved, text = self.allocator[name], self.texts[name]
        self.free(name)
        try:
            new = self.allocator.import_sequence(saved)
        except OutOfPagesError:
            return False
        self.texts[new] = text
        self.write(new, 0)
        return True

    def extend(self, names, new_tokens) -> bool:
        before = self.state()
        try:
            growth = self.allocator.extend(names, [len(t) for t in new_tokens], new_tokens)
        except OutOfPagesError:
            assert self.state() == before
            return False
        for old, new in growth.copies:
            for slot in range(self.allocator.page_size):
                self.slots[new, slot] = self.slots.get((old, slot), -1)
        for name, start, new in zip(names, growth.starts, new_tokens, strict=True):
            assert start == len(self.texts[name])
            self.texts[name] += new
            self.write(name, start)
        return True

    def write(self, name: int, start: int) -> None:
        size = self.allocator.page_size
        for t in range(start, len(self.texts[name])):
            self.slots[self.allocator[name].pages[t // size], t % size] = self.texts[name][t]

    def state(self):
        names = {n: (s.length, s.pages[:]) for n, s in self.allocator.sequences.items()}
        return names, self.allocator.counts[:], self.allocator.num_free_pages

    def check(self, texts: bool = True) -> None:
        """No page lost, none given out twice, and every sequence reads what was written to it."""
        allocator, size = self.allocator, self.allocator.page_size
        held = Counter(page for s in allocator.sequences.values() for page in s.pages)
        assert allocator.counts == [held[page] for page in range(allocator.num_pages)]
        spare = [*allocator._free, *allocator._kept]
        assert sorted([*spare, *held]) == list(range(allocator.num_pages))
        assert allocator.num_free_pages == allocator.num_pages - len(held)
        if not texts:
            return
        for name, text in self.texts.items():
            sequence = allocator[name]
            assert sequence.length == len(text) and len(sequence.pages) == -(-len(text) // size)
            assert [self.slots[sequence.pages[t // size], t % size] for t in range(len(text))] == text


def random_step(model: Model, rng, max_tokens: int) -> None:
    """One of the things a serving loop does."""
    names = list(model.texts)
    what = rng.integers(0, 10)
    if not names or what == 0:
        model.add(rng.integers(0, 2, rng.integers(0, 4 * max_tokens)).tolist() if rng.integers(0, 2) else ())
        return
    chosen = [names[i] for i in rng.permutation(len(names))[: rng.integers(1, 5)]]
    if what == 1:
        model.fork(chosen[0])
    elif what == 2:
        model.free(chosen[0])
    elif what == 3:
        model.swap(chosen[0])
    elif not model.extend(chosen, [rng.integers(0, 2, rng.integers(0, max_tokens)).tolist() for _ in chosen]):
        model.free(chosen[0])


# --- the allocator --------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_pages=st.integers(0, 40),
    page_size=st.sampled_from([1, 2, 4, 16]),
    prefix_sharing=st.booleans(),
)
def test_against_the_model(seed, num_pages, page_size, prefix_sharing):
    rng = np.random.default_rng(seed)
    model = Model(num_pages, page_size, prefix_sharing)
    for _ in range(60):
        random_step(model, rng, 2 * page_size + 2)
        model.check()
    for name in list(model.texts):
        model.free(name)
    model.check()
    assert model.allocator.num_free_pages == num_pages


@pytest.mark.parametrize("prefix_sharing", [False, True])
def test_soak(prefix_sharing):
    """A hundred thousand steps; what the sequences read is looked at every thousand."""
    rng = np.random.default_rng(7)
    model = Model(64, 4, prefix_sharing)
    for step in range(50_000):
        random_step(model, rng, 9)
        if len(model.texts) > 12:
            model.free(next(iter(model.texts)))
        if step % 500 == 0:
            model.check(texts=step % 1000 == 0)
    model.check()


def test_forks_that_are_extended_together():
    """Of three owners of a half full page two copy it, the last writes in place, and all is returned once."""
    model = Model(8, 4)
    a = model.add()
    model.extend([a], [[1, 2, 3, 4, 5, 6]])
    model.fork(a), model.fork(a)
    assert model.allocator.num_free_pages == 6
    growth = model.allocator.extend([0, 1, 2], [1, 1, 1])
    assert [old for old, _ in growth.copies] == [model.allocator[2].pages[1]] * 2
    assert model.allocator.num_free_pages == 4
    assert len({s.pages[1] for s in model.allocator.sequences.values()}) == 3
    for name in (1, 0, 2):
        model.allocator.free(name)
    assert model.allocator.num_free_pages == 8 and model.allocator.counts == [0] * 8


def test_threads():
    """Several threads on one allocator: nothing lost."""
    allocator = PageAllocator(200, 4, 200)

    def work():
        for _ in range(200):
            s = allocator.add()
            allocator.extend([s], [9])
            t = allocator.fork(s)
            allocator.extend([t], [3])
            allocator.free(s)
            allocator.free(t)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert allocator.num_free_pages == 200 and sorted(allocator._free) == list(range(200))


# --- prefixes -------------------------------------------------------------------------------------------------------


def test_prefixes_are_shared():
    """Whole pages of the same tokens, never all of a prompt; other tokens or another beginning share nothing."""
    model = Model(20, 4, prefix_sharing=True)
    text = list(range(100, 113))
    first = model.add(text)
    assert model.allocator[first].length == 0
    model.extend([first], [text])
    for tokens, shared in (
        (text, 12),
        (text[:12], 8),
        ([*text[:12], 7], 12),
        (text[:9], 8),
        ([*text[:7], 0, *text[8:]], 4),
        (text[4:], 0),
        (text[:4], 0),
    ):
        assert model.allocator[model.add(tokens)].length == shared, tokens
    model.check()


def test_kept_prefixes_go_out_by_last_use():
    model = Model(6, 2, prefix_sharing=True)
    for text in ([1, 2, 3, 4], [5, 6, 7, 8]):
        s = model.add(text)
        model.extend([s], [text])
        model.free(s)
    assert model.allocator.num_free_pages == 6
    assert model.allocator[model.add([1, 2, 3, 4, 0])].length == 4  # used last now
    model.free(max(model.texts))
    s = model.add()
    model.extend([s], [[9] * 8])  # two free pages, then the end and the beginning of 5, 6, 7, 8
    assert model.allocator[model.add([5, 6, 7, 8, 0])].length == 0
    assert model.allocator[model.add([1, 2, 3, 4, 0])].length == 4
    model.check()


def test_tokens_that_were_never_told_share_nothing():
    allocator = PageAllocator(10, 2, 10, prefix_sharing=True)
    s = allocator.add()
    allocator.extend([s], [2])
    allocator.extend([s], [2], [[1, 2]])
    assert allocator[allocator.add([1, 2, 3])].length == 0


# --- the cache ------------------------------------------------------------------------------------------------------

HEADS, DIM = 2, 64


class Loop:
    """A cache beside plain arrays of what each sequence should hold."""

    def __init__(self, device, rng, num_pages=12, page_size=4, **options) -> None:
        self.device, self.rng = device, rng
        self.cache = rawops.PagedKVCache(num_pages, page_size, HEADS, DIM, **options)
        self.cache.pages[...] = np.nan
        self.kv: dict[int, list[np.ndarray]] = {}

    def new(self, count: int) -> list[np.ndarray]:
        return [self.rng.standard_normal((count, HEADS, DIM)).astype(np.float16) for _ in "kv"]

    def add(self, count: int = 0) -> int:
        s = self.cache.add_sequence()
        self.kv[s] = self.new(0)
        if count:
            self.append([s], [count])
        return s

    def fork(self, s: int) -> int:
        t = self.cache.fork(s)
        self.kv[t] = [x.copy() for x in self.kv[s]]
        return t

    def append(self, sequences, counts=None) -> None:
        given = counts or [1] * len(sequences)
        parts = [self.new(n) for n in given]
        k, v = (self.device.put(np.concatenate(x)) for x in zip(*parts, strict=True))
        self.cache.append(k, v, sequences, counts)
        self.note(sequences, parts)

    def note(self, sequences, parts) -> None:
        for s, new in zip(sequences, parts, strict=True):
            self.kv[s] = [np.concatenate(pair) for pair in zip(self.kv[s], new, strict=True)]

    def check(self, sequences=None) -> None:
        """Decode, and compare with float64 attention on the plain arrays."""
        sequences = list(self.kv) if sequences is None else sequences
        q = self.rng.standard_normal((len(sequences), 2 * HEADS, DIM)).astype(np.float16)
        out = self.device.get(self.cache.decode(self.device.put(q), sequences))
        for i, s in enumerate(sequences):
            assert self.cache.length(s) == len(self.kv[s][0])
            assert_close(out[i : i + 1], attend(q[i : i + 1], *self.kv[s])[0], np.float16, k=2**17, magnitude=1.0)


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


def test_prefill_in_chunks_equals_all_at_once(device, rng):
    loop = Loop(device, rng, num_pages=20, page_size=8)
    a, b = loop.add(), loop.add(3)
    q = rng.standard_normal((20, 4, DIM)).astype(np.float16)
    got = []
    for n, others in ((9, 1), (6, 2), (5, 0)):
        loop.append([a, b], [n, others])
        start = len(loop.kv[a][0]) - n
        mixed = np.concatenate([q[start : start + n], q[:others]])
        cu = [0, n, n + others]
        cu = cu if others else device.put(np.array(cu, np.int32))
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
    loop.append(list(loop.kv))
    loop.check()


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
    loop.cache.append(k, v, [b], [4], tokens=[[1, 2, 3, 4]])
    assert loop.cache.length(loop.cache.add_sequence([*text[:8], 99, 1, 2, 3, 4])) == 12


def test_cascade_equals_plain(device, rng, monkeypatch):
    """A common prefix read once, by choice and by arithmetic; what follows differs, is shared in part, or is empty."""
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
    monkeypatch.setattr("rawops._paged_kv_cache._CASCADE_BYTES", 0)
    monkeypatch.setattr("rawops._paged_kv_cache.merge_states", lambda *_: pytest.fail("a cascade"))
    loop.cache.decode(q, [a, a_too, b, d], window=(5, None))
    with pytest.raises(pytest.fail.Exception):
        loop.cache.decode(q, [a, a_too, b, d])
    with pytest.raises(ValueError, match="cascade must be False with any of window"):
        loop.cache.decode(q, [a, a_too, b, d], window=(5, None), cascade=True)


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
    ]:
        with pytest.raises(kind, match=f"decode: {message}"):
            loop.cache.decode(queries, both, cascade=cascade, out=out)


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


MISTAKES = {
    "page_size must be": (lambda c, x: rawops.PagedKVCache(4, 12, 1, 64), ValueError),
    "dtype must be": (lambda c, x: rawops.PagedKVCache(4, 16, 1, 64, "float32"), ValueError),
    "head_dim must be between 1 and 256": (lambda c, x: rawops.PagedKVCache(4, 16, 1, 300), ValueError),
    "a sequence must be one that was added": (lambda c, x: c.append(x, x, [5]), ValueError),
    "sequences must all be different": (lambda c, x: c.append(x, x, [0, 0], [1, 0]), ValueError),
    "counts must be 1 numbers": (lambda c, x: c.append(x, x, [0], [1, 1]), ValueError),
    r"k must have shape \(2, 2, 64\)": (lambda c, x: c.append(x, x, [0], [2]), ValueError),
    "k must have dtype float16": (lambda c, x: c.append(x.astype(np.float32), x, [0]), TypeError),
    "tokens must have": (lambda c, x: c.append(x, x, [0], tokens=[[1, 2]]), ValueError),
    "counts must be an integer": (lambda c, x: c.append(x, x, [0], [1.5]), TypeError),
    "softcap must be finite": (lambda c, x: c.decode(x, [0], softcap=-1), ValueError),
    "options must be among alibi_slopes, causal": (lambda c, x: c.decode(x, [0], slope=1), TypeError),
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
