// The gradients of attention with mma.sync: what is differentiated stays in registers, the other side passes by.
//
// With P = exp(scores - lse), dP = dout @ v^T, delta = the sum over a row of dout * out and dS = P * (dP - delta):
//
//   keys stay, queries pass:   dv += P^T @ dout, dk += dS^T @ q
//   queries stay, keys pass:   dq += dS @ k
//
// Scores and dP are made twice, which costs two products of seven, and in return nothing is added from two blocks:
// no atomics, no float32 copy of dq, the same bits each time. (Dao, 2023, arXiv:2307.08691)
#pragma once
#include "attention_softmax.cuh"
#include "attention_tile.cuh"
#include "dropout.cuh"
#include "mma.cuh"

namespace rawops {

struct GradientParams {
    AttentionParams forward;  // with the out and lse that came of it
    const void* dout;
    void *dq, *dk, *dv;
    float* delta;  // laid out as lse
    AttentionStrides dout_strides, dq_strides, dk_strides, dv_strides;
    int key_tiles;  // of a KV head and sequence
    float softmax_scale;
};

// Whose gradients a kernel makes.
constexpr int kOfQueries = 0, kOfKeys = 1, kOfValues = 2;  // the last two as bits

// One tile of keys of one sequence and KV head; the fields are those of AttentionBlock.
struct KeyBlock {
    int batch, kv_head, tile, q_begin, q_len, k_begin, k_len;

    __device__ KeyBlock(const GradientParams& params, int index) {
        const AttentionCall& call = params.forward.call;
        const AttentionShape& shape = params.forward.shape;
        const int kv_heads = shape.heads / shape.group;
        tile = index % params.key_tiles;
        index /= params.key_tiles;
        kv_head = index % kv_heads;
        batch = index / kv_heads;
        q_begin = k_begin = 0;
        q_len = shape.seqlen_q;
        k_len = shape.seqlen_k;
        if (call.cu_seqlens_k) {  // one sequence more: the keys past the last one, which no query sees
            const bool is_last = batch >= shape.batches;
            k_begin = clamp(call.cu_seqlens_k[batch], 0, shape.total_keys);
            const int end = is_last ? shape.total_keys : call.cu_seqlens_k[batch + 1];
            k_len = clamp(end, k_begin, shape.total_keys) - k_begin;
            q_begin = is_last ? 0 : clamp(call.cu_seqlens_q[batch], 0, shape.total_q);
            q_len = is_last ? 0 : clamp(call.cu_seqlens_q[batch + 1], q_begin, shape.total_q) - q_begin;
            if (is_last) batch = 0;
        }
    }

