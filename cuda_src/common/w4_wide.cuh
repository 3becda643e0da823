// What a block of gemm_w4_wide_sm90.cu computes at a time, where it keeps it, its producer and its consumers up to the
// sums in their registers.
#pragma once
#include "dequant.cuh"
#include "w4_problem.cuh"
#include "wgmma.cuh"

namespace rawops {

struct WideMaps {
    TensorMap tokens, weights, d, scale, zero;
};

// How the sums of a tile become D. The numbers are those of _gemm_w4_wide.py.
enum WideFinish : int {
    kBySlab,  // any epilogue
    kByBox,   // alpha, bias, activation; through TMA
    kByRing,  // any epilogue, in blocks of one tile
};

template <class T_, class Scale_, int kFormat_, bool kHasZeros_, int GROUP_, int TOKENS_, int UNITS_, int SLICES_,
          int STAGES_, bool kKMajor_, bool kGated_, int kFinish_, int CLUSTER_>
struct WideTile {
    using T = T_;
    using Scale = Scale_;
    using Weights = SmallWeights<T, kFormat_>;
    static constexpr bool kHasZeros = kHasZeros_, kKMajor = kKMajor_, kGated = kGated_;
    static constexpr int kFinish = kFinish_, CLUSTER = CLUSTER_;
    static constexpr int GROUP = GROUP_, TOKENS = TOKENS_, UNITS = UNITS_, SLICES = SLICES_, STAGES = STAGES_;
    static constexpr int CONSUMERS = UNITS * SLICES, THREADS = (1 + CONSUMERS) * kWarpGroupSize;
    static constexpr int UNIT = 64, PARTS = kGated ? 2 : 1, COLS = UNITS * UNIT / PARTS;  // of b, of D
    static constexpr int BLOCK_K = 128, GROUPS = BLOCK_K / GROUP;
    // K is multiplied in sections. What is read from shared memory for one stands in line behind products, the other
    // consumers' too. So it is read while AHEAD others are still to be dequantised, and a consumer that goes on has at
    // most IN_LINE unfinished. The numbers are as measured, since the compiler orders the rest differently with each: a
    // wait for nothing, after the second section of a group, helps some. More consumers have fewer registers.
    static constexpr int STEPS = 2, SECTION = STEPS * 16, SECTIONS = BLOCK_K / SECTION;
    static constexpr int AHEAD = CONSUMERS == 2 ? 2 : 1, FRAGMENTS = AHEAD * 2;
    static constexpr bool kShortLine = kKMajor && kFormat_ != kFloat4 && kFinish == kByBox;
    static constexpr int IN_LINE = CONSUMERS == 2 && !kShortLine ? 3 : AHEAD, WAITS_AFTER = kShortLine ? 1 : IN_LINE;
    static_assert(IN_LINE < FRAGMENTS && SECTIONS % FRAGMENTS == 0, "fragments that are replaced have been read");
    static constexpr int PRODUCER_REGISTERS = CONSUMERS == 2 ? 40 : 24;
    static constexpr int CONSUMER_REGISTERS = CONSUMERS == 2 ? 232 : 112;
    using Operand = WgmmaOperand<true, 64>;
    using Sums = float[TOKENS / 2];

    // A stage: tokens in boxes of 64 along K, weights unit by unit, scales and zero points part by part: boxes of those
    // have the groups of K for rows.
    static constexpr int OF_PART = UNITS / PARTS, PART_COLS = OF_PART * UNIT;
    static constexpr int TOKEN_BOX = TOKENS * 128, UNIT_BYTES = UNIT * BLOCK_K / 2;
    static constexpr int UNITS_IN_BOX = kKMajor ? OF_PART : 1;  // of weights
    static constexpr int SCALE_BOX = GROUPS * PART_COLS * int(sizeof(Scale)), ZERO_BOX = GROUPS * PART_COLS;
    static constexpr int WEIGHTS_AT = 2 * TOKEN_BOX, SCALES_AT = WEIGHTS_AT + UNITS * UNIT_BYTES;
    static constexpr int ZERO_STEP = ceil_div(ZERO_BOX, 128) * 128, ZEROS_AT = SCALES_AT + PARTS * SCALE_BOX;
    static constexpr int END = ZEROS_AT + (kHasZeros ? PARTS * ZERO_STEP : 0);
    static constexpr int STAGE_BYTES = ceil_div(END, 1024) * 1024;
    static constexpr int COPIED = SCALES_AT + PARTS * (SCALE_BOX + (kHasZeros ? ZERO_BOX : 0));

