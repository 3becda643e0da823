"""What the paged ops do alike at each call: convert the arrays, plan once a kind of call, look for overlaps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rawops._runtime import arrays, checks

_MAX_PLANS = 256


@dataclass(frozen=True)
class Plan:
    """A call whose arguments were checked.

    Attributes
    ----------
    launch : object
        What the op runs; None where there is nothing to compute.
    apart : tuple
        Pairs of operands that must not share memory, see `keep_apart`.
    copies : bool
        Some operand has strides that the kernel does not take: it gets a copy.
    """

    device: object
    launch: object
    page_size: int
    apart: tuple = ()
    copies: bool = False


class Op:
    """An op whose calls share plans.

    Parameters
    ----------
    names : tuple of str
        Of the arrays, in the order of the call.
    required : int
        How many of them, from the first, must be given.
    prepare : callable
        Takes the function's name, the arrays, their addresses and the options; returns a `Plan`.
    """

    def __init__(self, names: tuple[str, ...], required: int, prepare: Callable[..., Plan]) -> None:
        self.names, self.required, self.prepare = names, required, prepare
        self._plans: dict[tuple, Plan] = {}
        self._last: tuple = (None, None, None, None)

    def resolve(self, function: str, operands: tuple, options: tuple) -> tuple[Plan, tuple, list, Callable | None]:
        """Return the plan, the arrays as CuPy's or NumPy's, their addresses, and what converts a result back."""
        found = arrays.signature(operands)
        if found is None:
            return self._convert(function, operands, options)
        key, addresses = found  # all that the plan depends on, with the options
        last_key, last_function, last_options, plan = self._last
        if key != last_key or function != last_function or options != last_options:
            plan = self._plan_of(function, operands, addresses, options, (*key, function, options))
            self._last = key, function, options, plan
        if plan.apart:
            self._check_apart(function, plan, addresses)
        return plan, operands, addresses, None

    def _plan_of(self, function: str, operands: tuple, addresses: list, options: tuple, key: tuple) -> Plan:
        plan = self._plans.get(key)
        if plan is None:
            self._check_given(function, operands)
            plan = self.prepare(function, operands, addresses, options)
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            self._plans[key] = plan
        return plan

    def _convert(self, function: str, operands: tuple, options: tuple) -> tuple:
        self._check_given(function, operands)
        taken, give = arrays.take(function, **dict(zip(self.names, operands, strict=True)))
        device = arrays.device_of(function, **dict(zip(self.names, taken, strict=True)))
        operands, addresses = tuple(taken), [device.pointer(x) for x in taken]
        plan = self.prepare(function, operands, addresses, options)
        self._check_apart(function, plan, addresses)
        return plan, operands, addresses, give

    def _check_given(self, function: str, operands: tuple) -> None:
        for name, x in zip(self.names[: self.required], operands, strict=False):
            if x is None:
                checks.fail(TypeError, function, name, "be an array", "None")

    def _check_apart(self, function: str, plan: Plan, addresses: list) -> None:
        for written, other, low, high, allowed in plan.apart:
            distance = addresses[other] - addresses[written]
            if low < distance < high and not (allowed and distance == 0):
                names = self.names[written], self.names[other]
                hint = "Pass a copy of one of them."
                checks.fail(ValueError, function, names[0], f"not overlap {names[1]}", f"{distance} bytes apart", hint)


def keep_apart(operands: tuple, written: int, others: tuple[int, ...], same: int | None = None) -> tuple:
    """List between which distances each other operand would share memory with a written one.

    Parameters
    ----------
    operands : tuple of array or None
    written : int
        Index of what is written.
    others : tuple of int
        Indices of what must not lie there.
    same : int, optional
        The one of them that may be exactly the written array.
    """
    target = operands[written]
    if target is None or target.size == 0:
        return ()
    low, high = _span(target)
    found = []
    for index in others:
        x = operands[index]
        if x is None or x.size == 0:
            continue
        x_low, x_high = _span(x)
        found.append((written, index, low - x_high, high - x_low, index == same and x.strides == target.strides))
    return tuple(found)


def _span(x) -> tuple[int, int]:
    """First byte of an array and the one past its last, from its address."""
    steps = [(extent - 1) * s for extent, s in zip(x.shape, x.strides, strict=True)]
    return sum(s for s in steps if s < 0), sum(s for s in steps if s > 0) + x.dtype.itemsize


def check_vector(function: str, name: str, x, size: int, dtype: str) -> None:
    """Check the dtype and the shape (size,) of an array."""
    checks.dtype(function, name, x, (dtype,))
    checks.shape(function, name, x, (size,))


def has_unit_stride(x) -> bool:
    """Tell whether neighbours along the last axis are neighbours in memory."""
    return x.shape[-1] <= 1 or x.strides[-1] == x.dtype.itemsize


def in_order(x):
    """Return an array with unit stride along its last axis: itself, or a copy."""
    return x if x is None or has_unit_stride(x) else x.copy()


def contiguous(x):
    """Return an array in C order: itself, or a copy."""
    return x if x is None or x.flags.c_contiguous else x.copy()


def to_host(x):
    """Return a device array as a NumPy array, which waits for the device."""
    return x.get() if hasattr(x, "get") else x
