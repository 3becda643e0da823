// The end of a product whose columns were cut into slices: y = sums of all slices + beta * y.
#include "common/spmv.cuh"

namespace rawops {

// sums: (slices, rows), with alpha in them: that of the call only tells where there is nothing to do. 256 / PARTS
// neighbouring rows and PARTS slices at a time to a block.
template <class X, int PARTS>
__global__ void __launch_bounds__(256)
    spmv_slices(const __grid_constant__ SpmvCall call, const Accumulator<X>* __restrict__ sums, int slices) {
    using A = Accumulator<X>;
    constexpr int ROWS = 256 / PARTS;
    __shared__ A parts[PARTS][ROWS];
    RowEnd<X> end(call);
    if (end.keeps_y) return;
    end.alpha = make_value<A>(1, 0), end.reads_a = true;
    const int part = threadIdx.x / ROWS, place = threadIdx.x % ROWS;
    const int64_t row = int64_t(blockIdx.x) * ROWS + place;
    A sum = {};
    if (row < call.rows) {
#pragma unroll 4
        for (int i = part; i < slices; i += PARTS) sum = add(sum, sums[i * int64_t(call.rows) + row]);
    }
    parts[part][place] = sum;
    __syncthreads();
    if (part == 0 && row < call.rows) {
        for (int i = 1; i < PARTS; ++i) sum = add(sum, parts[i][place]);
        end.finish(row, sum);
    }
    end.template store_partial<256>(call.partials, blockIdx.x);
}

}  // namespace rawops
