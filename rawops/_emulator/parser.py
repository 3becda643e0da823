"""PTX text to decoded instructions."""

from __future__ import annotations

import hashlib
import math
import re
from functools import lru_cache
from typing import Any

from ..errors import UnsupportedPTX
from .operands import Operand, Reg, Sink, Special, Sym, names_of, read_number, read_operands, split_offset
from .pause import no_collection
from .program import Function, Instruction, Place, Program, Variable
from .shared import SHARED_BASE
from .types import DTYPE, SIZE


def parse(ptx: str, entry: str) -> Program:
    """Decode a kernel from PTX text; cached by the text and the name of the entry."""
    return _parse(_Text(ptx), entry)


class _Text:
    """PTX hashed by its digest, so that the cache need not compare megabytes."""

    def __init__(self, ptx: str) -> None:
        self.ptx = ptx
        self.digest = hashlib.sha256(ptx.encode()).digest()

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Text) and self.digest == other.digest


@lru_cache(maxsize=64)
def _parse(text: _Text, entry: str) -> Program:
    with no_collection():
        return _Parser(text.ptx, entry).program()


# ---- the parser ----------------------------------------------------------------------------------------

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_STATEMENT = re.compile(
    r"""\s*(?:
      (?P<filedef>\.file\s+(?P<number>\d+)\s+"(?P<path>[^"]*)"[^\n]*)
    | (?P<section>\.section\s+\S+\s*\{.*?\n\s*\})
    | (?P<meta>\.(?:version|target|address_size)\b[^\n]*)
    | (?P<label>[\w$%]+)\s*:(?!:)\s*(?P<table>\.(?:branchtargets|calltargets|callprototype)[^;]*;)?
    | (?P<open>\{)
    | (?P<close>\})
    | (?P<function>(?:\.(?:visible|extern|weak|common)\s+)*\.(?:entry|func)\b[^{;]*)
    | (?P<body>[^;{}]*(?:\{[^{}]*\}[^;{}]*)*;)
    )""",
    re.X | re.S,
)
# Nearly all statements are one of these: they are matched first.
_USUAL = re.compile(
    r"""\s*(?:
      \.loc\s+(?P<file>\d+)\s+(?P<line>\d+)\s+\d+[^\n]*
    | (?![\w$%]+\s*:(?!:))(?P<plain>[@a-z][^;{}]*);
    )""",
    re.X,
)
_VARIABLE = re.compile(
    r"(?:\.(?:visible|extern|weak|common)\s+)*\.(?P<space>global|shared|const|local|param)\b"
    r"(?P<attributes>(?:\s*\.(?:align\s+\d+|ptr|attribute\([^)]*\)|global|shared|const|local))*)"
    r"(?:\s*\.(?P<vector>v[24]))?\s*\.(?P<type>\w+)"
    r"(?P<attributes2>(?:\s*\.(?:align\s+\d+|ptr|global|shared|const|local))*)"
    r"\s+(?P<name>[\w$%]+)(?P<dims>(?:\[[^\]]*\])*)(?:\s*=\s*(?P<init>.*))?",
    re.S,
)


