// gelu, silu and swiglu of whole arrays.
#include "common/epilogue.cuh"
#include "common/rows.cuh"

namespace rawops {

struct ActivationParams {
    RowShape shape;  // without its columns, of which there may be more than an int counts
    RowArray x, out;
    int64_t cols, up;  // of out; from a column of x to the one that multiplies it, in elements
};

// A thread takes WIDTH columns. What comes from 16 bits is as precise as that needs.
template <class T, int WIDTH, int kActivation>
__global__ void __launch_bounds__(256) rowwise_activation(const __grid_constant__ ActivationParams params) {
    using V = Accumulator<T>;
    await_launch_before();
    start_next_launch();
    const int64_t groups = params.cols / WIDTH;  // WIDTH divides the columns
    const int64_t index = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    const int64_t row = params.shape.rows == 1 ? 0 : index / groups, column = (index - row * groups) * WIDTH;
    if (row >= params.shape.rows || column >= params.cols) return;
    const RowIndex place(params.shape, row);
    const T* x = params.x.row<const T>(place) + column * params.x.col;
    V values[WIDTH], up[WIDTH];
    read_columns<WIDTH>(values, x);
    if constexpr (kActivation == kSwiglu) read_columns<WIDTH>(up, x + params.up);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
        if constexpr (kActivation != kSwiglu) up[i] = V(1);
        if constexpr (sizeof(T) == 2) values[i] = activate_approximately<kActivation>(values[i], up[i]);
        else values[i] = activate<kActivation>(values[i], up[i]);
    }
    write_columns<WIDTH>(values, params.out.row<T>(place) + column * params.out.col);
}

}  // namespace rawops
