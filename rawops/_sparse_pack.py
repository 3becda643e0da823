"""The copy of a matrix that spmv_packed.cu reads: how it is laid out, and how the device makes it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rawops._runtime import dtypes
from rawops._runtime.kernel import KernelSpec, ParamStruct
from rawops._sparse_formats import Rows, module_of
from rawops._sparse_measure import LENGTHS
from rawops._sparse_profile import Choice, Profile

PACKABLE = ("float32", "float64", "complex64", "complex128")  # 16 bits are too few to add up blocks in
PIECE = 512  # entries of a long row that a warp adds up
_POINTERS = ("int32", "int64")
# As in sparse_pack.cu: rows that are sorted together, windows of a block where they are not, bits of a sum of depths
_WINDOW, _AT_ONCE, _DEPTH_BITS = 1024, 2, 31
_SPARE = 1.25  # times the entries that there are: what a packed copy may be allocated for without a look at its size
_SLICE_WORK, _PIECE_WORK = 8, 4  # what a slice and a piece cost beside their entries, in entries of a lane
_INT32 = np.dtype(np.int32)

FILL = ParamStruct(
    "PackFill",
    **dict.fromkeys(("data", "indices", "bounds"), "pointer"),
    stride="int64",
    **dict.fromkeys(("places", "slots", "pieces", "packed", "columns", "bases", "failed"), "pointer"),
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
    template=("pointer", "sorted", "cuts"),
    choices={"pointer": _POINTERS, "sorted": (False, True), "cuts": (False, True)},
    smoke=(
        *({"pointer": "int32", "sorted": is_sorted, "cuts": False} for is_sorted in (False, True)),
        *({"pointer": "int64", "sorted": is_sorted, "cuts": True} for is_sorted in (False, True)),
    ),
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
    data, columns, places, bases, slots, pieces : array
        As in spmv_packed.cu; `slots` are rows, or masks of those that are present where rows are not sorted.
    """

    def __init__(self, device, rows: Rows, choice: Choice, found: Profile) -> None:
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
        self._lay_out(choice.longest, found)
        self._fill(choice.is_wide, found)

    def _launch(self, spec: KernelSpec, grid: tuple, threads: int, values: tuple, **choices) -> None:
        values = tuple(self.device.pointer(v) if v is None or hasattr(v, "dtype") else v for v in values)
        spec.kernel(self.device, pointer=self._pointer, **choices).launch(grid, (threads, 1, 1), values)

    def _find_bounds(self):
        rows, count = self.source, self.source.shape[0]
        bounds = self.device.empty(((self.blocks + 1) * count,), rows.indptr.dtype)
        values = rows.indices, rows.indptr, bounds, count, self.blocks, self.width
        self._launch(BOUNDS, (-(-bounds.size // 256), 1, 1), 256, values)
        return bounds

    def _lay_out(self, longest: int, found: Profile) -> None:
        """Sort rows, cut long ones and find where slices and pieces are. It synchronises unless the size is clear."""
        empty, count, blocks = self.device.empty, self.source.shape[0], self.blocks
        has_long = found.max > longest
        ends, starts = (empty((blocks * count,), _INT32) if has_long else None for _ in range(2))
        self.slots = empty((self.slice_count * (32 // self.lanes if self.is_sorted else 1),), _INT32)
        self.places = empty((self.slice_count * 2,), _INT32)
        groups = -(-count // (_WINDOW * (1 if self.is_sorted else _AT_ONCE)))
        state = module_of(self.slots).zeros(blocks + blocks * groups + 1, np.int64)  # totals, words and turns
        pointer = self.device.pointer(state)
        values = self._bounds, self._stride, count, groups, longest, self.lanes, PIECE, self.places, self.slots
        state_values = pointer, pointer + 8 * blocks, pointer + 8 * (blocks + blocks * groups)
        grid, kinds = (blocks * groups, 1, 1), {"sorted": self.is_sorted, "cuts": has_long}
        self._launch(WINDOWS, grid, _WINDOW, (*values, ends, starts, *state_values), **kinds)
        self.piece_count, self.block_pieces, self.work = 0, [0] * blocks, []
        self.pieces = empty((0,), _INT32)
        # Slices of neighbours, which sorting and cutting in `lanes` make no longer but for rounding up.
        self._depth = math.ceil(found.padding * found.nnz / 32) + (self.lanes - 1) * -(-count // 32)
        if blocks == 1 and found.max <= min(longest, LENGTHS - 2) and 32 * self._depth <= _SPARE * found.nnz:
            return
        totals = state[:blocks].tolist()
        depths = _differences([total % 2**_DEPTH_BITS for total in totals])
        self._depth, self.block_pieces = sum(depths), _differences([total >> _DEPTH_BITS for total in totals])
        costs = zip(depths, self.block_pieces, strict=True)
        self.work = [d + _SLICE_WORK * self.per_block + _PIECE_WORK * p for d, p in costs]
        self.piece_count = sum(self.block_pieces)
        if self.piece_count:
            self.pieces = empty((self.piece_count * 8,), _INT32)
            values = self._bounds, self._stride, count, blocks, PIECE, self.piece_count, ends, starts, self.pieces
            self._launch(PIECES, (-(-self.piece_count // 256), 1, 1), 256, values)

    def _fill(self, is_wide: bool, found: Profile) -> None:
        empty, entries = self.device.empty, self._depth * 32
        self.data = empty((entries,), self.source.data.dtype)
        self.kind = "shared" if self.width else "far" if is_wide else "near"
        if self.kind != "far":
            self.bases = empty((0 if self.width else self._depth,), _INT32)
            self.columns = empty((entries,), np.dtype(np.uint16))
            spread = 2 * found.bandwidth + _WINDOW if found.rises else self.source.shape[1]
            may_fail = self.kind == "near" and min(spread, self.source.shape[1]) >= 2**16
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
        arrays = self.places, self.slots, self.pieces, self.data, self.columns, self.bases, failed
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
        return [*bounds, self.data, self.columns, self.places, self.bases, self.slots, self.pieces]


def _differences(ends: list[int]) -> list[int]:
    return [b - a for a, b in zip([0, *ends], ends, strict=False)]
