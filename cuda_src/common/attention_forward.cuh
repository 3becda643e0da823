// Attention with mma.sync: a tile of q stays in shared memory, k and v pass through a ring that cp.async fills, scores
// and weights never leave the registers.
#pragma once
#include "attention_softmax.cuh"
#include "attention_tile.cuh"
#include "dropout.cuh"
#include "mma.cuh"

namespace rawops {

// The same value, but the compiler does not know: what follows from it is made anew in each step of a loop and not kept
// in the registers of the whole loop.
__device__ inline int made_anew(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

// What all threads of a block know alike. In shared memory it costs the main loop no registers.
template <class T, template <class> class Rows> struct AttentionWork {
    AttentionBlock block;
    Rows<T> k, v;         // of the sequence and head; see StridedRows
    int first, last;      // rows of the tile that exist
    KeyRange keys;        // that they see, from a multiple of BLOCK_N on
    bool has_cleared;     // some values of v were not finite; see is_cut
};

template <class T, template <class> class Rows, class Out, class Tile, int ACCESS, int kScore> struct AttentionForward {
    using Work = AttentionWork<T, Rows>;
    static constexpr int BLOCK_M = Tile::BLOCK_M, BLOCK_N = Tile::BLOCK_N, STAGES = Tile::STAGES;
    static constexpr int WARP_M = Tile::WARP_M, THREADS = Tile::THREADS;
    static constexpr int ATOMS_M = WARP_M / 16, ATOMS_N = BLOCK_N / 8, ATOMS_V = Tile::HEAD_DIM_V / 8, ROWS = 2 * ATOMS_M;
    using TileQ = RowTile<T, BLOCK_M, Tile::HEAD_DIM>;
    using TileK = RowTile<T, BLOCK_N, Tile::HEAD_DIM>;
    using TileV = RowTile<T, BLOCK_N, Tile::HEAD_DIM_V>;
    using ReaderQ = FragmentReader<T, typename TileQ::Panel, true>;
    using ReaderK = FragmentReader<T, typename TileK::Panel, true, true>;
    using ReaderV = FragmentReader<T, typename TileV::Panel, false, true>;
    static constexpr bool kDrops = (kScore & kScoreDropout) != 0, kPlain = (kScore & ~kScoreDropout) == 0;
    using Scores = float[ATOMS_M][ATOMS_N][4];
    using Weights = uint32_t[ATOMS_M][ATOMS_N / 2][4];
    using Accumulators = float[ATOMS_M][ATOMS_V][4];
    static constexpr int STAGE_BYTES = TileK::BYTES + TileV::BYTES;
    static_assert(STAGES >= 2, "one stage is read while the next is filled");

    const AttentionParams& params;
    Work& work;
    const AttentionBlock& block;
    const uint32_t shared;
    const int warp, lane;
    OnlineSoftmax<ATOMS_M> softmax;
    Accumulators acc;

    // Begins with a tile of rows. All threads of the block come here.
    __device__ AttentionForward(const AttentionParams& params_, Work& work_, int tile, uint32_t shared_)
        : params(params_),
          work(work_),
          block(work_.block),
          shared(shared_),
          warp(threadIdx.x / kWarpSize),
          lane(threadIdx.x % kWarpSize),
          acc{} {
        __syncthreads();  // all are done with the tile before
        if (threadIdx.x == 0) {
            work.first = tile * BLOCK_M;
            work.last = min_of(work.first + BLOCK_M, block.rows(params.shape)) - 1;
            work.keys = block.keys(params.shape, query(work.first), query(work.last), BLOCK_N);
            work.keys.begin = work.keys.begin / BLOCK_N * BLOCK_N;
            work.has_cleared = false;
        }
        __syncthreads();
    }

    // Works through the keys.
    __device__ void run() {
        const AttentionShape& shape = params.shape;
        if (work.keys.is_empty()) return;
        fetch_q();
#pragma unroll
        for (int index = 0; index < STAGES - 1; ++index) fetch(work.keys.begin + index * BLOCK_N, index);
        // Keys that all rows see: for blocks of these nothing else needs to be known.
        const int plain_begin = block.visible(shape, query(work.last)).begin;
        const int plain_end = block.visible(shape, query(work.first)).end;
        int stage = 0;
#pragma unroll 1
        for (int key = work.keys.begin; key < work.keys.end; key += BLOCK_N) {
            cp_async_wait<STAGES - 2>();
            __syncthreads();  // the stage is visible to all, and all have left the one before, which is filled next
            const uint32_t tile_k = shared + TileQ::BYTES + stage * STAGE_BYTES, tile_v = tile_k + TileK::BYTES;
            bool sees_some = true, sees_all = true;
            if (key < plain_begin || key + BLOCK_N > plain_end) {
                if (min_of(key + BLOCK_N, block.k_len) > plain_end || key < plain_begin) clear_nonfinite(tile_v);
                const int first_row = work.first + warp * WARP_M;
                const KeyRange at_first = block.visible(shape, query(first_row));
                const KeyRange at_last = block.visible(shape, query(first_row + WARP_M - 1));
                sees_some = first_row <= work.last && key < at_last.end && key + BLOCK_N > at_first.begin;
                sees_all = key >= at_last.begin && key + BLOCK_N <= at_first.end;
            }
            if (sees_some) {
                Scores scores = {};
                Weights weights;
                multiply_qk(scores, tile_k);
                fetch(key + (STAGES - 1) * BLOCK_N, stage == 0 ? STAGES - 1 : stage - 1);
                if (!kPlain || !sees_all) make_scores(scores, key, sees_all);
                softmax.template step<T>(scores, weights, acc, kPlain ? shape.scale : 1.0f);
                if constexpr (kDrops) drop(weights, key);
                multiply_pv(weights, tile_v);
            } else {
                fetch(key + (STAGES - 1) * BLOCK_N, stage == 0 ? STAGES - 1 : stage - 1);
            }
            stage = stage == STAGES - 1 ? 0 : stage + 1;
        }
    }

    // Writes the rows and their lse.
    __device__ void finish() {
        const AttentionShape& shape = params.shape;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const int row = row_of(r);
            const float sum = quad_sum(softmax.sum[r]), dropped = kDrops ? shape.dropout.scale : 1.0f;
            const float factor = sum == 0.0f ? 0.0f : dropped / sum;
            const bool by_quads = sizeof(Out) == 2 && shape.out_pairs == 2;
            if constexpr (sizeof(Out) == 2) {
                if (by_quads) write_quads(row, acc[r / 2], r % 2 * 2, factor);
            }
            if (row > work.last) continue;
            if (params.call.lse && lane % 4 == 0) {
                params.call.lse[block.split * shape.lse_split + block.batch * shape.lse_batch +
                                head_of(row) * shape.lse_head + block.q_begin + query(row)] =
                    log_sum(softmax.max[r], sum);
            }
            if (!by_quads) write_row(out_row(row), acc[r / 2], r % 2 * 2, factor);
        }
        __syncthreads();
        if (work.has_cleared) add_nonfinite();
    }

private:
    // Row of the problem that the thread's row r is, its query and its head. Rows that do not exist stand for the last.
    __device__ int row_of(int r) const { return work.first + warp * WARP_M + r * 8 + lane / 4; }
    __device__ int query(int row) const {
        const int packed = params.shape.packed, existing = min_of(row, work.last);
        return packed == 1 ? existing : existing / packed;  // a branch costs less than a division
    }
    __device__ int head_of(int row) const {
        const int packed = params.shape.packed;
        return packed == 1 ? block.head : block.head + min_of(row, work.last) % packed;
    }

    // Starts the copies of the keys from `key` on into a stage of the ring; there may be none left.
    __device__ void fetch(int key, int stage) const {
        if (key < work.keys.end) {
            const AttentionShape& shape = params.shape;
            const int thread = threadIdx.x;
            const uint32_t tile_k = shared + TileQ::BYTES + stage * STAGE_BYTES, tile_v = tile_k + TileK::BYTES;
            fetch_often<TileK, ACCESS, THREADS>(tile_k, work.k, key, block.k_len, shape.head_dim, thread);
            fetch_often<TileV, ACCESS, THREADS>(tile_v, work.v, key, block.k_len, shape.head_dim_v, thread);
        }
        cp_async_commit();
    }

    __device__ Out* out_row(int row) const {
        const AttentionStrides& s = params.shape.out;
        return static_cast<Out*>(params.call.out) + block.split * params.shape.out_split + block.batch * s.batch +
               (block.q_begin + query(row)) * s.row + head_of(row) * s.head;
    }

    __device__ void fetch_q() {
        const AttentionStrides& s = params.shape.q;
        const T* base = static_cast<const T*>(params.call.q) + block.batch * s.batch + block.q_begin * s.row +
                        block.head * s.head;
        const int packed = params.shape.packed, cols = params.shape.head_dim;
        if (packed == 1) {
            const StridedRows<T> rows = {base, s.row, s.col};
            fetch_rows<TileQ, ACCESS, THREADS>(shared, rows, work.first, work.last + 1, cols, threadIdx.x);
        } else {
            const PackedRows<T> rows = {base, s.row, s.head, s.col, packed};
            fetch_rows<TileQ, ACCESS, THREADS>(shared, rows, work.first, work.last + 1, cols, threadIdx.x);
        }
    }

    __device__ void multiply_qk(Scores& scores, uint32_t tile_k) const {
        const ReaderQ reader_q(warp * WARP_M, lane);
        const ReaderK reader_k(0, lane);
#pragma unroll
        for (int step = 0; step < Tile::HEAD_DIM / 16; ++step) {
            uint32_t q[ATOMS_M][4];
#pragma unroll
            for (int i = 0; i < ATOMS_M; ++i) {
                reader_q.read(q[i], shared + TileQ::panel(step * 16), i, step % (TileQ::PANEL_COLS / 16));
            }
#pragma unroll
            for (int pair = 0; pair < ATOMS_N / 2; ++pair) {
                uint32_t k[4];
                reader_k.read(k, tile_k + TileK::panel(step * 16), pair, step % (TileK::PANEL_COLS / 16));
#pragma unroll
                for (int i = 0; i < ATOMS_M; ++i) {
                    MmaAtom<T>::multiply(scores[i][2 * pair], q[i], k[0], k[1]);
                    MmaAtom<T>::multiply(scores[i][2 * pair + 1], q[i], k[2], k[3]);
                }
            }
        }
    }

    __device__ void multiply_pv(const Weights& weights, uint32_t tile_v) {
        const ReaderV reader_v(0, lane);
#pragma unroll
        for (int step = 0; step < BLOCK_N / 16; ++step) {
#pragma unroll
            for (int pair = 0; pair < ATOMS_V / 2; ++pair) {
                uint32_t v[4];
                reader_v.read(v, tile_v + TileV::panel(pair * 16), pair % (TileV::PANEL_COLS / 16), step);
#pragma unroll
                for (int i = 0; i < ATOMS_M; ++i) {
                    MmaAtom<T>::multiply(acc[i][2 * pair], weights[i][step], v[0], v[1]);
                    MmaAtom<T>::multiply(acc[i][2 * pair + 1], weights[i][step], v[2], v[3]);
                }
            }
        }
    }

    // Scores out of products, -inf for keys that a row does not see.
    __device__ void make_scores(Scores& scores, int first_key, bool sees_all) const {
        const int first_row = row_of(0);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const int row = first_row + r * 8, i = query(row);
            const RowScore<T, kScore> score(params, block, i, head_of(row));
            const KeyRange seen = sees_all ? KeyRange{0, block.k_len} : block.visible(params.shape, i);
#pragma unroll
            for (int j = 0; j < ATOMS_N; ++j) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& value = scores[r / 2][j][r % 2 * 2 + e];
                    const int key = first_key + j * 8 + lane % 4 * 2 + e;
                    const bool is_seen = key >= seen.begin && key < seen.end;
                    if constexpr (kPlain) value = is_seen ? value : -infinity();
                    else value = is_seen ? score(value, key) : -infinity();
                }
            }
        }
    }

    // Puts zeros in the place of weights that dropout takes; heads are not packed then.
    __device__ void drop(Weights& weights, int first_key) const {
        const Dropout dropout(params.shape, block.batch, block.head);
#pragma unroll
        for (int i = 0; i < ATOMS_M; ++i) {
#pragma unroll
            for (int step = 0; step < BLOCK_N / 16; ++step) {
                const int query = work.first + warp * WARP_M + i * 16;
                const DropoutNumbers numbers = dropout.of_queries(query, first_key + step * 16, lane);
#pragma unroll
                for (int part = 0; part < 4; ++part) weights[i][step][part] &= numbers.mask(part);
            }
        }
    }

    // --- a value that is not finite, next to rows that do not see it: a weight of 0 would make it NaN

    // Puts zeros in the place of such values, and remembers if there were any.
    __device__ void clear_nonfinite(uint32_t tile_v) const {
        uint32_t found = 0;
#pragma unroll 2
        for (int byte = threadIdx.x * 16; byte < TileV::BYTES; byte += THREADS * 16) {
            uint32_t x, y, z, w;
            asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                         : "=r"(x), "=r"(y), "=r"(z), "=r"(w)
                         : "r"(tile_v + byte)
                         : "memory");
            found |= nonfinite_halves<T>(x) | nonfinite_halves<T>(y) | nonfinite_halves<T>(z) | nonfinite_halves<T>(w);
        }
        if (!__syncthreads_or(found)) return;
        work.has_cleared = true;
