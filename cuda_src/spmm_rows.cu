// Sparse matrix times dense matrix: an entry of A meets a stretch of a row of x, which neighbouring lanes read.
//
//   LANES lanes hold VEC columns each, a tile of the result's columns. SHARE such groups share a row of A, whose
//   entries they take four at a time in turn; then they add up their sums.
//
// Rows with more than `longest` entries are left to those that come first: whole warps take the ones of a list, and
// still longer ones are cut into segments of a block each. Where a row has several, each leaves its sums in memory, and
// the last to arrive adds them up, in their order: the same bits every time.
//
// kColumns, for the solvers: alpha and beta are arrays, of a number for each column, and the squares of each column of
// y are added up. y has the layout of x.
#include "common/spmm.cuh"

namespace rawops {

constexpr int kThreads = 256;
constexpr int kQuad = 4;  // entries of a group at a time

struct SpmmPlan {
    const int64_t* segments;  // (segments, 4): first entry, the one behind the last, row, index in splits or -1
    const int* splits;        // (splits, 2): first segment, segments
    void* sums;               // (segments, columns), of the accumulator's type
    unsigned int* tickets;    // (column tiles, splits), zero between products
    const int* rows;          // (listed), of a warp each
    int segment_count, split_count, listed;
    int longest, rows_a_team;
    int64_t step;  // kColumns: from one column's alpha to the next one's, and of beta
};

// Blocks of an SM, as many as registers allow without spills.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kColumnsResident = 3;
#else
constexpr int kColumnsResident = 4;
#endif
template <class V, class X, bool kColumns>
constexpr int kResident = kColumns ? sizeof(X) > 4 ? 3 : kColumnsResident : sizeof(V) == 4 && is_same<X, float> ? 5 : 4;

// The scalars of a column, and the end of its entries of y.
template <class X> struct SpmmColumn {
    using A = Accumulator<X>;
    Real<A> alpha, beta;

    __device__ void read(const SpmvCall& call, const SpmmPlan& plan, int column) {
        alpha = Real<A>(call.alpha.pointer[column * plan.step]), beta = Real<A>(call.beta.pointer[column * plan.step]);
    }

    __device__ bool is_wanted() const { return alpha != 0 || beta != 1; }

    __device__ X finished(A sum, X old) const {
        A value = {};
        if (alpha != 0) value = scale(make_value<A>(alpha, 0), sum);
        if (beta != 0) value = add(value, scale(make_value<A>(beta, 0), A(widen(old))));
        return narrow<X>(value);
    }
};

// ACCESS: bytes of a row of x that a lane reads at once.
template <class V, class X, class P, int ACCESS, int LANES, int SHARE, bool kConjugate, bool kColumns> struct SpmmTile {
    using A = Accumulator<X>;
    static constexpr int VEC = max_of(ACCESS / int(sizeof(X)), 1);
    static constexpr int WIDTH = VEC * LANES, TEAM = LANES * SHARE;
    using Stretch = Vector<X, VEC>;

    const SpmvCall& call;
    const DenseShape& shape;
    const SpmmPlan& plan;
    SpmmEnd<X> end;
    int column;
    bool exists, is_wanted;  // whether there is anything to do
    A sums[VEC];
    double squares[kColumns ? VEC : 1] = {};

    __device__ SpmmTile(const SpmvCall& call, const DenseShape& shape, const SpmmPlan& plan)
        : call(call),
          shape(shape),
          plan(plan),
          end(call, shape),
          column(blockIdx.y * WIDTH + threadIdx.x % LANES * VEC),
          exists(column < shape.columns) {
        if constexpr (kColumns) {
            is_wanted = false;
#pragma unroll
            for (int j = 0; j < VEC; ++j) {
                SpmmColumn<X> found = {0, 1};
                if (column + j < shape.columns) found.read(call, plan, column + j);
                is_wanted |= found.is_wanted();
                if (threadIdx.x < LANES) own(j) = found;
            }
            is_wanted = __any_sync(~0u, is_wanted);  // a warp has all columns
            end.reads_a = is_wanted;                  // of any of them
            __syncthreads();
        } else {
            is_wanted = !end.keeps_y;
        }
    }

    // The scalars of this thread's columns: in shared memory, since the registers are for what is on its way.
    __device__ SpmmColumn<X>& own(int j) const {
        __shared__ SpmmColumn<X> columns[LANES][VEC];
        return columns[threadIdx.x % LANES][j];
    }

    // What comes of the sums, by the first group of those that share a row.
    __device__ void finish(int row) {
        if constexpr (kColumns) {
            Stretch* y = reinterpret_cast<Stretch*>(end.row_of(row) + column);
            Stretch found = *y;
#pragma unroll
            for (int j = 0; j < VEC; ++j) {
                found.data[j] = own(j).finished(sums[j], found.data[j]);
                squares[j] += square(widen(found.data[j]));
            }
            *y = found;
        } else {
            end.finish_vector(end.row_of(row), column, sums);
        }
    }

    // The same for an entry of a row that the whole block has. `place`: of its square among those of its column.
    __device__ void finish_one(int64_t row, int result, A sum, int place) {
        if constexpr (kColumns) {
            SpmmColumn<X> found;
            found.read(call, plan, result);
            X* y = end.row_of(row) + result;
            const X value = *y = found.finished(sum, *y);
            call.partials[int64_t(place) * shape.columns + result] = square(widen(value));
        } else {
            end.finish_one(end.row_of(row), result, sum);
        }
    }

    // Adds up the squares of the block's rows in a fixed order. All threads call it.
    __device__ void store_squares() {
        __shared__ double parts[kThreads / kWarpSize][WIDTH];
        const int lane = threadIdx.x % kWarpSize;
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
            double sum = squares[j];
#pragma unroll
            for (int mask = LANES; mask < kWarpSize; mask *= 2) sum += __shfl_xor_sync(~0u, sum, mask);
            if (lane < LANES) parts[threadIdx.x / kWarpSize][lane * VEC + j] = sum;
        }
        __syncthreads();
        for (int i = threadIdx.x; i < WIDTH; i += kThreads) {
            const int result = blockIdx.y * WIDTH + i;
            double sum = 0;
            for (int w = 0; w < kThreads / kWarpSize; ++w) sum += parts[w][i];
            if (result < shape.columns) call.partials[int64_t(blockIdx.x) * shape.columns + result] = sum;
        }
    }

