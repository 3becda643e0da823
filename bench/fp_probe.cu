// Temporary: gemm_sm80 with a main loop that reads the first fragments of a stage while it still multiplies the last.
#include "common/gemm_problem.cuh"
#include "common/mma_tile.cuh"

namespace rawops {

// float64 with atoms of 4 along K: half the registers for fragments.
struct F64 {
    double x;
};
template <> struct AccumulatorOf<F64> { using Type = double; };
template <> struct MmaAtom<F64> {
    using Register = double;
    static constexpr int K = 4;
    static __device__ void multiply(double (&d)[4], const double (&a)[2], double b) {
        asm volatile(
            "mma.sync.aligned.m16n8k4.row.col.f64.f64.f64.f64 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
            : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
            : "d"(a[0]), "d"(a[1]), "d"(b));
    }
};
template <class Tile, bool kKMajor, bool kPaired> struct FragmentReader<F64, Tile, kKMajor, kPaired> {
    int lane_offset;
    __device__ FragmentReader(int mn_begin, int lane)
        : lane_offset(kKMajor ? Tile::offset(mn_begin + lane / 4, lane % 4)
                              : Tile::offset(lane % 4, mn_begin + lane / 4)) {}
    __device__ void read(double (&r)[2], uint32_t tile, int mn_step, int k_step) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int mn = mn_step * 16 + i * 8, k = k_step * 4;
            load_shared(r[i], tile + (kKMajor ? Tile::moved(lane_offset, mn, k) : Tile::moved(lane_offset, k, mn)));
        }
    }
    static __device__ void round(double (&)[2]) {}
};

template <class Tile, bool kBKMajor, bool kPaired, bool kInPlace>
__device__ inline void multiply_tile_ahead(typename Tile::Accumulators& acc, typename Tile::LoaderA& loader_a,
                                           typename Tile::LoaderB& loader_b, uint32_t ring, int k_count, int thread) {
    using Register = typename Tile::Register;
    static_assert(Tile::ATOMS_K % 2 == 0, "fragments alternate between two sets, across stages too");
    const int warp = thread / kWarpSize, lane = thread % kWarpSize;
    const typename Tile::ReaderA reader_a(warp / Tile::WARPS_N * Tile::WARP_M, lane);
    const FragmentReader<typename Tile::T, typename Tile::LoaderB::Tile, kBKMajor, kPaired> reader_b(warp % Tile::WARPS_N * Tile::WARP_N, lane);
    constexpr int REGISTERS = is_same<typename Tile::T, F64> ? 2 : 4;
    Register a[2][Tile::ATOMS_M][REGISTERS], b[2][Tile::ATOMS_N / 2][REGISTERS];

    auto fetch = [&](uint32_t stage, int block) {
        const int k_left = k_count - block * Tile::BLOCK_K;
        loader_a.fetch(stage, k_left);
        loader_b.fetch(stage + Tile::A_BYTES, k_left);
    };
    auto store = [&](uint32_t stage) {
        loader_a.store(stage);
        loader_b.store(stage + Tile::A_BYTES);
    };
    auto read_a = [&](int set, int i, uint32_t stage, int k_step) { reader_a.read(a[set][i], stage, i, k_step); };
    auto read_b = [&](int set, uint32_t stage, int k_step) {
#pragma unroll
        for (int j = 0; j < Tile::ATOMS_N / 2; ++j) reader_b.read(b[set][j], stage + Tile::A_BYTES, j, k_step);
    };
    auto step = [&](int k_step, uint32_t from, int next_step) {
        const int now = k_step % 2, now_a = kInPlace ? 0 : now, next_a = kInPlace ? 0 : 1 - now;
        read_b(1 - now, from, next_step);
#pragma unroll
        for (int i = 0; i < Tile::ATOMS_M && !kInPlace; ++i) read_a(next_a, i, from, next_step);
#pragma unroll
        for (int j = 0; j < Tile::ATOMS_N / 2; ++j) reader_b.round(b[now][j]);
#pragma unroll
        for (int i = 0; i < Tile::ATOMS_M; ++i) {
            reader_a.round(a[now_a][i]);
#pragma unroll
            for (int j = 0; j < Tile::ATOMS_N; ++j) {
                const auto& pair = b[now][j / 2];
                if constexpr (REGISTERS == 2) Tile::Atom::multiply(acc[i][j], a[now_a][i], pair[j % 2]);
                else if (kPaired) Tile::Atom::multiply(acc[i][j], a[now_a][i], pair[j % 2 * 2], pair[j % 2 * 2 + 1]);
                else Tile::Atom::multiply(acc[i][j], a[now_a][i], pair[j % 2], pair[j % 2 + 2]);
            }
            if (kInPlace) read_a(0, i, from, next_step);
        }
    };
    auto begin = [&](uint32_t stage) {
#pragma unroll
        for (int i = 0; i < Tile::ATOMS_M; ++i) read_a(0, i, stage, 0);
        read_b(0, stage, 0);
    };
    auto multiply = [&](uint32_t stage) {
#pragma unroll
        for (int k_step = 0; k_step + 1 < Tile::ATOMS_K; ++k_step) step(k_step, stage, k_step + 1);
    };
    auto finish = [&](uint32_t next) { step(Tile::ATOMS_K - 1, next, 0); };
    run_ring_ahead<Tile::STAGES, stage_bytes<Tile>>(ring, ceil_div(k_count, Tile::BLOCK_K), fetch, store, begin,
                                                    multiply, finish);
}

