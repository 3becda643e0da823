"""Instructions bound to a context, ready to run, and how they group into basic blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from ..errors import BarrierError
from .instructions import Run, lookup
from .lanes import Lanes, Wait, lanes_text, pack_warps
from .operands import Imm, Not, Operand, Reg, Rows

if TYPE_CHECKING:
    from .context import Context
    from .program import Instruction, Program

_TERMINATORS = frozenset({"bra", "brx", "call", "ret", "exit"})
_STRONG = frozenset({"volatile", "relaxed", "acquire"})

# How few instructions are worth running as one, and up to how many values: temporaries beyond 128 KiB, which the
# allocator gets from the system one by one, cost more than the calls saved.
_MIN_FUSED = 4
_MAX_FUSED_VALUES = 8192


@dataclass(slots=True, eq=False)
class Step:
    """An instruction bound to a context.

    Attributes
    ----------
    run : callable
        Executes it. For lane-scope instructions the guard is inside.
    guard : callable or None
        For the others: the lanes' guard values.
    complete : callable or None
        For the others: which lanes of a group have all partners in it.
    members : callable or None
        For those with a member mask: the lanes' masks.
    length : int
        How many instructions it stands for.
    """

    ins: Instruction
    run: Run
    guard: Callable[[Lanes], np.ndarray] | None = None
    complete: Callable[[Lanes], np.ndarray] | None = None
    members: Callable[[Lanes], np.ndarray] | None = None
    length: int = 1


def bind(code: list[Instruction], index: int, end: int, ctx: Context) -> Step:
    """Make the closure of the instruction at an index, and what decides when its lanes are complete.

    Those that follow it in its basic block, which ends at `end`, go into the same step if they do the same to
    other registers, as in an unrolled loop.
    """
    ins = code[index]
    entry = lookup(ins)
    most = _MAX_FUSED_VALUES // ctx.L
    if entry.fuses and most >= _MIN_FUSED and _begins_alike(code[index : min(end, index + _MIN_FUSED)]):
        like = _alike(code[index : min(end, index + most)])
        if len(like) >= _MIN_FUSED:
            return Step(ins, entry.binder(_fused(like), ctx), length=len(like))
    run = entry.binder(ins, ctx)
    guard = None if ins.guard is None else guard_of(ins, ctx)
    if entry.scope == "lane":
        return Step(ins, run if guard is None else _guarded(run, guard))
    if entry.scope == "warpgroup":
        return Step(ins, run, guard, lambda lanes: lanes.in_whole_groups)
    if not entry.member_mask:
        return Step(ins, run, guard, _whole_warps(ctx))
    members = ctx.reader(ins.operands[-1], "u32")
    if ctx.launch.check:
        run = _members_checked(run, members, ctx)
    return Step(ins, run, guard, _whole_masks(ctx, members), members)


def _begins_alike(code: list[Instruction]) -> bool:
    """Whether it is worth looking how many may run at once."""
    opcode = code[0].opcode
    return len(code) == _MIN_FUSED and all(ins.opcode == opcode for ins in code)


def _alike(code: list[Instruction]) -> list[Instruction]:
    """The first instructions that may run at once: the same but for registers, none using another's result."""
    first = code[0]
    written: set[Operand] = set()
    for count, ins in enumerate(code):
        if ins.opcode != first.opcode or ins.guard is not None or "cc" in ins.opcode:
            return code[:count]
        target, *sources = ins.operands
        same_form = all(
            isinstance(op, Reg) if isinstance(model, Reg) else isinstance(model, Imm) and op == model
            for op, model in zip(ins.operands, first.operands, strict=True)
        )
        if not same_form or target in written or not written.isdisjoint(sources):
            return code[:count]
        written.add(target)
    return code


def _fused(code: list[Instruction]) -> Instruction:
    """One instruction for several that are alike."""
    columns = zip(*(ins.operands for ins in code), strict=True)
    return replace(code[0], operands=tuple(Rows(c) if isinstance(c[0], Reg) else c[0] for c in columns))


def guard_of(ins: Instruction, ctx: Context) -> Callable[[Lanes], np.ndarray]:
    """Reader of the instruction's guard, which it must have."""
    assert ins.guard is not None
    register, negated = ins.guard
    return ctx.reader(Not(register) if negated else register, "pred")


def is_terminator(ins: Instruction) -> bool:
    """Whether the instruction ends a basic block by itself."""
    return ins.opcode[0] in _TERMINATORS


@lru_cache(64)
def basic_blocks(program: Program) -> tuple[list[int], list[int]]:
    """For each instruction, the end of its basic block (its terminator, or the next block's start), and how
    many before it read memory that another thread may be about to change."""
    code = program.instructions
    starts = {target for ins in code for target in ins.targets}
    ends, end = [0] * len(code), len(code)
    for index in range(len(code) - 1, -1, -1):
        if is_terminator(code[index]):
            end = index
        elif index + 1 in starts:
            end = index + 1
        ends[index] = end
    return ends, [0, *accumulate(map(_polls, code))]


def _polls(ins: Instruction) -> bool:
    name = ins.opcode[0]
    if name == "ld":
        return bool(_STRONG & set(ins.opcode))
    return name in ("atom", "nanosleep") or ins.opcode[:2] == ("mbarrier", "test_wait")


def _guarded(run: Run, guard: Callable[[Lanes], np.ndarray]) -> Run:
    def run_guarded(lanes: Lanes) -> list[Wait] | None:
        on = guard(lanes)
        if on.all():
            return run(lanes)
        return run(lanes.select(on)) if on.any() else None

    return run_guarded


def _whole_warps(ctx: Context) -> Callable[[Lanes], np.ndarray]:
    def complete(lanes: Lanes) -> np.ndarray:
        return (ctx.alive_bits & ~lanes.warp_bits)[ctx.warp_of.take(lanes.ids)] == 0

    return complete


def _whole_masks(ctx: Context, members: Callable[[Lanes], np.ndarray]) -> Callable[[Lanes], np.ndarray]:
    def complete(lanes: Lanes) -> np.ndarray:
        missing = ctx.alive_bits & ~lanes.warp_bits
        return (missing[ctx.warp_of.take(lanes.ids)] & members(lanes)) == 0

    return complete


def _members_checked(run: Run, members: Callable[[Lanes], np.ndarray], ctx: Context) -> Run:
    """Refuse masks that leave out the lane itself, or name lanes that have exited."""

    def run_checked(lanes: Lanes) -> list[Wait] | None:
        mask = np.broadcast_to(members(lanes), lanes.n)
        outside = (mask >> ctx.lane_of[lanes.index].astype(np.uint32)) & 1 == 0
        if outside.any():
            at = int(np.flatnonzero(outside)[0])
            raise ctx.error(BarrierError, f"the member mask 0x{mask[at]:08x} leaves out the lane itself", lanes.ids[at])
        if ctx.alive_count != ctx.exists_count:
            exited = pack_warps(ctx.exists & ~ctx.alive)[ctx.warp_of[lanes.index]] & mask
            if exited.any():
                at = int(np.flatnonzero(exited)[0])
                message = f"the member mask 0x{mask[at]:08x} names {lanes_text(int(exited[at]))} that exited before it"
                raise ctx.error(BarrierError, message, lanes.ids[at])
        return run(lanes)

    return run_checked
