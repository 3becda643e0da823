"""Equal shares of entries for the stream kernel: tiles of whole short rows, segments of long ones."""

from __future__ import annotations

import numpy as np

from rawops._runtime import dtypes
from rawops._runtime.kernel import KernelSpec, ParamStruct
from rawops._sparse_formats import Rows
from rawops._sparse_memory import answers, kernel, zeros

_SMALL = 2**20  # entries of a matrix that so few warps read that none may have much to do
_TILE, _GROUP = 2048, 4  # as in spmv_stream.cu
_ROW_WORK = 4  # rows that weigh as much as an entry
_PLAN_ROWS = 1024  # of a block of sparse_plan.cu

_POINTERS = ("int32", "int64")
CUTS = ParamStruct("StreamCuts", **dict.fromkeys(("rows", "longest", "row_work", "segment"), "int32"), size="int64")
PLAN = KernelSpec(
    source="sparse_plan.cu",
    entry="rawops::plan_stream",
    template=("pointer",),
    choices={"pointer": _POINTERS},
    smoke=({"pointer": "int32"}, {"pointer": "int64"}),
    params=CUTS,
)


def segment_size(rows: Rows) -> int:
    """Return how many entries of a long row one warp adds up."""
    return 512 if rows.nnz < _SMALL else 2048


def plan_stream(device, rows: Rows, longest: int, longest_row: int) -> tuple:
    """Return the tiles of rows of at most `longest` entries and the segments of longer ones, as in sparse_plan.cu.

    A tile may have no rows. It synchronises once. `longest_row` is that of the matrix, or an upper bound.
    """
    count, pointer = rows.shape[0], device.pointer
    if not count:
        return tuple(device.empty((0, width), np.dtype(np.int64)) for width in (2, 4))
    size = _ROW_WORK * (_TILE - 2 * _GROUP - min(longest, longest_row))
    segment = segment_size(rows)
    long_rows = min(rows.nnz // (longest + 1), count) if longest_row > longest else 0
    most_tiles = (_ROW_WORK * rows.nnz + count) // size + long_rows + 2
    most_segments = rows.nnz // segment + long_rows if long_rows else 0
    blocks = -(-count // _PLAN_ROWS)
    state = zeros(device, 2 * most_tiles + 2 * blocks + 1)  # tiles, words and turns
    segments = device.empty((most_segments, 4), state.dtype)
    tiles = pointer(state)
    words = tiles + 16 * most_tiles
    cuts = CUTS.pack(count, longest, _ROW_WORK, segment, size)
    plans = kernel(device, PLAN, dtypes.name(rows.indptr.dtype))
    with answers(device) as answer:
        addresses = tiles, pointer(segments), answer.address(2), words, words + 16 * blocks
        values = pointer(rows.indptr), cuts, _GROUP, *addresses
        plans.launch((blocks, 1, 1), (_PLAN_ROWS, 1, 1), values)
        tile_count, segment_count = answer.wait(2)
    return state[: 2 * tile_count].reshape(-1, 2), segments[:segment_count]
