// Compressed rows of the transpose: a stable sort by column (least significant digit first) that carries rows and
// values along, so entries of a column keep the order of their rows and the same matrix gives the same bits. Each pass
// reads what it sorts once: tiles find out where their entries go from those before them, while they are on their way.
#include "common/lookback.cuh"
#include "common/spmv.cuh"

namespace rawops {

constexpr int kSortThreads = 512, kSortWarps = kSortThreads / kWarpSize;
constexpr int kSortSteps = 8;  // entries of a thread
constexpr int kSortTile = kSortThreads * kSortSteps;
constexpr int kDigits = 256, kPasses = 4;  // of 31 bits at most

// Blocks that an SM shall hold: those of sm_120 spill for two, with values of 16 bytes.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
template <class V> constexpr int kSortBlocks = sizeof(V) > 8 ? 1 : 2;
#else
template <class V> constexpr int kSortBlocks = 2;
#endif

struct Digit {
    int shift, mask;

    __device__ int of(int column) const { return column >> shift & mask; }
};

// The row of an entry, between two rows: the last one that begins at or before it.
template <class P> __device__ inline int row_of(const P* __restrict__ indptr, int low, int high, int64_t entry) {
    while (low + 1 < high) {
        const int middle = low + (high - low) / 2;
        if (indptr[middle] <= entry) low = middle;
        else high = middle;
    }
    return low;
}

// counts (passes, kDigits): entries with each digit of `bits` bits; they start as 0. tile_rows (tiles + 1): the row of
// each tile's first entry, and of the last entry.
template <class P>
__global__ void __launch_bounds__(kSortThreads)
    transpose_digits(const int* __restrict__ columns, const P* __restrict__ indptr, int row_count, int64_t count,
                     int bits, int passes, int tiles, Word* __restrict__ counts, int* __restrict__ tile_rows) {
    constexpr int UNROLL = 4;
    __shared__ int own[kPasses][kDigits];
    for (int i = threadIdx.x; i < kPasses * kDigits; i += kSortThreads) own[0][i] = 0;
    __syncthreads();
    const int64_t step = int64_t(gridDim.x) * kSortThreads, begin = int64_t(blockIdx.x) * kSortThreads + threadIdx.x;
    for (int64_t tile = begin; tile <= tiles; tile += step) {
        tile_rows[tile] = row_of(indptr, 0, row_count, tile < tiles ? tile * kSortTile : count - 1);
    }
    for (int64_t first = begin; first < count; first += UNROLL * step) {
        int column[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) column[u] = first + u * step < count ? columns[first + u * step] : -1;
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            for (int pass = 0; pass < passes && column[u] >= 0; ++pass) {
                atomicAdd(&own[pass][Digit{pass * bits, (1 << bits) - 1}.of(column[u])], 1);
            }
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < passes * kDigits; i += kSortThreads) {
        if (own[0][i] != 0) atomicAdd(counts + i, Word(own[0][i]));
    }
}

// Writes what is staged, in the order of `sorted`.
template <class T>
__device__ inline void write_out(T* to, int stride, const uint32_t* staged, const int* sorted, const int64_t* shifts,
                                 Digit digit, int size) {
    __syncthreads();
    for (int i = threadIdx.x; i < size; i += kSortThreads) {
        to[(shifts[digit.of(sorted[i])] + i) * stride] = T(staged[i]);
    }
    __syncthreads();
}

// Stages the rows of a tile's entries. A warp looks for those of its steps first, between which there are few.
template <class P>
__device__ inline void find_rows(uint32_t* staged, const P* __restrict__ indptr, const int* __restrict__ tile_rows,
                                 int number, int64_t tile, int size, int first) {
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const int at = min_of((warp * kSortSteps + lane) * kWarpSize, size - 1);
    int bound = 0;
    if (lane <= kSortSteps) bound = row_of(indptr, tile_rows[number], tile_rows[number + 1] + 1, tile + at);
#pragma unroll 1
    for (int i = 0; i < kSortSteps; ++i) {
        const int low = __shfl_sync(~0u, bound, i), high = __shfl_sync(~0u, bound, i + 1) + 1;
        const int entry = first + i * kWarpSize;
        if (entry < size) staged[entry] = row_of(indptr, low, high, tile + entry);
    }
}

// The places of a warp's entries among those with their digit, in the order of entries; counts its digits in `next`.
__device__ inline void count_digits(int (&place)[kSortSteps], const int (&column)[kSortSteps], uint16_t* next,
                                    Digit digit, int lane) {
#pragma unroll
    for (int i = 0; i < kSortSteps; ++i) {
        const bool is_there = column[i] >= 0;
        const int found = is_there ? digit.of(column[i]) : kDigits;
        const unsigned int same = __match_any_sync(~0u, found);
        const int before = __popc(same & ((1u << lane) - 1));
        if (is_there) place[i] = next[found] + before;
        __syncwarp();
        if (is_there && before == 0) next[found] += uint16_t(__popc(same));
        __syncwarp();
    }
}

// Makes the counts of a digit by warps what is before each warp; returns their sum.
__device__ inline int add_warps(uint16_t (&next)[kSortWarps][kDigits], int digit) {
    int total = 0;
#pragma unroll 4
    for (int w = 0; w < kSortWarps; ++w) {
        const int here = next[w][digit];
        next[w][digit] = uint16_t(total);
        total += here;
    }
    return total;
}

// Writes the values of a sorted tile, a part of 4 bytes (or 2) at a time.
template <class V>
__device__ inline void write_values(V* __restrict__ to, const V* __restrict__ data, const int (&place)[kSortSteps],
                                    uint32_t* staged, const int* sorted, const int64_t* shifts, Digit digit,
                                    int64_t tile, int first, int size) {
    using Part = typename Choose<sizeof(V) == 2, uint16_t, uint32_t>::Type;
    constexpr int PARTS = int(sizeof(V) / sizeof(Part));
#pragma unroll 1
    for (int part = 0; part < PARTS; ++part) {
        const Part* from = reinterpret_cast<const Part*>(data) + part;
#pragma unroll
        for (int i = 0; i < kSortSteps; ++i) {
            if (first + i * kWarpSize < size) staged[place[i]] = from[(tile + first + i * kWarpSize) * PARTS];
        }
        write_out(reinterpret_cast<Part*>(to) + part, PARTS, staged, sorted, shifts, digit, size);
    }
}

// counts (kDigits), of this pass; words (tiles, kDigits) and turns start as 0. In the first pass rows come from the row
// pointers, between those of the tile.
//
// A tile is sorted in shared memory first, one array after the other, so that entries of a digit are written side by
// side.
template <class V, class P, bool kFirst>
__global__ void __launch_bounds__(kSortThreads, kSortBlocks<V>)
    transpose_scatter(const int* __restrict__ columns, const int* __restrict__ rows, const V* __restrict__ data,
                      const P* __restrict__ indptr, const int* __restrict__ tile_rows, int64_t count, int shift,
                      int mask, const Word* __restrict__ counts, Word* __restrict__ words, Word* __restrict__ turns,
                      int* __restrict__ to_columns, int* __restrict__ to_rows, V* __restrict__ to_data) {
    __shared__ __align__(4) uint16_t next[kSortWarps][kDigits];  // of a warp and digit: entries so far, then where
    __shared__ int64_t shifts[kDigits];                          // from a place in the sorted tile to that in memory
    __shared__ int sorted[kSortTile];
    __shared__ uint32_t staged[kSortTile];
    __shared__ int tile_number, warp_sums[kSortWarps];
    __shared__ int64_t warp_totals[kSortWarps];
    const Digit digit = {shift, mask};
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, own = threadIdx.x;
    if (threadIdx.x == 0) tile_number = take_turn(turns);
    uint32_t* const pairs = reinterpret_cast<uint32_t*>(next[0]);
    for (int i = threadIdx.x; i < kSortWarps * kDigits / 2; i += kSortThreads) pairs[i] = 0;
    __syncthreads();
    const int number = tile_number;
    const int64_t tile = int64_t(number) * kSortTile;
    const int size = int(tile + kSortTile < count ? kSortTile : count - tile);
    const int first = warp * kSortSteps * kWarpSize + lane;  // a warp has neighbouring entries, whose order it keeps
    int column[kSortSteps], place[kSortSteps];
#pragma unroll
    for (int i = 0; i < kSortSteps; ++i) {
        const int at = first + i * kWarpSize;
        column[i] = at < size ? columns[tile + at] : -1;
    }
    if constexpr (kFirst) find_rows(staged, indptr, tile_rows, number, tile, size, first);
    count_digits(place, column, next[warp], digit, lane);
    __syncthreads();
    int total = 0;
    Word* const word = words + int64_t(number) * kDigits + own;
    if (own < kDigits) {
        total = add_warps(next, own);
        leave_sum(word, number > 0 ? kOwnSum : kWholeSum, total);
    }
    const int begin = sum_before(total, warp_sums);
    const int64_t digits_before = sum_before(int64_t(own < kDigits ? counts[own] : 0), warp_totals);
    if (own < kDigits) {
#pragma unroll 4
        for (int w = 0; w < kSortWarps; ++w) next[w][own] += uint16_t(begin);
    }
    __syncthreads();
    int row[kSortSteps];
#pragma unroll
    for (int i = 0; i < kSortSteps; ++i) {
        const int at = first + i * kWarpSize;
        if (at >= size) continue;
        if constexpr (kFirst) row[i] = int(staged[at]);
        else row[i] = rows[tile + at];
    }
    if constexpr (kFirst) __syncthreads();
#pragma unroll
    for (int i = 0; i < kSortSteps; ++i) {
        if (first + i * kWarpSize >= size) continue;
        place[i] += next[warp][digit.of(column[i])];
        sorted[place[i]] = column[i];
        staged[place[i]] = row[i];
    }
    if (own < kDigits) {
        const int64_t before = int64_t(look_back(words + own, kDigits, number));
        if (number > 0) leave_sum(word, kWholeSum, before + total);
        shifts[own] = digits_before + before - begin;
    }
    write_out(to_rows, 1, staged, sorted, shifts, digit, size);
    for (int i = threadIdx.x; i < size; i += kSortThreads) to_columns[shifts[digit.of(sorted[i])] + i] = sorted[i];
    write_values(to_data, data, place, staged, sorted, shifts, digit, tile, first, size);
}

// The first of sorted columns, between two places, that is not below `column`.
__device__ inline int64_t first_of(const int* __restrict__ columns, int64_t low, int64_t high, int64_t column) {
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (columns[middle] < column) low = middle + 1;
        else high = middle;
    }
    return low;
}

