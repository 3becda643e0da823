// What a block of the Hopper GEMM computes at a time, where it keeps it, and who works on it.
#pragma once
#include "groups.cuh"
#include "launches.cuh"
#include "wgmma.cuh"

namespace rawops {

// How a tile leaves the registers. The numbers are those of _gemm_sm90_specs.py.
enum Finish : int {
    kPlain,   // alpha alone; through the staging tile and TMA
    kStaged,  // any epilogue; the same way out
    kBiased,  // alpha, bias, activation; straight from the accumulators like plain
    kDirect,  // any epilogue, written by the threads: for a D that TMA cannot write, and for float32
    kPartial,  // none: float32 sums of slices of K, the batches of a product, which gemm_reduce.cu adds up
};

// Rows of a are not sorted by what is added to them; hopper_adapters.cuh has the other case.
struct LowRankCall;
struct NotSorted {
    using Call = LowRankCall;
    static constexpr bool kSorted = false, kInOrder = false, kBeside = false;  // the last: see hopper_beside.cuh
    static constexpr int COLUMN_BYTES = 0, LOADERS = 0;
    template <class Tile, class... Arguments> static __device__ int begin(const Arguments&...) { return 0; }
};

// How lora_a comes where it rides. The numbers are those of _gemm_sm90_specs.py.
enum LoraA : int {
    kByRank,  // rows of ranks
    kByK,     // rows along K
    kEights,  // rows of eight ranks without gaps, which TMA reads as rows of 64
};

// The last of these in shared memory: core matrices of 8 along K, 16 bytes each, and those of the ranks 8 .. 15 of a
// stage behind, which are zero.
struct EightRanks {
    static constexpr int BYTES = 64 * 16;
    static __device__ uint64_t descriptor(uint32_t address) {
        return uint64_t(BYTES >> 4) << 32 | uint64_t(128 >> 4) << 16 | (address & 0x3ffff) >> 4;
    }
    static __device__ uint64_t advance(uint64_t descriptor, int, int k_steps) {
        return descriptor + k_steps * (256 >> 4);
    }
};

// A low-rank part y @ lora_b with y = a @ lora_a, up to RANK ranks; see hopper_low_rank.cuh. kRides: y is made here.
template <int RANK_, bool kRides_, int kLoraA, bool kBKMajor_> struct LowRank : NotSorted {
    static constexpr int RANK = RANK_;
    // Rows of 32 bytes take TMA as long as those of 128, so a warp copies them.
    static constexpr int LOADERS = kRides_ && kLoraA == kByRank && RANK == 16 ? kWarpSize : 0;
    static constexpr bool kRides = kRides_, kPacked = kLoraA == kEights;
    static constexpr bool kAKMajor = kLoraA == kByK, kBKMajor = kBKMajor_;
    using OperandA = typename Choose<kPacked, EightRanks, WgmmaOperand<kAKMajor, 64, kAKMajor ? 128 : RANK * 2>>::Type;
    using Accumulators = float[RANK / 2];
    static_assert(!kPacked || (kRides && RANK == 16), "eight ranks and as many zeros");
};
struct NoLowRank : NotSorted {
    static constexpr int RANK = 0;
    static constexpr bool kRides = false, kPacked = false;
    using Accumulators = float[1];
};

// No scales but alpha, and one sum for all of K. scaling.cuh has others.
struct NoScaling {
    static constexpr bool kPromotes = false, kByColumns = false;
    static constexpr int LOADERS = 0, RELEASES = 1;  // lanes that load scales; arrivals that let a stage go
    static constexpr __device__ int stage_bytes(int, int) { return 0; }  // of scales
    template <class T, class Out, int kActivation> using Epilogue = rawops::Epilogue<T, Out, kActivation>;

    template <class Epilogue>
    static __device__ Epilogue epilogue(const GemmParams& params, const int (&batch)[3], float alpha, int rows_end) {
        return Epilogue(params.call.epilogue, params.shape.epilogue, batch, alpha, rows_end);
    }
    static __device__ float factor(const GemmParams& params) { return float(params.call.alpha.read()); }

