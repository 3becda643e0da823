// The gradients of flash attention on Hopper, a block's whole run: dk and dv of 128 keys stay in registers, while the
// queries that see these keys come by.
//
//   warpgroup 0, one thread    TMA: k, v --> their tiles; q, dout and two numbers a row --> rings of stages
//   warpgroups 1 and 2         64 keys each, transposed so that keys are the rows of their accumulators:
//                              P = exp(k @ q^T * scale - lse), dS = P * (v @ dout^T - delta)
//                              dv += P @ dout, dk += dS @ q                        P and dS from registers
//                              dq = dS^T @ k over the keys of both                 dS from shared memory
//                              dq --> staging, in two places
//   warpgroup 0, two warps     staging --> TMA adds it to the float32 sum in global memory, in turn if asked to
//
// delta is the sum over the row of dout * out (Dao, 2023, arXiv:2307.08691). The query heads of a group go by one after
// another, so that their sums end up in dk and dv.
#pragma once
#include "dropout.cuh"
#include "hopper_attention_backward_tile.cuh"

namespace rawops {

// A tile of queries, as a warpgroup with 64 keys meets it.
struct QueryTile {
    KeyRange seen[2];      // queries that the thread's two keys are seen from
    bool is_masked;        // some query does not see some key
    int first_key, row;    // of the warpgroup and of the tile
    int head, place;       // the place is among all tiles
    bool accumulate;       // it is not the first one
    bool begins, goes_on;  // nothing of it has been made yet; the next one is as it comes
};

// A consumer warpgroup: what those of all tiles do alike.
template <class Tile> class BackwardGroup {
public:
    using T = typename Tile::T;
    using Scores = typename Tile::Scores;
    using Weights = typename Tile::Weights;
    using Gradient = typename Tile::Gradient;

    __device__ BackwardGroup(const AttentionParams& params_, const AttentionBackwardParams& backward_,
                             const BackwardExchange<Tile>& exchange_, int number_)
        : params(params_),
          backward(backward_),
          exchange(exchange_),
          number(number_),
          thread(threadIdx.x % kWarpGroupSize) {}

protected:
    const AttentionParams& params;
    const AttentionBackwardParams& backward;
    const BackwardExchange<Tile>& exchange;
    const int number, thread;
    RingPosition<Tile::STAGES> slot;
    RingPosition<1> slot_keys;
    static constexpr bool kDrops = (Tile::kScore & kScoreDropout) != 0;
    static constexpr bool kCaps = (Tile::kScore & kScoreSoftcap) != 0, kSlopes = (Tile::kScore & kScoreAlibi) != 0;
    static constexpr int kClearedId = 5;  // a named barrier of both warpgroups

    __device__ bool leads() const { return thread == 0; }
    __device__ void sync() const { sync_group<kWarpGroupSize>(2 + number); }
    __device__ uint32_t q() const { return exchange.shared + Tile::Q_AT + slot.stage * Tile::Q_BYTES; }
    __device__ uint32_t dout() const { return exchange.shared + Tile::DOUT_AT + slot.stage * Tile::Q_BYTES; }
    __device__ uint32_t rows() const {  // two numbers a row of the thread's columns
        return exchange.shared + Tile::ROWS_AT + slot.stage * Tile::ROWS_BYTES + thread % 4 * 8;
    }

    // Takes tiles of keys until the producer has no more.
    template <class Run> __device__ void take(Run run) {
        RingPosition<2> slot_work;
#pragma unroll 1
        while (true) {
            const AttentionBlock& work = exchange.work.take(slot_work);
            if (uniform(work.tile) < 0) break;
            run(work);
            sync();
            exchange.work.release(slot_work, leads());
        }
    }

    // The first of the thread's two keys; `first_key` is that of the warpgroup.
    __device__ int own_key(int first_key) const {
        return first_key + thread / kWarpSize * 16 + thread % kWarpSize / 4;
    }

    // Takes the tiles of queries that see the warpgroup's keys; false where there is none.
    template <class Step> __device__ bool pass(const AttentionBlock& work, int first_key, Step step) {
        const QueryTiles<Tile> tiles(params.shape, work);
        if (tiles.first >= tiles.end) return false;
        const int key = own_key(first_key);
        QueryTile now = {{seen_from(work, params.shape, key), seen_from(work, params.shape, key + 8)}};
        now.first_key = first_key;
        now.head = work.head;
        now.place = first_query_tile<Tile>(params, backward, work, work.head) + tiles.first;
        // tiles all of whose rows see all keys of the warpgroup
        const bool is_whole = first_key + 64 <= work.k_len;
        const int whole_first = ceil_div(seen_from(work, params.shape, first_key + 63).begin, Tile::BLOCK_M);
        const int whole_end = is_whole ? seen_from(work, params.shape, first_key).end / Tile::BLOCK_M : 0;
        const int steps = params.shape.group * (tiles.end - tiles.first);
        int tile = tiles.first;
        barrier_wait(exchange.keys_barriers.full(0), slot_keys.phase);
        slot_keys.advance();
        const bool is_packed = params.call.cu_seqlens_q;  // then rows of other sequences may follow those of a tile
        const int keys = work.k_len - work.tile * Tile::BLOCK_N;
        const int cut_tile = is_packed && work.q_len % Tile::BLOCK_M != 0 ? work.q_len / Tile::BLOCK_M : -1;
        if (is_packed && keys < Tile::BLOCK_N) {
            clear_rows<Tile::BLOCK_N>(exchange.shared + (number == 0 ? Tile::K_AT : Tile::V_AT), keys);
        }
#pragma unroll 1
        for (int i = 0; i < steps; ++i) {
            if (__builtin_expect(tile == cut_tile, 0)) {
                barrier_wait(exchange.q_barriers.full(slot.stage), slot.phase);
                barrier_wait(exchange.dout_barriers.full(slot.stage), slot.phase);
                clear_rows<Tile::BLOCK_M>(number == 0 ? q() : dout(), work.q_len % Tile::BLOCK_M);
            }
            now.is_masked = tile < whole_first || tile >= whole_end;
            now.row = tile * Tile::BLOCK_M;
            now.accumulate = i > 0;
            now.begins = i == 0 || tile == cut_tile;
            const int next = tile + 1 == tiles.end ? tiles.first : tile + 1;
            now.goes_on = i + 1 < steps && next != cut_tile;
            step(now);
            slot.advance();
            ++now.place;
            if ((tile = next) == tiles.first) {  // on to the next head of the group
                now.place += backward.q_tiles - (tiles.end - tiles.first);
                ++now.head;
            }
        }
        if (leads()) barrier_arrive(exchange.keys_barriers.empty(0));
        return true;
    }

    // Puts zeros from row `valid` on; what lies there may be no number. The other warpgroup does the same elsewhere.
    template <int ROWS> __device__ void clear_rows(uint32_t tile, int valid) const {
        constexpr uint32_t kZeros[4] = {};
        constexpr int CHUNKS = Tile::SPAN / 16;
#pragma unroll 1
        for (int i = thread; i < (ROWS - valid) * CHUNKS * Tile::BOXES; i += kWarpGroupSize) {
            const int row = valid + i / CHUNKS % (ROWS - valid), box = i / CHUNKS / (ROWS - valid);
            store_quad(tile + (box * ROWS + row) * Tile::SPAN + i % CHUNKS * 16, kZeros);
        }
        fence_async_proxy();
        sync_group<Tile::CONSUMERS * kWarpGroupSize>(kClearedId);
    }

    // Makes weights of products with keys, narrow for the next ones: `p` as dv takes it, 0 where dropout took it;
    // `by_score` as dS takes it, with the derivative of the score, and with the sign bit where dropout took it.
    __device__ void make_weights(Scores& s, Weights& p, Weights& by_score, const AttentionBlock& work,
                                 const QueryTile& queries) const {
        if constexpr (Tile::kScore != 0) {
            make_other_weights(s, p, by_score, work, queries);
        } else {
            if (queries.is_masked) {
                const int column = queries.row + thread % 4 * 2;
                mask_scores(s, 0, queries.seen[0], column);
                mask_scores(s, 1, queries.seen[1], column);
            }
#pragma unroll
            for (int i = 0; i < Tile::BLOCK_M / 2; i += 4) {
                const float2 lse = load_pair(rows() + i * 8);
                s[i] = exp2_fast(s[i] * params.shape.scale - lse.x);
                s[i + 1] = exp2_fast(s[i + 1] * params.shape.scale - lse.y);
                s[i + 2] = exp2_fast(s[i + 2] * params.shape.scale - lse.x);
                s[i + 3] = exp2_fast(s[i + 3] * params.shape.scale - lse.y);
            }
            narrow_weights<T>(by_score, s);
        }
        if constexpr (!kCaps) keep(p, by_score);
    }

    __device__ void make_other_weights(const Scores& s, Weights& p, Weights& by_score, const AttentionBlock& work,
                                       const QueryTile& queries) const {
        const AttentionShape& shape = params.shape;
        const int lane = thread % kWarpSize, key = own_key(queries.first_key);
        float slope = 0;
        if constexpr (kSlopes) slope = params.call.alibi_slopes[work.batch * shape.alibi_batch + queries.head] * kLog2e;
        const Dropout dropout(shape, work.batch, queries.head);
        DropoutNumbers numbers;
#pragma unroll
        for (int atom = 0; atom < Tile::BLOCK_M / 8; ++atom) {
            const float2 lse = load_pair(rows() + atom * 32);
            const int first = queries.row + atom * 8;
            if constexpr (kDrops) {
                if (atom % 2 == 0) numbers = dropout.of_keys(first, queries.first_key + thread / kWarpSize * 16, lane);
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const KeyRange& seen = queries.seen[half];
                float weights[2], others[2];
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const int query = first + lane % 4 * 2 + j;
                    float score = s[atom * 4 + half * 2 + j] * shape.scale, derivative = 1;
                    if constexpr (kCaps) {
                        const float capped = tanh_fast(score);
                        score = shape.softcap * capped;
                        derivative = 1 - capped * capped;
                    }
                    if constexpr (kSlopes) {
                        score -= slope * fabsf(float(query + work.k_len - work.q_len - key - half * 8));
                    }
                    if (queries.is_masked && !(query >= seen.begin && query < seen.end)) score = -infinity();
                    weights[j] = exp2_fast(score - (j == 0 ? lse.x : lse.y));
                    others[j] = weights[j] * derivative;
                    if (kDrops && !numbers.keeps(atom % 2, half * 2 + j)) {
                        weights[j] = 0;
                        others[j] = -others[j];
                    }
                }
                if constexpr (kCaps) p[atom / 2][atom % 2 * 2 + half] = narrow_pair<T>(weights[0], weights[1]);
                by_score[atom / 2][atom % 2 * 2 + half] = narrow_pair<T>(others[0], others[1]);
            }
        }
    }

