"""Exact attention without the matrix of scores: flash attention, forward and backward."""

from __future__ import annotations

import functools

from rawops._attention_call import Attention
from rawops._attention_operands import Options, checked


@functools.lru_cache(maxsize=256)
def _attention(options: Options) -> Attention:
    """Return what all calls of `flash_attention` with these options share."""
    return Attention("flash_attention", checked("flash_attention", options))


def flash_attention(
    q,
    k,
    v,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0,
    alibi_slopes=None,
    bias=None,
    num_splits: int | None = None,
    return_lse: bool = False,
    out=None,
):
    """Attend: ``softmax(scores + mask) @ v``, without the matrix of scores in memory.

    A score is ``softmax_scale * (q . k)``; with a softcap ``softcap * tanh(softmax_scale * (q . k) / softcap)``; then
    ``bias`` is added, and ``-slope * |distance|``. The softmax runs along with the products, block of keys by block of
    keys (FlashAttention: Dao et al., 2022, arXiv:2205.14135; FlashAttention-2: Dao, 2023, arXiv:2307.08691).

    Parameters
    ----------
    q : array (batch, seqlen_q, num_heads, head_dim)
        float16 or bfloat16; float32 runs too, slowly, for checks. Any strides; rows on 16-byte boundaries are fastest.
    k : array (batch, seqlen_k, num_kv_heads, head_dim)
        num_kv_heads divides num_heads: query head h reads KV head ``h // (num_heads // num_kv_heads)``, uncopied.
    v : array (batch, seqlen_k, num_kv_heads, head_dim_v)
        head_dim and head_dim_v are at most 256; 64, 96, 128, 192 and 256 waste nothing.
    causal : bool
        Query i sees keys up to ``i + seqlen_k - seqlen_q``: the last query sees all, whatever the lengths.
    softmax_scale : float, optional
        1 / sqrt(head_dim) if left out. Any finite number, 0 and negative ones too.
    window : (int or None, int or None)
        Query i sees keys ``i + seqlen_k - seqlen_q - left`` to ``i + seqlen_k - seqlen_q + right``, both included; None
        is unlimited. Blocks of keys that no query of a tile sees are not read.
    softcap : float
        0 for none.
    alibi_slopes : array (num_heads,) or (batch, num_heads), optional
        float32. The distance is from key j to ``i + seqlen_k - seqlen_q``.
    bias : array broadcastable to (batch, num_heads, seqlen_q, seqlen_k), optional
        Of q's dtype or float32. -inf hides a key.
    num_splits : int, optional
        Ranges of keys that blocks of their own work on, merged by a second kernel. If left out, as many as it takes
        to keep the GPU busy.
    return_lse : bool
        Return the logarithm of each row's sum of exponentials too.
    out : array (batch, seqlen_q, num_heads, head_dim_v), optional
        Where the result goes; of q's dtype. Where it overlaps an input, the result is computed aside and copied.

    Returns
    -------
    out : array (batch, seqlen_q, num_heads, head_dim_v)
        A query that sees no key has zeros.
    lse : array (batch, num_heads, seqlen_q)
        With `return_lse`: float32, natural logarithm, -inf for a query that sees no key.

    Raises
    ------
    TypeError, ValueError
        For dtypes, shapes or values that do not fit, before anything is launched.

    Notes
    -----
    Products accumulate in float32, as do maximum, sum and result of each row; the weights are rounded to the inputs'
    dtype for the product with v. Nothing synchronises, no atomics: the same call gives the same bits. A NaN or an
    infinity at a hidden key stays hidden. To capture it in a CUDA graph, use `FlashAttention` with ``out=``.
    """
    options = Options(causal, softmax_scale, window, softcap, num_splits, return_lse)
    try:
        attention = _attention(options)
    except TypeError:  # what cannot be hashed; if it is not wrong either, it runs without the cache
        attention = _attention.__wrapped__(options)
    return attention((q, k, v, out, None, alibi_slopes, bias, None, None))
