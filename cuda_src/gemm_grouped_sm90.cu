// Grouped GEMM on the tensor cores of Hopper: the GEMM of gemm_sm90.cu on rows of a that come in groups, with a matrix
// b for each. Where the groups begin is read on the device, and groups.cuh makes tiles of it. A tile's rows of a that
// are another group's are multiplied, too, and not written.
#include "common/hopper_gemm.cuh"

namespace rawops {

template <class T, class Out, int BLOCK_M, int BLOCK_N, int STAGES, bool kBKMajor, int kActivation, int kFinish,
          bool kPingPong,
          class Tile = HopperTile<T, Out, BLOCK_M, BLOCK_N, STAGES, 1, true, kBKMajor, kActivation, kFinish, kPingPong,
                                  NoLowRank, true>>
__global__ void __launch_bounds__(Tile::THREADS, 1)
    gemm_grouped_sm90(const __grid_constant__ GemmMaps maps, const __grid_constant__ GemmParams params,
                      const __grid_constant__ GroupOffsets groups, int raster_group) {
    run_gemm<Tile>(maps, params, nullptr, raster_group, &groups);
}

}  // namespace rawops
