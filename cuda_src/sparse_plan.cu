// The plan of spmv_stream: equal shares of the entries of short rows (tiles), and segments of long ones.
#include "common/numeric.cuh"

namespace rawops {

// A tile begins with the first row whose work before it reaches a multiple of `size`, and behind a long row. An entry of
// a short row weighs `row_work` and a row 1, so that many empty rows do not meet in one tile.
struct StreamCuts {
    int rows, longest, row_work, segment;
    int64_t size;
};

// work (rows): of each row; segments (rows): how many it is cut into, where given.
template <class P>
__global__ void __launch_bounds__(256) plan_rows(const P* __restrict__ indptr, const __grid_constant__ StreamCuts cuts,
                                                 int64_t* __restrict__ work, int* __restrict__ segments) {
    const int64_t row = int64_t(blockIdx.x) * 256 + threadIdx.x;
    if (row >= cuts.rows) return;
    const int64_t length = indptr[row + 1] - indptr[row];
    const bool is_long = length > cuts.longest;
    work[row] = (is_long ? 0 : length * cuts.row_work) + 1;
    if (segments != nullptr) segments[row] = is_long ? int((length + cuts.segment - 1) / cuts.segment) : 0;
}

template <class P> __device__ inline bool is_long(const P* indptr, int64_t row, const StreamCuts& cuts) {
    return indptr[row + 1] - indptr[row] > cuts.longest;
}

// starts (rows): 1 for a row that a tile begins with. ends: running sums of the work.
template <class P>
__global__ void __launch_bounds__(256)
    plan_starts(const P* __restrict__ indptr, const __grid_constant__ StreamCuts cuts,
                const int64_t* __restrict__ ends, int* __restrict__ starts) {
    const int64_t row = int64_t(blockIdx.x) * 256 + threadIdx.x;
    if (row >= cuts.rows) return;
    bool begins = row == 0 || is_long(indptr, row - 1, cuts);
    if (!begins) {  // the work before it and before the row before it
        const int64_t before = ends[row - 1], earlier = row > 1 ? ends[row - 2] : 0;
        begins = before / cuts.size != earlier / cuts.size;
    }
    starts[row] = begins && !is_long(indptr, row, cuts);
}

struct Tile {
    int64_t first_entry;
    int first_row;
    unsigned short rows, entries;  // as in spmv_stream.cu
};

// The first index from `low` on whose running sum is over `value`; `high` where there is none.
template <class T> __device__ inline int64_t first_over(const T* __restrict__ sums, int64_t low, int64_t high, T value) {
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (sums[middle] > value) high = middle;
        else low = middle + 1;
    }
    return low;
}

// numbers, segment_ends (rows): running sums of the starts and, where there are any, of the segments. Each row that begins
// a tile looks for its end: the next tile's first row or a long one.
template <class P>
__global__ void __launch_bounds__(256)
    plan_tiles(const P* __restrict__ indptr, const __grid_constant__ StreamCuts cuts, const int* __restrict__ numbers,
               const int64_t* __restrict__ segment_ends, Tile* __restrict__ tiles, int group) {
    const int64_t row = int64_t(blockIdx.x) * 256 + threadIdx.x;
    if (row >= cuts.rows) return;
    const int number = numbers[row];
    if (number == (row > 0 ? numbers[row - 1] : 0)) return;
    int64_t end = row + cuts.size + 2 < cuts.rows ? row + cuts.size + 2 : cuts.rows;
    end = first_over(numbers, row + 1, end, number);
    if (segment_ends != nullptr) end = first_over(segment_ends, row + 1, end, segment_ends[row]);
    const int64_t first = indptr[row] & ~int64_t(group - 1);
    tiles[number - 1] = {first, int(row), static_cast<unsigned short>(end - row),
                         static_cast<unsigned short>(indptr[end] - first)};
}

struct Segment {
    int64_t begin, stop;
    int row, first, count, unused;  // the segments of its row
};

// ends (rows): running sums of the segments.
template <class P>
__global__ void __launch_bounds__(256)
    plan_segments(const P* __restrict__ indptr, const __grid_constant__ StreamCuts cuts,
                  const int64_t* __restrict__ ends, int count, Segment* __restrict__ segments) {
    const int number = blockIdx.x * 256 + threadIdx.x;
    if (number >= count) return;
    const int64_t low = first_over(ends, 0, cuts.rows, int64_t(number));
    const int first = low > 0 ? int(ends[low - 1]) : 0;
    const int64_t begin = indptr[low] + int64_t(number - first) * cuts.segment, stop = begin + cuts.segment;
    segments[number] = {begin, stop < indptr[low + 1] ? stop : int64_t(indptr[low + 1]), int(low), first, int(ends[low]) - first, 0};
}

}  // namespace rawops
