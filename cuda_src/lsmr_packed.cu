// A sparse matrix times a vector that is gathered from shared memory, for matrices with many entries a row and few
// columns, or few rows: the entries of the vector come in blocks that fit there, and 16 bits are enough for their place.
//
// Each block of columns has its own rows, longest first, 32 to a slice: entry k of the 32 rows lies side by side, so that
// a warp reads a slice without gaps and a thread adds up a row. Shorter rows of a slice are filled up with zeros.
#include "common/numeric.cuh"

namespace rawops {

constexpr int kPackedThreads = 1024;
constexpr int kPackedWarps = kPackedThreads / kWarpSize;

// grid (ranges, blocks of columns). kFused, with a single block: y = alpha A x + beta y, where rows lie in the order of the
// slices, and partial sums of |y|^2. Otherwise y (blocks, rows) takes the sums of each block, rows[slot] being theirs.
template <class V, class R, bool kFused>
__global__ void __launch_bounds__(kPackedThreads, 1)
    lsmr_packed(const V* __restrict__ data, const uint16_t* __restrict__ indices, const int64_t* __restrict__ starts,
                const int* __restrict__ first_slices, const int* __restrict__ rows, const R* __restrict__ x, int x_size,
                int block_size, R* __restrict__ y, int y_size, const double* __restrict__ alpha,
                const double* __restrict__ beta, double* __restrict__ partials) {
    constexpr int VEC = 16 / int(sizeof(R)), UNROLL = 8;
    using Stretch = Vector<R, VEC>;
    extern __shared__ __align__(16) char shared[];
    __shared__ double warps[kPackedWarps];
    R* const own = reinterpret_cast<R*>(shared);
    const double to_x = *alpha, to_y = *beta;
    if (to_x == 0 && (!kFused || to_y == 1)) return;  // y stays, or is not going to be read

    const int base = blockIdx.y * block_size;  // a multiple of VEC
    const int count = min_of(block_size, x_size - base), whole = count / VEC;
    for (int first = threadIdx.x; first < whole; first += 4 * kPackedThreads) {
        Stretch stretches[4];
#pragma unroll
        for (int u = 0; u < 4; ++u) {
            const int i = first + u * kPackedThreads;
            if (i < whole) stretches[u] = reinterpret_cast<const Stretch*>(x + base)[i];
        }
#pragma unroll
        for (int u = 0; u < 4; ++u) {
            const int i = first + u * kPackedThreads;
            if (i < whole) reinterpret_cast<Stretch*>(own)[i] = stretches[u];
        }
    }
    for (int i = whole * VEC + threadIdx.x; i < count; i += kPackedThreads) own[i] = x[base + i];
    __syncthreads();

    const int lane = threadIdx.x % kWarpSize, last = first_slices[blockIdx.y + 1];
    const int step = gridDim.x * kPackedWarps;
    int slice = first_slices[blockIdx.y] + blockIdx.x + gridDim.x * (threadIdx.x / kWarpSize);
    int64_t next_start = slice < last ? starts[slice] : 0, next_end = slice < last ? starts[slice + 1] : 0;
    double squares = 0;
    for (; slice < last; slice += step) {
        const int64_t start = next_start;
        const int length = to_x != 0 ? int(next_end - start) / kWarpSize : 0;
        if (slice + step < last) next_start = starts[slice + step], next_end = starts[slice + step + 1];
        const V* value = data + start + lane;
        const uint16_t* index = indices + start + lane;
        R sums[2] = {};
        int k = 0;
        for (; k + UNROLL <= length; k += UNROLL, value += UNROLL * kWarpSize, index += UNROLL * kWarpSize) {
            V values[UNROLL];
            uint16_t places[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) values[u] = value[u * kWarpSize], places[u] = index[u * kWarpSize];
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) sums[u % 2] += R(values[u]) * own[places[u]];
        }
        V values[UNROLL] = {};
        uint16_t places[UNROLL] = {};
#pragma unroll
        for (int u = 0; u < UNROLL - 1; ++u) {
            if (k + u < length) values[u] = value[u * kWarpSize], places[u] = index[u * kWarpSize];
        }
#pragma unroll
        for (int u = 0; u < UNROLL - 1; ++u) sums[u % 2] += R(values[u]) * own[places[u]];
        const R sum = sums[0] + sums[1];
        const int slot = slice * kWarpSize + lane;
        if constexpr (kFused) {
            if (slot < y_size) {
                const R result = R(to_x) * sum + (to_y != 0 ? R(to_y) * y[slot] : R(0));
                y[slot] = result;
                squares += double(result) * double(result);
            }
        } else {
            const int row = rows[slot];
            if (row >= 0) y[int64_t(blockIdx.y) * y_size + row] = sum;
        }
    }
    if constexpr (kFused) {
#pragma unroll
        for (int offset = kWarpSize / 2; offset > 0; offset /= 2) squares += __shfl_xor_sync(~0u, squares, offset);
        if (lane == 0) warps[threadIdx.x / kWarpSize] = squares;
        __syncthreads();
        if (threadIdx.x == 0) {
            double sum = 0;
            for (int w = 0; w < kPackedWarps; ++w) sum += warps[w];
            partials[blockIdx.x] = sum;
        }
    }
}

}  // namespace rawops
