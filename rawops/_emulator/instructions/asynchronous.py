"""cp.async with its groups, and the proxy fences between ordinary and asynchronous accesses.

A copy's source is read when it is issued; its destination is written when the program waits for it
(completion "early": at once), and until then reading the destination raises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...errors import RaceError
from ..operands import Not, Reg
from ..types import UINT
from . import Run, instruction, options, unsupported
from .mbarrier import Deferred, barriers, clock_of, released, shared_address

if TYPE_CHECKING:
    from ..context import Context
    from ..lanes import Lanes
    from ..program import Instruction

_EVERYTHING = np.iinfo(np.int64).max


@dataclass(slots=True, eq=False)
class _Copy:
    """Copies in flight: destination, data and the group of each; `number` says in which order they came."""

    number: int
    ids: np.ndarray
    addresses: np.ndarray
    values: np.ndarray
    groups: np.ndarray

    def split(self, keep: np.ndarray) -> _Copy:
        """The part where `keep` is true."""
        parts = (self.ids[keep], self.addresses[keep], self.values[keep], self.groups[keep])
        return _Copy(self.number, *parts)


class _Copies:
    """What the lanes of a batch have in flight."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self.committed = np.zeros(ctx.L, np.int64)  # groups, by lane
        self._flying: list[_Copy] = []
        self._issued = 0

    def issue(self, lanes: Lanes, addresses: np.ndarray, values: np.ndarray) -> None:
        """Take up one copy a lane."""
        self._ctx.shared.pend(addresses, values.itemsize, lanes.ids)
        self._issued += 1
        groups = self.committed[lanes.ids]
        self._flying.append(_Copy(self._issued, lanes.ids, addresses, values, groups))

    def mark(self) -> int:
        """The number of the last copy issued so far."""
        return self._issued

    def land(self, ids: np.ndarray, limits: np.ndarray | int, last: int, *, engine: bool) -> None:
        """Land what the lanes `ids` issued in groups below `limits`, up to the copy numbered `last`."""
        limit_of = np.full(self._ctx.L, -1, np.int64)
        limit_of[ids] = limits
        left = []
        for copy in self._flying:
            due = copy.groups < limit_of.take(copy.ids)
            if copy.number > last or not due.any():
                left.append(copy)
                continue
            part = copy
            if not due.all():
                part = copy.split(due)
                left.append(copy.split(~due))
            self._ctx.shared.land(part.addresses, part.values, part.ids, engine=engine)
        self._flying = left


def _copies(ctx: Context) -> _Copies:
    return ctx.state("cp.async", lambda: _Copies(ctx))


def is_early(ctx: Context) -> bool:
    """Whether asynchronous operations complete when they are issued."""
    return ctx.launch.completion == "early"


@instruction("cp.async", kind="async")
def cp_async(ins: Instruction, ctx: Context) -> Run:
    """Copy 4, 8 or 16 bytes a lane from global to shared memory."""
    hints = "L2::cache_hint L2::64B L2::128B L2::256B"
    given = options(ins, f"async ca cg shared shared::cta global {hints}")
    destination, source, size_operand, *extra = ins.operands
    if "L2::cache_hint" in given:
        extra = extra[:-1]
    size = int(size_operand.value("u32"))
    if size not in (4, 8, 16) or len(extra) > 1 or ("cg" in given and size != 16):
        raise unsupported(ins)
    to, origin = ctx.address(destination), ctx.address(source)
    memory = ctx.space("global")
    count = _byte_count(ctx, extra[0], size) if extra else None

    def fetch(lanes: Lanes) -> np.ndarray:
        addresses = origin(lanes)
        if count is None:
            return memory.load(addresses, size, lanes.ids)
        return _load_partly(memory, addresses, np.broadcast_to(count(lanes), lanes.n), size, lanes.ids)

    def run(lanes: Lanes) -> None:
        values, addresses = fetch(lanes), to(lanes)
        copies = _copies(ctx)
        copies.issue(lanes, addresses, values)
        if is_early(ctx):
            copies.land(lanes.ids, _EVERYTHING, copies.mark(), engine=False)

    return run


def _byte_count(ctx: Context, operand, size: int):
    """``get(lanes)``: bytes to read of each copy, from its src-size or its ignore-src operand."""
    if isinstance(operand, Not) or (isinstance(operand, Reg) and operand.type == "pred"):
        ignore = ctx.reader(operand, "pred")
        return lambda lanes: np.where(ignore(lanes), 0, size)
    return ctx.reader(operand, "u32")