    struct Bounds {
        P begin = 0, stop = 0;
    };

    __device__ Bounds bounds(int row) const {
        if (row >= call.rows || !end.reads_a) return {};
        const P* __restrict__ indptr = static_cast<const P*>(call.indptr);
        return {indptr[row], indptr[row + 1]};
    }

    // Four entries.
    struct Quad {
        Vector<int, kQuad> places;
        Vector<V, kQuad> values;
    };

    __device__ void load(Quad& quad, P at, P stop) const {
        const V* __restrict__ data = static_cast<const V*>(call.data);
        if (at + kQuad <= P(call.nnz)) {
            quad.places = *reinterpret_cast<const Vector<int, kQuad>*>(call.indices + at);
            quad.values = *reinterpret_cast<const Vector<V, kQuad>*>(data + at);
        } else {
#pragma unroll
            for (int i = 0; i < kQuad; ++i) {
                if (at + i < stop) quad.places.data[i] = call.indices[at + i], quad.values.data[i] = data[at + i];
            }
        }
    }

    // Adds up group `part` of `parts`'s share of entries `begin` to `stop`. kColumns: its next four are on their way
    // while it waits for what those before meet of x; the registers for that cost short rows more than it gains.
    __device__ void add_entries(P begin, P stop, int part, int parts) {
        const char* x = reinterpret_cast<const char*>(static_cast<const X*>(call.x) + column);
        const uint64_t row_bytes = shape.x_row * sizeof(X);
#pragma unroll
        for (int j = 0; j < VEC; ++j) sums[j] = A{};
        P at = (begin & ~P(kQuad - 1)) + part * kQuad;
        if (!exists || at >= stop) return;
        Quad now, next;
        if constexpr (kColumns) load(next, at, stop);
        while (at < stop) {
            const P then = at + parts * kQuad;
            if constexpr (kColumns) {
                now = next;
                if (then < stop) load(next, then, stop);
            } else {
                load(now, at, stop);
            }
            Stretch stretches[kQuad];
#pragma unroll
            for (int i = 0; i < kQuad; ++i) {
                stretches[i] = {};
                if (at + i < begin || at + i >= stop) now.values.data[i] = V{};  // a neighbour's: 0 * 0
                else stretches[i] = *reinterpret_cast<const Stretch*>(x + uint32_t(now.places.data[i]) * row_bytes);
            }
#pragma unroll
            for (int i = 0; i < kQuad; ++i) {
                const auto value = widen(conjugated<kConjugate>(now.values.data[i]));
#pragma unroll
                for (int j = 0; j < VEC; ++j) {
                    sums[j] = multiply_add(value, A(widen(stretches[i].data[j])), sums[j]);
                }
            }
            at = then;
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
            if (is_mine && exists && group == 0) finish(row);
        }
        if constexpr (kColumns) store_squares();
    }

