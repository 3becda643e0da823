"""The copy of a matrix that spmv_packed.cu reads: how it is laid out, and how the device makes it."""

from __future__ import annotations

import math

from rawops._runtime import dtypes
from rawops._runtime.kernel import KernelSpec, ParamStruct
from rawops._sparse_formats import Rows
from rawops._sparse_measure import LENGTHS
from rawops._sparse_memory import answers, kernel, spaces
from rawops._sparse_profile import Choice, Profile

PACKABLE = ("float32", "float64", "complex64", "complex128")  # 16 bits are too few to add up blocks in
PIECE = 512  # entries of a long row that a warp adds up
_POINTERS = ("int32", "int64")
# As in sparse_pack.cu: rows that are sorted together, windows of a block where they are not, bits of a sum of depths
_WINDOW, _AT_ONCE, _DEPTH_BITS = 1024, 2, 31
_SPARE = 1.25  # times the entries that there are: what a packed copy may be allocated for without a look at its size
_SLICE_WORK, _PIECE_WORK = 8, 4  # what a slice and a piece cost beside their entries, in entries of a lane

FILL = ParamStruct(
    "PackFill",
    **dict.fromkeys(("data", "indices", "bounds"), "pointer"),
    **dict.fromkeys(("stride", "nnz"), "int64"),
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
    cut : int
        Pieces whose rows may have others.
    data, columns, places, bases, slots, pieces, sums, tickets : int
        Addresses of what spmv_packed.cu reads; `slots` are rows, or masks of those that are present where rows are not
        sorted.
    """

    def __init__(self, device, rows: Rows, choice: Choice, found: Profile) -> None:
        self.device, self.source = device, rows
        self.lanes, self.is_sorted = choice.lanes, choice.is_sorted
        count, cols = rows.shape
        self.blocks = -(-cols // choice.width) if choice.width else 1
        even = -(-cols // (4 * self.blocks)) * 4  # columns of a block, all of one size
        self.width = even if choice.width else 0
        self._pointer = dtypes.name(rows.indptr.dtype)
        self._sources = device.pointer(rows.data), device.pointer(rows.indices), device.pointer(rows.indptr)
        self._bounds, self._stride, self._bounds_kept = self._sources[2], 1, []
        if self.blocks > 1:
            self._find_bounds()
        self.per_block = -(-count // (32 // self.lanes))
        self.slice_count = self.blocks * self.per_block
        self._lay_out(choice.longest, found)
        self._fill(choice.is_wide, found)

    def _find_bounds(self) -> None:
        count, self._stride = self.source.shape[0], self.source.shape[0]
        size = (self.blocks + 1) * count
        self._bounds_kept, (self._bounds,) = spaces(self.device, size * self.source.indptr.itemsize)
        values = *self._sources[1:], self._bounds, count, self.blocks, self.width
        kernel(self.device, BOUNDS, self._pointer).launch((-(-size // 256), 1, 1), (256, 1, 1), values)

    def _lay_out(self, longest: int, found: Profile) -> None:
        """Sort rows, cut long ones and find where slices and pieces are. It synchronises unless the size is clear."""
        device, count, blocks = self.device, self.source.shape[0], self.blocks
        has_long = found.max > longest
        groups = -(-count // (_WINDOW * (1 if self.is_sorted else _AT_ONCE)))
        slots = self.slice_count * (32 // self.lanes if self.is_sorted else 1)
        # What each group leaves for those behind it, turns, and totals that nobody waits for.
        sizes = 8 * (blocks * groups + 2), 4 * slots, 8 * self.slice_count
        self._laid_out, (words, self.slots, self.places) = spaces(device, *sizes, zeros=1)
        _kept, (ends, starts) = spaces(device, *[4 * blocks * count] * 2) if has_long else ([], (0, 0))
        turns = words + 8 * blocks * groups
        values = self._bounds, self._stride, count, groups, longest, self.lanes, PIECE, self.places, self.slots
        windows = kernel(device, WINDOWS, self._pointer, self.is_sorted, has_long)
        grid, threads = (blocks * groups, 1, 1), (_WINDOW, 1, 1)
        self.piece_count, self.block_pieces, self.work = 0, [0] * blocks, []
        self._depth = self._most_depth(longest, found)
        if 0 <= 32 * self._depth <= _SPARE * found.nnz:
            windows.launch(grid, threads, (*values, ends, starts, turns + 8, words, turns))
        else:
            with answers(device) as answer:
                windows.launch(grid, threads, (*values, ends, starts, answer.address(blocks), words, turns))
                totals = answer.wait(blocks)
            depths = _differences([total % 2**_DEPTH_BITS for total in totals])
            self._depth, self.block_pieces = sum(depths), _differences([total >> _DEPTH_BITS for total in totals])
            costs = zip(depths, self.block_pieces, strict=True)
            self.work = [d + _SLICE_WORK * self.per_block + _PIECE_WORK * p for d, p in costs]
            self.piece_count = sum(self.block_pieces)
        self.cut = self.piece_count if found.max > PIECE else 0  # into pieces of 16 bytes, as large as any accumulator
        sizes = 4 * self.cut, 16 * self.cut, 32 * self.piece_count
        self._cut_up, (self.tickets, self.sums, self.pieces) = [], (0, 0, 0)
        if self.piece_count:
            self._cut_up, (self.tickets, self.sums, self.pieces) = spaces(device, *sizes, zeros=1)
            values = self._bounds, self._stride, count, blocks, PIECE, self.piece_count, ends, starts, self.pieces
            pieces = kernel(device, PIECES, self._pointer)
            pieces.launch((-(-self.piece_count // 256), 1, 1), (256, 1, 1), values)

    def _most_depth(self, longest: int, found: Profile) -> int:
        """Return what all slices have at most, in entries of a lane; -1 where the profile does not tell."""
        if self.blocks > 1 or found.max > longest:
            return -1
        rounding = self.slice_count * (self.lanes - 1)  # up to multiples of `lanes`
        if self.is_sorted:  # a slice's longest row is no longer than any of the slice before, but for a window's first
            windows = -(-self.source.shape[0] // _WINDOW)
            return -(-found.nnz // 32) + -(-(windows * found.max + rounding) // self.lanes)
        if found.max > LENGTHS - 2:
            return -1
        return math.ceil(found.padding * found.nnz / 32) + -(-rounding // self.lanes)

    def _fill(self, is_wide: bool, found: Profile) -> None:
        self.kind = "shared" if self.width else "far" if is_wide else "near"
        if self.kind != "far":
            spread = 2 * found.bandwidth + _WINDOW if found.rises else self.source.shape[1]
            may_fail = self.kind == "near" and min(spread, self.source.shape[1]) >= 2**16
            self._allocate(2, 0 if self.width else 4)
            if not may_fail:
                self.copy()
                return
            with answers(self.device) as answer:
                self.copy(answer.address(1, clear=True))
                if not answer.wait(1)[0]:
                    return
        self.kind = "far"
        self._allocate(4, 0)
        self.copy()

    def _allocate(self, column_bytes: int, base_bytes: int) -> None:
        entries, value_bytes = self._depth * 32, self.source.data.itemsize
        sizes = entries * value_bytes, entries * column_bytes, self._depth * base_bytes
        self._filled, (self.data, self.columns, self.bases) = spaces(self.device, *sizes)

    def copy(self, failed: int = 0) -> None:
        """Take the entries of the format, with the values as they are now.

        `failed` is the address of what becomes 1 where 16 bits are few.
        """
        rows = self.source
        if not self._depth:
            return
        sources = *self._sources[:2], self._bounds, self._stride, rows.nnz
        addresses = self.places, self.slots, self.pieces, self.data, self.columns, self.bases
        sizes = rows.shape[0], self.per_block, self.slice_count, self.piece_count, self.width, self.lanes, PIECE
        fill = FILL.pack(*sources, *addresses, failed, *sizes)
        column = "int32" if self.kind == "far" else "rawops::uint16_t"
        value = dtypes.name(rows.data.dtype)
        fills = kernel(self.device, ENTRIES, value, self._pointer, column, self.is_sorted, self.kind == "near")
        fills.launch((-(-(self.slice_count + self.piece_count) // 8), 1, 1), (256, 1, 1), (fill,))

    @property
    def kept(self) -> list:
        """All arrays beside the format's own."""
        return [*self._bounds_kept, *self._laid_out, *self._cut_up, *self._filled]


def _differences(ends: list[int]) -> list[int]:
    return [b - a for a, b in zip([0, *ends], ends, strict=False)]
