"""Who may import whom: every import of the package, read from its syntax tree, against the layers of the design."""

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "rawops"
CUDA = ROOT / "cuda_src"

OPS = {"gemm", "lora", "attention", "paged_kv", "sparse", "lsmr", "rowwise"}
SIDEWAYS = {("paged_kv", "attention"), ("lora", "gemm"), ("lsmr", "sparse")}
TOP = {"", "__main__", "_demo"}  # "" is rawops/__init__.py, which gathers the public names
# Top to bottom: a module of the runtime imports from the lines below its own.
RUNTIME = [
    {"custom"},
    {"explain"},
    {"call", "kernel", "paper", "workspace"},
    {"arrays"},
    {"device"},
    {"launches"},
    {"boards", "compiler", "tensormap"},
    {"cache", "checks", "progress", "sources"},
    {"copies", "dtypes", "held"},
]
HEADERS = {"cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h"}
# Slow or absent on some machines: imported inside the functions that need them, or never.
NOT_AT_IMPORT = {"cupy", "cupyx", "cuda", "torch", "scipy", "rich", "platformdirs", "jax", "numba"}


def module_name(path: Path) -> str:
    """Dotted name below rawops: "" for the package itself, "_runtime.device"."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


class Import(NamedTuple):
    """An absolute dotted name that a module imports."""

    name: str
    line: int
    lazy: bool  # inside a function


def imports_of(name: str) -> list[Import]:
    package = ["rawops", *filter(None, name.split("."))]
    if MODULES[name].stem != "__init__":
        package.pop()
    return imports_in(MODULES[name].read_text(encoding="utf-8"), package)


def imports_in(source: str, package: list[str]) -> list[Import]:
    """Every import of a source text that belongs to `package`."""
    found = []

    def visit(node: ast.AST, lazy: bool) -> None:
        lazy |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, node.lineno, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = [*base, *filter(None, [node.module])]
            found.extend(Import(".".join([*origin, alias.name]), node.lineno, lazy) for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child, lazy)

    visit(ast.parse(source), False)
    return found


def target_of(imported: str) -> str | None:
    """The module of ours that an imported name lives in, None for someone else's."""
    parts = imported.split(".")
    if parts[0] != "rawops":
        return None
    while ".".join(parts[1:]) not in MODULES:
        parts.pop()
    return ".".join(parts[1:])


def level(name: str) -> int:
    module = name.split(".")[1]
    matches = [i for i, modules in enumerate(RUNTIME) if module in modules]
    assert matches, f"rawops/_runtime/{module}.py has no place among the layers of this test"
    return matches[0]


def op_of(name: str) -> str | None:
    """The op that a module is, or that a module such as _gemm_sm90 is a private part of."""
    return next((op for op in OPS if name == op or name.startswith(f"_{op}_")), None)


def allowed(importer: str, target: str) -> bool:
    """Whether the design has an edge from one module of rawops to another."""
    layer, other = importer.split(".")[0], target.split(".")[0]
    if layer in TOP:
        return other not in TOP or importer in TOP - {""}
    if layer in {"config", "errors"}:
        return False
    if other in {"config", "errors"}:
        return layer != "testing"
    if layer == other == "_runtime":
        return "." in target and level(importer) < level(target)
    if layer == other:
        return True
    if other == "_runtime":
        return op_of(layer) is not None
    if other == "_emulator":
        return importer == "_runtime.device"
    if target in OPS:
        return (importer, target) in SIDEWAYS or importer == f"_{target}_explain"
    ops = op_of(importer), op_of(target)
    return None not in ops and (ops[0] == ops[1] or ops in SIDEWAYS)


@pytest.mark.parametrize("name", MODULES, ids=lambda name: name or "rawops")
def test_python_imports(name):
    wrong = []
    for found in imports_of(name):
        target = target_of(found.name)
        if target not in (None, name) and not allowed(name, target):
            wrong.append(f"line {found.line}: {found.name}")
    assert not wrong, f"{MODULES[name].relative_to(ROOT)} imports from a layer it may not: {wrong}"


@pytest.mark.parametrize("name", MODULES, ids=lambda name: name or "rawops")
def test_import_time_stays_small(name):
    """The heavy packages are imported in functions: `import rawops` needs neither CuPy nor a GPU."""
    heavy = [found for found in imports_of(name) if not found.lazy and found.name.split(".")[0] in NOT_AT_IMPORT]
    assert not heavy


@pytest.mark.parametrize("path", sorted(CUDA.rglob("*.cu*")), ids=lambda path: path.name)
def test_cuda_includes(path):
    """.cu -> common/*.cuh -> the three CUDA headers, and no other."""
    in_common = path.parent == CUDA / "common"
    assert path.suffix == (".cuh" if in_common else ".cu")
    assert in_common or path.parent == CUDA, "entry points lie flat in cuda_src"
    for kind, header in re.findall(r'^\s*#\s*include\s*([<"])([^>"]+)', path.read_text(encoding="utf-8"), re.M):
        if kind == "<":
            assert header in HEADERS
        else:
            assert (path.parent / header).resolve().parent == CUDA / "common", header


def test_imports_are_found_wherever_they_stand():
    source = """
from . import a
from ..errors import B
try:
    import cupy.cuda
except ImportError:
    def f():
        from rawops._runtime import kernel as k
"""
    assert imports_in(source, ["rawops", "_runtime"]) == [
        ("rawops._runtime.a", 2, False),
        ("rawops.errors.B", 3, False),
        ("cupy.cuda", 5, False),
        ("rawops._runtime.kernel", 8, True),
    ]


def test_rules_allow_and_forbid():
    """The rules themselves, on edges that must and must not exist."""
    for edge in [
        ("gemm", "_runtime.kernel"),
        ("_runtime.device", "_emulator"),
        ("lora", "gemm"),
        ("gemm", "_gemm_sm90"),
        ("_gemm_call", "_gemm_sm90"),
        ("lora", "_gemm_call"),
        ("_lora_config", "_gemm_config"),
        ("_gemm_explain", "gemm"),
        ("", "gemm"),
    ]:
        assert allowed(*edge), edge
    for edge in [
        ("gemm", "lora"),
        ("attention", "_gemm_sm90"),
        ("_gemm_config", "_lora_config"),
        ("_gemm_explain", "lora"),
        ("_gemm_sm90", "gemm"),
        ("gemm", "_emulator"),
        ("gemm", ""),
        ("_runtime.compiler", "_runtime.device"),
        ("_runtime.device", "gemm"),
        ("_emulator.machine", "_runtime.dtypes"),
        ("config", "errors"),
        ("testing.references", "gemm"),
        ("testing.references", "errors"),
        ("", "_demo"),
    ]:
        assert not allowed(*edge), edge


def test_files_are_short():
    """A file over 500 lines wants to be two."""
    lengths = {p: len(p.read_text(encoding="utf-8").splitlines()) for p in [*MODULES.values(), *CUDA.rglob("*.cu*")]}
    assert {str(path.relative_to(ROOT)): n for path, n in lengths.items() if n > 500} == {}


def test_lines_of_cuda_are_short():
    """120 columns, as ruff has it for Python."""
    paths = sorted([*CUDA.rglob("*.cu*"), *(ROOT / "tests").rglob("*.cu*")])
    lines = ((p, i, line) for p in paths for i, line in enumerate(p.read_text(encoding="utf-8").splitlines(), 1))
    assert [f"{path.relative_to(ROOT)}:{i}" for path, i, line in lines if len(line) > 120] == []
