"""Bulk copies by the copy engines (1-D cp.async.bulk), their groups, and st.async.

Data on the way to shared memory complete on an mbarrier and land with its phase. Data on the way out of
shared memory belong to a bulk group of the issuing lane: their source is read when they are issued, and again
when the group is waited for, since it must not have changed in between.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...errors import EmulatorError, MemoryFault
from ..shared import RANK_SHIFT
from ..types import SIZE, UINT
from . import instruction, options, unsupported
from .asynchronous import SharedSource, engine_clock, is_early
from .atomic import Atomic, operation_of
from .groups import GroupQueue
from .mbarrier import Barrier, Deferred, barriers

_UNIT = 16  # bytes: what bulk copies are made of
_HINTS = "L2::cache_hint"
Write = Callable[[np.ndarray], None]


def own_lanes(lanes):
    """Position and lane number of each lane: engines take one order at a time."""
    return enumerate(lanes.ids.tolist())


def barrier_at(ctx, address: int, lane: int) -> Barrier:
    """The mbarrier at an address as a lane sees it."""
    return next(barriers(ctx, np.array([address], np.uint64), np.array([lane])))[0]


def chunks(address: int, nbytes: int) -> np.ndarray:
    """The addresses of the 16-byte units of a range."""
    return np.arange(address, address + nbytes, _UNIT, dtype=np.uint64)


def of_rank(address: int, rank: int) -> int:
    """The same shared offset in the block of a rank."""
    return (rank + 1) << RANK_SHIFT | (address & ((1 << RANK_SHIFT) - 1))


def receivers(address: int, barrier: int, mask: int | None) -> list[tuple[int, int]]:
    """Destination and mbarrier of each block that a copy goes to; a multicast mask names them by rank."""
    if mask is None:
        return [(address, barrier)]
    ranks = [rank for rank in range(16) if mask >> rank & 1]
    return [(of_rank(address, rank), of_rank(barrier, rank)) for rank in ranks]


def deliver(ctx, lane: int, addresses: np.ndarray, values: np.ndarray, barrier: Barrier) -> None:
    """Send values to shared memory; `barrier` counts them when they land."""
    owners = np.full(len(addresses), lane)
    ctx.shared.pend(addresses, values.itemsize, owners)

    def land() -> np.ndarray | None:
        ctx.shared.land(addresses, values, owners, engine=True)
        return engine_clock(ctx, owners[:1])

    barrier.defer(Deferred(0, values.nbytes, land), is_early(ctx))


class _Stores:
    """The bulk groups of each lane: copies out of shared memory, as their source and what writes it out."""

    def __init__(self, ctx) -> None:
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


def _stores(ctx) -> _Stores:
    return ctx.state("bulk", lambda: _Stores(ctx))


def send(ctx, lane: int, addresses: np.ndarray, write: Write) -> None:
    """Start a copy out of shared memory in the lane's open bulk group."""
    source = SharedSource(ctx, addresses, lane)
    if is_early(ctx):
        write(source.read())
    else:
        _stores(ctx).of(lane).open.append((source, write))


def writer(ctx, addresses: np.ndarray, lane: int, size: int, operation: Atomic | None = None) -> Write:
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


def _check_range(ctx, lane: int, nbytes: int, *addresses: int) -> None:
    if nbytes % _UNIT or any(address % _UNIT for address in addresses):
        where = " and ".join(hex(address) for address in addresses)
        raise ctx.error(MemoryFault, f"a bulk copy of {nbytes} bytes at {where} is not in units of 16 bytes", lane)


