// The second half of split-K: adds the partial results of all slices in a fixed order and finishes D.
#include "common/gemm_problem.cuh"
#include "common/launches.cuh"

namespace rawops {

// partials: (splits, batches, M, row_stride) in the accumulator's type. LANES threads share the slices of one group of
// columns, and the first finishes it.
template <class T, class Out, int LANES, int kActivation>
__global__ void __launch_bounds__(128)
    gemm_reduce(const __grid_constant__ GemmParams params,
                const Accumulator<T>* partials, int splits, int row_stride) {
    start_next_launch();
    using Epilogue = Epilogue<T, Out, kActivation>;
    using Group = typename Epilogue::Group;
    constexpr int WIDTH = Epilogue::WIDTH;
    const GemmCall& call = params.call;
    const GemmShape& shape = params.shape;
    const int groups = ceil_div(shape.epilogue.cols, WIDTH);
    const int64_t item = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / LANES;
    const int64_t row = item / groups;  // of all batches
    const int n = int(item % groups) * WIDTH, batch = int(row / shape.M), m = int(row % shape.M);
    const int lane = threadIdx.x % LANES;
    const bool exists = batch < shape.batches;

    const int64_t stride = int64_t(shape.batches) * shape.M * row_stride;
    const int cols = shape.epilogue.cols, count = min_of(cols - n, WIDTH);
    auto sum = [&](Group& total, int col) {
#pragma unroll 4
        for (int split = exists ? lane : splits; split < splits; split += LANES) {
            Group part;
            const int64_t offset = split * stride + row * row_stride + col;
            read_group<Accumulator<T>>(part, partials, offset, 1, count, col % WIDTH == 0);
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) total[i] += part[i];
        }
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
#pragma unroll
            for (int distance = 1; distance < LANES; distance *= 2) {
                total[i] += __shfl_xor_sync(~0u, total[i], distance);
            }
        }
    };
    await_launch_before();
    Group value = {}, up = {};
    sum(value, n);
    if constexpr (Epilogue::kGated) sum(up, cols + n);

    if (!exists || lane != 0) return;
    int index[3];
    shape.batch_index(batch, index);
    Epilogue(call.epilogue, shape.epilogue, index, Accumulator<T>(call.alpha.read())).finish(m, n, value, up);
}

}  // namespace rawops
