"""What the instructions of one batch of resident blocks see: registers, lanes, memory spaces, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import EmulatorError, UnsupportedPTX
from .lanes import Lanes, pack_warps, runs_text
from .operands import Imm, Mem, Not, Operand, Reg, Rows, Special, Sym
from .program import Instruction, Program
from .shared import block_bits
from .special import SM_COUNT, is_volatile, special_register
from .types import DTYPE, PACKED, SINT, SIZE, UINT, is_signed

if TYPE_CHECKING:
    from .launch import Launch
    from .spaces import Space

Get = Callable[[Lanes], Any]
Put = Callable[[Lanes, Any], None]


class Context:
    """State of R resident blocks of T threads (T padded to whole warps), one lane a thread.

    Instructions are bound to a context once and run for many batches of blocks, so they must hold on to
    nothing but the arrays and objects named here, which stay the same; only their contents change.

    Attributes
    ----------
    program, launch
        The decoded program; the launch (grid, block, options, kernel name, report, arch).
    R, T, W, L : int
        Resident blocks, lanes a block, warps a block, lanes in all (R * T).
    cluster_size : int
        Blocks in a cluster (1 without clusters). A cluster is resident as a whole and its blocks are
        neighbours: block b has rank ``b % cluster_size``.
    block_of, thread_of, lane_of, warp_of : ndarray of intp, shape (L,)
        Of each lane: its resident block, thread number in the block, lane in the warp, resident warp
        (block * W + warp).
    ctaid, clusterid : ndarray of uint32, shape (3, L)
        Coordinates of each lane's block and cluster. `smid` is the multiprocessor it is said to run on.
    alive : ndarray of bool, shape (L,)
        Lanes that exist and have not exited. `alive_bits` is the same packed by warp, `alive_count` their
        number, `everyone` they as a group. `exists` and `exists_count` also have those that have exited.
    shared : SharedSpace
        Shared memory of all resident blocks, with initialisation and race tracking.
    races : Races or None
        Vector clocks; None without check.
    current : Instruction
        What is being executed: the machine keeps it up to date for error messages and counters.
    """

    def __init__(self, launch: Launch, resident: int) -> None:
        self.launch = launch
        self.program: Program = launch.program
        self.cluster_size = launch.cluster_size
        self.R = resident
        self.T = -(-launch.threads // 32) * 32
        self.W = self.T // 32
        self.L = self.R * self.T
        lanes = np.arange(self.L)
        self.block_of = lanes // self.T
        self.thread_of = lanes % self.T
        self.lane_of = lanes % 32
        self.warp_of = lanes // 32
        self.ctaid = np.zeros((3, self.L), np.uint32)
        self.clusterid = np.zeros((3, self.L), np.uint32)
        self.smid = np.zeros(self.L, np.uint32)
        self.exists = np.zeros(self.L, bool)
        self.exists_count = 0
        self.alive = np.zeros(self.L, bool)
        self.alive_bits = np.zeros(self.R * self.W, np.uint32)
        self.alive_count = 0
        self.current: Instruction = self.program.instructions[0]
        self.registers: dict[str, np.ndarray] = {}
        self._states: dict[str, Any] = {}
        launch.add_spaces(self)

    def attach(self, launch: Launch) -> None:
        """Serve another launch, which differs in grid, parameters, memory and messages only."""
        self.launch = launch
        launch.refill_spaces(self)

    # ---- batches -------------------------------------------------------------------------------------

    def start(self, blocks: np.ndarray) -> Lanes:
        """Take up a new batch: `blocks` are linear block numbers, in whole clusters. Returns all lanes."""
        count = len(blocks)
        coordinates = self.launch.block_coordinates(blocks)
        self.ctaid[:, : count * self.T] = np.repeat(coordinates, self.T, axis=1)
        self.clusterid[:] = self.ctaid // np.array(self.launch.cluster, np.uint32)[:, None]
        self.smid[: count * self.T] = np.repeat(blocks % SM_COUNT, self.T)
        self.exists[:] = (self.thread_of < self.launch.threads) & (self.block_of < count)
        self.exists_count = int(np.count_nonzero(self.exists))
        self.alive[:] = self.exists
        self._count_alive()
        self._states.clear()
        for space in self._spaces.values():
            space.reset()
        if self.races is not None:
            self.races.reset()
        return self.everyone

    def kill(self, lanes: Lanes) -> None:
        """The lanes have exited."""
        self.alive[lanes.index] = False
        self._count_alive()

    def _count_alive(self) -> None:
        self.alive_bits[:] = pack_warps(self.alive)
        ids = np.flatnonzero(self.alive)
        self.alive_count = len(ids)
        self.everyone = Lanes(self, ids)

    def state(self, key: str, factory: Callable[[], Any]) -> Any:
        """State of an instruction family for the present batch (cp.async groups, mbarriers, ...).

        Made by `factory` at first use in each batch: ask for it inside `run`, not while binding. If it has a
        method `finish`, that is called when all blocks of the batch have exited.
        """
        found = self._states.get(key)
        if found is None:
            found = self._states[key] = factory()
        return found

    def finish(self) -> None:
        """All blocks of the batch have exited: let the families object to what they left in flight."""
        for state in self._states.values():
            if hasattr(state, "finish"):
                state.finish()

    def set_spaces(self, spaces: dict[str, Space], races: Any) -> None:
        """Give the context its memory spaces, by PTX name, and the race tracker or None."""
        self._spaces = spaces
        self.shared = spaces["shared"]
        self.races = races

    def space(self, name: str) -> Space:
        """The memory space: "global", "shared", "shared::cluster", "local", "const", "param", "generic"."""
        return self._spaces[name]

    # ---- operands ------------------------------------------------------------------------------------

    def register(self, reg: Reg) -> np.ndarray:
        """The register's bits for every lane: bool for .pred, else an unsigned array of its width."""
        bits = self.registers.get(reg.name)
        if bits is None:
            dtype = np.dtype(bool) if reg.type == "pred" else UINT[SIZE[reg.type]]
            bits = self.registers[reg.name] = np.zeros(self.L, dtype)
        return bits

    def whole(self, operand: Operand, ptx_type: str) -> Any:
        """The operand for all L lanes (a live view of the register) or as a NumPy scalar.

        Packed types give 2 * L elements, the low half of each lane first. A type narrower than the
        register reads its low bits.
        """
        dtype = DTYPE[ptx_type]
        if isinstance(operand, Reg):
            bits = self.register(operand)
            step = bits.itemsize // SIZE[ptx_type]
            view = bits.view(dtype)
            return view if step == 1 else view[::step]
        if isinstance(operand, Imm):
            return operand.value(ptx_type)
        if isinstance(operand, Sym):
            address = DTYPE[ptx_type].type(self.address_of(operand))
            if self.cluster_size > 1 and self.program.variables[operand.name].space == "shared":
                # as on hardware, where a matrix descriptor made of it has to mask the rank
                address = address | block_bits(self.block_of % self.cluster_size).astype(dtype)
            return address
        if isinstance(operand, Special):
            value = special_register(self, operand.name)
            return value.astype(dtype) if isinstance(value, np.ndarray) else dtype.type(value)
        if isinstance(operand, Not):
            raise TypeError("a negated predicate has no storage; use reader")
        raise EmulatorError(f"{self.current.place}: cannot read the operand in: {self.current.text}")

    def reader(self, operand: Operand, ptx_type: str) -> Get:
        """``get(lanes)``: the operand's values, shape (n,) (2n if packed), or a NumPy scalar if constant.

        Registers give a view where the lanes are contiguous: copy before changing the register.
        "f16" gives float16, "bf16" its bits as uint16 (see `types.widen`), "pred" bool.
        """
        if isinstance(operand, Not):
            get = self.reader(operand.operand, ptx_type)
            return lambda lanes: ~get(lanes)
        if isinstance(operand, Special):
            return self._special_reader(operand, ptx_type)
        if isinstance(operand, Rows):
            gets = [self.reader(register, ptx_type) for register in operand.registers]
            return lambda lanes: np.concatenate([get(lanes) for get in gets])
        whole = self.whole(operand, ptx_type)
        if not isinstance(whole, np.ndarray):
            return lambda lanes: whole
        if ptx_type in PACKED:
            get_bits = _reader_of(whole.view(np.uint32))
            return lambda lanes: get_bits(lanes).view(whole.dtype)
        return _reader_of(whole)

    def _special_reader(self, operand: Special, ptx_type: str) -> Get:
        dtype = DTYPE[ptx_type]
        if is_volatile(operand.name):
            return lambda lanes: self.whole(operand, ptx_type)
        value = special_register(self, operand.name)
        if isinstance(value, np.ndarray):
            get = _reader_of(value)
            return lambda lanes: get(lanes).astype(dtype)
        constant = dtype.type(value)
        return lambda lanes: constant

    def writer(self, operand: Operand, ptx_type: str) -> Put:
        """``put(lanes, values)``: set the register; a narrower type is sign- or zero-extended.

        `values` has shape (n,) (2n if packed) or is a scalar. The sink ``_`` swallows everything.
        """
        if isinstance(operand, Rows):
            return self._rows_writer([self.writer(register, ptx_type) for register in operand.registers])
        if not isinstance(operand, Reg):
            return lambda lanes, values: None
        bits = self.register(operand)
        if ptx_type in PACKED:
            put_bits = _writer_of(bits)
            return lambda lanes, values: put_bits(lanes, values.view(np.uint32))
        size = SIZE[ptx_type]
        if size < bits.itemsize and is_signed(ptx_type):
            bits = bits.view(SINT[bits.itemsize])
        elif size == bits.itemsize:
            bits = bits.view(DTYPE[ptx_type])
        return _writer_of(bits)

    @staticmethod
    def _rows_writer(puts: list[Put]) -> Put:
        def put_rows(lanes: Lanes, values: np.ndarray) -> None:
            for put, row in zip(puts, values.reshape(len(puts), -1), strict=True):
                put(lanes, row)

        return put_rows

    def elementwise(
        self,
        fn: Callable[..., Any],
        destination: Operand,
        out_type: str,
        *sources: tuple[Operand, str],
        finish: Callable[[np.ndarray], Any] | None = None,
    ) -> Callable[[Lanes], None]:
        """The closure of a lane-wise instruction: ``destination = fn(*sources)``.

        Parameters
        ----------
        fn : callable
            Takes the source arrays (or scalars) and returns the result. A NumPy ufunc writes straight
            into the register where all live lanes are on, or their neighbours.
        finish : callable, optional
            Applied in place to the result, as for canonical NaNs.
        """
        kinds = {type(operand) for operand, _ in sources}
        direct = (
            isinstance(fn, np.ufunc)
            and isinstance(destination, Reg)
            and self.register(destination).itemsize == SIZE[out_type]
            and Reg in kinds
            and kinds <= {Reg, Imm, Sym}
        )
        if direct:
            out = self.register(destination).view(DTYPE[out_type])
            return _direct(fn, out, [self.whole(*source) for source in sources], finish)
        put = self.writer(destination, out_type)
        gets = [self.reader(*source) for source in sources]

        def run(lanes: Lanes) -> None:
            result = fn(*[get(lanes) for get in gets])
            if finish is not None:
                result = np.atleast_1d(result)
                finish(result)
            put(lanes, result)

        return run

    # ---- addresses -----------------------------------------------------------------------------------

    def address_of(self, sym: Sym) -> int:
        """The address of a variable, in its own space (what `mov` of its name gives)."""
        if sym.name in self.program.functions:
            raise UnsupportedPTX(
                f"{self.current.place}: the emulator does not know pointers to functions: {self.current.text}"
            )
        return self.launch.address_of(sym.name) + sym.offset

    def address(self, mem: Mem) -> Get:
        """``get(lanes)``: the addresses of a ``[base + offset]`` operand, shape (n,), uint64."""
        offset = np.uint64(mem.offset & 0xFFFFFFFFFFFFFFFF)
        if isinstance(mem.base, Reg):
            width = SIZE[mem.base.type] * 8
            get = self.reader(mem.base, f"u{width}")
            if width == 64:
                return (lambda lanes: get(lanes) + offset) if mem.offset else get
            signed = np.int64(mem.offset)
            return lambda lanes: (get(lanes).astype(np.int64) + signed).view(np.uint64)
        base = mem.base.value("u64") if isinstance(mem.base, Imm) else np.uint64(self.address_of(mem.base))
        constant = np.uint64((int(base) + mem.offset) & 0xFFFFFFFFFFFFFFFF)
        return lambda lanes: np.full(lanes.n, constant)

    # ---- messages ------------------------------------------------------------------------------------

    def who(self, lane: int) -> str:
        """A lane as "block (0, 1, 0), thread (3, 0, 0)"."""
        return f"block {self.block_name(lane)}, thread {self.launch.thread_name(int(self.thread_of[lane]))}"

    def describe(self, lanes: Lanes) -> str:
        """A group in a few words: the threads of its first block, and how many blocks more."""
        block = self.block_of[lanes.ids[0]]
        threads = self.thread_of[lanes.ids[self.block_of[lanes.ids] == block]]
        others = len(lanes.blocks) - 1
        more = f" (and {others} more blocks)" if others else ""
        return f"block {self.block_name(int(lanes.ids[0]))} thread{'s' * (len(threads) > 1)} {runs_text(threads)}{more}"

    def block_name(self, lane: int) -> str:
        """The coordinates of a lane's block, as a tuple in text."""
        return str(tuple(int(c) for c in self.ctaid[:, lane]))

    def error(
        self, kind: type[EmulatorError], message: str, lane: int | None = None, ins: Instruction | None = None
    ) -> EmulatorError:
        """An error that names kernel, source line, instruction and, with `lane`, block and thread.

        Raise what it returns.
        """
        ins = ins or self.current
        who = "" if lane is None else f", {self.who(int(lane))}"
        return kind(f"{self.launch.kernel_name}, {ins.place}{who}: {message}\n    {ins.text}")


def _direct(
    fn: np.ufunc, out: np.ndarray, sources: list[Any], finish: Callable[[np.ndarray], Any] | None
) -> Callable[[Lanes], None]:
    """``out = fn(*sources)`` for arrays of all lanes, and scalars."""

    def run(lanes: Lanes) -> None:
        index = lanes.index
        if lanes.full:
            target, values = out, sources
        elif type(index) is slice:
            target, values = out[index], [s[index] if type(s) is np.ndarray else s for s in sources]
        else:
            target = fn(*[s.take(index) if type(s) is np.ndarray else s for s in sources])
            if finish is not None:
                finish(target)
            out[index] = target
            return
        fn(*values, out=target)
        if finish is not None:
            finish(target)

    return run


def _reader_of(values: np.ndarray) -> Get:
    def get(lanes: Lanes) -> np.ndarray:
        index = lanes.index
        return values[index] if type(index) is slice else values.take(index)

    return get


def _writer_of(target: np.ndarray) -> Put:
    def put(lanes: Lanes, values: Any) -> None:
        target[lanes.index] = values

    return put
