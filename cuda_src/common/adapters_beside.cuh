// Adapters of up to 64 rows on Hopper, of up to sixteen ranks: which rows have which, and y = scaling * x @ a, each row
// with its own a. The blocks of the product share it out: a part is the sum over a stretch of K for up to sixteen rows
// of an adapter, each block makes some, and then all add up all parts, in the order of K.
#pragma once
#include "hopper.cuh"
#include "launches.cuh"
#include "mma.cuh"

namespace rawops {

constexpr int kBesideRows = 64, kBesideRanks = 16;

// As _lora_beside.py packs it.
struct AdaptersBeside {
    TensorMap a;     // (K / 64, max_loras * 16, 64), blocks of the matrix (.., K)
    const char* b;   // (max_loras, N, 16) as place_of_rank of adapters.cuh has it, and columns that fill a tile
    const char* x;   // (M, K)
    const int *indices, *ranks, *non_finite;  // of each row; of each slot
    const float* scalings;                    // likewise
    float* parts;   // of y: (stretches of K, 64, 16)
    int* counters;  // of blocks that have made their parts, and that have seen those of all; 0 between launches
    int64_t x_row, index_stride;  // bytes; elements
    int M, N, K, max_loras;
    int patience;  // how often a block looks whether the parts of others are there, before it makes all by itself
};

// Up to sixteen rows of one adapter.
struct RowsOfAdapter {
    int slot, count;
    unsigned char rows[16];
};

// What 64 threads find out about the rows, in shared memory.
struct BesideRows {
    int slots[kBesideRows];  // max_loras: none
    uint32_t firsts[2];      // rows that are the first of their slot
    uint32_t starts[2];      // and those that come first of sixteen of their slot
    uint32_t non_finite[2];  // rows whose b has an infinity or a NaN
    int most[2];             // rows that a row is in one set with
    RowsOfAdapter sets[kBesideRows];

    __device__ static uint64_t joined(const uint32_t (&halves)[2]) { return halves[0] | uint64_t(halves[1]) << 32; }
    __device__ int slot_of_first(uint64_t set) const { return slots[__ffsll(set) - 1]; }

