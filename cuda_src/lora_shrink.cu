// What comes before a product with an adapter for each row: the rows in the order of their adapters, and
// y = scaling * x @ a, each row with its own a.
//
// A row's place is behind all rows of a lower slot, and those before it of the same. There is a block for each place,
// or for four that are sorted; those work where a tile of up to 16 rows of one adapter begins, anywhere as indices have
// it.
#include "common/adapters.cuh"
#include "common/launches.cuh"

namespace rawops {

// A row's place among the sorted ones, if lora_group has found it.
struct alignas(16) RowPlace {
    int slot, row, start, unused;  // where it was; the first place of its slot
};

// As _lora_multi_product.py packs it; strides in elements.
struct ShrinkParams {
    const void* x;  // (M, K)
    const void* a;  // (max_loras, slices, slot_rank, K), filled up to the slice's rank; rows on 16-byte boundaries
    const int* indices;
    const int *ranks, *non_finite;  // (max_loras, slices), (max_loras,)
    const float* scalings;          // (max_loras,)
    void* sorted;                   // x in the new order, rows on 16-byte boundaries; null: y and infos as x is
    float* y;                       // (slices, capacity, slot_rank) in that order
    RowInfo* infos;
    RowPlace* places;
    int64_t x_row, x_col, a_row, sorted_row, index_stride;
    int M, K, max_loras, slot_rank, capacity;

