// What a matrix looks like, and copies of its indices and row pointers in the types of the kernels, in one pass each.
#include "common/numeric.cuh"

namespace rawops {

constexpr int kMeasureThreads = 256;
constexpr int kLengths = 1024;  // of the histogram: the last takes all longer rows

// All counts are of integers, so the order of the additions does not matter.
struct Measured {
    unsigned long long outside;    // indices below 0 or past the last
    unsigned long long jumps;      // entries in another 32-byte sector of a float32 x than the one before
    unsigned long long falls;      // entries with a lower index than the one before, row ends included
    unsigned long long row_falls;  // of those, first entries of their row
    unsigned long long drops;      // row pointers below the one before, or not between the ends
    unsigned long long first, last;
    unsigned long long squares, longest, empty;
    unsigned long long padded;     // entries of slices of 32 rows, each as long as its longest
    unsigned long long bandwidth;  // largest distance of a row's first and last entry from the diagonal
    unsigned long long lengths[kLengths];
};

__device__ inline void add_up(unsigned long long value, unsigned long long* total) {
    for (int mask = 16; mask > 0; mask /= 2) value += __shfl_xor_sync(~0u, value, mask);
    if (threadIdx.x % kWarpSize == 0 && value != 0) atomicAdd(total, value);
}

__device__ inline void find_largest(unsigned long long value, unsigned long long* largest) {
    for (int mask = 16; mask > 0; mask /= 2) {
        const unsigned long long other = __shfl_xor_sync(~0u, value, mask);
        value = value > other ? value : other;
    }
    if (threadIdx.x % kWarpSize == 0 && value > *largest) atomicMax(largest, value);
}

// The first indptr[rows] of `count` indices; `copy` may be null.
template <class I, class P>
__global__ void __launch_bounds__(kMeasureThreads)
    measure_indices(const I* __restrict__ indices, const P* __restrict__ indptr, int rows, int64_t count, int64_t cols,
                    int* __restrict__ copy, Measured* __restrict__ found) {
    constexpr int UNROLL = 4;
    const int64_t last = indptr[rows];
    if (last < count) count = last;
    unsigned long long outside = 0, jumps = 0, falls = 0;
    const int64_t step = int64_t(gridDim.x) * kMeasureThreads;
    for (int64_t first = int64_t(blockIdx.x) * kMeasureThreads; first < count; first += UNROLL * step) {
        I index[UNROLL], before[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int64_t i = first + threadIdx.x + u * step;
            index[u] = i < count ? indices[i] : I(0);
            before[u] = i < count && i > 0 ? indices[i - 1] : index[u];
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int64_t i = first + threadIdx.x + u * step;
            if (i >= count) break;
            outside += index[u] < 0 || index[u] >= cols;
            jumps += index[u] >> 3 != before[u] >> 3;
            falls += index[u] < before[u];
            if (copy != nullptr) copy[i] = int(index[u]);
        }
    }
    add_up(outside, &found->outside);
    add_up(jumps, &found->jumps);
    add_up(falls, &found->falls);
}

// `copy` may be null. Row pointers are trusted only as far as they stay within `count`.
template <class I, class P, class Q>
__global__ void __launch_bounds__(kMeasureThreads)
    measure_rows(const I* __restrict__ indices, const P* __restrict__ indptr, int rows, int64_t count,
                 Q* __restrict__ copy, Measured* __restrict__ found) {
    __shared__ unsigned int lengths[kLengths];
    for (int i = threadIdx.x; i < kLengths; i += kMeasureThreads) lengths[i] = 0;
    __syncthreads();
    unsigned long long row_falls = 0, drops = 0, squares = 0, longest = 0, empty = 0, padded = 0, bandwidth = 0;
    for (int64_t first = int64_t(blockIdx.x) * kMeasureThreads; first < rows; first += gridDim.x * kMeasureThreads) {
        const int64_t row = first + threadIdx.x;
        unsigned long long length = 0;
        if (row < rows) {
            const int64_t begin = indptr[row], stop = indptr[row + 1];
            const bool is_right = 0 <= begin && begin <= stop && stop <= count;
            drops += !is_right;
            if (is_right) {
                length = stop - begin;
                empty += length == 0;
                squares += length * length;
                atomicAdd(&lengths[length < kLengths ? int(length) : kLengths - 1], 1u);
                if (length > 0) {
                    const int64_t left = int64_t(indices[begin]) - row, right = int64_t(indices[stop - 1]) - row;
                    const unsigned long long here = left < 0 ? -left : left, there = right < 0 ? -right : right;
                    const unsigned long long reach = here > there ? here : there;
                    bandwidth = bandwidth > reach ? bandwidth : reach;
                    row_falls += begin > 0 && indices[begin] < indices[begin - 1];
                }
            }
            if (copy != nullptr) copy[row] = Q(begin);
            if (row == 0) found->first = begin;
            if (row == rows - 1) {
                found->last = stop;
                if (copy != nullptr) copy[rows] = Q(stop);
            }
        }
        longest = longest > length ? longest : length;
        unsigned long long most = length;
        for (int mask = 16; mask > 0; mask /= 2) {
            const unsigned long long other = __shfl_xor_sync(~0u, most, mask);
            most = most > other ? most : other;
        }
        padded += most;  // by each of the 32 lanes
    }
    add_up(row_falls, &found->row_falls);
    add_up(drops, &found->drops);
    add_up(squares, &found->squares);
    add_up(empty, &found->empty);
    add_up(padded, &found->padded);
    find_largest(longest, &found->longest);
    find_largest(bandwidth, &found->bandwidth);
    __syncthreads();
    for (int i = threadIdx.x; i < kLengths; i += kMeasureThreads) {
        if (lengths[i] != 0) atomicAdd(&found->lengths[i], static_cast<unsigned long long>(lengths[i]));
    }
}

}  // namespace rawops
