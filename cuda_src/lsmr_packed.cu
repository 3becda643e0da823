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
    for (int i = threadIdx.x; i < whole; i += kPackedThreads) {
        reinterpret_cast<Stretch*>(own)[i] = reinterpret_cast<const Stretch*>(x + base)[i];
    }
    for (int i = whole * VEC + threadIdx.x; i < count; i += kPackedThreads) own[i] = x[base + i];
    __syncthreads();

    const int lane = threadIdx.x % kWarpSize, last = first_slices[blockIdx.y + 1];
    double squares = 0;
    for (int slice = first_slices[blockIdx.y] + blockIdx.x + gridDim.x * (threadIdx.x / kWarpSize); slice < last;
         slice += gridDim.x * kPackedWarps) {
        const int64_t start = starts[slice];
        const int length = to_x != 0 ? int(starts[slice + 1] - start) / kWarpSize : 0;
        const V* value = data + start + lane;
        const uint16_t* index = indices + start + lane;
        R sums[2] = {};
        for (int k = 0; k < length; k += UNROLL, value += UNROLL * kWarpSize, index += UNROLL * kWarpSize) {
            R values[UNROLL];
            int places[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                const bool exists = k + u < length;
                values[u] = exists ? R(value[u * kWarpSize]) : R(0);
                places[u] = exists ? index[u * kWarpSize] : 0;
            }
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) sums[u % 2] += values[u] * own[places[u]];
        }
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
