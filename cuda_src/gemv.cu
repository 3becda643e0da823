// A single row times a matrix, D = a @ b with M = 1, where b is contiguous along K: at the speed at which the memory
// delivers b. It is read once and shared with nobody: what matters is that every SM has enough wide loads on the way,
// whatever the shape. Sums are float32 (float64 for float64), in a fixed order. blockIdx.z is the batch.
#include "common/gemm_problem.cuh"
#include "common/launches.cuh"

namespace rawops {

// Elements that lie next to each other along K, 16 bytes of them.
template <class T> struct Run {
    static constexpr int LENGTH = 16 / int(sizeof(T));
    Vector<T, LENGTH> values;

    // `valid` of them exist, and nothing behind is read.
    __device__ void load(const T* source, int valid) {
        if (valid >= LENGTH) {
            values = *reinterpret_cast<const Vector<T, LENGTH>*>(source);
        } else {
#pragma unroll
            for (int i = 0; i < LENGTH; ++i) values.data[i] = i < valid ? source[i] : narrow<T>(Accumulator<T>(0));
        }
    }
    // The same for what is read once: the L1 keeps nothing of it.
    __device__ void stream(const T* source, int valid) {
        if (valid < LENGTH) return load(source, valid);
        uint4 words;
        asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                     : "l"(source));
        values = *reinterpret_cast<const Vector<T, LENGTH>*>(&words);
    }
    __device__ Accumulator<T> operator[](int i) const { return widen(values.data[i]); }
};

// A run of a and those of the columns beside it.
template <class T, int COLUMNS> struct Runs {
    Run<T> a, b[COLUMNS];

    __device__ void load(const T* row, const T* const (&columns)[COLUMNS], int k, int valid) {
        a.load(row + k, valid);
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) b[i].stream(columns[i] + k, valid);
    }
    __device__ void add_products(Accumulator<T> (&sum)[COLUMNS]) const {
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) {
#pragma unroll
            for (int j = 0; j < Run<T>::LENGTH; ++j) sum[i] += a[j] * b[i][j];
        }
    }
};

// Leaves the sums over the lanes of a warp.
template <class V, int COUNT> __device__ inline void leave_sums(V (&sum)[COUNT], V (&partial)[COUNT], int lane) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
#pragma unroll
        for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
            sum[i] += __shfl_xor_sync(~0u, sum[i], distance);
        }
        if (lane == 0) partial[i] = sum[i];
    }
}

constexpr int kFirstBlocks = 400;  // three for each SM of an H200, which may come while the launch before still runs

// SPLIT warps share the K of a group of columns (of swiglu, one of gate and one of up), and each has the loads of
// UNROLL steps under way.
template <class T, class Out, int SPLIT, int UNROLL, int kActivation>
__global__ void __launch_bounds__(256) gemv(const __grid_constant__ GemmParams params) {
    using Epilogue = Epilogue<T, Out, kActivation>;
    using V = Accumulator<T>;
    constexpr int WIDTH = Epilogue::WIDTH, COLUMNS = Epilogue::kGated ? 2 * WIDTH : WIDTH, RUN = Run<T>::LENGTH;
    constexpr int GROUPS = 256 / kWarpSize / SPLIT;               // of a block
    constexpr int EXTENT = SPLIT * kWarpSize * RUN;               // of K in a step of all its warps
    // The L2 is asked for the lines of 128 bytes that a block begins with, while it waits for the launch before.
    constexpr bool kAsksAhead = sizeof(T) == 2 && !Epilogue::kGated;
    constexpr int LINE = 128 / int(sizeof(T)), LINES = UNROLL * EXTENT / LINE;  // of a column
    __shared__ V partial[GROUPS][SPLIT][COLUMNS];
    start_next_launch();
    const GemmShape& shape = params.shape;
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, cols = shape.epilogue.cols;
    const int group = GROUPS == 1 ? 0 : warp / SPLIT, part = GROUPS == 1 ? warp : warp % SPLIT;
    const int n = (int(blockIdx.x) * GROUPS + group) * WIDTH;

    for (int batch = blockIdx.z; batch < shape.batches; batch += gridDim.z) {
        int index[3];
        shape.batch_index(batch, index);
        const T* a = static_cast<const T*>(params.call.a) + shape.a.offset(index);
        const T* b = static_cast<const T*>(params.call.b) + shape.b.offset(index);
        if (kAsksAhead && batch == blockIdx.z && int(blockIdx.x) < kFirstBlocks) {
#pragma unroll 1
            for (int i = threadIdx.x; i < GROUPS * WIDTH * LINES; i += 256) {
                const int column = int(blockIdx.x) * GROUPS * WIDTH + i / LINES, k = i % LINES * LINE;
                if (column < cols && k < shape.K) prefetch_line(b + column * shape.b.col + k);
            }
        }
        const T* columns[COLUMNS];  // those past the last one repeat it
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) {
            columns[i] = b + (min_of(n + i % WIDTH, cols - 1) + (i < WIDTH ? 0 : cols)) * shape.b.col;
        }
        if (batch == blockIdx.z) await_launch_before();
        const V alpha = V(params.call.alpha.read());
        const int K = alpha == V(0) ? 0 : shape.K;  // 0: a and b are not read
        V sum[COLUMNS] = {};
        int k = (part * kWarpSize + lane) * RUN;
#pragma unroll 1
        for (; k + (UNROLL - 1) * EXTENT + RUN <= K; k += UNROLL * EXTENT) {
            Runs<T, COLUMNS> runs[UNROLL];
#pragma unroll
            for (int i = 0; i < UNROLL; ++i) runs[i].load(a, columns, k + i * EXTENT, RUN);
#pragma unroll
            for (int i = 0; i < UNROLL; ++i) runs[i].add_products(sum);
        }
#pragma unroll 1
        for (; k < K; k += EXTENT) {
            Runs<T, COLUMNS> runs;
            runs.load(a, columns, k, K - k);
            runs.add_products(sum);
        }
        leave_sums(sum, partial[group][part], lane);
        __syncthreads();
        if (lane == 0 && part == 0) {
            V value[WIDTH] = {}, up[WIDTH] = {};
#pragma unroll
            for (int i = 0; i < SPLIT * WIDTH; ++i) {
                value[i % WIDTH] += partial[group][i / WIDTH][i % WIDTH];
                up[i % WIDTH] += partial[group][i / WIDTH][COLUMNS - WIDTH + i % WIDTH];
            }
            Epilogue(params.call.epilogue, shape.epilogue, index, alpha).finish(0, n, value, up);
        }
        __syncthreads();
    }
}

}  // namespace rawops
