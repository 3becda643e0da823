"""Kernels that work along the last axis: normalisation, softmax, gates, rotary positions, sums."""

from __future__ import annotations

import math

from rawops import config
from rawops._rowwise_call import OPS, run
from rawops._rowwise_rope import MAX_PAIRS
from rawops._rowwise_rope import OP as ROPE
from rawops._runtime import checks, dtypes


def _eps(function: str, eps) -> float:
    eps = checks.number(function, "eps", eps)
    if not 0 <= eps < math.inf:
        checks.fail(ValueError, function, "eps", "be finite and not negative", eps)
    return eps


def rmsnorm(x, weight=None, eps: float = 1e-6, residual=None, *, out=None, residual_out=None):
    """Divide rows by their root mean square: ``x / sqrt(mean(x**2) + eps) * weight`` (Zhang and Sennrich, 2019).

    Parameters
    ----------
    x : array (..., N)
        float16, bfloat16, float32 or float64. Any strides; rows on 16-byte boundaries with neighbouring columns are
        fastest.
    weight : array (N,), optional
        Of x's dtype, or float32 beside 16-bit rows. Ones if None.
    eps : float
        Not negative.
    residual : array (..., N), optional
        Of x's dtype, any strides. ``x + residual`` takes x's place; it is added in float32 and **not rounded** before
        it is normalised, so that a sum past the largest float16 has its norm all the same.
    out : array (..., N), optional
        Of x's dtype, any strides. It may be x or residual itself.
    residual_out : array (..., N), optional
        Where ``x + residual`` goes, rounded: what the next layer's residual is. Of x's dtype, any strides; it may be
        residual or x itself. Only with residual.

    Returns
    -------
    array (..., N)
        Of x's dtype, out if it was given.

    Raises
    ------
    TypeError, ValueError
        For a wrong dtype, shape or eps, and where an output shares memory with an input otherwise than as above,
        before anything is launched.

    Notes
    -----
    Sums are float32 (float64 of float64), in an order that depends on the shape alone: the same bits each time. Rows
    whose squares float32 cannot hold (entries from 1e19 on) are measured in units of a power of two. A row of zeros
    gives zeros as long as eps is not 0. An infinity or a NaN in a row reaches that row alone: an infinity makes NaN of
    itself and 0 of the others.

    One launch, or several for more than four axes that cannot be merged, which nothing waits for; with out it can be
    captured in a CUDA graph after one call. On Hopper it overlaps with the end of the launch before it.
    """
    operands = (x, weight, None, residual, out, residual_out)
    return run(OPS["norm"], "rmsnorm", operands, (_eps("rmsnorm", eps), False))[4]


def layernorm(x, weight=None, bias=None, eps: float = 1e-5, *, residual=None, out=None, residual_out=None):
    """Normalise rows: ``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`` (Ba, Kiros and Hinton, 2016).

    Parameters
    ----------
    x : array (..., N)
        As for `rmsnorm`, as are residual, out and residual_out.
    weight, bias : array (N,), optional
        Both of x's dtype, or both float32 beside 16-bit rows. Ones and zeros if None.
    eps : float
        Not negative. var is the mean of the squared distances from the mean, which is taken first.

    Returns
    -------
    array (..., N)
        Of x's dtype, out if it was given.

    Raises
    ------
    TypeError, ValueError
        As `rmsnorm`.

    Notes
    -----
    As for `rmsnorm`. An infinity or a NaN makes its whole row NaN. Rows far from 0 are as precise as others: what the
    rounding of their mean leaves out is taken off.
    """
    operands = (x, weight, bias, residual, out, residual_out)
    return run(OPS["norm"], "layernorm", operands, (_eps("layernorm", eps), True))[4]


