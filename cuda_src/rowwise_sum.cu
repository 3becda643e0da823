// Sums of rows.
#include "common/rows.cuh"

namespace rawops {

struct SumParams {
    RowShape shape;
    RowArray x, out;  // out has one column
};

template <class T, class Out, int ACCESS, int TEAM, int CLUSTER>
__global__ void __launch_bounds__(RowTeam<TEAM, CLUSTER>::BLOCK) ROW_BLOCKS(CLUSTER)
    rowwise_sum(const __grid_constant__ SumParams params) {
    using V = Accumulator<T>;
    using Load = OneArray<T, ACCESS>;
    await_launch_before();
    start_next_launch();
    RowTeam<TEAM, CLUSTER> team(params.shape.rows);
    const RowIndex index(params.shape, team.row);
    const Load load{params.x.row<const T>(index), params.x.col};
    const TeamRow<V, 0, decltype(team), Load> row(team, params.shape.cols, load);
    const V sum = row.sum([](V value) { return value; });
    if (team.exists && team.thread == 0) *params.out.row<Out>(index) = narrow<Out>(sum);
    team.finish();
}

}  // namespace rawops