template <class T> struct IfF64 { using Type = T; };
template <> struct IfF64<F64> { using Type = double; };

// kVariant 0: the loop of mma_tile.cuh, 1: fragments ahead, 2: with B in register pairs, 3: and A replaced row by row
template <class T, class Shape, int kVariant, bool kAKMajor, bool kBKMajor>
__global__ void __launch_bounds__(Shape::THREADS, 1) fp_probe(const __grid_constant__ GemmParams params) {
    using Value = typename IfF64<T>::Type;
    using Epilogue = Epilogue<Value, Value, 0>;
    using Tile = MmaTile<T, Shape, kAKMajor, kBKMajor, 16, 16>;
    constexpr int BLOCK_M = Shape::BLOCK_M, BLOCK_N = Shape::BLOCK_N;
    extern __shared__ __align__(128) char shared[];
    const GemmCall& call = params.call;
    const GemmShape& shape = params.shape;
    const int thread = threadIdx.x;
    const TileIndex tile = grouped_raster(blockIdx.x, ceil_div(shape.M, BLOCK_M), ceil_div(shape.N, BLOCK_N));
    const int m_begin = tile.m * BLOCK_M, n_begin = tile.n * BLOCK_N;
    const int index[3] = {};
    typename Tile::LoaderA loader_a(static_cast<const T*>(call.a), shape.a.row, shape.a.col, m_begin, shape.M, 0, 0,
                                    thread);
    typename Tile::LoaderB loader_b(static_cast<const T*>(call.b), shape.b.col, shape.b.row, n_begin, shape.N, 0, 0,
                                    thread);
    typename Tile::Accumulators acc = {};
    if constexpr (kVariant > 0) {
        multiply_tile_ahead<Tile, kBKMajor, (kVariant > 1), (kVariant > 2)>(acc, loader_a, loader_b, shared_address(shared), shape.K, thread);
    } else {
        NoRider rider;
        multiply_tile<Tile>(acc, loader_a, loader_b, rider, shared_address(shared), shape.K, thread);
    }
    const Epilogue epilogue(call.epilogue, shape.epilogue, index, Accumulator<T>(call.alpha.read()));
    finish_tile<Tile>(acc, epilogue, shared, m_begin, n_begin, thread);
}

}  // namespace rawops
