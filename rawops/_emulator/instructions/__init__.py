"""The registry of instructions: one module a family, each function binding one opcode.

A family registers *binders*::

    @instruction("shfl", scope="warp", member_mask=True)
    def shfl(ins, ctx):
        value = ctx.reader(ins.operands[1], "b32")          # decode once
        def run(lanes):                                     # executed many times
            ...
        return run

`run(lanes)` executes the instruction for a `Lanes` group and returns None (the lanes go on to the next
instruction) or the `Wait` of each part of it that may not go on yet. Guards (`@%p`) are applied before `run`
is called; `lanes` is never empty. Control flow (bra, brx, call, ret, exit) is the machine's own.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ...errors import UnsupportedPTX
from ..types import is_float

if TYPE_CHECKING:
    from ..context import Context
    from ..lanes import Lanes, Wait
    from ..program import Instruction

Run = Callable[["Lanes"], "list[Wait] | None"]
Binder = Callable[["Instruction", "Context"], Run]


@dataclass(frozen=True, slots=True)
class Entry:
    """One registered opcode.

    Attributes
    ----------
    binder : callable
        Makes the closure.
    scope : {"lane", "warp", "warpgroup"}
        Whose lanes have to stand at the instruction before it runs: any, whole warps, whole warpgroups.
    member_mask : bool
        With scope "warp": the last operand names the lanes that have to be there; without it, every live
        lane of the warp has to.
    kind : str
        The class under which the report counts the instruction.
    fuses : bool
        Neighbours with the same opcode may run as one instruction with `Rows` of registers: what it computes
        depends on its operands alone, element by element.
    """

    binder: Binder
    scope: str
    member_mask: bool
    kind: str
    fuses: bool


_REGISTRY: dict[str, Entry] = {}


def instruction(
    *names: str, scope: str = "lane", member_mask: bool = False, kind: str = "integer", fuses: bool = False
) -> Callable[[Binder], Binder]:
    """Register a binder for opcodes.

    Parameters
    ----------
    *names : str
        First tokens of the opcode ("shfl") or several of them ("cp.async.bulk"): the longest registered
        name that the opcode starts with wins.
    scope, member_mask, kind, fuses
        See `Entry`. `kind` is one of "integer", "float", "convert", "move", "memory", "control", "warp",
        "barrier", "matrix", "async"; "arithmetic" is split into integer and float by type.
    """

    def register(binder: Binder) -> Binder:
        for name in names:
            if name in _REGISTRY:
                raise ValueError(f"instruction {name!r} is registered twice")
            _REGISTRY[name] = Entry(binder, scope, member_mask, kind, fuses)
        return binder

    return register


@functools.cache
def _find(opcode: tuple[str, ...]) -> Entry | None:
    for length in range(min(len(opcode), 5), 0, -1):
        entry = _REGISTRY.get(".".join(opcode[:length]))
        if entry is not None:
            return entry
    return None


def lookup(ins: Instruction) -> Entry:
    """The entry for an instruction, by its longest registered prefix."""
    entry = _find(ins.opcode)
    if entry is None:
        raise unsupported(ins)
    return entry


def kind_of(ins: Instruction) -> str:
    """The class under which the report counts an instruction."""
    entry = _find(ins.opcode)
    if entry is None:
        return "unknown"
    if entry.kind != "arithmetic":
        return entry.kind
    return "float" if is_float(ins.opcode[-1]) else "integer"


def unsupported(ins: Instruction, detail: str = "") -> UnsupportedPTX:
    """The error for an instruction, or a form of it, that the emulator does not know."""
    reason = f" ({detail})" if detail else ""
    return UnsupportedPTX(f"{ins.place}: the emulator does not know the instruction{reason}: {ins.text}")


def options(ins: Instruction, known: str, *tables: Any) -> set[str]:
    """The modifiers after the first token as a set, refused unless all are known.

    Parameters
    ----------
    known : str
        Modifiers accepted as they are, separated by spaces.
    *tables : container
        More accepted modifiers, as of types or comparison names.
    """
    accepted = set(known.split())
    given = set(ins.opcode[1:])
    for name in given - accepted:
        if not any(name in table for table in tables):
            raise unsupported(ins, f"modifier .{name}")
    return given


# Each module of this package is a family; it registers itself when imported.
for _module in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
