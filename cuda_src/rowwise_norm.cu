// Layer normalisation and RMS normalisation of rows, with the sum that a residual stream goes on with.
#include "common/rows.cuh"

namespace rawops {

struct NormParams {
    RowShape shape;
    RowArray x, residual, out, residual_out;
    const void *weight, *bias;  // null: not there
    int64_t weight_col, bias_col, whole_weights;  // whole: 16 bytes of them may move as one, whatever ACCESS is
    double eps;
};

// x + residual, which is added in V and not rounded.
template <class T, int ACCESS_> struct SumOfTwo {
    static constexpr int WIDTH = kGroup<T>, ACCESS = ACCESS_, WORDS = 2 * OneArray<T, ACCESS>::WORDS;
    struct Raw {
        Columns<T, WIDTH, ACCESS> x, residual;
    };
    OneArray<T, ACCESS> x, residual;

    __device__ Raw read(int column, int count) const { return {x.read(column, count), residual.read(column, count)}; }
    template <class V> __device__ void widen(V (&values)[WIDTH], const Raw& raw) const {
        V other[WIDTH];
        raw.x.widen_to(values);
        raw.residual.widen_to(other);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) values[i] += other[i];
    }
};

// A power of two whose product with the largest entry is near 1, where squares leave V's range; else 1.
template <class V> __device__ inline V unit_of(V largest) {
    if (!(largest > V(0)) || isinf(largest)) return V(1);
    constexpr int LAST = sizeof(V) == 8 ? 1022 : 126;
    return ldexp(V(1), clamp(-ilogb(largest), -LAST, LAST));
}

template <class T, int ACCESS, bool kResidual>
using NormLoad = typename Choose<kResidual, SumOfTwo<T, ACCESS>, OneArray<T, ACCESS>>::Type;

// What a row is normalised by: an entry becomes (entry * unit - mean - rest) * factor.
template <class V> struct RowNorm {
    V unit = 1, mean = 0, variance = 0, rest = 0;

    __device__ V distance(V value) const { return value * unit - mean; }
    __device__ V factor(double eps) const { return V(1) / sqrt(variance + V(eps) * unit * unit); }
};

// The mean and the variance, in the unit.
template <bool kCentered, class V, class Row> __device__ inline void measure(RowNorm<V>& norm, const Row& row, V cols) {
    if constexpr (kCentered) norm.mean = row.sum([&](V value) { return value * norm.unit; }) / cols;
    norm.variance = row.sum([&](V value) { return norm.distance(value) * norm.distance(value); }) / cols;
}

// Squares of bfloat16 and float32 overflow from 1e19 on, and vanish below 1e-19: such a row has a unit of its own. eps
// comes by reference, so that only who asks for it reads it.
template <bool kCentered, class V, class Row>
__device__ inline void measure_again(RowNorm<V>& norm, const Row& row, V cols, const double& eps) {
    constexpr V kTiny = sizeof(V) == 8 ? 1e-280 : 1e-28f;
    const bool is_lost = !(norm.variance < V(infinity())) || (norm.variance < kTiny && V(eps) == V(0));
    if (__any_sync(~0u, is_lost)) {
        V largest = 0;
        row.each_value([&](V value) { largest = fmax(largest, fabs(value)); });
        largest = row.team.max(largest);
        if (is_lost) norm.unit = unit_of(largest);
        measure<kCentered>(norm, row, cols);
    }
}

// Far from 0 a row may vary by less than its mean is rounded by: the distances have a mean of their own.
template <class V, class Row> __device__ inline void correct(RowNorm<V>& norm, const Row& row, V cols) {
    const bool is_far = norm.mean * norm.mean > V(16) * norm.variance;
    if (__any_sync(~0u, is_far)) {
        const V found = row.sum([&](V value) { return norm.distance(value); }) / cols;
        if (is_far) {
            norm.rest = found;
            norm.variance = norm.variance > found * found ? norm.variance - found * found : V(0);
        }
    }
}

// As many entries of 16 bits have a sum without rounding; that of two entries may take all bits of a float.
template <class T, bool kResidual>
constexpr int kExactSums = sizeof(T) >= 4 || kResidual ? 0 : is_same<T, __half> ? 1 << 13 : 1 << 16;

