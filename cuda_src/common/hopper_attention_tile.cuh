// What a block of the Hopper attention works on, in which order, where it keeps it, and how its warpgroups tell each
// other.
#pragma once
#include "attention_problem.cuh"
#include "wgmma.cuh"

namespace rawops {

// D and DV: head sizes of q and k, and of v, that are paid for; TMA fills what the arrays lack with zeros.
template <class T_, int D_, int DV_, int CONSUMERS_, int BLOCK_N_, int STAGES_, bool kTurns_> struct HopperAttention {
    using T = T_;
    static constexpr int D = D_, DV = DV_, CONSUMERS = CONSUMERS_, BLOCK_N = BLOCK_N_, STAGES = STAGES_;
    static constexpr bool kTurns = kTurns_;
    static constexpr bool kLags = DV > 128;  // narrower output is rescaled in less time than it takes to ask
    static constexpr int BLOCK_M = 64 * CONSUMERS, THREADS = (1 + CONSUMERS) * kWarpGroupSize;
    // Boxes of TMA are as wide as the swizzle.
    static constexpr int SPAN = D % 64 == 0 ? 128 : 64, BOX = SPAN / 2, BOXES = D / BOX;
    static constexpr int SPAN_V = DV % 64 == 0 ? 128 : 64, BOX_V = SPAN_V / 2, BOXES_V = DV / BOX_V;
    using OperandK = WgmmaOperand<true, BOX, SPAN>;  // and q
    using OperandV = WgmmaOperand<false, BLOCK_N, SPAN_V>;
    using Scores = float[BLOCK_N / 2];
    using Output = float[DV / 2];
    using Weights = uint32_t[BLOCK_N / 16][4];

    static constexpr int Q_BYTES = 64 * D * 2;  // of a consumer
    static constexpr int K_BYTES = BLOCK_N * D * 2, V_BYTES = BLOCK_N * DV * 2;
    static constexpr int K_AT = CONSUMERS * Q_BYTES, V_AT = K_AT + STAGES * K_BYTES;
    static constexpr int BARRIERS_AT = V_AT + STAGES * V_BYTES;
    static constexpr int WORK_AT = BARRIERS_AT + 2 * RingBarriers<STAGES>::BYTES + 48;  // barriers of q and of the slots
    static constexpr int PRODUCER_REGISTERS = CONSUMERS == 3 ? 32 : 40, REGISTERS = CONSUMERS == 3 ? 160 : 232;

    static_assert(DV % 32 == 0, "a quad stores four eighths of 64 bytes");
    static_assert(K_BYTES % 1024 == 0 && V_BYTES % 1024 == 0, "tiles start where the swizzle does");
};

struct AttentionMaps {
    TensorMap q, k, v;  // axes: 1, sequence, head, row, column
};

// Heads go in sections whose operands stay in the L2 together. Within a section, the longest tiles come first: under
// causality the last ones of queries, and the first ones of keys (kFirstLongest).
template <bool kFirstLongest> class AttentionSchedule {
public:
    int count;

    __device__ AttentionSchedule(const AttentionParams& params_, int section_, int* taken_)
        : count((params_.shape.batches + (params_.call.cu_seqlens_q != nullptr)) * params_.shape.row_tiles *
                (params_.shape.heads / params_.shape.packed)),
          params(params_),
          section(section_),
          taken(taken_) {}

    // The index of this block's tile after another one; the first one has its own number. With a counter, whoever is
    // free takes the next one; else it goes there and back again over the blocks, to even out their work. Each block
    // asks once for a tile that is not there: the last one to ask leaves 0 for the next launch.
    __device__ int after(int index) const {
        if (!taken) {
            const int turn = index / gridDim.x + 1;
            return turn * gridDim.x + (turn % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
        }
        const int before = atomicAdd(taken, 1);
        if (before == count - 1) atomicExch(taken, 0);
        return gridDim.x + before;
    }

    __device__ AttentionBlock at(int index) const {
        const int tiles = params.shape.row_tiles, first = index / (section * tiles) * section;
        const int heads = min_of(section, count / tiles - first);
        index -= first * tiles;
        const int order = kFirstLongest ? tiles - 1 - index / heads : index / heads;  // 0 is the last tile
        return AttentionBlock(params, (first + index % heads) * tiles + order);
    }

private:
    const AttentionParams& params;
    int section;
    int* taken;
};

// The blocks of keys that a tile sees, [first, end) in units of BLOCK_N.
struct KeyBlocks {
    int first, end;

    template <class Tile> static __device__ KeyBlocks of(const AttentionShape& shape, const AttentionBlock& block) {
        const int row = block.tile * Tile::BLOCK_M, last = min_of(row + Tile::BLOCK_M, block.rows(shape)) - 1;
        const KeyRange keys = block.keys(shape, row, last, Tile::BLOCK_N);
        if (row > last || keys.is_empty()) return {0, 0};
        return {keys.begin / Tile::BLOCK_N, ceil_div(keys.end, Tile::BLOCK_N)};
    }

    // Those of which no row misses a key that is in memory: where the storage ends, TMA fills with zeros.
    template <class Tile>
    static __device__ KeyBlocks uncut(const AttentionParams& params, const AttentionBlock& block) {
        const int row = block.tile * Tile::BLOCK_M, last = min_of(row + Tile::BLOCK_M, block.rows(params.shape)) - 1;
        const int begin = block.visible(params.shape, last).begin, end = block.visible(params.shape, row).end;
        const bool is_last = end == block.k_len && !params.call.cu_seqlens_k && !params.call.seqlens_k;
        return {ceil_div(begin, Tile::BLOCK_N), (end + is_last * (Tile::BLOCK_N - 1)) / Tile::BLOCK_N};
    }

    __device__ bool has(int block) const { return block >= first && block < end; }
};

// How the consumers learn from the producer what comes next: two places, so that it can be ahead by one. Consumers read
// where it lies, which keeps their registers for tiles.
struct WorkSlots {
    static constexpr int BYTES = 2 * sizeof(AttentionBlock);
    AttentionBlock* places;
    RingBarriers<2> barriers;

    __device__ void init(int consumers) const { barriers.init(consumers); }

    __device__ AttentionBlock& next(const RingPosition<2>& at) const {
        barrier_wait(barriers.empty(at.stage), at.phase ^ 1);
        return places[at.stage];
    }
    __device__ void put(RingPosition<2>& at) const {
        barrier_arrive(barriers.full(at.stage));
        at.advance();
    }
    __device__ const AttentionBlock& take(const RingPosition<2>& at) const {
        barrier_wait(barriers.full(at.stage), at.phase);
        return places[at.stage];
    }
    __device__ void release(RingPosition<2>& at, bool leads) const {
        if (leads) barrier_arrive(barriers.empty(at.stage));
        at.advance();
    }
};

template <class Tile> struct AttentionExchange {
    uint32_t q, k, v;
    RingBarriers<Tile::STAGES> k_barriers, v_barriers;
    RingBarriers<1> q_barriers;
    WorkSlots work;

    __device__ explicit AttentionExchange(char* shared)
        : q(shared_address(shared)),
          k(q + Tile::K_AT),
          v(q + Tile::V_AT),
          k_barriers{q + Tile::BARRIERS_AT},
          v_barriers{k_barriers.base + k_barriers.BYTES},
          q_barriers{v_barriers.base + v_barriers.BYTES},
          work{reinterpret_cast<AttentionBlock*>(shared + Tile::WORK_AT), {q_barriers.base + q_barriers.BYTES}} {}

    // By one thread; a __syncthreads() must follow.
    __device__ void init() const {
        k_barriers.init(Tile::CONSUMERS);
        v_barriers.init(Tile::CONSUMERS);
        q_barriers.init(Tile::CONSUMERS);
        work.init(Tile::CONSUMERS);
    }
};

// Starts the copies of ROWS rows from `from` on, box after box.
template <int ROWS, int BOX, int BOXES>
__device__ inline void load_rows(uint32_t destination, const TensorMap& map, TensorCoordinates from, uint32_t full) {
#pragma unroll
    for (int box = 0; box < BOXES; ++box) {
        from.at[0] = box * BOX;
        tma_load(destination + box * ROWS * BOX * 2, map, from, full);
    }
}

}  // namespace rawops
