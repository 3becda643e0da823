"""Equal shares of entries for the stream kernel: tiles of whole short rows, segments of long ones."""

from __future__ import annotations

from typing import Any

from rawops._runtime.kernel import KernelSpec, ParamStruct
from rawops._sparse_formats import Rows
from rawops._sparse_memory import spaces
from rawops._sparse_plan import plan_stream, segment_size
from rawops._sparse_profile import Choice, Profile
from rawops._sparse_spmv import CALL, TYPES, Packer, smoke, types_of

# As in spmv_stream.cu
_THREADS, _WARPS = 256, 8
_BLOCKS_PER_SM = {2: 4, 4: 4, 8: 3, 16: 2}  # that walk over tiles, by the bytes of a value


PLAN = ParamStruct(
    "StreamPlan",
    **dict.fromkeys(("tiles", "segments", "sums", "tickets"), "pointer"),
    **dict.fromkeys(("segment_count", "segment_blocks", "tile_count", "lanes"), "int32"),
    tile_blocks="int32",
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
)


class ByStream:
    """Tiles of rows of at most `choice.longest` entries, and warps for the longer ones.

    Attributes
    ----------
    tiles, segments : array (tiles, 2) and (segments, 4), int64
        As Tile and Segment in sparse_plan.cu.
    """

    def __init__(self, device, rows: Rows, choice: Choice, found: Profile) -> None:
        self.device, self.rows, self.walks = device, rows, choice.walk != "single"
        self.tiles, self.segments = plan_stream(device, rows, choice.longest, found.max)
        count, tiles = self.segments.shape[0], self.tiles.shape[0]
        segment_blocks = -(-count // _WARPS)
        blocks = device.sm_count * _BLOCKS_PER_SM[rows.data.itemsize]
        tile_blocks = min(tiles, blocks) if self.walks else tiles
        sizes = count, segment_blocks, tiles, choice.lanes, tile_blocks
        self._blocks = segment_blocks + tile_blocks
        # Only where a row may be cut: 16 bytes a segment, as large as any accumulator.
        cut = count if found.max > segment_size(rows) else 0
        self.num_partials = self._blocks + cut
        workspace, (tickets, sums) = spaces(device, 4 * cut, 16 * cut, zeros=1) if cut else ([], (0, 0))
        self.kept: list[Any] = [self.tiles, self.segments, *workspace]
        self._plan = PLAN.pack(device.pointer(self.tiles), device.pointer(self.segments), sums, tickets, *sizes)
        self._pack, self._kernels = Packer(device, rows), {}

    def run(self, x, y, alpha: tuple, beta: tuple, partials, conjugate: bool, early: bool = False) -> None:
        key = x.dtype, conjugate
        if key not in self._kernels:
            types = types_of(self.rows, x, conjugate)
            self._kernels[key] = STREAM.kernel(self.device, **types, walks=self.walks)
        call = self._pack(x, y, alpha, beta, partials)
        self._kernels[key].launch((self._blocks, 1, 1), (_THREADS, 1, 1), (call, self._plan), early=early)
