// Fused LoRA on the tensor cores of Hopper: the GEMM of gemm_sm90.cu with a low-rank part on the same accumulators,
// activation(a @ b + scaling * (a @ lora_a) @ lora_b + bias) + residual. hopper_low_rank.cuh tells how.
#include "common/hopper_gemm.cuh"

namespace rawops {

template <class T, class Out, int BLOCK_M, int BLOCK_N, int STAGES, bool kAKMajor, bool kBKMajor, int kActivation,
          int kFinish, int RANK, bool kRides, int kLoraA, bool kLoraBKMajor, bool kPingPong,
          class Tile = HopperTile<T, Out, BLOCK_M, BLOCK_N, STAGES, 1, kAKMajor, kBKMajor, kActivation, kFinish,
                                  kPingPong, LowRank<RANK, kRides, kLoraA, kLoraBKMajor>>>
__global__ void __launch_bounds__(Tile::THREADS, 1)
    lora_sm90(const __grid_constant__ GemmMaps maps, const __grid_constant__ GemmParams params,
              const __grid_constant__ LowRankCall low_rank, int raster_group) {
    run_gemm<Tile>(maps, params, &low_rank, raster_group);
}

template <class T, class Out, int BLOCK_M, int BLOCK_N, int STAGES, int CLUSTER, bool kAKMajor, bool kBKMajor,
          int kActivation, int kFinish, int RANK, bool kRides, int kLoraA, bool kLoraBKMajor,
          class Tile = HopperTile<T, Out, BLOCK_M, BLOCK_N, STAGES, CLUSTER, kAKMajor, kBKMajor, kActivation, kFinish,
                                  false, LowRank<RANK, kRides, kLoraA, kLoraBKMajor>>>
__global__ void __launch_bounds__(Tile::THREADS, 1) __cluster_dims__(CLUSTER, 1, 1)
    lora_sm90_cluster(const __grid_constant__ GemmMaps maps, const __grid_constant__ GemmParams params,
                      const __grid_constant__ LowRankCall low_rank, int raster_group) {
    run_gemm<Tile>(maps, params, &low_rank, raster_group);
}

}  // namespace rawops