    // What a thread's accumulators are multiplied with on their way out, before alpha: nothing.
    template <class Tile> struct Factors {
        struct Columns {};
        float alpha;
        __device__ Factors(const GemmParams&, const struct Work&, int, const struct Consumer&, float alpha_)
            : alpha(alpha_) {}
        __device__ Columns columns(int, int) const { return {}; }
        template <class V> __device__ V times(V value, int, int, Columns, int) const { return value; }
    };
};

constexpr int kBox = 64;  // columns of a box of a row-major b

// Consumers are warpgroups. Those of a 128-row tile take 64 rows each; with kPingPong they take turns instead, one
// multiplies while the other finishes a tile of its own. The blocks of a cluster take a slice of K each, and then a
// share of the columns of their sum. kByColumns: consumers have half of the columns each, not of the rows. kGrouped:
// rows come in groups with a matrix b each. TOGETHER: two blocks (kPairs) take tiles below each other, and each loads
// half of their columns of b for both; four (kSquares) have two by two tiles, and each loads half of its rows of a and
// half of its columns of b for two.
template <class T_, class Out_, int BLOCK_M_, int BLOCK_N_, int STAGES_, int CLUSTER_, bool kAKMajor_, bool kBKMajor_,
          int kActivation, int kFinish_, bool kPingPong_ = false, class LowRank_ = NoLowRank, bool kGrouped_ = false,
          class Scaling_ = NoScaling, int TOGETHER_ = 1>
struct HopperTile {
    using T = T_;
    using Out = Out_;
    using LowRank = LowRank_;
    using Scaling = Scaling_;
    using Epilogue = typename Scaling::template Epilogue<T, Out, kActivation>;
    using Value = Accumulator<T>;
    static constexpr int ITEM_BYTES = sizeof(T);
    static constexpr int BLOCK_M = BLOCK_M_, BLOCK_N = BLOCK_N_, STAGES = STAGES_, CLUSTER = CLUSTER_;
    static constexpr int BLOCK_K = 128 / ITEM_BYTES;
    static constexpr bool kAKMajor = kAKMajor_, kBKMajor = kBKMajor_;
    static constexpr int kFinish = kFinish_;
    static constexpr bool kByThreads = kFinish == kDirect || kFinish == kPartial;
    static constexpr bool kPingPong = kPingPong_, kGrouped = kGrouped_, kPairs = TOGETHER_ == 2;
    static constexpr bool kSquares = TOGETHER_ == 4, kShares = TOGETHER_ > 1;
    static constexpr bool kRanksInTurn = kPingPong && LowRank::RANK > 0;  // see hopper_low_rank_turns.cuh
    static constexpr int SHARERS = kShares ? 2 : 1;                       // of b
    static constexpr int RELEASERS = kSquares ? 3 : SHARERS;  // blocks that let go of what one has loaded
    // For the launch before, at the start. Otherwise a low-rank part waits where it reads what was made for it.
    static constexpr bool kWaits = LowRank::kRides || (LowRank::RANK == 0 && !LowRank::kSorted);
    static constexpr bool kStreams = BLOCK_M == 64 && !kGrouped;  // b, if a has one row of tiles
    static constexpr bool kScaled = !is_same<Scaling, NoScaling>;
    static constexpr int CONSUMERS = kPingPong || BLOCK_M == 128 ? 2 : 1;
    static constexpr int THREADS = (1 + CONSUMERS) * kWarpGroupSize;
    using OperandA = WgmmaOperand<kAKMajor, BLOCK_K, 128, ITEM_BYTES>;
    using OperandB = WgmmaOperand<kBKMajor, BLOCK_K, 128, ITEM_BYTES>;
    static constexpr bool kTransposed = is_same<T, float> && !kAKMajor;  // of D, see hopper_tf32.cuh
    static constexpr bool kByColumns = Scaling::kByColumns && BLOCK_M == 128 && CLUSTER == 1 && !Epilogue::kGated;
    static constexpr int K_STEPS = 4, ATOMS_M = kPingPong || kByColumns ? BLOCK_M / 64 : 1;  // 64 rows each
    static constexpr int ROWS = ATOMS_M * 64, WIDTH = BLOCK_N / (kByColumns ? 2 : 1);        // of a consumer
    // A gated tile holds BLOCK_N / 2 columns of the gate, then the same columns of up: one thread has both.
    static constexpr int PARTS = Epilogue::kGated ? 2 : 1, COLS = BLOCK_N / PARTS;
    static constexpr int SHARE = WIDTH / PARTS / CLUSTER;  // columns of D that a consumer finishes
    // More blocks than there are tiles share out the boxes of a row-major b: some have one less than a tile.
    static constexpr bool kSpreads = !kBKMajor && kStreams && CLUSTER == 1 && !kPingPong && PARTS == 1 &&
                                     !kByThreads && !LowRank::kSorted && !LowRank::kBeside;
    using Accumulators = Value[ATOMS_M][WIDTH / 2];
    using Finished = Value[ATOMS_M][SHARE * PARTS / 2];
    using Factors = typename Scaling::template Factors<HopperTile>;

