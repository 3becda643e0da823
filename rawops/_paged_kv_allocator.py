"""Which pages belong to which sequence: reference counts, copy-on-write, and full pages kept for later prefixes.

Host code alone: nothing here knows of a device. An operation costs O(1) for each page it touches.
"""

from __future__ import annotations

import hashlib
import operator
import threading
from collections import OrderedDict
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


@dataclass(frozen=True)
class Growth:
    """What `PageAllocator.extend` did.

    Attributes
    ----------
    starts : list of int
        The length that each sequence had: the position of its first new token.
    copies : list of (int, int)
        Pages to copy, from and to, before anything is written.
    before : list of tuple
        What each sequence had, for `undo`: pages, digests, the page that was replaced or -1, and its tokens from
        `starts` on, None where they stay.
    """

    starts: list[int]
    copies: list[tuple[int, int]]
    before: list[tuple[int, int, int, list[int] | None]]


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
        try:
            found = None if isinstance(sequence, bool) else self.sequences.get(sequence)
        except TypeError:  # what cannot be hashed
            found = None
        if found is None:
            checks.fail(ValueError, "PagedKVCache", "a sequence", "be one that was added and not freed", repr(sequence))
        return found

    def add(self, tokens: Sized[int] = ()) -> int:
        """Start a sequence. With prefix sharing it begins with the longest kept or held prefix of `tokens`.

        At least one token is left to be computed, since its query is what the caller is after.
        """
        with self.lock:
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
        with self.lock:
            old = self[sequence]
            for page in old.pages:
                self.counts[page] += 1
            tokens = old.tokens[: old.length]  # of those to come it may have others
            return self._register(Sequence(old.pages[:], old.length, [], tokens, old.digests[:]))

    def free(self, sequence: int) -> None:
        """End a sequence; pages that no other has are free, or kept."""
        with self.lock:
            old = self[sequence]
            del self.sequences[sequence]
            for page in reversed(old.pages):  # the ends of prefixes are given out again before their beginnings
                self._release(page)

    def extend(self, sequences: Sized[int], counts: Sized[int], tokens: Sized[Sized[int]] | None = None) -> Growth:
        """Make room for new tokens at the end of several sequences: all of them, or none.

        A last page that others have too is replaced by a copy, if it is to be written.

        Parameters
        ----------
        sequences, counts : sequence of int
            Different sequences, and the number of new tokens of each.
        tokens : sequence of sequence of int, optional
            Their ids, for prefix sharing.

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
            starts, copies, before = [], [], []
            for i, (name, count, (pages, copied)) in enumerate(zip(sequences, counts, needs, strict=True)):
                sequence = self.sequences[name]
                starts.append(sequence.length)
                is_told = ids is not None and len(sequence.tokens) >= sequence.length  # else some before are not known
                tail = sequence.tokens[sequence.length :] if is_told else None
                replaced = sequence.pages[-1] if copied else -1
                before.append((len(sequence.pages), len(sequence.digests), replaced, tail))
                if copied:
                    copies.append(self._replace_last(sequence))
                sequence.pages += [self._take() for _ in range(pages)]
                sequence.length += count
                if is_told:
                    sequence.tokens[starts[-1] :] = ids[i]
                self._remember(sequence)
            return Growth(starts, copies, before)

    def undo(self, sequences: Sized[int], growth: Growth) -> None:
        """Take an `extend` back, whose tokens have not been written. What else was done since must not concern it."""
        with self.lock:
            for name, start, was in reversed(list(zip(sequences, growth.starts, growth.before, strict=True))):
                sequence, (pages, digests, replaced, tail) = self.sequences[name], was
                for index, digest in enumerate(sequence.digests[digests:], digests):
                    if self._page_of.get(digest) == sequence.pages[index]:
                        del self._page_of[digest], self._digest_of[sequence.pages[index]]
                del sequence.digests[digests:]
                while len(sequence.pages) > pages:
                    self._release(sequence.pages.pop())
                if replaced >= 0:
                    self._release(sequence.pages.pop())
                    sequence.pages.append(replaced)
                    sequence.replaced.pop()
                    self.counts[replaced] += 1
                if tail is not None:
                    sequence.tokens[start:] = tail
                sequence.length = start

    def import_sequence(self, old: Sequence) -> tuple[int, Growth]:
        """Start a sequence of the length of one that was saved, on pages of its own."""
        with self.lock:
            new = Sequence(tokens=old.tokens[:])
            name = self._register(new)
            try:
                return name, self.extend([name], [old.length])
            except (OutOfPagesError, ValueError):
                del self.sequences[name]
                raise

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