    // By the thread of a row, whose slot it returns; `sync` is a barrier of these threads, and another one must follow.
    template <class Sync> __device__ int find(const AdaptersBeside& call, int row, Sync sync) {
        int slot = call.max_loras;
        bool infinite = false;
        if (row < call.M) {
            const int index = call.indices[row * call.index_stride];
            if (index >= 0 && index < call.max_loras && call.ranks[index] > 0) {
                slot = index;
                infinite = call.non_finite[index] != 0;
            }
        }
        slots[row] = slot;
        sync();
        int same = 0, before = 0, start = 0;  // rows of the slot, those before this one, the row that leads its sixteen
#pragma unroll 8
        for (int other = 0; other < kBesideRows; ++other) {
            if (slots[other] != slot) continue;
            if (other <= row && same % 16 == 0) start = other;
            before += other < row;
            ++same;
        }
        const bool exists = slot < call.max_loras;
        const int count = exists ? min_of(same - before / 16 * 16, 16) : 0;
        const uint32_t first = __ballot_sync(~0u, exists && before == 0);
        const uint32_t leads = __ballot_sync(~0u, exists && row == start);
        const uint32_t non_finite_rows = __ballot_sync(~0u, infinite);
        const int most_of_warp = __reduce_max_sync(~0u, count);
        if (row % kWarpSize == 0) {
            const int half = row / kWarpSize;
            firsts[half] = first;
            starts[half] = leads;
            non_finite[half] = non_finite_rows;
            most[half] = most_of_warp;
        }
        sync();
        if (exists) {
            RowsOfAdapter& set = sets[__popcll(joined(starts) & ((uint64_t(1) << start) - 1))];
            set.rows[before % 16] = row;
            if (row == start) {
                set.slot = slot;
                set.count = count;
            }
        }
        return slot;
    }
};

// The parts of y: set by set, and of each the stretches of K, BLOCKS times 64. A block makes those that are its own in
// rounds, as many at once as fit into BYTES of shared memory: sixteen ranks of a each, and behind these the rows of x.
template <class T, int BLOCKS, int BYTES, int WARPS> class PartsOfY {
    static constexpr int ROW = 128, A_BYTES = BLOCKS * 16 * ROW, X_BYTES = BLOCKS * ROW;
    static_assert(A_BYTES + 16 * X_BYTES <= BYTES, "one has room");

    const AdaptersBeside& call;
    const BesideRows& rows;
    int stretches, at_once, x_at, x_pitch;

public:
    int count;

    __device__ PartsOfY(const AdaptersBeside& call_, const BesideRows& rows_) : call(call_), rows(rows_) {
        const int most = max_of(rows.most[0], rows.most[1]);
        stretches = ceil_div(call.K, BLOCKS * 64);
        count = __popcll(BesideRows::joined(rows.starts)) * stretches;
        at_once = BYTES / (A_BYTES + most * X_BYTES);
        x_at = at_once * A_BYTES;
        x_pitch = most * X_BYTES;
    }

    __device__ int makers() const { return min_of(count, int(gridDim.x)); }  // blocks that make some

    // Makes part `first` and every `step`th behind it, by all threads of WARPS warps; `sync` is their barrier. `full`
    // is the barrier of the copies to `place`, and `phase` how it stands.
    template <class Sync>
    __device__ void make(int first, int step, uint32_t place, uint32_t full, uint32_t& phase, int thread,
                         Sync sync) const {
#pragma unroll 1
        for (int begin = first; begin < count; begin += at_once * step, phase ^= 1) {
            if (thread == 0) fetch(begin, step, place, full);
            barrier_wait(full, phase);
            __syncwarp();
            for_each_part(begin, step, [&](int i, const RowsOfAdapter& set, int stretch) {
                if (i % WARPS != thread / kWarpSize) return;
                multiply(set, stretch, place + i * A_BYTES, place + x_at + i * x_pitch);
            });
            sync();
        }
    }

    // Adds up the parts of a row, sixteen ranks.
    __device__ void add_up(float (&sum)[kBesideRanks], int row) const {
        const auto* from = reinterpret_cast<const float4*>(call.parts + row * kBesideRanks);
#pragma unroll 8
        for (int stretch = 0; stretch < stretches; ++stretch) {
#pragma unroll
            for (int i = 0; i < kBesideRanks / 4; ++i) {
                const float4 part = load_past_l1(from + stretch * (kBesideRows * kBesideRanks / 4) + i);
                sum[i * 4] += part.x;
                sum[i * 4 + 1] += part.y;
                sum[i * 4 + 2] += part.z;
                sum[i * 4 + 3] += part.w;
            }
        }
    }

private:
    __device__ int blocks_of(int stretch) const { return min_of(call.K / 64 - stretch * BLOCKS, BLOCKS); }

    template <class Visit> __device__ void for_each_part(int begin, int step, Visit visit) const {
#pragma unroll 1
        for (int i = 0, part = begin; i < at_once && part < count; ++i, part += step) {
            visit(i, rows.sets[part / stretches], part % stretches);
        }
    }

    // Starts the copies of a round.
    __device__ void fetch(int begin, int step, uint32_t place, uint32_t full) const {
        int bytes = 0;
        for_each_part(begin, step, [&](int, const RowsOfAdapter& set, int stretch) {
            bytes += A_BYTES + set.count * blocks_of(stretch) * ROW;
        });
        barrier_arrive_expect(full, bytes);
        for_each_part(begin, step, [&](int i, const RowsOfAdapter& set, int stretch) {
            tma_load_once(place + i * A_BYTES, call.a, {0, set.slot * kBesideRanks, stretch * BLOCKS, 0, 0}, full);
            for (int row = 0; row < set.count; ++row) {
                const char* from = call.x + set.rows[row] * call.x_row + int64_t(stretch) * X_BYTES;
                bulk_load(place + x_at + i * x_pitch + row * X_BYTES, from, blocks_of(stretch) * ROW, full);
            }
        });
    }

    // The order of K within an atom is free as long as x and a share it: a thread takes eight elements that lie side by
    // side of both. TMA has swizzled a.
    __device__ void multiply(const RowsOfAdapter& set, int stretch, uint32_t a_rows, uint32_t x_rows) const {
        const int g = threadIdx.x % kWarpSize / 4, t = threadIdx.x % 4, blocks = blocks_of(stretch);
        float acc[2][4] = {};  // of eight ranks each
#pragma unroll 1
        for (int block = 0; block < blocks; ++block) {
#pragma unroll
            for (int chunk = t; chunk < 8; chunk += 4) {
                uint4 x[2] = {}, a[2];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int row = g + half * 8;
                    a[half] = load_quad(a_rows + block * 16 * ROW + swizzled_offset<ROW>(row, chunk));
                    if (row < set.count) x[half] = load_quad(x_rows + row * X_BYTES + block * ROW + chunk * 16);
                }
                const uint32_t low[4] = {x[0].x, x[1].x, x[0].y, x[1].y};
                const uint32_t high[4] = {x[0].z, x[1].z, x[0].w, x[1].w};
#pragma unroll
                for (int atom = 0; atom < 2; ++atom) {
                    MmaAtom<T>::multiply(acc[atom], low, a[atom].x, a[atom].y);
                    MmaAtom<T>::multiply(acc[atom], high, a[atom].z, a[atom].w);
                }
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (g + half * 8 >= set.count) continue;
            float* to = call.parts + (stretch * kBesideRows + set.rows[g + half * 8]) * kBesideRanks + t * 2;
#pragma unroll
            for (int atom = 0; atom < 2; ++atom) {
                *reinterpret_cast<float2*>(to + atom * 8) = {acc[atom][half * 2], acc[atom][half * 2 + 1]};
            }
        }
    }
};

}  // namespace rawops