    static constexpr int SPAN = 128;  // bytes of a row of an operand
    static constexpr int A_BYTES = BLOCK_M * SPAN, B_BYTES = BLOCK_N * SPAN;
    static constexpr int STAGE_BYTES = A_BYTES + B_BYTES + (LowRank::kRides ? LowRank::RANK * BLOCK_K * 2 : 0);
    // D leaves in boxes as wide as the swizzle, so that staging it is free of bank conflicts. A consumer that has the
    // other's main loop for it stages a few columns at a time, and leaves the memory to the ring.
    static constexpr int PASS_COLS = kPingPong ? min_of(SHARE, 32) : SHARE, PASSES = ceil_div(SHARE, PASS_COLS);
    static constexpr int BOX_COLS = SHARE % 64 == 0 && !kPingPong ? 64 : SHARE % 32 == 0 ? 32 : 16;
    static constexpr int BOX_BYTES = ROWS * BOX_COLS * 2;
    static constexpr int LORA_B_BOX = SHARE % 64 == 0 ? 64 : SHARE % 32 == 0 ? 32 : 16;  // columns of one of lora_b
    // Before that, the place holds ranks of adapters, or those of lora_b.
    static constexpr int RANK_BYTES = SHARE * PARTS * LowRank::COLUMN_BYTES;
    static constexpr int LORA_B_BYTES = LowRank::RANK * SHARE * PARTS * 2;
    static constexpr int STAGING_BYTES =
        max_of(kByThreads ? 0 : ROWS * PASS_COLS * 2, kRanksInTurn ? LORA_B_BYTES : RANK_BYTES);
    // Any other epilogue sees the accumulators through a slab for each warp, CHUNK columns of D at a time.
    using Slab = SharedTile<typename Epilogue::Value, 16, 32>;
    static constexpr int CHUNK = Slab::COLS / PARTS, CHUNKS = ceil_div(SHARE, CHUNK);
    static constexpr int SLABS_BYTES =  // of a consumer; or the bias of its columns
        kFinish == kPlain || kFinish == kPartial ? 0 : kFinish == kBiased ? SHARE * PARTS * 4 : 4 * Slab::BYTES;

    // Shared memory: the ring, staging tiles and slabs of the consumers, the barriers. RANK ranks of lora_b go through
    // the ring, too; in a cluster, where that lends its memory, they have a place of their own.
    static constexpr int LORA_B_AT = STAGES * STAGE_BYTES, STAGING_AT = LORA_B_AT + (CLUSTER > 1 ? LORA_B_BYTES : 0);
    static constexpr int SLABS_AT = STAGING_AT + CONSUMERS * STAGING_BYTES;
    static constexpr int BARRIERS_AT = SLABS_AT + CONSUMERS * SLABS_BYTES;
    // If there are any, the table of the groups or the scales of each stage.
    static constexpr int GROUPS_AT = BARRIERS_AT + STAGES * 16 + 32, SCALES_AT = GROUPS_AT;
    static constexpr int SCALE_BYTES = Scaling::stage_bytes(BLOCK_M, BLOCK_N);

