"""Opcodes shared by integers and floats, and the integer half of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..operands import Reg
from ..types import DTYPE, SIZE, is_float
from . import Run, instruction, options, unsupported
from .floating import FLOATING

if TYPE_CHECKING:
    from ..context import Context
    from ..program import Instruction

_CARRY = Reg("%cc", "pred")
_WIDE = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}


@instruction("add", "sub", "mul", "mad", "fma", "div", "abs", "neg", "min", "max", kind="arithmetic", fuses=True)
def arithmetic(ins: Instruction, ctx: Context) -> Run:
    """Dispatch on the type, which is the last modifier."""
    kind = ins.opcode[-1]
    table = FLOATING if is_float(kind) else _INTEGER
    if kind not in DTYPE or ins.opcode[0] not in table:
        raise unsupported(ins)
    return table[ins.opcode[0]](ins, ctx, kind)


def _add_sub(ins: Instruction, ctx: Context, kind: str) -> Run:
    given = options(ins, "cc sat", DTYPE)
    if "cc" in given:
        return _with_carry(ins, ctx, kind, carry_in=False)
    ufunc = np.add if ins.opcode[0] == "add" else np.subtract
    fn: Callable[..., Any] = ufunc
    if "sat" in given:
        limits = np.iinfo(DTYPE[kind])

        def fn(a: Any, b: Any) -> Any:
            return np.clip(ufunc(a, b, dtype=np.int64), limits.min, limits.max)

    d, a, b = ins.operands
    return ctx.elementwise(fn, d, kind, (a, kind), (b, kind))


@instruction("addc", "subc", kind="integer")
def add_with_carry(ins: Instruction, ctx: Context) -> Run:
    """Add or subtract with the carry flag coming in."""
    options(ins, "cc", DTYPE)
    return _with_carry(ins, ctx, ins.opcode[-1], carry_in=True)


def _with_carry(ins: Instruction, ctx: Context, kind: str, *, carry_in: bool) -> Run:
    kind = f"u{SIZE[kind] * 8}"
    subtract = ins.opcode[0].startswith("sub")
    sets = "cc" in ins.opcode
    d, a, b = ins.operands
    get_a, get_b, put = ctx.reader(a, kind), ctx.reader(b, kind), ctx.writer(d, kind)
    get_carry, put_carry = ctx.reader(_CARRY, "pred"), ctx.writer(_CARRY, "pred")

    def run(lanes: Any) -> None:
        x, y = np.asarray(get_a(lanes)), np.asarray(get_b(lanes))
        result = x - y if subtract else x + y
        carry = x < y if subtract else result < x
        if carry_in:
            flag = get_carry(lanes).astype(result.dtype)
            before = result
            result = before - flag if subtract else before + flag
            carry = carry | (before < flag if subtract else result < before)
        put(lanes, result)
        if sets:
            put_carry(lanes, carry)

    return run


def multiply(kind: str, part: str) -> Callable[[Any, Any], Any]:
    """The product's low half, high half or all of it."""
    wide = DTYPE.get(_WIDE.get(kind, ""))
    dtype = DTYPE[kind]
    bits = dtype.type(dtype.itemsize * 8)
    if part == "lo":
        return np.multiply
    if part == "wide":
        return lambda a, b: np.multiply(a, b, dtype=wide)
    if wide is not None:
        return lambda a, b: (np.multiply(a, b, dtype=wide) >> wide.type(bits)).astype(dtype)
    return _high64 if kind[0] == "u" else _high64_signed


def _high64(a: Any, b: Any) -> Any:
    """The high half of an unsigned 64-bit product, by 32-bit halves."""
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    a, b = np.asarray(a), np.asarray(b)
    a0, a1, b0, b1 = a & low, a >> shift, b & low, b >> shift
    middle = a1 * b0 + (a0 * b0 >> shift)
    return a1 * b1 + (middle >> shift) + ((middle & low) + a0 * b1 >> shift)


def _high64_signed(a: Any, b: Any) -> Any:
    a, b = np.asarray(a), np.asarray(b)
    high = _high64(a.view(np.uint64), b.view(np.uint64)).view(np.int64)
    return high - np.where(a < 0, b, 0) - np.where(b < 0, a, 0)


def _mul(ins: Instruction, ctx: Context, kind: str) -> Run:
    given = options(ins, "lo hi wide", DTYPE)
    part = next((p for p in ("hi", "wide") if p in given), "lo")
    d, a, b = ins.operands
    return ctx.elementwise(multiply(kind, part), d, _result(kind, part), (a, kind), (b, kind))


def _mad(ins: Instruction, ctx: Context, kind: str) -> Run:
    given = options(ins, "lo hi wide sat cc", DTYPE)
    part = next((p for p in ("hi", "wide") if p in given), "lo")
    result = _result(kind, part)
    d, a, b, c = ins.operands
    if "cc" in given:
        return _mad_carry(ins, ctx, kind, part, carry_in=False)
    product = multiply(kind, part)
    if "sat" in given:

        def fn(a: Any, b: Any, c: Any) -> Any:
            limits = np.iinfo(np.int32)
            return np.clip(product(a, b).astype(np.int64) + c, limits.min, limits.max)

    else:

        def fn(a: Any, b: Any, c: Any) -> Any:
            return product(a, b) + c

    return ctx.elementwise(fn, d, result, (a, kind), (b, kind), (c, result))


@instruction("madc", kind="integer")
def mad_with_carry(ins: Instruction, ctx: Context) -> Run:
    """Multiply and add with the carry flag coming in."""
    given = options(ins, "lo hi cc", DTYPE)
    return _mad_carry(ins, ctx, ins.opcode[-1], "hi" if "hi" in given else "lo", carry_in=True)


