// What LSMR does between its two products with the matrix, for any number of right-hand sides at once.
//
// Vectors are (rows, columns), row-major, a column a right-hand side; complex elements are PARTS = 2 reals, since all
// scalars of LSMR are real. A norm is finished where it is used: whoever makes a vector leaves partial sums of squares,
// (blocks, columns), and the next kernel adds them up in a fixed order. No atomics: the same bits every time.
#include "common/lsmr_state.cuh"

namespace rawops {

constexpr int kLsmrThreads = 256;

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
    double sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += warps[w][threadIdx.x % COLS];
    return sum;
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
        for (int i = threadIdx.x / COLS; i < count; i += kLsmrThreads / COLS) sum += partials[int64_t(i) * columns + column];
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

// target = source, contiguous, and the partial sums of its squares.
template <class R, int PARTS, int COLS>
__global__ void __launch_bounds__(kLsmrThreads)
    lsmr_load(const Vector<R, PARTS>* __restrict__ source, int64_t row_stride, int64_t column_stride,
              Vector<R, PARTS>* __restrict__ target, int64_t rows, int columns, double* __restrict__ partials) {
    const Place<COLS> place;
    double sum = 0;
    if (place.column < columns) {
        for (int64_t i = place.row; i < rows; i += place.stride) {
            const Vector<R, PARTS> value = source[i * row_stride + place.column * column_stride];
            target[i * columns + place.column] = value;
            sum += square(value);
        }
    }
    leave_partial<COLS>(partials, sum, columns);
}

// y = alpha * sum of the `count` slices of w + beta * y, and the partial sums of its squares; scale, if given, multiplies
// the rows of w. Scalars are read at alpha[column * scalar_stride]. alpha = 0 reads no w, beta = 0 no y.
template <class R, int PARTS, int COLS>
__global__ void __launch_bounds__(kLsmrThreads)
    lsmr_combine(const double* __restrict__ alpha, const double* __restrict__ beta, int64_t scalar_stride,
                 const Vector<R, PARTS>* __restrict__ w, int count, const R* __restrict__ scale,
                 Vector<R, PARTS>* __restrict__ y, int64_t rows, int columns, double* __restrict__ partials) {
    const Place<COLS> place;
    double sum = 0;
    if (place.column < columns) {
        const double to_w = alpha[place.column * scalar_stride], to_y = beta[place.column * scalar_stride];
        const bool is_frozen = to_w == 0 && to_y == 1;
        const R a = R(to_w), b = R(to_y);
        for (int64_t i = is_frozen ? rows : place.row; i < rows; i += place.stride) {
            const int64_t at = i * columns + place.column;
            Vector<R, PARTS> value = {};
            if (a != 0) {
                const Vector<R, PARTS>* source = w + at;
#pragma unroll 3
                for (int slice = 0; slice < count; ++slice, source += rows * columns) {
                    const Vector<R, PARTS> part = *source;
#pragma unroll
                    for (int p = 0; p < PARTS; ++p) value.data[p] += part.data[p];
                }
                const R factor = scale == nullptr ? a : a * scale[i];
#pragma unroll
                for (int p = 0; p < PARTS; ++p) value.data[p] *= factor;
            }
            if (b != 0) {
                const Vector<R, PARTS> old = y[at];
#pragma unroll
                for (int p = 0; p < PARTS; ++p) value.data[p] += b * old.data[p];
            }
            y[at] = value;
            sum += square(value);
        }
    }
    if (partials != nullptr) leave_partial<COLS>(partials, sum, columns);
}

// Shortens partials (count, columns) to (gridDim.x, columns).
__global__ void __launch_bounds__(kLsmrThreads)
    lsmr_shorten(const double* __restrict__ partials, int count, int columns, double* __restrict__ shorter) {
    const int slice = ceil_div(count, int(gridDim.x)), begin = blockIdx.x * slice, end = min_of(begin + slice, count);
    double sum = 0;
    for (int i = begin + threadIdx.x; i < end; i += kLsmrThreads) sum += partials[int64_t(i) * columns + blockIdx.y];
    sum = column_sum<1>(sum);
    if (threadIdx.x == 0) shorter[int64_t(blockIdx.x) * columns + blockIdx.y] = sum;
}

// One block a right-hand side, after u = b - A x0.
__global__ void __launch_bounds__(kLsmrThreads)
    lsmr_begin(LsmrState* __restrict__ states, double damp, double atol, double btol, double ctol, double maxiter,
               const double* __restrict__ b_partials, int b_count, const double* __restrict__ u_partials, int u_count) {
    const double squares_b = finish_sum<1>(b_partials, b_count, blockIdx.x, gridDim.x);
    const double squares_u = finish_sum<1>(u_partials, u_count, blockIdx.x, gridDim.x);
    if (threadIdx.x == 0) {
        begin(states[blockIdx.x], {damp, atol, btol, ctol, maxiter}, sqrt(squares_b), norm_of(squares_u));
    }
}

// One block a right-hand side: tests the last x, then takes the norm of u in; u_count = 0 is the test alone. Doing it
// twice is doing it once. The two are done side by side by two warps.
__global__ void __launch_bounds__(kLsmrThreads)
    lsmr_scalars(LsmrState* __restrict__ states, const double* __restrict__ x_partials, int x_count,
                 const double* __restrict__ u_partials, int u_count, double* __restrict__ history, int history_rows) {
    const int column = blockIdx.x, columns = gridDim.x;
    const bool judges = threadIdx.x / kWarpSize == 1, tests = threadIdx.x == kWarpSize, takes_u = threadIdx.x == 0;
    __shared__ bool has_stopped;
    LsmrState& state = states[column];
    LsmrScalars s;
    if (judges || takes_u) s = state.next;  // arrives while the sums are made
    const double normx = sqrt(finish_sum<1>(x_partials, x_count, column, columns));
    const double squares_u = finish_sum<1>(u_partials, u_count, column, columns);
    if (judges) {
        const bool is_new = s.untested != 0;
        if (is_new) close(s, normx, judge(s, state.settings, normx));
        if (s.istop > 0) freeze(s);
        if (tests) {
            if (is_new) record(s, history, history_rows, column, columns), state.next = s;
            has_stopped = s.phase == kStopped;
        }
    }
    if (takes_u && u_count > 0 && s.phase == kRun) aim_v(s, norm_of(squares_u));
    __syncthreads();
    if (takes_u && !has_stopped) {
        if (s.untested != 0) s.normx = normx, s.untested = 0;
        state.now = s;
    }
    if (tests && has_stopped) state.now = s;
}

// The rotations, which every block repeats for itself, and hbar, x and h with the partial sums of |x|^2. The first time
// it makes h of v, and brings v itself to its scale. The last block along x does the estimates and none of the vectors.
template <class R, int PARTS, int COLS>
__global__ void __launch_bounds__(kLsmrThreads)
    lsmr_update(LsmrState* __restrict__ states, const double* __restrict__ v_partials, int v_count,
                Vector<R, PARTS>* __restrict__ v, Vector<R, PARTS>* __restrict__ x, Vector<R, PARTS>* __restrict__ h,
                Vector<R, PARTS>* __restrict__ hbar, int64_t rows, int columns, double* __restrict__ x_partials) {
    __shared__ LsmrMove moves[COLS];
    __shared__ double sigmas[COLS];
    __shared__ int phases[COLS];
    __shared__ bool clears_x[COLS];
    const int blocks = gridDim.x - 1;
    const bool estimates = int(blockIdx.x) == blocks;
    const Place<COLS> place(blocks);
    const bool exists = place.column < columns, has_scalars = threadIdx.x < COLS && exists;
    LsmrScalars s;
    if (has_scalars) s = states[place.column].now;  // arrives while the sum is made
    const Norm norm_v = norm_of(finish_sum<COLS>(v_partials, v_count, place.column, columns));
    if (has_scalars) {
        LsmrState& state = states[place.column];
        phases[threadIdx.x] = int(s.phase);
        if (s.phase == kRun) {
            LsmrTurn next = first_turn(s, state.settings.damp);
            turn(s, next, norm_v);
            moves[threadIdx.x] = next.move;
            if (estimates) estimate(s, next);
        }
        if (s.phase == kStart) moves[threadIdx.x] = prepare(s, state.settings, norm_v);
        clears_x[threadIdx.x] = s.clears_x != 0;
        sigmas[threadIdx.x] = s.sigma;
        if (estimates) state.next = s;
    }
    if (estimates) return;
    __syncthreads();
    const int own = threadIdx.x % COLS;
    double sum = 0;
    const bool is_frozen = !exists || phases[own] == kStopped;
    if (!is_frozen) {
        const R to_hbar = R(moves[own].hbar), to_x = R(moves[own].x), to_h = R(moves[own].h), to_v = R(moves[own].v);
        const R sigma = R(sigmas[own]);
        const bool is_first = phases[own] == kStart, clears = clears_x[own];
        for (int64_t i = place.row; i < rows; i += place.stride) {
            const int64_t at = i * columns + place.column;
            Vector<R, PARTS> vi = v[at], hi = {}, bi = {}, xi = x[at];
            if (!is_first) hi = h[at], bi = hbar[at];
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
        }
    }
    // A column that has stopped keeps its partial sums too.
    sum = column_sum<COLS>(sum);
    if (threadIdx.x < COLS && !is_frozen) x_partials[int64_t(blockIdx.x) * columns + place.column] = sum;
}

}  // namespace rawops
