// Rotary positions (RoPE): each pair of columns of a query or key turned by an angle that grows with its position.
#include "common/rows.cuh"

namespace rawops {

constexpr int kMostPairs = 128;
constexpr int kRopeThreads = 128;

struct RopeParams {
    RowShape shape;  // tokens for rows; cols is head_dim
    RowArray q, k, q_out, k_out;
    int64_t q_step, k_step, q_out_step, k_out_step;  // from head to head
    RowArray positions;
    const void *cos, *sin;  // (table_rows, half), or null: of the position itself
    int64_t cos_step, cos_col, sin_step, sin_col, table_rows;
    int wide_positions;  // int64 instead of int32
    int q_heads, k_heads, half;
    int copied;  // columns past the pairs, which are taken as they are
    double turns[kMostPairs];  // of each pair from one position to the next, in whole turns
};

// A block takes a token. A thread takes WIDTH pairs of a head: neighbours if kInterleaved, else `half` columns apart.
template <class T, class Table, int WIDTH, bool kInterleaved>
__global__ void __launch_bounds__(kRopeThreads) rowwise_rope(const __grid_constant__ RopeParams params) {
    using V = Accumulator<T>;
    __shared__ V cosines[kMostPairs], sines[kMostPairs];
    await_launch_before();
    start_next_launch();
    const RowShape& shape = params.shape;
    const RowIndex token(shape, blockIdx.x);
    const int64_t position = params.wide_positions ? *params.positions.row<const int64_t>(token)
                                                   : *params.positions.row<const int>(token);
    for (int pair = threadIdx.x; pair < params.half; pair += kRopeThreads) {
        V cos, sin;
        if (params.cos == nullptr) {
            // The whole turns go first, in float64: what is left is exact to 1e-9 of a turn at position 1e7.
            const double angle = double(position) * params.turns[pair];
            sincospi(V(2 * (angle - rint(angle))), &sin, &cos);
        } else if (position >= 0 && position < params.table_rows) {
            cos = widen(static_cast<const Table*>(params.cos)[position * params.cos_step + pair * params.cos_col]);
            sin = widen(static_cast<const Table*>(params.sin)[position * params.sin_step + pair * params.sin_col]);
        } else {
            cos = sin = V(nanf(""));
        }
        cosines[pair] = cos;
        sines[pair] = sin;
    }
    __syncthreads();

    const int turned = params.half / WIDTH, pieces = turned + ceil_div(params.copied, WIDTH);
    for (int task = threadIdx.x; task < (params.q_heads + params.k_heads) * pieces; task += kRopeThreads) {
        const int piece = task % pieces;
        int head = task / pieces;
        const bool is_key = head >= params.q_heads;
        if (is_key) head -= params.q_heads;
        const RowArray &from = is_key ? params.k : params.q, &to = is_key ? params.k_out : params.q_out;
        const T* source = from.row<const T>(token) + head * (is_key ? params.k_step : params.q_step);
        T* target = to.row<T>(token) + head * (is_key ? params.k_out_step : params.q_out_step);
        V first[WIDTH], second[WIDTH];
        if (piece >= turned) {
            const int column = 2 * params.half + (piece - turned) * WIDTH, end = min_of(column + WIDTH, shape.cols);
            for (int i = column; i < end; ++i) target[i * to.col] = source[i * from.col];
            continue;
        }
        const int pair = piece * WIDTH, one = kInterleaved ? 2 * pair : pair;
        const int other = kInterleaved ? one + WIDTH : one + params.half;
        read_columns<WIDTH>(first, source + one * from.col);
        read_columns<WIDTH>(second, source + other * from.col);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            // Interleaved, the pairs are the neighbours in `first` followed by `second`.
            V &x = kInterleaved ? (2 * i < WIDTH ? first[2 * i % WIDTH] : second[2 * i % WIDTH]) : first[i];
            V &y = kInterleaved ? (2 * i + 1 < WIDTH ? first[(2 * i + 1) % WIDTH] : second[(2 * i + 1) % WIDTH])
                                : second[i];
            const V cos = cosines[pair + i], sin = sines[pair + i], before = x;
            x = before * cos - y * sin;
            y = y * cos + before * sin;
        }
        write_columns<WIDTH>(first, target + one * to.col);
        write_columns<WIDTH>(second, target + other * to.col);
    }
}

}  // namespace rawops
