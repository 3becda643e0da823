"""The allocator of pages: against a model, copy-on-write, threads, prefixes and which of them go."""

import functools
import itertools
import sys
import threading
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rawops._paged_kv_allocator import Growth, PageAllocator
from rawops.errors import OutOfPagesError


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
        saved, text, growth = self.allocator[name], self.texts[name], Growth()
        self.free(name)
        try:
            new = self.allocator.import_sequence(saved, growth)
        except OutOfPagesError:
            self.allocator.undo(growth)
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

    def undo(self, names, new_tokens) -> None:
        """Extend, and take it back: all is as it was, but for kept pages that were given out."""
        before, remembered = self.state(), dict(self.allocator._page_of)
        what = {n: (s.tokens[:], s.digests[:], s.replaced[:]) for n, s in self.allocator.sequences.items()}
        try:
            growth = self.allocator.extend(names, [len(t) for t in new_tokens], new_tokens)
        except OutOfPagesError:
            return
        self.allocator.undo(growth)
        assert self.state() == before
        assert what == {n: (s.tokens, s.digests, s.replaced) for n, s in self.allocator.sequences.items()}
        assert self.allocator._page_of.items() <= remembered.items()
        assert {page: digest for digest, page in self.allocator._page_of.items()} == self.allocator._digest_of

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
    elif what == 4:
        model.undo(chosen, [rng.integers(0, 2, rng.integers(0, max_tokens)).tolist() for _ in chosen])
    elif not model.extend(chosen, [rng.integers(0, 2, rng.integers(0, max_tokens)).tolist() for _ in chosen]):
        model.free(chosen[0])


def interrupted(call, line: int) -> bool:
    """Make a call with a Ctrl-C at one of the lines that it runs in the allocator; False if it has no so many."""
    lines = itertools.count()

    def trace(frame, event, _):
        if not frame.f_code.co_filename.endswith("_paged_kv_allocator.py"):
            return None
        if event == "line" and next(lines) == line:
            sys.settrace(before)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


CHANGES = {  # of a model with sequences 0 and 2, which share pages, and what was saved of one that is gone
    "add": lambda allocator, saved, growth: allocator.add([1, 2, 3, 4, 5]),
    "fork": lambda allocator, saved, growth: allocator.fork(0),
    "free": lambda allocator, saved, growth: allocator.free(0),
    "extend": lambda allocator, saved, growth: allocator.extend([2, 0], [5, 2], [[7] * 5, [8] * 2], growth),
    "import": lambda allocator, saved, growth: allocator.import_sequence(saved, growth),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_ctrl_c_at_any_line_loses_no_page(what):
    for line in itertools.count():
        model, growth = Model(8, 2, prefix_sharing=True), Growth()
        first, gone = model.add([1, 2, 3, 4, 5]), model.add()
        model.extend([first, gone], [[1, 2, 3, 4, 5], [9] * 6])
        model.fork(first)
        saved = model.allocator[gone]
        model.free(gone)  # its pages are kept
        before = model.state()
        call = functools.partial(CHANGES[what], model.allocator, saved, growth)
        is_stopped = interrupted(call, line)
        model.allocator.undo(growth)  # whoever was to have the growth has not
        model.check(texts=what in ("extend", "import"))
        if what in ("extend", "import"):
            assert model.state() == before
        assert {page: digest for digest, page in model.allocator._page_of.items()} == model.allocator._digest_of
        if not is_stopped:
            break
    assert line > 8


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


def test_a_fork_may_go_on_with_other_tokens():
    """What the parent is still to have is not the child's, unless it is told."""
    allocator = PageAllocator(20, 2, 10, prefix_sharing=True)
    text = [1, 2, 3, 4, 5, 6, 7]
    parent = allocator.add(text)
    allocator.extend([parent], [3])
    child = allocator.fork(parent)
    allocator.extend([child], [3])  # of tokens that nobody named
    assert allocator[allocator.add(text)].length == 2
    allocator.extend([parent], [3])
    assert allocator[allocator.add(text)].pages == allocator[parent].pages


def test_tokens_that_were_never_told_share_nothing():
    allocator = PageAllocator(10, 2, 10, prefix_sharing=True)
    s = allocator.add()
    allocator.extend([s], [2])
    allocator.extend([s], [2], [[1, 2]])
    assert allocator[allocator.add([1, 2, 3])].length == 0
