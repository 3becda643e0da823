// A few tokens, up to eight, times packed 4-bit weights, K contiguous: the weights come straight to the registers of
// the lanes that dequantise them, at the speed at which the memory delivers them. With more tokens, which every block
// reads, gemm_w4_sm90.cu is faster.
//
// A block has 32 columns, and SPLIT warps that take the groups of 128 along K in turn. What matters is that every SM
// has enough loads on the way: many warps, of few registers each.
#include "common/launches.cuh"
#include "common/w4_stream.cuh"

namespace rawops {

// 16 bytes that are read once: the L1 keeps nothing of them. A load of a warp takes pieces of 64 bytes of eight rows,
// and other warps what lies beside: the L2 is to fetch 128 bytes for the first of them.
__device__ inline void load_once(uint32_t (&r)[4], const char* from) {
    asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "l"(from));
}

// A lane: where it finds what it multiplies next. Columns past the last one repeat those before. Where zero points are,
// and the scales of float4, is found anew for each group: pointers that move on would take registers that are not
// there.
template <class Tile> class DirectLane {
public:
    __device__ DirectLane(const W4Params& params_, int n_, int group, int lane)
        : params(params_), n(min_of(n_, params_.shape.epilogue.cols - COLUMNS)) {
        const GemmShape& shape = params.shape;
        const int token = min_of(lane / 4, shape.M - 1), t = lane % 4;
        weights = static_cast<const char*>(params.call.b) + n * shape.b.col + group * (Tile::GROUP / 2) + t * 16;
        tokens = static_cast<const T*>(params.call.a) + token * shape.a.row + group * Tile::GROUP + t * 32;
        scale = scales_of(group);
    }

    // acc += scale * (tokens @ (q - zero)), a group.
    __device__ void add_group(typename Tile::Accumulators& acc, int group) {
        const int cols = params.shape.epilogue.cols;
        const char* column = weights;
        uint32_t words[4][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            load_once(words[i], column);
            column += i % COLUMNS == COLUMNS - 1 ? (cols - COLUMNS + 1) * params.shape.b.col : params.shape.b.col;
        }
        const auto* zero = static_cast<const unsigned char*>(params.groups.zero) + group * params.groups.zero_row + n;
        if constexpr (!kScaleMoves) scale = scales_of(group);
        Vector<Scale, COLUMNS> scales[Tile::PARTS];
        Vector<unsigned char, COLUMNS> zeros[Tile::PARTS];
#pragma unroll
        for (int part = 0; part < Tile::PARTS; ++part) {
            scales[part] = *reinterpret_cast<const Vector<Scale, COLUMNS>*>(scale + part * cols);
            if constexpr (Tile::kHasZeros) {
                zeros[part] = *reinterpret_cast<const Vector<unsigned char, COLUMNS>*>(zero + part * cols);
            }
        }
        typename Tile::Offsets offsets;
        if constexpr (Tile::kHasZeros) {
            const int sign = params.groups.zero_sign;
#pragma unroll
            for (int i = 0; i < 4; ++i) offsets[i].set((zeros[i / COLUMNS].data[i % COLUMNS] ^ sign) - sign);
        }
        typename Tile::Accumulators sum = {};
        multiply_group<Tile>(sum, words, offsets, [&](uint32_t (&to)[4], int q, int) {
            load(to, tokens + q * 8);
            pair_apart(to);
        });
#pragma unroll
        for (int i = 0; i < 4; ++i) add_scaled<Tile>(acc, sum, i, widen(scales[i / COLUMNS].data[i % COLUMNS]));
    }

    // Goes on to another group.
    __device__ void advance(int groups) {
        weights += groups * (Tile::GROUP / 2);
        tokens += groups * Tile::GROUP;
        if constexpr (kScaleMoves) scale += groups * params.groups.scale_row;
    }

private:
    using T = typename Tile::T;
    using Scale = typename Tile::Scale;
    static constexpr int COLUMNS = Tile::COLUMNS;
    static constexpr bool kScaleMoves = Tile::kFormat != kFloat4;
    const W4Params& params;
    const char* weights;
    const T* tokens;
    const Scale* scale;
    int n;

    __device__ const Scale* scales_of(int group) const {
        return static_cast<const Scale*>(params.groups.scale) + group * params.groups.scale_row + n;
    }

    // In this order: all of them early would take more registers than there are.
    static __device__ void load(uint32_t (&r)[4], const T* from) {
        asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "l"(from)
                     : "memory");
    }
};

