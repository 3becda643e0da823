// Adapters of up to 64 rows on Hopper, of up to sixteen ranks: which rows have which, and y = scaling * x @ a, each row
// with its own a. Some blocks make y while the others, of the same launch, multiply x with the weight.
#pragma once
#include "hopper.cuh"
#include "launches.cuh"
#include "mma.cuh"

namespace rawops {

constexpr int kBesideRows = 64, kBesideRanks = 16;
constexpr int kBesideLeast = 120 << 10;  // bytes of shared memory that a block has

// As _lora_beside.py packs it; strides in elements.
struct AdaptersBeside {
    TensorMap b;     // (max_loras, N, 16)
    TensorMap a, x;  // (K / 64, max_loras * 16, 64) and (K / 64, M, 64), blocks of the matrices (.., K)
    const int *indices, *ranks, *non_finite;  // of each row; of each slot
    const float* scalings;                    // likewise
    float* y;                                 // (64, 16); 0 for ranks that an adapter does not have
    int* counters;  // of blocks that have made their part of y, and that have seen all of it; 0 between launches
    int64_t index_stride;
    int M, K, max_loras, makers;  // blocks that make y, the first of the grid
};

// What 64 threads find out about the rows, in shared memory.
struct BesideRows {
    int slots[kBesideRows];  // max_loras: none
    uint32_t firsts[2];      // rows that are the first of their slot
    uint32_t starts[2];      // and those that come first of sixteen of their slot
    uint32_t non_finite[2];  // rows whose b has an infinity or a NaN