    // Queries that see any of the keys from `first` to `last`.
    __device__ KeyRange queries(const AttentionShape& shape, int first, int last) const {
        const int64_t shift = k_len - q_len, zero = 0, all = q_len;
        const int64_t begin = first - shift - shape.window_right, end = last - shift + shape.window_left + 1;
        return {int(begin > zero ? begin : zero), int(end < all ? end : all)};
    }
};

template <class T_, class Tile, int ACCESS, int kScore, int kOf> struct AttentionGradient {
    using T = T_;
    static constexpr bool kKeysStay = kOf != kOfQueries;
    static constexpr bool kFirst = (kOf & kOfValues) == 0 || (kOf & kOfKeys) != 0;  // dq or dk is wanted
    static constexpr bool kSecond = (kOf & kOfValues) != 0;
    static constexpr bool kDrops = (kScore & kScoreDropout) != 0, kPlain = (kScore & ~kScoreDropout) == 0;
    static constexpr int BLOCK_M = Tile::BLOCK_M, BLOCK_N = Tile::BLOCK_N, THREADS = Tile::THREADS;
    static constexpr int D = Tile::HEAD_DIM, DV = Tile::HEAD_DIM_V, ATOMS_N = BLOCK_N / 8;
    static_assert(Tile::WARP_M == 16, "a warp has 16 rows that stay");
    using Stay = RowTile<T, BLOCK_M, D>;      // q or k
    using StayV = RowTile<T, BLOCK_M, DV>;    // dout or v
    using Pass = RowTile<T, BLOCK_N, D>;      // k or q
    using PassV = RowTile<T, BLOCK_N, DV>;    // v or dout
    using Products = float[ATOMS_N][4];
    using Fragments = uint32_t[ATOMS_N / 2][4];
    static constexpr int STAY_BYTES = Stay::BYTES + StayV::BYTES;
    static constexpr int STAGE_BYTES = Pass::BYTES + PassV::BYTES + 2 * BLOCK_N * 4;  // lse and delta of queries

    const GradientParams& params;
    const uint32_t shared;
    const int warp, lane;
    float acc[kFirst ? D / 8 : 1][4], acc_v[kSecond ? DV / 8 : 1][4];

    __device__ AttentionGradient(const GradientParams& params_, uint32_t shared_)
        : params(params_),
          shared(shared_),
          warp(threadIdx.x / kWarpSize),
          lane(threadIdx.x % kWarpSize),
          acc{},
          acc_v{} {}

    struct Rows {
        StridedRows<T> rows, rows_v;
    };

    // Of q and dout, and of k and v.
    template <class Block> __device__ Rows queries(const Block& block, int head) const {
        const AttentionStrides &q = params.forward.shape.q, &d = params.dout_strides;
        const T* from = static_cast<const T*>(params.forward.call.q) + block.batch * q.batch + head * q.head;
        const T* dout = static_cast<const T*>(params.dout) + block.batch * d.batch + head * d.head;
        return {{from + block.q_begin * q.row, q.row, q.col}, {dout + block.q_begin * d.row, d.row, d.col}};
    }
    template <class Block> __device__ Rows keys(const Block& block) const {
        const AttentionStrides &k = params.forward.shape.k, &v = params.forward.shape.v;
        const T* from = static_cast<const T*>(params.forward.call.k) + block.batch * k.batch + block.kv_head * k.head;
        const T* from_v = static_cast<const T*>(params.forward.call.v) + block.batch * v.batch + block.kv_head * v.head;
        return {{from + block.k_begin * k.row, k.row, k.col}, {from_v + block.k_begin * v.row, v.row, v.col}};
    }

    __device__ void fetch_stay(const Rows& rows, int first, int end) const {
        const AttentionShape& shape = params.forward.shape;
        fetch_rows<Stay, ACCESS, THREADS>(shared, rows.rows, first, end, shape.head_dim, threadIdx.x);
        fetch_rows<StayV, ACCESS, THREADS>(shared + Stay::BYTES, rows.rows_v, first, end, shape.head_dim_v,
                                           threadIdx.x);
    }

    // Works through rows `range` of what passes by, for one query head. The rows that stay begin at `first`.
    template <class Block>
    __device__ void run(const Block& block, const Rows& pass, KeyRange range, int first, int head) {
        const int pass_end = kKeysStay ? block.q_len : block.k_len, begin = range.begin / BLOCK_N * BLOCK_N;
        auto fetch = [&](int at, int stage) {
            if (at < range.end) {
                const AttentionShape& shape = params.forward.shape;
                const uint32_t tile = stage_at(stage);
                fetch_rows<Pass, ACCESS, THREADS>(tile, pass.rows, at, pass_end, shape.head_dim, threadIdx.x);
                fetch_rows<PassV, ACCESS, THREADS>(tile + Pass::BYTES, pass.rows_v, at, pass_end, shape.head_dim_v,
                                                   threadIdx.x);
                if (kKeysStay && threadIdx.x < BLOCK_N) {
                    const float2 numbers = numbers_of(block, at + threadIdx.x, head);
                    const uint32_t to = tile + Pass::BYTES + PassV::BYTES + threadIdx.x * 8;
                    asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(to), "f"(numbers.x), "f"(numbers.y)
                                 : "memory");
                }
            }
            cp_async_commit();
        };
        float2 own[2];  // lse and delta of the rows that stay, if those are queries
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (!kKeysStay) own[half] = numbers_of(block, first + warp * 16 + half * 8 + lane / 4, head);
        }
        fetch(begin, 0);
        int stage = 0;
#pragma unroll 1
        for (int at = begin; at < range.end; at += BLOCK_N, stage ^= 1) {
            cp_async_wait<0>();
            __syncthreads();  // the stage is visible to all, and all have left the other one, which is filled next
            fetch(at + BLOCK_N, stage ^ 1);
            step(block, stage_at(stage), at, first, head, own);
        }
        __syncthreads();
    }

    // Writes rows `first` to before `end`.
    __device__ void write(void* to, const AttentionStrides& strides, int64_t offset, int first, int end) const {
        write_rows(static_cast<T*>(to) + offset, strides, acc, params.forward.shape.head_dim, params.softmax_scale,
                   first, end);
    }
    __device__ void write_v(void* to, const AttentionStrides& strides, int64_t offset, int first, int end) const {
        write_rows(static_cast<T*>(to) + offset, strides, acc_v, params.forward.shape.head_dim_v,
                   kDrops ? params.forward.shape.dropout.scale : 1.0f, first, end);
    }

