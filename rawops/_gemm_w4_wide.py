"""The host side of gemm_w4_wide_sm90.cu: many tokens and packed 4-bit weights, either way round, on Hopper."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from rawops import _gemm_sm90_specs as specs
from rawops._gemm_config import ACTIVATIONS
from rawops._gemm_maps import encode, k_major, map_of
from rawops._runtime.kernel import KernelSpec, ParamStruct

BLOCK_K = 128
# Tokens, units of 64 columns, and the warpgroups that share out the stages of each; what a block of K takes, in
# nanoseconds on an H200, with K contiguous. Fitted, with the numbers below, to 433 timings of 77 products.
TILES = {
    (16, 4, 1): 690,
    (16, 2, 2): 340,
    (16, 1, 4): 225,
    (32, 4, 1): 830,
    (32, 2, 2): 415,
    (32, 1, 4): 252,
    (48, 2, 1): 455,
    (64, 4, 1): 912,
    (64, 2, 2): 480,
    (64, 1, 4): 306,
    (96, 2, 1): 642,
    (128, 2, 1): 739,
}

BY_SLAB, BY_BOX, BY_RING = range(3)  # WideFinish in w4_wide.cuh

_UNIT = 64
_CHUNK = 16  # tokens that pass through the slab at a time
_MAX_STAGES = 8
_RASTER_ROWS = 8
_MAX_SPLITS = 16

# In nanoseconds, too: a launch, what it costs that two blocks share a tile, a second launch, what that takes for each
# slice, and the bytes of partial sums a nanosecond; the end of a tile, and what it takes for each token.
_LAUNCH, _PAIR, _SPLIT, _SLICE, _SUM_BYTES = 2300, 1470, 2100, 60, 8700
_FINISH = {BY_SLAB: (560, 44), BY_BOX: (1300, 0), BY_RING: (160, 10)}


def specs_of(params: ParamStruct, types: dict[str, tuple], groups: tuple[int, ...]) -> tuple[KernelSpec, KernelSpec]:
    """Declare the kernels, which take the parameters of gemm_w4.cu, and the types that every kernel has.

    Two blocks of the second one share a tile.
    """
    choices = {
        **types,
        "group": groups,
        "tokens": tuple(sorted({tokens for tokens, _, _ in TILES})),
        "units": (1, 2, 4),
        "slices": (1, 2, 4),
        "stages": tuple(range(2, _MAX_STAGES + 1)),
        "b_k_major": (True, False),
        "activation": tuple(range(len(ACTIVATIONS))),
    }
    smoke = [
        ("bfloat16", "bfloat16", "bfloat16", 0, False, 128, 128, 2, 1, 4, True, 0, BY_BOX),
        ("bfloat16", "bfloat16", "bfloat16", 0, False, 128, 128, 2, 1, 4, False, 0, BY_BOX),
        ("bfloat16", "bfloat16", "bfloat16", 0, False, 128, 64, 4, 1, 5, True, 0, BY_BOX),
        ("bfloat16", "bfloat16", "bfloat16", 0, False, 128, 64, 2, 2, 6, False, 0, BY_RING),
        ("bfloat16", "bfloat16", "bfloat16", 0, False, 128, 16, 1, 4, 8, False, 0, BY_RING),
        ("float16", "float32", "float32", 1, True, 32, 128, 2, 1, 4, True, 0, BY_SLAB),
        ("float16", "float16", "float16", 2, False, 64, 96, 2, 1, 5, False, 5, BY_SLAB),
        ("float16", "float32", "float32", 1, True, 64, 64, 4, 1, 4, True, 5, BY_SLAB),
        ("bfloat16", "float32", "float32", 1, True, 32, 32, 2, 2, 8, True, 5, BY_RING),
    ]
    of_pairs = [
        ("bfloat16", "bfloat16", "bfloat16", 0, False, 128, 64, 1, 4, 8, True, 0),
        ("float16", "float16", "float32", 1, True, 32, 64, 2, 2, 6, False, 5),
    ]
    file, name = "gemm_w4_wide_sm90.cu", "gemm_w4_wide_sm90"
    finish = {"finish": (BY_SLAB, BY_BOX, BY_RING)}
    return (
        specs.spec_of(file, name, {**choices, **finish}, *smoke, params=params),
        specs.spec_of(file, f"{name}_pairs", choices, *of_pairs, params=params),
    )


@dataclass(frozen=True)
class Problem:
    """What a configuration depends on.

    N counts columns of b. `parts` is 2 for swiglu. `storable`: D has 16 bits, TMA can write it, and nothing but alpha,
    bias and activation is in the epilogue. `group` along K has a scale, and perhaps a zero point.
    """

    M: int
    N: int
    K: int
    parts: int
    storable: bool
    group: int
    scale_bytes: int
    zero_bytes: int


@dataclass(frozen=True)
class Config:
    """Tiles of `tokens` x `units` times 64 columns of b, `stages` of 128 along K, each over `k_per_split` of K.

    A unit's stages are shared out over `slices` warpgroups. The slices of K are those of the blocks of a `cluster`, one
    or two, or products of their own, `split_k` of them. Units have `parts`: in such products gate and up meet later.
    `finish` tells how a tile leaves. `blocks` take the tiles of a few rows of them, raster_rows, at a time.
    """

    tokens: int
    units: int
    slices: int
    stages: int
    stage_bytes: int
    split_k: int
    cluster: int
    k_per_split: int
    parts: int
    finish: int
    blocks: int
    raster_rows: int
    cost: int

    @property
    def threads(self) -> int:
        return 128 * (1 + self.units * self.slices)

    @property
    def shared_bytes(self) -> int:
        return self.stages * (self.stage_bytes + 16) + _finish_bytes(self.tokens, self.units, self.finish)

    @property
    def packed(self) -> int:
        """What the kernel takes of it."""
        return self.raster_rows


def _finish_bytes(tokens: int, units: int, finish: int) -> int:
    """Behind the ring."""
    if finish == BY_BOX:
        return units * tokens * _UNIT * 2
    return _CHUNK * (units * _UNIT + 4) * 4 if finish == BY_SLAB else 0


def select_config(problem: Problem, sm_count: int, max_shared_bytes: int) -> Config:
    """Choose the tile and the slices of K; pure arithmetic."""
    k_blocks, limits, found = -(-problem.K // BLOCK_K), (sm_count, max_shared_bytes), []
    for tile in TILES:
        for split in range(1, min(_MAX_SPLITS, max(1, k_blocks // 4)) + 1):
            if tile[1] % problem.parts == 0 or split > 1:
                found.append(configure(problem, *limits, tile, -(-k_blocks // split)))
        if tile[1] % problem.parts == 0 and k_blocks > 1:
            found.append(configure(problem, *limits, tile, -(-k_blocks // 2), cluster=2))
    return min(filter(None, found), key=lambda c: (c.cost, c.split_k, c.cluster, -c.tokens))


def configure(
    problem: Problem, sm_count: int, max_shared_bytes: int, tile: tuple[int, int, int], k_blocks: int, cluster: int = 1
) -> Config | None:
    """Complete a configuration of one of `TILES` and slices of `k_blocks`; None if pairs of blocks find no room."""
    M, N, (tokens, units, slices) = problem.M, problem.N, tile
    split_k = 1 if cluster > 1 else -(-problem.K // (k_blocks * BLOCK_K))
    parts = problem.parts if split_k == 1 else 1
    of_part = BLOCK_K // problem.group * (units // parts) * _UNIT
    stage = tokens * BLOCK_K * 2 + units * _UNIT * BLOCK_K // 2
    stage += parts * of_part * problem.scale_bytes + parts * (-(-of_part * problem.zero_bytes // 128) * 128)
    stage = -(-stage // 1024) * 1024
    tiles_m = -(-M // tokens)
    items = tiles_m * -(-N // (units * _UNIT)) * split_k * cluster
    finish = BY_SLAB
    if problem.storable and slices == split_k == cluster == 1:
        finish = BY_BOX
    elif items <= sm_count:
        finish = BY_RING
    elif cluster > 1:
        return None
    room = max_shared_bytes - _finish_bytes(tokens, units, finish)
    stages = min(room // (stage + 16), _MAX_STAGES) // slices * slices
    cost, of_token = _FINISH[finish]
    cost += k_blocks * TILES[tile] + of_token * tokens + (_PAIR if cluster > 1 else 0)
    cost = _LAUNCH + -(-items // sm_count) * cost
    if split_k > 1:
        cost += _SPLIT + split_k * _SLICE + 2 * split_k * M * N * 4 // _SUM_BYTES
    raster_rows = -(-tiles_m // -(-tiles_m // _RASTER_ROWS))
    sizes = stages, stage, split_k, cluster, k_blocks * BLOCK_K, parts, finish
    return Config(tokens, units, slices, *sizes, min(items, sm_count), raster_rows, cost)


def tensor_maps(device, operands: dict, further: dict, config: Config, group: int, sizes: tuple) -> Callable:
    """Return a function from the addresses of a, b, out, scales and zero points to the kernel's WideMaps.

    `sizes` are M, N, K.
    """
    (M, N, K), (a, b, out) = sizes, (operands[role] for role in ("a", "b", "out"))
    one = (1, 1, 1)
    columns, b_k_major = config.units // config.parts * _UNIT, is_k_major(b, N, K)
    describe = [
        map_of(a, (M, a.row), (K, a.col), True, config.tokens, 64, one),
        map_of(b, (N, b.col), (K // 2, b.row), b_k_major, columns if b_k_major else _UNIT, BLOCK_K // 2, one),
        map_of(out, (M, out.row), (N, out.col), True, config.tokens, _UNIT, one) if config.finish == BY_BOX else None,
    ]
    for role in ("scale_b", "zero_b"):
        if x := further.get(role):
            described = map_of(x, (K // group, x.row), (N, x.col), True, BLOCK_K // group, columns, one)
            describe.append(functools.partial(described, swizzle=0))

    @functools.lru_cache(maxsize=64)
    def maps(*addresses: int) -> bytes:
        pairs = zip(describe, addresses, strict=True)
        return b"".join(encode(device, [d], (x,))[0] if d else bytes(128) for d, x in pairs).ljust(5 * 128, b"\0")

    return maps


def is_k_major(b, N: int, K: int) -> bool | None:
    """Tell how packed weights lie; None where TMA cannot read them."""
    return k_major(b, N, K // 2, b.col, b.row)
