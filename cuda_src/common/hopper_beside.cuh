// The Hopper GEMM on up to 64 rows, each with an adapter of its own of up to sixteen ranks, or none: behind the stages
// of K the ring brings b of all adapters that the rows have, some of them a stage, and wgmma adds y @ b adapter by
// adapter, with zeros for y of the rows that have another one. So no row depends on which adapters the others have.
//
// Until then the followers, a thread a row, make the block's parts of y where the staging tile is later, wait for those
// of the other blocks, and add all up. The blocks of a grid run at the same time, since it has at most one for each SM,
// unless two such launches come to have a part of the SMs each; then a block loses patience and makes all parts itself.
#pragma once
#include "adapters_beside.cuh"
#include "hopper_adapter_turns.cuh"
#include "hopper_copies.cuh"

namespace rawops {

// What a block keeps of the adapters, and the barriers: `known` tells of the rows, `made` of y, `fetched` of what a
// round of its parts takes.
struct BesideMemory {
    uint64_t known, made, fetched;
    BesideRows rows;
    alignas(16) float y[kBesideRows][kBesideRanks];  // 0 where there is no adapter
};
static_assert(sizeof(BesideMemory) <= 6 << 10, "as _lora_beside.py has it");

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
        barrier_init(shared_address(&memory<Tile>().fetched), 1);
    }

    // A part of y takes 256 of K where that has room, as _lora_beside.py has it.
    template <class Tile> static constexpr int BLOCKS = Tile::kFinish != kDirect && Tile::SHARE >= 128 ? 4 : 2;
    template <class Tile>
    using Parts = PartsOfY<typename Tile::T, BLOCKS<Tile>, Tile::BARRIERS_AT - Tile::STAGING_AT, FOLLOWERS / kWarpSize>;
    template <class Tile> static constexpr int PARTS = kPartsOfY<typename Tile::T, typename Tile::Out>;

    // The followers: one for each row.
    template <class Tile> static __device__ void follow(const Call& call, int row) {
        BesideMemory& own = memory<Tile>();
        auto sync = [] { sync_group<4, FOLLOWERS>(); };
        await_launch_before();
        const int slot = own.rows.find(call, row, sync);
        barrier_arrive(shared_address(&own.known));
        sync();
        const Parts<Tile> parts(call, own.rows);
        if (parts.count == 0) return;
        extern __shared__ __align__(1024) char shared[];
        uint32_t phase = 0;
        auto make = [&](int first, int step) {
            parts.make(first, step, shared_address(shared) + Tile::STAGING_AT, shared_address(&own.fetched), phase, row,
                       sync);
        };
        make(blockIdx.x, gridDim.x);
        if (row == 0 && blockIdx.x < parts.makers()) {
            asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(call.counters) : "memory");
        }
        const bool late = !await_parts(call, parts.makers());
        if (sync_group_or<FOLLOWERS>(4, late)) make(0, 1);  // the same bits as those that others write, or have written
        float sum[kBesideRanks] = {};
        if (slot < call.max_loras) {
            parts.add_up(sum, row);
            const int rank = call.ranks[slot];
            const float scaling = call.scalings[slot];
#pragma unroll
            for (int i = 0; i < kBesideRanks; ++i) sum[i] = i < rank ? scaling * sum[i] : 0;
        }
#pragma unroll
        for (int i = 0; i < kBesideRanks; ++i) own.y[row][i] = rounded_for_parts<typename Tile::T, PARTS<Tile>>(sum[i]);
        barrier_arrive(shared_address(&own.made));
        sync();  // all of them have seen that they are made
        if (row == 0 && atomicAdd(call.counters + 1, 1) == int(gridDim.x) - 1) {
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
                uint32_t to = exchange.ring + slot.stage * Tile::STAGE_BYTES + Stage<Tile>::AT + i * Stage<Tile>::BYTES;
                const char* from = call.b + (int64_t(own.rows.slot_of_first(todo)) * call.N + n) * 32;
#pragma unroll
                for (int part = 0; part < Tile::PARTS; ++part) {
                    const char* own_part = from + int64_t(part) * cols * 32;
                    bulk_load_once(to + part * Tile::COLS * 32, own_part, Tile::COLS * 32, full);
                }
            }
            slot.advance();
        }
    }

    // The consumer's part of a tile: acc += y @ b.
    template <class Tile>
    static __device__ void add(typename Tile::Finished& acc, RingPosition<Tile::STAGES>& slot,
                               const Exchange<Tile>& exchange, const Call& call, const Consumer& self) {
        using T = typename Tile::T;
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
                    add_ranks_one_by_one<T>(acc[0], own.y[row], 8 * kBesideRanks,
                                            call.ranks[own.rows.slot_of_first(todo)], {inside(0), inside(1)},
                                            stage + i * Stage<Tile>::BYTES, 0, Tile::BLOCK_N, self.lane());
                }
                self.sync();  // all threads have read the stage
            } else if (__popcll(todo) >= Stage<Tile>::COUNT) {
                multiply<Tile, Stage<Tile>::COUNT>(acc[0], parts.slices[0], own.rows, slots, todo, stage);
            } else {
#pragma unroll 1
                for (int i = 0; todo != 0; ++i) {
                    multiply<Tile, 1>(acc[0], parts.slices[0], own.rows, slots, todo, stage + i * Stage<Tile>::BYTES);
                }
            }
            if (self.leads()) barrier_arrive(exchange.barriers.empty(slot.stage));
            slot.advance();
        }
        if (scaled) multiply_rows({1 / parts.factor[0], 1 / parts.factor[1]});
    }

private:
    // Tells whether they have come.
    static __device__ bool await_parts(const Call& call, int makers) {
        for (int looks = 0; looks < call.patience; ++looks) {
            int made;
            asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(made) : "l"(call.counters) : "memory");
            if (made >= makers) return true;
            __nanosleep(500);
        }
        return false;
    }

    // acc += y @ b for the next COUNT adapters, with zeros for y of the rows that have another one.
    template <class Tile, int COUNT, class T, int SUMS>
    static __device__ void multiply(float (&acc)[SUMS], const RankParts<T>& y, const BesideRows& rows,
                                    const int (&slots)[2], uint64_t& todo, uint32_t place) {
        using Operand = WgmmaOperand<true, 16, 32>;
        uint32_t own[COUNT][PARTS<Tile>][4];
#pragma unroll
        for (int i = 0; i < COUNT; ++i, todo &= todo - 1) {
            const int slot = rows.slot_of_first(todo);
#pragma unroll
            for (int j = 0; j < PARTS<Tile> * 4; ++j) {
                own[i][j / 4][j % 4] = slots[j % 2] == slot ? y.values[j / 4][j % 4] : 0;
            }
        }
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const uint64_t b = Operand::descriptor(place + i * Stage<Tile>::BYTES);
#pragma unroll
            for (int part = 0; part < PARTS<Tile>; ++part) {
                Wgmma<Tile::BLOCK_N>::template multiply<T, true>(acc, own[i][part], b, 1);
            }
        }
        wgmma_commit();
        wgmma_wait<0>();
        hold(acc);
    }
};

}  // namespace rawops