private:
    __device__ uint32_t stage_at(int stage) const { return shared + STAY_BYTES + stage * STAGE_BYTES; }

    // lse * log2(e) and delta of a query. Where there is none, or it sees no key: what makes its weights zero.
    template <class Block> __device__ float2 numbers_of(const Block& block, int query, int head) const {
        if (query >= block.q_len) return {infinity(), 0.0f};
        const AttentionShape& shape = params.forward.shape;
        const int64_t at = block.batch * shape.lse_batch + head * shape.lse_head + block.q_begin + query;
        const float lse = params.forward.call.lse[at];
        return {lse == -infinity() ? infinity() : lse * kLog2e, params.delta[at]};
    }

    template <class Block>
    __device__ void step(const Block& block, uint32_t tile, int at, int first, int head, const float2 (&own)[2]) {
        Products p = {}, ds = {};
        multiply<Stay, Pass>(p, shared, tile);
        if constexpr (kFirst) multiply<StayV, PassV>(ds, shared + Stay::BYTES, tile + Pass::BYTES);
        const uint32_t numbers = tile + Pass::BYTES + PassV::BYTES;
        if (sees_all(block, at, first + warp * 16)) {
            differentiate<true>(block, p, ds, numbers, at, first, head, own);
        } else {
            differentiate<false>(block, p, ds, numbers, at, first, head, own);
        }
        Fragments fragments;
        if constexpr (kSecond) {
            pack(fragments, p);
            accumulate<PassV>(acc_v, fragments, tile + Pass::BYTES);
        }
        if constexpr (kFirst) {
            pack(fragments, ds);
            accumulate<Pass>(acc, fragments, tile);
        }
    }

    // Products of rows of two tiles.
    template <class A, class B> __device__ void multiply(Products& out, uint32_t tile_a, uint32_t tile_b) const {
        const FragmentReader<T, typename A::Panel, true> reader_a(warp * 16, lane);
        const FragmentReader<T, typename B::Panel, true, true> reader_b(0, lane);
#pragma unroll
        for (int k = 0; k < A::COLS / 16; ++k) {
            uint32_t a[4], b[4];
            reader_a.read(a, tile_a + A::panel(k * 16), 0, k % (A::PANEL_COLS / 16));
#pragma unroll
            for (int pair = 0; pair < ATOMS_N / 2; ++pair) {
                reader_b.read(b, tile_b + B::panel(k * 16), pair, k % (B::PANEL_COLS / 16));
                MmaAtom<T>::multiply(out[2 * pair], a, b[0], b[1]);
                MmaAtom<T>::multiply(out[2 * pair + 1], a, b[2], b[3]);
            }
        }
    }

    // out += fragments @ tile, whose rows are those that pass by.
    template <class B, int ATOMS>
    __device__ void accumulate(float (&out)[ATOMS][4], const Fragments& fragments, uint32_t tile) const {
        const FragmentReader<T, typename B::Panel, false, true> reader(0, lane);
#pragma unroll
        for (int step = 0; step < BLOCK_N / 16; ++step) {
#pragma unroll
            for (int pair = 0; pair < ATOMS / 2; ++pair) {
                uint32_t b[4];
                reader.read(b, tile + B::panel(pair * 16), pair % (B::PANEL_COLS / 16), step);
                MmaAtom<T>::multiply(out[2 * pair], fragments[step], b[0], b[1]);
                MmaAtom<T>::multiply(out[2 * pair + 1], fragments[step], b[2], b[3]);
            }
        }
    }

    static __device__ void pack(Fragments& fragments, const Products& values) {
#pragma unroll
        for (int part = 0; part < 2 * ATOMS_N; ++part) {
            const float(&w)[4] = values[part / 2];
            fragments[part / 4][part % 4] = pack_pair<T>(w[part % 2 * 2], w[part % 2 * 2 + 1]);
        }
    }

    // Whether each query sees each key, of what passes from `at` on and of the warp's rows that stay, from `row` on.
    template <class Block> __device__ bool sees_all(const Block& block, int at, int row) const {
        const AttentionShape& shape = params.forward.shape;
        const int i = kKeysStay ? at : row, last = i + (kKeysStay ? BLOCK_N : 16) - 1;
        const int key = kKeysStay ? row : at, last_key = key + (kKeysStay ? 16 : BLOCK_N) - 1;
        const int shift = block.k_len - block.q_len;
        return key - last - shift >= -shape.window_left && last_key - i - shift <= shape.window_right &&
               last_key < block.k_len && last < block.q_len;
    }

    // Turns q.k into weights, and dP into the gradient of q.k; both are zero for what a query does not see. kWhole:
    // that is nothing.
    template <bool kWhole, class Block>
    __device__ void differentiate(const Block& block, Products& p, Products& ds, uint32_t numbers, int at, int first,
                                  int head, const float2 (&own)[2]) const {
        const AttentionShape& shape = params.forward.shape;
        const int shift = block.k_len - block.q_len, row = first + warp * 16 + lane / 4, col = at + lane % 4 * 2;
        DropoutNumbers dropped;
#pragma unroll
        for (int j = 0; j < ATOMS_N; ++j) {
            if constexpr (kDrops) {
                if (j % 2 == 0) dropped = numbers_of_atoms(block, head, first + warp * 16, at + j * 8);
            }
            float2 passing[2];
            if constexpr (kKeysStay) {
                const uint32_t from = numbers + (j * 8 + lane % 4 * 2) * 8;
                asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
                             : "=f"(passing[0].x), "=f"(passing[0].y), "=f"(passing[1].x), "=f"(passing[1].y)
                             : "r"(from)
                             : "memory");
            }
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int stays = row + e / 2 * 8, passes = col + j * 8 + e % 2;
                const int i = kKeysStay ? passes : stays, key = kKeysStay ? stays : passes;
                const float2 number = kKeysStay ? passing[e % 2] : own[e / 2];
                const int distance = key - i - shift;
                const bool is_seen = kWhole || (distance >= -shape.window_left && distance <= shape.window_right &&
                                     key < block.k_len && i < block.q_len);
                float weight = 0.0f, slope = 1.0f;
                if (kPlain) {
                    weight = exp2_fast(p[j][e] * shape.scale - number.x);
                } else if (is_seen) {
                    const RowScore<T, kScore> score(params.forward, block, i, head);
                    weight = exp2_fast(score(p[j][e], key) - number.x);
                    slope = score.derivative(p[j][e]);
                }
                const bool is_kept = !kDrops || dropped.keeps(j % 2, e);
                p[j][e] = is_seen && is_kept ? weight : 0.0f;
                if constexpr (kFirst) {
                    if (kDrops) ds[j][e] = is_kept ? ds[j][e] * shape.dropout.scale : 0.0f;
                    ds[j][e] = is_seen ? weight * (ds[j][e] - number.y) * slope : 0.0f;
                }
            }
        }
    }

    // What dropout needs of two atoms, whose rows are those that stay.
    template <class Block>
    __device__ DropoutNumbers numbers_of_atoms(const Block& block, int head, int stays, int passes) const {
        const Dropout dropout(params.forward.shape, block.batch, head);
        if constexpr (kKeysStay) return dropout.of_keys(passes, stays, lane);
        return dropout.of_queries(stays, passes, lane);
    }

    template <int ATOMS>
    __device__ void write_rows(T* out, const AttentionStrides& strides, const float (&values)[ATOMS][4], int cols,
                               float factor, int first, int end) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = first + warp * 16 + half * 8 + lane / 4, col = lane % 4 * 2;
            if (row >= end) continue;
            T* to = out + row * strides.row + col * strides.col;
#pragma unroll
            for (int j = 0; j < ATOMS; ++j, to += 8 * strides.col) {
                const int left = cols - col - j * 8;
                if (left > 0) to[0] = narrow<T>(values[j][half * 2] * factor);
                if (left > 1) to[strides.col] = narrow<T>(values[j][half * 2 + 1] * factor);
            }
        }
    }
};

}  // namespace rawops
