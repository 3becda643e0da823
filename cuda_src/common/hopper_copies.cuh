// How tiles of a and b come to the Hopper GEMM: the ring's place in shared memory, and the threads that fill it.
#pragma once
#include "hopper_low_rank.cuh"
#include "hopper_tile.cuh"

namespace rawops {

struct GemmMaps {
    // Axes from the outermost: three of the batch, then the two of the matrix as they lie in memory. Of a transposed
    // tile a and b are in each other's place.
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

    // Where consumers take turns each has its own: the barrier that tells that it has come.
    __device__ uint32_t lora_b_of(int consumer) const {
        return consumer == 0 ? lora_b_barriers.full(0) : lora_b_barriers.empty(0);
    }

    // By one thread; a __syncthreads() must follow. Spread over the lanes of a warp it takes longer: they wait for the
    // fence one after the other.
    __device__ void init() const {
        if constexpr (Tile::kPingPong) {
            barrier_init(turns, 1);
            barrier_init(turns + 8, 1);
        }
        if constexpr (Tile::LowRank::RANK > 0) lora_b_barriers.init(Tile::kRanksInTurn ? 1 : Tile::CONSUMERS);
        const int releases = (Tile::kPingPong ? 1 : Tile::CONSUMERS) * Tile::Scaling::RELEASES * Tile::RELEASERS;
        barriers.init(releases, 1 + Tile::Scaling::LOADERS + Tile::LowRank::LOADERS);
    }
};

// For whom: this block, this block and nobody after it, two blocks of a cluster; nobody yet, but the L2 is to have it.
enum Reader : int { kOwn, kOnce, kForBoth, kLater };

// Starts the copies of one operand's part of a stage, EXTENT elements along MN from `mn` on and K_BYTES along K. They
// may come in PARTS parts, whose places in the matrix are `distance` apart; MN-major ones in boxes of MN_BOX. At
// most `limit` boxes.
template <bool kKMajor, int EXTENT, int PARTS = 1, int MN_BOX = 64, int K_BYTES = 128, int kReader = kOwn>
__device__ inline void load_operand(uint32_t destination, const TensorMap& map, TensorCoordinates from, int mn, int k,
                                    uint32_t full, int distance = 0, int limit = 1 << 30) {
    constexpr int BOX = kKMajor ? EXTENT / PARTS : MN_BOX, BOXES = EXTENT / BOX;
#pragma unroll
    for (int box = 0; box < BOXES; ++box) {
        if (box >= limit) break;
        const int at = mn + box % (BOXES / PARTS) * BOX + box / (BOXES / PARTS) * distance;
        from.at[0] = kKMajor ? k : at;
        from.at[1] = kKMajor ? at : k;
        const uint32_t to = destination + box * BOX * K_BYTES;
        if constexpr (kReader == kOnce) tma_load_once(to, map, from, full);
        else if constexpr (kReader == kForBoth) tma_load_multicast(to, map, from, full, 3);
        else if constexpr (kReader == kLater) tma_prefetch(map, from);
        else tma_load(to, map, from, full);
    }
}

// The same of one half of it, which is one box: half of MN, but half of K where all of MN is one box across. It is for
// the blocks of `ranks`.
template <bool kKMajor, int EXTENT, int kReader>
__device__ inline void load_half(uint32_t destination, const TensorMap& map, TensorCoordinates from, int mn, int k,
                                 int half, uint32_t full, int ranks) {
    constexpr bool kHalfOfK = !kKMajor && EXTENT == 64;
    static_assert(kKMajor || EXTENT <= 128, "one box");
    (kHalfOfK ? k : mn) += half * EXTENT / 2;
    from.at[0] = kKMajor ? k : mn;
    from.at[1] = kKMajor ? mn : k;
    if constexpr (kReader == kLater) tma_prefetch(map, from);
    else tma_load_multicast(destination + half * EXTENT / 2 * 128, map, from, full, ranks);
}

// Rows of a's tile that no copy brings, where a has fewer than a tile: the box is as high as a, in eights.
template <class Tile> __device__ inline int missing_rows(int M) {
    return Tile::kAKMajor && M < Tile::BLOCK_M ? Tile::BLOCK_M - ceil_div(M, 8) * 8 : 0;
}

// Asks the L2 for the first blocks of K of a tile, while the launch before is still at work. What several tiles read,
// the first of them asks for.
template <class Tile>
__device__ inline void ask_ahead(const GemmMaps& maps, const Work& work, const TensorCoordinates& a,
                                 const TensorCoordinates& b, int first_k, int blocks) {
    constexpr int COLS = Tile::BLOCK_N / Tile::SHARERS;  // of a pair, each block asks for half
    const int rank = Tile::kShares ? cluster_rank() : 0, n = work.n + (Tile::kPairs ? rank * COLS : 0);
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
        const int k = first_k + block * Tile::BLOCK_K;
        if constexpr (Tile::kSquares) {
            if (work.n < Tile::BLOCK_N * 2) {
                load_half<Tile::kAKMajor, Tile::BLOCK_M, kLater>(0, maps.a, a, work.m, k, rank / 2, 0, 0);
            }
            if (work.m < Tile::BLOCK_M * 2) {
                load_half<Tile::kBKMajor, Tile::BLOCK_N, kLater>(0, maps.b, b, work.n, k, rank % 2, 0, 0);
            }
            continue;
        }
        if (work.n == 0) load_operand<Tile::kAKMajor, Tile::BLOCK_M, 1, 64, 128, kLater>(0, maps.a, a, work.m, k, 0);
        if (work.m < Tile::BLOCK_M * Tile::SHARERS) {
            load_operand<Tile::kBKMajor, COLS, 1, 64, 128, kLater>(0, maps.b, b, n, k, 0);
        }
    }
}

