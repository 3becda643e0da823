// The Hopper GEMM, a block's whole run: TMA, wgmma, the sum over a cluster, the epilogue.
//
//   warpgroup 0, one thread   TMA:   a, b --> ring of stages                          waits for `empty`, ends `full`
//   warpgroups 1 and 2        wgmma: ring --> accumulators (registers)                waits for `full`, ends `empty`
//                             epilogue: accumulators --> staging tile --> TMA --> D
//
// A block takes tiles blockIdx.x, blockIdx.x + gridDim.x, ... The ring runs on from tile to tile: while the consumers
// finish one, the first stages of the next arrive, and D leaves during the next main loop.
//
// A cluster works on one tile, each block on a slice of K. Then every block adds up a share of the columns from the
// partial sums of all, in the order of their ranks, and finishes it. Pairs and squares have a tile a block, and share
// what they load: see HopperTile.
#pragma once
#include "hopper_copies.cuh"
#include "hopper_finish.cuh"
#include "hopper_low_rank_turns.cuh"
#include "hopper_tf32.cuh"

namespace rawops {

// Zeros for what no copy brings, missing rows of a, ranks that do not exist and boxes that the block does not have, in
// every stage, by all consumers: they make what is not part of D.
template <class Tile>
__device__ inline void clear_missing(uint32_t ring, int M, const Schedule<Tile>& schedule, const Consumer& self) {
    constexpr int THREADS = Tile::CONSUMERS * kWarpGroupSize, B_END = Tile::A_BYTES + Tile::B_BYTES;
    auto clear = [&](int begin, int end) {
#pragma unroll 1
        for (int stage = 0; stage < Tile::STAGES; ++stage) {
#pragma unroll 1
            for (int at = begin + (self.number * kWarpGroupSize + self.thread) * 16; at < end; at += THREADS * 16) {
                const float zeros[4] = {};
                store_shared(ring + stage * Tile::STAGE_BYTES + at, zeros);
            }
        }
    };
    const int missing = missing_rows<Tile>(M) * Tile::SPAN;
    int of_b = 0;
    if constexpr (Tile::kSpreads) of_b = schedule.at(schedule.first).template missing_bytes<Tile>();
    if (missing + of_b == 0 && !Tile::LowRank::kPacked) return;
    clear(Tile::A_BYTES - missing, Tile::A_BYTES);
    if constexpr (Tile::kSpreads) clear(B_END - of_b, B_END);
    if constexpr (Tile::LowRank::kPacked) clear(Tile::STAGE_BYTES - EightRanks::BYTES, Tile::STAGE_BYTES);
    fence_async_proxy();
    sync_group<3, THREADS>();
}

// acc = a @ b, and y = a @ lora_a if it rides, over the next k_blocks stages. One batch of products stays in
// flight: a stage is let go when those of the next have been issued. before_end() is called when all have been.
// `continues`: acc has sums of stages before.
struct Nothing {
    __device__ void operator()() const {}
};
template <class Tile, class BeforeEnd = Nothing>
__device__ inline void multiply_stages(typename Tile::Accumulators& acc, typename Tile::LowRank::Accumulators& y,
                                       RingPosition<Tile::STAGES>& slot, int k_blocks, const Exchange<Tile>& exchange,
                                       const Consumer& self, BeforeEnd before_end = {}, bool continues = false) {
    using A = typename Tile::OperandA;
    using B = typename Tile::OperandB;
    using LowRank = typename Tile::LowRank;
    auto let_go = [&](int stage) {
        if constexpr (Tile::kSquares) {  // at its own, at who is above or below, and at who is beside it
            if (self.thread < 3) barrier_arrive_at_rank(exchange.barriers.empty(stage), cluster_rank() ^ self.thread);
        } else if constexpr (Tile::kPairs) {
            if (self.thread < Tile::SHARERS) barrier_arrive_at_rank(exchange.barriers.empty(stage), self.thread);
        } else {
            if (self.leads()) barrier_arrive(exchange.barriers.empty(stage));
        }
    };
    int previous = 0;
#pragma unroll 1
    for (int block = 0; block < k_blocks; ++block) {
        const uint32_t stage = exchange.ring + slot.stage * Tile::STAGE_BYTES;
        const uint64_t a = A::descriptor(stage + self.row / 64 * A::ROWS_64), b = B::descriptor(stage + Tile::A_BYTES);
        barrier_wait(exchange.barriers.full(slot.stage), slot.phase);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < Tile::K_STEPS; ++step) {
            const bool accumulate = block > 0 || step > 0 || continues;
#pragma unroll
            for (int i = 0; i < Tile::ATOMS_M; ++i) {
                WgmmaAtom<typename Tile::T, Tile::BLOCK_N, Tile::kAKMajor, Tile::kBKMajor>::multiply(
                    acc[i], A::advance(a, i, step), B::advance(b, 0, step), accumulate);
            }
            if constexpr (LowRank::kRides) {
                using LoraA = typename LowRank::OperandA;
                const uint64_t lora_a = LoraA::descriptor(stage + Tile::A_BYTES + Tile::B_BYTES);
                Wgmma<LowRank::RANK>::template multiply<typename Tile::T, Tile::kAKMajor, LowRank::kAKMajor>(
                    y, A::advance(a, 0, step), LoraA::advance(lora_a, 0, step), accumulate);
            }
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (block > 0) let_go(previous);
        previous = slot.stage;
        slot.advance();
    }
    if constexpr (Tile::kPingPong) self.end_turn();
    before_end();
    wgmma_wait<0>();
    if (k_blocks > 0) let_go(previous);
#pragma unroll
    for (int i = 0; i < Tile::ATOMS_M; ++i) hold(acc[i]);
    if constexpr (LowRank::kRides) hold(y);
}

// values = the sums over the cluster, in the order of the ranks: four of them lie at place_of(group). The parts of some
// groups are under way together, no more than there are registers for: the way from another SM is long.
template <int CLUSTER, int COUNT, class PlaceOf>
__device__ inline void add_up_parts(float (&values)[COUNT], PlaceOf place_of) {
    constexpr int GROUPS = COUNT / 4, AT_A_TIME = max_of(16 / CLUSTER, 1);
#pragma unroll
    for (int begin = 0; begin < GROUPS; begin += AT_A_TIME) {
        float parts[AT_A_TIME][CLUSTER][4];
#pragma unroll
        for (int i = 0; i < AT_A_TIME && begin + i < GROUPS; ++i) {
#pragma unroll
            for (int rank = 0; rank < CLUSTER; ++rank) load_from_rank(parts[i][rank], place_of(begin + i), rank);
        }
#pragma unroll
        for (int i = 0; i < AT_A_TIME && begin + i < GROUPS; ++i) {
            float(&sum)[4] = four(&values[(begin + i) * 4]);
#pragma unroll
            for (int v = 0; v < 4; ++v) sum[v] = parts[i][0][v];
#pragma unroll
            for (int rank = 1; rank < CLUSTER; ++rank) {
#pragma unroll
                for (int v = 0; v < 4; ++v) sum[v] += parts[i][rank][v];
            }
            hold(sum);
        }
    }
}

// sum = the block's share of the columns of acc, added up over the cluster; y that rides is added up as a whole. The
// ring lends its memory, so it must not run on to another tile. All warps of the blocks take part in both barriers; the
// last cluster_wait() is the caller's, before the block exits.
template <class Tile>
__device__ inline void add_up_cluster(typename Tile::Finished& sum, const typename Tile::Accumulators& acc,
                                      typename Tile::LowRank::Accumulators& y, uint32_t ring, const Consumer& self) {
    constexpr int THREADS = Tile::CONSUMERS * kWarpGroupSize, GROUPS = Tile::BLOCK_N / 8;  // of four registers
    constexpr int Y_GROUPS = Tile::LowRank::kRides ? Tile::LowRank::RANK / 8 : 0, SHARE_GROUPS = Tile::SHARE / 8;
    const uint32_t own = ring + (self.number * kWarpGroupSize + self.thread) * 16;
    auto place = [&](int group) { return own + group * THREADS * 16; };
    sync_group<3, THREADS>();  // no product of this block reads the ring any more
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        store_shared(place(group), four(&acc[0][group * 4]));
    }
#pragma unroll
    for (int group = 0; group < Y_GROUPS; ++group) {
        store_shared(place(GROUPS + group), four(&y[group * 4]));
    }
    cluster_sync();  // the partial sums are there
    const int first = cluster_rank() * SHARE_GROUPS;
    add_up_parts<Tile::CLUSTER>(sum[0], [&](int group) {
        return place(group / SHARE_GROUPS * (Tile::COLS / 8) + first + group % SHARE_GROUPS);
    });
    if constexpr (Y_GROUPS > 0) add_up_parts<Tile::CLUSTER>(y, [&](int group) { return place(GROUPS + group); });
    cluster_arrive();  // and have been read
}

