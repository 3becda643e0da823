// The gradients of the low-rank factors: scaling * x^T @ y for two pairs at once, x with 16 bits and y in float32.
//
// A block walks over all rows of 64 columns of an x. Its warps take eight rows at a time, straight from memory: a
// thread has eight neighbouring columns of two rows, and the order of columns within an atom is free as long as it is
// undone when they are written. y goes in as the sum of two TF32 values; x fits TF32 exactly.
#include "common/split_tf32.cuh"

namespace rawops {

// As _lora_grad.py packs it; strides in elements.
struct GradSide {
    const void* x;   // (M, cols)
    const float* y;  // (M, rank)
    void* out;       // (cols, rank)
    int64_t x_row, x_col, y_row, out_row, out_col;
    int cols, flags;
};
struct GradParams {
    GradSide sides[2];
    int M, rank;
    float scaling;
};

enum GradFlags : int { kVectors = 1, kFloatOut = 2 };  // eight columns of x may move as one; float32 results

constexpr int kGradWarps = 8, kGradCols = 64, kGradThreads = kGradWarps * kWarpSize;

// Eight neighbouring columns of a row, of which `count` exist; the others become zero.
template <class T> __device__ inline uint4 read_columns(const T* from, int64_t stride, int count, bool vectors) {
    uint4 bits = {};
    if (vectors && count >= 8) return *reinterpret_cast<const uint4*>(from);
    auto* elements = reinterpret_cast<uint16_t*>(&bits);
    const auto* source = reinterpret_cast<const uint16_t*>(from);
#pragma unroll
    for (int i = 0; i < 8; ++i) elements[i] = i < count ? source[i * stride] : uint16_t(0);
    return bits;
}

// RANKS: 16 or 32 ranks from blockIdx.y * RANKS on.
template <class T, int RANKS>
__global__ void __launch_bounds__(kGradThreads) lora_grad(const __grid_constant__ GradParams params) {
    constexpr int GROUPS = RANKS / 16, ATOMS = 8, UNROLL = 4 / GROUPS;
    __shared__ float sums[RANKS][kGradCols + 4];
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, g = lane / 4, t = lane % 4;
    const int tiles = ceil_div(params.sides[0].cols, kGradCols);
    const bool second = blockIdx.x >= tiles;
    const GradSide& side = params.sides[second];
    const int first = (blockIdx.x - (second ? tiles : 0)) * kGradCols, rank = blockIdx.y * RANKS;
    const bool vectors = side.flags & kVectors;
    const T* x = static_cast<const T*>(side.x) + (first + g * 8) * side.x_col;
    const float* y = side.y + rank + g;

    float acc[GROUPS][ATOMS][4] = {};
#pragma unroll UNROLL
    for (int m = warp * 8; m < params.M; m += kGradWarps * 8) {
        uint4 bits[2];
        float own[2][GROUPS * 2] = {};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = m + t + half * 4;
            const bool exists = row < params.M;
            const int count = exists ? side.cols - first - g * 8 : 0;
            bits[half] = read_columns(x + row * side.x_row, side.x_col, count, vectors);
#pragma unroll
            for (int i = 0; i < GROUPS * 2; ++i) {
                if (exists && rank + i * 8 + g < params.rank) own[half][i] = y[row * side.y_row + i * 8];
            }
        }
        const auto* low_rows = reinterpret_cast<const T*>(&bits[0]);
        const auto* high_rows = reinterpret_cast<const T*>(&bits[1]);
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            uint32_t high[4], low[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) split_tf32(high[i], low[i], own[i / 2][group * 2 + i % 2]);
#pragma unroll
            for (int atom = 0; atom < ATOMS; ++atom) {
                multiply_split(acc[group][atom], high, low, widen(low_rows[atom]), widen(high_rows[atom]));
            }
        }
    }

    for (int turn = 0; turn < kGradWarps; ++turn) {  // always in the same order
        if (warp == turn) {
#pragma unroll
            for (int i = 0; i < GROUPS * ATOMS * 4; ++i) {
                const int group = i / (ATOMS * 4), atom = i / 4 % ATOMS;
                float& sum = sums[group * 16 + g + i / 2 % 2 * 8][(t * 2 + i % 2) * 8 + atom];
                sum = (turn == 0 ? 0 : sum) + acc[group][atom][i % 4];
            }
        }
        __syncthreads();
    }
    for (int i = threadIdx.x; i < RANKS * kGradCols; i += kGradThreads) {
        const bool by_rank = side.out_col == 1;  // neighbouring threads write neighbouring entries
        const int r = by_rank ? i % RANKS : i / kGradCols, col = by_rank ? i / RANKS : i % kGradCols;
        if (rank + r >= params.rank || first + col >= side.cols) continue;
        const float value = params.scaling * sums[r][col];
        const int64_t at = (first + col) * side.out_row + (rank + r) * side.out_col;
        if (side.flags & kFloatOut) static_cast<float*>(side.out)[at] = value;
        else static_cast<T*>(side.out)[at] = narrow<T>(value);
    }
}

}  // namespace rawops
