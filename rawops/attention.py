"""Exact attention without the matrix of scores: flash attention, forward and backward."""

from __future__ import annotations

import functools

from rawops._attention_backward import backward
from rawops._attention_call import Attention
from rawops._attention_dropout import dropout_of
from rawops._attention_merge import merge_states
from rawops._attention_operands import LONGEST, Layout, Options, checked
from rawops._runtime import arrays, checks
from rawops._runtime.copies import ByArguments


@functools.lru_cache(maxsize=256, typed=True)  # since 2.0 and True are not the 2 and 1 that they equal
def _attention(
    function: str, varlen: Layout | None, causal, softmax_scale, window, softcap, num_splits, return_lse, dropout_p, *_
) -> Attention:
    """Return what all calls of `function` with these options share.

    The entries of `window` and `varlen` follow once more, since the cache tells no types apart within a tuple.
    """
    if varlen is not None:
        for name, longest in varlen._asdict().items():
            checks.int_range(function, name, longest, 0, LONGEST - 1)
    options = Options(causal, softmax_scale, window, softcap, num_splits, return_lse, dropout_p)
    return Attention(function, checked(function, options), varlen)


def _run(operands: tuple, seed, offset, function: str, options: tuple, varlen: Layout | None = None):
    window = options[2]
    try:
        attention = _attention(function, varlen, *options, *window, *(varlen or ()))
    except TypeError:  # what cannot be hashed; if it is not wrong either, it runs without the cache
        attention = _attention.__wrapped__(function, varlen, *options)
    return attention(operands, dropout_of(attention.function, attention.options.dropout_p, seed, offset))


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
    scale_q=None,
    scale_k=None,
    scale_v=None,
    dropout_p: float = 0.0,
    dropout_seed=None,
    dropout_offset=0,
):
    """Attend: ``softmax(scores + mask) @ v``, without the matrix of scores in memory.

    A score is ``softmax_scale * (q . k)``; with a softcap ``softcap * tanh(softmax_scale * (q . k) / softcap)``; then
    ``bias`` is added, and ``-slope * |distance|``. The softmax runs along with the products, block of keys by block of
    keys (FlashAttention: Dao et al., 2022, arXiv:2205.14135; FlashAttention-2: Dao, 2023, arXiv:2307.08691).

    Parameters
    ----------
    q : array (batch, seqlen_q, num_heads, head_dim)
        float16 or bfloat16; float32 runs too, slowly, for checks; float8_e4m3fn on Hopper, see Notes. Any strides; rows
        on 16-byte boundaries are fastest.
    k : array (batch, seqlen_k, num_kv_heads, head_dim)
        num_kv_heads divides num_heads: query head h reads KV head ``h // (num_heads // num_kv_heads)``, uncopied.
    v : array (batch, seqlen_k, num_kv_heads, head_dim_v)
        head_dim and head_dim_v are at most 256; 64, 96, 128, 192 and 256 waste nothing.
    causal : bool
        Query i sees keys up to ``i + seqlen_k - seqlen_q``: the last query sees all, whatever the lengths.
    softmax_scale : float, optional
        1 / sqrt(head_dim) if left out. Any number that fits float32, 0 and negative ones too; of float8 a positive one.
    window : (int or None, int or None)
        Query i sees keys ``i + seqlen_k - seqlen_q - left`` to ``i + seqlen_k - seqlen_q + right``, both included; None
        is unlimited. Blocks of keys that no query of a tile sees are not read.
    softcap : float
        0 for none. A score is then right to about 1e-7 of it.
    alibi_slopes : array (num_heads,) or (batch, num_heads), optional
        float32, contiguous along its heads. The distance is from key j to ``i + seqlen_k - seqlen_q``.
    bias : array broadcastable to (batch, num_heads, seqlen_q, seqlen_k), optional
        Of q's dtype or float32. -inf takes a key's weight, but not a NaN or an infinity that its k or v has. What is
        past the range of float32 when multiplied by log2(e), as its lowest number is, counts as -inf.
    num_splits : int, optional
        Ranges of keys that blocks of their own work on, merged by a second kernel, 1 to 256, and no more than there
        are blocks of keys. If left out, as many as it takes to keep the GPU busy.
    return_lse : bool
        Return the logarithm of each row's sum of exponentials too.
    out : array (batch, seqlen_q, num_heads, head_dim_v), optional
        Where the result goes; of q's dtype. Where it overlaps an input, the result is computed aside and copied.
    scale_q, scale_k, scale_v : array () or (heads,) or (batch, heads), optional
        float32, what float8 operands are multiplied by, one for each of their heads; 1 if left out. Those of q and k
        may be 0, and must not be negative, for which RAWOPS_CHECK=1 raises.
    dropout_p : float
        From 0 to under 1, in steps of 2^-16: the share of weights that become 0; the others are divided by the share
        that stays. `lse` is of all weights.
    dropout_seed : int or array of one int64 or uint64
        Needed with a `dropout_p`. Which weights go depends on seed, offset, sequence, head, query and key alone
        (Philox4x32-10: Salmon et al., 2011): the same in `flash_attention_backward`, whatever the kernel.
    dropout_offset : int below 2^32, or array of one int64 or uint64
        Another one, other weights: count calls with it. Arrays are read by the kernel, so replays of a captured graph
        may find another number there; of an offset the low 32 bits count.

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
    UnsupportedError
        For float8 without Hopper.

    Notes
    -----
    Products accumulate in float32, as do maximum, sum and result of each row; the weights are rounded to the inputs'
    dtype for the product with v. Nothing synchronises, and nothing is added up by atomics: the same call gives the same
    bits. A NaN or an infinity at a key that causality or the window hides stays hidden. To capture it in a CUDA graph,
    use `FlashAttention` with ``out=``.

    q, k and v of float8_e4m3fn give bfloat16, or float16 with an ``out`` of it. Weights are then rounded to float8,
    after they were multiplied by 16, which its range has room for; the tensor cores add products of float8 with
    about 14 bits. It takes causality and windows, and q, k and v with rows of multiples of 16 bytes, on Hopper; where
    those of ``out`` are not, the result is computed aside and copied.
    """
    options = causal, softmax_scale, window, softcap, num_splits, return_lse, dropout_p
    operands = (q, k, v, out, None, alibi_slopes, bias, None, None, scale_q, scale_k, scale_v)
    return _run(operands, dropout_seed, dropout_offset, "flash_attention", options)


