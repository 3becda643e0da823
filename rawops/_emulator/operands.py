"""Operands of PTX instructions: what they are, and how they are read."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .types import DTYPE, PACKED

_OPERAND = re.compile(r"[\[\](){},|!]|[^\s\[\](){},|!]+")
_PUNCTUATION = frozenset("[](){}|!")
_HEX_FLOAT = {"f": 4, "d": 8}


@dataclass(frozen=True, slots=True)
class Reg:
    """A register. Names declared in an inner scope carry a suffix that makes them unique."""

    name: str
    type: str


@dataclass(frozen=True, slots=True)
class Not:
    """A negated predicate, ``!%p1``."""

    operand: Reg


@dataclass(frozen=True, slots=True)
class Imm:
    """A constant: an int, or the bits of a float constant with its size (``0f...`` 4, ``0d...`` 8)."""

    number: int
    float_size: int = 0

    def value(self, ptx_type: str) -> Any:
        """The constant as a NumPy scalar of a type (an array of two for packed types)."""
        dtype = DTYPE[ptx_type]
        if ptx_type in PACKED:
            return np.array([int(self.number) & 0xFFFFFFFF], np.uint32).view(dtype)
        if self.float_size == dtype.itemsize or (self.float_size and dtype.kind == "f"):
            exact = np.array([self.number], f"u{self.float_size}").view(f"f{self.float_size}")
            return (exact.astype(dtype) if dtype.kind == "f" else exact.view(dtype))[0]
        if dtype.kind == "b":
            return np.bool_(self.number)
        if dtype.kind == "f":
            return dtype.type(self.number)
        size = dtype.itemsize
        return np.frombuffer((self.number & ((1 << 8 * size) - 1)).to_bytes(size, "little"), dtype)[0]


@dataclass(frozen=True, slots=True)
class Special:
    """A special register, as ``%tid.x``."""

    name: str


@dataclass(frozen=True, slots=True)
class Sym:
    """The name of a variable or function, plus a constant offset."""

    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Vec:
    """A vector of operands, ``{a, b}``."""

    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two destinations, ``d|p``."""

    first: Operand
    second: Operand


@dataclass(frozen=True, slots=True)
class Sink:
    """The destination ``_``."""


@dataclass(frozen=True, slots=True)
class Mem:
    """An address in brackets: ``[base + offset]``, and the coordinates of ``[map, {x, y}]`` as `extra`."""

    base: Reg | Sym | Imm
    offset: int = 0
    extra: tuple[Operand, ...] = ()


@dataclass(frozen=True, slots=True)
class Rows:
    """The same operand of several instructions that run as one: their registers end to end."""

    registers: tuple[Reg, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """Operands in parentheses, as in a call."""

    items: tuple[Operand, ...]


Operand = Reg | Not | Imm | Special | Sym | Vec | Pair | Sink | Mem | Rows | Group


def read_operands(text: str, name: Callable[[str], Operand]) -> tuple[Operand, ...]:
    """The operands in the text of an instruction; `name` says what a name or number stands for."""
    if _PUNCTUATION.isdisjoint(text):
        return tuple(map(name, text.replace(" ", "").split(","))) if text else ()
    return _Operands(_OPERAND.findall(text), name).all()


class _Operands:
    """Recursive descent over the operand tokens of one instruction."""

    def __init__(self, tokens: list[str], name: Callable[[str], Operand]) -> None:
        self.tokens = tokens
        self.at = 0
        self.name = name

    def all(self) -> tuple[Operand, ...]:
        """Operands separated by commas, to the end or to a closing bracket."""
        items: list[Operand] = []
        while self.at < len(self.tokens) and self.tokens[self.at] not in ")}]":
            items.append(self.one())
            if self.at < len(self.tokens) and self.tokens[self.at] == ",":
                self.at += 1
        return tuple(items)

    def one(self) -> Operand:
        token = self.tokens[self.at]
        self.at += 1
        if token == "{":
            return Vec(self._bracketed())
        if token == "(":
            return Group(self._bracketed())
        if token == "[":
            return self._memory()
        if token == "!":
            return Not(self.one())
        operand = self.name(token)
        if self.at < len(self.tokens) and self.tokens[self.at] == "|":
            self.at += 1
            return Pair(operand, self.one())
        return operand

    def _bracketed(self) -> tuple[Operand, ...]:
        items = self.all()
        self.at += 1
        return items

    def _memory(self) -> Mem:
        close = self.tokens.index("]", self.at)
        first = self.at
        while self.at < close and self.tokens[self.at] not in ",{":
            self.at += 1
        base, sign, offset = split_offset("".join(self.tokens[first : self.at]))
        target = self.name(base)
        if self.tokens[self.at] == ",":
            self.at += 1
        extra = self.all()
        self.at += 1
        if isinstance(target, Sym):
            return Mem(Sym(target.name), target.offset + sign * offset, extra)
        return Mem(target, sign * offset, extra)


def names_of(kind: type[Reg] | type[Sym], operands: tuple[Operand, ...]) -> Iterator[str]:
    """The names of all registers, or symbols, in operands."""
    for op in operands:
        match op:
            case Reg() | Sym():
                if isinstance(op, kind):
                    yield op.name
            case Not():
                yield from names_of(kind, (op.operand,))
            case Vec() | Group():
                yield from names_of(kind, op.items)
            case Pair():
                yield from names_of(kind, (op.first, op.second))
            case Mem():
                yield from names_of(kind, (op.base, *op.extra))


def split_offset(token: str) -> tuple[str, int, int]:
    """Split "base+12", "base+-4" or "base-4" into base, sign and number."""
    match = re.fullmatch(r"(.+?)\s*(\+-|\+|-)\s*(0[xX][0-9a-fA-F]+|\d+)U?", token)
    if match is None:
        return token, 1, 0
    return match[1], 1 if match[2] == "+" else -1, int(match[3], 0)


def read_number(token: str) -> Imm | None:
    """A literal as an immediate, or None."""
    if not (token[0].isdigit() or token[0] in "+-"):
        return None
    match = re.fullmatch(r"0([fdFD])([0-9a-fA-F]{8}|[0-9a-fA-F]{16})", token)
    if match is not None:
        return Imm(int(match[2], 16), _HEX_FLOAT[match[1].lower()])
    match = re.fullmatch(r"([+-]?)(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?", token)
    if match is not None:
        text = match[2]
        octal = len(text) > 1 and text[0] == "0" and text.isdigit()
        number = int(text, 8 if octal else 0)
        return Imm(-number if match[1] == "-" else number)
    try:
        return Imm(struct.unpack("<Q", struct.pack("<d", float(token)))[0], 8)
    except ValueError:
        return None
