// What a block of Hopper gradients of attention works on, where it keeps it, and how its warpgroups tell each other.
#pragma once
#include "hopper_attention_rows.cuh"
#include "hopper_attention_tile.cuh"

namespace rawops {

// Two warps of warpgroup 0 see to additions to dq. One alone would wait for an addition to complete, as the next one to
// add has to, for longer than a step takes.
constexpr int kAddingWarps = 2;

// kInTurn: who adds to dq waits for its turn, so that the sum is the same from call to call.
// kScore: how scores are made; no bias.
template <class T_, int D_, int BLOCK_M_, int STAGES_, bool kInTurn_, int kScore_> struct HopperAttentionBackward {
    using T = T_;
    static constexpr bool kInTurn = kInTurn_;
    static constexpr int kScore = kScore_;
    static constexpr bool kAddsAside = true;  // warps of warpgroup 0 take parts of dq to global memory
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
    static constexpr int ROWS_AT = PARTS_AT + kAddingWarps * CONSUMERS * PART_BYTES;
    static constexpr int BARRIERS_AT = ROWS_AT + STAGES * ROWS_BYTES;
    static constexpr int WORK_AT = BARRIERS_AT + 2 * RingBarriers<STAGES>::BYTES + 80;  // of k, v, slots and parts
};

struct AttentionBackwardMaps {
    TensorMap q, k, v, dout;  // axes: 1, sequence, head, row, column
};

struct AttentionBackwardParams {
    void *dk, *dv;
    float* dq;         // for each sequence, head and tile of queries, its parts, in the order of `add_part`
    const float* rows; // for each sequence, head and tile of queries: lse * log2(e) of its rows, then delta
    int* turns;        // for each sequence, head and tile of queries, two: the tile of keys that may add to dq next
    AttentionStrides dk_strides, dv_strides;
    int q_tiles;       // of a head: in a sequence, or with cu_seqlens in all of them and one more in each
    float softmax_scale;
};

// The place of the first tile of queries of a sequence and head in `rows` and `dq`.
template <class Tile>
__device__ inline int first_query_tile(const AttentionParams& params, const AttentionBackwardParams& backward,
                                       const AttentionBlock& work, int head) {
    if (params.call.cu_seqlens_q) return head * backward.q_tiles + work.q_begin / Tile::BLOCK_M + work.batch;
    return (work.batch * params.shape.heads + head) * backward.q_tiles;
}

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
    RingBarriers<kAddingWarps> part_barriers;  // of all consumers' parts of dq

    __device__ explicit BackwardExchange(char* memory)
        : shared(shared_address(memory)),
          q_barriers{shared + Tile::BARRIERS_AT},
          dout_barriers{q_barriers.base + q_barriers.BYTES},
          keys_barriers{dout_barriers.base + dout_barriers.BYTES},
          work{reinterpret_cast<AttentionBlock*>(memory + Tile::WORK_AT), {keys_barriers.base + keys_barriers.BYTES}},
          part_barriers{work.barriers.base + work.barriers.BYTES} {}

    // By one thread; a __syncthreads() must follow.
    __device__ void init() const {
        q_barriers.init(Tile::CONSUMERS);
        dout_barriers.init(Tile::CONSUMERS);
        keys_barriers.init(Tile::CONSUMERS);
        work.init(Tile::CONSUMERS + (Tile::kInTurn || Tile::kAddsAside ? kAddingWarps : 0));
        part_barriers.init(1, Tile::CONSUMERS);
    }
};

// --- turns at adding to dq: tiles of keys in their order, so nobody waits for a tile that starts after its own

__device__ inline void await_turn(const int* turn, int tile) {
    int now;
    do {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
    } while (now < tile);
}

__device__ inline void end_turn(int* turn) {
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(turn) : "memory");
}

// Calls `serve` with the place of every tile of dq that the block adds to, and with the tile of keys it does it for.
template <class Tile, class Serve>
__device__ inline void serve_additions(const AttentionParams& params, const AttentionBackwardParams& backward,
                                   const BackwardExchange<Tile>& exchange, Serve serve) {
    RingPosition<2> slot_work;
#pragma unroll 1
    while (true) {
        const AttentionBlock& work = exchange.work.take(slot_work);
        if (uniform(work.tile) < 0) break;
        const QueryTiles<Tile> tiles(params.shape, work);
#pragma unroll 1
        for (int head = work.head; head < work.head + params.shape.group; ++head) {
            const int first = first_query_tile<Tile>(params, backward, work, head);
#pragma unroll 1
            for (int place = first + tiles.first; place < first + tiles.end; ++place) serve(place, work.tile);
        }
        __syncwarp();
        exchange.work.release(slot_work, threadIdx.x % kWarpSize == 0);
    }
}

