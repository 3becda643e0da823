"""A decoded kernel: its instructions, functions and variables."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from .operands import Operand, Reg, Sym, names_of


@dataclass(frozen=True, slots=True)
class Place:
    """A source line."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else "unknown line"


@dataclass(slots=True, eq=False)
class Instruction:
    """One decoded instruction.

    Attributes
    ----------
    opcode : tuple of str
        The opcode split at its dots: ``("ld", "global", "v4", "f32")``.
    guard : (Reg, bool) or None
        Predicate of ``@%p`` and whether it is negated.
    targets : tuple of int
        For branches and calls: the indices they may go to.
    index : int
        Position in `Program.instructions`.
    """

    opcode: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: tuple[Reg, bool] | None
    place: Place
    text: str
    index: int
    function: str
    targets: tuple[int, ...] = ()


@dataclass(slots=True)
class Variable:
    """A variable in some state space. `address` is its offset there; `data` its initial bytes if any."""

    name: str
    space: str
    size: int
    align: int
    data: bytes | None = None
    address: int = 0
    relocations: dict[int, Sym] = field(default_factory=dict)


@dataclass(slots=True)
class Function:
    """A function: where it starts, its parameters by name, in order, and the blocks that an entry may have."""

    name: str
    entry: bool
    start: int = -1
    params: list[Variable] = field(default_factory=list)
    returns: list[Variable] = field(default_factory=list)
    cluster: tuple[int, int, int] = (1, 1, 1)
    required_block: tuple[int, int, int] | None = None
    max_threads: int | None = None


@dataclass(eq=False)
class Program:
    """A decoded kernel with everything it can call.

    Attributes
    ----------
    sizes : dict
        Bytes used of each space that has a layout: "shared" (static), "local", "const", "param".
    storage : dict
        Module-scope variables as bytes: they keep their values from launch to launch.
    """

    entry: Function
    target: str
    instructions: list[Instruction]
    functions: dict[str, Function]
    variables: dict[str, Variable]
    sizes: dict[str, int]
    storage: dict[str, np.ndarray] = field(default_factory=dict)

    @cached_property
    def read_registers(self) -> frozenset[str]:
        """Registers named anywhere but as the result of an atomic: others need no old value."""
        names: set[str] = set()
        for ins in self.instructions:
            operands = ins.operands[1:] if ins.opcode[0] == "atom" else ins.operands
            names.update(names_of(Reg, operands))
            if ins.guard is not None:
                names.add(ins.guard[0].name)
        return frozenset(names)

    @property
    def cluster(self) -> tuple[int, int, int]:
        """Cluster shape that the kernel was compiled for."""
        return self.entry.cluster
