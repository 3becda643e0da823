"""Temporary: float32, float64 and TF32 candidates on a GPU beside torch.mm. Correctness first, tables last.

    python bench/fp_probe.py [--kinds float32 float64 tf32 float16] [--seconds 38] [--emulate]
"""

from __future__ import annotations

import argparse
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import rawops
from rawops._runtime import device as devices

START = time.perf_counter()
HERE = Path(__file__).resolve().parent
SIMT, MMA = HERE.parent / "cuda_src" / "gemm_simt.cu", HERE / "fp_probe.cu"
LAYOUTS = {"TN": (True, True), "NN": (True, False), "TT": (False, True), "NT": (False, False)}  # a, b contiguous in K

# block_m, block_n, block_k, stages, warps_m, warps_n; for MMA also the variant of fp_probe.cu
CANDIDATES = {
    "float32": [(128, 128, 8, 3, 2, 2), (128, 256, 8, 3, 2, 4), (256, 128, 8, 3, 4, 2), (256, 128, 16, 3, 4, 2)],
    "float64": [(64, 64, 16, 4, 2, 2, 0), (64, 64, 16, 4, 2, 2, 3), (128, 128, 16, 3, 4, 2, 3)],
    "float64 k4": [
        (64, 64, 16, 4, 2, 2, 3), (128, 64, 16, 3, 2, 2, 3), (128, 128, 16, 3, 4, 2, 3), (128, 128, 16, 3, 2, 4, 3),
        (128, 128, 16, 4, 4, 2, 3),
    ],
    "tf32": [
        (128, 128, 32, 3, 2, 4, 0), (128, 128, 32, 3, 2, 4, 3), (128, 256, 32, 3, 2, 4, 3), (128, 256, 16, 4, 2, 4, 3),
        (128, 128, 32, 3, 2, 2, 3),
    ],
    "float16": [
        (128, 256, 32, 4, 2, 4, 0), (128, 256, 32, 4, 2, 4, 3), (64, 128, 64, 3, 2, 2, 0), (64, 128, 64, 3, 2, 2, 3),
    ],
}  # fmt: skip
TYPES = {"float32": "float", "tf32": "float", "float64": "double", "float64 k4": "rawops::F64", "float16": "__half"}
DTYPES = {kind: np.dtype("float32" if kind == "tf32" else kind.split()[0]) for kind in TYPES}


def pointer(x) -> int:
    return devices.emulated().pointer(x) if isinstance(x, np.ndarray) else x.data.ptr


