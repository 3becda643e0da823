"""The demo: real kernels on real work, on the GPU where there is one, else in the emulator on smaller shapes."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

import rawops
from rawops.testing import cublas, has_gpu, references
from rawops.testing.minilm import MiniLM
from rawops.testing.tables import show
from rawops.testing.timing import Timing, graph_times, rotations
from rawops.testing.tolerances import Errors, errors

DTYPE = "float16"
# M, K, N, r: gate_up_proj of Llama-3-8B for 64 tokens. The emulator gets fewer of its columns.
GPU_SHAPE = (64, 4096, 28672, 8)
EMULATED_SHAPE = (64, 4096, 1024, 8)
RANK = 16  # of the LoRA between two layers of MiniLM
SENTENCE = (
    "A kernel that is compiled when it is first called needs no compiler on the user's machine: the source is shipped "
    "as text, the driver's own library turns it into instructions, and the next process finds them in a cache."
)


@dataclass(frozen=True)
class Stage:
    """Where the demo plays.

    Attributes
    ----------
    emulator : emulate, optional
        None on the GPU.
    as_json : bool
        Print JSON lines instead of tables.
    launched : list of str
        For each launch in the emulator's report, the call that made it.
    """

    emulator: rawops.emulate | None
    as_json: bool
    launched: list[str] = field(default_factory=list)

    def put(self, array: np.ndarray):
        """A host array, rounded to float16, where the kernels can read it."""
        rounded = array.astype(DTYPE)
        if not self.emulator:
            return _cupy().asarray(rounded)
        copy = self.emulator.device.empty(rounded.shape, DTYPE)  # aligned as on a GPU
        copy[...] = rounded
        return copy

    def get(self, array) -> np.ndarray:
        """An array on the host."""
        return array if self.emulator else _cupy().asnumpy(array)

    def empty(self, *shape: int):
        """An array to be filled, with NaN in it until then."""
        return self.put(np.full(shape, np.nan))

    def run(self, calls: Mapping[str, Callable], inputs: Sequence[tuple] = ((),)) -> dict[str, Timing]:
        """Make every call once in the emulator; on the GPU, time them all side by side."""
        if not self.emulator:
            return graph_times(calls, inputs)
        for name, call in calls.items():
            call(*inputs[0])
            self.launched.extend([name] * (len(self.emulator.report) - len(self.launched)))
        return {}

    def show(self, title: str, rows: Sequence[dict], note: str) -> None:
        """Print a table, and under it what the emulator counted since the last one."""
        show(title, rows, as_json=self.as_json, note=note)
        if self.emulator:
            counted = [
                _counters(name, launch) for name, launch in zip(self.launched, self.emulator.report, strict=True)
            ]
            show("Counted by the emulator", counted, as_json=self.as_json)
            self.emulator.report.clear()
            self.launched.clear()


def run(*, real: bool, json: bool) -> int:
    """Play all of it; 0 if every error is within its tolerance."""
    with contextlib.ExitStack() as stack:
        emulator = None if has_gpu() else stack.enter_context(rawops.emulate())
        stage = Stage(emulator, json)
        if emulator and not json:
            print(
                "No GPU here, or no CuPy: the same kernels run in the emulator. In place of times\n"
                "it shows what it counted: memory traffic, bank conflicts, instructions.\n"
            )
        right = _experiment(stage)
        if real:
            right &= _real_block(stage)
    if not json:
        print("Every error is within its tolerance." if right else "AN ERROR IS BEYOND ITS TOLERANCE.")
    return 0 if right else 1


# --- the experiment: the two low-rank products fused into the main one ----------------------------------------------


def _experiment(stage: Stage) -> bool:
    """O = X C + (X A) B: the four kernels of a serial version, each and together, then one."""
    m, k, n, rank = EMULATED_SHAPE if stage.emulator else GPU_SHAPE
    rng = np.random.default_rng(0)
    x, c, a, b = (
        rng.standard_normal(shape, np.float32).astype(DTYPE) for shape in ((m, k), (k, n), (k, rank), (rank, n))
    )

    def arrays() -> SimpleNamespace:
        inputs = {name: stage.put(array) for name, array in (("x", x), ("c", c), ("a", a), ("b", b))}
        results = {name: stage.empty(m, n) for name in ("z", "w", "serial", "fused")}
        return SimpleNamespace(**inputs, **results, y=stage.empty(m, rank))

    sets = [(arrays(),) for _ in range(1 if stage.emulator else rotations(2 * k * n))]
    times = stage.run(_steps(stage), sets)
    serial, fused = (stage.get(array).astype(np.float64) for array in (sets[0][0].serial, sets[0][0].fused))
    exact = _exact_lora(x, c, a, b)
    found = {
        "serial": errors(serial, exact, DTYPE, k=k),
        "fused": errors(fused, exact, DTYPE, k=k + rank, plain=serial),
        "fused against serial": errors(fused, serial, DTYPE, k=k + rank, plain=exact),
    }
    work = dict(zip(_PARTS, (2 * m * k * rank, 2 * m * rank * n, 2 * m * k * n, m * n), strict=True))
    work["serial"] = work["fused"] = sum(work.values())
    names = [*(_PARTS if times else ()), *found]
    rows = [_row(name, times.get(name), work.get(name), found.get(name)) for name in names]
    del rows[names.index("serial")]["within tolerance"]  # it is not on trial
    title = f"LoRA: O = X C + (X A) B, M={m} K={k} N={n} r={rank}, {DTYPE}"
    note = "errors against float64, but for the last row"
    if times:
        note += f"; fused / serial = {times['fused'].median / times['serial'].median:.3f}"
    stage.show(title, rows, note)
    return found["fused"].within and found["fused against serial"].within


_PARTS = ("op1: Y = X A", "op2: Z = Y B", "op3: W = X C", "add: O = W + Z")


def _steps(stage: Stage) -> dict[str, Callable[[SimpleNamespace], None]]:
    """The timed calls on one set of arrays. The serial version multiplies by cuBLAS; in the emulator, by our gemm."""
    product = _gemm if stage.emulator else cublas.gemm
    add = np.add if stage.emulator else _cupy().add
    parts = dict(
        zip(
            _PARTS,
            (
                lambda s: product(s.x, s.a, s.y),
                lambda s: product(s.y, s.b, s.z),
                lambda s: product(s.x, s.c, s.w),
                lambda s: add(s.w, s.z, out=s.serial),
            ),
            strict=True,
        )
    )

    def serial(s: SimpleNamespace) -> None:
        for part in parts.values():
            part(s)

    def fused(s: SimpleNamespace) -> None:
        rawops.lora_linear(s.x, s.c, s.a, s.b, out=s.fused)

    # Without times there is nothing to see in the parts alone.
    return {**({} if stage.emulator else parts), "serial": serial, "fused": fused}


def _gemm(a, b, out) -> None:
    rawops.gemm(a, b, out=out)


def _exact_lora(x, c, a, b) -> np.ndarray:
    """The float64 reference, by groups of columns: all of C in float64 would be a gigabyte."""
    groups = (slice(start, start + 4096) for start in range(0, c.shape[1], 4096))
    return np.concatenate([references.lora_linear(x, c[:, columns], a, b[:, columns]) for columns in groups], axis=1)


# --- a real feed-forward block --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Check:
    """A call, what it has to give, and `plain`: the same with every intermediate result rounded."""

    call: Callable[[], object]
    out: object
    exact: np.ndarray
    terms: int
    plain: np.ndarray | None = None


def _real_block(stage: Stage) -> bool:
    """The first feed-forward block of MiniLM-L6 on a sentence, and a LoRA made of two layers' weights."""
    model = MiniLM.find()
    if model is None:
        print(
            "MiniLM-L6 is not installed, so its part is skipped: scripts/demo.sh --real installs it.", file=sys.stderr
        )
        return True
    x = model.feed_forward_input(SENTENCE)
    w1, b1, w2, b2 = (
        model.tensor(f"encoder.layer.0.{half}.dense.{name}")
        for half in ("intermediate", "output")
        for name in ("weight", "bias")
    )
    lora_a, lora_b, captured = _low_rank((model.tensor("encoder.layer.1.intermediate.dense.weight") - w1).T)
    # The weights are stored (out, in): their transposes are views, and column-major.
    host = SimpleNamespace(x=x, w1=w1.T, b1=b1, w2=w2.T, b2=b2, lora_a=lora_a, lora_b=lora_b)
    checks = _block_checks(stage, SimpleNamespace(**{name: y.astype(DTYPE) for name, y in vars(host).items()}))

    times = stage.run({name: check.call for name, check in checks.items()})
    found = {
        name: errors(stage.get(check.out), check.exact, DTYPE, k=check.terms, plain=check.plain)
        for name, check in checks.items()
    }
    rows = [
        _row(name, times.get(name), 2 * len(x) * w1.size if name in times else None, found[name]) for name in checks
    ]
    title = (
        f"MiniLM-L6, feed-forward block of layer 0 on {len(x)} tokens, {w1.shape[1]} -> {len(w1)} -> {len(w2)}, {DTYPE}"
    )
    note = f"the LoRA turns layer 0 to layer 1: rank {RANK} holds {captured:.1%} of their difference, in squared norm"
    stage.show(title, rows, note)
    return all(errors.within for errors in found.values())


