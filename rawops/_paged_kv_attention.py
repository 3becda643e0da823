"""The host side of paged_attention.cu: its instances, what one launch is told, and the workspace it needs."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass

from rawops._paged_kv_pool import DTYPES, POOL_FIELDS, Pool
from rawops._runtime import checks
from rawops._runtime.kernel import KernelSpec, ParamStruct

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
UNLIMITED = 2**31 - 1
_LOG2_E = 1.4426950408889634
_ROWS = 16  # of an item: one MMA
_SM_RESERVED = 1024  # bytes of shared memory that the system takes for each block
_MAX_STAGES = 6

PARAMS = ParamStruct(
    "PagedParams",
    **dict.fromkeys(("q", "out", "lse", "partial", "counters"), "pointer"),
    **dict.fromkeys(("q_row", "q_head", "q_dim", "out_row", "out_head", "out_dim", "lse_head", "lse_row"), "int64"),
    **POOL_FIELDS,
    **dict.fromkeys(("seq_lens", "cu_seqlens_q"), "pointer"),
    **dict.fromkeys(("batch", "total_q", "kv_heads", "group", "window_left", "window_right"), "int32"),
    **dict.fromkeys(("num_splits", "min_tiles"), "int32"),
    **dict.fromkeys(("scale", "softcap"), "float32"),
    alibi_slopes="pointer",
    q_in_pairs="int32",
)


@dataclass(frozen=True)
class Config:
    """How a block is made: its warps, the stages of each warp's ring, and how many blocks an SM holds."""

    warps: int
    stages: int
    blocks: int

    def shared_bytes(self, head_dim: int) -> int:
        """Dynamic shared memory: a stage has 16 tokens of 16-bit keys and values, or 32 of 8-bit ones."""
        return self.warps * self.stages * 64 * head_dim


def select_config(head_dim: int, max_shared_bytes: int) -> Config:
    """Choose the most stages that leave an SM two blocks, or one where two would have no ring.

    Two blocks of four warps keep the memory busy while one of them is between items.
    """
    static = 32 * head_dim + 1024  # queries, and what the warps tell each other
    for warps, blocks in ((4, 2), (4, 1), (2, 1)):
        each = (max_shared_bytes + _SM_RESERVED) // blocks - _SM_RESERVED - static
        stages = min(each // (warps * 64 * head_dim), _MAX_STAGES)
        if stages >= 2:
            return Config(warps, stages, blocks)
    raise AssertionError(f"no ring for head_dim {head_dim} in {max_shared_bytes} bytes")


_CHOICES = {
    "dtype": DTYPES,
    "head_dim": HEAD_DIMS,
    "access": (16, 2),
    "warps": (4, 2),
    "stages": tuple(range(2, _MAX_STAGES + 1)),
    "blocks": (1, 2),
    "ragged": (False, True),
}


def _smoke(head_dim: int, dtype: str = "float16", access: int = 16, ragged: bool = False) -> dict:
    config = select_config(head_dim, 232448)
    choices = {"dtype": dtype, "head_dim": head_dim, "access": access, "ragged": ragged}
    return choices | {"warps": config.warps, "stages": config.stages, "blocks": config.blocks}


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
    ],
    params=PARAMS,
)


@dataclass(frozen=True)
class Options:
    """What a call asks for beside its arrays, checked."""

    scale: float | None  # 1 / sqrt(head_dim)
    softcap: float
    window: tuple[int, int]
    num_splits: int


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
    q_in_pairs: int

    def run(self, device, addresses: tuple, workspace: Workspace) -> None:
        """Launch with the addresses of q, out, lse, pages, block_table, seq_lens, cu_seqlens_q and alibi_slopes."""
        q, out, lse, pages, table, lens, cu, slopes = addresses
        partial, counters = workspace.addresses(device, self.partial_floats, self.grid[0])
        packed = PARAMS.pack(
            *(q, out, lse, partial, counters, *self.strides, pages, table, *self.pool, lens, cu),
            *(*self.work, slopes, self.q_in_pairs),
        )
        self.function.launch(self.grid, self.block, (packed,), self.shared_bytes)