    // Rows without an adapter come last.
    __device__ int slot_of(int row) const {
        const int slot = indices[row * index_stride];
        return slot >= 0 && slot < max_loras ? slot : max_loras;
    }
};

constexpr int kGroupThreads = 256, kRowsOfWarp = 4, kSlotsAtATime = 4096;  // of lora_group
constexpr int kShrinkThreads = 512, kMostGrouped = 256;                    // of lora_shrink

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
// all others, whose slots pass through shared memory.
__global__ void __launch_bounds__(kGroupThreads) lora_group(const __grid_constant__ ShrinkParams params) {
    __shared__ int others[kSlotsAtATime];
    const int lane = threadIdx.x % kWarpSize;
    const int first = (blockIdx.x * kGroupThreads + threadIdx.x) / kWarpSize * kRowsOfWarp;
    int slots[kRowsOfWarp], lower[kRowsOfWarp] = {}, before[kRowsOfWarp] = {};
#pragma unroll
    for (int i = 0; i < kRowsOfWarp; ++i) slots[i] = first + i < params.M ? params.slot_of(first + i) : -1;
    for (int begin = 0; begin < params.M; begin += kSlotsAtATime) {
        const int count = min_of(params.M - begin, kSlotsAtATime);
        __syncthreads();
#pragma unroll 4
        for (int i = threadIdx.x; i < count; i += kGroupThreads) others[i] = params.slot_of(begin + i);
        __syncthreads();
#pragma unroll 4
        for (int other = lane; other < count; other += kWarpSize) {
            const int slot = others[other];
#pragma unroll
            for (int i = 0; i < kRowsOfWarp; ++i) {
                lower[i] += slot < slots[i];
                before[i] += slot == slots[i] && begin + other < first + i;
            }
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
            params.places[lower[i] + before[i]] = {slots[i], first + i, lower[i], 0};
        }
    }
}

// The rows that a block works on: those from its place on, up to 16, if they are the next ones of their slot.
struct BlockRows {
    int rows[16], slot, count;
};

template <bool kGroups> __device__ inline void find_rows(BlockRows& block, const ShrinkParams& params, int place) {
    const int thread = threadIdx.x;
    if constexpr (kGroups) {
        __shared__ int slots[kMostGrouped];
        const int own = thread < params.M ? params.slot_of(thread) : 0;
        if (thread < params.M) slots[thread] = own;
        if (thread == 0) block.count = 0;
        __syncthreads();
        if (thread < params.M) {
            int lower = 0, before = 0, same = 0;
#pragma unroll 8
            for (int other = 0; other < params.M; ++other) {
                const int slot = slots[other];
                lower += slot < own;
                same += slot == own;
                before += slot == own && other < thread;
            }
            const int offset = place - lower;  // of the block's first row among those of the slot
            if (offset >= 0 && offset < same && offset % 16 == 0 && before >= offset && before < offset + 16) {
                block.rows[before - offset] = thread;
                if (before == offset) {
                    block.slot = own;
                    block.count = min_of(same - offset, 16);
                }
            }
        }
    } else if (thread < kWarpSize) {
        const bool exists = thread < 16 && place + thread < params.M;
        RowPlace own = {-1, 0, 0, 0};
        if (exists) own = params.places[place + thread];
        const int slot = __shfl_sync(~0u, own.slot, 0), start = __shfl_sync(~0u, own.start, 0);
        const uint32_t same = __ballot_sync(~0u, exists && own.slot == slot && (place - start) % 16 == 0);
        if (exists) block.rows[thread] = own.row;
        if (thread == 0) {
            block.slot = slot;
            block.count = __popc(same);
        }
    }
    __syncthreads();
}

// y for the rows of a block in a slice of the columns, 8 * ATOMS ranks at a time, and x sorted in the first slice. The
// warps share out K. The order of K within an atom is free as long as x and a share it: a thread takes eight elements
// that lie side by side of both.
template <class T, int ATOMS, bool kAligned>
__device__ inline void make_y(float (&parts)[kShrinkThreads / kWarpSize][16][ATOMS * 8], const ShrinkParams& params,
                              const BlockRows& block, int first, int slice) {
    constexpr int WARPS = kShrinkThreads / kWarpSize, RANKS = ATOMS * 8;
    constexpr int UNROLL = (kAligned ? 8 : 4) / ATOMS, K_STEP = WARPS * 32;
    const int thread = threadIdx.x, warp = thread / kWarpSize, lane = thread % kWarpSize;
    const int count = block.count, slot = block.slot;
    const bool has_adapter = slot < params.max_loras;
    const int rank = has_adapter ? params.ranks[slot * gridDim.y + slice] : 0;
    const float scaling = has_adapter ? params.scalings[slot] : 0;
    const bool sorts = params.sorted != nullptr;
    if (slice == 0 && thread < count) {
        const int row = block.rows[thread], non_finite = has_adapter ? params.non_finite[slot] : 0;
        params.infos[sorts ? first + thread : row] = {slot, row, rank, non_finite};
    }

    const T* x[2];
    T* sorted[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int own = lane / 4 + half * 8;
        x[half] = own < count ? static_cast<const T*>(params.x) + block.rows[own] * params.x_row : nullptr;
        sorted[half] = static_cast<T*>(params.sorted) + (first + own) * params.sorted_row;
    }

    // Of ranks that the adapter does not have the products are made, too, but not written.
    for (int begin = 0; begin < rank || (sorts && slice == 0 && begin == 0); begin += RANKS) {
        const T* a = static_cast<const T*>(params.a) +
                     ((int64_t(slot) * gridDim.y + slice) * params.slot_rank + begin + lane / 4) * params.a_row;
        float acc[ATOMS][4] = {};
#pragma unroll 1
        for (int k = warp * 32; k < params.K; k += K_STEP * UNROLL) {
            uint4 rows[UNROLL][2], ranks[UNROLL][ATOMS];
#pragma unroll
            for (int step = 0; step < UNROLL; ++step) {
                const int at = k + step * K_STEP + lane % 4 * 8, exist = params.K - at;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const T* from = x[half] + at * params.x_col;
                    rows[step][half] = read_eight<T, kAligned>(from, params.x_col, x[half] == nullptr ? 0 : exist);
                }
#pragma unroll
                for (int atom = 0; atom < ATOMS; ++atom) {
                    const bool in_slot = has_adapter && begin + atom * 8 < params.slot_rank;
                    const T* from = a + atom * 8 * params.a_row + at;
                    ranks[step][atom] = read_eight<T, kAligned>(from, 1, in_slot ? exist : 0);
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
                    const bool copies = sorts && slice == 0 && begin == 0 && at < params.K && x[half] != nullptr;
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
            if (begin + r >= rank) continue;
            float sum = 0;
#pragma unroll
            for (int part = 0; part < WARPS; ++part) sum += parts[part][own][r];
            const int64_t row = int64_t(slice) * params.capacity + (sorts ? first + own : block.rows[own]);
            params.y[row * params.slot_rank + begin + r] = scaling * sum;
        }
    }
}

// kGroups: the blocks sort the rows themselves, and each looks at one place. Otherwise it looks at a few, of which
// hardly more than one is the first of a tile; the next block looks at those 16 further on, where the next tile of the
// same slot begins: blocks that work are neighbours, and lie on all SMs.
template <class T, int ATOMS, bool kAligned, bool kGroups>
__global__ void __launch_bounds__(kShrinkThreads) lora_shrink(const __grid_constant__ ShrinkParams params) {
    __shared__ BlockRows block;
    __shared__ float parts[kShrinkThreads / kWarpSize][16][ATOMS * 8];
    constexpr int PLACES = kGroups ? 1 : 4;
    start_next_launch();
    const int lane = threadIdx.x % kWarpSize, tiles = gridDim.x * PLACES / 16;
    const int begin = kGroups ? blockIdx.x : blockIdx.x % tiles * 16 + blockIdx.x / tiles * PLACES;
    uint32_t leading = 1;
    if constexpr (!kGroups) {
        const int place = begin + lane;
        const bool exists = lane < PLACES && place < params.M;
        leading = __ballot_sync(~0u, exists && (place - params.places[exists ? place : 0].start) % 16 == 0);
    }
#pragma unroll 1
    for (; leading != 0; leading &= leading - 1) {
        const int first = begin + __ffs(leading) - 1;
        find_rows<kGroups>(block, params, first);
        if (block.count > 0) make_y<T, ATOMS, kAligned>(parts, params, block, first, blockIdx.y);
        __syncthreads();  // block and parts have been read
    }
}

// y @ b in float32, for a product that takes it as an addend; rows as they come, one for each blockIdx.y. A row without
// an adapter, and columns in no slice, get -0: adding that changes no bit.
template <class T>
__global__ void __launch_bounds__(kGroupThreads)
    lora_expand(const __grid_constant__ Adapters adapters, float* out) {
    const int n = blockIdx.x * kGroupThreads + threadIdx.x;
    if (n >= adapters.N) return;
    const int row = blockIdx.y, slot = adapters.infos[row].slot;
    float sum = -0.0f;
    for (int slice = 0; slice < adapters.slice_count && slot < adapters.max_loras; ++slice) {
        if (n < adapters.slices[slice * 2] || n >= adapters.slices[slice * 2 + 1]) continue;
        const int rank = adapters.ranks[slot * adapters.slice_count + slice];
        const float* y = adapters.y + (int64_t(slice) * adapters.capacity + row) * adapters.slot_rank;
        const T* b = static_cast<const T*>(adapters.b) + (int64_t(slot) * adapters.N + n) * adapters.slot_rank;
#pragma unroll 4
        for (int begin = 0; begin < rank; begin += 8) {
            const auto eight = *reinterpret_cast<const Vector<T, 8>*>(b + place_of_rank(begin, n));
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                if (begin + i < rank) sum = fmaf(y[begin + i], widen(eight.data[i]), sum);
            }
        }
    }
    out[int64_t(row) * adapters.N + n] = sum;
}

}  // namespace rawops
