// The softmax of rows: one pass finds maximum and sum, a second one writes.
#include "common/rows.cuh"

namespace rawops {

struct SoftmaxParams {
    RowShape shape;
    RowArray x, out;
};

// e ** x: of float32 to about 1e-6 of it, for x that matter, with 0 for what has no normal number.
__device__ inline float exponential(float x) { return exp2_fast(x * kLog2e); }
__device__ inline double exponential(double x) { return exp(x); }

// What is taken from scores up to a maximum, which may be that of none.
template <class V> __device__ inline V base_of(V most) { return most == -V(infinity()) ? V(0) : most; }

template <class T, int ACCESS, int GROUPS, int TEAM, int CLUSTER>
__global__ void __launch_bounds__(RowTeam<TEAM, CLUSTER>::BLOCK,
                                  row_blocks<RowTeam<TEAM, CLUSTER>, OneArray<T, ACCESS>, Accumulator<T>, GROUPS>())
    ROW_BLOCKS(CLUSTER) rowwise_softmax(const __grid_constant__ SoftmaxParams params) {
    using V = Accumulator<T>;
    constexpr int WIDTH = kGroup<T>;
    using Group = V[WIDTH];
    using Load = OneArray<T, ACCESS>;
    await_launch_before();
    start_next_launch();
    RowTeam<TEAM, CLUSTER> team(params.shape.rows);
    const RowIndex index(params.shape, team.row);
    const Load load{params.x.row<const T>(index), params.x.col};
    const TeamRow<V, GROUPS, decltype(team), Load> row(team, params.shape.cols, load);

    // Each thread's own maximum and sum (Milakov and Gimelshein, 2018). Columns of nothing but -inf add nothing, so
    // that they are no NaN to those of other threads; a row of nothing else becomes NaN when it is written.
    V most = -V(infinity()), sum = 0;
    row.each([&](const Group& values, int, int count) {
        const auto exists = [&](int i) { return ACCESS == WIDTH || i < count; };
        V highest = most;
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) highest = exists(i) ? fmax(highest, values[i]) : highest;
        const V base = base_of(highest);
        sum *= exponential(most - base);
        most = highest;
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) sum += exists(i) ? exponential(values[i] - base) : V(0);
    });
    const V own = most;
    most = team.max(own);
    sum = team.sum(sum == V(0) ? sum : sum * exponential(own - base_of(most)));
    const V factor = V(1) / sum;
    if (team.exists) {
        T* out = params.out.row<T>(index);
        row.each([&](const Group& values, int column, int count) {
            Group result;
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) result[i] = exponential(values[i] - most) * factor;
            write_columns<ACCESS>(result, out + column_offset<ACCESS>(column, params.out.col), params.out.col, count);
        });
    }
    team.finish();
}

}  // namespace rawops
