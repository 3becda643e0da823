"""Groups of lanes that stand at one instruction, and what an instruction returns to make them wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .context import Context

_LANE_BIT = np.left_shift(np.uint32(1), np.arange(32, dtype=np.uint32))


class Lanes:
    """The lanes that execute an instruction together, in ascending order.

    A lane is one thread of one resident block: lane ``block * T + thread``, T padded to whole warps.

    Attributes
    ----------
    ids : ndarray of intp, shape (n,)
        The lanes.
    index : slice or ndarray
        The same as an index into per-lane arrays: a slice where the lanes are contiguous.
    full : bool
        True if these are all the live lanes. Register arithmetic may then run on whole arrays (what it
        leaves in dead lanes is never looked at); memory accesses must still use `ids`.
    """

    def __init__(self, ctx: Context, ids: np.ndarray) -> None:
        self._ctx = ctx
        self.ids = ids
        self.n = n = len(ids)
        self.full = n == ctx.alive_count
        first, last = (int(ids[0]), int(ids[-1]) + 1) if n else (0, 0)
        self.index: slice | np.ndarray = slice(first, last) if last - first == n else ids

    @cached_property
    def mask(self) -> np.ndarray:
        """Shape (L,) bool: which lanes are in the group."""
        mask = np.zeros(self._ctx.L, bool)
        mask[self.index] = True
        return mask

    @cached_property
    def warp_bits(self) -> np.ndarray:
        """Shape (R * W,) uint32: for each resident warp, the bit mask of its lanes in the group."""
        return pack_warps(self.mask)

    @cached_property
    def warps(self) -> np.ndarray:
        """The resident warps (block * W + warp) with at least one lane here, ascending."""
        if self.full and self.n == self._ctx.L:
            return np.arange(self._ctx.L // 32)
        return np.flatnonzero(self.warp_bits)

    @cached_property
    def warp_count(self) -> int:
        """How many warps have a lane here."""
        return len(self.warps)

    @cached_property
    def blocks(self) -> np.ndarray:
        """The resident blocks with at least one lane here, ascending."""
        return np.unique(self.warps // self._ctx.W)

    @cached_property
    def whole_warps(self) -> bool:
        """Whether every live lane of every warp touched is here."""
        if self.full:
            return True
        bits = self.warp_bits
        return bool(((bits == 0) | (bits == self._ctx.alive_bits)).all())

    @cached_property
    def in_whole_groups(self) -> np.ndarray:
        """Shape (n,) bool: whether every live lane of the lane's warpgroup (4 warps) is here."""
        ctx = self._ctx
        groups = -(-ctx.W // 4)
        missing = np.zeros((ctx.R, groups * 4), bool)
        missing[:, : ctx.W] = ((ctx.alive_bits & ~self.warp_bits) != 0).reshape(ctx.R, ctx.W)
        missing = missing.reshape(-1, 4).any(axis=1)
        return ~missing[ctx.block_of[self.ids] * groups + ctx.thread_of[self.ids] // 128]

    def select(self, keep: np.ndarray) -> Lanes:
        """The lanes where `keep` (shape (n,), bool) is true; the group itself if that is all of them."""
        return self if keep.all() else Lanes(self._ctx, self.ids[keep])

    def merge(self, other: Lanes) -> Lanes:
        """The union of two disjoint groups."""
        if self.n + other.n == self._ctx.alive_count:
            return self._ctx.everyone
        ids = np.concatenate((self.ids, other.ids))
        ids.sort()
        return Lanes(self._ctx, ids)

    def without(self, other: Lanes) -> Lanes:
        """The lanes of this group that are not in `other`."""
        return self.select(~other.mask[self.index])


@dataclass(slots=True)
class Wait:
    """Returned by an instruction's `run`, in a list: these lanes may not go on yet.

    Lanes of the call that wait for nothing go on at once. The waiting ones are looked at again when
    nothing else in the batch can run, and continue at the *next* instruction when `ready` says so.

    Attributes
    ----------
    lanes : Lanes
        Who waits.
    ready : callable
        ``ready(lanes) -> bool array (n,)``: which of them may go on now. It may also act (land data).
    why : callable
        ``why(lanes) -> str`` for the deadlock report, as in "bar.sync 1 (64 of 128 threads arrived)".
    resume : callable, optional
        ``resume(lanes)``, run once for the lanes that go on: write results, acquire clocks.
    give_up : callable, optional
        ``give_up(lanes)``, for waits that may end for want of time: run for lanes that go on although they
        are not ready, when nothing else can run.
    """

    lanes: Lanes
    ready: Callable[[Lanes], np.ndarray]
    why: Callable[[Lanes], str]
    resume: Callable[[Lanes], None] | None = None
    give_up: Callable[[Lanes], None] | None = None


def runs_text(numbers: np.ndarray) -> str:
    """Ascending numbers as "0-15, 20", cut short after four runs."""
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    parts = [f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs]
    return ", ".join(parts[:4]) + (", ..." if len(parts) > 4 else "")


def lanes_text(bits: int) -> str:
    """A mask of a warp's lanes as "lanes 16-31"."""
    numbers = np.flatnonzero(_LANE_BIT & np.uint32(bits))
    return f"lane{'s' * (len(numbers) > 1)} {runs_text(numbers)}"


def pack_warps(mask: np.ndarray) -> np.ndarray:
    """A bool per lane as one uint32 per warp, lane 0 in bit 0."""
    return np.packbits(mask.reshape(-1, 32), axis=1, bitorder="little").view(np.uint32).ravel()


def unpack_warps(bits: np.ndarray) -> np.ndarray:
    """The inverse of `pack_warps`: shape (n_warps, 32), bool."""
    return (bits[:, None] & _LANE_BIT) != 0
