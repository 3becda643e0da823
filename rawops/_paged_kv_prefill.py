"""The host side of paged_prefill_sm80.cu: many queries a sequence, in the tiles of flash attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from rawops import _attention_config as attention
from rawops._attention_merge import merge_parts
from rawops._attention_operands import access_of
from rawops._paged_kv_pool import DTYPES, Pool
from rawops._paged_kv_workspace import Workspace
from rawops._runtime import dtypes
from rawops._runtime.kernel import KernelSpec, ParamStruct

_MIN_ROWS = 64  # queries x heads of a group, on average, from where a tile of them is worth while
_MIN_SMS = 0.5  # the share of SMs that has to have a block
_ZEROS = 128  # int32: a row of the widest head

PARAMS = ParamStruct(
    "PagedPrefill", **attention.CALL_FIELDS, **attention.SHAPE_FIELDS, zeros="pointer", num_pages="int32"
)
_TILES = [tile for d in attention.HEAD_DIMS for tile in attention.tiles_of(d, d)]
_CHOICES = {
    "dtype": DTYPES,
    "out_dtype": (*DTYPES, "float32"),
    "tile": tuple(tile.cpp for tile in _TILES),
    "score": (*range((attention.SOFTCAP | attention.ALIBI) + 1), attention.MULTIPLY),
}
KERNEL = KernelSpec(
    source="paged_prefill_sm80.cu",
    entry="rawops::paged_prefill",
    template=tuple(_CHOICES),
    choices=_CHOICES,
    smoke=[
        {"dtype": "float16", "out_dtype": out_dtype, "tile": tile.cpp, "score": 0}
        for out_dtype in ("float16", "float32")
        for tile in (attention.tiles_of(128, 128)[0], attention.tiles_of(128, 128)[-2])
    ],
    params=PARAMS,
)


@dataclass(frozen=True)
class Prefill:
    """A prefill whose shapes, strides and options are known: all but the addresses.

    Attributes
    ----------
    values, sums : int
        Floats of the partial results where keys are split, and of their lse.
    merge : callable, optional
        Joins them.
    """

    function: object
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    shape: tuple
    value_bytes: int
    num_pages: int
    values: int
    sums: int
    merge: Callable[[int, int, int, int], None] | None
    copies_q: bool = False

    def run(self, device, addresses: tuple, workspace: Workspace) -> None:
        """Launch with the addresses of q, out, lse, and of the others in the order of the op."""
        q, out, lse, pages, table, lens, cu, slopes, *_ = addresses
        target, target_lse = out, lse
        if self.merge is not None:
            target = workspace.partial(device, self.values + self.sums)
            target_lse = target + 4 * self.values
        call = (q, pages, pages + self.value_bytes, target, target_lse, slopes, 0, cu, 0, lens, table)
        packed = PARAMS.pack(*call, *self.shape, workspace.zeros(device, _ZEROS), self.num_pages)
        self.function.launch(self.grid, (self.threads, 1, 1), (packed,), self.shared_bytes)
        if self.merge is not None:
            self.merge(target, target_lse, out, lse)


def takes(pool: Pool, q, q_address: int, num_splits: int) -> bool:
    """Tell whether a call has enough queries, and arrays that this kernel reads."""
    if pool.dtype not in DTYPES or pool.access != 16 or num_splits or access_of(q, q_address) != 16:
        return False
    return q.shape[0] * (q.shape[1] // pool.num_heads) >= _MIN_ROWS * pool.batch


def plan(device, pool: Pool, q, out_strides: list, options, scale: float, has_slopes: bool) -> Prefill | None:
    """Choose the tile and lay out what does not change from call to call; None where SMs would be left without one."""
    total_q, heads, head_dim = q.shape
    dtype, (left, right) = dtypes.name(q.dtype), options.window
    problem = attention.Problem(
        *(dtype, pool.batch, total_q, pool.capacity, heads, pool.num_heads, head_dim, head_dim),
        window_left=left,
        window_right=right,
        score=attention.score_bits(scale, options.softcap, has_slopes, False),
        varlen=True,
    )
    chosen = attention.select_config(problem, device.sm_count, device.max_shared_bytes)
    blocks = chosen.row_tiles * (heads // chosen.packed) * chosen.splits
    if blocks * pool.batch < _MIN_SMS * device.sm_count:
        return None
    shape, lse_shape = (chosen.splits, total_q, heads, head_dim), (chosen.splits, heads, total_q)
    merge, out_dtype = None, dtype
    if chosen.splits > 1:
        merge = merge_parts(device, dtype, shape, lse_shape, (None, 0, 1, 2), (0, *out_strides))
        out_dtype, out_strides = "float32", [heads * head_dim, head_dim, 1]
    page, value, token, head, dim, table, num_pages, *_ = pool.numbers
    fields = {"batches": pool.batch, "heads": heads, "group": problem.group, "packed": chosen.packed}
    fields |= {"seqlen_q": total_q, "seqlen_k": pool.capacity, "total_q": total_q}
    fields |= {"head_dim": head_dim, "head_dim_v": head_dim, "row_tiles": chosen.row_tiles, "splits": chosen.splits}
    fields |= {"out_split": math.prod(shape[1:]), "lse_split": heads * total_q}
    fields |= {"window_left": left, "window_right": right, "lse_head": total_q}
    fields |= {"block_table_batch": table, "page_shift": pool.page_size.bit_length() - 1}
    fields["scale"], fields["softcap"] = attention.score_scales(scale, options.softcap)
    strides = {"q": (0, *(s // q.dtype.itemsize for s in q.strides)), "out": (0, *out_strides)}
    strides |= dict.fromkeys("kv", (page, token, head, dim))
    for name, values in strides.items():
        fields |= {f"{name}_{axis}": x for axis, x in zip(("batch", "row", "head", "col"), values, strict=True)}
    return Prefill(
        KERNEL.kernel(device, dtype=dtype, out_dtype=out_dtype, tile=chosen.tile.cpp, score=problem.score),
        (blocks * (pool.batch + 1), 1, 1),  # and one sequence of the rows past the last
        chosen.tile.threads,
        chosen.tile.shared_bytes,
        tuple(fields.get(name, 0) for name in attention.SHAPE_FIELDS),
        value * q.dtype.itemsize,
        num_pages,
        math.prod(shape),
        math.prod(lse_shape),
        merge,
    )
