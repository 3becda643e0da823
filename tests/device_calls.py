"""Calls of every op for tests of where they run: each takes a `Place` and returns the arrays that it made.

Around the calls there is nothing but views of arrays that were put there: whatever else happens, an op has done.
"""

from __future__ import annotations

import types

import numpy as np

import rawops
from rawops._runtime import dtypes

BF16 = dtypes.numpy("bfloat16")
E4M3 = dtypes.numpy("float8_e4m3fn")


class Place:
    """Where arrays go.

    Attributes
    ----------
    put : callable
        Takes a host array to the device.
    within : callable
        A context in which the device is the current one, for calls that have no arrays to tell.
    large : bool
        Sizes for a GPU, on which other kernels run than on small arrays.
    """

    def __init__(self, put, within, large: bool = False) -> None:
        self._put, self.within, self.large = put, within, large
        self._rng = np.random.default_rng(7)

    def put(self, array):
        if array.dtype == E4M3:  # which CuPy knows as views only
            return self._put(array.view(np.uint8)).view(E4M3)
        return self._put(array)

    def reals(self, *shape: int, dtype=np.float16):
        return self.put(self._rng.uniform(-1, 1, shape).astype(dtype))

    def ints(self, values, dtype=np.int32):
        return self.put(np.asarray(values, dtype))

    def size(self, small: int, large: int) -> int:
        return large if self.large else small


def _csr(p: Place, rows: int, cols: int, dtype=np.float32) -> tuple:
    dense = p._rng.uniform(-1, 1, (rows, cols)) * (p._rng.random((rows, cols)) < 0.2)
    dense[:, 0] = dense[0] = 1
    row, col = np.nonzero(dense)
    indptr = np.searchsorted(row, np.arange(rows + 1)).astype(np.int32)
    return dense[row, col].astype(dtype), col.astype(np.int32), indptr, row.astype(np.int32)


# --- products -------------------------------------------------------------------------------------------------------


def gemm(p: Place):
    n = p.size(40, 512)
    a, b, c, bias = p.reals(n, n), p.reals(n, n), p.reals(n, n), p.reals(n)
    alpha = p.put(np.array(0.5, np.float32))
    out = p.reals(n, n)
    made = [rawops.gemm(a, b, c, alpha=alpha, beta=2.0, bias=bias, residual=c, activation="silu")]
    made += [rawops.gemm(a, b, out=out), rawops.gemm(a[:1], b), rawops.gemm(a, b, split_k=3)]
    made.append(rawops.gemm(a[:, ::2], b[::2], out_dtype="float32"))
    return made


