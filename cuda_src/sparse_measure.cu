// What a matrix looks like, and copies of its indices and row pointers in the types of the kernels, in one launch.
#include "common/numeric.cuh"

namespace rawops {

constexpr int kMeasureThreads = 256;
constexpr int kLengths = 1024;  // up to which, but for the last, the histogram counts rows

// All counts are of integers, so the order of the additions does not matter.
enum Field {
    kOutside,    // indices below 0 or past the last
    kJumps,      // entries in another 32-byte sector of a float32 x than the one before
    kFalls,      // entries with a lower index than the one before, row ends included
    kRowFalls,   // of those, first entries of their row
    kDrops,      // row pointers below the one before, or not between the ends
    kFirst, kLast,
    kSquares, kLongest, kEmpty,
    kPadded,     // entries of slices of 32 rows, each as long as its longest, but for rows that the histogram cannot hold
    kBandwidth,  // largest distance of a row's first and last entry from the diagonal
    kListed,     // rows that the histogram cannot hold
    kFields,
};
using Count = unsigned long long;

// What a block has found.
struct Measured {
    Count fields[kFields];
    unsigned int lengths[kLengths];

    __device__ void add_up(Field field, Count value) {
        for (int mask = 16; mask > 0; mask /= 2) value += __shfl_xor_sync(~0u, value, mask);
        if (threadIdx.x % kWarpSize == 0 && value != 0) atomicAdd(&fields[field], value);
    }

