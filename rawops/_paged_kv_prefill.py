"""Several queries a sequence in the tiles of flash attention: which kernel, and the host side of the sm_80 one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from rawops import _attention_config as attention
from rawops import _paged_kv_cascade_sm90 as cascade
from rawops import _paged_kv_prefill_sm90 as hopper
from rawops._attention_merge import merge_parts
from rawops._attention_operands import access_of
from rawops._attention_sm90 import View
from rawops._paged_kv_pool import DTYPES, Pool
from rawops._runtime import dtypes
from rawops._runtime.kernel import KernelSpec, ParamStruct
from rawops._runtime.workspace import Workspace

_MIN_ROWS = 64  # queries x heads of a group, on average, from where a tile of them is worth while
_MIN_SMS = 0.5  # the share of SMs that has to have a block
_ZEROS = 128  # int32: a row of the widest head
_TILES_PER_SM = 16  # row tiles an SM, some of them empty, up to which a long sequence has a block for each of its own

PARAMS = ParamStruct(
    "PagedPrefill", **attention.CALL_FIELDS, **attention.SHAPE_FIELDS, zeros="pointer", num_pages="int32"
)
_TILES = [tile for d in attention.HEAD_DIMS for uneven in (False, True) for tile in attention.tiles_of(d, d, 0, uneven)]
_CHOICES = {
    "dtype": DTYPES,
    "out_dtype": (*DTYPES, "float32"),
    "tile": tuple(dict.fromkeys(tile.cpp for tile in _TILES)),
    "score": (*range((attention.SOFTCAP | attention.ALIBI) + 1), attention.MULTIPLY),
    "packed": (False, True),
}
KERNEL = KernelSpec(
    source="paged_prefill_sm80.cu",
    entry="rawops::paged_prefill",
    template=tuple(_CHOICES),
    choices=_CHOICES,
    smoke=[
        {"dtype": "float16", "out_dtype": out_dtype, "tile": tile.cpp, "score": 0, "packed": packed}
        for out_dtype, packed in (("float16", False), ("float16", True), ("float32", False))
        for tile in attention.tiles_of(128, 128, uneven=packed)[:2]
    ],
    params=PARAMS,
    spills={"sm_100a": 16, "sm_120a": 8},
)


class Parts(NamedTuple):
    """Partial results in a workspace: addresses of values and lse, floats from part to part, how many there are.

    `pending`: what makes them, for a launch that makes one part more beside them: how many tiles there are, how many
    blocks work together, and the arguments of paged_prefill_sm90.cu.
    """

    values: int
    lse: int
    split: int
    lse_split: int
    count: int
    pending: tuple[int, int, tuple] | None = None


NO_PARTS = Parts(0, 0, 0, 0, 0)


@dataclass(frozen=True)
class Prefill:
    """A prefill whose shapes, strides and options are known: all but the addresses.

    Attributes
    ----------
    launch : callable
        Takes the workspace and the values of an AttentionParams, of which `shape` is the second part. With `beside` it
        returns the arguments of a launch instead.
    value_bytes : int
        From a page's keys to its values.
    parts, values, sums : int
        Partial results where keys are split: how many, and the floats of each and of its lse.
    merge : callable, optional
        Joins them.
    beside : tuple of int, optional
        So many tiles are to be part of another launch, in clusters of so many blocks.
    """

    launch: Callable[[Workspace, tuple], tuple | None]
    shape: tuple
    value_bytes: int
    parts: int
    values: int
    sums: int
    merge: Callable[[int, int, int, int], None] | None
    beside: tuple[int, int] | None = None
    copies_q: bool = False

    def run(self, device, addresses: tuple, workspace: Workspace) -> None:
        """Launch with the addresses of q, out, lse, and of the others in the order of the op."""
        _, out, lse, *_ = addresses
        if self.merge is None:
            self._launch(addresses, out, lse, workspace)
        else:
            floats = self.parts * self.values
            target = workspace.partial(device, floats + self.parts * self.sums)
            self._launch(addresses, target, target + 4 * floats, workspace)
            self.merge(target, target + 4 * floats, out, lse)

    def run_parts(self, device, addresses: tuple, workspace: Workspace) -> Parts:
        """Launch without an out and an lse, unless that is for another launch, and return the partial results."""
        parts = self.parts + (self.beside is not None)
        floats = parts * self.values
        target = workspace.prior(device, floats + parts * self.sums)
        arguments = self._launch(addresses, target, target + 4 * floats, workspace)
        pending = (*self.beside, arguments) if self.beside else None
        return Parts(target, target + 4 * floats, self.values, self.sums, self.parts, pending)

    def _launch(self, addresses: tuple, target: int, target_lse: int, workspace: Workspace) -> tuple | None:
        q, _, _, pages, table, lens, cu, slopes, *_ = addresses
        if self.beside:  # one sequence, as long as the table
            lens = cu = 0
        call = (q, pages, pages + self.value_bytes, target, target_lse, slopes, 0, cu, 0, lens, table)
        return self.launch(workspace, (*call, *self.shape))


def takes(pool: Pool, q, q_address: int, num_splits: int, beside: bool = False) -> bool:
    """Tell whether a call has enough queries, and arrays that this kernel reads."""
    if not pool.batch or pool.dtype not in DTYPES or pool.access != 16 or num_splits or access_of(q, q_address) != 16:
        return False
    rows = q.shape[0] * (q.shape[1] // pool.num_heads)
    return rows >= (cascade.MIN_ROWS if beside else _MIN_ROWS) * pool.batch


def plan(
    device, pool: Pool, q, out_strides: list, options, scale: float, has_slopes: bool, alignments: tuple[int, int]
) -> Prefill | None:
    """Choose kernel and tile and lay out what does not change from call to call; None where SMs would be left idle.

    `alignments` are the addresses of q and out modulo 16.
    """
    total_q, heads, head_dim = q.shape
    dtype, (left, right) = dtypes.name(q.dtype), options.window
    problem = attention.Problem(
        *(dtype, pool.batch, total_q, pool.capacity, heads, pool.num_heads, head_dim, head_dim),
        window_left=left,
        window_right=right,
        score=attention.score_bits(scale, options.softcap, has_slopes, False),
        varlen=True,
    )
    page, _, token, head, dim, _, num_pages, *_ = pool.numbers
    q_strides = [s // q.dtype.itemsize for s in q.strides]
    views = {
        "q": View((1, *q.shape), (0, *q_strides), alignments[0]),
        "out": View((1, *q.shape), (0, *out_strides), alignments[1]),
        "k": View((num_pages, pool.page_size, pool.num_heads, head_dim), (page, token, head, dim), 0),
    }
    on_hopper = hopper.supports(device, problem, pool, views)
    if on_hopper:
        beside = options.beside and cascade.takes(head_dim, heads // pool.num_heads)
        chosen = hopper.select(problem, device.sm_count, beside)
    else:
        chosen = _select(problem, device)
    blocks = chosen.row_tiles * (heads // chosen.packed) * chosen.splits
    beside = on_hopper and chosen.beside
    if blocks * pool.batch < _MIN_SMS * device.sm_count and not beside:
        return None
    shape, lse_shape = (chosen.splits, total_q, heads, head_dim), (chosen.splits, heads, total_q)
    merge, out_dtype = None, dtype
    if chosen.splits > 1 or options.parts:
        if not options.parts:
            merge = merge_parts(device, dtype, shape, lse_shape, (None, 0, 1, 2), (0, *out_strides))
        out_dtype, out_strides = "float32", [heads * head_dim, head_dim, 1]
    k_strides = v_strides = (page, token, head, dim)
    if on_hopper:
        k_strides, v_strides = (hopper.page_groups(pool), *k_strides[1:]), (num_pages, *v_strides[1:])
        launch = (
            hopper.arguments_of(device, problem, pool, chosen, views)
            if beside
            else hopper.launcher(device, problem, pool, chosen, out_dtype, views)
        )
    else:
        launch = _launcher(device, problem, chosen, out_dtype, num_pages)
    fields = _shape_fields(problem, pool, chosen)
    strides = {"q": (0, *q_strides), "out": (0, *out_strides), "k": k_strides, "v": v_strides}
    for name, values in strides.items():
        fields |= {f"{name}_{axis}": x for axis, x in zip(("batch", "row", "head", "col"), values, strict=True)}
    fields["scale"], fields["softcap"] = attention.score_scales(scale, options.softcap)
    fields = tuple(fields.get(name, 0) for name in attention.SHAPE_FIELDS)
    value_bytes = pool.numbers[1] * q.dtype.itemsize
    sizes = chosen.splits, math.prod(shape[1:]), math.prod(lse_shape[1:])
    tiles = (hopper.tiles_of(problem, chosen), chosen.cluster) if beside else None
    return Prefill(launch, fields, value_bytes, *sizes, merge, tiles)


def _shape_fields(problem: attention.Problem, pool: Pool, chosen) -> dict:
    """What an AttentionShape has beside strides and scales."""
    total_q, heads, head_dim = problem.seqlen_q, problem.heads, problem.head_dim
    fields = {"batches": pool.batch, "heads": heads, "group": problem.group, "packed": chosen.packed}
    fields |= {"seqlen_q": total_q, "seqlen_k": pool.capacity, "total_q": total_q}
    fields |= {"head_dim": head_dim, "head_dim_v": head_dim, "row_tiles": chosen.row_tiles, "splits": chosen.splits}
    fields |= {"out_split": total_q * heads * head_dim, "lse_split": heads * total_q, "lse_head": total_q}
    fields |= {"window_left": problem.window_left, "window_right": problem.window_right}
    return fields | {"block_table_batch": pool.numbers[5], "page_shift": pool.page_size.bit_length() - 1}


def _select(problem: attention.Problem, device) -> attention.Config:
    """Choose as for sequences of average length, since the true ones are on the device.

    The blocks of a longer one take several of its row tiles each. There are blocks for more than the average, up to a
    number of which those without rows cost little.
    """
    rows = -(-problem.seqlen_q // problem.batches)
    chosen = attention.select_config(replace(problem, seqlen_q=rows), device.sm_count, device.max_shared_bytes)
    all_tiles = -(-problem.seqlen_q * chosen.packed // chosen.tile.block_m)
    units = problem.batches * (problem.heads // chosen.packed) * chosen.splits
    return replace(chosen, row_tiles=min(all_tiles, max(chosen.row_tiles, _TILES_PER_SM * device.sm_count // units)))


def _launcher(device, problem: attention.Problem, chosen, out_dtype: str, num_pages: int) -> Callable:
    """Return what launches paged_prefill_sm80.cu."""
    tile, packed = chosen.tile, chosen.packed
    kernel = KERNEL.kernel(
        device, dtype=problem.dtype, out_dtype=out_dtype, tile=tile.cpp, score=problem.score, packed=packed > 1
    )
    sequences = problem.batches + 1  # one more, of the rows past the last
    grid = attention.grid_of(problem, chosen.row_tiles, sequences * (problem.heads // packed) * chosen.splits)

    def launch(workspace: Workspace, values: tuple) -> None:
        args = PARAMS.pack(*values, workspace.zeros(device, _ZEROS), num_pages)
        kernel.launch(grid, (tile.threads, 1, 1), (args,), tile.shared_bytes)

    return launch
