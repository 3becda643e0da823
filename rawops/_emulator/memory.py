"""Global memory: arrays mapped into one address space with gaps between them."""

from __future__ import annotations

import ctypes
import itertools
import threading
import weakref
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ..errors import MemoryFault
from .spaces import Piece, Space, refuse_misaligned
from .types import UINT

if TYPE_CHECKING:
    from .context import Context

_ALIGNMENT = 512  # of allocations, as on a device
_HOST_ALIGNMENT = 16  # of NumPy's allocations: misalignment beyond it is the array's own
_FIRST = 0x7_0000_0000
_GAP = 1 << 20  # unmapped between allocations, so that an index that is off faults
_TOMBSTONES = 4096  # freed allocations remembered, for the sake of messages


Ranges = tuple[tuple[int, int], ...]  # disjoint and ascending; another thread may be looking through them


@dataclass(slots=True)
class Mapped:
    """The address ranges that views cover, and those that writeable ones do."""

    readable: Ranges = ()
    writable: Ranges = ()

    def add(self, span: tuple[int, int], writable: bool) -> None:
        """Add what a view covers."""
        self.readable = _join(self.readable, span)
        if writable:
            self.writable = _join(self.writable, span)


@dataclass(slots=True, eq=False)
class Segment:
    """The memory of one root buffer.

    Attributes
    ----------
    base, size, host : int
        Where it lies, how long it is, and where it is in this process.
    name : str
        What was mapped last, for messages.
    ever, recent : Mapped
        What views of the buffer cover, of all that were mapped, and of those mapped for launch number `launch`.
        The rest of the buffer is as unmapped to a kernel as the gaps are.
    views : dict
        For each access size: the address of element 0 and the storage as elements of that size.
    """

    base: int
    size: int
    host: int
    name: str
    ever: Mapped = field(default_factory=lambda: Mapped())
    recent: Mapped = field(default_factory=lambda: Mapped())
    launch: int = -1
    views: dict[int, tuple[int, np.ndarray]] = field(default_factory=dict)
    alive: bool = True

    def make_views(self) -> None:
        """Views by address: they must not keep the array alive."""
        raw = np.ctypeslib.as_array((ctypes.c_uint8 * self.size).from_address(self.host))
        for size, dtype in UINT.items():
            skip = -self.base % size
            count = max(self.size - skip, 0) // size
            self.views[size] = self.base + skip, raw[skip : skip + count * size].view(dtype)

    def map(self, span: tuple[int, int] | None, writable: bool, launch: int) -> None:
        """Make an address range, None if it is empty, accessible to a launch."""
        if self.launch != launch:
            self.launch, self.recent = launch, Mapped()
        if span is not None:
            self.ever.add(span, writable)
            self.recent.add(span, writable)

    def ranges(self, write: bool, launch: int) -> Ranges:
        """What a launch may read or write. One that was given no view of the buffer has its address from elsewhere,
        as from a table of pointers, and may use what earlier ones were given."""
        mapped = self.recent if self.launch == launch else self.ever
        return mapped.writable if write else mapped.readable

    def bury(self) -> None:
        """The array is gone."""
        self.alive = False
        self.views.clear()


