"""dtype <-> C++ type name <-> item size: the only such table."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np

_CPP = {
    "float16": "__half",
    "bfloat16": "__nv_bfloat16",
    "float32": "float",
    "float64": "double",
    "float8_e4m3fn": "__nv_fp8_e4m3",
    "float8_e5m2": "__nv_fp8_e5m2",
    "int8": "signed char",
    "uint8": "unsigned char",
    "int32": "int",
    "uint32": "unsigned int",
    "int64": "long long",
    "uint64": "unsigned long long",
    "complex64": "float2",
    "complex128": "double2",
}


@functools.cache
def numpy(name: str) -> np.dtype:
    """Return the NumPy dtype called `name`; bfloat16 and float8 are those of ml_dtypes."""
    return np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else np.dtype(name)


@functools.cache  # since NumPy's own takes some microseconds
def name(dtype) -> str:
    """Return the library's name of a dtype, NumPy scalar type or name."""
    return numpy(dtype).name if isinstance(dtype, str) else np.dtype(dtype).name


def shown(dtype) -> str:
    """Return the name of a dtype, or what else was given in words."""
    if dtype is None:  # NumPy takes it for float64
        return "None"
    try:
        return name(dtype)
    except (TypeError, ValueError, AttributeError):
        return repr(dtype)


def cpp(name: str) -> str:
    """Return the C++ type that a kernel template takes for the dtype called `name`."""
    return _CPP[name]


def is_dtype(name) -> bool:
    """Tell whether `name` is a dtype name of the table."""
    return isinstance(name, str) and name in _CPP


def as_float32(value: float) -> float:
    """Round `value` as a kernel's float32 would: past the range it is infinite, where `struct` would raise."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def itemsize(name: str) -> int:
    """Return the bytes of one element."""
    return numpy(name).itemsize
