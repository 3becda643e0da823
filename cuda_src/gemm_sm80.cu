// GEMM on the tensor cores of sm_80 and later (mma.sync): float16, bfloat16, float32 rounded to TF32, float64.
//
// A block computes one tile of D and walks along K through a ring of cp.async stages. blockIdx.x is the tile,
// blockIdx.y the slice of K (split-K), blockIdx.z the batch.
#include "common/gemm_problem.cuh"
#include "common/mma_tile.cuh"

namespace rawops {

template <class T, class Out, class Shape, bool kAKMajor, bool kBKMajor, int ACCESS_A, int ACCESS_B, int kActivation>
__global__ void __launch_bounds__(Shape::THREADS, 1) gemm_sm80(const __grid_constant__ GemmParams params) {
    using Epilogue = Epilogue<T, Out, kActivation>;
    using Tile = MmaTile<T, Shape, kAKMajor, kBKMajor, ACCESS_A, ACCESS_B, Epilogue::kGated>;
    constexpr int BLOCK_M = Shape::BLOCK_M;
    constexpr int TILE_COLS = Epilogue::kGated ? Shape::BLOCK_N / 2 : Shape::BLOCK_N;  // columns of D
    extern __shared__ __align__(128) char shared[];
    const GemmCall& call = params.call;
    const GemmShape& shape = params.shape;

    const int cols = shape.epilogue.cols;
    const TileIndex tile = grouped_raster(blockIdx.x, ceil_div(shape.M, BLOCK_M), ceil_div(cols, TILE_COLS));
    const int m_begin = tile.m * BLOCK_M, n_begin = tile.n * TILE_COLS;
    const int k_begin = blockIdx.y * shape.k_per_split;
    const auto alpha = Accumulator<T>(call.alpha.read());
    const int k_count = alpha == 0 ? 0 : min_of(shape.K - k_begin, shape.k_per_split);  // 0: a and b are not read

    for (int batch = blockIdx.z; batch < shape.batches; batch += gridDim.z) {
        int thread;  // read for each batch, which keeps what the epilogue makes of it out of the main loop's registers
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
        int index[3];
        shape.batch_index(batch, index);
        typename Tile::LoaderA loader_a(static_cast<const T*>(call.a) + shape.a.offset(index), shape.a.row, shape.a.col,
                                        m_begin, shape.M, k_begin, 0, thread);
        typename Tile::LoaderB loader_b(static_cast<const T*>(call.b) + shape.b.offset(index), shape.b.col, shape.b.row,
                                        n_begin, cols, k_begin, cols * shape.b.col, thread);
        typename Tile::Accumulators acc = {};
        NoRider rider;
        multiply_tile<Tile>(acc, loader_a, loader_b, rider, shared_address(shared), k_count, thread);

        EpilogueCall target = call.epilogue;
        const bool partial = shape.partial_stride != 0;
        target.out = static_cast<Out*>(target.out) + blockIdx.y * shape.partial_stride;
        const Epilogue epilogue(target, shape.epilogue, index, partial ? Accumulator<T>(1) : alpha);
        finish_tile<Tile>(acc, epilogue, shared, m_begin, n_begin, thread);
        __syncthreads();  // the next batch fills what finish_tile still reads
    }
}

}  // namespace rawops
