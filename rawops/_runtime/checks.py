"""Argument checks of every op, and the one form their messages have."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Sequence

import numpy as np

from rawops._runtime import dtypes


def fail(kind: type[Exception], function: str, argument: str, rule: str, got, hint: str = "") -> None:
    """Raise `kind` as ``<function>: <argument> must <rule>, got <value>. <what to do>``."""
    text = f"{function}: {argument} must {rule}, got {got}"
    raise kind(f"{text}. {hint}" if hint else text)


def dtype(function: str, argument: str, x, allowed: Sequence[str], hint: str = "") -> str:
    """Return the dtype name of array `x`, which must be one of `allowed`."""
    name = dtypes.name(x.dtype)
    if name not in allowed:
        fail(TypeError, function, argument, f"have dtype {_either(allowed)}", name, hint)
    return name


def named_dtype(function: str, argument: str, name: str, allowed: Sequence[str], where: str = "") -> str:
    """Return the name of a dtype that is asked for, as `dtypes.shown` has it, which must be one of `allowed`."""
    if name not in allowed:
        fail(TypeError, function, argument, f"be {' or '.join(allowed)}{where}", name)
    return name


def shape(function: str, argument: str, x, expected: tuple, hint: str = "") -> None:
    """Raise unless array `x` has exactly the shape `expected`."""
    if tuple(x.shape) != tuple(expected):
        fail(ValueError, function, argument, f"have shape {tuple(expected)}", tuple(x.shape), hint)


def choice(function: str, argument: str, value, allowed: Sequence, hint: str = ""):
    """Return `value`, which must be one of `allowed`."""
    # 4.0 and True are equal to 4 and 1, but no sizes.
    is_alien = isinstance(value, (bool, np.bool_)) and not any(isinstance(a, bool) for a in allowed)
    is_alien = is_alien or isinstance(value, (float, complex, np.inexact)) or hasattr(value, "__dlpack__")
    if is_alien or value not in allowed:
        fail(ValueError, function, argument, f"be {_either([repr(a) for a in allowed])}", repr(value), hint)
    return value


def flag(function: str, argument: str, value) -> bool:
    """Return `value`, which must be True or False (or 1 or 0), as a bool."""
    if not (isinstance(value, (bool, np.bool_)) or (isinstance(value, numbers.Integral) and value in (0, 1))):
        fail(TypeError, function, argument, "be True or False", f"{value!r} ({type(value).__name__})")
    return bool(value)


def int_range(function: str, argument: str, value, low: int, high: int, hint: str = "") -> int:
    """Return `value` as an int in ``low..high``."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Integral):
        fail(TypeError, function, argument, "be an integer", f"{value!r} ({type(value).__name__})", hint)
    if not low <= value <= high:
        fail(ValueError, function, argument, f"be between {low} and {high}", int(value), hint)
    return int(value)


def places(count: int, things: str) -> str:
    """Return how a rule names the numbers of things: "between 0 and 3", or "among 0 rows" where there are none."""
    return f"between 0 and {count - 1}" if count else f"among 0 {things}"


def number(function: str, argument: str, value, kind: type = float):
    """Return a scalar of Python, NumPy or ml_dtypes as a float, a complex one too if `kind` is complex; no bool."""
    is_narrow = isinstance(value, np.generic) and value.dtype.kind in "Vf" and dtypes.is_dtype(value.dtype.name)
    is_number = is_narrow or isinstance(value, numbers.Real if kind is float else numbers.Complex)
    if not is_number or isinstance(value, bool):
        rule = "be a real number" if kind is float else "be a number"
        fail(TypeError, function, argument, rule, f"{value!r} ({type(value).__name__})")
    try:
        return kind(value)
    except OverflowError:
        pass
    return fail(ValueError, function, argument, "fit a float", f"a larger {type(value).__name__}")


def arrays_given(function: str, **named) -> None:
    """Raise TypeError for an array that is missing."""
    for name, x in named.items():
        if x is None:
            fail(TypeError, function, name, "be an array", "None")


def output(function: str, argument: str, x) -> None:
    """Raise unless array `x` can be written, and no two of its entries share memory."""
    if isinstance(x, np.ndarray) and not x.flags.writeable:
        fail(ValueError, function, argument, "be writeable", "a read-only array")
    if x.size and not _nests(x):
        fail(ValueError, function, argument, "have entries of its own", f"strides {tuple(x.strides)}")


def on_elements(function: str, argument: str, x, address: int) -> None:
    """Raise unless all elements of array `x`, the first of them at `address`, lie on multiples of their size.

    A kernel that reads one that does not ends the program's CUDA context.
    """
    places, size = address, x.dtype.itemsize
    for step in x.strides:
        places |= step
    if places % size == 0:  # nearly always; sizes are powers of two
        return
    steps = (s for s, extent in zip(x.strides, x.shape, strict=True) if extent > 1)
    if 0 not in x.shape and any(place % size for place in (address, *steps)):
        got = f"address {address}, strides {tuple(x.strides)} bytes"
        fail(ValueError, function, argument, "lie on whole elements", got, "Copy it first.")


def all_on_elements(function: str, names: Iterable[str], operands: Iterable, addresses: Iterable[int]) -> None:
    """Raise unless `on_elements` holds of all operands that are not None."""
    for name, x, address in zip(names, operands, addresses, strict=True):
        if x is not None:
            on_elements(function, name, x, address)


def _nests(x) -> bool:
    """Tell whether each axis steps over all that the smaller steps reach: then no two entries share memory."""
    reach = x.dtype.itemsize
    for step, extent in sorted((abs(s), extent) for s, extent in zip(x.strides, x.shape, strict=True) if extent > 1):
        if step < reach:
            return False
        reach += step * (extent - 1)
    return True


def _either(names: Sequence[str]) -> str:
    names = [str(n) for n in names]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