// The same by a warp, which looks at 32 places at a time.
__device__ inline int64_t first_of_warp(const int* __restrict__ columns, int64_t count, int64_t column) {
    int64_t low = 0, high = count;
    while (low < high) {
        const int64_t step = (high - low + kWarpSize - 1) / kWarpSize;
        const int64_t at = low + threadIdx.x % kWarpSize * step;
        const bool is_below = at < high && columns[at] < column;
        const int below = __popc(__ballot_sync(~0u, is_below));  // of places `step` apart
        if (below == 0) return low;
        const int64_t first = low + (below - 1) * step + 1, last = low + below * step;
        low = first;
        if (last < high) high = last;
    }
    return low;
}

// indptr (size + 1) of sorted columns, `share` of them to a block, which looks for its first and last first.
template <class P>
__global__ void __launch_bounds__(256)
    transpose_pointers(const int* __restrict__ columns, int64_t count, int size, int share, P* __restrict__ indptr) {
    __shared__ int64_t ends[2];
    const int64_t begin = int64_t(blockIdx.x) * share, stop = begin + share;
    if (threadIdx.x < 2 * kWarpSize) {
        const int which = threadIdx.x / kWarpSize;
        const int64_t found = first_of_warp(columns, count, which == 0 ? begin : stop - 1);
        if (threadIdx.x % kWarpSize == 0) ends[which] = found;
    }
    __syncthreads();
#pragma unroll 4
    for (int64_t i = begin + threadIdx.x; i < stop; i += 256) {
        if (i <= size) indptr[i] = P(first_of(columns, ends[0], ends[1], i));
    }
}

}  // namespace rawops