constexpr int kLastBlocks = 8;  // of K, during which the adapters of rows in order are looked at

// A consumer warpgroup: its tiles, one after the other.
template <class Tile, class Params>
__device__ inline void multiply_tiles(const GemmMaps& maps, const Params& params,
                                      const LowRankCallOf<Tile>* low_rank, const Schedule<Tile>& schedule, float alpha,
                                      const Exchange<Tile>& exchange, const Consumer& self) {
    constexpr int TURNS = Tile::kPingPong ? 2 : 1;
    const int begin = Tile::kPingPong ? self.number : 0, k_blocks = schedule.k_blocks;
    uint32_t turn_phase = self.number ^ 1;  // the first turn of consumer 0 is its own
    RingPosition<Tile::STAGES> slot;
    slot.skip(begin * k_blocks);
    RanksInTurnOf<Tile> ranks(low_rank, params.shape, exchange, self);
    clear_missing<Tile>(exchange.ring, params.shape.M, schedule, self);
    if constexpr (Tile::kWaits) await_launch_before();
#pragma unroll 1
    for (int index = schedule.first + begin * schedule.step; index < schedule.count; index += TURNS * schedule.step) {
        typename Tile::Accumulators acc;
        typename Tile::LowRank::Accumulators y;
        Work work = schedule.at(index);
        auto read_made_y = [&](int first) {
            if constexpr (Tile::LowRank::RANK > 0 && !Tile::LowRank::kRides && !Tile::kRanksInTurn) {
                const int row = work.m + self.row, M = params.shape.M;
                await_launch_before();
                read_y(y, *low_rank, first, int64_t(work.number) * M + row, M - row, self);
            }
        };
        if (k_blocks == 0) {
#pragma unroll
            for (int i = 0; i < Tile::ATOMS_M * Tile::WIDTH / 2; ++i) acc[0][i] = 0;
#pragma unroll
            for (int i = 0; i < Tile::LowRank::RANK / 2; ++i) y[i] = 0;
        }
        const int share_n = work.n + (Tile::CLUSTER > 1 ? cluster_rank() * Tile::SHARE : self.col);
        const TileBias<Tile> bias(params, work, share_n, self);
        const SumsOut<Tile> sums(params, work, share_n, self);
        const typename Tile::Factors factors(params, work, share_n, self, alpha);
        using Epilogue = typename Tile::Epilogue;
        const auto epilogue = Tile::Scaling::template epilogue<Epilogue>(params, work.batch, factors.alpha, work.m_end);
        const int apart = Tile::LowRank::kInOrder ? max_of(k_blocks - kLastBlocks, 0) : 0;
        if constexpr (Tile::LowRank::kInOrder) multiply_stages<Tile>(acc, y, slot, apart, exchange, self);
        auto passes = Tile::LowRank::template begin<Tile>(*low_rank, params.shape, work, self);
        ranks.fetch(work, 0);
        if constexpr (Tile::kPingPong) self.await_turn(turn_phase);
        if constexpr (Tile::Scaling::kPromotes) {
            Tile::Scaling::template multiply<Tile>(acc, params, work, slot, k_blocks, exchange, self);
        } else if constexpr (Tile::kTransposed) {
            multiply_transposed<Tile>(acc, slot, k_blocks, exchange, self);
        } else {
            multiply_stages<Tile>(acc, y, slot, k_blocks - apart, exchange, self, [&] { read_made_y(0); }, apart > 0);
        }
        auto finish = [&](typename Tile::Finished& sum) {
            if constexpr (Tile::kRanksInTurn) {
                await_launch_before();
                ranks.add(sum, work);
            } else if constexpr (Tile::LowRank::RANK > 0) {
#pragma unroll 1
                for (int first = 0; first < low_rank->rank; first += Tile::LowRank::RANK) {
                    if (first > 0) read_made_y(first);
                    const auto place = exchange.lora_b(slot);
                    barrier_wait(place.full, place.phase);
                    add_rank_product<Tile>(sum, y, *low_rank, low_rank->rank - first, place.address, self);
                    if (self.leads()) barrier_arrive(place.empty);
                    slot.advance();
                }
            }
            if constexpr (Tile::LowRank::kBeside) {
                Tile::LowRank::template add<Tile>(sum, slot, exchange, *low_rank, self);
            }
            if constexpr (Tile::kFinish == kPartial) {
                sums.write(sum);
            } else if constexpr (Tile::LowRank::kSorted) {
                Tile::LowRank::template finish<Tile>(passes, sum, epilogue, alpha, params, *low_rank, work, self);
            } else {
                finish_work<Tile>(sum, factors, epilogue, factors.alpha, bias, maps.d, work, self);
            }
        };
        if constexpr (Tile::CLUSTER > 1) {
            typename Tile::Finished sum;
            add_up_cluster<Tile>(sum, acc, y, exchange.ring, self);
            work.n = share_n;
            finish(sum);
            cluster_wait();
        } else {
            work.n = share_n;
            finish(acc);
        }
        slot.skip((TURNS - 1) * k_blocks);
        turn_phase ^= 1;
    }
    if (self.leads()) tma_store_wait_read();  // the block's memory ends with it
    if constexpr (!Tile::kWaits) await_launch_before();  // the next launch waits for this one alone
}

