"""Attention beside torch's scaled_dot_product_attention with FlashAttention-2 and with cuDNN, and the seed's table.

Work counts as 4 B H N^2 D operations forward and 10 backward, half of that where it is causal, and what is in the band
with a window. Windows and packed sequences have torch's FlashAttention-2 for a rival, float8 our own bfloat16. Forward
passes are CUDA-graph replays; backward passes are loops between events, rivals through autograd. "math" is torch's
three-step attention, with the matrix of scores in memory.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from common import cupy, environment
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import rawops
from rawops._runtime import arrays
from rawops.testing.tables import show
from rawops.testing.timing import graph_times

RIVALS = {"FA2": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
WRONG = 2e-2  # a relative difference from the first rival, in the 2-norm, that no rounding explains
SEED = {"B": 1, "H": 32, "Hkv": 32, "D": 128, "causal": True, "dtype": torch.float16}


@dataclass(frozen=True)
class Shape:
    """B sequences of N queries and keys, H query heads on Hkv others."""

    B: int
    H: int
    Hkv: int
    N: int
    D: int
    causal: bool
    dtype: torch.dtype = torch.bfloat16
    window: int | None = None  # keys before a query's own

    @property
    def flops(self) -> float:
        if self.window is not None:
            seen = self.N * (self.window + 1) - self.window * (self.window + 1) / 2
            return 4.0 * self.B * self.H * seen * self.D
        return 4.0 * self.B * self.H * self.N**2 * self.D * (0.5 if self.causal else 1.0)

    @property
    def columns(self) -> dict[str, object]:
        heads = f"{self.H}/{self.Hkv}" if self.Hkv != self.H else str(self.H)
        mask = f"window {self.window}" if self.window is not None else "causal" if self.causal else "full"
        return {"B": self.B, "heads": heads, "N": self.N, "D": self.D, "mask": mask, "dtype": str(self.dtype)[6:]}

    def inputs(self) -> list[torch.Tensor]:
        """q, k, v and dout."""
        heads = (self.H, self.Hkv, self.Hkv, self.H)
        return [torch.randn(self.B, self.N, h, self.D, device="cuda", dtype=self.dtype) for h in heads]


def forward_shapes(quick: bool) -> Iterator[Shape]:
    """The anchors' shapes."""
    both = (True, False)
    sizes = [(1, 32, 32, 8192, 128), (2, 32, 32, 8192, 64)] if quick else []
    if not quick:
        sizes += [(2, 32, 32, 8192, 64), (1, 32, 32, 2048, 64)]
        sizes += [(8, 32, 32, 512, 128), (4, 32, 32, 1024, 128), (8, 32, 32, 2048, 128), (2, 32, 32, 8192, 128)]
        sizes += [(1, 32, 32, 16384, 128), (2, 32, 8, 8192, 128), (1, 16, 16, 2048, 256), (2, 16, 16, 8192, 256)]
    yield from (Shape(*size, causal) for size in sizes for causal in both)


def backward_shapes(quick: bool) -> Iterator[Shape]:
    """Two sequences of 8192, 16 heads."""
    for D in (128,) if quick else (64, 128, 256):
        yield from (Shape(2, 16, 16, 8192, D, causal) for causal in (True, False))


def window_shapes(quick: bool) -> Iterator[Shape]:
    """Long sequences of which each query sees the last 1024 keys."""
    yield from (Shape(1, 32, 32, 16384, D, True, window=1024) for D in ((128,) if quick else (64, 128)))


def float8_shapes(quick: bool) -> Iterator[Shape]:
    """Shapes of the forward table."""
    yield Shape(2, 32, 32, 8192, 128, True)
    if not quick:
        yield from (
            Shape(2, 32, 32, 8192, 64, True),
            Shape(2, 32, 32, 8192, 128, False),
            Shape(2, 16, 16, 8192, 256, True),
        )


def on_stream(call: Callable) -> Callable:
    """Have torch work on CuPy's current stream."""

    @functools.wraps(call)
    def run(*arguments):
        pointer = cupy.cuda.get_current_stream().ptr
        if pointer == 0:
            return call(*arguments)
        with torch.cuda.stream(torch.cuda.ExternalStream(pointer)):
            return call(*arguments)

    return run


def sdpa(backend: SDPBackend, shape: Shape, q, k, v):
    """torch's attention of (B, N, H, D) arrays, as (B, H, N, D)."""
    with sdpa_kernel(backend):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        grouped = shape.Hkv != shape.H
        return scaled_dot_product_attention(q, k, v, is_causal=shape.causal, enable_gqa=grouped)


def to_cupy(tensors: Sequence[torch.Tensor]) -> list:
    named = {str(i): x for i, x in enumerate(tensors)}
    return arrays.take("bench attention", **named)[0]


