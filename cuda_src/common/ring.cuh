// The shape of a block's work, and the ring of shared-memory stages: cp.async fills the later stages while the block
// works on the current one.
#pragma once
#include "copy.cuh"

namespace rawops {

// The part of a product that one block computes, and the warps that share it out.
template <int BLOCK_M_, int BLOCK_N_, int BLOCK_K_, int STAGES_, int WARPS_M_, int WARPS_N_> struct TileShape {
    static constexpr int BLOCK_M = BLOCK_M_, BLOCK_N = BLOCK_N_, BLOCK_K = BLOCK_K_, STAGES = STAGES_;
    static constexpr int WARPS_M = WARPS_M_, WARPS_N = WARPS_N_, THREADS = WARPS_M * WARPS_N * kWarpSize;
    static constexpr int WARP_M = BLOCK_M / WARPS_M, WARP_N = BLOCK_N / WARPS_N;
};

// Starts the copies of one slice.
template <class Fetch> struct RingStart {
    const Fetch& fetch;
    uint32_t stage;
    int block;

    __device__ void operator()() const {
        fetch(stage, block);
        cp_async_commit();
    }
};

// For each of `blocks` slices: fetch(stage, block) starts the copies, store(stage) completes what went through
// registers, multiply(stage) consumes. begin(stage) comes before the first; finish(next) ends each slice when the next
// is there to be read and nothing of this one is read any more: what can be put off until then hides the wait.
// fetch is also called for slices past the last one and must then read nothing: finish(next) may read the first such.
// After it no copy is pending and all threads may reuse the ring.
// kLate: it is multiply(stage, start), which calls start() once, for the fetch of the slice that would come before it.
template <int STAGES, int STAGE_BYTES, bool kLate = false, class Fetch, class Store, class Begin, class Multiply,
          class Finish>
__device__ inline void run_ring(uint32_t ring, int blocks, Fetch fetch, Store store, Begin begin, Multiply multiply,
                                Finish finish) {
    static_assert(STAGES >= 3, "one stage is read, the next is there, and one is filled");
#pragma unroll 1
    for (int block = 0; block < STAGES - 1; ++block) {
        fetch(ring + block * STAGE_BYTES, block);
        store(ring + block * STAGE_BYTES);
        cp_async_commit();
    }
    uint32_t current = ring, filled = ring + (STAGES - 1) * STAGE_BYTES;
    const uint32_t last = filled;
    cp_async_wait<STAGES - 2>();
    __syncthreads();
    begin(current);
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
        if constexpr (kLate) {
            multiply(current, RingStart<Fetch>{fetch, filled, block + STAGES - 1});
        } else {
            fetch(filled, block + STAGES - 1);
            cp_async_commit();
            multiply(current);
        }
        cp_async_wait<STAGES - 2>();
        __syncthreads();  // the next stage is visible to all, and all have left this one, which is filled next
        const uint32_t fetched = filled;
        filled = current;
        current = current == last ? ring : current + STAGE_BYTES;
        finish(current);
        store(fetched);  // last, for the loads to arrive meanwhile; two slices on, another barrier has passed
    }
    cp_async_wait<0>();
    __syncthreads();
}

// The same where nothing is put off.
template <int STAGES, int STAGE_BYTES, class Fetch, class Store, class Multiply>
__device__ inline void run_ring(uint32_t ring, int blocks, Fetch fetch, Store store, Multiply multiply) {
    auto nothing = [](uint32_t) {};
    run_ring<STAGES, STAGE_BYTES>(ring, blocks, fetch, store, nothing, multiply, nothing);
}

}  // namespace rawops
