// The Hopper GEMM on up to 64 rows, each with an adapter of its own of up to sixteen ranks, or none: behind the stages
// of K the ring brings b of all adapters that the rows have, some of them a stage, and wgmma adds y @ b adapter by
// adapter, with zeros for y of the rows that have another one. So no row depends on which adapters the others have.
#pragma once
#include "adapters_beside.cuh"
#include "hopper_adapter_turns.cuh"
#include "hopper_copies.cuh"

namespace rawops {

// What a block that multiplies x with the weight keeps of the adapters, and the barriers: `known` tells of the rows,
// `made` of y.
struct BesideMemory {
    uint64_t known, made;
    BesideRows rows;
    alignas(16) float y[kBesideRows][kBesideRanks];  // 0 where there is no adapter
};

// In the place of a LowRank of hopper_tile.cuh.
struct RowsBeside : NotSorted {
    using Call = AdaptersBeside;
    static constexpr int RANK = 0;
    static constexpr bool kRides = false, kPacked = false, kBeside = true;
    using Accumulators = float[1];

    static constexpr int FOLLOWERS = kBesideRows;  // the last threads of the first warpgroup

    template <class Tile> struct Stage {
        // Where b is in a stage, behind the rows of x that stay zero.
        static constexpr int AT = Tile::A_BYTES, BYTES = Tile::BLOCK_N * 32, COUNT = Tile::B_BYTES / BYTES;
        static_assert(Tile::ROWS == kBesideRows && Tile::CONSUMERS == 1 && Tile::CLUSTER == 1, "one has all rows");
    };
    template <class Tile> static __device__ BesideMemory& memory() {
        extern __shared__ __align__(1024) char shared[];
        return *reinterpret_cast<BesideMemory*>(shared + Tile::GROUPS_AT);
    }

    // By one thread, before the barriers of the ring.
    template <class Tile> static __device__ void init() {
        barrier_init(shared_address(&memory<Tile>().known), FOLLOWERS);
        barrier_init(shared_address(&memory<Tile>().made), FOLLOWERS);
    }

    // The followers: one for each row.
    template <class Tile> static __device__ void follow(const Call& call, int row) {
        BesideMemory& own = memory<Tile>();
        auto sync = [] { sync_group<4, FOLLOWERS>(); };
        await_launch_before();
        const bool has_adapter = find_slot(own.rows, call, row, sync).slot < call.max_loras;
        barrier_arrive(shared_address(&own.known));
        await_makers(call);
#pragma unroll
        for (int i = 0; i < kBesideRanks; i += 4) {
            const auto* from = reinterpret_cast<const float4*>(call.y + row * kBesideRanks + i);
            *reinterpret_cast<float4*>(&own.y[row][i]) = has_adapter ? load_past_l1(from) : float4{};
        }
        barrier_arrive(shared_address(&own.made));
        sync();  // all of them have seen that it is made
        if (row == 0 && atomicAdd(call.counters + 1, 1) == int(gridDim.x) - call.makers - 1) {
            atomicExch(call.counters, 0);
            atomicExch(call.counters + 1, 0);
        }
    }

    // The producer's part of a tile, behind the stages of K.
    template <class Tile>
    static __device__ void load(RingPosition<Tile::STAGES>& slot, const Exchange<Tile>& exchange, const Call& call,
                                int n, int cols) {
        const BesideMemory& own = memory<Tile>();
        barrier_wait(shared_address(&own.known), 0);
        uint64_t todo = BesideRows::joined(own.rows.firsts);
#pragma unroll 1
        while (todo != 0) {
            const uint32_t full = exchange.barriers.full(slot.stage);
            const int count = min_of(__popcll(todo), Stage<Tile>::COUNT);
            barrier_wait(exchange.barriers.empty(slot.stage), slot.phase ^ 1);
            barrier_arrive_expect(full, count * Stage<Tile>::BYTES);
#pragma unroll 1
            for (int i = 0; i < count; ++i, todo &= todo - 1) {
                const uint32_t stage = exchange.ring + slot.stage * Tile::STAGE_BYTES + Stage<Tile>::AT;
                load_operand<true, Tile::BLOCK_N, Tile::PARTS, 64, 32>(
                    stage + i * Stage<Tile>::BYTES, call.b, {0, 0, own.rows.slot_of_first(todo)}, n, 0, full, cols);
            }
            slot.advance();
        }
    }