def gemm_aside(p: Place):
    """The result overlaps an operand, so it is computed aside and copied."""
    n = p.size(24, 256)
    whole = p.reals(2 * n, n)
    return [rawops.gemm(whole[:n], whole[n:], out=whole[n // 2 : n // 2 + n])]


def gemm_of_many_axes(p: Place):
    n = p.size(8, 64)
    a, b = p.reals(2, 3, 2, 2, n, n)[::-1, :, ::-1], p.reals(2, 1, 2, 1, n, n)
    return [rawops.gemm(a, b), rawops.gemm(a[0, 0, 0, 0, :, :0], b[0, 0, 0, 0, :0])]


def gemm_float8(p: Place):
    n = p.size(32, 256)
    a, b = p.reals(n, n, dtype=E4M3), p.reals(n, n, dtype=E4M3)
    whole = p.reals(2 * n, n, dtype=E4M3)
    made = [rawops.gemm(a, b, scale_a=2.0, scale_d=0.5, out_dtype=E4M3)]
    return [*made, rawops.gemm(whole[:n], b, out=whole[1 : n + 1])]


def gemm_int4(p: Place):
    n = p.size(32, 512)
    q = p.ints(p._rng.integers(0, 16, (n, n)), np.uint8)
    packed = rawops.pack_int4(q)
    scale = p.reals(n // 32, n)
    return [rawops.gemm(p.reals(rows, n), packed, b_dtype="int4", scale_b=scale) for rows in (1, 8, p.size(20, 200))]


def gemm_plan(p: Place):
    """The same arrays again and again: the last calls are their launch alone."""
    n = p.size(24, 512)
    plan, a, b, out = rawops.Gemm(n, n, n, np.float16), p.reals(n, n), p.reals(n, n), p.reals(n, n)
    for _ in range(5):
        made = plan(a, b, out=out)
    return [made]


def grouped_gemm(p: Place):
    n = p.size(16, 128)
    return [rawops.grouped_gemm(p.reals(3 * n, n), p.reals(3, n, n), p.ints([0, n, n + 3, 3 * n]))]


# --- LoRA -----------------------------------------------------------------------------------------------------------


def lora(p: Place):
    m, n, r = p.size(20, 300), p.size(32, 256), 8
    x, c, a, b = p.reals(m, n), p.reals(n, n), p.reals(n, r), p.reals(r, n)
    made = [rawops.lora_linear(x, c, a, b, scaling=2.0), rawops.lora_linear(x[:1], c, a, b)]
    made.append(rawops.lora_linear(x, c, [a, None], [b[:, :16], None], slices=[(0, 16), (16, n)]))
    whole = p.reals(2 * m, n)
    made.append(rawops.lora_linear(whole[:m], c, a, b, out=whole[1 : m + 1]))
    return made


def lora_merged(p: Place):
    n, r = p.size(24, 256), 4
    layer = rawops.FusedLoRA(p.reals(n, n), p.reals(n, r), p.reals(r, n), 0.5)
    x = p.reals(8, n)
    made = [layer(x)]
    layer.merge()
    made.append(layer(x))
    layer.unmerge()
    return [*made, layer.c]


def multi_lora(p: Place):
    n, r = p.size(24, 256), 8
    layer = rawops.MultiLoRA(p.reals(n, n), 3, r)
    for slot in range(3):
        layer.load(slot, p.reals(n, r - slot), p.reals(r - slot, n), 0.5)
    layer.unload(1)
    x, indices, residual = p.reals(2, 5, n), p.ints([[0, 1, 2, -1, 0], [2, 2, 1, 0, 0]]), p.reals(5, n)
    made = [layer(x[0], indices[0]), layer(x, indices, residual=residual)]
    out = p.reals(5, 2, n).swapaxes(0, 1)
    return [*made, layer(x[:, :, ::-1], indices[:, ::-1], out=out)]


def lora_backward(p: Place):
    m, n, r = p.size(12, 200), p.size(24, 256), 4
    x, c, a, b = p.reals(m, n), p.reals(n, n), p.reals(n, r), p.reals(r, n)
    made = [*rawops.lora_linear_backward(p.reals(m, n), x, c, a, b, scaling=0.5, out=[x, None, None])]
    made += rawops.lora_linear_backward(p.reals(3, m, n)[:, ::2], p.reals(3, m, n)[:, ::2], c, a, b)
    return [*made, *rawops.lora_linear_backward(p.reals(m, n), p.reals(m, n), c, a, b, scaling=0)]


# --- attention ------------------------------------------------------------------------------------------------------


def attention(p: Place):
    s, d = p.size(20, 300), p.size(32, 128)
    q, k, v = (p.reals(2, s, 2, d) for _ in "qkv")
    out, lse = rawops.flash_attention(q, k, v, causal=True, return_lse=True)
    split = rawops.flash_attention(q[:, :1], k, v, num_splits=2)
    seed, offset = p.put(np.array([3], np.int64)), p.put(np.array([5], np.int64))
    dropped = rawops.flash_attention(q, k, v, dropout_p=0.5, dropout_seed=seed, dropout_offset=offset)
    whole = p.reals(2, 2 * s, 2, d)
    aside = rawops.flash_attention(whole[:, :s], k, v, out=whole[:, 1 : s + 1])
    merged = rawops.merge_attention_states(out, lse, out, lse)
    return [out, lse, split, dropped, aside, *merged]


def attention_varlen(p: Place):
    s, d = p.size(20, 300), p.size(32, 128)
    q, k, v = (p.reals(2 * s, 2, d) for _ in "qkv")
    starts = p.ints([0, s - 7, 2 * s])
    plan = rawops.FlashAttention(causal=True, num_splits=2)
    made = [rawops.flash_attention_varlen(q, k, v, starts, starts, s + 7, s + 7)]
    return [*made, *(plan(q[None], k[None], v[None]) for _ in range(2))]


def attention_backward(p: Place):
    s, d = p.size(16, 200), p.size(32, 128)
    q, k, v, dout = (p.reals(1, s, 2, d) for _ in range(4))
    out, lse = rawops.flash_attention(q, k, v, return_lse=True)
    return [*rawops.flash_attention_backward(dout, q, k, v, out, lse, deterministic=True)]


# --- row-wise -------------------------------------------------------------------------------------------------------


def rowwise(p: Place):
    n = p.size(64, 4096)
    x, w, b, r = p.reals(6, n), p.reals(n), p.reals(n), p.reals(6, n)
    made = [rawops.rmsnorm(x, w, residual=r), rawops.layernorm(x, w, b), rawops.softmax(x), rawops.row_sum(x)]
    made.append(rawops.row_sum(p.reals(2, p.size(70, 1 << 20))))  # in parts, which a workspace of the stream takes
    made += [rawops.gelu(x), rawops.silu(x[:, ::2]), rawops.swiglu(x), rawops.rmsnorm(x, w, out=x)]
    q, k, positions = p.reals(6, 2, 32), p.reals(6, 1, 32), p.ints(range(6))
    made += rawops.rope(q, k, positions)
    return [*made, *rawops.rope(q, k, positions, cos=p.reals(8, 16), sin=p.reals(8, 16))]


# --- pages ----------------------------------------------------------------------------------------------------------


def paged(p: Place):
    """Arrays in strides that the kernels do not take: they are copied."""
    heads, d = 2, 33
    pages, table = p.reals(6, 2, 4, heads, d), p.ints([[0, 9, 2, 9], [3, 9, 4, 9]])[:, ::2]
    lengths, starts = p.ints([5, 0, 7, 0])[::2], p.ints([0, 1, 1, 1, 3, 3])[::2]
    k, v, positions = p.reals(2, heads, d), p.reals(2, heads, d), p.ints([4, 0, 6, 0])[::2]
    rawops.append_paged_kv(k, v, pages, table, positions)
    made = [pages, rawops.paged_attention(p.reals(2, 4, d), pages, table, lengths)]
    made += rawops.paged_attention(p.reals(3, 4, d), pages, table, lengths, cu_seqlens_q=starts, return_lse=True)
    slopes = p.reals(8, dtype=np.float32)[::2]
    return [*made, rawops.paged_attention(p.reals(2, 4, d), pages, table, lengths, alibi_slopes=slopes)]


def paged_cache(p: Place):
    made = []
    for kv_dtype in (None, "int8"):
        heads, d = 2, p.size(32, 128)
        with p.within():
            cache = rawops.PagedKVCache(12, 4, heads, d, kv_dtype=kv_dtype, max_length=24)
        first = cache.add_sequence()
        cache.append(p.reals(9, heads, d), p.reals(9, heads, d), [first], counts=[9])
        second = cache.fork(first)
        cache.append(p.reals(2, heads, d), p.reals(2, heads, d), [first, second])
        both, q = [first, second], p.reals(2, 4, d)
        made += [cache.decode(q, both, cascade=cascade) for cascade in (False, True)]
        made += cache.decode(q, both, cascade=True, return_lse=True, out=p.reals(2, 4, d))
        made.append(cache.prefill(p.reals(3, 4, d), both, [0, 1, 3]))
        saved = cache.save(first)
        cache.free(first)
        third = cache.restore(saved)
        made.append(cache.decode(q, [second, third]))
        made += [*cache.step([second, third]), cache.block_table([third]), cache.seq_lens([third])]
    return made


# --- sparse ---------------------------------------------------------------------------------------------------------


def sparse(p: Place):
    rows, cols = p.size(20, 3000), p.size(15, 500)
    data, col, indptr, row = _csr(p, rows, cols)
    at = types.SimpleNamespace(data=p.put(data), col=p.put(col), indptr=p.put(indptr), row=p.put(row))
    x, u, wide = p.reals(cols, dtype=np.float32), p.reals(rows, dtype=np.float32), p.reals(cols, 6, dtype=np.float32)
    compressed = rawops.SparseMatrix.from_csr(at.data, at.col, at.indptr, (rows, cols))
    twice = rawops.SparseMatrix.from_coo(*(p.put(np.tile(given, 2)) for given in (data, row, col)), (rows, cols))
    turned = rawops.SparseMatrix.from_csc(at.data, at.col, at.indptr, (cols, rows))
    made = []
    for matrix in (compressed, twice, turned.T):
        made += [matrix @ x, matrix.T @ u, matrix @ wide]
        made.append(matrix.matvec(wide[:, 1], beta=2.0, out=p.reals(rows, dtype=np.float32)))
    matrix = compressed
    whole = p.reals(rows + cols, dtype=np.float32)
    made.append(matrix.matvec(whole[:cols], out=whole[1 : rows + 1]))
    made.append(matrix.rmatvec(u, alpha=p.put(np.array(0.5)), beta=1.0, out=p.reals(2 * cols, dtype=np.float32)[::2]))
    both = p.reals(rows + cols, 3, dtype=np.float32)
    made.append(matrix.matmat(both[:cols], out=both[1 : rows + 1]))
    made += [matrix.matmat(p.reals(3, cols, dtype=np.float32).T), matrix @ p.reals(cols, dtype=np.float64)]
    for matrix in (compressed, twice):
        matrix.update_values(p.reals(matrix._store.data_size, dtype=np.float32))
        made += [matrix @ x, matrix.H @ u]
    for kept in (False, "auto"):
        one = rawops.SparseMatrix.from_csr(at.data, at.col, at.indptr, (rows, cols), dual=kept)
        made.append(one @ x)
        assert one.T.profile.rows == cols
    assert compressed.to_scipy().shape == (rows, cols)
    return made


def blocks(p: Place):
    n = p.size(32, 512)
    data, col, indptr, _ = _csr(p, n, n)
    matrix = rawops.SparseMatrix.from_csr(p.put(data), p.put(col), p.put(indptr), (n, n))
    x = p.reals(n, 9, dtype=np.float32)
    made = [matrix.to_bsr(8) @ x, matrix.to_bsr(16).matmat(x, precision="tf32"), matrix.T.to_bsr(4) @ x[:, ::2]]
    ell = rawops.BSRMatrix.from_blocked_ell(p.reals(16, 32), p.ints([[1, -1]]), (16, 32))
    made.append(ell @ p.reals(32, 5))
    bsr = rawops.BSRMatrix.from_bsr(p.reals(2, 16, 16), p.ints([1, 0]), p.ints([0, 1, 2]), (32, 32))
    return [*made, bsr @ p.reals(32, 16), bsr @ p.reals(32, 5)[:, ::2]]


# --- LSMR -----------------------------------------------------------------------------------------------------------


def lsmr(p: Place):
    rows, cols = p.size(9, 400), p.size(4, 60)
    data, col, indptr, _ = _csr(p, rows, cols, np.float64)
    matrix = rawops.SparseMatrix.from_csr(p.put(data), p.put(col), p.put(indptr), (rows, cols))
    b, x0 = p.reals(rows, dtype=np.float64), p.reals(cols, dtype=np.float32)
    dense, number = p.reals(rows, cols, dtype=np.float32), p.ints(p._rng.integers(-4, 5, (rows, cols)))
    found = [rawops.lsmr(matrix, b, damp=0.1, x0=x0, preconditioner="column"), rawops.lsmr(dense, b, history=True)]
    found += [rawops.lsmr(number, b, reorthogonalize="full"), rawops.lsmr(dense, x0=x0, b=b, preconditioner="column")]
    operator = rawops.LinearOperator((rows, cols), matrix.matvec, matrix.rmatvec, "float64")
    found.append(rawops.lsmr(operator, b))
    solver = rawops.LSMR(matrix, maxiter=p.size(3, 100))
    found += [solver.solve(b), solver.solve(b, x0), solver.solve_many(p.reals(rows, 3, dtype=np.float64))]
    assert all(result.status.normr >= 0 for result in found[:-1])
    assert all(status.normar >= 0 for status in found[-1].status)
    half = p.put(np.array(0.5))
    products = [operator.matvec(x0, half, -1.0, p.reals(rows, dtype=np.float64)), operator.rmatvec(b, 0)]
    return [*products, *(result.x for result in found)]


def own_kernel(p: Place):
    source = (
        'extern "C" __global__ void times(float* x, float by, int n) { if (threadIdx.x < n) x[threadIdx.x] *= by; }'
    )
    kernel, x = rawops.Kernel(source, "times"), p.reals(40, dtype=np.float32)
    kernel(1, 64, (x, p.put(np.array(3, np.float32)), 40))
    kernel(1, 64, (x, 0.5, 40))
    return [x]


CALLS = {
    call.__name__: call
    for call in (
        *(gemm, gemm_aside, gemm_of_many_axes, gemm_float8, gemm_int4, gemm_plan, grouped_gemm),
        *(lora, lora_merged, multi_lora, lora_backward, attention, attention_varlen, attention_backward),
        *(rowwise, paged, paged_cache, sparse, blocks, lsmr, own_kernel),
    )
}
CHECKED = ("grouped_gemm", "attention_varlen", "rowwise", "paged")  # those that RAWOPS_CHECK=1 makes read values
