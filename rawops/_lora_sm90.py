"""x @ a in float32 on Hopper, a launch beside which the product that reads it begins."""

from __future__ import annotations

import functools
import math

from rawops._gemm_maps import encode, k_major, map_of
from rawops._gemm_sm90_specs import NARROW_ROWS, RANKS
from rawops._runtime.kernel import KernelSpec, ParamStruct

_THREADS, _RING_BYTES = 416, 208 << 10

_NARROW = ParamStruct(
    "NarrowParams",
    **dict.fromkeys(("x", "a_map"), "tensormap"),
    **dict.fromkeys(("a", "y", "parts"), "pointer"),
    **dict.fromkeys(("a_row", "a_col", "y_row", "parts_row"), "int64"),
    **dict.fromkeys(("M", "K", "rank", "batches"), "int32"),
    **dict.fromkeys(("extent_0", "extent_1", "extent_2", "moves_0", "moves_1", "moves_2", "waits"), "int32"),
)
NARROW = KernelSpec(
    source="lora_narrow_sm90.cu",
    entry="rawops::lora_narrow_sm90",
    template=("dtype", "ranks", "x_by_k", "a_by_k"),
    choices={
        "dtype": ("float16", "bfloat16"),
        "ranks": RANKS,
        "x_by_k": (True, False),
        "a_by_k": (True, False),
    },
    smoke=(
        {"dtype": "float16", "ranks": 16, "x_by_k": True, "a_by_k": False},
        {"dtype": "bfloat16", "ranks": 64, "x_by_k": True, "a_by_k": True},
        {"dtype": "bfloat16", "ranks": 32, "x_by_k": False, "a_by_k": False},
    ),
    min_arch=90,
    max_arch=90,
    params=_NARROW,
)


class NarrowProduct:
    """y = x @ a in float32, for x and a that TMA can read: a pass over x.

    A large product launched behind begins on the SMs that this one leaves.

    Parameters
    ----------
    device : Device
    x, a : Operand
        x with three batch axes of `extents`, M rows each; a is (K, rank).
    M, K, rank : int
    extents : tuple of 3 int
    y_row : int
        Row stride of y, which has the rows of all batches.
    blocks : int
        That share out the rows, at most.
    """

    def __init__(self, device, x, a, M: int, K: int, rank: int, extents: tuple, y_row: int, blocks: int) -> None:
        x_by_k, a_by_k = k_major(x, M, K, x.row, x.col), k_major(a, rank, K, a.col, a.row)
        ranks = next((step for step in RANKS if step >= rank), RANKS[-1])
        self._kernel = NARROW.kernel(device, dtype=x.dtype, ranks=ranks, x_by_k=x_by_k, a_by_k=a_by_k)
        batches = math.prod(extents)
        self._grid = min(batches * -(-M // NARROW_ROWS), blocks), -(-rank // ranks), 1
        self._shared_bytes = _shared_bytes(ranks)
        moves = [int(n > 1 and s != 0) for n, s in zip(extents, x.batch, strict=True)]
        self._numbers = a.row, a.col, y_row, row_of_parts(rank), M, K, rank, batches, *extents, *moves
        describe = [map_of(x, (M, x.row), (K, x.col), x_by_k, NARROW_ROWS if x_by_k else 64, 64, extents)]
        if ranks == RANKS[-1]:  # rows of 128 bytes
            describe.append(map_of(a, (rank, a.col), (K, a.row), a_by_k, ranks, 64, (1, 1, 1)))
        self._maps = functools.lru_cache(maxsize=64)(lambda *at: encode(device, describe, at[: len(describe)]))

    def run(self, x: int, a: int, y: int, beside: bool = False, parts: int = 0) -> None:
        """Launch on these addresses; with `parts` y goes there, too, in the form of `row_of_parts`.

        With `beside` it runs beside the launch before, which must neither write x or a nor use the memory of y.
        """
        x_map, a_map = (*self._maps(x, a), b"")[:2]
        params = _NARROW.pack(x_map, a_map, a, y, parts, *self._numbers, not beside)
        self._kernel.launch(self._grid, (_THREADS, 1, 1), (params,), self._shared_bytes, True)


def row_of_parts(rank: int) -> int:
    """Return how many bfloat16 a row of y takes as two values each: for 64 ranks the first ones, then the second."""
    return -(-rank // RANKS[-1]) * 2 * RANKS[-1]


def _shared_bytes(ranks: int) -> int:
    stage = (NARROW_ROWS + ranks) * 128
    return _RING_BYTES // stage * (stage + 16)
