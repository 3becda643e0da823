"""The copy of a matrix that spmv_packed.cu reads: how it is laid out, and how the device makes it."""

from __future__ import annotations

import math

from rawops._runtime import dtypes
from rawops._runtime.kernel import KernelSpec, ParamStruct
from rawops._sparse_formats import Rows
from rawops._sparse_measure import LENGTHS, LONGER
from rawops._sparse_memory import Answers, answers, kernel, spaces
from rawops._sparse_profile import Choice, Profile

PACKABLE = ("float32", "float64", "complex64", "complex128")  # 16 bits are too few to add up blocks in
_POINTERS = ("int32", "int64")
# As in sparse_pack.cu: rows that are sorted together, windows of a block where they are neither sorted nor cut, entries
# of a piece, bits of a sum of depths
_WINDOW, _AT_ONCE, _PIECE, _DEPTH_BITS = 1024, 2, 512, 31
_SPARE = 1.25  # times the entries that there are: what a packed copy may be allocated for without a look at its size
_SLICE_WORK, _PIECE_WORK = 8, 4  # what a slice and a piece cost beside their entries, in entries of a lane

FILL = ParamStruct(
    "PackFill",
    **dict.fromkeys(("data", "indices", "bounds"), "pointer"),
    **dict.fromkeys(("stride", "nnz"), "int64"),
    **dict.fromkeys(("places", "slots", "piece_ends", "piece_stops", "pieces"), "pointer"),
    **dict.fromkeys(("packed", "columns", "bases", "failed"), "pointer"),
    **dict.fromkeys(("rows", "slices_per_block", "slices", "piece_count", "width", "lanes"), "int32"),
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
    spills={"sm_100a": 16},
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
        self.piece_count = 0
        with answers(device) as answer:
            self._make(answer, choice.longest, choice.is_wide, found)

    def _find_bounds(self) -> None:
        count, self._stride = self.source.shape[0], self.source.shape[0]
        size = (self.blocks + 1) * count
        self._bounds_kept, (self._bounds,) = spaces(self.device, size * self.source.indptr.itemsize)
        values = *self._sources[1:], self._bounds, count, self.blocks, self.width
        kernel(self.device, BOUNDS, self._pointer).launch((-(-size // 256), 1, 1), (256, 1, 1), values)

    def _make(self, answer: Answers, longest: int, is_wide: bool, found: Profile) -> None:
        """Sort rows, cut long ones, find where slices and pieces are and fill the copy.

        It synchronises once: at the end, and only for long rows and columns that may be far apart, where the profile
        bounds how large the copy is; else in between. Once more where columns were too far apart.
        """
        device, count, blocks = self.device, self.source.shape[0], self.blocks
        self.kind = "shared" if self.width else "far" if is_wide else "near"
        has_long, may_fail = found.max > longest, self.kind == "near" and self._may_fail(found)
        self._depth, pieces = self._limits(longest, found)
        is_clear = 0 <= 32 * self._depth <= _SPARE * found.nnz
        groups = -(-count // (_WINDOW * (1 if self.is_sorted or has_long else _AT_ONCE)))
        slots = self.slice_count * (32 // self.lanes if self.is_sorted else 1)
        # What each group leaves for those behind it, turns, and totals that nobody waits for; then slots and places.
        sizes = 8 * (blocks * groups + 2), 4 * slots, 8 * self.slice_count
        self._kept, (words, self.slots, self.places) = spaces(device, *sizes, zeros=1)
        _cuts, cuts = spaces(device, *[4 * blocks * count] * 2) if has_long else ([], (0, 0))
        turns = words + 8 * blocks * groups
        is_awaited = has_long or may_fail or not is_clear
        numbers = answer.address(blocks + 1, clear=True) if is_awaited else 0  # totals, and whether 16 bits are few
        values = self._bounds, self._stride, count, groups, longest, self.lanes, self.places, self.slots
        values = *values, *cuts, numbers or turns + 8, words, turns
        windows = kernel(device, WINDOWS, self._pointer, self.is_sorted, has_long)
        windows.launch((blocks * groups, 1, 1), (_WINDOW, 1, 1), values)
        if not is_clear:
            self._count(answer.wait(blocks))
            pieces = self.piece_count
        kept, addresses = spaces(device, *self._copy_sizes(pieces, found), zeros=1)
        self._kept += kept
        self.tickets, self.sums, self.pieces, self.data, self.columns, self.bases = addresses
        self._fill(pieces, *cuts, failed=numbers + 8 * blocks if may_fail else 0)
        if may_fail or (has_long and is_clear):
            *totals, failed = answer.wait(blocks + 1)
            if failed:
                self._make(answer, longest, True, found)
                return
            self._count(totals)
        self.cut = self.piece_count if found.max > _PIECE else 0

    def _copy_sizes(self, pieces: int, found: Profile) -> tuple[int, ...]:
        """Return the bytes of tickets, sums (of 16 bytes, as large as any accumulator), pieces and the copy."""
        entries, is_far = self._depth * 32, self.kind == "far"
        copy = entries * self.source.data.itemsize, entries * (4 if is_far else 2)
        cut = pieces if found.max > _PIECE else 0
        return 4 * cut, 16 * cut, 32 * pieces, *copy, 4 * self._depth if self.kind == "near" else 0

    def _count(self, totals: list[int]) -> None:
        """Take the depth and the pieces up to each block of columns."""
        self.work, self.block_pieces = [], []
        self._depth = self.piece_count = 0
        for total in totals:
            depth, pieces = total % 2**_DEPTH_BITS, total >> _DEPTH_BITS
            own = pieces - self.piece_count
            self.work.append(depth - self._depth + _SLICE_WORK * self.per_block + _PIECE_WORK * own)
            self.block_pieces.append(own)
            self._depth, self.piece_count = depth, pieces

    def _limits(self, longest: int, found: Profile) -> tuple[int, int]:
        """Return what slices and pieces have at most, in entries of a lane, and the most pieces.

        The first is -1 where the profile does not tell.
        """
        top, lanes = min(longest, found.max), self.lanes  # of the rows in slices
        if self.blocks > 1 or (top > LENGTHS - 2 and not self.is_sorted):
            return -1, 0
        rounding = self.slice_count * (lanes - 1)  # up to multiples of `lanes`
        if self.is_sorted:  # a slice's longest row is no longer than any of the slice before, but for a window's first
            windows = -(-self.source.shape[0] // _WINDOW)
            depth = -(-found.nnz // 32) + -(-(windows * top + rounding) // lanes)
        else:
            depth = math.ceil(found.padding * found.nnz / 32) + -(-rounding // lanes)
        if found.max <= longest:
            return depth, 0
        rows = found.rows  # that are longer, at most
        for limit, count in zip(LONGER, found.longer, strict=True):
            if limit <= longest:
                rows = count
        unheld, rest = found.longer[-1], found.nnz - found.held
        short = max(rows - unheld, 0)  # of pieces' rows, with 1022 entries at most
        return depth + -(-rest // 32) + unheld + 32 * short, rest // _PIECE + unheld + 2 * short

    def _may_fail(self, found: Profile) -> bool:
        """Tell whether columns side by side may be too far apart for 16 bits."""
        spread = 2 * found.bandwidth + _WINDOW if found.rises else self.source.shape[1]
        return min(spread, self.source.shape[1]) >= 2**16

    def copy(self) -> None:
        """Take the entries of the format, with the values as they are now."""
        self._fill(self.piece_count)

    def _fill(self, piece_count: int, piece_ends: int = 0, piece_stops: int = 0, failed: int = 0) -> None:
        """Launch the copy; of pieces that are not cut yet, where it is given how. It tells in `failed`, an address."""
        rows = self.source
        if not self._depth:
            return
        sources = *self._sources[:2], self._bounds, self._stride, rows.nnz, self.places, self.slots
        pieces = piece_ends, piece_stops, self.pieces
        addresses = self.data, self.columns, self.bases, failed
        sizes = rows.shape[0], self.per_block, self.slice_count, piece_count, self.width, self.lanes
        fill = FILL.pack(*sources, *pieces, *addresses, *sizes)
        column = "int32" if self.kind == "far" else "rawops::uint16_t"
        value = dtypes.name(rows.data.dtype)
        fills = kernel(self.device, ENTRIES, value, self._pointer, column, self.is_sorted, self.kind == "near")
        fills.launch((-(-(self.slice_count + piece_count) // 8), 1, 1), (256, 1, 1), (fill,))

    @property
    def kept(self) -> list:
        """All arrays beside the format's own."""
        return [*self._bounds_kept, *self._kept]