    // The consumer's part of a tile: acc += y @ b.
    template <class Tile>
    static __device__ void add(typename Tile::Finished& acc, RingPosition<Tile::STAGES>& slot,
                               const Exchange<Tile>& exchange, const Call& call, const Consumer& self) {
        using T = typename Tile::T;
        using Operand = WgmmaOperand<true, 16, 32>;
        const BesideMemory& own = memory<Tile>();
        barrier_wait(shared_address(&own.known), 0);
        uint64_t todo = BesideRows::joined(own.rows.firsts);
        if (todo == 0) return;
        barrier_wait(shared_address(&own.made), 0);
        const int row = self.warp_row() + self.lane() / 4;
        const int slots[2] = {own.rows.slots[row], own.rows.slots[row + 8]};
        float y[8];
        uint32_t largest = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            y[i] = own.y[row + i / 2 % 2 * 8][i / 4 * 8 + self.lane() % 4 * 2 + i % 2];
            largest = max(largest, __float_as_uint(y[i]) & 0x7fffffff);
        }
        const bool infinite = largest >= 0x7f800000 || BesideRows::joined(own.rows.non_finite) != 0;
        const bool careful = uniform(sync_group_or<kWarpGroupSize>(1 + self.number, infinite));
        const RankFragments<T, 16> parts(y, 1, 16);
        const bool scaled = !careful && __any_sync(~0u, parts.is_scaled());
        auto multiply_rows = [&](const float (&factor)[2]) {
#pragma unroll
            for (int i = 0; i < Tile::BLOCK_N / 2; ++i) acc[0][i] *= factor[i / 2 % 2];
        };
        if (scaled) multiply_rows(parts.factor);
#pragma unroll 1
        while (todo != 0) {
            const uint32_t stage = exchange.ring + slot.stage * Tile::STAGE_BYTES + Stage<Tile>::AT;
            barrier_wait(exchange.barriers.full(slot.stage), slot.phase);
            auto inside = [&](int row) { return slots[row] == own.rows.slot_of_first(todo); };  // has the next adapter
            if (careful) {
#pragma unroll 1
                for (int i = 0; i < Stage<Tile>::COUNT && todo != 0; ++i, todo &= todo - 1) {
                    add_ranks_one_by_one<T>(acc[0], call.y + row * kBesideRanks, 8 * kBesideRanks,
                                            call.ranks[own.rows.slot_of_first(todo)], {inside(0), inside(1)},
                                            stage + i * Stage<Tile>::BYTES, 0, Tile::BLOCK_N, self.lane());
                }
                self.sync();  // all threads have read the stage
            } else {
#pragma unroll 1
                for (int i = 0; i < Stage<Tile>::COUNT && todo != 0; i += 2) {
                    // Two adapters at a time. Where there is but one, zeros meet it once more.
                    const YOf<T> first(parts.slices[0], inside(0), inside(1));
                    todo &= todo - 1;
                    const bool both = todo != 0;
                    const YOf<T> second(parts.slices[0], both && inside(0), both && inside(1));
                    todo &= todo - 1;
                    const uint32_t place = stage + i * Stage<Tile>::BYTES;
                    const uint64_t b = Operand::descriptor(place);
                    const uint64_t next = Operand::descriptor(place + both * Stage<Tile>::BYTES);
                    wgmma_fence();
#pragma unroll
                    for (int part = 0; part < RankParts<T>::COUNT; ++part) {
                        Wgmma<Tile::BLOCK_N>::template multiply<T, true>(acc[0], first.values[part], b, 1);
                        Wgmma<Tile::BLOCK_N>::template multiply<T, true>(acc[0], second.values[part], next, 1);
                    }
                    wgmma_commit();
                    wgmma_wait<0>();
                    hold(acc[0]);
                }
            }
            if (self.leads()) barrier_arrive(exchange.barriers.empty(slot.stage));
            slot.advance();
        }
        if (scaled) multiply_rows({1 / parts.factor[0], 1 / parts.factor[1]});
    }

private:
    static __device__ void await_makers(const Call& call) {
        while (true) {
            int made;
            asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(made) : "l"(call.counters) : "memory");
            if (made >= call.makers) return;
            __nanosleep(500);
        }
    }

    // y of the rows that have an adapter, and zeros.
    template <class T> struct YOf {
        uint32_t values[RankParts<T>::COUNT][4];

        __device__ YOf(const RankParts<T>& parts, bool first, bool second) {
#pragma unroll
            for (int part = 0; part < RankParts<T>::COUNT; ++part) {
#pragma unroll
                for (int i = 0; i < 4; ++i) values[part][i] = (i % 2 == 0 ? first : second) ? parts.values[part][i] : 0;
            }
        }
    };
};

}  // namespace rawops
