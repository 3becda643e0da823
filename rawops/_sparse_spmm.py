"""Y = alpha A X + beta Y for a dense matrix X: the layouts of spmm_rows.cu and their launches."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rawops._runtime import dtypes
from rawops._runtime.kernel import KernelSpec, ParamStruct
from rawops._sparse_formats import Rows, module_of
from rawops._sparse_profile import power_of_two
from rawops._sparse_spmv import ACCUMULATOR, CALL, TYPES, pack, types_of

_THREADS, _WARP = 256, 32
_SEGMENT = 2048  # entries of a long row for one block
_BLOCK_WORK, _BLOCK_ROWS = 1024, 128  # entries of a block's rows, about, and how many rows
_WIDE_BLOCK_ROWS = 64  # with 32 lanes: what all blocks read and write at a time stays in the L2
_SHARE = 4  # groups that share a row at most
_COLUMN_ROWS = 8  # rows that a group takes at most where a block's squares are added up
_BLOCKS_PER_SM, _WAVES = 4, 4  # blocks that an SM holds, and times that it is filled where there are many rows
_LONG = 512  # entries of a row that no warp should be alone with,
_LONG_OF_MANY = 4096  # unless most rows are like that, and there are many

DENSE = ParamStruct(
    "DenseShape",
    **dict.fromkeys(("x_row", "y_row", "y_col"), "int64"),
    **dict.fromkeys(("columns", "is_vector_y"), "int32"),
)
PLAN = ParamStruct(
    "SpmmPlan",
    **dict.fromkeys(("segments", "splits", "sums", "tickets", "rows"), "pointer"),
    **dict.fromkeys(("segment_count", "split_count", "listed", "longest", "rows_a_team"), "int32"),
    step="int64",
)


def _smoke(value="float32", vector=None, access=16, lanes=32, share=1, conjugate=False, columns=False) -> dict:
    layout = {"access": access, "lanes": lanes, "share": share}
    choices = {"value": value, "vector": vector or value, "pointer": "int32", **layout, "conjugate": conjugate}
    return {**choices, "columns": columns}


SPMM = KernelSpec(
    source="spmm_rows.cu",
    entry="rawops::spmm_rows",
    template=("value", "vector", "pointer", "access", "lanes", "share", "conjugate", "columns"),
    choices={
        **TYPES,
        "access": (2, 4, 8, 16),
        "lanes": (1, 2, 4, 8, 16, 32),
        "share": (1, 2, 4, 8, 16, 32),
        "conjugate": (False, True),
        "columns": (False, True),
    },
    smoke=(
        _smoke(),
        _smoke(lanes=8, share=2),
        _smoke(lanes=2, share=4),
        _smoke(access=4),
        _smoke("float16", lanes=16),
        _smoke("float64", lanes=16),
        _smoke("complex64", lanes=4, share=8, conjugate=True),
        _smoke("complex128", lanes=32, conjugate=True),
        _smoke(lanes=8, columns=True),
        _smoke("float64", lanes=16, columns=True),
        _smoke("complex128", lanes=8, share=4, conjugate=True, columns=True),
    ),
    params=CALL,
    spills={"sm_89": 24},
)


@dataclass(frozen=True)
class Layout:
    """How a product is shared out.

    Attributes
    ----------
    access : int
        Bytes of a row of x that a thread reads at once.
    lanes, share : int
        Threads side by side on a row of x, and groups of them that share a row of A.
    longest, split : int
        Rows with more entries have a warp of their own; those with still more are cut into segments.
    rows_a_team : int
        Rows that a group (or those that share a row) takes one after another.
    """

    access: int
    lanes: int
    share: int
    longest: int
    split: int
    rows_a_team: int

    def width(self, itemsize: int) -> int:
        """Return how many columns a block of threads takes."""
        return max(self.access // itemsize, 1) * self.lanes

    @property
    def choices(self) -> dict:
        return {"access": self.access, "lanes": self.lanes, "share": self.share}


def layout_for(columns: int, itemsize: int, alignment: int, mean: float) -> Layout:
    """Return the layout for rows of x of so many columns that begin at multiples of `alignment` bytes."""
    access = itemsize
    while access < 16 and alignment % (2 * access) == 0 and columns * itemsize % (2 * access) == 0:
        access *= 2
    lanes = 1
    while lanes < min(columns * itemsize // access, _WARP):
        lanes *= 2
    share = power_of_two(mean / (4 * lanes), 1, min(_SHARE, _WARP // lanes))
    # Rows that are much longer than their neighbours would keep those of the same warp waiting.
    longest = int(min(max(16 * share, 2 * mean, 64 if lanes == _WARP else 0), _LONG))
    split = max(longest, 64 * _WARP // lanes)
    teams = _THREADS // (lanes * share)
    most = _WIDE_BLOCK_ROWS if lanes == _WARP else _BLOCK_ROWS
    rows_a_team = power_of_two(min(_BLOCK_WORK / max(mean, 1), most) / teams, 1, most)
    return Layout(access, lanes, share, longest, split, rows_a_team)


class Dense:
    """One direction of a matrix times dense matrices.

    Attributes
    ----------
    kept : list of array
        The segments of long rows, and the sums of those that are cut.
    """

    def __init__(self, device, rows: Rows) -> None:
        self.device, self.rows = device, rows
        self._segments: dict[tuple, tuple] = {}
        self._workspaces: dict[tuple, tuple] = {}

    @property
    def kept(self) -> list:
        found = [*self._segments.values(), *self._workspaces.values()]
        return [array for arrays in found for array in arrays]

    def run(self, x, y, alpha: tuple, beta: tuple, conjugate: bool) -> None:
        """Launch on matrices of one type and any strides; x is read and y written in place."""
        if not y.size:
            return
        if y.shape[1] > 1 and x.strides[1] != x.itemsize:
            x = module_of(x).ascontiguousarray(x)
        self._launch(self._layout(x), x, y, alpha, beta, conjugate)

    def run_columns(self, x, y, alpha: tuple, beta: tuple, step: int, partials, conjugate: bool, early: bool) -> None:
        """Launch with numbers for each column on contiguous matrices from the device's pool.

        alpha and beta are (0.0, 0.0, address) of the first column's number, float64, with `step` numbers from one
        column's to the next one's. Where they are 0 and 1 for all columns of a block of threads, it does nothing. With
        `early` the launch is an early one.

        Parameters
        ----------
        partials : array (num_partials(x), columns), float64
            Parts of the sums of the squares of the columns of y.
        """
        layout = self._column_layout(x)
        self._launch(layout, x, y, alpha, beta, conjugate, step, partials, early)

    def num_partials(self, x) -> int:
        """How many parts of the sums of squares `run_columns` leaves. The first call synchronises."""
        layout = self._column_layout(x)
        _, _, splits = self._apart(layout.longest, layout.split)
        return self._blocks(layout) + splits.shape[0]

    def _layout(self, x) -> Layout:
        mean = self.rows.nnz / self.rows.shape[0]
        layout = layout_for(x.shape[1], x.itemsize, self._alignment(x), mean)
        usual = min(int(2 * mean), _LONG_OF_MANY)
        if usual <= layout.longest or self._row_blocks(layout) < self.device.sm_count * _BLOCKS_PER_SM * _WAVES:
            return layout
        return replace(layout, longest=usual, split=max(layout.split, usual))

    def _row_blocks(self, layout: Layout) -> int:
        """Return how many blocks of threads there are with one row for each group."""
        return self.rows.shape[0] * layout.lanes * layout.share // _THREADS

    def _column_layout(self, x) -> Layout:
        layout, most = self._layout(x), self.device.sm_count * _BLOCKS_PER_SM * _WAVES
        rows_a_team = power_of_two(self._row_blocks(layout) / most, 1, _COLUMN_ROWS)
        return replace(layout, rows_a_team=max(layout.rows_a_team, rows_a_team))

    def _blocks(self, layout: Layout) -> int:
        listed, segments, _ = self._apart(layout.longest, layout.split)
        at_once = _THREADS // (layout.lanes * layout.share) * layout.rows_a_team
        return segments.shape[0] + -(-listed.size // (_THREADS // _WARP)) + -(-self.rows.shape[0] // at_once)

    def _launch(self, layout: Layout, x, y, alpha, beta, conjugate, step=0, partials=None, early=False) -> None:
        columns = y.shape[1]
        tiles = -(-columns // layout.width(x.itemsize))
        listed, segments, splits = self._apart(layout.longest, layout.split)
        types = types_of(self.rows, x, conjugate)
        kernel = SPMM.kernel(self.device, **types, **layout.choices, columns=partials is not None)
        workspace = self._workspace(segments, splits, columns, tiles, types["vector"])
        call = pack(self.device, self.rows, x, y, alpha, beta, partials)
        is_vector_y = layout.access > y.itemsize and self._alignment(y) % layout.access == 0
        shape = DENSE.pack(*strides_of(x, y), columns, is_vector_y)
        sizes = segments.shape[0], splits.shape[0], listed.size, layout.longest, layout.rows_a_team, step
        plan = PLAN.pack(*map(self.device.pointer, (segments, splits, *workspace, listed)), *sizes)
        kernel.launch((self._blocks(layout), tiles, 1), (_THREADS, 1, 1), (call, shape, plan), early=early)

    def _alignment(self, x) -> int:
        """Return a divisor, in bytes, of where the rows of x begin; that of an element where columns are apart."""
        if x.shape[1] > 1 and x.strides[1] != x.itemsize:  # columns apart, of y
            return x.itemsize
        step = x.strides[0] if x.shape[0] > 1 else 0
        return math.gcd(self.device.pointer(x), step, 16)

    def _apart(self, longest: int, split: int) -> tuple:
        """Return the rows of warps of their own, and segments and splits; the first call synchronises."""
        key = longest, split
        if key not in self._segments:
            indptr = self.rows.indptr
            xp = module_of(indptr)
            lengths = indptr[1:] - indptr[:-1]
            listed = xp.flatnonzero((lengths > longest) & (lengths <= split)).astype(np.int32)
            self._segments[key] = listed, *_segments(xp, self.rows, xp.flatnonzero(lengths > split))
        return self._segments[key]

    def _workspace(self, segments, splits, columns: int, tiles: int, vector: str) -> tuple[Any, Any]:
        if not splits.size:
            return segments, segments  # not read
        key = segments.shape[0], columns, tiles, vector
        if key not in self._workspaces:
            sums = self.device.empty((segments.shape[0], columns), dtypes.numpy(ACCUMULATOR.get(vector, vector)))
            tickets = module_of(splits).zeros((tiles, splits.shape[0]), np.uint32)
            self._workspaces[key] = sums, tickets
        return self._workspaces[key]


def strides_of(x, y) -> list[int]:
    """Return the strides of a DenseShape, in elements."""
    return [stride // x.itemsize for stride in (x.strides[0], *y.strides)]


def _segments(xp, rows: Rows, long_rows) -> tuple:
    """Cut long rows: the segments as spmm_rows.cu has them, and the first segment and number of each cut row."""
    if long_rows.size == 0:
        return xp.zeros((0, 4), np.int64), xp.zeros((0, 2), np.int32)
    begin, stop = (rows.indptr[long_rows + i].astype(np.int64) for i in (0, 1))
    counts = -(-(stop - begin) // _SEGMENT)
    ends = xp.cumsum(counts)
    number = xp.arange(int(ends[-1]))
    owner = xp.searchsorted(ends, number, side="right")
    entry = begin[owner] + (number - ends[owner] + counts[owner]) * _SEGMENT
    is_cut = counts > 1
    split = xp.where(is_cut, xp.cumsum(is_cut) - 1, -1)
    fields = entry, xp.minimum(entry + _SEGMENT, stop[owner]), long_rows[owner], split[owner]
    splits = (ends - counts)[is_cut], counts[is_cut]
    return xp.stack(fields, 1).astype(np.int64), xp.stack(splits, 1).astype(np.int32)
