"""Bulk copies by the copy engines (1-D cp.async.bulk), their groups, and st.async.

Data on the way to shared memory complete on an mbarrier and land with its phase. Data on the way out of
shared memory belong to a bulk group of the issuing lane: their source is read when they are issued, and again
when the group is waited for, since it must not have changed in between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ...errors import EmulatorError, MemoryFault
from ..shared import RANK_SHIFT
from ..types import SIZE, UINT
from . import Run, instruction, options, unsupported
from .asynchronous import SharedSource, engine_clock, is_early
from .atomic import Atomic, operation_of
from .groups import GroupQueue
from .mbarrier import Barrier, Deferred, barriers

if TYPE_CHECKING:
    from ..context import Context
    from ..lanes import Lanes
    from ..program import Instruction

_UNIT = 16  # bytes: what bulk copies are made of
Write = Callable[[np.ndarray], None]


def barrier_at(ctx: Context, address: int, lane: int) -> Barrier:
    """The mbarrier at an address as a lane sees it."""
    return next(barriers(ctx, np.array([address], np.uint64), np.array([lane])))[0]


def chunks(address: int, nbytes: int, unit: int = _UNIT) -> np.ndarray:
    """The addresses of the units of a range."""
    return np.arange(address, address + nbytes, unit, dtype=np.uint64)


def of_rank(address: int, rank: int) -> int:
    """The same shared offset in the block of a rank."""
    return (rank + 1) << RANK_SHIFT | (address & ((1 << RANK_SHIFT) - 1))


def receivers(address: int, barrier: int, mask: int | None) -> list[tuple[int, int]]:
    """Destination and mbarrier of each block that a copy goes to; a multicast mask names them by rank."""
    if mask is None:
        return [(address, barrier)]
    ranks = [rank for rank in range(16) if mask >> rank & 1]
    return [(of_rank(address, rank), of_rank(barrier, rank)) for rank in ranks]


def deliver(
    ctx: Context,
    addresses: np.ndarray,
    values: np.ndarray,
    owners: np.ndarray,
    barrier: Barrier,
    operation: Atomic | None = None,
) -> None:
    """Send values to shared memory, or combine them with what is there; `barrier` counts them when they land."""
    if operation is None:
        ctx.shared.pend(addresses, values.itemsize, owners)

    def land() -> np.ndarray | None:
        landed = values
        if operation is not None:
            ((view, index, _),) = ctx.shared.locate(addresses, values.itemsize, owners, "atomic")
            operation.apply(view, index, [values], None, slice(None))
            landed = view.take(index)
        ctx.shared.land(addresses, landed, owners, engine=True)
        return engine_clock(ctx, owners)

    barrier.defer(Deferred(0, values.nbytes, land), is_early(ctx))


class _Stores:
    """The bulk groups of each lane: copies out of shared memory, as their source and what writes it out."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._queues: dict[int, GroupQueue[tuple[SharedSource, Write]]] = {}

    def of(self, lane: int) -> GroupQueue[tuple[SharedSource, Write]]:
        """A lane's groups."""
        return self._queues.setdefault(lane, GroupQueue())

    def finish(self) -> None:
        """Refuse copies whose source was gone, with its block, before they were waited for."""
        for lane, queue in self._queues.items():
            for source, _ in queue:
                message = "the block exited with this copy in flight; cp.async.bulk.wait_group is missing"
                raise self._ctx.error(EmulatorError, message, lane, source.issued)


def _stores(ctx: Context) -> _Stores:
    return ctx.state("bulk", lambda: _Stores(ctx))


def send(ctx: Context, lane: int, addresses: np.ndarray, write: Write) -> None:
    """Start a copy out of shared memory in the lane's open bulk group."""
    source = SharedSource(ctx, addresses, lane)
    if is_early(ctx):
        write(source.read())
    else:
        _stores(ctx).of(lane).open.append((source, write))


def writer(ctx: Context, addresses: np.ndarray, lane: int, size: int, operation: Atomic | None = None) -> Write:
    """Check global addresses now; the result stores bytes there later, or combines them with what is there."""
    pieces = ctx.space("global").locate(addresses, size, np.full(len(addresses), lane), "store")

    def write(data: np.ndarray) -> None:
        values = data.view(UINT[size])
        for view, index, where in pieces:
            new = values if where is None else values[where]
            if operation is None:
                view[index] = new
            else:
                operation.apply(view, index, [new], None, slice(None))

    return write


@instruction("cp.async.bulk", "cp.reduce.async.bulk", kind="async")
def bulk(ins: Instruction, ctx: Context) -> Run:
    """1-D copy global -> shared, shared -> global, or to another block's shared memory; or a reduction."""
    spaces = [token for token in ins.opcode if token in ("global", "shared::cta", "shared::cluster")]
    types = [token for token in ins.opcode if token in SIZE]
    options(
        ins,
        "reduce async bulk global shared::cta shared::cluster mbarrier::complete_tx::bytes bulk_group "
        "multicast::cluster noftz add min max inc dec and or xor L2::cache_hint",
        types,
    )
    if len(spaces) != 2:
        raise unsupported(ins)
    operation = operation_of(ins, types[0]) if ins.opcode[1] == "reduce" else None
    width = SIZE[types[0]] if operation else _UNIT
    if spaces[0] == "global":
        return _outward(ins, ctx, operation, width)
    return _inward(ins, ctx, operation, width)


