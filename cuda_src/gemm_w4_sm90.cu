// A few tokens times packed 4-bit weights on Hopper: K contiguous, a scale for each 128. TMA keeps far more on its way
// from memory than registers could, and the weights are dequantised in the registers of the lanes that multiply them.
//
//   last warp, one thread   TMA: weights, tokens, scales --> ring of stages       waits for `empty`, ends `full`
//   the other warps         ring --> registers --> mma.sync --> sums              wait for `full`, end `empty`
//
// A block has `units` of 32 columns and `slices` warps for each, which take every slices-th group of 128 along K. A lane
// reads 32 neighbours along K of four columns. The order of K in a product is free as long as both operands share it, so
// that this makes its fragments of the MMA without an exchange. In the end the slices are added up in order.
// blockIdx.x counts `units` units.
#include "common/dequant.cuh"
#include "common/hopper.cuh"
#include "common/launches.cuh"
#include "common/w4_problem.cuh"

namespace rawops {

constexpr int kStreamThreads = 576;  // at most: more warps had to do with fewer registers each, and were no faster

// A copy brings all that a stage has of an operand: K is two axes, of which the inner one is a swizzled row.
struct StreamMaps {
    TensorMap tokens, weights, scale, zero;
};

// How a block is made up, and its stages: the weights, 128 bytes a row and pair of groups, the tokens, 128 bytes a row
// and half a group, scales and zero points.
struct StreamShape {
    int slices, units, stages, groups;  // groups: of a stage
    int token_rows;  // of a box of tokens
    int tokens_at, scale_at, zero_at, stage_bytes, box_bytes;  // box_bytes: of a stage without what only aligns

    __device__ int consumers() const { return slices * units; }

    // From the scales (of a type V) of gate to those of up.
    template <class V> __device__ int part_bytes(int cols) const {
        return ceil_div(groups * units * cols * int(sizeof(V)), 128) * 128;
    }
};

template <class T_, class Scale_, int kFormat_, bool kHasZeros_, int TOKENS_, bool kGated_> struct StreamTile {
    using T = T_;
    using Scale = Scale_;
    using Weights = SmallWeights<T, kFormat_>;
    using Offsets = typename Weights::Offsets[4];  // of a lane's columns
    static constexpr int TOKENS = TOKENS_, ATOMS = TOKENS / 8;
    static constexpr bool kHasZeros = kHasZeros_, kGated = kGated_;
    static constexpr int GROUP = 128, UNIT = 32, PARTS = kGated ? 2 : 1, COLS = UNIT / PARTS;  // of K, of b, of D
    static constexpr int COLUMNS = 4 / PARTS;  // of a lane, neighbours of a part
    static constexpr int SPAN = 128;           // bytes of a swizzled row
    using Accumulators = float[2][ATOMS][4];  // of 16 columns x 8 tokens
    static_assert(TOKENS % 8 == 0, "whole atoms");
};

// Shared addresses of a block.
struct StreamRing {
    const StreamShape& shape;
    uint32_t base, barriers;

    __device__ StreamRing(const StreamShape& shape_, uint32_t shared)
        : shape(shape_), base(shared), barriers(shared + shape_.stages * shape_.stage_bytes) {}
    __device__ uint32_t stage(int i) const { return base + i * shape.stage_bytes; }
    __device__ uint32_t full(int i) const { return barriers + i * 8; }
    __device__ uint32_t empty(int i) const { return barriers + (shape.stages + i) * 8; }

    // By one thread; a __syncthreads() must follow.
    __device__ void init() const {
        for (int i = 0; i < shape.stages; ++i) {
            barrier_init(full(i), 1);
            barrier_init(empty(i), shape.groups * shape.units);
        }
        barrier_init_fence();
    }
};

// A place in the ring; see RingPosition. `group` is of the stage, or of those behind it.
struct StreamPosition {
    int stage = 0, group = 0;
    uint32_t phase = 0;

