// Flash attention on the tensor cores of sm_80 and later: every layout, mask and score the library knows.
#include "common/attention_forward.cuh"

namespace rawops {

// Out is float for the partial results of ranges of keys, which attention_merge.cu joins.
template <class T, class Out, class Tile, int ACCESS, int kScore>
__global__ void __launch_bounds__(Tile::THREADS) attention_sm80(const __grid_constant__ AttentionParams params) {
    extern __shared__ __align__(128) char shared[];
    const AttentionCall& call = params.call;
    const AttentionShape& shape = params.shape;
    AttentionBlock block(params, blockIdx.x);
    const int64_t k_offset = block.batch * shape.k.batch + block.k_begin * shape.k.row + block.kv_head * shape.k.head;
    const int64_t v_offset = block.batch * shape.v.batch + block.k_begin * shape.v.row + block.kv_head * shape.v.head;
    const StridedRows<T> k = {static_cast<const T*>(call.k) + k_offset, shape.k.row, shape.k.col};
    const StridedRows<T> v = {static_cast<const T*>(call.v) + v_offset, shape.v.row, shape.v.col};
    // One tile, but for the rows past the last sequence, of which there may be any number.
#pragma unroll 1
    for (; block.tile * Tile::BLOCK_M < block.rows(shape); block.tile += shape.row_tiles) {
        AttentionForward<T, Out, Tile, ACCESS, kScore> forward(params, block, shared_address(shared));
        forward.run(k, v);
        forward.finish();
        __syncthreads();
    }
}

}  // namespace rawops
