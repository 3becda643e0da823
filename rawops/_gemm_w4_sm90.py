"""The host side of gemm_w4_sm90.cu: few tokens and packed 4-bit weights that are contiguous along K."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

from rawops import _gemm_sm90_specs as specs
from rawops._gemm_config import ACTIVATIONS
from rawops._gemm_maps import encode, map_of
from rawops._runtime import dtypes
from rawops._runtime.kernel import KernelSpec, ParamStruct
from rawops._runtime.tensormap import TensorMap

GROUP = 128  # along K, that have a scale
MOST_TOKENS = 16

_UNIT = 32  # columns of a warp
_SPAN = 128  # bytes of a swizzled row
_MAX_UNITS = 8  # whose columns are those of a box
_MAX_CONSUMERS = 17  # warps
_BUSY = 10  # of them, which the memory waits for
_MIN_STAGES, _MAX_STAGES = 3, 32  # a warp's next group is at most as many stages ahead as there are
_BARRIERS = 32  # bytes of a stage
_GAP = 4  # columns between rows of sums
_SHARED = 4  # units, for which a warp pairs the tokens
_STAGE_BYTES = 16384  # of weights, at least, and no more than it takes: a block begins when its first stage is there
_ROWS = 18  # of a box of tokens: two more than a lane reads, so that what eight lanes read lies in different banks
_SHAPE_FIELDS = (
    "slices",
    "units",
    "stages",
    "groups",
    "tokens_at",
    "scale_at",
    "zero_at",
    "stage_bytes",
    "box_bytes",
)
_SHAPE = ParamStruct("StreamShape", **dict.fromkeys(_SHAPE_FIELDS, "int32"))


def spec_of(params: ParamStruct, types: dict[str, tuple]) -> KernelSpec:
    """Declare the kernel, which takes the parameters of gemm_w4.cu, and the types that every kernel has."""
    choices = {**types, "paired": (False, True), "activation": tuple(range(len(ACTIVATIONS)))}
    smoke = [
        ("bfloat16", "bfloat16", "bfloat16", 0, False, False, 0),
        ("bfloat16", "bfloat16", "bfloat16", 0, False, True, 0),
        ("float16", "float16", "float32", 1, True, True, 0),
        ("float16", "float16", "float16", 2, False, False, 5),
        ("bfloat16", "float32", "float32", 1, True, False, 5),
    ]
    return specs.spec_of("gemm_w4_sm90.cu", "gemm_w4_sm90", choices, *smoke, params=params)


@dataclass(frozen=True)
class Config:
    """How blocks share the work: StreamShape in gemm_w4_sm90.cu.

    Attributes
    ----------
    slices, units : int
        Warps of a block along K, and along N in units of 32 columns.
    blocks, stages : int
    groups : int
        Of a stage.
    weight_bytes, token_bytes, scale_bytes, zero_bytes : int
        Of a stage, as copies count them.
    parts : int
        2 for swiglu, whose boxes of scales and zero points begin on 128 bytes each.
    """

    slices: int
    units: int
    blocks: int
    stages: int
    groups: int
    weight_bytes: int
    token_bytes: int
    scale_bytes: int
    zero_bytes: int
    parts: int

    @property
    def threads(self) -> int:
        return 32 * (self.slices * self.units + 1 + self.paired)

    @property
    def paired(self) -> bool:
        """Whether a warp pairs the tokens for all others: it takes as long for a group as the warps of four units."""
        return self.units >= _SHARED

    @property
    def scale_at(self) -> int:
        return self.weight_bytes + self.token_bytes

    @property
    def zero_at(self) -> int:
        return self.scale_at + self._aligned(self.scale_bytes)

    @property
    def stage_bytes(self) -> int:
        return -(-(self.zero_at + self._aligned(self.zero_bytes)) // 1024) * 1024

    def _aligned(self, size: int) -> int:
        return self.parts * (-(-size // self.parts // 128) * 128)

    @property
    def shared_bytes(self) -> int:
        return self.stages * (self.stage_bytes + _BARRIERS)

    @property
    def packed(self) -> bytes:
        """StreamShape."""
        box_bytes = self.scale_at + self.scale_bytes + self.zero_bytes
        sizes = (self.weight_bytes, self.scale_at, self.zero_at, self.stage_bytes, box_bytes)
        return _SHAPE.pack(self.slices, self.units, self.stages, self.groups, *sizes)


def select_config(
    N: int, K: int, parts: int, group_bytes: tuple[int, int], sm_count: int, max_shared_bytes: int
) -> Config:
    """Choose the shape of the blocks; pure arithmetic.

    An SM has one block at a time. The time of a block is that of its warps' longest way through K, for each of its
    warps or for as many as it takes to keep the memory busy.

    Parameters
    ----------
    N : int
        Columns of b.
    K : int
        A multiple of 128.
    parts : int
        2 for swiglu.
    group_bytes : (int, int)
        Of a scale and of a zero point.
    sm_count, max_shared_bytes : int
    """
    groups_of_k, units_of_n, most = K // GROUP, -(-N // _UNIT), _MAX_CONSUMERS
    found = []
    for slices in range(1, most + 1):
        for units in range(1, min(_MAX_UNITS, most // slices) + 1):
            blocks = -(-units_of_n // units)
            rounds = -(-blocks // sm_count) * -(-groups_of_k // slices)
            found.append((rounds * max(slices * units, _BUSY), slices, units, blocks))
    rings = (
        _with_ring(slices, units, blocks, parts, group_bytes, max_shared_bytes)
        for _, slices, units, blocks in sorted(found)
    )
    return next(config for config in rings if config)


def _with_ring(
    slices: int, units: int, blocks: int, parts: int, group_bytes: tuple, max_shared_bytes: int
) -> Config | None:
    """Complete a configuration; None where too few stages fit."""
    columns = units * _UNIT
    groups = 2 * -(-_STAGE_BYTES // (columns * GROUP))
    sizes = groups * columns * GROUP // 2, groups * _ROWS * GROUP * 2, *(groups * columns * n for n in group_bytes)
    config = Config(slices, units, blocks, 0, groups, *sizes, parts)
    config = replace(config, stages=min(max_shared_bytes // (config.stage_bytes + _BARRIERS), _MAX_STAGES))
    holds_sums = config.shared_bytes >= slices * (columns + _GAP) * MOST_TOKENS * 4
    return config if config.stages >= _MIN_STAGES and holds_sums else None


def tensor_maps(device, operands: dict, further: dict, config: Config, sizes: tuple) -> Callable:
    """Return a function from the addresses of a, b, out, scales and zero points to the kernel's StreamMaps.

    `sizes` are M, N, K and the columns of the result. K is two axes for a and b: a box has many swizzled rows of it.
    """
    (M, N, K, cols), a, b = sizes, operands["a"], operands["b"]
    columns, pitch = config.units * _UNIT * cols // N, 16  # the stride of axes with one entry

    def in_rows(dtype: str, rows: int, row_bytes: int, row_bytes_of_k: int, box: tuple) -> Callable:
        item = dtypes.itemsize(dtype)
        shape = (1, 1, row_bytes_of_k // _SPAN, rows, _SPAN // item)
        strides = (pitch, pitch, _SPAN, row_bytes if rows > 1 else pitch, item)
        box = (1, 1, *box, _SPAN // item)
        return functools.partial(
            TensorMap,
            dtype=dtypes.numpy(dtype),
            shape=shape,
            strides=strides,
            box=box,
            swizzle=_SPAN,
            l2_promotion=0,  # which costs 5 % where all that is fetched is asked for anyway
        )

    describe = [
        in_rows(a.dtype, M, a.row * 2, K * 2, (2 * config.groups, _ROWS)),
        in_rows("uint8", N, b.col, K // 2, (config.groups // 2, columns)),
    ]
    for role in ("scale_b", "zero_b"):
        if x := further.get(role):
            described = map_of(x, (K // GROUP, x.row), (N, x.col), True, config.groups, columns, (1, 1, 1))
            describe.append(functools.partial(described, swizzle=0))

    @functools.lru_cache(maxsize=64)
    def maps(*addresses: int) -> bytes:
        return b"".join(encode(device, describe, addresses)).ljust(4 * 128, b"\0")

    return lambda a, b, _, *scales: maps(a, b, *scales)


def takes(M: int, K: int, group: int, b_k_major: bool | None) -> bool:
    """Tell whether the kernel can run a product whose operands TMA can read."""
    return group == GROUP and 0 < M <= MOST_TOKENS and b_k_major is True and K % (2 * GROUP) == 0