// Asks the L2 for the first stages of b of a tile of few rows, as many as the host says.
template <class Tile>
__device__ inline void ask_for_b(const GemmMaps& maps, const Schedule<Tile>& schedule, const Work& work,
                                 const TensorCoordinates& b, int up, int boxes) {
#pragma unroll 1
    for (int block = 0; block < min_of(schedule.ahead, schedule.k_blocks); ++block) {
        const int k = (schedule.first_block + block) * Tile::BLOCK_K;
        load_operand<Tile::kBKMajor, Tile::BLOCK_N, Tile::PARTS, 64, 128, kLater>(0, maps.b, b, work.n, k, 0, up,
                                                                                  boxes);
    }
}

// Starts the copies of b to a stage.
template <class Tile>
__device__ inline void load_b(const GemmMaps& maps, const GemmShape& shape, const Work& work,
                              const TensorCoordinates& b, int k, uint32_t stage, uint32_t full, int up, int boxes) {
    const uint32_t to = stage + Tile::A_BYTES;
    if constexpr (Tile::kSquares) {  // for who is above or below
        const int rank = cluster_rank();
        load_half<Tile::kBKMajor, Tile::BLOCK_N, kForBoth>(to, maps.b, b, work.n, k, rank % 2, full, 3 << (rank & 2));
    } else if constexpr (Tile::kPairs) {
        constexpr int HALF = Tile::BLOCK_N / 2;
        const int skipped = cluster_rank() * HALF, n = work.n + skipped;
        load_operand<Tile::kBKMajor, HALF, 1, 64, 128, kForBoth>(to + skipped * 128, maps.b, b, n, k, full);
    } else if (Tile::kStreams && shape.M <= Tile::BLOCK_M && shape.batches == 1) {
        load_operand<Tile::kBKMajor, Tile::BLOCK_N, Tile::PARTS, 64, 128, kOnce>(to, maps.b, b, work.n, k, full, up,
                                                                                 boxes);
    } else {
        load_operand<Tile::kBKMajor, Tile::BLOCK_N, Tile::PARTS>(to, maps.b, b, work.n, k, full, up);
    }
}

// Starts the copies of a to a stage, and of lora_a that rides.
template <class Tile>
__device__ inline void load_a(const GemmMaps& maps, const LowRankCallOf<Tile>* low_rank, const Work& work,
                              const TensorCoordinates& a, int k, uint32_t stage, uint32_t full) {
    using LowRank = typename Tile::LowRank;
    if constexpr (Tile::kSquares) {  // for who is beside it
        const int rank = cluster_rank();
        load_half<Tile::kAKMajor, Tile::BLOCK_M, kForBoth>(stage, maps.a, a, work.m, k, rank / 2, full, 5 << rank % 2);
    } else {
        load_operand<Tile::kAKMajor, Tile::BLOCK_M, 1, Tile::SPAN / Tile::ITEM_BYTES>(stage, maps.a, a, work.m, k,
                                                                                      full);
    }
    if constexpr (LowRank::kPacked) {
        tma_load(stage + Tile::A_BYTES + Tile::B_BYTES, low_rank->a, {0, k / 8, 0, 0, 0}, full);
    } else if constexpr (LowRank::kRides && LowRank::LOADERS == 0) {
        load_operand<LowRank::kAKMajor, LowRank::RANK, 1, LowRank::RANK>(stage + Tile::A_BYTES + Tile::B_BYTES,
                                                                         low_rank->a, {}, 0, k, full);
    }
}