    __device__ void advance(int stages) {
        if (++stage == stages) {
            stage = 0;
            phase ^= 1;
        }
    }
    // Goes on to the group's stage, and waits for it and each one on the way: a parity tells two phases apart and no
    // more, so that a consumer may miss none.
    __device__ void seek(const StreamRing& ring) {
        while (group >= ring.shape.groups) {
            group -= ring.shape.groups;
            advance(ring.shape.stages);
            barrier_wait(ring.full(stage), phase);
        }
    }
};

// The producer: one thread that keeps the ring full.
template <class Tile>
__device__ inline void load_stages(const StreamMaps& maps, const StreamRing& ring, int groups, int cols) {
    const StreamShape& shape = ring.shape;
    const int part_rows = shape.units * Tile::COLS, n = blockIdx.x * part_rows;
    StreamPosition slot;
#pragma unroll 1
    for (int first = 0; first < groups; first += shape.groups) {
        const uint32_t stage = ring.stage(slot.stage), full = ring.full(slot.stage);
        barrier_wait(ring.empty(slot.stage), slot.phase ^ 1);
        barrier_arrive_expect(full, shape.box_bytes);
#pragma unroll
        for (int part = 0; part < Tile::PARTS; ++part) {
            const int weights_at = part * (shape.groups / 2 * part_rows * Tile::SPAN);
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

// A consumer's lane: where it finds what it multiplies in a stage.
template <class Tile> class StreamLane {
public:
    const int lane;

    __device__ StreamLane(const StreamShape& shape_, int unit, int lane_) : lane(lane_), shape(shape_) {
        const int t = lane % 4, g = lane / 4;
        const int row = unit * Tile::COLS + g * Tile::COLUMNS;
        weights = row * Tile::SPAN + (t ^ row % 8) * 16;
    }

    // The number of its i-th column: the gates of all units come before all of up.
    __device__ int column(int i) const {
        return weights / Tile::SPAN + i % Tile::COLUMNS + i / Tile::COLUMNS * shape.units * Tile::COLS;
    }

    // acc += scale * (tokens @ (q - zero)), a group in the ring.
    __device__ void add_group(typename Tile::Accumulators& acc, const StreamRing& ring, const StreamPosition& slot,
                              int zero_sign) const {
        const uint32_t stage = ring.stage(slot.stage);
        const int group = slot.group;
        const int group_rows = shape.units * Tile::COLS, t = lane % 4;
        const uint32_t first = stage + (weights ^ group % 2 * 64) + group / 2 * group_rows * Tile::SPAN;
        const int to_up = shape.groups / 2 * group_rows * Tile::SPAN;
        uint32_t words[4][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // the swizzle of neighbouring rows: the first has an even number, or one in fours
            const int k = i % Tile::COLUMNS;
            load_shared(words[i], (first ^ k * 16) + k * Tile::SPAN + i / Tile::COLUMNS * to_up);
        }
        const int token = min_of(lane / 4, shape.token_rows - 1), row = (group * 2 + t / 2) * shape.token_rows + token;
        const uint32_t tokens = stage + shape.tokens_at + row * Tile::SPAN + (t % 2 * 4 ^ row % 8) * 16;
        const int own = group * group_rows + column(0);
        typename Tile::Offsets offsets;
        if constexpr (Tile::kHasZeros) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                offsets[i].set((of_column<unsigned char>(stage + shape.zero_at, own, i) ^ zero_sign) - zero_sign);
            }
        }
        typename Tile::Accumulators sum = {};
        multiply(sum, words, tokens, offsets);
        int number = slot.stage;  // once more: the address takes no register among those of the products
        asm volatile("" : "+r"(number));
        const uint32_t scales = ring.stage(number) + shape.scale_at;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float scale = widen(of_column<typename Tile::Scale>(scales, own, i));
#pragma unroll
            for (int j = 0; j < Tile::ATOMS * 2; ++j) {
                float& to = acc[i / 2][j / 2][i % 2 * 2 + j % 2];
                to = fmaf(scale, sum[i / 2][j / 2][i % 2 * 2 + j % 2], to);
            }
        }
    }

private:
    const StreamShape& shape;
    int weights;

    // What the lane's i-th column has.
    template <class V> __device__ V of_column(uint32_t from, int own, int i) const {
        constexpr int COUNT = Tile::COLUMNS;
        const uint32_t at = from + i / COUNT * shape.part_bytes<V>(Tile::COLS) + own * int(sizeof(V));
        return static_cast<const Vector<V, COUNT>*>(__cvta_shared_to_generic(at))->data[i % COUNT];
    }

    __device__ void multiply(typename Tile::Accumulators& sum, const uint32_t (&words)[4][4], uint32_t tokens,
                             const typename Tile::Offsets& offsets) const {
#pragma unroll
        for (int q = 0; q < 4; ++q) {  // eight of K
            uint32_t b[Tile::ATOMS][4];
#pragma unroll
            for (int atom = 0; atom < Tile::ATOMS; ++atom) {
                load_shared(b[atom], (tokens ^ q * 16) + atom * 8 * Tile::SPAN);
                pair_apart(b[atom]);
            }
#pragma unroll
            for (int step = 0; step < 2; ++step) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    uint32_t a[4];  // 16 columns x 16 of K
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int column = half * 2 + i % 2;
                        a[i] = Tile::Weights::pair_apart(words[column][q], step * 2 + i / 2, offsets[column]);
                    }
#pragma unroll
                    for (int atom = 0; atom < Tile::ATOMS; ++atom) {
                        MmaAtom<typename Tile::T>::multiply(sum[half][atom], a, b[atom][step * 2], b[atom][step * 2 + 1]);
                    }
                }
            }
        }
    }
};