def agrees(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    difference = torch.linalg.norm(mine.double() - theirs.double()) / torch.linalg.norm(theirs.double())
    return bool(difference < WRONG)


def fa2(q, k, v, causal: bool, window: int | None = None, bounds=None, longest: int | None = None):
    """torch's FlashAttention-2 of (B, N, H, D) arrays, or of packed sequences between `bounds`."""
    longest = longest or q.shape[1]
    sides = {} if window is None else {"window_size_left": window, "window_size_right": 0}
    call = torch.ops.aten._flash_attention_forward
    return call(q, k, v, bounds, bounds, longest, longest, 0.0, causal, False, **sides)[0]


def forward(shape: Shape) -> dict[str, object]:
    """One row of the forward table, or of that of windows."""
    sets = []
    for _ in range(2):
        tensors = [*shape.inputs()[:3]]
        tensors.append(torch.empty(shape.B, shape.N, shape.H, shape.D, device="cuda", dtype=shape.dtype))
        sets.append((*tensors, to_cupy(tensors)))
    plan = rawops.FlashAttention(causal=shape.causal, window=(shape.window, None))

    def ours(*arguments):
        q, k, v, out = arguments[-1]
        plan(q, k, v, out=out)

    rivals = {}
    if shape.window is None:
        for name, backend in RIVALS.items():
            rivals[name] = on_stream(lambda *a, backend=backend: sdpa(backend, shape, *a[:3]).transpose(1, 2))
    else:
        rivals["FA2"] = on_stream(lambda *a: fa2(*a[:3], True, shape.window))
    return {**shape.columns, **compare(ours, rivals, sets, shape.flops)}


def compare(ours: Callable, rivals: dict[str, Callable], sets: list[tuple], flops: float) -> dict[str, object]:
    """Check ours against the first rival and time them side by side. Sets: q, k, v, out and more."""
    torch.cuda.synchronize()
    ours(*sets[0])
    torch.cuda.synchronize()
    right = agrees(sets[0][3], next(iter(rivals.values()))(*sets[0]))
    times = graph_times({"rawops": ours, **rivals}, sets, replays=20)
    mine = times["rawops"]
    return {
        "us": mine.median,
        "p20": mine.p20,
        "p80": mine.p80,
        "TFLOP/s": flops / mine.median * 1e-6,
        **{f"x {name}": times[name].median / mine.median for name in rivals},
        "right": right,
    }


def varlen(D: int) -> dict[str, object]:
    """64 packed sequences of 16 to 4096, their mean about 700, causal."""
    H = 32
    lengths = np.random.default_rng(0).lognormal(0.0, 0.9, 64)
    lengths = np.clip(lengths * 700 / lengths.mean(), 16, 4096).astype(int)
    bounds = torch.tensor(np.concatenate([[0], np.cumsum(lengths)]), dtype=torch.int32, device="cuda")
    total, longest, sets = int(lengths.sum()), int(lengths.max()), []
    for _ in range(2):
        tensors = [torch.randn(total, H, D, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
        sets.append((*tensors, bounds, to_cupy([*tensors, bounds])))

    def ours(*arguments):
        q, k, v, out, between = arguments[-1]
        rawops.flash_attention_varlen(q, k, v, between, between, longest, longest, causal=True, out=out)

    rivals = {"FA2": on_stream(lambda q, k, v, out, between, _: fa2(q, k, v, True, None, between, longest))}
    flops = 2.0 * H * D * float(np.square(lengths.astype(float)).sum())
    shape = {"sequences": 64, "heads": H, "mean N": total / 64, "longest": longest, "D": D, "mask": "causal"}
    return {**shape, **compare(ours, rivals, sets, flops)}


def float8(shape: Shape) -> dict[str, object]:
    """float8 e4m3 beside our bfloat16; the difference between the two is what float8 costs."""
    sets = []
    for _ in range(2):
        wide = shape.inputs()[:3]
        narrow = [x.to(torch.float8_e4m3fn) for x in wide]
        outs = [torch.empty_like(wide[0]) for _ in range(2)]
        sets.append((to_cupy([*narrow, outs[0]]), to_cupy([*wide, outs[1]]), outs))
    plan = rawops.FlashAttention(causal=shape.causal)

    def run(which: int, *arguments):
        q, k, v, out = arguments[which]
        plan(q, k, v, out=out)

    calls = {"float8": functools.partial(run, 0), "bfloat16": functools.partial(run, 1)}
    torch.cuda.synchronize()
    times = graph_times(calls, sets, replays=20)
    torch.cuda.synchronize()
    narrow, wide = (x.double() for x in sets[0][2])
    return {
        **shape.columns,
        "dtype": "float8_e4m3fn",
        "us": times["float8"].median,
        "TFLOP/s": shape.flops / times["float8"].median * 1e-6,
        "x bfloat16": times["bfloat16"].median / times["float8"].median,
        "difference": float(torch.linalg.norm(narrow - wide) / torch.linalg.norm(wide)),
    }


def event_times(calls: dict[str, Callable], rounds: int = 7, repeats: int = 2) -> dict[str, float]:
    """Median microseconds a call on torch's current stream, rivals in turn."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            call()
            start.record()
            for _ in range(repeats):
                call()
            end.record()
            end.synchronize()
            samples[name].append(start.elapsed_time(end) * 1e3 / repeats)
    return {name: float(np.median(found)) for name, found in samples.items()}


def backward(shape: Shape) -> dict[str, object]:
    """One row of the backward table."""
    q, k, v, dout = shape.inputs()
    torch.cuda.synchronize()
    mine = to_cupy([q, k, v, dout])
    out, lse = rawops.flash_attention(*mine[:3], causal=shape.causal, return_lse=True)
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    targets = dict(zip(("dq", "dk", "dv"), to_cupy(gradients), strict=True))

    ours = functools.partial(rawops.flash_attention_backward, mine[3], *mine[:3], out, lse)
    ours = functools.partial(ours, causal=shape.causal, **targets)
    calls, answers = {"rawops": ours, "in turn": functools.partial(ours, deterministic=True)}, {}
    for name, backend in RIVALS.items():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        result = sdpa(backend, shape, *leaves)
        calls[name] = functools.partial(torch.autograd.grad, result, leaves, dout.transpose(1, 2), retain_graph=True)
        answers[name] = calls[name]()
    ours()
    torch.cuda.synchronize()
    right = all(agrees(x, y) for x, y in zip(gradients, answers["FA2"], strict=True))
    times = event_times(calls)
    return {
        **shape.columns,
        "us": times["rawops"],
        "TFLOP/s": 2.5 * shape.flops / times["rawops"] * 1e-6,
        **{f"x {name}": times[name] / times["rawops"] for name in RIVALS},
        "deterministic": times["in turn"] / times["rawops"],
        "right": right,
    }


def seed(N: int) -> dict[str, object]:
    """One row of the article's table: time and peak memory beside the three-step attention."""
    shape = Shape(N=N, **SEED)
    q, k, v, _ = shape.inputs()
    torch.cuda.synchronize()
    mine = to_cupy([q, k, v])
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        rawops.flash_attention(*mine, causal=True, return_lse=True)
        memory = pool.total_bytes()
    calls = {"rawops": lambda: rawops.flash_attention(*mine, causal=True)}
    math_memory = None
    try:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        sdpa(SDPBackend.MATH, shape, q, k, v)
        math_memory = (torch.cuda.max_memory_allocated() - before) / 2**20
        calls["math"] = lambda: sdpa(SDPBackend.MATH, shape, q, k, v)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
    times = event_times(calls, rounds=5)
    return {
        **shape.columns,
        "ms": times["rawops"] * 1e-3,
        "math ms": times["math"] * 1e-3 if "math" in times else None,
        "x math": times["math"] / times["rawops"] if "math" in times else None,
        "out and lse, MiB": (q.nbytes + 4 * shape.B * shape.H * N) / 2**20,
        "memory MiB": memory / 2**20,
        "math memory MiB": math_memory,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Show the tables that are asked for; 1 if an answer is wrong."""
    parser = argparse.ArgumentParser(prog="bench attention", description="Time attention beside its rivals.")
    parser.add_argument("--quick", action="store_true", help="the few shapes that matter most")
    parser.add_argument("--json", action="store_true", help="one JSON line a case instead of tables")
    parser.add_argument(
        "--table", choices=("forward", "window", "varlen", "float8", "backward", "seed"), help="only this one"
    )
    options = parser.parse_args(argv)
    tables = {
        "forward": [functools.partial(forward, s) for s in forward_shapes(options.quick)],
        "window": [functools.partial(forward, s) for s in window_shapes(options.quick)],
        "varlen": [functools.partial(varlen, D) for D in ((128,) if options.quick else (64, 128))],
        "float8": [functools.partial(float8, s) for s in float8_shapes(options.quick)],
        "backward": [functools.partial(backward, s) for s in backward_shapes(options.quick)],
        "seed": [functools.partial(seed, n) for n in ((512, 2048) if options.quick else (512, 1024, 2048, 4096, 8192))],
    }
    machine, right = environment(), True
    note = ", ".join(f"{key} {value}" for key, value in machine.items())
    for name, cases in tables.items():
        if options.table not in (None, name):
            continue
        rows = []
        for case in cases:
            rows.append(case())
            right &= rows[-1].get("right", True)
            if options.json:
                show(f"attention, {name}", [{**rows[-1], **machine}], as_json=True)
        if not options.json:
            show(f"attention, {name}", rows, note=note)
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
