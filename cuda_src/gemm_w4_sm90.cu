// A few tokens times packed 4-bit weights on Hopper: K contiguous, a scale for each 128. TMA keeps far more on its way
// from memory than registers could, and the weights are dequantised in the registers of the lanes that multiply them.
//
//   last warp, one thread   TMA: weights, tokens, scales --> ring of stages       waits for `empty`, ends `full`
//   the other warps         ring --> registers --> mma.sync --> sums              wait for `full`, end `empty`
//
// A block has `units` of 32 columns and `slices` warps for each, which take a group of 128 along K of every stage. A lane
// reads 32 neighbours along K of four columns. The order of K in a product is free as long as both operands share it, so
// that this makes its fragments of the MMA without an exchange. In the end the slices are added up in order.
// blockIdx.x counts `units` units.
#include "common/dequant.cuh"
#include "common/hopper.cuh"
#include "common/w4_problem.cuh"

namespace rawops {

constexpr int kStreamThreads = 512;  // at most

// A copy brings all that a stage has of an operand: K is two axes, of which the inner one is a swizzled row.
struct StreamMaps {
    TensorMap tokens, weights, scale, zero;
};

// How a block is made up, and its stages: the weights, 128 bytes a row and pair of slices, the tokens, 128 bytes a row
// and half a slice, scales and zero points.
struct StreamShape {
    int slices, units, stages;
    int tokens_at, scale_at, zero_at, stage_bytes, box_bytes;  // box_bytes: of a stage without what only aligns

    __device__ int consumers() const { return slices * units; }

    // From the scales (of a type V) of gate to those of up.
    template <class V> __device__ int part_bytes(int cols) const {
        return ceil_div(slices * units * cols * int(sizeof(V)), 128) * 128;
    }
};

template <class T_, class Scale_, int kFormat_, bool kHasZeros_, int TOKENS_, bool kGated_> struct StreamTile {
    using T = T_;
    using Scale = Scale_;
    static constexpr int kFormat = kFormat_, TOKENS = TOKENS_, ATOMS = TOKENS / 8;
    static constexpr bool kHasZeros = kHasZeros_, kGated = kGated_;
    static constexpr int GROUP = 128, UNIT = 32, PARTS = kGated ? 2 : 1, COLS = UNIT / PARTS;  // of K, of b, of D
    static constexpr int SPAN = 128;  // bytes of a swizzled row
    // Of a box of tokens: two more, past M or not used, so that what eight lanes read lies in different banks.
    static constexpr int TOKEN_ROWS = TOKENS + 2;
    using Accumulators = float[2][ATOMS][4];  // of 16 columns x 8 tokens
    static_assert(TOKENS % 8 == 0, "whole atoms");

    // Where the gates of all units come before all of up.
    static __device__ int column(int unit, int units, int i, int lane) {
        return kGated ? (i / 2 * units + unit) * COLS + lane / 4 * 2 + i % 2 : unit * UNIT + lane / 4 * 4 + i;
    }
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
            barrier_init(empty(i), shape.consumers());
        }
        barrier_init_fence();
    }
};

