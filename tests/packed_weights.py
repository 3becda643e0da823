"""Random 4-bit weights and the exact values they mean, for the tests of products with them."""

import ml_dtypes
import numpy as np

import rawops

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
VALUES = {
    "int4": np.array([*range(8), *range(-8, 0)], np.float64),
    "uint4": np.arange(16.0),
    "float4_e2m1fn": np.concatenate([E2M1, -E2M1]),
}  # of every code
DTYPES = {"float16": np.dtype("float16"), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype("float32")}


class Weights:
    """Random codes, scales that are powers of two and zero points, on the device, and the exact values they mean."""

    def __init__(self, device, rng, K, N, group, b_dtype, *, zeros=False, k_major=True, scale_dtype="float16"):
        codes = rng.integers(0, 16, (K, N))
        scale = 2.0 ** rng.integers(-1, 2, (K // group, N))
        self.values, self.zero_b = VALUES[b_dtype][codes], None
        if zeros:
            zero = rng.integers(0, 16, (K // group, N))
            self.values = self.values - np.repeat(zero, group, 0)
            self.zero_b = device.put(zero.astype(np.uint8))
        self.values = self.values * np.repeat(scale, group, 0)
        packed = rawops.pack_int4(codes)
        self.b = device.put(np.ascontiguousarray(packed.T)).T if k_major else device.put(packed)
        self.scale_b = device.put(scale.astype(DTYPES[scale_dtype]))
        self.b_dtype = b_dtype

    def gemm(self, a, c=None, **keywords):
        groups = {"scale_b": self.scale_b, "zero_b": self.zero_b, "b_dtype": self.b_dtype}
        return rawops.gemm(a, self.b, c, **groups, **keywords)


def integers(rng, shape, dtype="float16") -> np.ndarray:
    return rng.integers(-2, 3, shape).astype(DTYPES[dtype])


def same(device, got, want) -> None:
    np.testing.assert_array_equal(device.get(got).astype(np.float64), want)
