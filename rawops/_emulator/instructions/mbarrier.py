"""mbarrier objects in shared memory, and the asynchronous operations that complete on them.

An object lives beside the 8 bytes it stands for. Asynchronous operations that will arrive or complete
transactions on it are *deferred*: they take place when someone waits for the phase and nothing but them is
outstanding. A wait that finds its phase incomplete parks its lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ...errors import BarrierError, EmulatorError, RaceError
from ..lanes import Lanes, Wait
from ..operands import Mem
from ..program import Instruction
from ..spaces import WINDOWS
from . import Run, instruction, options

if TYPE_CHECKING:
    from ..context import Context

_SCOPES = "cta cluster"
_SPACES = "shared shared::cta shared::cluster"
_STATE_SHIFT = 20  # a state token is phase << 20 | pending arrivals
_MAX_COUNT = (1 << _STATE_SHIFT) - 1


@dataclass(slots=True)
class Deferred:
    """An asynchronous operation in flight: what it will count, and `land`, which carries it out.

    `land` returns the clock that whoever waits for the phase acquires, or None without race checks.
    """

    arrivals: int
    nbytes: int
    land: Callable[[], np.ndarray | None]


@dataclass(slots=True)
class Barrier:
    """One mbarrier object.

    Attributes
    ----------
    expected, pending : int
        Arrivals that each phase takes; those that the present one still lacks.
    tx : int
        Bytes expected and not yet completed (less than 0 while a copy is ahead of its expect_tx).
    phase : int
        Phases completed so far.
    arriving, done : ndarray or None
        Clocks of the arrivals so far, and those of the last completed phase.
    """

    name: str
    expected: int
    maker: int
    made: int
    pending: int = 0
    tx: int = 0
    phase: int = 0
    arriving: np.ndarray | None = None
    done: np.ndarray | None = None
    deferred: list[Deferred] = field(default_factory=list)

    def arrive(self, count: int, clock: np.ndarray | None = None) -> bool:
        """Count arrivals; False if there are more than the phase lacks."""
        if count > self.pending:
            return False
        self._learn(clock)
        self.pending -= count
        self._turn()
        return True

    def complete(self, nbytes: int) -> None:
        """Count `nbytes` of transactions as completed."""
        self.tx -= nbytes
        self._turn()

    def defer(self, operation: Deferred, early: bool) -> None:
        """Take up an operation in flight, or carry it out at once."""
        if not early:
            self.deferred.append(operation)
            return
        self._learn(operation.land())
        self.pending -= operation.arrivals
        self.tx -= operation.nbytes
        self._turn()

    def poll(self) -> None:
        """Carry out the deferred operations if nothing else is outstanding."""
        deferred = self.deferred
        if deferred and self.pending == sum(d.arrivals for d in deferred):
            if self.tx != sum(d.nbytes for d in deferred):
                return
            self.deferred = []
            for operation in deferred:
                self._learn(operation.land())
            self.pending = self.tx = 0
            self._turn()

    def _learn(self, clock: np.ndarray | None) -> None:
        if clock is not None:
            self.arriving = clock if self.arriving is None else np.maximum(self.arriving, clock)

    def _turn(self) -> None:
        if self.pending == 0 and self.tx == 0:
            self.phase += 1
            self.pending = self.expected
            self.done = self.arriving

    def __str__(self) -> str:
        flying = sum(d.nbytes for d in self.deferred)
        return (
            f"{self.name} (phase {self.phase} lacks {self.pending} of {self.expected} arrivals and "
            f"{self.tx} bytes, of which {flying} are in flight)"
        )


class Barriers:
    """The barrier objects of the resident blocks, by byte index in shared memory."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self.at: dict[int, Barrier] = {}

    def finish(self) -> None:
        """Refuse copies that were still to land when their blocks had exited."""
        for barrier in self.at.values():
            if barrier.deferred:
                message = f"the block exited with copies to its shared memory in flight at {barrier}"
                raise self._ctx.error(BarrierError, message, barrier.maker)


def _table(ctx: Context) -> dict[int, Barrier]:
    return ctx.state("mbarrier", lambda: Barriers(ctx)).at


def shared_address(ctx: Context, ins: Instruction, mem: Mem):
    """``get(lanes)``: shared addresses of an operand that is generic unless the opcode names the space."""
    get = ctx.address(mem)
    if any(token in _SPACES.split() for token in ins.opcode):
        return get
    return lambda lanes: get(lanes) - np.uint64(WINDOWS["shared"])


