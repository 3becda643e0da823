"""The operands of attention: options, checks, sizes and strides."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rawops._attention_config import (
    DTYPES,
    FLOAT8,
    HEAD_DIMS,
    LONGEST,
    MOST_SPLITS,
    UNLIMITED,
    Problem,
    score_bits,
    score_scales,
)
from rawops._attention_dropout import checked_probability
from rawops._runtime import checks

AXES = ("batch", "row", "head", "col")  # of q, k, v and out, in the order of AttentionStrides
_MAX_HEAD_DIM = HEAD_DIMS[-1]
AS_BFLOAT16 = "Convert q, k and v to bfloat16."  # the way out where float8 cannot go

# --- options --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """The keywords of a call that are no arrays; `softmax_scale` None is 1/sqrt(head_dim)."""

    causal: bool = False
    softmax_scale: float | None = None
    window: tuple[int | None, int | None] = (None, None)
    softcap: float = 0.0
    num_splits: int | None = None
    return_lse: bool = False
    dropout_p: float = 0.0

    @property
    def bounds(self) -> tuple[int, int]:
        """The window as the kernels take it, causality included."""
        left, right = (UNLIMITED if bound is None or bound >= LONGEST else bound for bound in self.window)
        return left, 0 if self.causal else right

    def scale(self, head_dim: int) -> float:
        return self.softmax_scale if self.softmax_scale is not None else max(head_dim, 1) ** -0.5


def checked(function: str, options: Options) -> Options:
    """Return the options with everything in them of its own type, or raise for what the user got wrong."""
    scale, window = options.softmax_scale, options.window
    if scale is not None:
        scale = _finite(function, "softmax_scale", scale)
    softcap = _finite(function, "softcap", options.softcap)
    if softcap < 0:
        checks.fail(ValueError, function, "softcap", "be 0 (no cap) or positive", softcap)
    scale = in_float32(function, scale, softcap)
    if not (isinstance(window, (tuple, list)) and len(window) == 2):
        checks.fail(TypeError, function, "window", "be a pair (left, right)", repr(window), "None is unlimited.")
    hint = "None is unlimited; causal=True hides what comes after."
    most = np.iinfo(np.int64).max
    bounds = [None if b is None else checks.int_range(function, "window", b, 0, most, hint) for b in window]
    splits = options.num_splits
    if splits is not None:
        splits = checks.int_range(function, "num_splits", splits, 1, MOST_SPLITS, "None chooses it.")
    causal = checks.flag(function, "causal", options.causal)
    return_lse = checks.flag(function, "return_lse", options.return_lse)
    dropout_p = checked_probability(function, options.dropout_p)
    return Options(causal, scale, tuple(bounds), softcap, splits, return_lse, dropout_p)


def in_float32(function: str, softmax_scale: float | None, softcap: float) -> float | None:
    """Return the scale, 0 for what float32 would make of it, or raise where it or the softcap is too large for that."""
    scale = 1.0 if softmax_scale is None else softmax_scale
    if max(map(abs, score_scales(scale, softcap))) >= 2.0**128:
        rule = "fit float32 when multiplied by log2(e)"
        if softcap:
            checks.fail(ValueError, function, "softcap", f"{rule}, as must softmax_scale / softcap", softcap)
        checks.fail(ValueError, function, "softmax_scale", rule, scale)
    return 0.0 if abs(scale) < 2.0**-126 else softmax_scale


def _finite(function: str, name: str, value) -> float:
    value = checks.number(function, name, value)
    if not np.isfinite(value):
        checks.fail(ValueError, function, name, "be finite", value)
    return value


# --- operands -------------------------------------------------------------------------------------------------------


class Layout(NamedTuple):
    """What the cu_seqlens add: the longest sequences as the caller states them."""

    max_seqlen_q: int
    max_seqlen_k: int


def strides_of(x, axes: tuple[int | None, ...]) -> tuple[int, ...]:
    """Strides of the axes in elements, 0 for None and for axes that broadcast."""
    return tuple(0 if axis is None or x.shape[axis] == 1 else x.strides[axis] // x.dtype.itemsize for axis in axes)


def access_of(x, address: int) -> int:
    """Widest access in bytes that every row of an array allows, rows along its last axis."""
    itemsize = x.dtype.itemsize
    if x.shape[-1] > 1 and x.strides[-1] != itemsize:
        return itemsize
    steps = [address, *(s for extent, s in zip(x.shape[:-1], x.strides[:-1], strict=True) if extent > 1)]
    return next(width for width in (16, 8, 4, 2) if width == itemsize or not any(step % width for step in steps))


def check_values(function: str, named: dict, sizes: Sizes, varlen: Layout | None) -> None:
    """With RAWOPS_CHECK=1: raise for cu_seqlens that bound no sequences of these lengths, and for negative scales.

    It waits for the device.
    """
    for name in ("scale_q", "scale_k"):
        scale = named.get(name)
        if scale is not None and (scale < 0).any():
            checks.fail(ValueError, function, name, "not be negative", float(scale.min()))
    if varlen is None:
        return
    limits = {"q": (sizes.total_q, varlen.max_seqlen_q), "k": (named["k"].shape[0], varlen.max_seqlen_k)}
    for name, (total, longest) in limits.items():
        found = [int(x) for x in named[f"cu_seqlens_{name}"]]
        lengths = [end - begin for begin, end in itertools.pairwise(found)]
        if found[0] != 0 or min(lengths, default=0) < 0 or found[-1] > total or max(lengths, default=0) > longest:
            rule = f"rise from 0 to at most {total} by at most {longest}"
            checks.fail(ValueError, function, f"cu_seqlens_{name}", rule, found)


@dataclass(frozen=True)
class Sizes:
    """The sizes of a problem, and the axes (batch, row, head, col) of its arrays."""

    batches: int
    seqlen_q: int
    seqlen_k: int
    total_q: int
    total_keys: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    out: tuple[int, ...]
    lse: tuple[int, ...]
    axes: tuple[int | None, ...]


def sizes_of(function: str, named: dict, varlen: Layout | None, dtypes: tuple = DTYPES) -> Sizes:
    """Check shapes and dtypes of all arrays and return the sizes."""
    q, k, v = named["q"], named["k"], named["v"]
    dtype = checks.dtype(function, "q", q, dtypes)
    ndim, shape = (4, "(batch, seqlen, heads, head_dim)") if varlen is None else (3, "(total, heads, head_dim)")
    for name, x in (("q", q), ("k", k), ("v", v)):
        checks.dtype(function, name, x, (dtype,), "q, k and v have one dtype; convert one of them.")
        if x.ndim != ndim:
            checks.fail(ValueError, function, name, f"have {ndim} dimensions {shape}", f"shape {tuple(x.shape)}")
    *rows_q, heads, head_dim = q.shape
    *rows_k, kv_heads, _ = k.shape
    hint = f"q and k share {'head_dim' if ndim == 3 else 'batch and head_dim'}."
    checks.shape(function, "k", k, (*q.shape[: ndim - 3], *k.shape[ndim - 3 : -1], head_dim), hint)
    checks.shape(function, "v", v, (*k.shape[:-1], v.shape[-1]), "v is k's but for its own head_dim.")
    for name, x in (("q", q), ("v", v)):
        if x.shape[-1] > _MAX_HEAD_DIM:
            checks.fail(ValueError, function, name, f"have a head_dim of at most {_MAX_HEAD_DIM}", x.shape[-1])
    if heads and (kv_heads == 0 or heads % kv_heads):
        rule = f"have a number of heads that those of k ({kv_heads}) divide"
        checks.fail(ValueError, function, "q", rule, heads, "Query head h reads KV head h // (Hq / Hkv).")
    if max(rows_q[-1], rows_k[-1]) >= LONGEST:
        checks.fail(ValueError, function, "q", f"and k must have under {LONGEST} rows", (rows_q[-1], rows_k[-1]))
    out = (*q.shape[:-1], v.shape[-1])
    common = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "head_dim_v": v.shape[-1], "out": out}
    if varlen is None:
        batches = q.shape[0]
        rows = {"batches": batches, "seqlen_q": rows_q[-1], "seqlen_k": rows_k[-1]}
        rows |= {"total_q": rows_q[-1], "total_keys": rows_k[-1]}
        return Sizes(**common, **rows, lse=(batches, heads, rows_q[-1]), axes=(0, 1, 2, 3))
    batches = _check_cu_seqlens(function, named)
    rows = {"batches": batches, "seqlen_q": varlen.max_seqlen_q, "seqlen_k": varlen.max_seqlen_k}
    rows |= {"total_q": rows_q[0], "total_keys": rows_k[0]}
    return Sizes(**common, **rows, lse=(heads, rows_q[0]), axes=(None, 0, 1, 2))


def _check_cu_seqlens(function: str, named: dict) -> int:
    """Check the two arrays and return how many sequences they bound."""
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        x = named[name]
        checks.dtype(function, name, x, ("int32",))
        if x.ndim != 1 or x.size == 0:
            checks.fail(ValueError, function, name, "have shape (batch_size + 1,)", f"shape {tuple(x.shape)}")
        if x.size > 1 and x.strides[0] != x.dtype.itemsize:
            checks.fail(ValueError, function, name, "be contiguous", f"strides {x.strides}")
    checks.shape(function, "cu_seqlens_k", named["cu_seqlens_k"], named["cu_seqlens_q"].shape, "One entry a sequence.")
    return named["cu_seqlens_q"].size - 1


def check_scores(function: str, named: dict, sizes: Sizes) -> None:
    """Check alibi_slopes and bias."""
    slopes, bias = named["alibi_slopes"], named["bias"]
    for name, x in (("alibi_slopes", slopes), ("bias", bias)):
        if x is not None and named["q"].dtype.name == FLOAT8:
            checks.fail(ValueError, function, name, "be None with float8", "an array", AS_BFLOAT16)
    if slopes is not None:
        checks.dtype(function, "alibi_slopes", slopes, ("float32",))
        if tuple(slopes.shape) not in ((sizes.heads,), (sizes.batches, sizes.heads)):
            rule = f"have shape ({sizes.heads},) or ({sizes.batches}, {sizes.heads})"
            checks.fail(ValueError, function, "alibi_slopes", rule, tuple(slopes.shape))
        if slopes.size and sizes.heads > 1 and slopes.strides[-1] != 4:
            checks.fail(
                ValueError, function, "alibi_slopes", "be contiguous along its heads", f"strides {slopes.strides}"
            )
    if bias is not None:
        checks.dtype(function, "bias", bias, (named["q"].dtype.name, "float32"))
        full = (sizes.batches, sizes.heads, sizes.seqlen_q, sizes.seqlen_k)
        extents = (1,) * (4 - bias.ndim) + tuple(bias.shape)
        if bias.ndim > 4 or any(e not in (1, f) for e, f in zip(extents, full, strict=True)):
            rule = f"broadcast to (batch, heads, seqlen_q, seqlen_k) = {full}"
            checks.fail(ValueError, function, "bias", rule, f"shape {tuple(bias.shape)}")


def check_scales(function: str, named: dict, sizes: Sizes) -> None:
    """Check scale_q, scale_k and scale_v."""
    for name, heads in (("scale_q", sizes.heads), ("scale_k", sizes.kv_heads), ("scale_v", sizes.kv_heads)):
        scale = named[name]
        if scale is None:
            continue
        if named["q"].dtype.name != FLOAT8:
            checks.fail(ValueError, function, name, "be None unless q, k and v are float8", named["q"].dtype.name)
        checks.dtype(function, name, scale, ("float32",))
        if tuple(scale.shape) not in ((), (heads,), (sizes.batches, heads)):
            rule = f"have shape (), ({heads},) or ({sizes.batches}, {heads})"
            checks.fail(ValueError, function, name, rule, tuple(scale.shape))


def scale_strides(named: dict) -> tuple[int, ...]:
    """Strides of batch and head in scale_q, scale_k and scale_v, as AttentionScales has them."""
    found = []
    for name in ("scale_q", "scale_k", "scale_v"):
        scale = named[name]
        steps = () if scale is None else scale.strides
        found += [0, 0, *(step // 4 for step in steps)][-2:]
    return tuple(found)


def dense(shape: tuple[int, ...], axes: tuple[int | None, ...]) -> tuple[int, ...]:
    """Strides in elements of a C-contiguous array."""
    return tuple(0 if axis is None else math.prod(shape[axis + 1 :]) for axis in axes)


# --- what the kernels are told --------------------------------------------------------------------------------------


def problem_of(named: dict, sizes: Sizes, options: Options, access: int) -> Problem:
    """Return what the choice of a kernel depends on."""
    left, right = options.bounds
    has_alibi, has_bias = named["alibi_slopes"] is not None, named["bias"] is not None
    return Problem(
        dtype=named["q"].dtype.name,
        batches=sizes.batches,
        seqlen_q=sizes.seqlen_q,
        seqlen_k=sizes.seqlen_k,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        head_dim_v=sizes.head_dim_v,
        window_left=left,
        window_right=right,
        score=score_bits(options.scale(sizes.head_dim), options.softcap, has_alibi, has_bias, options.dropout_p > 0),
        access=access,
        varlen=named["cu_seqlens_q"] is not None,
    )


def shape_fields(named: dict, sizes: Sizes, problem: Problem, options: Options) -> dict:
    """Return the fields of AttentionShape but for those of out and of the configuration."""
    fields = {"batches": sizes.batches, "heads": sizes.heads, "group": problem.group}
    fields |= {"seqlen_q": sizes.seqlen_q, "seqlen_k": sizes.seqlen_k}
    fields |= {"total_q": sizes.total_q, "total_keys": sizes.total_keys}
    fields |= {"head_dim": sizes.head_dim, "head_dim_v": sizes.head_dim_v}
    fields |= {"window_left": problem.window_left, "window_right": problem.window_right}
    fields["scale"], fields["softcap"] = score_scales(options.scale(sizes.head_dim), options.softcap)
    for name in "qkv":
        strides = strides_of(named[name], sizes.axes)
        fields |= {f"{name}_{axis}": s for axis, s in zip(AXES, strides, strict=True)}
    *lse_batch, lse_heads, lse_rows = sizes.lse
    fields |= {"lse_head": lse_rows, "lse_batch": lse_heads * lse_rows if lse_batch else 0}
    slopes, bias = named["alibi_slopes"], named["bias"]
    if slopes is not None and slopes.ndim == 2:
        fields["alibi_batch"] = strides_of(slopes, (0,))[0]
    if bias is not None:
        axes = tuple(axis if axis >= 0 else None for axis in range(bias.ndim - 4, bias.ndim))
        batch, head, row, col = strides_of(bias, axes)
        fields |= {"bias_batch": batch, "bias_head": head, "bias_row": row, "bias_col": col}
        fields["bias_is_float"] = bias.dtype == np.float32
    return fields
