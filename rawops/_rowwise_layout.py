"""How the row-wise kernels see arrays: axes merged, groups of columns that move as one, threads a row."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

LEADING = 4  # axes before the last one that a kernel knows
MAX_COLS = 2**31 - 2**16  # leaves the kernels' int arithmetic room
TEAMS = (8, 32, 128, 256, 512)  # threads of a block that have one row
CLUSTERS = (1, 2, 4, 8)  # blocks that have
GROUPS = (0, 1, 2, 4, 8)  # that a thread holds, 0 for a row that is too long to be held
LOADS = 4  # groups that `row_sum` has on their way at a time
_USUAL, _MOST = 4, 8  # groups a thread, where a larger team can have the others, and where none can
_BUSY = 768  # threads that keep an SM busy
_BLOCKS = 2  # of the largest team, on an SM at a time

ROW_FIELDS = {"rows": "int64", **dict.fromkeys(("extent1", "extent2", "extent3", "cols"), "int32")}


def array_fields(*names: str) -> dict[str, str]:
    """Return the fields of a RowArray for each name."""
    return {
        f"{name}_{field}": "pointer" if field == "base" else "int64"
        for name in names
        for field in ("base", *(f"step{axis}" for axis in range(LEADING)), "col")
    }


@dataclass(frozen=True)
class View:
    """An array as its strides in elements, of the axes before the last one and of that."""

    itemsize: int
    alignment: int  # of its address and of all steps between rows, in bytes: at most 16
    steps: tuple[int, ...]
    col: int


@dataclass(frozen=True)
class Rows:
    """The rows of several arrays of one leading shape.

    Attributes
    ----------
    outer : tuple of tuple of int
        Offsets in bytes, one an array, of each launch: more than one where the axes do not merge to `LEADING`.
    extents : tuple of int
        Of the `LEADING` axes.
    views : tuple
        Of each array; None where there is none.
    """

    outer: tuple[tuple[int, ...], ...]
    extents: tuple[int, ...]
    views: tuple[View | None, ...]

    @property
    def count(self) -> int:
        return math.prod(self.extents)

    def numbers(self, names: tuple[str, ...]) -> dict[str, int]:
        """Return the fields that the kernels have for the shape and for the arrays of these names."""
        found = dict(zip(("rows", "extent1", "extent2", "extent3"), (self.count, *self.extents[1:]), strict=True))
        for name, view in zip(names, self.views, strict=True):
            if view is not None:
                found |= {f"{name}_step{axis}": step for axis, step in enumerate(view.steps)}
                found[f"{name}_col"] = view.col
        return found


@dataclass(frozen=True)
class Dense:
    """A C-contiguous array that is yet to be allocated."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def strides(self) -> tuple[int, ...]:
        return tuple(math.prod(self.shape[axis + 1 :]) * self.dtype.itemsize for axis in range(self.ndim))