def flash_attention_varlen(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0,
    alibi_slopes=None,
    num_splits: int | None = None,
    return_lse: bool = False,
    out=None,
    scale_q=None,
    scale_k=None,
    scale_v=None,
    dropout_p: float = 0.0,
    dropout_seed=None,
    dropout_offset=0,
):
    """Attend within each of many sequences that lie one after the other; otherwise as `flash_attention`.

    Parameters
    ----------
    q : array (total_q, num_heads, head_dim)
    k : array (total_k, num_kv_heads, head_dim)
    v : array (total_k, num_kv_heads, head_dim_v)
    cu_seqlens_q, cu_seqlens_k : array (batch + 1,)
        int32 on the device, contiguous, from 0 on: sequence b has rows ``cu_seqlens[b]`` to before
        ``cu_seqlens[b + 1]``. Any sequence may be empty on either side.
    max_seqlen_q, max_seqlen_k : int
        The longest sequences; what the grid is made for. A longer one is right all the same, only slower;
        RAWOPS_CHECK=1 raises for it.
    causal, softmax_scale, window, softcap, alibi_slopes, num_splits, return_lse
        As for `flash_attention`, each sequence for itself.
    dropout_p, dropout_seed, dropout_offset
        As for `flash_attention`; queries and keys count from the start of their sequence.
    out : array (total_q, num_heads, head_dim_v), optional
    scale_q, scale_k, scale_v : array () or (heads,) or (batch, heads), optional
        For float8, as for `flash_attention`.

    Returns
    -------
    out : array (total_q, num_heads, head_dim_v)
        Rows past ``cu_seqlens_q[-1]`` are zeros; those of k and v past ``cu_seqlens_k[-1]`` are not read.
    lse : array (num_heads, total_q)
        With `return_lse`.

    Notes
    -----
    The lengths are read on the device: nothing synchronises, and a captured graph may be replayed with other lengths
    up to the longest. With ``RAWOPS_CHECK=1`` they are checked, which waits for the device.
    """
    options = causal, softmax_scale, window, softcap, num_splits, return_lse, dropout_p
    operands = (q, k, v, out, None, alibi_slopes, None, cu_seqlens_q, cu_seqlens_k, scale_q, scale_k, scale_v)
    layout = Layout(max_seqlen_q, max_seqlen_k)
    return _run(operands, dropout_seed, dropout_offset, "flash_attention_varlen", options, layout)


