"""The host side of attention_sm90.cu: what TMA can read, which tile, and the launch.

Callers ask `supports` and, if so, keep what `plan` returns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rawops._attention_config import HEAD_DIMS, PARAMS, Problem, padded
from rawops._runtime import dtypes
from rawops._runtime.kernel import Function, KernelSpec
from rawops._runtime.tensormap import TensorMap

_ROWS = 64  # of a consumer
_ITEMSIZE = 2
_LONG = 4096  # keys
_BLOCK_BYTES = 36  # of an AttentionBlock
_L2_BYTES = 32 << 20  # of keys and values that stay in the L2 while a section of heads is at work

_TEMPLATE = ("dtype", "head_dim", "head_dim_v", "consumers", "block_n", "stages", "turns")
SM90 = KernelSpec(
    source="attention_sm90.cu",
    entry="rawops::attention_sm90",
    template=_TEMPLATE,
    choices={
        "dtype": ("float16", "bfloat16"),
        "head_dim": HEAD_DIMS,
        "head_dim_v": HEAD_DIMS,
        "consumers": (2, 3),
        "block_n": tuple(range(16, 257, 16)),
        "stages": (2, 3),
        "turns": (False, True),
    },
    smoke=[
        dict(zip(_TEMPLATE, values, strict=True))
        for values in (
            ("bfloat16", 64, 64, 3, 128, 2, True),
            ("float16", 96, 96, 2, 176, 2, True),
            ("bfloat16", 128, 128, 2, 128, 2, True),
            ("bfloat16", 128, 128, 2, 176, 2, True),
            ("bfloat16", 192, 128, 2, 128, 2, True),
            ("float16", 256, 256, 2, 80, 2, False),
        )
    ],
    min_arch=90,
    max_arch=90,
    params=PARAMS,
)


class View(NamedTuple):
    """One of q, k, v and out, with axes (sequences, rows, heads, columns).

    `strides` count elements, `alignment` is the address modulo 16. With cu_seqlens there is one sequence.
    """

    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]
    alignment: int


@dataclass(frozen=True)
class Config:
    """Consumers of 64 rows each, keys of a block, and how many heads go together to share the L2."""

    consumers: int
    block_n: int
    stages: int
    turns: bool
    section: int
    head_dim: int
    head_dim_v: int

    @property
    def block_m(self) -> int:
        return self.consumers * _ROWS

    @property
    def threads(self) -> int:
        return (1 + self.consumers) * 128

    @property
    def shared_bytes(self) -> int:
        """The tile of q, the rings of k and v, the barriers, and what the producer tells the consumers."""
        rings = self.stages * (self.block_n * (self.head_dim + self.head_dim_v) * _ITEMSIZE + 32)
        return self.block_m * self.head_dim * _ITEMSIZE + rings + 48 + 2 * _BLOCK_BYTES


def select_config(problem: Problem) -> Config:
    """Choose the tile and the order of heads; pure arithmetic.

    More keys at a time pay where rows are long; where they are short or end at a diagonal, a good part of them is
    wasted.
    """
    d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
    wide = max(d, dv)
    if wide == 128:
        block_n = 176 if problem.seqlen_k >= _LONG and not problem.is_masked else 128
    else:
        block_n = {64: 128, 96: 176, 192: 128 if dv <= 128 else 112, 256: 80}[wide]
    section = section_of(problem.seqlen_k, d + dv) * problem.group
    return Config(3 if wide == 64 else 2, block_n, 2, wide < 256, section, d, dv)


def section_of(rows: int, columns: int) -> int:
    """Return how many KV heads go together, of whose operands that many rows and columns stay in the L2."""
    return max(1, _L2_BYTES // max(rows * columns * _ITEMSIZE, 1))


def supports(device, problem: Problem, views: Mapping[str, View], splits: int) -> bool:
    """Tell whether the kernel can run a problem, and is the one to do so: Hopper, 16 bits, plain scores, many rows.

    Parameters
    ----------
    device : Device
    problem : Problem
    views : mapping of str to View
        "q", "k", "v" and "out".
    splits : int
        Ranges of keys that another kernel would have blocks of their own for.
    """
    if not SM90.exists_on(device.capability) or problem.score or problem.dtype not in SM90.choices["dtype"]:
        return False
    if problem.head_dim % 8 or problem.head_dim_v % 8 or not all(movable(view) for view in views.values()):
        return False
    few = 3 * _tiles(problem, select_config(problem)) < 2 * device.sm_count
    return problem.seqlen_q > _ROWS and problem.seqlen_k > 0 and not (few and splits > 1)


@dataclass(frozen=True)
class Plan:
    """A launch ready but for its pointers."""

    config: Config
    row_tiles: int
    kernel: Function
    grid: tuple[int, int, int]
    maps: Callable[[int, int, int], bytes]  # from the addresses of q, k and v
    wants_counter: bool

    def run(self, q: int, k: int, v: int, params: bytes, taken: int) -> None:
        """Launch; `params` is the AttentionParams that all attention kernels take, `taken` a counter's address or 0."""
        values = (self.maps(q, k, v), params, self.config.section, taken)
        self.kernel.launch(self.grid, (self.config.threads, 1, 1), values, self.config.shared_bytes)


