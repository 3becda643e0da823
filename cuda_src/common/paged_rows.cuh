// The attention of 16 rows (queries of one group of heads) over a tile of tokens in shared memory, by one warp: scores
// on the tensor cores, online softmax in base 2 and float32, values weighted on the tensor cores again.
#pragma once
#include "paged_convert.cuh"
#include "paged_schedule.cuh"

namespace rawops {

// How scores are made; `scale` includes log2(e), softcap and slopes do not.
struct ScoreRule {
    float scale, softcap;
    const float* alibi_slopes;  // by query head, or none
};

constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

__device__ inline float minus_infinity() { return __int_as_float(0xff800000); }

__device__ inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// tanh to float32's accuracy where it matters: the error is a rounding of 1.
__device__ inline float tanh_of(float x) { return 1.0f - 2.0f / (1.0f + exp2_fast(2.0f * kLog2E * x)); }

template <class T> __device__ inline uint32_t pack_pair(float low, float high) {
    const T a = narrow<T>(low), b = narrow<T>(high);
    return uint32_t(reinterpret_cast<const uint16_t&>(a)) | uint32_t(reinterpret_cast<const uint16_t&>(b)) << 16;
}

// B fragments of a tile's keys and values, and which column of a head a lane's elements are, for steps of 16 columns:
// element i of 4 in the A fragments of Q, and element e of the accumulators of atom 2 step + atom.
template <class T, class Tile, int BYTES = sizeof(typename Tile::T)> struct Fragments;

template <class T, class Tile> struct Fragments<T, Tile, 2> {
    using Layout = typename Tile::Layout;

    static __device__ int query_column(int i, int lane) { return i / 2 * 8 + lane % 4 * 2 + i % 2; }
    static __device__ int out_column(int atom, int e, int lane) { return atom * 8 + lane % 4 * 2 + e; }

    static __device__ void keys(uint32_t (&r)[2][2], uint32_t slot, int step, int lane) {
        const int from = Layout::offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
        uint32_t words[4];
        ldmatrix<false>(words, slot + Layout::moved(from, 0, step * 2));
        r[0][0] = words[0], r[0][1] = words[1], r[1][0] = words[2], r[1][1] = words[3];
    }
    static __device__ void values(uint32_t (&r)[1][4], uint32_t slot, int step, int lane) {
        const int from = Layout::offset(lane % 16, lane / 16);
        ldmatrix<true>(r[0], slot + Tile::VALUES + Layout::moved(from, 0, step * 2));
    }
};

// A word of the matrix has four columns of one token, or two columns of two tokens: columns go to lanes in that order.
template <class T, class Tile> struct Fragments<T, Tile, 1> {
    using Layout = typename Tile::Layout;
    using Stored = typename Tile::T;

    static __device__ int query_column(int i, int lane) { return lane % 4 * 4 + i; }
    static __device__ int out_column(int atom, int e, int lane) { return lane % 4 * 4 + e * 2 + atom; }

    static __device__ void keys(uint32_t (&r)[4][2], uint32_t slot, int step, int lane) {
        uint32_t words[4];
        ldmatrix<false>(words, slot + Layout::moved(Layout::offset(lane, 0), 0, step));
#pragma unroll
        for (int j = 0; j < 4; ++j) widen_word<T, Stored, false>(r[j], words[j]);
    }
    static __device__ void values(uint32_t (&r)[2][4], uint32_t slot, int step, int lane) {
        uint32_t words[4];
        ldmatrix<true>(words, slot + Tile::VALUES + Layout::moved(Layout::offset(lane, 0), 0, step));
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            uint32_t columns[2];
            widen_word<T, Stored, true>(columns, words[j]);
            r[j / 2][j % 2] = columns[0], r[j / 2][j % 2 + 2] = columns[1];
        }
    }
};

// What a lane's two rows see, and where they stand among the keys.
struct Bounds {
    KeyRange seen[2];
    int position[2];
    float slope[2];  // of ALiBi, times log2(e)
    bool scaled_by_page;  // else 8-bit keys and values of the item have one scale each:
    float k_scale, v_scale;

    __device__ bool hide(int token, int tokens) const {  // any of these tokens
        const int begin = max_of(seen[0].begin, seen[1].begin), end = min_of(seen[0].end, seen[1].end);
        return begin > token || end < token + tokens;
    }
};

