// The gradients of the low-rank factors: scaling * x^T @ y for two pairs at once, x with 16 bits and y in float32.
//
// A block walks over all rows of 64 columns of an x. Its warps take sixteen rows at a time, each from a ring of its own
// in shared memory: a thread has eight neighbouring columns of four rows, and the order of columns within an atom is
// free as long as it is undone when they are written. y goes in as a sum of values of x's type: x stays as it is.
#include "common/adapters.cuh"

namespace rawops {

// As _lora_factors.py packs it; strides in elements.
struct GradSide {
    const void* x;   // (M, cols)
    const float* y;  // (M, rank), rows on 16-byte boundaries
    void* out;       // (cols, rank)
    int64_t x_row, x_col, y_row, out_row, out_col;
    int cols, float_out;
};
struct GradParams {
    GradSide sides[2];
    int M, rank;
    float scaling;
};

constexpr int kGradWarps = 8, kGradThreads = kGradWarps * kWarpSize, kGradCols = 64, kGradAtoms = kGradCols / 8;
constexpr int kGradStages = 4, kGradStageBytes = 16 * (kGradCols * 2 + 64);  // sixteen rows of x, and 16 ranks of y

// Eight neighbouring columns of a row, of which `count` exist; the others become zero.
template <class T> __device__ inline uint4 read_columns(const T* from, int64_t stride, int count) {
    uint4 bits = {};
    auto* elements = reinterpret_cast<uint16_t*>(&bits);
    const auto* source = reinterpret_cast<const uint16_t*>(from);
#pragma unroll
    for (int i = 0; i < 8; ++i) elements[i] = i < count ? source[i * stride] : uint16_t(0);
    return bits;
}

// Starts the copy of rows m .. m + 15 to a stage; what does not exist becomes zero.
template <class T, bool kVectors>
__device__ inline void fetch_rows(uint32_t stage, const GradSide& side, int m, int M, int first, int rank, int ranks,
                                  int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = i * 4 + lane / 8, col = lane % 8 * 8, count = m + row < M ? side.cols - first - col : 0;
        const T* from = static_cast<const T*>(side.x) + (m + row) * side.x_row + (first + col) * side.x_col;
        const uint32_t to = stage + row * (kGradCols * 2) + col * 2;
        if constexpr (kVectors) {
            cp_async<16>(to, from, count > 0 ? 16 : 0);
        } else {
            const uint4 bits = read_columns<T>(from, side.x_col, count);
            asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(bits.x), "r"(bits.y), "r"(bits.z),
                         "r"(bits.w)
                         : "memory");
        }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = i * 8 + lane / 4, own = rank + lane % 4 * 4;
        const int count = m + row < M ? clamp(ranks - own, 0, 4) : 0;
        const uint32_t to = stage + 16 * kGradCols * 2 + row * 64 + lane % 4 * 16;
        cp_async<16>(to, side.y + (m + row) * side.y_row + own, count * 4);
    }
    cp_async_commit();
}

// Rows 4t .. 4t + 3 of sixteen, as a thread has them: columns 8g .. 8g + 7 of x, ranks g and g + 8 of y.
template <class T> struct GradRows {
    uint4 x[4];
    float y[2][4];

    __device__ void read(const char* stage, int lane) {
        const int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = t * 4 + i;
            x[i] = *reinterpret_cast<const uint4*>(stage + row * (kGradCols * 2) + g * 16);
            const auto* ranks = reinterpret_cast<const float*>(stage + 16 * kGradCols * 2 + row * 64);
            y[0][i] = ranks[g];
            y[1][i] = ranks[g + 8];
        }
    }
    // The pairs of rows of column 8g + atom.
    __device__ void column(uint32_t (&b)[2], int atom) const {
        const uint32_t order = atom % 2 ? 0x7632 : 0x5410;
#pragma unroll
        for (int i = 0; i < 2; ++i) b[i] = __byte_perm(word(x[i * 2], atom / 2), word(x[i * 2 + 1], atom / 2), order);
    }

private:
    static __device__ uint32_t word(const uint4& bits, int i) {
        return i == 0 ? bits.x : i == 1 ? bits.y : i == 2 ? bits.z : bits.w;
    }
};

