"""The kernels of block-sparse matrices: tiles of 16 x 16 for the tensor cores, and blocks for the CUDA cores."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from rawops._runtime import dtypes
from rawops._runtime.kernel import KernelSpec, ParamStruct
from rawops._runtime.tensormap import TensorMap
from rawops._sparse_formats import VALUES, module_of
from rawops._sparse_spmm import DENSE, strides_of
from rawops._sparse_spmv import CALL

BLOCKS = (4, 8, 16, 32)
TILE = 16
_WIDTH = 64  # as in bsr_tile.cuh
_SPARE = 1.5  # times the columns that are wanted, fetched in spans of neighbours


@dataclass(frozen=True)
class Layout:
    """How a kernel shares a product out.

    Attributes
    ----------
    warps, rows : int
        Warps of a group, and tile rows of each where there are many, else one.
    columns, cluster : int
        Tile columns of a chunk of the ring, and groups that fetch it together.
    itemsize : int
        Bytes of a value.
    """

    warps: int
    rows: int
    columns: int
    cluster: int
    itemsize: int

    @property
    def chunk_bytes(self) -> int:
        return self.columns * TILE * _WIDTH * self.itemsize

    def rows_of(self, tile_rows: int, tiles_n: int, sm_count: int) -> int:
        """Return the tile rows of a warp: tall groups fetch less of x, as long as there are enough of them."""
        return self.rows if -(-tile_rows // (self.warps * self.rows)) * tiles_n >= 0.6 * sm_count else 1

    def stages(self, device) -> int:
        """Return how many chunks a device has room for."""
        return min((device.max_shared_bytes - _STATIC_BYTES) // self.chunk_bytes, _STAGES[-1])


_STATIC_BYTES = 1 << 10  # of shared memory, at most
# By the bytes of a value, as in spmm_bsr_sm90.cu and spmm_bsr.cu
_SM90 = {
    2: Layout(warps=16, rows=2, columns=16, cluster=2, itemsize=2),
    4: Layout(warps=8, rows=4, columns=8, cluster=2, itemsize=4),
}
_SM80 = {
    2: Layout(warps=8, rows=4, columns=8, cluster=1, itemsize=2),
    4: Layout(warps=8, rows=4, columns=4, cluster=1, itemsize=4),
}
_STAGES = tuple(range(2, 15))
_HEIGHTS = {"warps": (8, 16), "rows": (1, 2, 4)}

BSR_PLAN = ParamStruct(
    "BsrPlan",
    **dict.fromkeys(("columns", "chunks", "pairs", "places", "rows"), "pointer"),
    span="int32",
)
BSR = KernelSpec(
    source="spmm_bsr.cu",
    entry="rawops::spmm_bsr",
    template=("dtype", "warps", "rows", "stages"),
    choices={"dtype": ("float16", "bfloat16", "float32"), **_HEIGHTS, "stages": _STAGES},
    smoke=(
        {"dtype": "float16", "warps": 8, "rows": 1, "stages": 6},
        {"dtype": "bfloat16", "warps": 8, "rows": 4, "stages": 10},
        *({"dtype": "float32", "warps": 8, "rows": rows, "stages": 6} for rows in (1, 4)),
    ),
    params=CALL,
)
BSR_SM90 = KernelSpec(
    source="spmm_bsr_sm90.cu",
    entry="rawops::spmm_bsr_sm90",
    template=("dtype", "warps", "rows", "stages"),
    choices={"dtype": ("float16", "bfloat16", "float32"), **_HEIGHTS, "stages": _STAGES},
    smoke=(
        {"dtype": "float16", "warps": 16, "rows": 1, "stages": 7},
        {"dtype": "bfloat16", "warps": 16, "rows": 2, "stages": 7},
        *({"dtype": "float32", "warps": 8, "rows": rows, "stages": 7} for rows in (1, 4)),
    ),
    min_arch=90,
    max_arch=100,
    params=CALL,
)
BSR_SIMT = KernelSpec(
    source="spmm_bsr_simt.cu",
    entry="rawops::spmm_bsr_simt",
    template=("value", "vector", "block", "lanes"),
    choices={"value": VALUES, "vector": VALUES, "block": BLOCKS, "lanes": (1, 2, 4, 8, 16, 32)},
    smoke=(
        *({"value": "float32", "vector": "float32", "block": block, "lanes": 32} for block in (4, 16, 32)),
        {"value": "float32", "vector": "float32", "block": 8, "lanes": 2},
        {"value": "float64", "vector": "float64", "block": 16, "lanes": 32},
        {"value": "complex128", "vector": "complex128", "block": 8, "lanes": 16},
    ),
    params=CALL,
    spills={"sm_100a": 44},
)


@dataclass(frozen=True)
class Blocks:
    """A matrix of dense blocks, rows of blocks compressed.

    Attributes
    ----------
    data : array (blocks, block, block)
    indices : array (blocks,), int32
        The column of each block, rising within a row.
    indptr : array (block rows + 1,), int32
    shape : tuple of int
        Of the matrix; the last blocks may reach past it, with zeros.
    """

    data: Any
    indices: Any
    indptr: Any
    shape: tuple[int, int]

    @property
    def block(self) -> int:
        return self.data.shape[2]


class OnTensorCores:
    """Products of 16-bit values, or of float32 in TF32, by spmm_bsr_sm90.cu and, before Hopper, spmm_bsr.cu.

    The tiles are kept in the kernel's order, once for each height of a group and kernel that a product has asked for.
    """

    def __init__(self, device, blocks: Blocks) -> None:
        self.device, self.blocks = device, blocks
        self.packed: dict[tuple, Packed] = {}

    def run(self, x, y, alpha: tuple, beta: tuple) -> None:
        """Launch on an aligned x; see `aligned`."""
        device, pointer = self.device, self.device.pointer
        tile_rows, tiles_n = -(-y.shape[0] // TILE), -(-y.shape[1] // _WIDTH)
        is_sm90 = BSR_SM90.exists_on(device.capability)
        layout = (_SM90 if is_sm90 else _SM80)[x.itemsize]
        rows = layout.rows_of(tile_rows, tiles_n, device.sm_count)
        groups = -(-tile_rows // (layout.warps * rows * layout.cluster)) * layout.cluster
        key = layout, rows
        is_new = key not in self.packed
        if is_new:
            self.packed[key] = pack_tiles(self.blocks, layout, rows, groups)
        packed, stages = self.packed[key], layout.stages(device)
        call = CALL.pack(pointer(packed.tiles), 0, 0, pointer(x), pointer(y), *alpha, *beta, 0, 0, *self.blocks.shape)
        addresses = map(pointer, (packed.columns, packed.chunks, packed.pairs, packed.places, packed.rows))
        values = call, dense_shape(device, x, y, 16 // y.itemsize), BSR_PLAN.pack(*addresses, packed.span)
        names = {"dtype": dtypes.name(x.dtype), "warps": layout.warps, "rows": rows, "stages": stages}
        threads, shared_bytes = layout.warps * 32, stages * layout.chunk_bytes
        if is_sm90:
            kernel = BSR_SM90.kernel(device, **names)
            values, threads = (*values, _map(device, x, packed.span)), threads + 128
        else:
            kernel = BSR.kernel(device, **names)
        # It looks up columns before it waits for the launch before, which may not be the one that made them.
        kernel.launch((groups, tiles_n, 1), (threads, 1, 1), values, shared_bytes, early=not is_new)


class OnCudaCores:
    """Products of any types, by spmm_bsr_simt.cu."""

    packed: dict = {}  # noqa: RUF012  what it keeps beside the blocks: nothing

    def __init__(self, device, blocks: Blocks) -> None:
        self.device, self.blocks = device, blocks

    def run(self, x, y, alpha: tuple, beta: tuple) -> None:
        """Launch on an aligned x; see `aligned`."""
        blocks, pointer = self.blocks, self.device.pointer
        per_lane = max(16 // x.itemsize, 1)
        lanes = min(1 << (-(-y.shape[1] // per_lane) - 1).bit_length(), 32)
        names = {"value": dtypes.name(blocks.data.dtype), "vector": dtypes.name(x.dtype)}
        kernel = BSR_SIMT.kernel(self.device, **names, block=blocks.block, lanes=lanes)
        addresses = map(pointer, (blocks.data, blocks.indices, blocks.indptr, x, y))
        call = CALL.pack(*addresses, *alpha, *beta, 0, 0, *blocks.shape)
        warps = 8
        grid = -(-y.shape[0] // (warps * min(blocks.block, 16))), -(-y.shape[1] // (lanes * per_lane)), 1
        kernel.launch(grid, (warps * 32, 1, 1), (call, dense_shape(self.device, x, y, per_lane)))


def _map(device, x, span: int) -> bytes:
    """Return the tensor map of x, whose boxes are the rows of so many tile columns."""
    step = max(x.strides[0], 16)
    shape, strides = (1, 1, 1, *x.shape), (16, 16, 16, step, x.itemsize)
    box = 1, 1, 1, TILE * span, 128 // x.itemsize
    found = TensorMap(device.pointer(x), x.dtype, shape, strides, box, swizzle=128, tf32=x.itemsize == 4)
    return found.encode_emulated() if device.is_emulated else found.encode_driver()


def aligned(device, x):
    """Return x, or a copy, with neighbouring columns side by side and rows that begin at multiples of 16 bytes."""
    is_dense = x.shape[1] == 1 or x.strides[1] == x.itemsize
    if is_dense and x.strides[0] >= 0 and math.gcd(x.strides[0], device.pointer(x)) % 16 == 0:
        return x
    per_row = -(-x.shape[1] * x.itemsize // 16) * 16 // x.itemsize
    copy = device.empty((x.shape[0], per_row), x.dtype)[:, : x.shape[1]]
    copy[...] = x
    return copy


def dense_shape(device, x, y, vector: int) -> bytes:
    """Return the DenseShape of a product whose kernel writes so many columns of y at once."""
    is_dense = y.strides[1] == y.itemsize and y.shape[1] % vector == 0
    is_aligned = math.gcd(y.strides[0], device.pointer(y)) % (vector * y.itemsize) == 0
    return DENSE.pack(*strides_of(x, y), y.shape[1], is_dense and is_aligned)


@dataclass(frozen=True)
class Packed:
    """Tiles in the kernels' order, and the plan as bsr_tile.cuh has it."""

    tiles: Any
    columns: Any
    chunks: Any
    pairs: Any
    places: Any
    rows: Any
    span: int

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.tiles, self.columns, self.chunks, self.pairs, self.places, self.rows))


