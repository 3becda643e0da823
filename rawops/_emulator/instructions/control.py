"""Barriers, fences, traps, and functions the device runtime provides."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import BarrierError, EmulatorError
from ..lanes import Lanes, Wait
from ..operands import Imm
from . import Run, instruction, unsupported

if TYPE_CHECKING:
    from ..context import Context
    from ..program import Instruction

_BARRIERS = 16
_FORMAT = re.compile(r"%[-+ #0]*(\*|\d+)?(?:\.(\*|\d+))?(hh|h|ll|l|z|j|t)?([diouxXcsfFeEgGaAp%])")


class Barriers:
    """The sixteen barriers of each resident block. Lanes arrive by whole warps."""

    def __init__(self, ctx: Context) -> None:
        shape = (ctx.R, _BARRIERS)
        self._ctx = ctx
        self.arrived = np.zeros(shape, np.int64)
        self.generation = np.zeros(shape, np.int64)
        self.expected = np.zeros(shape, np.int64)  # 0: the whole block
        self.votes = np.zeros((*shape, 3), np.int64)  # predicates true and arrivals so far; true at the last
        if ctx.races is not None:
            self.clocks = np.zeros((*shape, ctx.races.columns), np.int64)
            self.released = np.zeros_like(self.clocks)

    def needed(self, number: int, blocks: np.ndarray) -> np.ndarray:
        """How many lanes complete the barrier in each of these blocks."""
        ctx = self._ctx
        live = np.count_nonzero(ctx.alive_bits.reshape(ctx.R, ctx.W), axis=1) * 32
        expected = self.expected[blocks, number]
        return np.where(expected > 0, expected, live[blocks])

    def arrive(self, number: int, lanes: Lanes, count: int) -> None:
        """Whole warps arrive; `count` is the number of lanes the barrier is for, 0 for all."""
        ctx = self._ctx
        warps = np.bincount(lanes.warps // ctx.W, minlength=ctx.R)
        blocks = np.flatnonzero(warps)
        self.expected[blocks, number] = count
        self.arrived[blocks, number] += warps[blocks] * 32
        if ctx.races is not None:
            clocks = ctx.races.release(ctx.races.agents(lanes.warps))
            np.maximum.at(self.clocks[:, number], lanes.warps // ctx.W, clocks)
        self.refuse_exited(number, blocks)
        self.complete(number, blocks)

    def complete(self, number: int, blocks: np.ndarray) -> None:
        """Open the barrier where enough have arrived."""
        arrived, needed = self.arrived[blocks, number], self.needed(number, blocks)
        if (arrived > needed).any():
            block = blocks[np.flatnonzero(arrived > needed)[0]]
            raise self._ctx.error(
                BarrierError,
                f"barrier {number} is for {needed.max()} threads, but {arrived.max()} arrived",
                block * self._ctx.T,
            )
        done = blocks[arrived == needed]
        self.arrived[done, number] = 0
        self.generation[done, number] += 1
        self.votes[done, number, 2] = self.votes[done, number, 0]
        self.votes[done, number, :2] = 0
        self._ctx.launch.report.barriers += len(done)
        if self._ctx.races is not None:
            self.released[done, number] = self.clocks[done, number]
            self.clocks[done, number] = 0

    def leave(self, number: int, lanes: Lanes) -> None:
        """Lanes go on: they have seen what all who arrived did."""
        ctx = self._ctx
        if ctx.races is not None:
            warps = lanes.warps
            ctx.races.acquire(ctx.races.agents(warps), self.released[warps // ctx.W, number])

    def refuse_exited(self, number: int, blocks: np.ndarray) -> None:
        """Raise, if checking, for a barrier for the whole block that some threads can no longer reach.

        Hardware lets the barrier open without threads that have exited, which hides the mistake.
        """
        ctx = self._ctx
        if not ctx.launch.check or ctx.alive_count == ctx.exists_count:
            return
        gone = (ctx.exists & ~ctx.alive).reshape(ctx.R, ctx.T)
        waiting = (self.arrived[:, number] > 0) & (self.expected[:, number] == 0)
        bad = np.flatnonzero(gone[blocks].any(axis=1) & waiting[blocks])
        if len(bad):
            block = blocks[bad[0]]
            missing = block * ctx.T + np.flatnonzero(gone[block])
            raise ctx.error(
                BarrierError,
                f"barrier {number} is not reached by all threads: {ctx.describe(Lanes(ctx, missing))} exited before it",
                np.flatnonzero(ctx.alive & (ctx.block_of == block))[0],
            )


@instruction("bar", "barrier", scope="warp", kind="barrier")
def bar(ins: Instruction, ctx: Context) -> Run:
    """Barriers of a block: sync, arrive and red."""
    mode = next((m for m in ins.opcode if m in ("sync", "arrive", "red")), "")
    if not mode or "cluster" in ins.opcode:
        raise unsupported(ins)
    operands = list(ins.operands)
    reduce, put = _reduction(ins, ctx, operands) if mode == "red" else (None, None)
    predicate = ctx.reader(operands.pop(), "pred") if mode == "red" else None
    get_number = ctx.reader(operands[0], "u32")
    get_count = ctx.reader(operands[1] if len(operands) > 1 else Imm(0), "u32")

    def run(lanes: Lanes) -> list[Wait] | None:
        groups = _by_barrier(ctx, lanes, get_number(lanes), get_count(lanes))
        return [wait for group in groups if (wait := arrive(*group))] or None

    def arrive(number: int, count: int, lanes: Lanes) -> Wait | None:
        barriers: Barriers = ctx.state("barriers", lambda: Barriers(ctx))
        if number >= _BARRIERS or count % 32:
            raise ctx.error(BarrierError, f"barrier {number} for {count} threads", lanes.ids[0])
        if predicate is not None:
            _count_votes(ctx, barriers, number, lanes, predicate(lanes))
        before = barriers.generation[:, number].copy()
        barriers.arrive(number, lanes, count)
        if mode == "arrive":
            return None

        def ready(waiting: Lanes) -> np.ndarray:
            barriers.refuse_exited(number, waiting.blocks)
            barriers.complete(number, waiting.blocks[barriers.arrived[waiting.blocks, number] > 0])
            return (barriers.generation[:, number] != before)[ctx.block_of[waiting.ids]]

        def resume(waiting: Lanes) -> None:
            barriers.leave(number, waiting)
            if reduce is not None:
                put(waiting, reduce(barriers.votes[ctx.block_of[waiting.ids], number, 2]))

        passed = (barriers.generation[:, number] != before)[ctx.block_of[lanes.ids]]
        if passed.all():
            resume(lanes)
            return None
        if passed.any():
            resume(lanes.select(passed))
        return Wait(lanes.select(~passed), ready, lambda waiting: _why(ctx, barriers, number, waiting), resume)

    return run


def _why(ctx: Context, barriers: Barriers, number: int, lanes: Lanes) -> str:
    block = lanes.blocks[:1]
    needed = int(barriers.needed(number, block)[0])
    return f"barrier {number} ({int(barriers.arrived[block[0], number])} of {needed} threads arrived)"


def _by_barrier(ctx: Context, lanes: Lanes, numbers: Any, counts: Any) -> list[tuple[int, int, Lanes]]:
    """Number and count of each barrier that warps of a group are at, and those warps."""
    if not np.ndim(numbers) and not np.ndim(counts):
        return [(int(numbers), int(counts), lanes)]
    keys = np.broadcast_to(numbers, lanes.n).astype(np.uint64) << np.uint64(32) | counts
    groups = []
    for key in np.unique(keys).tolist():
        group = lanes.select(keys == key)
        if not group.whole_warps:
            raise ctx.error(BarrierError, "barrier number or count differs inside a warp", group.ids[0])
        groups.append((key >> 32, key & 0xFFFFFFFF, group))
    return groups


def _reduction(ins: Instruction, ctx: Context, operands: list[Any]) -> tuple[Any, Any]:
    """What bar.red makes of the number of true predicates."""
    mode = next(m for m in ins.opcode if m in ("popc", "and", "or"))
    put = ctx.writer(operands.pop(0), "u32" if mode == "popc" else "pred")
    return {"popc": lambda n: n, "or": lambda n: n > 0, "and": lambda n: n == ctx.launch.threads}[mode], put


def _count_votes(ctx: Context, barriers: Barriers, number: int, lanes: Lanes, predicate: Any) -> None:
    true = lanes.ids[np.broadcast_to(predicate, lanes.n)]
    barriers.votes[:, number, 0] += np.bincount(ctx.block_of[true], minlength=ctx.R)


@instruction("fence", "membar", kind="barrier")
def fence(ins: Instruction, ctx: Context) -> Run:
    """Memory here is always in order; the race checks note what a fence publishes."""
    if ctx.races is None:
        return lambda lanes: None
    races = ctx.races
    publish = races.fence_inits if "mbarrier_init" in ins.opcode else races.fence
    return lambda lanes: publish(races.agents(lanes.warps))


@instruction("nanosleep", "griddepcontrol", "brkpt", "pmevent", kind="control")
def nothing(ins: Instruction, ctx: Context) -> Run:
    """No effect on results."""
    return lambda lanes: None


@instruction("trap", kind="control")
def trap(ins: Instruction, ctx: Context) -> Run:
    """Abort the launch."""

    def run(lanes: Lanes) -> None:
        raise ctx.error(EmulatorError, "the kernel executed a trap", lanes.ids[0])

    return run


@instruction("bra", "brx", "call", "ret", "exit", kind="control")
def control_flow(ins: Instruction, ctx: Context) -> Run:
    """Executed by the machine; registered for the report."""
    raise unsupported(ins, "control flow has no closure")


# ---- functions of the device runtime -------------------------------------------------------------------


def _argument(ctx: Context, lanes: Lanes, name: str) -> np.ndarray:
    """A function's 4- or 8-byte argument, from its parameter variable."""
    variable = ctx.program.variables[name]
    where = np.full(lanes.n, variable.address, np.uint64)
    return ctx.space("local").load(where, variable.size, lanes.ids)


