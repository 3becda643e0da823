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

// The running state of a thread's rows. The maximum is that of the scores times `scale` (log2(e) and all), the sum is
// the thread's own share of the row.
template <int ATOMS_M> struct OnlineSoftmax {
    static constexpr int ROWS = 2 * ATOMS_M;
    // From here on, a maximum is so coarse that a product has to be rounded as it was: fused with the difference, it
    // would give the weight of the maximum an error of its own.
    static constexpr float kFar = 4096;
    float max[ROWS], sum[ROWS];

    __device__ OnlineSoftmax() {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            max[r] = -infinity();
            sum[r] = 0.0f;
        }
    }

    // Turns scores into weights, relative to the new maximum, and brings the sums and `acc` to it. `scale` is positive.
    // Accumulators of two atoms are one fragment of the product with v.
    template <class T, int ATOMS_N, int ATOMS_V>
    __device__ void step(float (&scores)[ATOMS_M][ATOMS_N][4], uint32_t (&weights)[ATOMS_M][ATOMS_N / 2][4],
                         float (&acc)[ATOMS_M][ATOMS_V][4], float scale) {
        float base[ROWS], factor[ROWS];
        bool changed = false, is_far = false;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const int e = r % 2 * 2;
            float highest = -infinity();
#pragma unroll
            for (int j = 0; j < ATOMS_N; ++j) {
                highest = fmaxf(highest, fmaxf(scores[r / 2][j][e], scores[r / 2][j][e + 1]));
            }
            const float next = fmaxf(max[r], quad_max(highest) * scale);
            base[r] = next == -infinity() ? 0.0f : next;  // no key so far: weights of exp2(-inf) = 0
            factor[r] = exp2_fast(max[r] - base[r]);
            changed |= factor[r] != 1.0f;
            is_far |= fabsf(base[r]) > kFar;
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
        if (__any_sync(~0u, is_far)) {
            for_all(scores, [&](float& score) { score *= scale; });
            scale = 1.0f;
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const int e = r % 2 * 2;
#pragma unroll
            for (int j = 0; j < ATOMS_N; ++j) {
                const float low = exp2_fast(fmaf(scores[r / 2][j][e], scale, -base[r]));
                const float high = exp2_fast(fmaf(scores[r / 2][j][e + 1], scale, -base[r]));
                weights[r / 2][j / 2][j % 2 * 2 + r % 2] = pack_pair<T>(low, high);
                sum[r] += low + high;
            }
        }
    }

private:
    template <int M, int N, class Change> static __device__ void for_all(float (&values)[M][N][4], Change change) {
#pragma unroll
        for (int i = 0; i < M * N * 4; ++i) change(values[i / (N * 4)][i / 4 % N][i % 4]);
    }
};

// The natural logarithm of a row's sum of exponentials; -inf without a key.
__device__ inline float log_sum(float max, float sum) { return sum == 0.0f ? -infinity() : (max + log2f(sum)) * kLn2; }

}  // namespace rawops
