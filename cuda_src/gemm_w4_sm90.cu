// Up to sixteen tokens times packed 4-bit weights on Hopper: K contiguous, a scale for each 128. TMA brings both, for
// all warps of a block that share the tokens, and the weights are dequantised in the registers of the lanes that
// multiply them.
//
//   last warp, one thread   TMA: weights, tokens, scales --> ring of stages       waits for `empty`, ends `full`
//   the warp before         tokens: the pairs that weights come out in            waits for `full`, ends `ready`  (*)
//   the other warps         ring --> registers --> mma.sync --> sums              wait for `ready`, end `empty`
//
// (*) Where many warps share the tokens. Otherwise each pairs what it reads, and `full` is `ready`.
//
// A block has `units` of 32 columns and `slices` warps for each, which take every slices-th group of 128 along K. In
// the end the slices are added up in order. blockIdx.x counts `units` units.
#include "common/hopper.cuh"
#include "common/launches.cuh"
#include "common/w4_stream.cuh"

namespace rawops {

constexpr int kTokens = 16, kTokenRows = kTokens + 2;  // that a lane reads, of a box: free of bank conflicts
constexpr int kSpan = 128;                              // bytes of a swizzled row
constexpr int kStreamThreads = 608;  // at most: more warps had to do with fewer registers each, and were no faster

// A copy brings all that a stage has of an operand: K is two axes, of which the inner one is a swizzled row.
struct StreamMaps {
    TensorMap tokens, weights, scale, zero;
};

// How a block is made up, and its stages: the weights, 128 bytes a row and pair of groups, the tokens, 128 bytes a row
// and half a group, scales and zero points.
struct StreamShape {
    int slices, units, stages, groups;  // groups: of a stage
    int tokens_at, scale_at, zero_at, stage_bytes, box_bytes;  // box_bytes: of a stage without what only aligns

    __device__ int consumers() const { return slices * units; }

    // From the scales (of a type V) of gate to those of up.
    template <class V> __device__ int part_bytes(int cols) const {
        return ceil_div(groups * units * cols * int(sizeof(V)), 128) * 128;
    }
};

// Shared addresses of a block. kPaired: there is a warp that pairs the tokens.
template <bool kPaired> struct StreamRing {
    const StreamShape& shape;
    uint32_t base, barriers;

    __device__ StreamRing(const StreamShape& shape_, uint32_t shared)
        : shape(shape_), base(shared), barriers(shared + shape_.stages * shape_.stage_bytes) {}
    __device__ uint32_t stage(int i) const { return base + i * shape.stage_bytes; }
    __device__ uint32_t empty(int i) const { return barriers + i * 8; }
    __device__ uint32_t ready(int i, uint32_t round) const { return empty((1 + round % 2) * shape.stages + i); }
    __device__ uint32_t full(int i, uint32_t round) const {
        return kPaired ? empty(3 * shape.stages + i) : ready(i, round);
    }

    // By one thread; a __syncthreads() must follow.
    __device__ void init() const {
        for (int i = 0; i < shape.stages; ++i) {
            barrier_init(empty(i), shape.groups * shape.units);
            barrier_init(ready(i, 0), 1);
            barrier_init(ready(i, 1), 1);
            if (kPaired) barrier_init(full(i, 0), 1);
        }
        barrier_init_fence();
    }
};

// A place in the ring, which has come round `round` times. `group` is of the stage, or of those behind it.
//
// A parity tells a phase from the one before it and no more, which is enough for who passes through all stages. A
// consumer goes straight to its next stage: nobody waits for it at those that it has no group in, nor does it wait
// there. So even and odd rounds have a barrier `ready` each, of which a phase takes two rounds. If the next stage is at
// most `stages` behind the last one that it had, as the host sees to, what it waits for is not mistaken:
//   - for a later phase, since the stage is not filled again before it lets go of it;
//   - for the phase before the last: that of two rounds ago is over, since the producer saw the stage empty after that
//     before it filled the last one that the consumer had.
struct StreamPosition {
    int stage = 0, group = 0;
    uint32_t round = 0;

