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
    using V = Accumulator<T>;
    using Sum = Vector<V, Epilogue::WIDTH>;
    constexpr int WIDTH = Epilogue::WIDTH, GROUPS = 128 / LANES;  // of a block
    constexpr int AT_A_TIME = 4;                                  // slices that a thread has under way
    __shared__ Sum parts[LANES][GROUPS];
    const GemmCall& call = params.call;
    const GemmShape& shape = params.shape;
    const int groups = ceil_div(shape.epilogue.cols, WIDTH), own = threadIdx.x % GROUPS, lane = threadIdx.x / GROUPS;
    const int64_t item = int64_t(blockIdx.x) * GROUPS + own;
    const int64_t row = item / groups;  // of all batches
    const int n = int(item % groups) * WIDTH, batch = int(row / shape.M), m = int(row % shape.M);
    const bool exists = batch < shape.batches;

    // What can be is done before the wait, after which all warps of an SM compute at once.
    const int64_t stride = int64_t(shape.batches) * shape.M * row_stride;
    int64_t step = LANES * stride, at = lane * stride + row * row_stride;
    const int cols = shape.epilogue.cols, count = min_of(cols - n, WIDTH);
    int index[3];
    shape.batch_index(batch, index);
    if (call.alpha.pointer != nullptr || call.epilogue.c != nullptr) await_launch_before();
    const V alpha = V(call.alpha.read());
    const Epilogue epilogue(call.epilogue, shape.epilogue, index, alpha);
    Out* const out = static_cast<Out*>(call.epilogue.out);
    int64_t to = epilogue.place(m, n) - out;
    int is_plain = epilogue.is_plain() && count == WIDTH;
    asm volatile("" : "+l"(at), "+l"(step), "+l"(to), "+r"(is_plain));  // or the compiler computes them after it
    auto sum = [&](Group& total, int col) {
        Sum mine = {};
        const bool whole = count == WIDTH && col % WIDTH == 0;
        const V* source = partials + at + col;
#pragma unroll 1
        for (int split = exists ? lane : splits; split < splits; split += AT_A_TIME * LANES) {
            Group part[AT_A_TIME];
#pragma unroll
            for (int i = 0; i < AT_A_TIME; ++i, source += step) {
                read_group<V>(part[i], source, 0, 1, split + i * LANES < splits ? count : 0, whole);
            }
#pragma unroll
            for (int i = 0; i < AT_A_TIME * WIDTH; ++i) mine.data[i % WIDTH] += part[i / WIDTH][i % WIDTH];
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
    if (is_plain) {
        Vector<Out, WIDTH> group;
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) group.data[i] = narrow<Out>(value[i] * alpha);
        *reinterpret_cast<Vector<Out, WIDTH>*>(out + to) = group;
        return;
    }
    epilogue.finish(m, n, value, up);
}

}  // namespace rawops
