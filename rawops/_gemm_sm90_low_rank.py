"""The operands of a low-rank part on Hopper as lora_sm90.cu takes them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rawops._gemm_maps import box_cols, encode, k_major, map_of
from rawops._gemm_sm90_specs import BY_K, BY_RANK, EIGHTS
from rawops._runtime.kernel import ParamStruct

_BLOCK_K = 64
_CALL = ParamStruct(
    "LowRankCall",
    **dict.fromkeys(("a", "b"), "tensormap"),
    **dict.fromkeys(("elements", "y"), "pointer"),
    **dict.fromkeys(("a_row", "y_row"), "int64"),
    rank="int32",
    scaling="float32",
)


@dataclass(frozen=True)
class LowRank:
    """The operands a (K, rank) and b (rank, N), and how many products `narrow` as x @ a are made beside x @ c."""

    a: Any
    b: Any
    rank: int
    narrow: int = 1

    def majors(self, N: int, K: int) -> list[bool | None]:
        """Tell which axes of a and b are contiguous, as `k_major`; the rank is the K of b."""
        a, b, rank = self.a, self.b, self.rank
        return [k_major(a, rank, K, a.col, a.row), k_major(b, N, rank, b.col, b.row)]

    def a_layout(self, K: int) -> int:
        """Tell how the kernel is to read a that rides; TMA takes as long for a row of 16 bytes as for one of 128."""
        if self.rank == 8 and (self.a.row, self.a.col) == (8, 1) and K % 8 == 0:
            return EIGHTS
        return BY_K if self.majors(1, K)[0] else BY_RANK

    def call(self, device, N: int, K: int, step: int, share: int) -> Callable[..., bytes]:
        """Return a function to the kernel's LowRankCall, for `step` ranks at a time and tiles of `share` columns.

        It takes the scaling, the addresses of both factors, and the address and row stride of x @ a, where that is made
        before.
        """
        a, b, rank = self.a, self.b, self.rank
        a_k_major, b_k_major = self.majors(N, K)
        if self.a_layout(K) == EIGHTS:
            of_a = map_of(a, (K // 8, 64), (64, 1), True, _BLOCK_K // 8, 64, (1, 1, 1))
            of_a = functools.partial(of_a, swizzle=0)
        else:
            of_a = map_of(a, (rank, a.col), (K, a.row), a_k_major, step, _BLOCK_K, (1, 1, 1))
        describe = [
            of_a,
            map_of(b, (N, b.col), (rank, b.row), b_k_major, share if b_k_major else box_cols(share), step, (1, 1, 1)),
        ]

        @functools.lru_cache(maxsize=64)
        def call(scaling: float, a_address: int, b_address: int, y_address: int = 0, y_row: int = 0) -> bytes:
            maps = encode(device, describe, (a_address, b_address))
            return _CALL.pack(*maps, a_address, y_address, a.row, y_row, rank, scaling)

        return call