// acc += y^T @ x. What x has of infinities meets the first part of y alone if `careful`: times a part
// that is 0 they would make NaN.
template <class T>
__device__ inline void add_rows(float (&acc)[kGradAtoms][4], GradRows<T>& rows, bool careful) {
    constexpr bool kScaled = RankParts<T>::COUNT == 2;
    RankParts<T> y;
    y.split(0, rows.y[0]);
    y.split(1, rows.y[1]);
    float fresh[kScaled ? kGradAtoms : 1][4] = {};
#pragma unroll
    for (int part = 0; part < RankParts<T>::COUNT; ++part) {
#pragma unroll
        for (int atom = 0; atom < kGradAtoms; ++atom) {
            uint32_t b[2];
            rows.column(b, atom);
            if (part > 0 && careful) {
                b[0] = finite_or_zero<T>(b[0]);
                b[1] = finite_or_zero<T>(b[1]);
            }
            MmaAtom<T>::multiply(kScaled ? fresh[kScaled ? atom : 0] : acc[atom], y.values[part], b[0], b[1]);
        }
    }
    if constexpr (kScaled) {
#pragma unroll
        for (int i = 0; i < kGradAtoms * 4; ++i) {
            float& sum = acc[i / 4][i % 4];
            sum = fmaf(fresh[i / 4][i % 4], y.scale[i / 2 % 2], sum);
        }
    }
}

// Sixteen ranks and 64 columns a block; the blocks that share columns are neighbours. kVectors: eight neighbouring
// columns exist or none of them does, and they may move as one.
template <class T, bool kVectors>
__global__ void __launch_bounds__(kGradThreads) lora_grad(const __grid_constant__ GradParams params) {
    constexpr int STEP = kGradWarps * 16;
    using Sums = float[16][kGradCols + 4];
    extern __shared__ __align__(128) char shared[];
    static_assert(sizeof(Sums) <= kGradWarps * kGradStages * kGradStageBytes, "the sums take over the rings");
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, g = lane / 4, t = lane % 4;
    const int groups = ceil_div(params.rank, 16), tiles = ceil_div(params.sides[0].cols, kGradCols);
    const int rank = blockIdx.x % groups * 16, tile = blockIdx.x / groups;
    const GradSide& side = params.sides[tile >= tiles];
    const int first = (tile >= tiles ? tile - tiles : tile) * kGradCols;

    float acc[kGradAtoms][4];
    bool careful = false;
#pragma unroll 1
    while (true) {
#pragma unroll
        for (int i = 0; i < kGradAtoms * 4; ++i) acc[i / 4][i % 4] = 0;
        char* ring = shared + warp * (kGradStages * kGradStageBytes);
        auto fetch = [&](int stage, int m) {
            const uint32_t to = shared_address(ring + stage * kGradStageBytes);
            fetch_rows<T, kVectors>(to, side, m, params.M, first, rank, params.rank, lane);
        };
#pragma unroll
        for (int stage = 0; stage < kGradStages - 1; ++stage) fetch(stage, (warp + stage * kGradWarps) * 16);
        int stage = 0;
#pragma unroll 1
        for (int m = warp * 16; m < params.M; m += STEP) {
            GradRows<T> rows;
            cp_async_wait<kGradStages - 2>();
            __syncwarp();
            rows.read(ring + stage * kGradStageBytes, lane);
            __syncwarp();  // the stage before this one is free, too, and is filled next
            fetch((stage + kGradStages - 1) % kGradStages, m + (kGradStages - 1) * STEP);
            stage = (stage + 1) % kGradStages;
            add_rows(acc, rows, careful);
        }
        cp_async_wait<0>();
        bool nan = false;
#pragma unroll
        for (int i = 0; i < kGradAtoms * 4; ++i) nan |= acc[i / 4][i % 4] != acc[i / 4][i % 4];
        if (!__syncthreads_or(nan) || careful) break;
        careful = true;
    }

    Sums& sums = *reinterpret_cast<Sums*>(shared);
    for (int turn = 0; turn < kGradWarps; ++turn) {  // always in the same order
        if (warp == turn) {
#pragma unroll
            for (int i = 0; i < kGradAtoms * 4; ++i) {
                float& sum = sums[g + i / 2 % 2 * 8][(t * 2 + i % 2) * 8 + i / 4];
                sum = (turn == 0 ? 0 : sum) + acc[i / 4][i % 4];
            }
        }
        __syncthreads();
    }
    for (int i = threadIdx.x; i < 16 * kGradCols; i += kGradThreads) {
        const bool by_rank = side.out_col == 1;  // neighbouring threads write neighbouring entries
        const int r = by_rank ? i % 16 : i / kGradCols, col = by_rank ? i / 16 : i % kGradCols;
        if (rank + r >= params.rank || first + col >= side.cols) continue;
        const float value = params.scaling * sums[r][col];
        const int64_t at = (first + col) * side.out_row + (rank + r) * side.out_col;
        if (side.float_out) static_cast<float*>(side.out)[at] = value;
        else static_cast<T*>(side.out)[at] = narrow<T>(value);
    }
}

}  // namespace rawops
