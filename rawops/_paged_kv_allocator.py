"""Which pages belong to which sequence: reference counts, copy-on-write, and full pages kept for later prefixes.

Host code alone: nothing here knows of a device. An operation costs O(1) for each page it touches.
"""

from __future__ import annotations

import contextlib
import hashlib
import numbers
import operator
import threading
from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as Sized
from dataclasses import dataclass, field

import numpy as np

from rawops._runtime import checks
from rawops.errors import OutOfPagesError


@dataclass
class Sequence:
    """What the allocator knows of one sequence.

    Attributes
    ----------
    pages : list of int
        In the order of the tokens.
    replaced : list of int
        Indices in `pages` that copy-on-write has changed, as they came.
    tokens : list of int
        Token ids from the first on, as far as they were given.
    digests : list of bytes
        Of the full pages whose tokens are known: each stands for all tokens up to its end.
    """

    pages: list[int] = field(default_factory=list)
    length: int = 0
    replaced: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)


@dataclass
class Growth:
    """What `PageAllocator.extend` does, recorded ahead of each change, so that any moment of it can be undone.

    Attributes
    ----------
    starts : list of int
        The length that each sequence had: the position of its first new token.
    copies : list of (int, int)
        Pages to copy, from and to, before anything is written.
    before : list of tuple
        Each sequence and what it had: its length, the numbers of its pages, digests and replacements, its last page,
        and its tokens from its length on, None where they stay.
    new : int or None
        The sequence that was started for it.
    """

    starts: list[int] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    before: list[tuple] = field(default_factory=list)
    new: int | None = None


