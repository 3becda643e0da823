// Hopper's asynchronous machinery: mbarriers, the ring of stages, tensor memory access (TMA), register budgets.
#pragma once
#include "copy.cuh"

namespace rawops {

constexpr int kWarpGroupSize = 128;

// A tensor map, encoded on the host. As a kernel parameter it must be __grid_constant__.
struct alignas(64) TensorMap {
    uint64_t opaque[16];
};

// --- mbarrier: all functions take its shared address ----------------------------------------------------------------

__device__ inline void barrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the TMA unit; a __syncthreads() must follow for the other threads.
__device__ inline void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives when the cp.async copies that this thread has started are there.
__device__ inline void barrier_arrive_after_copies(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Arrives and keeps the phase open until copies have brought `bytes`.
__device__ inline void barrier_arrive_expect(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits for the end of the phase with this parity. Before the first phase has ended, that with parity 1 counts as over.
__device__ inline void barrier_wait(uint32_t barrier, uint32_t parity) {
    constexpr uint32_t kSuspendNanoseconds = 0x989680;  // a hint: the hardware wakes the thread much earlier
    uint32_t done;
    do {
        asm volatile(
            "{\n"
            ".reg .pred over;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2, %3;\n"
            "selp.u32 %0, 1, 0, over;\n"
            "}"
            : "=r"(done)
            : "r"(barrier), "r"(parity), "r"(kSuspendNanoseconds)
            : "memory");
    } while (!done);
}

// --- the ring of stages ---------------------------------------------------------------------------------------------

// Two barriers a stage: `full` ends a phase when the copies have landed, `empty` when every consumer has let go.
template <int STAGES> struct RingBarriers {
    static constexpr int BYTES = STAGES * 16;
    uint32_t base;

    __device__ uint32_t full(int stage) const { return base + stage * 8; }
    __device__ uint32_t empty(int stage) const { return base + (STAGES + stage) * 8; }

    // By one thread; a __syncthreads() must follow.
    __device__ void init(int consumers, int producers = 1) const {
        for (int stage = 0; stage < STAGES; ++stage) {
            barrier_init(full(stage), producers);
            barrier_init(empty(stage), consumers);
        }
        barrier_init_fence();
    }
};

// Where a producer or a consumer stands. A consumer waits for full(stage) with `phase`, a producer for empty(stage)
// with `phase ^ 1`, which falls through on the first round.
template <int STAGES> struct RingPosition {
    int stage = 0;
    uint32_t phase = 0;

    __device__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
    __device__ void skip(int count) {
        stage += count;
        phase ^= stage / STAGES & 1;
        stage %= STAGES;
    }
};

// --- TMA ------------------------------------------------------------------------------------------------------------

// Coordinates count elements, innermost axis first.
struct TensorCoordinates {
    int at[5];
};

// Copies a box to shared memory. What lies outside the tensor reads as zero and counts at the barrier like the rest.
__device__ inline void tma_load(uint32_t destination, const TensorMap& map, const TensorCoordinates& from,
                                uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], "
        "[%7];" ::"r"(destination),
        "l"(&map), "r"(from.at[0]), "r"(from.at[1]), "r"(from.at[2]), "r"(from.at[3]), "r"(from.at[4]), "r"(barrier)
        : "memory");
}

constexpr uint64_t kEvictFirst = 0x12f0000000000000;  // as createpolicy makes it

// The same for what is not asked for again: the L2 gives it up before anything else.
__device__ inline void tma_load_once(uint32_t destination, const TensorMap& map, const TensorCoordinates& from,
                                     uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(destination),
        "l"(&map), "r"(from.at[0]), "r"(from.at[1]), "r"(from.at[2]), "r"(from.at[3]), "r"(from.at[4]), "r"(barrier),
        "l"(kEvictFirst)
        : "memory");
}

// As tma_load, into each block of the cluster whose rank has a bit in `ranks`, at the same addresses.
__device__ inline void tma_load_multicast(uint32_t destination, const TensorMap& map, const TensorCoordinates& from,
                                          uint32_t barrier, int ranks) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(destination),
        "l"(&map), "r"(from.at[0]), "r"(from.at[1]), "r"(from.at[2]), "r"(from.at[3]), "r"(from.at[4]), "r"(barrier),
        "h"(static_cast<uint16_t>(ranks))
        : "memory");
}

// Has the L2 fetch a box.
__device__ inline void tma_prefetch(const TensorMap& map, const TensorCoordinates& from) {
    asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global [%0, {%1, %2, %3, %4, %5}];" ::"l"(&map), "r"(from.at[0]),
                 "r"(from.at[1]), "r"(from.at[2]), "r"(from.at[3]), "r"(from.at[4])
                 : "memory");
}

