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
// partial sums of all, in the order of their ranks, and finishes it.
#pragma once
#include "hopper_finish.cuh"
#include "hopper_low_rank.cuh"
#include "hopper_tf32.cuh"

namespace rawops {

struct GemmMaps {
    // Axes from the outermost: three of the batch, then the two of the matrix as they lie in memory. Of a transposed tile
    // a and b are in each other's place.
    TensorMap a, b, d;
};

// Shared addresses of what producer and consumers pass each other.
template <class Tile> struct Exchange {
    uint32_t ring, scales;
    RingBarriers<Tile::STAGES> barriers;
    RingBarriers<1> lora_b_barriers;
    uint32_t turns;

    __device__ explicit Exchange(uint32_t shared)
        : ring(shared),
          scales(shared + Tile::SCALES_AT),
          barriers{shared + Tile::BARRIERS_AT},
          lora_b_barriers{barriers.base + barriers.BYTES},
          turns(lora_b_barriers.base + lora_b_barriers.BYTES) {}

    // Where lora_b is for a tile that has gone through the stages before `slot`: in the place of b in that one. A block
    // of a cluster, which has one tile, has a place for it.
    struct Place {
        uint32_t address, full, empty, phase;
    };
    __device__ Place lora_b(const RingPosition<Tile::STAGES>& slot) const {
        if constexpr (Tile::CLUSTER > 1) {
            return {ring + Tile::LORA_B_AT, lora_b_barriers.full(0), lora_b_barriers.empty(0), 0};
        } else {
            const uint32_t address = ring + slot.stage * Tile::STAGE_BYTES + Tile::A_BYTES;
            return {address, barriers.full(slot.stage), barriers.empty(slot.stage), slot.phase};
        }
    }

    // By one thread; a __syncthreads() must follow. Spread over the lanes of a warp it takes longer: they wait for the
    // fence one after the other.
    __device__ void init() const {
        if constexpr (Tile::kPingPong) {
            barrier_init(turns, 1);
            barrier_init(turns + 8, 1);
        }
        if constexpr (Tile::LowRank::RANK > 0) lora_b_barriers.init(Tile::CONSUMERS);
        const int releases = (Tile::kPingPong ? 1 : Tile::CONSUMERS) * Tile::Scaling::RELEASES * Tile::SHARERS;
        barriers.init(releases, 1 + Tile::Scaling::LOADERS + Tile::LowRank::LOADERS);
    }
};

// For whom: this block, this block and nobody after it, both blocks of a pair.
enum Reader : int { kOwn, kOnce, kForBoth };

// Starts the copies of one operand's part of a stage, EXTENT elements along MN from `mn` on and K_EXTENT along K. They
// may come in PARTS parts, whose places in the matrix are `distance` apart; MN-major ones in boxes of MN_BOX.
template <bool kKMajor, int EXTENT, int PARTS = 1, int MN_BOX = 64, int K_BYTES = 128, int kReader = kOwn>
__device__ inline void load_operand(uint32_t destination, const TensorMap& map, TensorCoordinates from, int mn, int k,
                                    uint32_t full, int distance = 0) {
    constexpr int BOX = kKMajor ? EXTENT / PARTS : MN_BOX, BOXES = EXTENT / BOX;
#pragma unroll
    for (int box = 0; box < BOXES; ++box) {
        const int at = mn + box % (BOXES / PARTS) * BOX + box / (BOXES / PARTS) * distance;
        from.at[0] = kKMajor ? k : at;
        from.at[1] = kKMajor ? at : k;
        if constexpr (kReader == kOnce) tma_load_once(destination + box * BOX * K_BYTES, map, from, full);
        else if constexpr (kReader == kForBoth) tma_load_multicast(destination + box * BOX * K_BYTES, map, from, full, 3);
        else tma_load(destination + box * BOX * K_BYTES, map, from, full);
    }
}

// Rows of a's tile that no copy brings, where a has fewer than a tile: the box is as high as a, in eights.
template <class Tile> __device__ inline int missing_rows(int M) {
    return Tile::kAKMajor && M < Tile::BLOCK_M ? Tile::BLOCK_M - ceil_div(M, 8) * 8 : 0;
}

// Their zeros, and those of ranks that do not exist, in every stage, by all consumers: they make what is not part of D.
template <class Tile> __device__ inline void clear_missing(uint32_t ring, int M, const Consumer& self) {
    constexpr int THREADS = Tile::CONSUMERS * kWarpGroupSize;
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
    if (missing == 0 && !Tile::LowRank::kPacked) return;
    clear(Tile::A_BYTES - missing, Tile::A_BYTES);
    if constexpr (Tile::LowRank::kPacked) clear(Tile::STAGE_BYTES - EightRanks::BYTES, Tile::STAGE_BYTES);
    fence_async_proxy();
    sync_group<3, THREADS>();
}

// The producer: one thread that keeps the ring full.
template <class Tile>
__device__ inline void load_tiles(const GemmMaps& maps, const GemmShape& shape, const LowRankCallOf<Tile>* low_rank,
                                  const Schedule<Tile>& schedule, const Exchange<Tile>& exchange) {
    using LowRank = typename Tile::LowRank;
    const int missing = LowRank::kPacked ? EightRanks::BYTES : LowRank::LOADERS > 0 ? LowRank::RANK * 128 : 0;
    const int bytes = Tile::STAGE_BYTES - missing_rows<Tile>(shape.M) * Tile::SPAN - missing;
    RingPosition<Tile::STAGES> slot;
#pragma unroll 1
    for (int index = schedule.first; index < schedule.count; index += schedule.step) {
        const Work work = schedule.at(index);
        const TensorCoordinates a = work.matrix_of(Tile::kTransposed ? shape.b : shape.a);
        const TensorCoordinates b = work.matrix_of(Tile::kTransposed ? shape.a : shape.b);
        auto load_b = [&](int block, uint32_t stage, uint32_t full) {
            const int k = (schedule.first_block + block) * Tile::BLOCK_K;
            const uint32_t to = stage + Tile::A_BYTES;
            const int up = shape.epilogue.cols;
            if constexpr (Tile::kPairs) {
                constexpr int HALF = Tile::BLOCK_N / 2;
                const int skipped = cluster_rank() * HALF;
                load_operand<Tile::kBKMajor, HALF, 1, 64, 128, kForBoth>(to + skipped * 128, maps.b, b, work.n + skipped, k,
                                                                         full);
            } else if (Tile::kStreams && shape.M <= Tile::BLOCK_M && shape.batches == 1) {
                load_operand<Tile::kBKMajor, Tile::BLOCK_N, Tile::PARTS, 64, 128, kOnce>(to, maps.b, b, work.n, k, full, up);
            } else {
                load_operand<Tile::kBKMajor, Tile::BLOCK_N, Tile::PARTS>(to, maps.b, b, work.n, k, full, up);
            }
        };
        if (Tile::kWaits && index == schedule.first) await_launch_before();
        int ahead = 0;
        if constexpr (LowRank::kSorted && !LowRank::kInOrder) {
            if (index == schedule.first) {  // a is being sorted, b is there
                ahead = min_of(schedule.k_blocks, Tile::STAGES);
#pragma unroll 1
                for (int block = 0; block < ahead; ++block) {
                    barrier_arrive_expect(exchange.barriers.full(block), bytes);
                    load_b(block, exchange.ring + block * Tile::STAGE_BYTES, exchange.barriers.full(block));
                }
                await_launch_before();
            }
        }
#pragma unroll 1
        for (int block = 0; block < schedule.k_blocks; ++block) {
            const uint32_t stage = exchange.ring + slot.stage * Tile::STAGE_BYTES;
            const uint32_t full = exchange.barriers.full(slot.stage);
            const int k = (schedule.first_block + block) * Tile::BLOCK_K;
            if (!LowRank::kSorted || block >= ahead) {
                barrier_wait(exchange.barriers.empty(slot.stage), slot.phase ^ 1);
                barrier_arrive_expect(full, bytes);
                load_b(block, stage, full);
            }
            load_operand<Tile::kAKMajor, Tile::BLOCK_M, 1, Tile::SPAN / Tile::ITEM_BYTES>(stage, maps.a, a, work.m, k,
                                                                                          full);
            if constexpr (LowRank::kPacked) {
                tma_load(stage + Tile::A_BYTES + Tile::B_BYTES, low_rank->a, {0, k / 8, 0, 0, 0}, full);
            } else if constexpr (LowRank::kRides && LowRank::LOADERS == 0) {
                load_operand<LowRank::kAKMajor, LowRank::RANK, 1, LowRank::RANK>(
                    stage + Tile::A_BYTES + Tile::B_BYTES, low_rank->a, {}, 0, k, full);
            }
            slot.advance();
        }
        if constexpr (LowRank::RANK > 0) {
            const int n = work.n + (Tile::CLUSTER > 1 ? cluster_rank() * Tile::SHARE : 0);
#pragma unroll 1
            for (int rank = 0; rank < low_rank->rank; rank += LowRank::RANK) {
                const auto place = exchange.lora_b(slot);
                barrier_wait(place.empty, place.phase ^ 1);
                barrier_arrive_expect(place.full, Tile::LORA_B_BYTES);
                load_operand<LowRank::kBKMajor, Tile::SHARE * Tile::PARTS, Tile::PARTS, Tile::BOX_COLS,
                             LowRank::RANK * 2>(place.address, low_rank->b, {}, n, rank, place.full,
                                                shape.epilogue.cols);
                slot.advance();
            }
        }
    }
}

// A warp that copies lora_a, 16 ranks, to the stages.
template <class Tile>
__device__ inline void copy_lora_a(const GemmShape& shape, const LowRankCall& low_rank, const Schedule<Tile>& schedule,
                                   const Exchange<Tile>& exchange) {
    using T = typename Tile::T;
    const int lane = threadIdx.x % kWarpSize, half = lane % 2, bytes = clamp(low_rank.rank - half * 8, 0, 8) * 2;
    StageCopies<Tile::STAGES, min_of(Tile::STAGES - 2, 3)> copies{exchange.barriers};
    RingPosition<Tile::STAGES> slot;
    await_launch_before();
#pragma unroll 1
    for (int index = schedule.first; index < schedule.count; index += schedule.step) {
#pragma unroll 1
        for (int block = 0; block < schedule.k_blocks; ++block) {
            const uint32_t to = exchange.ring + slot.stage * Tile::STAGE_BYTES + Tile::A_BYTES + Tile::B_BYTES;
            const int k = (schedule.first_block + block) * Tile::BLOCK_K;
            barrier_wait(exchange.barriers.empty(slot.stage), slot.phase ^ 1);
#pragma unroll
            for (int row = lane / 2; row < Tile::BLOCK_K; row += kWarpSize / 2) {
                const T* from = static_cast<const T*>(low_rank.elements) + (k + row) * low_rank.a_row + half * 8;
                const bool exists = k + row < shape.K && bytes > 0;
                cp_async<16>(to + swizzled_offset<32>(row, half), exists ? from : low_rank.elements, exists ? bytes : 0);
            }
            copies.commit();
            slot.advance();
        }
        if constexpr (Tile::CLUSTER == 1) {  // lora_b comes through the ring
            barrier_wait(exchange.barriers.empty(slot.stage), slot.phase ^ 1);
            copies.commit();
            slot.advance();
        }
    }
    copies.finish();
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
        if constexpr (Tile::kPairs) {
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
    clear_missing<Tile>(exchange.ring, params.shape.M, self);
    if constexpr (Tile::kWaits) await_launch_before();
#pragma unroll 1
    for (int index = schedule.first + begin * schedule.step; index < schedule.count; index += TURNS * schedule.step) {
        typename Tile::Accumulators acc;
        typename Tile::LowRank::Accumulators y;
        Work work = schedule.at(index);
        auto read_made_y = [&](int first) {
            if constexpr (Tile::LowRank::RANK > 0 && !Tile::LowRank::kRides) {
                const int row = work.m + self.row, M = params.shape.M;
                await_launch_before();
                read_y<Tile>(y, *low_rank, first, int64_t(work.number) * M + row, M - row, self);
            }
        };
        if (k_blocks == 0) {
#pragma unroll
            for (int i = 0; i < Tile::ATOMS_M * Tile::BLOCK_N / 2; ++i) acc[0][i] = 0;
#pragma unroll
            for (int i = 0; i < Tile::LowRank::RANK / 2; ++i) y[i] = 0;
        }
        const int share_n = Tile::CLUSTER > 1 ? work.n + cluster_rank() * Tile::SHARE : work.n;
        const TileBias<Tile> bias(params, work, share_n, self);
        const typename Tile::Factors factors(params, work, share_n, self, alpha);
        const int apart = Tile::LowRank::kInOrder ? max_of(k_blocks - kLastBlocks, 0) : 0;
        if constexpr (Tile::LowRank::kInOrder) multiply_stages<Tile>(acc, y, slot, apart, exchange, self);
        auto passes = Tile::LowRank::template begin<Tile>(*low_rank, params.shape, work, self);
        if constexpr (Tile::kPingPong) self.await_turn(turn_phase);
        if constexpr (Tile::Scaling::kPromotes) {
            Tile::Scaling::template multiply<Tile>(acc, params, work, schedule.first_block, slot, k_blocks, exchange, self);
        } else if constexpr (Tile::kTransposed) {
            multiply_transposed<Tile>(acc, slot, k_blocks, exchange, self);
        } else {
            multiply_stages<Tile>(acc, y, slot, k_blocks - apart, exchange, self, [&] { read_made_y(0); }, apart > 0);
        }
        using Epilogue = typename Tile::Epilogue;
        const auto epilogue = Tile::Scaling::template epilogue<Epilogue>(params, work.batch, factors.alpha, work.m_end);
        auto finish = [&](typename Tile::Finished& sum) {
            if constexpr (Tile::LowRank::RANK > 0) {
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
            if constexpr (Tile::LowRank::kSorted) {
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

// Whether a block can find its tiles before it may read what the launch before writes: the way there takes a while, most
// of it for the parameters to arrive.
template <class Tile, class Params> __device__ inline bool begins_early(const Params& params) {
    if constexpr (Tile::kGrouped || !is_same<typename Tile::Scaling, NoScaling>) return false;
    else return params.call.alpha.pointer == nullptr;
}

// The body of the kernels. With a cluster, the grid has a block for every slice of every tile.
template <class Tile, class Params>
__device__ inline void run_gemm(const GemmMaps& maps, const Params& params, const LowRankCallOf<Tile>* low_rank,
                                int raster_group, const GroupOffsets* groups = nullptr) {
    extern __shared__ __align__(1024) char shared[];
    start_next_launch();
    const Exchange<Tile> exchange(shared_address(shared));
    if (threadIdx.x == 0) {
        exchange.init();
        prefetch_tensor_map(maps.a);
        prefetch_tensor_map(maps.b);
        if (Tile::kFinish != kDirect) prefetch_tensor_map(maps.d);
    }
    if constexpr (Tile::kPairs) cluster_sync();  // nothing comes from the other block before
    else __syncthreads();
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
        const Consumer self{number, thread, Tile::kPingPong ? 0 : number * 64, staging, slabs, exchange.turns};
        const float factor = params.shape.partial_stride != 0 ? 1 : alpha;  // a partial sum gets it with the others
        multiply_tiles<Tile>(maps, params, low_rank, schedule, factor, exchange, self);
    }
    if constexpr (Tile::kPairs) {  // nor after
        __syncwarp();
        cluster_sync();
    }
}

}  // namespace rawops
