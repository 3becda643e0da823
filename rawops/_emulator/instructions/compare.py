"""Comparisons and selections."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..operands import Pair
from ..rounding import flush
from ..types import DTYPE, PACKED, is_float, widen
from . import Run, instruction, options, unsupported

if TYPE_CHECKING:
    from ..context import Context
    from ..operands import Operand
    from ..program import Instruction

_ORDERED: dict[str, Callable[[Any, Any], Any]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}
_OPPOSITE = {"equ": "ne", "neu": "eq", "ltu": "ge", "leu": "gt", "gtu": "le", "geu": "lt"}
_COMBINE = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def _comparison(name: str, kind: str) -> Callable[[Any, Any], Any] | None:
    """The function of a comparison, false for NaNs if ordered, true if unordered."""
    if name == "num":
        return lambda a, b: ~(np.isnan(a) | np.isnan(b))
    if name == "nan":
        return lambda a, b: np.isnan(a) | np.isnan(b)
    if name in _OPPOSITE:
        opposite = _comparison(_OPPOSITE[name], kind)
        return None if opposite is None else lambda a, b: ~opposite(a, b)
    if name == "ne" and is_float(kind):  # NumPy's is true for NaNs
        return lambda a, b: (a < b) | (a > b)
    if name == "neu":
        return np.not_equal
    return _ORDERED.get(name)


@instruction("setp")
def setp(ins: Instruction, ctx: Context) -> Run:
    """Compare into one or two predicates, perhaps combined with a third."""
    compare, combine = _compare(ins)
    target, a, b, *rest = ins.operands
    kind = ins.opcode[-1]
    if kind in PACKED:
        return _setp_packed(ins, ctx, compare, combine)
    if combine is None and not isinstance(target, Pair):
        return ctx.elementwise(compare, target, "pred", (a, kind), (b, kind))
    first, second = (target.first, target.second) if isinstance(target, Pair) else (target, None)
    get_a, get_b = ctx.reader(a, kind), ctx.reader(b, kind)
    get_c = ctx.reader(rest[0], "pred") if rest else None
    put_first = ctx.writer(first, "pred")
    put_second = ctx.writer(second, "pred") if second is not None else None

    def run(lanes: Any) -> None:
        result = compare(get_a(lanes), get_b(lanes))
        other = ~result
        if combine is not None and get_c is not None:
            extra = get_c(lanes)
            result, other = combine(result, extra), combine(other, extra)
        put_first(lanes, result)
        if put_second is not None:
            put_second(lanes, other)

    return run


def _compare(ins: Instruction) -> tuple[Callable[[Any, Any], Any], Any]:
    """The comparison on values as a reader gives them, and the combining operation or None."""
    kind = ins.opcode[-1]
    modifiers = [m for m in ins.opcode[1:-1] if m != "ftz"]
    compare = _comparison(modifiers[0], kind) if kind in DTYPE else None
    if compare is None:
        raise unsupported(ins)
    combine = next((_COMBINE[m] for m in modifiers[1:] if m in _COMBINE), None)
    if kind.startswith("bf16"):
        return lambda a, b: compare(widen(a, kind), widen(b, kind)), combine
    if "ftz" in ins.opcode and kind == "f32":
        return lambda a, b: compare(flush(a), flush(b)), combine
    return compare, combine


def _setp_packed(ins: Instruction, ctx: Context, compare: Any, combine: Any) -> Run:
    """Two comparisons at once, one for each half."""
    target, a, b, *rest = ins.operands
    kind = ins.opcode[-1]
    targets = (target.first, target.second) if isinstance(target, Pair) else (target,)
    puts = [ctx.writer(t, "pred") for t in targets]
    get_a, get_b = ctx.reader(a, kind), ctx.reader(b, kind)
    get_c = ctx.reader(rest[0], "pred") if rest else None

    def run(lanes: Any) -> None:
        result = compare(get_a(lanes), get_b(lanes)).reshape(-1, 2)
        for half, put in enumerate(puts):
            value = result[:, half]
            put(lanes, combine(value, get_c(lanes)) if combine is not None and get_c is not None else value)

    return run


@instruction("set")
def set_value(ins: Instruction, ctx: Context) -> Run:
    """Compare into a number: all ones (integers) or 1.0 (floats) where true."""
    out, kind = ins.opcode[-2], ins.opcode[-1]
    if kind in PACKED and out not in PACKED:
        out = "u16x2"  # a mask for each half
    compare, combine = _compare(ins)
    d, a, b, *rest = ins.operands
    true = {"f": 1, "u": -1, "s": -1, "b": 0x3F80}[out[0]]
    dtype = DTYPE[out]

    def fn(a: Any, b: Any, *extra: Any) -> Any:
        result = compare(a, b)
        if extra:
            result = combine(result, np.repeat(extra[0], 2) if kind in PACKED else extra[0])
        return np.where(result, np.array(true).astype(dtype), dtype.type(0))

    sources: list[tuple[Operand, str]] = [(a, kind), (b, kind)]
    if rest:
        sources.append((rest[0], "pred"))
    return ctx.elementwise(fn, d, out, *sources)


@instruction("selp", kind="move")
def selp(ins: Instruction, ctx: Context) -> Run:
    """Select by a predicate."""
    options(ins, "", DTYPE)
    kind = ins.opcode[-1]
    d, a, b, p = ins.operands
    return ctx.elementwise(lambda a, b, p: np.where(p, a, b), d, kind, (a, kind), (b, kind), (p, "pred"))


@instruction("slct", kind="move")
def slct(ins: Instruction, ctx: Context) -> Run:
    """Select by the sign of a number."""
    selector = ins.opcode[-1]
    kind = ins.opcode[-2]
    d, a, b, c = ins.operands
    return ctx.elementwise(lambda a, b, c: np.where(c >= 0, a, b), d, kind, (a, kind), (b, kind), (c, selector))
