"""Temporary: the Hopper GEMM on a GPU, correctness first, then candidates beside cuBLAS. Tables come last.

    python bench/sm90_probe.py [--check] [--time] [--seconds 55]

It drives `rawops._gemm_sm90` directly, so it needs no wiring in `rawops.gemm`.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
import time

import cupy
import numpy as np

from rawops import _gemm_sm90 as sm90
from rawops._runtime import device as devices
from rawops._runtime import dtypes
from rawops.gemm import _CALL, _Operand, _pack_shape
from rawops.testing.timing import graph_times, rotations

START = time.perf_counter()


def operand(device, x, batch_axes: int = 3):
    strides = [s // x.itemsize for s in x.strides]
    *batch, row, col = [0] * (batch_axes + 2 - x.ndim) + strides
    batch = [0 if n == 1 else s for n, s in zip((1,) * (batch_axes + 2 - x.ndim) + x.shape[:-2], batch, strict=True)]
    return _Operand(dtypes.name(x.dtype), x.itemsize, device.pointer(x) % 16, row, col, batch)


def prepare(device, a, b, out, activation=0, config=None, **epilogue):
    """A function of (a, b, out) that launches; c, bias and residual are fixed."""
    named = {"a": a, "b": b, "out": out, **{k: v for k, v in epilogue.items() if k != "beta"}}
    operands = {
        k: _Operand(dtypes.name(v.dtype), v.itemsize, 0, 0, 1, [0] * 3) if k == "bias" else operand(device, v)
        for k, v in named.items()
    }
    M, K, N = a.shape[-2], a.shape[-1], b.shape[-1]
    gated = activation == 5
    cols = N // 2 if gated else N
    extents = ((1,) * (5 - out.ndim) + out.shape)[:3]
    select = sm90.select_config
    if config is not None:
        sm90.select_config = lambda *_: config
    try:
        plan = sm90.plan(device, operands, M, N, K, extents, activation)
    finally:
        sm90.select_config = select
    fake = dataclasses.make_dataclass("Fake", ["k_per_split"])(K)
    shape = _pack_shape(operands, (M, N, K, cols), extents, fake, cols if gated else 0)
    pointers = [device.pointer(epilogue.get(k)) for k in ("c", "bias", "residual")]
    beta = (0, float(epilogue.get("beta", 0.0)), 0)

    def run(a, b, out):
        at = [device.pointer(x) for x in (a, b, out)]
        plan.run(*at, _CALL.pack(*at[:2], 0, 1.0, 0, at[2], *pointers, *beta) + shape)

    run.plan = plan
    return run


def make(shape, dtype, major: str, integers: bool, rng):
    """A matrix whose last two axes are row-major ("n") or column-major ("t")."""
    stored = shape if major == "n" else (*shape[:-2], shape[-1], shape[-2])
    x = rng.integers(-3, 4, stored).astype("float32") if integers else rng.standard_normal(stored, dtype="float32")
    x = x.astype(dtype)
    return x if major == "n" else x.swapaxes(-1, -2)


def config_of(block_n, ping_pong, problem, device, stages=None, raster=None):
    config = sm90._config(problem, block_n, ping_pong, device.sm_count, device.max_shared_bytes)
    changes = {k: v for k, v in (("stages", stages), ("raster_rows", raster)) if v is not None}
    return dataclasses.replace(config, **changes)


CASES = [  # batch, M, N, K, layouts a b, dtype, out dtype, forced (block_n, ping_pong)
    ((), 256, 512, 256, "nt", "bfloat16", "bfloat16", None),
    ((), 256, 512, 256, "nn", "float16", "float16", None),
    ((), 256, 512, 256, "tn", "bfloat16", "bfloat16", None),
    ((), 256, 512, 256, "tt", "float16", "float16", None),
    ((), 1000, 1000, 1000, "nt", "bfloat16", "bfloat16", (256, False)),
    ((), 1000, 1000, 1000, "tn", "bfloat16", "bfloat16", (128, True)),
    ((), 4096, 4096, 4096, "nt", "bfloat16", "bfloat16", None),
    ((), 4096, 4104, 4072, "nn", "float16", "float16", None),
    ((), 392, 720, 328, "nt", "bfloat16", "bfloat16", (208, False)),
    ((), 392, 720, 328, "nt", "bfloat16", "bfloat16", (48, True)),
    ((), 392, 725, 328, "nt", "bfloat16", "bfloat16", (176, False)),  # D cannot be staged
    ((), 384, 720, 328, "tt", "float16", "float32", (256, False)),
    ((3,), 136, 264, 200, "nt", "bfloat16", "bfloat16", None),
    ((2, 3), 136, 264, 200, "tn", "float16", "float16", (64, True)),
    ((), 1, 4096, 4096, "nt", "bfloat16", "bfloat16", None),
    ((), 64, 6144, 4096, "nt", "bfloat16", "bfloat16", None),
]


def check(device) -> bool:
    rng = cupy.random.default_rng(7)
    rows, good = [], True
    for (batch, M, N, K, layout, dtype, out_dtype, forced), integers in itertools.product(CASES, (True, False)):
        dtype, out_dtype = dtypes.numpy(dtype), dtypes.numpy(out_dtype)
        a = make((*batch, M, K), dtype, layout[0], integers, rng)
        b = make((*batch, K, N), dtype, layout[1], integers, rng)
        whole = cupy.full(int(np.prod(batch)) * M * N + 512, cupy.nan, dtype="float32")
        whole[:256] = whole[-256:] = 77
        whole = whole.astype(out_dtype)
        out = whole[256:-256].reshape(*batch, M, N)
        problem = sm90.Problem(M, N, K, int(np.prod(batch)), layout[0] == "n", layout[1] == "t")
        config = None if forced is None else config_of(*forced, problem, device)
        run = prepare(device, a, b, out, config=config)
        for _ in range(3):
            run(a, b, out)
        exact = cupy.matmul(a.astype("float32"), b.astype("float32"))
        difference = cupy.abs(out.astype("float32") - exact.astype(out_dtype).astype("float32"))
        error = float(difference.max() / cupy.abs(exact).max())
        outside = cupy.concatenate([whole[:256].astype("float32"), whole[-256:].astype("float32")])
        bands = bool((outside == 77).all())
        limit = 0.0 if integers and K <= 200 else {2: 1e-2, 4: 1e-5}[out_dtype.itemsize]
        fine = error <= limit and bands
        good &= fine
        c = run.plan.config
        rows.append(
            f"{'ok ' if fine else 'BAD'} {batch} {M}x{N}x{K} {layout} {dtype.name}->{out_dtype.name} "
            f"{'int ' if integers else 'rand'} n{c.block_n} s{c.stages} pp{int(c.ping_pong)} error {error:.2e}"
        )
    good &= check_epilogues(device, rng, rows)
    print("\n".join(rows))
    return good


def check_epilogues(device, rng, rows) -> bool:
    good = True
    M, N, K = 328, 512, 264
    a, b = make((M, K), "float16", "n", True, rng), make((K, N), "float16", "t", True, rng)
    product = cupy.matmul(a.astype("float32"), b.astype("float32")) / 64
    a = (a.astype("float32") / 64).astype("float16")
    bias = rng.standard_normal(N, dtype="float32").astype("float16")
    for activation, ping_pong in itertools.product((0, 1, 3, 4, 5), (False, True)):
        cols = N // 2 if activation == 5 else N
        c, residual = make((M, N), "float16", "n", False, rng), make((M, cols), "float16", "n", False, rng)
        out = cupy.full((M, cols), cupy.nan, "float16")
        problem = sm90.Problem(M, cols, K, finish=sm90.STAGED, parts=2 if activation == 5 else 1)
        config = config_of(128, ping_pong, problem, device)
        run = prepare(device, a, b, out, activation, config, c=c, bias=bias, residual=residual, beta=0.5)
        run(a, b, out)
        x = product + 0.5 * c.astype("float32") + bias.astype("float32")
        sigmoid = 1 / (1 + cupy.exp(-x))
        gelu = 0.5 * x * (1 + cupy.tanh(0.7978845608 * (x + 0.044715 * x**3)))
        if activation == 5:
            want = (x * sigmoid)[:, :cols] * x[:, cols:]
        else:
            want = {0: x, 1: cupy.maximum(x, 0), 3: gelu, 4: x * sigmoid}[activation]
        want = want + residual.astype("float32")
        error = float(cupy.abs(out.astype("float32") - want).max() / cupy.abs(want).max())
        good &= error < 2e-3
        rows.append(f"{'ok ' if error < 2e-3 else 'BAD'} activation {activation} pp{int(ping_pong)} error {error:.2e}")
    return good


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


def candidates(M, N, K, device):
    """(block_n, ping_pong, stages, raster) by name: the model's choice and its neighbours."""
    problem = sm90.Problem(M, N, K)
    best = sm90.select_config(problem, device.sm_count, device.max_shared_bytes)
    found = {"chosen": best}
    tiles_m = -(-M // sm90.BLOCK_M)
    for raster in (4, 6, 12, 16, 32):
        if raster <= tiles_m and raster != best.raster_rows:
            found[f"r{raster}"] = dataclasses.replace(best, raster_rows=raster)
    ranked = sorted(
        (sm90._config(problem, n, False, device.sm_count, device.max_shared_bytes) for n in range(32, 257, 16)),
        key=lambda c: c.cost,
    )
    for config in [c for c in ranked if c.block_n != best.block_n][:2]:
        found[f"n{config.block_n}"] = config
    if not best.ping_pong:
        found["pp128"] = sm90._config(problem, 128, True, device.sm_count, device.max_shared_bytes)
    return found


def measure(device, seconds: float) -> None:
    name, rival = cublas_call()
    shapes = [
        (4096, 4096, 4096), (2048, 6144, 4096), (4096, 6144, 4096), (8192, 8192, 8192), (2048, 28672, 4096),
        (2048, 4096, 14336), (512, 28672, 4096), (1000, 1000, 1000), (4096, 4096, 64), (64, 28672, 4096),
        (64, 6144, 4096), (64, 4096, 14336), (1, 4096, 4096),
    ]  # fmt: skip
    rng = cupy.random.default_rng(3)
    rows = []
    for M, N, K in shapes:
        if time.perf_counter() - START > seconds:
            rows.append(f"{M}x{N}x{K}: out of time")
            continue
        sets = [
            (make((M, K), "bfloat16", "n", False, rng), make((K, N), "bfloat16", "t", False, rng),
             cupy.empty((M, N), dtypes.numpy("bfloat16")))
            for _ in range(min(rotations(2 * (M * K + K * N + M * N)), 6))
        ]  # fmt: skip
        configs = candidates(M, N, K, device)
        calls = {name: rival} | {label: prepare(device, *sets[0], config=c) for label, c in configs.items()}
        times = graph_times(calls, sets, replays=8 if M * N * K > 2**34 else 16)
        flops = 2.0 * M * N * K * 1e-6
        base = times[name].median
        parts = [f"{k} {t.median:.1f}us {flops / t.median:.0f}TF x{base / t.median:.3f}" for k, t in times.items()]
        c = configs["chosen"]
        head = f"{M}x{N}x{K} [chosen n{c.block_n} s{c.stages} pp{int(c.ping_pong)} r{c.raster_rows} waves {c.waves}]"
        rows.append(head + "\n    " + "\n    ".join(parts))
    print("\n".join(rows))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--seconds", type=float, default=50)
    options = parser.parse_args()
    both = options.check == options.time
    device = devices.cuda(cupy.cuda.runtime.getDevice())
    good = True
    if options.check or both:
        good = check(device)
        print("correct" if good else "WRONG", f"after {time.perf_counter() - START:.1f} s", flush=True)
    if options.time or both:
        measure(device, options.seconds)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
