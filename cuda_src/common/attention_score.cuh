// How scores are made out of products q.k: softcap, slopes, bias.
#pragma once
#include "attention_problem.cuh"

namespace rawops {

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

    // For key `key + further`; what depends on `key` alone is made once for many constants `further`.
    __device__ float operator()(float product, int key, int further = 0) const {
        float score = product * scale;
        if constexpr ((kScore & kScoreSoftcap) != 0) score = softcap * tanh_fast(score);
        if constexpr ((kScore & kScoreAlibi) != 0) score -= slope * fabsf(float(place - key) - float(further));
        if constexpr ((kScore & kScoreBias) != 0) {
            const float more = bias_is_float ? reinterpret_cast<const float*>(bias)[(key + further) * bias_col]
                                             : widen(reinterpret_cast<const T*>(bias)[(key + further) * bias_col]);
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

// The sign bits of the halves that are infinite or NaN.
template <class T> __device__ inline uint32_t nonfinite_halves(uint32_t pair) {
    constexpr uint32_t kUnit = is_same<T, __half> ? 0x04000400 : 0x00800080;  // the exponent's last bit
    return ((pair & 0x7fff7fff) + kUnit) & 0x80008000;
}

// All bits of the elements of a word that are not finite.
template <class T> __device__ inline uint32_t nonfinite_mask(uint32_t word) {
    return (nonfinite_halves<T>(word) >> 15) * 0xffff;
}

}  // namespace rawops
