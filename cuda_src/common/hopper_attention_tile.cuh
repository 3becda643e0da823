// What a block of the Hopper attention works on, in which order, where it keeps it, and how its warpgroups tell each
// other.
#pragma once
#include "attention_problem.cuh"
#include "wgmma.cuh"

namespace rawops {

// The widest swizzle that divides a row.
__host__ __device__ constexpr int span_of(int bytes) { return bytes % 128 == 0 ? 128 : bytes % 64 == 0 ? 64 : 32; }

// D and DV: head sizes of q and k, and of v, that are paid for; TMA fills what the arrays lack with zeros. kScore: how
// scores are made. Out is float for the partial results of ranges of keys. kPaged: keys and values come from pages, 8
// rows of all columns at a time, and a row of q's tile is one query of one of `packed` heads, 64 or a divisor of it.
template <class T_, int D_, int DV_, int CONSUMERS_, int BLOCK_N_, int STAGES_, bool kTurns_, int kScore_ = 0,
          class Out_ = T_, bool kPaged_ = false>
struct HopperAttention {
    using T = T_;
    using Out = Out_;
    static constexpr int kScore = kScore_;
    static constexpr int D = D_, DV = DV_, CONSUMERS = CONSUMERS_, BLOCK_N = BLOCK_N_, STAGES = STAGES_;
    static constexpr bool kTurns = kTurns_, kPaged = kPaged_;
    static constexpr int ITEM = sizeof(T);
    static constexpr bool kBytes = ITEM == 1;  // float8: with scales, and values transposed; see hopper_attention_8bit
    static constexpr int BLOCK_M = 64 * CONSUMERS, THREADS = (1 + CONSUMERS) * kWarpGroupSize;
    // Boxes of TMA are as wide as the swizzle.
    static constexpr int SPAN = span_of(D * ITEM), BOX = SPAN / ITEM, BOXES = D / BOX;
    static constexpr int SPAN_V = span_of(DV * ITEM), BOX_V = SPAN_V / ITEM, BOXES_V = DV / BOX_V;
    static constexpr int SPAN_T = span_of(BLOCK_N);  // values transposed: boxes of all columns and as many keys
    // Bytes from a box of keys or values to the next, and from 8 of its rows to the next.
    static constexpr int BOX_STEP = (kPaged ? 8 : BLOCK_N) * SPAN, ROWS_STEP = (kPaged ? BOXES : 1) * 8 * SPAN;
    static constexpr int BOX_STEP_V = (kPaged ? 8 : BLOCK_N) * SPAN_V;
    static constexpr int ROWS_STEP_V = (kPaged ? BOXES_V : 1) * 8 * SPAN_V;
    using OperandQ = WgmmaOperand<true, BOX, SPAN, ITEM>;
    using OperandK = WgmmaOperand<true, BOX, SPAN, ITEM, ROWS_STEP>;
    using OperandV = typename Choose<kBytes, WgmmaOperand<true, SPAN_T, SPAN_T, 1>,
                                     WgmmaOperand<false, BLOCK_N, SPAN_V, 2, ROWS_STEP_V, BOX_STEP_V>>::Type;
    using Scores = float[BLOCK_N / 2];
    using Output = float[DV / 2];
    using Weights = uint32_t[BLOCK_N * ITEM / 32][4];