// Accumulators of one warp: lane 4 g + t has rows g and g + 8, in the columns of Fragments::out_column.
template <class T, class Tile> class RowState {
public:
    using Parts = Fragments<T, Tile>;
    static constexpr int STEPS = Tile::HEAD_DIM / 16, TOKENS = Tile::TOKENS;
    float out[2 * STEPS][4];  // of values scaled by page, in units of `unit`, the largest scale so far
    float unit;
    float top[2], sum[2];  // of the two rows; the sum is of this lane's columns alone until `finish`

    __device__ void begin() {
#pragma unroll
        for (int j = 0; j < 2 * STEPS; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) out[j][i] = 0;
        }
        top[0] = top[1] = minus_infinity();
        sum[0] = sum[1] = 0;
        unit = 0;
    }

    // Adds a tile whose first token is `token`. queries: A fragments by step and lane.
    template <bool kSeveral>
    __device__ void add(const uint4* queries, uint32_t slot, int token, const Bounds& bounds, const ScoreRule& rule,
                        int lane) {
        const auto& seen = bounds.seen;
        float score[TOKENS / 8][4];
        multiply_keys(score, queries, slot, lane);
        if (Tile::kScaled && bounds.scaled_by_page) {
            const uint32_t scales = slot + Tile::SCALES + lane % 4 * 8;
            each(score, [&](float x, int, int column) { return x * load_scale(scales + column * 4); });
        }
        const float scale = Tile::kScaled ? rule.scale * bounds.k_scale : rule.scale;
        each(score, [&](float x, int, int) { return x * scale; });
        if (rule.softcap > 0) {
            const float factor = rule.softcap * kLog2E, inverse = 1 / factor;
            each(score, [&](float x, int, int) { return factor * tanh_of(x * inverse); });
        }
        if (rule.alibi_slopes) {
            each(score, [&](float x, int r, int column) {
                return x - bounds.slope[r] * fabsf(float(bounds.position[r] - token - lane % 4 * 2 - column));
            });
        }
        if (__any_sync(~0u, bounds.hide(token, TOKENS))) {
            each(score, [&](float x, int r, int column) {
                const int key = token + lane % 4 * 2 + column;
                return key >= seen[r].begin && key < seen[r].end ? x : minus_infinity();
            });
        }
        uint32_t weights[TOKENS / 16][4];
        weigh(weights, score, slot, bounds.scaled_by_page, lane);
        if (kSeveral && __any_sync(~0u, bounds.hide(token, TOKENS)) && has_non_finite(slot, lane)) {
            add_values_apart(weights, slot, token, seen, lane);
        } else {
            add_values(weights, slot, lane);
        }
    }

    // Completes the sums over a row's lanes, and brings values to their scale.
    __device__ void finish(const Bounds& bounds) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
            sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
        }
        if constexpr (Tile::kScaled) {
            const float scale = bounds.scaled_by_page ? unit : bounds.v_scale;
            scale_out(scale, scale);
        }
    }

private:
    // Replaces each score by f(score, which of the lane's rows, columns from the lane's first).
    template <class F> static __device__ void each(float (&score)[TOKENS / 8][4], F f) {
#pragma unroll
        for (int j = 0; j < TOKENS / 8; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) score[j][i] = f(score[j][i], i / 2, j * 8 + i % 2);
        }
    }

    static __device__ float load_scale(uint32_t address) {
        float scale;
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(scale) : "r"(address) : "memory");
        return scale;
    }

    // Of the rows' sums of values.
    __device__ void scale_out(float first, float second) {
#pragma unroll
        for (int j = 0; j < 2 * STEPS; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) out[j][i] *= i / 2 ? second : first;
        }
    }

    // Fragments are read AHEAD steps at a time, so that the products do not wait for each.
    static constexpr int AHEAD = Tile::kScaled ? 2 : 4;

    __device__ void multiply_keys(float (&score)[TOKENS / 8][4], const uint4* queries, uint32_t slot, int lane) {
        float odd[TOKENS / 8][4];  // two chains, since each product waits for the one before
        each(score, [](float, int, int) { return 0.0f; });
        each(odd, [](float, int, int) { return 0.0f; });
#pragma unroll
        for (int begin = 0; begin < STEPS; begin += AHEAD) {
            uint4 query[AHEAD];
            uint32_t key[AHEAD][TOKENS / 8][2];
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                if (begin + i >= STEPS) break;
                query[i] = queries[(begin + i) * kWarpSize + lane];
                Parts::keys(key[i], slot, begin + i, lane);
            }
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                if (begin + i >= STEPS) break;
                const uint32_t a[4] = {query[i].x, query[i].y, query[i].z, query[i].w};
#pragma unroll
                for (int j = 0; j < TOKENS / 8; ++j) {
                    MmaAtom<T>::multiply(i % 2 ? odd[j] : score[j], a, key[i][j][0], key[i][j][1]);
                }
            }
        }
