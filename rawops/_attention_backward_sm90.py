"""The host side of attention_backward_sm90.cu: what it can do, and its three launches."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rawops._attention_config import PARAMS, Problem
from rawops._attention_operands import AXES
from rawops._attention_sm90 import View, map_of, movable, section_of
from rawops._runtime.kernel import KernelSpec, ParamStruct
from rawops._runtime.tensormap import TensorMap

_BLOCK_M = {64: 128, 128: 64}  # queries of a tile by head size: a consumer makes 64 rows by 64 columns of dq
_BLOCK_N = 128  # keys
_STAGES, _CONSUMERS = 2, 2
_CHOICES = {"dtype": ("float16", "bfloat16"), "head_dim": (64, 128), "block_m": (64, 128)}


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


ROWS = _spec("attention_backward_rows_sm90", _CHOICES)
MAIN = _spec("attention_backward_sm90", {**_CHOICES, "stages": (_STAGES,)}, stages=_STAGES)
QUERIES = _spec("attention_backward_dq_sm90", _CHOICES)

_STRIDES = ParamStruct("AttentionStrides", **dict.fromkeys(AXES, "int64"))
_BACKWARD = ParamStruct(
    "AttentionBackwardParams",
    **dict.fromkeys(("dk", "dv", "dq", "rows"), "pointer"),
    **{f"{name}_{axis}": "int64" for name in ("dk", "dv") for axis in AXES},
    q_tiles="int32",
    softmax_scale="float32",
)


def supports(device, problem: Problem, views: Mapping[str, View]) -> bool:
    """Tell whether the kernels can run a problem: Hopper, plain scores, heads of 64 or 128, readable by TMA."""
    return (
        MAIN.exists_on(device.capability)
        and not problem.score
        and not problem.varlen
        and problem.head_dim == problem.head_dim_v
        and problem.head_dim in _BLOCK_M
        and all(movable(view) for view in views.values())
        and min(problem.batches, problem.heads, problem.seqlen_q, problem.seqlen_k) > 0
    )


def run(device, problem: Problem, views: Mapping[str, View], fields: dict, addresses: dict) -> None:
    """Launch what `supports` accepts.

    Parameters
    ----------
    device, problem, views
        As for `supports`; views of "q", "k", "v", "out", "dout", "dq", "dk" and "dv".
    fields : dict
        Those of AttentionShape, but for the configuration, and "softmax_scale".
    addresses : dict
        Of the same arrays, and of "lse".
    """
    block_m, D = _BLOCK_M[problem.head_dim], problem.head_dim
    q_tiles, key_tiles = -(-problem.seqlen_q // block_m), -(-problem.seqlen_k // _BLOCK_N)
    heads = problem.batches * problem.heads
    sums = device.empty((heads * q_tiles * block_m * D,), np.dtype(np.float32))
    rows = device.empty((heads * q_tiles * block_m * 2,), np.dtype(np.float32))
    fields = fields | addresses | {"packed": problem.group, "splits": 1, "row_tiles": key_tiles}
    params = PARAMS.pack(*(fields.get(name, 0) for name in PARAMS.fields))
    strides = {name: _STRIDES.pack(*views[name].strides) for name in ("dout", "dq")}
    scale, of_sums, of_rows = fields["softmax_scale"], device.pointer(sums), device.pointer(rows)
    choices = {"dtype": problem.dtype, "head_dim": D, "block_m": block_m}

    values = (params, addresses["dout"], strides["dout"], of_rows, of_sums)
    grid = (q_tiles * block_m // 8, problem.heads, problem.batches)
    ROWS.kernel(device, **choices).launch(grid, (256, 1, 1), values)

    maps = _maps(device, problem, views, addresses, block_m)
    gradients = (addresses["dk"], addresses["dv"], of_sums, of_rows, *views["dk"].strides, *views["dv"].strides)
    section = section_of(problem.seqlen_q * problem.group, 2 * D)
    tiles = problem.batches * problem.kv_heads * key_tiles
    blocks = min(tiles, device.sm_count)
    counter = device.zero() if problem.is_masked and tiles > 2 * blocks else None
    values = (maps, params, _BACKWARD.pack(*gradients, q_tiles, scale), section)
    values = (*values, device.pointer(counter) if counter is not None else 0)
    threads = ((1 + _CONSUMERS) * 128, 1, 1)
    MAIN.kernel(device, **choices, stages=_STAGES).launch((blocks, 1, 1), threads, values, shared_bytes(D))

    values = (params, of_sums, addresses["dq"], strides["dq"], scale)
    QUERIES.kernel(device, **choices).launch((q_tiles, problem.heads, problem.batches), (256, 1, 1), values)


def shared_bytes(head_dim: int) -> int:
    """k and v, the rings of q and dout with two numbers a row, dS twice, parts of dq, barriers, two tiles' places."""
    block_m = _BLOCK_M[head_dim]
    keys, ring = 2 * _BLOCK_N * head_dim * 2, _STAGES * (2 * block_m * head_dim * 2 + block_m * 8 + 32)
    return keys + ring + 2 * _BLOCK_N * block_m * 2 + _CONSUMERS * 64 * 64 * 4 + 48 + 72


def _maps(device, problem: Problem, views: Mapping[str, View], addresses: dict, block_m: int) -> bytes:
    encode = TensorMap.encode_emulated if device.is_emulated else TensorMap.encode_driver
    rows = {"q": block_m, "k": _BLOCK_N, "v": _BLOCK_N, "dout": block_m}
    maps = (map_of(problem.dtype, views[x], n, problem.head_dim)(addresses[x]) for x, n in rows.items())
    return b"".join(map(encode, maps))