// Copies a box from shared memory; what lies outside the tensor is not written.
__device__ inline void tma_store(const TensorMap& map, const TensorCoordinates& to, uint32_t source) {
    asm volatile(
        "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4, %5}], [%6];" ::"l"(&map),
        "r"(to.at[0]), "r"(to.at[1]), "r"(to.at[2]), "r"(to.at[3]), "r"(to.at[4]), "r"(source)
        : "memory");
}

__device__ inline void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until this thread's committed stores have read their source, which may then be written again.
__device__ inline void tma_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Waits until this thread's committed stores are complete.
__device__ inline void tma_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Orders this thread's writes to shared memory before what TMA or wgmma reads there after the next barrier.
__device__ inline void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The same for all memory, and for what TMA has written before what this thread does next.
__device__ inline void fence_async_proxy_everywhere() { asm volatile("fence.proxy.async;" ::: "memory"); }

__device__ inline void prefetch_tensor_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Copies whole chunks of 16 bytes to shared memory; it counts at the barrier like a box.
__device__ inline void bulk_load(uint32_t destination, const void* source, int bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     destination),
                 "l"(source), "r"(bytes), "r"(barrier)
                 : "memory");
}

// The same for what is not asked for again, as tma_load_once.
__device__ inline void bulk_load_once(uint32_t destination, const void* source, int bytes, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
        :
        : "r"(destination), "l"(source), "r"(bytes), "r"(barrier), "l"(kEvictFirst)
        : "memory");
}

// Adds float32 from shared memory to what is there, in the thread's group of stores.
__device__ inline void bulk_add(float* destination, uint32_t source, int bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(destination),
                 "r"(source), "r"(bytes)
                 : "memory");
}

// A thread's cp.async copies to the stages of a ring whose barriers count it, for wgmma to read: it arrives LAG stages
// later, when they are there and a fence is behind them. A consumer that lets a stage go when it has begun the next one
// needs LAG <= STAGES - 2.
template <int STAGES, int LAG> struct StageCopies {
    RingBarriers<STAGES> barriers;
    RingPosition<STAGES> last;  // that it has not arrived at
    int pending = 0;

    // Those to one more stage have been started.
    __device__ void commit() {
        cp_async_commit();
        if (++pending > LAG) arrive<LAG>();
    }
    __device__ void finish() {
#pragma unroll 1
        while (pending > 0) arrive<0>();
    }

private:
    template <int LEFT> __device__ void arrive() {
        cp_async_wait<LEFT>();
        fence_async_proxy();
        barrier_arrive(barriers.full(last.stage));
        last.advance();
        --pending;
    }
};

// --- warpgroups -----------------------------------------------------------------------------------------------------

// Every warp of a warpgroup calls it; needs __launch_bounds__ with one block an SM.
template <int COUNT> __device__ inline void release_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> __device__ inline void claim_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// A barrier of COUNT threads, whole warps. ID 0 is that of __syncthreads(); an ID in a register would take all sixteen.
template <int ID, int COUNT = kWarpGroupSize> __device__ inline void sync_group() {
    asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(COUNT) : "memory");
}

// Barriers 1 to 15 by number, for blocks that have an SM to themselves. Who only arrives does not wait.
template <int COUNT> __device__ inline void sync_group(int id) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(COUNT) : "memory");
}
// The same, and tells every thread whether some thread has a value other than 0.
template <int COUNT> __device__ inline bool sync_group_or(int id, uint32_t value) {
    uint32_t any;
    asm volatile(
        "{\n"
        ".reg .pred in, out;\n"
        "setp.ne.u32 in, %3, 0;\n"
        "bar.red.or.pred out, %1, %2, in;\n"
        "selp.u32 %0, 1, 0, out;\n"
        "}"
        : "=r"(any)
        : "r"(id), "n"(COUNT), "r"(value)
        : "memory");
    return any;
}
template <int COUNT> __device__ inline void arrive_group(int id) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(COUNT) : "memory");
}

// --- clusters -------------------------------------------------------------------------------------------------------

__device__ inline int cluster_rank() {
    int rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// The barrier of all threads of a cluster, by whole warps. Arriving publishes what this thread has written to shared
// memory; after waiting, what the others have published is there.
__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
// For what a fence of its own has published, as that of barriers that were initialised: a release waits for all memory.
__device__ inline void cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ inline void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}