class GlobalMemory:
    """The global memory of an emulated device; it has to live as long as addresses into it do."""

    def __init__(self) -> None:
        self._found: tuple[list[Segment], list[int]] = [], []  # segments, and where they start
        self._lock = threading.Lock()  # of what maps: threads look up addresses without it
        self._by_root: dict[int, Segment] = {}
        self._next = _FIRST
        self._numbers = itertools.count()
        self._of_thread = threading.local()

    def begin(self) -> int:
        """The number of this thread's launch that begins: what the thread maps from here on is for its next."""
        number, self._of_thread.next = self._next_launch(), next(self._numbers)
        return number

    def _next_launch(self) -> int:
        try:
            return self._of_thread.next
        except AttributeError:
            self._of_thread.next = number = next(self._numbers)
            return number

    def map(self, array: np.ndarray, name: str = "") -> int:
        """The address of an array's first element; messages call it by its name, or by its dtype and shape.

        The array is used in place: stores change it, and views of one buffer alias. To the
        next launch only the bytes between its lowest and its highest element are accessible, and only for
        reading if it is read-only. When the array that owns the buffer is gone, accesses raise.
        """
        root, (low, high) = _root(array), _extent(array)
        with self._lock:
            segment = self._by_root.get(id(root))
            if segment is None or not segment.alive:
                segment = self._add(root)
            segment.name = name or f"{array.dtype} array of shape {array.shape}"
            span = (segment.base + low - segment.host, segment.base + high - segment.host) if array.size else None
            segment.map(span, array.flags.writeable, self._next_launch())
        return segment.base + array.ctypes.data - segment.host

    def find(self, address: int) -> Segment | None:
        """The last segment that starts at or before an address."""
        segments, starts = self._found
        at = bisect_right(starts, address)
        return segments[at - 1] if at else None

    def nearest(self, address: int) -> Segment | None:
        """The segment closest to an address."""
        segments, starts = self._found
        at = bisect_right(starts, address)
        around = segments[max(at - 1, 0) : at + 1]
        return min(around, key=lambda s: max(s.base - address, address - s.base - s.size + 1), default=None)

    def _add(self, root: np.ndarray) -> Segment:
        low, high = _extent(root)
        base = self._next + low % _HOST_ALIGNMENT
        segment = Segment(base, high - low, low, "")
        segment.make_views()
        self._next = -(-(base + segment.size + _GAP) // _ALIGNMENT) * _ALIGNMENT
        if len(self._found[0]) > _TOMBSTONES:
            alive = [s for s in self._found[0] if s.alive]
            self._found = alive, [s.base for s in alive]
            self._by_root = {root: s for root, s in self._by_root.items() if s.alive}
        segments, starts = self._found
        segments.append(segment)  # first: whoever finds the start finds the segment
        starts.append(base)
        self._by_root[id(root)] = segment
        weakref.finalize(root, segment.bury).atexit = False
        return segment


class GlobalSpace(Space):
    """Global memory as one launch sees it."""

    def __init__(self, ctx: Context, memory: GlobalMemory) -> None:
        super().__init__(ctx)
        self.memory = memory

    def locate(self, addresses: np.ndarray, size: int, owners: np.ndarray, access: str) -> list[Piece]:
        refuse_misaligned(self.ctx, addresses, size, owners)
        write = not access.endswith("load")
        if self.ctx.launch.check:
            self.ctx.launch.report.global_access(self.ctx, addresses, size, owners, write)
        low, high = int(addresses.min()), int(addresses.max())
        segment = self.memory.find(low)
        if segment is not None and segment.alive:
            for start, end in segment.ranges(write, self.ctx.launch.number):
                if start <= low and high + size <= end:
                    return [_piece(segment, addresses, size, None)]
        return self._locate_each(addresses, size, owners, write)

    def _locate_each(self, addresses: np.ndarray, size: int, owners: np.ndarray, write: bool) -> list[Piece]:
        """Accesses to several allocations, or to none."""
        pieces = []
        left = np.arange(len(addresses))
        while len(left):
            there = addresses[left]
            segment = self.memory.find(int(there[0]))
            inside = np.zeros(len(left), bool)
            if segment is not None and segment.alive:
                for start, end in segment.ranges(write, self.ctx.launch.number):
                    inside |= (there >= start) & (there <= end - size)
            if not inside[0]:
                raise self._fault(int(there[0]), size, int(owners[left[0]]), write)
            pieces.append(_piece(segment, there[inside], size, left[inside]))
            left = left[~inside]
        return pieces

    def _fault(self, address: int, size: int, owner: int, write: bool) -> MemoryFault:
        """What is wrong with an address, and which allocation it is near."""
        verb = "store" if write else "load"
        segment = self.memory.nearest(address)
        offset = address - (address >> 63 << 64)
        if abs(offset) < _GAP:
            where = "null pointer" + (f" {offset:+} bytes" if offset else "")
        elif segment is None:
            where = "nothing is mapped"
        elif not segment.alive and segment.base <= address < segment.base + segment.size:
            where = f"it lies in a {segment.name} that has been freed"
        else:
            where = _distance(segment, address, size, write, self.ctx.launch.number)
        return self.ctx.error(MemoryFault, f"{size}-byte {verb} at 0x{address:x} is out of bounds: {where}", owner)


def _distance(segment: Segment, address: int, size: int, write: bool, launch: int) -> str:
    """Where an address lies relative to the mapped part of a segment."""
    readable = segment.ranges(False, launch)
    if write and any(start <= address and address + size <= end for start, end in readable):
        return f"the {segment.name} there is read-only"
    freed = "" if segment.alive else " that has been freed"
    if not readable:
        return f"it is near an empty {segment.name}{freed}"
    start, end = min(readable, key=lambda r: max(r[0] - address, address + size - r[1]))
    if address < start:
        return f"it starts {start - address} bytes before a {segment.name}{freed}"
    return f"it ends {address + size - end} bytes past the end of a {segment.name}{freed}"


def _piece(segment: Segment, addresses: np.ndarray, size: int, where: np.ndarray | None) -> Piece:
    origin, view = segment.views[size]
    index = addresses - np.uint64(origin)
    if size > 1:
        index >>= np.uint64(size.bit_length() - 1)
    return view, index.view(np.int64), where


def _root(array: np.ndarray) -> np.ndarray:
    """The array that owns the buffer."""
    while True:
        base = array.base
        if not isinstance(base, np.ndarray):
            base = getattr(base, "base", None)  # as_strided puts a wrapper in between
        if not isinstance(base, np.ndarray):
            return array
        array = base


def _extent(array: np.ndarray) -> tuple[int, int]:
    """The addresses in this process of an array's lowest byte and the end of its highest element."""
    low = high = array.ctypes.data
    if array.size:
        reach = [(n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)]
        low += sum(r for r in reach if r < 0)
        high += sum(r for r in reach if r > 0) + array.itemsize
    return low, high


def _join(ranges: Ranges, new: tuple[int, int]) -> Ranges:
    """Add a range to disjoint ascending ones."""
    if any(start <= new[0] and new[1] <= end for start, end in ranges):
        return ranges
    merged: list[tuple[int, int]] = []
    for start, end in sorted([*ranges, new]):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return tuple(merged)
