// Sparse matrix times vector for rows of any lengths: equal shares of entries, read in vectors, whosever they are.
//
// Short rows lie in tiles of whole rows. A block multiplies the entries of a tile in the order of memory, puts the
// products in shared memory and adds up the rows from there. Where tiles cost the same (kWalks), a block walks over
// several, and while it adds up the rows of one, the entries of the next are on their way; else each tile has a block,
// which the hardware places. Each long row is a warp's own, or cut into segments for several warps; the last of them to
// arrive adds the segments up, in their order.
#include "common/spmv.cuh"

namespace rawops {

constexpr int kThreads = 256;
constexpr int kGroup = 4, kGroups = 2;  // entries of a vector load; loads of a thread that are on their way
constexpr int kTile = kThreads * kGroups * kGroup;
constexpr int kWide = 16;               // entries that a lane adds up alone at most

// Blocks that fit on an SM: walking takes registers, and those of sm_80 to sm_89 spill for four blocks. What does not
// walk spills for five on sm_89 and from sm_100 on.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kWalkingBlocks = 3;
#else
constexpr int kWalkingBlocks = 4;
#endif
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1000)
constexpr int kSingleBlocks = 4;
#else
constexpr int kSingleBlocks = 5;
#endif
template <class A, bool kWalks>
constexpr int kBlocksPerSM = sizeof(A) == 4 ? (kWalks ? kWalkingBlocks : kSingleBlocks) : sizeof(A) == 8 ? 3 : 2;

struct Tile {
    int64_t first_entry;  // rounded down to a multiple of kGroup
    int first_row;
    unsigned short rows, entries;  // entries: from first_entry on
};

struct Segment {
    int64_t begin, stop;
    int row, first, count, unused;  // the segments of its row
};

struct StreamPlan {
    const Tile* tiles;
    const Segment* segments;
    void* sums;                 // (segments), of the accumulator's type
    unsigned int* tickets;      // (segments), as finish_part has them: of a row, that of its first segment
    int segment_count, segment_blocks, tile_count;
    int lanes;                  // threads that add up a row of a tile
    int tile_blocks;            // behind those of the segments
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

// A thread's entries of a stretch: groups of neighbours, STEP entries apart.
template <class V, int STEP> struct Entries {
    V value[kGroups][kGroup];
    int column[kGroups][kGroup];  // -1: none

    // From entry `first` on, a multiple of kGroup, `count` are wanted.
    __device__ void load(const SpmvCall& call, int64_t first, int count) {
        const V* data = static_cast<const V*>(call.data);
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
            const int64_t at = first + g * STEP;
            if (g * STEP < count && at + kGroup <= call.nnz) {
                load_once(column[g], call.indices + at);
                load_once(value[g], data + at);
            } else {
#pragma unroll
                for (int i = 0; i < kGroup; ++i) {
                    const bool is_there = g * STEP < count && at + i < call.nnz;
                    column[g][i] = is_there ? call.indices[at + i] : -1;
                    if (is_there) value[g][i] = data[at + i];
                }
            }
        }
    }
};

// Products in shared memory, with a gap after each 128 bytes: rows of a power of two would meet in few banks.
template <class A> struct Products {
    static constexpr int PER_LINE = 128 / int(sizeof(A));
    A data[kTile + kTile / PER_LINE];

    __device__ A& operator[](int i) { return data[i + i / PER_LINE]; }
};

// Adds up the rows of a tile. `begin` and `stop` bound the first row that this thread takes part in.
template <class X, class P>
__device__ void add_rows(const Tile& tile, const P* __restrict__ indptr, int lanes, int begin, int stop,
                         Products<Accumulator<X>>& products, RowEnd<X>& end) {
    using A = Accumulator<X>;
    const int lane = threadIdx.x & (lanes - 1), place = threadIdx.x / lanes, warp_lane = threadIdx.x % kWarpSize;
    for (int row = place; row - place < tile.rows; row += kThreads / lanes) {
        if (row != place && row < tile.rows) {
            begin = int(indptr[tile.first_row + row] - tile.first_entry);
            stop = int(indptr[tile.first_row + row + 1] - tile.first_entry);
        }
        if (row >= tile.rows || !end.reads_a) begin = stop = 0;
        const bool is_wide = stop - begin > kWide * lanes;
        A sum = {};
        if (!is_wide) {
            for (int i = begin + lane; i < stop; i += lanes) sum = add(sum, products[i]);
        }
        sum = sum_lanes(sum, lanes);
        for (unsigned int wide = __ballot_sync(~0u, is_wide && lane == 0); wide != 0; wide &= wide - 1) {
            const int owner = __ffs(wide) - 1;  // the whole warp adds up its row
            const int last = __shfl_sync(~0u, stop, owner);
            A part = {};
            for (int i = __shfl_sync(~0u, begin, owner) + warp_lane; i < last; i += kWarpSize) {
                part = add(part, products[i]);
            }
            part = sum_lanes(part, kWarpSize);
            if (warp_lane == owner) sum = part;
        }
        if (row < tile.rows && lane == 0) end.finish(tile.first_row + row, sum);
    }
}