// Arrives at another block's barrier. The arrival is ordered as within a block, since .release.cluster takes 0.8 us:
// what this thread has read of what the other block will overwrite must be in use by now.
__device__ inline void barrier_arrive_at_rank(uint32_t barrier, int rank) {
    asm volatile(
        "{\n"
        ".reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
        "}" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

// Reads from where `address` lies in another block of the cluster.
__device__ inline void load_from_rank(float (&values)[4], uint32_t address, int rank) {
    asm volatile(
        "{\n"
        ".reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %4, %5;\n"
        "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n"
        "}"
        : "=f"(values[0]), "=f"(values[1]), "=f"(values[2]), "=f"(values[3])
        : "r"(address), "r"(rank)
        : "memory");
}

template <class T> __device__ inline T value_at_rank(const T* value, int rank) {
    static_assert(sizeof(T) % 4 == 0, "whole words");
    uint32_t words[sizeof(T) / 4];
#pragma unroll
    for (int i = 0; i < int(sizeof(T)) / 4; ++i) {
        asm volatile(
            "{\n"
            ".reg .b32 there;\n"
            "mapa.shared::cluster.u32 there, %1, %2;\n"
            "ld.shared::cluster.b32 %0, [there];\n"
            "}"
            : "=r"(words[i])
            : "r"(shared_address(value) + 4 * i), "r"(rank)
            : "memory");
    }
    T found;
    memcpy(&found, words, sizeof(T));
    return found;
}

// Writes to where `address` lies in another block of the cluster, and has its barrier there count the bytes.
__device__ inline void send_to_rank(uint32_t address, float4 x, uint32_t barrier, int rank) {
    asm volatile(
        "{\n"
        ".reg .b32 there, counted;\n"
        "mapa.shared::cluster.u32 there, %0, %6;\n"
        "mapa.shared::cluster.u32 counted, %5, %6;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], {%1, %2, %3, %4}, [counted];\n"
        "}" ::"r"(address),
        "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(barrier), "r"(rank)
        : "memory");
}
__device__ inline void send_to_rank(uint32_t address, float2 x, uint32_t barrier, int rank) {
    asm volatile(
        "{\n"
        ".reg .b32 there, counted;\n"
        "mapa.shared::cluster.u32 there, %0, %4;\n"
        "mapa.shared::cluster.u32 counted, %3, %4;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [there], {%1, %2}, [counted];\n"
        "}" ::"r"(address),
        "f"(x.x), "f"(x.y), "r"(barrier), "r"(rank)
        : "memory");
}

__device__ inline uint32_t load_word(uint32_t address) {
    uint32_t word;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
    return word;
}
__device__ inline void store_word(uint32_t address, uint32_t word) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}
__device__ inline uint4 load_quad(uint32_t address) {
    uint4 words;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "r"(address)
                 : "memory");
    return words;
}
__device__ inline float2 load_pair(uint32_t address) {
    float2 pair;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(address) : "memory");
    return pair;
}
__device__ inline void store_shared(uint32_t address, float value) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}
__device__ inline void store_shared(uint32_t address, const float (&values)[4]) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(values[0]), "f"(values[1]),
                 "f"(values[2]), "f"(values[3])
                 : "memory");
}

__device__ inline void store_quad(uint32_t address, const uint32_t (&words)[4]) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words[0]), "r"(words[1]),
                 "r"(words[2]), "r"(words[3])
                 : "memory");
}

// Adds to four numbers in global memory, 16-byte aligned, each by itself.
__device__ inline void add_global(float* address, const float (&values)[4]) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(values[0]),
                 "f"(values[1]), "f"(values[2]), "f"(values[3])
                 : "memory");
}

// --- swizzled tiles -------------------------------------------------------------------------------------------------

// Stores four 8 x 8 matrices of 16-bit elements: lane l gives the address of row l % 8 of matrix l / 8.
__device__ inline void stmatrix(uint32_t address, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

__device__ inline uint32_t pack(__half2 pair) { return *reinterpret_cast<uint32_t*>(&pair); }
__device__ inline uint32_t pack(__nv_bfloat162 pair) { return *reinterpret_cast<uint32_t*>(&pair); }
template <class T> __device__ inline uint32_t narrow_pair(float low, float high) {
    if constexpr (is_same<T, __half>) return pack(__floats2half2_rn(low, high));
    else return pack(__floats2bfloat162_rn(low, high));
}
template <class T> __device__ inline float2 widen_pair(uint32_t pair) {
    if constexpr (is_same<T, __half>) return __half22float2(*reinterpret_cast<__half2*>(&pair));
    else return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000)};
}

}  // namespace rawops
