"""The copy of a matrix that spmv_packed.cu reads: how it is laid out, and how the device makes it."""

from __future__ import annotations

from typing import Any

import numpy as np

from rawops._runtime import dtypes
from rawops._runtime.kernel import KernelSpec, ParamStruct
from rawops._sparse_formats import Rows, module_of
from rawops._sparse_profile import Choice

PACKABLE = ("float32", "float64", "complex64", "complex128")  # 16 bits are too few to add up blocks in
PIECE = 512  # entries of a long row that a warp adds up
_POINTERS = ("int32", "int64")
_WINDOW = 1024  # rows that are sorted together, as in sparse_pack.cu
_SLICE_WORK = 8  # what a slice costs beside its entries, in entries of a lane
_INT32 = np.dtype(np.int32)

FILL = ParamStruct(
    "PackFill",
    **dict.fromkeys(("data", "indices", "bounds"), "pointer"),
    stride="int64",
    **dict.fromkeys(("starts", "slots", "pieces", "packed", "columns", "bases", "failed"), "pointer"),
    **dict.fromkeys(("rows", "slices_per_block", "slices", "piece_count", "width", "lanes", "piece"), "int32"),
)
BOUNDS = KernelSpec(
    source="sparse_pack.cu",
    entry="rawops::pack_bounds",
    template=("pointer",),
    choices={"pointer": _POINTERS},
    smoke=({"pointer": "int32"}, {"pointer": "int64"}),
)
WINDOWS = KernelSpec(
    source="sparse_pack.cu",
    entry="rawops::pack_windows",
    template=("pointer", "sorted"),
    choices={"pointer": _POINTERS, "sorted": (False, True)},
    smoke=({"pointer": "int32", "sorted": True}, {"pointer": "int64", "sorted": False}),
)
PIECES = KernelSpec(
    source="sparse_pack.cu",
    entry="rawops::pack_pieces",
    template=("pointer",),
    choices={"pointer": _POINTERS},
    smoke=({"pointer": "int32"}, {"pointer": "int64"}),
)
ENTRIES = KernelSpec(
    source="sparse_pack.cu",
    entry="rawops::pack_fill",
    template=("value", "pointer", "column", "sorted", "based"),
    choices={
        "value": PACKABLE,
        "pointer": _POINTERS,
        "column": ("rawops::uint16_t", "int32"),
        "sorted": (False, True),
        "based": (False, True),
    },
    smoke=(
        {"value": "float32", "pointer": "int32", "column": "rawops::uint16_t", "sorted": True, "based": True},
        {"value": "float64", "pointer": "int64", "column": "int32", "sorted": False, "based": False},
    ),
    params=FILL,
)


