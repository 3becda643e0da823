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

// Where a group of columns lies, in D and in the partials: `stride` elements from slice to slice, `up_at` from a gate
// to its up.
struct ReducePlace {
    int m, n, batch = 0;
    int64_t at, stride, up_at;
    bool exists;
};

// Of rows.
__device__ inline void find_in_rows(ReducePlace& place, const GemmShape& shape, int64_t item, int width,
                                    int row_stride) {
    const int groups = ceil_div(shape.epilogue.cols, width);
    const int64_t row = item / groups;  // of all batches
    place.n = int(item % groups) * width;
    place.batch = int(row / shape.M);
    place.m = int(row % shape.M);
    place.at = row * row_stride + place.n;
    place.stride = int64_t(shape.batches) * shape.M * row_stride;
    place.up_at = shape.epilogue.cols;
    place.exists = place.batch < shape.batches;
}

// Of fragments of 16 rows x 8 columns.
__device__ inline void find_in_fragments(ReducePlace& place, const GemmShape& shape, int item, int row_stride) {
    const int fragment = item / kWarpSize, corner = item % kWarpSize;
    const int wide = ceil_div(shape.epilogue.cols, 8), down = fragment / wide, across = fragment % wide;
    place.m = down * 16 + corner / 4 + corner % 2 * 8;
    place.n = across * 8 + corner % 4 / 2 * 4;
    place.at = int64_t(down) * 16 * row_stride + across * 128 + corner * 4;
    place.stride = int64_t(ceil_div(shape.M, 16)) * 16 * row_stride;
    place.up_at = int64_t(shape.epilogue.cols) * 16;
    place.exists = down * 16 < shape.M;
}

// Adds up a thread's slices of a group of columns: at source, source + step, ... AT_A_TIME of them are under way.
template <int AT_A_TIME, int LANES, class V, int WIDTH>
__device__ inline void add_slices(Vector<V, WIDTH>& sum, const V* source, int64_t step, int first, int splits,
                                  int width, bool whole) {
#pragma unroll 1
    for (int split = first; split < splits; split += AT_A_TIME * LANES) {
        V part[AT_A_TIME][WIDTH];
#pragma unroll
        for (int i = 0; i < AT_A_TIME; ++i, source += step) {
            read_group<V>(part[i], source, 0, 1, split + i * LANES < splits ? width : 0, whole);
        }
#pragma unroll
        for (int i = 0; i < AT_A_TIME * WIDTH; ++i) sum.data[i % WIDTH] += part[i / WIDTH][i % WIDTH];
    }
}

// Writes what has no epilogue but alpha.
template <class Out, class V, int WIDTH> __device__ inline void write_plain(Out* to, const V (&value)[WIDTH], V alpha) {
    Vector<Out, WIDTH> group;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) group.data[i] = narrow<Out>(value[i] * alpha);
    *reinterpret_cast<Vector<Out, WIDTH>*>(to) = group;
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
    const int own = threadIdx.x % GROUPS, lane = threadIdx.x / GROUPS;
    ReducePlace place;
    if constexpr (kFragments) find_in_fragments(place, shape, blockIdx.x * GROUPS + own, row_stride);
    else find_in_rows(place, shape, int64_t(blockIdx.x) * GROUPS + own, WIDTH, row_stride);

    // What can be is done before the wait, after which all warps of an SM compute at once.
    int64_t step = LANES * place.stride;
    place.at += lane * place.stride;
    const int cols = shape.epilogue.cols, count = min_of(cols - place.n, WIDTH);
    int index[3];
    shape.batch_index(place.batch, index);
    if (call.alpha.pointer != nullptr || call.epilogue.c != nullptr) await_launch_before();
    const V alpha = V(call.alpha.read());
    const Epilogue epilogue(call.epilogue, shape.epilogue, index, alpha);
    Out* const out = static_cast<Out*>(call.epilogue.out);
    int64_t to = epilogue.place(place.m, place.n) - out;
    int is_plain = epilogue.is_plain() && count == WIDTH && place.m < shape.M;
    asm volatile("" : "+l"(place.at), "+l"(step), "+l"(to), "+r"(is_plain));  // or the compiler computes them after it
    auto sum = [&](Group& total, int64_t from) {
        Sum mine = {};
        const bool whole = kFragments || (count == WIDTH && from % WIDTH == 0);
        const int width = kFragments ? WIDTH : count;
        const V* source = partials + place.at + from;
        add_slices<AT_A_TIME, LANES>(mine, source, step, place.exists ? lane : splits, splits, width, whole);
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
        sum(up, place.up_at);
    }

    if (!place.exists || lane != 0) return;
    if constexpr (kFragments) {
        constexpr unsigned ALL = GROUPS < kWarpSize ? (1u << GROUPS % kWarpSize) - 1 : ~0u;
        swap_rows(value, ALL);
        if constexpr (Epilogue::kGated) swap_rows(up, ALL);
    }
    if (is_plain) write_plain(out + to, value, alpha);
    else epilogue.finish(place.m, place.n, value, up);
}

}  // namespace rawops
