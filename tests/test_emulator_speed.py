"""How long the emulator may take for two kernels of the usual kind, with all its checks on.

The aims are 2 s and 1 s on two slow cores; the bounds are three times as wide, for machines that do other things too.
"""

import numpy as np

import rawops

PRELUDE = """
#include <cuda_fp16.h>
typedef unsigned u32;
__device__ u32 at(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ void copy_16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at(to)), "l"(from) : "memory");
}
__device__ void wait_for_copies() {
  asm volatile("cp.async.commit_group;\\ncp.async.wait_group 0;" ::: "memory");
  __syncthreads();
}
__device__ void load_tiles(u32 (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at(row)) : "memory");
}
__device__ void load_transposed(u32 (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at(row)) : "memory");
}
__device__ void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
"""

# One block of eight warps, 64 x 32 of the product a warp; rows padded by 16 bytes keep ldmatrix free of conflicts.
GEMM = (
    PRELUDE
    + """
__global__ void gemm(const __half* a, const __half* b, float* d) {
  constexpr int N = 128, K = 128, STEP = 32;
  __shared__ __align__(16) __half left[128][STEP + 8], right[STEP][N + 8];
  const int t = threadIdx.x, lane = t % 32, m0 = t / 128 * 64, n0 = t / 32 % 4 * 32;
  float acc[4][4][4] = {};
  for (int k0 = 0; k0 < K; k0 += STEP) {
    for (int i = t; i < 128 * STEP / 8; i += 256) {
      copy_16(&left[i / 4][i % 4 * 8], a + i / 4 * K + k0 + i % 4 * 8);
      copy_16(&right[i / 16][i % 16 * 8], b + (k0 + i / 16) * N + i % 16 * 8);
    }
    wait_for_copies();
#pragma unroll
    for (int k = 0; k < STEP; k += 16) {
      u32 x[4][4], y[2][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) load_tiles(x[i], &left[m0 + 16 * i + lane % 16][k + lane / 16 * 8]);
#pragma unroll
      for (int j = 0; j < 2; ++j) load_transposed(y[j], &right[k + lane % 16][n0 + 16 * j + lane / 16 * 8]);
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) mma(acc[i][j], x[i], y[j / 2][j % 2 * 2], y[j / 2][j % 2 * 2 + 1]);
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        *(float2*)(d + (m0 + 16 * i + lane / 4 + 8 * h) * N + n0 + 8 * j + lane % 4 * 2) =
            make_float2(acc[i][j][2 * h], acc[i][j][2 * h + 1]);
}
"""
)

# softmax(q @ k.T) @ v for one tile of 64 queries, 64 keys and 64 columns; each of four warps has 16 queries.
ATTENTION = (
    PRELUDE
    + """
__device__ u32 pair(float low, float high) {
  const __half2 both = __floats2half2_rn(low, high);
  return *(const u32*)&both;
}
__global__ void attention(const __half* q, const __half* k, const __half* v, float* out) {
  __shared__ __align__(16) __half tile[3][64][72];
  const int t = threadIdx.x, lane = t % 32, row = t / 32 * 16;
  for (int i = t; i < 64 * 8; i += 128) {
    copy_16(&tile[0][i / 8][i % 8 * 8], q + i * 8);
    copy_16(&tile[1][i / 8][i % 8 * 8], k + i * 8);
    copy_16(&tile[2][i / 8][i % 8 * 8], v + i * 8);
  }
  wait_for_copies();
  float score[8][4] = {}, value[8][4] = {};
#pragma unroll
  for (int d = 0; d < 64; d += 16) {
    u32 a[4], b[4];
    load_tiles(a, &tile[0][row + lane % 16][d + lane / 16 * 8]);
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      load_tiles(b, &tile[1][8 * j + lane / 16 * 8 + lane % 8][d + lane / 8 % 2 * 8]);
      mma(score[j], a, b[0], b[1]);
      mma(score[j + 1], a, b[2], b[3]);
    }
  }
  float scale[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float most = __int_as_float(0xff800000), sum = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) most = fmaxf(most, fmaxf(score[j][2 * h], score[j][2 * h + 1]));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int c = 0; c < 2; ++c) sum += score[j][2 * h + c] = __expf(0.125f * (score[j][2 * h + c] - most));
    sum += __shfl_xor_sync(~0u, sum, 1);
    scale[h] = 1 / (sum + __shfl_xor_sync(~0u, sum, 2));
  }
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    const u32 a[4] = {pair(score[j][0], score[j][1]), pair(score[j][2], score[j][3]),
                      pair(score[j + 1][0], score[j + 1][1]), pair(score[j + 1][2], score[j + 1][3])};
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      u32 b[4];
      load_transposed(b, &tile[2][8 * j + lane % 16][8 * n + lane / 16 * 8]);
      mma(value[n], a, b[0], b[1]);
      mma(value[n + 1], a, b[2], b[3]);
    }
  }
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int h = 0; h < 2; ++h)
      *(float2*)(out + (row + lane / 4 + 8 * h) * 64 + 8 * n + lane % 4 * 2) =
          make_float2(value[n][2 * h] * scale[h], value[n][2 * h + 1] * scale[h]);
}
"""
)


def launch(source, name, block, *arrays):
    """Run one block for sm_80 and return the report."""
    with rawops.emulate(arch="sm_80", check=True) as emu:
        rawops.Kernel(source, name)(1, block, arrays)
    return emu.report[0]


def test_gemm_of_256_threads(rng):
    a, b = (rng.standard_normal((128, 128)).astype(np.float16) for _ in range(2))
    d = np.zeros((128, 128), np.float32)
    report = launch(GEMM, "gemm", 256, a, b, d)
    np.testing.assert_allclose(d, a.astype(float) @ b.astype(float), atol=1e-4)
    assert report.flops == 2 * 128**3
    assert report.total.shared_conflicts == 0
    assert report.seconds < 3 * 2.0


def test_attention_tile(rng):
    q, k, v = (rng.standard_normal((64, 64)).astype(np.float16) for _ in range(3))
    out = np.zeros((64, 64), np.float32)
    report = launch(ATTENTION, "attention", 128, q, k, v, out)
    weights = np.exp(0.125 * (q.astype(float) @ k.T.astype(float)))
    np.testing.assert_allclose(out, weights / weights.sum(1, keepdims=True) @ v.astype(float), atol=2e-3)
    assert report.flops == 2 * 2 * 64**3
    assert report.total.shared_conflicts == 0
    assert report.seconds < 3 * 1.0
