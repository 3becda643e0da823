// Chunked prefill on Hopper: the attention of hopper_attention.cuh, whose keys and values TMA brings from pages.
#include "common/hopper_attention_pages.cuh"

namespace rawops {

// Out is float for the partial results of ranges of keys, which attention_merge.cu joins. The batch strides of k and v
// have no other use here: they are the groups from page to page, and the number of pages.
template <class T, class Out, int D, int CONSUMERS, int BLOCK_N, int STAGES, bool kTurns,
          class Tile = HopperAttention<T, D, D, CONSUMERS, BLOCK_N, STAGES, kTurns, 0, Out, true>>
__global__ void __launch_bounds__(Tile::THREADS, 1)
    paged_prefill_sm90(const __grid_constant__ AttentionMaps maps, const __grid_constant__ AttentionParams params,
                       int section, int* taken) {
    run_attention<Tile, PagedProducer<Tile>>(maps, params, section, taken);
}

}  // namespace rawops