    __device__ void advance(int stages) {
        if (++stage == stages) {
            stage = 0;
            ++round;
        }
    }
    // Goes on to the group's stage and waits for it.
    template <class Ring> __device__ void seek(const Ring& ring) {
        while (group >= ring.shape.groups) {
            group -= ring.shape.groups;
            advance(ring.shape.stages);
        }
        barrier_wait(ring.ready(stage, round), round / 2 % 2);
    }
};

// Asks the L2 for what the block begins with, while the launch before is still at work: weights and scales of a stage.
// What more it has asked for when that launch ends, the copies of the first stages would wait behind.
template <class Tile> __device__ inline void ask_ahead(const StreamMaps& maps, const StreamShape& shape, int cols) {
    const int n = blockIdx.x * (shape.units * Tile::COLS);
#pragma unroll
    for (int part = 0; part < Tile::PARTS; ++part) {
        const TensorCoordinates from = {n + part * cols, 0, 0, 0, 0};
        tma_prefetch(maps.weights, {0, n + part * cols, 0, 0, 0});
        tma_prefetch(maps.scale, from);
        if constexpr (Tile::kHasZeros) tma_prefetch(maps.zero, from);
    }
}

// The producer: one thread that keeps the ring full.
template <class Tile, class Ring>
__device__ inline void load_stages(const StreamMaps& maps, const Ring& ring, int groups, int cols) {
    const StreamShape& shape = ring.shape;
    const int part_rows = shape.units * Tile::COLS, n = blockIdx.x * part_rows;
    StreamPosition slot;
#pragma unroll 1
    for (int first = 0; first < groups; first += shape.groups) {
        const uint32_t stage = ring.stage(slot.stage), full = ring.full(slot.stage, slot.round);
        barrier_wait(ring.empty(slot.stage), slot.round % 2 ^ 1);
        barrier_arrive_expect(full, shape.box_bytes);
#pragma unroll
        for (int part = 0; part < Tile::PARTS; ++part) {
            const int weights_at = part * (shape.groups / 2 * part_rows * kSpan);
            tma_load(stage + weights_at, maps.weights, {0, n + part * cols, first / 2, 0, 0}, full);
            const TensorCoordinates from = {n + part * cols, first, 0, 0, 0};
            const int scale_at = shape.scale_at + part * shape.part_bytes<typename Tile::Scale>(Tile::COLS);
            const int zero_at = shape.zero_at + part * shape.part_bytes<unsigned char>(Tile::COLS);
            tma_load(stage + scale_at, maps.scale, from, full);
            if constexpr (Tile::kHasZeros) tma_load(stage + zero_at, maps.zero, from, full);
        }
        tma_load(stage + shape.tokens_at, maps.tokens, {0, 0, first * 2, 0, 0}, full);
        slot.advance(shape.stages);
    }
}

// The warp that pairs the tokens of each stage, in place: once for all the warps that multiply them.
__device__ inline void pair_tokens(const StreamRing<true>& ring, int groups, int lane) {
    constexpr int AT_ONCE = 6, BYTES = kTokenRows * 512;  // on their way; of two groups
    static_assert(BYTES % (AT_ONCE * kWarpSize * 16) == 0, "in whole steps");
    const StreamShape& shape = ring.shape;
    const int end = shape.tokens_at + shape.groups / 2 * BYTES;
    StreamPosition slot;
#pragma unroll 1
    for (int first = 0; first < groups; first += shape.groups) {
        const uint32_t stage = ring.stage(slot.stage);
        barrier_wait(ring.full(slot.stage, slot.round), slot.round % 2);
#pragma unroll 1
        for (int at = shape.tokens_at + lane * 16; at < end; at += AT_ONCE * kWarpSize * 16) {
            uint32_t eight[AT_ONCE][4];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) load_shared(eight[i], stage + at + i * kWarpSize * 16);
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                pair_apart(eight[i]);
                store_quad(stage + at + i * kWarpSize * 16, eight[i]);
            }
        }
        fence_async_proxy();
        __syncwarp();
        if (lane == 0) barrier_arrive(ring.ready(slot.stage, slot.round));
        slot.advance(shape.stages);
    }
}

// A consumer's lane: where it finds what it multiplies in a stage.
template <class Tile> class StreamLane {
public:
    const int lane;

    __device__ StreamLane(const StreamShape& shape_, int unit, int lane_) : lane(lane_), shape(shape_) {
        const int t = lane % 4, g = lane / 4;
        const int row = unit * Tile::COLS + g * Tile::COLUMNS, token = t / 2 * kTokenRows + g;
        weights = row * kSpan + (t ^ row % 8) * 16;
        tokens = token * kSpan + (t % 2 * 4 ^ token % 8) * 16;
        asm("" : "+r"(weights), "+r"(tokens));  // or they are found anew for each group
    }

    // acc += scale * (tokens @ (q - zero)), a group in the ring.
    template <bool kPaired>
    __device__ void add_group(typename Tile::Accumulators& acc, const StreamRing<kPaired>& ring,
                              const StreamPosition& slot, int zero_sign) const {
        const uint32_t stage = ring.stage(slot.stage);
        const int group = slot.group;
        const int group_rows = shape.units * Tile::COLS;
        const uint32_t first = stage + (weights ^ group % 2 * 64) + group / 2 * group_rows * kSpan;
        const int to_up = shape.groups / 2 * group_rows * kSpan;
        uint32_t words[4][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // neighbouring rows' swizzle: the first has an even number, or one in fours
            const int k = i % Tile::COLUMNS;
            load_shared(words[i], (first ^ k * 16) + k * kSpan + i / Tile::COLUMNS * to_up);
        }
        static_assert(2 * kTokenRows % 8 == 4, "rows of which the swizzle sees that the group's number is odd");
        const int group_bytes = 2 * kTokenRows * kSpan;
        const uint32_t own_tokens = stage + shape.tokens_at + group * group_bytes + (tokens ^ group % 2 * 64);
        const int own = group * group_rows + weights / kSpan;
        typename Tile::Offsets offsets;
        if constexpr (Tile::kHasZeros) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                offsets[i].set((of_column<unsigned char>(stage + shape.zero_at, own, i) ^ zero_sign) - zero_sign);
            }
        }
        typename Tile::Accumulators sum = {};
        multiply_group<Tile>(sum, words, offsets, [&](uint32_t (&to)[4], int q, int atom) {
            load_shared(to, (own_tokens ^ q * 16) + atom * 8 * kSpan);
            if (!kPaired) pair_apart(to);
        });
        int number = slot.stage;  // once more: the address takes no register among those of the products
        asm volatile("" : "+r"(number));
        const uint32_t scales = ring.stage(number) + shape.scale_at;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            add_scaled<Tile>(acc, sum, i, widen(of_column<typename Tile::Scale>(scales, own, i)));
        }
    }

