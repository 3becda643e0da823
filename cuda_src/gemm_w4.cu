// GEMM with 4-bit weights on the tensor cores of sm_80 and later: D = activation(alpha * a @ dequantised(b) + ...).
//
// Weights stay packed until they are in registers, so the memory moves a quarter of the bytes. They are the 16-row
// operand of the MMA and the tokens (rows of a) the 8-column one: a single token costs eight, not sixteen. Integers
// less their zero point, and e2m1 values, are exact in a's type; each group's sum is float32 and is scaled in float32.
//
// A block computes one tile of D and walks along K through a ring of cp.async stages. Its warps share out tokens,
// columns (32 each) and the K of a stage. blockIdx.x is the tile, blockIdx.y the slice of K, blockIdx.z the batch.
#include "common/dequant.cuh"
#include "common/ring.cuh"
#include "common/w4_problem.cuh"

namespace rawops {

template <int BLOCK_M_, int BLOCK_N_, int BLOCK_K_, int STAGES_, int WARPS_M_, int WARPS_K_> struct W4Shape {
    static constexpr int BLOCK_M = BLOCK_M_, BLOCK_N = BLOCK_N_, BLOCK_K = BLOCK_K_, STAGES = STAGES_;
    static constexpr int WARPS_M = WARPS_M_, WARPS_N = BLOCK_N / 32, WARPS_K = WARPS_K_;
    static constexpr int THREADS = WARPS_M * WARPS_N * WARPS_K * kWarpSize;
    static constexpr int WARP_M = BLOCK_M / WARPS_M, WARP_K = BLOCK_K / WARPS_K;
    static constexpr int BLOCKS = BLOCK_M == 8 ? 2 : 1;  // on an SM: few tokens leave registers for more
    static_assert(WARP_M % 8 == 0 && WARP_K % 32 == 0 && BLOCK_K % 128 == 0, "warps hold whole fragments and groups");
};

// The parts of a stage and who fills and reads them.
template <class T_, class Scale_, int kFormat, bool kHasZeros_, int GROUP_, class Shape, bool kAKMajor, bool kBKMajor,
          int ACCESS_A, int ACCESS_B, int ACCESS_SCALE, int ACCESS_ZERO, bool kGated>
struct W4Tile : Shape {
    using T = T_;
    using Scale = Scale_;
    using Shape::BLOCK_M, Shape::BLOCK_N, Shape::BLOCK_K, Shape::THREADS, Shape::WARP_M, Shape::WARP_K;
    static constexpr bool kHasZeros = kHasZeros_;
    static constexpr int GROUP = GROUP_, GROUPS = BLOCK_K / GROUP;
    static constexpr int GATE = kGated ? BLOCK_N / 2 : 0;  // a gated tile holds gate columns, then up

    using LoaderA = OperandLoader<T, BLOCK_M, BLOCK_K, kAKMajor, ACCESS_A, THREADS>;
    using LoaderB = OperandLoader<unsigned char, BLOCK_N, BLOCK_K / 2, kBKMajor, ACCESS_B, THREADS, GATE>;
    using LoaderScale = OperandLoader<Scale, BLOCK_N, GROUPS, false, ACCESS_SCALE, THREADS, GATE>;
    using LoaderZero = OperandLoader<unsigned char, BLOCK_N, GROUPS, false, ACCESS_ZERO, THREADS, GATE>;
    using Weights = WeightReader<T, kFormat, typename LoaderB::Tile, kBKMajor>;
    using Tokens = TokenReader<typename LoaderA::Tile, kAKMajor, kBKMajor>;

    static constexpr int TOKEN_ATOMS = WARP_M / 8;
    using Accumulators = float[2][TOKEN_ATOMS][4];  // of 16 columns x 8 tokens

