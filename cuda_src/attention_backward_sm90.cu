// The gradients of flash attention on the tensor cores of Hopper, in three kernels: what the rows need, the gradients
// of keys and values with the sum of that of the queries, and the latter in the type of the rest.
// hopper_attention_backward.cuh and hopper_attention_backward_wide.cuh tell how the second one runs.
#include "common/hopper_attention_backward_wide.cuh"

namespace rawops {

// Which of `parts` blocks of a head and sequence this one is: x alone has room for any number of heads and sequences.
struct PartOfHead {
    int part, parts, head, batch;

    __device__ PartOfHead(int parts, int heads)
        : part(blockIdx.x % parts), parts(parts), head(blockIdx.x / parts % heads), batch(blockIdx.x / parts / heads) {}
};

// Where a sequence lies, and the first of its tiles of queries of a head.
template <int BLOCK_M> struct QueryRows {
    int begin, length, k_len, tile;

    __device__ QueryRows(const AttentionParams& params, int q_tiles, int head, int batch)
        : begin(0), length(params.shape.seqlen_q), k_len(params.shape.seqlen_k) {
        const AttentionCall& call = params.call;
        tile = (batch * params.shape.heads + head) * q_tiles;
        if (call.cu_seqlens_q) {
            const int total_k = params.shape.total_keys, begin_k = clamp(call.cu_seqlens_k[batch], 0, total_k);
            begin = clamp(call.cu_seqlens_q[batch], 0, params.shape.total_q);
            length = clamp(call.cu_seqlens_q[batch + 1], begin, params.shape.total_q) - begin;
            k_len = clamp(call.cu_seqlens_k[batch + 1], begin_k, total_k) - begin_k;
            tile = head * q_tiles + begin / BLOCK_M + batch;
        }
    }
};

// Eight columns a thread: delta and lse * log2(e), zero for the sum of dq, and whose turn it is to add to it. Rows that
// do not exist in their tile, and those that see no key, get what makes their weights and gradients zero.
template <class T, int D, int BLOCK_M, int BLOCK_N>
__global__ void __launch_bounds__(256)
    attention_backward_rows_sm90(const __grid_constant__ AttentionParams params, const T* dout,
                                 const __grid_constant__ AttentionStrides dout_strides, float* rows, float* dq,
                                 int* turns, int q_tiles, int parts) {
    constexpr int LANES = D / 8, ROWS = 256 / LANES;
    const AttentionShape& shape = params.shape;
    const PartOfHead place(parts, shape.heads);
    const int lane = threadIdx.x % LANES, head = place.head, batch = place.batch;
    const QueryRows<BLOCK_M> sequence(params, q_tiles, head, batch);
    const int end = ceil_div(sequence.length, BLOCK_M) * BLOCK_M;
    const T* out = static_cast<const T*>(params.call.out) + batch * shape.out.batch + head * shape.out.head + lane * 8;
    dout += batch * dout_strides.batch + head * dout_strides.head + lane * 8;
#pragma unroll 1
    for (int row = place.part * ROWS + threadIdx.x / LANES; row < end; row += parts * ROWS) {
        const int64_t at = sequence.begin + row;
        float delta = 0, lse = 0;
        if (row < sequence.length) {
            if (lane * 8 < shape.head_dim_v) {
                const uint4 a = *reinterpret_cast<const uint4*>(out + at * shape.out.row);
                const uint4 b = *reinterpret_cast<const uint4*>(dout + at * dout_strides.row);
                const uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float2 u = widen_pair<T>(x[i]), v = widen_pair<T>(y[i]);
                    delta += u.x * v.x + u.y * v.y;
                }
            }
            lse = params.call.lse[batch * shape.lse_batch + head * shape.lse_head + at] * kLog2e;
        }
#pragma unroll
        for (int step = LANES / 2; step > 0; step /= 2) delta += __shfl_xor_sync(~0u, delta, step);
        const int64_t tile = sequence.tile + row / BLOCK_M;
        if (lane == 0) {
            rows[tile * 2 * BLOCK_M + row % BLOCK_M] = lse == -infinity() ? 0 : lse;
            rows[(tile * 2 + 1) * BLOCK_M + row % BLOCK_M] = delta;
            if (turns && row % BLOCK_M == 0) {  // the first tile of keys that any of the rows sees
                const int first = max_of(row + sequence.k_len - sequence.length - shape.window_left, 0) / BLOCK_N;
                turns[tile * 2] = turns[tile * 2 + 1] = first;
            }
        }
        float4* sum = reinterpret_cast<float4*>(dq + (tile * BLOCK_M + row % BLOCK_M) * D);
        sum[lane] = sum[lane + LANES] = {};
    }
}

template <class T, int D, int BLOCK_M, int STAGES, bool kInTurn, int kScore, bool kWide = (D > 128)>
struct BackwardTile {
    using Type = HopperAttentionBackward<T, D, BLOCK_M, STAGES, kInTurn, kScore>;
};
template <class T, int D, int BLOCK_M, int STAGES, bool kInTurn, int kScore>
struct BackwardTile<T, D, BLOCK_M, STAGES, kInTurn, kScore, true> {
    using Type = HopperAttentionBackwardWide<T, D, BLOCK_M, STAGES, kInTurn, kScore>;
};

template <class T, int D, int BLOCK_M, int STAGES, bool kInTurn, int kScore,
          class Tile = typename BackwardTile<T, D, BLOCK_M, STAGES, kInTurn, kScore>::Type>