// Asks the L2 for `rows` rows of a block's columns, of which it fetches SIZE together.
template <class Tile, int THREADS, int SIZE, class V>
__device__ inline void ask_for_columns(const V* from, int64_t row, int64_t col, int rows, int cols) {
    constexpr int PIECES = Tile::UNIT / SIZE;  // of a row
#pragma unroll 1
    for (int i = threadIdx.x; i < PIECES * rows; i += THREADS) {
        const int place = i % PIECES * SIZE, n = blockIdx.x * Tile::COLS + place % Tile::COLS;
        if (n < cols) prefetch_line(from + i / PIECES * row + (n + place / Tile::COLS * cols) * col);
    }
}

// The same for what a block begins with, while the launch before is still at work: the scales and zero points of all
// groups, which a warp would wait for after it has waited for its weights, and the first group of each warp. Where that
// is all of K, nothing. (Zero points beside float32 scales: 24 bytes of spills.)
template <class Tile, int SPLIT> __device__ inline void ask_ahead(const W4Params& params) {
    using Scale = typename Tile::Scale;
    constexpr int THREADS = SPLIT * kWarpSize, LINE = 128, SECTOR = 32;
    const GroupParams& groups = params.groups;
    const int count = params.shape.K / Tile::GROUP, cols = params.shape.epilogue.cols;
    if (count <= SPLIT) return;
    const auto* weights = static_cast<const char*>(params.call.b);
    ask_for_columns<Tile, THREADS, SECTOR / int(sizeof(Scale))>(static_cast<const Scale*>(groups.scale),
                                                                groups.scale_row, 1, count, cols);
    if constexpr (Tile::kHasZeros && sizeof(Scale) == 2) {
        const auto* zeros = static_cast<const char*>(groups.zero);
        ask_for_columns<Tile, THREADS, Tile::COLS>(zeros, groups.zero_row, 1, count, cols);
    }
    ask_for_columns<Tile, THREADS, 1>(weights, LINE, params.shape.b.col, SPLIT * Tile::GROUP / 2 / LINE, cols);
}

template <class T, class Out, class Scale, int kFormat, bool kHasZeros, int SPLIT, bool kAsks, int kActivation>
__global__ void __launch_bounds__(SPLIT * kWarpSize, 32 / SPLIT) gemv_w4(const __grid_constant__ W4Params params) {
    using Epilogue = Epilogue<T, Out, kActivation>;
    using Tile = StreamTile<T, Scale, kFormat, kHasZeros, 8, Epilogue::kGated>;
    __shared__ __align__(16) float shared[SPLIT * Tile::TOKENS * (Tile::UNIT + StreamSums<Tile>::GAP)];
    start_next_launch();
    if (kAsks) ask_ahead<Tile, SPLIT>(params);
    const StreamSums<Tile> sums{shared, SPLIT, 1};
    const int slice = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, rows = params.shape.M;
    DirectLane<Tile> self(params, blockIdx.x * Tile::COLS + sums.column(0, lane, 0), slice, lane);
    fetch_parameters(params);
    await_launch_before();
    const float alpha = params.call.alpha.read();
    const int groups = alpha == 0 ? 0 : params.shape.K / Tile::GROUP;  // 0: a and b are not read
    typename Tile::Accumulators acc = {};
#pragma unroll 1
    for (int group = slice; group < groups; group += SPLIT) {
        self.add_group(acc, group);
        self.advance(SPLIT);
    }
    sums.leave(acc, slice, 0, lane, rows);
    __syncthreads();
    const int batch[3] = {};
    const Epilogue epilogue(params.call.epilogue, params.shape.epilogue, batch, alpha);
    sums.finish(epilogue, rows, threadIdx.x, SPLIT * kWarpSize);
}

}  // namespace rawops
