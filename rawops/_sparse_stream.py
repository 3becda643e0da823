"""Equal shares of entries for the stream kernel: tiles of whole short rows, segments of long ones."""

from __future__ import annotations

from typing import Any

import numpy as np

from rawops._runtime import dtypes
from rawops._runtime.kernel import KernelSpec, ParamStruct
from rawops._sparse_formats import Rows, gather, module_of, pointers, row_numbers
from rawops._sparse_profile import Choice
from rawops._sparse_spmv import CALL, TYPES, pack, smoke, types_of

# As in spmv_stream.cu
_THREADS, _WARPS, _TILE, _GROUP = 256, 8, 2048, 4
_BLOCKS_PER_SM = {2: 4, 4: 4, 8: 3, 16: 2}  # that walk over tiles, by the bytes of a value

_ROW_WORK = 4  # rows that weigh as much as an entry
_SEGMENT = 2048  # entries of a long row for one warp
_END_ROWS = 32  # of a block of spmv_slices

PLAN = ParamStruct(
    "StreamPlan",
    **dict.fromkeys(("tiles", "segments", "splits", "sums", "tickets"), "pointer"),
    **dict.fromkeys(("segment_count", "segment_blocks", "tile_count", "lanes"), "int32"),
    **dict.fromkeys(("groups", "group_blocks", "tiles_per_group"), "int32"),
)
STREAM = KernelSpec(
    source="spmv_stream.cu",
    entry="rawops::spmv_stream",
    template=("value", "vector", "pointer", "conjugate", "walks"),
    choices={**TYPES, "conjugate": (False, True), "walks": (True, False)},
    smoke=(
        *(smoke(walks=walks) for walks in (True, False)),
        *(smoke("float64", walks=walks) for walks in (True, False)),
        smoke("bfloat16", walks=True),
        smoke("float16", "float32", "int64", walks=False),
        *(smoke("complex128", "complex128", "int64", True, walks=walks) for walks in (True, False)),
    ),
    params=CALL,
    spills={"sm_89": 24, "sm_100a": 36, "sm_120a": 36},
)
SLICES = KernelSpec(
    source="spmv_slices.cu",
    entry="rawops::spmv_slices",
    template=("vector",),
    choices={"vector": ("float32", "float64", "complex64", "complex128")},
    smoke=({"vector": "float32"}, {"vector": "complex128"}),
    params=CALL,
)
_ONE, _ZERO = (1.0, 0.0, 0), (0.0, 0.0, 0)


