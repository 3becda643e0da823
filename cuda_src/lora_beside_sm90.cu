// x @ c of up to 64 rows with an adapter for each, on the tensor cores of Hopper, in one launch: the first blocks of
// the grid make y = x @ a, the others are the GEMM of gemm_sm90.cu. hopper_beside.cuh tells how a tile ends.
#include "common/hopper_beside.cuh"
#include "common/hopper_gemm.cuh"

namespace rawops {

template <class T, class Out, int BLOCK_N, int STAGES, bool kBKMajor, int kActivation, int kFinish,
          class Tile = HopperTile<T, Out, 64, BLOCK_N, STAGES, 1, true, kBKMajor, kActivation, kFinish, false,
                                  RowsBeside>>
__global__ void __launch_bounds__(Tile::THREADS, 1)
    lora_beside_sm90(const __grid_constant__ GemmMaps maps, const __grid_constant__ GemmParams params,
                     const __grid_constant__ AdaptersBeside adapters, int raster_group) {
    extern __shared__ __align__(1024) char shared[];
    if (blockIdx.x >= adapters.makers) return run_gemm<Tile>(maps, params, &adapters, raster_group);
    start_next_launch();
    await_launch_before();
    RankProducts<T, Tile::THREADS, Tile::GROUPS_AT>::make(adapters, shared);
}

}  // namespace rawops
