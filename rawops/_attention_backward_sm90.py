"""The host side of attention_backward_sm90.cu: what it can do, and its three launches."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rawops._attention_config import BIAS, PARAMS, SCORES, Problem
from rawops._attention_operands import AXES
from rawops._attention_sm90 import View, map_of, movable, section_of
from rawops._runtime.kernel import KernelSpec, ParamStruct
from rawops._runtime.tensormap import TensorMap

_BLOCK_M = {64: 128, 128: 64, 256: 64}  # queries of a tile by head size
_BLOCK_N = {64: 128, 128: 128, 256: 64}  # keys
_STAGES, _CONSUMERS = 2, 2
_CHOICES = {"dtype": ("float16", "bfloat16"), "head_dim": (64, 128, 256), "block_m": (64, 128)}


def _spec(entry: str, choices: dict, **smoke) -> KernelSpec:
    return KernelSpec(
        source="attention_backward_sm90.cu",
        entry=f"rawops::{entry}",
        template=tuple(choices),
        choices=choices,
        smoke=[{"dtype": "bfloat16", "head_dim": d, "block_m": m, **smoke} for d, m in _BLOCK_M.items()],
        min_arch=90,
        max_arch=90,
        params=PARAMS,
    )


ROWS = _spec("attention_backward_rows_sm90", {**_CHOICES, "block_n": (64, 128)}, block_n=128)
MAIN = _spec(
    "attention_backward_sm90",
    {**_CHOICES, "stages": (_STAGES,), "in_turn": (False, True), "score": tuple(s for s in SCORES if not s & BIAS)},
    stages=_STAGES,
    in_turn=True,
    score=0,
)
QUERIES = _spec("attention_backward_dq_sm90", _CHOICES)

_STRIDES = ParamStruct("AttentionStrides", **dict.fromkeys(AXES, "int64"))
_BACKWARD = ParamStruct(
    "AttentionBackwardParams",
    **dict.fromkeys(("dk", "dv", "dq", "rows", "turns"), "pointer"),
    **{f"{name}_{axis}": "int64" for name in ("dk", "dv") for axis in AXES},
    q_tiles="int32",
    softmax_scale="float32",
)


def _head_dim(problem: Problem) -> int | None:
    """Return the head size of the kernels that run a problem."""
    wide = max(problem.head_dim, problem.head_dim_v)
    return next((size for size in _BLOCK_M if size >= wide), None)


def supports(device, problem: Problem, views: Mapping[str, View], deterministic: bool) -> bool:
    """Tell whether the kernels can run a problem: Hopper, no bias, readable by TMA.

    Blocks that take turns must know how many tiles a sequence has, so `deterministic` excludes cu_seqlens.
    """
    return (
        MAIN.exists_on(device.capability)
        and not problem.score & BIAS
        and not (problem.varlen and deterministic)
        and problem.head_dim % 8 == problem.head_dim_v % 8 == 0
        and _head_dim(problem) is not None
        and all(movable(view) for view in views.values())
        and min(problem.batches, problem.seqlen_q, problem.seqlen_k) > 0
        and all(0 not in view.shape for view in views.values())  # no tensor map has a size of 0
    )


def run(
    device, problem: Problem, views: Mapping[str, View], fields: dict, addresses: dict, deterministic: bool
) -> None:
    """Launch what `supports` accepts.

    Parameters
    ----------
    device, problem, views
        As for `supports`; views of "q", "k", "v", "out", "dout", "dq", "dk" and "dv".
    fields : dict
        Those of AttentionShape, but for the configuration, and "softmax_scale".
    addresses : dict
        Of the same arrays, and of "lse", "alibi_slopes", "cu_seqlens_q" and "cu_seqlens_k".
    deterministic : bool
        Blocks add to dq in a fixed order.
    """
    D = _head_dim(problem)
    block_m = _BLOCK_M[D]
    row_tiles, key_tiles = -(-problem.seqlen_q // block_m), -(-problem.seqlen_k // _BLOCK_N[D])
    # With cu_seqlens a sequence may begin anywhere in a tile, and has tiles of its own all the same.
    q_tiles = fields["total_q"] // block_m + problem.batches if problem.varlen else row_tiles
    tiles = problem.heads * q_tiles * (1 if problem.varlen else problem.batches)
    sums = device.empty((tiles * block_m * D,), np.dtype(np.float32))
    rows = device.empty((tiles * block_m * 2,), np.dtype(np.float32))
    turns = device.empty((tiles * 2,), np.dtype(np.int32)) if deterministic else None
    of_sums, of_rows, of_turns = (0 if x is None else device.pointer(x) for x in (sums, rows, turns))

    fields = fields | addresses | {"packed": problem.group, "splits": 1, "row_tiles": key_tiles}
    params = PARAMS.pack(*(fields.get(name, 0) for name in PARAMS.fields))
    strides = {name: _STRIDES.pack(*views[name].strides) for name in ("dout", "dq")}
    gradients = (addresses["dk"], addresses["dv"], of_sums, of_rows, of_turns)
    gradients = (*gradients, *views["dk"].strides, *views["dv"].strides, q_tiles, fields["softmax_scale"])
    backward, choices = _BACKWARD.pack(*gradients), {"dtype": problem.dtype, "head_dim": D, "block_m": block_m}

    parts = row_tiles * block_m * D // (256 * 8)
    values = (params, addresses["dout"], strides["dout"], of_rows, of_sums, of_turns, q_tiles, parts)
    grid = (parts * problem.heads * problem.batches, 1, 1)
    ROWS.kernel(device, **choices, block_n=_BLOCK_N[D]).launch(grid, (256, 1, 1), values)
    _run_main(device, problem, (_maps(device, problem, views, addresses, D), params, backward), choices, deterministic)
    values = (params, backward, addresses["dq"], strides["dq"], row_tiles)
    grid = (row_tiles * problem.heads * (problem.batches + problem.varlen), 1, 1)
    QUERIES.kernel(device, **choices).launch(grid, (256, 1, 1), values)


def _run_main(device, problem: Problem, values: tuple, choices: dict, deterministic: bool) -> None:
    D = choices["head_dim"]
    # Of fewer tiles of one head at a time, each waits less for the others' additions; under a mask the L2 has room.
    section = section_of(problem.seqlen_q * problem.group, 2 * D) * (1 + (deterministic and problem.is_masked))
    tiles = (problem.batches + problem.varlen) * problem.kv_heads * -(-problem.seqlen_k // _BLOCK_N[D])
    blocks = min(tiles, device.sm_count)
    # Of two tiles a block, there and back is as good an order as any, and equal ones need none. Blocks that wait for
    # each other's additions go on in the order in which they get ready.
    uneven = (problem.is_masked or problem.varlen) and tiles > 2 * blocks
    counter = device.zero() if uneven or deterministic else None
    values = (*values, section, 0 if counter is None else device.pointer(counter))
    kernel = MAIN.kernel(device, **choices, stages=_STAGES, in_turn=deterministic, score=problem.score)
    kernel.launch((blocks, 1, 1), ((1 + _CONSUMERS) * 128, 1, 1), values, shared_bytes(D))


def shared_bytes(head_dim: int) -> int:
    """k and v, the rings of q and dout with two numbers a row, dS and dq twice, barriers, two tiles' places.

    For wide heads, which have no room for dq, dS and P.
    """
    block_m, block_n = _BLOCK_M[head_dim], _BLOCK_N[head_dim]
    keys, ring = 2 * block_n * head_dim * 2, _STAGES * (2 * block_m * head_dim * 2 + block_m * 8 + 32)
    parts = 2 * _CONSUMERS * 64 * 64 * 4 if head_dim <= 128 else 0
    return keys + ring + 2 * block_n * block_m * 2 + parts + 80 + 72


def _maps(device, problem: Problem, views: Mapping[str, View], addresses: dict, head_dim: int) -> bytes:
    encode = TensorMap.encode_emulated if device.is_emulated else TensorMap.encode_driver
    block_m, block_n = _BLOCK_M[head_dim], _BLOCK_N[head_dim]
    rows = {"q": block_m, "k": block_n, "v": block_n, "dout": block_m}
    maps = (map_of(problem.dtype, views[x], n, head_dim)(addresses[x]) for x, n in rows.items())
    return b"".join(map(encode, maps))
