// Whole iterations of LSMR in one block of threads, for a sparse matrix that one SM reads quickly enough: no launches,
// no waiting for other SMs. Vectors and scalars stay in shared memory from iteration to iteration, and so does the
// matrix where it fits; a larger one stays in the caches. The last two warps work on scalars while the others make the
// products: one does the estimates and the stopping tests of the last iteration, so that a stop is known before the
// next x would be made, the other turns what it can.
#include "common/lsmr_state.cuh"

namespace rawops {

constexpr int kSmallThreads = 512;
constexpr int kSmallWorkers = kSmallThreads - 2 * kWarpSize;

// Compressed rows.
template <class T> struct SmallRows {
    const T* data;
    const int *indices, *indptr;
    int count, lanes;  // rows, and threads that share one
};

// Copies n entries by the whole block.
template <class T> __device__ inline void small_copy(const T* __restrict__ source, T* __restrict__ target, int n) {
    for (int i = threadIdx.x; i < n; i += kSmallThreads) target[i] = source[i];
}

// Moves both directions of a matrix of nnz entries into shared memory.
template <class T> __device__ inline void small_hold(SmallRows<T>& rows, SmallRows<T>& columns, int nnz, T* room) {
    T *const data = room, *const data_t = data + nnz;
    int* const indices = reinterpret_cast<int*>(data_t + nnz);
    int *const indices_t = indices + nnz, *const indptr = indices_t + nnz, *const indptr_t = indptr + rows.count + 1;
    small_copy(rows.data, data, nnz), small_copy(columns.data, data_t, nnz);
    small_copy(rows.indices, indices, nnz), small_copy(columns.indices, indices_t, nnz);
    small_copy(rows.indptr, indptr, rows.count + 1), small_copy(columns.indptr, indptr_t, columns.count + 1);
    rows.data = data, rows.indices = indices, rows.indptr = indptr;
    columns.data = data_t, columns.indices = indices_t, columns.indptr = indptr_t;
}

template <class R, int PARTS> __device__ inline double small_square(const Vector<R, PARTS>& x) {
    double sum = 0;
#pragma unroll
    for (int p = 0; p < PARTS; ++p) sum += double(x.data[p]) * double(x.data[p]);
    return sum;
}

// The sum over the block, in all threads. Two sums in turn need two arrays.
__device__ inline double small_sum(double value, double* __restrict__ warps) {
    constexpr int WARPS = kSmallThreads / kWarpSize;
#pragma unroll
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
    if (threadIdx.x % kWarpSize == 0) warps[threadIdx.x / kWarpSize] = value;
    __syncthreads();
    return tree_sum<WARPS>(warps, 1);
}

// y = alpha op(rows) x + beta y; returns this thread's share of |y|^2. A factor of 0 leaves its operand unread.
template <bool kConjugate, class R, int PARTS>
__device__ inline double small_product(const SmallRows<Vector<R, PARTS>>& rows, const Vector<R, PARTS>* __restrict__ x,
                                       Vector<R, PARTS>* __restrict__ y, double alpha, double beta) {
    using T = Vector<R, PARTS>;
    const R a = R(alpha), b = R(beta);
    const int lanes = rows.lanes, lane = threadIdx.x % lanes, at_once = kSmallWorkers / lanes;
    double squares = 0;
    if (threadIdx.x >= kSmallWorkers) return 0;
    for (int first = 0; first < rows.count; first += at_once) {
        const int row = first + threadIdx.x / lanes;
        const bool exists = row < rows.count;
        const int end = exists && alpha != 0 ? rows.indptr[row + 1] : 0;
        T sum = {};
#pragma unroll 4
        for (int k = end > 0 ? rows.indptr[row] + lane : 0; k < end; k += lanes) {
            const T value = rows.data[k], xi = x[rows.indices[k]];
#pragma unroll
            for (int p = 0; p < PARTS; ++p) sum.data[p] += value.data[0] * xi.data[p];
            if constexpr (PARTS == 2) {
                const R im = kConjugate ? -value.data[1] : value.data[1];
                sum.data[0] -= im * xi.data[1], sum.data[1] += im * xi.data[0];
            }
        }
        for (int offset = lanes / 2; offset > 0; offset /= 2) {
#pragma unroll
            for (int p = 0; p < PARTS; ++p) sum.data[p] += __shfl_xor_sync(~0u, sum.data[p], offset);
        }
        if (exists && lane == 0) {
            T value = {};
#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                if (alpha != 0) value.data[p] = a * sum.data[p];
                if (beta != 0) value.data[p] += b * y[row].data[p];
            }
            y[row] = value;
            squares += small_square(value);
        }
    }
    return squares;
}

