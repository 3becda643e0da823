// Compressed rows of the transpose: a stable sort by column (least significant digit first) that carries rows and values
// along, so entries of a column keep the order of their rows and the same matrix gives the same bits.
#include "common/spmv.cuh"

namespace rawops {

constexpr int kSortThreads = 256, kSortWarps = kSortThreads / kWarpSize;
constexpr int kSortSteps = 16;  // entries of a thread
constexpr int kSortTile = kSortThreads * kSortSteps;
constexpr int kDigits = 256;

struct Digit {
    int shift, mask;

    __device__ int of(int column) const { return column >> shift & mask; }
};

// counts (kDigits, tiles): entries of each tile with each digit.
__global__ void __launch_bounds__(kSortThreads)
    transpose_counts(const int* __restrict__ columns, int64_t count, int shift, int mask, int* __restrict__ counts) {
    __shared__ int own[kSortWarps][kDigits];
    const Digit digit = {shift, mask};
    for (int i = threadIdx.x; i < kSortWarps * kDigits; i += kSortThreads) own[0][i] = 0;
    __syncthreads();
    const int64_t first = int64_t(blockIdx.x) * kSortTile + threadIdx.x;
    int* const mine = own[threadIdx.x / kWarpSize];
#pragma unroll 8
    for (int i = 0; i < kSortSteps; ++i) {
        const int64_t at = first + i * kSortThreads;
        if (at < count) atomicAdd(&mine[digit.of(columns[at])], 1);
    }
    __syncthreads();
    int total = 0;
    for (int w = 0; w < kSortWarps; ++w) total += own[w][threadIdx.x];
    counts[int64_t(threadIdx.x) * gridDim.x + blockIdx.x] = total;
}

// The row of an entry, between two rows: the last one that begins at or before it.
template <class P> __device__ inline int row_of(const P* __restrict__ indptr, int low, int high, int64_t entry) {
    while (low + 1 < high) {
        const int middle = low + (high - low) / 2;
        if (indptr[middle] <= entry) low = middle;
        else high = middle;
    }
    return low;
}

// The sum over the threads before this one, of kDigits threads.
__device__ inline int sum_before(int value, int* shared) {
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    int sum = value;
    for (int step = 1; step < kWarpSize; step *= 2) {
        const int other = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += other;
    }
    if (lane == kWarpSize - 1) shared[warp] = sum;
    __syncthreads();
    for (int w = 0; w < warp; ++w) sum += shared[w];
    return sum - value;
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

// ends (kDigits, tiles): running sums of the counts. In the first pass rows come from the row pointers.
//
// A tile is sorted in shared memory first, one array after the other, so that entries of a digit are written side by
// side.
template <class V, class P, bool kFirst>
__global__ void __launch_bounds__(kSortThreads, 2)
    transpose_scatter(const int* __restrict__ columns, const int* __restrict__ rows, const V* __restrict__ data,
                      const P* __restrict__ indptr, int row_count, int64_t count, int shift, int mask,
                      const int* __restrict__ counts, const int64_t* __restrict__ ends, int* __restrict__ to_columns,
                      int* __restrict__ to_rows, V* __restrict__ to_data) {
    using Word = typename Choose<sizeof(V) == 2, uint16_t, uint32_t>::Type;
    constexpr int WORDS = int(sizeof(V) / sizeof(Word));
    __shared__ int next[kSortWarps][kDigits];  // where the next entry of a warp with a digit goes in the sorted tile
    __shared__ int64_t shifts[kDigits];        // from there to its place
    __shared__ int sorted[kSortTile];
    __shared__ uint32_t staged[kSortTile];
    __shared__ int row_ends[2], warp_sums[kSortWarps];
    const Digit digit = {shift, mask};
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const int64_t tile = int64_t(blockIdx.x) * kSortTile;
    const int size = int(tile + kSortTile < count ? kSortTile : count - tile);
    if (kFirst && threadIdx.x < 2) {
        row_ends[threadIdx.x] = row_of(indptr, 0, row_count, threadIdx.x == 0 ? tile : tile + size - 1);
    }
    for (int i = threadIdx.x; i < kSortWarps * kDigits; i += kSortThreads) next[0][i] = 0;
    __syncthreads();
    const int first = warp * kSortSteps * kWarpSize + lane;  // a warp has neighbouring entries, whose order it keeps
    int column[kSortSteps], place[kSortSteps];
#pragma unroll
    for (int i = 0; i < kSortSteps; ++i) {
        const int at = first + i * kWarpSize;
        column[i] = at < size ? columns[tile + at] : -1;
        if (column[i] >= 0) atomicAdd(&next[warp][digit.of(column[i])], 1);
    }
    __syncthreads();
    {
        const int64_t index = int64_t(threadIdx.x) * gridDim.x + blockIdx.x;
        int begin = sum_before(counts[index], warp_sums);
        shifts[threadIdx.x] = ends[index] - counts[index] - begin;
        for (int w = 0; w < kSortWarps; ++w) {
            const int own = next[w][threadIdx.x];
            next[w][threadIdx.x] = begin;
            begin += own;
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kSortSteps; ++i) {
        const bool is_there = column[i] >= 0;
        const int own = is_there ? digit.of(column[i]) : kDigits;
        const unsigned int same = __match_any_sync(~0u, own);
        const int before = __popc(same & ((1u << lane) - 1));
        if (is_there) place[i] = next[warp][own] + before;
        __syncwarp();
        if (is_there && before == 0) next[warp][own] += __popc(same);
        __syncwarp();
        if (is_there) sorted[place[i]] = column[i];
    }
#pragma unroll
    for (int i = 0; i < kSortSteps; ++i) {
        const int64_t at = tile + first + i * kWarpSize;
        if (column[i] < 0) continue;
        if constexpr (kFirst) staged[place[i]] = row_of(indptr, row_ends[0], row_ends[1] + 1, at);
        else staged[place[i]] = rows[at];
    }
    write_out(to_rows, 1, staged, sorted, shifts, digit, size);
    for (int i = threadIdx.x; i < size; i += kSortThreads) to_columns[shifts[digit.of(sorted[i])] + i] = sorted[i];
    for (int word = 0; word < WORDS; ++word) {
        const Word* from = reinterpret_cast<const Word*>(data) + word;
#pragma unroll
        for (int i = 0; i < kSortSteps; ++i) {
            if (column[i] >= 0) staged[place[i]] = from[(tile + first + i * kWarpSize) * WORDS];
        }
        write_out(reinterpret_cast<Word*>(to_data) + word, WORDS, staged, sorted, shifts, digit, size);
    }
}

// indptr (size + 1) of sorted columns.
template <class P>
__global__ void __launch_bounds__(256)
    transpose_pointers(const int* __restrict__ columns, int64_t count, int size, P* __restrict__ indptr) {
    const int64_t i = int64_t(blockIdx.x) * 256 + threadIdx.x;
    if (i > size) return;
    int64_t low = 0, high = count;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (columns[middle] < i) low = middle + 1;
        else high = middle;
    }
    indptr[i] = P(low);
}

}  // namespace rawops
