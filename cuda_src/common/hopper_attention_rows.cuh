// Accumulators of wgmma as rows of scores, weights and output: lane l holds columns 8 * j + l % 4 * 2 and the one after
// of rows l / 4 (elements 4 * j, 4 * j + 1) and l / 4 + 8 (the two after).
#pragma once
#include "attention_problem.cuh"
#include "wgmma.cuh"

namespace rawops {

// 2 ** x, with 0 for what float32 has no normal number for.
__device__ inline float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The softmax of a thread's two rows, r and r + 8, as the blocks of keys come in. Weights are 2 ** (score - base), where
// `base` is the row's maximum; or it may lag behind by up to kLag, so that most blocks leave it alone, while weights
// stay small enough for float16.
template <bool kLags> struct OnlineSoftmax {
    static constexpr float kLag = 8;
    // From here on, base is so coarse that a product has to be rounded as it was: fused with the difference, it would
    // give the weight of the maximum an error of its own.
    static constexpr float kFar = 4096;
    float base[2], sum[2];  // of the weights so far, the thread's share

    __device__ OnlineSoftmax() : base{-infinity(), -infinity()}, sum{0, 0} {}

    // Turns scores into weights. Where some row of the warp has a new base, the result is true, and earlier weights are
    // to be multiplied by `correction`.
    template <int COUNT> __device__ bool add(float (&s)[COUNT], float scale, float (&correction)[2]) {
        bool moves = false;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float most[2] = {s[half * 2], s[half * 2 + 1]};
#pragma unroll
            for (int i = 4; i < COUNT; i += 4) {
#pragma unroll
                for (int j = 0; j < 2; ++j) most[j] = fmaxf(most[j], s[i + half * 2 + j]);
            }
            most[0] = fmaxf(most[0], most[1]);
            most[0] = fmaxf(most[0], __shfl_xor_sync(~0u, most[0], 1));
            most[0] = fmaxf(most[0], __shfl_xor_sync(~0u, most[0], 2)) * scale;
            const bool is_new = most[0] > base[half] + (kLags ? kLag : 0);
            correction[half] = is_new ? exp2_approx(base[half] - most[0]) : 1;
            if (is_new) base[half] = most[0];
            moves |= is_new;
            const float shift = base[half] == -infinity() ? 0 : base[half];  // a row that sees no key yet
            float factor = scale;
            if (__any_sync(~0u, fabsf(shift) > kFar)) {
                factor = 1;
#pragma unroll
                for (int i = 0; i < COUNT; i += 4) {
#pragma unroll
                    for (int j = 0; j < 2; ++j) s[i + half * 2 + j] *= scale;
                }
            }
            float total[2] = {0, 0};
#pragma unroll
            for (int i = 0; i < COUNT; i += 4) {
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    float& x = s[i + half * 2 + j];
                    x = exp2_approx(fmaf(x, factor, -shift));
                    total[j] += x;
                }
            }
            sum[half] = sum[half] * correction[half] + (total[0] + total[1]);
        }
        return !kLags || __any_sync(~0u, moves);
    }

    // The sums over whole rows, at the end.
    __device__ void complete() {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            sum[half] += __shfl_xor_sync(~0u, sum[half], 1);
            sum[half] += __shfl_xor_sync(~0u, sum[half], 2);
        }
    }
};

// Minus infinity for the keys of a block that a row does not see. `column`: the key of s[0].
template <int COUNT>
__device__ inline void mask_scores(float (&s)[COUNT], const KeyRange (&visible)[2], int column) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const uint32_t width = max_of(visible[half].end - visible[half].begin, 0);
        const int offset = column - visible[half].begin;
#pragma unroll
        for (int i = 0; i < COUNT; i += 4) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                if (uint32_t(offset + i * 2 + j) >= width) s[i + half * 2 + j] = -infinity();
            }
        }
    }
}

// Weights as the first operand of the next product.
template <class T, int COUNT>
__device__ inline void narrow_weights(uint32_t (&p)[COUNT / 8][4], const float (&s)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT / 2; ++i) p[i / 4][i % 4] = narrow_pair<T>(s[i * 2], s[i * 2 + 1]);
}

// r[j] of lane t of each quad becomes r[t] of lane j.
__device__ inline void transpose_quad(uint32_t (&r)[4], int lane) {
#pragma unroll
    for (int step = 1; step <= 2; step *= 2) {
        const bool upper = lane & step;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i & step) continue;
            const uint32_t other = __shfl_xor_sync(~0u, upper ? r[i] : r[i | step], step);
            if (upper) r[i] = other;
            else r[i | step] = other;
        }
    }
}

// Writes accumulators times their row's factor, where rows and columns exist. `row`: the first one of the thread.
template <class T, int COUNT>
__device__ inline void store_rows(const float (&acc)[COUNT], const float (&factor)[2], T* out, int64_t row_stride,
                                  int row, int rows, int cols, int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int at = row + half * 8;
#pragma unroll
        for (int group = 0; group < COUNT / 16; ++group) {
            uint32_t packed[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* values = acc + (group * 4 + i) * 4 + half * 2;
                packed[i] = narrow_pair<T>(values[0] * factor[half], values[1] * factor[half]);
            }
            transpose_quad(packed, lane);
            const int col = group * 32 + lane % 4 * 8;
            if (at < rows && col < cols) {
                *reinterpret_cast<uint4*>(out + at * row_stride + col) = {packed[0], packed[1], packed[2], packed[3]};
            }
        }
    }
}

// The sign bits of the halves that are infinite or NaN.
template <class T> __device__ inline uint32_t nonfinite_halves(uint32_t pair) {
    constexpr uint32_t kUnit = is_same<T, __half> ? 0x04000400 : 0x00800080;  // the exponent's last bit
    return ((pair & 0x7fff7fff) + kUnit) & 0x80008000;
}

}  // namespace rawops
