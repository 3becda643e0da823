// x @ c with an adapter for each row, on the tensor cores of Hopper: the GEMM of gemm_sm90.cu on the sorted rows of
// lora_shrink.cu. hopper_adapters.cuh and hopper_adapter_turns.cuh tell how a tile ends.
#include "common/hopper_adapter_turns.cuh"
#include "common/hopper_adapters.cuh"
#include "common/hopper_gemm.cuh"

namespace rawops {

template <class T, class Out, int BLOCK_M, int BLOCK_N, int STAGES, bool kBKMajor, int kActivation, int kFinish,
          int BUFFERS, bool kInOrder, bool kPingPong,
          class Rows = typename Choose<kPingPong, RowsInTurn<BUFFERS>, SortedRows<BUFFERS, kInOrder>>::Type,
          class Tile = HopperTile<T, Out, BLOCK_M, BLOCK_N, STAGES, 1, true, kBKMajor, kActivation, kFinish, kPingPong,
                                  Rows>>
__global__ void __launch_bounds__(Tile::THREADS, 1)
    lora_multi_sm90(const __grid_constant__ GemmMaps maps, const __grid_constant__ GemmParams params,
                    const __grid_constant__ Adapters adapters, int raster_group) {
    run_gemm<Tile>(maps, params, &adapters, raster_group);
}

template <class T, class Out, int BLOCK_M, int BLOCK_N, int STAGES, int CLUSTER, bool kBKMajor, int kActivation,
          int kFinish, int BUFFERS, bool kInOrder,
          class Tile = HopperTile<T, Out, BLOCK_M, BLOCK_N, STAGES, CLUSTER, true, kBKMajor, kActivation, kFinish,
                                  false, SortedRows<BUFFERS, kInOrder>>>
__global__ void __launch_bounds__(Tile::THREADS, 1) __cluster_dims__(CLUSTER, 1, 1)
    lora_multi_sm90_cluster(const __grid_constant__ GemmMaps maps, const __grid_constant__ GemmParams params,
                            const __grid_constant__ Adapters adapters, int raster_group) {
    run_gemm<Tile>(maps, params, &adapters, raster_group);
}

}  // namespace rawops
