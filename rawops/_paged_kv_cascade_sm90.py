"""When a cascade pays, and the host side of paged_cascade_sm90.cu: what sequences have of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rawops import _paged_kv_prefill_sm90 as hopper
from rawops._paged_kv_pool import DTYPES, Pool
from rawops._paged_kv_workspace import Workspace
from rawops._runtime import dtypes
from rawops._runtime.kernel import Function, KernelSpec, ParamStruct

MIN_ROWS = 16  # queries x heads of a group, from where they are worth a launch of their own
_TOKENS, _ROWS = 64, 8  # of a stage, and of a tile of queries
# What the L2 moves in the time that a cascade adds: launches at the same time, or one after the other.
TOGETHER_BYTES, APART_BYTES = 16 << 20, 256 << 20
_CACHE_SPEED = 1.3  # of the L2 over the memory, from where rows of queries read shared pages again
_SHORT = 512  # tokens, which are through before the launch for the common ones
_LOG2_E = 1.4426950408889634
STAGES = {64: 6, 128: 3}  # by head_dim

PARAMS = ParamStruct(
    "CascadeParams",
    **dict.fromkeys(("q", "out", "lse", "prior", "prior_lse", "counters", "block_table", "seq_lens"), "pointer"),
    **dict.fromkeys(("prior_split", "prior_lse_split"), "int64"),
    **dict.fromkeys(("q_row", "q_head", "out_row", "out_head", "out_dim", "table_stride"), "int64"),
    **dict.fromkeys(("batch", "kv_heads", "group", "skipped", "capacity"), "int32"),
    **dict.fromkeys(("page_shift", "page_groups", "num_pages", "parts"), "int32"),
    scale="float32",
)
_TEMPLATE = ("dtype", "head_dim", "stages")
KERNEL = KernelSpec(
    source="paged_cascade_sm90.cu",
    entry="rawops::paged_cascade_sm90",
    template=_TEMPLATE,
    choices={
        "dtype": DTYPES,
        "head_dim": tuple(STAGES),
        "stages": tuple(STAGES.values()),
    },
    smoke=[dict(zip(_TEMPLATE, ("float16", d, STAGES[d]), strict=True)) for d in STAGES],
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
    return rows > 0 and (sequences - rows / 16 / _CACHE_SPEED) * shared_bytes > least


@dataclass(frozen=True)
class Launch:
    """A call whose shapes, strides and options are known: all but the addresses."""

    function: Function
    blocks: int
    threads: int
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
        counters = workspace.zeros(device, hopper.ZEROS) + 4
        packed = PARAMS.pack(
            *(q, out, lse, prior.values, prior.lse, counters, table, lens, prior.split, prior.lse_split),
            *(*self.strides, *self.work, prior.count, self.scale),
        )
        arguments = (self.maps(pages, pages + self.value_bytes), packed)
        self.function.launch((self.blocks, 1, 1), (self.threads, 1, 1), arguments, self.shared_bytes, True)


def plan(device, pool: Pool, q, out_strides: list, scale: float, skipped: int) -> Launch:
    """Lay out what does not change from call to call."""
    head_dim, dtype = pool.head_dim, dtypes.name(q.dtype)
    page, values, token, head, dim, table_stride, num_pages, *_ = pool.numbers
    group = q.shape[1] // pool.num_heads
    stages = STAGES[head_dim]
    q_row, q_head, _ = (s // q.dtype.itemsize for s in q.strides)
    view = hopper.View((num_pages, pool.page_size, pool.num_heads, head_dim), (page, token, head, dim), 0)
    describe = hopper.pages_map(dtype, pool, view, head_dim, _TOKENS, 128)
    return Launch(
        function=KERNEL.kernel(device, dtype=dtype, head_dim=head_dim, stages=stages),
        blocks=min(pool.batch * pool.num_heads, device.sm_count),
        threads=128 + 32,
        shared_bytes=_shared_bytes(head_dim, stages),
        value_bytes=values * q.dtype.itemsize,
        maps=hopper.encoded(device, (describe, describe)),
        strides=(q_row, q_head, *out_strides, table_stride),
        work=(
            *(pool.batch, pool.num_heads, group, skipped, pool.capacity),
            *(pool.page_size.bit_length() - 1, hopper.page_groups(pool), num_pages),
        ),
        scale=scale * _LOG2_E,
    )


def _shared_bytes(head_dim: int, stages: int) -> int:
    """The ring; queries, weights and results; barriers and items; what warps tell each other."""
    tiles = 16 * head_dim + 1024 + _ROWS * (head_dim + 4) * 4
    return stages * _TOKENS * head_dim * 4 + tiles + 16 * (stages + 3) + 48 + 256 + 128 + 32 + 8 * 64
