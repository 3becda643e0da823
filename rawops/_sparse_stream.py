"""Equal shares of entries for the stream kernel: tiles of whole short rows, segments of long ones."""

from __future__ import annotations

from typing import Any

import numpy as np

from rawops._runtime.kernel import KernelSpec, ParamStruct
from rawops._sparse_formats import Rows, module_of
from rawops._sparse_profile import Choice
from rawops._sparse_spmv import CALL, TYPES, pack, smoke, types_of

_THREADS, _WARPS = 256, 8
_TILE = 2048  # entries that a tile can have, kTile in spmv_stream.cu
_ALIGNMENT = 4  # the entries of a vector load
_ROW_WORK = 4  # rows that weigh as much as an entry
_SEGMENT = 2048  # entries of a long row for one warp

PLAN = ParamStruct(
    "StreamPlan",
    **dict.fromkeys(("tiles", "segments", "splits", "sums", "tickets"), "pointer"),
    **dict.fromkeys(("segment_count", "segment_blocks", "lanes"), "int32"),
)
STREAM = KernelSpec(
    source="spmv_stream.cu",
    entry="rawops::spmv_stream",
    template=("value", "vector", "pointer", "conjugate"),
    choices={**TYPES, "conjugate": (False, True)},
    smoke=(
        smoke(),
        smoke("float64"),
        smoke("bfloat16"),
        smoke("float16", "float32", "int64"),
        smoke("complex128", "complex128", "int64", True),
    ),
    params=CALL,
)


class ByStream:
    """Tiles of rows of at most `choice.longest` entries, and warps for the longer ones."""

    def __init__(self, device, rows: Rows, choice: Choice) -> None:
        self.device, self.rows, self.lanes = device, rows, choice.lanes
        xp = module_of(rows.indptr)
        lengths = (rows.indptr[1:] - rows.indptr[:-1]).astype(np.int64)
        is_long = lengths > choice.longest
        self.tiles = _tiles(xp, lengths, is_long, choice.longest) if lengths.size else xp.zeros((0, 2), np.int32)
        self.segments, self.splits = _segments(xp, rows.indptr, xp.flatnonzero(is_long))
        count = self.segments.shape[0]
        self.segment_blocks = -(-count // _WARPS)
        self._blocks = self.segment_blocks + self.tiles.shape[0]
        self.num_partials = self._blocks + self.splits.shape[0]
        self.kept: list[Any] = [self.tiles, self.segments, self.splits]
        # Only where rows are split: 16 bytes a segment, as large as any accumulator.
        self.sums = device.empty((count if self.splits.size else 0,), np.complex128)
        self.tickets = xp.zeros(self.splits.shape[0], np.uint32)
        self.kept += [self.sums, self.tickets]

    def run(self, x, y, alpha: tuple, beta: tuple, partials, conjugate: bool) -> None:
        kernel = STREAM.kernel(self.device, **types_of(self.rows, x, conjugate))
        call = pack(self.device, self.rows, x, y, alpha, beta, partials)
        addresses = [self.device.pointer(a) for a in self.kept]
        plan = PLAN.pack(*addresses, self.segments.shape[0], self.segment_blocks, self.lanes)
        kernel.launch((self._blocks, 1, 1), (_THREADS, 1, 1), (call, plan))


def _tiles(xp, lengths, is_long, longest: int):
    """Return the first and the last row (exclusive) of each tile, int32 (tiles, 2).

    A tile begins with the first row whose entries before it reach a multiple of a size, so it has at most that size
    and the longest short row. Rows count too, so that many empty ones do not meet in one tile. Long rows lie between
    tiles.
    """
    longest = min(longest, int(lengths.max()))
    size = _ROW_WORK * (_TILE - 2 * _ALIGNMENT - longest)
    work = xp.cumsum(xp.where(is_long, 0, _ROW_WORK * lengths) + 1)
    rows = lengths.size
    cuts = xp.searchsorted(work, xp.arange(1, int(work[-1]) // size + 1) * size) + 1
    long_rows = xp.flatnonzero(is_long)
    ends = xp.asarray([0, rows])
    first = xp.sort(xp.concatenate([ends, cuts, long_rows, long_rows + 1]))
    pairs = xp.stack([first[:-1], first[1:]], 1)
    pairs = pairs[pairs[:, 0] < pairs[:, 1]]
    return pairs[~is_long[pairs[:, 0]]].astype(np.int32)


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