    static constexpr int B = LoaderA::Tile::BYTES, SCALE = B + LoaderB::Tile::BYTES;
    static constexpr int ZERO = SCALE + LoaderScale::Tile::BYTES;
    static constexpr int STAGE_BYTES = ceil_div(ZERO + (kHasZeros ? LoaderZero::Tile::BYTES : 0), 128) * 128;
};

template <class T> __device__ inline T read_shared(uint32_t address) {
    return *static_cast<const T*>(__cvta_shared_to_generic(address));
}

// What a warp does with a stage: acc += scale * (a @ (q - zero)), one group or the warp's part of it after another.
template <class Tile> class W4Warp {
public:
    static constexpr int K_SPAN = min_of(Tile::GROUP, Tile::WARP_K);  // of one group

    __device__ W4Warp(int warp, int lane_, int zero_sign_)
        : m_begin(warp / (Tile::WARPS_K * Tile::WARPS_N) * Tile::WARP_M),
          n_begin(warp % Tile::WARPS_N * 32),
          k_begin(warp / Tile::WARPS_N % Tile::WARPS_K * Tile::WARP_K),
          lane(lane_),
          zero_sign(zero_sign_),
          weights(n_begin, k_begin, lane),
          tokens(m_begin, k_begin, lane) {}

    __device__ void multiply(typename Tile::Accumulators& acc, uint32_t stage) const {
#pragma unroll 1
        for (int span = 0; span < Tile::WARP_K / K_SPAN; ++span) {
            const int group = (k_begin + span * K_SPAN) / Tile::GROUP;
            float scale[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int at = Tile::LoaderScale::Tile::offset(group, n_begin + Tile::Weights::column(i, lane));
                scale[i] = widen(read_shared<typename Tile::Scale>(stage + Tile::SCALE + at));
            }
            typename Tile::Accumulators sum = {};
            if constexpr (Tile::kHasZeros) add_span(sum, stage, span, read_zeros(stage, group));
            else add_span(sum, stage, span, NoZeroPoints());
#pragma unroll
            for (int atom = 0; atom < 2; ++atom) {
#pragma unroll
                for (int j = 0; j < Tile::TOKEN_ATOMS; ++j) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        acc[atom][j][i] = fmaf(scale[atom * 2 + i / 2], sum[atom][j][i], acc[atom][j][i]);
                    }
                }
            }
        }
    }

    // Leaves the accumulators in the slab of the warp's part of K, (BLOCK_M, BLOCK_N).
    template <class Slab> __device__ void leave(const typename Tile::Accumulators& acc, char* slabs) const {
        char* slab = slabs + k_begin / Tile::WARP_K * Slab::BYTES;
#pragma unroll
        for (int atom = 0; atom < 2; ++atom) {
#pragma unroll
            for (int j = 0; j < Tile::TOKEN_ATOMS; ++j) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int row = m_begin + j * 8 + lane % 4 * 2 + i % 2;
                    const int col = n_begin + Tile::Weights::column(atom * 2 + i / 2, lane);
                    *reinterpret_cast<float*>(slab + Slab::offset(row, col)) = acc[atom][j][i];
                }
            }
        }
    }

private:
    const int m_begin, n_begin, k_begin, lane, zero_sign;
    const typename Tile::Weights weights;
    const typename Tile::Tokens tokens;

    // sum += a @ (q - zero)
    template <class Zeros>
    __device__ void add_span(typename Tile::Accumulators& sum, uint32_t stage, int span, const Zeros& zeros) const {
#pragma unroll
        for (int step = 0; step < K_SPAN / 32; ++step) {
            const int k_step = span * (K_SPAN / 32) + step;
            uint32_t words[4], a[2][2][4];
            weights.load(words, stage + Tile::B, k_step);
            Tile::Weights::dequantise(a, words, zeros);
#pragma unroll
            for (int j = 0; j < Tile::TOKEN_ATOMS; ++j) {
                uint32_t b[4];
                tokens.load(b, stage, j, k_step);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
#pragma unroll
                    for (int atom = 0; atom < 2; ++atom) {
                        MmaAtom<typename Tile::T>::multiply(sum[atom][j], a[atom][half], b[half * 2], b[half * 2 + 1]);
                    }
                }
            }
        }
    }

    __device__ ZeroPoints<typename Tile::T> read_zeros(uint32_t stage, int group) const {
        ZeroPoints<typename Tile::T> zeros;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int at = Tile::LoaderZero::Tile::offset(group, n_begin + Tile::Weights::column(i, lane));
            const int byte = read_shared<unsigned char>(stage + Tile::ZERO + at);
            zeros.value[i] = Half<typename Tile::T>::both(float((byte ^ zero_sign) - zero_sign));
        }
        return zeros;
    }
};

// Adds up the slabs of the warps' parts of K, and finishes the tile.
template <class Shape, class Slab, int TILE_COLS, class Epilogue>
__device__ inline void finish_slabs(const char* slabs, const Epilogue& epilogue, int m_begin, int n_begin, int thread) {
    auto sum = [&](int row, int col) {
        Vector<float, 4> total = {};
#pragma unroll
        for (int part = 0; part < Shape::WARPS_K; ++part) {
            const char* at = slabs + part * Slab::BYTES + Slab::offset(row, col);
            const auto terms = *reinterpret_cast<const Vector<float, 4>*>(at);
#pragma unroll
            for (int i = 0; i < 4; ++i) total.data[i] += terms.data[i];
        }
        return total;
    };
#pragma unroll 1
    for (int group = thread; group < Shape::BLOCK_M * TILE_COLS / 4; group += Shape::THREADS) {
        const int row = group / (TILE_COLS / 4), col = group % (TILE_COLS / 4) * 4;
        auto value = sum(row, col), up = value;
        if constexpr (Epilogue::kGated) up = sum(row, TILE_COLS + col);
        epilogue.finish(m_begin + row, n_begin + col, value.data, up.data);
    }
}

