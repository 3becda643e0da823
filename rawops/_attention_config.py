"""What every attention kernel is told: the problem, its parameter struct, and which tile and split it takes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from rawops._runtime.kernel import KernelSpec, ParamStruct

DTYPES = ("float16", "bfloat16", "float32")
FLOAT8 = "float8_e4m3fn"
HEAD_DIMS = (64, 96, 128, 192, 256)  # what kernels are made for; others are padded inside
MOST_SPLITS = 256
L2_BYTES = 32 << 20  # of keys and values that stay in the L2 while a section of heads is at work
_MAX_GRID = 65535  # blocks along y and z
_MANY_KEYS = 4096  # from where the largest tiles have their keys split rather than smaller ones taken
LONGEST = 1 << 30  # keys or queries of a sequence are fewer: sums of two fit 32 bits
UNLIMITED = LONGEST  # a window bound

# How a score differs from scale * q.k, as the bits of a template argument (attention_problem.cuh)
SOFTCAP, ALIBI, BIAS, MULTIPLY, DROPS = 1, 2, 4, 8, 16

# --- parameters -----------------------------------------------------------------------------------------------------


def _strides(name: str) -> dict[str, str]:
    return {f"{name}_{axis}": "int64" for axis in ("batch", "row", "head", "col")}


_POINTERS = ("q", "k", "v", "out", "lse", "alibi_slopes", "bias")
_POINTERS += ("cu_seqlens_q", "cu_seqlens_k", "seqlens_k", "block_table")
CALL_FIELDS = dict.fromkeys(_POINTERS, "pointer")
_SHAPE_FIELDS = {
    **{key: kind for name in ("q", "k", "v", "out", "bias") for key, kind in _strides(name).items()},
    **dict.fromkeys(("lse_batch", "lse_head", "out_split", "lse_split"), "int64"),
    **dict.fromkeys(("alibi_batch", "block_table_batch"), "int64"),
    **dict.fromkeys(("batches", "heads", "group", "packed", "seqlen_q", "seqlen_k"), "int32"),
    **dict.fromkeys(("total_q", "total_keys"), "int32"),
    **dict.fromkeys(("head_dim", "head_dim_v", "row_tiles", "splits", "window_left", "window_right"), "int32"),
    **dict.fromkeys(("page_shift", "bias_is_float", "out_pairs"), "int32"),
    **dict.fromkeys(("scale", "softcap"), "float32"),
}
_DROPOUT_FIELDS = {
    **dict.fromkeys(("dropout_seed_at", "dropout_offset_at"), "pointer"),
    **dict.fromkeys(("dropout_seed", "dropout_offset"), "int64"),
    "dropout_keep": "int32",
    "dropout_scale": "float32",
}
SHAPE_FIELDS = {**_SHAPE_FIELDS, **_DROPOUT_FIELDS}
CALL = ParamStruct("AttentionCall", **CALL_FIELDS)
SHAPE = ParamStruct("AttentionShape", **_SHAPE_FIELDS)  # but for what changes from call to call:
DROPOUT = ParamStruct("AttentionDropout", **_DROPOUT_FIELDS)
PARAMS = ParamStruct("AttentionParams", **CALL_FIELDS, **SHAPE_FIELDS)  # one after the other, all of 8-byte alignment


# --- problem --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """All that the choice of a kernel depends on; no pointers, no strides.

    Attributes
    ----------
    dtype : str
        Of q, k and v.
    batches, seqlen_q, seqlen_k : int
        With `varlen` the longest ones of `batches` sequences.
    heads, kv_heads, head_dim, head_dim_v : int
    window_left, window_right : int
        `UNLIMITED` or a bound; causal is a `window_right` of 0.
    score : int
        Bits of `SOFTCAP`, `ALIBI`, `BIAS`, `MULTIPLY`, `DROPS`.
    access : int
        Widest access in bytes that the rows of q, k and v all allow; 16 is what fast copies need.
    varlen : bool
    """

    dtype: str
    batches: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    window_left: int = UNLIMITED
    window_right: int = UNLIMITED
    score: int = 0
    access: int = 16
    varlen: bool = False

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // max(self.kv_heads, 1)

    @property
    def is_masked(self) -> bool:
        """Whether a window or causality hides keys."""
        return min(self.window_left, self.window_right) < UNLIMITED


def padded(head_dim: int) -> int:
    """Return the head size of the kernel that takes `head_dim`."""
    return next(size for size in HEAD_DIMS if size >= head_dim)


def score_bits(softmax_scale: float, softcap: float, has_alibi: bool, has_bias: bool, drops: bool = False) -> int:
    """Return the template argument for how scores are made, and whether weights are dropped."""
    bits = SOFTCAP * (softcap > 0) + ALIBI * has_alibi + BIAS * has_bias
    return (bits or MULTIPLY * (not softmax_scale > 0)) | DROPS * drops


def score_scales(softmax_scale: float, softcap: float) -> tuple[float, float]:
    """Return the struct's `scale` and `softcap`: powers are of two inside the kernels."""
    if softcap > 0:
        return softmax_scale / softcap, softcap * math.log2(math.e)
    return softmax_scale * math.log2(math.e), 0.0


