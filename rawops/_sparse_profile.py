"""What the rows of a matrix look like, and which kernel that calls for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rawops._sparse_formats import Rows, module_of


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


def profile(rows: Rows) -> Profile:
    """Measure the rows on the device; synchronises once."""
    count, cols = rows.shape
    if count == 0:
        return Profile(0, cols, 0, 0.0, 0, 0, 0, 0.0, 0)
    xp = module_of(rows.indptr)
    lengths = xp.sort(rows.indptr[1:] - rows.indptr[:-1])
    places = xp.asarray([min(count * 95 // 100, count - 1), min(count * 99 // 100, count - 1), count - 1])
    numbers = [*(lengths[places] * 1.0), lengths.std(), (lengths == 0).sum() * 1.0]
    p95, p99, longest, std, empty = xp.stack(numbers).tolist()
    mean = rows.nnz / count
    return Profile(
        count, cols, rows.nnz, mean, int(p95), int(p99), int(longest), std / mean if mean else 0.0, int(empty)
    )


@dataclass(frozen=True)
class Choice:
    """A kernel for one direction, with its parameters and the reason.

    Attributes
    ----------
    kernel : {"rows", "stream", "scatter"}
    lanes : int
        Threads that share a row (for "stream", a short row).
    longest : int
        For "stream": rows with more entries have warps of their own.
    why : str
    """

    kernel: str
    lanes: int
    longest: int
    why: str

    def __str__(self) -> str:
        split = f", rows over {self.longest} entries apart" if self.kernel == "stream" else ""
        return f"{self.kernel}, {self.lanes} threads a row{split}: {self.why}"


def power_of_two(number: float, low: int, high: int) -> int:
    """Return the largest power of two from `low` to `high` that is at most `number`, `low` if there is none."""
    found = low
    while found < high and 2 * found <= number:
        found *= 2
    return found


def choose(found: Profile) -> Choice:
    """Pick the kernel for rows that look like this: the rule table."""
    lanes = power_of_two(found.mean / 8, 1, 32)
    return Choice("stream", lanes, max(64, 16 * lanes), f"{found.mean:.3g} entries a row")


def candidates(found: Profile) -> list[Choice]:
    """Return what `SparseMatrix.tune` tries: the rule's choice first."""
    lanes = power_of_two(found.mean, 2, 32)
    rows = Choice("rows", lanes, 0, "")
    first = choose(found)
    others = [replace(first, longest=64), replace(first, longest=256), rows]
    return list(dict.fromkeys([first, *others]))


def choose_scatter(found: Profile) -> Choice:
    """Pick the kernel of the transposed product for the rows that are kept."""
    return Choice("scatter", power_of_two(found.mean, 2, 32), 0, "only one format is kept")