    // Without a softcap the weights of dv are the others, but for 0 where the sign is.
    static __device__ void keep(Weights& p, const Weights& by_score) {
#pragma unroll
        for (int i = 0; i < Tile::BLOCK_M / 4; ++i) {
            const uint32_t pair = by_score[i / 4][i % 4], signs = pair >> 15 & 0x00010001;
            p[i / 4][i % 4] = kDrops ? pair & ~(signs * 0xffff) : pair;
        }
    }

    // Turns dP into dS = P * (dP - delta).
    __device__ void differentiate(Scores& ds, const Weights& by_score) const {
#pragma unroll
        for (int i = 0; i < Tile::BLOCK_M / 2; i += 2) {
            const float2 delta = load_pair(rows() + Tile::BLOCK_M * 4 + i / 4 * 32);
            const float2 weights = widen_pair<T>(by_score[i / 8][i / 2 % 4]);
            ds[i] = by_product(weights.x, ds[i], delta.x);
            ds[i + 1] = by_product(weights.y, ds[i + 1], delta.y);
        }
    }
    __device__ float by_product(float weight, float value, float delta) const {
        if constexpr (!kDrops) return weight * (value - delta);
        const float kept = __float_as_int(weight) < 0 ? 0 : value * params.shape.dropout.scale;
        return fabsf(weight) * (kept - delta);
    }