    static constexpr int CLUSTER = 1;  // or 2 blocks with tiles of the same keys, half of which either fetches for both
    static constexpr int PLACES = 3;  // of tasks: one is under way, the next one begins before that ends
    static constexpr int Q_BYTES = 64 * D * ITEM;  // of a consumer
    static constexpr int K_BYTES = BLOCK_N * D * ITEM, V_BYTES = BLOCK_N * DV * ITEM;
    static constexpr int RINGS = STAGES * (K_BYTES + (1 + kBytes) * V_BYTES);  // bytes
    static constexpr int ROOM = 226 << 10;  // for them and for queries
    // Results leave through the place of a tile's queries, and the next tile's have another one, where there is room.
    static constexpr bool kStages = !kPaged && !kBytes && CONSUMERS == 2 && kTurns && DV <= D && is_same<T, Out> &&
                                    2 * CONSUMERS * Q_BYTES + RINGS <= ROOM;
    // Bytes leave from registers, but their next queries have a place of their own, too.
    static constexpr int Q_SLOTS = 1 + (kStages || (kBytes && 2 * CONSUMERS * Q_BYTES + RINGS <= ROOM));
    // Of keys, which are wanted first, there is a stage more where it has room.
    static constexpr int K_STAGES =
        STAGES + (!kPaged && !kBytes && Q_SLOTS * CONSUMERS * Q_BYTES + RINGS + K_BYTES <= ROOM);
    static constexpr int K_AT = Q_SLOTS * CONSUMERS * Q_BYTES, V_AT = K_AT + K_STAGES * K_BYTES;
    static constexpr int RAW_AT = V_AT + STAGES * V_BYTES;  // values before they are transposed
    static constexpr int BARRIERS_AT = RAW_AT + kBytes * STAGES * V_BYTES;
    // Values have a warp of their own (bring_values). With three consumers or wider rows that is slower without a mask.
    static constexpr bool kSearches = !kPaged && !kBytes && CONSUMERS == 2 && DV <= 128;
    static constexpr int TRANSPOSERS = kBytes ? 2 : 0;  // warps, which search the values, too
    static constexpr int FINDINGS_BYTES = STAGES * TRANSPOSERS * sizeof(uint32_t);
    static constexpr int WORK_AT = BARRIERS_AT + RingBarriers<K_STAGES>::BYTES +
                                   (1 + kBytes + kSearches) * RingBarriers<STAGES>::BYTES + FINDINGS_BYTES +
                                   (1 + kStages) * RingBarriers<Q_SLOTS * CONSUMERS>::BYTES +
                                   RingBarriers<PLACES>::BYTES;
    // Of a thread. Who transposes values needs more than who copies.
    static constexpr int PRODUCER_REGISTERS = kPaged ? 72 : kBytes ? 56 : CONSUMERS == 3 ? 32 : 40;
    static constexpr int REGISTERS = kPaged ? 216 : (CONSUMERS == 3 ? 160 : 232) - (kBytes ? 8 : 0);
    static constexpr int COPIERS = kPaged ? 3 : 1;  // warps of the producer that start copies
    static constexpr int READERS = COPIERS + CONSUMERS + TRANSPOSERS + kStages + kSearches;  // of tasks

    // The query of a row, and the keys that it sees.
    // `packed` is a power of two, and divisions take long before the first tile.
    static __device__ int query(const AttentionShape& shape, int row) {
        return kPaged ? row >> 31 - __clz(shape.packed) : row;
    }
    static __device__ KeyRange visible(const AttentionShape& shape, const AttentionBlock& work, int row) {
        return work.visible(shape, query(shape, row));
    }

    static_assert(!kPaged || (CONSUMERS == 2 && kScore == 0 && !kBytes), "what pages do");
    static_assert(DV % 32 == 0, "a quad stores four eighths of 64 bytes");
    static_assert(Q_BYTES % 1024 == 0 && K_BYTES % 1024 == 0 && V_BYTES % 1024 == 0,
                  "tiles start where the swizzle does");
    static_assert(!kBytes || (kScore == 0 && BLOCK_N % 32 == 0), "what float8 does");
};

struct AttentionMaps {
    TensorMap q, k, v;  // axes: 1, sequence, head, row, column
};

// Heads (times ranges of keys) go in sections whose operands stay in the L2 together. Within a section, the longest
// tiles come first: under causality the last ones of queries, and the first ones of keys (kFirstLongest).
template <bool kFirstLongest> class AttentionSchedule {
public:
    int units, count;  // heads and ranges of keys, and their tiles

    __device__ AttentionSchedule(const AttentionParams& params_, int section_, int* taken_)
        : units((params_.shape.batches + (params_.call.cu_seqlens_q != nullptr)) * params_.shape.splits *
                (params_.shape.heads / params_.shape.packed)),
          count(units * params_.shape.row_tiles),
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
        const int heads = min_of(section, units - first);
        index -= first * tiles;
        const int order = index / heads;
        return AttentionBlock(params, first + index - order * heads, kFirstLongest ? order : tiles - 1 - order);
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
        const KeyRange keys = block.keys(shape, Tile::query(shape, row), Tile::query(shape, last), Tile::BLOCK_N);
        if (row > last || keys.is_empty()) return {0, 0};
        return {keys.begin / Tile::BLOCK_N, ceil_div(keys.end, Tile::BLOCK_N)};
    }