    __device__ static uint64_t joined(const uint32_t (&halves)[2]) { return halves[0] | uint64_t(halves[1]) << 32; }
    __device__ int slot_of_first(uint64_t set) const { return slots[__ffsll(set) - 1]; }
};

// Where a row is in its slot: the rows before it with the same one, and all of them.
struct PlaceInSlot {
    int slot, before, same;
};

// By the thread of a row; `sync` is a barrier of these threads, and another one must follow.
template <class Sync>
__device__ inline PlaceInSlot find_slot(BesideRows& rows, const AdaptersBeside& call, int row, Sync sync) {
    int slot = call.max_loras;
    bool non_finite = false;
    if (row < call.M) {
        const int index = call.indices[row * call.index_stride];
        if (index >= 0 && index < call.max_loras && call.ranks[index] > 0) {
            slot = index;
            non_finite = call.non_finite[index] != 0;
        }
    }
    rows.slots[row] = slot;
    sync();
    PlaceInSlot place = {slot, 0, 0};
#pragma unroll 8
    for (int other = 0; other < kBesideRows; ++other) {
        const bool is_same = rows.slots[other] == slot;
        place.same += is_same;
        place.before += is_same && other < row;
    }
    const bool exists = slot < call.max_loras;
    const uint32_t first = __ballot_sync(~0u, exists && place.before == 0);
    const uint32_t start = __ballot_sync(~0u, exists && place.before % 16 == 0);
    const uint32_t infinite = __ballot_sync(~0u, non_finite);
    if (row % kWarpSize == 0) {
        rows.firsts[row / kWarpSize] = first;
        rows.starts[row / kWarpSize] = start;
        rows.non_finite[row / kWarpSize] = infinite;
    }
    return place;
}

// Up to sixteen rows of one adapter.
struct RowsOfAdapter {
    int slot, count, rank;
    float scaling;
    int rows[16];
};

// A block that makes y, THREADS of it. A stage has 512 of K of a set of rows: sixteen ranks of a, which TMA brings as
// one box, and the rows of x, a box each; every warp takes 64 of it. Beside the other blocks every way to the memory
// takes several microseconds, so as much as there is room for is on its way. The order of K within an atom is free as
// long as x and a share it: a thread takes eight elements that lie side by side of both.
template <class T, int THREADS, int MEMORY> class RankProducts {
    static constexpr int WARPS = THREADS / kWarpSize, K_STEP = 64, ROW = K_STEP * 2;  // of a warp
    static constexpr int A_BYTES = WARPS * 16 * ROW, X_BYTES = WARPS * ROW;           // of a row of x
    static constexpr int MOST_STAGES = 10;

    struct Tables {
        uint64_t full[MOST_STAGES], empty[MOST_STAGES];
        BesideRows rows;
        RowsOfAdapter sets[kBesideRows];
        float parts[kBesideRows][WARPS][kBesideRanks];  // of the warps
    };

    static constexpr int RING = (max_of(MEMORY, kBesideLeast) - int(sizeof(Tables))) / 1024 * 1024;
    static_assert(RING >= 2 * (A_BYTES + 16 * X_BYTES), "two of the largest");
    static_assert(WARPS == 8, "the boxes of _lora_beside.py");

public:
    static __device__ void make(const AdaptersBeside& call, char* memory) {
        Tables& tables = *reinterpret_cast<Tables*>(memory + RING);
        const int sets = find_sets(tables, call);
        int most = 0;
        for (int set = blockIdx.x; set < sets; set += call.makers) most = max_of(most, tables.sets[set].count);
        multiply_sets(tables, call, sets, A_BYTES + most * X_BYTES, shared_address(memory));
        __syncthreads();
        for (int set = blockIdx.x; set < sets; set += call.makers) add_up(tables, call, tables.sets[set]);
        __syncthreads();  // y has been written
        if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(call.counters) : "memory");
    }

private:
    // Returns how many there are.
    static __device__ int find_sets(Tables& tables, const AdaptersBeside& call) {
        const int row = threadIdx.x;
        PlaceInSlot place = {call.max_loras, 0, 0};
        if (row < kBesideRows) {
            tables.sets[row] = {};  // the compiler reads those that there are not, too
            place = find_slot(tables.rows, call, row, [] { sync_group<1, kBesideRows>(); });
        } else if (row == kBesideRows) {
            for (int stage = 0; stage < MOST_STAGES; ++stage) {
                barrier_init(shared_address(&tables.full[stage]), 1);
                barrier_init(shared_address(&tables.empty[stage]), WARPS);
            }
            barrier_init_fence();
        }
        __syncthreads();
        const uint64_t starts = BesideRows::joined(tables.rows.starts);
        if (place.slot < call.max_loras) {
            int nth = place.before / 16 * 16, start = 0;  // the row that leads the sixteen
            for (; tables.rows.slots[start] != place.slot || nth-- > 0; ++start) {}
            RowsOfAdapter& set = tables.sets[__popcll(starts & ((uint64_t(1) << start) - 1))];
            set.rows[place.before % 16] = row;
            if (row == start) {
                set.slot = place.slot;
                set.count = min_of(place.same - place.before, 16);
                set.rank = call.ranks[place.slot];
                set.scaling = call.scalings[place.slot];
            }
        }
        __syncthreads();
        return __popcll(starts);
    }

    // The warps' shares of K of all sets.
    static __device__ void multiply_sets(Tables& tables, const AdaptersBeside& call, int sets, int stage_bytes,
                                         uint32_t ring) {
        const int stages = min_of(RING / stage_bytes, MOST_STAGES), steps = ceil_div(call.K, WARPS * K_STEP);
        const int warp = threadIdx.x / kWarpSize;
        auto full = [&](int stage) { return shared_address(&tables.full[stage]); };
        auto empty = [&](int stage) { return shared_address(&tables.empty[stage]); };
        int fetched_set = blockIdx.x, fetched_step = 0, fetched_stage = 0;
        uint32_t fetched_phase = 1;
        auto fetch = [&] {  // by one thread
            if (fetched_set >= sets) return;
            barrier_wait(empty(fetched_stage), fetched_phase);
            fetch_stage(ring + fetched_stage * stage_bytes, call, tables.sets[fetched_set], fetched_step * WARPS,
                        full(fetched_stage));
            if (++fetched_step == steps) fetched_step = 0, fetched_set += call.makers;
            if (++fetched_stage == stages) fetched_stage = 0, fetched_phase ^= 1;
        };
        if (threadIdx.x == 0) {
            for (int i = 0; i < stages - 1; ++i) fetch();
        }
        float acc[2][2][4] = {};
        uint32_t phase = 0;
        int stage = 0;
#pragma unroll 1
        for (int set = blockIdx.x; set < sets; set += call.makers) {
            const int count = tables.sets[set].count;
#pragma unroll 1
            for (int step = 0; step < steps; ++step) {
                if (threadIdx.x == 0) fetch();
                __syncwarp();
                barrier_wait(full(stage), phase);
                multiply(acc, ring + stage * stage_bytes + warp * 16 * ROW,
                         ring + stage * stage_bytes + A_BYTES + warp * ROW, count);
                __syncwarp();
                if (threadIdx.x % kWarpSize == 0) barrier_arrive(empty(stage));
                if (++stage == stages) stage = 0, phase ^= 1;
            }
            finish(acc, tables, tables.sets[set]);
        }
    }

