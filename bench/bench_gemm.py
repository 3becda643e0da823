"""GEMM beside torch.mm, or cuBLAS where torch is not installed."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator

import numpy as np
from common import Case, cupy, main

import rawops
from rawops.testing import cublas
from rawops.testing.timing import rotations

try:
    import torch
except ImportError:
    torch = None

# (precision, M, N, K); the first lines are the quick subset.
SHAPES = [
    ("bfloat16", 4096, 4096, 4096),
    ("bfloat16", 64, 28672, 4096),
    ("bfloat16", 1, 4096, 4096),
    ("float16", 64, 28672, 4096),
    ("tf32", 4096, 4096, 4096),
    ("bfloat16", 8192, 8192, 8192),
    ("bfloat16", 2048, 28672, 4096),
    ("bfloat16", 2048, 6144, 4096),
    ("bfloat16", 2048, 4096, 14336),
    ("bfloat16", 512, 28672, 4096),
    ("bfloat16", 64, 4096, 14336),
    ("bfloat16", 64, 6144, 4096),
    ("bfloat16", 64, 4096, 4096),
    ("bfloat16", 16, 28672, 4096),
    ("bfloat16", 16, 4096, 14336),
    ("bfloat16", 16, 6144, 4096),
    ("bfloat16", 16, 4096, 4096),
    ("bfloat16", 1, 28672, 4096),
    ("bfloat16", 1, 4096, 14336),
    ("bfloat16", 1, 6144, 4096),
    ("bfloat16", 4096, 4096, 64),
    ("bfloat16", 128, 128, 32768),
    ("bfloat16", 1000, 1000, 1000),
    ("bfloat16", 8191, 4095, 4097),
    ("float16", 8192, 8192, 8192),
    ("float16", 4096, 4096, 4096),
    ("float32", 4096, 4096, 4096),
    ("float64", 4096, 4096, 4096),
]
QUICK = 5
LARGE = [
    (8192, 8192, 8192),
    (4096, 4096, 4096),
    (2048, 28672, 4096),
    (2048, 6144, 4096),
    (2048, 4096, 14336),
    (512, 28672, 4096),
]
FUSED = [("swiglu", 2048, 28672, 4096), ("gelu", 8192, 4096, 4096)]  # the latter with a bias


class Torch:
    """A function of torch on the memory of the CuPy arrays, on CuPy's current stream."""

    def __init__(self, inputs: list[tuple], function) -> None:
        self._views = {id(x): self._view(x) for arguments in inputs for x in arguments}
        self._function = function

    @staticmethod
    def _view(x):
        bits = {2: "uint16", 4: "uint32", 8: "uint64"}[x.itemsize]
        return torch.from_dlpack(x.view(bits)).view(getattr(torch, x.dtype.name))

    def __call__(self, *arguments) -> None:
        stream = torch.cuda.ExternalStream(cupy.cuda.get_current_stream().ptr)
        with torch.cuda.stream(stream):
            self._function(*(self._views[id(x)] for x in arguments))


def cases(quick: bool) -> Iterator[Case]:
    """Row-major A times column-major B, as a linear layer stores its weight; then other layouts, and epilogues."""
    for shape in SHAPES[: QUICK if quick else None]:
        yield plain(*shape)
    if not quick:
        for layout in ("nn", "tn", "tt"):
            yield from (plain("bfloat16", *sizes, layout) for sizes in LARGE)
        yield plain("tf32", 4096, 4096, 4096, "nn")
        yield from (plain("float32", 4096, 4096, 4096, layout) for layout in ("nn", "tn", "tt"))
        if torch is not None:
            yield from (fused(*case) for case in FUSED)


def plain(precision: str, m: int, n: int, k: int, layout: str = "nt") -> Case:
    """A product; "n" stands for a row-major operand, "t" for a column-major one."""
    tf32 = precision == "tf32"
    dtype = np.dtype("float32" if tf32 else precision)
    size = (m * k + k * n + m * n) * dtype.itemsize
    inputs = [
        (matrix(m, k, layout[0], dtype), matrix(k, n, layout[1], dtype), cupy.empty((m, n), dtype))
        for _ in range(rotations(size))
    ]
    op = rawops.Gemm(m, n, k, dtype.name, precision="tf32" if tf32 else None)
    if torch is None:
        rivals = {"cuBLAS": functools.partial(cublas.gemm, tf32=tf32)}
    else:
        torch.backends.cuda.matmul.allow_tf32 = tf32
        rivals = {"torch.mm": Torch(inputs, lambda a, b, out: torch.mm(a, b, out=out))}
    shape = f"{m} x {n} x {k}" + (f" {layout.upper()}" if layout != "nt" else "")
    return Case(shape, precision, 2.0 * m * n * k, size, inputs, functools.partial(run, op), rivals)


def fused(activation: str, m: int, n: int, k: int) -> Case:
    """A product with an epilogue beside torch, which takes several kernels for it, and our product without."""
    dtype, cols = np.dtype("bfloat16"), n // 2 if activation == "swiglu" else n
    size = (m * k + k * n + m * cols) * dtype.itemsize
    count = rotations(size)
    inputs = [
        (random((m, k), dtype), random((n, k), dtype).T, random((1, cols), dtype), cupy.empty((m, cols), dtype))
        for _ in range(count)
    ]
    op, without = rawops.Gemm(m, n, k, "bfloat16", activation=activation), rawops.Gemm(m, n, k, "bfloat16")
    product = cupy.empty((m, n), dtype)
    bias = activation == "gelu"

    def ours(a, b, row, out) -> None:
        op(a, b, bias=row[0] if bias else None, out=out)

    def with_torch(a, b, row, out) -> None:
        if bias:
            out.copy_(torch.nn.functional.gelu(torch.addmm(row, a, b)))
        else:
            gate, up = torch.mm(a, b).chunk(2, dim=1)
            torch.mul(torch.nn.functional.silu(gate), up, out=out)

    rivals = {"torch": Torch(inputs, with_torch), "plain product": lambda a, b, row, out: without(a, b, out=product)}
    shape = f"{m} x {n} x {k}, {'bias, ' if bias else ''}{activation}"
    return Case(shape, "bfloat16", 2.0 * m * n * k, size, inputs, ours, rivals)


def run(op: rawops.Gemm, a, b, out) -> None:
    """The plan's call, in the argument order that all share."""
    op(a, b, out=out)


def matrix(rows: int, cols: int, order: str, dtype: np.dtype):
    return random((rows, cols), dtype) if order == "n" else random((cols, rows), dtype).T


def random(shape: tuple[int, int], dtype: np.dtype):
    """Standard normal: zeros would draw less power and run faster."""
    return cupy.random.standard_normal(shape, dtype="float64" if dtype == "float64" else "float32").astype(dtype)


if __name__ == "__main__":
    sys.exit(main("gemm", cases))