class _Parser:
    def __init__(self, ptx: str, entry: str) -> None:
        self.text = _COMMENT.sub("", ptx)
        self.entry = entry
        self.instructions: list[Instruction] = []
        self.functions: dict[str, Function] = {}
        self.variables: dict[str, Variable] = {}
        self.files: dict[int, str] = {}
        self.lines: list[tuple[int, int]] = []  # of each instruction, as the files come last
        self.scopes: list[_Scope] = []
        self.instruction_scopes: list[tuple[_Scope, ...]] = []
        self.opcodes: dict[str, tuple[str, ...]] = {}
        self.registers: dict[str, Reg] = {}  # by unique name: one object each, as there are many mentions
        self.target = ""
        self.function: Function | None = None
        self.header_names: dict[str, str] = {}  # parameters of the function whose body comes next
        self.loc = (0, 0)
        self.count = 0

    def program(self) -> Program:
        """Parse everything, then resolve labels, places and addresses."""
        position, end = 0, len(self.text.rstrip())
        while position < end:
            match = _USUAL.match(self.text, position)
            if match is None:
                match = _STATEMENT.match(self.text, position)
                if match is None:
                    raise UnsupportedPTX(f"cannot parse PTX at: {self.text[position : position + 80].strip()!r}")
                self._statement(match)
            elif match["plain"]:
                self._instruction(match["plain"])
            else:
                # Line 0 marks code of no line in particular: the line before is more use to a reader.
                self.loc = (int(match["file"]), int(match["line"]) or self.loc[1])
            position = match.end()
        if self.entry not in self.functions or not self.functions[self.entry].entry:
            names = ", ".join(f.name for f in self.functions.values() if f.entry)
            raise UnsupportedPTX(f"the PTX has no kernel {self.entry!r}; it has: {names or 'none'}")
        self._resolve()
        return self._finish()

    def _statement(self, match: re.Match[str]) -> None:
        kind = match.lastgroup
        if kind == "body":
            self._body(match["body"][:-1].strip())
        elif kind == "filedef":
            self.files[int(match["number"])] = match["path"]
        elif kind == "meta":
            if ".target" in match["meta"]:
                self.target = match["meta"].split()[1].rstrip(",")
        elif kind in ("label", "table"):
            self._label(match["label"], match["table"])
        elif kind == "open":
            self.scopes.append(_Scope())
            if len(self.scopes) == 1:
                self.scopes[0].variables.update(self.header_names)
        elif kind == "close":
            self.scopes.pop()
            if not self.scopes:
                self.function = None
        elif kind == "function":
            self._function(match["function"])

    def _label(self, name: str, table: str | None) -> None:
        scope = self.scopes[-1]
        if table is None:
            scope.labels[name] = len(self.instructions)
        elif table.startswith(".branchtargets"):
            scope.tables[name] = [t.strip() for t in table[len(".branchtargets") : -1].split(",")]

    def _function(self, header: str) -> None:
        entry = ".entry" in header
        name_match = re.search(r"\.(?:entry|func)\s*(\((?P<ret>[^)]*)\))?\s*(?P<name>[\w$]+)", header, re.S)
        if name_match is None:
            raise UnsupportedPTX(f"cannot parse the function header {header.strip()!r}")
        function = Function(name_match["name"], entry)
        rest = header[name_match.end() :]
        params = re.match(r"\s*\((.*?)\)", rest, re.S)
        space = "param" if entry else "local"
        self.header_names = {}
        function.params = [self._parameter(p, space) for p in _split(params[1] if params else "")]
        function.returns = [self._parameter(p, space) for p in _split(name_match["ret"] or "")]
        function.cluster = _dimensions("reqnctapercluster", rest) or (1, 1, 1)
        function.required_block = _dimensions("reqntid", rest)
        most = _dimensions("maxntid", rest)
        function.max_threads = math.prod(most) if most else None
        function.start = len(self.instructions)
        if entry and function.name != self.entry:
            for parameter in function.params:
                del self.variables[parameter.name]
        known = self.functions.get(function.name)
        if known is None or known.start < 0 or function.name != self.entry:
            self.functions[function.name] = function
        self.function = function

    def _parameter(self, text: str, space: str) -> Variable:
        match = _VARIABLE.match(text.strip())
        if match is None:
            raise UnsupportedPTX(f"cannot parse the parameter {text.strip()!r}")
        return self._variable(match, space)

    def _body(self, text: str) -> None:
        if not text:
            if self.function is not None and not self.scopes:
                self.function.start, self.function = -1, None  # a declaration without a body
            return
        if text.startswith(".reg"):
            self.scopes[-1].declare(text, self._unique)
        elif text.startswith("."):
            match = _VARIABLE.match(text)
            if match is not None:
                space = match["space"]
                self._variable(match, "local" if space == "param" else space)
            elif not text.startswith((".pragma", ".maxntid", ".minnctapersm", ".alias")):
                raise UnsupportedPTX(f"the emulator does not know the directive: {text}")
        else:
            self._instruction(text)

    def _unique(self) -> int:
        self.count += 1
        return self.count

    def _variable(self, match: re.Match[str], space: str) -> Variable:
        vector = int(match["vector"][1:]) if match["vector"] else 1
        element = SIZE["u8" if match["type"] == "pred" else match["type"]]
        size = element * vector
        for dim in re.findall(r"\[\s*(\d*)\s*\]", match["dims"] or ""):
            size *= int(dim or 0)
        align = re.search(r"align\s+(\d+)", match["attributes"] + match["attributes2"])
        variable = Variable(match["name"], space, size, int(align[1]) if align else element * vector)
        if match["init"]:
            _initialise(variable, match["init"], match["type"])
        if space == "local":
            # A name declared again in another scope or function is another variable.
            names = self.header_names
            if self.scopes:
                names = self.scopes[-1].variables
                self.scopes[-1].names.clear()
            names[variable.name] = f"{variable.name}#{self._unique()}"
            variable.name = names[variable.name]
        self.variables[variable.name] = variable
        return variable

    # ---- instructions --------------------------------------------------------------------------------

    def _instruction(self, text: str) -> None:
        text = " ".join(text.split())
        guard = None
        rest = text
        if text.startswith("@"):
            predicate, rest = text[1:].split(None, 1)
            negated = predicate.startswith("!")
            register = self._name(predicate.lstrip("!"))
            assert isinstance(register, Reg)
            guard = (register, negated)
        opcode, _, operands = rest.partition(" ")
        parts = self.opcodes.get(opcode)
        if parts is None:
            parts = self.opcodes[opcode] = tuple(opcode.split("."))
        parsed = read_operands(operands, self._name)
        function = self.function.name if self.function else ""
        index = len(self.instructions)
        self.instructions.append(Instruction(parts, parsed, guard, Place("", 0), text, index, function))
        self.lines.append(self.loc)
        self.instruction_scopes.append(tuple(self.scopes))

    def _name(self, token: str) -> Operand:
        """A token that is not punctuation: register, special register, number or symbol."""
        names = self.scopes[-1].names
        found = names.get(token)
        if found is None:
            found = names[token] = self._look_up(token)
        return found

    def _look_up(self, token: str) -> Operand:
        if token == "_":
            return Sink()
        number = read_number(token)
        if number is not None:
            return number
        base, sign, offset = split_offset(token) if "+" in token or "-" in token else (token, 1, 0)
        for scope in reversed(self.scopes):
            register = scope.register(base)
            if register is not None:
                return self.registers.setdefault(register.name, register)
            if base in scope.variables:
                base = scope.variables[base]
                break
        if base.startswith("%") or base == "WARP_SZ":
            return Special(base.lstrip("%"))
        return Sym(base, sign * offset)

    # ---- after the last line -------------------------------------------------------------------------

    def _resolve(self) -> None:
        places: dict[tuple[int, int], Place] = {}
        for ins, loc, scopes in zip(self.instructions, self.lines, self.instruction_scopes, strict=True):
            if loc not in places:
                places[loc] = Place(self.files.get(loc[0], ""), loc[1])
            ins.place = places[loc]
            if ins.opcode[0] in ("bra", "brx"):
                names = [op.name for op in ins.operands if isinstance(op, Sym)]
                ins.targets = tuple(t for name in names for t in _find_labels(name, scopes, ins))
            elif ins.opcode[0] == "call":
                names = [op.name for op in ins.operands if isinstance(op, Sym)]
                function = self.functions.get(names[0]) if names else None
                ins.targets = (function.start,) if function and function.start >= 0 else ()

    def _drop_unused_variables(self) -> None:
        """Forget the module's variables that no code names: NVRTC writes out every static one, as ptxas does not."""
        used: set[str] = set()
        todo = {name for ins in self.instructions for name in names_of(Sym, ins.operands)}
        while todo:
            used |= todo
            known = [self.variables[name] for name in todo if name in self.variables]
            todo = {sym.name for variable in known for sym in variable.relocations.values()} - used
        module = ("global", "const", "shared")
        self.variables = {n: v for n, v in self.variables.items() if n in used or v.space not in module}

    def _finish(self) -> Program:
        self._drop_unused_variables()
        sizes = dict.fromkeys(("shared", "local", "const", "param"), 0)
        sizes["shared"] = SHARED_BASE
        dynamic = [v for v in self.variables.values() if v.space == "shared" and v.size == 0]
        for variable in self.variables.values():
            if variable.space in sizes and variable not in dynamic:
                sizes[variable.space] = variable.address = _align(sizes[variable.space], variable.align)
                sizes[variable.space] += variable.size
        # All extern shared arrays are the same dynamic memory, after the static.
        sizes["shared"] = _align(sizes["shared"], max((v.align for v in dynamic), default=1))
        for variable in dynamic:
            variable.address = sizes["shared"]
        sizes["shared"] -= SHARED_BASE
        entry = self.functions[self.entry]
        return Program(entry, self.target, self.instructions, self.functions, self.variables, sizes)


