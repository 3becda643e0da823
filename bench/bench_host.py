"""What a call costs the host: Python and the driver's launch, with the GPU's queue never full."""

from __future__ import annotations

import sys

from common import cupy

import rawops
from rawops.testing.tables import show
from rawops.testing.timing import host_cost

M, N, K, RANK = 256, 4096, 1024, 8  # one kernel a call
EMPTY = "__global__ void empty(int n, float a, const float* x, float* y) {}"


def main() -> int:
    """Time each kind of call and show the table."""
    shapes = {"x": (M, K), "w": (K, N), "a": (K, RANK), "b": (RANK, N), "out": (M, N)}
    x, w, a, b, out = (cupy.zeros(shape, "float16") for shape in shapes.values())
    plan, fused = rawops.Gemm(M, N, K, "float16"), rawops.FusedLoRA(w, a, b)
    kernel = rawops.Kernel(EMPTY, "empty")
    calls = {
        "Gemm plan, out= given": lambda: plan(x, w, out=out),
        "gemm, out= given": lambda: rawops.gemm(x, w, out=out),
        "gemm, allocating the result": lambda: rawops.gemm(x, w),
        "FusedLoRA, out= given": lambda: fused(x, out=out),
        "lora_linear, allocating": lambda: rawops.lora_linear(x, w, a, b),
        "Kernel, four arguments": lambda: kernel(1, 32, (1, 1.0, out, out)),
    }
    rows = []
    for name, call in calls.items():
        call()  # compiles
        timing = host_cost(call)
        rows.append({"call": name, "us": timing.median, "p20": timing.p20, "p80": timing.p80})
    show(f"host microseconds a call, float16 {M} x {N} x {K}", rows, as_json="--json" in sys.argv[1:])
    return 0


if __name__ == "__main__":
    sys.exit(main())
