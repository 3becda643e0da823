// y = x @ a in float32 on Hopper, x (M, K) and a of a few columns: a pass over x, to be run beside a large product.
//
//   warp 12         TMA: 256 x 64 of x --> ring of stages
//   warps 8-11      cp.async: 64 rows of a --> the same stage; 64 ranks come by TMA
//   warps 0-3, 4-7  wgmma: 128 rows of y each
//
// An SM takes in a few boxes a microsecond, whatever their size: these are large. TMA takes as long for a row of 32
// bytes as for one of 128, and a may have the former, so that it comes by cp.async.
// A block takes tiles of 256 rows blockIdx.x, blockIdx.x + gridDim.x, ...; blockIdx.y tells which ranks.
#include "common/launches.cuh"
#include "common/rank_parts.cuh"
#include "common/wgmma.cuh"

namespace rawops {

// As _lora_sm90.py packs it; strides in elements.
struct NarrowParams {
    TensorMap x;    // three axes of the batch, then those of the matrix as they lie in memory
    TensorMap a_map;  // where rows of a stage have 128 bytes, likewise
    const void* a;  // (K, rank)
    float* y;       // (batches * M, rank), rows on 16-byte boundaries
    void* parts;    // null, or y once more: for each 64 ranks the first of two values of bfloat16, then the second
    int64_t a_row, a_col, y_row, parts_row;
    int M, K, rank, batches;
    int extents[3], moves[3];  // of the batch; 0 for an axis along which x stays where it is
    int waits;                 // for the launch before, at the start: it may have made x or a
};

constexpr int kNarrowGroups = 2, kNarrowAtoms = 2, kNarrowRows = 64 * kNarrowGroups * kNarrowAtoms;
constexpr int kNarrowK = 64, kNarrowLoaders = 128;
constexpr int kNarrowRing = 208 << 10;  // bytes
constexpr int kRanksOfParts = 64;
constexpr int kNarrowConsumers = kNarrowGroups * kWarpGroupSize;
constexpr int kNarrowThreads = kNarrowConsumers + kNarrowLoaders + kWarpSize;

// A stage: x and a, swizzled as TMA writes and wgmma reads them.
template <int RANKS_, bool kByK_> struct NarrowTile {
    static constexpr int RANKS = RANKS_;
    static constexpr bool kByK = kByK_, kMoved = RANKS == 64;  // a by TMA, too
    static constexpr int SPAN = kByK ? kNarrowK * 2 : RANKS * 2, ROW_CHUNKS = SPAN / 16;  // of a row of a
    static constexpr int CHUNKS = kNarrowK * RANKS / 8;                                   // of 16 bytes
    static constexpr int BOX_BYTES = 64 * kNarrowK * 2, X_BYTES = kNarrowRows * kNarrowK * 2;
    static constexpr int STAGE_BYTES = X_BYTES + CHUNKS * 16;
    static constexpr int STAGES = kNarrowRing / STAGE_BYTES, BARRIERS_AT = STAGES * STAGE_BYTES;
    using OperandA = WgmmaOperand<kByK, kNarrowK, SPAN>;
    static_assert(STAGES >= 5, "for the lag of copies");
    static_assert(STAGE_BYTES % 1024 == 0, "swizzles repeat");
};

// A loading thread's chunks of a stage of a: their places do not change from stage to stage.
template <class T, class Tile> struct FactorLoader {
    static constexpr int COUNT = Tile::CHUNKS / kNarrowLoaders, STEP = kNarrowLoaders / Tile::ROW_CHUNKS;  // rows apart
    static_assert(STEP % 8 == 0, "the swizzle is the same");
    const NarrowParams& params;
    const T* from;
    int row, col, to;

    __device__ FactorLoader(const NarrowParams& params_, int first_rank, int thread)
        : params(params_),
          row(thread / Tile::ROW_CHUNKS),
          col(thread % Tile::ROW_CHUNKS * 8),
          to(Tile::X_BYTES + swizzled_offset<Tile::SPAN>(row, thread % Tile::ROW_CHUNKS)) {
        if (Tile::kByK) row += first_rank;
        else col += first_rank;
        from = static_cast<const T*>(params.a) + (Tile::kByK ? col + row * params.a_col : col + row * params.a_row);
    }
    // Starts the copies for k .. k + 63; what does not exist becomes zero.
    __device__ void fetch(uint32_t stage, int k) const {
        const T* source = from + k * (Tile::kByK ? 1 : params.a_row);
        const int left = Tile::kByK ? params.K - k - col : params.rank - col;
        const int valid = clamp(left, 0, 8) * 2, end = Tile::kByK ? params.rank : params.K - k;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const bool exists = valid > 0 && row + i * STEP < end;
            const T* chunk = source + i * STEP * (Tile::kByK ? params.a_col : params.a_row);
            cp_async<16>(stage + to + i * STEP * Tile::SPAN, exists ? chunk : params.a, exists ? valid : 0);
        }
    }
};

