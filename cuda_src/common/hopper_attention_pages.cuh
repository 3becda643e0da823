// How keys and values of the Hopper attention come from pages.
#pragma once
#include "hopper_attention.cuh"

namespace rawops {

// The producer: some warps, whose lanes look pages up side by side, and whose first lanes start the copies in turn,
// since one thread alone would be too slow for small pages; and a thread that plans the tiles.
//
// A copy brings a page, or a part of one where that does not divide a block of keys: 8 rows of all columns after the
// other. Its tensor has the axes head, group of 8 rows, box of columns, row, column; groups of all pages are numbered
// in one line, `page_groups` from page to page. TMA reads what lies outside of it as zeros.
template <class Tile> class PagedProducer : AttentionProducer<Tile> {
public:
    static constexpr int THREADS = kWarpGroupSize;

    __device__ PagedProducer(const AttentionMaps& maps, const AttentionParams& params,
                             const AttentionExchange<Tile>& exchange)
        : AttentionProducer<Tile>(maps, params, exchange),
          warp(threadIdx.x / kWarpSize),
          lane(threadIdx.x % kWarpSize),
          rank(Tile::CLUSTER == 1 ? 0 : cluster_rank()) {}

    __device__ void run(const AttentionSchedule<false>& schedule, const NoScales& scales) {
        if (warp < Tile::COPIERS) {
            auto load_by_warp = [&](const AttentionTask& work) {
                await_launch_before();
                load(work);
                __syncwarp();
            };
            this->take_tiles(load_by_warp, lane == 0);
        } else if (lane == 0) {
            this->plan(schedule, scales);
        }
    }

private:
    using AttentionProducer<Tile>::maps;
    using AttentionProducer<Tile>::params;
    using AttentionProducer<Tile>::exchange;
    using AttentionProducer<Tile>::slot_k;
    using AttentionProducer<Tile>::slot_v;
    using AttentionProducer<Tile>::slot_q;

    const int warp, lane, rank;

    __device__ int copied_rows() const { return min_of(1 << params.shape.page_shift, Tile::BLOCK_N & -Tile::BLOCK_N); }

    __device__ void load(const AttentionTask& work) {
        const AttentionShape& shape = params.shape;
        const KeyBlocks blocks = work.keys;
        if (!work.has_keys()) return;
        const int first = work.tile * Tile::BLOCK_M, last = min_of(first + Tile::BLOCK_M, work.rows(shape)) - 1;
        const KeyRange seen =
            work.AttentionBlock::keys(shape, Tile::query(shape, first), Tile::query(shape, last), Tile::BLOCK_N);
        // The lane's page of a block, none if no query of the tile sees one of its keys.
        auto find = [&](int block) {
            const int rows = copied_rows(), token = block * Tile::BLOCK_N + lane * rows;
            const bool is_seen = lane * rows < Tile::BLOCK_N && token + rows > seen.begin && token < seen.end;
            const int64_t row = work.batch * shape.block_table_batch;
            return is_seen ? __ldg(params.call.block_table + row + (token >> shape.page_shift)) : -1;
        };
        auto load_k = [&](int block, int page) {
            load_keys<Tile::K_BYTES>(exchange.k, exchange.k_barriers, slot_k, maps.k, work.kv_head, block, page);
        };
        auto load_v = [&](int block, int page) {
            load_keys<Tile::V_BYTES>(exchange.v, exchange.v_barriers, slot_v, maps.v, work.kv_head, block, page);
        };
        int page = find(blocks.end - 1), ahead = find(blocks.end - 2);
        load_k(blocks.end - 1, page);
        load_q(work);
#pragma unroll 1
        for (int block = blocks.end - 1; block > blocks.first; --block) {
            const int further = find(block - 2);
            load_k(block - 1, ahead);
            load_v(block, page);
            page = ahead;
            ahead = further;
        }
        load_v(blocks.first, page);
    }

    // Boxes of q are of some queries and the heads that lie side by side in a tile.
    __device__ void load_q(const AttentionBlock& work) {
        const int queries = 64 / params.shape.packed;
        TensorCoordinates from = {0, work.head, work.q_begin + work.tile * Tile::CONSUMERS * queries, 0, 0};
        if (threadIdx.x == 0) {
#pragma unroll
            for (int i = 0; i < Tile::CONSUMERS; ++i, from.at[2] += queries) {
                barrier_wait(exchange.q_barriers.empty(i), slot_q.phase ^ 1);
                barrier_arrive_expect(exchange.q_barriers.full(i), Tile::Q_BYTES);
                load_rows<64, Tile::BOX, Tile::BOXES>(exchange.q + i * Tile::Q_BYTES, maps.q, from,
                                                      exchange.q_barriers.full(i));
            }
        }
        slot_q.advance();
    }

    template <int BYTES>
    __device__ void load_keys(uint32_t ring, const RingBarriers<Tile::STAGES>& barriers,
                              RingPosition<Tile::STAGES>& slot, const TensorMap& map, int head, int block, int page) {
        const AttentionShape& shape = params.shape;
        const int rows = copied_rows(), in_page = (1 << shape.page_shift) - 1;
        const int page_groups = int(shape.k.batch), pages = int(shape.v.batch);
        // the lane's group, or one far before the first
        const int own = static_cast<uint32_t>(page) < static_cast<uint32_t>(pages)
                            ? page * page_groups + ((block * Tile::BLOCK_N + lane * rows & in_page) >> 3)
                            : -256;
        barrier_wait(barriers.empty(slot.stage), slot.phase ^ 1);
        const uint32_t full = barriers.full(slot.stage);
        if (threadIdx.x == 0) barrier_arrive_expect(full, BYTES);
        const uint32_t destination = ring + slot.stage * BYTES;
#pragma unroll 1
        for (int i = Tile::CLUSTER * warp + rank; i * rows < Tile::BLOCK_N; i += Tile::CLUSTER * Tile::COPIERS) {
            const int group = __shfl_sync(~0u, own, i);
            const uint32_t to = destination + BYTES / Tile::BLOCK_N * rows * i;
            if (lane == 0) {
                if constexpr (Tile::CLUSTER == 1) tma_load(to, map, {0, 0, 0, group, head}, full);
                else tma_load_multicast(to, map, {0, 0, 0, group, head}, full, 3);
            }
        }
        slot.advance();
    }
};

}  // namespace rawops
