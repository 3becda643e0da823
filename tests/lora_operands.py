"""What the tests of one adapter share: operands, and the comparison of exact results."""

import ml_dtypes
import numpy as np

DTYPES = {"float16": np.dtype("float16"), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def integers(rng, shape, dtype="float16") -> np.ndarray:
    return rng.integers(-2, 3, shape).astype(DTYPES.get(dtype, dtype))


def operands(rng, M, N, K, rank, dtype="float16") -> dict[str, np.ndarray]:
    shapes = {"x": (M, K), "c": (K, N), "a": (K, rank), "b": (rank, N)}
    return {name: integers(rng, shape, dtype) for name, shape in shapes.items()}


def random(rng, M, N, K, rank, dtype="float16") -> dict[str, np.ndarray]:
    scales = {"x": ((M, K), 1), "c": ((K, N), K**-0.5), "a": ((K, rank), K**-0.5), "b": ((rank, N), rank**-0.5)}
    return {n: (rng.standard_normal(shape) * s).astype(DTYPES.get(dtype, dtype)) for n, (shape, s) in scales.items()}


def put(device, inputs: dict) -> dict:
    return {name: device.put(x) for name, x in inputs.items()}


def same(device, got, want) -> None:
    np.testing.assert_array_equal(device.get(got).astype(np.float64), np.asarray(want).astype(np.float64))
