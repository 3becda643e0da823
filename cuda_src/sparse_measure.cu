// What a matrix looks like, and copies of its indices and row pointers in the types of the kernels, in one launch.
#include "common/lookback.cuh"

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
    kPadded,     // entries of slices of 32 rows, each as long as its longest, but for rows not in the histogram
    kBandwidth,  // largest distance of a row's first and last entry from the diagonal
    kHeld,       // entries of the rows that the histogram holds
    kListed,     // rows that it cannot hold
    kFields,
};
using Count = unsigned long long;

// What other blocks have written in this launch: past the L1.
__device__ inline Count load_shared_by_all(const Count* from) { return *static_cast<const volatile Count*>(from); }

// What a block has found.
struct Measured {
    Count fields[kFields];
    unsigned int lengths[kLengths];

    __device__ void add_up(Field field, Count value) {
        for (int mask = 16; mask > 0; mask /= 2) value += __shfl_xor_sync(~0u, value, mask);
        if (threadIdx.x % kWarpSize == 0 && value != 0) atomicAdd(&fields[field], value);
    }

    // Neighbouring rows are often equally long: those that are as long as the warp's first count at once.
    __device__ void count_length(bool is_held, int length) {
        const int usual = __shfl_sync(~0u, length, 0);
        const unsigned same = __ballot_sync(~0u, is_held && length == usual);
        if (threadIdx.x % kWarpSize == 0) {
            if (same != 0) atomicAdd(&lengths[usual], unsigned(__popc(same)));
        }
        if (is_held && length != usual) atomicAdd(&lengths[length], 1u);
    }

    __device__ void find_largest(Field field, Count value) {
        for (int mask = 16; mask > 0; mask /= 2) {
            const Count other = __shfl_xor_sync(~0u, value, mask);
            value = value > other ? value : other;
        }
        if (threadIdx.x % kWarpSize == 0 && value != 0) atomicMax(&fields[field], value);
    }
};

template <int BYTES> struct UnsignedOf { using Type = unsigned int; };
template <> struct UnsignedOf<8> { using Type = unsigned long long; };

// A block's share of the first indptr[rows] of `count` indices; `copy`, aligned to 16 bytes, may be null.
template <class I, class P>
__device__ void measure_indices(const I* __restrict__ indices, const P* __restrict__ indptr, int rows, int64_t count,
                                int64_t cols, int* __restrict__ copy, int block, int blocks, Measured& found) {
    constexpr int VEC = 16 / int(sizeof(I)), UNROLL = 4;
    struct __align__(16) Group {
        I data[VEC];
    };
    const int64_t last = indptr[rows];
    if (last < count) count = last;
    unsigned int outside = 0, jumps = 0, falls = 0;  // of a thread
    using U = typename UnsignedOf<sizeof(I)>::Type;
    const U limit = U(cols);
    const auto look_at = [&](I index, I before) {
        outside += U(index) >= limit;
        jumps += U(index ^ before) > 7;  // another number of 8
        falls += index < before;
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
                look_at(group[u].data[k], k > 0 ? group[u].data[max_of(k - 1, 0)] : before[u]);
            }
            if (copy == nullptr) continue;
            Vector<int, VEC> narrow;
#pragma unroll
            for (int k = 0; k < VEC; ++k) narrow.data[k] = int(group[u].data[k]);
            reinterpret_cast<Vector<int, VEC>*>(copy)[i] = narrow;
        }
    }
    for (int64_t i = groups * VEC + own; i < count; i += step) {
        look_at(indices[i], indices[i > 0 ? i - 1 : 0]);
        if (copy != nullptr) copy[i] = int(indices[i]);
    }
    found.add_up(kOutside, outside);
    found.add_up(kJumps, jumps);
    found.add_up(kFalls, falls);
}

