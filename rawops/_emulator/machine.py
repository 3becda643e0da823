"""The scheduler: which lanes execute which instruction next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from enum import Enum, auto
from typing import TYPE_CHECKING

import numpy as np

from ..errors import BarrierError, EmulatorError
from .context import Context
from .instructions import lookup, unsupported
from .instructions.control import BUILTINS
from .lanes import Lanes, Wait, lanes_text
from .operands import Group, Sym
from .program import Instruction
from .steps import Step, basic_blocks, bind, guard_of, is_terminator

if TYPE_CHECKING:
    from .launch import Launch

# Rounds in which all that can run only polls memory, before other blocks get their turn.
_PATIENCE = 16
# Basic blocks that run before all lanes get their turn, also beside a loop that is not known to poll.
_SLICE = 1024

Key = tuple[int, int]  # group, index of the next instruction


class State(Enum):
    """Why a machine gave up its turn."""

    DONE = auto()
    SPINNING = auto()


class Machine:
    """Runs the blocks of one context.

    Lanes at the same instruction form a front. The front with the lowest program counter runs, to the end
    of its basic block: this brings structured control flow together again by itself. Instructions of warp
    scope gather their partners first; waiting lanes are looked at when nothing else can run.

    With a random order, fronts never span warps (warpgroups where the kernel uses them), and which one runs
    is drawn.
    """

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self._code = ctx.program.instructions
        self._steps: list[Step | None] = [None] * len(self._code)
        self._ends, self._polls_before = basic_blocks(ctx.program)
        self._fronts: dict[Key, Lanes] = {}
        self._gathering: dict[Key, Lanes] = {}
        self._waiting: list[tuple[int, Wait]] = []
        self._gave_up_at = -1  # launch.progress when waits last ended for want of time
        self._yielded: dict[Key, Lanes] = {}
        self._ran = 0  # basic blocks since those that yielded had their turn
        self._returns: dict[str, np.ndarray] = {}
        self._branches: dict[int, Callable[[Lanes], np.ndarray]] = {}
        self._group_of: np.ndarray | None = None
        if ctx.launch.rng is not None:
            wide = any(lookup(ins).scope == "warpgroup" for ins in self._code if ins.opcode[0] == "wgmma")
            self._group_of = ctx.block_of * -(-ctx.W // 4) + ctx.thread_of // 128 if wide else ctx.warp_of

    def attach(self, launch: Launch) -> None:
        """Serve another launch; what is bound stays."""
        self.ctx.attach(launch)
        self._gave_up_at = -1

    def start(self, blocks: np.ndarray) -> None:
        """Take up a batch of blocks."""
        self._push(self.ctx.program.entry.start, self.ctx.start(blocks))

    def turn(self) -> State:
        """Run until all blocks are done or nothing but polling goes on."""
        launch = self.ctx.launch
        rounds = 0
        progress = launch.progress
        while True:
            if not self._fronts:
                overdue = self._ran > _SLICE
                if not self._poll() and not self._yielded and not self._give_up():
                    if self.ctx.alive_count:
                        raise self._deadlock()
                    self.ctx.finish()
                    return State.DONE
                if overdue or not self._fronts:
                    rounds = rounds + 1 if launch.progress == progress and not overdue else 0
                    progress = launch.progress
                    self._release()
                    if rounds > _PATIENCE:
                        return State.SPINNING
            key = self._choose()
            self._run(key[1], self._fronts.pop(key))

    def registers(self) -> int:
        """Return a hash of all registers: a turn without progress that leaves them as they were leads nowhere."""
        return hash(tuple(bits.tobytes() for bits in self.ctx.registers.values()))

    def _release(self) -> None:
        """Those that let others run first have their turn."""
        yielded, self._yielded = self._yielded, {}
        for key, lanes in yielded.items():
            _merge(self._fronts, key, lanes)
        self._ran = 0

    # ---- fronts --------------------------------------------------------------------------------------

    def _choose(self) -> Key:
        rng = self.ctx.launch.rng
        if rng is None:
            return min(self._fronts)
        groups = sorted({group for group, _ in self._fronts})
        group = groups[rng.integers(len(groups))]
        return min(key for key in self._fronts if key[0] == group)

    def _push(self, index: int, lanes: Lanes) -> None:
        """These lanes stand at an instruction."""
        if self._group_of is None:
            _merge(self._fronts, (0, index), lanes)
            return
        groups = self._group_of[lanes.ids]
        for group in np.unique(groups).tolist():
            _merge(self._fronts, (group, index), lanes.select(groups == group))

    def _run(self, index: int, lanes: Lanes) -> None:
        """Run a front until it ends, waits, splits, or another one has to be considered."""
        if lanes.n == self.ctx.alive_count:  # others may have exited since the group was made
            lanes = self.ctx.everyone
        while True:
            self._ran += 1
            left = self._straight(index, lanes)
            if left is None:
                return
            end = self._ends[index]
            fronts = self._end_of_block(end, left)
            if len(fronts) != 1 or self._fronts or self._yields(fronts[0][0], end):
                for target, group in fronts:
                    self._go(target, group, self._yields(target, end))
                return
            ((index, lanes),) = fronts

    def _yields(self, target: int, end: int) -> bool:
        """Whether lanes that jump let others run first: back over a poll of memory, or back after a long time."""
        polls = self._polls_before
        return target <= end and (polls[target] < polls[end] or self._ran > _SLICE)

    def _go(self, target: int, lanes: Lanes, yields: bool) -> None:
        """A front goes on elsewhere."""
        if not yields:
            self._push(target, lanes)
            return
        group = 0 if self._group_of is None else int(self._group_of[lanes.ids[0]])
        _merge(self._yielded, (group, target), lanes)

    def _straight(self, index: int, lanes: Lanes) -> Lanes | None:
        """Execute from `index` to the end of the basic block; returns the lanes that arrive there."""
        ctx, steps, end = self.ctx, self._steps, self._ends[index]
        start = index
        while index < end:
            step = steps[index] or self._bind(index)
            ctx.current = step.ins
            ready: Lanes | None = lanes
            if step.complete is not None:
                ready = self._gather(index, lanes, step)
                if ready is not lanes:
                    self._count(start, index, lanes)
                    if ready is None:
                        return None
                    start, lanes = index, ready
            waits = step.run(lanes)
            index += step.length
            if waits is not None:
                self._count(start, index, lanes)
                for wait in waits:
                    self._waiting.append((index, wait))
                    lanes = lanes.without(wait.lanes)
                if not lanes.n:
                    return None
                start = index
        self._count(start, end, lanes)
        return lanes

    def _count(self, start: int, end: int, lanes: Lanes) -> None:
        launch = self.ctx.launch
        launch.report.ran(start, end, lanes.warp_count)
        launch.steps += end - start
        if launch.steps > launch.max_steps:
            message = f"the launch goes on after {launch.max_steps} steps: does this loop end?"
            raise self.ctx.error(EmulatorError, message, lanes.ids[0])

    # ---- instructions --------------------------------------------------------------------------------

    def _bind(self, index: int) -> Step:
        self.ctx.current = self._code[index]
        step = self._steps[index] = bind(self._code, index, self._ends[index], self.ctx)
        return step

    def _gather(self, index: int, lanes: Lanes, step: Step) -> Lanes | None:
        """Lanes that may execute a warp-scope instruction now; others go past it or wait for partners."""
        if step.guard is not None:
            on = np.broadcast_to(step.guard(lanes), lanes.n)
            if not on.all():
                self._push(index + 1, lanes.select(~on))
                if not on.any():
                    return None
                lanes = lanes.select(on)
        if lanes.full and not self._gathering:
            return lanes
        key = (0 if self._group_of is None else int(self._group_of[lanes.ids[0]]), index)
        before = self._gathering.pop(key, None)
        if before is not None:
            lanes = lanes.merge(before)
        assert step.complete is not None
        complete = step.complete(lanes)
        if complete.all():
            return lanes
        self._gathering[key] = lanes.select(~complete)
        return lanes.select(complete) if complete.any() else None

    def _poll(self) -> bool:
        """Let waiting lanes go on that can. Returns whether any did."""
        moved = False
        waiting, self._waiting = self._waiting, []
        for index, wait in waiting:
            self.ctx.current = self._code[index - 1]
            ready = wait.ready(wait.lanes)
            if ready.any():
                moved = True
                lanes = wait.lanes.select(ready)
                if wait.resume is not None:
                    wait.resume(lanes)
                self._push(index, lanes)
                if lanes is wait.lanes:
                    continue
                wait = replace(wait, lanes=wait.lanes.select(~ready))
            self._waiting.append((index, wait))
        for key, lanes in list(self._gathering.items()):
            step = self._steps[key[1]]
            assert step is not None and step.complete is not None
            if step.complete(lanes).any():
                moved = True
                del self._gathering[key]
                _merge(self._fronts, key, lanes)
        return moved

    def _give_up(self) -> bool:
        """Let waits that may end by themselves do so, once for each time that something has changed."""
        if self.ctx.launch.progress == self._gave_up_at:
            return False
        self._gave_up_at = self.ctx.launch.progress
        waiting, self._waiting = self._waiting, []
        for index, wait in waiting:
            if wait.give_up is None:
                self._waiting.append((index, wait))
            else:
                wait.give_up(wait.lanes)
                self._push(index, wait.lanes)
        return bool(self._fronts)

    # ---- control flow --------------------------------------------------------------------------------

    def _end_of_block(self, end: int, lanes: Lanes) -> list[tuple[int, Lanes]]:
        """Where the lanes go from the end of a basic block."""
        ins = self._code[end] if end < len(self._code) else None
        if ins is None or not is_terminator(ins):
            return [(end, lanes)]
        ctx = self.ctx
        ctx.current = ins
        self._count(end, end + 1, lanes)
        taken, rest = lanes, None
        if ins.guard is not None:
            on = self._branch_guard(ins)(lanes)
            if not on.all():
                if not on.any():
                    return [(end + 1, lanes)]
                taken, rest = lanes.select(on), lanes.select(~on)
                split = np.count_nonzero((taken.warp_bits != 0) & (rest.warp_bits != 0))
                ctx.launch.report.diverged(end, int(split))
        fronts = self._leave(ins, taken)
        if rest is not None:
            # Exits above may have left the rest as everybody there is.
            fronts.append((end + 1, ctx.everyone if rest.n == ctx.alive_count else rest))
        return fronts

    def _branch_guard(self, ins: Instruction) -> Callable[[Lanes], np.ndarray]:
        get = self._branches.get(ins.index)
        if get is None:
            get = self._branches[ins.index] = guard_of(ins, self.ctx)
        return get

    def _leave(self, ins: Instruction, lanes: Lanes) -> list[tuple[int, Lanes]]:
        """Take the branch, call or return."""
        match ins.opcode[0]:
            case "bra":
                return self._jump(ins.targets[0], lanes)
            case "brx":
                choice = self.ctx.reader(ins.operands[0], "u32")(lanes)
                choice = np.broadcast_to(choice, lanes.n)
                return [(ins.targets[i], lanes.select(choice == i)) for i in np.unique(choice).tolist()]
            case "call":
                return self._call(ins, lanes)
        if self._exits(ins):
            self.ctx.kill(lanes)
            return []
        return self._return(ins, lanes)

    def _jump(self, target: int, lanes: Lanes) -> list[tuple[int, Lanes]]:
        """Go to a label. Lanes that would only exit there do so at once, which leaves the others whole."""
        there = self._code[target]
        if there.guard is None and self._exits(there):
            self._count(target, target + 1, lanes)
            self.ctx.kill(lanes)
            return []
        return [(target, lanes)]

    def _exits(self, ins: Instruction) -> bool:
        """Whether the instruction ends the thread."""
        name = ins.opcode[0]
        return name == "exit" or (name == "ret" and self.ctx.program.functions[ins.function].entry)

    def _call(self, ins: Instruction, lanes: Lanes) -> list[tuple[int, Lanes]]:
        results, name, arguments = _call_operands(ins)
        if not ins.targets:
            builtin = BUILTINS.get(name)
            if builtin is None:
                raise unsupported(ins, f"call of {name or 'a function pointer'}")
            builtin(self.ctx, lanes, [a.name for a in arguments], [r.name for r in results])
            return [(ins.index + 1, lanes)]
        returns = self._returns.setdefault(name, np.full(self.ctx.L, -1))
        if (returns[lanes.ids] >= 0).any():
            raise unsupported(ins, "recursion")
        returns[lanes.ids] = ins.index + 1
        for argument, parameter in zip(arguments, self.ctx.program.functions[name].params, strict=True):
            self._copy(argument.name, parameter.name, lanes)
        return [(ins.targets[0], lanes)]

    def _return(self, ins: Instruction, lanes: Lanes) -> list[tuple[int, Lanes]]:
        returns = self._returns[ins.function]
        where = returns[lanes.ids]
        returns[lanes.ids] = -1
        fronts = []
        for target in np.unique(where).tolist():
            group = lanes.select(where == target)
            results = _call_operands(self._code[target - 1])[0]
            for value, result in zip(self.ctx.program.functions[ins.function].returns, results, strict=True):
                self._copy(value.name, result.name, group)
            fronts.append((target, group))
        return fronts

    def _copy(self, source: str, target: str, lanes: Lanes) -> None:
        """Copy a parameter, which lives in per-thread memory."""
        ctx = self.ctx
        local, variables = ctx.space("local"), ctx.program.variables
        first, last = variables[source], variables[target]
        for at in range(min(first.size, last.size)):
            data = local.load(np.full(lanes.n, first.address + at, np.uint64), 1, lanes.ids)
            local.store(np.full(lanes.n, last.address + at, np.uint64), data, lanes.ids)

    # ---- deadlock ------------------------------------------------------------------------------------

    def _deadlock(self) -> EmulatorError:
        first = self._gathering or self._waiting
        if isinstance(first, dict):
            (_, index), lanes = next(iter(first.items()))
        else:
            index, lanes = first[0][0] - 1, first[0][1].lanes
        message = f"deadlock, these threads wait for ever:\n{self.describe()}"
        return self.ctx.error(BarrierError, message, lanes.ids[0], self._code[index])

    def describe(self) -> str:
        """Where everybody waits, a line for each group."""
        ctx = self.ctx
        lines = [
            f"    {self._code[index].place}: {ctx.describe(lanes)} at {'.'.join(self._code[index].opcode)}"
            f"{self._partners(index, lanes)} do not reach (divergent branch)"
            for (_, index), lanes in self._gathering.items()
        ]
        lines += [
            f"    {self._code[index - 1].place}: {ctx.describe(wait.lanes)} at {wait.why(wait.lanes)}"
            for index, wait in self._waiting
        ]
        lines += [
            f"    {self._code[index].place}: {ctx.describe(lanes)} polling memory that nobody changes"
            for (_, index), lanes in (*self._yielded.items(), *self._fronts.items())
        ]
        return "\n".join(lines)

    def _partners(self, index: int, lanes: Lanes) -> str:
        """Whom the first of the lanes that gather at an instruction lacks."""
        step, warp = self._steps[index], lanes.warps[0]
        if step is None or step.members is None:
            return ", which the other threads of the warp"
        mask = int(np.broadcast_to(step.members(lanes), lanes.n)[0])
        missing = int(self.ctx.alive_bits[warp] & ~lanes.warp_bits[warp]) & mask
        return f" with member mask 0x{mask:08x}, which {lanes_text(missing)} of the warp"


def _merge(fronts: dict[Key, Lanes], key: Key, lanes: Lanes) -> None:
    there = fronts.get(key)
    fronts[key] = lanes if there is None else there.merge(lanes)


def _call_operands(ins: Instruction) -> tuple[list[Sym], str, list[Sym]]:
    """Result variables, function name and argument variables of a call."""
    groups = [op for op in ins.operands if isinstance(op, Group)]
    names = [op for op in ins.operands if isinstance(op, Sym)]
    leading = isinstance(ins.operands[0], Group)
    results = list(groups.pop(0).items) if leading else []
    arguments = list(groups[0].items) if groups else []
    return results, names[0].name if names else "", arguments  # type: ignore[return-value]
