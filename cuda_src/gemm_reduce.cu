// The second half of split-K: adds the partial results of all slices in a fixed order and finishes D.
#include "common/gemm_problem.cuh"
#include "common/launches.cuh"

namespace rawops {

// Neighbouring lanes have two columns of two rows each; now they have four columns of one, the even one of the upper.
template <class V> __device__ inline void swap_rows(V (&value)[4], unsigned lanes) {
    const int odd = threadIdx.x % 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const V own = odd ? value[2 + i] : value[i];
        const V other = __shfl_xor_sync(lanes, odd ? value[i] : value[2 + i], 1);
        value[i] = odd ? other : own;
        value[2 + i] = odd ? own : other;
    }
}

// partials: (splits, batches, M, row_stride) in the accumulator's type. LANES threads share the slices of one group of
// columns, and the first finishes it. Neighbouring threads have neighbouring groups, so that they read whole lines.
// kFragments: no rows, but 16 rows x 8 columns after each other as SumsOut in hopper_finish.cuh leaves them, in
// one batch; M and the columns are rounded up to that.
//
// The compiler would do with 32 registers, and have each load wait for the one before: hence the blocks of an SM.
template <class T, class Out, int LANES, int kActivation, bool kFragments>
__global__ void __launch_bounds__(128, 4)
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
    int m, n, batch = 0;
    int64_t at, stride, up_at = shape.epilogue.cols;
    bool exists;
    if constexpr (kFragments) {
        const int item = blockIdx.x * GROUPS + own, fragment = item / kWarpSize, corner = item % kWarpSize;
        const int wide = ceil_div(shape.epilogue.cols, 8), down = fragment / wide, across = fragment % wide;
        m = down * 16 + corner / 4 + corner % 2 * 8;
        n = across * 8 + corner % 4 / 2 * 4;
        at = int64_t(down) * 16 * row_stride + across * 128 + corner * 4;
        up_at *= 16;
        stride = int64_t(ceil_div(shape.M, 16)) * 16 * row_stride;
        exists = down * 16 < shape.M;
    } else {
        const int64_t item = int64_t(blockIdx.x) * GROUPS + own;
        const int64_t row = item / groups;  // of all batches
        n = int(item % groups) * WIDTH;
        batch = int(row / shape.M);
        m = int(row % shape.M);
        at = row * row_stride + n;
        stride = int64_t(shape.batches) * shape.M * row_stride;
        exists = batch < shape.batches;
    }

    // What can be is done before the wait, after which all warps of an SM compute at once.
    int64_t step = LANES * stride;
    at += lane * stride;
    const int cols = shape.epilogue.cols, count = min_of(cols - n, WIDTH);
    int index[3];
    shape.batch_index(batch, index);
    if (call.alpha.pointer != nullptr || call.epilogue.c != nullptr) await_launch_before();
    const V alpha = V(call.alpha.read());
    const Epilogue epilogue(call.epilogue, shape.epilogue, index, alpha);
    Out* const out = static_cast<Out*>(call.epilogue.out);
    int64_t to = epilogue.place(m, n) - out;
    int is_plain = epilogue.is_plain() && count == WIDTH && m < shape.M;
    asm volatile("" : "+l"(at), "+l"(step), "+l"(to), "+r"(is_plain));  // or the compiler computes them after it
    auto sum = [&](Group& total, int64_t from) {
        Sum mine = {};
        const bool whole = kFragments || (count == WIDTH && from % WIDTH == 0);
        const int width = kFragments ? WIDTH : count;
        const V* source = partials + at + from;
#pragma unroll 1
        for (int split = exists ? lane : splits; split < splits; split += AT_A_TIME * LANES) {
            Group part[AT_A_TIME];
#pragma unroll
            for (int i = 0; i < AT_A_TIME; ++i, source += step) {
                read_group<V>(part[i], source, 0, 1, split + i * LANES < splits ? width : 0, whole);
            }
#pragma unroll
            for (int i = 0; i < AT_A_TIME * WIDTH; ++i) mine.data[i % WIDTH] += part[i / WIDTH][i % WIDTH];
        }
        if constexpr (LANES == 1) {
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) total[i] = mine.data[i];
            return;
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
    sum(value, 0);
    if constexpr (Epilogue::kGated) {
        __syncthreads();
        sum(up, up_at);
    }

    if (!exists || lane != 0) return;
    if constexpr (kFragments) {
        constexpr unsigned ALL = GROUPS < kWarpSize ? (1u << GROUPS % kWarpSize) - 1 : ~0u;
        swap_rows(value, ALL);
        if constexpr (Epilogue::kGated) swap_rows(up, ALL);
    }
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