@instruction("cp.async.bulk", "cp.reduce.async.bulk", kind="async")
def bulk(ins, ctx):
    """1-D copy global -> shared, shared -> global, or to another block's shared memory; or a reduction."""
    opcode = ins.opcode
    spaces = [token for token in opcode if token in ("global", "shared::cta", "shared::cluster")]
    types = [token for token in opcode if token in SIZE]
    options(
        ins,
        "reduce async bulk global shared::cta shared::cluster mbarrier::complete_tx::bytes bulk_group "
        f"multicast::cluster noftz add min max inc dec and or xor {_HINTS}",
        types,
    )
    if len(spaces) != 2:
        raise unsupported(ins)
    destination, source, size, *extra = ins.operands
    to, origin, count = ctx.address(destination), ctx.address(source), ctx.reader(size, "u32")
    operation = operation_of(ins, types[0]) if "reduce" in opcode else None
    width = SIZE[types[0]] if operation else _UNIT
    inward = spaces[0] != "global"
    bell = ctx.address(extra[0]) if inward else None
    mask = ctx.reader(extra[1], "u16") if "multicast::cluster" in opcode else None

    def bring(lane: int, target: int, start: int, nbytes: int, bar: int, ranks: int | None) -> None:
        owners, units = np.full(nbytes // _UNIT, lane), chunks(start, nbytes)
        if spaces[1] == "global":
            values = ctx.space("global").load(units, _UNIT, owners)
        else:
            values = ctx.shared.fetch(units, _UNIT, owners)
        for address, bell_address in receivers(target, bar, ranks):
            there = chunks(address, nbytes)
            if operation is not None:
                old = ctx.shared.fetch(there, _UNIT, owners).view(UINT[width])
                values = operation.combine(old, [values.view(UINT[width])]).view(UINT[_UNIT])
            deliver(ctx, lane, there, values, barrier_at(ctx, bell_address, lane))

    def run(lanes) -> None:
        targets, starts = to(lanes).tolist(), origin(lanes).tolist()
        sizes = np.broadcast_to(count(lanes), lanes.n).tolist()
        bars = bell(lanes).tolist() if inward else None
        masks = np.broadcast_to(mask(lanes), lanes.n).tolist() if mask else [None] * lanes.n
        for i, lane in own_lanes(lanes):
            _check_range(ctx, lane, sizes[i], targets[i], starts[i])
            if not sizes[i]:
                continue
            if inward:
                bring(lane, targets[i], starts[i], sizes[i], bars[i], masks[i])
            else:
                addresses = np.arange(targets[i], targets[i] + sizes[i], width, dtype=np.uint64)
                send(ctx, lane, chunks(starts[i], sizes[i]), writer(ctx, addresses, lane, width, operation))

    return run


@instruction("cp.async.bulk.commit_group", kind="async")
def commit_group(ins, ctx):
    """Close the lanes' open bulk group."""
    options(ins, "async bulk commit_group")

    def run(lanes) -> None:
        for lane in lanes.ids.tolist():
            _stores(ctx).of(lane).commit()

    return run


@instruction("cp.async.bulk.wait_group", kind="async")
def wait_group(ins, ctx):
    """Finish all bulk groups of the lanes but the N youngest; with .read their sources are free too."""
    options(ins, "async bulk wait_group read")
    pending = int(ins.operands[0].value("u32"))

    def run(lanes) -> None:
        for lane in lanes.ids.tolist():
            for source, write in _stores(ctx).of(lane).drain(pending):
                write(source.read())

    return run


@instruction("cp.async.bulk.prefetch", "prefetch.tensormap", "prefetchu.tensormap", kind="async")
def prefetch(ins, ctx):
    """A hint."""
    return lambda lanes: None


@instruction("st.async", "red.async", kind="async")
def st_async(ins, ctx):
    """Store a value or vector a lane to another block's shared memory, or reduce into it; an mbarrier counts."""
    type_ = ins.opcode[-1]
    options(
        ins,
        f"async weak relaxed cluster shared::cluster mbarrier::complete_tx::bytes v2 v4 "
        f"add min max inc dec and or xor {type_}",
    )
    destination, source, bell = ins.operands
    items = getattr(source, "items", (source,))
    size = SIZE[type_]
    to, bar = ctx.address(destination), ctx.address(bell)
    gets = [ctx.reader(item, f"b{8 * size}") for item in items]
    operation = operation_of(ins, type_) if ins.opcode[0] == "red" else None

    def run(lanes) -> None:
        addresses = to(lanes)[:, None] + np.arange(len(items), dtype=np.uint64) * np.uint64(size)
        values = np.stack([np.broadcast_to(get(lanes), lanes.n) for get in gets], axis=1)
        for barrier, positions in barriers(ctx, bar(lanes), lanes.ids):
            there, owners = addresses[positions].ravel(), np.repeat(lanes.ids[positions], len(items))
            _store_later(ctx, there, values[positions].ravel(), owners, barrier, operation)

    return run


def _store_later(ctx, addresses, values, owners, barrier: Barrier, operation) -> None:
    """Land the lanes' values when the barrier's phase is waited for."""
    if operation is None:
        ctx.shared.pend(addresses, values.itemsize, owners)

    def land() -> np.ndarray | None:
        if operation is None:
            ctx.shared.land(addresses, values, owners, engine=True)
        else:
            ((view, index, _),) = ctx.shared.locate(addresses, values.itemsize, owners, "atomic")
            operation.apply(view, index, [values], None, slice(None))
            ctx.shared.land(addresses, view.take(index), owners, engine=True)
        return engine_clock(ctx, owners)

    barrier.defer(Deferred(0, values.nbytes, land), is_early(ctx))
