"""When a cascade pays, and the host side of paged_cascade_sm90.cu."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from rawops import _paged_kv_prefill_sm90 as hopper
from rawops._paged_kv_pool import DTYPES, Pool
from rawops._runtime import dtypes
from rawops._runtime.kernel import Function, KernelSpec, ParamStruct
from rawops._runtime.workspace import Workspace

MIN_ROWS = 16  # queries x heads of a group, from where it pays that one launch reads both
_TOKENS, _ROWS = 64, 8  # of a stage, and of a tile of queries
# What the L2 moves in the time that a cascade adds: both in one launch, or one launch after the other.
TOGETHER_BYTES, APART_BYTES = 16 << 20, 256 << 20
_CACHE_SPEED = 1.3  # of the L2 over the memory, from where rows of queries read shared pages again
_SHORT = 512  # tokens, which are through before the common ones
_LOG2_E = 1.4426950408889634
STAGES = {64: 6, 128: 3}  # of what sequences have of their own, by head_dim
_JOINING = 256  # threads

PARAMS = ParamStruct(
    "CascadeParams",
    **dict.fromkeys(("out", "lse", "partial", "partial_lse", "taken", "block_table", "seq_lens"), "pointer"),
    **dict.fromkeys(("split", "lse_split"), "int64"),
    **dict.fromkeys(("out_row", "out_head", "out_dim", "table_stride"), "int64"),
    **dict.fromkeys(("batch", "kv_heads", "group", "skipped", "capacity"), "int32"),
    **dict.fromkeys(("page_shift", "page_groups", "num_pages", "parts"), "int32"),
    scale="float32",
)
_TEMPLATE = ("dtype", "head_dim", "block_n", "stages", "own_stages", "cluster")
KERNEL = KernelSpec(
    source="paged_cascade_sm90.cu",
    entry="rawops::paged_cascade_sm90",
    template=_TEMPLATE,
    choices={
        "dtype": DTYPES,
        "head_dim": tuple(STAGES),
        "block_n": tuple(n for n, _ in hopper.BESIDE.values()),
        "stages": tuple(stages for _, stages in hopper.BESIDE.values()),
        "own_stages": tuple(STAGES.values()),
        "cluster": (1, 2),
    },
    smoke=[
        dict(zip(_TEMPLATE, ("float16", d, *hopper.BESIDE[d], STAGES[d], cluster), strict=True))
        for d in STAGES
        for cluster in (1, 2)
    ],
    min_arch=90,
    max_arch=90,
    params=PARAMS,
)
JOIN = KernelSpec(
    source="paged_cascade_sm90.cu",
    entry="rawops::paged_cascade_join",
    template=_TEMPLATE[:2],
    choices={"dtype": DTYPES, "head_dim": tuple(STAGES)},
    smoke=[{"dtype": "float16", "head_dim": d} for d in STAGES],
    min_arch=90,
    max_arch=90,
    params=PARAMS,
)


def takes(head_dim: int, group: int) -> bool:
    """Tell whether the kernel has an instance for such heads, where the one for the common keys runs."""
    return head_dim in STAGES and group <= _ROWS


def rows_of(q, num_heads: int) -> int:
    """Return how many rows of queries there are for a KV head; 0 where q is none."""
    return q.shape[0] * (q.shape[1] // num_heads) if getattr(q, "ndim", None) == 3 else 0


def overlaps(device, own: list[int], num_heads: int, head_dim: int, rows: int) -> bool:
    """Tell whether `own` tokens of sequences go at the same time as `rows` rows of queries over what they share."""
    if rows < MIN_ROWS or not takes(head_dim, rows // len(own)) or not KERNEL.exists_on(device.capability):
        return False
    # no item is much longer than what a block has to do anyway, since an item has one block
    return max(own) <= max(2 * sum(own) * num_heads // device.sm_count, _SHORT)


def saves(sequences: int, rows: int, shared_bytes: int, together: bool) -> bool:
    """Tell whether reading shared pages once for 16 rows of queries saves more than the launches cost."""
    least = TOGETHER_BYTES if together else APART_BYTES
    return rows > 0 and (sequences - max(1, rows / 16 / _CACHE_SPEED)) * shared_bytes > least  # once in any case


@dataclass(frozen=True)
class Launch:
    """A call whose shapes, strides and options are known: all but the addresses."""

    function: Callable[[int], Function]  # by how many blocks work together
    join: Function
    items: int
    joined: int
    shared_bytes: int
    value_bytes: int
    maps: Callable
    strides: tuple
    work: tuple
    scale: float
    copies_q: bool = False

    def run(self, device, addresses: tuple, workspace: Workspace, prior) -> None:
        """Launch with the addresses of q, out, lse, and of the others in the order of the op."""
        q, out, lse, pages, table, lens, *_ = addresses
        tiles, cluster, (maps, common, section, taken) = prior.pending
        packed = PARAMS.pack(
            *(out, lse, prior.values, prior.lse, workspace.zeros(device, hopper.ZEROS) + 4, table, lens),
            *(prior.split, prior.lse_split, *self.strides, *self.work, prior.count, self.scale),
        )
        arguments = (maps + self.maps(q, pages, pages + self.value_bytes), common, packed, section, taken)
        blocks = max(min(max(tiles, self.items), device.sm_count) // cluster, 1) * cluster
        self.function(cluster).launch((blocks, 1, 1), (512, 1, 1), arguments, self.shared_bytes, True)
        self.join.launch((self.joined, 1, 1), (_JOINING, 1, 1), (packed,), 0, True)


def plan(device, pool: Pool, q, out_strides: list, scale: float, skipped: int) -> Launch:
    """Lay out what does not change from call to call."""
    head_dim, dtype = pool.head_dim, dtypes.name(q.dtype)
    page, values, token, head, dim, table_stride, num_pages, *_ = pool.numbers
    group = q.shape[1] // pool.num_heads
    block_n, stages = hopper.BESIDE[head_dim]
    choices = {"dtype": dtype, "head_dim": head_dim}
    sizes = {"block_n": block_n, "stages": stages, "own_stages": STAGES[head_dim]}
    q_row, q_head, _ = (s // q.dtype.itemsize for s in q.strides)
    view = hopper.View((num_pages, pool.page_size, pool.num_heads, head_dim), (page, token, head, dim), 0)
    queries = hopper.View((1, *q.shape), (0, q_row, q_head, 1), 0)
    describe = hopper.pages_map(dtype, pool, view, head_dim, _TOKENS, 128)
    return Launch(
        function=functools.cache(lambda cluster: KERNEL.kernel(device, **choices, **sizes, cluster=cluster)),
        join=JOIN.kernel(device, **choices),
        items=pool.batch * pool.num_heads,
        joined=-(-pool.batch * q.shape[1] * head_dim // (4 * _JOINING)),
        shared_bytes=_shared_bytes(head_dim, block_n, stages),
        value_bytes=values * q.dtype.itemsize,
        maps=hopper.encoded(device, (hopper.queries_map(dtype, queries, 1, group), describe, describe)),
        strides=(*out_strides, table_stride),
        work=(
            *(pool.batch, pool.num_heads, group, skipped, pool.capacity),
            *(pool.page_size.bit_length() - 1, hopper.page_groups(pool), num_pages),
        ),
        scale=scale * _LOG2_E,
    )


def _shared_bytes(head_dim: int, block_n: int, stages: int) -> int:
    """Of the common keys as for a prefill; a ring; queries and weights; barriers, items, and other words."""
    common = hopper.shared_bytes_of(128, head_dim, block_n, stages, 2)
    own, tiles = STAGES[head_dim], 3 * 16 * head_dim + 1024
    return -(-common // 1024) * 1024 + own * _TOKENS * head_dim * 4 + tiles + 16 * (own + 3) + 48 + 256 + 256
