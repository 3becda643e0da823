"""Products with packed 4-bit weights beside the 16-bit product of the same shape, ours and cuBLAS's."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator

from common import Case, cupy, main

import rawops
from rawops.testing import cublas
from rawops.testing.timing import rotations

# (M, N, K, format, K contiguous in the weights); the first are the quick subset.
SHAPES = [
    (1, 8192, 8192, "int4", True),
    (16, 8192, 8192, "int4", True),
    (1, 28672, 4096, "int4", True),
    (16, 28672, 4096, "int4", True),
    (1, 8192, 8192, "int4", False),
    (16, 28672, 4096, "int4", False),
    (1, 8192, 8192, "uint4", True),
    (1, 8192, 8192, "float4_e2m1fn", True),
    (1, 4096, 4096, "int4", True),
    (32, 28672, 4096, "int4", True),
    (64, 28672, 4096, "int4", True),
    (64, 4096, 4096, "int4", True),
    (64, 28672, 4096, "int4", False),
    (256, 8192, 8192, "int4", True),
    (1024, 8192, 8192, "int4", True),
    (1024, 8192, 8192, "int4", False),
    (4096, 4096, 4096, "int4", True),
]
QUICK = 4
GROUP = 128
# In one launch: a chain of CuPy's own would take longer to compile than everything here takes to run.
DEQUANTISE = rawops.Kernel(
    """
#include <cuda_bf16.h>
__global__ void dequantise(const unsigned char* b, int row, int col, int half, int n, const __nv_bfloat16* scale,
                           const unsigned char* zero, const float* values, __nv_bfloat162* wide) {
    const int k = blockIdx.x * blockDim.x + threadIdx.x, column = blockIdx.y;
    if (k >= half) return;
    const int code = b[(long long)k * row + (long long)column * col], group = k / 64 * n + column;
    const float factor = __bfloat162float(scale[group]), less = zero[group];
    const float first = (values[code & 15] - less) * factor, second = (values[code >> 4] - less) * factor;
    wide[(long long)column * half + k] = __floats2bfloat162_rn(first, second);
}
""",
    "dequantise",
)


def cases(quick: bool) -> Iterator[Case]:
    """bfloat16 activations and scales, groups of 128, zero points for uint4."""
    for m, n, k, b_dtype, k_major in SHAPES[: QUICK if quick else None]:
        size = k * n // 2 + k // GROUP * n * (3 if b_dtype == "uint4" else 2) + (m * k + m * n) * 2
        rows, columns = (n, k // 2) if k_major else (k // 2, n)
        weights = [packed(rows, columns, k_major, k // GROUP, n, b_dtype) for _ in range(rotations(size))]
        wide = [dequantised(*w, b_dtype) for w in weights[:2]]  # each of which is larger than the L2
        a = [cupy.random.standard_normal((m, k), dtype="float32").astype("bfloat16") for _ in weights]
        out = cupy.empty((m, n), "bfloat16")
        inputs = [(a[i], *weights[i], wide[i % 2], out) for i in range(len(weights))]
        name = f"{m} x {n} x {k} {b_dtype}{'' if k_major else ', N contiguous'}"
        rivals = {"cuBLAS bf16": cublas_16_bit, "rawops bf16": ours_16_bit}
        ours = functools.partial(ours_4_bit, b_dtype)
        yield Case(name, "bfloat16", 2.0 * m * n * k, size, inputs, ours, rivals)


def packed(rows: int, columns: int, k_major: bool, groups: int, n: int, b_dtype: str) -> tuple:
    """Random weights (K // 2, N), scales and zero points."""
    b = cupy.random.randint(0, 256, (rows, columns), dtype="uint8")
    scale = (cupy.random.uniform(0.5, 1.5, (groups, n), dtype="float32") * 0.01).astype("bfloat16")
    zero = cupy.random.randint(0, 16, (groups, n), dtype="uint8") if b_dtype == "uint4" else None
    return b.T if k_major else b, scale, zero


def dequantised(b, scale, zero, b_dtype: str):
    """The same weights as bfloat16 (K, N), K contiguous as a linear layer stores them."""
    values = {
        "int4": [*range(8), *range(-8, 0)],
        "uint4": range(16),
        "float4_e2m1fn": [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6],
    }[b_dtype]
    half, n = b.shape
    wide = cupy.empty((n, 2 * half), "bfloat16")
    values = cupy.asarray(values, dtype="float32")
    zero = cupy.zeros(scale.shape, "uint8") if zero is None else zero
    DEQUANTISE((-(-half // 256), n), 256, (b, *b.strides, half, n, scale, zero, values, wide))
    return wide.T


def ours_4_bit(b_dtype: str, a, b, scale, zero, wide, out) -> None:
    """One call of ours."""
    rawops.gemm(a, b, scale_b=scale, zero_b=zero, b_dtype=b_dtype, out=out)


def ours_16_bit(a, b, scale, zero, wide, out) -> None:
    """Our product with the weights as bfloat16."""
    rawops.gemm(a, wide, out=out)


def cublas_16_bit(a, b, scale, zero, wide, out) -> None:
    """cuBLAS with the weights as bfloat16."""
    cublas.gemm(a, wide, out)


if __name__ == "__main__":
    sys.exit(main("gemm_w4", cases))