// Where a tile is.
struct NarrowPlace {
    int m, batch, at[3];

    __device__ NarrowPlace(const NarrowParams& params, int index, int tiles)
        : m(index % tiles * kNarrowRows), batch(index / tiles) {
        const int inner = batch / params.extents[2];
        at[0] = inner / params.extents[1] * params.moves[0];
        at[1] = inner % params.extents[1] * params.moves[1];
        at[2] = batch % params.extents[2] * params.moves[2];
    }
};

// A thread's part of 64 rows of y from `row` of the tile on, as wgmma leaves it.
template <int COUNT>
__device__ inline void write_narrow(const float (&acc)[COUNT], const NarrowParams& params, const NarrowPlace& place,
                                    int row, int first_rank) {
    const int lane = threadIdx.x % kWarpSize, own = place.m + row + threadIdx.x / kWarpSize % 4 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const int m = own + i / 2 % 2 * 8, rank = first_rank + i / 4 * 8 + lane % 4 * 2 + i % 2;
        if (m < params.M && rank < params.rank) {
            params.y[(int64_t(place.batch) * params.M + m) * params.y_row + rank] = acc[i];
        }
    }
}

// The same as sums of two values of bfloat16. Ranks that do not exist become zero: a has none, but x may be infinite.
template <int COUNT>
__device__ inline void write_parts(const float (&acc)[COUNT], const NarrowParams& params, const NarrowPlace& place,
                                   int row, int first_rank) {
    const int lane = threadIdx.x % kWarpSize, own = place.m + row + threadIdx.x / kWarpSize % 4 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < COUNT; i += 2) {
        const int m = own + i / 2 % 2 * 8, rank = i / 4 * 8 + lane % 4 * 2;
        if (m >= params.M) continue;
        uint32_t first = 0, second = 0;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const bool exists = first_rank + rank + k < params.rank;
            float value = exists ? rounded_for_parts<__nv_bfloat16, 2>(acc[i + k]) : 0;
            first |= cut_bfloat16(value) >> (k == 0 ? 16 : 0);
            second |= cut_bfloat16(value) >> (k == 0 ? 16 : 0);
        }
        auto* to = static_cast<uint16_t*>(params.parts) + (int64_t(place.batch) * params.M + m) * params.parts_row;
        *reinterpret_cast<uint32_t*>(to + first_rank * 2 + rank) = first;
        *reinterpret_cast<uint32_t*>(to + first_rank * 2 + kRanksOfParts + rank) = second;
    }
}

// acc = the products of a consumer group's rows over all stages of a tile. One batch of products stays in flight: a
// stage is let go when those of the next have been issued.
template <class T, bool kXByK, class Tile>
__device__ inline void multiply_narrow(float (&acc)[kNarrowAtoms][Tile::RANKS / 2], RingPosition<Tile::STAGES>& slot,
                                       const RingBarriers<Tile::STAGES>& barriers, uint32_t ring, int k_blocks,
                                       int group, int thread) {
    using OperandX = WgmmaOperand<kXByK, kNarrowK>;
    int previous = 0;
#pragma unroll 1
    for (int block = 0; block < k_blocks; ++block, slot.advance()) {
        const uint32_t stage = ring + slot.stage * Tile::STAGE_BYTES;
        const uint64_t x = OperandX::descriptor(stage + group * kNarrowAtoms * OperandX::ROWS_64);
        const uint64_t a = Tile::OperandA::descriptor(stage + Tile::X_BYTES);
        barrier_wait(barriers.full(slot.stage), slot.phase);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kNarrowK / 16; ++step) {
#pragma unroll
            for (int i = 0; i < kNarrowAtoms; ++i) {
                Wgmma<Tile::RANKS>::template multiply<T, kXByK, Tile::kByK>(
                    acc[i], OperandX::advance(x, i, step), Tile::OperandA::advance(a, 0, step), 1);
            }
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (block > 0 && thread == 0) barrier_arrive(barriers.empty(previous));
        previous = slot.stage;
    }
    wgmma_wait<0>();
    if (thread == 0) barrier_arrive(barriers.empty(previous));
}