class ByStream:
    """Tiles of rows of at most `choice.longest` entries, and warps for the longer ones."""

    def __init__(self, device, rows: Rows, choice: Choice) -> None:
        self.device, self.rows, self.walks = device, rows, choice.walk != "single"
        xp = module_of(rows.indptr)
        lengths = (rows.indptr[1:] - rows.indptr[:-1]).astype(np.int64)
        is_long = lengths > choice.longest
        self.tiles = _tiles(xp, rows.indptr, lengths, is_long, choice.longest)
        self.segments, self.splits = _segments(xp, rows.indptr, xp.flatnonzero(is_long))
        count, tiles = self.segments.shape[0], self.tiles.shape[0]
        segment_blocks = -(-count // _WARPS)
        # All tiles are one group, or each SM has one, since blocks go round the SMs.
        groups = min(tiles, device.sm_count if choice.walk == "neighbours" else 1)
        per_group = -(-tiles // max(groups, 1))
        blocks = device.sm_count * _BLOCKS_PER_SM[rows.data.itemsize]
        group_blocks = min(per_group, blocks // max(groups, 1)) if self.walks else per_group
        self._sizes = count, segment_blocks, tiles, choice.lanes, groups, group_blocks, per_group
        self._blocks = segment_blocks + groups * group_blocks
        self.num_partials = self._blocks + self.splits.shape[0]
        # Only where rows are split: 16 bytes a segment, as large as any accumulator.
        sums = device.empty((count if self.splits.size else 0,), np.complex128)
        tickets = xp.zeros(self.splits.shape[0], np.uint32)
        self.kept: list[Any] = [self.tiles, self.segments, self.splits, sums, tickets]

    def run(self, x, y, alpha: tuple, beta: tuple, partials, conjugate: bool) -> None:
        kernel = STREAM.kernel(self.device, **types_of(self.rows, x, conjugate), walks=self.walks)
        call = pack(self.device, self.rows, x, y, alpha, beta, partials)
        plan = PLAN.pack(*(self.device.pointer(a) for a in self.kept), *self._sizes)
        kernel.launch((self._blocks, 1, 1), (_THREADS, 1, 1), (call, plan))


class BySlices:
    """Slices of columns, each so narrow that its part of x stays in an L1: the stream kernel, and a sum of the slices.

    It has the entries in an order of its own beside the format that they come from.
    """

    def __init__(self, device, rows: Rows, choice: Choice) -> None:
        self.device, self.whole = device, rows
        self.rows, self._order = _sliced(device, rows, choice.width)
        self._slices = -(-rows.shape[1] // choice.width)
        self._stream = ByStream(device, self.rows, choice)
        self.num_partials = -(-rows.shape[0] // _END_ROWS)
        self._sums: dict[str, Any] = {}

    @property
    def kept(self) -> list:
        rows = self.rows
        return [rows.data, rows.indices, rows.indptr, self._order, *self._stream.kept, *self._sums.values()]

    def update(self) -> None:
        """Take the values of the format again."""
        self.rows.data[...] = gather(self.device, self.whole.data, self._order)

    def run(self, x, y, alpha: tuple, beta: tuple, partials, conjugate: bool) -> None:
        vector = dtypes.name(x.dtype)
        if vector not in self._sums:
            self._sums[vector] = self.device.empty((self.rows.shape[0],), x.dtype)
        sums = self._sums[vector]
        self._stream.run(x, sums, alpha, _ZERO, None, conjugate)
        kernel = SLICES.kernel(self.device, vector=vector)
        call = pack(self.device, self.whole, x, y, _ONE, beta, partials)
        values = call, self.device.pointer(sums), self._slices
        kernel.launch((self.num_partials, 1, 1), (256, 1, 1), values)


def _tiles(xp, indptr, lengths, is_long, longest: int):
    """Return the tiles as spmv_stream.cu has them.

    A tile begins with the first row whose entries before it reach a multiple of a size, so it has at most that size
    and the longest short row. Rows count too, so that many empty ones do not meet in one tile. Long rows lie between
    tiles.
    """
    if lengths.size == 0:
        return xp.zeros((0, 2), np.int64)
    longest = min(longest, int(lengths.max()))
    size = _ROW_WORK * (_TILE - 2 * _GROUP - longest)
    work = xp.cumsum(xp.where(is_long, 0, _ROW_WORK * lengths) + 1)
    rows = lengths.size
    cuts = xp.searchsorted(work, xp.arange(1, int(work[-1]) // size + 1) * size) + 1
    long_rows = xp.flatnonzero(is_long)
    ends = xp.asarray([0, rows])
    first = xp.sort(xp.concatenate([ends, cuts, long_rows, long_rows + 1]))
    first, last = first[:-1], first[1:]
    is_tile = (first < last) & ~is_long[xp.minimum(first, rows - 1)]
    first, last = first[is_tile], last[is_tile]
    begin = indptr[first].astype(np.int64) & ~(_GROUP - 1)
    sizes = first + ((last - first) << 32) + ((indptr[last] - begin) << 48)
    return xp.stack([begin, sizes], 1).astype(np.int64)


def _sliced(device, rows: Rows, width: int) -> tuple[Rows, Any]:
    """Return the rows cut into slices of `width` columns, and the order in which they take the entries.

    The rows of a slice follow those of the slice before: (slices * rows) rows in all.
    """
    xp = module_of(rows.indptr)
    slices = -(-rows.shape[1] // width)
    key = rows.indices // width * np.int64(rows.shape[0]) + row_numbers(rows)
    order = xp.argsort(key, kind="stable").astype(np.int64, copy=False)
    indptr = pointers(xp, key, slices * rows.shape[0])
    shape = slices * rows.shape[0], rows.shape[1]
    return Rows(gather(device, rows.data, order), rows.indices[order], indptr, shape), order


def _segments(xp, indptr, rows) -> tuple:
    """Cut long rows: the segments as spmv_stream.cu has them, and the first segment and number of each cut row."""
    if rows.size == 0:
        return xp.zeros((0, 4), np.int64), xp.zeros((0, 2), np.int32)
    begin, stop = indptr[rows].astype(np.int64), indptr[rows + 1].astype(np.int64)
    counts = -(-(stop - begin) // _SEGMENT)
    ends = xp.cumsum(counts)
    number = xp.arange(int(ends[-1]))
    owner = xp.searchsorted(ends, number, side="right")
    first = ends - counts
    is_cut = counts > 1
    split = xp.where(is_cut, xp.cumsum(is_cut) - 1, -1)
    entry = begin[owner] + (number - first[owner]) * _SEGMENT
    segments = xp.stack([entry, xp.minimum(entry + _SEGMENT, stop[owner]), rows[owner], split[owner]], 1)
    return segments.astype(np.int64), xp.stack([first[is_cut], counts[is_cut]], 1).astype(np.int32)
