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
    using ReaderB = FragmentReader<T, typename LoaderB::Tile, kBKMajor>;
    using Accumulators = Accumulator<T>[ATOMS_M][ATOMS_N][4];

    static constexpr int A_BYTES = LoaderA::Tile::BYTES, B_BYTES = LoaderB::Tile::BYTES;
    static_assert(WARP_M % 16 == 0 && WARP_N % 16 == 0 && BLOCK_K % Atom::K == 0, "warps hold whole atom pairs");
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

// acc += this stage's A @ B. Fragments of the next atom are read while the current one multiplies.
template <class Tile, class Rider>
__device__ inline void multiply_stage(typename Tile::Accumulators& acc, const typename Tile::ReaderA& reader_a,
                                      const typename Tile::ReaderB& reader_b, Rider& rider, uint32_t stage) {
    using Register = typename Tile::Register;
    Register a[2][Tile::ATOMS_M][4];
    Register b[2][Tile::ATOMS_N / 2][4];
    const uint32_t stage_b = stage + Tile::A_BYTES, stage_rider = stage_b + Tile::B_BYTES;

    auto read = [&](int k_step) {
#pragma unroll
        for (int i = 0; i < Tile::ATOMS_M; ++i) reader_a.load(a[k_step % 2][i], stage, i, k_step);
#pragma unroll
        for (int j = 0; j < Tile::ATOMS_N / 2; ++j) reader_b.load(b[k_step % 2][j], stage_b, j, k_step);
    };

    read(0);
#pragma unroll
    for (int k_step = 0; k_step < Tile::ATOMS_K; ++k_step) {
        if (k_step + 1 < Tile::ATOMS_K) read(k_step + 1);
        const auto& a_now = a[k_step % 2];
        const auto& b_now = b[k_step % 2];
#pragma unroll
        for (int i = 0; i < Tile::ATOMS_M; ++i) {
#pragma unroll
            for (int j = 0; j < Tile::ATOMS_N; ++j) {
                Tile::Atom::multiply(acc[i][j], a_now[i], b_now[j / 2][j % 2], b_now[j / 2][j % 2 + 2]);
            }
        }
        rider.multiply(stage_rider, k_step, a_now);
    }
}

// acc += A @ B over k_count elements of K. `ring` is the shared address of STAGES * stage_bytes, aligned to 128 bytes.
// After it the ring is free for other use by all threads.
template <class Tile, class Rider>
__device__ inline void multiply_tile(typename Tile::Accumulators& acc, typename Tile::LoaderA& loader_a,
                                     typename Tile::LoaderB& loader_b, Rider& rider, uint32_t ring, int k_count,
                                     int thread) {
    const int warp = thread / kWarpSize, lane = thread % kWarpSize;
    const typename Tile::ReaderA reader_a(warp / Tile::WARPS_N * Tile::WARP_M, lane);
    const typename Tile::ReaderB reader_b(warp % Tile::WARPS_N * Tile::WARP_N, lane);

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
    auto multiply = [&](uint32_t stage) { multiply_stage<Tile>(acc, reader_a, reader_b, rider, stage); };
    run_ring<Tile::STAGES, stage_bytes<Tile, Rider>>(ring, ceil_div(k_count, Tile::BLOCK_K), fetch, store, multiply);
}

}  // namespace rawops