// Starts the copies of lora_b for a tile, RANK ranks at a time: through the ring, or beside it.
template <class Tile>
__device__ inline void load_lora_b(RingPosition<Tile::STAGES>& slot, const LowRankCallOf<Tile>* low_rank,
                                   const Work& work, int up, const Exchange<Tile>& exchange) {
    using LowRank = typename Tile::LowRank;
    const int n = work.n + (Tile::CLUSTER > 1 ? cluster_rank() * Tile::SHARE : 0);
#pragma unroll 1
    for (int rank = 0; rank < low_rank->rank; rank += LowRank::RANK) {
        const auto place = exchange.lora_b(slot);
        barrier_wait(place.empty, place.phase ^ 1);
        barrier_arrive_expect(place.full, Tile::LORA_B_BYTES);
        load_operand<LowRank::kBKMajor, Tile::SHARE * Tile::PARTS, Tile::PARTS, Tile::LORA_B_BOX, LowRank::RANK * 2>(
            place.address, low_rank->b, {}, n, rank, place.full, up);
        slot.advance();
    }
}

// The producer: one thread that keeps the ring full.
template <class Tile>
__device__ inline void load_tiles(const GemmMaps& maps, const GemmShape& shape, const LowRankCallOf<Tile>* low_rank,
                                  const Schedule<Tile>& schedule, const Exchange<Tile>& exchange) {
    using LowRank = typename Tile::LowRank;
    const int missing = LowRank::kPacked ? EightRanks::BYTES : LowRank::LOADERS > 0 ? LowRank::RANK * 128 : 0;
    const int whole = Tile::STAGE_BYTES - missing_rows<Tile>(shape.M) * Tile::SPAN - missing;
    RingPosition<Tile::STAGES> slot;
#pragma unroll 1
    for (int index = schedule.first; index < schedule.count; index += schedule.step) {
        const Work work = schedule.at(index);
        const int bytes = whole - work.missing_bytes<Tile>();
        const TensorCoordinates a = work.matrix_of<Tile>(Tile::kTransposed ? shape.b : shape.a);
        const TensorCoordinates b = work.matrix_of<Tile>(Tile::kTransposed ? shape.a : shape.b);
        const int up = shape.epilogue.cols, boxes = Tile::kSpreads ? work.boxes : 1 << 30;
        auto k_of = [&](int block) {
            const int first = Tile::kFinish == kPartial ? work.number * schedule.k_blocks : schedule.first_block;
            return (first + block) * Tile::BLOCK_K;
        };
        if (Tile::kWaits && index == schedule.first) {
            if constexpr (Tile::kFinish == kPartial) {
                const int blocks = min_of(schedule.k_blocks, shape.k_per_split / Tile::BLOCK_K);
                ask_ahead<Tile>(maps, work, a, b, k_of(0), blocks);
            } else if constexpr (Tile::kStreams && !Tile::kScaled) {  // which has asked before it read its scales
                ask_for_b<Tile>(maps, schedule, work, b, up, boxes);
            }
            await_launch_before();
        }
        int ahead = 0;
        if constexpr (LowRank::kSorted && !LowRank::kInOrder) {
            if (index == schedule.first) {  // a is being sorted, b is there
                ahead = min_of(schedule.k_blocks, Tile::STAGES);
#pragma unroll 1
                for (int block = 0; block < ahead; ++block) {
                    barrier_arrive_expect(exchange.barriers.full(block), bytes);
                    load_b<Tile>(maps, shape, work, b, k_of(block), exchange.ring + block * Tile::STAGE_BYTES,
                                 exchange.barriers.full(block), up, boxes);
                }
                await_launch_before();
            }
        }
#pragma unroll 1
        for (int block = 0; block < schedule.k_blocks; ++block) {
            const uint32_t stage = exchange.ring + slot.stage * Tile::STAGE_BYTES;
            const uint32_t full = exchange.barriers.full(slot.stage);
            const int k = k_of(block);
            if (!LowRank::kSorted || block >= ahead) {
                barrier_wait(exchange.barriers.empty(slot.stage), slot.phase ^ 1);
                barrier_arrive_expect(full, bytes);
                load_b<Tile>(maps, shape, work, b, k, stage, full, up, boxes);
            }
            load_a<Tile>(maps, low_rank, work, a, k, stage, full);
            slot.advance();
        }
        if constexpr (LowRank::RANK > 0 && !Tile::kRanksInTurn) {
            load_lora_b<Tile>(slot, low_rank, work, shape.epilogue.cols, exchange);
        }
        if constexpr (LowRank::kBeside) {
            LowRank::template load<Tile>(slot, exchange, *low_rank, work.n, shape.epilogue.cols);
        }
    }
    if constexpr (Tile::kShares) {  // other blocks' consumers let go of stages here: it stays until they have
#pragma unroll 1
        for (int i = 0; i < Tile::STAGES; ++i) {
            barrier_wait(exchange.barriers.empty(slot.stage), slot.phase ^ 1);
            slot.advance();
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
                cp_async<16>(to + swizzled_offset<32>(row, half), exists ? from : low_rank.elements,
                             exists ? bytes : 0);
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

}  // namespace rawops
