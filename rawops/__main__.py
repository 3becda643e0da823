"""Command line: ``python -m rawops info | demo | kernels | compile | bench | explain | cache``.

Exits 0, 1 failed, 2 usage.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import pkgutil
import re
import runpy
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import rawops
from rawops._runtime import boards, cache, checks, compiler, sources
from rawops._runtime.explain import launch_row
from rawops._runtime.paper import PaperDevice


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    options = _parser().parse_args(argv)
    try:
        code = options.run(options)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # nobody reads on, as after `| head`; Python's own flush at exit would say so again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (rawops.RawopsError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except (TypeError, ValueError) as error:
        if traceback.extract_tb(error.__traceback__)[-1].name != checks.fail.__name__:
            raise  # no answer to a wrong option or variable, but a defect
        print(error, file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rawops", description=rawops.__doc__)
    parser.add_argument("--version", action="version", version=f"rawops {rawops.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name, run, help):
        sub = commands.add_parser(name, help=help, description=help)
        sub.set_defaults(run=run)
        return sub

    sub = command("info", _info, "what this machine offers, what is missing and how to get it")
    sub.add_argument("--json", action="store_true")
    sub = command("demo", _demo, "real kernels on real work: on the GPU, or in the emulator where there is none")
    sub.add_argument("--real", action="store_true", help="also a feed-forward block of MiniLM-L6 on a sentence")
    sub.add_argument("--json", action="store_true")
    for name, run, text in (
        ("kernels", _kernels, "registers, shared memory and spills of every instance; compiles what the cache lacks"),
        (
            "compile",
            _compile,
            "compile every instance into the cache; exit 1 on an error, an advisory or a spill not named by its spec",
        ),
    ):
        sub = command(name, run, text)
        sub.add_argument("--arch", action="append", help=f"or 'all', as without: {', '.join(compiler.ARCHS)}")
        sub.add_argument("--all", action="store_true", help="the whole product of template choices")
        sub.add_argument("--json", action="store_true")
    sub = command("bench", _bench, "time an op beside its rivals (needs a checkout with bench/)")
    sub.add_argument("op")
    sub.add_argument(
        "rest", nargs=argparse.REMAINDER, help="its own options, --help among them: a benchmark needs a GPU"
    )
    sub = command("explain", _explain, "which kernels a call takes and why, on paper: no GPU is needed, nothing runs")
    ops = sub.add_subparsers(dest="op", required=True)
    for op, module in _explainers().items():
        sub = ops.add_parser(op, help=module.__doc__.splitlines()[0], description=module.__doc__)
        module.add_arguments(sub)
        sub.add_argument("--gpu", choices=boards.BOARDS, default="H200", help="whose speeds and SMs to reckon with")
        sub.add_argument("--arch", help="another architecture than the board's")
        sub.add_argument("--sm-count", type=int, help="another number of SMs")
        sub.add_argument("--json", action="store_true")
        sub.set_defaults(explain=module.explain)
    sub = command("cache", _cache, "where compiled kernels are kept, and how many")
    sub.add_argument("--clear", action="store_true", help="delete them")
    sub.add_argument("--json", action="store_true")
    return parser


def _table(title: str, columns: list[str], rows: list[list], json_lines: list[dict] | None) -> None:
    """Print rows as a table, or `json_lines` one a line."""
    if json_lines is not None:
        for line in json_lines:
            print(json.dumps(line))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", header_style="bold")
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i and len(columns) > 2 else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(str, row))
    width = None if sys.stdout.isatty() else 140
    Console(width=width, highlight=False, markup=False).print(table)


# --- info -----------------------------------------------------------------------------------------------------------


def _info(options) -> int:
    facts = {"rawops": rawops.__version__, "python": sys.version.split()[0], **_toolchain(), **_gpu()}
    entries = cache.entries()
    facts["cache"] = f"{cache.folder()} ({len(entries)} files, {sum(size for _, size in entries) / 1e6:.1f} MB)"
    facts["cuda sources"] = str(sources.cuda_src())
    _table("rawops", ["what", "found"], [[k, v] for k, v in facts.items()], [facts] if options.json else None)
    return 0 if "missing" not in facts["nvrtc"] + facts["headers"] else 1


def _toolchain() -> dict[str, str]:
    facts = {}
    for name, ask in (
        ("nvrtc", lambda: ".".join(map(str, compiler.loaded_nvrtc_version()))),
        ("headers", lambda: str(compiler.include_folder())),
    ):
        try:
            facts[name] = ask()
        except rawops.UnsupportedError as error:
            facts[name] = f"missing: {error}"
    return facts


def _gpu() -> dict[str, str]:
    try:
        import cupy
    except ImportError:
        return {"cupy": f"missing (kernels run in the emulator). {compiler.INSTALL_HINT}"}
    facts = {"cupy": cupy.__version__}
    try:
        facts["driver"] = str(cupy.cuda.runtime.driverGetVersion())
        for i in range(cupy.cuda.runtime.getDeviceCount()):
            properties = cupy.cuda.runtime.getDeviceProperties(i)
            memory = properties["totalGlobalMem"] / 2**30
            arch = f"sm_{properties['major']}{properties['minor']}"
            facts[f"gpu {i}"] = f"{properties['name'].decode()}, {arch}, {memory:.0f} GiB"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        facts["gpu"] = f"missing: {error} (kernels run in the emulator)"
    return facts


# --- kernels, compile -----------------------------------------------------------------------------------------------


def _archs(options) -> tuple[str, ...]:
    chosen = options.arch or ("all",)
    return compiler.ARCHS if "all" in chosen else tuple(chosen)


def _resources(options) -> Iterator[tuple]:
    """Yield each kernel instance with an architecture and what it takes there; what the cache lacks is compiled."""
    for info in rawops.kernels(_archs(options), options.all, progress=True):
        for arch, resources in info.resources.items():
            yield info, arch, resources


def _kernels(options) -> int:
    lines = [
        {"kernel": info.expression, "source": info.source, "arch": arch, **dataclasses.asdict(resources)}
        for info, arch, resources in _resources(options)
    ]
    columns = ["kernel", "arch", "registers", "shared_bytes", "local_bytes", "spill_bytes"]
    rows = [[line[c] for c in columns] for line in lines]
    _table(f"{len(lines)} kernel instances", columns, rows, lines if options.json else None)
    return 0


def _compile(options) -> int:
    start = time.perf_counter()
    lines = [
        {"kernel": info.expression, "arch": arch, "spill_bytes": r.spill_bytes, "advisories": r.warnings}
        for info, arch, r in _resources(options)
        if r.spill_bytes > info.spills.get(arch, 0) or r.warnings
    ]
    archs, seconds = _archs(options), time.perf_counter() - start
    if options.json:
        print(json.dumps({"archs": archs, "seconds": seconds, "faults": lines}))
    else:
        for line in lines:
            print(f"{line['kernel']} ({line['arch']}): {line['spill_bytes']} B spills {' '.join(line['advisories'])}")
        state = f"{len(lines)} with spills or advisories" if lines else "no spills but accepted ones"
        print(f"compiled for {', '.join(archs)} in {seconds:.1f} s: {state}")
    return 1 if lines else 0


# --- explain --------------------------------------------------------------------------------------------------------


def _explainers() -> dict:
    """Return the modules that explain an op, by its name: see rawops/_runtime/explain.py."""
    names = (re.fullmatch("_(.+)_explain", module.name) for module in pkgutil.iter_modules(rawops.__path__))
    return {name[1]: importlib.import_module(f"rawops.{name[0]}") for name in names if name}


def _explain(options) -> int:
    board = boards.board_of(options.gpu, options.arch, options.sm_count)
    device = PaperDevice(board)
    found = options.explain(options, device)
    launches = [launch_row(launch, board) for launch in device.launches]
    if options.json:
        facts = {name: value for name, value, _ in found.facts}
        line = {"call": found.title, "why": found.why, "launches": launches, **facts, "candidates": found.candidates}
        print(json.dumps(line))
        return 0
    print(found.title)
    for sentence in found.why:
        print(sentence)
    for title, rows in (("launches", launches), ("candidates, the chosen one first", found.candidates)):
        if rows:
            columns = list(rows[0])
            _table(title, columns, [[_shown(row[c]) for c in columns] for row in rows], None)
    for name, value, how in found.facts:
        print(f"{name:<18} {_shown(value):>16}   {how}")
    return 0


def _shown(value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# --- demo, bench, cache ---------------------------------------------------------------------------------------------


def _demo(options) -> int:
    from rawops import _demo

    return _demo.run(real=options.real, json=options.json)


def _bench(options) -> int:
    folder = Path(rawops.__file__).resolve().parent.parent / "bench"
    known = sorted(path.stem.removeprefix("bench_") for path in folder.glob("bench_*.py"))
    if options.op not in known:
        print(
            f"bench: OP must be one of {', '.join(known) or '(no bench folder here)'}, got {options.op!r}",
            file=sys.stderr,
        )
        return 2
    script = folder / f"bench_{options.op}.py"
    sys.argv = [str(script), *options.rest]
    sys.path.insert(0, str(script.parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except ModuleNotFoundError as error:
        if str(error.name).split(".")[0] not in ("cupy", "cupyx", "torch"):
            raise
        print(f"bench {options.op}: needs a GPU, CuPy and its rivals: {error.name} was not found", file=sys.stderr)
        return 1
    return 0


def _cache(options) -> int:
    removed = cache.clear() if options.clear else 0
    entries = cache.entries()
    facts = {
        "folder": str(cache.folder()),
        "entries": len(entries),
        "bytes": sum(size for _, size in entries),
        "removed": removed,
    }
    _table("cache", ["what", "value"], [[k, v] for k, v in facts.items()], [facts] if options.json else None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