// A block's share of the rows; `copy` may be null. Row pointers are trusted only as far as they stay within `count`.
template <class I, class P, class Q>
__device__ void measure_rows(const I* __restrict__ indices, const P* __restrict__ indptr, int rows, int64_t count,
                             Q* __restrict__ copy, int block, int blocks, Measured& found, Count* __restrict__ totals,
                             Count* __restrict__ list, int listed) {
    constexpr int AT_ONCE = sizeof(P) + sizeof(I) > 8 ? 2 : 4;  // rows of a thread, whose loads wait for others twice
    using U = typename UnsignedOf<sizeof(P)>::Type;
    using R = typename UnsignedOf<sizeof(I)>::Type;
    unsigned int row_falls = 0, drops = 0, empty = 0;  // of a thread
    U longest = 0;
    R bandwidth = 0;
    Count squares = 0, padded = 0, held = 0;
    const int64_t step = int64_t(blocks) * kMeasureThreads;
    for (int64_t first = int64_t(block) * kMeasureThreads; first < rows; first += AT_ONCE * step) {
        P begin[AT_ONCE], stop[AT_ONCE];
        I left[AT_ONCE], right[AT_ONCE];
        bool is_right[AT_ONCE], falls[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int64_t row = first + i * step + threadIdx.x;
            begin[i] = row < rows ? indptr[row] : P(0), stop[i] = row < rows ? indptr[row + 1] : P(-1);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int64_t row = first + i * step + threadIdx.x;
            is_right[i] = 0 <= begin[i] && begin[i] <= stop[i] && stop[i] <= count;
            falls[i] = false, left[i] = right[i] = I(row);
            if (!is_right[i] || begin[i] == stop[i]) continue;
            left[i] = indices[begin[i]], right[i] = indices[stop[i] - 1];
            falls[i] = begin[i] > 0 && left[i] < indices[begin[i] - 1];
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int64_t row = first + i * step + threadIdx.x;
            const U length = is_right[i] ? U(stop[i]) - U(begin[i]) : U(0);
            const bool is_held = is_right[i] && length < kLengths - 1;
            if (is_right[i]) {
                empty += length == 0, squares += Count(length) * length, row_falls += falls[i];
                const R here = left[i] < I(row) ? R(row) - R(left[i]) : R(left[i]) - R(row);
                const R there = right[i] < I(row) ? R(row) - R(right[i]) : R(right[i]) - R(row);
                const R reach = here > there ? here : there;
                bandwidth = bandwidth > reach ? bandwidth : reach, longest = longest > length ? longest : length;
                if (is_held) {
                    held += length;
                } else {
                    const Count place = atomicAdd(totals + kListed, Count(1));
                    if (place < listed) list[place] = length;
                }
            }
            if (row < rows) {
                drops += !is_right[i];
                if (copy != nullptr) copy[row] = Q(begin[i]);
                if (row == 0) totals[kFirst] = begin[i];
                if (row == rows - 1) {
                    totals[kLast] = stop[i];
                    if (copy != nullptr) copy[rows] = Q(stop[i]);
                }
            }
            padded += __reduce_max_sync(~0u, is_held ? unsigned(length) : 0u);  // by each of the 32 lanes
            found.count_length(is_held, int(length));
        }
    }
    found.add_up(kRowFalls, row_falls);
    found.add_up(kDrops, drops);
    found.add_up(kSquares, squares);
    found.add_up(kEmpty, empty);
    found.add_up(kPadded, padded);
    found.add_up(kHeld, held);
    found.find_largest(kLongest, longest);
    found.find_largest(kBandwidth, bandwidth);
}

// The length at `place` of the sorted list, digit by digit from the highest; all threads of the block call it.
__device__ inline Count length_at(const Count* list, int64_t count, int64_t place, Count longest,
                                  unsigned int* digits) {
    __shared__ Word warp_sums[kMeasureThreads / kWarpSize];
    __shared__ Count chosen, left;
    Count value = 0;
    for (int known = 64 - __clzll(longest); known > 0;) {
        const int shift = max_of(known - 8, 0), mask = (1 << (known - shift)) - 1;
        digits[threadIdx.x] = 0;
        __syncthreads();
        if (threadIdx.x == 0) chosen = left = 0;  // for a list that is cut short, of row pointers that are wrong
        constexpr int AHEAD = 8;
        for (int64_t first = threadIdx.x; first < count; first += AHEAD * kMeasureThreads) {
            Count lengths[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                const int64_t at = first + i * kMeasureThreads;
                lengths[i] = at < count ? load_shared_by_all(list + at) : 0;  // which is in no list
            }
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                const bool is_there = lengths[i] != 0 && lengths[i] >> known == value >> known;
                if (is_there) atomicAdd(&digits[int(lengths[i] >> shift) & mask], 1u);
            }
        }
        __syncthreads();
        const int64_t own = digits[threadIdx.x], before = int64_t(sum_before(Word(own), warp_sums));
        if (before <= place && place < before + own) chosen = threadIdx.x, left = place - before;
        __syncthreads();
        value |= chosen << shift, place = int64_t(left), known = shift;
    }
    return value;
}

