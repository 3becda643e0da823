"""What a sparse product takes: checks of vectors, dense matrices and factors, and the result's dtype and memory."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np

from rawops import _sparse_formats as formats
from rawops._runtime import arrays, checks

MOST_COLUMNS = 2**20  # of a launch: 65535 tiles side by side, of at least 32 where there are many
ZERO = (0.0, 0.0, 0)  # a factor as the kernels take it: real, imaginary, address or 0


def operands(function: str, device, x, out, shape: tuple, name: str = "x") -> tuple:
    """Return x, of a shape in which None is any, and out as arrays of a device, and what gives the result back."""
    checks.arrays_given(function, **{name: x})
    (x, out), give = arrays.take(function, **{name: x, "out": out})
    found = arrays.device_of(function, **{name: x, "out": out})
    if device is not None:  # None: of any
        on_device(function, device, found, name)
    if x.ndim != len(shape) or x.shape[0] != shape[0]:
        wanted = f"({shape[0]},)" if len(shape) == 1 else f"({shape[0]}, any)"
        checks.fail(ValueError, function, name, f"have shape {wanted}", f"shape {tuple(x.shape)}")
    return x, out, give


def taken(function: str, **named) -> tuple:
    """Return the device of some arrays, none of which may be missing, and the arrays."""
    checks.arrays_given(function, **named)
    found, _ = arrays.take(function, **named)
    return arrays.device_of(function, **dict(zip(named, found, strict=True))), found


def on_device(function: str, device, found, name: str) -> None:
    """Raise unless an array was found on the matrix's device."""
    if found is not device:
        is_other_block = found.is_emulated and device.is_emulated
        hint = "The matrix belongs to another emulate() block: make it in this one." if is_other_block else ""
        checks.fail(ValueError, function, name, f"be on the matrix's device ({device})", str(found), hint)


def scalars(function: str, device, dtype, alpha, beta, out=None) -> tuple[tuple, tuple, list]:
    """Return both factors as the kernels take them, and what to hold on to until the launch: copies of those in out."""
    kept: list = []
    alpha = _scalar(function, device, "alpha", alpha, dtype, out, kept)
    return alpha, _scalar(function, device, "beta", beta, dtype, out, kept), kept


def _scalar(function: str, device, name: str, value, dtype, out, kept: list) -> tuple:
    if type(value) is float:  # as most are
        return value, 0.0, 0
    value = factor(function, device, name, value, dtype)
    if out is not None and not isinstance(value, complex) and arrays.overlap(value, out):
        value = value.copy()
        kept.append(value)
    return packed(value, device.pointer)


def factor(function: str, device, name: str, value, dtype):
    """Return a factor of a product of this dtype: a number as a complex one, or a 0-d array of the device."""
    if hasattr(value, "ndim") and not isinstance(value, np.generic):
        (array,), _ = arrays.take(function, **{name: value})
        checks.shape(function, name, array, ())
        checks.dtype(function, name, array, ("float64",))
        on_device(function, device, arrays.device_of(function, **{name: array}), name)
        return array
    value = checks.number(function, name, value, complex)
    if value.imag and dtype.kind != "c":
        hint = "Convert x to a complex type."
        checks.fail(TypeError, function, name, f"be real for a result of {dtype.name}", value, hint)
    return value


def packed(value, pointer) -> tuple:
    """Return a number, or the address of a 0-d array, as the kernels take it."""
    if hasattr(value, "ndim") and not isinstance(value, np.generic):
        return 0.0, 0.0, pointer(value)
    value = complex(value)
    return value.real, value.imag, 0


def target(function: str, device, out, shape: tuple, dtype, beta: tuple):
    """Return the checked output, or a new one."""
    if out is None:
        if beta != ZERO:
            checks.fail(ValueError, function, "out", "be given where beta is not 0", "None")
        return device.empty(shape, dtype)
    checks.shape(function, "out", out, shape)
    if out.dtype != dtype:
        checks.fail(TypeError, function, "out", f"have the result's dtype {dtype}", out.dtype)
    checks.output(function, "out", out)
    return out


def promoted(function: str, name: str, matrix: np.dtype, vector: np.dtype) -> np.dtype:
    """Return the dtype of a product."""
    result = _result_type(matrix, vector)
    if result is None:
        checks.fail(TypeError, function, name, f"have a dtype that NumPy promotes with {matrix}", vector)
    return result


@functools.lru_cache(maxsize=256)
def _result_type(matrix: np.dtype, vector: np.dtype) -> np.dtype | None:
    try:
        result = np.result_type(matrix, vector)
    except TypeError:
        return None
    return result if result.name in formats.VALUES else None


def pieces(x, y) -> Iterator[tuple]:
    """Yield dense matrices in pieces of columns for which a grid has room."""
    if y.shape[1] <= MOST_COLUMNS:
        yield x, y
        return
    for begin in range(0, y.shape[1], MOST_COLUMNS):
        columns = slice(begin, begin + MOST_COLUMNS)
        yield x[:, columns], y[:, columns]


def are_apart(known: tuple, sizes: tuple | None) -> bool:
    """Tell whether a call is one whose checks have passed, with x and out that do not overlap this time either."""
    if sizes is None:
        return False
    x, out = known[1]
    return x + sizes[0] <= out or out + sizes[1] <= x