    // Sixteen ranks of a, behind them the rows of x.
    static __device__ void fetch_stage(uint32_t stage, const AdaptersBeside& call, const RowsOfAdapter& set,
                                       int first_block, uint32_t full) {
        barrier_arrive_expect(full, A_BYTES + set.count * X_BYTES);
        tma_load(stage, call.a, {0, set.slot * kBesideRanks, first_block, 0, 0}, full);
        for (int i = 0; i < set.count; ++i) {
            tma_load(stage + A_BYTES + i * X_BYTES, call.x, {0, set.rows[i], first_block, 0, 0}, full);
        }
    }

    // What TMA has swizzled: rows of 128 bytes, a's one after the other, those of x alone where each eight begin.
    static __device__ void multiply(float (&acc)[2][2][4], uint32_t a_rows, uint32_t x_rows, int count) {
        const int g = threadIdx.x % kWarpSize / 4, t = threadIdx.x % 4, warp = threadIdx.x / kWarpSize;
        uint4 x[2][2] = {}, a[2][2];
#pragma unroll
        for (int step = 0; step < 2; ++step) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                a[step][half] = load_quad(a_rows + swizzled_offset<ROW>(g + half * 8, step * 4 + t));
                if (g + half * 8 < count) {
                    x[step][half] = load_quad(x_rows + (g + half * 8) * X_BYTES + ((step * 4 + t) ^ warp) * 16);
                }
            }
        }
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            const uint4(&row)[2] = x[step];
            const uint32_t low[4] = {row[0].x, row[1].x, row[0].y, row[1].y};
            const uint32_t high[4] = {row[0].z, row[1].z, row[0].w, row[1].w};
#pragma unroll
            for (int atom = 0; atom < 2; ++atom) {
                MmaAtom<T>::multiply(acc[step][atom], low, a[step][atom].x, a[step][atom].y);
                MmaAtom<T>::multiply(acc[step][atom], high, a[step][atom].z, a[step][atom].w);
            }
        }
    }

    // The warp's part of the rows of a set.
    static __device__ void finish(float (&acc)[2][2][4], Tables& tables, const RowsOfAdapter& set) {
        const int warp = threadIdx.x / kWarpSize, g = threadIdx.x % kWarpSize / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (g + half * 8 >= set.count) continue;
            float* to = tables.parts[set.rows[g + half * 8]][warp] + t * 2;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                to[i / 2 * 8 + i % 2] = acc[0][i / 2][half * 2 + i % 2] + acc[1][i / 2][half * 2 + i % 2];
            }
        }
#pragma unroll
        for (int i = 0; i < 16; ++i) acc[i / 8][i / 4 % 2][i % 4] = 0;
    }

    // Adds up the warps' parts and writes y.
    static __device__ void add_up(const Tables& tables, const AdaptersBeside& call, const RowsOfAdapter& set) {
        static_assert(THREADS == 16 * kBesideRanks, "a thread for each entry of y");
        const int own = threadIdx.x / kBesideRanks, rank = threadIdx.x % kBesideRanks;
        if (own >= set.count) return;
        float sum = 0;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) sum += tables.parts[set.rows[own]][warp][rank];
        call.y[set.rows[own] * kBesideRanks + rank] = rank < set.rank ? set.scaling * sum : 0;
    }
};

}  // namespace rawops