// kCentered: less the mean.
template <class T, class W, int ACCESS, int GROUPS, int TEAM, int CLUSTER, bool kCentered, bool kResidual>
__device__ inline void norm_rows(const NormParams& params) {
    using V = Accumulator<T>;
    constexpr int WIDTH = kGroup<T>;
    using Group = V[WIDTH];
    using Load = NormLoad<T, ACCESS, kResidual>;
    await_launch_before();
    start_next_launch();
    RowTeam<TEAM, CLUSTER> team(params.shape.rows);
    const RowIndex index(params.shape, team.row);
    Load load;
    const OneArray<T, ACCESS> x{params.x.row<const T>(index), params.x.col};
    if constexpr (kResidual) load = {x, {params.residual.row<const T>(index), params.residual.col}};
    else load = x;
    const TeamRow<V, GROUPS, decltype(team), Load> row(team, params.shape.cols, load);

    const W *weight = static_cast<const W*>(params.weight), *bias = static_cast<const W*>(params.bias);
    // A group a thread, which is few rows: weights come beside the row, not after it.
    constexpr bool kEarly = GROUPS == 1 && ACCESS == WIDTH;
    Columns<W, WIDTH, ACCESS> early_weight, early_bias;
    if constexpr (kEarly) {
        const int column = team.thread * WIDTH;
        if (weight && column < params.shape.cols) early_weight.read(weight + column);
        if (bias && column < params.shape.cols) early_bias.read(bias + column);
    }

    const V cols = V(params.shape.cols);
    RowNorm<V> norm;
    measure<kCentered>(norm, row, cols);
    if constexpr (!is_same<T, __half>) measure_again<kCentered>(norm, row, cols, params.eps);
    constexpr bool kExact = GROUPS > 0 && TEAM * CLUSTER * GROUPS * WIDTH <= kExactSums<T, kResidual>;
    constexpr bool kCorrected = kCentered && !kExact;
    if constexpr (kCorrected) {
        if (params.shape.cols > kExactSums<T, kResidual>) correct(norm, row, cols);
    }
    const V factor = norm.factor(params.eps);
    if (team.exists) {
        T* out = params.out.row<T>(index);
        T* sums = kResidual && params.residual_out.base ? params.residual_out.row<T>(index) : nullptr;
        // Rows that are not aligned have weights that are, as a rule.
        const auto read_weights = [&](Group& by, const W* from, int64_t col, int column, int count) {
            if (ACCESS != WIDTH && params.whole_weights && count >= WIDTH) read_columns<WIDTH>(by, from + column);
            else read_columns<ACCESS>(by, from + column_offset<ACCESS>(column, col), col, count);
        };
        row.each([&](const Group& values, int column, int count) {
            Group result, by;
            if (sums) {
                const int64_t col = params.residual_out.col;
                write_columns<ACCESS>(values, sums + column_offset<ACCESS>(column, col), col, count);
            }
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) {
                result[i] = norm.distance(values[i]);
                if constexpr (kCorrected) result[i] -= norm.rest;
                result[i] *= factor;
            }
            if (weight) {
                if constexpr (kEarly) early_weight.widen_to(by);
                else read_weights(by, weight, params.weight_col, column, count);
#pragma unroll
                for (int i = 0; i < WIDTH; ++i) result[i] *= by[i];
            }
            if (bias) {
                if constexpr (kEarly) early_bias.widen_to(by);
                else read_weights(by, bias, params.bias_col, column, count);
#pragma unroll
                for (int i = 0; i < WIDTH; ++i) result[i] += by[i];
            }
            const int64_t col = params.out.col;
            write_columns<ACCESS>(result, out + column_offset<ACCESS>(column, col), col, count);
        });
    }
    team.finish();
}

template <class T, int ACCESS, int GROUPS, class Team, bool kResidual>
constexpr int kNormBlocks = row_blocks<Team, NormLoad<T, ACCESS, kResidual>, Accumulator<T>, GROUPS>();

template <class T, class W, int ACCESS, int GROUPS, int TEAM, int CLUSTER, bool kCentered, bool kResidual,
          IfOneBlock<CLUSTER> = 0, class Team = RowTeam<TEAM, 1>>
__global__ void __launch_bounds__(Team::BLOCK, kNormBlocks<T, ACCESS, GROUPS, Team, kResidual>)
    rowwise_norm(const __grid_constant__ NormParams params) {
    norm_rows<T, W, ACCESS, GROUPS, TEAM, 1, kCentered, kResidual>(params);
}

template <class T, class W, int ACCESS, int GROUPS, int TEAM, int CLUSTER, bool kCentered, bool kResidual,
          IfCluster<CLUSTER> = 0, class Team = RowTeam<TEAM, CLUSTER>>
__global__ void __launch_bounds__(Team::BLOCK, kNormBlocks<T, ACCESS, GROUPS, Team, kResidual>) ROW_BLOCKS(CLUSTER)
    rowwise_norm(const __grid_constant__ NormParams params) {
    norm_rows<T, W, ACCESS, GROUPS, TEAM, CLUSTER, kCentered, kResidual>(params);
}

}  // namespace rawops