def _ranges(ins: Instruction, ctx: Context) -> Run:
    """``orders(lanes)``: position, lane, destination, source and bytes of each lane's copy."""
    to, origin = ctx.address(ins.operands[0]), ctx.address(ins.operands[1])
    count = ctx.reader(ins.operands[2], "u32")

    def orders(lanes: Lanes):
        sizes = np.broadcast_to(count(lanes), lanes.n).tolist()
        each = zip(lanes.ids.tolist(), to(lanes).tolist(), origin(lanes).tolist(), sizes, strict=True)
        for i, (lane, target, start, nbytes) in enumerate(each):
            if nbytes % _UNIT or target % _UNIT or start % _UNIT:
                message = f"a bulk copy of {nbytes} bytes, 0x{start:x} to 0x{target:x}, is not in units of 16 bytes"
                raise ctx.error(MemoryFault, message, lane)
            if nbytes:
                yield i, lane, target, start, nbytes

    return orders


def _inward(ins: Instruction, ctx: Context, operation: Atomic | None, width: int) -> Run:
    orders, bell = _ranges(ins, ctx), ctx.address(ins.operands[3])
    mask = ctx.reader(ins.operands[4], "u16") if "multicast::cluster" in ins.opcode else None
    fetch = ctx.space("global").load if "global" in ins.opcode else ctx.shared.fetch

    def run(lanes: Lanes) -> None:
        bars = bell(lanes).tolist()
        masks = np.broadcast_to(mask(lanes), lanes.n).tolist() if mask else [None] * lanes.n
        for i, lane, target, start, nbytes in orders(lanes):
            values = fetch(chunks(start, nbytes), _UNIT, np.full(nbytes // _UNIT, lane)).view(UINT[width])
            owners = np.full(len(values), lane)
            for address, bell_address in receivers(target, bars[i], masks[i]):
                there = chunks(address, nbytes, width)
                deliver(ctx, there, values, owners, barrier_at(ctx, bell_address, lane), operation)

    return run


def _outward(ins: Instruction, ctx: Context, operation: Atomic | None, width: int) -> Run:
    orders = _ranges(ins, ctx)

    def run(lanes: Lanes) -> None:
        for _, lane, target, start, nbytes in orders(lanes):
            write = writer(ctx, chunks(target, nbytes, width), lane, width, operation)
            send(ctx, lane, chunks(start, nbytes), write)

    return run


@instruction("cp.async.bulk.commit_group", kind="async")
def commit_group(ins: Instruction, ctx: Context) -> Run:
    """Close the lanes' open bulk group."""
    options(ins, "async bulk commit_group")

    def run(lanes: Lanes) -> None:
        for lane in lanes.ids.tolist():
            _stores(ctx).of(lane).commit()

    return run


@instruction("cp.async.bulk.wait_group", kind="async")
def wait_group(ins: Instruction, ctx: Context) -> Run:
    """Finish all bulk groups of the lanes but the N youngest; with .read their sources are free too."""
    options(ins, "async bulk wait_group read")
    pending = int(ins.operands[0].value("u32"))

    def run(lanes: Lanes) -> None:
        for lane in lanes.ids.tolist():
            for source, write in _stores(ctx).of(lane).drain(pending):
                write(source.read())

    return run


@instruction("cp.async.bulk.prefetch", "prefetch.tensormap", "prefetchu.tensormap", kind="async")
def prefetch(ins: Instruction, ctx: Context) -> Run:
    """A hint."""
    return lambda lanes: None


@instruction("st.async", "red.async", kind="async")
def st_async(ins: Instruction, ctx: Context) -> Run:
    """Store a value or vector a lane to another block's shared memory, or reduce into it; an mbarrier counts."""
    type_ = ins.opcode[-1]
    options(
        ins,
        "async weak relaxed cluster shared::cluster mbarrier::complete_tx::bytes v2 v4 "
        f"add min max inc dec and or xor {type_}",
    )
    destination, source, bell = ins.operands
    items = getattr(source, "items", (source,))
    size = SIZE[type_]
    to, bar = ctx.address(destination), ctx.address(bell)
    gets = [ctx.reader(item, f"b{8 * size}") for item in items]
    operation = operation_of(ins, type_) if ins.opcode[0] == "red" else None

    def run(lanes: Lanes) -> None:
        addresses = to(lanes)[:, None] + np.arange(len(items), dtype=np.uint64) * np.uint64(size)
        values = np.stack([np.broadcast_to(get(lanes), lanes.n) for get in gets], axis=1)
        for barrier, positions in barriers(ctx, bar(lanes), lanes.ids):
            there, owners = addresses[positions].ravel(), np.repeat(lanes.ids[positions], len(items))
            deliver(ctx, there, values[positions].ravel(), owners, barrier, operation)

    return run
