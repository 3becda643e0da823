// Flash attention on the tensor cores of sm_80 and later: every layout, mask and score the library knows.
#include "common/attention_forward.cuh"

namespace rawops {

// Out is float for the partial results of ranges of keys, which attention_merge.cu joins.
template <class T, class Out, class Tile, int ACCESS, int kScore>
__global__ void __launch_bounds__(Tile::THREADS) attention_sm80(const __grid_constant__ AttentionParams params) {
    using Forward = AttentionForward<T, StridedRows, Out, Tile, ACCESS, kScore>;
    extern __shared__ __align__(128) char shared[];
    __shared__ __align__(16) char storage[sizeof(typename Forward::Work)];
    auto& work = *reinterpret_cast<typename Forward::Work*>(storage);
    const AttentionCall& call = params.call;
    const AttentionShape& shape = params.shape;
    if (threadIdx.x == 0) {
        const AttentionBlock block(params, blockIdx.x);
        const int64_t k = block.batch * shape.k.batch + block.k_begin * shape.k.row + block.kv_head * shape.k.head;
        const int64_t v = block.batch * shape.v.batch + block.k_begin * shape.v.row + block.kv_head * shape.v.head;
        work.block = block;
        work.k = {static_cast<const T*>(call.k) + k, shape.k.row, shape.k.col};
        work.v = {static_cast<const T*>(call.v) + v, shape.v.row, shape.v.col};
    }
    __syncthreads();
    // One tile, but for the rows past the last sequence, of which there may be any number.
#pragma unroll 1
    for (int tile = work.block.tile; tile * Tile::BLOCK_M < work.block.rows(shape);
         tile = work.first / Tile::BLOCK_M + shape.row_tiles) {
        Forward forward(params, work, tile, shared_address(shared));
        forward.run();
        forward.finish();
    }
}

}  // namespace rawops