def pack_tiles(blocks: Blocks, layout: Layout, rows: int, groups: int) -> Packed:
    """Lay a matrix out for groups whose warps have so many tile rows. It synchronises."""
    xp, warps = module_of(blocks.data), layout.warps
    tiles, row, col = _tiles(xp, blocks)
    exists = (row * TILE < blocks.shape[0]) & (col * TILE < blocks.shape[1])
    tiles, row, col = tiles[exists], row[exists], col[exists]
    cols = -(-blocks.shape[1] // (TILE * layout.columns)) * layout.columns  # no span reaches into the next cluster
    rows_of, row = _dealt(xp, row, col, cols, layout, rows, groups)
    order = xp.argsort((row // rows * cols + col) * rows + row % rows)
    row, col, warp = row[order], col[order], row[order] // rows
    key, owner = xp.unique(warp // (warps * layout.cluster) * cols + col, return_inverse=True)
    columns, chunks, place, span = _columns(xp, key, cols, groups // layout.cluster, layout)
    counts = xp.bincount(warp, minlength=groups * warps)
    pairs = xp.zeros(counts.size + 1, np.int32)
    pairs[1:] = xp.cumsum(-(-counts // 2))
    to = pairs[warp] * 2 + xp.arange(warp.size) - (xp.cumsum(counts) - counts)[warp]
    filled = xp.zeros((int(pairs[-1]) * 2, TILE, TILE), tiles.dtype)
    places = xp.zeros(filled.shape[0], np.int32)
    filled[to], places[to] = tiles[order], place[owner.ravel()] << rows | xp.left_shift(1, row % rows)
    return Packed(_in_fragments(filled), columns, chunks, pairs, places, rows_of, span)


def _dealt(xp, row, col, cols: int, layout: Layout, rows: int, groups: int) -> tuple:
    """Return the tile row that each row of a warp is, and for each tile the row of a warp that it is in.

    In their order, or, if that is thought to be faster, dealt out so that all warps have as many tiles: neighbouring
    rows often ask for the same of x, and rows at random seldom do.
    """
    warps = groups * layout.warps
    in_order = xp.arange(warps * rows, dtype=np.int32)
    counts = xp.bincount(row, minlength=in_order.size)
    dealt = _deal(xp, counts, warps)  # (warps, rows)
    dealt = dealt[_deal(xp, counts[dealt].sum(1), groups).ravel()].ravel().astype(np.int32)
    place = xp.empty_like(dealt)
    place[dealt] = in_order
    costs = [_cost(xp, at, col, cols, layout, rows, groups) for at in (row, place[row])]
    return (in_order, row) if costs[0] <= costs[1] else (dealt, place[row].astype(np.int64))


def _deal(xp, counts, hands: int):
    """Return numbers of `counts`, the largest first, dealt to so many hands and back again: (hands, of each)."""
    order = xp.argsort(-counts, kind="stable").reshape(-1, hands)
    order[1::2] = order[1::2, ::-1].copy()
    return order.T


def _cost(xp, row, col, cols: int, layout: Layout, rows: int, groups: int) -> float:
    """Return about what the slowest group takes, in tiles.

    It waits for the memory that all of its warps share, and for the warp with the most tiles; a column of x takes as
    long to fetch as 0.8 tiles. Fitted to 4096 x 4096 x 1024, whose rows have as many tiles or not, on an H200.
    """
    tiles = xp.bincount(row // rows, minlength=groups * layout.warps).reshape(groups, -1)
    key = row // (rows * layout.warps * layout.cluster) * cols + col
    columns = xp.bincount(xp.unique(key) // cols, minlength=groups // layout.cluster)
    cost = (tiles.sum(1) + tiles.max(1) * layout.warps) / 2 + 0.8 * columns.repeat(layout.cluster)
    return float(cost.max())


def _columns(xp, key, cols: int, clusters: int, layout: Layout) -> tuple:
    """Return the columns of all chunks, where those of clusters begin, the place of each column, and the span.

    `key` numbers the tile columns that clusters have, one cluster after another, in rising order.
    """
    per_chunk, span = layout.columns, layout.columns // layout.cluster  # each group fetches a part
    while span > 1 and int(_is_first(xp, key // span).sum()) * span > _SPARE * key.size:
        span //= 2
    is_unit = _is_first(xp, key // span)
    units = key[is_unit] // span
    begin = xp.searchsorted(units, xp.arange(clusters + 1) * (cols // span))
    chunks = xp.zeros(clusters + 1, np.int32)
    chunks[1:] = xp.cumsum(-(-(begin[1:] - begin[:-1]) * span // per_chunk))
    cluster = units * span // cols
    place = (xp.arange(units.size) - begin[cluster]) * span  # of each unit in its cluster
    columns = xp.full(max(int(chunks[-1]), 1) * per_chunk, -1, np.int32)
    numbers = xp.arange(span)
    columns[(chunks[cluster] * per_chunk + place)[:, None] + numbers] = units[:, None] * span % cols + numbers
    return columns, chunks, place[xp.cumsum(is_unit) - 1] + key % span, span


def _is_first(xp, key):
    """Tell of sorted numbers which differ from the one before."""
    return xp.concatenate([xp.ones(min(key.size, 1), bool), key[1:] != key[:-1]])


def _tiles(xp, blocks: Blocks) -> tuple:
    """Return the blocks as tiles of 16 x 16, in unsigned integers of their size, and the row and column of each."""
    data = blocks.data.view(f"uint{8 * blocks.data.itemsize}")
    count, size = data.shape[0], blocks.block
    number = xp.arange(count)
    row = xp.searchsorted(blocks.indptr[1:], number.astype(np.int32), side="right").astype(np.int64)
    col = blocks.indices.astype(np.int64)
    if size >= TILE:
        n = size // TILE
        tiles = data.reshape(count, n, TILE, n, TILE).transpose(0, 1, 3, 2, 4).reshape(-1, TILE, TILE)
        row = xp.broadcast_to(row[:, None, None] * n + xp.arange(n)[:, None], (count, n, n)).ravel()
        col = xp.broadcast_to(col[:, None, None] * n + xp.arange(n), (count, n, n)).ravel()
        return tiles, row, col
    n = TILE // size
    cols = -(-blocks.shape[1] // TILE)
    key, owner = xp.unique(row // n * cols + col // n, return_inverse=True)
    tiles = xp.zeros((key.size * n * n, size, size), data.dtype)
    tiles[(owner * n + row % n) * n + col % n] = data
    tiles = tiles.reshape(-1, n, n, size, size).transpose(0, 1, 3, 2, 4).reshape(-1, TILE, TILE)
    return tiles, key // cols, key % cols


def _in_fragments(tiles):
    """Return tiles in the order in which the lanes of a warp hold them: 16 bytes a lane, see mma.cuh.

    Bits of a row: half, g (3); of a column, for 16-bit values: half, t (2), pair; for 32-bit ones: step, t (2), which
    of two that the atom has apart, see bsr_tile.cuh.
    """
    if tiles.itemsize == 2:
        bits = tiles.reshape(-1, 2, 8, 2, 4, 2)  # row half, g, column half, t, pair
        return bits.transpose(0, 2, 4, 3, 1, 5).copy()
    bits = tiles.reshape(-1, 2, 8, 2, 4, 2)  # row half, g, step, t, which of two
    return bits.transpose(0, 3, 2, 4, 5, 1).copy()
