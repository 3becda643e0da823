// Attention with mma.sync: a tile of q stays in shared memory, k and v pass through a ring that cp.async fills, scores
// and weights never leave the registers.
#pragma once
#include "attention_softmax.cuh"
#include "attention_tile.cuh"
#include "mma.cuh"

namespace rawops {

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

// The sign bits of the halves that are infinite or NaN.
template <class T> __device__ inline uint32_t nonfinite_halves(uint32_t pair) {
    constexpr uint32_t kUnit = is_same<T, __half> ? 0x04000400 : 0x00800080;  // the exponent's last bit
    return ((pair & 0x7fff7fff) + kUnit) & 0x80008000;
}

template <class T, class Out, class Tile, int ACCESS, int kScore> struct AttentionForward {
    static constexpr int BLOCK_M = Tile::BLOCK_M, BLOCK_N = Tile::BLOCK_N, STAGES = Tile::STAGES;
    static constexpr int WARP_M = Tile::WARP_M, THREADS = Tile::THREADS;
    static constexpr int ATOMS_M = WARP_M / 16, ATOMS_N = BLOCK_N / 8, ATOMS_V = Tile::HEAD_DIM_V / 8, ROWS = 2 * ATOMS_M;
    using TileQ = RowTile<T, BLOCK_M, Tile::HEAD_DIM>;
    using TileK = RowTile<T, BLOCK_N, Tile::HEAD_DIM>;
    using TileV = RowTile<T, BLOCK_N, Tile::HEAD_DIM_V>;
    using ReaderQ = FragmentReader<T, typename TileQ::Panel, true>;
    using ReaderK = FragmentReader<T, typename TileK::Panel, true, true>;
    using ReaderV = FragmentReader<T, typename TileV::Panel, false, true>;
    using Scores = float[ATOMS_M][ATOMS_N][4];
    using Weights = uint32_t[ATOMS_M][ATOMS_N / 2][4];  // fragments as the product with v takes them
    using Accumulators = float[ATOMS_M][ATOMS_V][4];
    static constexpr int STAGE_BYTES = TileK::BYTES + TileV::BYTES;
    static_assert(STAGES >= 2, "one stage is read while the next is filled");

    const AttentionParams& params;
    const AttentionBlock& block;
    const uint32_t shared;
    const int warp, lane;
    int first, last;  // rows of the block that exist
    ReaderQ reader_q;
    ReaderK reader_k;
    ReaderV reader_v;
    OnlineSoftmax<ATOMS_M> softmax;
    Accumulators acc;

    __device__ AttentionForward(const AttentionParams& params_, const AttentionBlock& block_, uint32_t shared_)
        : params(params_),
          block(block_),
          shared(shared_),
          warp(threadIdx.x / kWarpSize),
          lane(threadIdx.x % kWarpSize),
          first(block.tile * BLOCK_M),
          last(min_of(first + BLOCK_M, block.rows(params.shape)) - 1),
          reader_q(warp * WARP_M, lane),
          reader_k(0, lane),
          reader_v(0, lane),
          acc{} {}

    // Works through the keys of the block. Rows says where rows of k and v are; see StridedRows.
    template <template <class> class Rows> __device__ void run(const Rows<T>& k, const Rows<T>& v) {
        const AttentionShape& shape = params.shape;
        const KeyRange keys = block.keys(shape, query(first), query(last), BLOCK_N);
        const int begin = keys.begin / BLOCK_N * BLOCK_N;
        const int blocks = keys.is_empty() ? 0 : ceil_div(keys.end - begin, BLOCK_N);
        auto fetch = [&](int index) {
            if (index < blocks) {
                const uint32_t stage = stage_of(index);
                const int key = begin + index * BLOCK_N;
                fetch_rows<TileK, ACCESS, THREADS>(stage, k, key, block.k_len, shape.head_dim, threadIdx.x);
                fetch_rows<TileV, ACCESS, THREADS>(stage + TileK::BYTES, v, key, block.k_len, shape.head_dim_v,
                                                   threadIdx.x);
            }
            cp_async_commit();
        };
        if (blocks > 0) fetch_q();
#pragma unroll
        for (int index = 0; index < STAGES - 1; ++index) fetch(index);
        const bool is_idle = first + warp * WARP_M > last;  // no row of the warp exists
        const int warp_first = query(first + warp * WARP_M), warp_last = query(first + warp * WARP_M + WARP_M - 1);
        const KeyRange at_first = block.visible(shape, warp_first), at_last = block.visible(shape, warp_last);
#pragma unroll 1
        for (int index = 0; index < blocks; ++index) {
            cp_async_wait<STAGES - 2>();
            __syncthreads();  // the stage is visible to all, and all have left the one before, which is filled next
            fetch(index + STAGES - 1);
            const int key = begin + index * BLOCK_N, key_end = key + BLOCK_N;
            const bool sees_some = !is_idle && key < at_last.end && key_end > at_first.begin;
            const bool sees_all = key >= at_last.begin && key_end <= at_first.end;
            Weights weights;
            if (sees_some) {
                Scores scores = {};
                multiply_qk(scores, stage_of(index));
                if (kScore != 0 || !sees_all) make_scores(scores, key, sees_all);
                softmax.step(scores, acc, kScore == 0 ? shape.scale : 1.0f);
                pack(weights, scores);
            }
            const uint32_t tile_v = stage_of(index) + TileK::BYTES;
            if (is_cut(key)) keep_hidden_values_out(tile_v, key);
            if (sees_some) multiply_pv(weights, tile_v);
        }
    }

    // Writes the rows and their lse.
    __device__ void finish() {
        const AttentionShape& shape = params.shape;
        Out* out = static_cast<Out*>(params.call.out) + block.split * shape.out_split + block.batch * shape.out.batch;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const int row = row_of(r), i = query(row), head = head_of(row);
            const float sum = quad_sum(softmax.sum[r]);
            if (row > last) continue;
            const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
            if (params.call.lse && lane % 4 == 0) {
                params.call.lse[block.split * shape.lse_split + block.batch * shape.lse_batch +
                                head * shape.lse_head + block.q_begin + i] = log_sum(softmax.max[r], sum);
            }
            write_row(out + (block.q_begin + i) * shape.out.row + head * shape.out.head, acc[r / 2], r % 2 * 2, inverse);
        }
    }

private:
    __device__ uint32_t stage_of(int index) const { return shared + TileQ::BYTES + index % STAGES * STAGE_BYTES; }

