// The transposed product of a matrix that is kept in one format: rows are scattered onto y's accumulators.
//
// Atomic additions make the order of a sum that of their arrival: the last bits change from run to run.
#include "common/spmv.cuh"

namespace rawops {

template <class A> __device__ inline void atomic_add(A* target, A value) {
    if constexpr (is_complex<A>) {
        atomicAdd(&target->x, value.x);
        atomicAdd(&target->y, value.y);
    } else {
        atomicAdd(target, value);
    }
}

// sums (cols), zero before: += op(A)^T x, LANES threads a row of the stored format. Rows are those that x has.
template <class V, class X, class P, int LANES, bool kConjugate>
__global__ void __launch_bounds__(256)
    spmv_scatter(const __grid_constant__ SpmvCall call, Accumulator<X>* __restrict__ sums) {
    using A = Accumulator<X>;
    constexpr int ROWS = 256 / LANES;
    if (is_zero(call.alpha.read<A>())) return;
    const V* __restrict__ data = static_cast<const V*>(call.data);
    const P* __restrict__ indptr = static_cast<const P*>(call.indptr);
    const X* __restrict__ x = static_cast<const X*>(call.x);
    const int lane = threadIdx.x % LANES;
    for (int64_t row = int64_t(blockIdx.x) * ROWS + threadIdx.x / LANES; row < call.cols;
         row += int64_t(gridDim.x) * ROWS) {
        const P stop = indptr[row + 1];
        P entry = indptr[row] + lane;
        if (entry >= stop) continue;
        const A factor = A(widen(x[row]));
        for (; entry < stop; entry += LANES) {
            const auto value = widen(conjugated<kConjugate>(data[entry]));
            atomic_add(&sums[call.indices[entry]], multiply_add(value, factor, A{}));
        }
    }
}

// y = alpha * sums + beta * y, and sums back to zero for the next product.
template <class X>
__global__ void __launch_bounds__(256)
    spmv_scatter_end(const __grid_constant__ SpmvCall call, Accumulator<X>* __restrict__ sums) {
    RowEnd<X> end(call);
    for (int64_t row = int64_t(blockIdx.x) * 256 + threadIdx.x; row < call.rows; row += int64_t(gridDim.x) * 256) {
        end.finish(row, sums[row]);
        sums[row] = Accumulator<X>{};
    }
    end.template store_partial<256>(call.partials, blockIdx.x);
}

}  // namespace rawops
