// GEMM of float8 and int8 on the tensor cores of Hopper: the kernel of gemm_sm90.cu on bytes, K-major, with scales.
// hopper_gemm.cuh tells how it runs, scaling.cuh where the scales go.
#include "common/hopper_scaling.cuh"

namespace rawops {

template <class T, class Out, class Addend, int BLOCK_M, int BLOCK_N, int STAGES, int kPromotion, bool kVectors,
          int kActivation, int kFinish, bool kPingPong,
          class Tile = HopperTile<T, Out, BLOCK_M, BLOCK_N, STAGES, 1, true, true, kActivation, kFinish, kPingPong,
                                  NoLowRank, false, HopperScaling<Addend, kPromotion, kVectors>>>
__global__ void __launch_bounds__(Tile::THREADS, 1)
    gemm_8bit_sm90(const __grid_constant__ GemmMaps maps, const __grid_constant__ ScaledParams params,
                   int raster_group) {
    run_gemm<Tile>(maps, params, nullptr, raster_group);
}

template <class T, class Out, class Addend, int BLOCK_M, int BLOCK_N, int STAGES, int CLUSTER, int kPromotion,
          bool kVectors, int kActivation, int kFinish,
          class Tile = HopperTile<T, Out, BLOCK_M, BLOCK_N, STAGES, CLUSTER, true, true, kActivation, kFinish, false,
                                  NoLowRank, false, HopperScaling<Addend, kPromotion, kVectors>>>
__global__ void __launch_bounds__(Tile::THREADS, 1) __cluster_dims__(CLUSTER, 1, 1)
    gemm_8bit_sm90_cluster(const __grid_constant__ GemmMaps maps, const __grid_constant__ ScaledParams params,
                           int raster_group) {
    run_gemm<Tile>(maps, params, nullptr, raster_group);
}

}  // namespace rawops
