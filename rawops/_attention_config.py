"""What every attention kernel is told: the problem, its parameter struct, and which tile and split it takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rawops._runtime.kernel import ParamStruct

DTYPES = ("float16", "bfloat16", "float32")
HEAD_DIMS = (64, 96, 128, 192, 256)  # what kernels are made for; others are padded inside
UNLIMITED = -1  # a window bound
LONGEST = 1 << 30  # keys or queries of a sequence: sums of two fit 32 bits

# How a score differs from scale * q.k, as the bits of a template argument (attention_problem.cuh)
SOFTCAP, ALIBI, BIAS, MULTIPLY = 1, 2, 4, 8

# --- parameters -----------------------------------------------------------------------------------------------------


def _strides(name: str) -> dict[str, str]:
    return {f"{name}_{axis}": "int64" for axis in ("batch", "row", "head", "col")}


_POINTERS = ("q", "k", "v", "out", "lse", "alibi_slopes", "bias")
_POINTERS += ("cu_seqlens_q", "cu_seqlens_k", "seqlens_k", "block_table")
CALL_FIELDS = dict.fromkeys(_POINTERS, "pointer")
SHAPE_FIELDS = {
    **{key: kind for name in ("q", "k", "v", "out", "bias") for key, kind in _strides(name).items()},
    **dict.fromkeys(("lse_batch", "lse_head", "out_split", "lse_split"), "int64"),
    **dict.fromkeys(("alibi_batch", "block_table_batch"), "int64"),
    **dict.fromkeys(("batches", "heads", "group", "packed", "seqlen_q", "seqlen_k", "total_q"), "int32"),
    **dict.fromkeys(("head_dim", "head_dim_v", "row_tiles", "splits", "window_left", "window_right"), "int32"),
    **dict.fromkeys(("page_shift", "bias_is_float", "out_pairs"), "int32"),
    **dict.fromkeys(("scale", "softcap"), "float32"),
}
CALL = ParamStruct("AttentionCall", **CALL_FIELDS)
SHAPE = ParamStruct("AttentionShape", **SHAPE_FIELDS)
PARAMS = ParamStruct("AttentionParams", **CALL_FIELDS, **SHAPE_FIELDS)  # one after the other, both of 8-byte alignment


# --- problem --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """All that the choice of a kernel depends on; no pointers, no strides.

    Attributes
    ----------
    dtype : str
        Of q, k and v.
    batches, seqlen_q, seqlen_k : int
        With `varlen` the longest ones of `batches` sequences.
    heads, kv_heads, head_dim, head_dim_v : int
    window_left, window_right : int
        `UNLIMITED` or a bound; causal is a `window_right` of 0.
    score : int
        Bits of `SOFTCAP`, `ALIBI`, `BIAS`, `MULTIPLY`.
    access : int
        Widest access in bytes that the rows of q, k and v all allow; 16 is what fast copies need.
    varlen : bool
    """

    dtype: str
    batches: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    window_left: int = UNLIMITED
    window_right: int = UNLIMITED
    score: int = 0
    access: int = 16
    varlen: bool = False

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads

    @property
    def is_masked(self) -> bool:
        """Whether a window or causality hides keys."""
        return self.window_left >= 0 or self.window_right >= 0


def padded(head_dim: int) -> int:
    """Return the head size of the kernel that takes `head_dim`."""
    return next(size for size in HEAD_DIMS if size >= head_dim)


def score_bits(softmax_scale: float, softcap: float, has_alibi: bool, has_bias: bool) -> int:
    """Return the template argument for how scores are made."""
    bits = SOFTCAP * (softcap > 0) + ALIBI * has_alibi + BIAS * has_bias
    return bits or MULTIPLY * (not softmax_scale > 0)


def score_scales(softmax_scale: float, softcap: float) -> tuple[float, float]:
    """Return the struct's `scale` and `softcap`: powers are of two inside the kernels."""
    if softcap > 0:
        return softmax_scale / softcap, softcap * math.log2(math.e)
    return softmax_scale * math.log2(math.e), 0.0
