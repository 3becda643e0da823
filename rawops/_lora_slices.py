"""Ranges of columns with low-rank factors of their own: the checks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rawops._runtime import arrays, checks


def check_slices(function: str, slices, N: int) -> tuple[tuple[int, int], ...]:
    """Return the ranges of columns as ints; one of all columns for None."""
    if slices is None:
        return ((0, N),)
    hint = "Give a sequence of (start, stop), such as [(0, 4096), (4096, 5120)]."
    if not isinstance(slices, Sequence) or not all(isinstance(s, Sequence) and len(s) == 2 for s in slices):
        checks.fail(TypeError, function, "slices", "be pairs of column numbers", repr(slices), hint)
    found = tuple(
        (checks.int_range(function, "slices", start, 0, N), checks.int_range(function, "slices", stop, 0, N))
        for start, stop in slices
    )
    if not found:
        checks.fail(ValueError, function, "slices", "have at least one range", "none", hint)
    ordered = sorted(found)
    for start, stop in ordered:
        if start > stop:
            checks.fail(ValueError, function, "slices", "start before they stop", (start, stop), hint)
    for one, other in itertools.pairwise(ordered):
        if one[1] > other[0]:
            checks.fail(ValueError, function, "slices", "not overlap", f"{one} and {other}", hint)
    return found


def per_slice(x) -> tuple:
    """Return the arrays of all slices; one as it is will do for a single slice."""
    return tuple(x) if isinstance(x, Sequence) else (x,)


def take_factors(function: str, c, a, b, slices: tuple, max_rank: int | None = None) -> list[tuple | None]:
    """Return the arrays (a, b) of each slice, checked; None where there is no low-rank part."""
    given, is_one = {"a": a, "b": b}, not isinstance(a, Sequence) and not isinstance(b, Sequence)
    a, b = per_slice(a), per_slice(b)
    for (name, x), found in zip(given.items(), (a, b), strict=True):
        if len(found) != len(slices):
            got = f"{len(found)} of them" if isinstance(x, Sequence) else type(x).__name__
            checks.fail(ValueError, function, name, f"have an array for each of {len(slices)} slices", got)
    return [
        _take_pair(function, c, pair, stop - start, max_rank, "" if is_one else f"[{i}]")
        for i, (pair, (start, stop)) in enumerate(zip(zip(a, b, strict=True), slices, strict=True))
    ]


def _take_pair(function: str, c, pair: tuple, width: int, max_rank: int | None, which: str) -> tuple | None:
    a_name, b_name = f"a{which}", f"b{which}"
    if which and pair[0] is None and pair[1] is None:
        return None
    checks.arrays_given(function, **dict(zip((a_name, b_name), pair, strict=True)))
    (a, b, _), _ = arrays.take(function, **{a_name: pair[0], b_name: pair[1], "c": c})
    arrays.device_of(function, **{"c": c, a_name: a, b_name: b})
    for name, x in ((a_name, a), (b_name, b)):
        checks.dtype(function, name, x, (c.dtype.name,), "c, a and b have one dtype; convert one of them.")
        if x.ndim != 2:
            checks.fail(ValueError, function, name, "have 2 dimensions", f"shape {tuple(x.shape)}")
    rank = a.shape[1]
    if max_rank is not None and rank > max_rank:
        checks.fail(ValueError, function, a_name, f"have at most {max_rank} columns, the max_rank", rank)
    checks.shape(function, a_name, a, (c.shape[0], rank), "a is (K, rank): transpose it?")
    checks.shape(function, b_name, b, (rank, width), "b is (rank, columns): transpose it?")
    return a, b