def plan(device, problem: Problem, views: Mapping[str, View]) -> Plan:
    """Prepare a problem that `supports` accepts; the same arguments.

    The shape in the parameters has the plan's ``row_tiles``, and 1 for ``packed`` and ``splits``.
    """
    config = select_config(problem)
    kernel = SM90.kernel(
        device,
        dtype=problem.dtype,
        head_dim=config.head_dim,
        head_dim_v=config.head_dim_v,
        consumers=config.consumers,
        block_n=config.block_n,
        stages=config.stages,
        turns=config.turns,
    )
    describe = [
        map_of(problem.dtype, views["q"], _ROWS, config.head_dim),
        map_of(problem.dtype, views["k"], config.block_n, config.head_dim),
        map_of(problem.dtype, views["v"], config.block_n, config.head_dim_v),
    ]
    encode = TensorMap.encode_emulated if device.is_emulated else TensorMap.encode_driver

    @functools.lru_cache(maxsize=64)
    def maps(*addresses: int) -> bytes:
        return b"".join(encode(d(address)) for d, address in zip(describe, addresses, strict=True))

    tiles = _tiles(problem, config)
    blocks = min(tiles, device.sm_count)
    # Of two tiles a block, there and back is as good an order as any, and equal ones need none.
    uneven = (problem.is_masked or problem.varlen) and tiles > 2 * blocks
    return Plan(config, -(-problem.seqlen_q // config.block_m), kernel, (blocks, 1, 1), maps, uneven)


def _tiles(problem: Problem, config: Config) -> int:
    sequences = problem.batches + problem.varlen  # the last one stands for the rows past all sequences
    return sequences * problem.heads * -(-problem.seqlen_q // config.block_m)


def movable(x: View) -> bool:
    """Tell whether TMA can read a tensor, and threads write it 16 bytes at a time."""
    steps = [stride * _ITEMSIZE for extent, stride in zip(x.shape[:3], x.strides[:3], strict=True) if extent > 1]
    return x.strides[3] == 1 and x.alignment == 0 and all(0 < s < 2**40 and s % 16 == 0 for s in steps)


def map_of(dtype: str, x: View, rows: int, head_dim: int) -> Callable[[int], TensorMap]:
    """Return a function from a tensor's address to its map, whose boxes are `rows` rows of one head."""
    swizzle = 128 if head_dim % 64 == 0 else 64
    sequences, length, heads, columns = x.shape
    # an axis of one entry may have any stride, which the driver would not take
    steps = [s * _ITEMSIZE if n > 1 else 16 for n, s in zip(x.shape[:3], x.strides[:3], strict=True)]
    return functools.partial(
        TensorMap,
        dtype=dtypes.numpy(dtype),
        shape=(1, sequences, heads, length, columns),
        strides=(16, steps[0], steps[2], steps[1], _ITEMSIZE),
        box=(1, 1, 1, rows, swizzle // _ITEMSIZE),
        swizzle=swizzle,
    )
