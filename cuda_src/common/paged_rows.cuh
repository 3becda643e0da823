// The attention of 8 or 16 rows (queries of one group of heads) over a tile of tokens in shared memory, by one warp:
// scores on the tensor cores, online softmax in base 2 and float32, values weighted on the tensor cores again.
#pragma once
#include "base2.cuh"
#include "paged_convert.cuh"
#include "paged_schedule.cuh"

namespace rawops {

// How scores are made; `scale` includes log2(e), softcap and slopes do not.
struct ScoreRule {
    float scale, softcap;
    const float* alibi_slopes;  // by query head, or none
};

template <class T> __device__ inline uint32_t pack_pair(float low, float high) {
    const T a = narrow<T>(low), b = narrow<T>(high);
    return uint32_t(reinterpret_cast<const uint16_t&>(a)) | uint32_t(reinterpret_cast<const uint16_t&>(b)) << 16;
}

// An 8 x 8 matrix of 16-bit elements, lane 4 g + t with columns 2 t and 2 t + 1 of row g, becomes its transpose.
__device__ inline uint32_t transpose_8x8(uint32_t pair) {
    uint32_t other;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(other) : "r"(pair));
    return other;
}

// Tokens are the rows of the products' first operand, and rows of queries the columns of the second, of which there are
// 8: S^T = K Q^T and O^T = V^T P^T. A fragments of a tile's keys and values, and which column of a head a lane's
// elements are, for steps of 16 columns: element i of 4 in the B fragments of Q, and half h of the accumulators of O^T.
template <class T, class Tile, int BYTES = sizeof(typename Tile::T)> struct Fragments;

template <class T, class Tile> struct Fragments<T, Tile, 2> {
    using Layout = typename Tile::Layout;

    static __device__ int query_column(int i, int lane) { return i / 2 * 8 + lane % 4 * 2 + i % 2; }
    static __device__ int out_column(int half, int lane) { return half * 8 + lane / 4; }

    static __device__ void keys(uint32_t (&r)[1][4], uint32_t slot, int step, int lane) {
        const int from = Layout::offset(lane % 16, lane / 16);
        ldmatrix<false>(r[0], slot + Layout::moved(from, 0, step * 2));
    }
    static __device__ void values(uint32_t (&r)[1][4], uint32_t slot, int step, int lane) {
        const int from = Layout::offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
        ldmatrix<true>(r[0], slot + Tile::VALUES + Layout::moved(from, 0, step * 2));
    }
};

// A word of the matrix has four columns of one token, or two columns of two tokens: columns go to lanes in that order.
template <class T, class Tile> struct Fragments<T, Tile, 1> {
    using Layout = typename Tile::Layout;
    using Stored = typename Tile::T;

    static __device__ int query_column(int i, int lane) { return lane % 4 * 4 + i; }
    static __device__ int out_column(int half, int lane) { return lane / 4 * 2 + half; }

    static __device__ void keys(uint32_t (&r)[2][4], uint32_t slot, int step, int lane) {
        uint32_t words[4];
        ldmatrix<false>(words, slot + Layout::moved(Layout::offset(lane, 0), 0, step));
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            uint32_t columns[2];
            widen_word<T, Stored, false>(columns, words[j]);
            r[j / 2][j % 2] = columns[0], r[j / 2][j % 2 + 2] = columns[1];
        }
    }
    static __device__ void values(uint32_t (&r)[2][4], uint32_t slot, int step, int lane) {
        uint32_t words[4];
        ldmatrix<true>(words, slot + Tile::VALUES + Layout::moved(Layout::offset(lane, 0), 0, step));
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            uint32_t columns[2];
            widen_word<T, Stored, true>(columns, words[j]);
            r[j / 2][j % 2 * 2] = columns[0], r[j / 2][j % 2 * 2 + 1] = columns[1];
        }
    }
};

