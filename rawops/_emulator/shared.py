"""Shared memory of the resident blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..errors import MemoryFault, RaceError
from .races import Shadow
from .spaces import Piece, Space, refuse_misaligned
from .types import UINT

if TYPE_CHECKING:
    from .context import Context

# Offsets start here, as on hardware, so that 1024-byte alignment (swizzles) is honest and a null pointer
# faults. In a cluster the rank of the block, plus one, stands in the bits from RANK_SHIFT up.
SHARED_BASE = 1024
RANK_SHIFT = 24

_OFFSET_MASK = np.uint64((1 << RANK_SHIFT) - 1)
_RANK_SHIFT = np.uint64(RANK_SHIFT)


def block_bits(rank: np.ndarray) -> np.ndarray:
    """What the address of shared memory in the block of a rank has above the offset."""
    return (rank.astype(np.uint64) + np.uint64(1)) << _RANK_SHIFT


class SharedSpace(Space):
    """One flat array for all resident blocks, `stride` bytes a block.

    An address (32-bit, uint64 here) is an offset in the executing lane's own block, or ``(rank + 1) <<
    RANK_SHIFT | offset`` for the block of that rank in its cluster.

    Attributes
    ----------
    data : ndarray of uint8, shape (R * stride,)
        The bytes. `flat` gives indices into it.
    stride, size : int
        Bytes from block to block (a multiple of 1024, SHARED_BASE included); usable bytes of a block.
    """

    def __init__(self, ctx: Context, size: int, granule: int) -> None:
        super().__init__(ctx)
        self.size = size
        self.stride = -(-(SHARED_BASE + size) // 1024) * 1024
        self.data = np.zeros(ctx.R * self.stride, np.uint8)
        self._views = {n: self.data.view(dtype) for n, dtype in UINT.items()}
        self._own = (ctx.block_of * self.stride).astype(np.uint64)
        self._shadow = Shadow(ctx, ctx.races, len(self.data), granule) if ctx.races is not None else None

    def reset(self) -> None:
        """Fill with a pattern that is a NaN in every float format, so that unwritten bytes show."""
        self.data[:] = 0xFF
        if self._shadow is not None:
            self._shadow.reset()

    # ---- ordinary accesses ---------------------------------------------------------------------------

    def locate(self, addresses: np.ndarray, size: int, owners: np.ndarray, access: str) -> list[Piece]:
        index = self.index(addresses, size, owners)
        if self._shadow is not None:
            strong = access != "load" and access != "store"
            self.ctx.launch.report.shared_access(self.ctx, addresses, size, owners)
            if not access.endswith("store"):
                self._shadow.read(index, size, owners, strong)
            if not access.endswith("load"):
                self._shadow.write(index, size, owners, strong)
        return [(self._views[size], index, None)]

    def store(self, addresses: np.ndarray, values: np.ndarray, owners: np.ndarray, access: str = "store") -> None:
        size = values.itemsize
        index = self.index(addresses, size, owners)
        view = self._views[size]
        if self._shadow is None:
            view[index] = values
            return
        self.ctx.launch.report.shared_access(self.ctx, addresses, size, owners)
        # All writing the same is common, and harmless on hardware: not a race of the writes.
        lost = self._shadow.write(
            index, size, owners, access.startswith("strong"), lambda: _same(view.take(index), values)
        )
        view[index] = values
        bad = np.flatnonzero(lost & ~_same(view.take(index), values)) if lost.any() else ()
        if len(bad):
            raise self.ctx.error(
                RaceError, "write of shared memory races with another thread's in this instruction", owners[bad[0]]
            )

    # ---- for asynchronous copies and matrix instructions ---------------------------------------------

    def index(self, addresses: np.ndarray, size: int, owners: np.ndarray) -> np.ndarray:
        """Element indices of checked addresses in `data` seen as elements of `size` bytes."""
        low, high = int(addresses.min()), int(addresses.max())
        if high >> RANK_SHIFT:
            return self._foreign_index(addresses, size, owners)
        if low < SHARED_BASE or high + size > SHARED_BASE + self.size:
            bad = (addresses < SHARED_BASE) | (addresses + np.uint64(size) > SHARED_BASE + self.size)
            self._fault(addresses, owners, size, bad)
        return self._elements(addresses, self._own.take(owners) + addresses, size, owners)

    def flat(self, addresses: np.ndarray, size: int, owners: np.ndarray) -> np.ndarray:
        """Byte indices of checked addresses in `data`."""
        return self.index(addresses, size, owners) * size

    def fetch(self, addresses: np.ndarray, size: int, owners: np.ndarray) -> np.ndarray:
        """What a copy engine or wgmma reads for the owners: no bank traffic, but a proxy to fence for."""
        index = self.index(addresses, size, owners)
        if self._shadow is not None:
            self._shadow.read(index, size, owners, False, cross_proxy=True)
        return self._views[size].take(index)

    def peek(self, addresses: np.ndarray, size: int, owners: np.ndarray) -> np.ndarray:
        """What lies there, without any check but of the addresses."""
        return self._views[size].take(self.index(addresses, size, owners))

    def pend(self, addresses: np.ndarray, size: int, owners: np.ndarray) -> None:
        """An asynchronous copy to these addresses has been issued; until it lands, reading them raises."""
        index = self.index(addresses, size, owners)
        if self._shadow is not None:
            self._shadow.pend(index, size, owners)

    def land(self, addresses: np.ndarray, values: np.ndarray, owners: np.ndarray, *, engine: bool = False) -> None:
        """The data of a copy arrives. Nothing is checked against other accesses: `pend` did that.

        With `engine` the write is made by the pseudo-agent of the owner's block (``races.engine``), whose
        clock the waiting warps have to acquire; without it, by the owners themselves.
        """
        size = values.itemsize
        index = self.index(addresses, size, owners)
        self._views[size][index] = values
        if self._shadow is not None:
            self._shadow.land(index, size, owners, engine)

    def _foreign_index(self, addresses: np.ndarray, size: int, owners: np.ndarray) -> np.ndarray:
        """`index` where some addresses name a block of the cluster by rank."""
        ctx = self.ctx
        rank = (addresses >> _RANK_SHIFT).astype(np.intp) - 1
        offset = addresses & _OFFSET_MASK
        bad = (offset < SHARED_BASE) | (offset + np.uint64(size) > SHARED_BASE + self.size)
        bad |= rank >= ctx.cluster_size
        if bad.any():
            self._fault(addresses, owners, size, bad)
        block = ctx.block_of.take(owners)
        target = np.where(rank >= 0, block - block % ctx.cluster_size + rank, block)
        gone = ~ctx.alive.reshape(ctx.R, ctx.T).any(axis=1).take(target)
        if gone.any():
            at = np.flatnonzero(gone)[0]
            message = f"access to the shared memory of block {rank[at]} of the cluster, which has exited"
            raise ctx.error(MemoryFault, message, owners[at])
        if ctx.races is not None and (target != block).any():
            ctx.races.reaches_out()
        return self._elements(offset, target.astype(np.uint64) * np.uint64(self.stride) + offset, size, owners)

    def _elements(self, offsets: np.ndarray, flat: np.ndarray, size: int, owners: np.ndarray) -> np.ndarray:
        refuse_misaligned(self.ctx, offsets, size, owners)
        return (flat >> np.uint64(size.bit_length() - 1)).view(np.int64)

    def _fault(self, addresses: np.ndarray, owners: np.ndarray, size: int, bad: np.ndarray) -> None:
        """Raise for the first bad access."""
        at = np.flatnonzero(bad)[0]
        address = int(addresses[at])
        offset = (address & ((1 << RANK_SHIFT) - 1)) - SHARED_BASE
        if offset < 0:
            problem = f"lies before shared memory, which starts at {SHARED_BASE}"
        elif address >> RANK_SHIFT > self.ctx.cluster_size:
            problem = f"names block {(address >> RANK_SHIFT) - 1} of a cluster of {self.ctx.cluster_size}"
        else:
            problem = f"ends {offset + size - self.size} bytes past the block's {self.size} bytes"
        raise self.ctx.error(MemoryFault, f"{size}-byte access to shared memory at 0x{address:x} {problem}", owners[at])


def _same(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Which elements have the same bytes."""
    return (a.view(np.uint8).reshape(len(a), -1) == b.view(np.uint8).reshape(len(b), -1)).all(axis=1)