def softmax(x, *, out=None):
    """Return ``exp(x - max(x)) / sum(exp(x - max(x)))`` along the last axis.

    Parameters
    ----------
    x : array (..., N)
        float16, bfloat16, float32 or float64, any strides.
    out : array (..., N), optional
        Of x's dtype, any strides. It may be x itself.

    Returns
    -------
    array (..., N)
        Of x's dtype, out if it was given.

    Raises
    ------
    TypeError, ValueError
        For a wrong dtype or shape, and where out shares memory with x otherwise, before anything is launched.

    Notes
    -----
    Sums are float32 (float64 of float64), found in one pass with the maximum (Milakov and Gimelshein, 2018,
    arXiv:1805.02867): the same bits each time. -inf gives 0; a row of nothing else, a row with +inf and one with NaN
    are NaN throughout, as in NumPy, and leave other rows alone. Rows of up to 64 KB (of 512 KB from Hopper on) are read
    once, of 16 KB where they are not aligned.

    One launch, or several for more than four axes that cannot be merged, which nothing waits for; with out it can be
    captured in a CUDA graph after one call.
    """
    return run(OPS["softmax"], "softmax", (x, out), ())[1]


def row_sum(x, *, out_dtype=None, out=None):
    """Return the sum along the last axis.

    Parameters
    ----------
    x : array (..., N)
        float16, bfloat16, float32 or float64, any strides.
    out_dtype : dtype, optional
        x's, if left out, or float32 of 16-bit rows.
    out : array (...), optional
        Of out_dtype, or of one of the two if that is left out; any strides.

    Returns
    -------
    array (...)
        out if it was given. Zeros where N is 0.

    Raises
    ------
    TypeError, ValueError
        For a wrong dtype or shape, and where out shares memory with x, before anything is launched.

    Notes
    -----
    Added in float32 (float64 of float64), in an order that depends on the shape alone: the same bits each time. A
    float16 sum past 65504 is inf.

    One launch, or two for few long rows, which are cut into parts; with more than four axes that cannot be merged, as
    many for each index of the outermost ones. Nothing waits for them, and with out they can be captured in a CUDA graph
    after one call.
    """
    return run(OPS["row_sum"], "row_sum", (x, out), (None if out_dtype is None else dtypes.shown(out_dtype),))[1]


def gelu(x, approximate: str | None = None, *, out=None):
    """Return ``x * Phi(x)``, Phi the distribution function of the normal distribution (Hendrycks and Gimpel, 2016).

    Parameters
    ----------
    x : array
        float16, bfloat16, float32 or float64, any shape and strides.
    approximate : None or "tanh"
        "tanh": ``x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))``.
    out : array, optional
        Of x's shape and dtype, any strides. It may be x itself.

    Returns
    -------
    array
        Of x's shape and dtype, out if it was given.

    Raises
    ------
    TypeError, ValueError
        For a wrong dtype, shape or approximate, and where out shares memory with x otherwise, before anything is
        launched.

    Notes
    -----
    float32 is right to 1.5 ulp from -1 on and to 5.5 below, by tanh to 3 and some 150; float64 is as precise as its
    functions; 16-bit values are computed to about 5e-6 of float32. The limit is taken at -inf, which gives 0; NaN stays
    NaN.

    One launch, or several for more than four axes that cannot be merged, which nothing waits for; with out it can be
    captured in a CUDA graph after one call.
    """
    checks.choice("gelu", "approximate", approximate, (None, "tanh"))
    return run(OPS["activation"], "gelu", (x, out), ("gelu_tanh" if approximate else "gelu",))[1]


def silu(x, *, out=None):
    """Return ``x / (1 + exp(-x))``, also called swish.

    Parameters
    ----------
    x, out : array
        As for `gelu`.

    Returns
    -------
    array
        Of x's shape and dtype, out if it was given.

    Raises
    ------
    TypeError, ValueError
        As `gelu`.

    Notes
    -----
    As for `gelu`, but float32 is right to about 3 ulp.
    """
    return run(OPS["activation"], "silu", (x, out), ("silu",))[1]