    // Issues s = keys @ rows^T, of 64 keys or, for dout, their values.
    __device__ void multiply_keys(Scores& s, uint32_t keys, uint32_t rows) const {
        using Operand = typename Tile::OperandK;
        const uint64_t a = Operand::descriptor(keys), b = Operand::descriptor(rows);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < Tile::D / 16; ++step) {
            const int box = step / 4, within = step % 4 * 32;
            Wgmma<Tile::BLOCK_M>::template multiply<T, true, true>(
                s, a + (box * Tile::BLOCK_N * Tile::SPAN + within >> 4),
                b + (box * Tile::BLOCK_M * Tile::SPAN + within >> 4), step > 0);
        }
        wgmma_commit();
    }

    // Issues gradient += weights @ rows.
    __device__ void multiply_rows(Gradient& gradient, const Weights& weights, uint32_t rows, bool accumulate) const {
        using Operand = typename Tile::OperandRows;
        const uint64_t b = Operand::descriptor(rows);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < Tile::BLOCK_M / 16; ++step) {
            Wgmma<Tile::D>::template multiply<T, false>(gradient, weights[step], Operand::advance(b, 0, step),
                                                 step > 0 || accumulate);
        }
        wgmma_commit();
    }

    // Puts dS into its tile in shared memory, whose rows are keys; these from row `first` on.
    __device__ void put(const Weights& ds_narrow, uint32_t ds, int first) const {
        const int lane = thread % kWarpSize, key = first + thread / kWarpSize * 16 + lane % 16;
#pragma unroll
        for (int step = 0; step < Tile::BLOCK_M / 16; ++step) {
            const int box = step / 4, chunk = step % 4 * 2 + lane / 16;
            stmatrix(ds + box * Tile::BLOCK_N * Tile::SPAN + swizzled_offset<Tile::SPAN>(key, chunk), ds_narrow[step]);
        }
        fence_async_proxy();
    }

    // Issues 64 rows of dq = dS^T @ k, from box `box` of the head's columns on.
    template <int COLS>
    __device__ void multiply_part(float (&part)[COLS / 2], uint32_t ds, int rows_64, int box) const {
        using Operand = typename Tile::OperandKeys;
        const uint64_t a = Operand::descriptor(ds), b = Operand::descriptor(exchange.shared + Tile::K_AT);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < Tile::BLOCK_N / 16; ++step) {
            Wgmma<COLS>::template multiply<T, false, false>(part, Operand::advance(a, rows_64, step),
                                                            Operand::advance(b, box, step), step > 0);
        }
        wgmma_commit();
    }

    __device__ void store(const Gradient& gradient, float scale, void* to, const AttentionStrides& strides,
                          const AttentionBlock& work, int key, int cols) const {
        const float factor[2] = {scale, scale};
        T* out = static_cast<T*>(to) + work.batch * strides.batch + work.kv_head * strides.head +
                 work.k_begin * strides.row;
        store_rows(gradient, factor, out, strides.row, key, work.k_len, cols, thread % kWarpSize);
    }
    __device__ void store_dk(const Gradient& dk, const AttentionBlock& work, int key) const {
        store(dk, backward.softmax_scale, backward.dk, backward.dk_strides, work, key, params.shape.head_dim);
    }
    __device__ void store_dv(const Gradient& dv, const AttentionBlock& work, int key) const {
        const float scale = kDrops ? params.shape.dropout.scale : 1;
        store(dv, scale, backward.dv, backward.dv_strides, work, key, params.shape.head_dim_v);
    }
    static __device__ void clear(Gradient& gradient) {
#pragma unroll
        for (int i = 0; i < Tile::D / 2; ++i) gradient[i] = 0;
    }
};

