"""What every benchmark shares: cases, side-by-side measurement, the table and the JSON lines."""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from rawops.testing import has_gpu
from rawops.testing.timing import Timing, graph_times

# Datasheet peaks, without sparsity: bytes a second, and operations a second by precision.
_PEAKS = {
    "H200": (
        4.8e12,
        {"float16": 989e12, "bfloat16": 989e12, "tf32": 495e12, "float32": 67e12, "float64": 67e12},
    ),
}
_WRONG = 2e-2  # relative difference from the rival, in the 2-norm, that no rounding explains


@dataclass
class Case:
    """One line of a table.

    Attributes
    ----------
    shape, dtype : str
        As shown.
    flops, bytes : float
        Work of one call and the least memory traffic it needs.
    inputs : sequence of tuple
        Sets of arguments to go round; the last of each is the output.
    ours : callable
        `ours(*inputs[i])` fills the output.
    rivals : mapping of str to callable
        The same by others, with the same arguments. The first must give the same answer.
    """

    shape: str
    dtype: str
    flops: float
    bytes: float
    inputs: Sequence[tuple]
    ours: Callable[..., object]
    rivals: Mapping[str, Callable[..., object]]


@dataclass
class Result:
    """A measured case."""

    case: Case
    times: dict[str, Timing]
    difference: float
    roofline: float | None = field(default=None)

    def line(self) -> dict:
        """What a JSON line says of it."""
        ours = self.times["rawops"]
        return {
            "shape": self.case.shape,
            "dtype": self.case.dtype,
            "us": {"p20": ours.p20, "median": ours.median, "p80": ours.p80},
            "tflops": self.case.flops / ours.median * 1e-6,
            "gbs": self.case.bytes / ours.median * 1e-3,
            "roofline": self.roofline,
            "rivals_us": {name: time.median for name, time in self.times.items() if name != "rawops"},
            "difference": self.difference,
        }


def main(op: str, cases: Callable[[bool], Iterable[Case]], argv: Sequence[str] | None = None) -> int:
    """Measure `cases(quick)` and print them; 1 if a result is wrong or there is no GPU."""
    parser = argparse.ArgumentParser(prog=f"bench_{op}", description=f"Time rawops' {op} beside its rivals.")
    parser.add_argument("--quick", action="store_true", help="the few shapes that matter most, about 30 s")
    parser.add_argument("--json", action="store_true", help="one JSON line a case instead of the table")
    options = parser.parse_args(argv)
    if not has_gpu():
        parser.exit(1, "A benchmark needs a GPU and CuPy: python -m rawops info says what is missing.\n")
    machine = environment()
    results = []
    for case in cases(options.quick):
        results.append(measure(case))
        if options.json:
            print(json.dumps({"op": op, **results[-1].line(), **machine}), flush=True)
    if not options.json:
        _print_table(op, results, machine)
    return int(any(result.difference > _WRONG for result in results))


def measure(case: Case) -> Result:
    """Check a case against its first rival, then time all side by side."""
    import cupy

    *_, out = case.inputs[0]
    answers = []
    for call in (case.ours, next(iter(case.rivals.values()))):
        out[...] = float("nan")
        call(*case.inputs[0])
        answers.append(out.astype("float32"))
    ours, theirs = answers
    # NaN compares as wrong.
    difference = float(cupy.nan_to_num(cupy.linalg.norm(ours - theirs) / cupy.linalg.norm(theirs), nan=1.0))
    times = graph_times({"rawops": case.ours, **case.rivals}, case.inputs)
    return Result(case, times, difference, _roofline(case, times["rawops"]))


def environment() -> dict[str, str]:
    """GPU, driver, CuPy, NVRTC and git hash."""
    import cupy
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    return {
        "gpu": cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode(),
        "driver": _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0],
        "cupy": cupy.__version__,
        "nvrtc": f"{major}.{minor}",
        "git": _said("git", "rev-parse", "--short", "HEAD"),
    }


def _said(*command: str) -> str:
    """What a command prints, "unknown" where it cannot."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _roofline(case: Case, time: Timing) -> float | None:
    """Share of the peak of the resource that bounds the case, None for a card whose peaks are not listed."""
    import cupy

    name = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
    for known, (bandwidth, compute) in _PEAKS.items():
        if known in name:
            return max(case.flops / compute[case.dtype], case.bytes / bandwidth) / (time.median * 1e-6)
    return None


def _print_table(op: str, results: Sequence[Result], machine: Mapping[str, str]) -> None:
    caption = ", ".join(f"{key} {value}" for key, value in machine.items())
    table = Table(title=f"{op}: CUDA-graph replays, inputs rotated past the L2", caption=caption)
    rivals = list(dict.fromkeys(name for result in results for name in result.case.rivals))
    for heading in ("shape", "dtype"):
        table.add_column(heading, no_wrap=True)
    for heading in ("us", "p20-p80", "TFLOP/s", "GB/s", "% roofline", *(f"x {name}" for name in rivals)):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        ours = result.times["rawops"]
        speedups = [
            f"{result.times[name].median / ours.median:.2f}" if name in result.times else "" for name in rivals
        ]
        table.add_row(
            result.case.shape if result.difference <= _WRONG else f"{result.case.shape} WRONG",
            result.case.dtype,
            f"{ours.median:.2f}",
            f"{ours.p20:.2f}-{ours.p80:.2f}",
            f"{result.case.flops / ours.median * 1e-6:.1f}",
            f"{result.case.bytes / ours.median * 1e-3:.0f}",
            "" if result.roofline is None else f"{100 * result.roofline:.0f}",
            *speedups,
        )
    Console(width=None if Console().is_terminal else 160).print(table)
