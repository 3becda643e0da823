// gelu, silu and swiglu of whole arrays.
#include "common/epilogue.cuh"
#include "common/rows.cuh"

namespace rawops {

struct ActivationParams {
    RowShape shape;  // without its columns, of which there may be more than an int counts
    RowArray x, out;
    int64_t cols, up;  // of out; from a column of x to the one that multiplies it, in elements
};

constexpr int kActivationThreads = 256;

// A thread takes GROUPS times WIDTH columns, a block of threads apart. What comes from 16 bits is as precise as that
// needs.
template <class T, int WIDTH, int GROUPS, int kActivation>
__global__ void __launch_bounds__(kActivationThreads) rowwise_activation(
    const __grid_constant__ ActivationParams params) {
    using V = Accumulator<T>;
    constexpr bool kGated = kActivation == kSwiglu;
    await_launch_before();
    start_next_launch();
    const int64_t groups = params.cols / WIDTH;  // WIDTH divides the columns
    const int64_t first = int64_t(blockIdx.x) * (kActivationThreads * GROUPS) + threadIdx.x;
    const T* from[GROUPS] = {};
    T* to[GROUPS];
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
        const int64_t index = first + g * kActivationThreads;
        if (params.shape.rows == 1) {  // spares what finds a row
            if (index >= groups) continue;
            from[g] = static_cast<const T*>(params.x.base) + index * WIDTH * params.x.col;
            to[g] = static_cast<T*>(params.out.base) + index * WIDTH * params.out.col;
        } else {
            const int64_t row = index / groups, column = (index - row * groups) * WIDTH;
            if (row >= params.shape.rows) continue;
            const RowIndex place(params.shape, row);
            from[g] = params.x.row<const T>(place) + column * params.x.col;
            to[g] = params.out.row<T>(place) + column * params.out.col;
        }
    }
    Columns<T, WIDTH> columns[GROUPS], gated[GROUPS];
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
        if (from[g] == nullptr) continue;
        columns[g].read(from[g]);
        if constexpr (kGated) gated[g].read(from[g] + params.up);
    }
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
        if (from[g] == nullptr) continue;
        V values[WIDTH], up[WIDTH] = {};
        columns[g].widen_to(values);
        if constexpr (kGated) gated[g].widen_to(up);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            if constexpr (sizeof(T) == 2) values[i] = activate_approximately<kActivation>(values[i], up[i]);
            else values[i] = activate<kActivation>(values[i], up[i]);
        }
        write_columns<WIDTH>(values, to[g]);
    }
}

}  // namespace rawops
