"""Fused LoRA beside the four kernels it replaces, and beside the plain product that is its lower bound."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator

import numpy as np
from common import Case, cupy, main

import rawops
from rawops.testing import cublas
from rawops.testing.timing import rotations

# (M, K, N, r); the first is the shape of Llama-3-8B's gate_up_proj for a batch of 64.
SHAPES = [
    (64, 4096, 28672, 8),
    (64, 4096, 28672, 16),
    (64, 4096, 28672, 64),
    (1, 4096, 28672, 16),
    (2048, 4096, 28672, 16),
    (8192, 4096, 4096, 16),
]
QUICK = 2
DTYPE = np.dtype("float16")


def cases(quick: bool) -> Iterator[Case]:
    """The anchors' shapes in float16, with the weights row-major."""
    for m, k, n, rank in SHAPES[: QUICK if quick else None]:
        size = (m * k + k * n + k * rank + rank * n + m * n) * DTYPE.itemsize
        inputs = [arguments(m, k, n, rank) for _ in range(rotations(size))]
        intermediate = (cupy.empty((m, rank), DTYPE), cupy.empty((m, n), DTYPE), cupy.empty((m, n), DTYPE))
        yield Case(
            f"{m} x {k} x {n}, r {rank}",
            DTYPE.name,
            2.0 * m * (k * n + k * rank + rank * n),
            size,
            inputs,
            fused,
            {"serial": functools.partial(serial, *intermediate), "X C alone": main_product},
        )


def arguments(m: int, k: int, n: int, rank: int) -> tuple:
    """x, c, a, b and the output, scaled so that both products have entries of the same size."""
    x, c, a, b = (
        (cupy.random.standard_normal(shape, dtype="float32") * scale).astype(DTYPE)
        for shape, scale in (((m, k), 1.0), ((k, n), k**-0.5), ((k, rank), k**-0.5), ((rank, n), rank**-0.5))
    )
    return x, c, a, b, cupy.empty((m, n), DTYPE)


def fused(x, c, a, b, out) -> None:
    """One call of ours."""
    rawops.lora_linear(x, c, a, b, out=out)


def serial(y, z, w, x, c, a, b, out) -> None:
    """Y = X A, Z = Y B, W = X C by cuBLAS, O = W + Z by CuPy."""
    cublas.gemm(x, a, y)
    cublas.gemm(y, b, z)
    cublas.gemm(x, c, w)
    cupy.add(w, z, out=out)


def main_product(x, c, a, b, out) -> None:
    """X C alone: what a fused kernel can at best be as fast as."""
    cublas.gemm(x, c, out)


if __name__ == "__main__":
    sys.exit(main("lora", cases))
