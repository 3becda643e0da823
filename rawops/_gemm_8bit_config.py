"""The kernels of products of 8-bit operands: their parameters and instances."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import ClassVar

from rawops import _gemm_sm90_config
from rawops._gemm_config import (
    ACTIVATIONS,
    BLOCK_SCALED,
    CALL_FIELDS,
    COLUMN_SCALED,
    FLOAT8,
    IN_PLACE,
    PROMOTED,
    SHAPE_FIELDS,
    TILES,
    strides_of,
)
from rawops._gemm_sm90_config import Config
from rawops._gemm_sm90_config import Problem as HopperProblem
from rawops._gemm_sm90_specs import BIASED, CLUSTERS, DIRECT, OPERAND_CHOICES, PLAIN, STAGED, TILE_CHOICES, spec_of
from rawops._runtime import dtypes
from rawops._runtime.kernel import KernelSpec, ParamStruct

# What kernels take for the types of a and b.
BYTES = {
    (a, b): f"rawops::Bytes<{dtypes.cpp(a)}, {dtypes.cpp(b)}>"
    for a, b in (*itertools.product(FLOAT8, repeat=2), ("int8", "int8"))
}
# As in _gemm_sm90_config.py; the last was measured on an H200.
_COST_OF_TILE = {PLAIN: 300, BIASED: 600, STAGED: 1200, DIRECT: 2500}
# In a block of K, by promotion: more than with 16 bits, whose products take as long for half as many.
_COST_OF_A = {IN_PLACE: 32, PROMOTED: 128, BLOCK_SCALED: 72, COLUMN_SCALED: 32}
_E4M3, _INT8 = BYTES["float8_e4m3fn", "float8_e4m3fn"], BYTES["int8", "int8"]

_SCALE_FIELDS = {
    **dict.fromkeys(("whole_a", "whole_b", "whole_d", "scale_a", "scale_b"), "pointer"),
    **strides_of("scale_a"),
    **strides_of("scale_b"),
    "scales_of_b": "int32",
}
SCALES = ParamStruct("ScaleParams", **_SCALE_FIELDS)
PARAMS = ParamStruct("ScaledParams", **CALL_FIELDS, **SHAPE_FIELDS, **_SCALE_FIELDS)
_CHOICES = {
    "operands": tuple(BYTES.values()),
    "out_dtype": ("bfloat16", "float16", "float32", *FLOAT8, "int32"),
    "addend": ("bfloat16", "float16", "int32"),
}
_HOPPER_CHOICES = {**_CHOICES, **{name: TILE_CHOICES[name] for name in ("block_m", "block_n", "stages")}}
_FINISH = {
    "promotion": (IN_PLACE, PROMOTED, BLOCK_SCALED, COLUMN_SCALED),
    "has_vectors": (False, True),
    "activation": tuple(range(len(ACTIVATIONS))),
    "finish": OPERAND_CHOICES["finish"],
}
SM90 = spec_of(
    "gemm_8bit_sm90.cu",
    "gemm_8bit_sm90",
    {**_HOPPER_CHOICES, **_FINISH, "ping_pong": (False, True)},
    (_E4M3, "bfloat16", "bfloat16", 128, 256, 3, IN_PLACE, False, 0, PLAIN, False),
    (_E4M3, "bfloat16", "bfloat16", 128, 192, 4, PROMOTED, True, 0, PLAIN, False),
    (_E4M3, "bfloat16", "bfloat16", 128, 192, 4, BLOCK_SCALED, False, 0, PLAIN, False),
    (_E4M3, "float8_e4m3fn", "bfloat16", 128, 160, 5, PROMOTED, False, 2, DIRECT, False),
    (_E4M3, "float16", "float16", 64, 160, 6, COLUMN_SCALED, False, 0, STAGED, False),
    (_INT8, "int32", "int32", 128, 256, 4, IN_PLACE, False, 0, DIRECT, False),
    (_INT8, "bfloat16", "bfloat16", 128, 256, 3, IN_PLACE, True, 5, STAGED, False),
)
SM90_CLUSTER = spec_of(
    "gemm_8bit_sm90.cu",
    "gemm_8bit_sm90_cluster",
    {**_HOPPER_CHOICES, "cluster": CLUSTERS, **_FINISH},
    (_E4M3, "bfloat16", "bfloat16", 64, 128, 7, 2, PROMOTED, False, 0, PLAIN),
    (_E4M3, "bfloat16", "bfloat16", 64, 128, 7, 2, BLOCK_SCALED, False, 0, PLAIN),
)


def _smoke(operands: str, out: str, addend: str, tile, promotion: int, activation: int = 0) -> dict:
    values = {"operands": operands, "out_dtype": out, "addend": addend, "tile": tile.cpp}
    has_vectors = promotion < BLOCK_SCALED and out != "int32"
    return values | {"promotion": promotion, "has_vectors": has_vectors, "activation": activation}


_SM80_CHOICES = {
    **_CHOICES,
    "tile": tuple(dict.fromkeys(tile.cpp for kind in ("8-bit", "8-bit promoted") for tile in TILES[kind])),
    "promotion": _FINISH["promotion"],
    "has_vectors": _FINISH["has_vectors"],
    "activation": _FINISH["activation"],
}
SM80 = KernelSpec(
    source="gemm_8bit_sm80.cu",
    entry="rawops::gemm_8bit_sm80",
    template=tuple(_SM80_CHOICES),
    choices=_SM80_CHOICES,
    smoke=(
        _smoke(_INT8, "int32", "int32", TILES["8-bit"][0], IN_PLACE),
        _smoke(_E4M3, "bfloat16", "bfloat16", TILES["8-bit"][0], IN_PLACE, 5),
        _smoke(_E4M3, "bfloat16", "bfloat16", TILES["8-bit promoted"][0], PROMOTED),
        _smoke(_E4M3, "bfloat16", "bfloat16", TILES["8-bit promoted"][0], BLOCK_SCALED),
        _smoke(_E4M3, "float8_e5m2", "float16", TILES["8-bit promoted"][1], COLUMN_SCALED),
        _smoke(BYTES[FLOAT8], "float16", "float16", TILES["8-bit promoted"][2], PROMOTED),
    ),
    params=PARAMS,
)


@dataclass(frozen=True)
class BytesProblem(HopperProblem):
    """What a configuration of the Hopper kernel depends on. `promotion` is that of scaling.cuh."""

    itemsize: ClassVar[int] = 1

    promotion: int = IN_PLACE
    is_int8: bool = False

    @property
    def clusters(self) -> tuple[int, ...]:
        return () if self.is_int8 else CLUSTERS  # they add up float32

    @property
    def cost_of_tile(self) -> int:
        return _COST_OF_TILE[self.finish]

    def scale_bytes(self, block_m: int, block_n: int) -> int:
        if self.promotion < BLOCK_SCALED:
            return 0
        return (block_m + (block_n if self.promotion == COLUMN_SCALED else 4)) * 4

    def by_columns(self, block_m: int, cluster: int) -> bool:
        return self.promotion == PROMOTED and block_m == 128 and cluster == 1 and self.parts == 1

    def widths(self, step: int, block_m: int, cluster: int, ping_pong: bool) -> list[int]:
        if self.promotion == IN_PLACE:
            found = super().widths(step, block_m, cluster, ping_pong)
            return [width for width in found if width <= 128 or block_m == 64 or not ping_pong]  # as was measured
        if ping_pong:
            return []
        widest = 128 if cluster > 1 else 192 if self.finish == PLAIN else 160  # with two sets of accumulators
        if self.promotion == COLUMN_SCALED and self.parts == 2:
            widest = min(widest, 128)
        return [width for width in range(step, widest + 1, step) if self._fits_blocks(width // self.parts)]

    def _fits_blocks(self, cols: int) -> bool:
        """Tell whether the columns of any tile lie in two blocks of 128 at most, where these have scales.

        So they do for 160 as well, which was no faster than 192 anywhere.
        """
        return self.promotion != BLOCK_SCALED or cols <= 128 or cols == 192


def select_config(problem: BytesProblem, sm_count: int, max_shared_bytes: int) -> Config:
    """Choose the tile that finishes first."""
    return candidates(problem, sm_count, max_shared_bytes)[0]


def candidates(problem: BytesProblem, sm_count: int, max_shared_bytes: int) -> list[Config]:
    """As _gemm_sm90_config.candidates, with what tiles of 128 rows were measured to take here."""
    found = _gemm_sm90_config.candidates(problem, sm_count, max_shared_bytes)
    found = [replace(config, cost=_cost(problem, config)) for config in found]
    return sorted(found, key=lambda config: (config.cost, config.ping_pong, config.cluster, -config.block_n))


def _cost(problem: BytesProblem, config: Config) -> int:
    if config.block_m == 64:
        return config.cost
    k_blocks, finish = -(-problem.k_blocks // config.cluster), problem.cost_of_tile
    main_loop = k_blocks * (config.block_n + _COST_OF_A[problem.promotion])
    if config.ping_pong:
        return config.waves * (max(main_loop, finish) + finish // config.waves)
    return max(config.cost, config.waves * (main_loop + finish))  # the former where the memory is slower
