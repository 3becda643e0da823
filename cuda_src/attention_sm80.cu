// Flash attention on the tensor cores of sm_80 and later: every layout, mask and score the library knows.
#include "common/attention_forward.cuh"

namespace rawops {

// The grid is (heads that go together, row tiles from the last one on, how often): under a mask the longest tiles of
// all these heads come first. A head here stands for packed heads, and for each range of their keys.
// Out is float for the partial results of ranges of keys, which attention_merge.cu joins.
template <class T, class Out, class Tile, int ACCESS, int kScore, bool kPacked>
__global__ void __launch_bounds__(Tile::THREADS) attention_sm80(const __grid_constant__ AttentionParams params) {
    using Forward = AttentionForward<T, StridedRows, Out, Tile, ACCESS, kScore, kPacked>;
    extern __shared__ __align__(128) char shared[];
    __shared__ __align__(16) char storage[sizeof(typename Forward::Work)];
    auto& work = *reinterpret_cast<typename Forward::Work*>(storage);
    const AttentionShape& shape = params.shape;
    AttentionBlock block(params, blockIdx.z * gridDim.x + blockIdx.x, gridDim.y - 1 - blockIdx.y);
    auto rows = [&](const void* base, const AttentionStrides& s) {
        const T* first = static_cast<const T*>(base) + block.batch * s.batch + block.kv_head * s.head;
        return StridedRows<T>{first + block.k_begin * s.row, s.row, s.col};
    };
    StridedRows<T> k = rows(params.call.k, shape.k), v = rows(params.call.v, shape.v);
    // One tile, but for the rows past the last sequence, of which there may be any number.
    int tile = block.tile;
    while (tile * Tile::BLOCK_M < block.rows(shape)) {
        Forward forward(params, work, shared_address(shared));
        forward.run(block, k, v, tile);
        forward.finish();
        tile = work.first / Tile::BLOCK_M + gridDim.y;
        block = work.block, k = work.k, v = work.v;
        __syncthreads();
    }
}

}  // namespace rawops