    __device__ void multiply_listed(int block) {
        const int index = block * (kThreads / kWarpSize) + threadIdx.x / kWarpSize;
        if (index < plan.listed) {
            const int row = plan.rows[index], group = threadIdx.x % kWarpSize / LANES;
            const Bounds found = bounds(row);
            add_entries(found.begin, found.stop, group, kWarpSize / LANES);
            add_groups<kWarpSize>();
            if (exists && group == 0) finish(row);
        }
        if constexpr (kColumns) store_squares();
    }

    __device__ void multiply_segment(int index) {
        __shared__ A parts[kThreads * VEC];
        __shared__ bool is_last;
        const int64_t* found = plan.segments + 4 * index;
        const int64_t row = found[2];
        const int split = int(found[3]), at = threadIdx.x % WIDTH, group = threadIdx.x / WIDTH;
        const int result = blockIdx.y * WIDTH + at;
        const bool is_adding = threadIdx.x < WIDTH && result < shape.columns;
        add_entries(P(found[0]), P(found[1]), threadIdx.x / LANES, kThreads / LANES);
        add_groups<kWarpSize>();
        if (threadIdx.x % kWarpSize < LANES) {
            A* const mine = parts + threadIdx.x / kWarpSize * WIDTH + threadIdx.x % LANES * VEC;
#pragma unroll
            for (int j = 0; j < VEC; ++j) mine[j] = sums[j];
        }
        __syncthreads();
        A sum = {};
        if (is_adding) {
            for (int w = 0; w < kThreads / kWarpSize; ++w) sum = add(sum, parts[w * WIDTH + at]);
        }
        if (split < 0) {
            if (is_adding) finish_one(row, result, sum, blockIdx.x);
            return;
        }
        // The last to arrive, whichever it is, leaves the squares of the row behind those of the blocks.
        if (kColumns && is_adding) call.partials[int64_t(blockIdx.x) * shape.columns + result] = 0;
        volatile A* kept = static_cast<volatile A*>(plan.sums);
        if (is_adding) store_volatile(kept + int64_t(index) * shape.columns + result, sum);
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
        finish_one(row, result, sum, gridDim.x + split);
    }
};

template <class V, class X, class P, int ACCESS, int LANES, int SHARE, bool kConjugate, bool kColumns>
__global__ void __launch_bounds__(kThreads, (kResident<V, X, kColumns>))
    spmm_rows(const __grid_constant__ SpmvCall call, const __grid_constant__ DenseShape shape,
              const __grid_constant__ SpmmPlan plan) {
    SpmmTile<V, X, P, ACCESS, LANES, SHARE, kConjugate, kColumns> tile(call, shape, plan);
    if (!tile.is_wanted) return;
    const int after = blockIdx.x - plan.segment_count, listed = ceil_div(plan.listed, kThreads / kWarpSize);
    if (after >= listed) tile.multiply_rows(after - listed);  // all rows where A is not read, which makes them empty
    else if (!tile.end.reads_a) return;
    else if (after >= 0) tile.multiply_listed(after);
    else tile.multiply_segment(blockIdx.x);
}

}  // namespace rawops
