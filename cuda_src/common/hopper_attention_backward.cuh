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
#include "hopper_attention.cuh"

namespace rawops {

template <class T_, int D_, int BLOCK_M_, int STAGES_> struct HopperAttentionBackward {
    using T = T_;
    static constexpr int D = D_, BLOCK_M = BLOCK_M_, BLOCK_N = 128, STAGES = STAGES_, CONSUMERS = 2;
    static constexpr int THREADS = (1 + CONSUMERS) * kWarpGroupSize;
    static constexpr int BOX = 64, BOXES = D / BOX, SPAN = 128;
    using OperandK = WgmmaOperand<true, BOX>;             // k, v, q, dout along the head
    using OperandRows = WgmmaOperand<false, BLOCK_M>;     // q and dout along the rows
    using OperandKeys = WgmmaOperand<false, BLOCK_N>;     // k and dS along the keys
    using Scores = float[BLOCK_M / 2];
    using Gradient = float[D / 2];
    using Weights = uint32_t[BLOCK_M / 16][4];
    // A consumer makes 64 rows by 64 columns of dq.
    static constexpr int PARTS_M = BLOCK_M / 64, PARTS_D = D / 64;
    static_assert(PARTS_M * PARTS_D == CONSUMERS, "each consumer makes one part of dq");

    static constexpr int K_BYTES = BLOCK_N * D * 2, Q_BYTES = BLOCK_M * D * 2, DS_BYTES = BLOCK_N * BLOCK_M * 2;
    static constexpr int PART_BYTES = 64 * 64 * 4, ROWS_BYTES = 2 * BLOCK_M * 4;  // dq of a consumer; lse and delta
    static constexpr int K_AT = 0, V_AT = K_BYTES, Q_AT = 2 * K_BYTES, DOUT_AT = Q_AT + STAGES * Q_BYTES;
    static constexpr int DS_AT = DOUT_AT + STAGES * Q_BYTES, PARTS_AT = DS_AT + 2 * DS_BYTES;
    static constexpr int ROWS_AT = PARTS_AT + CONSUMERS * PART_BYTES, BARRIERS_AT = ROWS_AT + STAGES * ROWS_BYTES;
    static constexpr int WORK_AT = BARRIERS_AT + 2 * RingBarriers<STAGES>::BYTES + 48;  // barriers of k, v and the slots
};

struct AttentionBackwardMaps {
    TensorMap q, k, v, dout;  // axes: 1, sequence, head, row, column
};

struct AttentionBackwardParams {
    void *dk, *dv;
    float* dq;         // for each sequence, head and tile of queries, its parts as `store_part` writes them
    const float* rows; // for each sequence, head and tile of queries: lse * log2(e) of its rows, then delta
    AttentionStrides dk_strides, dv_strides;
    int q_tiles;       // of a head and sequence
    float softmax_scale;
};

// Queries that see key `j`.
__device__ inline KeyRange seen_from(const AttentionBlock& block, const AttentionShape& shape, int j) {
    const int same = j - (block.k_len - block.q_len);
    KeyRange all = {max_of(same - shape.window_right, 0), min_of(same + shape.window_left + 1, block.q_len)};
    if (j >= block.k_len) all.end = 0;
    return all;
}

// The tiles of queries that a tile of keys is seen from, [first, end).
template <class Tile> struct QueryTiles {
    int first, end;

    __device__ QueryTiles(const AttentionShape& shape, const AttentionBlock& block) {
        const int key = block.tile * Tile::BLOCK_N, last = min_of(key + Tile::BLOCK_N, block.k_len) - 1;
        first = seen_from(block, shape, key).begin / Tile::BLOCK_M;
        end = last < key ? 0 : ceil_div(max_of(seen_from(block, shape, last).end, 0), Tile::BLOCK_M);
    }
};

template <class Tile> struct BackwardExchange {
    uint32_t shared;
    RingBarriers<Tile::STAGES> q_barriers, dout_barriers;
    RingBarriers<1> keys_barriers;
    WorkSlots work;

    __device__ explicit BackwardExchange(char* memory)
        : shared(shared_address(memory)),
          q_barriers{shared + Tile::BARRIERS_AT},
          dout_barriers{q_barriers.base + q_barriers.BYTES},
          keys_barriers{dout_barriers.base + dout_barriers.BYTES},
          work{reinterpret_cast<AttentionBlock*>(memory + Tile::WORK_AT), {keys_barriers.base + keys_barriers.BYTES}} {}

    // By one thread; a __syncthreads() must follow.
    __device__ void init() const {
        q_barriers.init(Tile::CONSUMERS);
        dout_barriers.init(Tile::CONSUMERS);
        keys_barriers.init(Tile::CONSUMERS);
        work.init(Tile::CONSUMERS);
    }
};

// The producer: one thread that keeps the rings full.
template <class Tile, class Schedule>
__device__ inline void load_backward(const AttentionBackwardMaps& maps, const AttentionParams& params,
                                     const AttentionBackwardParams& backward, const Schedule& schedule,
                                     const BackwardExchange<Tile>& exchange) {
    RingPosition<Tile::STAGES> slot;
    RingPosition<1> slot_keys;
    RingPosition<2> slot_work;
    const bool is_packed = params.call.cu_seqlens_q != nullptr;
    const uint32_t full = exchange.keys_barriers.full(0);
#pragma unroll 1
    for (int index = blockIdx.x; index < schedule.count; index = schedule.after(index)) {
        const AttentionBlock work = schedule.at(index);
        exchange.work.next(slot_work) = work;
        exchange.work.put(slot_work);
        const QueryTiles<Tile> tiles(params.shape, work);
        if (tiles.first >= tiles.end) continue;
        const int batch = is_packed ? 0 : work.batch;
        const int key = work.k_begin + work.tile * Tile::BLOCK_N;
        barrier_wait(exchange.keys_barriers.empty(0), slot_keys.phase ^ 1);
        barrier_arrive_expect(full, 2 * Tile::K_BYTES);
        load_rows<Tile::BLOCK_N, Tile::BOX, Tile::BOXES>(exchange.shared + Tile::K_AT, maps.k,
                                                         {0, key, work.kv_head, batch, 0}, full);
        load_rows<Tile::BLOCK_N, Tile::BOX, Tile::BOXES>(exchange.shared + Tile::V_AT, maps.v,
                                                         {0, key, work.kv_head, batch, 0}, full);
        slot_keys.advance();
#pragma unroll 1
        for (int head = work.head; head < work.head + params.shape.group; ++head) {
            const float* rows = backward.rows + int64_t(work.batch * params.shape.heads + head) * backward.q_tiles *
                                                    (2 * Tile::BLOCK_M);
#pragma unroll 1
            for (int tile = tiles.first; tile < tiles.end; ++tile) {
                const int row = work.q_begin + tile * Tile::BLOCK_M;
                const uint32_t q_full = exchange.q_barriers.full(slot.stage);
                barrier_wait(exchange.q_barriers.empty(slot.stage), slot.phase ^ 1);
                barrier_arrive_expect(q_full, Tile::Q_BYTES + Tile::ROWS_BYTES);
                load_rows<Tile::BLOCK_M, Tile::BOX, Tile::BOXES>(
                    exchange.shared + Tile::Q_AT + slot.stage * Tile::Q_BYTES, maps.q, {0, row, head, batch, 0},
                    q_full);
                bulk_load(exchange.shared + Tile::ROWS_AT + slot.stage * Tile::ROWS_BYTES,
                          rows + tile * (2 * Tile::BLOCK_M), Tile::ROWS_BYTES, q_full);
                const uint32_t dout_full = exchange.dout_barriers.full(slot.stage);
                barrier_wait(exchange.dout_barriers.empty(slot.stage), slot.phase ^ 1);
                barrier_arrive_expect(dout_full, Tile::Q_BYTES);
                load_rows<Tile::BLOCK_M, Tile::BOX, Tile::BOXES>(
                    exchange.shared + Tile::DOUT_AT + slot.stage * Tile::Q_BYTES, maps.dout, {0, row, head, batch, 0},
                    dout_full);
                slot.advance();
            }
        }
    }
    exchange.work.next(slot_work).tile = -1;  // the end
    exchange.work.put(slot_work);
}

// A consumer warpgroup at work on one tile of keys after the other.
template <class Tile> class BackwardConsumer {
public:
    using T = typename Tile::T;
    using Scores = typename Tile::Scores;
    using Weights = typename Tile::Weights;
    using Gradient = typename Tile::Gradient;

    __device__ BackwardConsumer(const AttentionParams& params_, const AttentionBackwardParams& backward_,
                                const BackwardExchange<Tile>& exchange_, int number_)
        : params(params_),
          backward(backward_),
          exchange(exchange_),
          number(number_),
          thread(threadIdx.x % kWarpGroupSize) {}

    // Takes tiles until the producer has no more.
    __device__ void run() {
        RingPosition<2> slot_work;
#pragma unroll 1
        while (true) {
            const AttentionBlock& work = exchange.work.take(slot_work);
            if (uniform(work.tile) < 0) break;
            run(work);
            sync();
            exchange.work.release(slot_work, leads());
        }
        if (leads()) tma_store_wait();
    }

private:
    __device__ void run(const AttentionBlock& work) {
        const QueryTiles<Tile> tiles(params.shape, work);
        const int first_key = work.tile * Tile::BLOCK_N + number * 64;
        const int key = first_key + thread / kWarpSize * 16 + thread % kWarpSize / 4;
        Gradient dk, dv;
        if (tiles.first < tiles.end) {
            const KeyRange seen[2] = {seen_from(work, params.shape, key), seen_from(work, params.shape, key + 8)};
            // tiles all of whose rows see all keys of the consumer
            const bool is_whole = first_key + 64 <= work.k_len;
            const int whole_first = ceil_div(seen_from(work, params.shape, first_key + 63).begin, Tile::BLOCK_M);
            const int whole_end = is_whole ? seen_from(work, params.shape, first_key).end / Tile::BLOCK_M : 0;
            const int heads_before = work.batch * params.shape.heads + work.head;
            const int steps = params.shape.group * (tiles.end - tiles.first);
            int tile = tiles.first, dq_tile = heads_before * backward.q_tiles + tile;
            barrier_wait(exchange.keys_barriers.full(0), slot_keys.phase);
            slot_keys.advance();
#pragma unroll 1
            for (int i = 0; i < steps; ++i) {
                const bool is_masked = tile < whole_first || tile >= whole_end;
                step(dk, dv, seen, is_masked, tile * Tile::BLOCK_M, i > 0, dq_tile);
                ++dq_tile;
                if (++tile == tiles.end) {  // on to the next head of the group
                    tile = tiles.first;
                    dq_tile += backward.q_tiles - (tiles.end - tiles.first);
                }
            }
            if (leads()) barrier_arrive(exchange.keys_barriers.empty(0));
        } else {
#pragma unroll
            for (int i = 0; i < Tile::D / 2; ++i) dk[i] = dv[i] = 0;
        }
        store(dk, backward.softmax_scale, backward.dk, backward.dk_strides, work, key);
        store(dv, 1, backward.dv, backward.dv_strides, work, key);
    }

    const AttentionParams& params;
    const AttentionBackwardParams& backward;
    const BackwardExchange<Tile>& exchange;
    const int number, thread;
    RingPosition<Tile::STAGES> slot;
    RingPosition<1> slot_keys;
    int ds_buffer = 0;

    __device__ bool leads() const { return thread == 0; }
    __device__ void sync() const { sync_group<kWarpGroupSize>(2 + number); }

    // One tile of queries, from row `row` on.
    __device__ void step(Gradient& dk, Gradient& dv, const KeyRange (&seen)[2], bool is_masked, int row,
                         bool accumulate, int dq_tile) {
        const uint32_t q = exchange.shared + Tile::Q_AT + slot.stage * Tile::Q_BYTES;
        const uint32_t dout = exchange.shared + Tile::DOUT_AT + slot.stage * Tile::Q_BYTES;
        const uint32_t rows = exchange.shared + Tile::ROWS_AT + slot.stage * Tile::ROWS_BYTES + thread % 4 * 8;
        const uint32_t ds = exchange.shared + Tile::DS_AT + ds_buffer * Tile::DS_BYTES;
        Scores s, ds_values;
        Weights p_narrow, ds_narrow;
        barrier_wait(exchange.q_barriers.full(slot.stage), slot.phase);
        multiply_keys(s, Tile::K_AT, q);
        barrier_wait(exchange.dout_barriers.full(slot.stage), slot.phase);
        multiply_keys(ds_values, Tile::V_AT, dout);
        wgmma_wait<1>();
        hold(s);
        if (is_masked) mask_scores(s, seen, row + thread % 4 * 2);
#pragma unroll
        for (int i = 0; i < Tile::BLOCK_M / 2; i += 4) {
            const float2 lse = load_pair(rows + i * 8);
            s[i] = exp2_approx(s[i] * params.shape.scale - lse.x);
            s[i + 1] = exp2_approx(s[i + 1] * params.shape.scale - lse.y);
            s[i + 2] = exp2_approx(s[i + 2] * params.shape.scale - lse.x);
            s[i + 3] = exp2_approx(s[i + 3] * params.shape.scale - lse.y);
        }
        narrow_weights<T>(p_narrow, s);
        wgmma_wait<0>();
        hold(ds_values);
#pragma unroll
        for (int i = 0; i < Tile::BLOCK_M / 2; i += 4) {
            const float2 delta = load_pair(rows + Tile::BLOCK_M * 4 + i * 8);
#pragma unroll
            for (int half = 0; half < 4; half += 2) {
                const float2 p = widen_pair<T>(p_narrow[i / 8][(i + half) / 2 % 4]);
                ds_values[i + half] = p.x * (ds_values[i + half] - delta.x);
                ds_values[i + half + 1] = p.y * (ds_values[i + half + 1] - delta.y);
            }
        }
        narrow_weights<T>(ds_narrow, ds_values);
        multiply_rows(dv, p_narrow, dout, accumulate);
        share(ds_narrow, ds);
        float part[32];
        multiply_part(part, ds);
        multiply_rows(dk, ds_narrow, q, accumulate);
        wgmma_wait<2>();
        hold(dv);
        if (leads()) barrier_arrive(exchange.dout_barriers.empty(slot.stage));
        wgmma_wait<1>();
        hold(part);
        store_part(part, dq_tile);
        wgmma_wait<0>();
        hold(dk);
        if (leads()) barrier_arrive(exchange.q_barriers.empty(slot.stage));
        slot.advance();
        ds_buffer ^= 1;
    }

    // Issues s = k @ rows^T, of the consumer's keys or, for dout, their values.
    __device__ void multiply_keys(Scores& s, int keys_at, uint32_t rows) const {
        using Operand = typename Tile::OperandK;
        const uint64_t a = Operand::descriptor(exchange.shared + keys_at + number * 64 * Tile::SPAN);
        const uint64_t b = Operand::descriptor(rows);
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

    // Puts dS of the consumer's keys, the rows, beside that of the other one, and waits for it. Two buffers take turns:
    // who is here again has seen the other one through with the last but one.
    __device__ void share(const Weights& ds_narrow, uint32_t ds) const {
        const int lane = thread % kWarpSize, key = number * 64 + thread / kWarpSize * 16 + lane % 16;
#pragma unroll
        for (int step = 0; step < Tile::BLOCK_M / 16; ++step) {
            const int box = step / 4, chunk = step % 4 * 2 + lane / 16;
            stmatrix(ds + box * Tile::BLOCK_N * Tile::SPAN + swizzled_offset<Tile::SPAN>(key, chunk), ds_narrow[step]);
        }
        fence_async_proxy();
        sync_group<Tile::CONSUMERS * kWarpGroupSize>(1);
    }

    // Issues the consumer's part of dq = dS^T @ k.
    __device__ void multiply_part(float (&part)[32], uint32_t ds) const {
        using Operand = typename Tile::OperandKeys;
        const uint64_t a = Operand::descriptor(ds), b = Operand::descriptor(exchange.shared + Tile::K_AT);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < Tile::BLOCK_N / 16; ++step) {
            Wgmma<64>::template multiply<T, false, false>(part, Operand::advance(a, number % Tile::PARTS_M, step),
                                                          Operand::advance(b, number / Tile::PARTS_M, step), step > 0);
        }
        wgmma_commit();
    }

    // Adds the part to the sum in global memory, four registers of all threads after another.
    __device__ void store_part(const float (&part)[32], int dq_tile) const {
        const uint32_t staging = exchange.shared + Tile::PARTS_AT + number * Tile::PART_BYTES;
        if (leads()) tma_store_wait_read();  // of the tile before
        sync();
#pragma unroll
        for (int i = 0; i < 32; i += 4) store_shared(staging + (i / 4 * kWarpGroupSize + thread) * 16, four(&part[i]));
        fence_async_proxy();
        sync();
        if (leads()) {
            const int64_t place = int64_t(dq_tile) * Tile::CONSUMERS + number;
            bulk_add(backward.dq + place * (Tile::PART_BYTES / 4), staging, Tile::PART_BYTES);
            tma_store_commit();
        }
    }

    __device__ void store(const Gradient& gradient, float scale, void* to, const AttentionStrides& strides,
                          const AttentionBlock& work, int key) const {
        const float factor[2] = {scale, scale};
        T* out = static_cast<T*>(to) + work.batch * strides.batch + work.kv_head * strides.head +
                 work.k_begin * strides.row;
        store_rows(gradient, factor, out, strides.row, key, work.k_len, params.shape.head_dim, thread % kWarpSize);
    }
};

template <class Tile>
__device__ inline void run_attention_backward(const AttentionBackwardMaps& maps, const AttentionParams& params,
                                              const AttentionBackwardParams& backward, int section, int* taken) {
    extern __shared__ __align__(1024) char shared[];
    const BackwardExchange<Tile> exchange(shared);
    if (threadIdx.x == 0) {
        exchange.init();
        prefetch_tensor_map(maps.q);
        prefetch_tensor_map(maps.k);
        prefetch_tensor_map(maps.v);
        prefetch_tensor_map(maps.dout);
    }
    __syncthreads();

    const int group = uniform(threadIdx.x / kWarpGroupSize);
    if (group == 0) {
        release_registers<40>();
        const AttentionSchedule<true> schedule(params, section, taken);
        if (threadIdx.x == 0) load_backward<Tile>(maps, params, backward, schedule, exchange);
    } else {
        claim_registers<232>();
        BackwardConsumer<Tile> consumer(params, backward, exchange, group - 1);
        consumer.run();
    }
}

}  // namespace rawops