def parameters(a, b, out) -> bytes:
    """GemmParams of a plain product."""
    call = struct.pack("<QQQdqQQQQQdq", pointer(a), pointer(b), 0, 1.0, 0, pointer(out), 0, 0, 0, 0, 0.0, 0)

    def strides(x):
        return (x.strides[0] // x.itemsize, x.strides[1] // x.itemsize, 0, 0, 0)

    (M, K), N = a.shape, b.shape[1]
    numbers = (*strides(a), *strides(b), *strides(out), *[0] * 10, 0, M, N, 1, 0, 0, 0, 0, M, N, K, K, 1, 1, 1, 1)
    return call + struct.pack("<25qq6iq8i", *numbers)


class Candidate:
    def __init__(self, kind: str, numbers: tuple, layout: str) -> None:
        shape, self.itemsize = numbers[:6], DTYPES[kind].itemsize
        self.block_m, self.block_n, block_k, stages, warps_m, warps_n = shape
        self.threads = 32 * warps_m * warps_n
        tile = f"rawops::TileShape<{', '.join(map(str, shape))}>"
        majors = ", ".join(str(x).lower() for x in LAYOUTS[layout])
        if kind == "float32":
            self.kernel = rawops.Kernel(str(SIMT), f"rawops::gemm_simt<{tile}, {majors}, 16, 16, 0>")
        else:
            expression = f"rawops::fp_probe<{TYPES[kind]}, {tile}, {numbers[6]}, {majors}>"
            self.kernel = rawops.Kernel(str(MMA), expression)
        accumulator = max(self.itemsize, 4)
        staging = 0 if kind == "float32" else warps_m * 16 * self.block_n * accumulator
        self.shared = max(stages * (self.block_m + self.block_n) * block_k * self.itemsize, staging)
        variant = "" if kind == "float32" else f" v{numbers[6]}"
        self.name = f"{self.block_m}x{self.block_n}x{block_k} s{stages} ({warps_m},{warps_n}){variant} {layout}"
        self.packed: dict[int, bytes] = {}

    def __call__(self, a, b, out) -> None:
        key = pointer(out)
        if key not in self.packed:
            self.packed[key] = parameters(a, b, out)
        tiles = -(-a.shape[0] // self.block_m) * -(-b.shape[1] // self.block_n)
        self.kernel((tiles,), (self.threads,), (self.packed[key],), self.shared)


def make(xp, kind: str, layout: str, M: int, N: int, K: int, integers: bool):
    rng = xp.random.default_rng(5)

    def matrix(rows, cols, row_major):
        shape = (rows, cols) if row_major else (cols, rows)
        x = rng.integers(-3, 4, shape) if integers else rng.standard_normal(shape, dtype="float32")
        x = x.astype(DTYPES[kind])
        return x if row_major else x.T

    a_k, b_k = LAYOUTS[layout]
    return matrix(M, K, a_k), matrix(K, N, not b_k), xp.zeros((M, N), DTYPES[kind])


def check(xp, kind: str, candidate: Candidate, layout: str, sizes) -> str:
    """Exact products of small integers at ragged sizes (multiples of 16 bytes)."""
    for M, N, K in sizes:
        a, b, out = make(xp, kind, layout, M, N, K, True)
        candidate(a, b, out)
        candidate.packed.clear()
        want = (a.astype("float64") @ b.astype("float64")).astype(out.dtype)
        if not bool((out == want).all()):
            return "WRONG"
    return "ok"


def rival(kind: str):
    try:
        import torch
    except ImportError:
        from rawops.testing import cublas

        return "cuBLAS", lambda a, b, out: cublas.gemm(a, b, out, tf32=kind == "tf32")
    import cupy

    views = {}

    def view(x):
        if x.data.ptr not in views:
            views[x.data.ptr] = torch.from_dlpack(x), x
        return views[x.data.ptr][0]

    def mm(a, b, out):
        torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
        with torch.cuda.stream(torch.cuda.ExternalStream(cupy.cuda.get_current_stream().ptr)):
            torch.mm(view(a), view(b), out=view(out))

    return "torch.mm", mm


def measure(kind: str, layout: str, calls: dict, size: int) -> dict[str, float]:
    import cupy

    from rawops.testing.timing import graph_times

    sets = [make(cupy, kind, layout, size, size, size, False) for _ in range(2)]
    name, mm = rival(kind)
    times = graph_times({name: mm} | calls, sets, replays=4)
    base = times[name].median
    print(f"{kind} {size}^3 {layout}")
    for label, t in times.items():
        print(f"    {label:38} {t.median:8.1f} us {2e-6 * size**3 / t.median:6.1f} TF x{base / t.median:.3f}")
    return {k: t.median for k, t in times.items() if k != name}


def compiled(xp, wanted: list[tuple[str, str, int]]) -> dict[tuple[str, str, int], Candidate]:
    """Candidates by kind, layout and number, compiled side by side."""
    found = {(kind, layout, n): Candidate(kind, CANDIDATES[kind][n], layout) for kind, layout, n in wanted}
    if xp is not np:
        operands = {key: make(xp, key[0], key[1], 128, 128, 64, True) for key in found}
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda key: found[key](*operands[key]), found))
        xp.cuda.Device().synchronize()
        for candidate in found.values():
            candidate.packed.clear()
    print(f"compiled after {time.perf_counter() - START:.1f} s", flush=True)
    return found


def run(xp, kinds, seconds: float) -> None:
    emulated = xp is np
    sizes = [(136, 280, 72)]
    layouts = LAYOUTS if emulated else ["TN"]
    ours = compiled(xp, [(k, layout, n) for k in kinds for layout in layouts for n in range(len(CANDIDATES[k]))])
    verdicts = {key: check(xp, key[0], c, key[1], sizes) for key, c in ours.items()}
    print({key: v for key, v in verdicts.items() if v != "ok"} or f"all {len(verdicts)} right", flush=True)
    if emulated:
        return
    best = {}
    for kind in kinds:
        calls = {c.name: c for key, c in ours.items() if key[0] == kind}
        times = list(measure(kind, "TN", calls, 4096).values())
        best[kind] = times.index(min(times))
    others = compiled(xp, [(k, layout, n) for k, n in best.items() for layout in ("NN", "TT", "NT")])
    for (kind, layout, _), candidate in others.items():
        if time.perf_counter() - START < seconds:
            verdict = check(xp, kind, candidate, layout, sizes)
            measure(kind, layout, {f"{candidate.name} {verdict}": candidate}, 4096)
    print(f"after {time.perf_counter() - START:.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kinds", nargs="+", default=list(CANDIDATES))
    parser.add_argument("--seconds", type=float, default=23)
    parser.add_argument("--emulate", action="store_true")
    options = parser.parse_args()
    if options.emulate:
        with rawops.emulate(arch="sm_90a"):
            run(np, options.kinds, options.seconds)
        return
    import cupy

    run(cupy, options.kinds, options.seconds)


if __name__ == "__main__":
    main()