__global__ void __launch_bounds__(Tile::THREADS, 1)
    attention_backward_sm90(const __grid_constant__ AttentionBackwardMaps maps,
                            const __grid_constant__ AttentionParams params,
                            const __grid_constant__ AttentionBackwardParams backward, int section, int* taken) {
    extern __shared__ __align__(1024) char shared[];
    const BackwardExchange<Tile> exchange(shared);
    if (threadIdx.x == 0) {
        exchange.init();
        prefetch_tensor_map(maps.q);
        prefetch_tensor_map(maps.k);
        prefetch_tensor_map(maps.v);
        prefetch_tensor_map(maps.dout);
    }
    __syncthreads();

    const int group = uniform(threadIdx.x / kWarpGroupSize);
    if (group == 0) {
        release_registers<40>();
        const AttentionSchedule<true> schedule(params, section, taken);
        if (threadIdx.x == 0) BackwardProducer<Tile>(maps, params, backward, exchange).run(schedule);
        const int which = uniform(threadIdx.x / kWarpSize) - 1;
        if (which >= 0 && which < kAddingWarps) {
            if constexpr (Tile::kAddsAside) add_parts<Tile>(params, backward, exchange, which);
            else if constexpr (kInTurn) keep_turns<Tile>(params, backward, exchange, which);
        }
    } else {
        claim_registers<232>();
        if constexpr (D > 128) {
            BackwardConsumerWide<Tile> consumer(params, backward, exchange, group - 1);
            if (group == 1) consumer.run_values();
            else consumer.run_keys();
        } else {
            BackwardConsumer<Tile>(params, backward, exchange, group - 1).run();
        }
    }
}

// A thread takes eight columns of two rows, from four threads of a part.
template <class T, int D, int BLOCK_M>
__device__ inline void store_queries(const AttentionShape& shape, const float* from, T* to, int64_t row_stride,
                                     int left, float softmax_scale) {
    constexpr int PARTS_M = BLOCK_M / 64, PARTS = BLOCK_M * D / 4096;
    for (int i = threadIdx.x; i < PARTS * 256; i += blockDim.x) {  // per part 4 warps, 8 rows, 8 groups of columns
        const int part = i / 256, row = i / 4 % 8, group = i % 4 + i / 32 % 2 * 4, warp = i / 64 % 4;
        const float4* four = reinterpret_cast<const float4*>(from) + (part * 8 + group) * 128 + warp * 32 + row * 4;
        const int at = part % PARTS_M * 64 + warp * 16 + row, col = part / PARTS_M * 64 + group * 8;
        uint32_t packed[2][4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float4 values = four[j];
            packed[0][j] = narrow_pair<T>(values.x * softmax_scale, values.y * softmax_scale);
            packed[1][j] = narrow_pair<T>(values.z * softmax_scale, values.w * softmax_scale);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (at + half * 8 < left && col < shape.head_dim) {
                const uint32_t* p = packed[half];
                *reinterpret_cast<uint4*>(to + (at + half * 8) * row_stride + col) = {p[0], p[1], p[2], p[3]};
            }
        }
    }
}

// Zeros in rows `begin` to before `end` of a head, by all its blocks.
template <class T>
__device__ inline void clear_rows(T* to, const AttentionStrides& strides, const PartOfHead& place, int begin, int end,
                                  int cols) {
    for (int row = begin + place.part; row < end; row += place.parts) {
        for (int col = threadIdx.x; col < cols; col += blockDim.x) {
            to[row * strides.row + place.head * strides.head + col] = narrow<T>(0.0f);
        }
    }
}

// dq from the order of its parts; with cu_seqlens, zeros in the rows past the last sequence, as one more.
template <class T, int D, int BLOCK_M>
__global__ void __launch_bounds__(256)
    attention_backward_dq_sm90(const __grid_constant__ AttentionParams params,
                               const __grid_constant__ AttentionBackwardParams backward, T* dq,
                               const __grid_constant__ AttentionStrides dq_strides, int parts) {
    const AttentionShape& shape = params.shape;
    const PartOfHead place(parts, shape.heads);
    const int head = place.head, batch = place.batch;
    if (batch >= shape.batches) {
        const int total_k = shape.total_keys, begin_q = clamp(params.call.cu_seqlens_q[batch], 0, shape.total_q);
        const int begin_k = clamp(params.call.cu_seqlens_k[batch], 0, total_k);
        clear_rows(dq, dq_strides, place, begin_q, shape.total_q, shape.head_dim);
        if (head < shape.heads / shape.group) {
            clear_rows(static_cast<T*>(backward.dk), backward.dk_strides, place, begin_k, total_k, shape.head_dim);
            clear_rows(static_cast<T*>(backward.dv), backward.dv_strides, place, begin_k, total_k, shape.head_dim_v);
        }
        return;
    }
    const QueryRows<BLOCK_M> sequence(params, backward.q_tiles, head, batch);
#pragma unroll 1
    for (int tile = place.part; tile * BLOCK_M < sequence.length; tile += parts) {
        const int row = tile * BLOCK_M;
        const float* from = backward.dq + int64_t(sequence.tile + tile) * (BLOCK_M * D);
        T* to = dq + batch * dq_strides.batch + head * dq_strides.head + (sequence.begin + row) * dq_strides.row;
        store_queries<T, D, BLOCK_M>(shape, from, to, dq_strides.row, sequence.length - row, backward.softmax_scale);
    }
}

}  // namespace rawops