def rows_of(arrays: tuple, addresses: list, lead: tuple[int, ...]) -> Rows:
    """Describe arrays whose axes are `lead`, then others, the last of which has the columns; or `lead` alone."""
    strides: list = []
    for x in arrays:
        if x is None:
            strides.append(None)
            continue
        strides.append([s if extent != 1 else 0 for s, extent in zip(x.strides, x.shape, strict=True)])
    axes = _merged(lead, [None if own is None else own[: len(lead)] for own in strides])
    extra, axes = axes[:-LEADING], axes[-LEADING:]
    # One axis goes first, where it needs no division.
    filled = [(1, [0] * len(arrays))] * (LEADING - len(axes))
    ordered = axes + filled if len(axes) == 1 else filled + axes
    extents = tuple(extent for extent, _ in ordered)
    outer = tuple(
        tuple(sum(i * steps[a] for i, (_, steps) in zip(index, extra, strict=True)) for a in range(len(arrays)))
        for index in np.ndindex(*(extent for extent, _ in extra))
    )
    views = []
    for a, (x, own) in enumerate(zip(arrays, strides, strict=True)):
        if own is None:
            views.append(None)
            continue
        steps = [s[a] for _, s in ordered]
        alignment = math.gcd(16, addresses[a], *steps, *(offset[a] for offset in outer))
        col = own[-1] // x.dtype.itemsize if x.ndim > len(lead) and x.shape[-1] != 1 else 1
        views.append(View(x.dtype.itemsize, alignment, tuple(s // x.dtype.itemsize for s in steps), col))
    return Rows(outer, extents, tuple(views))


def _merged(lead: tuple[int, ...], strides: list) -> list[tuple[int, list[int]]]:
    """Merge axes that every array steps through evenly; return extents and each array's strides."""
    merged: list[tuple[int, list[int]]] = []
    for axis in reversed(range(len(lead))):
        extent, steps = lead[axis], [0 if own is None else own[axis] for own in strides]
        if extent == 1:
            continue
        if merged and extent * merged[0][0] < 2**31 and _continues(merged[0], steps):
            merged[0] = (merged[0][0] * extent, merged[0][1])
        else:
            merged.insert(0, (extent, steps))
    return merged or [(1, [0] * len(strides))]


def _continues(axis: tuple[int, list[int]], steps: list[int]) -> bool:
    """Tell whether an axis with these steps goes on, in every array, where the one within it ends."""
    extent, inner = axis
    return all(s == t * extent for s, t in zip(steps, inner, strict=True))


def width_of(views: tuple[View | None, ...], itemsize: int, *offsets: int) -> int:
    """Return how many columns of `itemsize` bytes move as one in all arrays: at most 16 bytes of the first's.

    `offsets` are further distances in columns that a group may begin or end at.
    """
    width = 16 // itemsize
    for view in views:
        if view is None:
            continue
        if view.col != 1:
            return 1
        while width > 1 and view.alignment % min(16, width * view.itemsize):
            width //= 2
    return math.gcd(width, *offsets)


def access_of(views: tuple[View | None, ...], itemsize: int, *offsets: int) -> int:
    """Return `width_of`, or 0 where an array has a column stride."""
    return 0 if any(view is not None and view.col != 1 for view in views) else width_of(views, itemsize, *offsets)


def team_of(groups: int, rows: int, whole: bool, device, few: int) -> dict[str, int]:
    """Return threads of a block and blocks a row, and the groups that each thread holds: 0 of a row that is too long.

    `groups` are those of a row, of 16 bytes, which are read as a `whole` or not: that does not change which thread has
    which, so that sums come in the same order. `few` are those that a thread is to have where rows are few.

    On Hopper and later the blocks of a cluster share what one block cannot hold, and what too few blocks would read.
    """
    full = device.sm_count * _BUSY
    if groups <= TEAMS[1] * _MOST and rows * TEAMS[1] >= full:
        # Many short rows: the fewer threads, the less is done for each besides its groups.
        team = TEAMS[0] if groups <= TEAMS[0] * _MOST and rows * TEAMS[0] >= full else TEAMS[1]
    else:
        each = few if rows * TEAMS[-2] <= full else _USUAL  # few rows: all wait for what a thread does
        team = next((t for t in TEAMS[:-1] if groups <= t * each), TEAMS[-2])
    if groups > team * _MOST:
        team = TEAMS[-1]
    cluster = 1
    if groups > TEAMS[-3] * _USUAL and device.capability >= 90:
        # As many blocks as hold the row, or as there are SMs for, as long as each thread has a group.
        wanted = max(-(-groups // (team * _MOST)), min(device.sm_count // (2 * rows), groups // team))
        cluster = next((c for c in CLUSTERS if c >= wanted), CLUSTERS[-1])
    held = 1 << (-(-groups // (team * cluster)) - 1).bit_length()
    most = _MOST if whole or team <= TEAMS[1] else _USUAL
    return {"team": team, "cluster": cluster, "groups": held if held <= most else 0}


def parts_of(groups: int, rows: int, device) -> int:
    """Return into how many parts a row is cut, with a block for each, where rows alone leave SMs idle.

    `groups` are those of a row, of 16 bytes.
    """
    team, cluster = TEAMS[-1], CLUSTERS[-1] if device.capability >= 90 else 1
    if rows * cluster > device.sm_count or groups < team * cluster * _USUAL:
        return 1
    return min(_BLOCKS * device.sm_count // rows, groups // (team * _USUAL))