// What the block is to do; a grouped product looks at its offsets first.
template <class Tile>
__device__ inline Schedule<Tile> schedule_of(const GemmShape& shape, int raster_group, int k_blocks,
                                             const GroupOffsets* groups, char* shared) {
    if constexpr (Tile::kGrouped) {
        GroupTable table(shared + Tile::GROUPS_AT, groups->count);
        table.fill(*groups, shape.M, Tile::BLOCK_M);
        return {shape, raster_group, k_blocks, table};
    } else {
        return {shape, raster_group, k_blocks};
    }
}

// Whether a block can find its tiles before it may read what the launch before writes: the way there takes a while,
// most of it for the parameters to arrive.
template <class Tile, class Params> __device__ inline bool begins_early(const Params& params) {
    if constexpr (Tile::kGrouped || Tile::kScaled) return false;
    else return params.call.alpha.pointer == nullptr;
}

// What ask_for_b does, before it is known whether b is read.
template <class Tile>
__device__ inline void ask_for_scaled_b(const GemmMaps& maps, const GemmShape& shape, int raster_group) {
    const Schedule<Tile> schedule(shape, raster_group, ceil_div(shape.K, Tile::BLOCK_K));
    if (schedule.ahead == 0 || schedule.first >= schedule.count) return;
    const Work work = schedule.at(schedule.first);
    ask_for_b<Tile>(maps, schedule, work, work.matrix_of<Tile>(shape.b), shape.epilogue.cols, 1 << 30);
}

