// Accumulators of wgmma as rows of scores, weights and output: lane l holds columns 8 * j + l % 4 * 2 and the one after
// of rows l / 4 (elements 4 * j, 4 * j + 1) and l / 4 + 8 (the two after).
#pragma once
#include "attention_score.cuh"
#include "mma.cuh"
#include "wgmma.cuh"

namespace rawops {

// The softmax of a thread's two rows, r and r + 8, as the blocks of keys come in. Weights are 2 ** (score - base +
// kGain), where `base` is the row's maximum or behind it, so that most blocks leave it alone: by up to kLag, or, where
// nobody looks for the maximum, by what keeps a thread's sum of a block's weights below kMost. The weights' type has to
// have room for both.
template <int kLag_, int kGain_, int kMost_> struct OnlineSoftmax {
    static constexpr float kLag = kLag_, kGain = kGain_, kMost = kMost_;
    // From here on, base is so coarse that a product has to be rounded as it was: fused with the difference, it would
    // give the weight of the maximum an error of its own.
    static constexpr float kFar = 4096;
    float base[2], sum[2];  // of the weights so far, the thread's share

    __device__ OnlineSoftmax() : base{-infinity(), -infinity()}, sum{0, 0} {}

    // Turns scores into weights. Where some row of the warp has a new base, the result is true, and earlier weights are
    // to be multiplied by `correction`.
    template <int COUNT> __device__ bool add(float (&s)[COUNT], float scale, float (&correction)[2]) {
        return add(s, scale, correction, {kLag, kLag});
    }
    template <int COUNT>
    __device__ bool add(float (&s)[COUNT], float scale, float (&correction)[2], const float (&lag)[2]) {
        bool moves = false, is_far = false;  // as few rows are
        float shift[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float most[2] = {s[half * 2], s[half * 2 + 1]};
#pragma unroll
            for (int i = 4; i < COUNT; i += 4) {
#pragma unroll
                for (int j = 0; j < 2; ++j) most[j] = fmaxf(most[j], s[i + half * 2 + j]);
            }
            shift[half] = fmaxf(most[0], most[1]);
        }
#pragma unroll
        for (int step = 1; step <= 2; step *= 2) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                shift[half] = fmaxf(shift[half], __shfl_xor_sync(~0u, shift[half], step));
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float most = shift[half] * scale;
            const bool is_new = most > base[half] + lag[half];
            correction[half] = is_new ? exp2_fast(base[half] - most) : 1;
            if (is_new) base[half] = most;
            moves |= is_new;
            shift[half] = base[half] == -infinity() ? 0 : base[half] - kGain;  // -inf: it sees no key yet
            is_far |= fabsf(shift[half]) > kFar;
        }
        float factor[2] = {scale, scale};
        moves = __any_sync(~0u, moves || is_far);
        if (moves && __any_sync(~0u, is_far)) {  // each row in its own way
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (!(fabsf(shift[half]) > kFar)) continue;
                factor[half] = 1;
#pragma unroll
                for (int i = half * 2; i < COUNT; i += 4) s[i] *= scale, s[i + 1] *= scale;
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float total[2] = {0, 0};
#pragma unroll
            for (int i = 0; i < COUNT; i += 4) {
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    float& x = s[i + half * 2 + j];
                    x = exp2_fast(fmaf(x, factor[half], -shift[half]));
                    total[j] += x;
                }
            }
            sum[half] = sum[half] * correction[half] + (total[0] + total[1]);
        }
        return moves;
    }

    // What `weigh` takes off a row's scores: so little that weights overflow, where that takes more thought.
    __device__ float shift(int half) const {
        const float known = base[half] - kGain;
        return fabsf(known) > kFar ? -infinity() : known;
    }

    // Turns scores into weights without a look at their maximum, whose sums are `total`. False if a weight of the
    // thread is too large for that, or no number.
    template <int COUNT>
    static __device__ bool weigh(float (&s)[COUNT], float scale, const float (&shift)[2], float (&total)[2]) {
        float parts[2][2] = {};
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            s[i] = exp2_fast(fmaf(s[i], scale, -shift[i / 2 % 2]));
            parts[i / 2 % 2][i % 2] += s[i];
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) total[half] = parts[half][0] + parts[half][1];
        return total[0] < kMost && total[1] < kMost;
    }

    // By how much `add` may leave a row's base behind after `weigh`: one whose own weights were right keeps it.
    static __device__ float lag_after(float total) {
        const uint32_t right = __ballot_sync(~0u, total < kMost) >> threadIdx.x % kWarpSize / 4 * 4;
        return (right & 15) == 15 ? infinity() : 0;
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

// Of the keys that a thread has of a row, two of every eight, how many come within `offset` of the first one.
__device__ inline int keys_within(int offset) { return offset <= 0 ? 0 : offset / 8 * 2 + min_of(offset % 8, 2); }
// The lowest `count` bits; none for less than 0, all for more than 32.
__device__ inline uint32_t low_bits(int count) { return count <= 0 ? 0 : ~0u >> 32 - min_of(count, 32); }

// Minus infinity for the keys of a block that a row does not see. `column`: the key of s[0]; `half`: 0 for the thread's
// first row, 1 for its second. A bit a key, since seven of them become predicates at once.
template <int COUNT>
__device__ inline void mask_scores(float (&s)[COUNT], int half, const KeyRange& visible, int column) {
    const int begin = keys_within(visible.begin - column), end = keys_within(visible.end - column);
#pragma unroll
    for (int first = 0; first < COUNT / 2; first += 32) {
        const uint32_t seen = low_bits(end - first) & ~low_bits(begin - first);
#pragma unroll
        for (int i = first; i < min_of(first + 32, COUNT / 2); ++i) {
            if (!(seen >> i - first & 1)) s[i / 2 * 4 + half * 2 + i % 2] = -infinity();
        }
    }
}

// Scores out of products, minus infinity for keys that the row does not see.
template <class Score, int COUNT>
__device__ inline void make_scores(float (&s)[COUNT], int half, const Score& score, const KeyRange& visible,
                                   int column) {
    const uint32_t width = max_of(visible.end - visible.begin, 0);
    const int offset = column - visible.begin;
#pragma unroll
    for (int i = 0; i < COUNT; i += 4) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            float& x = s[i + half * 2 + j];
            x = uint32_t(offset + i * 2 + j) < width ? score(x, column, i * 2 + j) : -infinity();
        }
    }
}

