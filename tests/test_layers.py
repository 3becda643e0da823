"""Who may import whom: every import of the package, read from its syntax tree, against the layers of the design."""

import ast
import re
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "rawops"
CUDA = ROOT / "cuda_src"

OPS = {"gemm", "lora", "attention", "paged_kv", "sparse", "lsmr", "rowwise"}
SIDEWAYS = {("paged_kv", "attention"), ("lora", "gemm"), ("lsmr", "sparse")}
TOP = {"", "__main__", "_demo"}  # "" is rawops/__init__.py, which gathers the public names
# Top to bottom; a module of the runtime imports from the lines below its own, or beside it where that is marked.
RUNTIME = [
    {"arrays", "kernel"},
    {"device"},
    {"compiler", "tensormap"},
    {"cache", "checks", "sources"},
    {"dtypes"},
]
RUNTIME_SIDEWAYS = {("kernel", "arrays")}
HEADERS = {"cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h"}
# Slow or absent on some machines: imported inside the functions that need them, or never.
NOT_AT_IMPORT = {"cupy", "cupyx", "cuda", "torch", "scipy", "rich", "platformdirs", "jax", "numba"}


def module_name(path: Path) -> str:
    """Dotted name below rawops: "" for the package itself, "_runtime.device"."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports_of(name: str) -> list[tuple[str, ast.stmt]]:
    """Absolute dotted names that a module imports anywhere in it, with the statement."""
    found = []
    package = ["rawops", *name.split(".")] if name else ["rawops"]
    if MODULES[name].stem != "__init__":
        package.pop()
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(alias.name, node) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            found += [(f"{source}.{alias.name}", node) for alias in node.names]
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
        if "." not in target:
            return False
        sideways = (importer.split(".")[1], target.split(".")[1]) in RUNTIME_SIDEWAYS
        return sideways or level(importer) < level(target)
    if layer == other:
        return True
    if other == "_runtime":
        return layer in OPS
    if other == "_emulator":
        return importer == "_runtime.device"
    return (importer, target) in SIDEWAYS


@pytest.mark.parametrize("name", MODULES, ids=lambda name: name or "rawops")
def test_python_imports(name):
    wrong = []
    for imported, node in imports_of(name):
        target = target_of(imported)
        if target is not None and target != name and not allowed(name, target):
            wrong.append(f"line {node.lineno}: {imported}")
    assert not wrong, f"{MODULES[name].relative_to(ROOT)} imports from a layer it may not: {wrong}"


@pytest.mark.parametrize("name", MODULES, ids=lambda name: name or "rawops")
def test_import_time_stays_small(name):
    """The heavy packages are imported in functions: `import rawops` needs neither CuPy nor a GPU."""
    top_level = set(ast.parse(MODULES[name].read_text(encoding="utf-8")).body)
    heavy = [imported for imported, node in imports_of(name) if node in top_level and _root(imported) in NOT_AT_IMPORT]
    if name not in {"__main__", "_demo"}:
        assert not heavy


def _root(imported: str) -> str:
    return imported.split(".")[0]


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


def test_rules_see_a_forbidden_edge():
    """The rules themselves, on edges that must and must not exist."""
    for edge in [("gemm", "_runtime.kernel"), ("lora", "gemm"), ("_runtime.device", "_emulator"), ("", "gemm")]:
        assert allowed(*edge), edge
    for edge in [
        ("gemm", "lora"),
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


def test_long_files_are_reported():
    """Over 500 lines a file wants a second look: a warning, not a failure."""
    for path in [*MODULES.values(), *CUDA.rglob("*.cu*")]:
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > 500:
            warnings.warn(f"{path.relative_to(ROOT)} has {lines} lines", stacklevel=1)