// Starts the copies of a stage of x by TMA, and of a where it comes by it, too.
template <bool kXByK, class Tile>
__device__ inline void load_narrow(const NarrowParams& params, const NarrowPlace& place, uint32_t stage, uint32_t full,
                                   int k, int first_rank) {
    barrier_arrive_expect(full, Tile::kMoved ? Tile::STAGE_BYTES : Tile::X_BYTES);
    if constexpr (Tile::kMoved) {
        tma_load(stage + Tile::X_BYTES, params.a_map,
                 {Tile::kByK ? k : first_rank, Tile::kByK ? first_rank : k, 0, 0, 0}, full);
    }
#pragma unroll
    for (int box = 0; box < (kXByK ? 1 : kNarrowRows / 64); ++box) {
        const int row = place.m + box * 64;
        const int last = kXByK ? k : row, next = kXByK ? row : k;
        tma_load(stage + box * Tile::BOX_BYTES, params.x, {last, next, place.at[2], place.at[1], place.at[0]}, full);
    }
}

template <class T, int RANKS, bool kXByK, bool kAByK, class Tile = NarrowTile<RANKS, kAByK>>
__global__ void __launch_bounds__(kNarrowThreads, 1) lora_narrow_sm90(const __grid_constant__ NarrowParams params) {
    extern __shared__ __align__(1024) char memory[];
    const uint32_t ring = shared_address(memory);
    const RingBarriers<Tile::STAGES> barriers{ring + Tile::BARRIERS_AT};
    const int group = __shfl_sync(~0u, int(threadIdx.x) / kWarpGroupSize, 0), thread = threadIdx.x % kWarpGroupSize;
    const int tiles = ceil_div(params.M, kNarrowRows), k_blocks = ceil_div(params.K, kNarrowK);
    const int first_rank = blockIdx.y * RANKS;
    if (threadIdx.x == 0) {
        barriers.init(kNarrowGroups, Tile::kMoved ? 1 : 1 + kNarrowLoaders);
        prefetch_tensor_map(params.x);
    }
    __syncthreads();
    if (params.waits) await_launch_before();
    start_next_launch();

    const FactorLoader<T, Tile> factor(params, first_rank, thread);
    StageCopies<Tile::STAGES, 3> copies{barriers};
    RingPosition<Tile::STAGES> slot;
#pragma unroll 1
    for (int index = blockIdx.x; index < tiles * params.batches; index += gridDim.x) {
        const NarrowPlace place(params, index, tiles);
        if (group < kNarrowGroups) {
            float acc[kNarrowAtoms][RANKS / 2] = {};
            multiply_narrow<T, kXByK, Tile>(acc, slot, barriers, ring, k_blocks, group, thread);
#pragma unroll
            for (int i = 0; i < kNarrowAtoms; ++i) {
                hold(acc[i]);
                write_narrow(acc[i], params, place, (group * kNarrowAtoms + i) * 64, first_rank);
                if constexpr (is_same<T, __nv_bfloat16> && RANKS == kRanksOfParts) {
                    const int row = (group * kNarrowAtoms + i) * 64;
                    if (params.parts != nullptr) write_parts(acc[i], params, place, row, first_rank);
                }
            }
        } else if (!Tile::kMoved || group > kNarrowGroups) {
#pragma unroll 1
            for (int k = 0; k < k_blocks * kNarrowK; k += kNarrowK, slot.advance()) {
                const uint32_t stage = ring + slot.stage * Tile::STAGE_BYTES, full = barriers.full(slot.stage);
                barrier_wait(barriers.empty(slot.stage), slot.phase ^ 1);
                if (group == kNarrowGroups) {
                    factor.fetch(stage, k);
                    copies.commit();
                } else if (thread == 0) {
                    load_narrow<kXByK, Tile>(params, place, stage, full, k, first_rank);
                }
            }
        }
    }
    copies.finish();
    await_launch_before();  // if this one has not: the next launch waits for this one alone
}

}  // namespace rawops
