// GEMM on the tensor cores of sm_80 and later (mma.sync): float16, bfloat16, float32 rounded to TF32, float64.
//
// A block computes one tile of D and walks along K through a ring of cp.async stages. blockIdx.x is the tile,
// blockIdx.y the slice of K (split-K), blockIdx.z the batch. A grouped product has a matrix b for each group of rows,
// as a batch has; its grid has room for the tiles of any offsets.
#include "common/groups.cuh"
#include "common/mma_tile.cuh"

namespace rawops {

template <class T, class Out, class Shape, bool kAKMajor, bool kBKMajor, int ACCESS_A, int ACCESS_B, int kActivation>
struct Sm80Product {
    using Epilogue = rawops::Epilogue<T, Out, kActivation>;
    using Tile = MmaTile<T, Shape, kAKMajor, kBKMajor, ACCESS_A, ACCESS_B, Epilogue::kGated>;
    static constexpr int BLOCK_M = Shape::BLOCK_M;
    static constexpr int COLS = Epilogue::kGated ? Shape::BLOCK_N / 2 : Shape::BLOCK_N;  // of D

    // The tile at m_begin and n_begin of one product of the batch, of rows below m_end.
    static __device__ void run(const GemmCall& call, const GemmShape& shape, uint32_t shared, int batch, int m_begin,
                               int m_end, int n_begin) {
        int thread;  // read for each batch, which keeps what the epilogue makes of it out of the main loop's registers
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
        const int cols = shape.epilogue.cols, k_begin = blockIdx.y * shape.k_per_split;
        const bool reads = Accumulator<T>(call.alpha.read()) != 0;
        const int k_count = reads ? min_of(shape.K - k_begin, shape.k_per_split) : 0;
        int index[3];
        shape.batch_index(batch, index);
        typename Tile::LoaderA loader_a(static_cast<const T*>(call.a) + shape.a.offset(index), shape.a.row, shape.a.col,
                                        m_begin, m_end, k_begin, 0, thread);
        typename Tile::LoaderB loader_b(static_cast<const T*>(call.b) + shape.b.offset(index), shape.b.col, shape.b.row,
                                        n_begin, cols, k_begin, cols * shape.b.col, thread);
        typename Tile::Accumulators acc = {};
        NoRider rider;
        multiply_tile<Tile>(acc, loader_a, loader_b, rider, shared, k_count, thread);

        EpilogueCall target = call.epilogue;
        const bool partial = shape.partial_stride != 0;
        target.out = static_cast<Out*>(target.out) + blockIdx.y * shape.partial_stride;
        const double alpha = partial ? 1 : call.alpha.read();  // once more: it takes no registers in the main loop
        const Epilogue epilogue(target, shape.epilogue, index, Accumulator<T>(alpha), m_end);
        finish_tile<Tile>(acc, epilogue, __cvta_shared_to_generic(shared), m_begin, n_begin, thread);
    }
};

template <class T, class Out, class Shape, bool kAKMajor, bool kBKMajor, int ACCESS_A, int ACCESS_B, int kActivation>
__global__ void __launch_bounds__(Shape::THREADS, 1) gemm_sm80(const __grid_constant__ GemmParams params) {
    using Product = Sm80Product<T, Out, Shape, kAKMajor, kBKMajor, ACCESS_A, ACCESS_B, kActivation>;
    extern __shared__ __align__(128) char shared[];
    const GemmShape& shape = params.shape;
    const int tiles_m = ceil_div(shape.M, Product::BLOCK_M), tiles_n = ceil_div(shape.epilogue.cols, Product::COLS);
    const TileIndex tile = grouped_raster(blockIdx.x, tiles_m, tiles_n);
    for (int batch = blockIdx.z; batch < shape.batches; batch += gridDim.z) {
        Product::run(params.call, shape, shared_address(shared), batch, tile.m * Product::BLOCK_M, shape.M,
                     tile.n * Product::COLS);
        __syncthreads();  // the next batch fills what finish_tile still reads
    }
}

template <class T, class Out, class Shape, bool kAKMajor, bool kBKMajor, int ACCESS_A, int ACCESS_B, int kActivation>
__global__ void __launch_bounds__(Shape::THREADS, 1)
    gemm_grouped_sm80(const __grid_constant__ GroupedParams params) {
    using Product = Sm80Product<T, Out, Shape, kAKMajor, kBKMajor, ACCESS_A, ACCESS_B, kActivation>;
    extern __shared__ __align__(128) char shared[];
    const GemmShape& shape = params.shape;
    GroupTable table(shared, params.groups.count);
    table.fill(params.groups, shape.M, Product::BLOCK_M);
    const int tiles_n = ceil_div(shape.epilogue.cols, Product::COLS);
    if (blockIdx.x >= table.row_tiles() * tiles_n) return;
    const GroupTile tile = table.find(blockIdx.x, tiles_n, 8, Product::BLOCK_M);
    const uint32_t ring = shared_address(shared) + table.bytes();
    Product::run(params.call, shape, ring, tile.group, tile.m, tile.m_end, tile.n * Product::COLS);
}

}  // namespace rawops
