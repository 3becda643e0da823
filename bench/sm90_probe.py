"""Temporary: the Hopper GEMM and LoRA on a GPU, correctness first, then candidates beside cuBLAS. Tables come last.

python bench/sm90_probe.py [check] [decode] [lora] [large] [--seconds 55]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import subprocess
import sys
import time

import cupy
import numpy as np

from rawops import _gemm_sm90 as sm90
from rawops import lora
from rawops._gemm_call import Product
from rawops._gemm_operands import Options
from rawops._runtime import device as devices
from rawops._runtime import dtypes
from rawops.testing.timing import graph_times, rotations

START = time.perf_counter()
NOTHING = (None, None, None)


def is_step(problem) -> bool:
    """Tell whether it is the product that makes x @ a."""
    return problem.finish == sm90.DIRECT and problem.N <= 64


@contextlib.contextmanager
def forced(config):
    """Let every product that is prepared meanwhile run with this configuration (None: the model's choice)."""
    select, split, supports = sm90.select_config, sm90.wants_split, sm90.supports
    if config == "sm80":
        sm90.supports = lambda *_: False
    elif config is not None:
        sm90.select_config = lambda problem, *limits: select(problem, *limits) if is_step(problem) else config
        sm90.wants_split = lambda problem, *_: is_step(problem) and split(problem, *_)
    try:
        yield
    finally:
        sm90.select_config, sm90.wants_split, sm90.supports = select, split, supports


def gemm_call(config, activation=None):
    """A function of (a, b, out); a product of its own, so that it keeps its configuration."""
    product = Product("gemm", Options(activation), workspaces={})

    def call(a, b, out):
        with forced(config):
            product((a, b, out, *NOTHING))

    return call


def lora_call(config, scaling=1.0):
    product = lora._LowRank("lora_linear", None, scaling, workspaces={})

    def call(x, c, low_a, low_b, out):
        with forced(config):
            product((x, c, out, *NOTHING, low_a, low_b))

    return call


def make(shape, dtype, major: str, integers: bool, rng, scale=1.0):
    """A matrix whose last two axes are row-major ("n") or column-major ("t")."""
    stored = shape if major == "n" else (*shape[:-2], shape[-1], shape[-2])
    x = rng.integers(-3, 4, stored).astype("float32") if integers else rng.standard_normal(stored, dtype="float32")
    x = (x * scale).astype(dtype)
    return x if major == "n" else x.swapaxes(-1, -2)


def config_of(device, problem, block_m, block_n, cluster=1, ping_pong=False, rides=None, **changes):
    limits = device.sm_count, device.max_shared_bytes
    rides = problem.rank > 0 if rides is None else rides
    config = sm90.configure(problem, *limits, block_m, block_n, cluster, ping_pong, rides)
    return dataclasses.replace(config, **changes)


def named(c) -> str:
    return (
        f"{c.block_m}x{c.block_n} s{c.stages} c{c.cluster}" + " pp" * c.ping_pong + " rides" * c.rides + f" b{c.blocks}"
    )


# --- correctness ----------------------------------------------------------------------------------------------------

CASES = [  # batch, M, N, K, layouts a b, dtype, out dtype, forced (block_m, block_n, cluster, ping_pong)
    ((), 64, 1024, 512, "nt", "bfloat16", "bfloat16", (64, 256, 1, False)),
    ((), 64, 1024, 512, "nn", "float16", "float16", (64, 256, 1, False)),
    ((), 300, 1024, 512, "nn", "float16", "float16", (64, 256, 1, True)),
    ((), 64, 1024, 520, "nt", "bfloat16", "bfloat16", (64, 128, 2, False)),
    ((), 64, 1024, 512, "nt", "bfloat16", "bfloat16", (64, 128, 2, False)),
    ((), 64, 1024, 520, "nt", "bfloat16", "bfloat16", (64, 192, 4, False)),
    ((), 64, 1024, 768, "nt", "bfloat16", "bfloat16", (64, 192, 4, False)),
    ((), 512, 512, 4096, "nt", "bfloat16", "bfloat16", (128, 64, 4, False)),
    ((), 72, 264, 696, "nn", "float16", "float16", (64, 192, 4, False)),
    ((), 72, 200, 696, "tn", "float16", "float16", (64, 128, 8, False)),
    ((), 72, 328, 696, "nn", "float16", "float16", (64, 256, 4, False)),
    ((), 64, 128, 136, "nn", "float16", "float16", (64, 128, 8, False)),
    ((), 130, 400, 328, "nn", "float16", "float16", (128, 192, 4, False)),
    ((), 33, 1000, 4096, "nn", "float16", "float16", (64, 256, 8, False)),
    ((), 64, 1000, 4096, "tn", "float16", "float32", (64, 128, 8, False)),
    ((), 1000, 1000, 1000, "nt", "bfloat16", "bfloat16", (128, 128, 2, False)),
    ((), 1000, 1000, 1000, "tn", "bfloat16", "bfloat16", (128, 192, 4, False)),
    ((3,), 136, 264, 200, "nt", "bfloat16", "bfloat16", (128, 64, 2, False)),
    ((), 1, 4096, 4096, "nt", "bfloat16", "bfloat16", None),
    ((), 64, 6144, 4096, "nt", "bfloat16", "bfloat16", None),
    ((), 4096, 4096, 4096, "nt", "bfloat16", "bfloat16", None),
    ((), 392, 720, 328, "nt", "bfloat16", "bfloat16", (128, 208, 1, False)),
    ((2, 3), 136, 264, 200, "tn", "float16", "float16", (128, 64, 1, True)),
]
LORA_CASES = [  # M, N, K, rank, transposed as PEFT stores it, forced (block_m, block_n, cluster, ping-pong, rides)
    (64, 1024, 512, 16, False, (64, 256, 1)),
    (64, 1024, 512, 8, True, (64, 256, 1)),
    (40, 1000, 520, 64, False, (64, 256, 1)),
    (64, 1000, 520, 24, True, (64, 128, 4)),
    (64, 1024, 520, 40, True, (64, 256, 2)),
    (72, 200, 328, 24, False, (64, 128, 8)),
    (72, 328, 328, 24, False, (64, 256, 4)),
    (300, 1000, 520, 16, False, (128, 256, 1)),
    (300, 1000, 520, 64, True, (128, 192, 1)),
    (300, 1000, 520, 16, True, (128, 128, 2)),
    (300, 1000, 520, 16, False, (128, 256, 1, False, False)),
    (300, 1000, 520, 64, True, (128, 224, 1, False, False)),
    (64, 1024, 520, 40, True, (64, 256, 2, False, False)),
]


def guarded(shape, dtype):
    whole = cupy.full(int(np.prod(shape)) + 512, cupy.nan, dtype="float32")
    whole[:256] = whole[-256:] = 77
    whole = whole.astype(dtype)
    return whole, whole[256:-256].reshape(shape)


def check(first: int) -> int:
    """Run the cases from `first` on in this process, one line each; returns how many were wrong."""
    device = devices.cuda(cupy.cuda.runtime.getDevice())
    rng = cupy.random.default_rng(7)
    wrong = 0
    cases = list(itertools.product([*CASES, *LORA_CASES], (True, False)))
    for index, (case, integers) in list(enumerate(cases))[first:]:
        print(f"{index:3d} {case} {'int' if integers else 'rand'}", end=" ", flush=True)
        fine, text = (check_gemm if len(case) == 8 else check_lora)(device, rng, *case, integers)
        print("ok " if fine else "BAD", text, flush=True)
        wrong += not fine
    return wrong


def check_gemm(device, rng, batch, M, N, K, layout, dtype, out_dtype, tile, integers) -> tuple[bool, str]:
    dtype, out_dtype = dtypes.numpy(dtype), dtypes.numpy(out_dtype)
    a = make((*batch, M, K), dtype, layout[0], integers, rng)
    b = make((*batch, K, N), dtype, layout[1], integers, rng)
    whole, out = guarded((*batch, M, N), out_dtype)
    problem = sm90.Problem(M, N, K, int(np.prod(batch)), layout[0] == "n", layout[1] == "t")
    if out_dtype.itemsize == 4:
        problem = dataclasses.replace(problem, finish=sm90.DIRECT)
    call = gemm_call(None if tile is None else config_of(device, problem, *tile))
    results = []
    for _ in range(3):
        call(a, b, out)
        results.append(out.copy())
    same = all(bool((r == results[0]).all()) for r in results)
    exact = cupy.matmul(a.astype("float32"), b.astype("float32"))
    limit = 0.0 if integers and K <= 520 else {2: 1e-2, 4: 1e-5}[out_dtype.itemsize]
    fine, text = verdict(whole, out, exact, limit)
    return fine and same, text + ("" if same else " NOT THE SAME TWICE")


def check_lora(device, rng, M, N, K, rank, peft, tile, integers) -> tuple[bool, str]:
    dtype, major = np.dtype("float16"), "t" if peft else "n"
    x, c = make((M, K), dtype, "n", integers, rng), make((K, N), dtype, major, integers, rng)
    low_a = make((K, rank), dtype, major, integers, rng, 0.25)
    low_b = make((rank, N), dtype, major, integers, rng, 0.25)
    whole, out = guarded((M, N), dtype)
    step = next(s for s in sm90.RANKS if s >= rank)
    problem = sm90.Problem(M, N, K, b_k_major=peft, rank=step)
    lora_call(config_of(device, problem, *tile), 0.5)(x, c, low_a, low_b, out)
    low = cupy.matmul(x.astype("float64"), low_a.astype("float64"))
    exact = cupy.matmul(x.astype("float64"), c.astype("float64")) + 0.5 * cupy.matmul(low, low_b.astype("float64"))
    return verdict(whole, out, exact, 1e-3)


def verdict(whole, out, exact, limit) -> tuple[bool, str]:
    difference = cupy.abs(out.astype("float32") - exact.astype(out.dtype).astype("float32"))
    error = float(difference.max() / cupy.abs(exact).max())
    edges = cupy.concatenate([whole[:256], whole[-256:]]).astype("float32")
    inside = bool((edges == 77).all())
    return error <= limit and inside, f"error {error:.1e}" + ("" if inside else " WROTE OUTSIDE")


def check_in_children() -> bool:
    """A crash takes the process along: go on behind the case that crashed, in a new one."""
    first, good = 0, True
    count = 2 * len([*CASES, *LORA_CASES])
    while first < count:
        child = subprocess.run(
            [sys.executable, __file__, "check-from", str(first)],
            capture_output=True,
            text=True,
        )
        print(child.stdout, end="", flush=True)
        if child.returncode == 0:
            break
        good = False
        if "total wrong" in child.stdout:
            break
        errors = [line for line in child.stderr.splitlines() if "rror" in line]
        print("CRASHED", errors[:1], flush=True)
        done = [line for line in child.stdout.splitlines() if line[:3].strip().isdigit()]
        first = int(done[-1][:3]) + 1 if done else count
    return good


# --- times ----------------------------------------------------------------------------------------------------------

# M, N, K, layout of b: candidates as (block_m, block_n, cluster[, changes])
DECODE = {
    (64, 28672, 4096, "t"): [(64, 224, 1), (64, 224, 1, {"stages": 4}), (64, 240, 1)],
    (64, 28672, 4096, "n"): [(64, 256, 1), (64, 256, 1, {"stages": 3})],
    (64, 6144, 4096, "t"): [(64, 48, 1), (64, 64, 1), (64, 96, 2), (64, 128, 2), (64, 256, 4), (64, 224, 4)],
    (64, 6144, 4096, "n"): [(64, 64, 1), (64, 128, 2), (64, 256, 4)],
    (64, 4096, 14336, "t"): [(64, 64, 2), (64, 128, 2), (64, 192, 4), (64, 160, 4), (64, 256, 4)],
    (64, 4096, 4096, "t"): [(64, 32, 1), (64, 64, 2), (64, 96, 2), (64, 192, 4), (64, 160, 4)],
    (1, 4096, 4096, "t"): [(64, 32, 1), (64, 64, 1), (64, 64, 2), (64, 96, 2), (64, 192, 4)],
    (16, 28672, 4096, "t"): [(64, 224, 1), (64, 256, 1)],
    (1, 28672, 4096, "t"): [(64, 224, 1), (64, 256, 1)],
    (128, 128, 32768, "t"): [(64, 128, 8), (64, 64, 4)],
    (1000, 1000, 1000, "t"): [(128, 64, 1), (128, 128, 2), (128, 192, 4), (64, 128, 1), (128, 144, 2), (128, 256, 4)],
    (512, 512, 4096, "t"): [(128, 64, 2), (128, 32, 2), (128, 64, 4), (128, 128, 4), (64, 64, 2)],
}  # fmt: skip
LARGE = {
    (4096, 4096, 4096, "t"): [(128, 256, 1)],
    (512, 28672, 4096, "t"): [(128, 176, 1), (128, 208, 1), (128, 224, 1), (128, 240, 1), (128, 256, 1)],
    (2048, 6144, 4096, "t"): [(128, 192, 1)],
}


def cublas_call():
    try:
        import torch
    except ImportError:
        from rawops.testing import cublas

        return "cuBLAS", cublas.gemm
    views = {}

    def view(x):
        if id(x) not in views:
            views[id(x)] = torch.from_dlpack(x.view("uint16")).view(torch.bfloat16), x
        return views[id(x)][0]

    def mm(a, b, out):
        with torch.cuda.stream(torch.cuda.ExternalStream(cupy.cuda.get_current_stream().ptr)):
            torch.mm(view(a), view(b), out=view(out))

    return "torch.mm", mm


def tell(head, times, base, flops) -> str:
    best = min(times, key=lambda k: times[k].median)
    rows = [
        f"    {t.median:8.2f} us  x{times[base].median / t.median:.3f}  {flops / t.median:6.0f} TF  {k}"
        + (" <" if k == best else "")
        for k, t in times.items()
    ]
    return head + "\n" + "\n".join(rows)


def measure(device, shapes: dict, seconds: float, rows: list) -> None:
    name, rival = cublas_call()
    rng = cupy.random.default_rng(3)
    bf16 = dtypes.numpy("bfloat16")
    for (M, N, K, major), candidates in shapes.items():
        if time.perf_counter() - START > seconds:
            rows.append(f"{M}x{N}x{K}: out of time")
            continue
        count = min(rotations(2 * (M * K + K * N + M * N)), 32)
        sets = [
            (make((M, K), bf16, "n", False, rng), make((K, N), bf16, major, False, rng), cupy.empty((M, N), bf16))
            for _ in range(count)
        ]
        problem = sm90.Problem(M, N, K, b_k_major=major == "t")
        chosen = sm90.select_config(problem, device.sm_count, device.max_shared_bytes)
        calls = {name: rival, f"chosen {named(chosen)}": gemm_call(None)}
        if M in (1, 128):
            calls["sm80"] = gemm_call("sm80")
        for block_m, block_n, cluster, *changes in candidates:
            changes = changes[0] if changes else {}
            config = config_of(device, problem, block_m, block_n, cluster, **changes)
            calls[named(config)] = gemm_call(config)
        times = graph_times(calls, sets, replays=8 if M * N * K > 2**34 else 12)
        split = " (split)" if sm90.wants_split(problem, chosen, device.sm_count) else ""
        rows.append(tell(f"{M}x{N}x{K} b {major}{split}", times, name, 2.0 * M * N * K * 1e-6))


def measure_lora(device, seconds: float, rows: list) -> None:
    rng = cupy.random.default_rng(5)
    fp16 = np.dtype("float16")
    for (M, N, K), rank, major in (
        ((64, 28672, 4096), 8, "n"), ((64, 28672, 4096), 16, "n"), ((64, 28672, 4096), 64, "n"),
        ((64, 28672, 4096), 8, "t"), ((64, 28672, 4096), 16, "t"), ((1, 28672, 4096), 16, "t"),
        ((2048, 28672, 4096), 16, "t"), ((2048, 28672, 4096), 64, "t"), ((8192, 4096, 4096), 16, "n"),
    ):  # fmt: skip
        if time.perf_counter() - START > seconds:
            rows.append(f"lora {M}x{N}x{K} r{rank}: out of time")
            continue
        sets = [
            (make((M, K), fp16, "n", False, rng), make((K, N), fp16, major, False, rng, K**-0.5),
             make((K, rank), fp16, major, False, rng, K**-0.5), make((rank, N), fp16, major, False, rng),
             cupy.empty((M, N), fp16))
            for _ in range(2)
        ]  # fmt: skip
        step = next(s for s in sm90.RANKS if s >= rank)
        limits = device.sm_count, device.max_shared_bytes
        plain = sm90.Problem(M, N, K, b_k_major=major == "t")
        problem = dataclasses.replace(plain, rank=step)
        gemm = gemm_call(None)
        calls = {
            f"plain {named(sm90.select_config(plain, *limits))}": lambda x, c, a, b, out, g=gemm: g(x, c, out),
            f"lora {named(sm90.select_config(problem, *limits))}": lora_call(None),
            "lora sm80": lora_call("sm80"),
        }
        block_m = 64 if M <= 64 else 128
        for rides, block_n in itertools.product((True, False), (192, 256) if major == "n" else (192, 208, 224, 256)):
            config = config_of(device, problem, block_m, block_n, rides=rides)
            if config.stages >= 3 and not (M <= 64 and block_n < 224):
                calls[named(config)] = lora_call(config)
        times = graph_times(calls, sets, replays=6 if M > 64 else 12)
        rows.append(tell(f"lora {M}x{N}x{K} r{rank} {major}", times, next(iter(calls)), 2.0 * M * N * K * 1e-6))


def main() -> int:
    if sys.argv[1:2] == ["check-from"]:
        wrong = check(int(sys.argv[2]))
        print("total wrong:", wrong)
        return min(wrong, 1)
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=["check", "decode", "lora", "large"])
    parser.add_argument("--seconds", type=float, default=50)
    options = parser.parse_args()
    good, rows = True, []
    if "check" in options.parts:
        good = check_in_children()
        print("correct" if good else "WRONG", f"after {time.perf_counter() - START:.1f} s", flush=True)
    device = devices.cuda(cupy.cuda.runtime.getDevice())
    for part, shapes in (("decode", DECODE), ("large", LARGE)):
        if part in options.parts:
            measure(device, shapes, options.seconds, rows)
    if "lora" in options.parts:
        measure_lora(device, options.seconds, rows)
    print("\n".join(rows))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