// The rows of a lane: r of 2 to 4. Lane 4 g + t has rows 2 t and 2 t + 1 of every 8.
__device__ inline int row_of_lane(int r, int lane) { return r / 2 * 8 + lane % 4 * 2 + r % 2; }

// What a lane's rows see, and where they stand among the keys.
template <int COUNT> struct Bounds {
    KeyRange seen[COUNT];
    int position[COUNT];
    float slope[COUNT];   // of ALiBi, times log2(e)
    bool scaled_by_page;  // else 8-bit keys and values of the item have one scale each:
    float k_scale, v_scale;

    __device__ bool hide(int token, int tokens) const {  // any of these tokens
        bool hidden = false;
#pragma unroll
        for (int r = 0; r < COUNT; ++r) hidden |= seen[r].begin > token || seen[r].end < token + tokens;
        return hidden;
    }
};

// Accumulators of one warp for 8 or 16 rows.
template <class T, class Tile, int ROWS> class RowState {
public:
    using Parts = Fragments<T, Tile>;
    static constexpr int STEPS = Tile::HEAD_DIM / 16, TOKENS = Tile::TOKENS, M = TOKENS / 16, N = ROWS / 8;
    static constexpr int OWN = 2 * N;  // rows of a lane
    using Bounds = rawops::Bounds<OWN>;
    // B fragments of the queries, a step and lane.
    struct alignas(8 * N) Query {
        uint32_t word[2 * N];
    };
    float out[STEPS][N][4];  // of values scaled by page, in units of `unit`, the largest scale so far
    float unit;
    float top[OWN], sum[OWN];  // the sums are of this lane's tokens alone until `finish`

    __device__ void begin() {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
#pragma unroll
            for (int i = 0; i < 4 * N; ++i) out[step][i / 4][i % 4] = 0;
        }
#pragma unroll
        for (int r = 0; r < OWN; ++r) top[r] = -infinity(), sum[r] = 0;
        unit = 0;
    }

    // Adds a tile whose first token is `token`. queries: by step and lane.
    template <bool kSeveral>
    __device__ void add(const Query* queries, uint32_t slot, int token, const Bounds& bounds, const ScoreRule& rule,
                        int lane) {
        const auto& seen = bounds.seen;
        Scores score;
        multiply_keys(score, queries, slot, lane);
        if (Tile::kScaled && bounds.scaled_by_page) {
            const uint32_t scales = slot + Tile::SCALES + lane / 4 * 4;
            each(score, [&](float x, int, int further) { return x * load_scale(scales + further * 4); });
        }
        const float scale = Tile::kScaled ? rule.scale * bounds.k_scale : rule.scale;
        each(score, [&](float x, int, int) { return x * scale; });
        if (rule.softcap > 0) {
            const float factor = rule.softcap * kLog2e, inverse = 1 / factor;
            each(score, [&](float x, int, int) { return factor * tanh_fast(x * inverse); });
        }
        const int own = token + lane / 4;  // the lane's first token
        if (rule.alibi_slopes) {
            each(score, [&](float x, int r, int further) {
                return x - bounds.slope[r] * fabsf(float(bounds.position[r] - own - further));
            });
        }
        if (__any_sync(~0u, bounds.hide(token, TOKENS))) {
            each(score, [&](float x, int r, int further) {
                return own + further >= seen[r].begin && own + further < seen[r].end ? x : -infinity();
            });
        }
        Weights weights;
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
        for (int r = 0; r < OWN; ++r) {
#pragma unroll
            for (int step = 4; step < kWarpSize; step *= 2) sum[r] += __shfl_xor_sync(~0u, sum[r], step);
        }
        if constexpr (Tile::kScaled) {
            float scale[OWN];
#pragma unroll
            for (int r = 0; r < OWN; ++r) scale[r] = bounds.scaled_by_page ? unit : bounds.v_scale;
            scale_out(scale);
        }
    }