class Packed:
    """Slices of rows side by side, and pieces of rows of more than `choice.longest` entries.

    Attributes
    ----------
    kind : {"shared", "near", "far"}
        Where x is, and how wide the columns are: as in spmv_packed.cu.
    blocks, width : int
        Blocks of columns, and columns of one (0 where x is not in shared memory).
    slice_count, piece_count : int
    work : list of int
        Work of each block of columns, in entries of a lane.
    block_pieces : list of int
        Pieces of each block of columns.
    per_block : int
        Slices of a block of columns.
    data, columns, starts, bases, slots, pieces : array
        As in spmv_packed.cu; `slots` are rows, or masks of those that are present where rows are not sorted.
    """

    def __init__(self, device, rows: Rows, choice: Choice, longest_row: int) -> None:
        self.device, self.source = device, rows
        self.lanes, self.is_sorted = choice.lanes, choice.is_sorted
        count, cols = rows.shape
        self.blocks = -(-cols // choice.width) if choice.width else 1
        even = -(-cols // (4 * self.blocks)) * 4  # columns of a block, all of one size
        self.width = even if choice.width else 0
        self._pointer = dtypes.name(rows.indptr.dtype)
        self._bounds, self._stride = rows.indptr, 1
        if self.blocks > 1:
            self._bounds, self._stride = self._find_bounds(), count
        self.per_block = -(-count // (32 // self.lanes))
        self.slice_count = self.blocks * self.per_block
        self._lay_out(choice.longest, longest_row)
        self._fill(choice.is_wide)

    def _launch(self, spec: KernelSpec, grid: tuple, threads: int, values: tuple, **choices) -> None:
        values = tuple(self.device.pointer(v) if v is None or hasattr(v, "dtype") else v for v in values)
        spec.kernel(self.device, pointer=self._pointer, **choices).launch(grid, (threads, 1, 1), values)

    def _find_bounds(self):
        rows, count = self.source, self.source.shape[0]
        bounds = self.device.empty(((self.blocks + 1) * count,), rows.indptr.dtype)
        values = rows.indices, rows.indptr, bounds, count, self.blocks, self.width
        self._launch(BOUNDS, (-(-bounds.size // 256), 1, 1), 256, values)
        return bounds

    def _lay_out(self, longest: int, longest_row: int) -> None:
        """Sort rows, cut long ones and find where slices and pieces start. It synchronises once or twice."""
        empty, count, slices = self.device.empty, self.source.shape[0], self.slice_count
        xp = module_of(self.source.indptr)
        has_long = longest_row > longest
        counts = empty((self.blocks * count,), _INT32) if has_long else None
        self.slots = empty((slices * (32 // self.lanes if self.is_sorted else 1),), _INT32)
        depths = empty((slices,), _INT32)
        values = self._bounds, self._stride, count, longest, self.lanes, PIECE, depths, self.slots, counts
        self._launch(WINDOWS, (-(-count // _WINDOW), self.blocks, 1), _WINDOW, values, sorted=self.is_sorted)
        self.piece_count, self.block_pieces = 0, [0] * self.blocks
        self.pieces = empty((0,), _INT32)
        if has_long:
            ends = counts.cumsum(dtype=np.int64)
            self.block_pieces = _differences(ends[count - 1 :: count].tolist())
            self.piece_count = sum(self.block_pieces)
            self.pieces = empty((self.piece_count * 4,), _INT32)
            whole = empty((slices + self.piece_count,), _INT32)
            whole[:slices] = depths
            depths = whole
            values = self._bounds, self._stride, count, self.blocks, PIECE, self.piece_count, ends, self.pieces
            if self.piece_count:
                grid = (-(-self.piece_count // 256), 1, 1)
                self._launch(PIECES, grid, 256, (*values, depths[slices:]))
        self.starts = empty((depths.size + 1,), _INT32)
        self.starts[:1] = 0
        xp.cumsum(depths, out=self.starts[1:])
        self._depth = int(self.starts[-1])
        ends = self.starts[self.per_block :: self.per_block][: self.blocks].tolist() if self.blocks > 1 else []
        deep = zip(_differences(ends), self.block_pieces, strict=False)
        self.work = [d + _SLICE_WORK * self.per_block + (PIECE // 32 + _SLICE_WORK) * p for d, p in deep]

    def _fill(self, is_wide: bool) -> None:
        empty, entries = self.device.empty, self._depth * 32
        self.data = empty((entries,), self.source.data.dtype)
        self.kind = "shared" if self.width else "far" if is_wide else "near"
        if self.kind != "far":
            self.bases = empty((0 if self.width else self._depth,), _INT32)
            self.columns = empty((entries,), np.dtype(np.uint16))
            may_fail = self.kind == "near" and self.source.shape[1] >= 2**16
            failed = module_of(self.data).zeros(1, np.int32) if may_fail else None
            self.copy(failed)
            if failed is None or not int(failed[0]):
                return
        self.kind, self.bases = "far", empty((0,), _INT32)
        self.columns = empty((entries,), _INT32)
        self.copy()

    def copy(self, failed: Any = None) -> None:
        """Take the entries of the format, with the values as they are now. `failed` becomes 1 where 16 bits are few."""
        rows, pointer = self.source, self.device.pointer
        if not self._depth:
            return
        arrays = self.starts, self.slots, self.pieces, self.data, self.columns, self.bases, failed
        sizes = rows.shape[0], self.per_block, self.slice_count, self.piece_count, self.width, self.lanes, PIECE
        sources = map(pointer, (rows.data, rows.indices, self._bounds))
        fill = FILL.pack(*sources, self._stride, *map(pointer, arrays), *sizes)
        types = {"value": dtypes.name(rows.data.dtype), "sorted": self.is_sorted, "based": self.kind == "near"}
        types["column"] = "int32" if self.kind == "far" else "rawops::uint16_t"
        grid = (-(-(self.slice_count + self.piece_count) // 8), 1, 1)
        self._launch(ENTRIES, grid, 256, (fill,), **types)

    @property
    def kept(self) -> list:
        """All arrays beside the format's own."""
        bounds = [self._bounds] if self.blocks > 1 else []
        return [*bounds, self.data, self.columns, self.starts, self.bases, self.slots, self.pieces]


def _differences(ends: list[int]) -> list[int]:
    return [b - a for a, b in zip([0, *ends], ends, strict=False)]