    // Behind the ring: a box of D for each unit, or sums of CHUNK tokens on their way to it, in rows so long that a
    // store's lanes meet all banks. A block of one tile has the ring for the sums of all.
    static constexpr int BOX = TOKENS * UNIT * 2, CHUNK = 16, SLAB_ROW = UNITS * UNIT + 4;
    static constexpr int FINISH_AT = kFinish == kByRing ? 0 : STAGES * STAGE_BYTES;
    static constexpr int FINISH_BYTES = kFinish == kByBox ? UNITS * BOX : kFinish == kBySlab ? CHUNK * SLAB_ROW * 4 : 0;
    static constexpr int BARRIERS_AT = STAGES * STAGE_BYTES + FINISH_BYTES;
    static_assert(TOKENS % 16 == 0 && CONSUMERS * TOKENS <= 256, "sum and part of it fit in the registers");
    static_assert(UNITS % PARTS == 0, "units of gate and of up");
    static_assert(CONSUMERS != 2 || SLICES == 1, "two consumers have all stages: see await_first()");
    static_assert(kFinish != kByBox || (PARTS == 1 && SLICES == 1), "a consumer alone knows what a box holds");
    static_assert(kFinish != kByRing || SLICES * TOKENS * SLAB_ROW * 4 <= STAGES * STAGE_BYTES,
                  "the ring holds the sums");
    static_assert(CLUSTER == 1 || kFinish == kByRing, "a block of a cluster has one tile");
    // A consumer that has seen one phase of a stage waits for no other than the next, before it lets go of the last.
    static_assert(STAGES % SLICES == 0 && STAGES > SLICES, "a stage is always the same slice's");
};

// What a block works on: a tile and a slice of K. The blocks of a cluster have one tile, of which each takes a slice.
struct WideWork {
    int m, n, slice, first_block, blocks;
};

template <class Tile> class WideSchedule {
public:
    int first, count, step;

    __device__ WideSchedule(const GemmShape& shape_, int raster_rows_)
        : first(blockIdx.x / Tile::CLUSTER), step(gridDim.x / Tile::CLUSTER), shape(shape_), raster_rows(raster_rows_) {
        tiles_m = ceil_div(shape.M, Tile::TOKENS);
        tiles_n = ceil_div(shape.epilogue.cols, Tile::COLS);
        blocks = ceil_div(shape.K, Tile::BLOCK_K);
        per_slice = ceil_div(shape.k_per_split, Tile::BLOCK_K);
        count = tiles_m * tiles_n * (Tile::CLUSTER > 1 ? 1 : ceil_div(blocks, per_slice));
    }

    // a and b are not read.
    __device__ void skip_operands() { blocks = 0; }

    __device__ WideWork at(int index) const {
        const int tiles = tiles_m * tiles_n, slice = Tile::CLUSTER > 1 ? cluster_rank() : index / tiles;
        const int begin = slice * per_slice, number = Tile::CLUSTER > 1 ? index : index - slice * tiles;
        const TileIndex tile = grouped_raster(number, tiles_m, tiles_n, raster_rows);
        return {tile.m * Tile::TOKENS, tile.n * Tile::COLS, slice, begin, clamp(blocks - begin, 0, per_slice)};
    }

private:
    const GemmShape& shape;
    int raster_rows, tiles_m, tiles_n, per_slice, blocks;
};

// Starts the copies of weights, scales and zero points of a block of K. kLater: nobody yet, but the L2 is to have them.
template <class Tile, bool kLater = false>
__device__ inline void load_weights(const WideMaps& maps, int n, int block, int cols, uint32_t stage, uint32_t full) {
    auto load = [&](int at, const TensorMap& map, const TensorCoordinates& from) {
        if constexpr (kLater) tma_prefetch(map, from);
        else tma_load(stage + at, map, from, full);
    };
    const int k = block * (Tile::BLOCK_K / 2);
#pragma unroll
    for (int unit = 0; unit < Tile::UNITS; unit += Tile::UNITS_IN_BOX) {
        const int column = n + unit % Tile::OF_PART * Tile::UNIT + unit / Tile::OF_PART * cols;
        const int x = Tile::kKMajor ? k : column, y = Tile::kKMajor ? column : k;
        load(Tile::WEIGHTS_AT + unit * Tile::UNIT_BYTES, maps.weights, {x, y, 0, 0, 0});
    }
#pragma unroll
    for (int part = 0; part < Tile::PARTS; ++part) {
        const TensorCoordinates from = {n + part * cols, block * Tile::GROUPS, 0, 0, 0};
        load(Tile::SCALES_AT + part * Tile::SCALE_BOX, maps.scale, from);
        if constexpr (Tile::kHasZeros) load(Tile::ZEROS_AT + part * Tile::ZERO_STEP, maps.zero, from);
    }
}

// Asks the L2 for the first block of K, while the launch before is still at work, where there are many more. It fetches
// 256 bytes at a time, four blocks of a column, if K is contiguous. What several tiles read, the first one asks for.
template <class Tile>
__device__ inline void ask_ahead(const WideMaps& maps, const WideSchedule<Tile>& schedule, int cols) {
    constexpr int MANY = 24;  // 64 x 4096 x 4096, which has 16, took 0.5 % longer
    if (schedule.first >= schedule.count) return;
    const WideWork work = schedule.at(schedule.first);
    if (work.m == 0 && work.blocks >= MANY) load_weights<Tile, true>(maps, work.n, work.first_block, cols, 0, 0);
}

// The producer: one thread that keeps the ring full.
template <class Tile>
__device__ inline void load_wide(const WideMaps& maps, const WideSchedule<Tile>& schedule, int cols, uint32_t ring,
                                 const RingBarriers<Tile::STAGES>& barriers) {
    RingPosition<Tile::STAGES> slot;
#pragma unroll 1
    for (int index = schedule.first; index < schedule.count; index += schedule.step) {
        const WideWork work = schedule.at(index);
#pragma unroll 1
        for (int block = work.first_block; block < work.first_block + work.blocks; ++block) {
            const uint32_t stage = ring + slot.stage * Tile::STAGE_BYTES, full = barriers.full(slot.stage);
            barrier_wait(barriers.empty(slot.stage), slot.phase ^ 1);
            barrier_arrive_expect(full, Tile::COPIED);
            load_weights<Tile>(maps, work.n, block, cols, stage, full);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int k = block * Tile::BLOCK_K + half * 64;
                tma_load(stage + half * Tile::TOKEN_BOX, maps.tokens, {k, work.m, 0, 0, 0}, full);
            }
            slot.advance();
        }
    }
}

