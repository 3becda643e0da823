"""Instructions bound to a context, ready to run, and how they group into basic blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .instructions import Run, lookup
from .lanes import Lanes, Wait
from .operands import Not, Operand

if TYPE_CHECKING:
    from .context import Context
    from .parser import Instruction

_TERMINATORS = frozenset({"bra", "brx", "call", "ret", "exit"})
_STRONG = frozenset({"volatile", "relaxed", "acquire"})


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
    """

    ins: Instruction
    run: Run
    guard: Callable[[Lanes], np.ndarray] | None = None
    complete: Callable[[Lanes], np.ndarray] | None = None


def bind(ins: Instruction, ctx: Context) -> Step:
    """Make the closure of an instruction, and what decides when its lanes are complete."""
    entry = lookup(ins)
    run = entry.binder(ins, ctx)
    guard = None if ins.guard is None else guard_of(ins, ctx)
    if entry.scope == "lane":
        return Step(ins, run if guard is None else _guarded(run, guard))
    if entry.scope == "warpgroup":
        return Step(ins, run, guard, lambda lanes: lanes.in_whole_groups)
    complete = _members(ctx, ins.operands[-1]) if entry.member_mask else _whole_warps(ctx)
    return Step(ins, run, guard, complete)


def guard_of(ins: Instruction, ctx: Context) -> Callable[[Lanes], np.ndarray]:
    """Reader of the instruction's guard, which it must have."""
    assert ins.guard is not None
    register, negated = ins.guard
    return ctx.reader(Not(register) if negated else register, "pred")


def is_terminator(ins: Instruction) -> bool:
    """Whether the instruction ends a basic block by itself."""
    return ins.opcode[0] in _TERMINATORS


def basic_blocks(code: list[Instruction]) -> tuple[list[int], list[bool]]:
    """For each instruction, the end of its basic block (its terminator, or the next block's start), and
    whether anything from there to the end reads memory that another thread may be about to change."""
    starts = {target for ins in code for target in ins.targets}
    ends, polls = [0] * len(code), [False] * len(code)
    end, poll = len(code), False
    for index in range(len(code) - 1, -1, -1):
        ins = code[index]
        if ins.opcode[0] in _TERMINATORS:
            end, poll = index, False
        elif index + 1 in starts:
            end, poll = index + 1, False
        poll = poll or _polls(ins)
        ends[index], polls[index] = end, poll
    return ends, polls


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


def _members(ctx: Context, operand: Operand) -> Callable[[Lanes], np.ndarray]:
    mask = ctx.reader(operand, "u32")

    def complete(lanes: Lanes) -> np.ndarray:
        missing = ctx.alive_bits & ~lanes.warp_bits
        return (missing[ctx.warp_of.take(lanes.ids)] & mask(lanes)) == 0

    return complete
