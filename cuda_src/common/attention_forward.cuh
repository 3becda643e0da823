// Attention with mma.sync: a tile of q stays in shared memory, blocks of k and v come and go there by cp.async, scores
// and weights never leave the registers. While a block of keys is multiplied, its values are on their way, and while
// those are, the next keys: one place for each leaves an SM room for two blocks or more, which fill each other's waits.
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

// What all threads of a block know alike. In shared memory it costs the main loop no registers; it is there from the
// first barrier of AttentionForward::run on.
template <class T, template <class> class Rows> struct AttentionWork {
    AttentionBlock block;
    Rows<T> k, v;         // of the sequence and head; see StridedRows
    int first, last;      // rows of the tile that exist
    KeyRange keys;        // that they see, from a multiple of BLOCK_N on
    bool has_cleared;     // some values of v were not finite; see clear_nonfinite
};

// kPacked: query heads of a group may lie side by side in the tile; see attention_problem.cuh.
template <class T, template <class> class Rows, class Out, class Tile, int ACCESS, int kScore, bool kPacked>
struct AttentionForward {
    using Work = AttentionWork<T, Rows>;
    static constexpr int BLOCK_M = Tile::BLOCK_M, BLOCK_N = Tile::BLOCK_N;
    static constexpr int WARP_M = Tile::WARP_M, THREADS = Tile::THREADS;
    static constexpr int ATOMS_M = WARP_M / 16, ATOMS_N = BLOCK_N / 8, ATOMS_V = Tile::HEAD_DIM_V / 8;
    static constexpr int ROWS = 2 * ATOMS_M;
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
    // Steps of q k^T, each of 16 columns, whose fragments of q stay in registers: as many as there are, where heads are
    // so wide that a warp has 16 rows.
    static constexpr int STEPS = Tile::HEAD_DIM / 16, SPARE = 192 - ATOMS_M * (ATOMS_N + ATOMS_V) * 4;
    static constexpr int KEPT = Tile::HEAD_DIM_V > 128 && WARP_M == 16 ? clamp(SPARE / 4, 0, STEPS) : 0;
    using Kept = uint32_t[max_of(KEPT, 1)][4];
    // With 32 rows of so many columns a warp has no registers to fetch values while it still makes weights.
    static constexpr bool kApart = WARP_M == 32 && Tile::HEAD_DIM_V > 96;

    const AttentionParams& params;
    Work& work;
    const AttentionBlock& block;
    const uint32_t shared;
    const int warp, lane;
    OnlineSoftmax<ATOMS_M> softmax;
    Accumulators acc;
    // A thread copies every ROW_STEP-th row of a block of keys and of its values.
    static constexpr int THREADS_PER_ROW = TileK::PANEL_COLS * int(sizeof(T)) / 16;
    static constexpr int ROW_STEP = THREADS / THREADS_PER_ROW;
    typename Rows<T>::template Found<BLOCK_N / ROW_STEP, ROW_STEP> found;

    __device__ AttentionForward(const AttentionParams& params_, Work& work_, uint32_t shared_)
        : params(params_),
          work(work_),
          block(work_.block),
          shared(shared_),
          warp(threadIdx.x / kWarpSize),
          lane(threadIdx.x % kWarpSize),
          acc{} {}

