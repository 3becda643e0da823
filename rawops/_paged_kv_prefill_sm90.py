"""The host side of paged_prefill_sm90.cu: many queries a sequence on Hopper, pages by TMA."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

from rawops import _attention_config as attention
from rawops import _attention_sm90 as contiguous
from rawops._attention_sm90 import View
from rawops._paged_kv_pool import DTYPES, Pool
from rawops._runtime import dtypes
from rawops._runtime.kernel import Function, KernelSpec
from rawops._runtime.tensormap import TensorMap
from rawops._runtime.workspace import Workspace

_GROUP = 8  # rows that are copied together: the swizzle repeats after as many
_ROWS = 64  # of a consumer
ZEROS = 2  # int32 that are 0 between launches, of which the first counts these tiles
_TASKS = 16  # tiles an SM, some of them empty, up to which a long sequence has blocks for all of its tiles

_TEMPLATE = ("dtype", "out_dtype", "head_dim", "consumers", "block_n", "stages", "turns")
KERNEL = KernelSpec(
    source="paged_prefill_sm90.cu",
    entry="rawops::paged_prefill_sm90",
    template=_TEMPLATE,
    choices={
        "dtype": DTYPES,
        "out_dtype": (*DTYPES, "float32"),
        "head_dim": attention.HEAD_DIMS,
        "consumers": (2,),
        "block_n": tuple(range(16, 257, 16)),
        "stages": (2, 3),
        "turns": (False, True),
    },
    smoke=[
        dict(zip(_TEMPLATE, values, strict=True))
        for values in (
            ("float16", "float16", 64, 2, 128, 3, True),
            ("float16", "float16", 128, 2, 128, 2, True),
            ("float16", "float32", 128, 2, 128, 2, True),
            ("bfloat16", "bfloat16", 256, 2, 80, 2, False),
        )
    ],
    min_arch=90,
    max_arch=90,
    params=attention.PARAMS,
)
# Keys of a block and stages in the blocks of paged_cascade_sm90.cu, by head_dim.
BESIDE = {64: (96, 3), 128: (48, 3)}


class Choice(NamedTuple):
    """How the rows of all queries go to blocks: heads side by side in a tile, tiles of a sequence, ranges of keys."""

    config: contiguous.Config
    packed: int
    row_tiles: int
    splits: int
    beside: bool = False  # in blocks of paged_cascade_sm90.cu

    @property
    def cluster(self) -> int:
        """Of blocks there: two whose tiles see the same keys fetch them together."""
        return 2 if self.row_tiles % 2 == 0 else 1


def supports(device, problem: attention.Problem, pool: Pool, views: dict[str, View]) -> bool:
    """Tell whether the kernel can run a problem; `views` has q, out and the keys of the pool."""
    keys = views["k"]
    if not KERNEL.exists_on(device.capability) or problem.score or problem.head_dim % _box_columns(problem.head_dim):
        return False
    if pool.page_size < _GROUP or 0 in keys.shape or not all(map(contiguous.movable, views.values())):
        return False
    page, row, *_ = keys.strides
    return page % (_GROUP * row) == 0 and pool.numbers[6] * (page // (_GROUP * row)) < 2**31


def page_groups(pool: Pool) -> int:
    """Return how many groups of rows lie between two pages."""
    page, _, row, *_ = pool.numbers
    return page // (_GROUP * row)


def _box_columns(head_dim: int) -> int:
    """Return the columns of a box: those of the swizzle."""
    return 64 if attention.padded(head_dim) % 64 == 0 else 32


def select(problem: attention.Problem, sm_count: int, beside: bool = False) -> Choice:
    """Choose the tile, and how many blocks share the work; pure arithmetic on averages, since lengths are not known."""
    config = contiguous.select_config(problem, sm_count, 1)
    config = dataclasses.replace(config, consumers=2)  # with three, registers would not do for the producer
    if config.head_dim == 128:
        config = dataclasses.replace(config, block_n=128)  # into which larger boxes go
    if beside:
        block_n, stages = BESIDE[config.head_dim]
        config = dataclasses.replace(config, block_n=block_n, stages=stages)
    packed = problem.group if _ROWS % problem.group == 0 else 1
    heads, rows = problem.heads // packed, problem.seqlen_q * packed
    average = -(-rows // (problem.batches * config.block_m))
    budget = _TASKS * sm_count // ((problem.batches + 1) * heads)
    row_tiles = min(-(-rows // config.block_m), max(average, budget))
    tiles, splits = problem.batches * heads * average, 1
    if 3 * tiles < 2 * sm_count:
        splits = max(1, min(sm_count // tiles, problem.seqlen_k // (2 * config.block_n), attention.MOST_SPLITS))
    return Choice(config, packed, row_tiles, splits, beside)


def launcher(
    device, problem: attention.Problem, pool: Pool, choice: Choice, out_dtype: str, views: dict[str, View]
) -> Callable[[Workspace, tuple], None]:
    """Return what launches a problem with the values of AttentionParams."""
    config, arguments = choice.config, arguments_of(device, problem, pool, choice, views)
    kernel = _kernel(device, problem.dtype, out_dtype, config)
    blocks, bytes_of_block = min(tiles_of(problem, choice), device.sm_count), shared_bytes(config)

    def launch(workspace: Workspace, values: tuple) -> None:
        kernel.launch((blocks, 1, 1), (config.threads, 1, 1), arguments(workspace, values), bytes_of_block)

    return launch


def arguments_of(
    device, problem: attention.Problem, pool: Pool, choice: Choice, views: dict[str, View]
) -> Callable[[Workspace, tuple], tuple]:
    """Return what makes the arguments of a launch out of the values of AttentionParams."""
    maps = _maps(device, problem, pool, choice, views)
    in_pairs = choice.beside and choice.cluster > 1
    counts = tiles_of(problem, choice) > device.sm_count and not in_pairs
    # a section of all units that have rows, at most: the rows past all sequences come last, when every block has a tile
    units = problem.batches * (problem.heads // choice.packed)
    section = 1 if in_pairs else min(choice.config.section, max(units, 1)) * choice.splits

    def arguments(workspace: Workspace, values: tuple) -> tuple:
        zeros = workspace.zeros(device, ZEROS) if counts else 0
        return maps(*values[:3]), attention.PARAMS.pack(*values), section, zeros

    return arguments


def tiles_of(problem: attention.Problem, choice: Choice) -> int:
    """Return how many tiles there are; the rows past all sequences are one sequence more, if they may exist."""
    sequences = problem.batches + (not choice.beside)
    return sequences * (problem.heads // choice.packed) * choice.row_tiles * choice.splits


def shared_bytes(config: contiguous.Config) -> int:
    """A tile of q, rings of k and v, barriers, and what the producer tells the others."""
    return shared_bytes_of(config.block_m, config.head_dim, config.block_n, config.stages, config.consumers)


def shared_bytes_of(block_m: int, head_dim: int, block_n: int, stages: int, consumers: int) -> int:
    """Do so by its sizes."""
    rows = block_m + 2 * stages * block_n
    return 2 * rows * head_dim + 16 * (2 * stages + consumers) + 3 * (16 + contiguous.TASK_BYTES)


def _kernel(device, dtype: str, out_dtype: str, config: contiguous.Config) -> Function:
    return KERNEL.kernel(
        device,
        dtype=dtype,
        out_dtype=out_dtype,
        head_dim=config.head_dim,
        consumers=config.consumers,
        block_n=config.block_n,
        stages=config.stages,
        turns=config.turns,
    )


def _maps(device, problem: attention.Problem, pool: Pool, choice: Choice, views: dict[str, View]) -> Callable:
    """Return a function from the addresses of q, keys and values to their tensor maps."""
    config = choice.config
    queries = queries_map(problem.dtype, views["q"], _ROWS // choice.packed, choice.packed)
    pages = pages_map(problem.dtype, pool, views["k"], config.head_dim, config.block_n, 128 if choice.beside else 256)
    return encoded(device, (queries, pages, pages))


def queries_map(dtype: str, q: View, rows: int, packed: int) -> Callable[[int], TensorMap]:
    """Return a function from the address of q to its map: boxes of `packed` heads side by side, query after query."""
    size = 2
    _, total, heads, columns = q.shape
    _, row, head, _ = (s * size for s in q.strides)
    box = _box_columns(attention.padded(columns))
    return functools.partial(
        TensorMap,
        dtype=dtypes.numpy(dtype),
        shape=(1, 1, total, heads, columns),
        strides=(16, 16, row if total > 1 else 16, head if heads > 1 else 16, size),
        box=(1, 1, rows, packed, box),
        swizzle=box * size,
    )


def pages_map(
    dtype: str, pool: Pool, keys: View, head_dim: int, block_n: int, promotion: int
) -> Callable[[int], TensorMap]:
    """Return a function from the address of keys or values to their map: boxes of a page, or what divides a block.

    Bytes that come from memory are faster with a `promotion` of 128.
    """
    box = _box_columns(head_dim)
    swizzle, boxes, size = 2 * box, head_dim // box, 2
    num_pages, page_size, kv_heads, _ = keys.shape
    _, row, head, _ = (s * size for s in keys.strides)
    return functools.partial(
        TensorMap,
        dtype=dtypes.numpy(dtype),
        shape=(kv_heads, (num_pages - 1) * page_groups(pool) + page_size // _GROUP, boxes, _GROUP, box),
        strides=(head if kv_heads > 1 else 16, _GROUP * row, swizzle, row, size),
        box=(1, min(page_size, block_n & -block_n) // _GROUP, boxes, _GROUP, box),
        swizzle=swizzle,
        l2_promotion=promotion,
    )


def encoded(device, describe: tuple[Callable[[int], TensorMap], ...]) -> Callable[..., bytes]:
    """Return a function from addresses to the maps of what lies there."""
    encode = TensorMap.encode_emulated if device.is_emulated else TensorMap.encode_driver

    @functools.lru_cache(maxsize=64)
    def maps(*addresses: int) -> bytes:
        return b"".join(encode(d(address)) for d, address in zip(describe, addresses, strict=True))

    return maps
