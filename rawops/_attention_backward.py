"""The gradients of attention: parameters, kernels, tiles and launches."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rawops import _attention_backward_sm90 as sm90
from rawops import config as settings
from rawops._attention_config import (
    ALIBI,
    BIAS,
    CALL_FIELDS,
    DROPS,
    HEAD_DIMS,
    SCORES,
    SHAPE_FIELDS,
    SOFTCAP,
    Problem,
    Tile,
    padded,
)
from rawops._attention_dropout import Dropout
from rawops._attention_operands import (
    AXES,
    Layout,
    Options,
    Sizes,
    access_of,
    check_scores,
    check_values,
    problem_of,
    shape_fields,
    sizes_of,
    strides_of,
)
from rawops._runtime import arrays, checks
from rawops._runtime.call import check_apart_once
from rawops._runtime.kernel import KernelSpec, ParamStruct

_DTYPES = ("float16", "bfloat16")
_GRADIENTS = ("dq", "dk", "dv")
_OF_KEYS, _OF_VALUES = 1, 2
_ROWS = 64  # that stay, of a block

# --- kernels --------------------------------------------------------------------------------------------------------

PARAMS = ParamStruct(
    "GradientParams",
    **CALL_FIELDS,
    **SHAPE_FIELDS,
    **dict.fromkeys(("dout", *_GRADIENTS, "delta"), "pointer"),
    **{f"{name}_{axis}": "int64" for name in ("dout", *_GRADIENTS) for axis in AXES},
    key_tiles="int32",
    softmax_scale="float32",
)


def tiles_of(head_dim: int, head_dim_v: int, score: int = 0) -> list[Tile]:
    """Return the tiles for padded head sizes and bits of `score`, largest first.

    `block_m` is what stays, `block_n` what passes: the fewer, the wider the heads, for want of registers.
    """
    wide = max(head_dim, head_dim_v)
    most = 64 if wide == 64 and not score else 32 if wide <= 192 else 16
    return [Tile(head_dim, head_dim_v, _ROWS, block_n) for block_n in (64, 32, 16) if block_n <= most]


def shared_bytes(tile: Tile) -> int:
    """Shared memory of what stays and of two stages of what passes, with two numbers a row."""
    width = 2 * (tile.head_dim + tile.head_dim_v)
    return tile.block_m * width + 2 * tile.block_n * (width + 8)


def select_tile(head_dim: int, head_dim_v: int, score: int, max_shared_bytes: int) -> Tile:
    """Return the largest tile of which an SM holds two, or one where even the smallest is too large for that."""
    tiles = tiles_of(padded(head_dim), padded(head_dim_v), score)
    fitting = [t for t in tiles if shared_bytes(t) <= max_shared_bytes]
    return next((t for t in fitting if 2 * shared_bytes(t) <= max_shared_bytes), fitting[0])


def passes(tile: Tile) -> tuple[int, ...]:
    """Return what each launch over the keys makes: dk and dv together, or one after the other for wide heads."""
    together = tile.head_dim + tile.head_dim_v <= 256
    return (_OF_KEYS | _OF_VALUES,) if together else (_OF_KEYS, _OF_VALUES)


_CHOICES = {
    "dtype": _DTYPES,
    "tile": tuple(tile.cpp for d in HEAD_DIMS for dv in HEAD_DIMS for tile in tiles_of(d, dv)),
    "access": (16, 8, 4, 2),
    "score": SCORES,
}


def _smoke(**changes) -> list[dict]:
    found = []
    for width, score, access in (
        *((64, 0, 16), (128, 0, 16), (256, 0, 16), (64, SOFTCAP | ALIBI | BIAS, 2), (128, DROPS, 16)),
    ):
        tile = tiles_of(width, width, score)[0]
        values = {"dtype": "bfloat16", "tile": tile.cpp, "access": access, "score": score}
        found += [{**values, "of": of} for of in passes(tile)] if changes else [values]
    return found


DELTA = KernelSpec(
    source="attention_backward_sm80.cu",
    entry="rawops::attention_delta",
    template=("dtype",),
    choices={"dtype": _DTYPES},
    smoke=({"dtype": "float16"},),
    params=PARAMS,
)
QUERIES = KernelSpec(
    source="attention_backward_sm80.cu",
    entry="rawops::attention_backward_queries",
    template=tuple(_CHOICES),
    choices=_CHOICES,
    smoke=_smoke(),
    params=PARAMS,
)
KEYS = KernelSpec(
    source="attention_backward_sm80.cu",
    entry="rawops::attention_backward_keys",
    template=(*_CHOICES, "of"),
    choices={**_CHOICES, "of": (_OF_KEYS, _OF_VALUES, _OF_KEYS | _OF_VALUES)},
    smoke=_smoke(of=True),
    params=PARAMS,
    spills={"sm_120a": 24},
)

# --- calls ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """A checked call: arrays by name, on one device."""

    function: str
    options: Options
    device: object
    named: dict
    sizes: Sizes
    is_varlen: bool
    is_deterministic: bool
    dropout: Dropout | None

    def strides(self, name: str) -> dict[str, int]:
        found = strides_of(self.named[name], self.sizes.axes)
        return {f"{name}_{axis}": s for axis, s in zip(AXES, found, strict=True)}


def backward(
    function: str,
    options: Options,
    varlen: Layout | None,
    named: dict,
    deterministic: bool,
    dropout: Dropout | None,
) -> tuple:
    """Check a call and run it; see rawops.flash_attention_backward."""
    required = ("dout", "q", "k", "v", "out", "lse", *(("cu_seqlens_q", "cu_seqlens_k") if varlen else ()))
    checks.arrays_given(function, **{name: named[name] for name in required})
    values, give = arrays.take(function, _GRADIENTS, **named)
    named = dict(zip(named, values, strict=True))
    device = arrays.device_of(function, **named)
    with device.current():
        _prepare_and_run(function, options, varlen, device, named, deterministic, dropout)
    return tuple(give(named[name]) for name in _GRADIENTS)


def _prepare_and_run(function: str, options, varlen, device, named: dict, deterministic: bool, dropout) -> None:
    """Check a call on a device and run it; results that were not given are added to `named`."""
    sizes = sizes_of(function, named, varlen)
    check_scores(function, named, sizes)
    if varlen is not None and settings.current().check:
        check_values(function, named, sizes, varlen)
    read = named if dropout is None else named | dropout.arrays
    check_apart_once(function, device, read, _GRADIENTS)  # they are written while the operands are read
    dtype = checks.dtype(function, "q", named["q"], _DTYPES)
    for name, like in (("dout", "out"), ("out", "out"), ("dq", "q"), ("dk", "k"), ("dv", "v")):
        x, shape = named[name], sizes.out if like == "out" else named[like].shape
        if x is None:
            named[name] = device.empty(shape, named["q"].dtype)
        else:
            checks.dtype(function, name, x, (dtype,))
            checks.shape(function, name, x, shape)
            if name in _GRADIENTS:
                checks.output(function, name, x)
    lse = named["lse"]
    checks.dtype(function, "lse", lse, ("float32",))
    checks.shape(function, "lse", lse, sizes.lse)
    if not lse.flags.c_contiguous:
        checks.fail(ValueError, function, "lse", "be C-contiguous", f"strides {lse.strides}")
    _run(_Call(function, options, device, named, sizes, varlen is not None, deterministic, dropout))


def _run(call: _Call) -> None:
    named, sizes, device = call.named, call.sizes, call.device
    if math.prod(sizes.lse) == 0:  # without a query nothing is added to the gradients of keys
        named["dk"][...], named["dv"][...] = 0, 0
        return
    read = ("q", "k", "v", "dout")
    access = min(access_of(named[name], device.pointer(named[name])) for name in read)
    problem = problem_of(named, sizes, call.options, access)
    if _run_on_hopper(call, problem):
        return
    tile = select_tile(sizes.head_dim, sizes.head_dim_v, problem.score, device.max_shared_bytes)
    fields = shape_fields(named, sizes, problem, call.options)
    row_tiles, key_tiles = (max(1, -(-n // _ROWS)) for n in (sizes.seqlen_q, sizes.seqlen_k))
    fields |= {"packed": 1, "splits": 1, "row_tiles": row_tiles, "key_tiles": key_tiles}
    for name in ("out", "dout", *_GRADIENTS):
        fields |= call.strides(name)
    fields["softmax_scale"] = call.options.scale(sizes.head_dim)
    delta = device.empty(sizes.lse, np.dtype(np.float32))
    fields |= {name: device.pointer(x) for name, x in {**named, "delta": delta}.items() if name in PARAMS.fields}
    fields |= _dropout_fields(call)
    params = (PARAMS.pack(*(fields.get(name, 0) for name in PARAMS.fields)),)

    choices = {"dtype": problem.dtype, "tile": tile.cpp, "access": access, "score": problem.score}
    sequences, threads, memory = sizes.batches + call.is_varlen, (tile.threads, 1, 1), shared_bytes(tile)
    DELTA.kernel(device, dtype=problem.dtype).launch((-(-math.prod(sizes.lse) // 4), 1, 1), (128, 1, 1), params)
    blocks = row_tiles * sizes.heads * sequences
    QUERIES.kernel(device, **choices).launch((blocks, 1, 1), threads, params, memory)
    if named["k"].size or named["v"].size:
        blocks = key_tiles * sizes.kv_heads * sequences
        for of in passes(tile):
            KEYS.kernel(device, **choices, of=of).launch((blocks, 1, 1), threads, params, memory)


def _dropout_fields(call: _Call) -> dict:
    return {} if call.dropout is None else call.dropout.fields(call.function, call.device)


def _run_on_hopper(call: _Call, problem: Problem) -> bool:
    """Launch the Hopper kernels, where they are the ones to run."""
    views, addresses = {}, {}
    for name in ("q", "k", "v", "out", "dout", *_GRADIENTS):
        x = call.named[name]
        addresses[name] = address = call.device.pointer(x)
        strides = strides_of(x, call.sizes.axes)
        views[name] = sm90.View((1,) * (4 - x.ndim) + tuple(x.shape), strides, address % 16)
    if not sm90.supports(call.device, problem, views, call.is_deterministic):
        return False
    for name in ("lse", "alibi_slopes", "cu_seqlens_q", "cu_seqlens_k"):
        addresses[name] = call.device.pointer(call.named[name])
    fields = shape_fields(call.named, call.sizes, problem, call.options) | call.strides("out")
    fields["softmax_scale"] = call.options.scale(call.sizes.head_dim)
    fields |= _dropout_fields(call)
    sm90.run(call.device, problem, views, fields, addresses, call.is_deterministic)
    return True