#pragma unroll 1
        for (int byte = threadIdx.x * 4; byte < TileV::BYTES; byte += THREADS * 4) {
            uint32_t word;
            load_shared(word, tile_v + byte);
            const uint32_t bad = nonfinite_halves<T>(word) >> 15;  // 1 in a half to be cleared
            asm volatile("st.shared.b32 [%0], %1;" ::"r"(tile_v + byte), "r"(word & ~(bad * 0xffff)) : "memory");
        }
        __syncthreads();
    }

    // Adds the values that were cleared to the rows that see them, in the result: rare enough to take its time.
    __device__ void add_nonfinite() const {
        const AttentionShape& shape = params.shape;
        const int uncut_begin = block.visible(shape, query(work.last)).begin + BLOCK_N;
        const int uncut_end = block.visible(shape, query(work.first)).end - BLOCK_N;
#pragma unroll 1
        for (int row = work.first; row <= work.last; ++row) {
            const KeyRange seen = block.visible(shape, query(row));
            Out* out = out_row(row);
#pragma unroll 1
            for (int key = max_of(work.keys.begin, seen.begin); key < min_of(work.keys.end, seen.end); ++key) {
                if (key >= uncut_begin && key < uncut_end) {
                    key = uncut_end - 1;
                    continue;
                }
                for (int col = threadIdx.x; col < shape.head_dim_v; col += THREADS) {
                    const float value = widen(work.v.at(key)[col * work.v.col]);
                    if (value - value != 0.0f) {
                        Out& element = out[col * shape.out.col];
                        element = narrow<Out>(widen(element) + value);
                    }
                }
            }
        }
    }

    // Elements e and e + 1 of each atom, times `factor`, where the row exists: lanes of a quad exchange what they have, so
    // that each writes 16 bytes.
    __device__ void write_quads(int row, const float (&values)[ATOMS_V][4], int e, float factor) const {
        Out* out = out_row(row) + made_anew(lane % 4 * 8);
#pragma unroll
        for (int group = 0; group < ATOMS_V / 4; ++group) {
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float(&pair)[4] = values[group * 4 + i];
                words[i] = pack_pair<Out>(pair[e] * factor, pair[e + 1] * factor);
            }
            transpose_quad(words, lane);
            if (row <= work.last && group * 32 + lane % 4 * 8 < params.shape.head_dim_v) {
                *reinterpret_cast<uint4*>(out + group * 32) = {words[0], words[1], words[2], words[3]};
            }
        }
    }

    // The same, each lane for itself, in a row that exists.
    __device__ void write_row(Out* out, const float (&values)[ATOMS_V][4], int e, float factor) const {
        const AttentionShape& shape = params.shape;
        const int first_col = made_anew(lane % 4 * 2);
        if (shape.out_pairs && shape.head_dim_v == Tile::HEAD_DIM_V) {
#pragma unroll
            for (int j = 0; j < ATOMS_V; ++j) {
                const Vector<Out, 2> pair = {narrow<Out>(values[j][e] * factor), narrow<Out>(values[j][e + 1] * factor)};
                *reinterpret_cast<Vector<Out, 2>*>(out + first_col + j * 8) = pair;
            }
        } else {
            Out* to = out + first_col * shape.out.col;
#pragma unroll
            for (int j = 0; j < ATOMS_V; ++j, to += 8 * shape.out.col) {
                const int left = shape.head_dim_v - first_col - j * 8;
                if (left > 0) to[0] = narrow<Out>(values[j][e] * factor);
                if (left > 1) to[shape.out.col] = narrow<Out>(values[j][e + 1] * factor);
            }
        }
    }
};

}  // namespace rawops
