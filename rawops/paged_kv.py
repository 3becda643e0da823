"""Attention over keys and values in pages, and writing them there.

A pool of pages, (num_pages, 2, page_size, num_kv_heads, head_dim), holds the keys ([:, 0]) and values ([:, 1]) of many
sequences. Token t of sequence b is slot ``t % page_size`` of page ``block_table[b, t // page_size]``. Nothing is
gathered: kernels translate addresses as they load.
"""

from __future__ import annotations

from rawops._paged_kv_append import append
from rawops._paged_kv_attention import attend, options_of
from rawops._paged_kv_cache import PagedKVCache
from rawops._runtime import checks

__all__ = ["PagedKVCache", "append_paged_kv", "paged_attention"]


def append_paged_kv(
    k,
    v,
    pages,
    block_table,
    positions,
    *,
    sequence_ids=None,
    layout: str = "NHD",
    k_scale=None,
    v_scale=None,
    cos=None,
    sin=None,
    interleaved: bool = False,
    q=None,
    q_out=None,
) -> None:
    """Write the keys and values of new tokens into their pages, all in one launch.

    Parameters
    ----------
    k, v : array (tokens, num_kv_heads, head_dim)
        Of the pool's dtype, or float16 or bfloat16 for an 8-bit pool, with any strides: slices of a packed QKV are as
        good as any. Rows on 16-byte boundaries are fastest.
    pages : array (num_pages, 2, page_size, num_kv_heads, head_dim)
        The pool, which is changed in place; any strides. ``page_size`` is a power of two up to 256.
    block_table : int32 array (batch_size, max_pages), or (max_pages,) for a single sequence
        The pages of each sequence, in order.
    positions : int32 array (tokens,)
        Where each token goes in its sequence. A negative position skips the token, and its row of `k` and `v` is not
        read.
    sequence_ids : int32 array (tokens,), optional
        The row of `block_table` for each token. Without, token i is of sequence i, and there are `batch_size` tokens.
    layout : {"NHD", "HND"}
        HND: pages are (num_pages, 2, num_kv_heads, page_size, head_dim).
    k_scale, v_scale : float32 array (num_kv_heads,) or (num_pages, num_kv_heads), optional
        For a pool of float8_e4m3fn, float8_e5m2 or int8: it gets k / k_scale and v / v_scale, rounded to nearest (ties
        to even) and saturated. A NaN stays one in float8 and becomes 0 in int8; a scale of 0 stores zeros. 1 by
        default.
    cos, sin : float32 array (max_position, rotary_dim / 2), optional
        Rotary position embedding (Su et al., 2021, arXiv:2104.09864) of the first `rotary_dim` columns of k, by the
        row of each token's position, in float32 before it is rounded. A position past the tables skips the token.
    interleaved : bool
        Turn pairs of neighbours (GPT-J) instead of columns i and ``i + rotary_dim / 2`` (GPT-NeoX, Llama).
    q, q_out : array (tokens, num_heads, head_dim), optional
        With `cos` and `sin`: q is turned too and goes to `q_out`, another array, but for the rows of skipped tokens.

    Raises
    ------
    TypeError, ValueError
        For dtypes and shapes that do not fit, before anything is launched.

    Notes
    -----
    A position past the table, a sequence that is none and a page id out of range skip the token, so nothing outside
    the pool is written; with ``RAWOPS_CHECK=1`` they raise ValueError, which waits for the device. Two tokens for one
    slot: one of the two is written. Nothing synchronises, and after a first call one can be captured in a CUDA graph,
    which then follows tables and positions as they are at each replay.
    """
    operands = (k, v, pages, block_table, positions, sequence_ids, k_scale, v_scale, cos, sin, q, q_out)
    append("append_paged_kv", operands, layout, checks.flag("append_paged_kv", "interleaved", interleaved))


