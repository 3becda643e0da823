// Sparse matrix times vector for rows of any lengths: equal shares of entries, read in vectors, whatever rows they are of.
//
// Short rows lie in tiles of whole rows with at most kTile entries. A block multiplies the entries of its tile in the
// order of memory, all loads in flight at once, and adds up the rows from shared memory. Each long row is a warp's own,
// or cut into segments for several warps; the last of them to arrive adds the segments up, in their order.
#include "common/spmv.cuh"

namespace rawops {

constexpr int kThreads = 256, kGroup = 4, kGroupsPerThread = 2;
constexpr int kTile = kThreads * kGroupsPerThread * kGroup;

struct StreamPlan {
    const int* tiles;           // (tiles, 2): first row, and the one behind the last
    const int64_t* segments;    // (segments, 4): first entry, the one behind the last, row, index in splits or -1
    const int* splits;          // (splits, 2): first segment, segments
    void* sums;                 // (segments), of the accumulator's type
    unsigned int* tickets;      // (splits), zero between products
    int segment_count, segment_blocks;
    int lanes;                  // threads that add up a row of a tile
};

// Reads what is read once past the L1, which x needs.
template <class T> __device__ inline void load_once(T* to, const T* from) {
    constexpr int BYTES = kGroup * sizeof(T);
    uint32_t* word = reinterpret_cast<uint32_t*>(to);
    if constexpr (BYTES == 8) {
        asm("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(word[0]), "=r"(word[1]) : "l"(from));
    } else {
#pragma unroll
        for (int i = 0; i < BYTES / 16; ++i) {
            asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                : "=r"(word[4 * i]), "=r"(word[4 * i + 1]), "=r"(word[4 * i + 2]), "=r"(word[4 * i + 3])
                : "l"(reinterpret_cast<const char*>(from) + 16 * i));
        }
    }
}

// Four neighbouring entries, at a multiple of four; columns of -1 are none.
template <class V> struct Group {
    V value[kGroup];
    int column[kGroup];

    __device__ void load(const SpmvCall& call, int64_t first) {
        const V* data = static_cast<const V*>(call.data);
        if (first + kGroup <= call.nnz) {
            load_once(column, call.indices + first);
            load_once(value, data + first);
        } else {
#pragma unroll
            for (int i = 0; i < kGroup; ++i) {
                column[i] = first + i < call.nnz ? call.indices[first + i] : -1;
                value[i] = first + i < call.nnz ? data[first + i] : V{};
            }
        }
    }
    __device__ void clear() {
#pragma unroll
        for (int i = 0; i < kGroup; ++i) column[i] = -1;
    }
};

// Products in shared memory, a gap after each 128 bytes: rows of a power of two would meet in few banks.
template <class A> struct Products {
    static constexpr int PER_LINE = 128 / int(sizeof(A));
    A data[kTile + kTile / PER_LINE];

    __device__ A& operator[](int i) { return data[i + i / PER_LINE]; }
};

template <class V, class X, class P, bool kConjugate>
__device__ void multiply_tile(const SpmvCall& call, const StreamPlan& plan, int tile, RowEnd<X>& end) {
    using A = Accumulator<X>;
    __shared__ Products<A> products;
    const P* __restrict__ indptr = static_cast<const P*>(call.indptr);
    const X* __restrict__ x = static_cast<const X*>(call.x);
    const int first_row = plan.tiles[2 * tile], last_row = plan.tiles[2 * tile + 1];
    const int64_t base = indptr[first_row] & ~P(kGroup - 1);
    if (end.reads_a) {
        const int count = int(indptr[last_row] - base);
        Group<V> groups[kGroupsPerThread];
#pragma unroll
        for (int g = 0; g < kGroupsPerThread; ++g) {
            const int at = (g * kThreads + threadIdx.x) * kGroup;
            if (at < count) groups[g].load(call, base + at);
            else groups[g].clear();
        }
        A gathered[kGroupsPerThread][kGroup];
#pragma unroll
        for (int g = 0; g < kGroupsPerThread; ++g) {
#pragma unroll
            for (int i = 0; i < kGroup; ++i) {
                if (groups[g].column[i] >= 0) gathered[g][i] = widen(x[groups[g].column[i]]);
            }
        }
#pragma unroll
        for (int g = 0; g < kGroupsPerThread; ++g) {
#pragma unroll
            for (int i = 0; i < kGroup; ++i) {
                const auto value = widen(conjugated<kConjugate>(groups[g].value[i]));
                if (groups[g].column[i] >= 0) {
                    products[(g * kThreads + threadIdx.x) * kGroup + i] = multiply_add(value, gathered[g][i], A{});
                }
            }
        }
        __syncthreads();
    }
    const int lanes = plan.lanes, lane = threadIdx.x & (lanes - 1), place = threadIdx.x / lanes;
    for (int row = first_row + place; row - place < last_row; row += kThreads / lanes) {
        A sum = {};
        if (row < last_row && end.reads_a) {
            const int stop = int(indptr[row + 1] - base);
            for (int i = int(indptr[row] - base) + lane; i < stop; i += lanes) sum = add(sum, products[i]);
        }
        sum = sum_lanes(sum, lanes);
        if (row < last_row && lane == 0) end.finish(row, sum);
    }
}

// The sum of a warp's own entries from `begin` to `stop`.
template <class V, class X, bool kConjugate>
__device__ Accumulator<X> sum_entries(const SpmvCall& call, int64_t begin, int64_t stop, int lane) {
    using A = Accumulator<X>;
    const X* __restrict__ x = static_cast<const X*>(call.x);
    A sums[kGroup] = {};
    constexpr int STEP = kWarpSize * kGroup;
    for (int64_t at = (begin & ~int64_t(kGroup - 1)) + lane * kGroup; at < stop; at += kGroupsPerThread * STEP) {
        Group<V> groups[kGroupsPerThread];
#pragma unroll
        for (int g = 0; g < kGroupsPerThread; ++g) {
            if (at + g * STEP < stop) groups[g].load(call, at + g * STEP);
            else groups[g].clear();
        }
#pragma unroll
        for (int g = 0; g < kGroupsPerThread; ++g) {
#pragma unroll
            for (int i = 0; i < kGroup; ++i) {
                const int64_t entry = at + g * STEP + i;
                if (entry < begin || entry >= stop) continue;  // a neighbour's
                const auto value = widen(conjugated<kConjugate>(groups[g].value[i]));
                sums[i] = multiply_add(value, A(widen(x[groups[g].column[i]])), sums[i]);
            }
        }
    }
    return sum_lanes(add(add(sums[0], sums[1]), add(sums[2], sums[3])), kWarpSize);
}

template <class V, class X, bool kConjugate>
__device__ void multiply_segment(const SpmvCall& call, const StreamPlan& plan, RowEnd<X>& end) {
    using A = Accumulator<X>;
    const int segment = blockIdx.x * (kThreads / kWarpSize) + threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    if (segment >= plan.segment_count) return;
    const int64_t* found = plan.segments + 4 * segment;
    const int row = int(found[2]), split = int(found[3]);
    A sum = {};
    if (end.reads_a) sum = sum_entries<V, X, kConjugate>(call, found[0], found[1], lane);
    if (split < 0) {
        if (lane == 0) end.finish(row, sum);
        return;
    }
    const int first = plan.splits[2 * split], count = plan.splits[2 * split + 1];
    volatile A* sums = static_cast<volatile A*>(plan.sums);
    int is_last = 0;
    if (lane == 0) {
        store_volatile(sums + segment, sum);
        __threadfence();
        is_last = atomicInc(plan.tickets + split, count - 1) == count - 1;  // back to zero by itself
    }
    if (!__shfl_sync(~0u, is_last, 0)) return;
    __threadfence();
    sum = A{};
    for (int i = lane; i < count; i += kWarpSize) sum = add(sum, load_volatile(sums + first + i));
    sum = sum_lanes(sum, kWarpSize);
    if (lane == 0) {
        RowEnd<X> own = end;  // its square has a place of its own, since any block may be the last
        own.squares = 0;
        own.finish(row, sum);
        if (call.partials != nullptr) call.partials[gridDim.x + split] = own.squares;
    }
}

template <class V, class X, class P, bool kConjugate>
__global__ void __launch_bounds__(kThreads)
    spmv_stream(const __grid_constant__ SpmvCall call, const __grid_constant__ StreamPlan plan) {
    RowEnd<X> end(call);
    if (end.keeps_y) return;
    const int tile = int(blockIdx.x) - plan.segment_blocks;
    if (tile < 0) multiply_segment<V, X, kConjugate>(call, plan, end);
    else multiply_tile<V, X, P, kConjugate>(call, plan, tile, end);
    end.template store_partial<kThreads>(call.partials, blockIdx.x);
}

}  // namespace rawops
