"""What the rows of a matrix look like, and which kernel that calls for."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from rawops._sparse_formats import Rows
from rawops._sparse_measure import LONGER, measure

_SHARED_READS = 128  # blocks of threads that each read all of x
_BLOCK_MEAN = 12  # entries of a row in a block of columns that pay for adding up the blocks
_SMALL = 2**20  # entries of a matrix that the launch and its tail cost more than


class Profile(NamedTuple):
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
        Share of neighbouring entries whose places in a float32 x lie in different 32-byte sectors: near 1, each entry
        costs a sector of its own; 1/8 is best. NaN for a direction whose format is not kept.
    bandwidth : int
        Largest distance of an entry from the diagonal, from the ends of the rows: less than it is where columns do not
        rise.
    padding : float
        Entries of slices of 32 neighbouring rows, each as long as its longest row, over those there are: 1 where rows
        are even. Rows of 1023 entries and more are left out.
    rises : bool
        Whether columns rise, or stay, within each row.
    longer : tuple of int
        Rows of more than 32, 64, 128, 256, 512 and 1022 entries.
    held : int
        Entries of the rows of at most 1022.
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
    bandwidth: int = 0
    padding: float = 1.0
    rises: bool = False
    longer: tuple[int, ...] = (0,) * len(LONGER)
    held: int = 0


def profile(device, rows: Rows, is_kept: bool = True) -> Profile:
    """Measure the rows on the device; it synchronises where they are not measured yet.

    Without `is_kept`, only the row pointers are right.
    """
    count, cols = rows.shape
    nnz = rows.nnz
    if count == 0 or nnz == 0:
        return Profile(count, cols, 0, 0.0, 0, 0, 0, 0.0, count, math.nan, rises=True)
    found = rows.measured or measure(device, rows.indices, rows.indptr, cols)
    variance = (count * found.squares - nnz * nnz) / count**2
    scatter = found.jumps / (nnz - 1) if is_kept and nnz > 1 else math.nan
    return Profile(
        count, cols, nnz, nnz / count, found.p95, found.p99, found.longest, math.sqrt(variance) * count / nnz,
        found.empty, scatter, found.bandwidth, found.padding, is_kept and found.falls == found.row_falls,
        found.longer, found.held,
    )  # fmt: skip


class Choice(NamedTuple):
    """A kernel for one direction, with its parameters and the reason.

    Attributes
    ----------
    kernel : {"rows", "stream", "packed", "scatter"}
    lanes : int
        Threads that share a row (for "stream" and "packed", a short row).
    longest : int
        For "stream" and "packed": rows with more entries have warps of their own.
    width : int
        For "packed": columns of a block, whose part of x is in shared memory; 0 where x comes through the L1.
    walk : {"dealt", "single"}
        For "stream": tiles are dealt out to as many blocks as the device holds, or each has a block that the hardware
        places.
    is_sorted : bool
        For "packed": whether rows are sorted by length, in windows.
    is_wide : bool
        For "packed" with x through the L1: whether columns take 32 bits even where 16 would do.
    why : str
    """

    kernel: str
    lanes: int
    longest: int = 0
    width: int = 0
    walk: str = "dealt"
    is_sorted: bool = True
    is_wide: bool = False
    why: str = ""

    @property
    def name(self) -> str:
        """The kernel, as the rule table in docs/sparse.md has it."""
        if self.kernel == "packed":
            if self.width:
                return f"packed, shared, {self.width} columns at a time"
            return f"packed, {'far' if self.is_wide else 'near'}{', sorted' if self.is_sorted else ''}"
        return f"stream, {self.walk}" if self.kernel == "stream" else self.kernel

    def __str__(self) -> str:
        if self.kernel == "stream" and not self.longest:
            return f"{self.name}, all rows have warps of their own: {self.why}"
        lanes = "1 lane" if self.lanes == 1 else f"{self.lanes} lanes"
        split = f", rows over {self.longest} entries have warps of their own" if self.longest else ""
        return f"{self.name}, {lanes} a row{split}: {self.why}"


class Limits(NamedTuple):
    """What a device and a type of values allow: columns whose x fits in shared memory, as the only block of columns or
    as one of several, and whether a packed copy may be made at all.
    """

    columns: int = 57_000
    block_columns: int = 28_000
    may_pack: bool = True


def power_of_two(number: float, low: int, high: int) -> int:
    """Return the largest power of two from `low` to `high` that is at most `number`, `low` if there is none."""
    found = low
    while found < high and 2 * found <= number:
        found *= 2
    return found


def choose(found: Profile, limits: Callable[[], Limits]) -> Choice:
    """Pick the kernel for rows that look like this: the rule table. Limits are asked for where they matter."""
    if found.max <= 16 and found.nnz < _SMALL:
        return Choice("rows", 2, why=f"{found.max} entries a row at most, under 2^20 in all")
    limits = limits()
    if limits.may_pack and found.nnz >= _SMALL:
        packed = _in_shared_memory(found, limits) or _by_slices(found)
        if packed is not None:
            return packed
    if found.mean > 128:
        return Choice("stream", 1, walk="single", why=f"mean over 128: {found.mean:.0f} entries a row")
    if found.cv > 1 and found.nnz >= _SMALL:
        lanes = power_of_two(found.mean / 16, 1, 32)
        return Choice("stream", lanes, 256, walk="single", why=f"unequal rows, coefficient of variation {found.cv:.3g}")
    lanes = power_of_two(found.mean / 8, 1, 32)
    why = f"under 2^20 entries, {found.mean:.3g} a row"
    if found.nnz >= _SMALL:
        why = (
            "neither even, short nor unequal rows" if limits.may_pack else "no packed copy of such values, or no memory"
        )
    return Choice("stream", lanes, 256, why=why)


def _in_shared_memory(found: Profile, limits: Limits) -> Choice | None:
    if found.cols <= limits.columns and _SHARED_READS * found.cols <= found.nnz:
        return _blocked(found.mean, found.cols, f"all of x, {found.cols} numbers, fits in shared memory")
    blocks = -(-found.cols // limits.block_columns)
    mean = found.mean / blocks
    if found.rises and found.scatter > 0.5 and mean >= _BLOCK_MEAN:
        why = f"scattered columns, and rows of {found.mean:.0f} entries are long enough for {blocks} blocks"
        return _blocked(mean, limits.block_columns, why)
    return None


def _blocked(mean: float, width: int, why: str) -> Choice:
    lanes = power_of_two(mean / 12, 1, 16)
    return Choice("packed", lanes, 32 * lanes, width, why=why)


def _by_slices(found: Profile) -> Choice | None:
    is_wide = found.scatter > 0.9  # which leaves nothing to gain from narrow columns
    is_sorted = found.padding > 1.2
    if found.cv <= 0.5 and found.mean <= 256:
        lanes = power_of_two(found.mean / 16, 1, 32)
        why = f"even rows, of {found.mean:.3g} entries"
        return Choice("packed", lanes, 4096, is_sorted=is_sorted, is_wide=is_wide, why=why)
    if found.mean <= 16 and found.p99 <= 1.25 * found.mean:
        why = f"short rows, 99 % of them of {found.p99} entries at most"
        return Choice("packed", 1, 32, is_sorted=is_sorted, is_wide=is_wide, why=why)
    return None


def candidates(found: Profile, limits: Limits) -> list[Choice]:
    """Return what `SparseMatrix.tune` tries: the rule's choice first."""
    first, lanes = choose(found, lambda: limits), power_of_two(found.mean / 8, 1, 32)
    others = [Choice("stream", lanes, 256, walk=walk) for walk in ("dealt", "single")]
    others.append(Choice("rows", power_of_two(found.mean / 4, 2, 32)))
    if limits.may_pack:
        packed = power_of_two(found.mean / 16, 1, 16)
        others.append(Choice("packed", packed, 32 * packed))
        blocks = 1 if found.cols <= limits.columns else -(-found.cols // limits.block_columns)
        if (found.rises or blocks == 1) and found.mean >= 8 * blocks:
            others.append(_blocked(found.mean / blocks, found.cols if blocks == 1 else limits.block_columns, ""))
    return [first, *(choice for choice in others if choice._replace(why=first.why) != first)]


def choose_scatter(found: Profile) -> Choice:
    """Pick the kernel of the transposed product for the rows that are kept."""
    return Choice("scatter", power_of_two(found.mean, 2, 32), why="only one format is kept")