def paged_attention(
    q,
    pages,
    block_table,
    seq_lens,
    *,
    cu_seqlens_q=None,
    causal: bool = True,
    softmax_scale: float | None = None,
    window: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0,
    alibi_slopes=None,
    num_splits: int | None = None,
    return_lse: bool = False,
    layout: str = "NHD",
    k_scale=None,
    v_scale=None,
    out=None,
):
    """Attend from the last queries of each sequence to its keys and values in pages.

    Decoding, where each sequence has one query; chunked prefill, where `cu_seqlens_q` gives each its own number; or
    any mix of the two in one launch. Query head h reads KV head ``h // (num_heads / num_kv_heads)``, and keys and
    values are read once for all the query heads of a group. Online softmax in float32 after Milakov and Gimelshein
    (2018, arXiv:1805.02867); keys are divided among blocks as in Flash-Decoding, in equal shares ("stream-K", Osama et
    al., 2023, arXiv:2301.03598) that are computed on the device from `seq_lens`.

    Parameters
    ----------
    q : array (total_q, num_heads, head_dim)
        float16 or bfloat16, any strides; one that is not contiguous along `head_dim`, or whose rows are off the 4-byte
        boundaries, is copied first. Without `cu_seqlens_q`, total_q is batch_size.
    pages : array (num_pages, 2, page_size, num_kv_heads, head_dim)
        The pool, of q's dtype, float8_e4m3fn, float8_e5m2 or int8, and any strides; `head_dim` up to 256, `page_size`
        a power of two up to 256.
    block_table : int32 array (batch_size, max_pages)
    seq_lens : int32 array (batch_size,)
        Keys of each sequence, those of the queries themselves included: append first.
    cu_seqlens_q : int32 array (batch_size + 1,), optional
        Sequence b has the queries ``cu_seqlens_q[b] : cu_seqlens_q[b + 1]``. Rows of q past the last become zeros.
    causal : bool
        Query i of n sees keys j <= i + seq_len - n (bottom-right). Of one query it makes no difference.
    softmax_scale : float, optional
        1 / sqrt(head_dim) by default.
    window : (left, right)
        Query i of n sees keys ``i + seq_len - n - left .. i + seq_len - n + right``, both ends in; None: unlimited.
    softcap : float
        If positive, scores become ``softcap * tanh(score * softmax_scale / softcap)``.
    alibi_slopes : float32 array (num_heads,), optional
        ``- slope * distance`` is added to the scores, after softcap.
    num_splits : int, optional
        How many blocks share the keys of a sequence and head, 1 to 1024. By default as many as balance the GPU, which
        depends on all lengths; with a number, a sequence's result does not depend on the others of its batch.
    return_lse : bool
        Return the logarithm of the softmax's denominator too.
    layout : {"NHD", "HND"}
        HND: pages are (num_pages, 2, num_kv_heads, page_size, head_dim).
    k_scale, v_scale : float32 array (num_kv_heads,) or (num_pages, num_kv_heads), optional
        What 8-bit keys and values are multiplied by: a number a head, or a page and head. 1 by default. They are
        widened to q's dtype, exactly, in registers; the scales act in float32.
    out : array (total_q, num_heads, head_dim), optional
        Where the result goes; `q` itself is allowed.

    Returns
    -------
    array (total_q, num_heads, head_dim), and with `return_lse` float32 (num_heads, total_q)
        A query that sees no key: zeros, and -inf.

    Raises
    ------
    TypeError, ValueError
        For dtypes, shapes or values that do not fit, before anything is launched.

    Notes
    -----
    What slots past a length hold changes no result, NaN too. Table entries past the last page or before the window
    lead nowhere. A length past the table counts as all of the table; a page id out of range stands for keys and
    values of zero; offsets of queries are clamped to the rows of q. With ``RAWOPS_CHECK=1`` all of these raise
    ValueError, which waits for the device. Otherwise nothing synchronises, and the same call gives the same bits.
    After a first call on a stream, calls with ``out=`` can be captured there in a CUDA graph: each replay follows
    the lengths and tables as they are then. Calls on one stream, and graphs captured on it, share a workspace, so
    replay such a graph on that stream or in order with it.
    """
    options = options_of("paged_attention", causal, softmax_scale, window, softcap, num_splits)
    operands = (q, pages, block_table, seq_lens, cu_seqlens_q, alibi_slopes, k_scale, v_scale, out)
    return attend("paged_attention", operands, options, return_lse, layout)
