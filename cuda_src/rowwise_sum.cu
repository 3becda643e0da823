// Sums of rows, or of parts of them.
#include "common/rows.cuh"

namespace rawops {

struct SumParams {
    RowShape shape;
    RowArray x, out;  // out has a column for each part
    int span;  // the columns of a part
};

// Groups that a thread has on their way before it adds the first.
template <class T, int ACCESS> constexpr int kAhead = ACCESS == kGroup<T> ? 4 : 2;

// On an SM, at least: without a number the compiler makes room for all threads that an SM could have, and has one load
// on its way at a time for it.
constexpr int kSumBlocks = 1;

// In pairs.
template <class V, int N> __device__ inline V sum_of(V (&values)[N]) {
#pragma unroll
    for (int half = N / 2; half > 0; half /= 2) {
#pragma unroll
        for (int i = 0; i < half; ++i) values[i] += values[i + half];
    }
    return values[0];
}

// A team takes part blockIdx.y of a row.
template <class T, class Out, int ACCESS, int TEAM, int CLUSTER>
__device__ inline void sum_rows(const SumParams& params) {
    using V = Accumulator<T>;
    using Load = OneArray<T, ACCESS>;
    constexpr int WIDTH = Load::WIDTH, STEP = TEAM * CLUSTER * WIDTH, AHEAD = kAhead<T, ACCESS>;
    await_launch_before();
    start_next_launch();
    RowTeam<TEAM, CLUSTER> team(params.shape.rows);
    const RowIndex index(params.shape, team.row);
    const int first = blockIdx.y * params.span, cols = min_of(params.shape.cols - first, params.span);
    const Load load{params.x.row<const T>(index) + first * params.x.col, params.x.col};
    const int last = (cols - 1) / WIDTH * WIDTH;
    V total = 0;
#pragma unroll 1
    for (unsigned begin = team.thread * WIDTH; begin < unsigned(cols); begin += AHEAD * STEP) {
        // Past the end the last group is read again, and not added: no load waits for a branch.
        typename Load::Raw held[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int column = begin + i * STEP < unsigned(cols) ? int(begin + i * STEP) : last;
            held[i] = load.read(column, cols - column);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            V values[WIDTH];
            load.widen(values, held[i]);
            const V sum = sum_of(values);
            if (begin + i * STEP < unsigned(cols)) total += sum;
        }
    }
    total = team.sum(total);
    if (team.exists && team.thread == 0) params.out.row<Out>(index)[blockIdx.y] = narrow<Out>(total);
    team.finish();
}

template <class T, class Out, int ACCESS, int TEAM, int CLUSTER, IfOneBlock<CLUSTER> = 0>
__global__ void __launch_bounds__(RowTeam<TEAM, 1>::BLOCK, kSumBlocks)
    rowwise_sum(const __grid_constant__ SumParams params) {
    sum_rows<T, Out, ACCESS, TEAM, 1>(params);
}

template <class T, class Out, int ACCESS, int TEAM, int CLUSTER, IfCluster<CLUSTER> = 0>
__global__ void __launch_bounds__(RowTeam<TEAM, CLUSTER>::BLOCK, kSumBlocks) ROW_BLOCKS(CLUSTER)
    rowwise_sum(const __grid_constant__ SumParams params) {
    sum_rows<T, Out, ACCESS, TEAM, CLUSTER>(params);
}

}  // namespace rawops
