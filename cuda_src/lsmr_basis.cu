// Reorthogonalisation for LSMR: v against the vectors v that are kept, in two passes over them.
//
// basis: (capacity, rows), the unit vectors of the last iterations in a ring, so that any order of summation is fixed.
#include "common/lsmr_state.cuh"

namespace rawops {

constexpr int kBasisThreads = 256;

// The sum over the block, in all threads.
__device__ inline double basis_sum(double value) {
    __shared__ double warps[kBasisThreads / kWarpSize];
#pragma unroll
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
    __syncthreads();  // an earlier sum is still being read
    if (threadIdx.x % kWarpSize == 0) warps[threadIdx.x / kWarpSize] = value;
    __syncthreads();
    return tree_sum<kBasisThreads / kWarpSize>(warps, 1);
}

// How many vectors are kept when the new v is made. None if v stays as it is.
__device__ inline int basis_size(const LsmrScalars& s, int capacity) {
    if (s.phase != kRun || s.adjoint_alpha == 0) return 0;
    return s.itn + 1 < capacity ? int(s.itn) + 1 : capacity;
}

// coefficients (capacity, PARTS): the inner product of each kept vector with v; a block each.
template <class R, int PARTS>
__global__ void __launch_bounds__(kBasisThreads)
    lsmr_project(const LsmrState* __restrict__ state, const Vector<R, PARTS>* __restrict__ basis, int capacity,
                 const Vector<R, PARTS>* __restrict__ v, int64_t rows, double* __restrict__ coefficients) {
    if (int(blockIdx.x) >= basis_size(state->now, capacity)) return;
    const auto* kept = basis + blockIdx.x * rows;
    double sums[2] = {};
    for (int64_t i = threadIdx.x; i < rows; i += kBasisThreads) {
        const Vector<R, PARTS> k = kept[i], x = v[i];
#pragma unroll
        for (int p = 0; p < PARTS; ++p) sums[0] += double(k.data[p]) * x.data[p];
        if constexpr (PARTS == 2) sums[1] += double(k.data[0]) * x.data[1] - double(k.data[1]) * x.data[0];
    }
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
        const double sum = basis_sum(sums[p]);
        if (threadIdx.x == 0) coefficients[blockIdx.x * PARTS + p] = sum;
    }
}

// v -= the kept vectors by their coefficients, and the partial sums of |v|^2.
template <class R, int PARTS>
__global__ void __launch_bounds__(kBasisThreads)
    lsmr_subtract(const LsmrState* __restrict__ state, const Vector<R, PARTS>* __restrict__ basis, int capacity,
                  Vector<R, PARTS>* __restrict__ v, int64_t rows, const double* __restrict__ coefficients,
                  double* __restrict__ partials) {
    const int size = basis_size(state->now, capacity);
    if (size == 0) return;
    double squares = 0;
    const int64_t first = int64_t(blockIdx.x) * kBasisThreads + threadIdx.x;
    for (int64_t i = first; i < rows; i += int64_t(gridDim.x) * kBasisThreads) {
        double sums[PARTS] = {};
#pragma unroll 4
        for (int j = 0; j < size; ++j) {
            const Vector<R, PARTS> k = basis[j * rows + i];
            const double re = coefficients[j * PARTS];
#pragma unroll
            for (int p = 0; p < PARTS; ++p) sums[p] += re * k.data[p];
            if constexpr (PARTS == 2) {
                const double im = coefficients[j * PARTS + 1];
                sums[0] -= im * k.data[1], sums[1] += im * k.data[0];
            }
        }
        Vector<R, PARTS> x = v[i];
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
            x.data[p] = R(double(x.data[p]) - sums[p]);
            squares += double(x.data[p]) * x.data[p];
        }
        v[i] = x;
    }
    squares = basis_sum(squares);
    if (threadIdx.x == 0) partials[blockIdx.x] = squares;
}

// Keeps the unit vector of v, after lsmr_update: over the oldest one where the basis is full.
template <class R, int PARTS>
__global__ void __launch_bounds__(kBasisThreads)
    lsmr_keep(const LsmrState* __restrict__ state, const Vector<R, PARTS>* __restrict__ v, int64_t rows,
              Vector<R, PARTS>* __restrict__ basis, int capacity) {
    const LsmrScalars& s = state->next;
    if (s.phase == kStopped) return;
    auto* target = basis + (int64_t(s.itn) % capacity) * rows;
    const R scale = R(s.over_v);
    const int64_t first = int64_t(blockIdx.x) * kBasisThreads + threadIdx.x;
    for (int64_t i = first; i < rows; i += int64_t(gridDim.x) * kBasisThreads) {
        Vector<R, PARTS> x = v[i];
#pragma unroll
        for (int p = 0; p < PARTS; ++p) x.data[p] *= scale;
        target[i] = x;
    }
}

}  // namespace rawops
