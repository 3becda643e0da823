// Sums of rows, or of parts of them.
#include "common/rows.cuh"

namespace rawops {

struct SumParams {
    RowShape shape;
    RowArray x, out;  // out has a column for each part
    int span;  // the columns of a part
};

// Whole groups leave room for all threads that an SM can have.
template <class T, int ACCESS, class Team> __host__ __device__ constexpr int sum_blocks() {
    return (ACCESS == kGroup<T> && sizeof(T) <= 4 ? 2048 : 1024) / Team::BLOCK;
}

// A team takes part blockIdx.y of a row.
template <class T, class Out, int ACCESS, int TEAM, int CLUSTER>
__global__ void __launch_bounds__(RowTeam<TEAM, CLUSTER>::BLOCK, sum_blocks<T, ACCESS, RowTeam<TEAM, CLUSTER>>())
    ROW_BLOCKS(CLUSTER) rowwise_sum(const __grid_constant__ SumParams params) {
    using V = Accumulator<T>;
    using Load = OneArray<T, ACCESS>;
    await_launch_before();
    start_next_launch();
    RowTeam<TEAM, CLUSTER> team(params.shape.rows);
    const RowIndex index(params.shape, team.row);
    const int first = blockIdx.y * params.span;
    const Load load{params.x.row<const T>(index) + first * params.x.col, params.x.col};
    const TeamRow<V, 0, decltype(team), Load> row(team, min_of(params.shape.cols - first, params.span), load);
    const V sum = row.sum([](V value) { return value; });
    if (team.exists && team.thread == 0) params.out.row<Out>(index)[blockIdx.y] = narrow<Out>(sum);
    team.finish();
}

}  // namespace rawops