// Heads of up to 128: both warpgroups do the same, each for 64 keys.
template <class Tile> class BackwardConsumer : BackwardGroup<Tile> {
    using Group = BackwardGroup<Tile>;
    using typename Group::Gradient;
    using typename Group::Scores;
    using typename Group::T;
    using typename Group::Weights;
    using Group::exchange, Group::number, Group::thread, Group::slot, Group::leads;

public:
    using Group::Group;

    __device__ void run() {
        this->take([&](const AttentionBlock& work) {
            const int first_key = work.tile * Tile::BLOCK_N + number * 64, key = this->own_key(first_key);
            Gradient dk, dv;
            const bool is_seen =
                this->pass(work, first_key, [&](const QueryTile& queries) { step(dk, dv, work, queries); });
            if (!is_seen) {
                this->clear(dk);
                this->clear(dv);
            }
            this->store_dk(dk, work, key);
            this->store_dv(dv, work, key);
        });
    }

private:
    static constexpr bool kLate = Tile::kScore != 0;  // such weights take the registers of dP, which has to wait

    int ds_buffer = 0;
    RingPosition<kAddingWarps> slot_part;

    // One tile of queries.
    __device__ void step(Gradient& dk, Gradient& dv, const AttentionBlock& work, const QueryTile& queries) {
        const uint32_t q = this->q(), dout = this->dout(), own = exchange.shared + number * 64 * Tile::SPAN;
        const uint32_t ds = exchange.shared + Tile::DS_AT + ds_buffer * Tile::DS_BYTES;
        Scores s, ds_values;
        Weights p, by_score, ds_narrow;
        barrier_wait(exchange.q_barriers.full(slot.stage), slot.phase);
        this->multiply_keys(s, own + Tile::K_AT, q);
        if constexpr (!kLate) {
            barrier_wait(exchange.dout_barriers.full(slot.stage), slot.phase);
            this->multiply_keys(ds_values, own + Tile::V_AT, dout);
        }
        wgmma_wait<(kLate ? 0 : 1)>();
        hold(s);
        this->make_weights(s, p, by_score, work, queries);
        if constexpr (kLate) {
            barrier_wait(exchange.dout_barriers.full(slot.stage), slot.phase);
            this->multiply_keys(ds_values, own + Tile::V_AT, dout);
        }
        wgmma_wait<0>();
        hold(ds_values);
        this->differentiate(ds_values, by_score);
        narrow_weights<T>(ds_narrow, ds_values);
        this->multiply_rows(dv, p, dout, queries.accumulate);
        // Two buffers take turns: who is here again has seen the other one through with the last but one.
        this->put(ds_narrow, ds, number * 64);
        sync_group<Tile::CONSUMERS * kWarpGroupSize>(1);
        float part[32];
        this->template multiply_part<64>(part, ds, number % Tile::PARTS_M, number / Tile::PARTS_M);
        this->multiply_rows(dk, ds_narrow, q, queries.accumulate);
        wgmma_wait<2>();
        hold(dv);
        if (leads()) barrier_arrive(exchange.dout_barriers.empty(slot.stage));
        wgmma_wait<1>();
        hold(part);
        add_part(part);
        wgmma_wait<0>();
        hold(dk);
        if (leads()) barrier_arrive(exchange.q_barriers.empty(slot.stage));
        ds_buffer ^= 1;
    }

    // Hands the part to the warp that adds it to the sum, four registers of all threads after another.
    __device__ void add_part(const float (&part)[32]) {
        const uint32_t parts = exchange.shared + Tile::PARTS_AT + slot_part.stage * Tile::CONSUMERS * Tile::PART_BYTES;
        const uint32_t own = parts + number * Tile::PART_BYTES + thread * 16;
        barrier_wait(exchange.part_barriers.empty(slot_part.stage), slot_part.phase ^ 1);
#pragma unroll
        for (int i = 0; i < 32; i += 4) store_shared(own + i / 4 * kWarpGroupSize * 16, four(&part[i]));
        fence_async_proxy();
        this->sync();
        if (leads()) barrier_arrive(exchange.part_barriers.full(slot_part.stage));
        slot_part.advance();
    }
};

