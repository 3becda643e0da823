// GEMM of float8 and int8 on the tensor cores of sm_80 and later (mma.sync), operands K-major with rows on 16-byte
// boundaries. Where mma.sync does not take float8 itself (it does on sm_89 and sm_120), that becomes float16 in
// registers.
//
// As gemm_sm80.cu, but that a block walks along K in spans, whose sums it adds up in float32, each with its scales.
#include "common/mma_tile.cuh"
#include "common/scaling.cuh"

namespace rawops {

// The tensor cores add float8 products with about 14 bits, so no sum in them is longer than this.
constexpr int kLongestSum = 1024;

// sum += part * scales for the accumulators of a thread; m_begin and n_begin are those of the block, n in columns of D.
template <class Tile, int kPromotion>
__device__ inline void add_scaled(typename Tile::Accumulators& sum, const typename Tile::Accumulators& part,
                                  const BlockScales& scales, int block, int m_begin, int n_begin, int cols,
                                  int thread) {
    constexpr int WARP_COLS = Tile::GATE > 0 ? Tile::GATE : Tile::WARP_N;
    const int warp = thread / kWarpSize, lane = thread % kWarpSize;
    const int m = m_begin + warp / Tile::WARPS_N * Tile::WARP_M + lane / 4;
    const int n = n_begin + warp % Tile::WARPS_N * WARP_COLS + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < Tile::ATOMS_N; ++j) {
#pragma unroll
        for (int place = 0; place < 2; ++place) {
            const int column = n + j * 8 % WARP_COLS + place + j * 8 / WARP_COLS * cols;
            const int index = kPromotion == kColumnScaled ? column : column / kScaleBlock;
            const float of_column = scales.b == nullptr ? 1 : *scales.of_column(index, block);
#pragma unroll
            for (int i = 0; i < Tile::ATOMS_M; ++i) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float* of_row = scales.of_row(m + i * 16 + half * 8, block);
                    const float scale = scales.a == nullptr ? of_column : *of_row * of_column;
                    sum[i][j][half * 2 + place] += part[i][j][half * 2 + place] * scale;
                }
            }
        }
    }
}

template <class Tile>
__device__ inline void add(typename Tile::Accumulators& sum, const typename Tile::Accumulators& part) {
#pragma unroll
    for (int i = 0; i < Tile::ATOMS_M; ++i) {
#pragma unroll
        for (int j = 0; j < Tile::ATOMS_N; ++j) {
#pragma unroll
            for (int value = 0; value < 4; ++value) sum[i][j][value] += part[i][j][value];
        }
    }
}

template <class T, class Out, class Addend, class Shape, int kPromotion, bool kVectors, int kActivation>
__global__ void __launch_bounds__(Shape::THREADS, 1) gemm_8bit_sm80(const __grid_constant__ ScaledParams params) {
    using Scaling = Scaling<Addend, kPromotion, kVectors>;
    using Epilogue = typename Scaling::template Epilogue<T, Out, kActivation>;
    using Tile = MmaTile<T, Shape, true, true, 16, 16, Epilogue::kGated>;
    constexpr int TILE_COLS = Epilogue::kGated ? Shape::BLOCK_N / 2 : Shape::BLOCK_N;  // columns of D
    extern __shared__ __align__(128) char shared[];
    const GemmCall& call = params.call;
    const GemmShape& shape = params.shape;

    const int thread = threadIdx.x, cols = shape.epilogue.cols;
    const TileIndex tile = grouped_raster(blockIdx.x, ceil_div(shape.M, Shape::BLOCK_M), ceil_div(cols, TILE_COLS));
    const int m_begin = tile.m * Shape::BLOCK_M, n_begin = tile.n * TILE_COLS;
    const float alpha = params.factor();
    const int k_count = alpha == 0 ? 0 : shape.K;  // 0: a and b are not read
    const int span = kPromotion >= kBlockScaled ? kScaleBlock : kPromotion == kPromoted ? kLongestSum : k_count;

    for (int batch = blockIdx.z; batch < shape.batches; batch += gridDim.z) {
        int index[3];
        shape.batch_index(batch, index);
        const T* a = static_cast<const T*>(call.a) + shape.a.offset(index);
        const T* b = static_cast<const T*>(call.b) + shape.b.offset(index);
        typename Tile::Accumulators acc = {};
#pragma unroll 1
        for (int k = 0; k < k_count; k += span) {
            typename Tile::LoaderA loader_a(a, shape.a.row, 1, m_begin, shape.M, k, 0, thread);
            typename Tile::LoaderB loader_b(b, shape.b.col, 1, n_begin, cols, k, cols * shape.b.col, thread);
            NoRider rider;
            const uint32_t ring = shared_address(shared);
            const int count = min_of(k_count - k, span);
            if constexpr (kPromotion == kInPlace) {
                multiply_tile<Tile>(acc, loader_a, loader_b, rider, ring, count, thread);
            } else {
                typename Tile::Accumulators part = {};
                multiply_tile<Tile>(part, loader_a, loader_b, rider, ring, count, thread);
                if constexpr (kPromotion == kPromoted) {
                    add<Tile>(acc, part);
                } else {
                    const BlockScales scales(params, index);
                    add_scaled<Tile, kPromotion>(acc, part, scales, k / kScaleBlock, m_begin, n_begin, cols, thread);
                }
            }
        }
        const auto epilogue = Scaling::template epilogue<Epilogue>(params, index, alpha, shape.M);
        finish_tile<Tile>(acc, epilogue, shared, m_begin, n_begin, thread);
        __syncthreads();  // the next batch fills what finish_tile still reads
    }
}

}  // namespace rawops
