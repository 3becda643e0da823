"""What the rows of a matrix look like, and which kernel that calls for."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rawops._sparse_formats import Rows, module_of

_STRETCH, _STRETCHES = 64, 4096  # entries of a sample, samples
_SECTOR = 8  # float32 numbers of 32 bytes
_SLICE_WIDTH = 8192  # columns: 32 KB of float32
_SLICE_MEAN = 7  # entries of a row in a slice that pay for adding up the slices
_SMALL = 2**20  # entries of a matrix that the launch and its tail cost more than


@dataclass(frozen=True)
class Profile:
    """The rows of a matrix (of its transpose, for the other direction).

    Attributes
    ----------
    rows, cols, nnz : int
    mean, p95, p99, max : float or int
        Entries a row: mean, percentiles and the longest.
    cv : float
        Coefficient of variation of the row lengths: standard deviation over mean.
    empty : int
        Rows without an entry.
    scatter : float
        Share of neighbouring entries whose places in a float32 x lie in different 32-byte sectors, from a sample: near
        1, each entry costs a sector of its own; 1/8 is best. NaN for a direction whose format is not kept.
    """

    rows: int
    cols: int
    nnz: int
    mean: float
    p95: int
    p99: int
    max: int
    cv: float
    empty: int
    scatter: float


def profile(rows: Rows, is_kept: bool = True) -> Profile:
    """Measure the rows on the device; synchronises once. Without `is_kept`, only the row pointers are right."""
    count, cols = rows.shape
    if count == 0:
        return Profile(0, cols, 0, 0.0, 0, 0, 0, 0.0, 0, math.nan)
    xp = module_of(rows.indptr)
    lengths = xp.sort(rows.indptr[1:] - rows.indptr[:-1])
    places = xp.asarray([min(count * 95 // 100, count - 1), min(count * 99 // 100, count - 1), count - 1])
    numbers = [*(lengths[places] * 1.0), lengths.std(), (lengths == 0).sum() * 1.0]
    numbers.append(_scatter(xp, rows.indices) if is_kept and rows.nnz > 1 else xp.asarray(math.nan))
    p95, p99, longest, std, empty, scatter = xp.stack(numbers).tolist()
    mean = rows.nnz / count
    cv = std / mean if mean else 0.0
    return Profile(count, cols, rows.nnz, mean, int(p95), int(p99), int(longest), cv, int(empty), scatter)


def _scatter(xp, indices):
    """Return the share of neighbours in different sectors, from stretches of entries."""
    starts = xp.arange(0, max(indices.size - _STRETCH, 1), max(indices.size // _STRETCHES, 1))
    stretch = min(_STRETCH, indices.size)
    sectors = indices[starts[:, None] + xp.arange(stretch)] // _SECTOR
    return (sectors[:, 1:] != sectors[:, :-1]).mean()


@dataclass(frozen=True)
class Choice:
    """A kernel for one direction, with its parameters and the reason.

    Attributes
    ----------
    kernel : {"rows", "stream", "slices", "scatter"}
    lanes : int
        Threads that share a row (for "stream", a short row).
    longest : int
        For "stream" and "slices": rows with more entries have warps of their own.
    width : int
        For "slices": columns of a slice.
    walk : {"dealt", "single", "neighbours"}
        For "stream": tiles are dealt out to as many blocks as the device holds, or each has a block that the hardware
        places, or neighbours go to one SM, whose L1 then has their part of x.
    why : str
    """

    kernel: str
    lanes: int
    longest: int = 0
    width: int = 0
    walk: str = "dealt"
    why: str = ""

    def __str__(self) -> str:
        split = f", rows over {self.longest} entries apart" if self.longest else ""
        slices = f", {self.width} columns a slice" if self.width else ""
        return f"{self.kernel}, {self.lanes} threads a row{split}{slices}: {self.why}"


def power_of_two(number: float, low: int, high: int) -> int:
    """Return the largest power of two from `low` to `high` that is at most `number`, `low` if there is none."""
    found = low
    while found < high and 2 * found <= number:
        found *= 2
    return found


def choose(found: Profile, may_slice: bool = True) -> Choice:
    """Pick the kernel for rows that look like this: the rule table. 16-bit values may not be cut into slices."""
    if may_slice and found.scatter > 0.9 and found.mean >= _SLICE_MEAN * _slice_count(found) > _SLICE_MEAN:
        return _slices(found)
    if found.mean > 128:
        return Choice("stream", 1, walk="single", why=f"{found.mean:.0f} entries a row: all rows are long")
    if found.cv > 1:
        lanes = power_of_two(found.mean / 16, 1, 32)
        return Choice("stream", lanes, 256, walk="single", why=f"rows differ, {found.cv:.3g} times their mean")
    if found.max <= 16 and found.nnz < _SMALL:
        return Choice("rows", 2, why=f"short rows, of {found.max} entries at most, and few")
    lanes = power_of_two(found.mean / 8, 1, 32)
    return Choice("stream", lanes, 256, why=f"even rows, of {found.mean:.3g} entries")


def _slice_count(found: Profile) -> int:
    return -(-found.cols // _SLICE_WIDTH)


def _slices(found: Profile) -> Choice:
    slices = _slice_count(found)
    lanes = power_of_two(found.mean / slices / 8, 1, 32)
    why = f"x is scattered over, and rows of {found.mean:.0f} entries are long enough to be cut in {slices}"
    return Choice("slices", lanes, 256, _SLICE_WIDTH, "neighbours", why)


def candidates(found: Profile, may_slice: bool = True) -> list[Choice]:
    """Return what `SparseMatrix.tune` tries: the rule's choice first."""
    first, lanes = choose(found, may_slice), power_of_two(found.mean / 8, 1, 32)
    others = [Choice("stream", lanes, 256, walk=walk) for walk in ("dealt", "single")]
    others += [Choice("stream", 1), Choice("rows", power_of_two(found.mean / 4, 2, 32))]
    if may_slice and found.mean >= 4 * _slice_count(found) > 4:
        others.append(_slices(found))
    return [first, *(choice for choice in others if replace(choice, why=first.why) != first)]


def choose_scatter(found: Profile) -> Choice:
    """Pick the kernel of the transposed product for the rows that are kept."""
    return Choice("scatter", power_of_two(found.mean, 2, 32), why="only one format is kept")
