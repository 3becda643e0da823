// From scores to weights: the softmax that never sees a whole row.
//
// A thread holds accumulators [ATOMS_M][ATOMS_N][4] as mma leaves them: its row r is atom r / 2, elements 2 * (r % 2)
// and the one after; the four lanes of a quad share each row.
#pragma once
#include "attention_score.cuh"

namespace rawops {

__device__ inline float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ inline float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

template <class T> __device__ inline uint32_t pack_pair(float low, float high);
template <> __device__ inline uint32_t pack_pair<__half>(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
template <> __device__ inline uint32_t pack_pair<__nv_bfloat16>(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// The running state of a thread's rows. The maximum is that of the scores times `scale` (log2(e) and all), or a little
// less, the sum is the thread's own share of the row.
template <int ATOMS_M> struct OnlineSoftmax {
    static constexpr int ROWS = 2 * ATOMS_M;
    // From here on, a maximum is so coarse that a product has to be rounded as it was: fused with the difference, it
    // would give the weight of the maximum an error of its own.
    static constexpr float kFar = 4096;
    // A score that is no more than this over the maximum leaves it: weights of up to 32 cost no precision, and a new
    // maximum costs as much as a third of a product.
    static constexpr float kGain = 5;
    float max[ROWS], sum[ROWS];
    bool is_settled = false;  // warp-wide: all rows have a maximum, and none is far

    __device__ OnlineSoftmax() {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            max[r] = -infinity();
            sum[r] = 0.0f;
        }
    }

    // Turns scores into weights relative to the maximum, and brings the sums and `acc` to it if it is a new one.
    // `scale` is positive. Accumulators of two atoms are one fragment of the product with v.
    template <class T, int ATOMS_N, int ATOMS_V>
    __device__ void step(float (&scores)[ATOMS_M][ATOMS_N][4], uint32_t (&weights)[ATOMS_M][ATOMS_N / 2][4],
                         float (&acc)[ATOMS_M][ATOMS_V][4], float scale) {
        float highest[ROWS];
        bool rises = !is_settled;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const int e = r % 2 * 2;
            highest[r] = -infinity();
#pragma unroll
            for (int j = 0; j < ATOMS_N; ++j) {
                highest[r] = fmaxf(highest[r], fmaxf(scores[r / 2][j][e], scores[r / 2][j][e + 1]));
            }
            rises |= highest[r] * scale > max[r] + kGain;
        }
        const bool is_relative = __any_sync(~0u, rises) && raise(highest, acc, scale);
        if (is_relative) {
            make_relative(scores, scale);
            scale = 1.0f;
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const int e = r % 2 * 2;
            const float from = is_relative ? 0.0f : base(max[r]);
#pragma unroll
            for (int j = 0; j < ATOMS_N; ++j) {
                const float low = exp2_fast(fmaf(scores[r / 2][j][e], scale, -from));
                const float high = exp2_fast(fmaf(scores[r / 2][j][e + 1], scale, -from));
                weights[r / 2][j / 2][j % 2 * 2 + r % 2] = pack_pair<T>(low, high);
                sum[r] += low + high;
            }
        }
    }

private:
    // What weights are relative to: without a key so far they are exp2(-inf) = 0.
    static __device__ float base(float max) { return max == -infinity() ? 0.0f : max; }

    static __device__ bool far(float max) { return fabsf(base(max)) > kFar; }

    // Takes the highest scores of rows that are not settled, or that rise, into their maxima, and tells whether one of
    // the warp is far. What becomes of a row is its own affair, to the bit: others may see keys that it does not.
    template <int ATOMS_V>
    __device__ bool raise(const float (&highest)[ROWS], float (&acc)[ATOMS_M][ATOMS_V][4], float scale) {
        float factor[ROWS];
        bool changed = false, is_far = false, is_empty = false;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const float most = quad_max(highest[r]) * scale;
            const bool stays = max[r] != -infinity() && !far(max[r]) && !(most > max[r] + kGain);
            const float next = stays ? max[r] : fmaxf(max[r], most);
            factor[r] = exp2_fast(max[r] - base(next));
            changed |= factor[r] != 1.0f;
            is_empty |= next == -infinity();
            is_far |= far(next);
            max[r] = next;
        }
        if (__any_sync(~0u, changed)) {
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                sum[r] *= factor[r];
#pragma unroll
                for (int j = 0; j < ATOMS_V; ++j) {
                    acc[r / 2][j][r % 2 * 2] *= factor[r];
                    acc[r / 2][j][r % 2 * 2 + 1] *= factor[r];
                }
            }
        }
        is_far = __any_sync(~0u, is_far);
        is_settled = !is_far && !__any_sync(~0u, is_empty);
        return is_far;
    }

    // Turns scores into their distances from the maxima, rounded as products first where those are far.
    template <int ATOMS_N> __device__ void make_relative(float (&scores)[ATOMS_M][ATOMS_N][4], float scale) const {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const bool is_product = far(max[r]);
            const float times = is_product ? 1.0f : scale, from = base(max[r]);
#pragma unroll
            for (int j = 0; j < ATOMS_N; ++j) {
#pragma unroll
                for (int e = r % 2 * 2; e < r % 2 * 2 + 2; ++e) {
                    float& score = scores[r / 2][j][e];
                    if (is_product) score = __fmul_rn(score, scale);
                    score = fmaf(score, times, -from);
                }
            }
        }
    }
};

// The natural logarithm of a row's sum of exponentials; -inf without a key.
__device__ inline float log_sum(float max, float sum) { return sum == 0.0f ? -infinity() : (max + log2f(sum)) * kLn2; }

}  // namespace rawops
