"""Equal shares of entries for the stream kernel: tiles of whole short rows, segments of long ones."""

from __future__ import annotations

from typing import Any

import numpy as np

from rawops._runtime import dtypes
from rawops._runtime.kernel import KernelSpec, ParamStruct
from rawops._sparse_formats import Rows, module_of

_SMALL = 2**20  # entries of a matrix that so few warps read that none may have much to do
_TILE, _GROUP = 2048, 4  # as in spmv_stream.cu
_ROW_WORK = 4  # rows that weigh as much as an entry
_THREADS = 256

_POINTERS = ("int32", "int64")
CUTS = ParamStruct("StreamCuts", **dict.fromkeys(("rows", "longest", "row_work", "segment"), "int32"), size="int64")


def _spec(entry: str) -> KernelSpec:
    smoke = ({"pointer": pointer} for pointer in _POINTERS)
    choices: dict[str, Any] = {"template": ("pointer",), "choices": {"pointer": _POINTERS}, "smoke": smoke}
    return KernelSpec(source="sparse_plan.cu", entry=f"rawops::plan_{entry}", params=CUTS, **choices)


ROWS, STARTS, TILES, SEGMENTS = map(_spec, ("rows", "starts", "tiles", "segments"))


def segment_size(rows: Rows) -> int:
    """Return how many entries of a long row one warp adds up."""
    return 512 if rows.nnz < _SMALL else 2048


def plan_stream(device, rows: Rows, longest: int, longest_row: int) -> tuple:
    """Return the tiles of rows of at most `longest` entries and the segments of longer ones, as in sparse_plan.cu.

    It synchronises once or twice. `longest_row` is that of the matrix, or an upper bound.
    """
    xp, count = module_of(rows.indptr), rows.shape[0]
    tiles, segments = xp.zeros((0, 2), np.int64), xp.zeros((0, 4), np.int64)
    if not count:
        return tiles, segments
    size = _ROW_WORK * (_TILE - 2 * _GROUP - min(longest, longest_row))
    cuts = CUTS.pack(count, longest, _ROW_WORK, segment_size(rows), size)

    def launch(spec: KernelSpec, places: int, *values) -> None:
        kernel = spec.kernel(device, pointer=dtypes.name(rows.indptr.dtype))
        values = tuple(device.pointer(v) if v is None or hasattr(v, "dtype") else v for v in values)
        blocks = -(-places // _THREADS)
        kernel.launch((blocks, 1, 1), (_THREADS, 1, 1), (device.pointer(rows.indptr), cuts, *values))

    work, starts = device.empty((count,), np.dtype(np.int64)), device.empty((count,), np.dtype(np.int32))
    counts = device.empty((count,), np.dtype(np.int32)) if longest_row > longest else None
    launch(ROWS, count, work, counts)
    work_ends = xp.cumsum(work)
    launch(STARTS, count, work_ends, starts)
    numbers, ends = xp.cumsum(starts, dtype=np.int32), None
    if counts is not None:
        ends = xp.cumsum(counts, dtype=np.int64)
        segments = xp.zeros((int(ends[-1]), 4), np.int64)
    tiles = xp.zeros((int(numbers[-1]), 2), np.int64)
    if tiles.size:
        launch(TILES, count, numbers, ends, tiles, _GROUP)
    if segments.size:
        launch(SEGMENTS, segments.shape[0], ends, segments.shape[0], segments)
    return tiles, segments
