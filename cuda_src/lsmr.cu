// What LSMR does between its two products with the matrix, for any number of right-hand sides at once.
//
// Vectors are (rows, columns), row-major, a column a right-hand side; complex elements are PARTS = 2 reals, since all
// scalars of LSMR are real. A norm is finished where it is used: whoever makes a vector leaves partial sums of squares,
// (blocks, columns), and the next kernel adds them up in a fixed order. No atomics: the same bits every time.
//
// A launch may begin before the one before is complete; all let the next one begin after they have waited for the one
// before them. So what earlier launches than that have written may be read before the wait.
#include "common/launches.cuh"
#include "common/lsmr_state.cuh"

namespace rawops {

constexpr int kLsmrThreads = 256;
// Blocks that an SM shall hold.
template <class R, int PARTS> constexpr int kBlocks = PARTS * sizeof(R) > 8 ? 3 : 4;

// Rows that a thread has on their way at once.
template <class R, int PARTS> constexpr int kBatch = max_of(16 / (PARTS * int(sizeof(R))), 1);

// Adds up, over all threads of one column, and returns the sum to all of them. Thread t is of column t % COLS.
template <int COLS> __device__ inline double column_sum(double value) {
    constexpr int WARPS = kLsmrThreads / kWarpSize;
    __shared__ double warps[WARPS][COLS];
#pragma unroll
    for (int offset = kWarpSize / 2; offset >= COLS; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
    __syncthreads();  // an earlier sum is still being read
    const int lane = threadIdx.x % kWarpSize;
    if (lane < COLS) warps[threadIdx.x / kWarpSize][lane] = value;
    __syncthreads();
    return tree_sum<WARPS>(&warps[0][threadIdx.x % COLS], COLS);
}

// Where a thread works: its column, and which of its rows come first. Blocks along x share rows, along y columns.
template <int COLS> struct Place {
    static constexpr int ROWS = kLsmrThreads / COLS;
    int column;
    int64_t row, stride;
    __device__ explicit Place(int blocks = gridDim.x)
        : column(blockIdx.y * COLS + threadIdx.x % COLS),
          row(int64_t(blockIdx.x) * ROWS + threadIdx.x / COLS),
          stride(int64_t(blocks) * ROWS) {}
};

// The sum of partials (count, columns) over its rows.
template <int COLS>
__device__ inline double finish_sum(const double* __restrict__ partials, int count, int column, int columns) {
    double sum = 0;
    if (column < columns) {
#pragma unroll 4
        for (int i = threadIdx.x / COLS; i < count; i += kLsmrThreads / COLS) {
            sum += partials[int64_t(i) * columns + column];
        }
    }
    return column_sum<COLS>(sum);
}

template <class R, int PARTS> __device__ inline double square(const Vector<R, PARTS>& x) {
    double sum = 0;
#pragma unroll
    for (int p = 0; p < PARTS; ++p) sum += double(x.data[p]) * double(x.data[p]);
    return sum;
}

template <int COLS> __device__ inline void leave_partial(double* __restrict__ partials, double sum, int columns) {
    sum = column_sum<COLS>(sum);
    const int column = blockIdx.y * COLS + threadIdx.x;
    if (threadIdx.x < COLS && column < columns) partials[int64_t(blockIdx.x) * columns + column] = sum;
}

__device__ inline void take_turn() {
    await_launch_before();
    start_next_launch();
}

// target = source, contiguous, and the partial sums of its squares.
template <class R, int PARTS, int COLS>
__global__ void __launch_bounds__(kLsmrThreads)
    lsmr_load(const Vector<R, PARTS>* __restrict__ source, int64_t row_stride, int64_t column_stride,
              Vector<R, PARTS>* __restrict__ target, int64_t rows, int columns, double* __restrict__ partials) {
    take_turn();
    constexpr int BATCH = kBatch<R, PARTS>;
    const Place<COLS> place;
    double sum = 0;
    if (place.column < columns) {
        for (int64_t first = place.row; first < rows; first += BATCH * place.stride) {
            Vector<R, PARTS> values[BATCH];
#pragma unroll
            for (int k = 0; k < BATCH; ++k) {
                const int64_t i = first + k * place.stride;
                if (i < rows) values[k] = source[i * row_stride + place.column * column_stride];
            }
#pragma unroll
            for (int k = 0; k < BATCH; ++k) {
                const int64_t i = first + k * place.stride;
                if (i < rows) target[i * columns + place.column] = values[k], sum += square(values[k]);
            }
        }
    }
    leave_partial<COLS>(partials, sum, columns);
}

// y = alpha * sum of the `count` slices of w + beta * y, and the partial sums of its squares; scale, if given,
// multiplies the rows of w. Scalars are read at alpha[column * scalar_stride]. alpha = 0 reads no w, beta = 0 no y.
template <class R, int PARTS, int COLS>
__global__ void __launch_bounds__(kLsmrThreads, (kBlocks<R, PARTS>))
    lsmr_combine(const double* __restrict__ alpha, const double* __restrict__ beta, int64_t scalar_stride,
                 const Vector<R, PARTS>* __restrict__ w, int count, const R* __restrict__ scale,
                 Vector<R, PARTS>* __restrict__ y, int64_t rows, int columns, double* __restrict__ partials) {
    take_turn();
    constexpr int BATCH = kBatch<R, PARTS>;
    const Place<COLS> place;
    double sum = 0;
    if (place.column < columns) {
        const double to_w = alpha[place.column * scalar_stride], to_y = beta[place.column * scalar_stride];
        const bool is_frozen = to_w == 0 && to_y == 1;
        const R a = R(to_w), b = R(to_y);
        for (int64_t first = is_frozen ? rows : place.row; first < rows; first += BATCH * place.stride) {
            Vector<R, PARTS> values[BATCH], old[BATCH];
#pragma unroll
            for (int k = 0; k < BATCH; ++k) {
                const int64_t i = first + k * place.stride, at = i * columns + place.column;
                values[k] = {}, old[k] = {};
                if (i >= rows) continue;
                if (b != 0) old[k] = y[at];
                if (a != 0) values[k] = w[at];
            }
            for (int slice = 1; a != 0 && slice < count; ++slice) {
#pragma unroll
                for (int k = 0; k < BATCH; ++k) {
                    const int64_t i = first + k * place.stride;
                    if (i >= rows) continue;
                    const Vector<R, PARTS> part = w[(slice * rows + i) * columns + place.column];
#pragma unroll
                    for (int p = 0; p < PARTS; ++p) values[k].data[p] += part.data[p];
                }
            }
#pragma unroll
            for (int k = 0; k < BATCH; ++k) {
                const int64_t i = first + k * place.stride;
                if (i >= rows) continue;
                const R factor = scale == nullptr || a == 0 ? a : a * scale[i];
#pragma unroll
                for (int p = 0; p < PARTS; ++p) {
                    R value = a != 0 ? factor * values[k].data[p] : R(0);
                    if (b != 0) value += b * old[k].data[p];
                    values[k].data[p] = value;
                }
                y[i * columns + place.column] = values[k];
                sum += square(values[k]);
            }
        }
    }
    if (partials != nullptr) leave_partial<COLS>(partials, sum, columns);
}

// Shortens partials (count, columns) to (gridDim.x, columns).
template <int COLS>
__global__ void __launch_bounds__(kLsmrThreads)
    lsmr_shorten(const double* __restrict__ partials, int count, int columns, double* __restrict__ shorter) {
    take_turn();
    const int slice = ceil_div(count, int(gridDim.x)), begin = blockIdx.x * slice, end = min_of(begin + slice, count);
    const int column = blockIdx.y * COLS + threadIdx.x % COLS;
    const double sum = finish_sum<COLS>(partials + int64_t(begin) * columns, max_of(end - begin, 0), column, columns);
    if (threadIdx.x < COLS && column < columns) shorter[int64_t(blockIdx.x) * columns + column] = sum;
}

// One block a right-hand side, after u = b - A x0.
__global__ void __launch_bounds__(kLsmrThreads)
    lsmr_begin(LsmrState* __restrict__ states, double damp, double atol, double btol, double ctol, double maxiter,
               const double* __restrict__ b_partials, int b_count, const double* __restrict__ u_partials, int u_count,
               LsmrGate* __restrict__ gate) {
    take_turn();
    const double squares_b = finish_sum<1>(b_partials, b_count, blockIdx.x, gridDim.x);
    const double squares_u = finish_sum<1>(u_partials, u_count, blockIdx.x, gridDim.x);
    if (threadIdx.x == 0) {
        begin(states[blockIdx.x], {damp, atol, btol, ctol, maxiter}, sqrt(squares_b), norm_of(squares_u));
        if (blockIdx.x == 0) *gate = {1, 0, 0, 0};
    }
}

// One block a right-hand side: tests the last x, then takes the norm of u in; u_count = 0 is the test alone. Doing it
// twice is doing it once. The test comes while the product is still under way.
__global__ void __launch_bounds__(kLsmrThreads)
    lsmr_scalars(LsmrState* __restrict__ states, const double* __restrict__ x_partials, int x_count,
                 const double* __restrict__ u_partials, int u_count, double* __restrict__ history, int history_rows,
                 LsmrGate* __restrict__ gate) {
    const int column = blockIdx.x, columns = gridDim.x;
    const bool judges = threadIdx.x / kWarpSize == 1, tests = threadIdx.x == kWarpSize, takes_u = threadIdx.x == 0;
    __shared__ bool has_stopped;
    LsmrState& state = states[column];
    LsmrScalars s;
    if (u_count == 0) await_launch_before();  // which made x
    if (judges || takes_u) s = state.next;    // arrives while the sum is made
    const double normx = sqrt(finish_sum<1>(x_partials, x_count, column, columns));
    const bool is_new = s.untested != 0;
    if (judges) {
        if (is_new) close(s, normx, judge(s, state.settings, normx));
        if (s.istop > 0) freeze(s);
        if (tests) has_stopped = s.phase == kStopped;
    }
    take_turn();
    const double squares_u = finish_sum<1>(u_partials, u_count, column, columns);
    if (tests && is_new) record(s, history, history_rows, column, columns), state.next = s;
    if (takes_u && u_count > 0 && s.phase == kRun) aim_v(s, norm_of(squares_u));
    __syncthreads();
    if (takes_u && !has_stopped) {
        if (s.untested != 0) s.normx = normx, s.untested = 0;
        state.now = s;
    }
    if (tests && has_stopped) {
        const bool is_first = state.now.phase != kStopped;
        state.now = s;
        if (is_first && atomicAdd(&gate->stopped, 1) == gridDim.x - 1) gate->alpha = 0, gate->beta = 1;
    }
}

// The scalars of a block's columns, into shared memory.
template <int COLS>
__device__ inline void load_scalars(LsmrScalars (&scalars)[COLS], const LsmrState* __restrict__ states, int columns) {
    constexpr int SIZE = sizeof(LsmrScalars) / sizeof(double);
    for (int i = threadIdx.x; i < COLS * SIZE; i += kLsmrThreads) {
        const int column = blockIdx.y * COLS + i / SIZE;
        if (column < columns) {
            reinterpret_cast<double*>(scalars)[i] = reinterpret_cast<const double*>(&states[column].now)[i % SIZE];
        }
    }
}

// The rotations, which every block repeats for itself, and hbar, x and h with the partial sums of |x|^2. The first time
// it makes h of v, and brings v itself to its scale. The last block along x does the estimates and none of the vectors.
template <class R, int PARTS, int COLS>
__global__ void __launch_bounds__(kLsmrThreads, (kBlocks<R, PARTS>))
    lsmr_update(LsmrState* __restrict__ states, const double* __restrict__ v_partials, int v_count,
                Vector<R, PARTS>* __restrict__ v, Vector<R, PARTS>* __restrict__ x, Vector<R, PARTS>* __restrict__ h,
                Vector<R, PARTS>* __restrict__ hbar, int64_t rows, int columns, double* __restrict__ x_partials) {
    __shared__ LsmrScalars scalars[COLS];
    __shared__ LsmrTurn turns[COLS];
    __shared__ int phases[COLS];
    const int blocks = gridDim.x - 1;
    const bool estimates = int(blockIdx.x) == blocks;
    const Place<COLS> place(blocks);
    const bool exists = place.column < columns, has_scalars = threadIdx.x < COLS && exists;
    const int64_t last_row = estimates || !exists ? 0 : rows;
    Vector<R, PARTS> hi, bi, xi;
    if (place.row < last_row) {
        const int64_t at = place.row * columns + place.column;
        hi = h[at], bi = hbar[at], xi = x[at];
    }
    load_scalars(scalars, states, columns);
    __syncthreads();
    const int own = threadIdx.x % COLS;
    LsmrScalars& s = scalars[own];
    LsmrTurn& next = turns[own];
    if (has_scalars) {
        phases[own] = int(s.phase);
        if (s.phase == kRun) next = first_turn(s, states[place.column].settings.damp);
    }
    take_turn();
    const Norm norm_v = norm_of(finish_sum<COLS>(v_partials, v_count, place.column, columns));
    if (has_scalars) {
        if (phases[own] == kRun) {
            turn(s, next, norm_v);
            if (estimates) estimate(s, next);
        }
        if (phases[own] == kStart) next.move = prepare(s, states[place.column].settings, norm_v);
        if (estimates) states[place.column].next = s;
    }
    if (estimates) return;
    __syncthreads();
    double sum = 0;
    const bool is_frozen = !exists || phases[own] == kStopped;
    if (!is_frozen) {
        const LsmrMove& move = next.move;
        const R to_hbar = R(move.hbar), to_x = R(move.x), to_h = R(move.h), to_v = R(move.v), sigma = R(s.sigma);
        const bool is_first = phases[own] == kStart, clears = s.clears_x != 0;
        for (int64_t i = place.row; i < last_row;) {
            const int64_t at = i * columns + place.column;
            Vector<R, PARTS> vi = v[at];
            if (is_first) hi = {}, bi = {};
#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                bi.data[p] = hi.data[p] + to_hbar * bi.data[p];
                xi.data[p] = clears ? R(0) : xi.data[p] + to_x * bi.data[p];
                hi.data[p] = to_v * vi.data[p] + to_h * hi.data[p];
            }
            if (is_first) {
#pragma unroll
                for (int p = 0; p < PARTS; ++p) vi.data[p] *= sigma;
                v[at] = vi;
            }
            hbar[at] = bi, x[at] = xi, h[at] = hi;
            sum += square(xi);
            i += place.stride;
            if (i < last_row) {
                const int64_t then = i * columns + place.column;
                hi = h[then], bi = hbar[then], xi = x[then];
            }
        }
    }
    // A column that has stopped keeps its partial sums too.
    sum = column_sum<COLS>(sum);
    if (threadIdx.x < COLS && !is_frozen) x_partials[int64_t(blockIdx.x) * columns + place.column] = sum;
}

}  // namespace rawops
