// The plan of spmv_stream: equal shares of the entries of short rows (tiles), and segments of long ones, in one launch.
#include "common/lookback.cuh"

namespace rawops {

// An entry of a short row weighs `row_work` and a row 1, so that many empty rows do not meet in one tile. A tile begins
// with the first row whose work before it reaches a multiple of `size`, and behind a long row.
struct StreamCuts {
    int rows, longest, row_work, segment;
    int64_t size;
};

struct Tile {
    int64_t first_entry;  // rounded down to a multiple of `group`
    int first_row;
    unsigned int sizes;   // in spmv_stream.cu two numbers of 16 bits: rows, entries
};

struct Segment {
    int64_t begin, stop;
    int row, first, count, unused;  // the segments of its row
};

constexpr int kPlanRows = 1024, kPlanWarps = kPlanRows / kWarpSize;
constexpr int kCountBits = 31;  // of a word of two sums: returns from long rows to short ones, and segments above them

// What the rows before a row amount to.
struct Before {
    Word work, counts;

    __device__ int64_t returns() const { return int64_t(counts & ((Word(1) << kCountBits) - 1)); }
    __device__ int segments() const { return int(counts >> kCountBits); }
};

// Tiles are numbered by the work and the returns before them, so a number may be left out where both meet: such a tile
// has no rows. words (2, blocks), turns and tiles start as 0; totals: how many tiles and segments there are.
template <class P>
__global__ void __launch_bounds__(kPlanRows)
    plan_stream(const P* __restrict__ indptr, const __grid_constant__ StreamCuts cuts, int group,
                Tile* __restrict__ tiles, Segment* __restrict__ segments, int64_t* __restrict__ totals,
                Word* __restrict__ words, Word* __restrict__ turns) {
    __shared__ Word work_sums[kPlanWarps], count_sums[kPlanWarps], own_sums[2], sums[2];
    __shared__ int turn;
    if (threadIdx.x == 0) turn = take_turn(turns);
    __syncthreads();
    const int number = turn;
    const int64_t row = int64_t(number) * kPlanRows + threadIdx.x;
    const bool is_there = row < cuts.rows;
    const int64_t begin = is_there ? indptr[row] : 0, stop = is_there ? indptr[row + 1] : 0;
    const int64_t last = is_there && row > 0 ? indptr[row - 1] : begin;  // where the row before begins
    const bool is_long = stop - begin > cuts.longest, was_long = begin - last > cuts.longest;
    const int64_t work = !is_there ? 0 : 1 + (is_long ? 0 : (stop - begin) * cuts.row_work);
    const bool returns = is_there && was_long && !is_long;
    const int count = is_long ? int((stop - begin + cuts.segment - 1) / cuts.segment) : 0;
    const Word counts = Word(count) << kCountBits | Word(returns);
    Before before = {sum_before(Word(work), work_sums), sum_before(counts, count_sums)};
    if (threadIdx.x == kPlanRows - 1) own_sums[0] = before.work + work, own_sums[1] = before.counts + counts;
    __syncthreads();
    if (threadIdx.x < 2 * kWarpSize) {
        const int which = threadIdx.x / kWarpSize;
        Word* const own = words + int64_t(which) * gridDim.x;
        if (threadIdx.x % kWarpSize == 0) leave_sum(own + number, number > 0 ? kOwnSum : kWholeSum, own_sums[which]);
        const Word found = look_back_warp(own, number);
        if (threadIdx.x % kWarpSize == 0) {
            sums[which] = found;
            if (number > 0) leave_sum(own + number, kWholeSum, found + own_sums[which]);
        }
    }
    __syncthreads();
    if (!is_there) return;
    before.work += sums[0], before.counts += sums[1];

    const int64_t share = int64_t(before.work) / cuts.size, rest = int64_t(before.work) - share * cuts.size;
    const int64_t tile = share + before.returns() + returns;
    if (row == cuts.rows - 1) totals[0] = tile + 1, totals[1] = before.segments() + count;
    if (is_long) {
        for (int i = 0; i < count; ++i) {
            const int64_t from = begin + int64_t(i) * cuts.segment, to = from + cuts.segment;
            segments[before.segments() + i] = {from, to < stop ? to : stop, int(row), before.segments(), count, 0};
        }
        return;
    }
    // Rows and entries of a tile are what its end adds less what its begin takes away, both from one word.
    const int64_t work_before = was_long ? 1 : 1 + (begin - last) * cuts.row_work;  // of the row before
    const bool begins = row == 0 || returns || rest < work_before;
    if (begins) {
        const int64_t first = begin & ~int64_t(group - 1);
        tiles[tile].first_entry = first, tiles[tile].first_row = int(row);
        atomicAdd(&tiles[tile].sizes, 0u - (unsigned(row) + (unsigned(first) << 16)));
    }
    const int64_t next = row + 1 < cuts.rows ? indptr[row + 2] : stop;
    const bool ends = row + 1 == cuts.rows || next - stop > cuts.longest || rest + work >= cuts.size;
    if (ends) atomicAdd(&tiles[tile].sizes, unsigned(row + 1) + (unsigned(stop) << 16));
}

}  // namespace rawops
