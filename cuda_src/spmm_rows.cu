// Sparse matrix times dense matrix: an entry of A meets a stretch of a row of x, which neighbouring lanes read.
//
//   LANES lanes hold VEC columns each, a tile of the result's columns. SHARE such groups share a row of A, whose
//   entries they take four at a time in turn; then they add up their sums.
//
// Rows with more than `longest` entries are left to those that come first: whole warps take the ones of a list, and
// still longer ones are cut into segments of a block each. Where a row has several, each leaves its sums in memory, and
// the last to arrive adds them up, in their order: the same bits every time.
#include "common/spmm.cuh"

namespace rawops {

constexpr int kThreads = 256;
constexpr int kQuad = 4;  // entries of a group at a time

struct SpmmPlan {
    const int64_t* segments;  // (segments, 5): first entry, the one behind the last, row, index in splits or -1, place
    const int* splits;        // (splits, 2): first segment, segments
    void* sums;               // (segments, columns), of the accumulator's type
    unsigned int* tickets;    // (column tiles, splits), zero between products
    const int* rows;          // (listed), of a warp each
    int segment_count, split_count, listed;
    int longest, rows_a_team;
};

// Blocks of an SM, as many as registers allow without spills.
template <class V, class X> constexpr int kResident = sizeof(V) == 4 && is_same<X, float> ? 5 : 4;

// ACCESS: bytes of a row of x that a lane reads at once.
template <class V, class X, class P, int ACCESS, int LANES, int SHARE, bool kConjugate> struct SpmmTile {
    using A = Accumulator<X>;
    static constexpr int VEC = max_of(ACCESS / int(sizeof(X)), 1);
    static constexpr int WIDTH = VEC * LANES, TEAM = LANES * SHARE;
    using Stretch = Vector<X, VEC>;

    const SpmvCall& call;
    const DenseShape& shape;
    const SpmmPlan& plan;
    SpmmEnd<X> end;
    int column;
    bool exists;
    A sums[VEC];

    __device__ SpmmTile(const SpmvCall& call, const DenseShape& shape, const SpmmPlan& plan)
        : call(call),
          shape(shape),
          plan(plan),
          end(call, shape),
          column(blockIdx.y * WIDTH + threadIdx.x % LANES * VEC),
          exists(column < shape.columns) {}

    struct Bounds {
        P begin = 0, stop = 0;
    };

    __device__ Bounds bounds(int row) const {
        if (row >= call.rows || !end.reads_a) return {};
        const P* __restrict__ indptr = static_cast<const P*>(call.indptr);
        return {indptr[row], indptr[row + 1]};
    }

    // Adds up group `part` of `parts`'s share of the entries from `begin` to `stop`.
    __device__ void add_entries(P begin, P stop, int part, int parts) {
        const V* __restrict__ data = static_cast<const V*>(call.data);
        const X* __restrict__ x = static_cast<const X*>(call.x) + column;
#pragma unroll
        for (int j = 0; j < VEC; ++j) sums[j] = A{};
        if (!exists) return;
        for (P at = (begin & ~P(kQuad - 1)) + part * kQuad; at < stop; at += parts * kQuad) {
            Vector<int, kQuad> places;
            Vector<V, kQuad> values;
            if (at + kQuad <= P(call.nnz)) {
                places = *reinterpret_cast<const Vector<int, kQuad>*>(call.indices + at);
                values = *reinterpret_cast<const Vector<V, kQuad>*>(data + at);
            } else {
#pragma unroll
                for (int i = 0; i < kQuad; ++i) {
                    if (at + i < stop) places.data[i] = call.indices[at + i], values.data[i] = data[at + i];
                }
            }
            Stretch stretches[kQuad];
#pragma unroll
            for (int i = 0; i < kQuad; ++i) {
                stretches[i] = {};
                if (at + i < begin || at + i >= stop) values.data[i] = V{};  // a neighbour's: 0 * 0
                else stretches[i] = *reinterpret_cast<const Stretch*>(x + places.data[i] * shape.x_row);
            }
#pragma unroll
            for (int i = 0; i < kQuad; ++i) {
                const auto value = widen(conjugated<kConjugate>(values.data[i]));
#pragma unroll
                for (int j = 0; j < VEC; ++j) {
                    sums[j] = multiply_add(value, A(widen(stretches[i].data[j])), sums[j]);
                }
            }
        }
    }

    // Adds up the sums of groups of LANES within `threads` neighbouring ones; the whole warp takes part.
    template <int LANES_IN_ALL> __device__ void add_groups() {
#pragma unroll
        for (int mask = LANES; mask < LANES_IN_ALL; mask *= 2) {
#pragma unroll
            for (int j = 0; j < VEC; ++j) sums[j] = add(sums[j], shuffle_xor(sums[j], mask));
        }
    }

    // Teams side by side take neighbouring rows, so that what they read of x meets in the L1. The pointers of a team's
    // next row are on their way while it adds up one.
    __device__ void multiply_rows(int block) {
        constexpr int TEAMS = kThreads / TEAM;
        const int group = threadIdx.x / LANES % SHARE;
        int row = block * TEAMS * plan.rows_a_team + threadIdx.x / TEAM;
        Bounds next = bounds(row);
        for (int i = 0; i < plan.rows_a_team; ++i, row += TEAMS) {
            const Bounds found = next;
            if (i + 1 < plan.rows_a_team) next = bounds(row + TEAMS);
            const bool is_mine = row < call.rows && found.stop - found.begin <= plan.longest;
            add_entries(found.begin, is_mine ? found.stop : found.begin, group, SHARE);
            add_groups<TEAM>();
            if (is_mine && exists && group == 0) end.finish_vector(end.row_of(row), column, sums);
        }
    }

    __device__ void multiply_listed(int block) {
        const int index = block * (kThreads / kWarpSize) + threadIdx.x / kWarpSize;
        if (index >= plan.listed) return;
        const int row = plan.rows[index], group = threadIdx.x % kWarpSize / LANES;
        const Bounds found = bounds(row);
        add_entries(found.begin, found.stop, group, kWarpSize / LANES);
        add_groups<kWarpSize>();
        if (exists && group == 0) end.finish_vector(end.row_of(row), column, sums);
    }

    __device__ void multiply_segment(int index) {
        __shared__ A parts[kThreads * VEC];
        __shared__ bool is_last;
        const int64_t* found = plan.segments + 5 * index;
        const int64_t row = found[2];
        const int split = int(found[3]), at = threadIdx.x % WIDTH, group = threadIdx.x / WIDTH;
        const int result = blockIdx.y * WIDTH + at;
        const bool is_adding = threadIdx.x < WIDTH && result < shape.columns;
        add_entries(P(found[0]), P(found[1]), threadIdx.x / LANES, kThreads / LANES);
        add_groups<kWarpSize>();
        if (threadIdx.x % kWarpSize < LANES) {
#pragma unroll
            for (int j = 0; j < VEC; ++j) parts[threadIdx.x / kWarpSize * WIDTH + threadIdx.x % LANES * VEC + j] = sums[j];
        }
        __syncthreads();
        A sum = {};
        if (is_adding) {
            for (int w = 0; w < kThreads / kWarpSize; ++w) sum = add(sum, parts[w * WIDTH + at]);
        }
        if (split < 0) {
            if (is_adding) end.finish_one(end.row_of(row), result, sum);
            return;
        }
        volatile A* kept = static_cast<volatile A*>(plan.sums);
        if (is_adding) store_volatile(kept + found[4] * shape.columns + result, sum);
        __threadfence();
        __syncthreads();
        const int first = plan.splits[2 * split], count = plan.splits[2 * split + 1];
        if (threadIdx.x == 0) {
            unsigned int* ticket = plan.tickets + blockIdx.y * plan.split_count + split;
            is_last = atomicInc(ticket, count - 1) == count - 1;  // back to zero by itself
        }
        __syncthreads();
        if (!is_last) return;
        __threadfence();
        sum = A{};
        if (result < shape.columns) {
            for (int i = group; i < count; i += kThreads / WIDTH) {
                sum = add(sum, load_volatile(kept + int64_t(first + i) * shape.columns + result));
            }
        }
        parts[threadIdx.x] = sum;
        __syncthreads();
        if (!is_adding) return;
        for (int g = 1; g < kThreads / WIDTH; ++g) sum = add(sum, parts[g * WIDTH + at]);
        end.finish_one(end.row_of(row), result, sum);
    }
};

template <class V, class X, class P, int ACCESS, int LANES, int SHARE, bool kConjugate>
__global__ void __launch_bounds__(kThreads, kResident<V, X>)
    spmm_rows(const __grid_constant__ SpmvCall call, const __grid_constant__ DenseShape shape,
              const __grid_constant__ SpmmPlan plan) {
    SpmmTile<V, X, P, ACCESS, LANES, SHARE, kConjugate> tile(call, shape, plan);
    if (tile.end.keeps_y) return;
    const int after = blockIdx.x - plan.segment_count, listed = ceil_div(plan.listed, kThreads / kWarpSize);
    if (after >= listed) tile.multiply_rows(after - listed);  // all rows where A is not read, which makes them empty
    else if (!tile.end.reads_a) return;
    else if (after >= 0) tile.multiply_listed(after);
    else tile.multiply_segment(blockIdx.x);
}

}  // namespace rawops
