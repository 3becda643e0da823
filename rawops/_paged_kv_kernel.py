"""The host side of paged_attention.cu: its instances, and what one launch is told."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from rawops._paged_kv_pool import DTYPES, KV_DTYPES, POOL_FIELDS, Pool
from rawops._paged_kv_prefill import NO_PARTS, Parts
from rawops._runtime import checks, dtypes
from rawops._runtime.kernel import KernelSpec, ParamStruct
from rawops._runtime.workspace import Workspace

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
_LOG2_E = 1.4426950408889634
_ROWS = 16  # of an item: one MMA
_SM_RESERVED = 1024  # bytes of shared memory that the system takes for each block
_MAX_STAGES = 6
_MANY_BLOCKS = 16  # that share an item, from where they are made larger

PARAMS = ParamStruct(
    "PagedParams",
    **dict.fromkeys(("q", "out", "lse", "partial", "prior", "prior_lse"), "pointer"),
    **dict.fromkeys(("prior_split", "prior_lse_split"), "int64"),
    **dict.fromkeys(("q_row", "q_head", "out_row", "out_head", "out_dim", "lse_head", "lse_row"), "int64"),
    **POOL_FIELDS,
    **dict.fromkeys(("seq_lens", "cu_seqlens_q"), "pointer"),
    **dict.fromkeys(("batch", "total_q", "kv_heads", "group", "window_left", "window_right"), "int32"),
    **dict.fromkeys(("num_splits", "row_tiles", "skipped", "prior_parts"), "int32"),
    **dict.fromkeys(("scale", "softcap"), "float32"),
    alibi_slopes="pointer",
)


@dataclass(frozen=True)
class Config:
    """How a block is made: its warps, the stages of each warp's ring, and how many blocks an SM holds."""

    warps: int
    stages: int
    blocks: int

    def shared_bytes(self, head_dim: int, kv_dtype: str) -> int:
        """Dynamic shared memory: the rings, and each warp's sums of a few rows."""
        return self.warps * (self.stages * _stage_bytes(head_dim, kv_dtype) + _spare_bytes(head_dim, kv_dtype))


def _stage_bytes(head_dim: int, kv_dtype: str) -> int:
    """Of 16 tokens with 16-bit keys and values, or 32 with 8-bit ones and their scales."""
    return 64 * head_dim + (256 if dtypes.itemsize(kv_dtype) == 1 else 0)


def _spare_bytes(head_dim: int, kv_dtype: str) -> int:
    """Of float32 sums: SPARE_ROWS in paged_attention.cu."""
    return 16 * head_dim if head_dim <= 128 and dtypes.itemsize(kv_dtype) > 1 else 0


