// The gradients of flash attention on the tensor cores of Hopper, in three kernels: what the rows need, the gradients
// of keys and values with the sum of that of the queries, and the latter in the type of the rest.
// hopper_attention_backward.cuh tells how the second one runs.
#include "common/hopper_attention_backward.cuh"

namespace rawops {

// A warp a row: delta and lse * log2(e), and zero for the sum of dq. Rows that do not exist in their tile, and those
// that see no key, get what makes their weights and gradients zero.
template <class T, int D, int BLOCK_M>
__global__ void __launch_bounds__(256)
    attention_backward_rows_sm90(const __grid_constant__ AttentionParams params, const T* dout,
                                 const __grid_constant__ AttentionStrides dout_strides, float* rows, float* dq) {
    const AttentionShape& shape = params.shape;
    const int lane = threadIdx.x % kWarpSize, row = blockIdx.x * 8 + threadIdx.x / kWarpSize;
    const int head = blockIdx.y, batch = blockIdx.z;
    int begin = 0, length = shape.seqlen_q;
    if (params.call.cu_seqlens_q) {
        begin = params.call.cu_seqlens_q[batch];
        length = params.call.cu_seqlens_q[batch + 1] - begin;
    }
    float delta = 0, lse = 0;
    if (row < length) {
        const T* a = static_cast<const T*>(params.call.out) + batch * shape.out.batch + head * shape.out.head +
                     (begin + row) * shape.out.row;
        const T* b = dout + batch * dout_strides.batch + head * dout_strides.head + (begin + row) * dout_strides.row;
        for (int i = lane * 2; i < shape.head_dim_v; i += 2 * kWarpSize) {
            delta += widen(a[i]) * widen(b[i]) + widen(a[i + 1]) * widen(b[i + 1]);
        }
        lse = params.call.lse[batch * shape.lse_batch + head * shape.lse_head + begin + row] / kLn2;
    }
#pragma unroll
    for (int step = kWarpSize / 2; step > 0; step /= 2) delta += __shfl_xor_sync(~0u, delta, step);
    const int64_t tile = (int64_t(batch) * shape.heads + head) * (gridDim.x * 8 / BLOCK_M) + row / BLOCK_M;
    if (lane == 0) {
        rows[tile * 2 * BLOCK_M + row % BLOCK_M] = lse == -infinity() ? 0 : lse;
        rows[(tile * 2 + 1) * BLOCK_M + row % BLOCK_M] = delta;
    }
    for (int i = lane; i < D; i += kWarpSize) dq[(tile * BLOCK_M + row % BLOCK_M) * D + i] = 0;
}

template <class T, int D, int BLOCK_M, int STAGES, class Tile = HopperAttentionBackward<T, D, BLOCK_M, STAGES>>
__global__ void __launch_bounds__(Tile::THREADS, 1)
    attention_backward_sm90(const __grid_constant__ AttentionBackwardMaps maps,
                            const __grid_constant__ AttentionParams params,
                            const __grid_constant__ AttentionBackwardParams backward, int section, int* taken) {
    run_attention_backward<Tile>(maps, params, backward, section, taken);
}

// dq from the order of `store_part`: a thread takes eight columns of two rows, from four threads of a part.
template <class T, int D, int BLOCK_M>
__global__ void __launch_bounds__(256)
    attention_backward_dq_sm90(const __grid_constant__ AttentionParams params, const float* sum, T* dq,
                               const __grid_constant__ AttentionStrides dq_strides, float softmax_scale) {
    constexpr int PARTS_M = BLOCK_M / 64, PARTS = BLOCK_M * D / 4096;
    const AttentionShape& shape = params.shape;
    const int tile = blockIdx.x, head = blockIdx.y, batch = blockIdx.z;
    int begin = 0, length = shape.seqlen_q;
    if (params.call.cu_seqlens_q) {
        begin = params.call.cu_seqlens_q[batch];
        length = params.call.cu_seqlens_q[batch + 1] - begin;
    }
    const float* from = sum + ((int64_t(batch) * shape.heads + head) * gridDim.x + tile) * (BLOCK_M * D);
    T* to = dq + batch * dq_strides.batch + head * dq_strides.head + begin * dq_strides.row;
    for (int i = threadIdx.x; i < PARTS * 256; i += blockDim.x) {  // per part 4 warps, 8 rows, 8 groups of columns
        const int part = i / 256, row = i / 4 % 8, group = i % 4 + i / 32 % 2 * 4, warp = i / 64 % 4;
        const float4* four = reinterpret_cast<const float4*>(from) + (part * 8 + group) * 128 + warp * 32 + row * 4;
        const int at = tile * BLOCK_M + part % PARTS_M * 64 + warp * 16 + row;
        const int col = part / PARTS_M * 64 + group * 8;
        uint32_t packed[2][4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float4 values = four[j];
            packed[0][j] = narrow_pair<T>(values.x * softmax_scale, values.y * softmax_scale);
            packed[1][j] = narrow_pair<T>(values.z * softmax_scale, values.w * softmax_scale);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (at + half * 8 < length && col < shape.head_dim) {
                const uint32_t* p = packed[half];
                *reinterpret_cast<uint4*>(to + (at + half * 8) * dq_strides.row + col) = {p[0], p[1], p[2], p[3]};
            }
        }
    }
}

}  // namespace rawops
