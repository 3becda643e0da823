"""The memory spaces behind one interface: load, store and atomics on arrays of addresses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..errors import MemoryFault
from .types import UINT

if TYPE_CHECKING:
    from .context import Context

# Windows of the generic address space. Global allocations lie below them.
_WINDOW_SHIFT = 56
WINDOWS = {
    "global": 0,
    "shared": 1 << _WINDOW_SHIFT,
    "local": 2 << _WINDOW_SHIFT,
    "param": 3 << _WINDOW_SHIFT,
    "const": 4 << _WINDOW_SHIFT,
}
_BY_WINDOW = ("global", "shared", "local", "param", "const")

# Part of an access that falls into one array: the storage as elements of the access's size, the element
# indices, and the positions among the accesses (None: all of them).
Piece = tuple[np.ndarray, np.ndarray, "np.ndarray | None"]


class Space:
    """A memory space of one context.

    In every method `addresses` is uint64 of shape (n,), `owners` the lane that makes each access (intp,
    shape (n,); a lane may own several), `size` the bytes of one access: 1, 2, 4, 8 or 16. Values are of
    dtype ``UINT[size]``. Alignment to `size`, bounds, initialisation, races and the counters of the report
    are taken care of inside; a wrong access raises.

    `access` is "load", "store" or "atomic"; "strong load" and "strong store" are the volatile, relaxed,
    acquire and release ones, which do not race with each other or with atomics.
    """

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx

    def reset(self) -> None:
        """Forget the last batch of blocks."""

    def load(self, addresses: np.ndarray, size: int, owners: np.ndarray, access: str = "load") -> np.ndarray:
        """The values at the addresses, shape (n,), dtype ``UINT[size]``."""
        pieces = self.locate(addresses, size, owners, access)
        if len(pieces) == 1:
            view, index, _ = pieces[0]
            return view.take(index)
        values = np.empty(len(addresses), UINT[size])
        for view, index, where in pieces:
            values[where] = view.take(index)
        return values

    def store(self, addresses: np.ndarray, values: np.ndarray, owners: np.ndarray, access: str = "store") -> None:
        """Store values of dtype ``UINT[size]``; where addresses coincide the highest lane wins."""
        for view, index, where in self.locate(addresses, values.itemsize, owners, access):
            view[index] = values if where is None else values[where]

    def locate(self, addresses: np.ndarray, size: int, owners: np.ndarray, access: str) -> list[Piece]:
        """Check and count the accesses and find their storage, for atomics and the like."""
        raise NotImplementedError


class LocalSpace(Space):
    """Per-thread memory: the same offsets mean other bytes in every lane."""

    def __init__(self, ctx: Context, size: int) -> None:
        super().__init__(ctx)
        self._size = size
        self._stride = -(-size // 16) * 16
        data = np.zeros(ctx.L * self._stride, np.uint8)
        self._views = {n: data.view(dtype) for n, dtype in UINT.items()}

    def locate(self, addresses: np.ndarray, size: int, owners: np.ndarray, access: str) -> list[Piece]:
        refuse_misaligned(self.ctx, addresses, size, owners)
        refuse_outside(self.ctx, addresses, size, owners, self._size, "local")
        elements = addresses.view(np.int64) >> (size.bit_length() - 1)
        return [(self._views[size], owners * (self._stride // size) + elements, None)]


class ConstantSpace(Space):
    """Kernel parameters, or the constant bank: read-only bytes, the same for all."""

    def __init__(self, ctx: Context, name: str, data: bytes) -> None:
        super().__init__(ctx)
        self._name = name
        self.data = np.zeros(-(-len(data) // 16) * 16, np.uint8)
        self.data[: len(data)] = np.frombuffer(data, np.uint8)
        self._size = len(data)
        self._views = {n: self.data.view(dtype) for n, dtype in UINT.items()}

    def refill(self, data: bytes) -> None:
        """Other bytes of the same number."""
        self.data[: self._size] = np.frombuffer(data, np.uint8)

    def locate(self, addresses: np.ndarray, size: int, owners: np.ndarray, access: str) -> list[Piece]:
        if access != "load":
            raise self.ctx.error(MemoryFault, f"store to {self._name} memory, which is read-only", owners[0])
        refuse_misaligned(self.ctx, addresses, size, owners)
        refuse_outside(self.ctx, addresses, size, owners, self._size, self._name)
        return [(self._views[size], addresses.view(np.int64) >> (size.bit_length() - 1), None)]


class GenericSpace(Space):
    """Addresses that may lie in any space: each window leads to its own."""

    def load(self, addresses: np.ndarray, size: int, owners: np.ndarray, access: str = "load") -> np.ndarray:
        space, offsets = self._only(addresses)
        if space is not None:
            return space.load(offsets, size, owners, access)
        return super().load(addresses, size, owners, access)

    def store(self, addresses: np.ndarray, values: np.ndarray, owners: np.ndarray, access: str = "store") -> None:
        for space, offsets, where in self._split(addresses):
            space.store(offsets, values[where], owners[where], access)

    def locate(self, addresses: np.ndarray, size: int, owners: np.ndarray, access: str) -> list[Piece]:
        pieces: list[Piece] = []
        positions = np.arange(len(addresses))
        for space, offsets, where in self._split(addresses):
            for view, index, inner in space.locate(offsets, size, owners[where], access):
                outer = positions[where]
                pieces.append((view, index, outer if inner is None else outer[inner]))
        return pieces

    def _only(self, addresses: np.ndarray) -> tuple[Space | None, np.ndarray]:
        """The one space that all addresses lie in, with the offsets there, or None."""
        first = int(addresses[0]) >> _WINDOW_SHIFT
        base = np.uint64(first << _WINDOW_SHIFT)
        offsets = addresses - base
        if first >= len(_BY_WINDOW) or int(offsets.max()) >> _WINDOW_SHIFT:
            return None, addresses
        return self.ctx.space(_BY_WINDOW[first]), offsets

    def _split(self, addresses: np.ndarray) -> list[tuple[Space, np.ndarray, slice | np.ndarray]]:
        space, offsets = self._only(addresses)
        if space is not None:
            return [(space, offsets, slice(None))]
        windows = addresses >> np.uint64(_WINDOW_SHIFT)
        parts: list[tuple[Space, np.ndarray, slice | np.ndarray]] = []
        for window in np.unique(windows).tolist():
            where = np.flatnonzero(windows == window)
            known = window < len(_BY_WINDOW)
            # What lies in no window is nobody's: global memory says so best.
            name, base = (_BY_WINDOW[window], window << _WINDOW_SHIFT) if known else ("global", 0)
            parts.append((self.ctx.space(name), addresses[where] - np.uint64(base), where))
        return parts


def refuse_misaligned(ctx: Context, addresses: np.ndarray, size: int, owners: np.ndarray) -> None:
    """Raise if an address is no multiple of the access size."""
    if size > 1 and int(np.bitwise_or.reduce(addresses)) & (size - 1):
        at = np.flatnonzero(addresses & np.uint64(size - 1))[0]
        raise ctx.error(
            MemoryFault,
            f"{size}-byte access at 0x{int(addresses[at]):x} is misaligned: the address is no multiple of {size}",
            owners[at],
        )


def refuse_outside(ctx: Context, addresses: np.ndarray, size: int, owners: np.ndarray, limit: int, name: str) -> None:
    """Raise if an access of a space that begins at 0 ends past its size."""
    if int(addresses.max()) + size > limit:
        at = np.argmax(addresses > np.uint64(max(limit - size, 0)))  # the first; any if nothing fits
        raise ctx.error(
            MemoryFault,
            f"{size}-byte access at offset {int(addresses[at])} of {name} memory is out of bounds: "
            f"there are {limit} bytes",
            owners[at],
        )
