"""Warpgroup matrix instructions of Hopper: wgmma, its groups, and setmaxnreg.

A product is carried out when `wgmma.wait_group` covers it (completion "early": when it is issued); until then
its accumulator registers hold a NaN pattern. Operands in shared memory are found through the descriptor that
the kernel built, bit by bit, so a wrong descriptor gives wrong numbers here as it does on hardware.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...errors import BarrierError, EmulatorError, RaceError
from ..lanes import Lanes
from ..operands import Imm, Vec
from . import Run, instruction, options, unsupported
from .asynchronous import SharedSource, is_early
from .fragments import AS_READ, BITS, a_matrix, accumulate, accumulator_registers, accumulators, decode
from .groups import GroupQueue
from .matrix import registers_reader, registers_writer

if TYPE_CHECKING:
    from ..context import Context
    from ..program import Instruction

_ROWS = 64
_K_BYTES = 32  # of every row of an operand, whatever the type
_SPAN = {0: 0, 1: 128, 2: 64, 3: 32}  # descriptor bits 62-63: width of the swizzle in bytes
_PENDING = np.uint32(0x7FC0FFEE)  # NaN as float32 and as two float16: accumulators of a product in flight


@functools.lru_cache(256)
def _offsets(extent: int, k_major: bool, span: int, leading: int, stride: int) -> np.ndarray:
    """Byte offsets of an operand's 16-byte chunks, before the swizzle.

    Parameters
    ----------
    extent : int
        Elements along M or N.
    k_major : bool
        True gives chunks (extent, 2), else (16, extent / 8): 16-bit elements, rows along K.
    span : int
        Swizzle width in bytes, 0 for core matrices of 8 rows x 16 bytes.
    leading, stride : int
        The descriptor's LBO and SBO in bytes.
    """
    if k_major:
        row, chunk = np.ogrid[:extent, : _K_BYTES // 16]
        inner = row % 8 * (span or 16) + row // 8 * stride
        return inner + chunk * (16 if span else leading)
    k, chunk = np.ogrid[:16, : extent // 8]
    if not span:
        return chunk * stride + k % 8 * 16 + k // 8 * leading
    per_atom = span // 16
    return chunk % per_atom * 16 + chunk // per_atom * leading + k % 8 * span + k // 8 * stride


def swizzled(addresses: np.ndarray, span: int) -> np.ndarray:
    """Apply the shared-memory swizzle of 0, 32, 64 or 128 bytes: it acts on the absolute address."""
    if not span:
        return addresses
    return addresses ^ (((addresses >> 7) & (span // 16 - 1)) << 4)


def operand_chunks(descriptor: int, extent: int, k_major: bool) -> np.ndarray:
    """The shared addresses of an operand's 16-byte chunks, from its 64-bit matrix descriptor."""
    start, leading, stride = ((descriptor >> bit & 0x3FFF) << 4 for bit in (0, 16, 32))
    span = _SPAN[descriptor >> 62]
    return swizzled(start + _offsets(extent, k_major, span, leading, stride), span)


@dataclass(slots=True, eq=False)
class _Chain:
    """Accumulators (64, N) of one warpgroup that products in flight add to, one after the other."""

    values: np.ndarray
    in_flight: int = 0


@dataclass(slots=True, eq=False)
class _Product:
    """One wgmma.mma_async of one warpgroup that has been issued."""

    form: _Form
    lanes: Lanes
    chain: _Chain
    left: SharedSource | np.ndarray
    right: SharedSource
    keep: bool  # scale-d: whether the accumulators take part


