"""Small exact operands of 8 bits and how they lie in memory, for the tests of products with them."""

import ml_dtypes
import numpy as np

E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
BFLOAT16, INT8, FLOAT32 = np.dtype(ml_dtypes.bfloat16), np.dtype("int8"), np.dtype("float32")


def integers(rng, shape, dtype) -> np.ndarray:
    return rng.integers(-3, 4, shape).astype(dtype)


def powers(rng, shape) -> np.ndarray:
    return (2.0 ** rng.integers(-3, 3, shape)).astype(np.float32)


def exact(a, b) -> np.ndarray:
    return a.astype(np.float64) @ b.astype(np.float64)


def laid_out(device, x: np.ndarray, layout: str):
    """x row-major ("row"), column-major ("col") or with rows of an odd length ("odd"), NaN or 77 around it."""
    stored = x.swapaxes(-1, -2) if layout == "col" else x
    pad = 1 if layout == "odd" else -stored.shape[-1] % 16 + 16
    nothing = 77 if x.dtype == INT8 else np.nan
    room = np.full((*stored.shape[:-2], stored.shape[-2] + 1, stored.shape[-1] + pad), nothing)
    room[..., :-1, :-pad] = stored
    view = device.put(room.astype(x.dtype))[..., :-1, :-pad]
    return view.swapaxes(-1, -2) if layout == "col" else view


def same(device, got, want) -> None:
    want = np.asarray(want, np.float64).astype(got.dtype).astype(np.float64)
    np.testing.assert_array_equal(device.get(got).astype(np.float64), want)


def spread(scale: np.ndarray, shape: tuple) -> np.ndarray:
    """A scale for every entry of an operand."""
    for axis, size in enumerate(shape):
        if scale.shape[axis] not in (1, size):
            scale = np.repeat(scale, 128, axis)
        scale = np.take(scale, np.arange(min(size, scale.shape[axis])), axis)
    return np.broadcast_to(scale, shape).astype(np.float64)
