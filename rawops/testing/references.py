"""What the ops should answer, in float64 NumPy, written from their contracts and nothing else.

Arguments are NumPy arrays of any dtype, taken as the values they hold: a float16 input is its exact value. Results are
float64 and not rounded. Memory that the contract calls unread is not read here either.
"""

from __future__ import annotations

import math

import numpy as np

_erfc = np.vectorize(math.erfc, otypes=[np.float64])


def relu(x: np.ndarray) -> np.ndarray:
    """max(x, 0), and NaN for NaN."""
    return np.maximum(x, 0.0)


# The next three are 0 in float64 long before -1e4: the cut changes no value and spares -inf the product inf * 0.


def gelu(x: np.ndarray) -> np.ndarray:
    """x times the normal distribution function of x."""
    x = np.maximum(x, -1e4)
    return 0.5 * x * _erfc(-x / math.sqrt(2.0))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    """The tanh approximation of `gelu`."""
    x = np.maximum(x, -1e4)
    near = np.minimum(x, 1e4)  # keeps the cube finite where tanh is 1 anyway
    # 0.5 * (1 + tanh(u)) is the logistic function of 2 u, which does not cancel for negative u.
    return x * _logistic(2.0 * math.sqrt(2.0 / math.pi) * (near + 0.044715 * near**3))


def silu(x: np.ndarray) -> np.ndarray:
    """x times the logistic function of x."""
    x = np.maximum(x, -1e4)
    return x * _logistic(x)


def _logistic(x: np.ndarray) -> np.ndarray:
    small = np.exp(-np.abs(x))  # of a negative number only: no overflow at either end
    return np.where(x >= 0, 1.0, small) / (1.0 + small)


def swiglu(x: np.ndarray) -> np.ndarray:
    """silu of the first half of the last axis times the second half."""
    half = x.shape[-1] // 2
    return silu(x[..., :half]) * x[..., half:]


ACTIVATIONS = {
    None: lambda x: x,
    "relu": relu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "silu": silu,
    "swiglu": swiglu,
}


def gemm(
    a, b, c=None, *, alpha: float = 1.0, beta: float = 0.0, bias=None, residual=None, activation: str | None = None
) -> np.ndarray:
    """activation(alpha * (a @ b) + beta * c + bias) + residual.

    Parameters
    ----------
    a, b : array
        (..., M, K) and (..., K, N); batch axes broadcast. Not read when `alpha` is 0.
    c : array, optional
        Broadcasts to (..., M, N). Not read when `beta` is 0.
    bias : array, optional
        (N,).
    residual : array, optional
        Of the result's shape.
    """
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    total = np.zeros((*batch, a.shape[-2], b.shape[-1]))
    with np.errstate(invalid="ignore", over="ignore"):
        if alpha != 0:
            total += alpha * (exact(a) @ exact(b))
        if beta != 0:
            total += beta * exact(c)
        if bias is not None:
            total += exact(bias)
        result = ACTIVATIONS[activation](total)
        return result if residual is None else result + exact(residual)


def lora_linear(x, c, a, b, *, scaling: float = 1.0, bias=None, activation: str | None = None) -> np.ndarray:
    """activation(x @ c + scaling * (x @ a) @ b + bias), x (M, K), c (K, N), a (K, r), b (r, N)."""
    return gemm(gemm(x, a), b, gemm(x, c), alpha=scaling, beta=1.0, bias=bias, activation=activation)


def gemm_magnitude(a, b) -> np.ndarray:
    """|a| @ |b|: what the rounding errors of a @ b are in proportion to, however much cancels."""
    return np.abs(exact(a)) @ np.abs(exact(b))


def exact(x) -> np.ndarray:
    """x in float64; complex numbers, which would lose their imaginary parts, raise TypeError."""
    return np.asarray(x).astype(np.float64, casting="same_kind")


# --- attention ------------------------------------------------------------------------------------------------------


