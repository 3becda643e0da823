"""The host side of gemm_w4_sm90.cu: few tokens and packed 4-bit weights that are contiguous along K."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

from rawops._gemm_config import ACTIVATIONS, DTYPES
from rawops._gemm_maps import encode, map_of
from rawops._runtime import dtypes
from rawops._runtime.kernel import KernelSpec, ParamStruct
from rawops._runtime.tensormap import TensorMap

GROUP = 128  # along K, that have a scale
TOKENS = (8, 16)  # of an instance

_UNIT = 32  # columns of a warp
_SPAN = 128  # bytes of a swizzled row
_MAX_UNITS = 8  # whose columns are those of a box
_MAX_CONSUMERS = 15  # warps
_BUSY = 10  # of them, which the memory waits for
_MIN_STAGES, _MAX_STAGES = 3, 16
_SHAPE_FIELDS = ("slices", "units", "stages", "tokens_at", "scale_at", "zero_at", "stage_bytes", "box_bytes")
_SHAPE = ParamStruct("StreamShape", **dict.fromkeys(_SHAPE_FIELDS, "int32"))


def spec_of(params: ParamStruct, scale_dtypes: tuple[str, ...], formats: int) -> KernelSpec:
    """Declare the kernel, which takes the parameters of gemm_w4.cu."""
    choices = {
        "dtype": DTYPES[:2],
        "out_dtype": DTYPES[:3],
        "scale_dtype": scale_dtypes,
        "format": tuple(range(formats)),
        "has_zeros": (False, True),
        "tokens": TOKENS,
        "activation": tuple(range(len(ACTIVATIONS))),
    }
    smoke = [
        ("bfloat16", "bfloat16", "bfloat16", 0, False, 8, 0),
        ("bfloat16", "bfloat16", "bfloat16", 0, False, 16, 0),
        ("float16", "float16", "float32", 1, True, 16, 0),
        ("float16", "float16", "float16", 2, False, 8, 5),
        ("bfloat16", "float32", "float32", 1, True, 16, 5),
    ]
    return KernelSpec(
        source="gemm_w4_sm90.cu",
        entry="rawops::gemm_w4_sm90",
        template=tuple(choices),
        choices=choices,
        smoke=[dict(zip(choices, values, strict=True)) for values in smoke],
        min_arch=90,
        max_arch=90,
        params=params,
    )


@dataclass(frozen=True)
class Config:
    """How blocks share the work: StreamShape in gemm_w4_sm90.cu.

    Attributes
    ----------
    tokens : int
        Of the kernel's instance.
    slices, units : int
        Warps of a block along K, and along N in units of 32 columns.
    blocks, stages : int
    weight_bytes, token_bytes, scale_bytes, zero_bytes : int
        Of a stage, as copies count them.
    parts : int
        2 for swiglu, whose boxes of scales and zero points begin on 128 bytes each.
    """

    tokens: int
    slices: int
    units: int
    blocks: int
    stages: int
    weight_bytes: int
    token_bytes: int
    scale_bytes: int
    zero_bytes: int
    parts: int

    @property
    def threads(self) -> int:
        return 32 * (self.slices * self.units + 1)

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
    def other_bytes(self) -> int:
        """Shared memory beside the ring: the sums."""
        return self.slices * self.units * self.tokens * _UNIT * 4

    @property
    def shared_bytes(self) -> int:
        return self.stages * (self.stage_bytes + 16) + self.other_bytes

    def pack(self) -> bytes:
        box_bytes = self.scale_at + self.scale_bytes + self.zero_bytes
        sizes = (self.weight_bytes, self.scale_at, self.zero_at, self.stage_bytes, box_bytes)
        return _SHAPE.pack(self.slices, self.units, self.stages, *sizes)


def select_config(
    M: int, N: int, K: int, parts: int, group_bytes: tuple[int, int], sm_count: int, max_shared_bytes: int
) -> Config:
    """Choose the shape of the blocks; pure arithmetic.

    An SM has one block at a time. The time of a block is that of its warps' longest way through K, for each of its
    warps or for as many as it takes to keep the memory busy.

    Parameters
    ----------
    M : int
        At most 16.
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
    tokens = next(n for n in TOKENS if n >= M)
    groups, units_of_n = K // GROUP, -(-N // _UNIT)
    found = []
    for slices in range(2, _MAX_CONSUMERS + 1, 2):
        for units in range(1, min(_MAX_UNITS, _MAX_CONSUMERS // slices) + 1):
            blocks = -(-units_of_n // units)
            columns = slices * units * _UNIT
            sizes = (columns * GROUP // 2, slices * (tokens + 2) * GROUP * 2, *(columns * n for n in group_bytes))
            config = Config(tokens, slices, units, blocks, 0, *sizes, parts)
            stages = min((max_shared_bytes - config.other_bytes) // (config.stage_bytes + 16), _MAX_STAGES)
            if stages < _MIN_STAGES:
                continue
            rounds = -(-blocks // sm_count) * max(1, -(-groups // slices))
            cost = rounds * max(slices * units, _BUSY)
            found.append((cost, slices, replace(config, stages=stages)))
    return min(found, key=lambda entry: entry[:2])[2]


def tensor_maps(device, operands: dict, further: dict, config: Config, sizes: tuple) -> Callable:
    """Return a function from the addresses of a, b, scales and zero points to the kernel's StreamMaps.

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
            TensorMap, dtype=dtypes.numpy(dtype), shape=shape, strides=strides, box=box, swizzle=_SPAN
        )

    describe = [
        in_rows(a.dtype, M, a.row * 2, K * 2, (2 * config.slices, config.tokens + 2)),
        in_rows("uint8", N, b.col, K // 2, (config.slices // 2, columns)),
    ]
    for role in ("scale_b", "zero_b"):
        if x := further.get(role):
            described = map_of(x, (K // GROUP, x.row), (N, x.col), True, config.slices, columns, (1, 1, 1))
            describe.append(functools.partial(described, swizzle=0))

    @functools.lru_cache(maxsize=64)
    def maps(*addresses: int) -> bytes:
        return b"".join(encode(device, describe, addresses)).ljust(4 * 128, b"\0")

    return maps


def movable(x, N: int, K: int) -> bool:
    """Tell whether TMA can move scales or zero points."""
    steps = (x.row if K > GROUP else 0,)
    return x.col == 1 and x.alignment == 0 and all(s >= 0 and s * x.itemsize % 16 == 0 for s in steps)
