"""The host side of attention_sm90.cu and attention_sm90_8bit.cu: what TMA can read, which tile, and the launch.

Callers ask `supports` and, if so, keep what `plan` returns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from rawops._attention_config import (
    ALIBI,
    BIAS,
    DROPS,
    FLOAT8,
    HEAD_DIMS,
    L2_BYTES,
    PARAMS,
    SCORES,
    SOFTCAP,
    Problem,
    padded,
    ranges_of,
)
from rawops._runtime import dtypes
from rawops._runtime.kernel import Function, KernelSpec, ParamStruct
from rawops._runtime.tensormap import TensorMap

_ROWS = 64  # of a consumer
_SHORT, _LONG = 1024, 4096  # keys
_KEYS = {64: 128, 96: 176, 128: 128, 192: 112, 256: 80}  # of a block, by the wider head
_KEYS_LONG = 64  # of heads of 128 with long rows
_KEYS_SCORED = {64: 128, 96: 128, 128: 112, 192: 96, 256: 64}
_KEYS_8BIT = {64: 128, 96: 96, 128: 96, 192: 128, 256: 96}
TASK_BYTES = 68  # of an AttentionTask
_ROOM_BYTES = 226 << 10  # of shared memory for operands

_TEMPLATE = ("dtype", "head_dim", "head_dim_v", "consumers", "block_n", "stages", "turns", "score", "out_dtype")
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
        "score": SCORES,
        "out_dtype": ("float16", "bfloat16", "float32"),
    },
    smoke=[
        dict(zip(_TEMPLATE, values, strict=True))
        for values in (
            ("bfloat16", 64, 64, 3, 128, 3, True, 0, "bfloat16"),
            ("float16", 96, 96, 2, 176, 2, True, 0, "float16"),
            ("bfloat16", 128, 128, 2, 128, 2, True, 0, "bfloat16"),
            ("bfloat16", 128, 128, 3, 64, 3, True, 0, "bfloat16"),
            ("bfloat16", 192, 128, 2, 128, 2, True, 0, "bfloat16"),
            ("float16", 256, 256, 2, 80, 2, False, 0, "float16"),
            ("bfloat16", 64, 64, 2, 128, 3, True, ALIBI, "bfloat16"),
            ("bfloat16", 128, 128, 2, 112, 2, True, SOFTCAP, "bfloat16"),
            ("bfloat16", 128, 128, 2, 112, 2, True, BIAS, "float32"),
            ("bfloat16", 128, 128, 2, 112, 2, True, DROPS, "bfloat16"),
            ("float16", 256, 256, 2, 64, 2, False, SOFTCAP | ALIBI | BIAS, "float16"),
        )
    ],
    min_arch=90,
    max_arch=90,
    params=PARAMS,
    spills={"sm_90a": 40},  # of the thread that plans, with three consumers
)


_TEMPLATE_8BIT = ("head_dim", "head_dim_v", "consumers", "block_n", "stages", "turns", "out_dtype")
SM90_8BIT = KernelSpec(
    source="attention_sm90_8bit.cu",
    entry="rawops::attention_sm90_8bit",
    template=_TEMPLATE_8BIT,
    choices={
        **{name: SM90.choices[name] for name in ("head_dim", "head_dim_v", "consumers")},
        "block_n": (64, 96, 128, 160, 192, 224, 256),
        "stages": (2, 3),
        "turns": (False, True),
        "out_dtype": SM90.choices["out_dtype"],
    },
    smoke=[
        dict(zip(_TEMPLATE_8BIT, values, strict=True))
        for values in (
            (64, 64, 3, 128, 3, True, "bfloat16"),
            (96, 96, 3, 96, 3, True, "float16"),
            (128, 128, 3, 96, 3, True, "bfloat16"),
            (192, 128, 2, 128, 2, True, "float32"),
            (256, 256, 2, 96, 2, False, "bfloat16"),
        )
    ],
    min_arch=90,
    max_arch=90,
    params=PARAMS,
    spills={"sm_90a": 8},  # of the thread that plans
)
SCALES = ParamStruct(
    "AttentionScales",
    **dict.fromkeys(("q", "k", "v"), "pointer"),
    **dict.fromkeys(("q_batch", "q_head", "k_batch", "k_head", "v_batch", "v_head"), "int32"),
)


class View(NamedTuple):
    """One of q, k, v and out, with axes (sequences, rows, heads, columns).

    `strides` count elements, `alignment` is the address modulo 16. With cu_seqlens there is one sequence.
    """

    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]
    alignment: int
    itemsize: int = 2


@dataclass(frozen=True)
class Config:
    """Consumers of 64 rows each, keys of a block, how many heads go together to share the L2, ranges of keys."""

    consumers: int
    block_n: int
    stages: int
    turns: bool
    section: int
    head_dim: int
    head_dim_v: int
    splits: int = 1
    itemsize: int = 2

    @property
    def block_m(self) -> int:
        return self.consumers * _ROWS

    @property
    def threads(self) -> int:
        return (1 + self.consumers) * 128

    @property
    def shared_bytes(self) -> int:
        """One tile of q, or two where there is room, rings of k and v, barriers, and what the producer tells others."""
        queries = self.consumers * _ROWS * self.head_dim * self.itemsize
        rings = self.stages * self.block_n * (self.head_dim + self.head_dim_v) * self.itemsize
        if self.itemsize == 1:  # values as they come, and transposed
            rings += self.stages * self.block_n * self.head_dim_v
        stages_results = self.itemsize == 2 and self.consumers == 2
        places = 1 + ((stages_results or self.itemsize == 1) and 2 * queries + rings <= _ROOM_BYTES)
        barriers = 16 * (3 * self.stages + places**2 * self.consumers)
        if self.itemsize == 1:  # what was found in values
            barriers += 8 * self.stages
        more = self.block_n * self.head_dim * self.itemsize  # a stage of keys more, where it has room
        if self.itemsize == 2 and places * queries + rings + more <= _ROOM_BYTES:
            rings, barriers = rings + more, barriers + 16
        return places * queries + rings + barriers + 3 * (16 + TASK_BYTES)


def select_config(problem: Problem, sm_count: int, num_splits: int | None = None) -> Config:
    """Choose the tile, the order of heads and the split; pure arithmetic.

    Where rows are long, three consumers hide more of each other's softmax than two; where they are short or end at a
    diagonal, a good part of their larger tiles is wasted. Scores other than products take registers. Keys are split
    where tiles alone would leave SMs idle.
    """
    d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
    wide, is_plain, itemsize = max(d, dv), not problem.score, 1 if problem.dtype == FLOAT8 else 2
    if itemsize == 1:
        block_n = _KEYS_8BIT[wide]
    else:
        block_n = (_KEYS if is_plain else _KEYS_SCORED)[wide]
        if wide == 192 and dv <= 128:
            block_n += 16
    consumers = 3 if wide <= (64 if itemsize == 2 else 128) and is_plain else 2
    if wide == 128 and itemsize == 2 and is_plain and _has_long_rows(problem, sm_count):
        consumers, block_n = 3, _KEYS_LONG
    section = section_of(problem.seqlen_k, (d + dv) * itemsize // 2) * problem.group
    if problem.seqlen_k <= _SHORT:
        # A first tile that reads all of its head's keys from memory takes longer than one that finds them in the L2
        # or on their way there: all tiles of a head at a time, or, longest first, those of a KV head for two SMs.
        heads = -(-sm_count // max(1, -(-problem.seqlen_q // (consumers * _ROWS))))
        heads = -(-heads // problem.group) if not problem.is_masked else max(1, sm_count // 2)
        section = min(section, heads * problem.group)
    stages = 3 if wide == 64 or consumers == 3 else 2
    config = Config(consumers, block_n, stages, wide < 256, section, d, dv, itemsize=itemsize)
    steps = -(-problem.seqlen_k // block_n)
    return replace(config, splits=ranges_of(num_splits, _tiles(problem, config), steps, sm_count))


def _has_long_rows(problem: Problem, sm_count: int) -> bool:
    """Tell whether heads of 128 pass so many keys that tiles of 192 rows are faster than those of 128.

    They take a twelfth less time a row. Equal tiles are no faster if the last wave of them is mostly empty; under
    causality, a counter evens it out.
    """
    if problem.varlen or min(problem.window_left, problem.seqlen_k) < problem.seqlen_k:
        return False
    if problem.is_masked:
        return problem.seqlen_k >= 4 * _LONG

    def rows(consumers: int) -> int:
        tiles = problem.batches * problem.heads * -(-problem.seqlen_q // (consumers * _ROWS))
        return -(-tiles // sm_count) * consumers * _ROWS

    return problem.seqlen_k >= _LONG and 20 * rows(3) <= 21 * rows(2)


def section_of(rows: int, columns: int) -> int:
    """Return how many KV heads go together, of whose operands that many rows and columns of 16 bits stay in the L2."""
    return max(1, L2_BYTES // max(rows * columns * 2, 1))


def supports(device, problem: Problem, views: Mapping[str, View]) -> bool:
    """Tell whether the kernel can run a problem, and is the one to do so: Hopper, many rows.

    Parameters
    ----------
    device : Device
    problem : Problem
    views : mapping of str to View
        "q", "k", "v" and "out".
    """
    is_wide = problem.dtype != FLOAT8
    if not SM90.exists_on(device.capability) or problem.dtype not in (*SM90.choices["dtype"], FLOAT8):
        return False
    if problem.score not in (SM90.choices["score"] if is_wide else (0,)):
        return False
    quantum = 16 // views["q"].itemsize
    if problem.head_dim % quantum or problem.head_dim_v % quantum or not all(movable(x) for x in views.values()):
        return False
    if not (problem.head_dim and problem.head_dim_v and views["k"].shape[1]):  # no tensor map has a size of 0
        return False
    return problem.seqlen_q > _ROWS or not is_wide


@dataclass(frozen=True)
class Plan:
    """A launch ready but for its pointers."""

    config: Config
    row_tiles: int
    kernel: Function
    grid: tuple[int, int, int]
    maps: Callable[..., tuple[bytes, ...]]  # from the addresses of q, k, v and out
    wants_counter: bool
    early: bool  # it may begin while the launch before still runs, for which the kernel waits

    def run(self, q: int, k: int, v: int, out: int, params: bytes, scales: bytes, taken: int) -> None:
        """Launch; `params` is the AttentionParams that all attention kernels take, `taken` a counter's address or 0.

        `scales` are AttentionScales with float8, else nothing.
        """
        values = (*self.maps(q, k, v, out), params, *([scales] if scales else []), self.config.section, taken)
        self.kernel.launch(self.grid, (self.config.threads, 1, 1), values, self.config.shared_bytes, self.early)


def plan(device, problem: Problem, views: Mapping[str, View], out_dtype: str, num_splits: int | None) -> Plan:
    """Prepare a problem that `supports` accepts; the same arguments.

    The shape in the parameters has the plan's ``row_tiles`` and ``config.splits``, and 1 for ``packed``. With more than
    one split, out and lse are float32, a part after the other.
    """
    config = select_config(problem, device.sm_count, num_splits)
    choices = {name: getattr(config, name) for name in _TEMPLATE_8BIT[:-1]}
    choices["out_dtype"] = out_dtype if config.splits == 1 else "float32"
    if config.itemsize == 1:
        kernel = SM90_8BIT.kernel(device, **choices)
    else:
        kernel = SM90.kernel(device, **choices, dtype=problem.dtype, score=problem.score)
    # Where keys are few the memory has most to do, and it is faster if the L2 asks for no more than it must.
    promotion = 0 if problem.seqlen_k <= _SHORT else 256
    describe = [
        map_of(problem.dtype, views["q"], _ROWS, config.head_dim, promotion),
        map_of(problem.dtype, views["k"], config.block_n, config.head_dim, promotion),
        map_of(problem.dtype, views["v"], config.block_n, config.head_dim_v, promotion),
    ]
    if config.itemsize == 2:  # float8 leaves by itself
        whole = views["out"] if config.splits == 1 else views["q"]  # the latter for want of anything to describe
        describe.append(map_of(problem.dtype, whole, _ROWS, config.head_dim_v))
    encode = TensorMap.encode_emulated if device.is_emulated else TensorMap.encode_driver

    @functools.lru_cache(maxsize=64)
    def maps(*addresses: int) -> tuple[bytes, ...]:
        q, k, v, *out = (encode(d(address)) for d, address in zip(describe, addresses, strict=False))
        return q + k + v, *out

    tiles = _tiles(problem, config) * config.splits
    blocks = min(tiles, device.sm_count)
    # Of two tiles a block, there and back is as good an order as any, and equal ones need none.
    uneven = (problem.is_masked or problem.varlen) and tiles > 2 * blocks
    # If every SM gets a block, they may come to SMs that are done with the launch before.
    early = blocks == device.sm_count
    return Plan(config, _row_tiles(problem, config), kernel, (blocks, 1, 1), maps, uneven, early)


def _row_tiles(problem: Problem, config: Config) -> int:
    return max(1, -(-problem.seqlen_q // config.block_m))


def _tiles(problem: Problem, config: Config) -> int:
    sequences = problem.batches + problem.varlen  # the last one stands for the rows past all sequences
    return sequences * problem.heads * _row_tiles(problem, config)


def movable(x: View) -> bool:
    """Tell whether TMA can read a tensor, and threads write it 16 bytes at a time."""
    steps = [stride * x.itemsize for extent, stride in zip(x.shape[:3], x.strides[:3], strict=True) if extent > 1]
    return x.strides[3] == 1 and x.alignment == 0 and all(0 < s < 2**40 and s % 16 == 0 for s in steps)


def map_of(dtype: str, x: View, rows: int, head_dim: int, l2_promotion: int = 256) -> Callable[[int], TensorMap]:
    """Return a function from a tensor's address to its map, whose boxes are `rows` rows of one head."""
    swizzle = next(span for span in (128, 64, 32) if head_dim * x.itemsize % span == 0)
    sequences, length, heads, columns = x.shape
    # an axis of one entry may have any stride, which the driver would not take
    steps = [s * x.itemsize if n > 1 else 16 for n, s in zip(x.shape[:3], x.strides[:3], strict=True)]
    return functools.partial(
        TensorMap,
        dtype=dtypes.numpy(dtype),
        shape=(1, sequences, heads, length, columns),
        strides=(16, steps[0], steps[2], steps[1], x.itemsize),
        box=(1, 1, 1, rows, swizzle // x.itemsize),
        swizzle=swizzle,
        l2_promotion=l2_promotion,
    )
