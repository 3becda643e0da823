"""GEMM beside cuBLAS, and beside torch.mm where torch is installed."""

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


class TorchMM:
    """torch.mm on the memory of the CuPy arrays, on CuPy's current stream."""

    def __init__(self, inputs: list[tuple]) -> None:
        self._views = {id(x): self._view(x) for arguments in inputs for x in arguments}

    @staticmethod
    def _view(x):
        bits = {2: "uint16", 4: "uint32", 8: "uint64"}[x.itemsize]
        return torch.from_dlpack(x.view(bits)).view(getattr(torch, x.dtype.name))

    def __call__(self, a, b, out) -> None:
        stream = torch.cuda.ExternalStream(cupy.cuda.get_current_stream().ptr)
        with torch.cuda.stream(stream):
            torch.mm(self._views[id(a)], self._views[id(b)], out=self._views[id(out)])


def cases(quick: bool) -> Iterator[Case]:
    """Row-major A times column-major B, as a linear layer stores its weight."""
    for precision, m, n, k in SHAPES[: QUICK if quick else None]:
        tf32 = precision == "tf32"
        dtype = np.dtype("float32" if tf32 else precision)
        size = (m * k + k * n + m * n) * dtype.itemsize
        inputs = [
            (random((m, k), dtype), random((n, k), dtype).T, cupy.empty((m, n), dtype)) for _ in range(rotations(size))
        ]
        op = rawops.Gemm(m, n, k, dtype.name, precision="tf32" if tf32 else None)
        rivals = {"cuBLAS": functools.partial(cublas.gemm, tf32=tf32)}
        if torch is not None:
            torch.backends.cuda.matmul.allow_tf32 = tf32
            rivals["torch.mm"] = TorchMM(inputs)
        yield Case(f"{m} x {n} x {k}", precision, 2.0 * m * n * k, size, inputs, functools.partial(run, op), rivals)


def run(op: rawops.Gemm, a, b, out) -> None:
    """The plan's call, in the argument order that all share."""
    op(a, b, out=out)


def random(shape: tuple[int, int], dtype: np.dtype):
    """Standard normal: zeros would draw less power and run faster."""
    return cupy.random.standard_normal(shape, dtype="float64" if dtype == "float64" else "float32").astype(dtype)


if __name__ == "__main__":
    sys.exit(main("gemm", cases))
