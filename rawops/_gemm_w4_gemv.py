"""The host side of gemv_w4.cu: up to eight tokens and packed 4-bit weights that are contiguous along K."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rawops import _gemm_sm90_specs as specs
from rawops._gemm_config import ACTIVATIONS, SWIGLU
from rawops._runtime.kernel import KernelSpec, ParamStruct

GROUP = 128  # along K, that have a scale
MOST_TOKENS = 8

_UNIT = 32  # columns of a block
_SPLITS = (4, 8, 16, 32)  # warps that share the K of a block
_WARPS_PER_SM = 19  # that keep enough loads on the way
_MANY = 2**25  # weights, from which on asking ahead saves time: of 6144 x 4096 it cost 1 %, of 4096 x 8192 it saved 2 %


def spec_of(params: ParamStruct, types: dict[str, tuple]) -> KernelSpec:
    """Declare the kernel, which takes the parameters of gemm_w4.cu, and the types that every kernel has."""
    choices = {**types, "split": _SPLITS, "asks": (False, True), "activation": tuple(range(len(ACTIVATIONS)))}
    smoke = (
        ("bfloat16", "bfloat16", "bfloat16", 0, False, 4, True, 0),
        ("bfloat16", "bfloat16", "bfloat16", 0, False, 16, False, 0),
        ("float16", "float16", "float32", 1, True, 8, True, 0),
        ("float16", "float16", "float16", 2, False, 16, True, SWIGLU),
        ("bfloat16", "float32", "float32", 1, True, 32, True, SWIGLU),
    )
    return specs.spec_of("gemv_w4.cu", "gemv_w4", choices, *smoke, params=params)


def takes(M: int, K: int, cols: int, parts: int, group: int, b_k_major: bool | None) -> bool:
    """Tell whether the kernel can run a product whose operands lie on 16-byte boundaries.

    A lane reads the scales of its neighbouring columns at once: four, or with `parts` 2, of swiglu, two of each part.
    """
    fits = group == GROUP and K % GROUP == 0 and cols % (4 // parts) == 0
    return fits and 0 < M <= MOST_TOKENS and b_k_major is True


@dataclass(frozen=True)
class Config:
    """Warps of a block, which share its K, and the number of blocks.

    asks: whether a block asks the L2 for its scales and first weights while the launch before still runs.
    """

    split: int
    blocks: int
    asks: bool
    shared_bytes: ClassVar[int] = 0  # beside what the kernel declares

    @property
    def threads(self) -> int:
        return 32 * self.split


def select_config(N: int, K: int, sm_count: int) -> Config:
    """Choose the fewest warps that keep the memory busy; as measured on an H200."""
    blocks = -(-N // _UNIT)
    enough = (split for split in _SPLITS if blocks * split >= _WARPS_PER_SM * sm_count)
    split = next(enough, _SPLITS[-1])
    return Config(split, blocks, split < K // GROUP and N * K >= _MANY)