template <class V, class X, class P, bool kConjugate, bool kWalks>
__device__ void multiply_tiles(const SpmvCall& call, const StreamPlan& plan, RowEnd<X>& end) {
    using A = Accumulator<X>;
    __shared__ Products<A> products;
    const P* __restrict__ indptr = static_cast<const P*>(call.indptr);
    const X* __restrict__ x = static_cast<const X*>(call.x);
    const int step = plan.tile_blocks, last = plan.tile_count;
    int index = blockIdx.x - plan.segment_blocks;
    if (index >= last) return;

    const int first = threadIdx.x * kGroup;  // of this thread in a tile
    Tile tile = plan.tiles[index], next = {};
    Entries<V, kThreads * kGroup> entries;
    entries.load(call, tile.first_entry + first, end.reads_a ? tile.entries - first : 0);
    while (true) {
        const bool is_last = !kWalks || index + step >= last;
        if (!is_last) next = plan.tiles[index + step];
        int begin = 0, stop = 0;
        const int place = threadIdx.x / plan.lanes;
        if (place < tile.rows) {
            begin = int(indptr[tile.first_row + place] - tile.first_entry);
            stop = int(indptr[tile.first_row + place + 1] - tile.first_entry);
        }
        A gathered[kGroups][kGroup];
#pragma unroll
        for (int i = 0; i < kGroups * kGroup; ++i) {
            const int column = entries.column[i / kGroup][i % kGroup];
            if (column >= 0) gathered[i / kGroup][i % kGroup] = widen(x[column]);
        }
#pragma unroll
        for (int i = 0; i < kGroups * kGroup; ++i) {
            const int g = i / kGroup, k = i % kGroup;
            const auto value = widen(conjugated<kConjugate>(entries.value[g][k]));
            if (entries.column[g][k] >= 0) {
                products[g * kThreads * kGroup + first + k] = multiply_add(value, gathered[g][k], A{});
            }
        }
        if (!is_last) entries.load(call, next.first_entry + first, end.reads_a ? next.entries - first : 0);
        __syncthreads();
        add_rows<X, P>(tile, indptr, plan.lanes, begin, stop, products, end);
        if (is_last) break;
        __syncthreads();
        index += step;
        tile = next;
    }
}

// A lane's part of the sum of a warp's own entries from `begin` to `stop`.
template <class V, class X, bool kConjugate>
__device__ Accumulator<X> sum_entries(const SpmvCall& call, int64_t begin, int64_t stop, int lane) {
    using A = Accumulator<X>;
    const X* __restrict__ x = static_cast<const X*>(call.x);
    constexpr int STEP = kWarpSize * kGroup;
    A sums[kGroup] = {};
    for (int64_t at = (begin & ~int64_t(kGroup - 1)) + lane * kGroup; at < stop; at += kGroups * STEP) {
        Entries<V, STEP> entries;
        entries.load(call, at, int(stop - at));
#pragma unroll
        for (int i = 0; i < kGroups * kGroup; ++i) {
            const int64_t entry = at + i / kGroup * STEP + i % kGroup;
            if (entry < begin || entry >= stop) continue;  // a neighbour's
            const auto value = widen(conjugated<kConjugate>(entries.value[i / kGroup][i % kGroup]));
            const A factor = widen(x[entries.column[i / kGroup][i % kGroup]]);
            sums[i % kGroup] = multiply_add(value, factor, sums[i % kGroup]);
        }
    }
    return add(add(sums[0], sums[1]), add(sums[2], sums[3]));
}

template <class V, class X, bool kConjugate>
__device__ void multiply_segment(const SpmvCall& call, const StreamPlan& plan, RowEnd<X>& end) {
    using A = Accumulator<X>;
    const int segment = blockIdx.x * (kThreads / kWarpSize) + threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    if (segment >= plan.segment_count) return;
    const Segment found = plan.segments[segment];
    A sum = {};
    if (end.reads_a) sum = sum_entries<V, X, kConjugate>(call, found.begin, found.stop, lane);
    finish_part(end, plan.sums, plan.tickets, segment, found.row, found.first, found.count, sum);
}

template <class V, class X, class P, bool kConjugate, bool kWalks>
__global__ void __launch_bounds__(kThreads, kBlocksPerSM<Accumulator<X>, kWalks>)
    spmv_stream(const __grid_constant__ SpmvCall call, const __grid_constant__ StreamPlan plan) {
    RowEnd<X> end(call);
    if (end.keeps_y) return;
    if (blockIdx.x < plan.segment_blocks) multiply_segment<V, X, kConjugate>(call, plan, end);
    else multiply_tiles<V, X, P, kConjugate, kWalks>(call, plan, end);
    end.template store_partial<kThreads>(call.partials, blockIdx.x);
}

}  // namespace rawops