    static_assert(BLOCK_M == 64 || BLOCK_M == 128, "one or two atoms");
    static_assert(WIDTH / PARTS % (16 * CLUSTER) == 0, "stmatrix stores 16 columns");
    static_assert(kBKMajor || COLS % 64 == 0, "boxes of an MN-major operand are 64 wide");
    static_assert(ATOMS_M * WIDTH <= (Scaling::kPromotes ? 192 : 384),
                  "accumulators fit in the registers of a consumer, and a sum beside them if there is one");
    static_assert(kByThreads || sizeof(Out) == 2, "staged elements have 16 bits");
    static_assert(Epilogue::WIDTH == 4, "stage_finished packs four");
    static_assert(!kTransposed || (kFinish == kDirect && !kPingPong && PARTS == 1), "one way out, whole rows of D");
    static_assert(!kPingPong || (CLUSTER == 1 && !LowRank::kRides), "these have one order of tiles for all");
    static_assert(!kRanksInTurn || LowRank::RANK == 16, "ranks at a time");
    static_assert(CLUSTER == 1 || is_same<Value, float>, "partial sums are float32");
    static_assert(!kShares || (CLUSTER == 1 && PARTS == 1 && LowRank::RANK == 0 && !kGrouped && !kTransposed &&
                               !kScaled),
                  "only multiply_stages lets go of other blocks' stages");
    static_assert(!kPairs || kBKMajor || BLOCK_N % 128 == 0, "half of b is whole boxes");
    static_assert(CLUSTER == 1 || BLOCK_M * (BLOCK_N + LowRank::kRides * LowRank::RANK) * 4 <= LORA_B_AT,
                  "the ring holds partial sums");
};

template <class Tile> using LowRankCallOf = typename Tile::LowRank::Call;  // what a kernel takes for it

// One tile: its place in D, where the rows that it may write end, and the batch it belongs to.
struct Work {
    int m, m_end, n, number, batch[3];  // the number of the batch, its index
    int boxes;                          // of a row-major b, where a tile may have fewer: see kSpreads

    // Bytes of a stage of b that nothing comes to.
    template <class Tile> __device__ int missing_bytes() const {
        if constexpr (Tile::kSpreads) return Tile::B_BYTES - boxes * kBox * Tile::SPAN;
        else return 0;
    }