// The sums of a block: for each slice of K, TOKENS rows of the columns of all units.
template <class Tile> struct StreamSums {
    float* sums;
    const StreamShape& shape;

    __device__ float* place(int slice, int token, int column) const {
        return sums + ((slice * Tile::TOKENS + token) * shape.units * Tile::UNIT + column);
    }

    __device__ void leave(const typename Tile::Accumulators& acc, int slice, const StreamLane<Tile>& self) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int column = self.column(i);
#pragma unroll
            for (int j = 0; j < Tile::ATOMS * 2; ++j) {
                const int token = j / 2 * 8 + self.lane % 4 * 2 + j % 2;
                *place(slice, token, column) = acc[i / 2][j / 2][i % 2 * 2 + j % 2] * Tile::Weights::kFactor;
            }
        }
    }

    // Of four neighbouring columns.
    __device__ Vector<float, 4> total(int token, int column) const {
        Vector<float, 4> total = {};
#pragma unroll 1
        for (int slice = 0; slice < shape.slices; ++slice) {
            const auto part = *reinterpret_cast<const Vector<float, 4>*>(place(slice, token, column));
#pragma unroll
            for (int i = 0; i < 4; ++i) total.data[i] += part.data[i];
        }
        return total;
    }

    // By all consumers, `thread` of them all.
    template <class Epilogue> __device__ void finish(const Epilogue& epilogue, int rows, int thread) const {
        const int cols = shape.units * Tile::COLS, n = blockIdx.x * cols;
#pragma unroll 1
        for (int piece = thread; piece < rows * (cols / 4); piece += shape.consumers() * kWarpSize) {
            const int token = piece / (cols / 4), column = piece % (cols / 4) * 4;
            auto value = total(token, column), up = value;
            if constexpr (Tile::kGated) up = total(token, cols + column);
            epilogue.finish(token, n + column, value.data, up.data);
        }
    }
};

template <class T, class Out, class Scale, int kFormat, bool kHasZeros, int TOKENS, int kActivation>
__global__ void __launch_bounds__(kStreamThreads, 1)
    gemm_w4_sm90(const __grid_constant__ StreamMaps maps, const __grid_constant__ W4Params params,
                 const __grid_constant__ StreamShape shape) {
    using Epilogue = Epilogue<T, Out, kActivation>;
    using Tile = StreamTile<T, Scale, kFormat, kHasZeros, TOKENS, Epilogue::kGated>;
    extern __shared__ __align__(1024) char shared[];
    const StreamRing ring(shape, shared_address(shared));
    const int warp = __shfl_sync(~0u, int(threadIdx.x) / kWarpSize, 0), lane = threadIdx.x % kWarpSize;
    const int consumers = shape.consumers() * kWarpSize, cols = params.shape.epilogue.cols;
    start_next_launch();
    if (warp == shape.consumers()) {  // begins while the others are on their way
        if (lane == 0) ring.init();
        __syncwarp();
        asm volatile("bar.arrive 2, %0;" ::"r"(consumers + kWarpSize) : "memory");
    }
    await_launch_before();
    const int groups = float(params.call.alpha.read()) == 0 ? 0 : params.shape.K / Tile::GROUP;  // 0: a and b are not read
    if (warp == shape.consumers()) {
        if (lane == 0) load_stages<Tile>(maps, ring, groups, cols);
        return;
    }
    asm volatile("bar.sync 2, %0;" ::"r"(consumers + kWarpSize) : "memory");
    const StreamLane<Tile> self(shape, warp / shape.slices, lane);
    int group = warp % shape.slices;
    StreamPosition slot;
    slot.group = group;
    if (groups > 0) barrier_wait(ring.full(0), 0);
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
    const StreamSums<Tile> sums{reinterpret_cast<float*>(shared), shape};
    sums.leave(acc, group % shape.slices, self);
    asm volatile("bar.sync 1, %0;" ::"r"(consumers) : "memory");
    const int batch[3] = {};
    const float alpha = params.call.alpha.read();  // once more: it takes no register in the main loop
    const Epilogue epilogue(params.call.epilogue, params.shape.epilogue, batch, alpha);
    sums.finish(epilogue, min_of(TOKENS, params.shape.M), threadIdx.x);
}

}  // namespace rawops
