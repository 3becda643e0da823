"""One launch: its geometry, the addresses of its variables, and the blocks in batches."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Hashable
from functools import lru_cache

import numpy as np

from ..errors import BarrierError, EmulatorError, UnsupportedPTX
from .context import Context
from .machine import Machine, State
from .memory import GlobalMemory, GlobalSpace
from .operands import Imm, Sym, names_of
from .pause import no_collection
from .program import Program, Variable
from .races import Clocks
from .report import LaunchReport
from .shared import SharedSpace
from .spaces import WINDOWS, ConstantSpace, GenericSpace, LocalSpace, Space
from .types import SIZE

Dim3 = tuple[int, int, int]

# Machines of launches that have ended: binding the instructions is most of the work of a short launch.
_idle: dict[Hashable, list[Machine]] = {}
_MAX_IDLE = 8
_lock = threading.Lock()


def _keep(alike: Hashable, machines: list[Machine]) -> None:
    """Leave machines to later launches, and give up the oldest."""
    with _lock:
        _idle[alike] = machines
        if len(_idle) > _MAX_IDLE:
            del _idle[next(iter(_idle))]


class Launch:
    """A kernel launch.

    Attributes
    ----------
    grid, block, cluster : tuple of three ints
        Blocks in the grid, threads in a block, blocks in a cluster.
    threads, cluster_size, dynamic_shared : int
        Threads of a block, blocks of a cluster, bytes of dynamic shared memory.
    number : int
        Which launch it is to the memory: arrays were mapped for it.
    check : bool
        Whether races, uninitialised reads and barriers are checked and memory traffic is counted.
    completion : {"late", "early", "random"}
        When asynchronous operations complete.
    rng : numpy.random.Generator or None
        With completion "random": the order in which warps proceed.
    steps, max_steps, progress : int
        Instructions executed, by a group of threads each, and how many may be; how often memory that others may
        wait for has changed.
    """

    def __init__(
        self,
        program: Program,
        grid: Dim3,
        block: Dim3,
        params: bytes,
        *,
        memory: GlobalMemory,
        shared_bytes: int,
        check: bool,
        completion: str,
        seed: int,
        kernel_name: str,
        resident_lanes: int,
        max_steps: int,
    ) -> None:
        self.program = program
        self.grid, self.block, self.cluster = grid, block, program.cluster
        self.threads = int(np.prod(block))
        self.cluster_size = int(np.prod(self.cluster))
        self.blocks = int(np.prod(grid))
        self.memory = memory
        self.params = params
        self.dynamic_shared = shared_bytes
        self.check = check
        self.completion = completion
        self.rng = np.random.default_rng(seed) if completion == "random" else None
        self.kernel_name = kernel_name
        self.report = LaunchReport(program, kernel_name, grid, block, check)
        self.steps = 0
        self.progress = 0
        self.max_steps = max_steps
        self._resident_lanes = resident_lanes
        self._globals = _map_globals(program, memory)
        self.number = memory.begin()
        self._shared_granule = _smallest_shared_access(program)
        self._refuse_bad_geometry()

    def _refuse_bad_geometry(self) -> None:
        needed = self.program.sizes["param"]
        if len(self.params) < needed:
            raise EmulatorError(f"{self.kernel_name}: params must have {needed} bytes, got {len(self.params)}")
        if not 1 <= self.threads <= 1024 or self.blocks < 1 or max(self.grid[1:]) > 65535:
            raise EmulatorError(
                f"{self.kernel_name}: a block must have 1 to 1024 threads, and a grid at least one block and at most "
                f"65535 along y and z, got block {self.block} and grid {self.grid}"
            )
        self._refuse_bad_block()
        if any(g % c for g, c in zip(self.grid, self.cluster, strict=True)):
            raise EmulatorError(
                f"{self.kernel_name}: grid must be a multiple of the cluster {self.cluster}, got {self.grid}"
            )

    def _refuse_bad_block(self) -> None:
        """A kernel compiled for certain blocks does not start with others."""
        most, required = self.program.entry.max_threads, self.program.entry.required_block
        if required is not None and required != self.block:
            raise EmulatorError(
                f"{self.kernel_name}: the kernel is compiled for a block of {required} (__block_size__, .reqntid), "
                f"got block {self.block}"
            )
        if most is not None and self.threads > most:
            raise EmulatorError(
                f"{self.kernel_name}: a block must have at most {most} threads (__launch_bounds__, .maxntid), "
                f"got block {self.block} of {self.threads}"
            )

    # ---- geometry ------------------------------------------------------------------------------------

    def block_coordinates(self, numbers: np.ndarray) -> np.ndarray:
        """Coordinates, shape (3, n), of blocks numbered cluster by cluster."""
        rank = numbers % self.cluster_size
        cluster = numbers // self.cluster_size
        x, y, _ = self.cluster
        nx, ny = self.grid[0] // x, self.grid[1] // y
        inner = (rank % x, rank // x % y, rank // (x * y))
        outer = (cluster % nx, cluster // nx % ny, cluster // (nx * ny))
        return np.array([o * c + i for o, c, i in zip(outer, self.cluster, inner, strict=True)])

    def thread_coordinates(self, threads: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """threadIdx of threads numbered within the block."""
        x, y, _ = self.block
        return threads % x, threads // x % y, threads // (x * y)

    def thread_name(self, thread: int) -> str:
        """threadIdx as text: "(3, 0, 0)"."""
        return str(tuple(int(c) for c in self.thread_coordinates(np.asarray(thread))))

    # ---- memory --------------------------------------------------------------------------------------

    def address_of(self, name: str) -> int:
        """The address of a variable in its own space."""
        if name in self._globals:
            return self._globals[name]
        variable = self.program.variables.get(name)
        if variable is None:
            raise EmulatorError(f"{self.kernel_name}: the PTX does not define {name!r}")
        return variable.address

    def add_spaces(self, ctx: Context) -> None:
        """Make the memory spaces of a context."""
        sizes = self.program.sizes
        races = Clocks(ctx) if self.check else None
        ctx.races = races
        shared = SharedSpace(ctx, sizes["shared"] + self.dynamic_shared, self._shared_granule)
        spaces: dict[str, Space] = {
            "global": GlobalSpace(ctx, self.memory),
            "local": LocalSpace(ctx, sizes["local"]),
            "const": ConstantSpace(ctx, "constant", _constant_bank(self.program, self._globals)),
            "param": ConstantSpace(ctx, "parameter", self.params),
            "generic": GenericSpace(ctx),
        }
        spaces.update(dict.fromkeys(("shared", "shared::cta", "shared::cluster"), shared))
        ctx.set_spaces(spaces, races)

    def refill_spaces(self, ctx: Context) -> None:
        """Put this launch's memory and parameters into the spaces of a context made for one like it."""
        ctx.space("global").memory = self.memory
        ctx.space("param").refill(self.params)

    # ---- running -------------------------------------------------------------------------------------

    def run(self) -> LaunchReport:
        """Execute all blocks."""
        start = time.perf_counter()
        with np.errstate(all="ignore"), no_collection():
            self._run_batches()
        self.report.finish(time.perf_counter() - start)
        return self.report

    def _run_batches(self) -> None:
        """Batch after batch; where one only spins, the next is started and they take turns."""
        lanes = -(-self.threads // 32) * 32 * self.cluster_size
        clusters = max(min(self._resident_lanes // lanes, self.blocks // self.cluster_size), 1)
        resident = clusters * self.cluster_size
        todo = deque(np.split(np.arange(self.blocks), range(resident, self.blocks, resident)))
        alike = self._alike(resident)
        with _lock:
            idle = _idle.pop(alike, [])
        for machine in idle:
            machine.attach(self)
        running: deque[Machine] = deque()
        stuck, progress = 0, self.progress
        registers: dict[Machine, int] = {}  # of those that had a turn since nobody gets on any more
        still = 0  # turns that left them as they were
        while todo or running:
            if not running or (stuck >= len(running) and todo):
                machine = idle.pop() if idle else Machine(Context(self, resident))
                machine.start(todo.popleft())
                running.appendleft(machine)
                stuck = 0
            machine = running.popleft()
            if machine.turn() is State.DONE:
                idle.append(machine)
                stuck = 0
                continue
            running.append(machine)
            stuck = stuck + 1 if self.progress == progress else 0
            progress = self.progress
            if todo or stuck <= len(running):
                registers.clear()
                still = 0
                continue
            before, registers[machine] = registers.get(machine), machine.registers()
            still = still + 1 if registers[machine] == before else 0
            if still >= len(running):
                raise self._deadlock(running)
        if not self._globals:  # their addresses are bound into the instructions
            _keep(alike, idle[:1])

    def _alike(self, resident: int) -> Hashable:
        """What launches have in common that can use each other's machines."""
        options = self.check, self.completion == "random"
        return self.program, self.block, self.dynamic_shared, len(self.params), resident, options

    def _deadlock(self, running: deque[Machine]) -> BarrierError:
        waiting = "\n".join(machine.describe() for machine in running)
        return BarrierError(f"{self.kernel_name}: deadlock, all threads left wait for ever:\n{waiting}")


def _map_globals(program: Program, memory: GlobalMemory) -> dict[str, int]:
    """Addresses of module-scope variables; their storage lives as long as the program."""
    addresses = {}
    variables = [v for v in program.variables.values() if v.space == "global"]
    for variable in variables:
        if variable.name not in program.storage:
            array = np.zeros(variable.size, np.uint8)
            array[:] = np.frombuffer(variable.data or bytes(variable.size), np.uint8)
            program.storage[variable.name] = array
        name = f"{variable.size}-byte variable {variable.name}"
        addresses[variable.name] = memory.map(program.storage[variable.name], name)
    for variable in variables:
        for at, symbol in variable.relocations.items():
            pointer = _generic_address(program, addresses, variable, symbol)
            program.storage[variable.name][at : at + 8] = np.frombuffer(pointer, np.uint8)
    return addresses


def _constant_bank(program: Program, addresses: dict[str, int]) -> bytes:
    """The initial bytes of all .const variables."""
    bank = bytearray(program.sizes["const"])
    for variable in program.variables.values():
        if variable.space != "const" or variable.data is None:
            continue
        bank[variable.address : variable.address + variable.size] = variable.data
        for at, symbol in variable.relocations.items():
            at += variable.address
            bank[at : at + 8] = _generic_address(program, addresses, variable, symbol)
    return bytes(bank)


def _generic_address(program: Program, addresses: dict[str, int], holder: Variable, symbol: Sym) -> bytes:
    """The generic address of a variable that another one holds, as its bytes."""
    variable = program.variables.get(symbol.name)
    if variable is None:
        users = (i for i in program.instructions if holder.name in names_of(Sym, i.operands))
        place = next((f"{ins.place}: " for ins in users), "")
        raise UnsupportedPTX(
            f"{place}the emulator does not know pointers to functions: {holder.name} holds {symbol.name}"
        )
    address = addresses.get(symbol.name, variable.address) + WINDOWS[variable.space]
    return (address + symbol.offset).to_bytes(8, "little")


@lru_cache(64)
def _smallest_shared_access(program: Program) -> int:
    """Bytes of the narrowest access that the program may make to shared memory."""
    smallest = 16
    for ins in program.instructions:
        name, modifiers = ins.opcode[0], set(ins.opcode)
        if name in ("ld", "st", "atom", "red") and not modifiers & {"global", "local", "const", "param"}:
            vector = () if "async" in modifiers else ins.opcode  # st.async goes an element at a time
            length = next((int(m[1]) for m in vector if m in ("v2", "v4", "v8")), 1)
            smallest = min(smallest, SIZE.get(ins.opcode[-1], 4) * length)
        elif name == "cp":
            sizes = [int(op.number) for op in ins.operands if isinstance(op, Imm) and op.number in (4, 8)]
            smallest = min([smallest, *sizes])
        elif name == "mbarrier":
            smallest = min(smallest, 8)
    return smallest
