"""Moves, loads, stores and addresses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..operands import Imm, Mem, Reg, Sink, Sym, Vec
from ..spaces import WINDOWS, refuse_misaligned
from ..types import DTYPE, SIZE, UINT
from . import Run, instruction, unsupported

if TYPE_CHECKING:
    from ..context import Context
    from ..lanes import Lanes
    from ..operands import Operand
    from ..program import Instruction
    from ..spaces import Space

_SPACES = ("global", "shared", "shared::cta", "shared::cluster", "local", "const", "param")
_STRONG = frozenset({"volatile", "relaxed", "acquire", "release", "mmio"})


def space_of(ins: Instruction, ctx: Context) -> Space:
    """The space an instruction names, or the generic one.

    Parameters of functions (not of kernels) lie in per-thread memory.
    """
    names = [m.split("::")[0] if m.startswith("param") else m for m in ins.opcode]
    name = next((m for m in names if m in _SPACES), "generic")
    if name == "param":
        base = next(op.base for op in ins.operands if isinstance(op, Mem))
        variable = ctx.program.variables.get(base.name) if isinstance(base, Sym) else None
        if variable is not None and variable.space == "local":
            name = "local"
    return ctx.space(name)


def vector_length(ins: Instruction) -> int:
    """Elements of a vector access: 1, 2, 4 or 8."""
    return next((int(m[1]) for m in ins.opcode if m in ("v2", "v4", "v8")), 1)


def fences(ins: Instruction, ctx: Context) -> bool:
    """Whether a strong access also orders (acquire, release), for the race checks."""
    return ctx.races is not None and bool({"acquire", "release", "acq_rel"} & set(ins.opcode))


@instruction("ld", "ldu", kind="memory")
def ld(ins: Instruction, ctx: Context) -> Run:
    """Loads from all spaces, scalar and vector."""
    kind = ins.opcode[-1]
    if kind not in SIZE:
        raise unsupported(ins)
    target, mem = ins.operands[:2]
    assert isinstance(mem, Mem)
    space = space_of(ins, ctx)
    if space is ctx.space("param") and not isinstance(mem.base, Reg):
        return _load_parameter(ins, ctx, target, mem, kind)
    targets = target.items if isinstance(target, Vec) else (target,)
    puts = [ctx.writer(op, kind) for op in targets]
    n = vector_length(ins)
    total = SIZE[kind] * n
    address = ctx.address(mem)
    access = "strong load" if _STRONG & set(ins.opcode) else "load"
    dtype = DTYPE[kind]
    chunks = [(at, min(16, total - at)) for at in range(0, total, 16)]

    def run(lanes: Lanes) -> None:
        where = address(lanes)
        parts = [space.load(where + np.uint64(at), size, lanes.ids, access) for at, size in chunks]
        if n == 1:
            puts[0](lanes, parts[0].view(dtype))
            return
        columns = [c for part in parts for c in part.view(dtype).reshape(lanes.n, -1).T]
        for put, column in zip(puts, columns, strict=True):
            put(lanes, column)

    return run


def _load_parameter(ins: Instruction, ctx: Context, target: Operand, mem: Mem, kind: str) -> Run:
    """A kernel parameter at a fixed place: the same value in all lanes, found while binding."""
    assert isinstance(mem.base, (Sym, Imm))
    base = ctx.address_of(mem.base) if isinstance(mem.base, Sym) else int(mem.base.number)
    targets = target.items if isinstance(target, Vec) else (target,)
    size = SIZE[kind]
    puts = [ctx.writer(op, kind) for op in targets]
    addresses = base + mem.offset + size * np.arange(len(targets), dtype=np.uint64)
    owners = np.full(len(targets), ctx.everyone.ids[0])
    ((view, index, _),) = ctx.space("param").locate(addresses.astype(np.uint64), size, owners, "load")

    def run(lanes: Lanes) -> None:
        for put, value in zip(puts, view.take(index).view(DTYPE[kind]), strict=True):
            put(lanes, value)

    return run


@instruction("st", kind="memory")
def st(ins: Instruction, ctx: Context) -> Run:
    """Stores to all spaces, scalar and vector."""
    kind = ins.opcode[-1]
    if kind not in SIZE:
        raise unsupported(ins)
    mem, source = ins.operands[:2]
    assert isinstance(mem, Mem)
    space = space_of(ins, ctx)
    address = ctx.address(mem)
    strong = bool(_STRONG & set(ins.opcode))
    access = "strong store" if strong else "store"
    orders = fences(ins, ctx)
    items = source.items if isinstance(source, Vec) else (source,)
    gets = [ctx.reader(op, kind) for op in items]
    dtype, n = DTYPE[kind], len(items)
    per_chunk = min(n, 16 // SIZE[kind])
    chunk = UINT[SIZE[kind] * per_chunk]
    private = space is ctx.space("local")

    def run(lanes: Lanes) -> None:
        where = address(lanes)
        if orders:
            ctx.races.fence(ctx.races.agents(lanes.warps))
        if not private:
            ctx.launch.progress += 1
        for at in range(0, n, per_chunk):
            data = np.empty((lanes.n, per_chunk), dtype)
            for i in range(per_chunk):
                data[:, i] = gets[at + i](lanes)
            values = data.view(chunk).ravel()
            space.store(where + np.uint64(at * dtype.itemsize) if at else where, values, lanes.ids, access)

    return run


@instruction("prefetch", "prefetchu", "applypriority", kind="memory")
def hint(ins: Instruction, ctx: Context) -> Run:
    """Hints have no effect."""
    return lambda lanes: None


@instruction("discard", kind="memory")
def discard(ins: Instruction, ctx: Context) -> Run:
    """Forgets a line of 128 bytes: what is read there before the next write is no number."""
    mem = ins.operands[0]
    assert isinstance(mem, Mem)
    space, address = space_of(ins, ctx), ctx.address(mem)
    line, step = 128, 8

    def run(lanes: Lanes) -> None:
        where = address(lanes)
        refuse_misaligned(ctx, where, line, lanes.ids)
        ctx.launch.progress += 1
        ones = np.full(lanes.n, 2**64 - 1, UINT[step])
        for at in range(0, line, step):
            space.store(where + np.uint64(at), ones, lanes.ids, "discard")

    return run


@instruction("createpolicy", kind="memory")
def createpolicy(ins: Instruction, ctx: Context) -> Run:
    """A cache policy: an opaque value nobody looks at."""
    put = ctx.writer(ins.operands[0], "b64")
    return lambda lanes: put(lanes, np.uint64(0))


@instruction("cvta", kind="move")
def cvta(ins: Instruction, ctx: Context) -> Run:
    """Addresses to generic ones and back (``to``)."""
    to = ins.opcode[1] == "to"
    space = ins.opcode[2] if to else ins.opcode[1]
    kind = ins.opcode[-1]
    window = WINDOWS[space.split("::")[0]]
    d, a = ins.operands
    if window == 0:
        return mov(ins, ctx)
    if SIZE[kind] != 8:
        raise unsupported(ins, "32-bit generic addresses")
    fn = np.subtract if to else np.add
    return ctx.elementwise(fn, d, kind, (a, kind), (Imm(window), kind))


@instruction("isspacep", kind="move")
def isspacep(ins: Instruction, ctx: Context) -> Run:
    """Whether a generic address lies in a space."""
    window = WINDOWS[ins.opcode[1].split("::")[0]]
    p, a = ins.operands
    shift = np.uint64(56)
    return ctx.elementwise(
        lambda address: (np.asarray(address) >> shift) == np.uint64(window >> 56), p, "pred", (a, "u64")
    )


@instruction("mov", kind="move")
def mov(ins: Instruction, ctx: Context) -> Run:
    """Copies, packing and unpacking of vectors, addresses of variables."""
    kind = ins.opcode[-1]
    d, a = ins.operands[:2]
    if isinstance(d, Vec) and isinstance(a, Vec):
        pairs = list(zip(d.items, a.items, strict=True))
        puts = [ctx.writer(t, f"b{SIZE[kind] * 8}") for t, _ in pairs]
        gets = [ctx.reader(s, f"b{SIZE[kind] * 8}") for _, s in pairs]
        return _move_all(gets, puts)
    if isinstance(d, Vec):
        return _unpack(ctx, d, a, kind)
    if isinstance(a, Vec):
        return _pack(ctx, d, a, kind)
    if kind != "pred":
        kind = f"b{SIZE[kind] * 8}"
    put, get = ctx.writer(d, kind), ctx.reader(a, kind)
    return lambda lanes: put(lanes, get(lanes))


def _move_all(gets: list[Any], puts: list[Any]) -> Run:
    def run(lanes: Lanes) -> None:
        values = [np.array(get(lanes)) for get in gets]
        for put, value in zip(puts, values, strict=True):
            put(lanes, value)

    return run


def _unpack(ctx: Context, d: Vec, a: Operand, kind: str) -> Run:
    """Split a register, the low part first."""
    n = len(d.items)
    part = f"b{SIZE[kind] * 8 // n}"
    get = ctx.reader(a, f"b{SIZE[kind] * 8}")
    puts = [(i, ctx.writer(op, part)) for i, op in enumerate(d.items) if not isinstance(op, Sink)]
    dtype = DTYPE[part]

    def run(lanes: Lanes) -> None:
        parts = np.array(np.broadcast_to(get(lanes), lanes.n)).view(dtype)
        for i, put in puts:
            put(lanes, parts[i::n])

    return run


def _pack(ctx: Context, d: Operand, a: Vec, kind: str) -> Run:
    """Join registers, the low part first."""
    n = len(a.items)
    part = f"b{SIZE[kind] * 8 // n}"
    whole = f"b{SIZE[kind] * 8}"
    gets = [ctx.reader(op, part) for op in a.items]
    put = ctx.writer(d, whole)

    def run(lanes: Lanes) -> None:
        parts = np.empty((lanes.n, n), DTYPE[part])
        for i, get in enumerate(gets):
            parts[:, i] = get(lanes)
        put(lanes, parts.view(DTYPE[whole]).ravel())

    return run
