// A sparse matrix times several vectors for LSMR: y_j = alpha_j A x_j + beta_j y_j with scalars of their own for each
// column j, read on the device, and the partial sums of |y_j|^2. Row-major x and y: an entry of A meets a stretch of x.
#include "common/numeric.cuh"

namespace rawops {

constexpr int kSpmmThreads = 256;
constexpr int kSpmmWarps = kSpmmThreads / kWarpSize;

// LANES threads side by side hold VEC columns each. kShares: the groups of a warp share a row, entry by entry in turn;
// otherwise each has its own.
template <class V, class R, int VEC, int LANES, bool kShares>
__global__ void __launch_bounds__(kSpmmThreads)
    lsmr_spmm(const V* __restrict__ data, const int* __restrict__ indices, const int* __restrict__ indptr,
              const R* __restrict__ x, R* __restrict__ y, int rows, int columns, const double* __restrict__ alpha,
              const double* __restrict__ beta, int64_t scalar_stride, double* __restrict__ partials) {
    using Stretch = Vector<R, VEC>;
    constexpr int GROUPS = kShares ? kWarpSize / LANES : 1;
    constexpr int TILE = VEC * LANES, SPAN = LANES * GROUPS, UNROLL = 4;
    __shared__ double squares[kSpmmWarps][TILE];
    const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES % GROUPS;
    const int column = blockIdx.y * TILE + lane * VEC;  // columns is a multiple of VEC
    const bool exists = column < columns;

    R a[VEC], b[VEC];
    bool frozen[VEC], works = false;
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
        const double to_x = exists ? alpha[(column + i) * scalar_stride] : 0;
        const double to_y = exists ? beta[(column + i) * scalar_stride] : 1;
        a[i] = R(to_x), b[i] = R(to_y), frozen[i] = to_x == 0 && to_y == 1;
        works |= !frozen[i];
    }
    if (!__syncthreads_or(works)) return;

    double sums[VEC] = {};
    constexpr int ROWS = kSpmmThreads / SPAN;
    for (int64_t first = int64_t(blockIdx.x) * ROWS; first < rows; first += int64_t(gridDim.x) * ROWS) {
        const int64_t row = first + threadIdx.x / SPAN;
        const int end = row < rows && works ? indptr[row + 1] : 0;
        R total[VEC] = {};
        for (int k = end > 0 ? indptr[row] + group : 0; k < end; k += GROUPS * UNROLL) {
            Stretch stretch[UNROLL];
            R value[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                const int at = k + u * GROUPS;
                value[u] = 0, stretch[u] = {};
                if (at >= end) continue;
                value[u] = R(data[at]);
                stretch[u] = *reinterpret_cast<const Stretch*>(x + int64_t(indices[at]) * columns + column);
            }
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
#pragma unroll
                for (int i = 0; i < VEC; ++i) total[i] += value[u] * stretch[u].data[i];
            }
        }
#pragma unroll
        for (int offset = SPAN / 2; offset >= LANES; offset /= 2) {
#pragma unroll
            for (int i = 0; i < VEC; ++i) total[i] += __shfl_xor_sync(~0u, total[i], offset);
        }
        if (row >= rows || !works || group != 0) continue;
        Stretch* const target = reinterpret_cast<Stretch*>(y + row * columns + column);
        Stretch result = *target;
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
            if (frozen[i]) continue;
            result.data[i] = a[i] * total[i] + (b[i] != 0 ? b[i] * result.data[i] : R(0));
            sums[i] += double(result.data[i]) * double(result.data[i]);
        }
        *target = result;
    }

#pragma unroll
    for (int i = 0; i < VEC; ++i) {
#pragma unroll
        for (int offset = kWarpSize / 2; offset >= LANES; offset /= 2) sums[i] += __shfl_xor_sync(~0u, sums[i], offset);
        if (threadIdx.x % kWarpSize < LANES) squares[threadIdx.x / kWarpSize][lane * VEC + i] = sums[i];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < TILE && blockIdx.y * TILE + i < columns; i += kSpmmThreads) {
        double sum = 0;
#pragma unroll
        for (int w = 0; w < kSpmmWarps; ++w) sum += squares[w][i];
        partials[int64_t(blockIdx.x) * columns + blockIdx.y * TILE + i] = sum;
    }
}

}  // namespace rawops