// The stopping tests of an iteration by a warp.
__device__ inline void finish(LsmrScalars& s, const LsmrSettings& settings, double normx, double* __restrict__ history,
                              int history_rows) {
    const double istop = judge(s, settings, normx);
    __syncwarp();  // all lanes have read s
    if (threadIdx.x % kWarpSize == 0) close(s, normx, istop), record(s, history, history_rows, 0, 1);
    __syncwarp();
}

// One block. Continues from the state, which has been tested, for some iterations; leaves all vectors and the state.
template <class R, int PARTS>
__global__ void __launch_bounds__(kSmallThreads, 1)
    lsmr_small(LsmrState* __restrict__ state, const Vector<R, PARTS>* __restrict__ data,
               const int* __restrict__ indices, const int* __restrict__ indptr, int lanes,
               const Vector<R, PARTS>* __restrict__ data_t, const int* __restrict__ indices_t,
               const int* __restrict__ indptr_t, int lanes_t, int nnz, int holds, int m, int n,
               Vector<R, PARTS>* __restrict__ vectors_u, Vector<R, PARTS>* __restrict__ vectors_v,
               Vector<R, PARTS>* __restrict__ vectors_x, Vector<R, PARTS>* __restrict__ vectors_h,
               Vector<R, PARTS>* __restrict__ vectors_hbar, int iterations, double* __restrict__ history,
               int history_rows) {
    using T = Vector<R, PARTS>;
    extern __shared__ __align__(16) char shared[];
    __shared__ double warps[3][kSmallThreads / kWarpSize];
    __shared__ LsmrScalars s;
    __shared__ LsmrTurn next;
    T* const u = reinterpret_cast<T*>(shared);
    T *const v = u + m, *const x = v + n, *const h = x + n, *const hbar = h + n;
    SmallRows<T> rows{data, indices, indptr, m, lanes}, columns{data_t, indices_t, indptr_t, n, lanes_t};
    if (holds) small_hold(rows, columns, nnz, hbar + n);
    const LsmrSettings settings = state->settings;
    if (threadIdx.x == 0) s = state->next;
    for (int i = threadIdx.x; i < m; i += kSmallThreads) u[i] = vectors_u[i];
    for (int i = threadIdx.x; i < n; i += kSmallThreads) {
        v[i] = vectors_v[i], x[i] = vectors_x[i], h[i] = vectors_h[i], hbar[i] = vectors_hbar[i];
    }
    __syncthreads();

    const bool turns = threadIdx.x == kSmallWorkers, judges = threadIdx.x == kSmallWorkers + kWarpSize;
    const bool is_judge = threadIdx.x >= kSmallWorkers + kWarpSize;  // or of the same warp
    bool untested = false;  // an x
    double normx = 0;
    for (int iteration = 0; iteration < iterations && s.phase == kRun; ++iteration) {
        double squares = small_product<false>(rows, v, u, s.forward_alpha, s.forward_beta);
        if (judges && untested) estimate(s, next);
        squares = small_sum(squares, warps[0]);
        if (turns) aim_v(s, norm_of(squares));
        __syncthreads();
        squares = s.beta > 0 ? small_product<true>(columns, u, v, s.adjoint_alpha, s.adjoint_beta) : 0;
        if (turns) next = first_turn(s, settings.damp);
        if (is_judge && untested) finish(s, settings, normx, history, history_rows);
        squares = small_sum(squares, warps[1]);
        untested = untested && s.istop == 0;
        if (s.istop > 0) break;
        if (turns) turn(s, next, norm_of(squares));
        __syncthreads();
        squares = 0;
        const R to_hbar = R(next.move.hbar), to_x = R(next.move.x), to_h = R(next.move.h), to_v = R(next.move.v);
        for (int i = threadIdx.x; i < n && threadIdx.x < kSmallWorkers; i += kSmallWorkers) {
            T hi = h[i], bi = hbar[i], xi = x[i];
            const T vi = v[i];
#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                bi.data[p] = hi.data[p] + to_hbar * bi.data[p];
                xi.data[p] += to_x * bi.data[p];
                hi.data[p] = to_v * vi.data[p] + to_h * hi.data[p];
            }
            hbar[i] = bi, x[i] = xi, h[i] = hi;
            squares += small_square(xi);
        }
        normx = sqrt(small_sum(squares, warps[2]));
        untested = true;
    }
    __syncthreads();  // all have left the loop
    if (judges && untested) estimate(s, next);
    __syncthreads();
    if (is_judge && untested) finish(s, settings, normx, history, history_rows);
    if (judges) {
        if (s.istop > 0) freeze(s);
        state->now = state->next = s;
    }
    for (int i = threadIdx.x; i < m; i += kSmallThreads) vectors_u[i] = u[i];
    for (int i = threadIdx.x; i < n; i += kSmallThreads) {
        vectors_v[i] = v[i], vectors_x[i] = x[i], vectors_h[i] = h[i], vectors_hbar[i] = hbar[i];
    }
}

}  // namespace rawops