private:
    using Scores = float[M][N][4];        // of tokens lane / 4 and 8 further on, two rows each
    using Weights = uint32_t[M][N][2];  // as B fragments

    // Replaces each score by f(score, which of the lane's rows, tokens from the lane's first).
    template <class F> static __device__ void each(Scores& score, F f) {
#pragma unroll
        for (int m = 0; m < M; ++m) {
#pragma unroll
            for (int n = 0; n < N; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) score[m][n][i] = f(score[m][n][i], n * 2 + i % 2, m * 16 + i / 2 * 8);
            }
        }
    }

    static __device__ float load_scale(uint32_t address) {
        float scale;
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(scale) : "r"(address) : "memory");
        return scale;
    }

    // Of the rows' sums of values.
    __device__ void scale_out(const float (&factor)[OWN]) {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
#pragma unroll
            for (int n = 0; n < N; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) out[step][n][i] *= factor[n * 2 + i % 2];
            }
        }
    }

    // Fragments are read AHEAD steps at a time, so that the products do not wait for each.
    static constexpr int AHEAD = Tile::kScaled ? 2 : 4;

    __device__ void multiply_keys(Scores& score, const Query* queries, uint32_t slot, int lane) {
        Scores odd;  // two chains, since each product waits for the one before
        each(score, [](float, int, int) { return 0.0f; });
        each(odd, [](float, int, int) { return 0.0f; });
#pragma unroll
        for (int begin = 0; begin < STEPS; begin += AHEAD) {
            Query query[AHEAD];
            uint32_t key[AHEAD][M][4];
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                if (begin + i >= STEPS) break;
                query[i] = queries[(begin + i) * kWarpSize + lane];
                Parts::keys(key[i], slot, begin + i, lane);
            }
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                if (begin + i >= STEPS) break;
#pragma unroll
                for (int m = 0; m < M; ++m) {
#pragma unroll
                    for (int n = 0; n < N; ++n) {
                        MmaAtom<T>::multiply((i % 2 ? odd : score)[m][n], key[i][m], query[i].word[2 * n],
                                             query[i].word[2 * n + 1]);
                    }
                }
            }
        }
#pragma unroll
        for (int i = 0; i < M * N * 4; ++i) score[i / (4 * N)][i / 4 % N][i % 4] += odd[i / (4 * N)][i / 4 % N][i % 4];
    }

    // Scores become weights relative to the largest score so far, and what is there already is scaled to it.
    __device__ void weigh(Weights& weights, Scores& score, uint32_t slot, bool scaled_by_page, int lane) {
        float correction[OWN];
        bool moves = false;
#pragma unroll
        for (int r = 0; r < OWN; ++r) {
            float high = top[r];
#pragma unroll
            for (int m = 0; m < M; ++m) high = fmaxf(high, fmaxf(score[m][r / 2][r % 2], score[m][r / 2][r % 2 + 2]));
#pragma unroll
            for (int step = 4; step < kWarpSize; step *= 2) high = fmaxf(high, __shfl_xor_sync(~0u, high, step));
            const float base = high == -infinity() ? 0 : high;
            correction[r] = exp2_fast(top[r] - base);
            top[r] = high;
            float total = 0;
#pragma unroll
            for (int m = 0; m < M; ++m) {
#pragma unroll
                for (int i = r % 2; i < 4; i += 2) {
                    float& x = score[m][r / 2][i];
                    total += x = exp2_fast(x - base);
                }
            }
            sum[r] = fmaf(sum[r], correction[r], total);
        }
        if (Tile::kScaled && scaled_by_page) weigh_scales(score, correction, slot, lane);
#pragma unroll
        for (int m = 0; m < M; ++m) {
#pragma unroll
            for (int n = 0; n < N; ++n) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    weights[m][n][i] = transpose_8x8(pack_pair<T>(score[m][n][2 * i], score[m][n][2 * i + 1]));
                }
            }
        }