def swiglu(gate_up, *, out=None):
    """Return ``silu(gate) * up``, gate the first half of the columns and up the second (Shazeer, 2020).

    Parameters
    ----------
    gate_up : array (..., 2 N)
        float16, bfloat16, float32 or float64, any strides: what a product with a fused gate_up weight gives. (`gemm`
        does both at once with ``activation="swiglu"``.)
    out : array (..., N), optional
        Of gate_up's dtype, any strides.

    Returns
    -------
    array (..., N)
        Of gate_up's dtype, out if it was given.

    Raises
    ------
    TypeError, ValueError
        For a wrong dtype, an odd number of columns, a wrong shape, and where out shares memory with gate_up, before
        anything is launched.

    Notes
    -----
    As for `silu`. The product is rounded once, so that only it can be past the largest float16. A gate of -inf counts
    as 0, and so does one below -98 of 16 bits, or -136 of float32, however large up is.
    """
    return run(OPS["swiglu"], "swiglu", (gate_up, out), ("swiglu",))[1]


def rope(
    q,
    k,
    positions,
    *,
    theta: float = 10000.0,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    cos=None,
    sin=None,
    q_out=None,
    k_out=None,
):
    """Turn pairs of columns of queries and keys by angles that grow with their position (RoFormer: Su et al., 2021).

    Pair i, of rotary_dim / 2, turns by ``position * theta ** (-2 i / rotary_dim)``:
    ``(x, y) -> (x cos - y sin, y cos + x sin)``.

    Parameters
    ----------
    q : array (..., num_heads, head_dim)
        float16, bfloat16, float32 or float64, any strides: a slice of a packed qkv, say.
    k : array (..., num_kv_heads, head_dim) or None
        Of q's dtype and leading axes.
    positions : array (...) of int32 or int64
        One a token: of q's axes before num_heads, or what broadcasts to them. Any strides, any values.
    theta : float
        The base of the angles, positive. Not used with cos and sin.
    interleaved : bool
        True: a pair is two neighbouring columns (GPT-J). False: columns i and i + rotary_dim / 2 (GPT-NeoX, Llama).
    rotary_dim : int, optional
        How many columns, from the first, are turned; even, at most head_dim and 256. The others are copied as they are.
        All of head_dim if left out, or twice what the tables have.
    cos, sin : array (positions, rotary_dim / 2), optional
        Cosines and sines by position instead of theta: of one dtype, any of q's. A position that they do not have makes
        the turned columns NaN; with RAWOPS_CHECK=1 it raises.
    q_out, k_out : array, optional
        Where the results go: of the shapes and dtype of q and k, any strides. They may be q and k themselves.

    Returns
    -------
    tuple of array
        q and k, turned: q_out and k_out if they were given; k is None where there was none.

    Raises
    ------
    TypeError, ValueError
        For a wrong dtype, shape or option, and where an output shares memory with an input otherwise, before anything
        is launched. Slices of one array that lie between each other share none.

    Notes
    -----
    Angles are taken in float64 and whole turns left out before the sine and cosine, in float32 (float64 of float64):
    right to 1e-6 also at a position of 1e7. All heads of a token share them.

    One launch for q and k, or several for more than four axes before the heads that cannot be merged, which nothing
    waits for; with q_out and k_out it can be captured in a CUDA graph after one call.
    """
    theta = checks.number("rope", "theta", theta)
    if not 0 < theta < math.inf:
        checks.fail(ValueError, "rope", "theta", "be positive and finite", theta)
    if rotary_dim is not None:  # here: 64.0 would find the plan of 64
        rotary_dim = checks.int_range("rope", "rotary_dim", rotary_dim, 0, 2 * MAX_PAIRS)
    options = (theta, checks.flag("rope", "interleaved", interleaved), rotary_dim)
    check = _check_positions if cos is not None and config.current().check else None
    made = run(ROPE, "rope", (q, positions, k, cos, sin, q_out, k_out), options, check)
    return made[5], made[6]


def _check_positions(q, positions, k, cos, *_) -> None:
    """Raise for positions that a table does not have, which waits for the device."""
    low, high = (int(positions.min()), int(positions.max())) if positions.size else (0, 0)
    if positions.size and not 0 <= low <= high < cos.shape[0]:
        rule = f"be {checks.places(cos.shape[0], 'rows of the tables')}"
        checks.fail(ValueError, "rope", "positions", rule, f"{low} to {high}")
