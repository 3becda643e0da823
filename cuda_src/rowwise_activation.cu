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

// Reads and writes a group of which `count` columns exist, all of them where ACCESS is WIDTH: the last one of a row one
// by one.
template <class T, int WIDTH, int ACCESS>
__device__ inline void read_some(Columns<T, WIDTH, ACCESS>& columns, const T* from, int64_t col, int count) {
    if (ACCESS == WIDTH || count == WIDTH) {
        columns.read(from, col);
    } else {
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) columns[i] = i < count ? from[column_offset<ACCESS>(i, col)] : T(0.0f);
    }
}
template <class T, int WIDTH, int ACCESS>
__device__ inline void write_some(Columns<T, WIDTH, ACCESS>& columns, T* to, int64_t col, int count) {
    if (ACCESS == WIDTH || count == WIDTH) {
        columns.write(to, col);
    } else {
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            if (i < count) to[column_offset<ACCESS>(i, col)] = columns[i];
        }
    }
}

// A thread takes GROUPS groups of 16 bytes of columns, a block of threads apart, in pieces of ACCESS. What comes from
// 16 bits is as precise as that needs.
template <class T, int ACCESS, int GROUPS, int kActivation>
__global__ void __launch_bounds__(kActivationThreads) rowwise_activation(
    const __grid_constant__ ActivationParams params) {
    using V = Accumulator<T>;
    using Group = Columns<T, kGroup<T>, ACCESS>;
    constexpr bool kGated = kActivation == kSwiglu;
    constexpr int WIDTH = kGroup<T>;
    await_launch_before();
    start_next_launch();
    const int64_t groups = (params.cols + WIDTH - 1) / WIDTH;  // of a row
    const int64_t first = int64_t(blockIdx.x) * (kActivationThreads * GROUPS) + threadIdx.x;
    const T* from[GROUPS];
    T* to[GROUPS];
    int count[GROUPS];  // of the columns that exist
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
        const int64_t index = first + g * kActivationThreads;
        int64_t column = index * WIDTH;
        count[g] = 0;
        if (params.shape.rows == 1) {  // spares what finds a row
            if (column >= params.cols) continue;
            from[g] = static_cast<const T*>(params.x.base) + column_offset<ACCESS>(column, params.x.col);
            to[g] = static_cast<T*>(params.out.base) + column_offset<ACCESS>(column, params.out.col);
        } else {
            const int64_t row = index / groups;
            if (row >= params.shape.rows) continue;
            column -= row * groups * WIDTH;
            const RowIndex place(params.shape, row);
            from[g] = params.x.row<const T>(place) + column_offset<ACCESS>(column, params.x.col);
            to[g] = params.out.row<T>(place) + column_offset<ACCESS>(column, params.out.col);
        }
        count[g] = ACCESS == WIDTH || params.cols - column > WIDTH ? WIDTH : int(params.cols - column);
    }
    Group columns[GROUPS], gated[GROUPS];
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
        if (count[g] == 0) continue;
        read_some(columns[g], from[g], params.x.col, count[g]);
        if constexpr (kGated) read_some(gated[g], from[g] + params.up, params.x.col, count[g]);
    }
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
        if (count[g] == 0) continue;
        V values[WIDTH], up[WIDTH] = {};
        columns[g].widen_to(values);
        if constexpr (kGated) gated[g].widen_to(up);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            if constexpr (sizeof(T) == 2) values[i] = activate_approximately<kActivation>(values[i], up[i]);
            else values[i] = activate<kActivation>(values[i], up[i]);
        }
        columns[g].narrow_from(values);
        write_some(columns[g], to[g], params.out.col, count[g]);
    }
}

}  // namespace rawops
