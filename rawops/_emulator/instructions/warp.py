"""Instructions in which the lanes of a warp exchange values."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import UninitializedRead
from ..lanes import pack_warps, unpack_warps
from ..operands import Pair, Sink
from ..types import DTYPE
from . import Run, instruction, unsupported

if TYPE_CHECKING:
    from ..context import Context
    from ..lanes import Lanes
    from ..program import Instruction


# What a shuffle up or down gives for a lane that is not there, NaN in every float type: the steps of a reduction
# read past the last lane and drop what comes, so that it must not raise.
_POISON = 0xFFFFFFFF


def spread(ctx: Context, lanes: Lanes, values: Any) -> np.ndarray:
    """Values of a group of lanes as an array for all of them, shape (n_warps, 32); others have garbage."""
    values = np.asarray(values)
    if lanes.n == ctx.L and values.ndim:
        return values.reshape(-1, 32)
    everywhere = np.zeros(ctx.L, values.dtype)
    everywhere[lanes.index] = values
    return everywhere.reshape(-1, 32)


def order_warps(ctx: Context, lanes: Lanes) -> None:
    """Lanes of a warp that execute a warp-level instruction together are ordered by it."""
    if ctx.races is not None:
        ctx.races.sync_warps(lanes.warps)


@instruction("shfl", scope="warp", member_mask=True, kind="warp")
def shfl(ins: Instruction, ctx: Context) -> Run:
    """Read another lane's register."""
    mode = next((m for m in ins.opcode if m in ("up", "down", "bfly", "idx")), "")
    if not mode or "sync" not in ins.opcode:
        raise unsupported(ins)
    target, a, b, c, mask = ins.operands
    d, p = (target.first, target.second) if isinstance(target, Pair) else (target, Sink())
    get_a, get_b, get_c = ctx.reader(a, "b32"), ctx.reader(b, "u32"), ctx.reader(c, "u32")
    get_mask = ctx.reader(mask, "u32")
    put_d, put_p = ctx.writer(d, "b32"), ctx.writer(p, "pred")
    lane_of = ctx.lane_of

    def run(lanes: Lanes) -> None:
        lane = lane_of[lanes.index]
        amount = np.asarray(get_b(lanes)).astype(np.intp) & 31
        control = np.asarray(get_c(lanes)).astype(np.intp)
        segment, clamp = (control >> 8) & 31, control & 31
        low = lane & segment
        high = low | (clamp & ~segment)
        if mode == "up":
            source = lane - amount
            inside = source >= high
        elif mode == "down":
            source = lane + amount
            inside = source <= high
        elif mode == "bfly":
            source = lane ^ amount
            inside = source <= high
        else:
            source = low | (amount & ~segment)
            inside = source <= high
        source = np.where(inside, source, lane)
        values = spread(ctx, lanes, get_a(lanes)).ravel().take(lanes.ids - lane + source)
        if ctx.launch.check:
            absent = _absent(ctx, lanes, source, get_mask(lanes))
            if absent.any():
                if mode in ("bfly", "idx"):
                    raise _undefined(ctx, lanes, source, absent)
                values[absent] = _POISON
        put_d(lanes, values)
        put_p(lanes, inside)
        order_warps(ctx, lanes)

    return run


def _absent(ctx: Context, lanes: Lanes, source: np.ndarray, mask: Any) -> np.ndarray:
    """Whose source takes no part in the shuffle."""
    there = lanes.warp_bits[ctx.warp_of[lanes.index]] & mask
    return (there >> source.astype(np.uint32)) & 1 == 0


def _undefined(ctx: Context, lanes: Lanes, source: np.ndarray, absent: np.ndarray) -> UninitializedRead:
    at = int(np.flatnonzero(absent)[0])
    message = f"read of lane {source[at]} of the warp, which takes no part in the shuffle"
    return ctx.error(UninitializedRead, message, lanes.ids[at])  # type: ignore[return-value]


@instruction("vote", scope="warp", member_mask=True, kind="warp")
def vote(ins: Instruction, ctx: Context) -> Run:
    """Combine a predicate over the lanes of a mask."""
    mode = next((m for m in ins.opcode if m in ("all", "any", "uni", "ballot")), "")
    if not mode or "sync" not in ins.opcode:
        raise unsupported(ins)
    d, a, mask = ins.operands
    get, get_mask = ctx.reader(a, "pred"), ctx.reader(mask, "u32")
    put = ctx.writer(d, "u32" if mode == "ballot" else "pred")

    def run(lanes: Lanes) -> None:
        there, members = _ballot(ctx, lanes, get(lanes), get_mask(lanes))
        if mode == "ballot":
            put(lanes, there)
        elif mode == "all":
            put(lanes, there == members)
        elif mode == "any":
            put(lanes, there != 0)
        else:
            put(lanes, (there == members) | (there == 0))
        order_warps(ctx, lanes)

    return run


