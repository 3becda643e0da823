// The main loop of every tensor-core product: a ring of shared-memory stages that cp.async fills while the warps
// multiply, for one BLOCK_M x BLOCK_N tile of a @ b.
#pragma once
#include "mma.cuh"
#include "ring.cuh"

namespace rawops {

template <class T_, class Shape, bool kAKMajor, bool kBKMajor, int ACCESS_A, int ACCESS_B, bool kGated = false>
struct MmaTile : Shape {
    using T = T_;
    using Atom = MmaAtom<T>;
    using Register = typename Atom::Register;
    using Shape::BLOCK_M, Shape::BLOCK_N, Shape::BLOCK_K, Shape::THREADS, Shape::WARP_M, Shape::WARP_N;
    static constexpr int ATOMS_M = WARP_M / 16, ATOMS_N = WARP_N / 8, ATOMS_K = BLOCK_K / Atom::K;
    // A gated tile holds gate and up columns of one output column in one thread: a warp's first half and second half.
    static constexpr int GATE = kGated ? WARP_N / 2 : 0;

    using LoaderA = OperandLoader<T, BLOCK_M, BLOCK_K, kAKMajor, ACCESS_A, THREADS>;
    using LoaderB = OperandLoader<T, BLOCK_N, BLOCK_K, kBKMajor, ACCESS_B, THREADS, GATE>;
    using ReaderA = FragmentReader<T, typename LoaderA::Tile, kAKMajor>;
    using ReaderB = FragmentReader<T, typename LoaderB::Tile, kBKMajor, true>;
    using Accumulators = Accumulator<T>[ATOMS_M][ATOMS_N][4];

    static constexpr int A_BYTES = LoaderA::Tile::BYTES, B_BYTES = LoaderB::Tile::BYTES;
    static_assert(WARP_M % 16 == 0 && WARP_N % 16 == 0, "warps hold whole atom pairs");
    static_assert(BLOCK_K % (2 * Atom::K) == 0, "fragments of B alternate between two sets, across stages too");
};

// What may travel with the ring: it has a slice of every stage, is filled with it, and sees A's fragments. The
// columns of lora_a are the example; this one is empty.
struct NoRider {
    static constexpr int BYTES = 0;
    __device__ void fetch(uint32_t, int) {}
    __device__ void store(uint32_t) {}
    template <class Fragments> __device__ void multiply(uint32_t, int, const Fragments&) {}
};

template <class Tile, class Rider = NoRider>
constexpr int stage_bytes = Tile::A_BYTES + Tile::B_BYTES + Rider::BYTES;

// The fragments that a warp multiplies next, and the product. Those of the following step along K are read meanwhile:
// A's in place, row by row of atoms, as soon as a row is done with, and B's into a second set. float64 has no registers
// for that and replaces B in the last row, which takes long enough.
template <class Tile> struct WarpProduct {
    static constexpr int SETS = sizeof(typename Tile::T) == 8 ? 1 : 2;

    typename Tile::ReaderA reader_a;
    typename Tile::ReaderB reader_b;
    typename Tile::Register a[Tile::ATOMS_M][4], b[SETS][Tile::ATOMS_N / 2][4];

    __device__ explicit WarpProduct(int thread)
        : reader_a(thread / kWarpSize / Tile::WARPS_N * Tile::WARP_M, thread % kWarpSize),
          reader_b(thread / kWarpSize % Tile::WARPS_N * Tile::WARP_N, thread % kWarpSize) {}

    __device__ void read_a(int i, uint32_t stage, int k_step) { reader_a.read(a[i], stage, i, k_step); }
    __device__ void read_b(int j, uint32_t stage, int k_step) {
        reader_b.read(b[k_step % SETS][j], stage + Tile::A_BYTES, j, k_step);
    }

    __device__ void begin(uint32_t stage) {
#pragma unroll
        for (int i = 0; i < Tile::ATOMS_M; ++i) read_a(i, stage, 0);
#pragma unroll
        for (int j = 0; j < Tile::ATOMS_N / 2; ++j) read_b(j, stage, 0);
    }

    // acc += the step's product; next_step of next_stage follows.
    __device__ void multiply(typename Tile::Accumulators& acc, int k_step, uint32_t next_stage, int next_step) {
        auto& now = b[k_step % SETS];
#pragma unroll
        for (int j = 0; j < Tile::ATOMS_N / 2; ++j) {
            if (SETS == 2) read_b(j, next_stage, next_step);
            reader_b.round(now[j]);
        }
#pragma unroll
        for (int i = 0; i < Tile::ATOMS_M; ++i) {
            reader_a.round(a[i]);
#pragma unroll
            for (int j = 0; j < Tile::ATOMS_N / 2; ++j) {
                Tile::Atom::multiply(acc[i][2 * j], a[i], now[j][0], now[j][1]);
                Tile::Atom::multiply(acc[i][2 * j + 1], a[i], now[j][2], now[j][3]);
                if (SETS == 1 && i + 1 == Tile::ATOMS_M) read_b(j, next_stage, next_step);
            }
            read_a(i, next_stage, next_step);
        }
    }
};

// acc += A @ B over k_count elements of K. `ring` is the shared address of STAGES * stage_bytes, aligned to 128 bytes.
// After it the ring is free for other use by all threads.
template <class Tile, class Rider>
__device__ inline void multiply_tile(typename Tile::Accumulators& acc, typename Tile::LoaderA& loader_a,
                                     typename Tile::LoaderB& loader_b, Rider& rider, uint32_t ring, int k_count,
                                     int thread) {
    WarpProduct<Tile> product(thread);
    auto fetch = [&](uint32_t stage, int block) {
        const int k_left = k_count - block * Tile::BLOCK_K;
        loader_a.fetch(stage, k_left);
        loader_b.fetch(stage + Tile::A_BYTES, k_left);
        rider.fetch(stage + Tile::A_BYTES + Tile::B_BYTES, k_left);
    };
    auto store = [&](uint32_t stage) {
        loader_a.store(stage);
        loader_b.store(stage + Tile::A_BYTES);
        rider.store(stage + Tile::A_BYTES + Tile::B_BYTES);
    };
    auto begin = [&](uint32_t stage) { product.begin(stage); };
    auto multiply = [&](uint32_t stage) {
        const uint32_t stage_rider = stage + Tile::A_BYTES + Tile::B_BYTES;
#pragma unroll
        for (int k_step = 0; k_step < Tile::ATOMS_K; ++k_step) {
            rider.multiply(stage_rider, k_step, product.a);
            if (k_step + 1 < Tile::ATOMS_K) product.multiply(acc, k_step, stage, k_step + 1);
        }
    };
    auto finish = [&](uint32_t next) { product.multiply(acc, Tile::ATOMS_K - 1, next, 0); };
    run_ring<Tile::STAGES, stage_bytes<Tile, Rider>>(ring, ceil_div(k_count, Tile::BLOCK_K), fetch, store, begin,
                                                     multiply, finish);
}

}  // namespace rawops