def _load_partly(memory, addresses: np.ndarray, counts: np.ndarray, size: int, ids: np.ndarray) -> np.ndarray:
    """Load the first `counts` bytes of each `size`, the rest zero; what is not asked for is not touched."""
    values = np.zeros(len(ids), UINT[size])
    whole = counts >= size
    if whole.any():
        values[whole] = memory.load(addresses[whole], size, ids[whole])
    bytes_of = values.view(np.uint8).reshape(-1, size)
    for i in range(size if (~whole & (counts > 0)).any() else 0):
        there = ~whole & (counts > i)
        if there.any():
            bytes_of[there, i] = memory.load(addresses[there] + np.uint64(i), 1, ids[there])
    return values


@instruction("cp.async.commit_group", kind="async")
def commit_group(ins: Instruction, ctx: Context) -> Run:
    """Close the lanes' open group."""
    options(ins, "async commit_group")

    def run(lanes: Lanes) -> None:
        _copies(ctx).committed[lanes.index] += 1

    return run


@instruction("cp.async.wait_group", "cp.async.wait_all", kind="async")
def wait_group(ins: Instruction, ctx: Context) -> Run:
    """Land all groups of the lanes but the N youngest; wait_all lands the open one too."""
    given = options(ins, "async wait_group wait_all")
    pending = None if "wait_all" in given else int(ins.operands[0].value("u32"))

    def run(lanes: Lanes) -> None:
        copies = _copies(ctx)
        limits = _EVERYTHING if pending is None else copies.committed[lanes.ids] - pending
        copies.land(lanes.ids, limits, copies.mark(), engine=False)

    return run


@instruction("cp.async.mbarrier.arrive", kind="async")
def mbarrier_arrive(ins: Instruction, ctx: Context) -> Run:
    """Arrive once the lane's copies so far have landed; without .noinc that arrival is an extra one."""
    given = options(ins, "async mbarrier arrive noinc b64 shared shared::cta")
    address = shared_address(ctx, ins, ins.operands[0])

    def run(lanes: Lanes) -> None:
        copies = _copies(ctx)
        for barrier, positions in barriers(ctx, address(lanes), lanes.ids):
            ids = lanes.ids[positions]
            if "noinc" not in given:
                barrier.pending += len(ids)
            land = _lander(ctx, copies, ids)
            barrier.defer(Deferred(len(ids), 0, land), is_early(ctx))

    return run


def _lander(ctx: Context, copies: _Copies, ids: np.ndarray) -> Callable[[], np.ndarray | None]:
    """What lands the copies that the lanes have issued so far, and tells their clock."""
    last, clock = copies.mark(), released(ctx, ids)

    def land() -> np.ndarray | None:
        copies.land(ids, _EVERYTHING, last, engine=True)
        return None if clock is None else np.maximum(clock, engine_clock(ctx, ids))

    return land


class SharedSource:
    """Shared memory that an operation in flight reads: when it is issued, and again when it completes.

    The second look finds what was overwritten, or is about to be by a copy, before the program waited.
    """

    def __init__(self, ctx: Context, addresses: np.ndarray, owner: int) -> None:
        self._ctx, self.issued = ctx, ctx.current
        self._addresses, self._owners = addresses, np.full(len(addresses), owner)
        self._seen = self._fetch()

    def _fetch(self) -> np.ndarray:
        return self._ctx.shared.fetch(self._addresses, 16, self._owners)

    def read(self) -> np.ndarray:
        """The bytes as they are now."""
        ctx = self._ctx
        found = ctx.shared.peek(self._addresses, 16, self._owners)
        if ctx.races is not None:
            if found.tobytes() != self._seen.tobytes():
                message = "what this reads of shared memory was overwritten before it was waited for"
                raise ctx.error(RaceError, message, int(self._owners[0]), self.issued)
            self._fetch()
        return found.view(np.uint8)


def engine_clock(ctx: Context, ids: np.ndarray) -> np.ndarray | None:
    """What a wait learns about the copies that engines made for these lanes."""
    if ctx.races is None:
        return None
    return clock_of(ctx, ctx.races.engine(np.unique(ctx.block_of[ids])))


@instruction("fence.proxy", kind="async")
def fence_proxy(ins: Instruction, ctx: Context) -> Run:
    """Order the lanes' ordinary accesses before asynchronous ones that follow."""
    given = options(
        ins,
        "proxy alias async async::generic tensormap::generic global shared::cta shared::cluster acquire release "
        "sync_restrict::shared::cta sync_restrict::shared::cluster cta cluster gpu sys",
    )
    if "async" not in given or "global" in given or ctx.races is None:
        return lambda lanes: None

    def run(lanes: Lanes) -> None:
        ctx.races.proxy_fence(lanes.ids)

    return run