def _mad_carry(ins: Instruction, ctx: Context, kind: str, part: str, *, carry_in: bool) -> Run:
    d, a, b, c = ins.operands
    unsigned = f"u{SIZE[kind] * 8}"
    product = multiply(kind, part)
    gets = ctx.reader(a, kind), ctx.reader(b, kind), ctx.reader(c, unsigned)
    put = ctx.writer(d, unsigned)
    get_carry, put_carry = ctx.reader(_CARRY, "pred"), ctx.writer(_CARRY, "pred")
    sets = "cc" in ins.opcode

    def run(lanes: Any) -> None:
        x, y, z = (np.asarray(get(lanes)) for get in gets)
        first = np.asarray(product(x, y)).view(DTYPE[unsigned])
        result = first + z
        carry = result < first
        if carry_in:
            flag = get_carry(lanes).astype(result.dtype)
            result = result + flag
            carry = carry | (result < flag)
        put(lanes, result)
        if sets:
            put_carry(lanes, carry)

    return run


def _result(kind: str, part: str) -> str:
    return _WIDE[kind] if part == "wide" else kind


@instruction("mul24", "mad24", kind="integer")
def mul24(ins: Instruction, ctx: Context) -> Run:
    """Products of the low 24 bits."""
    given = options(ins, "lo hi sat", DTYPE)
    kind = ins.opcode[-1]
    shift = np.int64(16 if "hi" in given else 0)

    def low24(x: Any) -> Any:
        x = np.asarray(x).astype(np.int64)
        return ((x << 40) >> 40) if kind == "s32" else x & 0xFFFFFF

    def fn(a: Any, b: Any, c: Any = 0) -> Any:
        return (((low24(a) * low24(b)) >> shift) + c).astype(np.uint64).astype(np.uint32).view(DTYPE[kind])

    return ctx.elementwise(fn, ins.operands[0], kind, *[(op, kind) for op in ins.operands[1:]])


def divide(a: Any, b: Any) -> Any:
    """Integer quotient rounded to zero; by zero, all ones."""
    a, b = np.broadcast_arrays(np.asarray(a), np.asarray(b))
    quotient = a // b
    if a.dtype.kind == "i":
        quotient = quotient + ((a % b != 0) & ((a < 0) != (b < 0)))
    return np.where(b == 0, np.array(-1).astype(a.dtype), quotient)


def remainder(a: Any, b: Any) -> Any:
    """Integer remainder with the dividend's sign; by zero, all ones."""
    rest = np.asarray(a - divide(a, b) * b)
    return np.where(b == 0, np.array(-1).astype(rest.dtype), rest)


@instruction("rem", kind="integer")
def rem(ins: Instruction, ctx: Context) -> Run:
    """Remainder."""
    return _binary(remainder)(ins, ctx, ins.opcode[-1])


@instruction("sad", kind="integer")
def sad(ins: Instruction, ctx: Context) -> Run:
    """Sum of absolute difference."""
    kind = ins.opcode[-1]
    d, a, b, c = ins.operands

    def fn(a: Any, b: Any, c: Any) -> Any:
        return np.where(a < b, b - a, a - b) + c

    return ctx.elementwise(fn, d, kind, (a, kind), (b, kind), (c, kind))


def _binary(fn: Callable[..., Any]) -> Callable[[Instruction, Context, str], Run]:
    def bind(ins: Instruction, ctx: Context, kind: str) -> Run:
        options(ins, "", DTYPE)
        return ctx.elementwise(fn, ins.operands[0], kind, *[(op, kind) for op in ins.operands[1:]])

    return bind


def _min_max(ins: Instruction, ctx: Context, kind: str) -> Run:
    relu = "relu" in options(ins, "relu", DTYPE)
    ufunc = np.minimum if ins.opcode[0] == "min" else np.maximum
    fn: Callable[..., Any] = (lambda a, b: np.maximum(ufunc(a, b), 0)) if relu else ufunc
    d, a, b = ins.operands
    return ctx.elementwise(fn, d, kind, (a, kind), (b, kind))


_INTEGER: dict[str, Callable[[Any, Any, str], Run]] = {
    "add": _add_sub,
    "sub": _add_sub,
    "mul": _mul,
    "mad": _mad,
    "div": _binary(divide),
    "abs": _binary(np.abs),
    "neg": _binary(np.negative),
    "min": _min_max,
    "max": _min_max,
}


@instruction("dp4a", "dp2a", kind="integer")
def dot_product(ins: Instruction, ctx: Context) -> Run:
    """Dot products of bytes with bytes (dp4a) or of halfwords with two of the bytes (dp2a)."""
    options(ins, "lo hi", DTYPE)
    name = ins.opcode[0]
    kind_a, kind_b = ins.opcode[-2], ins.opcode[-1]
    d, a, b, c = ins.operands
    out = "s32" if "s" in kind_a[0] + kind_b[0] else "u32"
    dtype_a = DTYPE[kind_a[0] + ("8" if name == "dp4a" else "16")]
    dtype_b = DTYPE[kind_b[0] + "8"]
    columns = slice(None) if name == "dp4a" else slice(0, 2) if "lo" in ins.opcode else slice(2, 4)

    def fn(a: Any, b: Any, c: Any) -> Any:
        x = np.ascontiguousarray(a).view(dtype_a).reshape(-1, 4 if name == "dp4a" else 2).astype(np.int64)
        y = np.ascontiguousarray(b).view(dtype_b).reshape(-1, 4)[:, columns].astype(np.int64)
        return ((x * y).sum(axis=1) + c).astype(np.uint64).astype(np.uint32).view(DTYPE[out])

    return ctx.elementwise(fn, d, out, (a, "u32"), (b, "u32"), (c, out))
