// Fused LoRA on the tensor cores of sm_80 and later: activation(x @ c + scaling * (x @ a) @ b + bias) + residual.
//
// The GEMM of gemm_sm80.cu, with the rank-r part on the same accumulators before the only write of D. Split along K
// it stays right slice by slice, since (x @ a) @ b is linear in x @ a.
#include "common/gemm_problem.cuh"
#include "common/lora_tile.cuh"

namespace rawops {

struct LoraParams {
    GemmCall call;    // a and b are x and c
    GemmShape shape;
    LoraOperands lora;
};

// kRide: rank <= RANK, and x @ a is made here, along the K loop. Otherwise it is read, and b passes through shared
// memory RANK ranks at a time.
template <class T, class Out, class Shape, bool kAKMajor, bool kBKMajor, int ACCESS_A, int ACCESS_B, int kActivation,
          int RANK, bool kRide, bool kLoraAKMajor, bool kLoraBKMajor, int ACCESS_LORA_A, int ACCESS_LORA_B>
__global__ void __launch_bounds__(Shape::THREADS, 1) lora_sm80(const __grid_constant__ LoraParams params) {
    using Epilogue = Epilogue<T, Out, kActivation>;
    using Tile = MmaTile<T, Shape, kAKMajor, kBKMajor, ACCESS_A, ACCESS_B, Epilogue::kGated>;
    using Rider = LoraRider<Tile, RANK, kLoraAKMajor, ACCESS_LORA_A>;
    using Product = RankProduct<Tile, RANK, kLoraBKMajor, ACCESS_LORA_B>;
    constexpr int BLOCK_M = Shape::BLOCK_M;
    constexpr int TILE_COLS = Epilogue::kGated ? Shape::BLOCK_N / 2 : Shape::BLOCK_N;  // columns of D
    constexpr int RING_BYTES = Shape::STAGES * (kRide ? stage_bytes<Tile, Rider> : stage_bytes<Tile>);
    static_assert(Product::TileY::BYTES <= RING_BYTES, "x @ a takes over the ring when it rides");
    extern __shared__ __align__(128) char shared[];
    const GemmCall& call = params.call;
    const GemmShape& shape = params.shape;
    const LoraOperands& lora = params.lora;
    const uint32_t ring = shared_address(shared), tile_b = ring + RING_BYTES, tile_y = tile_b + Product::B_BYTES;

    const int thread = threadIdx.x;
    const int cols = shape.epilogue.cols;
    const TileIndex tile = grouped_raster(blockIdx.x, ceil_div(shape.M, BLOCK_M), ceil_div(cols, TILE_COLS));
    const int m_begin = tile.m * BLOCK_M, n_begin = tile.n * TILE_COLS;
    const int k_begin = blockIdx.y * shape.k_per_split;
    const int k_count = min_of(shape.K - k_begin, shape.k_per_split);

    for (int batch = blockIdx.z; batch < shape.batches; batch += gridDim.z) {
        int index[3];
        shape.batch_index(batch, index);
        typename Tile::LoaderA loader_x(static_cast<const T*>(call.a) + shape.a.offset(index), shape.a.row, shape.a.col,
                                        m_begin, shape.M, k_begin, 0, thread);
        typename Tile::LoaderB loader_c(static_cast<const T*>(call.b) + shape.b.offset(index), shape.b.col, shape.b.row,
                                        n_begin, cols, k_begin, cols * shape.b.col, thread);
        typename Tile::Accumulators acc = {};
        Product::fetch_b(lora, 0, n_begin, cols, tile_b, thread);  // arrives while the K loop runs
        if constexpr (kRide) {
            Rider rider(lora, k_begin, thread);
            multiply_tile<Tile>(acc, loader_x, loader_c, rider, ring, k_count, thread);
            rider.store_product(shared, thread);
            __syncthreads();
            Product::add(acc, ring, tile_b, lora.rank, lora.scaling, thread);
        } else {
            auto fetch_y = [&](int begin) {
                Product::fetch_y(lora, begin, int64_t(batch) * shape.M + m_begin, shape.M - m_begin, tile_y, thread);
            };
            fetch_y(0);
            NoRider rider;
            multiply_tile<Tile>(acc, loader_x, loader_c, rider, ring, k_count, thread);
            const int rank = blockIdx.y == 0 ? lora.rank : 0;  // the first slice of K adds it
#pragma unroll 1
            for (int begin = 0; begin < rank; begin += RANK) {
                if (begin > 0) {
                    __syncthreads();  // all warps are done with the ranks before
                    Product::fetch_b(lora, begin, n_begin, cols, tile_b, thread);
                    fetch_y(begin);
                    cp_async_commit();
                    cp_async_wait<0>();
                    __syncthreads();
                }
                Product::add(acc, tile_y, tile_b, rank - begin, lora.scaling, thread);
            }
        }
        __syncthreads();  // finish_tile takes the memory over

        EpilogueCall target = call.epilogue;
        target.out = static_cast<Out*>(target.out) + blockIdx.y * shape.partial_stride;
        const Epilogue epilogue(target, shape.epilogue, index, 1.0f);
        finish_tile<Tile>(acc, epilogue, shared, m_begin, n_begin, thread);
        __syncthreads();  // the next batch fills what finish_tile still reads
    }
}

}  // namespace rawops