#pragma unroll
        for (int j = 0; j < TOKENS / 8; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) score[j][i] += odd[j][i];
        }
    }

    // Scores become weights relative to the largest score so far, and what is there already is scaled to it.
    __device__ void weigh(uint32_t (&weights)[TOKENS / 16][4], float (&score)[TOKENS / 8][4], uint32_t slot,
                          bool scaled_by_page, int lane) {
        float correction[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float high = top[r];
#pragma unroll
            for (int j = 0; j < TOKENS / 8; ++j) high = fmaxf(high, fmaxf(score[j][2 * r], score[j][2 * r + 1]));
            high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
            high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
            const float base = high == minus_infinity() ? 0 : high;
            correction[r] = exp2_fast(top[r] - base);
            top[r] = high;
            float total = 0;
#pragma unroll
            for (int j = 0; j < TOKENS / 8; ++j) {
#pragma unroll
                for (int i = 2 * r; i < 2 * r + 2; ++i) total += score[j][i] = exp2_fast(score[j][i] - base);
            }
            sum[r] = fmaf(sum[r], correction[r], total);
        }
        if (Tile::kScaled && scaled_by_page) weigh_scales(score, correction, slot, lane);
#pragma unroll
        for (int j = 0; j < TOKENS / 8; ++j) {
            weights[j / 2][j % 2 * 2] = pack_pair<T>(score[j][0], score[j][1]);
            weights[j / 2][j % 2 * 2 + 1] = pack_pair<T>(score[j][2], score[j][3]);
        }
        if (__any_sync(~0u, correction[0] != 1 || correction[1] != 1)) scale_out(correction[0], correction[1]);
    }

    // The scales of values go into the weights, as parts of the largest scale so far, and that into the correction.
    __device__ void weigh_scales(float (&score)[TOKENS / 8][4], float (&correction)[2], uint32_t slot, int lane) {
        const uint32_t scales = slot + Tile::SCALES + TOKENS * 4;
        float largest = fabsf(load_scale(scales + lane * 4));
#pragma unroll
        for (int step = 1; step < kWarpSize; step *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
        if (largest > unit) {
            correction[0] *= unit / largest;
            correction[1] *= unit / largest;
            unit = largest;
        }
        const float inverse = unit == 0 ? 0 : 1 / unit;
        each(score, [&](float x, int, int column) {
            return x == 0 ? 0 : x * (load_scale(scales + lane % 4 * 8 + column * 4) * inverse);
        });
    }

    // Whether a value is infinite or NaN, which a weight of 0 would not hide.
    static __device__ bool has_non_finite(uint32_t slot, int lane) {
        constexpr uint32_t kExponent = is_same<T, __half> ? 0x7c00 : 0x7f80;
        bool found = false;
#pragma unroll 1
        for (int step = 0; step < STEPS; ++step) {
            uint32_t value[TOKENS / 16][4];
            Parts::values(value, slot, step, lane);
#pragma unroll
            for (int i = 0; i < TOKENS / 4; ++i) {
                const uint32_t pair = value[i / 4][i % 4];
                found |= (pair & kExponent) == kExponent || (pair >> 16 & kExponent) == kExponent;
            }
        }
        return __any_sync(~0u, found);
    }

    // The same product row by row, with the values that a row does not see set to zero: slow, for the rare tile that
    // needs it.
    __device__ void add_values_apart(const uint32_t (&weights)[TOKENS / 16][4], uint32_t slot, int token,
                                     const KeyRange (&seen)[2], int lane) {
#pragma unroll 1
        for (int row = 0; row < kItemRows; ++row) {
            const KeyRange mine = row < 8 ? seen[0] : seen[1];
            const int begin = __shfl_sync(~0u, mine.begin, row % 8 * 4), end = __shfl_sync(~0u, mine.end, row % 8 * 4);
            uint32_t visible[TOKENS / 8];  // halves of a register: two tokens of one dimension
#pragma unroll
            for (int j = 0; j < TOKENS / 8; ++j) {
                const int key = token + j * 8 + lane % 4 * 2;
                visible[j] = (key >= begin && key < end ? 0xffff : 0) | (key + 1 >= begin && key + 1 < end ? 0xffff0000 : 0);
            }
            const bool own[2] = {lane / 4 == row, lane / 4 == row - 8};
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                float part[2][4] = {};
                uint32_t value[TOKENS / 16][4];
                Parts::values(value, slot, step, lane);
#pragma unroll
                for (int tokens = 0; tokens < TOKENS / 16; ++tokens) {
                    for (int i = 0; i < 4; ++i) value[tokens][i] &= visible[2 * tokens + i % 2];
                    MmaAtom<T>::multiply(part[0], weights[tokens], value[tokens][0], value[tokens][1]);
                    MmaAtom<T>::multiply(part[1], weights[tokens], value[tokens][2], value[tokens][3]);
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if (own[i / 2]) out[2 * step][i] += part[0][i], out[2 * step + 1][i] += part[1][i];
                }
            }
        }
    }

    __device__ void add_values(const uint32_t (&weights)[TOKENS / 16][4], uint32_t slot, int lane) {
#pragma unroll
        for (int begin = 0; begin < STEPS; begin += AHEAD) {
            uint32_t value[AHEAD][TOKENS / 16][4];
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                if (begin + i < STEPS) Parts::values(value[i], slot, begin + i, lane);
            }
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                if (begin + i >= STEPS) break;
                auto &even = out[2 * (begin + i)], &odd = out[2 * (begin + i) + 1];
#pragma unroll
                for (int tokens = 0; tokens < TOKENS / 16; ++tokens) {
                    MmaAtom<T>::multiply(even, weights[tokens], value[i][tokens][0], value[i][tokens][1]);
                    MmaAtom<T>::multiply(odd, weights[tokens], value[i][tokens][2], value[i][tokens][3]);
                }
            }
        }
    }
};

}  // namespace rawops