def philox(counter: tuple, key: tuple[int, int]) -> tuple:
    """Philox4x32-10 (Salmon et al., 2011): four arrays of 32-bit numbers from four arrays and a key of two."""
    c0, c1, c2, c3 = (np.asarray(c, dtype=np.uint64) for c in counter)
    low, key0, key1 = np.uint64(0xFFFFFFFF), *map(int, key)
    for _ in range(10):
        first, second = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (
            (second >> np.uint64(32)) ^ c1 ^ np.uint64(key0),
            second & low,
            (first >> np.uint64(32)) ^ c3 ^ np.uint64(key1),
            first & low,
        )
        key0, key1 = (key0 + 0x9E3779B9) % 2**32, (key1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def attention_dropout(shape: tuple[int, int, int, int], p: float, seed: int, offset: int = 0) -> np.ndarray:
    """What the weights (batch, heads, seqlen_q, seqlen_k) are multiplied by: 0, or the inverse of the share kept.

    Each counter makes eight numbers of 16 bits; a weight whose number is under round((1 - p) * 2^16) is kept.
    """
    batch, heads, query, key = np.ogrid[tuple(map(slice, shape))]
    counter = (key // 16 * 4 + key % 8 // 2, query // 16 * 8 + query % 8, batch * heads.size + heads, offset)
    words = np.stack(np.broadcast_arrays(*philox(counter, (seed % 2**32, seed // 2**32))))
    word = np.broadcast_to(query % 16 // 8 * 2 + key % 16 // 8, words.shape[1:])
    numbers = np.take_along_axis(words, word[None], 0)[0] >> (16 * (key % 2)).astype(np.uint64) & np.uint64(0xFFFF)
    keep = max(1, round((1 - p) * 2**16))
    return np.where(numbers < keep, 2**16 / keep, 0.0)


class AttentionRows:
    """The rows of an attention problem one at a time: what a query sees, its scores and their derivatives.

    Parameters are those of `attention`; rows are those of one batch entry and head.
    """

    def __init__(
        self,
        q,
        k,
        *,
        causal=False,
        softmax_scale=None,
        window=(None, None),
        softcap=0.0,
        alibi_slopes=None,
        bias=None,
        dropout_p=0.0,
        dropout_seed=0,
        dropout_offset=0,
    ) -> None:
        self.q, self.k, self.softcap, self.slopes, self.bias = exact(q), exact(k), softcap, alibi_slopes, bias
        self.scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        self.group = q.shape[2] // k.shape[2]
        self.shift = k.shape[1] - q.shape[1]
        left, right = window
        self.left, self.right = left, 0 if causal else right
        shape = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        self.factors = np.ones(shape)
        if dropout_p:
            self.factors = attention_dropout(shape, dropout_p, dropout_seed, dropout_offset)

    def seen(self, i: int) -> range:
        """Keys that query i sees."""
        same, count = i + self.shift, self.k.shape[1]
        begin = 0 if self.left is None else max(0, same - self.left)
        end = count if self.right is None else min(count, same + self.right + 1)
        return range(begin, max(begin, end))

    def scores(self, b: int, h: int, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Scores of the keys that query i sees, and their derivatives by scale * q.k."""
        seen = self.seen(i)
        products = self.scale * (self.k[b, seen.start : seen.stop, h // self.group] @ self.q[b, i, h])
        slope = np.ones_like(products)
        if self.softcap:
            slope = 1.0 - np.tanh(products / self.softcap) ** 2
            products = self.softcap * np.tanh(products / self.softcap)
        if self.slopes is not None:
            of_head = np.broadcast_to(exact(self.slopes), (self.q.shape[0], self.q.shape[2]))[b, h]
            products = products - of_head * np.abs(np.array(seen) - i - self.shift)
        if self.bias is not None:
            full = (self.q.shape[0], self.q.shape[2], self.q.shape[1], self.k.shape[1])
            products = products + np.broadcast_to(exact(self.bias), full)[b, h, i, seen.start : seen.stop]
        return products, slope


def attention(q, k, v, **options) -> tuple[np.ndarray, np.ndarray]:
    """softmax(scores) @ v and the logarithm of each row's sum of exponentials.

    Parameters
    ----------
    q, k, v : array
        (B, Sq, Hq, D), (B, Sk, Hkv, D) and (B, Sk, Hkv, Dv).
    **options
        causal, softmax_scale, window, softcap, alibi_slopes, bias and dropout_* as for `rawops.flash_attention`.
    """
    rows, v = AttentionRows(q, k, **options), exact(v)
    B, Sq, Hq = q.shape[:3]
    out, lse = np.zeros((B, Sq, Hq, v.shape[-1])), np.full((B, Hq, Sq), -np.inf)
    for b, i, h in np.ndindex(B, Sq, Hq):
        scores, _ = rows.scores(b, h, i)
        if scores.size and scores.max() != -np.inf:  # NaN is a score
            seen = rows.seen(i)
            weights = np.exp(scores - scores.max())
            lse[b, h, i] = scores.max() + np.log(weights.sum())
            factors = rows.factors[b, h, i, seen.start : seen.stop]
            out[b, i, h] = (weights / weights.sum() * factors) @ v[b, seen.start : seen.stop, h // rows.group]
    return out, lse


def attention_backward(dout, q, k, v, **options) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The gradients of sum(dout * out) of `attention` by q, k and v, row by row; the same parameters."""
    rows, dout, v = AttentionRows(q, k, **options), exact(dout), exact(v)
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    for b, i, h in np.ndindex(*q.shape[:3]):
        scores, slope = rows.scores(b, h, i)
        if not scores.size or scores.max() == -np.inf:
            continue
        seen, kv = slice(rows.seen(i).start, rows.seen(i).stop), h // rows.group
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        factors = rows.factors[b, h, i, seen]
        by_weight = factors * (v[b, seen, kv] @ dout[b, i, h])
        by_product = weights * (by_weight - weights @ by_weight) * slope * rows.scale
        dv[b, seen, kv] += (weights * factors)[:, None] * dout[b, i, h]
        dq[b, i, h] = by_product @ rows.k[b, seen, kv]
        dk[b, seen, kv] += by_product[:, None] * rows.q[b, i, h]
    return dq, dk, dv