    __device__ bool has(int block) const { return block >= first && block < end; }
};

// A branch would keep the compiler from mixing what comes before with what comes after.
__device__ inline void barrier_arrive_if(bool arrives, uint32_t barrier) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %0, 0;\n@p mbarrier.arrive.shared::cta.b64 _, [%1];\n}" ::"r"(
                     uint32_t(arrives)),
                 "r"(barrier)
                 : "memory");
}

// The same at the barrier that lies there in a block of the cluster.
__device__ inline void barrier_arrive_at_rank_if(bool arrives, uint32_t barrier, int rank) {
    asm volatile(
        "{\n.reg .pred p;\n.reg .b32 there;\nsetp.ne.u32 p, %0, 0;\nmapa.shared::cluster.u32 there, %1, %2;\n"
        "@p mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(uint32_t(arrives)),
        "r"(barrier), "r"(rank)
        : "memory");
}

template <int STAGES> __device__ inline RingPosition<STAGES> after(RingPosition<STAGES> position) {
    position.advance();
    return position;
}
template <int STAGES> __device__ inline RingPosition<STAGES> before(RingPosition<STAGES> position) {
    position.phase ^= position.stage == 0;
    position.stage = position.stage == 0 ? STAGES - 1 : position.stage - 1;
    return position;
}

// How the others learn what comes next, from one thread that is ahead of them. They read where it lies, which keeps
// their registers for tiles.
template <class Work, int PLACES = 2> struct WorkRing {
    using Position = RingPosition<PLACES>;
    static constexpr int BYTES = PLACES * sizeof(Work);
    Work* places;
    RingBarriers<PLACES> barriers;

    __device__ void init(int readers) const { barriers.init(readers); }

    __device__ Work& next(const Position& at) const {
        barrier_wait(barriers.empty(at.stage), at.phase ^ 1);
        return places[at.stage];
    }
    __device__ void put(Position& at) const {
        barrier_arrive(barriers.full(at.stage));
        at.advance();
    }
    __device__ const Work& take(const Position& at) const {
        barrier_wait(barriers.full(at.stage), at.phase);
        return places[at.stage];
    }
    __device__ const Work& at(const Position& position) const { return places[position.stage]; }  // that has been taken
    __device__ void release(Position& at, bool leads) const {
        if (leads) barrier_arrive(barriers.empty(at.stage));
        at.advance();
    }
};
using WorkSlots = WorkRing<AttentionBlock>;

// What there is to know of a block of keys, in one number, since each that a warp is to have once takes a while.
struct BlockNotes {
    int bits;
    __device__ bool is_last() const { return bits & 1; }     // of the tile
    __device__ bool is_plain() const { return bits & 2; }    // all rows see it
    __device__ bool is_cut() const { return bits & 4; }      // some row misses a key of it that is in memory
    __device__ int plain() const { return bits >> 4; }       // how many that all rows see come next, one below another
    __device__ bool ends_plain() const { return bits & 8; }  // nothing comes after those
};

// A tile of queries and its blocks of keys. For those of `plain`, which all rows see, nothing else needs to be known.
// Of those of `uncut` no row misses a key that is in memory: where the storage ends, TMA fills with zeros.
struct AttentionTask : AttentionBlock {
    KeyBlocks keys, plain, uncut;
    float scale, scale_v;  // float8: of the products, and of the values

