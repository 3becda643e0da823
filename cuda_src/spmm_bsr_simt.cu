// A matrix of dense blocks times a dense matrix on the CUDA cores: exact products of any type.
#include "common/spmm.cuh"

namespace rawops {

constexpr int kThreads = 256, kWarps = kThreads / kWarpSize;
constexpr int kQuad = 4;  // columns of a block at a time

// A warp takes ROWS rows of a row of blocks: LANES lanes hold VEC columns of the result each, and the groups of LANES
// take the blocks in turn. call.indptr bounds the rows of blocks; x has neighbouring columns side by side and rows
// that begin at multiples of 16 bytes.
template <class V, class X, int BLOCK, int LANES>
__global__ void __launch_bounds__(kThreads, sizeof(Accumulator<X>) == 4 ? 2 : 1)
    spmm_bsr_simt(const __grid_constant__ SpmvCall call, const __grid_constant__ DenseShape shape) {
    using A = Accumulator<X>;
    constexpr int VEC = max_of(16 / int(sizeof(X)), 1), ROWS = min_of(BLOCK, 16), GROUPS = kWarpSize / LANES;
    using Stretch = Vector<X, VEC>;
    const SpmmEnd<X> end(call, shape);
    if (end.keeps_y) return;
    const V* __restrict__ data = static_cast<const V*>(call.data);
    const int* __restrict__ indptr = static_cast<const int*>(call.indptr);
    const int64_t first_row = (int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarpSize) * ROWS;
    const int column = blockIdx.y * LANES * VEC + threadIdx.x % LANES * VEC;
    const int group = threadIdx.x / LANES % GROUPS;
    const bool exists = column < shape.columns;
    if (first_row >= call.rows) return;
    const X* __restrict__ x = static_cast<const X*>(call.x) + column;

    A sums[ROWS][VEC] = {};
    const int block_row = int(first_row / BLOCK), stop = end.reads_a && exists ? indptr[block_row + 1] : 0;
    for (int entry = stop > 0 ? indptr[block_row] + group : 0; entry < stop; entry += GROUPS) {
        const V* block = data + (int64_t(entry) * BLOCK + first_row % BLOCK) * BLOCK;
        const int64_t x_row = int64_t(call.indices[entry]) * BLOCK;
#pragma unroll 1
        for (int k = 0; k < BLOCK; k += kQuad) {
            Stretch stretches[kQuad];
#pragma unroll
            for (int i = 0; i < kQuad; ++i) {
                stretches[i] = {};
                if (x_row + k + i >= call.cols) continue;
                const X* from = x + (x_row + k + i) * shape.x_row;
                if (VEC == 1 || column + VEC <= shape.columns) {
                    stretches[i] = *reinterpret_cast<const Stretch*>(from);
                } else {
#pragma unroll
                    for (int j = 0; j < VEC; ++j) {
                        if (column + j < shape.columns) stretches[i].data[j] = from[j];
                    }
                }
            }
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const auto values = *reinterpret_cast<const Vector<V, kQuad>*>(block + r * BLOCK + k);
#pragma unroll
                for (int i = 0; i < kQuad; ++i) {
#pragma unroll
                    for (int j = 0; j < VEC; ++j) {
                        const A factor = widen(stretches[i].data[j]);
                        sums[r][j] = multiply_add(widen(values.data[i]), factor, sums[r][j]);
                    }
                }
            }
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
        for (int mask = LANES; mask < kWarpSize; mask *= 2) {
#pragma unroll
            for (int j = 0; j < VEC; ++j) sums[r][j] = add(sums[r][j], shuffle_xor(sums[r][j], mask));
        }
        const bool is_mine = exists && group == 0 && first_row + r < call.rows;
        if (is_mine) end.finish_vector(end.row_of(first_row + r), column, sums[r]);
    }
}

}  // namespace rawops