def barriers(ctx: Context, addresses: np.ndarray, ids: np.ndarray) -> Iterator[tuple[Barrier, np.ndarray]]:
    """The barriers at the addresses of some lanes, each with the positions of its lanes."""
    flat = ctx.shared.flat(addresses, 8, ids)
    table = _table(ctx)
    for key, positions in _groups(flat):
        barrier = table.get(key)
        lane = int(ids[positions[0]])
        if barrier is None:
            raise ctx.error(BarrierError, f"no mbarrier was initialised at 0x{int(addresses[positions[0]]):x}", lane)
        if ctx.races is not None:
            _check_made(ctx, barrier, lane)
        yield barrier, positions


def _groups(keys: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Each distinct key with the positions where it stands."""
    if (keys == keys[0]).all():
        yield int(keys[0]), np.arange(len(keys))
        return
    for key in np.unique(keys):
        yield int(key), np.flatnonzero(keys == key)


def _check_made(ctx: Context, barrier: Barrier, lane: int) -> None:
    """Refuse a use that nothing orders after mbarrier.init."""
    races = ctx.races
    agent, maker = races.agent_of[lane], races.column(races.agent_of[barrier.maker])
    if lane != barrier.maker and max(races.seen[agent, maker], races.inits_seen[agent, maker]) < barrier.made:
        raise ctx.error(RaceError, f"{barrier.name} is used without being ordered after its mbarrier.init", lane)


def released(ctx: Context, ids: np.ndarray) -> np.ndarray | None:
    """What the lanes' present clocks tell whoever synchronises with them."""
    if ctx.races is None:
        return None
    return clock_of(ctx, np.unique(ctx.races.agent_of[ids]))


def clock_of(ctx: Context, agents: np.ndarray) -> np.ndarray:
    """The agents' clocks, to be kept: an engine that has done nothing so far has been seen up to now."""
    return np.minimum(ctx.races.release(agents).max(axis=0), ctx.races.now)


@instruction("mbarrier.init", kind="barrier")
def init(ins: Instruction, ctx: Context) -> Run:
    """Make a barrier object."""
    options(ins, f"init b64 {_SPACES}")
    address, count = shared_address(ctx, ins, ins.operands[0]), ctx.reader(ins.operands[1], "u32")

    def run(lanes: Lanes) -> None:
        addresses = address(lanes)
        flat = ctx.shared.flat(addresses, 8, lanes.ids)
        table = _table(ctx)
        counts = np.broadcast_to(count(lanes), lanes.n)
        for key, at, expected, lane in zip(
            flat.tolist(), addresses.tolist(), counts.tolist(), lanes.ids.tolist(), strict=True
        ):
            if not 1 <= expected <= _MAX_COUNT:
                raise ctx.error(EmulatorError, f"the count must be from 1 to {_MAX_COUNT}, got {expected}", lane)
            made = 0 if ctx.races is None else ctx.races.tick()
            table[key] = Barrier(f"mbarrier at 0x{at:x}", expected, lane, made, pending=expected)

    return run


@instruction("mbarrier.inval", kind="barrier")
def inval(ins: Instruction, ctx: Context) -> Run:
    """Unmake a barrier object."""
    options(ins, f"inval b64 {_SPACES}")
    address = shared_address(ctx, ins, ins.operands[0])

    def run(lanes: Lanes) -> None:
        addresses = address(lanes)
        for _, positions in list(barriers(ctx, addresses, lanes.ids)):
            (key,) = set(ctx.shared.flat(addresses[positions], 8, lanes.ids[positions]).tolist())
            del _table(ctx)[key]

    return run


@instruction("mbarrier.arrive", "mbarrier.arrive_drop", kind="barrier")
def arrive(ins: Instruction, ctx: Context) -> Run:
    """Arrive, with `.expect_tx` after announcing bytes; arrive_drop leaves the later phases too."""
    given = options(ins, f"arrive arrive_drop expect_tx noComplete release relaxed b64 {_SCOPES} {_SPACES}")
    state, mem, *extra = ins.operands
    address, put_state = shared_address(ctx, ins, mem), ctx.writer(state, "u64")
    number = ctx.reader(extra[0], "u32") if extra else lambda lanes: np.uint32(1)
    expect, drop, no_complete = "expect_tx" in given, "arrive_drop" in given, "noComplete" in given

    def arrive_at(barrier: Barrier, numbers: np.ndarray, ids: np.ndarray) -> None:
        total = int(numbers.sum(dtype=np.int64))
        count = len(ids) if expect else total
        if count > barrier.pending and len(ids) > 1:  # the phase ends with one of the lanes
            for i in range(len(ids)):
                arrive_at(barrier, numbers[i : i + 1], ids[i : i + 1])
            return
        barrier.tx += total if expect else 0
        barrier.expected -= count if drop else 0
        if no_complete and count >= barrier.pending:
            raise ctx.error(BarrierError, f"a .noComplete arrival would complete the phase of {barrier}", ids[0])
        if not barrier.arrive(count, None if "relaxed" in given else released(ctx, ids)):
            raise ctx.error(BarrierError, f"{count} arrivals are more than fit {barrier}", ids[0])

    def run(lanes: Lanes) -> None:
        numbers = np.broadcast_to(number(lanes), lanes.n)
        states = np.zeros(lanes.n, np.uint64)
        for barrier, positions in barriers(ctx, address(lanes), lanes.ids):
            states[positions] = barrier.phase << _STATE_SHIFT | barrier.pending
            arrive_at(barrier, numbers[positions], lanes.ids[positions])
        put_state(lanes, states)
        ctx.launch.progress += 1

    return run


@instruction("mbarrier.expect_tx", "mbarrier.complete_tx", kind="barrier")
def change_tx(ins: Instruction, ctx: Context) -> Run:
    """Announce bytes, or count them as completed."""
    given = options(ins, f"expect_tx complete_tx relaxed b64 {_SCOPES} {_SPACES}")
    address, number = shared_address(ctx, ins, ins.operands[0]), ctx.reader(ins.operands[1], "u32")
    expect = "expect_tx" in given

    def run(lanes: Lanes) -> None:
        numbers = np.broadcast_to(number(lanes), lanes.n)
        for barrier, positions in barriers(ctx, address(lanes), lanes.ids):
            total = int(numbers[positions].sum(dtype=np.int64))
            if expect:
                barrier.tx += total
            else:
                barrier.complete(total)
        ctx.launch.progress += 1

    return run


@instruction("mbarrier.pending_count", kind="barrier")
def pending_count(ins: Instruction, ctx: Context) -> Run:
    """The pending arrivals that a state token was taken at."""
    options(ins, "pending_count b64")
    put, get = ctx.writer(ins.operands[0], "u32"), ctx.reader(ins.operands[1], "u64")
    return lambda lanes: put(lanes, (get(lanes) & np.uint64(_MAX_COUNT)).astype(np.uint32))


@instruction("mbarrier.test_wait", "mbarrier.try_wait", kind="barrier")
def wait(ins: Instruction, ctx: Context) -> Run:
    """Ask whether a phase has completed; try_wait parks the lanes until it has or nothing else can run."""
    given = options(ins, f"test_wait try_wait parity acquire relaxed b64 {_SCOPES} {_SPACES}")
    put = ctx.writer(ins.operands[0], "pred")
    address = shared_address(ctx, ins, ins.operands[1])
    parity, acquire = "parity" in given, "relaxed" not in given
    token = ctx.reader(ins.operands[2], "u32" if parity else "u64")

    def completed(lanes: Lanes) -> np.ndarray:
        tokens = np.broadcast_to(token(lanes), lanes.n)
        done = np.zeros(lanes.n, bool)
        for barrier, positions in barriers(ctx, address(lanes), lanes.ids):
            barrier.poll()
            mine = tokens[positions]
            if parity:
                done[positions] = mine & np.uint32(1) != barrier.phase & 1
            else:
                done[positions] = mine >> np.uint64(_STATE_SHIFT) < barrier.phase
        return done

    def go_on(lanes: Lanes) -> None:
        put(lanes, True)
        if acquire and ctx.races is not None:
            for barrier, positions in barriers(ctx, address(lanes), lanes.ids):
                if barrier.done is not None:
                    ctx.races.acquire(np.unique(ctx.races.agent_of[lanes.ids[positions]]), barrier.done)

    def why(lanes: Lanes) -> str:
        return ", ".join(str(barrier) for barrier, _ in barriers(ctx, address(lanes), lanes.ids))

    def run(lanes: Lanes) -> list[Wait] | None:
        done = completed(lanes)
        if done.any():
            go_on(lanes.select(done))
        if done.all():
            return None
        rest = lanes.select(~done)
        if "test_wait" in given:
            put(rest, False)
            return None
        return [Wait(rest, completed, why, go_on, lambda lanes: put(lanes, False))]

    return run