// A thread of a consumer. Its two rows of the product, which are columns of D, are `column` and the one behind.
template <class Tile> class WideConsumer {
public:
    int number, unit, slice, warp, lane, column;

    __device__ WideConsumer(int number_, int thread, int zero_sign_)
        : number(number_),
          unit(number_ % Tile::UNITS),
          slice(number_ / Tile::UNITS),
          warp(thread / kWarpSize),
          lane(thread % kWarpSize),
          zero_sign(zero_sign_) {
        const int g = lane / 4, t = lane % 4;
        column = warp * 16 + g * 2;
        select = 0x4040 + t * 0x1111;
        constant = Tile::Weights::kConstant + (zero_sign & 1);  // of 0 or 128, which the compiler does not know
        weights = Tile::WEIGHTS_AT + unit * Tile::UNIT_BYTES;
        if constexpr (Tile::kKMajor) {
            weights += column * 64 + g % 4 * 16;
        } else {  // ldmatrix brings two rows to a lane, here the same one twice
            const int row = lane / 2;
            weights += row * 64 + (warp ^ row / 2 % 4) * 16;
        }
    }

    // sum = a @ b over the consumer's share of `blocks` stages.
    __device__ void multiply(typename Tile::Sums& sum, int blocks, uint32_t ring, RingPosition<Tile::STAGES> slot,
                             const RingBarriers<Tile::STAGES>& barriers) const {
        constexpr int SECTIONS = Tile::SECTIONS, AHEAD = Tile::AHEAD, FRAGMENTS = Tile::FRAGMENTS;
#pragma unroll
        for (int i = 0; i < Tile::TOKENS / 2; ++i) sum[i] = 0;
        const int first = (slice - slot.stage % Tile::SLICES + Tile::SLICES) % Tile::SLICES;
        if (first >= blocks) return;
        auto begin = [&] {
            barrier_wait(barriers.full(slot.stage), slot.phase);
            return ring + slot.stage * Tile::STAGE_BYTES;
        };
        Fragments a[FRAGMENTS];
        Packed packed[AHEAD];
        slot.skip(first);
        uint32_t stage = begin();
#pragma unroll
        for (int section = 0; section < AHEAD; ++section) fetch(packed[section], stage, section);
        dequantise(a[0], packed[0]);
        fetch(packed[0], stage, AHEAD);
        typename Tile::Sums part;
        const bool apart = Tile::CONSUMERS == 2 && blocks > Tile::STAGES;  // see await_first()
        if (apart && number == 1) await_first();
#pragma unroll 1
        for (int block = first; block < blocks; block += Tile::SLICES) {
            const int current = slot.stage;
            uint32_t next = stage;
            float scale[2];
#pragma unroll
            for (int section = 0; section < SECTIONS; ++section) {
                const int begin_k = section * Tile::SECTION, end_k = begin_k + Tile::SECTION;
                const int fetched = section + 1 + AHEAD;
                if (begin_k % Tile::GROUP == 0) read_scales(scale, stage, begin_k / Tile::GROUP);
                begin_products(part, a[section % FRAGMENTS], stage, section);
                if (apart && number == 0 && block == 0 && section == 1) release_second();
                if (fetched == SECTIONS && block + Tile::SLICES < blocks) {
                    slot.skip(Tile::SLICES);
                    next = begin();
                }
                if (begin_k % Tile::GROUP / Tile::SECTION >= Tile::WAITS_AFTER) wgmma_wait<Tile::IN_LINE>();
                // After the last stage these are its own first sections once more, which does no harm.
                dequantise(a[(section + 1) % FRAGMENTS], packed[(section + 1) % AHEAD]);
                fetch(packed[(section + 1) % AHEAD], fetched < SECTIONS ? stage : next, fetched % SECTIONS);
                if (end_k % Tile::GROUP == 0) {
                    add_group(sum, part, scale, barriers.empty(current), section + 1 == SECTIONS);
                }
            }
            stage = next;
        }
    }

    __device__ bool leads() const { return warp == 0 && lane == 0; }
    __device__ void sync() const { sync_group<kWarpGroupSize>(3 + number); }

private:
    int zero_sign, weights;
    uint32_t select, constant;

    // The second of two consumers begins a tile when the first has begun half a stage, so that they do not add up at
    // the same time. With no more blocks than stages, the first might be at its next tile before the second waits.
    __device__ void await_first() const { sync_group<2 * kWarpGroupSize>(2); }
    __device__ void release_second() const { arrive_group<2 * kWarpGroupSize>(2); }

    template <class V> __device__ Vector<V, 2> pair_at(uint32_t boxes, int step, int group) const {
        const int n = unit % Tile::OF_PART * Tile::UNIT + column;
        const uint32_t at = boxes + unit / Tile::OF_PART * step + (group * Tile::PART_COLS + n) * int(sizeof(V));
        return *static_cast<const Vector<V, 2>*>(__cvta_shared_to_generic(at));
    }

    __device__ void read_scales(float (&scale)[2], uint32_t stage, int group) const {
        const auto pair = pair_at<typename Tile::Scale>(stage + Tile::SCALES_AT, Tile::SCALE_BOX, group);
        for (int i = 0; i < 2; ++i) scale[i] = widen(pair.data[i]);
    }

    // What a section's fragments are made of, as shared memory has it.
    struct Packed {
        uint32_t words[Tile::STEPS][Tile::kKMajor ? 4 : 2];
        Vector<unsigned char, 2> zero;
    };
    using Fragments = uint32_t[Tile::STEPS][4];

    __device__ void fetch(Packed& packed, uint32_t stage, int section) const {
#pragma unroll
        for (int step = 0; step < Tile::STEPS; step += 2) {
            const int at = section * Tile::STEPS + step;
            if constexpr (Tile::kKMajor) {  // 32 along K of each column
#pragma unroll
                for (int i = 0; i < 2; ++i) load_shared(packed.words[step + i], ((stage + weights) ^ at * 8) + i * 64);
            } else {
                uint32_t four[4];
                ldmatrix<true>(four, stage + weights + at * 8 * 64);
#pragma unroll
                for (int i = 0; i < 4; ++i) packed.words[step + i / 2][i % 2] = four[i];
            }
        }
        if constexpr (Tile::kHasZeros) {
            const int group = section * Tile::SECTION / Tile::GROUP;
            packed.zero = pair_at<unsigned char>(stage + Tile::ZEROS_AT, Tile::ZERO_STEP, group);
        }
    }

    __device__ void dequantise(Fragments& a, const Packed& packed) const {
        typename Tile::Weights::Offsets offsets[2];
        if constexpr (Tile::kHasZeros) {
            for (int i = 0; i < 2; ++i) offsets[i].set((packed.zero.data[i] ^ zero_sign) - zero_sign);
        }
#pragma unroll
        for (int step = 0; step < Tile::STEPS; ++step) {
            // Two bytes twice: of a column, four apart along K, or of both columns.
            uint32_t both[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const uint32_t* words = packed.words[Tile::kKMajor ? step / 2 * 2 + i : step];
                if constexpr (Tile::kKMajor) {
                    both[i] = __byte_perm(words[step % 2 * 2], words[step % 2 * 2 + 1], select);
                } else {
                    both[i] = words[i];
                }
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {  // entry j of the fragment: column j % 2, the first or the second eight of K
                uint32_t(&of)[4] = a[step];
                if constexpr (Tile::kKMajor) {
                    Tile::Weights::pairs(of[i], of[i + 2], both[i], constant, offsets[i], offsets[i]);
                } else {
                    Tile::Weights::pairs(of[i * 2], of[i * 2 + 1], both[i], constant, offsets[0], offsets[1]);
                }
            }
        }
    }

    // part = the products of a section, or part += them. They go on while the consumer does.
    __device__ void begin_products(typename Tile::Sums& part, const Fragments& a, uint32_t stage, int section) const {
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < Tile::STEPS; ++step) {
            const int k = section * Tile::SECTION + step * 16;
            const uint64_t tokens = Tile::Operand::descriptor(stage + k / 64 * Tile::TOKEN_BOX);
            Wgmma<Tile::TOKENS>::template multiply<typename Tile::T, true>(
                part, a[step], Tile::Operand::advance(tokens, 0, k % 64 / 16), k % Tile::GROUP != 0);
        }
        wgmma_commit();
    }

    // Waits for the products of a group, lets go of the stage after its last one, and adds up.
    __device__ void add_group(typename Tile::Sums& sum, typename Tile::Sums& part, const float (&scale)[2],
                              uint32_t empty, bool is_last) const {
        wgmma_wait<0>();
        hold(part);
        if (is_last) {
            __syncwarp();
            if (lane == 0) barrier_arrive(empty);
        }
#pragma unroll
        for (int i = 0; i < Tile::TOKENS / 2; ++i) sum[i] = fmaf(scale[i / 2 % 2], part[i], sum[i]);
    }
};

}  // namespace rawops
