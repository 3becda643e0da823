// The gradients of attention on the tensor cores of sm_80 and later; see attention_backward.cuh.
#include "common/attention_backward.cuh"

namespace rawops {

// delta: the sum over each row of dout * out. A warp a row, which is one query of one head.
template <class T>
__global__ void __launch_bounds__(128) attention_delta(const __grid_constant__ GradientParams params) {
    const AttentionShape& shape = params.forward.shape;
    const int lane = threadIdx.x % kWarpSize;
    const int length = params.forward.call.cu_seqlens_q ? shape.total_q : shape.seqlen_q;
    int64_t index = int64_t(blockIdx.x) * (blockDim.x / kWarpSize) + threadIdx.x / kWarpSize;
    const int head = int(index % shape.heads);
    index /= shape.heads;
    const int row = int(index % length), batch = int(index / length);
    if (batch >= (params.forward.call.cu_seqlens_q ? 1 : shape.batches)) return;
    const int64_t at = batch * shape.lse_batch + head * shape.lse_head + row;
    float sum = 0.0f;
    if (params.forward.call.lse[at] != -infinity()) {  // else nothing of the row counts, nor is it read
        const AttentionStrides &o = shape.out, &d = params.dout_strides;
        const T* out = static_cast<const T*>(params.forward.call.out) + batch * o.batch + row * o.row + head * o.head;
        const T* dout = static_cast<const T*>(params.dout) + batch * d.batch + row * d.row + head * d.head;
        for (int col = lane; col < shape.head_dim_v; col += kWarpSize) {
            sum = fmaf(widen(out[col * o.col]), widen(dout[col * d.col]), sum);
        }
    }
    for (int step = kWarpSize / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane == 0) params.delta[at] = sum;
}

template <class T, class Tile, int ACCESS, int kScore>
__global__ void __launch_bounds__(Tile::THREADS)
    attention_backward_queries(const __grid_constant__ GradientParams params) {
    extern __shared__ __align__(128) char shared[];
    const AttentionShape& shape = params.forward.shape;
    __shared__ __align__(16) char storage[sizeof(AttentionBlock)];  // there it costs the main loop no registers
    const AttentionBlock& block = *reinterpret_cast<AttentionBlock*>(storage);
    if (threadIdx.x == 0) *reinterpret_cast<AttentionBlock*>(storage) = AttentionBlock(params.forward, blockIdx.x);
    __syncthreads();
#pragma unroll 1
    for (int tile = block.tile; tile * Tile::BLOCK_M < block.q_len; tile += shape.row_tiles) {
        AttentionGradient<T, Tile, ACCESS, kScore, kOfQueries> gradient(params, shared_address(shared));
        const int first = tile * Tile::BLOCK_M, last = min_of(first + Tile::BLOCK_M, block.q_len) - 1;
        const KeyRange keys = block.keys(shape, first, last, Tile::BLOCK_N);
        if (!keys.is_empty()) {
            gradient.fetch_stay(gradient.queries(block, block.head), first, block.q_len);
            gradient.run(block, gradient.keys(block), keys, first, block.head);
        }
        const AttentionStrides& s = params.dq_strides;
        gradient.write(params.dq, s, block.batch * s.batch + block.q_begin * s.row + block.head * s.head, first,
                       block.q_len);
    }
}

// kOf: kOfKeys, kOfValues or both, which wide heads have no registers for.
template <class T, class Tile, int ACCESS, int kScore, int kOf>
__global__ void __launch_bounds__(Tile::THREADS)
    attention_backward_keys(const __grid_constant__ GradientParams params) {
    extern __shared__ __align__(128) char shared[];
    const AttentionShape& shape = params.forward.shape;
    __shared__ __align__(16) char storage[sizeof(KeyBlock)];
    const KeyBlock& block = *reinterpret_cast<KeyBlock*>(storage);
    if (threadIdx.x == 0) *reinterpret_cast<KeyBlock*>(storage) = KeyBlock(params, blockIdx.x);
    __syncthreads();
#pragma unroll 1
    for (int tile = block.tile; tile * Tile::BLOCK_M < block.k_len; tile += params.key_tiles) {
        AttentionGradient<T, Tile, ACCESS, kScore, kOf> gradient(params, shared_address(shared));
        const int first = tile * Tile::BLOCK_M, last = min_of(first + Tile::BLOCK_M, block.k_len) - 1;
        const KeyRange queries = block.queries(shape, first, last);
        if (!queries.is_empty()) {
            gradient.fetch_stay(gradient.keys(block), first, block.k_len);
#pragma unroll 1
            for (int member = 0; member < shape.group; ++member) {  // of the query heads that share the KV head
                const int head = block.kv_head * shape.group + member;
                gradient.run(block, gradient.queries(block, head), queries, first, head);
            }
        }
        if constexpr ((kOf & kOfKeys) != 0) {
            const AttentionStrides& s = params.dk_strides;
            gradient.write(params.dk, s, block.batch * s.batch + block.k_begin * s.row + block.kv_head * s.head, first,
                           block.k_len);
        }
        if constexpr ((kOf & kOfValues) != 0) {
            const AttentionStrides& s = params.dv_strides;
            gradient.write_v(params.dv, s, block.batch * s.batch + block.k_begin * s.row + block.kv_head * s.head,
                             first, block.k_len);
        }
    }
}

}  // namespace rawops