    // Works through the keys of a tile of rows. `mine` is the block, which every thread works out for itself: copies
    // begin before anything is exchanged. k and v are its keys and values.
    __device__ void run(const AttentionBlock& mine, const Rows<T>& k, const Rows<T>& v, int tile) {
        const AttentionShape& shape = params.shape;
        const int first = tile * BLOCK_M, last = min_of(first + BLOCK_M, mine.rows(shape)) - 1;
        const int first_query = kPacked ? first / shape.packed : first;
        const int last_query = kPacked ? last / shape.packed : last;
        KeyRange keys = mine.keys(shape, first_query, last_query, BLOCK_N);
        keys.begin = keys.begin / BLOCK_N * BLOCK_N;
        if (!keys.is_empty()) {
            look(k, keys.begin, keys.end);
            fetch_q(mine, first, last);
            fetch_keys(k, keys.begin, keys.end);
        }
        if (threadIdx.x == 0) work = {mine, k, v, first, last, keys, false};
        // Keys that all rows see: for blocks of these nothing else needs to be known.
        const int plain_begin = uniform(mine.visible(shape, last_query).begin);
        const int plain_end = uniform(mine.visible(shape, first_query).end), keys_end = uniform(keys.end);
        if (keys.is_empty()) __syncthreads();
        Kept kept;
#pragma unroll 1
        for (int key = uniform(keys.begin); key < keys_end; key += BLOCK_N) {
            cp_async_wait<0>();
            __syncthreads();  // the keys are visible to all, and all have left the values before
            if (KEPT > 0 && key == keys.begin) keep(kept);
            fetch_values(key, keys_end);
            look(rows_k(), key + BLOCK_N, keys_end);
            bool sees_some = true, sees_all = true;
            const bool is_cut = key < plain_begin || key + BLOCK_N > plain_end;
            if (is_cut) {
                const int first_row = work.first + warp * WARP_M;
                const KeyRange at_first = block.visible(shape, query(first_row));
                const KeyRange at_last = block.visible(shape, query(first_row + WARP_M - 1));
                sees_some = first_row <= work.last && key < at_last.end && key + BLOCK_N > at_first.begin;
                sees_all = key >= at_last.begin && key + BLOCK_N <= at_first.end;
            }
            auto hides = [&]() { return is_cut && (min_of(key + BLOCK_N, keys_end) > plain_end || key < plain_begin); };
            auto pass_on = [&]() {
                cp_async_wait<0>();
                __syncthreads();  // the values are visible to all, and all have left the keys
                fetch_keys(rows_k(), key + BLOCK_N, keys_end);
                if (!kApart && hides()) clear_nonfinite();
            };
            Weights weights;
            if (sees_some) {
                Scores scores = {};
                multiply_qk(scores, kept);
                pass_on();
                if (!kPlain || !sees_all) make_scores(scores, key, sees_all);
                softmax.template step<T>(scores, weights, acc, kPlain ? shape.scale : 1.0f);
                if constexpr (kDrops) drop(weights, key);
                if constexpr (!kApart) multiply_pv(weights);
            } else {
                pass_on();
            }
            if constexpr (kApart) {
                if (hides()) clear_nonfinite();
                if (sees_some) multiply_pv(weights);
            }
        }
    }

    // Writes the rows and their lse.
    __device__ void finish() {
        const AttentionShape& shape = params.shape;
        const float dropped = kDrops ? shape.dropout.scale : 1.0f;
        const int last = work.last;
        float factor[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            softmax.sum[r] = quad_sum(softmax.sum[r]);
            factor[r] = softmax.sum[r] == 0.0f ? 0.0f : __fdividef(dropped, softmax.sum[r]);
        }
        Out* out = out_row(row_of(0));
        const bool by_quads = sizeof(Out) == 2 && shape.out_pairs == 2;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const int row = row_of(r);
            if (r > 0) out = kPacked ? out_row(row) : out + 8 * shape.out.row;
            if constexpr (sizeof(Out) == 2) {
                if (by_quads) write_quads(out, row <= last, acc[r / 2], r % 2 * 2, factor[r]);
            }
            if (!by_quads && row <= last) write_row(out, acc[r / 2], r % 2 * 2, factor[r]);
        }
        if (params.call.lse && lane % 4 == 0) {
#pragma unroll
            for (int r = 0; r < ROWS; ++r) write_lse(row_of(r), log_sum(softmax.max[r], softmax.sum[r]));
        }
        if (work.has_cleared) {
            __syncthreads();
            add_nonfinite();
        }
    }