def _block_checks(stage: Stage, host: SimpleNamespace) -> dict[str, _Check]:
    """The three calls on float16 arrays, with their float64 answers."""
    tokens, width, units = len(host.x), host.w2.shape[1], host.w1.shape[1]
    on = SimpleNamespace(**{name: stage.put(array) for name, array in vars(host).items()})
    hidden, out, turned = stage.empty(tokens, units), stage.empty(tokens, width), stage.empty(tokens, units)
    exact_hidden = references.gemm(host.x, host.w1, bias=host.b1, activation="gelu")
    low = references.gemm(host.x, host.lora_a)

    def down(h):
        return references.gemm(h, host.w2, bias=host.b2, residual=host.x)

    def lora(y):
        return references.gemm(y, host.lora_b, references.gemm(host.x, host.w1), beta=1.0)

    return {
        "up: h = gelu(x W + b)": _Check(
            lambda: rawops.gemm(on.x, on.w1, bias=on.b1, activation="gelu", out=hidden), hidden, exact_hidden, width
        ),
        "down: h W + b + x": _Check(
            lambda: rawops.gemm(hidden, on.w2, bias=on.b2, residual=on.x, out=out),
            out,
            down(exact_hidden),
            units,
            down(exact_hidden.astype(DTYPE)),
        ),
        f"LoRA: x W + (x A) B, r={RANK}": _Check(
            lambda: rawops.lora_linear(on.x, on.w1, on.lora_a, on.lora_b, out=turned),
            turned,
            lora(low),
            width + RANK,
            lora(low.astype(DTYPE)),
        ),
    }


