"""x @ c of few rows with an adapter for each on Hopper, in one launch: some blocks make x @ a beside the others."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from rawops import _gemm_sm90
from rawops._gemm_maps import encode, map_of
from rawops._gemm_operands import Operand
from rawops._gemm_sm90_specs import BIASED, DIRECT, OPERAND_CHOICES, PLAIN, STAGED, TILE_CHOICES, spec_of
from rawops._runtime import dtypes
from rawops._runtime.kernel import ParamStruct
from rawops._runtime.tensormap import TensorMap

ROWS, RANKS = 64, 16  # at most
_FEWEST_MAKERS, _MOST_MAKERS = 4, 16  # blocks that make x @ a
_ADAPTERS_OF_MAKER = 8  # at most: with more its part comes later than the last block of K
_MEMORY = 304 + ROWS * RANKS * 4  # bytes of BesideMemory
_LEAST = 120 << 10  # of shared memory, for three stages of a maker

_BLOCK_K, _BLOCKS = 64, 8  # of K in a row of a box, and of these in a box

_CALL = ParamStruct(
    "AdaptersBeside",
    **dict.fromkeys(("b", "a", "x"), "tensormap"),
    **dict.fromkeys(("indices", "ranks", "non_finite", "scalings", "y", "counters"), "pointer"),
    index_stride="int64",
    **dict.fromkeys(("M", "K", "max_loras", "makers"), "int32"),
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


def plan(device, operands: dict, M: int, N: int, K: int, extents: tuple, activation: int, adapters: Adapters):
    """Prepare a product that `_gemm_sm90.supports` accepts, with the rows of x in order; None where it does not pay.

    The configuration is that of `gemm`, but for the blocks: rows without an adapter get the same bits. What the plan
    takes of a low-rank part are the addresses of x, lora_indices and y, and the stride of the second.
    """
    problem = _gemm_sm90.describe_problem(operands, M, N, K, extents, activation)
    config = _gemm_sm90.select_config(problem, device.sm_count, device.max_shared_bytes)
    if config.cluster > 1 or config.block_m > ROWS or K % _BLOCK_K:
        return None
    makers = min(max(device.sm_count - config.blocks, _FEWEST_MAKERS), _MOST_MAKERS)
    tiles = -(-N // config.block_n)
    blocks = min(config.blocks, device.sm_count - makers)
    if min(M, adapters.max_loras) > _ADAPTERS_OF_MAKER * makers or -(-tiles // blocks) > -(-tiles // config.blocks):
        return None
    config = replace(config, ping_pong=False, pairs=False)
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
    factors = Operand(b.dtype, 2, 0, RANKS, 1, [0, 0, N * RANKS])
    of_b = map_of(
        factors, (N, RANKS), (RANKS, 1), True, config.block_n // problem.parts, RANKS, (1, 1, adapters.max_loras)
    )
    of_a = _blocks_of(b.dtype, adapters.max_loras * RANKS, K, adapters.a_row, RANKS)
    of_x = _blocks_of(b.dtype, M, K, operands["a"].row, 1)

    @functools.lru_cache(maxsize=64)
    def factor_maps(x: int) -> list[bytes]:
        return encode(device, [of_b, of_a, of_x], (adapters.b, adapters.a, x))

    def call(x: int, indices: int, index_stride: int, y: int) -> bytes:
        pointers = (indices, adapters.ranks, adapters.non_finite, adapters.scalings, y, adapters.counters)
        return _CALL.pack(*factor_maps(x), *pointers, index_stride, M, K, adapters.max_loras, makers)

    shared_bytes = max(config.shared_bytes(problem) + _MEMORY, _LEAST)
    kernel = BESIDE.kernel(device, **choices)
    return _gemm_sm90.Plan(config, kernel, (makers + blocks, 1, 1), shared_bytes, maps, call, True)


def _blocks_of(dtype: str, rows: int, K: int, row: int, box_rows: int):
    """Return a function from the address of a matrix (rows, K) to a map of it, whose boxes are blocks along K."""
    return functools.partial(
        TensorMap,
        dtype=dtypes.numpy(dtype),
        shape=(1, 1, K // _BLOCK_K, rows, _BLOCK_K),
        strides=(16, 16, _BLOCK_K * 2, row * 2, 2),
        box=(1, 1, _BLOCKS, box_rows, _BLOCK_K),
        swizzle=_BLOCK_K * 2,
    )
