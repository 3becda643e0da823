"""Logic, shifts and bit fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..operands import Imm
from ..types import DTYPE, SIZE
from . import Run, instruction, options, unsupported

if TYPE_CHECKING:
    from ..context import Context
    from ..program import Instruction

_BINARY = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


@instruction("and", "or", "xor", "not", fuses=True)
def logic(ins: Instruction, ctx: Context) -> Run:
    """Bitwise logic, on predicates too."""
    options(ins, "pred", DTYPE)
    kind = ins.opcode[-1]
    fn = _BINARY.get(ins.opcode[0], np.invert)
    return ctx.elementwise(fn, ins.operands[0], kind, *[(op, kind) for op in ins.operands[1:]])


@instruction("cnot")
def cnot(ins: Instruction, ctx: Context) -> Run:
    """1 where the source is 0, else 0."""
    kind = ins.opcode[-1]
    return ctx.elementwise(lambda a: np.asarray(a) == 0, ins.operands[0], kind, (ins.operands[1], kind))


@instruction("shl", "shr", fuses=True)
def shift(ins: Instruction, ctx: Context) -> Run:
    """Shifts; NumPy, like PTX, shifts everything out where the amount is too large."""
    options(ins, "", DTYPE)
    kind = ins.opcode[-1]
    d, a, amount = ins.operands
    if ins.opcode[0] == "shl":
        return ctx.elementwise(np.left_shift, d, f"u{kind[1:]}", (a, f"u{kind[1:]}"), (amount, "u32"))
    kind = kind.replace("b", "u")
    # A 32-bit amount read with the sign of the value keeps NumPy from widening.
    return ctx.elementwise(np.right_shift, d, kind, (a, kind), (amount, "s32" if kind == "s32" else "u32"))


# Functions of two bits by their 4-bit truth table; 0b1100 is b, 0b1010 is c.
_TWO_BITS: list[Callable[[Any, Any], Any]] = [
    lambda b, c: np.uint32(0),
    lambda b, c: ~(b | c),
    lambda b, c: ~b & c,
    lambda b, c: ~b,
    lambda b, c: b & ~c,
    lambda b, c: ~c,
    lambda b, c: b ^ c,
    lambda b, c: ~(b & c),
    lambda b, c: b & c,
    lambda b, c: ~(b ^ c),
    lambda b, c: c,
    lambda b, c: ~b | c,
    lambda b, c: b,
    lambda b, c: b | ~c,
    lambda b, c: b | c,
    lambda b, c: np.uint32(0xFFFFFFFF),
]


@instruction("lop3")
def lop3(ins: Instruction, ctx: Context) -> Run:
    """Any function of three bits: a truth table of eight is two of four, chosen by the first source."""
    if ins.opcode != ("lop3", "b32"):
        raise unsupported(ins)
    d, a, b, c, table = ins.operands
    lut = int(table.value("u32"))
    where_one, where_zero = _TWO_BITS[lut >> 4], _TWO_BITS[lut & 15]

    def fn(a: Any, b: Any, c: Any) -> Any:
        one, zero = where_one(b, c), where_zero(b, c)
        return zero ^ (a & (one ^ zero))

    return ctx.elementwise(fn, d, "u32", (a, "u32"), (b, "u32"), (c, "u32"))


@instruction("shf")
def funnel(ins: Instruction, ctx: Context) -> Run:
    """Shift of a 64-bit pair, one half of which is kept."""
    given = options(ins, "l r wrap clamp b32")
    left = "l" in given
    wrap = "wrap" in given
    d, low, high, amount = ins.operands

    def fn(low: Any, high: Any, amount: Any) -> Any:
        amount = (amount & np.uint32(31)) if wrap else np.minimum(amount, np.uint32(32))
        amount = np.asarray(amount).astype(np.uint64)
        both = (np.asarray(high).astype(np.uint64) << np.uint64(32)) | low
        return ((both << amount) >> np.uint64(32) if left else both >> amount).astype(np.uint32)

    return ctx.elementwise(fn, d, "u32", (low, "u32"), (high, "u32"), (amount, "u32"))


# The selectors that the modes of prmt stand for, by the low two bits of the third source.
_PERMUTATIONS = {
    "f4e": (0x3210, 0x4321, 0x5432, 0x6543),
    "b4e": (0x5670, 0x6701, 0x7012, 0x0123),
    "rc8": (0x0000, 0x1111, 0x2222, 0x3333),
    "ecl": (0x3210, 0x3211, 0x3222, 0x3333),
    "ecr": (0x0000, 0x1110, 0x2210, 0x3210),
    "rc16": (0x1010, 0x3232, 0x1010, 0x3232),
}


@instruction("prmt")
def permute_bytes(ins: Instruction, ctx: Context) -> Run:
    """Pick four of eight bytes, or copies of their sign bits."""
    mode = next(iter(options(ins, "b32", _PERMUTATIONS) - {"b32"}), "")
    d, a, b, selector = ins.operands
    if not mode and isinstance(selector, Imm) and not int(selector.value("u32")) & 0x8888:
        picks = [(int(selector.value("u32")) >> 4 * i) & 7 for i in range(4)]

        def fixed(a: Any, b: Any) -> Any:
            a, b = np.broadcast_arrays(np.atleast_1d(a), b)
            sources = [np.ascontiguousarray(x).view(np.uint8).reshape(-1, 4) for x in (a, b)]
            result = np.empty((len(a), 4), np.uint8)
            for i, pick in enumerate(picks):
                result[:, i] = sources[pick >> 2][:, pick & 3]
            return result.view(np.uint32).ravel()

        return ctx.elementwise(fixed, d, "u32", (a, "u32"), (b, "u32"))

    def fn(a: Any, b: Any, selector: Any) -> Any:
        if mode:
            selector = np.array(_PERMUTATIONS[mode], np.uint32).take(selector & np.uint32(3))
        both = (np.asarray(b).astype(np.uint64) << np.uint64(32)) | a
        result = np.zeros_like(both)
        for i in range(4):
            nibble = np.asarray(selector >> np.uint32(4 * i)).astype(np.uint64)
            byte = (both >> ((nibble & np.uint64(7)) * np.uint64(8))) & np.uint64(0xFF)
            signs = np.where(byte & np.uint64(0x80), np.uint64(0xFF), np.uint64(0))
            byte = np.where(nibble & np.uint64(8), signs, byte)
            result |= byte << np.uint64(8 * i)
        return result.astype(np.uint32)

    return ctx.elementwise(fn, d, "u32", (a, "u32"), (b, "u32"), (selector, "u32"))


_BYTE_POPC = np.array([bin(i).count("1") for i in range(256)], np.uint32)


def population(a: Any) -> Any:
    """Bits set in each element."""
    a = np.ascontiguousarray(a)
    counts = _BYTE_POPC.take(a.view(np.uint8))
    return counts.reshape(-1, a.itemsize).sum(axis=1, dtype=np.uint32)


def highest_bit(a: Any) -> Any:
    """Position of the highest set bit, all ones for 0."""
    a = np.asarray(a)
    position = np.full(a.shape, 0xFFFFFFFF, np.uint32)
    rest = a.copy()
    found = np.zeros(a.shape, np.uint32)
    for step in (32, 16, 8, 4, 2, 1):
        if step >= a.itemsize * 8:
            continue
        upper = rest >> a.dtype.type(step)
        up = upper != 0
        rest = np.where(up, upper, rest)
        found += np.where(up, np.uint32(step), np.uint32(0))
    return np.where(a != 0, found, position)


def reverse_bits(a: Any) -> Any:
    """The bits in reverse order."""
    a = np.asarray(a)
    octets = np.ascontiguousarray(a).view(np.uint8).reshape(-1, a.itemsize)[:, ::-1]
    return np.ascontiguousarray(_REVERSED_BYTE.take(octets)).view(a.dtype).reshape(a.shape)


_REVERSED_BYTE = np.array([int(f"{i:08b}"[::-1], 2) for i in range(256)], np.uint8)


@instruction("popc", "clz", "brev", "bfind")
def bit_search(ins: Instruction, ctx: Context) -> Run:
    """Count, reverse and find bits."""
    given = options(ins, "shiftamt", DTYPE)
    name, kind = ins.opcode[0], ins.opcode[-1]
    unsigned = f"u{kind[1:]}"
    top = np.uint32(8 * SIZE[kind] - 1)

    def find(a: Any) -> Any:
        if kind[0] == "s":
            a = np.where(a < 0, ~a, a).view(DTYPE[unsigned])
        position = highest_bit(a)
        return np.where(position > top, position, top - position) if "shiftamt" in given else position

    functions: dict[str, tuple[Callable[[Any], Any], str, str]] = {
        "popc": (population, "u32", unsigned),
        "clz": (lambda a: top - highest_bit(a), "u32", unsigned),  # wraps to top + 1 for 0
        "brev": (reverse_bits, unsigned, unsigned),
        "bfind": (find, "u32", kind),
    }
    fn, out, source = functions[name]
    return ctx.elementwise(fn, ins.operands[0], out, (ins.operands[1], source))


# The part of start and length that hardware looks at; it emulates the 64-bit forms, and those take all of them.
_FIELD_BITS = {32: np.uint32(0xFF), 64: np.uint32(0xFFFFFFFF)}


@instruction("bfe")
def extract_field(ins: Instruction, ctx: Context) -> Run:
    """Bit field, sign- or zero-extended."""
    options(ins, "", DTYPE)
    kind = ins.opcode[-1]
    bits = 8 * SIZE[kind]
    used = _FIELD_BITS[bits]
    signed = kind[0] == "s"
    d, a, start, length = ins.operands

    def fn(a: Any, start: Any, length: Any) -> Any:
        start, length = (np.asarray(x & used).astype(np.int64) for x in (start, length))
        a = np.asarray(a)
        if signed:  # what lies above the top bit is the sign
            field = a >> np.minimum(start, bits - 1).astype(a.dtype)
            spare = np.clip(bits - length, 0, bits).astype(a.dtype)
            return np.where(length == 0, a.dtype.type(0), (field << spare) >> spare)
        field = np.where(start < bits, a >> np.minimum(start, bits - 1).astype(a.dtype), a.dtype.type(0))
        spare = np.clip(bits - length, 0, bits - 1).astype(a.dtype)
        return np.where(length == 0, a.dtype.type(0), (field << spare) >> spare)

    return ctx.elementwise(fn, d, kind, (a, kind), (start, "u32"), (length, "u32"))


@instruction("bfi")
def insert_field(ins: Instruction, ctx: Context) -> Run:
    """The second source with a bit field replaced by the low bits of the first."""
    options(ins, "", DTYPE)
    kind = f"u{ins.opcode[-1][1:]}"
    bits = 8 * SIZE[kind]
    dtype = DTYPE[kind]
    used = _FIELD_BITS[bits]
    d, a, b, start, length = ins.operands

    def fn(a: Any, b: Any, start: Any, length: Any) -> Any:
        start, length = (np.asarray(x & used).astype(dtype) for x in (start, length))
        spare = np.where(length < bits, dtype.type(bits) - length, dtype.type(0))
        mask = (~dtype.type(0) >> spare) << start
        mask = np.where(length == 0, dtype.type(0), mask)
        return ((a << start) & mask) | (b & ~mask)

    return ctx.elementwise(fn, d, kind, (a, kind), (b, kind), (start, "u32"), (length, "u32"))


@instruction("bmsk")
def bit_mask(ins: Instruction, ctx: Context) -> Run:
    """A mask of `length` ones from bit `start`."""
    given = options(ins, "clamp wrap b32")
    d, start, length = ins.operands
    wrap = "wrap" in given

    def fn(start: Any, length: Any) -> Any:
        start, length = (np.asarray(x).astype(np.uint64) for x in (start, length))
        if wrap:
            start, length = start & np.uint64(31), length & np.uint64(31)
        else:
            start, length = np.minimum(start, np.uint64(32)), np.minimum(length, np.uint64(32))
        return (((np.uint64(1) << length) - np.uint64(1)) << start).astype(np.uint32)

    return ctx.elementwise(fn, d, "u32", (start, "u32"), (length, "u32"))


@instruction("szext")
def extend_from(ins: Instruction, ctx: Context) -> Run:
    """Sign- or zero-extend from the given number of bits."""
    given = options(ins, "clamp wrap", DTYPE)
    kind = ins.opcode[-1]
    d, a, width = ins.operands
    wrap = "wrap" in given

    def fn(a: Any, width: Any) -> Any:
        width = (width & np.uint32(31)) if wrap else np.minimum(width, np.uint32(32))
        spare = np.asarray(32 - np.asarray(width).astype(np.int64))
        wide = (np.asarray(a).astype(np.int64) << (spare + 32)) >> (spare + 32)
        if kind == "u32":
            wide = wide & ((np.int64(1) << (32 - spare)) - 1)
        return np.where(spare == 32, 0, wide).astype(DTYPE[kind])

    return ctx.elementwise(fn, d, kind, (a, kind), (width, "u32"))


@instruction("fns")
def find_nth_set(ins: Instruction, ctx: Context) -> Run:
    """The n-th set bit from a base position, upwards or downwards; all ones if there is none."""
    d, mask, base, offset = ins.operands

    def fn(mask: Any, base: Any, offset: Any) -> Any:
        mask, base, offset = np.broadcast_arrays(*map(np.atleast_1d, (mask, base, offset)))
        positions = np.arange(32)
        ones = ((mask[:, None] >> positions.astype(np.uint32)) & np.uint32(1)).astype(bool)
        up = offset[:, None] >= 0
        there = base[:, None].astype(np.int64)
        ones &= np.where(up, positions >= there, positions <= there)
        rank = np.where(up, np.cumsum(ones, axis=1), np.cumsum(ones[:, ::-1], axis=1)[:, ::-1])
        wanted = np.where(offset == 0, 1, np.abs(offset.astype(np.int64)))[:, None]
        hit = ones & (rank == wanted) & ((offset != 0)[:, None] | (positions == there))
        return np.where(hit.any(axis=1), hit.argmax(axis=1).astype(np.uint32), np.uint32(0xFFFFFFFF))

    return ctx.elementwise(fn, d, "u32", (mask, "u32"), (base, "u32"), (offset, "s32"))
