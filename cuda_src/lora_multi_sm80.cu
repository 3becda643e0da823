// x @ c with an adapter for each row, on the tensor cores of sm_80 and later: the GEMM of gemm_sm80.cu on the sorted
// rows of lora_shrink.cu, with the low-rank part on the same accumulators and the rows put back on their way out.
#include "common/adapters.cuh"
#include "common/gemm_problem.cuh"
#include "common/mma_tile.cuh"

namespace rawops {

struct MultiParams {
    GemmCall call;  // a is x, sorted
    GemmShape shape;
    Adapters adapters;
};

// b straight from memory.
template <class T, class Columns> struct DirectRanks {
    static constexpr int BUFFERS = 1, GROUP = 2;
    const Adapters& adapters;
    const Columns& columns;
    int lane;
    const T* b;  // of the adapter
    int rank, from, to;  // this thread's first one; columns

    __device__ void fetch(const Columns&, int slot, int begin, int from_, int to_, int) {
        b = static_cast<const T*>(adapters.b) + int64_t(slot) * adapters.N * adapters.slot_rank;
        rank = begin + lane % 4 * 4;
        from = from_;
        to = to_;
    }
    __device__ uint2 read(int atom, int) const {
        const int n = columns.begin(atom) + lane / 4;
        if (n < from || n >= min_of(to, columns.end(atom))) return {};
        return *reinterpret_cast<const uint2*>(b + int64_t(n) * adapters.slot_rank + place_of_rank(rank, n));
    }
};

// Calls visit(acc[i]): registers have no index.
template <class Tile, class Visit>
__device__ inline void for_row(typename Tile::Accumulators& acc, int i, Visit visit) {
#pragma unroll
    for (int candidate = 0; candidate < Tile::ATOMS_M; ++candidate) {
        if (candidate == i) visit(acc[candidate]);
    }
}
template <int ATOMS> __device__ inline void copy_atoms(float (&to)[ATOMS][4], const float (&from)[ATOMS][4]) {
#pragma unroll
    for (int i = 0; i < ATOMS * 4; ++i) to[i / 4][i % 4] = from[i / 4][i % 4];
}

template <class T, class Out, class Shape, bool kBKMajor, int ACCESS_B, int kActivation>
__global__ void __launch_bounds__(Shape::THREADS, 1) lora_multi_sm80(const __grid_constant__ MultiParams params) {
    using Epilogue = Epilogue<T, Out, kActivation>;
    using Tile = MmaTile<T, Shape, true, kBKMajor, 16, ACCESS_B, Epilogue::kGated>;
    constexpr int TILE_COLS = Epilogue::kGated ? Shape::BLOCK_N / 2 : Shape::BLOCK_N;  // columns of D
    extern __shared__ __align__(128) char shared[];
    const GemmCall& call = params.call;
    const GemmShape& shape = params.shape;
    const Adapters& adapters = params.adapters;

    const int thread = threadIdx.x, cols = shape.epilogue.cols;
    const TileIndex tile = grouped_raster(blockIdx.x, ceil_div(shape.M, Shape::BLOCK_M), ceil_div(cols, TILE_COLS));
    const int m_begin = tile.m * Shape::BLOCK_M, n_begin = tile.n * TILE_COLS;
    const int k_begin = blockIdx.y * shape.k_per_split;

    typename Tile::LoaderA loader_x(static_cast<const T*>(call.a), adapters.x_row, 1, m_begin, shape.M, k_begin, 0,
                                    thread);
    typename Tile::LoaderB loader_c(static_cast<const T*>(call.b), shape.b.col, shape.b.row, n_begin, cols, k_begin,
                                    cols * shape.b.col, thread);
    typename Tile::Accumulators acc = {};
    NoRider rider;
    multiply_tile<Tile>(acc, loader_x, loader_c, rider, shared_address(shared),
                        min_of(shape.K - k_begin, shape.k_per_split), thread);
    if (blockIdx.y == 0) {  // the first slice of K adds it
        const int warp = thread / kWarpSize, warp_cols = Epilogue::kGated ? Tile::WARP_N / 2 : Tile::WARP_N;
        const int n = n_begin + warp % Tile::WARPS_N * warp_cols;
        using Columns = WarpColumns<Tile::ATOMS_N, Epilogue::kGated ? 2 : 1>;
        const Columns columns{n, cols};
        const int lane = thread % kWarpSize;
#pragma unroll 1
        for (int i = 0; i < Tile::ATOMS_M; ++i) {  // one copy of the code for all rows
            const int first = m_begin + warp / Tile::WARPS_N * Tile::WARP_M + i * 16;
            float sum[Tile::ATOMS_N][4];
            for_row<Tile>(acc, i, [&](float (&own)[Tile::ATOMS_N][4]) { copy_atoms(sum, own); });
            const DirectRanks<T, Columns> source{adapters, columns, lane};
            AdapterPasses<T, Columns, DirectRanks<T, Columns>> passes(adapters, columns, source, first, lane);
            passes.add(sum);
            for_row<Tile>(acc, i, [&](float (&own)[Tile::ATOMS_N][4]) { copy_atoms(own, sum); });
        }
    }

    EpilogueCall target = call.epilogue;
    target.out = static_cast<Out*>(target.out) + blockIdx.y * shape.partial_stride;
    const int batch[3] = {};
    const Epilogue epilogue(target, shape.epilogue, batch, 1.0f);
    finish_tile<Tile>(acc, RowsPutBack<Epilogue>{epilogue, adapters}, shared, m_begin, n_begin, thread);
}

}  // namespace rawops
