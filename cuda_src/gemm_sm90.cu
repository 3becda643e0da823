// GEMM on the tensor cores of Hopper (wgmma): float16 and bfloat16 operands that TMA can read, in any of the layouts,
// and float32 ones that are contiguous along K, rounded to TF32.
// hopper_gemm.cuh tells how it runs.
//
// Blocks without a cluster have a kernel of their own: as clusters of one they are placed on other SMs, and a large
// product takes 4 % longer.
#include "common/hopper_gemm.cuh"

namespace rawops {

template <class T, class Out, int BLOCK_M, int BLOCK_N, int STAGES, bool kAKMajor, bool kBKMajor, int kActivation,
          int kFinish, bool kPingPong,
          class Tile = HopperTile<T, Out, BLOCK_M, BLOCK_N, STAGES, 1, kAKMajor, kBKMajor, kActivation, kFinish,
                                  kPingPong>>
__global__ void __launch_bounds__(Tile::THREADS, 1)
    gemm_sm90(const __grid_constant__ GemmMaps maps, const __grid_constant__ GemmParams params, int raster_group) {
    run_gemm<Tile>(maps, params, nullptr, raster_group);
}

template <class T, class Out, int BLOCK_M, int BLOCK_N, int STAGES, int CLUSTER, bool kAKMajor, bool kBKMajor,
          int kActivation, int kFinish,
          class Tile = HopperTile<T, Out, BLOCK_M, BLOCK_N, STAGES, CLUSTER, kAKMajor, kBKMajor, kActivation, kFinish>>
__global__ void __launch_bounds__(Tile::THREADS, 1) __cluster_dims__(CLUSTER, 1, 1)
    gemm_sm90_cluster(const __grid_constant__ GemmMaps maps, const __grid_constant__ GemmParams params,
                      int raster_group) {
    run_gemm<Tile>(maps, params, nullptr, raster_group);
}

template <class T, class Out, int BLOCK_M, int BLOCK_N, int STAGES, bool kAKMajor, bool kBKMajor, int kActivation,
          int kFinish, bool kPingPong,
          class Tile = HopperTile<T, Out, BLOCK_M, BLOCK_N, STAGES, 1, kAKMajor, kBKMajor, kActivation, kFinish,
                                  kPingPong, NoLowRank, false, NoScaling, 2>>
__global__ void __launch_bounds__(Tile::THREADS, 1) __cluster_dims__(2, 1, 1)
    gemm_sm90_pairs(const __grid_constant__ GemmMaps maps, const __grid_constant__ GemmParams params,
                    int raster_group) {
    run_gemm<Tile>(maps, params, nullptr, raster_group);
}

template <class T, class Out, int BLOCK_M, int BLOCK_N, int STAGES, bool kAKMajor, bool kBKMajor, int kActivation,
          int kFinish,
          class Tile = HopperTile<T, Out, BLOCK_M, BLOCK_N, STAGES, 1, kAKMajor, kBKMajor, kActivation, kFinish, false,
                                  NoLowRank, false, NoScaling, 4>>
__global__ void __launch_bounds__(Tile::THREADS, 1) __cluster_dims__(4, 1, 1)
    gemm_sm90_squares(const __grid_constant__ GemmMaps maps, const __grid_constant__ GemmParams params,
                      int raster_group) {
    run_gemm<Tile>(maps, params, nullptr, raster_group);
}

}  // namespace rawops
