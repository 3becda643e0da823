// Sparse matrix times dense matrix, one thread for each entry of the result: right for any strides.
#include "common/spmv.cuh"

namespace rawops {

struct SpmmShape {
    int64_t x_row, x_col, y_row, y_col;  // strides in elements
    int columns;
};

// 32 neighbouring columns to a warp, which read the same entry of A and, in a row-major x, one stretch of a row.
template <class V, class X, class P, bool kConjugate>
__global__ void __launch_bounds__(256)
    spmm_rows(const __grid_constant__ SpmvCall call, const __grid_constant__ SpmmShape shape) {
    using A = Accumulator<X>;
    const V* __restrict__ data = static_cast<const V*>(call.data);
    const P* __restrict__ indptr = static_cast<const P*>(call.indptr);
    const X* __restrict__ x = static_cast<const X*>(call.x);
    RowEnd<X> end(call);
    const int column = blockIdx.y * kWarpSize + threadIdx.x % kWarpSize;
    if (column >= shape.columns) return;
    for (int64_t row = int64_t(blockIdx.x) * 8 + threadIdx.x / kWarpSize; row < call.rows;
         row += int64_t(gridDim.x) * 8) {
        A sum = {};
        const P stop = end.reads_a ? indptr[row + 1] : P(0);
        for (P entry = end.reads_a ? indptr[row] : P(0); entry < stop; ++entry) {
            const int64_t offset = call.indices[entry] * shape.x_row + column * shape.x_col;
            sum = multiply_add(widen(conjugated<kConjugate>(data[entry])), A(widen(x[offset])), sum);
        }
        end.finish(row * shape.y_row + column * shape.y_col, sum);
    }
}

}  // namespace rawops