def _text(ctx: Context, address: int, lane: int) -> str:
    """A zero-terminated string at a generic address."""
    owner = np.array([lane])
    octets = bytearray()
    while True:
        at = np.array([address + len(octets)], np.uint64)
        octet = int(ctx.space("generic").load(at, 1, owner)[0])
        if not octet:
            return octets.decode(errors="replace")
        octets.append(octet)


def _printf(ctx: Context, lanes: Lanes, arguments: list[str], results: list[str]) -> None:
    """Format and print, a lane at a time in order."""
    formats, buffers = (_argument(ctx, lanes, name) for name in arguments)
    for lane, format_at, buffer in zip(lanes.ids.tolist(), formats.tolist(), buffers.tolist(), strict=True):
        sys.stdout.write(_formatted(ctx, _text(ctx, format_at, lane), buffer, lane))


def _formatted(ctx: Context, text: str, buffer: int, lane: int) -> str:
    """C formatting with arguments packed in a buffer at their natural alignment."""
    generic, owner = ctx.space("generic"), np.array([lane])
    position = buffer

    def take(dtype: type[np.generic]) -> Any:
        nonlocal position
        size = np.dtype(dtype).itemsize
        position = -(-position // size) * size
        value = generic.load(np.array([position], np.uint64), size, owner).view(dtype)[0]
        position += size
        return value.item()

    def convert(match: re.Match[str]) -> str:
        width, precision, length, letter = match.groups()
        if letter == "%":
            return "%"
        spec = match[0].replace(length or "", "") if length else match[0]
        for star in (width, precision):
            if star == "*":
                spec = spec.replace("*", str(take(np.int32)), 1)
        wide = length in ("l", "ll", "z", "j", "t")
        if letter in "di":
            return spec % take(np.int64 if wide else np.int32)
        if letter in "ouxX":
            return spec.replace("u", "d") % take(np.uint64 if wide else np.uint32)
        if letter == "c":
            return spec % chr(take(np.int32) & 0xFF)
        if letter == "s":
            return spec % _text(ctx, take(np.uint64), lane)
        if letter == "p":
            return f"0x{take(np.uint64):x}"
        return spec % take(np.float64) if letter not in "aA" else take(np.float64).hex()

    return _FORMAT.sub(convert, text)


def _assert_fail(ctx: Context, lanes: Lanes, arguments: list[str], results: list[str]) -> None:
    """A failed assert()."""
    lane = int(lanes.ids[0])
    message, file, line = (int(_argument(ctx, lanes, name)[0]) for name in arguments[:3])
    where = f"{_text(ctx, file, lane)}:{line}"
    raise ctx.error(EmulatorError, f"assertion failed: {_text(ctx, message, lane)} ({where})", lane)


BUILTINS: dict[str, Callable[[Any, Lanes, list[str], list[str]], None]] = {
    "vprintf": _printf,
    "__assertfail": _assert_fail,
}
