// Flash attention, forward, on the tensor cores of Hopper: float16 and bfloat16 that TMA can read, every mask and
// score. hopper_attention.cuh tells how it runs.
#include "common/hopper_attention.cuh"

namespace rawops {

template <class T, int D, int DV, int CONSUMERS, int BLOCK_N, int STAGES, bool kTurns, int kScore, class Out,
          class Tile = HopperAttention<T, D, DV, CONSUMERS, BLOCK_N, STAGES, kTurns, kScore, Out>>
__global__ void __launch_bounds__(Tile::THREADS, 1)
    attention_sm90(const __grid_constant__ AttentionMaps maps, const __grid_constant__ TensorMap out,
                   const __grid_constant__ AttentionParams params, int section, int* taken) {
    run_attention<Tile>(maps, params, section, taken, NoScales(), &out);
}

}  // namespace rawops
