"""Calls of an op that share plans: arrays converted, planned once a kind of call, overlaps looked for each time."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import numpy as np

from rawops._runtime import arrays, checks

_MAX_PLANS = 256


class Op:
    """An op whose calls share plans.

    Parameters
    ----------
    names : tuple of str
        Of the arrays, in the order of the call.
    required : int
        How many of them, from the first, must be given.
    prepare : callable
        Takes the function's name, the arrays, their addresses and the options; returns a plan, which has a `device`
        and `apart`: pairs of operands that must not share memory, see `keep_apart`.
    written : tuple of str
        The names of those that the op writes.
    """

    def __init__(
        self, names: tuple[str, ...], required: int, prepare: Callable[..., Any], written: tuple[str, ...] = ("out",)
    ) -> None:
        self.names, self.required, self.prepare, self.written = names, required, prepare, written
        self._plans: dict[tuple, Any] = {}
        self._last: tuple = (None, None, None, None)

    def resolve(self, function: str, operands: tuple, options: tuple) -> tuple[Any, list] | None:
        """Return the plan and the addresses of the arrays.

        None where they are not CuPy's or NumPy's or not of the current device: call again with what `take` returns.
        """
        found = arrays.signature(operands)
        if found is None:
            return self._resolve_emulated(function, operands, options)
        key, addresses = found  # all that the plan depends on, with the options
        last_key, last_function, last_options, plan = self._last
        if key != last_key or function != last_function or options != last_options:
            plan = self._plan_of(function, operands, addresses, options, (*key, function, options))
            self._last = key, function, options, plan
        if plan.apart:
            check_apart(function, self.names, plan.apart, addresses)
        return plan, addresses

    def take(self, function: str, operands: tuple) -> tuple[tuple, Callable, Any]:
        """Return the arrays as CuPy's, what converts a result back, and the device, to be made the current one."""
        self._check_given(function, operands)
        taken, give = arrays.take(function, self.written, **dict(zip(self.names, operands, strict=True)))
        device = arrays.device_of(function, **dict(zip(self.names, taken, strict=True)))
        return tuple(taken), give, device

    def _plan_of(self, function: str, operands: tuple, addresses: list, options: tuple, key: tuple):
        plan = self._plans.get(key)
        if plan is None:
            self._check_given(function, operands)
            checks.all_on_elements(function, self.names, operands, addresses)
            plan = self.prepare(function, operands, addresses, options)
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            self._plans[key] = plan
        return plan

    def _resolve_emulated(self, function: str, operands: tuple, options: tuple) -> tuple[Any, list] | None:
        """Resolve arrays of the emulator, which is too slow itself to need a cache."""
        if not all(x is None or isinstance(x, np.ndarray) for x in operands):
            return None
        _, _, device = self.take(function, operands)
        if device.get_current() != device.ordinal:  # where tests have an emulator that may not be the current one
            return None
        addresses = [device.pointer(x) for x in operands]
        plan = self.prepare(function, operands, addresses, options)
        check_apart(function, self.names, plan.apart, addresses)
        return plan, addresses

    def _check_given(self, function: str, operands: tuple) -> None:
        checks.arrays_given(function, **dict(zip(self.names[: self.required], operands, strict=False)))


def keep_apart(operands: tuple, written: int, others: tuple[int, ...], same: int | None = None) -> tuple:
    """List at which distances each other operand would share memory with a written one.

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
    found = []
    for index in others:
        x = operands[index]
        if x is not None and x.size:
            bounds = arrays.distances(arrays.span(target), arrays.span(x))
            found.append((written, index, *bounds, _windows(target, x), index == same and x.strides == target.strides))
    return tuple(found)


def check_apart(function: str, names: tuple[str, ...], apart: tuple, addresses: list) -> None:
    """Raise where operands of these names and addresses share memory that `keep_apart` has listed."""
    for written, other, low, high, windows, allowed in apart:
        distance = addresses[other] - addresses[written]
        if not low < distance < high or (distance == 0 and allowed):  # nearly always, and each call asks for each pair
            continue
        if all(_meet(distance % period, period, *bounds) for period, *bounds in windows):
            rule, hint = f"not overlap {names[other]}", "Pass a copy of one of them."
            checks.fail(ValueError, function, names[written], rule, f"{distance} bytes apart", hint)


def check_apart_once(function: str, device, named: dict, written: Container[str]) -> None:
    """Raise where an array that is written shares memory with any other, in a call that has no plan."""
    named = {name: x for name, x in named.items() if x is not None and x.size}
    names, operands = tuple(named), tuple(named.values())
    addresses = [device.pointer(x) for x in operands]
    reaches = [tuple(address + end for end in arrays.span(x)) for x, address in zip(operands, addresses, strict=True)]
    for target in (i for i, name in enumerate(names) if name in written):
        low, high = reaches[target]
        for other, (start, end) in enumerate(reaches):
            if other != target and start < high and low < end:  # seldom: a closer look takes some microseconds
                check_apart(function, names, keep_apart(operands, target, (other,)), addresses)


def _windows(target, x) -> tuple[tuple[int, int, int], ...]:
    """Return periods, and between which distances within each two arrays meet, if they share memory.

    Slices of one array lie within each other's span and are apart all the same, which shows within a period: a stride
    of both that their larger ones are multiples of.
    """
    found = []
    for period in {abs(s) for s in target.strides} & {abs(s) for s in x.strides} - {0}:
        inner = [_span_within(own, period) for own in (target, x)]
        if None not in inner:
            found.append((period, *arrays.distances(*inner)))
    return tuple(found)


def _span_within(x, period: int) -> tuple[int, int] | None:
    """Return what the axes that step less than a period span, if that is no more than it, and the others step by it."""
    inner = [(s, extent) for s, extent in zip(x.strides, x.shape, strict=True) if extent > 1 and s % period]
    if any(abs(s) > period for s, _ in inner):
        return None
    low, high = (sum(s * (extent - 1) for s, extent in inner if (s > 0) == up) for up in (False, True))
    high += x.dtype.itemsize
    return (low, high) if high - low <= period else None


def _meet(rest: int, period: int, low: int, high: int) -> bool:
    """Tell whether a distance less whole periods, or one period less still, lies between bounds."""
    return low < rest < high or low < rest - period < high
