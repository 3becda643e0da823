// What comes before a product with an adapter for each row: the rows in the order of their adapters, and
// y = scaling * x @ a, each row with its own a.
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
    int64_t x_row, x_col, a_row, sorted_row, index_stride;
    int M, K, k_per_split, max_loras, slot_rank, capacity;

    // Rows without an adapter come last.
    __device__ int slot_of(int row) const {
        const int slot = indices[row * index_stride];
        return slot >= 0 && slot < max_loras ? slot : max_loras;
    }
};

constexpr int kGroupThreads = 128;

// The place of a row among all: behind those with a lower slot, and those before it with the same. The slots of all
// rows pass through shared memory; all threads take part.
__device__ inline int place_of(const ShrinkParams& params, int row, int slot, int* tile) {
    int place = 0;
    for (int begin = 0; begin < params.M; begin += kGroupThreads) {
        const int own = begin + threadIdx.x;
        __syncthreads();
        tile[threadIdx.x] = own < params.M ? params.slot_of(own) : params.max_loras + 1;
        __syncthreads();
#pragma unroll 8
        for (int i = 0; i < kGroupThreads; ++i) {
            place += tile[i] < slot || (tile[i] == slot && begin + i < row);
        }
    }
    return place;
}

// For more rows than each block of lora_shrink can order by itself: one thread a row.
__global__ void __launch_bounds__(kGroupThreads) lora_group(const __grid_constant__ ShrinkParams params) {
    __shared__ int tile[kGroupThreads];
    const int row = blockIdx.x * kGroupThreads + threadIdx.x;
    const int slot = row < params.M ? params.slot_of(row) : params.max_loras + 1;
    const int place = place_of(params, row, slot, tile);
    if (row < params.M) {
        params.slots[place] = slot;
        params.rows[place] = row;
    }
}

// Eight elements of a row as they lie in memory, `count` of which exist; the others become zero.
template <class T, bool kAligned>
__device__ inline uint4 read_eight(const T* from, int64_t stride, int count) {
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

// Sixteen sorted rows (blockIdx.x), a slice of K (y), a slice of the columns (z), whose ranks are 8 * ATOMS at a time.
// The warps share out K. The order of K within an atom is free as long as x and a share it: a thread takes eight
// elements that lie side by side of both. kGroups: the blocks order the rows themselves.
template <class T, int ATOMS, bool kAligned, bool kGroups>
__global__ void __launch_bounds__(kGroupThreads) lora_shrink(const __grid_constant__ ShrinkParams params) {
    constexpr int WARPS = kGroupThreads / kWarpSize, RANKS = ATOMS * 8, UNROLL = max_of(8 / ATOMS, 1);
    __shared__ int tile[kGroupThreads], rows[16], slots[16];
    __shared__ float parts[WARPS][16][RANKS];
    const int thread = threadIdx.x, warp = thread / kWarpSize, lane = thread % kWarpSize;
    const int first = blockIdx.x * 16, count = min_of(params.M - first, 16), slice = blockIdx.z;
    const bool copies = slice == 0;
    if constexpr (kGroups) {
        for (int begin = 0; begin < params.M; begin += kGroupThreads) {
            const int row = begin + thread;
            const int slot = row < params.M ? params.slot_of(row) : params.max_loras + 1;
            const int place = place_of(params, row, slot, tile) - first;
            if (row < params.M && place >= 0 && place < 16) {
                rows[place] = row;
                slots[place] = slot;
            }
        }
        __syncthreads();
        if (copies && blockIdx.y == 0 && thread < count) {
            params.rows[first + thread] = rows[thread];
            params.slots[first + thread] = slots[thread];
        }
    } else {
        if (thread < count) {
            rows[thread] = params.rows[first + thread];
            slots[thread] = params.slots[first + thread];
        }
        __syncthreads();
    }

    const int k_begin = blockIdx.y * params.k_per_split, k_end = min_of(params.K, k_begin + params.k_per_split);
    const T* x[2];
    T* sorted[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int own = lane / 4 + half * 8, row = own < count ? rows[own] : -1;
        x[half] = row < 0 ? nullptr : static_cast<const T*>(params.x) + row * params.x_row;
        sorted[half] = static_cast<T*>(params.sorted) + (first + own) * params.sorted_row;
    }

    int end = 0;
    for (int row = 0; row < count; row = end) {
        const int slot = slots[row];
        for (end = row; end < count && slots[end] == slot;) ++end;
        const int rank = slot < params.max_loras ? params.ranks[slot * gridDim.z + slice] : 0;
        const bool copies_now = copies && row == 0;
        for (int begin = 0; begin < rank || (copies_now && begin == 0); begin += RANKS) {
            const T* a = static_cast<const T*>(params.a) +
                         ((int64_t(slot) * gridDim.z + slice) * params.slot_rank + begin + lane / 4) * params.a_row;
            const int left = rank - begin;
            float acc[ATOMS][4] = {};
#pragma unroll UNROLL
            for (int k = k_begin + warp * 32 + lane % 4 * 8; k - lane % 4 * 8 < k_end; k += WARPS * 32) {
                uint4 values[2];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int exist = x[half] == nullptr ? 0 : k_end - k;
                    uint4& value = values[half];
                    value = read_eight<T, kAligned>(x[half] + k * params.x_col, params.x_col, exist);
                    if (copies_now && begin == 0 && exist > 0) *reinterpret_cast<uint4*>(sorted[half] + k) = value;
                }
                const uint32_t one[4] = {values[0].x, values[1].x, values[0].y, values[1].y};
                const uint32_t two[4] = {values[0].z, values[1].z, values[0].w, values[1].w};
#pragma unroll
                for (int atom = 0; atom < ATOMS; ++atom) {
                    if (atom * 8 >= left) continue;
                    const int exist = atom * 8 + lane / 4 < left ? k_end - k : 0;
                    const uint4 b = read_eight<T, kAligned>(a + atom * 8 * params.a_row + k, 1, exist);
                    MmaAtom<T>::multiply(acc[atom], one, b.x, b.y);
                    MmaAtom<T>::multiply(acc[atom], two, b.z, b.w);
                }
            }
            __syncthreads();  // the sums before have been read
#pragma unroll
            for (int atom = 0; atom < ATOMS; ++atom) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    parts[warp][lane / 4 + i / 2 * 8][atom * 8 + lane % 4 * 2 + i % 2] = acc[atom][i];
                }
            }
            __syncthreads();
            for (int i = thread; i < (end - row) * RANKS; i += kGroupThreads) {
                const int own = row + i / RANKS, r = i % RANKS;
                if (r >= left) continue;
                float sum = 0;
                for (int part = 0; part < WARPS; ++part) sum += parts[part][own][r];
                const int64_t plane = int64_t(slice) * gridDim.y + blockIdx.y;
                params.y[(plane * params.capacity + first + own) * params.slot_rank + begin + r] =
                    params.scalings[slot] * sum;
            }
        }
    }
}

}  // namespace rawops
