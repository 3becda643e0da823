// What comes before a product with an adapter for each row: the rows in the order of their adapters, and
// y = scaling * x @ a, each row with its own a.
//
// A row's place is behind all rows of a lower slot, and those before it of the same. The grid has a block for every
// place; those work where a tile of up to 16 rows of one adapter begins, which any indices may bring about.
#include "common/mma.cuh"

namespace rawops {

// As _lora_multi.py packs it; strides in elements.
struct ShrinkParams {
    const void* x;  // (M, K)
    const void* a;  // (max_loras, slices, slot_rank, K), filled up to the slice's rank; rows on 16-byte boundaries
    const int* indices;
    const int* ranks;       // (max_loras, slices)
    const float* scalings;  // (max_loras,)
    void* sorted;           // x in the new order, rows on 16-byte boundaries
    float* y;               // (slices, splits, capacity, slot_rank) in that order
    int *slots, *rows;      // the adapter of each row in that order, and where it was
    int* starts;            // the first row of the same adapter
    int64_t x_row, x_col, a_row, sorted_row, index_stride;
    int M, K, k_per_split, max_loras, slot_rank, capacity;

    // Rows without an adapter come last.
    __device__ int slot_of(int row) const {
        const int slot = indices[row * index_stride];
        return slot >= 0 && slot < max_loras ? slot : max_loras;
    }
};

constexpr int kShrinkThreads = 256, kRowsOfWarp = 4;  // the latter of lora_group

// Eight elements of a row as they lie in memory, `count` of which exist; the others become zero.
template <class T, bool kAligned> __device__ inline uint4 read_eight(const T* from, int64_t stride, int count) {
    uint4 bits = {};
    if (kAligned) {
        if (count > 0) bits = *reinterpret_cast<const uint4*>(from);
    } else {
        auto* elements = reinterpret_cast<uint16_t*>(&bits);
        const auto* source = reinterpret_cast<const uint16_t*>(from);
#pragma unroll
        for (int i = 0; i < 8; ++i) elements[i] = i < count ? source[i * stride] : uint16_t(0);
    }
    return bits;
}

// Sorts the rows where there are more than each block of lora_shrink can sort by itself. A warp compares four rows with
// all others.
__global__ void __launch_bounds__(kShrinkThreads) lora_group(const __grid_constant__ ShrinkParams params) {
    const int lane = threadIdx.x % kWarpSize;
    const int first = (blockIdx.x * kShrinkThreads + threadIdx.x) / kWarpSize * kRowsOfWarp;
    int slots[kRowsOfWarp], lower[kRowsOfWarp] = {}, before[kRowsOfWarp] = {};
#pragma unroll
    for (int i = 0; i < kRowsOfWarp; ++i) slots[i] = first + i < params.M ? params.slot_of(first + i) : -1;
#pragma unroll 8
    for (int other = lane; other < params.M; other += kWarpSize) {
        const int slot = params.slot_of(other);
#pragma unroll
        for (int i = 0; i < kRowsOfWarp; ++i) {
            lower[i] += slot < slots[i];
            before[i] += slot == slots[i] && other < first + i;
        }
    }
#pragma unroll
    for (int i = 0; i < kRowsOfWarp; ++i) {
#pragma unroll
        for (int step = kWarpSize / 2; step > 0; step /= 2) {
            lower[i] += __shfl_xor_sync(~0u, lower[i], step);
            before[i] += __shfl_xor_sync(~0u, before[i], step);
        }
        if (lane == i && first + i < params.M) {
            const int place = lower[i] + before[i];
            params.slots[place] = slots[i];
            params.rows[place] = first + i;
            params.starts[place] = lower[i];
        }
    }
}

// The rows that a block works on: those from its place on, up to 16, if they are the next ones of their slot.
struct BlockRows {
    int rows[16], slot, count;
};

// By all threads, of which the first 16 end up in charge of a row each. Up to kShrinkThreads rows are sorted here.
template <bool kGroups> __device__ inline void find_rows(BlockRows& block, const ShrinkParams& params, int place) {
    const int thread = threadIdx.x;
    if constexpr (kGroups) {
        __shared__ int slots[kShrinkThreads];
        const int own = thread < params.M ? params.slot_of(thread) : params.max_loras + 1;
        slots[thread] = own;
        if (thread == 0) block.count = 0;
        __syncthreads();
        int lower = 0, before = 0, same = 0;
#pragma unroll 8
        for (int other = 0; other < params.M; ++other) {
            lower += slots[other] < own;
            same += slots[other] == own;
            before += slots[other] == own && other < thread;
        }
        const int offset = place - lower;  // of the block's first row among those of the slot
        if (thread < params.M && offset >= 0 && offset < same && offset % 16 == 0) {
            if (before >= offset && before < offset + 16) block.rows[before - offset] = thread;
            if (before == offset) {
                block.slot = own;
                block.count = min_of(same - offset, 16);
            }
        }
    } else {
        const bool exists = thread < 16 && place + thread < params.M;
        const int slot = params.slots[place];
        const bool leads = (place - params.starts[place]) % 16 == 0;
        if (thread < kWarpSize) {
            const bool same = exists && leads && params.slots[place + thread] == slot;
            const int count = __popc(__ballot_sync(~0u, same));
            if (same) block.rows[thread] = params.rows[place + thread];
            if (thread == 0) {
                block.slot = slot;
                block.count = count;
            }
        }
    }
    __syncthreads();
}

// y for the rows from place blockIdx.x on, a slice of K (y), a slice of the columns (z), whose ranks are 8 * ATOMS at a
// time. The warps share out K. The order of K within an atom is free as long as x and a share it: a thread takes eight
// elements that lie side by side of both. kGroups: the blocks sort the rows themselves.
template <class T, int ATOMS, bool kAligned, bool kGroups>
__global__ void __launch_bounds__(kShrinkThreads) lora_shrink(const __grid_constant__ ShrinkParams params) {
    constexpr int WARPS = kShrinkThreads / kWarpSize, RANKS = ATOMS * 8;
    constexpr int UNROLL = max_of(8 / ATOMS, 1), K_STEP = WARPS * 32;
    __shared__ BlockRows block;
    __shared__ float parts[WARPS][16][RANKS];
    const int thread = threadIdx.x, warp = thread / kWarpSize, lane = thread % kWarpSize;
    const int first = blockIdx.x, slice = blockIdx.z;
    find_rows<kGroups>(block, params, first);
    const int count = block.count;
    if (count == 0) return;
    const int slot = block.slot;
    const bool has_adapter = slot < params.max_loras;
    const int rank = has_adapter ? params.ranks[slot * gridDim.z + slice] : 0;
    const float scaling = has_adapter ? params.scalings[slot] : 0;
    if (kGroups && slice == 0 && blockIdx.y == 0 && thread < count) {
        params.rows[first + thread] = block.rows[thread];
        params.slots[first + thread] = slot;
    }

    const int k_begin = blockIdx.y * params.k_per_split, k_end = min_of(params.K, k_begin + params.k_per_split);
    const T* x[2];
    T* sorted[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int own = lane / 4 + half * 8;
        x[half] = own < count ? static_cast<const T*>(params.x) + block.rows[own] * params.x_row : nullptr;
        sorted[half] = static_cast<T*>(params.sorted) + (first + own) * params.sorted_row;
    }

    for (int begin = 0; begin < rank || (slice == 0 && begin == 0); begin += RANKS) {
        const T* a = static_cast<const T*>(params.a) +
                     ((int64_t(slot) * gridDim.z + slice) * params.slot_rank + begin + lane / 4) * params.a_row;
        const int left = rank - begin;
        float acc[ATOMS][4] = {};
#pragma unroll 1
        for (int k = k_begin + warp * 32; k < k_end; k += K_STEP * UNROLL) {
            uint4 rows[UNROLL][2], ranks[UNROLL][ATOMS];
#pragma unroll
            for (int step = 0; step < UNROLL; ++step) {
                const int at = k + step * K_STEP + lane % 4 * 8, exist = k_end - at;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const T* from = x[half] + at * params.x_col;
                    rows[step][half] = read_eight<T, kAligned>(from, params.x_col, x[half] == nullptr ? 0 : exist);
                }
#pragma unroll
                for (int atom = 0; atom < ATOMS; ++atom) {
                    const T* from = a + atom * 8 * params.a_row + at;
                    ranks[step][atom] = read_eight<T, kAligned>(from, 1, atom * 8 + lane / 4 < left ? exist : 0);
                }
            }
#pragma unroll
            for (int step = 0; step < UNROLL; ++step) {
                const uint4(&row)[2] = rows[step];
                const uint32_t low[4] = {row[0].x, row[1].x, row[0].y, row[1].y};
                const uint32_t high[4] = {row[0].z, row[1].z, row[0].w, row[1].w};
#pragma unroll
                for (int atom = 0; atom < ATOMS; ++atom) {
                    MmaAtom<T>::multiply(acc[atom], low, ranks[step][atom].x, ranks[step][atom].y);
                    MmaAtom<T>::multiply(acc[atom], high, ranks[step][atom].z, ranks[step][atom].w);
                }
                const int at = k + step * K_STEP + lane % 4 * 8;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const bool copies = slice == 0 && begin == 0 && at < k_end && x[half] != nullptr;
                    if (copies) *reinterpret_cast<uint4*>(sorted[half] + at) = row[half];
                }
            }
        }
        if (begin > 0) __syncthreads();  // the sums before have been read
#pragma unroll
        for (int atom = 0; atom < ATOMS; ++atom) {
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                float* to = &parts[warp][lane / 4 + i / 2 * 8][atom * 8 + lane % 4 * 2];
                *reinterpret_cast<Vector<float, 2>*>(to) = {acc[atom][i], acc[atom][i + 1]};
            }
        }
        __syncthreads();
        for (int i = thread; i < count * RANKS; i += kShrinkThreads) {
            const int own = i / RANKS, r = i % RANKS;
            if (r >= left) continue;
            float sum = 0;
#pragma unroll
            for (int part = 0; part < WARPS; ++part) sum += parts[part][own][r];
            const int64_t plane = int64_t(slice) * gridDim.y + blockIdx.y;
            params.y[(plane * params.capacity + first + own) * params.slot_rank + begin + r] = scaling * sum;
        }
    }
}

}  // namespace rawops