// Of the warps that see to additions, this one takes the consumers' parts of every second tile of dq to global memory.
template <class Tile>
__device__ inline void add_parts(const AttentionParams& params, const AttentionBackwardParams& backward,
                                 const BackwardExchange<Tile>& exchange, int which) {
    constexpr int BYTES = Tile::CONSUMERS * Tile::PART_BYTES;
    const uint32_t parts = exchange.shared + Tile::PARTS_AT + which * BYTES;
    RingPosition<kAddingWarps> slot;
    serve_additions(params, backward, exchange, [&](int place, int tile) {
        if (slot.stage == which && threadIdx.x % kWarpSize == 0) {
            int* turn = backward.turns + 2 * place;
            barrier_wait(exchange.part_barriers.full(which), slot.phase);
            if constexpr (Tile::kInTurn) {
                await_turn(turn, tile);
                fence_async_proxy_everywhere();
            }
            bulk_add(backward.dq + int64_t(place) * (BYTES / 4), parts, BYTES);
            tma_store_commit();
            tma_store_wait_read();
            barrier_arrive(exchange.part_barriers.empty(which));
            if constexpr (Tile::kInTurn) {
                tma_store_wait();
                fence_async_proxy_everywhere();
                end_turn(turn);
            }
        }
        slot.advance();
    });
    tma_store_wait();
}

}  // namespace rawops