# --- tiles ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """What one block works on, and how: AttentionTile in attention_tile.cuh."""

    head_dim: int
    head_dim_v: int
    block_m: int
    block_n: int
    threads: ClassVar[int] = 128

    @property
    def cpp(self) -> str:
        sizes = (self.head_dim, self.head_dim_v, self.block_m, self.block_n)
        return f"rawops::AttentionTile<{', '.join(map(str, sizes))}>"

    @property
    def shared_bytes(self) -> int:
        """Shared memory of the tile of q and a block of keys and values, for elements of 16 bits."""
        return 2 * (self.block_m * self.head_dim + self.block_n * (self.head_dim + self.head_dim_v))

    def blocks_per_sm(self, max_shared_bytes: int) -> int:
        """How many blocks an SM holds, by shared memory and by registers, of which a thread takes up to 255."""
        return max(1, min(max_shared_bytes // self.shared_bytes, 256 // self.threads))


def tiles_of(head_dim: int, head_dim_v: int, score: int = 0, uneven: bool = False) -> list[Tile]:
    """Return the tiles for padded head sizes and bits of `score`, largest first.

    32 rows a warp halve the shared memory's traffic, and leave registers for fewer keys the wider the heads are;
    past 128 columns they leave too few, and so they do with dropout. Scores that are more than products take some,
    and so does finding rows that are `uneven`: of packed heads, in pages, or not on 16-byte boundaries. Two blocks
    of four warps on an SM have one warp's softmax run beside another one's products.
    """
    wide, plain = max(head_dim, head_dim_v), score == 0 and not uneven
    if head_dim_v > 128 and plain:
        large = [(64, 96)] if wide == 192 else []
    elif head_dim_v > 128 or score & DROPS:
        large = []
    elif plain:
        large = [(128, 128)] if wide == 64 else []
        large += [(128, 64), (128, 32)]  # the last for shared memory that holds but one of the others
    else:
        large = [(128, 64 if wide <= 96 else 32)]
    return [Tile(head_dim, head_dim_v, m, n) for m, n in [*large, (64, 64), (64, 32)]]


# --- kernels --------------------------------------------------------------------------------------------------------

_TILES = [
    tile for d in HEAD_DIMS for dv in HEAD_DIMS for score in (0, SOFTCAP, DROPS) for tile in tiles_of(d, dv, score)
]
_SCORES = (*range((SOFTCAP | ALIBI | BIAS) + 1), MULTIPLY)
SCORES = (*_SCORES, *(bits | DROPS for bits in _SCORES))


def _smoke(head_dim: int, **changes) -> list[dict]:
    """The largest tile of each height."""
    values = {"dtype": "float16", "out_dtype": "float16", "access": 16, "score": 0, "packed": False} | changes
    score = values["score"]
    tiles = {tile.block_m: tile.cpp for tile in reversed(tiles_of(head_dim, head_dim, score, values["packed"]))}
    return [{**values, "tile": tile} for tile in tiles.values()]


SM80 = KernelSpec(
    source="attention_sm80.cu",
    entry="rawops::attention_sm80",
    template=("dtype", "out_dtype", "tile", "access", "score", "packed"),
    choices={
        "dtype": DTYPES[:2],
        "out_dtype": DTYPES,
        "tile": tuple(dict.fromkeys(tile.cpp for tile in _TILES)),
        "access": (16, 8, 4, 2),
        "score": SCORES,
        "packed": (False, True),
    },
    smoke=[
        *_smoke(64),
        *_smoke(128),
        *_smoke(256),
        *_smoke(64, access=2, score=SOFTCAP | ALIBI | BIAS),
        *_smoke(128, score=DROPS),
        *_smoke(128, packed=True),
    ],
    params=PARAMS,
    spills={"sm_100a": 8, "sm_120a": 20},
)
SIMT = KernelSpec(
    source="attention_simt.cu",
    entry="rawops::attention_simt",
    template=("score",),
    choices={"score": SCORES},
    smoke=({"score": 0}, {"score": SOFTCAP | ALIBI | BIAS}, {"score": DROPS}),
    params=PARAMS,
    spills={"sm_100a": 20},
)
SIMT_ROWS, SIMT_KEYS = 16, 32  # of a block of attention_simt.cu, in which a warp has 4 rows and a lane a key

# --- which tile, which split ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """How a problem runs; `tile` is None for float32.

    Attributes
    ----------
    packed : int
        Query heads that lie side by side in a tile: 1, or all that share a KV head.
    row_tiles : int
        Of a head (or group of packed heads) and sequence.
    splits : int
        Ranges of keys, each with a block of its own, that a second kernel merges.
    """

    tile: Tile | None
    packed: int
    row_tiles: int
    splits: int


def select_config(problem: Problem, sm_count: int, max_shared_bytes: int, num_splits: int | None = None) -> Config:
    """Choose tile, packing and split; pure arithmetic.

    The tile is the large one if its rows are used and every SM gets one, or a range of the keys of one where there are
    so many keys that joining the ranges' results takes little of the time. Heads are packed where that takes fewer
    tiles. Keys are split where whole waves of blocks would otherwise leave SMs idle.
    """
    if problem.dtype == "float32":
        return _config(problem, None, SIMT_ROWS, SIMT_KEYS, sm_count * 4, num_splits)
    for rows in (128, 64):
        packed = _packed(problem, rows)
        uneven = packed > 1 or problem.access < 16
        tiles = tiles_of(padded(problem.head_dim), padded(problem.head_dim_v), problem.score, uneven)
        tile = _fitting(tiles, rows, problem.seqlen_k, max_shared_bytes)
        if tile is None:
            continue
        config = _config(problem, tile, rows, tile.block_n, sm_count, 1)
        ranges = max(1, problem.seqlen_k // _MANY_KEYS * 4)
        if rows == 64 or (problem.seqlen_q * packed > 64 and _blocks(problem, config) * ranges >= sm_count):
            break
    return _config(problem, tile, rows, tile.block_n, sm_count * tile.blocks_per_sm(max_shared_bytes), num_splits)


def _fitting(tiles: list[Tile], rows: int, keys: int, max_shared_bytes: int) -> Tile | None:
    """Return the tile with most keys of which an SM holds two blocks and whose last block of keys is no waste."""
    tiles = [t for t in tiles if t.block_m == rows and t.shared_bytes <= max_shared_bytes]
    busy = [t for t in tiles if t.blocks_per_sm(max_shared_bytes) >= 2] or tiles
    filled = (t for t in busy if 32 * (-keys % t.block_n) <= keys)
    return next(filled, min(busy, key=lambda t: -keys % t.block_n, default=None))


def _row_tiles(problem: Problem, rows: int, packed: int) -> int:
    return -(-problem.seqlen_q * packed // rows)


def _packed(problem: Problem, rows: int) -> int:
    """How many query heads lie side by side in tiles of so many rows."""
    alone, together = _row_tiles(problem, rows, 1), _row_tiles(problem, rows, problem.group)
    return problem.group if 8 * together <= 7 * alone * problem.group and not problem.score & DROPS else 1


def _config(problem, tile, block_m: int, block_n: int, slots: int, num_splits: int | None) -> Config:
    packed = _packed(problem, block_m)
    config = Config(tile, packed, max(1, _row_tiles(problem, block_m, packed)), 1)
    return replace(
        config, splits=ranges_of(num_splits, _blocks(problem, config), -(-problem.seqlen_k // block_n), slots)
    )


def grid_of(problem: Problem, row_tiles: int, units: int) -> tuple[int, int, int]:
    """Return the grid of attention_sm80.cu for `units` heads (or groups of packed heads, times ranges of keys).

    Under a mask, tiles of several heads go together, longest first, as many as have their keys and values in the L2.
    The kernel takes any number of row tiles for which there is no block.
    """
    most = 1
    if problem.is_masked:
        head_bytes = 2 * problem.seqlen_k * (problem.head_dim + problem.head_dim_v)
        most = L2_BYTES // max(head_bytes, 1) * problem.group
    section = next(s for s in range(max(1, min(units, most)), 0, -1) if units % s == 0)
    if units // section > _MAX_GRID:
        section = units
    return section, min(row_tiles, _MAX_GRID), units // section


def _blocks(problem: Problem, config: Config) -> int:
    return config.row_tiles * problem.batches * (problem.heads // config.packed)


def ranges_of(num_splits: int | None, blocks: int, steps: int, slots: int) -> int:
    """Return as many ranges as are asked for and have a block of keys, which are `steps`, or the best number."""
    return splits_for(blocks, steps, slots) if num_splits is None else max(1, min(num_splits, steps))


def splits_for(blocks: int, steps: int, slots: int) -> int:
    """Return the smallest split whose waves are nearly as full as the best one's, with four steps or more a block."""
    if blocks == 0 or 5 * blocks >= 4 * slots:
        return 1
    most = max(1, min(MOST_SPLITS, steps // 4))

    def fullness(splits: int) -> float:
        waves = blocks * splits / slots
        return waves / math.ceil(waves)

    best = max(fullness(s) for s in range(1, most + 1))
    return next(s for s in range(1, most + 1) if fullness(s) >= 0.85 * best)
