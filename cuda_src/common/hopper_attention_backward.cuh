// The gradients of flash attention on Hopper, a block's whole run: dk and dv of 128 keys stay in registers, while the
// queries that see these keys come by.
//
//   warpgroup 0, one thread    TMA: k, v --> their tiles; q, dout and two numbers a row --> rings of stages
//   warpgroups 1 and 2         64 keys each, transposed so that keys are the rows of their accumulators:
//                              P = exp(k @ q^T * scale - lse), dS = P * (v @ dout^T - delta)
//                              dv += P @ dout, dk += dS @ q                        P and dS from registers
//                              dq = dS^T @ k over the keys of both                 dS from shared memory
//                              dq --> staging --> TMA adds it to the float32 sum in global memory
//
// delta is the sum over the row of dout * out (Dao, 2023, arXiv:2307.08691). The query heads of a group go by one after
// another, so that their sums end up in dk and dv.
#pragma once
#include "hopper_attention_backward_tile.cuh"

namespace rawops {

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

    // Takes the tiles of queries that see the warpgroup's keys; false where there is none. `step` gets the keys' ranges
    // of queries, whether these cut the tile, its first row, whether it is the first one, and its place among all tiles.
    template <class Step> __device__ bool pass(const AttentionBlock& work, int first_key, Step step) {
        const QueryTiles<Tile> tiles(params.shape, work);
        if (tiles.first >= tiles.end) return false;
        const int key = own_key(first_key);
        const KeyRange seen[2] = {seen_from(work, params.shape, key), seen_from(work, params.shape, key + 8)};
        // tiles all of whose rows see all keys of the warpgroup
        const bool is_whole = first_key + 64 <= work.k_len;
        const int whole_first = ceil_div(seen_from(work, params.shape, first_key + 63).begin, Tile::BLOCK_M);
        const int whole_end = is_whole ? seen_from(work, params.shape, first_key).end / Tile::BLOCK_M : 0;
        const int steps = params.shape.group * (tiles.end - tiles.first);
        int tile = tiles.first, place = first_query_tile<Tile>(params, backward, work, work.head) + tile;
        barrier_wait(exchange.keys_barriers.full(0), slot_keys.phase);
        slot_keys.advance();
        const bool is_packed = params.call.cu_seqlens_q;  // then rows of other sequences may follow those of a tile
        const int keys = work.k_len - work.tile * Tile::BLOCK_N;
        if (is_packed && keys < Tile::BLOCK_N) {
            clear_rows<Tile::BLOCK_N>(exchange.shared + (number == 0 ? Tile::K_AT : Tile::V_AT), keys);
        }
#pragma unroll 1
        for (int i = 0; i < steps; ++i) {
            const int queries = work.q_len - tile * Tile::BLOCK_M;
            if (is_packed && queries < Tile::BLOCK_M) {
                barrier_wait(exchange.q_barriers.full(slot.stage), slot.phase);
                barrier_wait(exchange.dout_barriers.full(slot.stage), slot.phase);
                clear_rows<Tile::BLOCK_M>(number == 0 ? q() : dout(), queries);
            }
            step(seen, tile < whole_first || tile >= whole_end, tile * Tile::BLOCK_M, i == 0, place);
            slot.advance();
            ++place;
            if (++tile == tiles.end) {  // on to the next head of the group
                tile = tiles.first;
                place += backward.q_tiles - (tiles.end - tiles.first);
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

    // Makes weights of products with keys: 2 ** (scale * product - lse).
    __device__ void make_weights(Scores& s, const KeyRange (&seen)[2], bool is_masked, int row) const {
        if (is_masked) mask_scores(s, seen, row + thread % 4 * 2);
#pragma unroll
        for (int i = 0; i < Tile::BLOCK_M / 2; i += 4) {
            const float2 lse = load_pair(rows() + i * 8);
            s[i] = exp2_approx(s[i] * params.shape.scale - lse.x);
            s[i + 1] = exp2_approx(s[i + 1] * params.shape.scale - lse.y);
            s[i + 2] = exp2_approx(s[i + 2] * params.shape.scale - lse.x);
            s[i + 3] = exp2_approx(s[i + 3] * params.shape.scale - lse.y);
        }
    }

    // Turns dP into dS = P * (dP - delta).
    __device__ void differentiate(Scores& ds, const Weights& p) const {
#pragma unroll
        for (int i = 0; i < Tile::BLOCK_M / 2; i += 4) {
            const float2 delta = load_pair(rows() + Tile::BLOCK_M * 4 + i * 8);
#pragma unroll
            for (int half = 0; half < 4; half += 2) {
                const float2 weights = widen_pair<T>(p[i / 8][(i + half) / 2 % 4]);
                ds[i + half] = weights.x * (ds[i + half] - delta.x);
                ds[i + half + 1] = weights.y * (ds[i + half + 1] - delta.y);
            }
        }
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
        store(dv, 1, backward.dv, backward.dv_strides, work, key, params.shape.head_dim_v);
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
            const bool is_seen = this->pass(work, first_key, [&](const KeyRange(&seen)[2], bool is_masked, int row,
                                                                 bool is_first, int place) {
                step(dk, dv, seen, is_masked, row, !is_first, place);
            });
            if (!is_seen) {
                this->clear(dk);
                this->clear(dv);
            }
            this->store_dk(dk, work, key);
            this->store_dv(dv, work, key);
        });
        if (!Tile::kInTurn && leads()) tma_store_wait();
    }

private:
    int ds_buffer = 0;
    uint32_t part_phase = 0;

    // One tile of queries, from row `row` on.
    __device__ void step(Gradient& dk, Gradient& dv, const KeyRange (&seen)[2], bool is_masked, int row,
                         bool accumulate, int place) {
        const uint32_t q = this->q(), dout = this->dout(), own = exchange.shared + number * 64 * Tile::SPAN;
        const uint32_t ds = exchange.shared + Tile::DS_AT + ds_buffer * Tile::DS_BYTES;
        Scores s, ds_values;
        Weights p_narrow, ds_narrow;
        barrier_wait(exchange.q_barriers.full(slot.stage), slot.phase);
        this->multiply_keys(s, own + Tile::K_AT, q);
        barrier_wait(exchange.dout_barriers.full(slot.stage), slot.phase);
        this->multiply_keys(ds_values, own + Tile::V_AT, dout);
        wgmma_wait<1>();
        hold(s);
        this->make_weights(s, seen, is_masked, row);
        narrow_weights<T>(p_narrow, s);
        wgmma_wait<0>();
        hold(ds_values);
        this->differentiate(ds_values, p_narrow);
        narrow_weights<T>(ds_narrow, ds_values);
        this->multiply_rows(dv, p_narrow, dout, accumulate);
        // Two buffers take turns: who is here again has seen the other one through with the last but one.
        this->put(ds_narrow, ds, number * 64);
        sync_group<Tile::CONSUMERS * kWarpGroupSize>(1);
        float part[32];
        this->template multiply_part<64>(part, ds, number % Tile::PARTS_M, number / Tile::PARTS_M);
        this->multiply_rows(dk, ds_narrow, q, accumulate);
        wgmma_wait<2>();
        hold(dv);
        if (leads()) barrier_arrive(exchange.dout_barriers.empty(slot.stage));
        wgmma_wait<1>();
        hold(part);
        add_part(part, place);
        wgmma_wait<0>();
        hold(dk);
        if (leads()) barrier_arrive(exchange.q_barriers.empty(slot.stage));
        ds_buffer ^= 1;
    }

    // Adds the part to the sum in global memory, four registers of all threads after another.
    __device__ void add_part(const float (&part)[32], int place) {
        const uint32_t staging = exchange.shared + Tile::PARTS_AT + number * Tile::PART_BYTES;
        if constexpr (Tile::kInTurn) {
            barrier_wait(exchange.part_barriers.empty(number), part_phase ^ 1);
            part_phase ^= 1;
        } else {
            if (leads()) tma_store_wait_read();  // of the tile before
            this->sync();
        }
#pragma unroll
        for (int i = 0; i < 32; i += 4) store_shared(staging + (i / 4 * kWarpGroupSize + thread) * 16, four(&part[i]));
        fence_async_proxy();
        this->sync();
        if (leads()) {
            if constexpr (Tile::kInTurn) {
                barrier_arrive(exchange.part_barriers.full(number));
                return;
            }
            const int64_t at = int64_t(place) * Tile::CONSUMERS + number;
            bulk_add(this->backward.dq + at * (Tile::PART_BYTES / 4), staging, Tile::PART_BYTES);
            tma_store_commit();
        }
    }
};

}  // namespace rawops
