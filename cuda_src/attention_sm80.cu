// Flash attention on the tensor cores of sm_80 and later: every layout, mask and score the library knows.
#include "common/attention_forward.cuh"

namespace rawops {

// The grid is (heads that go together, row tiles from the last one on, how often): under a mask the longest tiles of
// all these heads come first. A head here stands for packed heads, and for each range of their keys.
// Out is float for the partial results of ranges of keys, which attention_merge.cu joins.
template <class T, class Out, class Tile, int ACCESS, int kScore, bool kPacked>
__global__ void __launch_bounds__(Tile::THREADS) attention_sm80(const __grid_constant__ AttentionParams params) {
    const AttentionBlock block(params, blockIdx.z * gridDim.x + blockIdx.x, gridDim.y - 1 - blockIdx.y);
    auto rows = [&](const void* base, const AttentionStrides& s) {
        const T* first = static_cast<const T*>(base) + block.batch * s.batch + block.kv_head * s.head;
        return StridedRows<T>{first + block.k_begin * s.row, s.row, s.col};
    };
    run_tiles<AttentionForward<T, StridedRows, Out, Tile, ACCESS, kScore, kPacked>>(
        params, block, rows(params.call.k, params.shape.k), rows(params.call.v, params.shape.v), gridDim.y);
}

}  // namespace rawops