def select_config(head_dim: int, kv_dtype: str, rows: int, is_shared: bool, max_shared_bytes: int) -> Config:
    """Choose the most stages that leave an SM two blocks, or one where two would have no ring.

    Two blocks of four warps keep the memory busy while one of them is between items. Where many blocks share each item,
    or an item has two SMs or two KV heads, they are few and large, so that there is less to put together at the end.
    Bytes take so much longer to multiply that they need six warps. Both only where a warp has no more than 8 rows,
    which leaves it registers.
    """
    static = 48 * head_dim + 2640  # queries, lengths, and what warps and blocks tell each other
    wanted = [(4, 2), (4, 1), (2, 1)]
    if rows == 8 and dtypes.itemsize(kv_dtype) == 1:
        wanted = [(6, 2), *wanted]
    if rows == 8 and is_shared:
        wanted = [(12, 1), *wanted]
    for warps, blocks in wanted:
        each = (max_shared_bytes + _SM_RESERVED) // blocks - _SM_RESERVED - static
        each -= warps * _spare_bytes(head_dim, kv_dtype)
        stages = min(each // (warps * _stage_bytes(head_dim, kv_dtype)), _MAX_STAGES)
        if stages >= 2:
            return Config(warps, stages, blocks)
    raise AssertionError(f"no ring for head_dim {head_dim} in {max_shared_bytes} bytes")


_CHOICES = {
    "dtype": DTYPES,
    "kv_dtype": KV_DTYPES,
    "head_dim": HEAD_DIMS,
    "access": (16, 2, 1),
    "rows": (8, 16),
    "warps": (12, 6, 4, 2),
    "stages": tuple(range(2, _MAX_STAGES + 1)),
    "blocks": (1, 2),
    "ragged": (False, True),
    "heads": (1, 2),
}


def _smoke(
    head_dim: int,
    dtype: str = "float16",
    access: int = 16,
    ragged: bool = False,
    kv_dtype: str = "",
    is_shared: bool = False,
    heads: int = 1,
) -> dict:
    kv_dtype = kv_dtype or dtype
    rows = 16 if ragged else 8
    config = select_config(head_dim, kv_dtype, rows, is_shared, 232448)
    choices = {"dtype": dtype, "kv_dtype": kv_dtype, "head_dim": head_dim, "access": access, "ragged": ragged}
    return choices | {"rows": rows, "heads": heads} | dataclasses.asdict(config)


KERNEL = KernelSpec(
    source="paged_attention.cu",
    entry="rawops::paged_attention",
    template=tuple(_CHOICES),
    choices=_CHOICES,
    smoke=[
        *(_smoke(d) for d in (64, 128, 256)),
        _smoke(128, "bfloat16"),
        _smoke(128, ragged=True),
        _smoke(128, access=2),
        _smoke(128, kv_dtype="float8_e4m3fn"),
        _smoke(128, kv_dtype="float8_e4m3fn", heads=2, is_shared=True),
        _smoke(128, "bfloat16", kv_dtype="int8", heads=2, is_shared=True),
        _smoke(128, is_shared=True),
    ],
    params=PARAMS,
)
_IN_CLUSTERS = ("dtype", "head_dim", "access", "warps", "stages", "blocks", "cluster")
CLUSTERS = KernelSpec(
    source="paged_attention.cu",
    entry="rawops::paged_attention_in_clusters",
    template=_IN_CLUSTERS,
    choices={name: _CHOICES[name] for name in _IN_CLUSTERS[:-1]} | {"head_dim": HEAD_DIMS[:4], "cluster": (2,)},
    smoke=[
        {name: choice for name, choice in _smoke(d, is_shared=shared).items() if name in _IN_CLUSTERS} | {"cluster": 2}
        for d, shared in ((64, False), (128, False), (128, True))
    ],
    min_arch=90,
    params=PARAMS,
)
_CLUSTER_ROWS = 4  # SPARE_ROWS in paged_attention.cu
_MUCH = 3 << 19  # bytes for each SM to read, from where two KV heads share an item
_LONG = 768  # tokens, from where 12 warps on each of two SMs have enough to do


@dataclass(frozen=True)
class Options:
    """What a call asks for beside its arrays, checked.

    Attributes
    ----------
    skipped : int
        Keys of each sequence that come before its row of the block table.
    parts : bool
        Leave partial results.
    beside : bool
        One launch is to read the common keys of a cascade and the rest.
    """

    scale: float | None  # 1 / sqrt(head_dim)
    softcap: float
    window: tuple[int, int]
    num_splits: int
    skipped: int = 0
    parts: bool = False
    beside: bool = False


@dataclass(frozen=True)
class Launch:
    """A call whose shapes, strides and options are known: all but the addresses."""

    function: object
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    partial_floats: int
    strides: tuple
    pool: tuple
    work: tuple
    rule: tuple
    copies_q: bool  # q has columns or rows off the 4-byte boundaries

    def run(self, device, addresses: tuple, workspace: Workspace, prior: Parts = NO_PARTS) -> None:
        """Launch with the addresses of q, out, lse, and of the others as _paged_kv_attention.py has them."""
        q, out, lse, pages, table, lens, cu, slopes, *scales = addresses
        partial = workspace.shares(device, self.partial_floats)
        packed = PARAMS.pack(
            *(q, out, lse, partial, *prior[:4], *self.strides, pages, table, *scales, *self.pool, lens, cu),
            *(*self.work, prior.count, *self.rule, slopes),
        )
        self.function.launch(self.grid, self.block, (packed,), self.shared_bytes, early=True)


def plan(
    device,
    function: str,
    pool: Pool,
    scales: tuple,
    q,
    out_strides: list[int],
    options: Options,
    scale: float,
    q_address: int,
    ragged: bool,
) -> Launch:
    """Choose the instance and the grid, and lay out what does not change from call to call."""
    total_q, heads, head_dim = q.shape
    group = heads // pool.num_heads
    padded = next(d for d in HEAD_DIMS if d >= head_dim)
    together = _heads_of_item(device, pool, group, ragged)
    kv_heads, group = pool.num_heads // together, group * together
    rows = 8 if group <= 8 and not ragged else _ROWS
    may_cluster = not ragged and not options.num_splits and padded <= 128 and pool.dtype in DTYPES
    may_cluster = may_cluster and group <= _CLUSTER_ROWS and CLUSTERS.exists_on(device.capability)
    is_shared = not options.num_splits and _is_shared(device, pool, kv_heads, -(-group // rows), may_cluster)
    tile = select_config(padded, pool.dtype, rows, is_shared or together > 1, device.max_shared_bytes)
    choices = {"dtype": dtypes.name(q.dtype), "kv_dtype": pool.dtype, "head_dim": padded}
    choices |= {"access": pool.access, "ragged": ragged, "rows": rows, "heads": together} | dataclasses.asdict(tile)
    row_tiles = -(-total_q * group // _ROWS) + pool.batch if ragged else -(-group // _ROWS) * pool.batch
    items, tiles = kv_heads * row_tiles, max(-(-pool.capacity // 16), 1)
    _check_tiles(function, items * tiles)
    splits = min(options.num_splits, tiles)
    blocks = items * splits or max(min(device.sm_count * tile.blocks, items * tiles // tile.warps), 1)
    kernel = KERNEL
    if may_cluster and _in_pairs(blocks, items):
        kernel, blocks = CLUSTERS, 2 * items
        choices = {name: choices[name] for name in _IN_CLUSTERS[:-1]} | {"cluster": 2}
    q_strides, copies_q = _query_strides(q, q_address)
    work = (pool.batch, total_q, kv_heads, group, *options.window, splits, -(-group // _ROWS))
    return Launch(
        function=kernel.kernel(device, **choices),
        grid=(blocks, 1, 1),
        block=(32 * tile.warps, 1, 1),
        shared_bytes=tile.shared_bytes(padded, pool.dtype),
        partial_floats=2 * blocks * _ROWS * (padded + 2),
        strides=(*q_strides, *out_strides, total_q, 1),
        pool=(*scales, *pool.numbers),
        work=(*work, options.skipped),
        rule=(scale * _LOG2_E, options.softcap),
        copies_q=copies_q,
    )


def _check_tiles(function: str, count: int) -> None:
    if count >= 2**31:
        rule = "keep KV heads x groups of 16 rows x tiles of 16 keys below 2**31"
        checks.fail(ValueError, function, "q", rule, count, "Split the queries among several calls.")


def _query_strides(q, address: int) -> tuple[tuple[int, int], bool]:
    """Return the strides of rows and heads, and whether they are those of a copy that can be read in pairs."""
    row, head, dim = (s // q.dtype.itemsize for s in q.strides)
    _, heads, head_dim = q.shape
    if dim == 1 and address % 4 == 0 and not any(x % 2 for x in (head_dim, row, head)):
        return (row, head), False
    even = head_dim + head_dim % 2
    return (heads * even, even), True


def _heads_of_item(device, pool: Pool, group: int, ragged: bool) -> int:
    """Return how many KV heads share an item: two where a row of bytes is short and another one lies beside it.

    There are half as many items then, and more blocks to put each together, which takes longer where there is little to
    read.
    """
    is_short = dtypes.itemsize(pool.dtype) == 1 and pool.head_dim <= 128
    can_share = is_short and pool.has_neighbours and pool.num_heads % 2 == 0 and group <= 4 and not ragged
    total = 2 * pool.batch * pool.capacity * pool.num_heads * pool.head_dim
    return 2 if can_share and total >= _MUCH * device.sm_count else 1


def _is_shared(device, pool: Pool, kv_heads: int, row_tiles: int, may_cluster: bool) -> bool:
    """Tell whether so many blocks share an item, or two SMs a long one, that larger blocks are better."""
    items = pool.batch * kv_heads
    if 2 * device.sm_count // max(items * row_tiles, 1) > _MANY_BLOCKS:
        return True
    return may_cluster and pool.head_dim > 96 and pool.capacity >= _LONG and _in_pairs(device.sm_count, items)


def _in_pairs(places: int, items: int) -> bool:
    """Tell whether two blocks an item take nearly all places, as the kernel finds it too."""
    return places // max(items, 1) == 2 and 2 * items >= places - places // 16
