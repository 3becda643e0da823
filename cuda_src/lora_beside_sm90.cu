// x @ c of up to 64 rows with an adapter for each, on the tensor cores of Hopper, in one launch: the GEMM of
// gemm_sm90.cu, whose blocks make y = x @ a on their way. hopper_beside.cuh tells how.
#include "common/hopper_beside.cuh"
#include "common/hopper_gemm.cuh"

namespace rawops {

template <class T, class Out, int BLOCK_N, int STAGES, bool kBKMajor, int kActivation, int kFinish,
          class Tile = HopperTile<T, Out, 64, BLOCK_N, STAGES, 1, true, kBKMajor, kActivation, kFinish, false,
                                  RowsBeside>>
__global__ void __launch_bounds__(Tile::THREADS, 1)
    lora_beside_sm90(const __grid_constant__ GemmMaps maps, const __grid_constant__ GemmParams params,
                     const __grid_constant__ AdaptersBeside adapters, int raster_group) {
    run_gemm<Tile>(maps, params, &adapters, raster_group);
}

}  // namespace rawops