class _Scope:
    """Names declared between two braces."""

    def __init__(self) -> None:
        self.types: dict[str, str] = {}
        self.ranges: dict[str, str] = {}
        self.suffix = ""
        self.labels: dict[str, int] = {}
        self.tables: dict[str, list[str]] = {}
        self.variables: dict[str, str] = {}
        self.names: dict[str, Operand] = {}  # what tokens stand for, as far as it has been asked

    def declare(self, text: str, unique: Any) -> None:
        """``.reg .b32 %r<9>, x``"""
        self.names.clear()
        if not self.suffix:
            self.suffix = f"#{unique()}"
        match = re.match(r"\.reg\s*(?:\.(v[24])\s*)?\.(\w+)\s+(.*)", text, re.S)
        if match is None:
            raise UnsupportedPTX(f"cannot parse the register declaration {text!r}")
        for name in match[3].split(","):
            name, _, count = name.strip().partition("<")
            (self.ranges if count else self.types)[name] = match[2]

    def register(self, name: str) -> Reg | None:
        """The register of that name declared here, if any."""
        kind = self.types.get(name)
        if kind is None and self.ranges:
            kind = self.ranges.get(name.rstrip("0123456789"))
        return None if kind is None else Reg(name + self.suffix, kind)


# ---- small pieces --------------------------------------------------------------------------------------