def _low_rank(difference: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """A and B of rank `RANK` with A B nearest to a matrix, and the share of its squared norm that they hold."""
    u, s, vt = np.linalg.svd(difference.astype(np.float64), full_matrices=False)
    root = np.sqrt(s[:RANK])
    return u[:, :RANK] * root, root[:, None] * vt[:RANK], float(np.sum(s[:RANK] ** 2) / np.sum(s**2))


# --- rows -----------------------------------------------------------------------------------------------------------


def _row(name: str, time: Timing | None, flops: int | None, found: Errors | None) -> dict[str, object]:
    """One line of a table; what is None is left out."""
    row: dict[str, object] = {"step": name}
    if time:
        row |= {"p20 us": time.p20, "median us": time.median, "p80 us": time.p80, "TFLOP/s": flops / time.median * 1e-6}
    if found:
        row |= {"max abs error": found.max_abs, "max rel error": found.max_rel, "within tolerance": found.within}
    return row


def _counters(step: str, launch) -> dict[str, object]:
    """What the emulator counted in one launch."""
    total = launch.total
    classes = sorted(launch.instructions.items(), key=lambda item: -item[1])[:2]
    return {
        "step": step.partition(":")[0],
        "kernel": launch.kernel.partition("<")[0].removeprefix("rawops::"),
        "blocks x threads": f"{math.prod(launch.grid)} x {math.prod(launch.block)}",
        "warp instructions": total.instructions,
        "most of them": ", ".join(f"{name} {count / total.instructions:.0%}" for name, count in classes),
        "global KB": total.global_bytes / 1e3,
        "coalesced": f"{total.efficiency:.0%}",
        "bank conflicts": total.shared_conflicts,
    }


def _cupy():
    import cupy

    return cupy
