"""The instances of gemm_sm90.cu and lora_sm90.cu."""

from __future__ import annotations

from rawops._runtime.kernel import KernelSpec, ParamStruct

RANKS = (16, 32, 64)  # ranks that a low-rank part is padded to
PLAIN, STAGED, BIASED, DIRECT, PARTIAL = range(5)  # Finish in hopper_tile.cuh
BY_RANK, BY_K, EIGHTS = range(3)  # LoraA in hopper_tile.cuh
MAX_STAGES = 8
NARROW_ROWS = 256  # of a tile of the product that makes x @ a

TILE_CHOICES = {
    "dtype": ("float16", "bfloat16", "float32"),  # float32 as TF32
    "out_dtype": ("float16", "bfloat16", "float32"),
    "block_m": (64, 128),
    "block_n": tuple(range(16, 257, 16)),
    "stages": tuple(range(2, MAX_STAGES + 1)),
}
CLUSTERS = (2, 8)  # of four, too few find room at a time; of eight pays where there are few tiles
OPERAND_CHOICES = {
    "a_k_major": (True, False),
    "b_k_major": (True, False),
    "activation": tuple(range(6)),
    "finish": (PLAIN, STAGED, BIASED, DIRECT, PARTIAL),
}
_LOW_RANK_CHOICES = {
    "rank": RANKS,
    "rides": (True, False),
    "lora_a": (BY_RANK, BY_K, EIGHTS),
    "lora_b_k_major": (True, False),
}


def spec_of(
    source: str,
    entry: str,
    choices: dict,
    *smoke: tuple,
    params: ParamStruct | None = None,
    spills: dict[str, int] | None = None,
) -> KernelSpec:
    """Declare a kernel of Hopper's own whose template takes `choices` in order, as the smoke instances do."""
    return KernelSpec(
        source=source,
        entry=f"rawops::{entry}",
        template=tuple(choices),
        choices=choices,
        smoke=[dict(zip(choices, values, strict=True)) for values in smoke],
        min_arch=90,
        max_arch=90,
        params=params,
        spills=spills,
    )


SM90 = spec_of(
    "gemm_sm90.cu",
    "gemm_sm90",
    {**TILE_CHOICES, **OPERAND_CHOICES, "ping_pong": (False, True)},
    ("bfloat16", "bfloat16", 128, 256, 3, True, True, 0, PLAIN, False),
    ("float16", "float16", 128, 256, 3, True, False, 0, PLAIN, False),
    ("float16", "float16", 128, 192, 4, False, True, 0, PLAIN, False),
    ("bfloat16", "bfloat16", 128, 192, 5, True, True, 0, PLAIN, True),
    ("bfloat16", "bfloat16", 128, 128, 6, False, False, 0, PLAIN, True),
    ("bfloat16", "bfloat16", 128, 192, 5, True, True, 2, BIASED, True),
    ("bfloat16", "bfloat16", 128, 160, 5, True, True, 5, BIASED, True),
    ("bfloat16", "bfloat16", 128, 256, 3, True, True, 2, STAGED, False),
    ("bfloat16", "bfloat16", 128, 256, 3, True, True, 5, BIASED, False),
    ("bfloat16", "float32", 128, 208, 5, True, True, 0, DIRECT, False),
    ("float32", "float32", 128, 256, 4, True, True, 0, DIRECT, False),
    ("float32", "float32", 128, 256, 4, False, True, 0, DIRECT, False),
    ("bfloat16", "float32", 64, 64, 8, True, True, 0, PARTIAL, False),
    ("bfloat16", "bfloat16", 64, 224, 5, True, True, 0, PLAIN, False),
    ("float16", "float16", 64, 256, 5, True, False, 0, PLAIN, True),
)
SM90_PAIRS = spec_of(
    "gemm_sm90.cu",
    "gemm_sm90_pairs",
    {**TILE_CHOICES, **OPERAND_CHOICES, "ping_pong": (False, True)},
    ("bfloat16", "bfloat16", 128, 128, 6, True, True, 0, PLAIN, False),
    ("float16", "float16", 128, 256, 3, False, False, 0, PLAIN, False),
    ("bfloat16", "bfloat16", 128, 192, 5, True, True, 2, BIASED, True),
    ("bfloat16", "float32", 64, 128, 8, True, True, 0, PARTIAL, False),
    ("bfloat16", "float32", 128, 128, 7, True, True, 0, PARTIAL, False),
)
SM90_SQUARES = spec_of(
    "gemm_sm90.cu",
    "gemm_sm90_squares",
    {**TILE_CHOICES, **OPERAND_CHOICES},
    ("bfloat16", "float32", 64, 64, 8, True, True, 0, PARTIAL),
    ("float16", "float32", 64, 64, 8, False, False, 0, PARTIAL),
)
SM90_CLUSTER = spec_of(
    "gemm_sm90.cu",
    "gemm_sm90_cluster",
    {**TILE_CHOICES, "cluster": CLUSTERS, **OPERAND_CHOICES},
    ("bfloat16", "bfloat16", 128, 128, 5, 2, True, True, 0, PLAIN),
    ("bfloat16", "bfloat16", 64, 128, 7, 2, True, True, 5, STAGED),
    ("bfloat16", "bfloat16", 64, 128, 8, 8, True, False, 0, PLAIN),
)
LORA = spec_of(
    "lora_sm90.cu",
    "lora_sm90",
    {**TILE_CHOICES, **OPERAND_CHOICES, **_LOW_RANK_CHOICES, "ping_pong": (False, True)},
    ("bfloat16", "bfloat16", 64, 224, 5, True, True, 0, PLAIN, 16, True, BY_K, True, False),
    ("float16", "float16", 64, 256, 4, True, False, 0, PLAIN, 16, True, BY_RANK, False, False),
    ("float16", "float16", 64, 256, 4, True, False, 0, PLAIN, 16, True, EIGHTS, False, False),
    ("float16", "float16", 64, 256, 3, True, False, 5, STAGED, 64, True, BY_RANK, False, False),
    ("bfloat16", "bfloat16", 128, 256, 3, True, True, 0, PLAIN, 16, False, BY_K, True, False),
    ("float16", "float16", 128, 256, 3, True, False, 0, PLAIN, 64, False, BY_K, False, False),
    ("bfloat16", "bfloat16", 128, 192, 5, True, True, 0, PLAIN, 16, False, BY_K, True, True),
    ("float16", "float16", 128, 192, 5, True, False, 0, PLAIN, 16, False, BY_K, False, True),
    ("float16", "float16", 128, 128, 6, True, False, 0, PLAIN, 16, False, BY_K, False, True),
    ("bfloat16", "bfloat16", 128, 176, 5, True, True, 2, BIASED, 16, False, BY_K, True, True),
)
LORA_CLUSTER = spec_of(
    "lora_sm90.cu",
    "lora_sm90_cluster",
    {**TILE_CHOICES, "cluster": CLUSTERS, **OPERAND_CHOICES, **_LOW_RANK_CHOICES},
    ("bfloat16", "bfloat16", 64, 96, 8, 2, True, True, 0, PLAIN, 32, True, BY_K, True),
)
