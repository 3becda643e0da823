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
_LONGEST_SPAN = 16  # 256 rows of x: the most of a TMA box


@dataclass(frozen=True)
class Stage:
    """What a stage of a kernel's ring holds: tile columns, tiles and bytes."""

    columns: int
    tiles: int
    nbytes: int

    def stages(self, device) -> int:
        """Return how many stages a device has room for, at most 4."""
        return min((device.max_shared_bytes - _STATIC_BYTES) // self.nbytes, _STAGES[-1])


# As in spmm_bsr_sm90.cu, and by the bytes of a value in spmm_bsr.cu
_STAGE_SM90 = Stage(16, 80, 72 << 10)
_STAGE = {2: Stage(8, 64, 48 << 10), 4: Stage(4, 32, 48 << 10)}
_STATIC_BYTES = 2 << 10  # of shared memory, for what the stages have beside the ring
_STAGES = (2, 3, 4)

BSR_PLAN = ParamStruct(
    "BsrPlan",
    **dict.fromkeys(("columns", "steps", "groups"), "pointer"),
    **dict.fromkeys(("columns_a_step", "span"), "int32"),
)
_HEIGHTS = {"warps": (8, 16), "rows": (1, 2)}  # warps of a group, and tile rows of each
BSR = KernelSpec(
    source="spmm_bsr.cu",
    entry="rawops::spmm_bsr",
    template=("dtype", "warps", "rows", "stages"),
    choices={"dtype": ("float16", "bfloat16", "float32"), **_HEIGHTS, "stages": _STAGES},
    smoke=(
        {"dtype": "float16", "warps": 8, "rows": 1, "stages": 4},
        {"dtype": "bfloat16", "warps": 16, "rows": 2, "stages": 2},
        *({"dtype": "float32", "warps": 8 * rows, "rows": rows, "stages": 2} for rows in (1, 2)),
    ),
    params=CALL,
)
BSR_SM90 = KernelSpec(
    source="spmm_bsr_sm90.cu",
    entry="rawops::spmm_bsr_sm90",
    template=("dtype", "warps", "rows", "stages"),
    choices={"dtype": ("float16", "bfloat16"), **_HEIGHTS, "stages": _STAGES},
    smoke=(
        {"dtype": "float16", "warps": 8, "rows": 1, "stages": 3},
        {"dtype": "bfloat16", "warps": 16, "rows": 2, "stages": 3},
    ),
    min_arch=90,
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
    """Products of 16-bit values, or of float32 in TF32, by spmm_bsr.cu.

    The tiles are kept in the kernel's order, once for each height of a group and kernel that a product has asked for.
    """

    def __init__(self, device, blocks: Blocks) -> None:
        self.device, self.blocks = device, blocks
        self.packed: dict[tuple, Packed] = {}

    def run(self, x, y, alpha: tuple, beta: tuple) -> None:
        """Launch on an aligned x; see `aligned`."""
        device, pointer = self.device, self.device.pointer
        tile_rows, tiles_n = -(-y.shape[0] // TILE), -(-y.shape[1] // _WIDTH)
        warps, rows = _height(tile_rows, tiles_n, device.sm_count)
        groups = -(-tile_rows // (warps * rows))
        is_sm90 = BSR_SM90.exists_on(device.capability) and x.itemsize == 2 and _STAGE_SM90.stages(device) > 1
        stage = _STAGE_SM90 if is_sm90 else _STAGE[x.itemsize]
        key = warps * rows, stage
        if key not in self.packed:
            self.packed[key] = pack_tiles(self.blocks, warps * rows, groups, stage)
        packed = self.packed[key]
        call = CALL.pack(pointer(packed.tiles), 0, 0, pointer(x), pointer(y), *alpha, *beta, 0, 0, *self.blocks.shape)
        addresses = map(pointer, (packed.columns, packed.steps, packed.groups))
        plan = BSR_PLAN.pack(*addresses, packed.columns_a_step, packed.span)
        values = call, dense_shape(device, x, y, 2), plan
        names = {"dtype": dtypes.name(x.dtype), "warps": warps, "rows": rows, "stages": stage.stages(device)}
        threads = warps * 32
        if is_sm90:
            kernel = BSR_SM90.kernel(device, **names)
            values, threads = (*values, _map(device, x, packed.span)), threads + 32
        else:
            kernel = BSR.kernel(device, **names)
        kernel.launch((groups, tiles_n, 1), (threads, 1, 1), values, names["stages"] * stage.nbytes)


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


def _height(tile_rows: int, tiles_n: int, sm_count: int) -> tuple[int, int]:
    """Return the warps of a group and their tile rows: tall ones fetch less of x, as long as there are enough."""
    return (16, 2) if -(-tile_rows // 32) * tiles_n >= 0.6 * sm_count else (8, 1)


def _map(device, x, span: int) -> bytes:
    """Return the tensor map of x, whose boxes are the rows of so many tile columns."""
    step = max(x.strides[0], 16)
    shape, strides = (1, 1, 1, *x.shape), (16, 16, 16, step, x.itemsize)
    box = 1, 1, 1, TILE * span, _WIDTH
    found = TensorMap(device.pointer(x), x.dtype, shape, strides, box, swizzle=128)
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
    """Tiles in the kernels' order, and the columns and steps as bsr_tile.cuh has them."""

    tiles: Any
    columns: Any
    steps: Any
    groups: Any
    columns_a_step: int
    span: int

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.tiles, self.columns, self.steps, self.groups))


def pack_tiles(blocks: Blocks, height: int, groups: int, stage: Stage) -> Packed:
    """Lay a matrix out for groups of so many tile rows. It synchronises."""
    xp = module_of(blocks.data)
    tiles, row, col = _tiles(xp, blocks)
    exists = (row * TILE < blocks.shape[0]) & (col * TILE < blocks.shape[1])
    tiles, row, col = tiles[exists], row[exists], col[exists]
    cols = -(-blocks.shape[1] // (TILE * stage.columns)) * stage.columns  # no span reaches into the next group
    key = row // height * cols + col
    order = xp.argsort(key * height + row % height)
    row, key = row[order], key[order]
    columns_a_step, fullest = stage.columns, stage.tiles + 1
    while fullest > stage.tiles:
        *found, span, fullest = _columns(xp, key, row % height, cols, groups, columns_a_step)
        columns_a_step //= 2
    return Packed(_in_fragments(tiles[order]), *found, 2 * columns_a_step or 1, span)


def _columns(xp, key, row, cols: int, groups: int, columns_a_step: int) -> tuple:
    """Return the columns and steps of all groups, where their steps begin, the span, and the tiles of the fullest step.

    `key` numbers the column of each tile, group after group, in rising order.
    """
    is_first = _is_first(xp, key)
    owner, first = xp.cumsum(is_first) - 1, xp.flatnonzero(is_first)
    key = key[first]
    masks = xp.bincount(owner, xp.left_shift(1, row).astype(np.float64), first.size)  # exact: sums of bits
    span = min(columns_a_step, _LONGEST_SPAN)
    while span > 1 and int(_is_first(xp, key // span).sum()) * span > _SPARE * key.size:
        span //= 2
    is_unit = _is_first(xp, key // span)
    units = key[is_unit] // span
    begin = xp.searchsorted(units, xp.arange(groups + 1) * (cols // span))
    starts = xp.zeros(groups + 1, np.int32)
    starts[1:] = xp.cumsum(-(-(begin[1:] - begin[:-1]) * span // columns_a_step))
    group = units * span // cols
    place = starts[group] * columns_a_step + (xp.arange(units.size) - begin[group]) * span
    found = place[xp.cumsum(is_unit) - 1] + key % span
    counts = xp.bincount(found[owner] // columns_a_step, minlength=max(int(starts[-1]), 1))
    steps = xp.stack([xp.cumsum(counts) - counts, counts], 1).astype(np.int32)
    columns = xp.zeros((counts.size * columns_a_step, 4), np.uint32)
    columns[:, 0] = 0xFFFFFFFF
    numbers = xp.arange(span)
    columns[place[:, None] + numbers, 0] = (units[:, None] * span % cols + numbers).astype(np.uint32)
    columns[found, 1] = masks.astype(np.uint32)
    columns[found, 2] = (first - steps[found // columns_a_step, 0]).astype(np.uint32)
    return columns, steps, starts, span, int(counts.max())


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

    Bits of a row: half, g (3); of a column, for 16-bit values: half, t (2), pair; for 32-bit ones: step, half, t (2).
    """
    if tiles.itemsize == 2:
        bits = tiles.reshape(-1, 2, 8, 2, 4, 2)  # row half, g, column half, t, pair
        return bits.transpose(0, 2, 4, 3, 1, 5).copy()
    bits = tiles.reshape(-1, 2, 8, 2, 2, 4)  # row half, g, step, column half, t
    return bits.transpose(0, 3, 2, 5, 4, 1).copy()
