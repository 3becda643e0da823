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
# As in bsr_tile.cuh
_WIDTH = 64
_STAGE_BYTES, _TILES_BYTES = 48 << 10, 32 << 10
_COLUMNS = {2: 8, 4: 4}  # of a stage at most, by the bytes of a value
_STATIC_BYTES = 2 << 10  # of shared memory, for what the stages have beside the ring
_STAGES = (2, 3, 4)

BSR_PLAN = ParamStruct("BsrPlan", columns="pointer", steps="pointer", columns_a_step="int32")
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
    template=("dtype", "warps", "rows", "stages", "shares"),
    choices={"dtype": ("float16", "bfloat16"), **_HEIGHTS, "stages": _STAGES, "shares": (1, 2, 4)},
    smoke=(
        {"dtype": "float16", "warps": 8, "rows": 1, "stages": 4, "shares": 1},
        {"dtype": "bfloat16", "warps": 16, "rows": 2, "stages": 4, "shares": 2},
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

    The tiles are kept in the kernel's order, once for each height of a group that a product has asked for.
    """

    def __init__(self, device, blocks: Blocks) -> None:
        self.device, self.blocks = device, blocks
        self.packed: dict[int, tuple] = {}

    def run(self, x, y, alpha: tuple, beta: tuple) -> None:
        """Launch on an aligned x; see `aligned`."""
        device, pointer = self.device, self.device.pointer
        tile_rows, tiles_n = -(-y.shape[0] // TILE), -(-y.shape[1] // _WIDTH)
        warps, rows = _height(tile_rows, tiles_n, device.sm_count)
        groups = -(-tile_rows // (warps * rows))
        if warps * rows not in self.packed:
            self.packed[warps * rows] = pack_tiles(self.blocks, warps * rows, groups)
        tiles, columns, steps, columns_a_step = self.packed[warps * rows]
        addresses = pointer(tiles), 0, 0, pointer(x), pointer(y)
        call = CALL.pack(*addresses, *alpha, *beta, 0, 0, *self.blocks.shape)
        plan = BSR_PLAN.pack(pointer(columns), pointer(steps), columns_a_step)
        values = call, dense_shape(device, x, y, 2), plan
        stages = min((device.max_shared_bytes - _STATIC_BYTES) // _STAGE_BYTES, _STAGES[-1])
        names = {"dtype": dtypes.name(x.dtype), "warps": warps, "rows": rows, "stages": stages}
        threads = warps * 32
        if names["dtype"] != "float32" and BSR_SM90.exists_on(device.capability):
            kernel = BSR_SM90.kernel(device, **names, shares=_shares(tiles_n))
            values, threads = (*values, _map(device, x)), threads + 32
        else:
            kernel = BSR.kernel(device, **names)
        kernel.launch((groups, tiles_n, 1), (threads, 1, 1), values, stages * _STAGE_BYTES)


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


def _shares(tiles_n: int) -> int:
    """Return the blocks of a cluster, that share tiles."""
    return 1


def _map(device, x) -> bytes:
    """Return the tensor map of x, whose boxes are the rows of a tile column."""
    step = max(x.strides[0], 16)
    shape, strides = (1, 1, 1, *x.shape), (16, 16, 16, step, x.itemsize)
    box = 1, 1, 1, TILE, _WIDTH
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


def pack_tiles(blocks: Blocks, height: int, groups: int) -> tuple:
    """Return the tiles, columns and steps as spmm_bsr.cu has them, for groups of so many tile rows. It synchronises."""
    xp, itemsize = module_of(blocks.data), blocks.data.itemsize
    tiles, row, col = _tiles(xp, blocks)
    exists = (row * TILE < blocks.shape[0]) & (col * TILE < blocks.shape[1])
    tiles, row, col = tiles[exists], row[exists], col[exists]
    cols = -(-blocks.shape[1] // TILE)
    column_key = row // height * cols + col
    order = xp.argsort(column_key * height + row % height)
    row, column_key = row[order], column_key[order]
    is_new = xp.concatenate([xp.ones(min(row.size, 1), bool), column_key[1:] != column_key[:-1]])
    owner, first = xp.cumsum(is_new) - 1, xp.flatnonzero(is_new)
    key = column_key[first]
    masks = xp.bincount(owner, xp.left_shift(1, row % height).astype(np.float64), first.size)  # exact: sums of bits
    group = key // cols
    group_begin = xp.searchsorted(group, xp.arange(groups + 1))
    most = _TILES_BYTES // (TILE * TILE * itemsize)
    for columns_a_step in (8, 4, 2, 1):
        if columns_a_step > _COLUMNS[itemsize]:
            continue
        steps = xp.zeros(groups + 1, np.int32)
        steps[1:] = xp.cumsum(-(-(group_begin[1:] - group_begin[:-1]) // columns_a_step))
        place = steps[group] * columns_a_step + xp.arange(key.size) - group_begin[group]
        count = max(int(steps[-1]), 1)
        step_tiles = xp.bincount(place[owner] // columns_a_step, minlength=count)
        if int(step_tiles.max()) <= most:
            break
    columns = xp.zeros((count * columns_a_step, 4), np.uint32)
    columns[:, 0] = 0xFFFFFFFF
    columns[place] = xp.stack([key % cols, masks.astype(np.int64), first, xp.zeros_like(first)], 1).astype(np.uint32)
    columns[::columns_a_step, 3] = step_tiles
    return _in_fragments(tiles[order]), columns, steps, columns_a_step


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