class _Form:
    """A decoded wgmma.mma_async: types, shape, and how to get at its operands."""

    def __init__(self, ins: Instruction, ctx: Context) -> None:
        self.ctx, self.ins = ctx, ins
        shape = next((re.fullmatch(r"m64n(\d+)k(\d+)", token) for token in ins.opcode if token[:3] == "m64"), None)
        self.types = [token for token in ins.opcode if token in BITS or token in ("f32", "s32")]
        if shape is None or len(self.types) != 3:
            raise unsupported(ins)
        options(ins, f"mma_async sync aligned satfinite and popc {shape[0]}", self.types)
        self.columns, self.k = int(shape[1]), int(shape[2])
        bits = BITS[self.types[1]]
        if self.k * bits != 8 * _K_BYTES or self.columns % 8 or not 8 <= self.columns <= 256 or bits == 4:
            raise unsupported(ins, "shape")
        self._bind_operands(ins, ctx)

    def _bind_operands(self, ins: Instruction, ctx: Context) -> None:
        d, a, b, scale_d, *immediates = ins.operands
        d_type, a_type, _ = self.types
        signs, majors = immediates[:2], immediates[2:]
        if len(d.items) * (2 if d_type == "f16" else 1) * 128 != _ROWS * self.columns:
            raise unsupported(ins, f"{len(d.items)} accumulator registers")
        if any(not isinstance(operand, Imm) for operand in immediates):
            raise unsupported(ins, "scale and transpose operands have to be constants")
        self.registers = tuple(item.name for item in d.items)
        word = AS_READ.get(d_type, d_type)
        self.get_d, self.put_d = registers_reader(ctx, d.items, word), registers_writer(ctx, d.items, word)
        self._poison = registers_writer(ctx, d.items, "b32")
        self._get_d_bits = registers_reader(ctx, d.items, "b32")
        self.a_in_registers = isinstance(a, Vec)
        self._get_a = registers_reader(ctx, a.items, "b32") if self.a_in_registers else ctx.reader(a, "u64")
        self._get_b = ctx.reader(b, "u64")
        self._get_scale = ctx.reader(scale_d, "pred")
        self._sign = float(np.prod([int(operand.value("s32")) for operand in signs]))
        flags = [int(operand.value("s32")) == 0 for operand in majors]
        self._a_k_major = flags[0] if len(flags) == 2 else True
        self._b_k_major = flags[-1] if flags else True
        if not (self._a_k_major and self._b_k_major) and BITS[a_type] != 16:
            raise unsupported(ins, "only 16-bit operands can be transposed")

    def issue(self, lanes: Lanes, queue: GroupQueue[_Product]) -> _Product:
        """Read what is read at issue, for one warpgroup; queue the product."""
        owner = int(lanes.ids[0])
        if self.a_in_registers:
            left = a_matrix(self._get_a(lanes), self.types[1], 16).reshape(_ROWS, self.k)
        else:
            left = self._source(self._get_a(lanes), _ROWS, self._a_k_major, owner)
        right = self._source(self._get_b(lanes), self.columns, self._b_k_major, owner)
        keep = bool(np.broadcast_to(self._get_scale(lanes), lanes.n)[0])
        chain = next((p.chain for p in queue if p.form.registers == self.registers), None)
        if chain is None:
            chain = _Chain(accumulators(self.get_d(lanes), 16).reshape(_ROWS, self.columns))
            self._poison(lanes, np.full((len(self.registers), lanes.n), _PENDING))
        chain.in_flight += 1
        product = _Product(self, lanes, chain, left, right, keep)
        queue.open.append(product)
        return product

    def _source(self, descriptors, extent: int, k_major: bool, owner: int) -> SharedSource:
        descriptor = int(np.broadcast_to(descriptors, 128)[0])
        if (descriptors != descriptor).any():
            raise self.ctx.error(EmulatorError, "the threads of the warpgroup give different descriptors", owner)
        if descriptor >> 49 & 7:
            raise unsupported(self.ins, "a matrix descriptor with a base offset")
        addresses = operand_chunks(descriptor, extent, k_major)
        return SharedSource(self.ctx, addresses.ravel().astype(np.uint64), owner)

    def _operand(self, source: SharedSource, fmt: str, k_major: bool) -> np.ndarray:
        """The operand's values, shape (M or N, K)."""
        found = source.read()
        return decode(found.reshape(-1, _K_BYTES), fmt) if k_major else decode(found.reshape(16, -1), fmt).T

    def land(self, product: _Product) -> None:
        """Carry out the product; the last one of a chain writes the registers."""
        d_type, a_type, b_type = self.types
        left, right = product.left, self._operand(product.right, b_type, self._b_k_major)
        if not self.a_in_registers:
            left = self._operand(left, a_type, self._a_k_major)
        chain = product.chain
        start = chain.values if product.keep else np.zeros_like(chain.values)
        if self._sign < 0:
            left = -left
        saturate = "satfinite" in self.ins.opcode
        chain.values = accumulate(left, right.T, start, d_type, saturate)
        chain.in_flight -= 1
        if not chain.in_flight:
            self._write(product)

    def _write(self, product: _Product) -> None:
        if (self._get_d_bits(product.lanes) != _PENDING).any():
            message = "accumulator registers of a wgmma in flight were written before wgmma.wait_group"
            raise self.ctx.error(RaceError, message, int(product.lanes.ids[0]), self.ins)
        matrices = product.chain.values.reshape(4, 16, self.columns)
        self.put_d(product.lanes, accumulator_registers(matrices))


