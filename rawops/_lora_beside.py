"""x @ c of few rows with an adapter for each on Hopper, in one launch, whose blocks make x @ a on their way."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from rawops import _gemm_sm90
from rawops._gemm_maps import encode
from rawops._gemm_sm90_specs import BIASED, DIRECT, OPERAND_CHOICES, PLAIN, STAGED, TILE_CHOICES, spec_of
from rawops._runtime import dtypes
from rawops._runtime.kernel import ParamStruct
from rawops._runtime.tensormap import TensorMap

ROWS, RANKS = 64, 16  # at most
MOST_COLUMNS = 256  # of a tile
_MEMORY = 6 << 10  # bytes of BesideMemory at most
_FEWEST_COLUMNS, _WIDE = 64, 128  # of D in a tile; from which on a part of x @ a takes more of K
_PATIENCE = 20000  # looks, half a microsecond apart

_BLOCK_K = 64

_CALL = ParamStruct(
    "AdaptersBeside",
    a="tensormap",
    **dict.fromkeys(("b", "x", "indices", "ranks", "non_finite", "scalings", "parts", "counters"), "pointer"),
    **dict.fromkeys(("x_row", "index_stride"), "int64"),
    **dict.fromkeys(("M", "N", "K", "max_loras", "patience"), "int32"),
)
BESIDE = spec_of(
    "lora_beside_sm90.cu",
    "lora_beside_sm90",
    {
        "dtype": ("float16", "bfloat16"),
        **{name: TILE_CHOICES[name] for name in ("out_dtype", "block_n", "stages")},
        **{name: OPERAND_CHOICES[name] for name in ("b_k_major", "activation", "finish")},
    },
    ("bfloat16", "bfloat16", 224, 5, True, 0, PLAIN),
    ("float16", "float16", 256, 4, False, 0, PLAIN),
    ("float16", "float16", 128, 6, True, 2, BIASED),
    ("bfloat16", "bfloat16", 256, 4, False, 5, STAGED),
    ("float16", "float32", 224, 5, True, 0, DIRECT),
)


@dataclass(frozen=True)
class Adapters:
    """The stack of a `MultiLoRA` as this kernel takes it: addresses and strides in elements."""

    a: int
    b: int
    ranks: int
    scalings: int
    non_finite: int
    counters: int
    a_row: int
    max_loras: int


def parts_size(K: int) -> int:
    """Return how many float32 the parts of x @ a take at most."""
    return -(-K // (2 * _BLOCK_K)) * ROWS * RANKS


def plan(device, operands: dict, M: int, N: int, K: int, extents: tuple, activation: int, adapters: Adapters):
    """Prepare a product that `_gemm_sm90.supports` accepts, with the rows of x in order; None where it does not pay.

    The configuration is that of `gemm`: rows without an adapter get the same bits. What the plan takes of a low-rank
    part are the addresses of x, lora_indices and the parts of x @ a, and the stride of the second.
    """
    problem = _gemm_sm90.describe_problem(operands, M, N, K, extents, activation)
    config = _gemm_sm90.select_config(problem, device.sm_count, device.max_shared_bytes)
    if config.cluster > 1 or config.block_m > ROWS or K % _BLOCK_K:
        return None
    share = config.share(problem)
    splits_eight = problem.parts == 2 and problem.N % 8  # see place_of_rank in adapters.cuh
    if share < _FEWEST_COLUMNS or splits_eight:
        return None
    config = replace(config.with_whole_tiles(problem), ping_pong=False, pairs=False)
    stages = (device.max_shared_bytes - config.other_bytes(problem) - _MEMORY) // config.stage_bytes(problem)
    config = replace(config, stages=min(stages, config.stages))
    b = operands["b"]
    choices = {
        "dtype": b.dtype,
        "out_dtype": operands["out"].dtype,
        "block_n": config.block_n,
        "stages": config.stages,
        "b_k_major": problem.b_k_major,
        "activation": activation,
        "finish": problem.finish,
    }
    maps = _gemm_sm90.tensor_maps(device, operands, problem, config, (M, N, K), extents)
    of_a = functools.partial(
        TensorMap,
        dtype=dtypes.numpy(b.dtype),
        shape=(1, 1, K // _BLOCK_K, adapters.max_loras * RANKS, _BLOCK_K),
        strides=(16, 16, _BLOCK_K * 2, adapters.a_row * 2, 2),
        box=(1, 1, 4 if share >= _WIDE and problem.finish != DIRECT else 2, RANKS, _BLOCK_K),
        swizzle=_BLOCK_K * 2,
    )
    (map_of_a,), x_row = encode(device, [of_a], (adapters.a,)), operands["a"].row * 2

    def call(x: int, indices: int, index_stride: int, parts: int) -> bytes:
        found = (adapters.ranks, adapters.non_finite, adapters.scalings, parts, adapters.counters)
        sizes = (x_row, index_stride, M, N, K, adapters.max_loras, _PATIENCE)
        return _CALL.pack(map_of_a, adapters.b, x, indices, *found, *sizes)

    kernel, shared_bytes = BESIDE.kernel(device, **choices), config.shared_bytes(problem) + _MEMORY
    ahead = _gemm_sm90.asked_ahead(problem, config)
    return _gemm_sm90.Plan(config, kernel, (config.blocks, 1, 1), shared_bytes, maps, call, True, ahead)
