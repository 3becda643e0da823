"""Atomic operations and reductions on memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..operands import Mem, Reg, Vec
from ..rounding import canonical_nans, flush, propagate_nans
from ..types import DTYPE, PACKED, SIZE, UINT, narrow, widen
from . import Run, instruction, unsupported
from .memory import fences, space_of, vector_length

if TYPE_CHECKING:
    from ..context import Context
    from ..lanes import Lanes
    from ..program import Instruction

Update = Callable[..., Any]

_PLAIN: dict[str, Update] = {
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "exch": lambda old, new: new,
    "inc": lambda old, limit: np.where(old >= limit, 0, old + 1),
    "dec": lambda old, limit: np.where((old == 0) | (old > limit), limit, old - 1),
    "cas": lambda old, expected, new: np.where(old == expected, new, old),
}


def _add32(old: Any, value: Any) -> Any:
    result = old + value
    canonical_nans(result)
    return result


# Floats are added by the multiprocessor in shared memory but by the L2 cache in global memory: there
# float32 subnormals count as zero, and float64 NaNs pass through with the new value's first.
_ADD_IN_SHARED: dict[str, Update] = {
    "f32": _add32,
    "f64": lambda old, value: propagate_nans(old + value, value, old),
}
_ADD_IN_GLOBAL: dict[str, Update] = {
    "f32": lambda old, value: flush(_add32(flush(old), flush(value))),
    "f64": lambda old, value: np.where(np.isnan(value), value, np.where(np.isnan(old), old, old + value)),
}


def _update(name: str, kind: str) -> Update | None:
    """``update(old, *operands) -> new`` on values as a reader gives them, in shared memory."""
    if name in _PLAIN:
        return _PLAIN[name]
    if name == "add" and kind in _ADD_IN_SHARED:
        return _ADD_IN_SHARED[kind]
    base = {"add": np.add, "min": np.minimum, "max": np.maximum}.get(name)
    if base is None or DTYPE[kind].itemsize > 2 or kind[0] in "us":
        return base
    if name != "add":
        base = np.fmin if name == "min" else np.fmax
    return lambda old, value: narrow(base(widen(old, kind), widen(value, kind)), kind)


def operation_of(ins: Instruction, kind: str, *, in_global: bool = False) -> Atomic:
    """The operation that an opcode names, on elements of a type."""
    name = next((m for m in ins.opcode if m in _PLAIN or m in ("add", "min", "max")), "")
    update = _update(name, kind) if kind in DTYPE else None
    if update is None or SIZE[kind] == 16:
        raise unsupported(ins)
    if in_global and name == "add":
        update = _ADD_IN_GLOBAL.get(kind, update)
    return Atomic(update, kind)


@instruction("atom", "red", kind="memory")
def atom(ins: Instruction, ctx: Context) -> Run:
    """Read-modify-write, one lane after another in lane order."""
    kind = ins.opcode[-2] if ins.opcode[-1] == "noftz" else ins.opcode[-1]
    in_shared, in_global = operation_of(ins, kind), operation_of(ins, kind, in_global=True)
    returns = ins.opcode[0] == "atom"
    operands = ins.operands[1:] if returns else ins.operands
    mem = operands[0]
    assert isinstance(mem, Mem)
    n = vector_length(ins)
    sources = [op.items if isinstance(op, Vec) else (op,) for op in operands[1 : 3 if "cas" in ins.opcode else 2]]
    gets = [[ctx.reader(op, kind) for op in items] for items in sources]
    target = ins.operands[0] if returns else None
    targets = target.items if isinstance(target, Vec) else (target,)
    wanted = [op for op in targets if isinstance(op, Reg) and op.name in ctx.program.read_registers]
    puts = [ctx.writer(op, kind) for op in targets] if wanted else []
    address, space = ctx.address(mem), space_of(ins, ctx)
    size, orders = SIZE[kind], fences(ins, ctx)

    def run(lanes: Lanes) -> None:
        where = address(lanes)
        if orders:
            ctx.races.fence(ctx.races.agents(lanes.warps))
        for i in range(n):
            values = [_broadcast(get[i](lanes), lanes.n, kind) for get in gets]
            old = np.empty(lanes.n, UINT[size])
            pieces = space.locate(where + np.uint64(i * size) if i else where, size, lanes.ids, "atomic")
            for view, index, part in pieces:
                chosen = slice(None) if part is None else part
                picked = [v[chosen] for v in values]
                operation = in_shared if view.base is ctx.shared.data else in_global
                if operation.apply(view, index, picked, old if puts else None, chosen):
                    ctx.launch.progress += 1
            if puts:
                puts[i](lanes, old.view(DTYPE[kind]))

    return run


def _broadcast(values: Any, n: int, kind: str) -> np.ndarray:
    """Operands as UINT of the access, shape (n,)."""
    values = np.asarray(values)
    if kind in PACKED:
        values = np.ascontiguousarray(values).view(np.uint32)
    return np.broadcast_to(values.reshape(-1), n)


class Atomic:
    """Applies an operation to memory in lane order, as few NumPy calls as the collisions allow."""

    def __init__(self, update: Update, kind: str) -> None:
        self._update = update
        self._dtype = DTYPE[kind]
        # Without old values to return, NumPy's own in-order loop does. Float additions that are more than
        # np.add settle their flushing and NaNs by adding -0 before and after.
        self._settles = update in (*_ADD_IN_SHARED.values(), *_ADD_IN_GLOBAL.values())
        self._quick = np.add if self._settles else update if isinstance(update, np.ufunc) else None
        self._integer_add = update is np.add and self._dtype.kind in "iu" and not kind.startswith("bf")

    def apply(
        self, view: np.ndarray, index: np.ndarray, values: list[np.ndarray], old: np.ndarray | None, at: Any
    ) -> bool:
        """Update ``view[index]``; put what was there into ``old[at]``. Returns whether anything changed."""
        if len(index) == 1 or not _collide(index):
            before = view.take(index)
            after = self.combine(before, values)
            view[index] = after
            if old is not None:
                old[at] = before
            return not np.array_equal(before, after)
        if old is None and self._quick is not None:
            typed, operand = view.view(self._dtype), np.ascontiguousarray(values[0]).view(self._dtype)
            nothing = self._dtype.type(-0.0)
            self._quick.at(typed, index, self._update(operand, nothing) if self._settles else operand)
            if self._settles:
                typed[index] = self._update(typed.take(index), nothing)
            return True
        order = np.argsort(index, kind="stable")
        sorted_index = index[order]
        first = np.concatenate(([True], sorted_index[1:] != sorted_index[:-1]))
        sorted_values = [v[order] for v in values]
        if self._integer_add:
            before, changed = self._running_sums(view, sorted_index, first, sorted_values[0])
        else:
            before, changed = self._rounds(view, sorted_index, first, sorted_values)
        if old is not None:
            unsorted = np.empty_like(before)
            unsorted[order] = before
            old[at] = unsorted
        return changed

    def combine(self, before: np.ndarray, values: list[np.ndarray]) -> np.ndarray:
        """What becomes of elements, all different, as bits."""
        typed = (np.ascontiguousarray(v).view(self._dtype) for v in values)
        return np.ascontiguousarray(self._update(before.view(self._dtype), *typed)).view(before.dtype)

    def _running_sums(
        self, view: np.ndarray, index: np.ndarray, first: np.ndarray, values: np.ndarray
    ) -> tuple[np.ndarray, bool]:
        """Integer addition: what a lane finds is the start plus what lanes before it added."""
        values = values.view(view.dtype)
        sums = np.cumsum(values, dtype=view.dtype) - values
        starts = np.flatnonzero(first)
        group = np.cumsum(first) - 1
        before = view.take(index) + (sums - sums[starts][group])
        ends = np.append(starts[1:], len(index)) - 1
        view[index[ends]] = before[ends] + values[ends]
        return before, bool(values.any())

    def _rounds(
        self, view: np.ndarray, index: np.ndarray, first: np.ndarray, values: list[np.ndarray]
    ) -> tuple[np.ndarray, bool]:
        """Any operation: in round r the r-th lane of each address."""
        starts = np.flatnonzero(first)
        group = np.cumsum(first) - 1
        rank = np.arange(len(index)) - starts[group]
        before = np.empty(len(index), view.dtype)
        changed = False
        by_rank = np.argsort(rank, kind="stable")
        for lanes in np.split(by_rank, np.cumsum(np.bincount(rank))[:-1]):
            there = index[lanes]
            found = view.take(there)
            after = self.combine(found, [v[lanes] for v in values])
            view[there] = after
            before[lanes] = found
            changed = changed or not np.array_equal(found, after)
        return before, changed


def _collide(index: np.ndarray) -> bool:
    """Whether any two indices coincide."""
    if (index[1:] > index[:-1]).all():
        return False
    ordered = np.sort(index)
    return bool((ordered[1:] == ordered[:-1]).any())