    template <class Tile> __device__ void plan(const AttentionParams& params) {
        const int row = tile * Tile::BLOCK_M, last = min_of(row + Tile::BLOCK_M, rows(params.shape)) - 1;
        const int end = Tile::visible(params.shape, *this, row).end;
        const bool is_whole = end == k_len && !params.call.cu_seqlens_k && !params.call.seqlens_k;
        keys = KeyBlocks::of<Tile>(params.shape, *this);
        plain = {ceil_div(Tile::visible(params.shape, *this, row + Tile::BLOCK_M - 1).begin, Tile::BLOCK_N),
                 end / Tile::BLOCK_N};
        uncut = {ceil_div(Tile::visible(params.shape, *this, last).begin, Tile::BLOCK_N),
                 (end + is_whole * (Tile::BLOCK_N - 1)) / Tile::BLOCK_N};
    }
    __device__ bool has_keys() const { return keys.first < keys.end; }
    __device__ BlockNotes notes_of(int block) const {
        const int left = block - keys.first;
        const int below = block > plain.end ? 0 : max_of(block - max_of(keys.first, plain.first), 0);
        return {uniform(below << 4 | (below == left) << 3 | !uncut.has(block) << 2 | plain.has(block) << 1 |
                        (left == 0))};
    }
};

template <class Tile> struct AttentionExchange {
    uint32_t q, k, v, raw;
    RingBarriers<Tile::K_STAGES> k_barriers;
    RingBarriers<Tile::STAGES> v_barriers, raw_barriers;
    RingBarriers<Tile::STAGES> search_barriers;  // `full` only: a stage of values has been searched
    RingBarriers<Tile::Q_SLOTS * Tile::CONSUMERS> q_barriers;  // of each consumer's rows
    RingBarriers<Tile::Q_SLOTS * Tile::CONSUMERS> staged_barriers;  // `full` only
    WorkRing<AttentionTask, Tile::PLACES> work;

    __device__ explicit AttentionExchange(char* shared)
        : q(shared_address(shared)),
          k(q + Tile::K_AT),
          v(q + Tile::V_AT),
          raw(q + Tile::RAW_AT),
          k_barriers{q + Tile::BARRIERS_AT},
          v_barriers{k_barriers.base + k_barriers.BYTES},
          raw_barriers{v_barriers.base + v_barriers.BYTES},
          search_barriers{raw_barriers.base + Tile::kBytes * raw_barriers.BYTES},
          q_barriers{search_barriers.base + Tile::kSearches * search_barriers.BYTES + Tile::FINDINGS_BYTES},
          staged_barriers{q_barriers.base + q_barriers.BYTES},
          work{reinterpret_cast<AttentionTask*>(shared + Tile::WORK_AT),
               {staged_barriers.base + Tile::kStages * staged_barriers.BYTES}} {}

    // What was found in a stage of values, 0 for nothing, by the warp that searches it, in the place of a barrier that
    // is not needed, or by one of those that transpose it.
    __device__ uint32_t findings(int stage, int warp = 0) const {
        return Tile::kBytes ? search_barriers.base + (stage * Tile::TRANSPOSERS + warp) * sizeof(uint32_t)
                            : search_barriers.empty(stage);
    }

    // The same of all who search it, once they have.
    __device__ uint32_t found(const RingPosition<Tile::STAGES>& at) const {
        barrier_wait((Tile::kBytes ? v_barriers : search_barriers).full(at.stage), at.phase);
        uint32_t found = load_word(findings(at.stage));
        for (int warp = 1; warp < Tile::TRANSPOSERS; ++warp) found |= load_word(findings(at.stage, warp));
        return found;
    }

    // By one thread; a __syncthreads() must follow.
    __device__ void init() const {
        k_barriers.init(Tile::CONSUMERS * Tile::CLUSTER);
        v_barriers.init(Tile::CONSUMERS * Tile::CLUSTER, max_of(Tile::TRANSPOSERS, 1));
        for (int stage = 0; stage < Tile::kSearches * Tile::STAGES; ++stage) {
            barrier_init(search_barriers.full(stage), 1);
        }
        if (Tile::kBytes) raw_barriers.init(Tile::TRANSPOSERS);
        q_barriers.init(1);
        if (Tile::kStages) staged_barriers.init(1);
        work.init(Tile::READERS);
    }
};

// Starts the copies of ROWS rows from `from` on, box after box.
template <int ROWS, int BOX, int BOXES, int ITEM = 2>
__device__ inline void load_rows(uint32_t destination, const TensorMap& map, TensorCoordinates from, uint32_t full) {
#pragma unroll
    for (int box = 0; box < BOXES; ++box) {
        from.at[0] = box * BOX;
        tma_load(destination + box * ROWS * BOX * ITEM, map, from, full);
    }
}

}  // namespace rawops
