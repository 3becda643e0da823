// Attention in float32 without tensor cores: what the fast kernels are checked against on a GPU.
//
// A block has 16 rows, a warp four of them; lane j has key j of every 32 and columns j, j + 32, ... of the result.
#include "common/attention_softmax.cuh"
#include "common/dropout.cuh"

namespace rawops {

constexpr int kSimtCols = 256 / kWarpSize;  // of a lane

// The product of a query and a key.
__device__ inline float dot(const float* q, const float* k, int key, const AttentionShape& shape) {
    float product = 0.0f;
#pragma unroll 2
    for (int d = 0; d < shape.head_dim; ++d) {
        product = fmaf(q[d * shape.q.col], k[key * shape.k.row + d * shape.k.col], product);
    }
    return product;
}

// Writes a lane's columns of a row of the result, and the row's lse.
template <bool kDrops>
__device__ inline void write_row(const float (&acc)[kSimtCols], float max, float sum, const AttentionParams& params,
                                 const AttentionBlock& block, int64_t query, int head, int lane) {
    const AttentionCall& call = params.call;
    const AttentionShape& shape = params.shape;
    if (call.lse && lane == 0) {
        call.lse[block.split * shape.lse_split + block.batch * shape.lse_batch + head * shape.lse_head + query] =
            log_sum(max, sum);
    }
    const float inverse = sum == 0.0f ? 0.0f : (kDrops ? shape.dropout.scale : 1.0f) / sum;
    float* out = static_cast<float*>(call.out) + block.split * shape.out_split + block.batch * shape.out.batch +
                 query * shape.out.row + head * shape.out.head;
#pragma unroll
    for (int c = 0; c < kSimtCols; ++c) {
        const int col = c * kWarpSize + lane;
        if (col < shape.head_dim_v) out[col * shape.out.col] = acc[c] * inverse;
    }
}

template <int kScore>
__global__ void __launch_bounds__(128) attention_simt(const __grid_constant__ AttentionParams params) {
    constexpr bool kDrops = (kScore & kScoreDropout) != 0;
    constexpr int ROWS = 4, BLOCK_M = 16, BLOCK_N = kWarpSize;
    const AttentionCall& call = params.call;
    const AttentionShape& shape = params.shape;
    AttentionBlock block(params, blockIdx.x);
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const float* k = static_cast<const float*>(call.k) + block.batch * shape.k.batch + block.k_begin * shape.k.row +
                     block.kv_head * shape.k.head;
    const float* v = static_cast<const float*>(call.v) + block.batch * shape.v.batch + block.k_begin * shape.v.row +
                     block.kv_head * shape.v.head;

    // A warp for itself: it takes every row_tiles-th tile, of which more than one is there only past the last sequence.
#pragma unroll 1
    for (; block.tile * BLOCK_M < block.rows(shape); block.tile += shape.row_tiles) {
#pragma unroll 1
        for (int r = 0; r < ROWS; ++r) {
            const int row = block.tile * BLOCK_M + warp * ROWS + r;
            if (row >= block.rows(shape)) break;
            const int i = row / shape.packed, head = block.head + row % shape.packed;
            const float* q = static_cast<const float*>(call.q) + block.batch * shape.q.batch +
                             (block.q_begin + i) * shape.q.row + head * shape.q.head;
            const RowScore<float, kScore | kScoreMultiply> score(params, block, i, head);
            const KeyRange keys = block.keys(shape, i, i, BLOCK_N);
            float acc[kSimtCols] = {}, max = -infinity(), sum = 0.0f;
#pragma unroll 1
            for (int first = keys.begin; first < keys.end; first += BLOCK_N) {
                const int key = first + lane;
                float value = -infinity();
                if (key < keys.end) value = score(dot(q, k, key, shape), key);
                float next = fmaxf(max, value);
                for (int step = 16; step > 0; step /= 2) next = fmaxf(next, __shfl_xor_sync(~0u, next, step));
                const float base = next == -infinity() ? 0.0f : next;
                const float factor = exp2f(max - base);
                float weight = exp2f(value - base);
                max = next;
                sum = sum * factor + weight;
                if constexpr (kDrops) {
                    if (!Dropout(shape, block.batch, head).keeps(i, key)) weight = 0.0f;
                }
#pragma unroll
                for (int c = 0; c < kSimtCols; ++c) acc[c] *= factor;
                const int count = min_of(keys.end - first, BLOCK_N);
#pragma unroll 1
                for (int j = 0; j < count; ++j) {
                    const float w = __shfl_sync(~0u, weight, j);
                    const float* from = v + (first + j) * shape.v.row;
#pragma unroll
                    for (int c = 0; c < kSimtCols; ++c) {
                        const int col = c * kWarpSize + lane;
                        if (col < shape.head_dim_v) acc[c] = fmaf(w, from[col * shape.v.col], acc[c]);
                    }
                }
            }
            for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
            write_row<kDrops>(acc, max, sum, params, block, block.q_begin + i, head, lane);
        }
    }
}

}  // namespace rawops