// Weights as the first operand of the next product.
template <class T, int COUNT>
__device__ inline void narrow_weights(uint32_t (&p)[COUNT / 8][4], const float (&s)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT / 2; ++i) p[i / 4][i % 4] = narrow_pair<T>(s[i * 2], s[i * 2 + 1]);
}

// Writes one of the thread's two rows, accumulators times `factor`, as far as there are columns. By the whole warp.
template <class T, int COUNT>
__device__ inline void store_row(const float (&acc)[COUNT], int half, float factor, T* out, int cols, int lane) {
#pragma unroll
    for (int group = 0; group < COUNT / 16; ++group) {
        uint32_t packed[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float* values = acc + (group * 4 + i) * 4 + half * 2;
            packed[i] = narrow_pair<T>(values[0] * factor, values[1] * factor);
        }
        transpose_quad(packed, lane);
        const int col = group * 32 + lane % 4 * 8;
        if (col < cols) *reinterpret_cast<uint4*>(out + col) = {packed[0], packed[1], packed[2], packed[3]};
    }
}
// In float32, as two columns a thread.
template <int COUNT>
__device__ inline void store_row(const float (&acc)[COUNT], int half, float factor, float* out, int cols, int lane) {
#pragma unroll
    for (int i = 0; i < COUNT / 4; ++i) {
        const float* values = acc + i * 4 + half * 2;
        const int col = i * 8 + lane % 4 * 2;
        if (col < cols) *reinterpret_cast<float2*>(out + col) = {values[0] * factor, values[1] * factor};
    }
}

// How 16-bit operands are multiplied, and what of them is not finite; hopper_attention_8bit.cuh has those of 8 bits.
template <class T> struct AttentionAtom {
    template <int COUNT> static __device__ void narrow(uint32_t (&p)[COUNT / 8][4], const float (&s)[COUNT]) {
        narrow_weights<T>(p, s);
    }
    template <int N> static __device__ void multiply_keys(float (&s)[N / 2], uint64_t q, uint64_t k, bool accumulates) {
        Wgmma<N>::template multiply<T, true, true>(s, q, k, accumulates);
    }
    template <class Tile>
    static __device__ void multiply_values(typename Tile::Output& o, const uint32_t (&p)[4], uint64_t v, int step,
                                           bool accumulates) {
        Wgmma<Tile::DV>::template multiply<T, false>(o, p, Tile::OperandV::advance(v, 0, step), accumulates);
    }
    // Notes the largest magnitudes of some values. As if of float16, of which one instruction compares four, and keeps
    // NaN: what is not finite in bfloat16 is NaN there, and so is what is finite and past 2 ** 121, which does no harm.
    static __device__ void look(uint32_t& found, const uint4& words) {
        const uint32_t each[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const __half2 magnitudes = __habs2(reinterpret_cast<const __half2&>(each[i]));
            found = pack(__hmax2_nan(reinterpret_cast<const __half2&>(found), magnitudes));
        }
    }
    static __device__ bool is_suspect(uint32_t found) { return nonfinite_halves<__half>(found) != 0; }

    // Of a key's values in columns `col` + thread % 4 * 2 and the next one, those that are not finite, else 0.
    template <class Tile>
    static __device__ float2 nonfinite_pair(uint32_t tile, int key, int col, int thread) {
        const int box = col / Tile::BOX_V, chunk = col % Tile::BOX_V / 8;
        const uint32_t word = load_word(tile + box * Tile::BOX_STEP_V + key / 8 * Tile::ROWS_STEP_V +
                                        swizzled_offset<Tile::SPAN_V>(key % 8, chunk) + thread % 4 * 4);
        return widen_pair<T>(word & nonfinite_mask<T>(word));
    }
    template <class Out, int COUNT>
    static __device__ void store(const float (&acc)[COUNT], int half, float factor, Out* out, int cols, int lane) {
        store_row(acc, half, factor, out, cols, lane);
    }
};

// Whether some of a tile's values are not finite, or may not be, as far as one of THREADS threads looks through them.
template <class Tile, int THREADS> __device__ inline bool is_suspect(uint32_t tile, int thread) {
    uint32_t found = 0;
#pragma unroll 4
    for (int i = thread * 16; i < Tile::V_BYTES; i += THREADS * 16) {
        AttentionAtom<typename Tile::T>::look(found, load_quad(tile + i));
    }
    return AttentionAtom<typename Tile::T>::is_suspect(found);
}

// Both rows, `row` and the one 8 further on, where they exist; they lie `row_stride` apart.
template <class T, int COUNT>
__device__ inline void store_rows(const float (&acc)[COUNT], const float (&factor)[2], T* out, int64_t row_stride,
                                  int row, int rows, int cols, int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int at = row + half * 8;
        store_row(acc, half, factor[half], out + at * row_stride, at < rows ? cols : 0, lane);
    }
}

}  // namespace rawops