    __device__ void find_largest(Field field, Count value) {
        for (int mask = 16; mask > 0; mask /= 2) {
            const Count other = __shfl_xor_sync(~0u, value, mask);
            value = value > other ? value : other;
        }
        if (threadIdx.x % kWarpSize == 0 && value != 0) atomicMax(&fields[field], value);
    }
};

// A block's share of the first indptr[rows] of `count` indices; `copy` may be null.
template <class I, class P>
__device__ void measure_indices(const I* __restrict__ indices, const P* __restrict__ indptr, int rows, int64_t count,
                                int64_t cols, int* __restrict__ copy, int block, int blocks, Measured& found) {
    constexpr int VEC = 16 / int(sizeof(I)), UNROLL = 8 / VEC;
    struct __align__(16) Group {
        I data[VEC];
    };
    const int64_t last = indptr[rows];
    if (last < count) count = last;
    Count outside = 0, jumps = 0, falls = 0;
    const auto look_at = [&](int64_t i, I index, I before) {
        outside += index < 0 || index >= cols;
        jumps += index >> 3 != before >> 3;
        falls += index < before;
        if (copy != nullptr) copy[i] = int(index);
    };
    const int64_t step = int64_t(blocks) * kMeasureThreads, own = int64_t(block) * kMeasureThreads + threadIdx.x;
    const int64_t groups = reinterpret_cast<uint64_t>(indices) % 16 == 0 ? count / VEC : 0;
    for (int64_t first = own; first < groups; first += UNROLL * step) {
        Group group[UNROLL];
        I before[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int64_t i = first + u * step;
            if (i >= groups) continue;
            group[u] = reinterpret_cast<const Group*>(indices)[i];
            before[u] = i > 0 ? indices[i * VEC - 1] : group[u].data[0];
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int64_t i = first + u * step;
            if (i >= groups) continue;
#pragma unroll
            for (int k = 0; k < VEC; ++k) {
                look_at(i * VEC + k, group[u].data[k], k > 0 ? group[u].data[max_of(k - 1, 0)] : before[u]);
            }
        }
    }
    for (int64_t i = groups * VEC + own; i < count; i += step) look_at(i, indices[i], indices[i > 0 ? i - 1 : 0]);
    found.add_up(kOutside, outside);
    found.add_up(kJumps, jumps);
    found.add_up(kFalls, falls);
}

// A block's share of the rows; `copy` may be null. Row pointers are trusted only as far as they stay within `count`.
template <class I, class P, class Q>
__device__ void measure_rows(const I* __restrict__ indices, const P* __restrict__ indptr, int rows, int64_t count,
                             Q* __restrict__ copy, int block, int blocks, Measured& found, Count* __restrict__ totals,
                             Count* __restrict__ list, int listed) {
    Count row_falls = 0, drops = 0, squares = 0, longest = 0, empty = 0, padded = 0, bandwidth = 0;
    for (int64_t first = int64_t(block) * kMeasureThreads; first < rows; first += int64_t(blocks) * kMeasureThreads) {
        const int64_t row = first + threadIdx.x;
        Count length = 0;
        if (row < rows) {
            const int64_t begin = indptr[row], stop = indptr[row + 1];
            const bool is_right = 0 <= begin && begin <= stop && stop <= count;
            drops += !is_right;
            if (is_right) {
                length = stop - begin;
                empty += length == 0;
                squares += length * length;
                if (length < kLengths - 1) {
                    atomicAdd(&found.lengths[int(length)], 1u);
                } else {
                    const Count place = atomicAdd(totals + kListed, Count(1));
                    if (place < listed) list[place] = length;
                }
                if (length > 0) {
                    const int64_t left = int64_t(indices[begin]) - row, right = int64_t(indices[stop - 1]) - row;
                    const Count here = left < 0 ? -left : left, there = right < 0 ? -right : right;
                    const Count reach = here > there ? here : there;
                    bandwidth = bandwidth > reach ? bandwidth : reach;
                    row_falls += begin > 0 && indices[begin] < indices[begin - 1];
                }
            }
            if (copy != nullptr) copy[row] = Q(begin);
            if (row == 0) totals[kFirst] = begin;
            if (row == rows - 1) {
                totals[kLast] = stop;
                if (copy != nullptr) copy[rows] = Q(stop);
            }
        }
        longest = longest > length ? longest : length;
        Count most = length < kLengths - 1 ? length : 0;
        for (int mask = 16; mask > 0; mask /= 2) {
            const Count other = __shfl_xor_sync(~0u, most, mask);
            most = most > other ? most : other;
        }
        padded += most;  // by each of the 32 lanes
    }
    found.add_up(kRowFalls, row_falls);
    found.add_up(kDrops, drops);
    found.add_up(kSquares, squares);
    found.add_up(kEmpty, empty);
    found.add_up(kPadded, padded);
    found.find_largest(kLongest, longest);
    found.find_largest(kBandwidth, bandwidth);
}

// The first `index_blocks` blocks look at the indices, the others at the rows. totals (kFields, kLengths, listed): fields,
// histogram and, in any order, the lengths of the rows that it does not count; they start as 0.
template <class I, class P, class Q>
__global__ void __launch_bounds__(kMeasureThreads)
    measure(const I* __restrict__ indices, const P* __restrict__ indptr, int rows, int64_t count, int64_t cols,
            int* __restrict__ index_copy, Q* __restrict__ pointer_copy, int index_blocks, int listed,
            Count* __restrict__ totals) {
    __shared__ Measured found;
    for (int i = threadIdx.x; i < kLengths; i += kMeasureThreads) found.lengths[i] = 0;
    if (threadIdx.x < kFields) found.fields[threadIdx.x] = 0;
    __syncthreads();
    const int block = int(blockIdx.x) - index_blocks;
    if (block < 0) {
        measure_indices(indices, indptr, rows, count, cols, index_copy, int(blockIdx.x), index_blocks, found);
    } else {
        const int blocks = int(gridDim.x) - index_blocks;
        Count* const list = totals + kFields + kLengths;
        measure_rows(indices, indptr, rows, count, pointer_copy, block, blocks, found, totals, list, listed);
    }
    __syncthreads();
    if (threadIdx.x < kFields) {
        const Count value = found.fields[threadIdx.x];
        Count* const total = totals + threadIdx.x;
        if (threadIdx.x == kLongest || threadIdx.x == kBandwidth) atomicMax(total, value);
        else if (value != 0) atomicAdd(total, value);
    }
    if (block < 0) return;
    for (int i = threadIdx.x; i < kLengths; i += kMeasureThreads) {
        if (found.lengths[i] != 0) atomicAdd(totals + kFields + i, Count(found.lengths[i]));
    }
}

}  // namespace rawops
