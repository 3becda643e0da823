"""GEMM of float8 and int8 beside torch._scaled_mm and torch._int_mm, which are cuBLAS."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator

import ml_dtypes
import numpy as np
from common import Case, cupy, main

import rawops
from rawops.testing.timing import rotations

try:
    import torch
except ImportError:
    sys.exit("bench gemm_8bit: needs torch, whose products are the rivals and which makes the float8 inputs.")

# (scales, M, N, K); the first lines are the quick subset. "tensor": one of a and one of b.
SHAPES = [
    ("tensor", 8192, 8192, 8192),
    ("tensor", 4096, 7168, 2048),
    ("blocks", 8192, 8192, 8192),
    ("int8", 8192, 8192, 8192),
    ("tensor", 2048, 28672, 4096),
    ("tensor", 64, 28672, 4096),
    ("fast", 8192, 8192, 8192),
    ("fast", 4096, 7168, 2048),
    ("fast", 2048, 28672, 4096),
    ("fast", 64, 28672, 4096),
    ("rows", 8192, 8192, 8192),
    ("rows", 2048, 28672, 4096),
    ("blocks", 4096, 7168, 2048),
    ("blocks", 2048, 28672, 4096),
    ("tensor, b row-major", 8192, 8192, 8192),
]
QUICK = 4


def cases(quick: bool) -> Iterator[Case]:
    """Row-major A times column-major B. All scales are one, so every case has the answer of tensor scales."""
    for kind, m, n, k in SHAPES[: QUICK if quick else None]:
        is_int8 = kind == "int8"
        size = m * k + k * n + m * n * (4 if is_int8 else 2)
        dtype = "int8" if is_int8 else "float8_e4m3fn"
        inputs = [make_inputs(m, n, k, dtype, "row-major" in kind) for _ in range(rotations(size))]
        op = rawops.Gemm(m, n, k, dtype, **keywords(kind, m, n, k))
        if is_int8:
            rivals = {"torch._int_mm": Torch(inputs)}
        else:
            rivals = {"torch._scaled_mm": Torch(inputs), "its fast_accum": Torch(inputs, fast=True)}
        name = f"{m} x {n} x {k}{'' if is_int8 else ', ' + kind}"
        yield Case(name, dtype, 2.0 * m * n * k, size, inputs, functools.partial(run, op), rivals)


def keywords(kind: str, m: int, n: int, k: int) -> dict:
    """Our plan's scales."""
    ones = functools.partial(cupy.ones, dtype="float32")
    if kind == "int8":
        return {}
    if kind == "rows":
        return {"scale_a": ones(m), "scale_b": ones(n)}
    if kind == "blocks":
        return {"scale_a": ones((m, k // 128)), "scale_b": ones((k // 128, n // 128))}
    return {"scale_a": ones(()), "scale_b": ones(()), "precision": "fast" if kind == "fast" else None}


def make_inputs(m: int, n: int, k: int, dtype: str, row_major: bool) -> tuple:
    """a, b and the output. CuPy makes no float8: torch does."""

    def random(rows: int, cols: int):
        if dtype == "int8":
            x = torch.randint(-128, 128, (rows, cols), dtype=torch.int8, device="cuda")
        else:
            x = torch.randn(rows, cols, device="cuda").to(torch.float8_e4m3fn)
        return cupy.from_dlpack(x.view(torch.uint8)).view(np.dtype(getattr(ml_dtypes, dtype, dtype)))

    b = random(k, n) if row_major else random(n, k).T
    return random(m, k), b, cupy.empty((m, n), "int32" if dtype == "int8" else "bfloat16")


class Torch:
    """torch._scaled_mm with its two kinds of accumulation, or torch._int_mm, on CuPy's memory and current stream."""

    def __init__(self, inputs: list[tuple], fast: bool = False) -> None:
        self._views = {id(x): self._view(x) for arguments in inputs for x in arguments}
        self._one, self._fast = torch.ones((), device="cuda"), fast

    @staticmethod
    def _view(x):
        if x.ndim == 2 and x.strides[0] < x.strides[1]:
            return Torch._view(x.T).T
        bits = {1: "uint8", 2: "uint16", 4: "int32"}[x.itemsize]
        return torch.from_dlpack(x.view(bits)).view(getattr(torch, x.dtype.name))

    def __call__(self, a, b, out) -> None:
        a, b, out = (self._views[id(x)] for x in (a, b, out))
        stream = torch.cuda.ExternalStream(cupy.cuda.get_current_stream().ptr)
        with torch.cuda.stream(stream):
            if a.dtype == torch.int8:
                torch._int_mm(a, b, out=out)
            else:
                if b.stride(1) == 1:  # which cuBLAS does not take: the copy is part of the product
                    b = b.T.contiguous().T
                scales = {"scale_a": self._one, "scale_b": self._one}
                torch._scaled_mm(a, b, **scales, out_dtype=out.dtype, use_fast_accum=self._fast, out=out)


def run(op: rawops.Gemm, a, b, out) -> None:
    """The plan's call, in the argument order that all share."""
    op(a, b, out=out)


if __name__ == "__main__":
    sys.exit(main("gemm_8bit", cases))