// A place in the ring; see RingPosition.
struct StreamPosition {
    int stage = 0;
    uint32_t phase = 0;
    __device__ void advance(int stages) {
        if (++stage == stages) {
            stage = 0;
            phase ^= 1;
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
    for (int first = 0; first < groups; first += shape.slices) {
        const uint32_t stage = ring.stage(slot.stage), full = ring.full(slot.stage);
        barrier_wait(ring.empty(slot.stage), slot.phase ^ 1);
        barrier_arrive_expect(full, shape.box_bytes);
#pragma unroll
        for (int part = 0; part < Tile::PARTS; ++part) {
            const int weights_at = part * (shape.slices / 2 * part_rows * Tile::SPAN);
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
    int slice, unit, lane;

    __device__ StreamLane(const StreamShape& shape_, int warp, int lane_)
        : slice(warp % shape_.slices), unit(warp / shape_.slices), lane(lane_), shape(shape_) {
        const int t = lane % 4, g = lane / 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int part_rows = shape.units * Tile::COLS, part = Tile::kGated ? i / 2 : 0;
            const int row = Tile::column(unit, shape.units, i, lane) - part * part_rows;
            const int box = part * (shape.slices / 2) + slice / 2, chunk = (slice % 2 * 4 + t) ^ (row % 8);
            weights[i] = (box * part_rows + row) * Tile::SPAN + chunk * 16;
        }
        const int row = (slice * 2 + t / 2) * Tile::TOKEN_ROWS + g;
        tokens = shape.tokens_at + row * Tile::SPAN + ((t % 2 * 4) ^ (row % 8)) * 16;
        column = slice * shape.units * Tile::COLS + Tile::column(unit, shape.units, 0, lane);
    }

    // acc += scale * (tokens @ (q - zero)), the slice's group.
    __device__ void add_group(typename Tile::Accumulators& acc, uint32_t stage, int zero_sign) const {
        uint32_t words[4][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) load_shared(words[i], stage + weights[i]);
        typename Tile::Accumulators sum = {};
        if constexpr (Tile::kHasZeros) multiply(sum, words, stage, zeros(stage, zero_sign));
        else multiply(sum, words, stage, NoZeroPoints());
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float scale = widen(of_column<typename Tile::Scale>(stage + shape.scale_at, i));
#pragma unroll
            for (int j = 0; j < Tile::ATOMS * 2; ++j) {
                float& to = acc[i / 2][j / 2][i % 2 * 2 + j % 2];
                to = fmaf(scale, sum[i / 2][j / 2][i % 2 * 2 + j % 2], to);
            }
        }
    }

private:
    const StreamShape& shape;
    int weights[4], tokens, column;

    // What the lane's i-th column has.
    template <class V> __device__ V of_column(uint32_t from, int i) const {
        constexpr int COUNT = 4 / Tile::PARTS;
        const uint32_t at = from + i / COUNT * shape.part_bytes<V>(Tile::COLS) + column * int(sizeof(V));
        return static_cast<const Vector<V, COUNT>*>(__cvta_shared_to_generic(at))->data[i % COUNT];
    }

    __device__ ZeroPoints<typename Tile::T> zeros(uint32_t stage, int sign) const {
        ZeroPoints<typename Tile::T> found;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int byte = of_column<unsigned char>(stage + shape.zero_at, i);
            found.value[i] = Half<typename Tile::T>::both(float((byte ^ sign) - sign));
        }
        return found;
    }

    template <class Zeros>
    __device__ void multiply(typename Tile::Accumulators& sum, const uint32_t (&words)[4][4], uint32_t stage,
                             const Zeros& zeros) const {
        using T = typename Tile::T;
#pragma unroll
        for (int q = 0; q < 4; ++q) {  // eight of K
            uint32_t b[Tile::ATOMS][4];
#pragma unroll
            for (int atom = 0; atom < Tile::ATOMS; ++atom) {
                load_shared(b[atom], ((stage + tokens) ^ q * 16) + atom * 8 * Tile::SPAN);
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
                        const uint32_t pair = pair_apart<T, Tile::kFormat>(words[column][q], step * 2 + i / 2);
                        a[i] = zeros.subtract_from(pair, column);
                    }
#pragma unroll
                    for (int atom = 0; atom < Tile::ATOMS; ++atom) {
                        MmaAtom<T>::multiply(sum[half][atom], a, b[atom][step * 2], b[atom][step * 2 + 1]);
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

    __device__ void leave(const typename Tile::Accumulators& acc, const StreamLane<Tile>& self) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int column = Tile::column(self.unit, shape.units, i, self.lane);
#pragma unroll
            for (int j = 0; j < Tile::ATOMS * 2; ++j) {
                const int token = j / 2 * 8 + self.lane % 4 * 2 + j % 2;
                *place(self.slice, token, column) = acc[i / 2][j / 2][i % 2 * 2 + j % 2];
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
    const float alpha = params.call.alpha.read();
    const int groups = alpha == 0 ? 0 : params.shape.K / Tile::GROUP;  // 0: a and b are not read
    if (warp == shape.consumers()) {  // begins while the others are on their way
        if (lane == 0) ring.init();
        __syncwarp();
        asm volatile("bar.arrive 2, %0;" ::"r"(consumers + kWarpSize) : "memory");
        if (lane == 0) load_stages<Tile>(maps, ring, groups, cols);
        return;
    }
    asm volatile("bar.sync 2, %0;" ::"r"(consumers + kWarpSize) : "memory");
    const StreamLane<Tile> self(shape, warp, lane);
    StreamPosition slot;
    typename Tile::Accumulators acc = {};
#pragma unroll 1
    for (int group = self.slice; group - self.slice < groups; group += shape.slices) {
        barrier_wait(ring.full(slot.stage), slot.phase);
        if (group < groups) self.add_group(acc, ring.stage(slot.stage), params.groups.zero_sign);
        __syncwarp();
        if (lane == 0) barrier_arrive(ring.empty(slot.stage));
        slot.advance(shape.stages);
    }
    const StreamSums<Tile> sums{reinterpret_cast<float*>(shared + shape.stages * (shape.stage_bytes + 16)), shape};
    sums.leave(acc, self);
    asm volatile("bar.sync 1, %0;" ::"r"(consumers) : "memory");
    const int batch[3] = {};
    const Epilogue epilogue(params.call.epilogue, params.shape.epilogue, batch, alpha);
    sums.finish(epilogue, min_of(TOKENS, params.shape.M), threadIdx.x);
}

}  // namespace rawops