    // The corner of an operand's matrix. Where it is broadcast over an axis of the batch, its map has size 1.
    template <class Tile> __device__ TensorCoordinates matrix_of(const Strides& strides) const {
        if (Tile::kFinish == kPartial) return {};
        auto along = [&](int axis) { return strides.batch[axis] == 0 ? 0 : batch[axis]; };
        return {0, 0, along(2), along(1), along(0)};
    }
};

// All tiles of all batches, in the order in which a cluster takes them, `group` rows of tiles together, and the slice
// of K that is this block's. Where one row of tiles is all that there is, group - 1 tells of `ahead` instead.
template <class Tile, bool kGrouped = Tile::kGrouped> class Schedule {
public:
    int first, count, step;     // of the cluster's tiles
    int first_block, k_blocks;  // of the slice
    int ahead;                  // stages of b that the L2 is to have when the launch before is complete

    __device__ Schedule(const GemmShape& shape_, int group_, int k_blocks_)
        : first(blockIdx.x / Tile::CLUSTER),
          step(gridDim.x / Tile::CLUSTER),
          first_block(0),
          k_blocks(k_blocks_),
          shape(shape_),
          tiles_m(ceil_div(Tile::kTransposed ? shape_.epilogue.cols : shape_.M, Tile::BLOCK_M * Tile::SHARERS) *
                  Tile::SHARERS),
          tiles_n(ceil_div(Tile::kTransposed ? shape_.M : shape_.epilogue.cols, Tile::COLS * ACROSS) * ACROSS),
          group(group_) {
        count = tiles_m * tiles_n * shape.batches;
        ahead = Tile::kStreams && count == tiles_n ? group - 1 : 0;
        boxes = Tile::kSpreads && int(gridDim.x) > count ? ceil_div(shape.epilogue.cols, kBox) : 0;
        if (boxes > 0) count = gridDim.x;
        if constexpr (Tile::CLUSTER > 1) {
            const int slice = ceil_div(k_blocks_, Tile::CLUSTER);
            first_block = cluster_rank() * slice;
            k_blocks = clamp(k_blocks_ - first_block, 0, slice);
        }
    }

    __device__ Work at(int index) const {
        Work work;
        work.number = shape.batches == 1 ? 0 : index / (tiles_m * tiles_n);
        const int rest = index - work.number * tiles_m * tiles_n;
        TileIndex tile = grouped_raster(rest / (ACROSS * ACROSS), tiles_m / ACROSS, tiles_n / ACROSS, group);
        if constexpr (Tile::kSquares) tile = {tile.m * 2 + rest % 2, tile.n * 2 + rest / 2 % 2};
        if constexpr (Tile::kFinish == kPartial) {  // one axis of slices: divisions would delay the first copies
            work.batch[0] = work.number;
            work.batch[1] = work.batch[2] = 0;
        } else {
            shape.batch_index(work.number, work.batch);
        }
        work.m = tile.m * Tile::BLOCK_M;
        work.m_end = shape.M;
        work.n = tile.n * Tile::COLS;
        if constexpr (Tile::kSpreads) {
            work.boxes = Tile::BLOCK_N / kBox;
            if (boxes > 0) {
                const int begin = index * boxes / count;
                work.n = begin * kBox;
                work.boxes = (index + 1) * boxes / count - begin;
            }
        }
        return work;
    }

private:
    static constexpr int ACROSS = Tile::kSquares ? 2 : 1;
    const GemmShape& shape;
    int tiles_m, tiles_n, group;
    int boxes;  // that the blocks share out, where they are more than the tiles; else 0
};

// The tiles of all groups. A group's b is that of the batch with its number.
template <class Tile> class Schedule<Tile, true> {
public:
    int first, count, step, first_block, k_blocks;

    __device__ Schedule(const GemmShape& shape_, int raster_rows_, int k_blocks_, const GroupTable& table_)
        : first(blockIdx.x),
          step(gridDim.x),
          first_block(0),
          k_blocks(k_blocks_),
          table(table_),
          tiles_n(ceil_div(shape_.epilogue.cols, Tile::COLS)),
          raster_rows(raster_rows_) {
        count = table.row_tiles() * tiles_n;
    }

    __device__ Work at(int index) const {
        const GroupTile tile = table.find(index, tiles_n, raster_rows, Tile::BLOCK_M);
        return {tile.m, tile.m_end, tile.n * Tile::COLS, tile.group, {0, 0, tile.group}};
    }

private:
    GroupTable table;
    int tiles_n, raster_rows;
};

// A thread of a consumer warpgroup. What the consumer has of the tile begins at row, col.
struct Consumer {
    int number, thread, row, col;
    char *staging, *slabs;  // the consumer's tile of D, its slabs
    uint32_t turns;        // two barriers: the turn of consumer 0, that of consumer 1

    __device__ int lane() const { return thread % kWarpSize; }
    __device__ int warp_row() const { return thread / kWarpSize * 16; }  // within each 64 rows
    template <class Tile> __device__ char* slab() const { return slabs + thread / kWarpSize * Tile::Slab::BYTES; }
    __device__ bool leads() const { return thread == 0; }
    __device__ void sync() const { number == 0 ? sync_group<1>() : sync_group<2>(); }

    // A parity tells two phases of a stage apart and no more, so a consumer may not run ahead to its next tile: it
    // waits until the other one has seen the last stage of the tile before.
    __device__ void await_turn(uint32_t phase) const { barrier_wait(turns + number * 8, phase); }
    __device__ void end_turn() const {
        if (leads()) barrier_arrive(turns + (number ^ 1) * 8);
    }
};

}  // namespace rawops
