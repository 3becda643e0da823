// From products q.k to weights: how scores are made, which are hidden, and the softmax that never sees a whole row.
//
// A thread holds accumulators [ATOMS_M][ATOMS_N][4] as mma leaves them: its row r is atom r / 2, elements 2 * (r % 2)
// and the one after; the four lanes of a quad share each row.
#pragma once
#include "attention_problem.cuh"

namespace rawops {

__device__ inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// tanh with an absolute error of an ulp of 1, which is what a score's error comes from.
__device__ inline float tanh_fast(float x) { return 1.0f - __fdividef(2.0f, 1.0f + exp2_fast(2.0f * kLog2e * x)); }

__device__ inline float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ inline float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// Makes scores of one row out of products: log2(e) times what the contract calls the score.
template <class T, int kScore> struct RowScore {
    float scale, softcap, slope;
    int place;  // of the query among the keys
    const char* bias;
    int64_t bias_col;
    bool bias_is_float;

    template <class Block>  // AttentionBlock, or another that knows sequence and lengths
    __device__ RowScore(const AttentionParams& params, const Block& block, int query, int head)
        : scale(params.shape.scale), softcap(params.shape.softcap), place(query + block.k_len - block.q_len) {
        const AttentionCall& call = params.call;
        const AttentionShape& shape = params.shape;
        if constexpr ((kScore & kScoreAlibi) != 0) {
            slope = call.alibi_slopes[block.batch * shape.alibi_batch + head] * kLog2e;
        }
        if constexpr ((kScore & kScoreBias) != 0) {
            const AttentionStrides& s = shape.bias;
            bias_is_float = shape.bias_is_float;
            bias_col = s.col;
            bias = static_cast<const char*>(call.bias) +
                   (block.batch * s.batch + head * s.head + query * s.row) * (bias_is_float ? 4 : int(sizeof(T)));
        }
    }

    __device__ float operator()(float product, int key) const {
        float score = product * scale;
        if constexpr ((kScore & kScoreSoftcap) != 0) score = softcap * tanh_fast(score);
        if constexpr ((kScore & kScoreAlibi) != 0) score -= slope * float(place > key ? place - key : key - place);
        if constexpr ((kScore & kScoreBias) != 0) {
            const float more = bias_is_float ? reinterpret_cast<const float*>(bias)[key * bias_col]
                                             : widen(reinterpret_cast<const T*>(bias)[key * bias_col]);
            score = fmaf(more, kLog2e, score);
        }
        return score;
    }

    // Of the score by scale * product.
    __device__ float derivative(float product) const {
        if constexpr ((kScore & kScoreSoftcap) == 0) return 1.0f;
        const float capped = tanh_fast(product * scale);
        return 1.0f - capped * capped;
    }
};

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
    __device__ void step(const float (&scores)[ATOMS_M][ATOMS_N][4], uint32_t (&weights)[ATOMS_M][ATOMS_N / 2][4],
                         float (&acc)[ATOMS_M][ATOMS_V][4], float scale) {
        float base[ROWS], factor[ROWS];
        bool changed = false;
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
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const int e = r % 2 * 2;
#pragma unroll
            for (int j = 0; j < ATOMS_N; ++j) {
                // A product and a difference, not a fused one: the weight of the maximum is 1 to the bit.
                const float low = exp2_fast(__fmul_rn(scores[r / 2][j][e], scale) - base[r]);
                const float high = exp2_fast(__fmul_rn(scores[r / 2][j][e + 1], scale) - base[r]);
                weights[r / 2][j / 2][j % 2 * 2 + r % 2] = pack_pair<T>(low, high);
                sum[r] += low + high;
            }
        }
    }
};

// The natural logarithm of a row's sum of exponentials; -inf without a key.
__device__ inline float log_sum(float max, float sum) { return sum == 0.0f ? -infinity() : (max + log2f(sum)) * kLn2; }

}  // namespace rawops
