"""What every benchmark shares: cases, side-by-side measurement, rooflines and the machine's description."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rawops.testing import has_gpu
from rawops.testing.tables import show
from rawops.testing.timing import Timing, graph_times, loop_times

if not has_gpu():
    sys.exit("A benchmark needs a GPU and CuPy: python -m rawops info says what is missing.")

import cupy

# Datasheet peaks, without sparsity: bytes a second, and operations a second by precision.
_DENSE = {"float16": 989e12, "bfloat16": 989e12, "tf32": 495e12, "float32": 67e12, "float64": 67e12}
_PEAKS = {
    "H200": (4.8e12, _DENSE | {"float8_e4m3fn": 1979e12, "int8": 1979e12}),
}
_WRONG = 2e-2  # a relative difference from the rival, in the 2-norm, that no rounding explains


@dataclass(frozen=True)
class Case:
    """One row of a table.

    Attributes
    ----------
    shape, dtype : str
        As shown.
    flops, bytes : float
        Work of one call, and the least memory traffic it needs.
    inputs : sequence of tuple
        Sets of arguments to go round, see `rawops.testing.timing.rotations`; the last of each is the output.
    ours : callable
        `ours(*inputs[i])` fills the output.
    rivals : mapping of str to callable
        Others, with the same arguments. The first must give the same answer.
    loops : mapping of str to callable
        Rivals that no graph takes: timed in loops of calls from Python, and beside them ours once more.
    extra : mapping of str to object
        Further columns of the row.
    """

    shape: str
    dtype: str
    flops: float
    bytes: float
    inputs: Sequence[tuple]
    ours: Callable[..., object]
    rivals: Mapping[str, Callable[..., object]]
    loops: Mapping[str, Callable[..., object]] = field(default_factory=dict)
    extra: Mapping[str, object] = field(default_factory=dict)


def main(
    op: str,
    cases: Callable[[bool], Iterable[Case]],
    argv: Sequence[str] | None = None,
    plot: Callable[[list, str], None] | None = None,
) -> int:
    """Measure `cases(quick)` and show them; 1 if an answer is wrong. `plot` takes the rows and a file name."""
    parser = argparse.ArgumentParser(prog=f"bench {op}", description=f"Time {op} beside its rivals.")
    parser.add_argument("--quick", action="store_true", help="the few shapes that matter most, about 30 s")
    parser.add_argument("--json", action="store_true", help="one JSON line a case instead of the table")
    if plot is not None:
        parser.add_argument("--plot", metavar="FILE", nargs="?", const=f"{op}.png", help="draw the table")
    options = parser.parse_args(argv)
    machine = environment()
    rows = []
    for case in cases(options.quick):
        rows.append(measure(case))
        print(_progress(rows[-1]), file=sys.stderr, flush=True)
        if options.json:
            show(op, [{**rows[-1], **machine}], as_json=True)
    if not options.json:
        title = f"{op}: microseconds a call, median and p20-p80 of CUDA-graph replays, inputs rotated past the L2"
        show(title, rows, note=", ".join(f"{key} {value}" for key, value in machine.items()))
    if plot is not None and options.plot:
        plot(rows, options.plot)
    return int(not all(row["right"] for row in rows))


def measure(case: Case) -> dict[str, object]:
    """Check a case against its first rival, time all side by side, and make the row."""
    right = _difference(case) < _WRONG
    times = graph_times({"rawops": case.ours, **case.rivals}, case.inputs)
    ours = times["rawops"]
    return {
        "shape": case.shape,
        "dtype": case.dtype,
        "us": ours.median,
        "p20": ours.p20,
        "p80": ours.p80,
        "TFLOP/s": case.flops / ours.median * 1e-6,
        "GB/s": case.bytes / ours.median * 1e-3,
        "% of roofline": _roofline_percent(case, ours),
        **{f"x {name}": times[name].median / ours.median for name in case.rivals},
        **_loops(case),
        **case.extra,
        "right": right,
    }


def _progress(row: dict[str, object]) -> str:
    """A line for those who wait for the table."""
    rivals = (f"{name} {value:.2f}" for name, value in row.items() if name.startswith("x ") and value is not None)
    return f"{row['shape']} {row['dtype']}: " + ", ".join([f"{row['us']:.2f} us", *rivals])


def _loops(case: Case) -> dict[str, object]:
    """The columns of calls from Python."""
    if not case.loops:
        return {}
    times = loop_times({"rawops": case.ours, **case.loops}, case.inputs)
    ours = times["rawops"].median
    return {"from Python us": ours, **{f"x {name}": times[name].median / ours for name in case.loops}}


def environment() -> dict[str, str]:
    """GPU, driver, CuPy, NVRTC and git hash."""
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    return {
        "GPU": _gpu_name(),
        "driver": _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0],
        "CuPy": cupy.__version__,
        "NVRTC": f"{major}.{minor}",
        "git": _output_of("git", "rev-parse", "--short", "HEAD"),
    }


def _difference(case: Case) -> float:
    """Relative distance of our answer from the first rival's; inf for NaN and for entries left unwritten."""
    *_, out = case.inputs[0]
    answers = []
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True):  # which torch follows, other than CuPy's null stream
        for call in (case.ours, next(iter(case.rivals.values()))):
            out[...] = -1 if out.dtype.kind == "i" else float("nan")
            call(*case.inputs[0])
            answers.append(out.astype("float64"))
        ours, theirs = answers
        distance = cupy.linalg.norm(ours - theirs) / cupy.linalg.norm(theirs)
        return float(cupy.nan_to_num(distance, nan=float("inf")))


def _roofline_percent(case: Case, time: Timing) -> float | None:
    """Share of the peak that bounds the case; None on a card whose peaks are not listed."""
    for known, (bandwidth, compute) in _PEAKS.items():
        if known in _gpu_name():
            bound = max(case.flops / compute[case.dtype], case.bytes / bandwidth)
            return 100 * bound / (time.median * 1e-6)
    return None


def _gpu_name() -> str:
    return cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()


def _output_of(*command: str) -> str:
    """What a command prints, "unknown" where it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