#pragma unroll
        for (int r = 0; r < OWN; ++r) moves |= correction[r] != 1;
        if (__any_sync(~0u, moves)) scale_out(correction);
    }

    // The scales of values go into the weights, as parts of the largest scale so far, and that into the correction.
    __device__ void weigh_scales(Scores& score, float (&correction)[OWN], uint32_t slot, int lane) {
        const uint32_t scales = slot + Tile::SCALES + TOKENS * 4;
        float largest = fabsf(load_scale(scales + lane * 4));
#pragma unroll
        for (int step = 1; step < kWarpSize; step *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
        if (largest > unit) {
#pragma unroll
            for (int r = 0; r < OWN; ++r) correction[r] *= unit / largest;
            unit = largest;
        }
        const float inverse = unit == 0 ? 0 : 1 / unit;
        each(score, [&](float x, int, int further) {
            return x == 0 ? 0 : x * (load_scale(scales + lane / 4 * 4 + further * 4) * inverse);
        });
    }

    // Whether a value is infinite or NaN, which a weight of 0 would not hide.
    static __device__ bool has_non_finite(uint32_t slot, int lane) {
        constexpr uint32_t kExponent = is_same<T, __half> ? 0x7c00 : 0x7f80;
        bool found = false;
#pragma unroll 1
        for (int step = 0; step < STEPS; ++step) {
            uint32_t value[M][4];
            Parts::values(value, slot, step, lane);
#pragma unroll
            for (int i = 0; i < M * 4; ++i) {
                const uint32_t pair = value[i / 4][i % 4];
                found |= (pair & kExponent) == kExponent || (pair >> 16 & kExponent) == kExponent;
            }
        }
        return __any_sync(~0u, found);
    }

    // The same product row by row, with the values that a row does not see set to zero: slow, for the rare tile that
    // needs it.
    __device__ void add_values_apart(const Weights& weights, uint32_t slot, int token, const KeyRange (&seen)[OWN],
                                     int lane) {
#pragma unroll
        for (int r = 0; r < OWN; ++r) {
#pragma unroll 1
            for (int quad = 0; quad < 4; ++quad) {  // row_of_lane(r, quad)
                const int begin = __shfl_sync(~0u, seen[r].begin, quad), end = __shfl_sync(~0u, seen[r].end, quad);
                uint32_t visible[2 * M];  // halves of a register: two tokens of one dimension
#pragma unroll
                for (int j = 0; j < 2 * M; ++j) {
                    const int key = token + j * 8 + lane % 4 * 2;
                    visible[j] =
                        (key >= begin && key < end ? 0xffff : 0) | (key + 1 >= begin && key + 1 < end ? 0xffff0000 : 0);
                }
#pragma unroll
                for (int step = 0; step < STEPS; ++step) {
                    float part[4] = {};
                    uint32_t value[M][4];
                    Parts::values(value, slot, step, lane);
#pragma unroll
                    for (int m = 0; m < M; ++m) {
                        for (int i = 0; i < 4; ++i) value[m][i] &= visible[2 * m + i / 2];
                        MmaAtom<T>::multiply(part, value[m], weights[m][r / 2][0], weights[m][r / 2][1]);
                    }
                    if (lane % 4 == quad) {
                        out[step][r / 2][r % 2] += part[r % 2];
                        out[step][r / 2][r % 2 + 2] += part[r % 2 + 2];
                    }
                }
            }
        }
    }

    __device__ void add_values(const Weights& weights, uint32_t slot, int lane) {
#pragma unroll
        for (int begin = 0; begin < STEPS; begin += AHEAD) {
            uint32_t value[AHEAD][M][4];
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                if (begin + i < STEPS) Parts::values(value[i], slot, begin + i, lane);
            }
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                if (begin + i >= STEPS) break;
#pragma unroll
                for (int m = 0; m < M; ++m) {
#pragma unroll
                    for (int n = 0; n < N; ++n) {
                        MmaAtom<T>::multiply(out[begin + i][n], value[i][m], weights[m][n][0], weights[m][n][1]);
                    }
                }
            }
        }
    }
};

}  // namespace rawops