def plan(device, function: str, pool: Pool, q, out, ragged: bool, options: Options, q_address: int) -> Launch:
    """Choose the kernel and lay out what does not change from call to call."""
    total_q, heads, head_dim = q.shape
    group = heads // pool.num_heads
    padded = next(d for d in HEAD_DIMS if d >= head_dim)
    config = select_config(padded, device.max_shared_bytes)
    choices = {"dtype": pool.dtype, "head_dim": padded, "access": pool.access, "ragged": ragged}
    choices |= {"warps": config.warps, "stages": config.stages, "blocks": config.blocks}
    row_tiles = -(-total_q * group // _ROWS) + pool.batch if ragged else -(-group // _ROWS) * pool.batch
    items, tiles = pool.num_heads * row_tiles, max(-(-pool.capacity // 16), 1)
    if items * tiles >= 2**31:
        rule = "keep KV heads x groups of 16 rows x tiles of 16 keys below 2**31"
        checks.fail(ValueError, function, "q", rule, items * tiles, "Split the queries among several calls.")
    if options.num_splits:
        blocks = items * options.num_splits
    else:
        blocks = max(min(device.sm_count * config.blocks, items * tiles // config.warps), 1)
    q_strides = [s // q.dtype.itemsize for s in q.strides]
    out_strides = [s // out.dtype.itemsize for s in out.strides] if out is not None else [heads * head_dim, head_dim, 1]
    in_pairs = q_strides[2] == 1 and not any(x % 2 for x in (head_dim, *q_strides[:2], q_address // 2))
    scale = options.scale if options.scale is not None else 1 / math.sqrt(head_dim)
    work = (pool.batch, total_q, pool.num_heads, group, *options.window, options.num_splits, config.warps)
    return Launch(
        function=KERNEL.kernel(device, **choices),
        grid=(blocks, 1, 1),
        block=(32 * config.warps, 1, 1),
        shared_bytes=config.shared_bytes(padded),
        partial_floats=2 * blocks * _ROWS * (padded + 2),
        strides=(*q_strides, *out_strides, total_q, 1),
        pool=pool.numbers,
        work=(*work, scale * _LOG2_E, options.softcap),
        q_in_pairs=int(in_pairs),
    )


class Workspace:
    """Where blocks leave partial results and count their arrivals; grows as needed, calls that share it are in order.

    The counters are zero between launches: each launch leaves them so. What was given out stays allocated, since a
    captured graph may use it.
    """

    def __init__(self) -> None:
        self._arrays: dict[str, list] = {"float32": [], "int32": []}
        self._lock = threading.Lock()

    def addresses(self, device, floats: int, counters: int) -> tuple[int, int]:
        """Return the addresses of the partial results and of the counters."""
        return self._at_least(device, "float32", floats), self._at_least(device, "int32", counters)

    def _at_least(self, device, dtype: str, count: int) -> int:
        found = self._arrays[dtype]
        if not found or found[-1].size < count:
            with self._lock:
                if not found or found[-1].size < count:
                    found.append(_zeros(device, 1 << (count - 1).bit_length(), dtype))
        return device.pointer(found[-1])


def _zeros(device, count: int, dtype: str):
    """Make zeros that are ready for every stream, in a capture too: the first call alone waits for them."""
    x = device.empty((count,), dtype)
    if device.is_emulated:
        x[...] = 0
        return x
    import cupy

    with cupy.cuda.Device(device.ordinal), cupy.cuda.Stream(non_blocking=True) as stream:
        x.fill(0)
        stream.synchronize()
    return x


_PER_THREAD_STREAM = 2  # cudaStreamPerThread: one handle, a stream for each thread
_workspaces: dict[tuple, Workspace] = {}


def workspace_of_stream(device) -> Workspace:
    """Return the workspace that all calls on the current stream of a device share."""
    if device.is_emulated:
        return Workspace()
    stream = device.get_stream().ptr
    key = (device.ordinal, stream, threading.get_ident() if stream == _PER_THREAD_STREAM else 0)
    found = _workspaces.get(key)
    return found if found is not None else _workspaces.setdefault(key, Workspace())
