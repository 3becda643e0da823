// Sparse matrix times vector with 2 to 32 threads a row: for any matrix, and fast where rows are even.
#include "common/spmv.cuh"

namespace rawops {

// V: type of the stored values, X: of x and y, P: of the row pointers, LANES: threads that share a row.
template <class V, class X, class P, int LANES, bool kConjugate>
__global__ void __launch_bounds__(256) spmv_rows(const __grid_constant__ SpmvCall call) {
    using A = Accumulator<X>;
    constexpr int THREADS = 256, ROWS = THREADS / LANES, UNROLL = 4;
    const V* __restrict__ data = static_cast<const V*>(call.data);
    const int* __restrict__ indices = call.indices;
    const P* __restrict__ indptr = static_cast<const P*>(call.indptr);
    const X* __restrict__ x = static_cast<const X*>(call.x);
    RowEnd<X> end(call);
    if (end.keeps_y) return;
    const int lane = threadIdx.x % LANES;

    for (int64_t first = int64_t(blockIdx.x) * ROWS; first < call.rows; first += int64_t(gridDim.x) * ROWS) {
        const int64_t row = first + threadIdx.x / LANES;
        const bool exists = row < call.rows;
        P entry = 0, stop = 0;
        if (exists && end.reads_a) entry = indptr[row] + lane, stop = indptr[row + 1];
        A sums[UNROLL] = {};
        for (; entry < stop; entry += UNROLL * LANES) {
            int column[UNROLL];
            V value[UNROLL];
#pragma unroll
            for (int i = 0; i < UNROLL; ++i) {
                const bool is_there = entry + i * LANES < stop;
                column[i] = is_there ? indices[entry + i * LANES] : -1;
                value[i] = is_there ? data[entry + i * LANES] : V{};
            }
#pragma unroll
            for (int i = 0; i < UNROLL; ++i) {
                if (column[i] < 0) continue;  // an absent entry does not touch x
                sums[i] = multiply_add(widen(conjugated<kConjugate>(value[i])), A(widen(x[column[i]])), sums[i]);
            }
        }
        const A sum = sum_lanes(add(add(sums[0], sums[1]), add(sums[2], sums[3])), LANES);
        if (exists && lane == 0) end.finish(row, sum);
    }
    end.template store_partial<THREADS>(call.partials, blockIdx.x);
}

}  // namespace rawops