// The body of the kernels. With a cluster, the grid has a block for every slice of every tile.
template <class Tile, class Params>
__device__ inline void run_gemm(const GemmMaps& maps, const Params& params, const LowRankCallOf<Tile>* low_rank,
                                int raster_group, const GroupOffsets* groups = nullptr) {
    extern __shared__ __align__(1024) char shared[];
    start_next_launch();
    const Exchange<Tile> exchange(shared_address(shared));
    if (threadIdx.x == 0) {
        if constexpr (Tile::LowRank::kBeside) Tile::LowRank::template init<Tile>();
        exchange.init();
        prefetch_tensor_map(maps.a);
        prefetch_tensor_map(maps.b);
        if (!Tile::kByThreads) prefetch_tensor_map(maps.d);
    }
    if constexpr (Tile::kShares) {  // nothing comes from other blocks before their barriers are there
        cluster_arrive_relaxed();
        cluster_wait();
    } else {
        __syncthreads();
    }
    if constexpr (Tile::kStreams && Tile::kScaled) {
        if (threadIdx.x == 0) ask_for_scaled_b<Tile>(maps, params.shape, raster_group);
    }
    if (Tile::kWaits && !begins_early<Tile>(params)) await_launch_before();
    const float alpha = Tile::Scaling::factor(params);
    const int k_blocks = alpha == 0 ? 0 : ceil_div(params.shape.K, Tile::BLOCK_K);  // 0: a and b are not read
    const Schedule<Tile> schedule = schedule_of<Tile>(params.shape, raster_group, k_blocks, groups, shared);
    const int group = __shfl_sync(~0u, int(threadIdx.x) / kWarpGroupSize, 0);  // known to be uniform
    if (group == 0) {
        if constexpr (Tile::CONSUMERS == 2) release_registers<40>();
        if (threadIdx.x == 0) load_tiles<Tile>(maps, params.shape, low_rank, schedule, exchange);
        if constexpr (Tile::Scaling::LOADERS > 0) {
            if (threadIdx.x / kWarpSize == 1) Tile::Scaling::template load<Tile>(params, schedule, exchange);
        }
        if constexpr (Tile::LowRank::LOADERS > 0) {
            if (threadIdx.x / kWarpSize == 1) copy_lora_a<Tile>(params.shape, *low_rank, schedule, exchange);
        }
        if constexpr (Tile::LowRank::kBeside) {
            const int row = int(threadIdx.x) - (kWarpGroupSize - Tile::LowRank::FOLLOWERS);
            if (row >= 0) Tile::LowRank::template follow<Tile>(*low_rank, row);
        }
        if constexpr (Tile::CLUSTER > 1) {  // the barriers of add_up_cluster count these warps, too
            __syncwarp();
            cluster_sync();
            cluster_sync();
        }
    } else {
        if constexpr (Tile::CONSUMERS == 2) claim_registers<232>();
        const int number = group - 1, thread = threadIdx.x % kWarpGroupSize;
        char* staging = shared + Tile::STAGING_AT + number * Tile::STAGING_BYTES;
        char* slabs = shared + Tile::SLABS_AT + number * Tile::SLABS_BYTES;
        const int row = Tile::ROWS == Tile::BLOCK_M ? 0 : number * Tile::ROWS;
        const int col = Tile::kByColumns ? number * Tile::WIDTH : 0;
        const Consumer self{number, thread, row, col, staging, slabs, exchange.turns};
        const float factor = params.shape.partial_stride != 0 ? 1 : alpha;  // a partial sum gets it with the others
        multiply_tiles<Tile>(maps, params, low_rank, schedule, factor, exchange, self);
    }
}

}  // namespace rawops