def _ballot(ctx: Context, lanes: Lanes, predicate: Any, mask: Any) -> tuple[np.ndarray, np.ndarray]:
    """For each lane, the bits of its mask's present lanes where the predicate holds, and those bits."""
    values = spread(ctx, lanes, np.broadcast_to(predicate, lanes.n)).ravel() & lanes.mask
    warps = ctx.warp_of[lanes.index]
    return pack_warps(values)[warps] & mask, lanes.warp_bits[warps] & mask


@instruction("activemask", kind="warp")
def activemask(ins: Instruction, ctx: Context) -> Run:
    """The lanes of the warp that happen to be here."""
    put = ctx.writer(ins.operands[0], "u32")
    return lambda lanes: put(lanes, lanes.warp_bits[ctx.warp_of[lanes.index]])


@instruction("elect", scope="warp", member_mask=True, kind="warp")
def elect(ins: Instruction, ctx: Context) -> Run:
    """Choose the lowest lane of the mask."""
    target, mask = ins.operands
    d, p = (target.first, target.second) if isinstance(target, Pair) else (target, Sink())
    get_mask = ctx.reader(mask, "u32")
    put_d, put_p = ctx.writer(d, "u32"), ctx.writer(p, "pred")

    def run(lanes: Lanes) -> None:
        members = lanes.warp_bits[ctx.warp_of[lanes.index]] & get_mask(lanes)
        lowest = members & (~members + np.uint32(1))
        leader = np.log2(lowest.astype(np.float64)).astype(np.uint32)
        put_d(lanes, leader)
        put_p(lanes, leader == ctx.lane_of[lanes.index])
        order_warps(ctx, lanes)

    return run


@instruction("match", scope="warp", member_mask=True, kind="warp")
def match(ins: Instruction, ctx: Context) -> Run:
    """Which lanes have the same value."""
    kind = ins.opcode[-1]
    target, a, mask = ins.operands
    d, p = (target.first, target.second) if isinstance(target, Pair) else (target, Sink())
    get, get_mask = ctx.reader(a, kind), ctx.reader(mask, "u32")
    put_d, put_p = ctx.writer(d, "u32"), ctx.writer(p, "pred")
    everyone = "all" in ins.opcode

    def run(lanes: Lanes) -> None:
        values = spread(ctx, lanes, np.broadcast_to(get(lanes), lanes.n))
        equal = (values[:, :, None] == values[:, None, :]).reshape(-1, 32)
        bits = pack_warps(equal)[lanes.index]
        members = lanes.warp_bits[ctx.warp_of[lanes.index]] & get_mask(lanes)
        same = bits & members
        if everyone:
            put_d(lanes, np.where(same == members, members, np.uint32(0)))
            put_p(lanes, same == members)
        else:
            put_d(lanes, same)
        order_warps(ctx, lanes)

    return run


_REDUCTIONS: dict[str, tuple[Callable[..., Any], Any]] = {
    "add": (np.add, 0),
    "and": (np.bitwise_and, -1),
    "or": (np.bitwise_or, 0),
    "xor": (np.bitwise_xor, 0),
}


@instruction("redux", scope="warp", member_mask=True, kind="warp")
def redux(ins: Instruction, ctx: Context) -> Run:
    """Reduce over the lanes of a mask, which is the same in all of them."""
    kind = ins.opcode[-1]
    name = next((m for m in ins.opcode if m in _REDUCTIONS or m in ("min", "max")), "")
    if not name:
        raise unsupported(ins)
    d, a, mask = ins.operands
    get, get_mask, put = ctx.reader(a, kind), ctx.reader(mask, "u32"), ctx.writer(d, kind)
    function, neutral = _reduction(name, kind, "NaN" in ins.opcode)
    absolute = "abs" in ins.opcode

    def run(lanes: Lanes) -> None:
        values = np.broadcast_to(get(lanes), lanes.n)
        values = spread(ctx, lanes, np.abs(values) if absolute else values)
        masks = spread(ctx, lanes, np.broadcast_to(get_mask(lanes), lanes.n)).max(axis=1)
        members = unpack_warps(masks & lanes.warp_bits)
        result = function.reduce(np.where(members, values, neutral), axis=1, dtype=DTYPE[kind])
        put(lanes, result[ctx.warp_of[lanes.index]])
        order_warps(ctx, lanes)

    return run


def _reduction(name: str, kind: str, keep_nan: bool) -> tuple[Any, Any]:
    """The ufunc and its neutral element."""
    dtype = DTYPE[kind]
    if name in _REDUCTIONS:
        function, neutral = _REDUCTIONS[name]
        return function, np.array(neutral).astype(dtype)
    low = name == "min"
    if dtype.kind == "f":
        plain = np.minimum if low else np.maximum
        dropping = np.fmin if low else np.fmax
        return (plain if keep_nan else dropping), dtype.type(np.inf if low else -np.inf)
    limits = np.iinfo(dtype)
    return (np.minimum if low else np.maximum), dtype.type(limits.max if low else limits.min)


@instruction("bar.warp.sync", scope="warp", member_mask=True, kind="barrier")
def bar_warp_sync(ins: Instruction, ctx: Context) -> Run:
    """The lanes of the mask wait for each other, which gathering them has already done."""
    return lambda lanes: order_warps(ctx, lanes)