    // Row of the storage's tile that the thread's row r is, its query and its head. Rows that do not exist stand for
    // the last one.
    __device__ int row_of(int r) const { return first + warp * WARP_M + r * 8 + lane / 4; }
    __device__ int query(int row) const { return min_of(row, last) / params.shape.packed; }
    __device__ int head_of(int row) const { return block.head + min_of(row, last) % params.shape.packed; }

    __device__ void fetch_q() {
        const AttentionStrides& s = params.shape.q;
        const T* base = static_cast<const T*>(params.call.q) + block.batch * s.batch + block.q_begin * s.row +
                        block.head * s.head;
        const PackedRows<T> rows = {base, s.row, s.head, s.col, params.shape.packed};
        fetch_rows<TileQ, ACCESS, THREADS>(shared, rows, first, last + 1, params.shape.head_dim, threadIdx.x);
    }

    __device__ void read_q(uint32_t (&q)[ATOMS_M][4], int step) const {
#pragma unroll
        for (int i = 0; i < ATOMS_M; ++i) {
            reader_q.read(q[i], shared + TileQ::panel(step * 16), i, step % (TileQ::PANEL_COLS / 16));
        }
    }

    // The fragments of the next step are on their way while the tensor cores work on this one.
    __device__ void multiply_qk(Scores& scores, uint32_t tile_k) const {
        constexpr int STEPS = Tile::HEAD_DIM / 16, PAIRS = ATOMS_N / 2;
        uint32_t q[1][ATOMS_M][4], k[2][4];
        auto read_k = [&](int index) {
            const int step = index / PAIRS;
            reader_k.read(k[index % 2], tile_k + TileK::panel(step * 16), index % PAIRS,
                          step % (TileK::PANEL_COLS / 16));
        };

        read_k(0);
#pragma unroll
        for (int index = 0; index < STEPS * PAIRS; ++index) {
            const int step = index / PAIRS, pair = index % PAIRS;
            if (index + 1 < STEPS * PAIRS) read_k(index + 1);
            if (pair == 0) read_q(q[0], step);
#pragma unroll
            for (int i = 0; i < ATOMS_M; ++i) {
                MmaAtom<T>::multiply(scores[i][2 * pair], q[0][i], k[index % 2][0], k[index % 2][1]);
                MmaAtom<T>::multiply(scores[i][2 * pair + 1], q[0][i], k[index % 2][2], k[index % 2][3]);
            }
        }
    }

    // Accumulators of two atoms are the fragment of one.
    static __device__ void pack(Weights& weights, const Scores& scores) {
#pragma unroll
        for (int i = 0; i < ATOMS_M; ++i) {
#pragma unroll
            for (int part = 0; part < 2 * ATOMS_N; ++part) {
                const float(&w)[4] = scores[i][part / 2];
                weights[i][part / 4][part % 4] = pack_pair<T>(w[part % 2 * 2], w[part % 2 * 2 + 1]);
            }
        }
    }