// The last block: what all of them have found, and zeros for the next launch. results: the fields, the lengths of the
// rows at 95 and 99 % of the sorted ones, and how many rows are longer than 32, 64, 128, 256 and 512.
__device__ inline void summarise(int64_t rows, int listed, Measured& found, Count* __restrict__ totals,
                                 Count* __restrict__ results) {
    constexpr int BINS = kLengths / kMeasureThreads;
    __shared__ Word warp_sums[kMeasureThreads / kWarpSize];
    __shared__ Count lengths[2];
    if (threadIdx.x < kFields) found.fields[threadIdx.x] = load_shared_by_all(totals + threadIdx.x);
    if (threadIdx.x < 2) lengths[threadIdx.x] = 0;
    Count* const bins = totals + kFields + threadIdx.x * BINS;
    Count own[BINS], sum = 0;
#pragma unroll
    for (int i = 0; i < BINS; ++i) sum += own[i] = load_shared_by_all(bins + i), bins[i] = 0;
    int64_t before = int64_t(sum_before(Word(sum), warp_sums));  // its barrier is the one for the fields
    const int power = __ffs(threadIdx.x) - 4;  // of a thread whose first bin is 32 << power
    if (power >= 0 && threadIdx.x == 8 << power) results[kFields + 2 + power] = rows - before - own[0];
    int64_t places[2];
#pragma unroll
    for (int q = 0; q < 2; ++q) {
        places[q] = rows * (q == 0 ? 95 : 99) / 100;
        if (places[q] >= rows) places[q] = rows - 1;
        int64_t at = before;
#pragma unroll
        for (int i = 0; i < BINS; ++i) {
            if (at <= places[q] && places[q] < at + int64_t(own[i])) lengths[q] = threadIdx.x * BINS + i;
            at += own[i];
        }
    }
    const int64_t count = found.fields[kListed] < Count(listed) ? found.fields[kListed] : Count(listed);
    const int64_t held = rows - int64_t(found.fields[kListed]);
    for (int q = 0; q < 2 && count > 0; ++q) {
        __syncthreads();
        if (places[q] < held) continue;
        const Count* const list = totals + kFields + kLengths + 1;
        const Count length = length_at(list, count, places[q] - held, found.fields[kLongest], found.lengths);
        if (threadIdx.x == 0) lengths[q] = length;
    }
    __syncthreads();
    if (threadIdx.x < kFields) totals[threadIdx.x] = 0;
    if (threadIdx.x == 0) totals[kFields + kLengths] = 0;
    if (threadIdx.x < kFields) results[threadIdx.x] = found.fields[threadIdx.x];
    if (threadIdx.x < 2) results[kFields + threadIdx.x] = lengths[threadIdx.x];
}

// The first `row_blocks` blocks look at the rows, the others at the indices; the last to finish sums up. totals
// (kFields, kLengths, 1, listed): fields, histogram, blocks that have finished and, in any order, the lengths of the
// rows that the histogram does not count. All but those are 0 before and after. results: as `summarise` leaves them.
template <class I, class P, class Q>
__global__ void __launch_bounds__(kMeasureThreads, 3)
    measure(const I* __restrict__ indices, const P* __restrict__ indptr, int rows, int64_t count, int64_t cols,
            int* __restrict__ index_copy, Q* __restrict__ pointer_copy, int row_blocks, int listed,
            Count* __restrict__ totals, Count* __restrict__ results) {
    __shared__ Measured found;
    __shared__ bool is_last;
    for (int i = threadIdx.x; i < kLengths; i += kMeasureThreads) found.lengths[i] = 0;
    if (threadIdx.x < kFields) found.fields[threadIdx.x] = 0;
    __syncthreads();
    const int block = blockIdx.x;
    if (block < row_blocks) {
        Count* const list = totals + kFields + kLengths + 1;
        measure_rows(indices, indptr, rows, count, pointer_copy, block, row_blocks, found, totals, list, listed);
    } else {
        const int blocks = int(gridDim.x) - row_blocks;
        measure_indices(indices, indptr, rows, count, cols, index_copy, block - row_blocks, blocks, found);
    }
    __syncthreads();
    if (threadIdx.x < kFields) {
        const Count value = found.fields[threadIdx.x];
        Count* const total = totals + threadIdx.x;
        if (value != 0) {
            if (threadIdx.x == kLongest || threadIdx.x == kBandwidth) atomicMax(total, value);
            else atomicAdd(total, value);
        }
    }
    for (int i = threadIdx.x; i < kLengths && block < row_blocks; i += kMeasureThreads) {
        if (found.lengths[i] != 0) atomicAdd(totals + kFields + i, Count(found.lengths[i]));
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(totals + kFields + kLengths, Count(1)) == gridDim.x - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    summarise(rows, listed, found, totals, results);
}

}  // namespace rawops
