"""A cache beside plain arrays of what its sequences hold, for tests."""

from __future__ import annotations

import numpy as np
from paged_pool import attend

import rawops
from rawops.testing.tolerances import assert_close

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

    def free(self, s: int) -> None:
        self.cache.free(s)
        del self.kv[s]

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