private:
    // Row of the problem that the thread's row r is, its query and its head. Rows that do not exist stand for the last.
    __device__ int row_of(int r) const { return work.first + warp * WARP_M + r * 8 + lane / 4; }
    __device__ int query(int row) const {
        const int existing = min_of(row, work.last);
        return kPacked ? existing / params.shape.packed : existing;
    }
    __device__ int head_of(int row) const {
        return kPacked ? block.head + min_of(row, work.last) % params.shape.packed : block.head;
    }

    __device__ uint32_t tile_k() const { return shared + TileQ::BYTES; }
    __device__ uint32_t tile_v() const { return shared + TileQ::BYTES + TileK::BYTES; }

    // Strides from the parameters, where reading them costs nothing.
    __device__ Rows<T> rows_k() const { return work.k.with(params.shape.k); }
    __device__ Rows<T> rows_v() const { return work.v.with(params.shape.v); }

    // Looks up where a block of keys and values is, a block ahead: the copies would wait for it.
    __device__ void look(const Rows<T>& rows, int key, int end) {
        found.look(rows, key + made_anew(threadIdx.x) / THREADS_PER_ROW, end);
    }

    // Start the copies of a block of keys, of which there may be none left, or of values. What places follow from the
    // thread is made anew, since the scores need the registers.
    __device__ void fetch_keys(const Rows<T>& rows, int key, int end) const {
        const int cols = params.shape.head_dim, thread = made_anew(threadIdx.x);
        if (key < end) fetch_tile<TileK, ACCESS, THREADS>(tile_k(), found.in(rows), key, end, cols, thread);
        cp_async_commit();
    }
    __device__ void fetch_values(int key, int end) const {
        const int cols = params.shape.head_dim_v, thread = made_anew(threadIdx.x);
        fetch_tile<TileV, ACCESS, THREADS>(tile_v(), found.in(rows_v()), key, end, cols, thread);
        cp_async_commit();
    }

    // Where a row goes, which may be one that does not exist.
    __device__ Out* out_row(int row) const {
        const AttentionStrides& s = params.shape.out;
        return static_cast<Out*>(params.call.out) + block.split * params.shape.out_split + block.batch * s.batch +
               (block.q_begin + (kPacked ? query(row) : row)) * s.row + head_of(row) * s.head;
    }

    __device__ void write_lse(int row, float value) const {
        const AttentionShape& shape = params.shape;
        if (row > work.last) return;
        params.call.lse[block.split * shape.lse_split + block.batch * shape.lse_batch + head_of(row) * shape.lse_head +
                        block.q_begin + query(row)] = value;
    }

    __device__ void fetch_q(const AttentionBlock& mine, int first, int last) {
        const AttentionStrides& s = params.shape.q;
        const T* base = static_cast<const T*>(params.call.q) + mine.batch * s.batch + mine.q_begin * s.row +
                        mine.head * s.head;
        const int cols = params.shape.head_dim;
        if constexpr (kPacked) {
            const PackedRows<T> rows = {base, s.row, s.head, s.col, params.shape.packed};
            fetch_rows<TileQ, ACCESS, THREADS>(shared, rows, first, last + 1, cols, threadIdx.x);
        } else {
            const StridedRows<T> rows = {base, s.row, s.col};
            fetch_tile<TileQ, ACCESS, THREADS>(shared, rows, first, last + 1, cols, threadIdx.x);
        }
    }

    // Reads the fragments of q that stay.
    __device__ void keep(Kept& kept) const {
        const ReaderQ reader(warp * WARP_M, lane);
#pragma unroll
        for (int step = 0; step < KEPT; ++step) read_q(kept[step], reader, 0, step);
    }
    __device__ void read_q(uint32_t (&q)[4], const ReaderQ& reader, int i, int step) const {
        reader.read(q, shared + TileQ::panel(step * 16), i, step % (TileQ::PANEL_COLS / 16));
    }

    __device__ void multiply_qk(Scores& scores, const Kept& kept) const {
        const int own = made_anew(lane);
        const ReaderQ reader_q(warp * WARP_M, own);
        const ReaderK reader_k(0, own);
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            uint32_t q[ATOMS_M][4];
#pragma unroll
            for (int i = 0; i < ATOMS_M; ++i) {
                if (step < KEPT) {
#pragma unroll
                    for (int part = 0; part < 4; ++part) q[i][part] = kept[step][part];
                } else {
                    read_q(q[i], reader_q, i, step);
                }
            }
#pragma unroll
            for (int pair = 0; pair < ATOMS_N / 2; ++pair) {
                uint32_t k[4];
                reader_k.read(k, tile_k() + TileK::panel(step * 16), pair, step % (TileK::PANEL_COLS / 16));
#pragma unroll
                for (int i = 0; i < ATOMS_M; ++i) {
                    MmaAtom<T>::multiply(scores[i][2 * pair], q[i], k[0], k[1]);
                    MmaAtom<T>::multiply(scores[i][2 * pair + 1], q[i], k[2], k[3]);
                }
            }
        }
    }

    __device__ void multiply_pv(const Weights& weights) {
        const ReaderV reader_v(0, made_anew(lane));
#pragma unroll
        for (int step = 0; step < BLOCK_N / 16; ++step) {
#pragma unroll
            for (int pair = 0; pair < ATOMS_V / 2; ++pair) {
                uint32_t v[4];
                reader_v.read(v, tile_v() + TileV::panel(pair * 16), pair % (TileV::PANEL_COLS / 16), step);
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
        if (kPlain && params.shape.window_left == kUnlimited) make_scores<false>(scores, first_key, sees_all);
        else make_scores<true>(scores, first_key, sees_all);
    }

    // kBegin: keys may be hidden before those that are seen, too.
    template <bool kBegin> __device__ void make_scores(Scores& scores, int first_key, bool sees_all) const {
        const int own = first_key + lane % 4 * 2;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const int i = query(row_of(r));
            const RowScore<T, kScore> score(params, block, i, head_of(row_of(r)));
            const KeyRange seen = !kPlain && sees_all ? KeyRange{0, block.k_len} : block.visible(params.shape, i);
            const int begin = seen.begin - own, end = seen.end - own;
            for_row(scores, r, [&](float& value, int further) {
                const bool is_seen = further < end && (!kBegin || further >= begin);
                if constexpr (kPlain) value = is_seen ? value : -infinity();
                else value = is_seen ? score(value, own, further) : -infinity();
            });
        }
    }

    // f(score, keys from the thread's first) for all scores of the thread's row r.
    template <class F> static __device__ void for_row(Scores& scores, int r, F f) {
#pragma unroll
        for (int i = 0; i < ATOMS_N * 2; ++i) f(scores[r / 2][i / 2][r % 2 * 2 + i % 2], i / 2 * 8 + i % 2);
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
    __device__ void clear_nonfinite() const {
        uint32_t found = 0;
#pragma unroll 2
        for (int byte = threadIdx.x * 16; byte < TileV::BYTES; byte += THREADS * 16) {
            uint32_t x, y, z, w;
            asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                         : "=r"(x), "=r"(y), "=r"(z), "=r"(w)
                         : "r"(tile_v() + byte)
                         : "memory");
            found |= nonfinite_halves<T>(x) | nonfinite_halves<T>(y) | nonfinite_halves<T>(z) | nonfinite_halves<T>(w);
        }
        if (!__syncthreads_or(found)) return;
        work.has_cleared = true;
#pragma unroll 1
        for (int byte = threadIdx.x * 4; byte < TileV::BYTES; byte += THREADS * 4) {
            uint32_t word;
            load_shared(word, tile_v() + byte);
            const uint32_t bad = nonfinite_halves<T>(word) >> 15;  // 1 in a half to be cleared
            asm volatile("st.shared.b32 [%0], %1;" ::"r"(tile_v() + byte), "r"(word & ~(bad * 0xffff)) : "memory");
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

    // Elements e and e + 1 of each atom, times `factor`, where the row exists: lanes of a quad exchange what they have,
    // so that each writes 16 bytes.
    __device__ void write_quads(Out* row, bool exists, const float (&values)[ATOMS_V][4], int e, float factor) const {
        Out* out = row + made_anew(lane % 4 * 8);
#pragma unroll
        for (int group = 0; group < ATOMS_V / 4; ++group) {
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float(&pair)[4] = values[group * 4 + i];
                words[i] = pack_pair<Out>(pair[e] * factor, pair[e + 1] * factor);
            }
            transpose_quad(words, lane);
            if (exists && group * 32 + lane % 4 * 8 < params.shape.head_dim_v) {
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
                const Out low = narrow<Out>(values[j][e] * factor), high = narrow<Out>(values[j][e + 1] * factor);
                *reinterpret_cast<Vector<Out, 2>*>(out + first_col + j * 8) = {low, high};
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

// Works through a block's tile of rows and every `tiles`-th one after it: of the rows past the last sequence, and of
// one that is longer than was known, there may be any number. k and v are the rows of the block's sequence and head.
template <class Forward, class Rows>
__device__ inline void run_tiles(const AttentionParams& params, AttentionBlock block, Rows k, Rows v, int tiles) {
    extern __shared__ __align__(128) char shared[];
    __shared__ __align__(16) char storage[sizeof(typename Forward::Work)];
    auto& work = *reinterpret_cast<typename Forward::Work*>(storage);
    int tile = block.tile;
    while (tile * Forward::BLOCK_M < block.rows(params.shape)) {
        Forward forward(params, work, shared_address(shared));
        forward.run(block, k, v, tile);
        forward.finish();
        tile = work.first / Forward::BLOCK_M + tiles;
        block = work.block, k = work.k, v = work.v;
        __syncthreads();
    }
}

}  // namespace rawops
