// What the warps of the Hopper attention do that do not multiply: plan, fetch operands, take results away.
#pragma once
#include "hopper_attention_rows.cuh"
#include "hopper_attention_tile.cuh"
#include "launches.cuh"

namespace rawops {

// What 16-bit operands are multiplied by beside the scale of all scores.
struct NoScales {
    __device__ void set(AttentionTask&, const AttentionParams&) const {}
};

// The producer: a thread that keeps the ring of keys full, a warp that does so with the values and searches them, or
// the same thread, and a thread that plans the tiles.
template <class Tile> class AttentionProducer {
public:
    static constexpr int THREADS = Tile::kSearches ? kWarpGroupSize : kWarpSize + 1;  // that run it

    __device__ AttentionProducer(const AttentionMaps& maps_, const AttentionParams& params_,
                                 const AttentionExchange<Tile>& exchange_)
        : maps(maps_), params(params_), exchange(exchange_) {}

    template <class Scales> __device__ void run(const AttentionSchedule<false>& schedule, const Scales& scales) {
        if (threadIdx.x == 0) {
            await_launch_before();
            take_tiles([&](const AttentionTask& work) { load(work); }, true);
        }
        if (threadIdx.x == kWarpSize) plan(schedule, scales);
        if (Tile::kSearches && threadIdx.x >= 3 * kWarpSize) bring_values();
    }

protected:
    static constexpr bool kPlannerLoads = !Tile::kPaged && (!Tile::kBytes || Tile::Q_SLOTS == 2);  // queries

    // Says what comes next, well ahead, since its divisions and what it asks of global memory take long, and fetches
    // its queries when they have a place.
    template <class Scales> __device__ void plan(const AttentionSchedule<false>& schedule, const Scales& scales) {
        RingPosition<Tile::PLACES> slot;
        const AttentionCall& call = params.call;
        if (call.cu_seqlens_q || call.seqlens_k || !is_same<Scales, NoScales>) await_launch_before();  // they are read
#pragma unroll 1
        for (int index = blockIdx.x; index < schedule.count; index = schedule.after(index)) {
            // One tile, but for sequences that are longer than stated, and the rows past the last one.
            const AttentionBlock block = schedule.at(index);
#pragma unroll 1
            for (int tile = block.tile; tile * Tile::BLOCK_M < block.rows(params.shape);
                 tile += params.shape.row_tiles) {
                AttentionTask& work = exchange.work.next(slot);
                static_cast<AttentionBlock&>(work) = block;
                work.tile = tile;
                work.plan<Tile>(params);
                scales.set(work, params);
                exchange.work.put(slot);
                await_launch_before();  // which may write the queries, and use the counter of tiles
                if (kPlannerLoads && work.has_keys()) load_q(work);
            }
            await_launch_before();
        }
        AttentionTask& none = exchange.work.next(slot);  // the end
        none.tile = -1;
        none.keys = {0, 0};
        exchange.work.put(slot);
    }

    // Loads what belongs to one tile after the other. `releases`: of the threads that load, the one that says so.
    template <class Load> __device__ void take_tiles(const Load& load, bool releases) const {
        RingPosition<Tile::PLACES> slot_work;
#pragma unroll 1
        while (true) {
            const AttentionTask& work = exchange.work.take(slot_work);
            if (work.tile < 0) break;
            load(work);
            exchange.work.release(slot_work, releases);
        }
    }

    const AttentionMaps& maps;
    const AttentionParams& params;
    const AttentionExchange<Tile>& exchange;
    RingPosition<Tile::K_STAGES> slot_k;
    RingPosition<Tile::STAGES> slot_v;
    RingPosition<Tile::Q_SLOTS> slot_q;

    __device__ void load(const AttentionTask& work) {
        const KeyBlocks blocks = work.keys;
        if (!work.has_keys()) return;
        const int batch = params.call.cu_seqlens_q ? 0 : work.batch;
        const TensorCoordinates keys = {0, work.k_begin, work.kv_head, batch, 0};
        auto load_k = [&](int block) {
            load_keys<Tile::BOX, Tile::BOXES>(exchange.k, exchange.k_barriers, slot_k, maps.k, keys, block);
        };
        auto load_v = [&](int block) {
            if (!Tile::kSearches) load_values(work, block);
        };
        load_k(blocks.end - 1);
        if (!kPlannerLoads) load_q(work);
#pragma unroll 1
        for (int block = blocks.end - 1; block > blocks.first; --block) {
            load_k(block - 1);
            load_v(block);
        }
        load_v(blocks.first);
    }

    __device__ void load_values(const AttentionTask& work, int block) {
        const TensorCoordinates from = {0, work.k_begin, work.kv_head, params.call.cu_seqlens_q ? 0 : work.batch, 0};
        const uint32_t ring = Tile::kBytes ? exchange.raw : exchange.v;
        const auto& barriers = Tile::kBytes ? exchange.raw_barriers : exchange.v_barriers;
        load_keys<Tile::BOX_V, Tile::BOXES_V>(ring, barriers, slot_v, maps.v, from, block);
    }

    // Loads values, and searches those of blocks that some row does not see all of for what is not finite, which would
    // cost consumers more. By a warp.
    __device__ void bring_values() {
        const int lane = threadIdx.x % kWarpSize;
        RingPosition<Tile::PLACES> slot_work;
        RingPosition<Tile::STAGES> slot;
        await_launch_before();
#pragma unroll 1
        while (true) {
            const AttentionTask& work = exchange.work.take(slot_work);
            if (uniform(work.tile) < 0) break;
            const KeyBlocks keys = work.keys, uncut = work.uncut;
#pragma unroll 1
            for (int block = keys.end - 1; block >= keys.first; --block) {
                if (lane == 0) load_values(work, block);
                if (!uncut.has(block)) {
                    barrier_wait(exchange.v_barriers.full(slot.stage), slot.phase);
                    const bool found = is_suspect<Tile, kWarpSize>(exchange.v + slot.stage * Tile::V_BYTES, lane);
                    const bool is_found = __any_sync(~0u, found);  // and all have looked
                    if (lane == 0) store_word(exchange.findings(slot.stage), is_found);
                }
                if (lane == 0) barrier_arrive(exchange.search_barriers.full(slot.stage));
                slot.advance();
            }
            __syncwarp();
            exchange.work.release(slot_work, lane == 0);
        }
    }

    __device__ void load_q(const AttentionTask& work) {
        const int batch = params.call.cu_seqlens_q ? 0 : work.batch;
        TensorCoordinates from = {0, work.q_begin + work.tile * Tile::BLOCK_M, work.head, batch, 0};
#pragma unroll
        for (int i = 0; i < Tile::CONSUMERS; ++i, from.at[1] += 64) {
            const int place = slot_q.stage * Tile::CONSUMERS + i;
            const uint32_t full = exchange.q_barriers.full(place);
            barrier_wait(exchange.q_barriers.empty(place), slot_q.phase ^ 1);
            barrier_arrive_expect(full, Tile::Q_BYTES);
            load_rows<64, Tile::BOX, Tile::BOXES, Tile::ITEM>(exchange.q + place * Tile::Q_BYTES, maps.q, from, full);
        }
        slot_q.advance();
    }

    template <int BOX, int BOXES, int STAGES>
    __device__ void load_keys(uint32_t ring, const RingBarriers<STAGES>& barriers, RingPosition<STAGES>& slot,
                              const TensorMap& map, TensorCoordinates from, int block) {
        constexpr int BYTES = Tile::BLOCK_N * BOX * BOXES * Tile::ITEM;
        barrier_wait(barriers.empty(slot.stage), slot.phase ^ 1);
        barrier_arrive_expect(barriers.full(slot.stage), BYTES);
        from.at[1] += block * Tile::BLOCK_N;
        load_rows<Tile::BLOCK_N, BOX, BOXES, Tile::ITEM>(ring + slot.stage * BYTES, map, from,
                                                         barriers.full(slot.stage));
        slot.advance();
    }
};

// Rows of a tile from `row` on, as far as the sequence has them.
template <class Tile>
__device__ inline void store_rows_one_by_one(const AttentionParams& params, const AttentionTask& work, uint32_t staging,
                                             int row, int lane) {
    constexpr int CHUNKS = Tile::DV / 8;
    const AttentionStrides& s = params.shape.out;
    auto* out = static_cast<typename Tile::Out*>(params.call.out) + work.head * s.head + (work.q_begin + row) * s.row;
#pragma unroll 1
    for (int i = lane; i < min_of(work.q_len - row, 64) * CHUNKS; i += kWarpSize) {
        const int at = i / CHUNKS, col = i % CHUNKS * 8, box = col / Tile::BOX_V, chunk = col % Tile::BOX_V / 8;
        if (col >= params.shape.head_dim_v) continue;
        *reinterpret_cast<uint4*>(out + at * s.row + col) =
            load_quad(staging + box * 64 * Tile::SPAN_V + swizzled_offset<Tile::SPAN_V>(at, chunk));
    }
}

// Takes what the consumers stage to global memory, beside their next tile, and gives the places back to queries. By a
// warp. TMA does not know where a sequence ends within the storage: of such tiles, the rows go one by one.
template <class Tile>
__device__ void store_staged(const TensorMap& map, const AttentionParams& params,
                             const AttentionExchange<Tile>& exchange) {
    const int lane = threadIdx.x % kWarpSize;
    RingPosition<Tile::PLACES> slot_work;
    RingPosition<Tile::Q_SLOTS> slot;
#pragma unroll 1
    while (true) {
        const AttentionTask& work = exchange.work.take(slot_work);
        if (uniform(work.tile) < 0) break;
        if (uniform(work.has_keys())) {
#pragma unroll 1
            for (int i = 0; i < Tile::CONSUMERS; ++i) {
                const int place = slot.stage * Tile::CONSUMERS + i, row = work.tile * Tile::BLOCK_M + i * 64;
                const uint32_t staging = exchange.q + place * Tile::Q_BYTES;
                barrier_wait(exchange.staged_barriers.full(place), slot.phase);
                if (params.call.cu_seqlens_q && row + 64 > work.q_len) {
                    store_rows_one_by_one<Tile>(params, work, staging, row, lane);
                } else if (lane == 0) {
                    const int batch = params.call.cu_seqlens_q ? 0 : work.batch;
                    TensorCoordinates to = {0, work.q_begin + row, work.head, batch, 0};
#pragma unroll
                    for (int box = 0; box < Tile::BOXES_V; ++box, to.at[0] += Tile::BOX_V) {
                        tma_store(map, to, staging + box * 64 * Tile::SPAN_V);
                    }
                    tma_store_commit();
                    tma_store_wait_read();
                }
                __syncwarp();
                if (lane == 0) barrier_arrive(exchange.q_barriers.empty(place));
            }
            slot.advance();
        }
        __syncwarp();
        exchange.work.release(slot_work, lane == 0);
    }
}

}  // namespace rawops