    __device__ void multiply_pv(const Weights& weights, uint32_t tile_v) {
        constexpr int STEPS = BLOCK_N / 16, PAIRS = ATOMS_V / 2;
        uint32_t v[2][4];
        auto read_v = [&](int index) {
            const int col = index % PAIRS * 16;
            reader_v.read(v[index % 2], tile_v + TileV::panel(col), col % TileV::PANEL_COLS / 16, index / PAIRS);
        };
        read_v(0);
#pragma unroll
        for (int index = 0; index < STEPS * PAIRS; ++index) {
            const int step = index / PAIRS, pair = index % PAIRS;
            if (index + 1 < STEPS * PAIRS) read_v(index + 1);
#pragma unroll
            for (int i = 0; i < ATOMS_M; ++i) {
                MmaAtom<T>::multiply(acc[i][2 * pair], weights[i][step], v[index % 2][0], v[index % 2][1]);
                MmaAtom<T>::multiply(acc[i][2 * pair + 1], weights[i][step], v[index % 2][2], v[index % 2][3]);
            }
        }
    }

    // Scores out of products, -inf for keys that a row does not see.
    __device__ void make_scores(Scores& scores, int first_key, bool sees_all) const {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const int i = query(row_of(r));
            const RowScore<T, kScore> score(params, block, i, head_of(row_of(r)));
            const KeyRange seen = sees_all ? KeyRange{0, block.k_len} : block.visible(params.shape, i);
#pragma unroll
            for (int j = 0; j < ATOMS_N; ++j) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& value = scores[r / 2][j][r % 2 * 2 + e];
                    const int key = first_key + j * 8 + lane % 4 * 2 + e;
                    const bool is_seen = key >= seen.begin && key < seen.end;
                    if constexpr (kScore == 0) value = is_seen ? value : -infinity();
                    else value = is_seen ? score(value, key) : -infinity();
                }
            }
        }
    }

    // --- a value that is not finite, next to rows that do not see it: a weight of 0 would make it NaN

    // Whether some row of the block sees only a part of these keys, the same for all threads.
    __device__ bool is_cut(int key) const {
        const AttentionShape& shape = params.shape;
        if (shape.window_left < 0 && shape.window_right < 0) return false;
        return key < block.visible(shape, query(last)).begin ||
               min_of(key + BLOCK_N, block.k_len) > block.visible(shape, query(first)).end;
    }

    // Adds such values to the rows that see them, and has zeros in their place for the product.
    __device__ void keep_hidden_values_out(uint32_t tile_v, int first_key) {
        constexpr int WORDS = TileV::BYTES / 4;
        uint32_t word, found = 0;
        for (int w = threadIdx.x; w < WORDS; w += THREADS) {
            load_shared(word, tile_v + w * 4);
            found |= nonfinite_halves<T>(word);
        }
        if (!__syncthreads_or(found)) return;
        KeyRange seen[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) seen[r] = block.visible(params.shape, query(row_of(r)));
#pragma unroll 1
        for (int key = 0; key < BLOCK_N; ++key) {
#pragma unroll
            for (int j = 0; j < ATOMS_V; ++j) {
                load_shared(word, tile_v + TileV::offset(key, j * 8 + lane % 4 * 2));
                const uint32_t bad = nonfinite_halves<T>(word);
#pragma unroll
                for (int e = 0; e < 4; ++e) {  // rows in the order of the accumulators: low, high, low, high
                    const float value = half_of(word, e % 2);
#pragma unroll
                    for (int i = 0; i < ATOMS_M; ++i) {
                        const KeyRange& range = seen[2 * i + e / 2];
                        const bool is_seen = first_key + key >= range.begin && first_key + key < range.end;
                        if (is_seen && (bad >> (e % 2 * 16 + 15) & 1)) acc[i][j][e] += value;
                    }
                }
            }
        }
        __syncthreads();
        for (int w = threadIdx.x; w < WORDS; w += THREADS) {
            load_shared(word, tile_v + w * 4);
            const uint32_t bad = nonfinite_halves<T>(word) >> 15;  // 1 in a half to be cleared
            asm volatile("st.shared.b32 [%0], %1;" ::"r"(tile_v + w * 4), "r"(word & ~(bad * 0xffff)) : "memory");
        }
        __syncthreads();
    }

    static __device__ float half_of(uint32_t word, int index) {
        const uint16_t bits = uint16_t(word >> (index * 16));
        return widen(reinterpret_cast<const T&>(bits));
    }

    // Elements e and e + 1 of each atom, times `factor`.
    __device__ void write_row(Out* out, const float (&values)[ATOMS_V][4], int e, float factor) const {
        const AttentionShape& shape = params.shape;
#pragma unroll
        for (int j = 0; j < ATOMS_V; ++j) {
            const int col = j * 8 + lane % 4 * 2;
            const Vector<Out, 2> pair = {narrow<Out>(values[j][e] * factor), narrow<Out>(values[j][e + 1] * factor)};
            if (shape.out_pairs && col + 1 < shape.head_dim_v) {
                *reinterpret_cast<Vector<Out, 2>*>(out + col) = pair;
            } else {
                if (col < shape.head_dim_v) out[col * shape.out.col] = pair.data[0];
                if (col + 1 < shape.head_dim_v) out[(col + 1) * shape.out.col] = pair.data[1];
            }
        }
    }
};

}  // namespace rawops
