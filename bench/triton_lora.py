"""The fused kernel of the seed in Triton: O = X C + Y B in one accumulator, with Y = X A made before by cuBLAS."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_CONFIGS = [
    triton.Config({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": 8}, num_warps=warps, num_stages=stages)
    for m, n, k, warps, stages in [
        (64, 128, 64, 4, 4),
        (64, 128, 128, 4, 3),
        (64, 256, 64, 8, 4),
        (128, 256, 64, 8, 3),
        (16, 128, 128, 4, 4),
    ]
]


def _time(call, quantiles):
    return triton.testing.do_bench(call, warmup=5, rep=20, quantiles=quantiles)


@triton.autotune(configs=_CONFIGS, key=["M", "N", "K", "R"], do_bench=_time)
@triton.jit
def _fused(
    x_ptr,
    c_ptr,
    y_ptr,
    b_ptr,
    o_ptr,
    M,
    N,
    K,
    R,
    RANKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """All matrices row-major; a program makes one tile of O, the rows of tiles in groups."""
    pid = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    group = pid // (GROUP_M * tiles_n)
    group_rows = min(tiles_m - group * GROUP_M, GROUP_M)
    rest = pid % (GROUP_M * tiles_n)
    rows = (group * GROUP_M + rest % group_rows) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = rest // group_rows * BLOCK_N + tl.arange(0, BLOCK_N)
    deep = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + rows[:, None] * K + deep[None, :]
    c_ptrs = c_ptr + deep[:, None] * N + cols[None, :]
    row_mask, col_mask = rows[:, None] < M, cols[None, :] < N
    sum = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        x = tl.load(x_ptrs, mask=row_mask & (k + deep[None, :] < K), other=0.0)
        c = tl.load(c_ptrs, mask=(k + deep[:, None] < K) & col_mask, other=0.0)
        sum = tl.dot(x, c, sum)
        x_ptrs += BLOCK_K
        c_ptrs += BLOCK_K * N
    ranks = tl.arange(0, RANKS)
    y = tl.load(y_ptr + rows[:, None] * R + ranks[None, :], mask=row_mask & (ranks[None, :] < R), other=0.0)
    b = tl.load(b_ptr + ranks[:, None] * N + cols[None, :], mask=(ranks[:, None] < R) & col_mask, other=0.0)
    sum = tl.dot(y, b, sum)
    tl.store(o_ptr + rows[:, None] * N + cols[None, :], sum.to(o_ptr.dtype.element_ty), mask=row_mask & col_mask)


def fused_expand(x: torch.Tensor, c: torch.Tensor, y: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """out = x @ c + y @ b on torch's current stream; all row-major."""
    (m, k), n, rank = x.shape, c.shape[1], b.shape[0]

    def grid(meta):
        return (triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]),)

    _fused[grid](x, c, y, b, out, m, n, k, rank, RANKS=max(triton.next_power_of_2(rank), 16))
