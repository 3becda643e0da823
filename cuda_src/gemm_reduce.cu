// The second half of split-K: adds the partial results of all slices in a fixed order and finishes D.
#include "common/gemm_problem.cuh"
#include "common/launches.cuh"

namespace rawops {

// partials: (splits, batches, M, row_stride) in the accumulator's type. LANES threads share the slices of one group of
// columns, and the first finishes it. Neighbouring threads have neighbouring groups, so that they read whole lines.
template <class T, class Out, int LANES, int kActivation>
__global__ void __launch_bounds__(128)
    gemm_reduce(const __grid_constant__ GemmParams params,
                const Accumulator<T>* partials, int splits, int row_stride) {
    start_next_launch();
    using Epilogue = Epilogue<T, Out, kActivation>;
    using Group = typename Epilogue::Group;
    using Sum = Vector<typename Epilogue::Value, Epilogue::WIDTH>;
    constexpr int WIDTH = Epilogue::WIDTH, GROUPS = 128 / LANES;  // of a block
    __shared__ Sum parts[LANES][GROUPS];
    const GemmCall& call = params.call;
    const GemmShape& shape = params.shape;
    const int groups = ceil_div(shape.epilogue.cols, WIDTH), own = threadIdx.x % GROUPS, lane = threadIdx.x / GROUPS;
    const int64_t item = int64_t(blockIdx.x) * GROUPS + own;
    const int64_t row = item / groups;  // of all batches
    const int n = int(item % groups) * WIDTH, batch = int(row / shape.M), m = int(row % shape.M);
    const bool exists = batch < shape.batches;

    const int64_t stride = int64_t(shape.batches) * shape.M * row_stride;
    const int cols = shape.epilogue.cols, count = min_of(cols - n, WIDTH);
    auto sum = [&](Group& total, int col) {
        Sum mine = {};
#pragma unroll 4
        for (int split = exists ? lane : splits; split < splits; split += LANES) {
            Group part;
            const int64_t offset = split * stride + row * row_stride + col;
            read_group<Accumulator<T>>(part, partials, offset, 1, count, col % WIDTH == 0);
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) mine.data[i] += part[i];
        }
        parts[lane][own] = mine;
        __syncthreads();
        if (lane > 0) return;
#pragma unroll
        for (int other = 0; other < LANES; ++other) {
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) total[i] += parts[other][own].data[i];
        }
    };
    await_launch_before();
    Group value = {}, up = {};
    sum(value, n);
    if constexpr (Epilogue::kGated) {
        __syncthreads();
        sum(up, cols + n);
    }

    if (!exists || lane != 0) return;
    int index[3];
    shape.batch_index(batch, index);
    Epilogue(call.epilogue, shape.epilogue, index, Accumulator<T>(call.alpha.read())).finish(m, n, value, up);
}

}  // namespace rawops