template <class T, class Out, class Scale, int kFormat, bool kHasZeros, int GROUP, class Shape, bool kAKMajor,
          bool kBKMajor, int ACCESS_A, int ACCESS_B, int ACCESS_SCALE, int ACCESS_ZERO, int kActivation>
__global__ void __launch_bounds__(Shape::THREADS, Shape::BLOCKS) gemm_w4(const __grid_constant__ W4Params params) {
    using Epilogue = Epilogue<T, Out, kActivation>;
    using Tile = W4Tile<T, Scale, kFormat, kHasZeros, GROUP, Shape, kAKMajor, kBKMajor, ACCESS_A, ACCESS_B,
                        ACCESS_SCALE, ACCESS_ZERO, Epilogue::kGated>;
    constexpr int BLOCK_M = Shape::BLOCK_M, BLOCK_K = Shape::BLOCK_K;
    constexpr int TILE_COLS = Epilogue::kGated ? Shape::BLOCK_N / 2 : Shape::BLOCK_N;  // columns of D
    extern __shared__ __align__(128) char shared[];
    const GemmCall& call = params.call;
    const GemmShape& shape = params.shape;
    const GroupParams& groups = params.groups;

    const int thread = threadIdx.x;
    const int cols = shape.epilogue.cols;
    const TileIndex tile = grouped_raster(blockIdx.x, ceil_div(shape.M, BLOCK_M), ceil_div(cols, TILE_COLS));
    const int m_begin = tile.m * BLOCK_M, n_begin = tile.n * TILE_COLS;
    const int k_begin = blockIdx.y * shape.k_per_split;
    const float alpha = call.alpha.read();
    const int k_count = alpha == 0 ? 0 : min_of(shape.K - k_begin, shape.k_per_split);  // 0: a and b are not read
    const W4Warp<Tile> warp(thread / kWarpSize, thread % kWarpSize, groups.zero_sign);

    for (int batch = blockIdx.z; batch < shape.batches; batch += gridDim.z) {
        int index[3];
        shape.batch_index(batch, index);
        typename Tile::LoaderA loader_a(static_cast<const T*>(call.a) + shape.a.offset(index), shape.a.row, shape.a.col,
                                        m_begin, shape.M, k_begin, 0, thread);
        typename Tile::LoaderB loader_b(static_cast<const unsigned char*>(call.b), shape.b.col, shape.b.row, n_begin,
                                        cols, k_begin / 2, cols * shape.b.col, thread);
        typename Tile::LoaderScale loader_scale(static_cast<const Scale*>(groups.scale), groups.scale_col,
                                                groups.scale_row, n_begin, cols, k_begin / GROUP,
                                                cols * groups.scale_col, thread);
        typename Tile::LoaderZero loader_zero(static_cast<const unsigned char*>(groups.zero), groups.zero_col,
                                              groups.zero_row, n_begin, cols, k_begin / GROUP,
                                              cols * groups.zero_col, thread);
        auto fetch = [&](uint32_t stage, int block) {
            const int k_left = k_count - block * BLOCK_K;
            loader_a.fetch(stage, k_left);
            if (n_begin + TILE_COLS <= cols && k_left >= BLOCK_K) {
                loader_b.template fetch<true>(stage + Tile::B, BLOCK_K / 2);
                loader_scale.template fetch<true>(stage + Tile::SCALE, BLOCK_K / GROUP);
                if constexpr (kHasZeros) loader_zero.template fetch<true>(stage + Tile::ZERO, BLOCK_K / GROUP);
            } else {
                loader_b.fetch(stage + Tile::B, k_left / 2);
                loader_scale.fetch(stage + Tile::SCALE, k_left / GROUP);
                if constexpr (kHasZeros) loader_zero.fetch(stage + Tile::ZERO, k_left / GROUP);
            }
        };
        auto store = [&](uint32_t stage) {
            loader_a.store(stage);
            loader_b.store(stage + Tile::B);
            loader_scale.store(stage + Tile::SCALE);
            if constexpr (kHasZeros) loader_zero.store(stage + Tile::ZERO);
        };
        typename Tile::Accumulators acc = {};
        auto multiply = [&](uint32_t stage) { warp.multiply(acc, stage); };
        run_ring<Shape::STAGES, Tile::STAGE_BYTES>(shared_address(shared), ceil_div(k_count, BLOCK_K), fetch, store,
                                                   multiply);

        using Slab = SharedTile<float, BLOCK_M, Shape::BLOCK_N>;
        warp.template leave<Slab>(acc, shared);
        __syncthreads();
        EpilogueCall target = call.epilogue;
        const bool partial = shape.partial_stride != 0;
        target.out = static_cast<Out*>(target.out) + blockIdx.y * shape.partial_stride;
        const Epilogue epilogue(target, shape.epilogue, index, partial ? 1.0f : alpha);
        finish_slabs<Shape, Slab, TILE_COLS>(shared, epilogue, m_begin, n_begin, thread);
        __syncthreads();  // the next batch fills what is still read
    }
}

}  // namespace rawops