def flash_attention_backward(
    dout,
    q,
    k,
    v,
    out,
    lse,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0,
    alibi_slopes=None,
    bias=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    dropout_seed=None,
    dropout_offset=0,
    deterministic: bool = False,
    dq=None,
    dk=None,
    dv=None,
):
    """Compute the gradients of `flash_attention` or `flash_attention_varlen` by q, k and v.

    The weights are made again from q, k and lse (FlashAttention-2: Dao, 2023, arXiv:2307.08691): beside the results one
    float32 number a row and head is all the memory it takes; on Hopper two, and a float32 dq of padded heads.

    Parameters
    ----------
    dout : array, as out
        The gradient of the loss by out, of any strides, 0 too.
    q, k, v, out, lse : array
        Arguments and results of the forward call, float16 or bfloat16; lse C-contiguous.
    causal, softmax_scale, window, softcap, alibi_slopes, bias
        Those of the forward call. There is no gradient by slopes and bias.
    dropout_p, dropout_seed, dropout_offset
        Those of the forward call, for the same weights to be dropped.
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        Those of a `flash_attention_varlen`, whose arrays have the shapes that it takes.
    deterministic : bool
        The same bits from call to call. On Hopper blocks then add to dq in turn, which takes longer, and a little more
        memory; with cu_seqlens the kernels of sm_80 do it.
    dq, dk, dv : array, optional
        Where the results go: memory that no operand has; parts of one packed array are fine.

    Returns
    -------
    dq, dk, dv : array
        As q, k and v. A query head's share of dk and dv is added in its KV head. A query without keys has a gradient of
        zeros, as have rows of storage past the last sequence.

    Raises
    ------
    TypeError, ValueError
        For dtypes, shapes or values that do not fit, before anything is launched.

    Notes
    -----
    Nothing synchronises. On Hopper, without a bias and with rows that TMA can read, blocks add to one float32 dq in the
    order in which they come, which moves its last bits from call to call, unless it is `deterministic`. Elsewhere there
    are no atomics: the same call gives the same bits. What a key and a query that do not see each other hold is
    multiplied by weights of 0: other than in the forward pass, a NaN or an infinity there, in dout too, spreads to the
    gradients of its tile.
    """
    varlen = None
    longest = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    packing = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, **longest}
    if any(value is not None for value in packing.values()):
        for name, value in packing.items():
            if value is None:
                hint = "Packed sequences take cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k together."
                checks.fail(TypeError, "flash_attention_backward", name, "be given", "None", hint)
        for name, value in longest.items():
            checks.int_range("flash_attention_backward", name, value, 0, LONGEST - 1)
        varlen = Layout(max_seqlen_q, max_seqlen_k)
    options = Options(causal, softmax_scale, window, softcap, dropout_p=dropout_p)
    options = checked("flash_attention_backward", options)
    dropout = dropout_of("flash_attention_backward", options.dropout_p, dropout_seed, dropout_offset)
    named = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    named |= {"alibi_slopes": alibi_slopes, "bias": bias, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    deterministic = checks.flag("flash_attention_backward", "deterministic", deterministic)
    return backward("flash_attention_backward", options, varlen, named, deterministic, dropout)


def merge_attention_states(out_a, lse_a, out_b, lse_b):
    """Merge two results of attention over disjoint sets of keys into the result over both.

    Parameters
    ----------
    out_a, out_b : array (batch, seqlen, num_heads, head_dim) or (total, num_heads, head_dim)
        float16, bfloat16 or float32.
    lse_a, lse_b : array (batch, num_heads, seqlen) or (num_heads, total)
        float32, natural logarithm, as `flash_attention` returns it.

    Returns
    -------
    out, lse : array
        As out_a and lse_a. Where one lse is -inf the other state comes back bit for bit, and the empty one's out is not
        read; where both are: zeros and -inf.
    """
    return merge_states("merge_attention_states", out_a, lse_a, out_b, lse_b)


class FlashAttention(ByArguments):
    """Attention with fixed options, for repeated calls; see `flash_attention`.

    It keeps its workspaces, so after a first call a call of the same sizes with ``out=`` (and ``lse=``, if that is
    wanted) allocates nothing and can be captured in a CUDA graph; an `out` that overlaps an operand, or that a float8
    kernel cannot write as it lies, gets its result by way of a new array. Calls of one object share the workspaces:
    they belong on one stream, or in an order that streams keep.

    Parameters
    ----------
    causal, softmax_scale, window, softcap, alibi_slopes, num_splits, return_lse, dropout_p
        As for `flash_attention`. `alibi_slopes` is kept, not copied.
    """

    def __init__(
        self,
        *,
        causal: bool = False,
        softmax_scale: float | None = None,
        window: tuple[int | None, int | None] = (None, None),
        softcap: float = 0.0,
        alibi_slopes=None,
        num_splits: int | None = None,
        return_lse: bool = False,
        dropout_p: float = 0.0,
    ) -> None:
        options = Options(causal, softmax_scale, window, softcap, num_splits, return_lse, dropout_p)
        self._attention = Attention("FlashAttention", checked("FlashAttention", options), workspaces={})
        (self._slopes,), _ = arrays.take("FlashAttention", alibi_slopes=alibi_slopes)

    def __call__(
        self,
        q,
        k,
        v,
        *,
        bias=None,
        out=None,
        lse=None,
        scale_q=None,
        scale_k=None,
        scale_v=None,
        dropout_seed=None,
        dropout_offset=0,
    ):
        """Run on q, k and v as `flash_attention`; lse (batch, num_heads, seqlen_q) is C-contiguous float32."""
        attention = self._attention
        dropout = dropout_of("FlashAttention", attention.options.dropout_p, dropout_seed, dropout_offset)
        operands = (q, k, v, out, lse, self._slopes, bias, None, None, scale_q, scale_k, scale_v)
        return attention(operands, dropout)