// The producer: one thread that keeps the rings full.
template <class Tile> class BackwardProducer {
public:
    __device__ BackwardProducer(const AttentionBackwardMaps& maps_, const AttentionParams& params_,
                                const AttentionBackwardParams& backward_, const BackwardExchange<Tile>& exchange_)
        : maps(maps_), params(params_), backward(backward_), exchange(exchange_) {}

    __device__ void run(const AttentionSchedule<true>& schedule) {
        RingPosition<2> slot_work;
#pragma unroll 1
        for (int index = blockIdx.x; index < schedule.count; index = schedule.after(index)) {
            // One tile, but for sequences that are longer than stated.
            bool has_further = true;
#pragma unroll 1
            for (int further = 0; has_further; further += params.shape.row_tiles) {
                AttentionBlock& work = exchange.work.next(slot_work);
                work = schedule.at(index);
                work.tile += further;
                has_further = (work.tile + params.shape.row_tiles) * Tile::BLOCK_N < work.k_len;
                if (work.tile * Tile::BLOCK_N >= work.k_len) break;
                exchange.work.put(slot_work);
                load(work);
            }
        }
        exchange.work.next(slot_work).tile = -1;  // the end
        exchange.work.put(slot_work);
    }

private:
    const AttentionBackwardMaps& maps;
    const AttentionParams& params;
    const AttentionBackwardParams& backward;
    const BackwardExchange<Tile>& exchange;
    RingPosition<Tile::STAGES> slot;
    RingPosition<1> slot_keys;

    __device__ void load(const AttentionBlock& work) {
        const QueryTiles<Tile> tiles(params.shape, work);
        if (tiles.first >= tiles.end) return;
        const int batch = params.call.cu_seqlens_q ? 0 : work.batch, key = work.k_begin + work.tile * Tile::BLOCK_N;
        const uint32_t full = exchange.keys_barriers.full(0);
        barrier_wait(exchange.keys_barriers.empty(0), slot_keys.phase ^ 1);
        barrier_arrive_expect(full, 2 * Tile::K_BYTES);
        load_rows<Tile::BLOCK_N, Tile::BOX, Tile::BOXES>(exchange.shared + Tile::K_AT, maps.k,
                                                         {0, key, work.kv_head, batch, 0}, full);
        load_rows<Tile::BLOCK_N, Tile::BOX, Tile::BOXES>(exchange.shared + Tile::V_AT, maps.v,
                                                         {0, key, work.kv_head, batch, 0}, full);
        slot_keys.advance();
#pragma unroll 1
        for (int head = work.head; head < work.head + params.shape.group; ++head) {
            const float* rows =
                backward.rows + int64_t(first_query_tile<Tile>(params, backward, work, head)) * (2 * Tile::BLOCK_M);
#pragma unroll 1
            for (int tile = tiles.first; tile < tiles.end; ++tile) {
                const TensorCoordinates place{0, work.q_begin + tile * Tile::BLOCK_M, head, batch, 0};
                load_queries(place, rows + tile * (2 * Tile::BLOCK_M));
            }
        }
    }

    __device__ void load_queries(TensorCoordinates from, const float* rows) {
        const uint32_t q_full = exchange.q_barriers.full(slot.stage);
        barrier_wait(exchange.q_barriers.empty(slot.stage), slot.phase ^ 1);
        barrier_arrive_expect(q_full, Tile::Q_BYTES + Tile::ROWS_BYTES);
        load_rows<Tile::BLOCK_M, Tile::BOX, Tile::BOXES>(exchange.shared + Tile::Q_AT + slot.stage * Tile::Q_BYTES,
                                                         maps.q, from, q_full);
        bulk_load(exchange.shared + Tile::ROWS_AT + slot.stage * Tile::ROWS_BYTES, rows, Tile::ROWS_BYTES, q_full);
        const uint32_t dout_full = exchange.dout_barriers.full(slot.stage);
        barrier_wait(exchange.dout_barriers.empty(slot.stage), slot.phase ^ 1);
        barrier_arrive_expect(dout_full, Tile::Q_BYTES);
        load_rows<Tile::BLOCK_M, Tile::BOX, Tile::BOXES>(exchange.shared + Tile::DOUT_AT + slot.stage * Tile::Q_BYTES,
                                                         maps.dout, from, dout_full);
        slot.advance();
    }
};

}  // namespace rawops