class PageAllocator:
    """Pages of a pool, and the sequences that hold them.

    Parameters
    ----------
    num_pages, page_size : int
    max_pages : int
        The most pages that one sequence may have.
    prefix_sharing : bool
        Remember full pages by their tokens; see `add`.

    Notes
    -----
    A page is free, held (its count is the number of sequences that have it), or, with prefix sharing, kept: held by
    none, but full of known tokens. Kept pages are given out again, the longest unused first, once no page is free.
    """

    def __init__(self, num_pages: int, page_size: int, max_pages: int, prefix_sharing: bool = False) -> None:
        self.num_pages, self.page_size, self.max_pages = num_pages, page_size, max_pages
        self.prefix_sharing = prefix_sharing
        self.lock = threading.RLock()
        self.sequences: dict[int, Sequence] = {}
        self.counts = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()  # the longest unused first
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._next = 0

    @property
    def num_free_pages(self) -> int:
        """Pages that can be given out, kept ones included."""
        return len(self._free) + len(self._kept)

    def __getitem__(self, sequence: int) -> Sequence:
        # 1.0 and True are equal to 1, but no names.
        is_name = type(sequence) is int or (isinstance(sequence, numbers.Integral) and not isinstance(sequence, bool))
        found = self.sequences.get(sequence) if is_name else None
        if found is None:
            checks.fail(ValueError, "PagedKVCache", "a sequence", "be one that was added and not freed", repr(sequence))
        return found

    def add(self, tokens: Sized[int] = ()) -> int:
        """Start a sequence. With prefix sharing it begins with the longest kept or held prefix of `tokens`.

        At least one token is left to be computed, since its query is what the caller is after.
        """
        with self._consistent():
            new = Sequence(tokens=_ids(tokens))
            if self.prefix_sharing:
                for digest in self._digests_of(new.tokens[:-1], b""):
                    page = self._page_of.get(digest)
                    if page is None or len(new.pages) == self.max_pages:
                        break
                    self._hold(page)
                    new.pages.append(page)
                    new.digests.append(digest)
                new.length = len(new.pages) * self.page_size
            return self._register(new)

    def fork(self, sequence: int) -> int:
        """Start a sequence with the pages of another, shared until one of the two is extended."""
        with self._consistent():
            old = self[sequence]
            for page in old.pages:
                self.counts[page] += 1
            tokens = old.tokens[: old.length]  # of those to come it may have others
            return self._register(Sequence(old.pages[:], old.length, [], tokens, old.digests[:]))

    def free(self, sequence: int) -> None:
        """End a sequence; pages that no other has are free, or kept."""
        with self._consistent():
            old = self[sequence]
            del self.sequences[sequence]
            for page in reversed(old.pages):  # the ends of prefixes are given out again before their beginnings
                self._release(page)

    def extend(
        self,
        sequences: Sized[int],
        counts: Sized[int],
        tokens: Sized[Sized[int]] | None = None,
        growth: Growth | None = None,
    ) -> Growth:
        """Make room for new tokens at the end of several sequences: all of them, or none.

        A last page that others have too is replaced by a copy, if it is to be written.

        Parameters
        ----------
        sequences, counts : sequence of int
            Different sequences, and the number of new tokens of each.
        tokens : sequence of sequence of int, optional
            Their ids, for prefix sharing.
        growth : Growth, optional
            A new one, for a caller that undoes it if this or what it does then fails half way (a Ctrl-C, no memory).

        Raises
        ------
        OutOfPagesError
            And nothing has changed.
        """
        with self.lock:
            ids = None if tokens is None else [_ids(t) for t in tokens]
            needs = self._needs(sequences, counts)
            wanted = sum(pages + copies for pages, copies in needs)
            if wanted > self.num_free_pages:
                raise OutOfPagesError(
                    f"PagedKVCache: {wanted} more pages are needed and {self.num_free_pages} of {self.num_pages} are "
                    "free. Free or save sequences."
                )
            self._check_lengths(sequences, counts)
            growth = growth or Growth()
            for i, (name, count, (pages, copied)) in enumerate(zip(sequences, counts, needs, strict=True)):
                sequence = self.sequences[name]
                start = sequence.length
                is_told = ids is not None and len(sequence.tokens) >= start  # else some before are not known
                sizes = start, len(sequence.pages), len(sequence.digests), len(sequence.replaced)
                tail = sequence.tokens[start:] if is_told else None
                growth.before.append((sequence, sizes, sequence.pages[-1:], tail))
                growth.starts.append(start)
                if copied:
                    growth.copies.append(self._replace_last(sequence))
                sequence.pages += [self._take() for _ in range(pages)]
                sequence.length += count
                if is_told:
                    sequence.tokens[start:] = ids[i]
                self._remember(sequence)
            return growth

    def undo(self, growth: Growth) -> None:
        """Take an `extend` back, whose tokens have not been written. What else was done since must not concern it."""
        with self.lock:
            for sequence, (start, pages, digests, replaced), last, tail in growth.before:
                for index, digest in enumerate(sequence.digests[digests:], digests):
                    if self._page_of.get(digest) == sequence.pages[index]:
                        del self._page_of[digest]
                del sequence.digests[digests:], sequence.replaced[replaced:], sequence.pages[pages:]
                sequence.pages[-1:] = last
                sequence.length = start
                if tail is not None:
                    sequence.tokens[start:] = tail
            if growth.new is not None:
                self.sequences.pop(growth.new, None)
            if growth.before:
                self._recount()

    def import_sequence(self, old: Sequence, growth: Growth) -> int:
        """Start a sequence of the length of one that was saved, on pages of its own; if it fails, undo `growth`."""
        with self.lock:
            growth.new = self._next
            name = self._register(Sequence(tokens=old.tokens[:]))
            self.extend([name], [old.length], growth=growth)
            return name

    # --- pages ---

    def _needs(self, sequences: Sized[int], counts: Sized[int]) -> list[tuple[int, int]]:
        """Return how many new pages and how many copies (0 or 1) each sequence needs."""
        if len(set(sequences)) != len(sequences):
            checks.fail(ValueError, "PagedKVCache", "sequences", "all be different", list(sequences))
        needs, left = [], {}  # of shared pages: how many sequences have them once the earlier ones have copied
        for name, count in zip(sequences, counts, strict=True):
            sequence = self[name]
            total = -(-(sequence.length + count) // self.page_size)
            copies = 0
            if count and sequence.length % self.page_size:
                page = sequence.pages[-1]
                holders = left.get(page, self.counts[page])
                copies = int(holders > 1)
                left[page] = holders - copies
            needs.append((total - len(sequence.pages), copies))
        return needs

    def _check_lengths(self, sequences: Sized[int], counts: Sized[int]) -> None:
        limit = self.max_pages * self.page_size
        for name, count in zip(sequences, counts, strict=True):
            length = self.sequences[name].length + count
            if length > limit:
                rule = f"have at most {limit} tokens (max_length)"
                checks.fail(ValueError, "PagedKVCache", "a sequence", rule, length)

    def _replace_last(self, sequence: Sequence) -> tuple[int, int]:
        old, new = sequence.pages[-1], self._take()
        sequence.pages[-1] = new
        sequence.replaced.append(len(sequence.pages) - 1)
        self._release(old)
        return old, new

    def _register(self, sequence: Sequence) -> int:
        name, self._next = self._next, self._next + 1
        self.sequences[name] = sequence
        return name

    def _take(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._kept.popitem(last=False)
            del self._page_of[self._digest_of.pop(page)]
        self.counts[page] = 1
        return page

    def _hold(self, page: int) -> None:
        self._kept.pop(page, None)
        self.counts[page] += 1

    def _release(self, page: int) -> None:
        self.counts[page] -= 1
        if self.counts[page] == 0:
            if page in self._digest_of:
                self._kept[page] = None
            else:
                self._free.append(page)

    @contextlib.contextmanager
    def _consistent(self) -> Iterator[None]:
        """Hold the lock; what is interrupted (by a Ctrl-C) loses no page."""
        with self.lock:
            try:
                yield
            except BaseException:
                self._recount()
                raise

    def _recount(self) -> None:
        """Make of pages what the sequences and the known prefixes say, whatever was under way."""
        known = {page: digest for digest, page in self._page_of.items() if self._digest_of.get(page) == digest}
        self._digest_of, self._page_of = known, {digest: page for page, digest in known.items()}
        self.counts = [0] * self.num_pages
        for sequence in self.sequences.values():
            for page in sequence.pages:
                self.counts[page] += 1
        order = dict.fromkeys([*self._free, *self._kept, *range(self.num_pages)])  # the one that they have, if they do
        idle = [page for page in order if self.counts[page] == 0]
        self._free = [page for page in idle if page not in known]
        self._kept = OrderedDict.fromkeys(page for page in idle if page in known)

    # --- prefixes ---

    def _digests_of(self, tokens: Sized[int], before: bytes):
        """Digests of the full pages of tokens, each of all that lies before its end."""
        for start in range(0, len(tokens) - self.page_size + 1, self.page_size):
            page = np.asarray(tokens[start : start + self.page_size], np.int64).tobytes()
            before = hashlib.blake2b(before + page, digest_size=16).digest()
            yield before

    def _remember(self, sequence: Sequence) -> None:
        """Record pages that have become full of known tokens, unless a page with those tokens is known already."""
        if not self.prefix_sharing:
            return
        full = min(sequence.length, len(sequence.tokens)) // self.page_size
        known = len(sequence.digests)
        if full <= known:
            return
        tokens = sequence.tokens[known * self.page_size : full * self.page_size]
        before = sequence.digests[-1] if sequence.digests else b""
        for index, digest in enumerate(self._digests_of(tokens, before), known):
            sequence.digests.append(digest)
            page = sequence.pages[index]
            if digest not in self._page_of and page not in self._digest_of:
                self._page_of[digest], self._digest_of[page] = page, digest


def _ids(tokens: Sized[int]) -> list[int]:
    """Return token ids as ints of 64 bits, or raise."""
    rule = "be integers of 64 bits"
    try:
        ids = [operator.index(t) for t in tokens]
    except TypeError:
        checks.fail(TypeError, "PagedKVCache", "tokens", rule, repr(tokens)[:80])
    if ids and not -(2**63) <= min(ids) <= max(ids) < 2**63:
        checks.fail(ValueError, "PagedKVCache", "tokens", rule, f"{min(ids)} to {max(ids)}")
    return ids