def _find_labels(name: str, scopes: tuple[_Scope, ...], ins: Instruction) -> list[int]:
    """Where a label (or a table of labels) leads, innermost scope first."""
    for scope in reversed(scopes):
        if name in scope.labels:
            return [scope.labels[name]]
        if name in scope.tables:
            return [t for label in scope.tables[name] for t in _find_labels(label, scopes, ins)]
    raise UnsupportedPTX(f"{ins.place}: no label {name!r} for: {ins.text}")


def _dimensions(directive: str, header: str) -> tuple[int, int, int] | None:
    """The three numbers of a directive in a function's header, if it is there."""
    match = re.search(rf"\.{directive}\s+([\d,\s]+)", header)
    if match is None:
        return None
    return (*(int(d) for d in match[1].split(",")), 1, 1)[:3]  # type: ignore[return-value]


def _split(text: str) -> list[str]:
    return [part for part in text.split(",") if part.strip()]


def _align(offset: int, align: int) -> int:
    return -(-offset // align) * align


def _initialise(variable: Variable, text: str, element_type: str) -> None:
    """Set a variable's initial bytes from ``{1, 2, 3}`` or a single value."""
    dtype = DTYPE[element_type]
    data = bytearray(variable.size)
    for i, item in enumerate(_split(re.sub(r"[{}\s]", "", text))):
        number = read_number(item)
        at = i * dtype.itemsize
        if number is not None:
            data[at : at + dtype.itemsize] = number.value(element_type).tobytes()
            continue
        base, sign, offset = split_offset(re.sub(r"^generic\((.*)\)", r"\1", item))
        variable.relocations[at] = Sym(base, sign * offset)
    variable.data = bytes(data)
