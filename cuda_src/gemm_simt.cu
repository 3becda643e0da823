// Exact float32 GEMM on the CUDA cores (sm_80 and later), for operands of any strides.
//
// Each warp holds a WARP_M x WARP_N part of the tile as 8 x 4 lanes. The tiles keep their operand's order in shared
// memory; a thread reads 16 bytes at a time either way: 4 elements of K from one row or column, or 4 rows or columns
// at one element of K. blockIdx is used as in gemm_sm80.cu.
#include "common/gemm_problem.cuh"
#include "common/ring.cuh"

namespace rawops {

// One thread's COUNT rows of A (or columns of B) of a tile, for 4 elements of K.
template <class Tile, bool kKMajor, int COUNT, int LANES> struct SimtReader {
    static_assert(COUNT % 4 == 0, "rows or columns are read in fours");
    int mn_begin, lane;

    // Where the thread's i-th row or column lies in the tile. Groups of 4 are neighbours if the epilogue or a 16-byte
    // read wants them so; otherwise the lanes are, which puts their reads into different banks.
    template <bool kGrouped> static __device__ int index(int i, int lane) {
        return kGrouped ? i / 4 * (4 * LANES) + lane * 4 + i % 4 : i * LANES + lane;
    }

    template <bool kGrouped> __device__ void read(float (&values)[4][COUNT], const char* tile, int k_begin) const {
        if constexpr (kKMajor) {
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                const int offset = Tile::offset(mn_begin + index<kGrouped>(i, lane), k_begin);
                const auto group = *reinterpret_cast<const Vector<float, 4>*>(tile + offset);
#pragma unroll
                for (int k = 0; k < 4; ++k) values[k][i] = group.data[k];
            }
        } else {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
#pragma unroll
                for (int i = 0; i < COUNT; i += 4) {
                    const int offset = Tile::offset(k_begin + k, mn_begin + index<true>(i, lane));
                    const auto group = *reinterpret_cast<const Vector<float, 4>*>(tile + offset);
#pragma unroll
                    for (int j = 0; j < 4; ++j) values[k][i + j] = group.data[j];
                }
            }
        }
    }
};

template <class Shape, bool kAKMajor, bool kBKMajor, int ACCESS_A, int ACCESS_B, int kActivation>
__global__ void __launch_bounds__(Shape::THREADS, 1) gemm_simt(const __grid_constant__ GemmParams params) {
    using Epilogue = Epilogue<float, float, kActivation>;
    constexpr int BLOCK_M = Shape::BLOCK_M, BLOCK_N = Shape::BLOCK_N, BLOCK_K = Shape::BLOCK_K;
    constexpr int WARP_M = Shape::WARP_M, WARP_N = Shape::WARP_N, THREADS = Shape::THREADS;
    constexpr int LANES_M = 8, LANES_N = 4;
    constexpr int ROWS = WARP_M / LANES_M, COLS = WARP_N / LANES_N;  // of one thread
    constexpr int GATE = Epilogue::kGated ? WARP_N / 2 : 0;
    constexpr int TILE_COLS = Epilogue::kGated ? BLOCK_N / 2 : BLOCK_N, UP = Epilogue::kGated ? COLS / 2 : 0;
    using LoaderA = OperandLoader<float, BLOCK_M, BLOCK_K, kAKMajor, ACCESS_A, THREADS>;
    using LoaderB = OperandLoader<float, BLOCK_N, BLOCK_K, kBKMajor, ACCESS_B, THREADS, GATE>;
    using ReaderA = SimtReader<typename LoaderA::Tile, kAKMajor, ROWS, LANES_M>;
    using ReaderB = SimtReader<typename LoaderB::Tile, kBKMajor, COLS, LANES_N>;
    constexpr int A_BYTES = LoaderA::Tile::BYTES, STAGE_BYTES = A_BYTES + LoaderB::Tile::BYTES;
    constexpr bool kGroupedRows = !kAKMajor;
    extern __shared__ __align__(128) char shared[];
    const GemmCall& call = params.call;
    const GemmShape& shape = params.shape;

    const int thread = threadIdx.x, warp = thread / kWarpSize, lane = thread % kWarpSize;
    const int lane_m = lane % LANES_M, lane_n = lane / LANES_M;
    const int warp_m = warp / Shape::WARPS_N * WARP_M, warp_n = warp % Shape::WARPS_N * WARP_N;
    const ReaderA reader_a{warp_m, lane_m};
    const ReaderB reader_b{warp_n, lane_n};
    const int cols = shape.epilogue.cols;
    const TileIndex tile = grouped_raster(blockIdx.x, ceil_div(shape.M, BLOCK_M), ceil_div(cols, TILE_COLS));
    const int m_begin = tile.m * BLOCK_M, n_begin = tile.n * TILE_COLS;
    const int k_begin = blockIdx.y * shape.k_per_split;
    const float alpha = call.alpha.read();
    const int k_count = alpha == 0 ? 0 : min_of(shape.K - k_begin, shape.k_per_split);  // 0: a and b are not read

    for (int batch = blockIdx.z; batch < shape.batches; batch += gridDim.z) {
        int index[3];
        shape.batch_index(batch, index);
        LoaderA loader_a(static_cast<const float*>(call.a) + shape.a.offset(index), shape.a.row, shape.a.col, m_begin,
                         shape.M, k_begin, 0, thread);
        LoaderB loader_b(static_cast<const float*>(call.b) + shape.b.offset(index), shape.b.col, shape.b.row, n_begin,
                         cols, k_begin, cols * shape.b.col, thread);
        float acc[ROWS][COLS] = {};

        const uint32_t ring = shared_address(shared);
        auto fetch = [&](uint32_t stage, int block) {
            const int k_left = k_count - block * BLOCK_K;
            loader_a.fetch(stage, k_left);
            loader_b.fetch(stage + A_BYTES, k_left);
        };
        auto multiply = [&](uint32_t stage) {
            const char* tile_a = shared + (stage - ring);
#pragma unroll
            for (int k_begin = 0; k_begin < BLOCK_K; k_begin += 4) {
                float a[4][ROWS], b[4][COLS];
                reader_a.template read<kGroupedRows>(a, tile_a, k_begin);
                reader_b.template read<true>(b, tile_a + A_BYTES, k_begin);
#pragma unroll
                for (int k = 0; k < 4; ++k) {
#pragma unroll
                    for (int i = 0; i < ROWS; ++i) {
#pragma unroll
                        for (int j = 0; j < COLS; ++j) acc[i][j] = fmaf(a[k][i], b[k][j], acc[i][j]);
                    }
                }
            }
        };
        run_ring<Shape::STAGES, STAGE_BYTES>(ring, ceil_div(k_count, BLOCK_K), fetch, [](uint32_t) {}, multiply);

        EpilogueCall target = call.epilogue;
        target.out = static_cast<float*>(target.out) + blockIdx.y * shape.partial_stride;
        const Epilogue epilogue(target, shape.epilogue, index, shape.partial_stride != 0 ? 1.0f : alpha);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const int m = m_begin + warp_m + ReaderA::template index<kGroupedRows>(i, lane_m);
#pragma unroll
            for (int j = 0; j < COLS - UP; j += 4) {
                const int n = n_begin + (UP > 0 ? warp_n / 2 : warp_n) + ReaderB::template index<true>(j, lane_n);
                float value[4], up[4];
#pragma unroll
                for (int v = 0; v < 4; ++v) value[v] = acc[i][j + v], up[v] = acc[i][j + v + UP];
                epilogue.finish(m, n, value, up);
            }
        }
    }
}

}  // namespace rawops