def _warpgroups(ctx: Context, lanes: Lanes) -> list[Lanes]:
    """The warpgroups that are here, each of which has to be complete."""
    first = lanes.ids[::128]
    if lanes.n % 128 or (lanes.ids[127::128] - first != 127).any() or (ctx.thread_of[first] % 128).any():
        message = "all lanes of the warpgroup have to execute this instruction, some have exited or gone elsewhere"
        raise ctx.error(BarrierError, message, int(first[0]))
    return [lanes] if lanes.n == 128 else [Lanes(ctx, ids) for ids in lanes.ids.reshape(-1, 128)]


def _queue(ctx: Context, group: Lanes) -> GroupQueue[_Product]:
    return ctx.state("wgmma", dict).setdefault(int(group.ids[0]), GroupQueue())


@instruction("wgmma.mma_async", scope="warpgroup", kind="matrix")
def mma_async(ins: Instruction, ctx: Context) -> Run:
    """D = A * B + D, 64 rows, one warpgroup; A in shared memory or registers, B in shared memory."""
    form = _Form(ins, ctx)
    early = is_early(ctx)
    flops = 2 * _ROWS * form.columns * form.k

    def run(lanes: Lanes) -> None:
        for group in _warpgroups(ctx, lanes):
            queue = _queue(ctx, group)
            product = form.issue(group, queue)
            if early:
                form.land(product)
                queue.open.pop()
            ctx.launch.report.flops += flops

    return run


@instruction("wgmma.fence", scope="warpgroup", kind="matrix")
def fence(ins: Instruction, ctx: Context) -> Run:
    """Order register accesses before the products that follow: they are in order here."""
    options(ins, "fence sync aligned")
    return lambda lanes: None


@instruction("wgmma.commit_group", scope="warpgroup", kind="matrix")
def commit_group(ins: Instruction, ctx: Context) -> Run:
    """Close the open group of products."""
    options(ins, "commit_group sync aligned")

    def run(lanes: Lanes) -> None:
        for group in _warpgroups(ctx, lanes):
            _queue(ctx, group).commit()

    return run


@instruction("wgmma.wait_group", scope="warpgroup", kind="matrix")
def wait_group(ins: Instruction, ctx: Context) -> Run:
    """Carry out all groups but the N youngest; what its warps read is then read by all four of them."""
    options(ins, "wait_group sync aligned")
    pending = int(ins.operands[0].value("u32"))

    def run(lanes: Lanes) -> None:
        for group in _warpgroups(ctx, lanes):
            for product in _queue(ctx, group).drain(pending):
                product.form.land(product)
            if ctx.races is not None:
                agents = ctx.races.agents(group.warps)
                ctx.races.acquire(agents, ctx.races.release(agents).max(axis=0))

    return run


@instruction("setmaxnreg", scope="warpgroup", kind="control")
def setmaxnreg(ins: Instruction, ctx: Context) -> Run:
    """Registers of a warpgroup: nothing to do, but all its warps have to come, with a count hardware takes."""
    options(ins, "inc dec sync aligned u32")
    count = int(ins.operands[0].value("u32"))
    if count % 8 or not 24 <= count <= 256:
        raise ctx.error(EmulatorError, f"the register count must be a multiple of 8 from 24 to 256, got {count}")
    return lambda lanes: None
