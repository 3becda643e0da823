"""Sequences in host memory: what `PagedKVCache.save` makes, and the copies there and back."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rawops._paged_kv_allocator import Sequence
from rawops._paged_kv_batch import copy_to_device
from rawops._runtime.held import hold


@dataclass(frozen=True, eq=False)
class SavedSequence:
    """A sequence in host memory, made by `PagedKVCache.save`.

    Attributes
    ----------
    length : int
    data : array (pages, 2, page_size, num_kv_heads, head_dim)
        Page-locked with a GPU. It is complete once the stream of the save has come this far.
    layout : {"NHD", "HND"}
        That of the cache: with HND the axes of slots and heads are the other way round.
    """

    length: int
    data: np.ndarray
    state: Sequence
    layout: str


class HostCopies:
    """Asynchronous copies between pages of a pool and page-locked memory, which is held until they are done."""

    def __init__(self, device) -> None:
        self._device = device

    def to_host(self, stored, pages: list[int]) -> np.ndarray:
        """Return these pages of a pool, in a new array."""
        data = self._array((len(pages), *stored.shape[1:]), stored.dtype)
        for host, page in zip(data, pages, strict=True):
            if self._device.is_emulated:
                host[...] = stored[page]
            else:
                stored[page].get(out=host, blocking=False)
        self._hold(data)
        return data

    def to_device(self, stored, pages: list[int], data: np.ndarray) -> None:
        """Copy an array that `to_host` made into these pages."""
        for host, page in zip(data, pages, strict=True):
            copy_to_device(stored[page], host)
        self._hold(data)

    def _hold(self, data: np.ndarray) -> None:
        if self._device.is_emulated or data.size == 0:
            return
        import cupy

        event = cupy.cuda.Event(disable_timing=True)
        event.record()
        hold(event, data)

    def _array(self, shape: tuple[int, ...], dtype) -> np.ndarray:
        size = math.prod(shape)
        if self._device.is_emulated or size == 0:
            return np.empty(shape, dtype)
        import cupy

        memory = cupy.cuda.alloc_pinned_memory(size * dtype.itemsize)
        return np.frombuffer(memory, dtype, size).reshape(shape)