private:
    const StreamShape& shape;
    int weights, tokens;  // of group 0, from the beginning of a stage and of its tokens

    // What the lane's i-th column has.
    template <class V> __device__ V of_column(uint32_t from, int own, int i) const {
        constexpr int COUNT = Tile::COLUMNS;
        const uint32_t at = from + i / COUNT * shape.part_bytes<V>(Tile::COLS) + own * int(sizeof(V));
        return static_cast<const Vector<V, COUNT>*>(__cvta_shared_to_generic(at))->data[i % COUNT];
    }
};

template <class T, class Out, class Scale, int kFormat, bool kHasZeros, bool kPaired, int kActivation>
__global__ void __launch_bounds__(kStreamThreads, 1)
    gemm_w4_sm90(const __grid_constant__ StreamMaps maps, const __grid_constant__ W4Params params,
                 const __grid_constant__ StreamShape shape) {
    using Epilogue = Epilogue<T, Out, kActivation>;
    using Tile = StreamTile<T, Scale, kFormat, kHasZeros, kTokens, Epilogue::kGated>;
    extern __shared__ __align__(1024) char shared[];
    const StreamRing<kPaired> ring(shape, shared_address(shared));
    const int warp = __shfl_sync(~0u, int(threadIdx.x) / kWarpSize, 0), lane = threadIdx.x % kWarpSize;
    const int consumers = shape.consumers() * kWarpSize, cols = params.shape.epilogue.cols;
    start_next_launch();
    const int threads = consumers + (kPaired ? 2 : 1) * kWarpSize;
    const bool produces = warp == threads / kWarpSize - 1;
    if (produces) {  // begins while the others are on their way
        if (lane == 0) ring.init();
        __syncwarp();
        asm volatile("bar.arrive 2, %0;" ::"r"(threads) : "memory");
        if (lane == 0) ask_ahead<Tile>(maps, shape, cols);
    }
    await_launch_before();
    const bool reads = float(params.call.alpha.read()) != 0;  // a and b
    const int groups = reads ? params.shape.K / Tile::GROUP : 0;
    if (produces) {
        if (lane == 0) load_stages<Tile>(maps, ring, groups, cols);
        return;
    }
    asm volatile("bar.sync 2, %0;" ::"r"(threads) : "memory");
    if constexpr (kPaired) {
        if (warp == shape.consumers()) return pair_tokens(ring, groups, lane);
    }
    const StreamLane<Tile> self(shape, warp / shape.slices, lane);
    int group = warp % shape.slices;
    StreamPosition slot;
    slot.group = group;
    typename Tile::Accumulators acc = {};
#pragma unroll 1
    for (; group < groups; group += shape.slices) {
        slot.seek(ring);
        self.add_group(acc, ring, slot, params.groups.zero_sign);
        __syncwarp();
        if (lane == 0) barrier_arrive(ring.empty(slot.stage));
        slot.group += shape.slices;
    }
    asm volatile("bar.sync 1, %0;" ::"r"(consumers) : "memory");  // the ring lends its memory
    const StreamSums<Tile> sums{reinterpret_cast<float*>(shared), shape.slices, shape.units};
    const int rows = min_of(kTokens, params.shape.M);
    sums.leave(acc, group % shape.slices, warp / shape.slices, lane, rows);
    asm volatile("bar.sync 1, %0;" ::"r"(consumers) : "memory");
    const int batch[3] = {};
    const float alpha = params.call.alpha.read();  // once more: it takes no register in the main loop
    const Epilogue epilogue(params.call.epilogue, params.shape.epilogue, batch, alpha);
    sums.finish(epilogue, rows, threadIdx.x, consumers);
}

}  // namespace rawops
