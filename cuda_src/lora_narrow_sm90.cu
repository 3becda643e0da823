// y = x @ a in float32 on Hopper, x (M, K) and a of a few columns: a pass over x, to be run beside a large product.
//
//   warps 8-11      TMA: 64 x 64 of x --> ring of stages;  cp.async: 64 rows of a --> the same stage
//   warps 0-3, 4-7  mma: every second stage --> 16 rows of y each; their sums are added up at the end of a tile
//
// TMA takes as long for a row of 32 bytes as for one of 128, and a may have the former, so that it comes by cp.async.
// A block takes tiles of 64 rows blockIdx.x, blockIdx.x + gridDim.x, ...; blockIdx.y tells which ranks.
#include "common/hopper.cuh"
#include "common/launches.cuh"
#include "common/mma.cuh"

namespace rawops {

// As _lora_sm90.py packs it; strides in elements.
struct NarrowParams {
    TensorMap x;    // three axes of the batch, then those of the matrix as they lie in memory
    const void* a;  // (K, rank)
    float* y;       // (batches * M, rank), rows on 16-byte boundaries
    int64_t a_row, a_col, y_row;
    int M, K, rank, batches;
    int extents[3], moves[3];  // of the batch; 0 for an axis along which x stays where it is
};

constexpr int kNarrowRows = 64, kNarrowK = 64, kNarrowGroups = 2, kNarrowLoaders = 128;
constexpr int kNarrowWarps = 4, kNarrowConsumers = kNarrowGroups * kNarrowWarps * kWarpSize;  // warps of a group
constexpr int kNarrowThreads = kNarrowConsumers + kNarrowLoaders;

// A stage: x swizzled as TMA writes it, then a with rows that are far enough apart for ldmatrix.
template <int RANKS_, bool kByK_> struct NarrowTile {
    static constexpr int RANKS = RANKS_;
    static constexpr bool kByK = kByK_;
    static constexpr int ROW_CHUNKS = kByK ? kNarrowK / 8 : RANKS / 8, CHUNKS = kNarrowK * RANKS / 8;  // of 16 bytes
    static constexpr int PITCH = ROW_CHUNKS * 16 + 16;
    static constexpr int X_BYTES = kNarrowRows * kNarrowK * 2;
    static constexpr int STAGE_BYTES = ceil_div(X_BYTES + CHUNKS / ROW_CHUNKS * PITCH, 1024) * 1024;
    static constexpr int STAGES = (192 << 10) / STAGE_BYTES < 14 ? (192 << 10) / STAGE_BYTES : 14;
    static constexpr int SUMS_AT = STAGES * STAGE_BYTES;  // of the second group: those of a thread 128 threads apart
    static constexpr int BARRIERS_AT = SUMS_AT + kNarrowRows * RANKS * 4;
};

// A loading thread's chunks of a stage of a: their places do not change from stage to stage.
template <class T, class Tile> struct FactorLoader {
    static constexpr int COUNT = Tile::CHUNKS / kNarrowLoaders, STEP = kNarrowLoaders / Tile::ROW_CHUNKS;  // rows apart
    const NarrowParams& params;
    const T* from;
    int row, col, to;

    __device__ FactorLoader(const NarrowParams& params_, int first_rank, int thread)
        : params(params_),
          row(thread / Tile::ROW_CHUNKS),
          col(thread % Tile::ROW_CHUNKS * 8),
          to(row * Tile::PITCH + col * 2) {
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
            cp_async<16>(stage + to + i * STEP * Tile::PITCH, exists ? chunk : params.a, exists ? valid : 0);
        }
    }
};

// Sixteen rows times sixteen ranks at a time.
template <class T, class Tile, bool kXByK>
__device__ inline void multiply_narrow(float (&acc)[Tile::RANKS / 8][4], uint32_t stage, int warp, int lane) {
#pragma unroll
    for (int step = 0; step < kNarrowK / 16; ++step) {
        uint32_t x[4];
        const int x_row = kXByK ? warp * 16 + lane % 16 : step * 16 + lane % 8 + lane / 16 * 8;
        const int x_chunk = kXByK ? step * 2 + lane / 16 : warp * 2 + lane / 8 % 2;
        ldmatrix<!kXByK>(x, stage + swizzled_offset<128>(x_row, x_chunk));
#pragma unroll
        for (int pair = 0; pair < Tile::RANKS / 16; ++pair) {
            uint32_t a[4];
            const int rank = pair * 16 + lane / 16 * 8, k = step * 16 + lane / 8 % 2 * 8;
            const int row = (Tile::kByK ? rank : k) + lane % 8, col = Tile::kByK ? k : rank;
            ldmatrix<!Tile::kByK>(a, stage + Tile::X_BYTES + row * Tile::PITCH + col * 2);
            MmaAtom<T>::multiply(acc[pair * 2], x, a[0], a[1]);
            MmaAtom<T>::multiply(acc[pair * 2 + 1], x, a[2], a[3]);
        }
    }
}

// The end of a tile: the first group adds the sums of the second, and writes those that exist.
template <class Tile>
__device__ inline void write_narrow(float (&acc)[Tile::RANKS / 8][4], const NarrowParams& params, uint32_t shared,
                                    int64_t first, int rows, int first_rank, int group, int thread) {
    const uint32_t sums = shared + Tile::SUMS_AT + thread * 16;
#pragma unroll
    for (int j = 0; j < Tile::RANKS / 8 && group > 0; ++j) store_shared(sums + j * kWarpGroupSize * 16, acc[j]);
    sync_group<1, kNarrowConsumers>();
#pragma unroll
    for (int j = 0; j < Tile::RANKS / 8 && group == 0; ++j) {
        const uint4 other = load_quad(sums + j * kWarpGroupSize * 16);
        const uint32_t words[4] = {other.x, other.y, other.z, other.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = thread / kWarpSize * 16 + thread % kWarpSize / 4 + i / 2 * 8;
            const int rank = first_rank + j * 8 + thread % 4 * 2 + i % 2;
            const float sum = acc[j][i] + __uint_as_float(words[i]);
            if (row < rows && rank < params.rank) params.y[(first + row) * params.y_row + rank] = sum;
        }
    }
    sync_group<2, kNarrowConsumers>();  // or the sums of the next tile come too early
}

template <class T, int RANKS, bool kXByK, bool kAByK, class Tile = NarrowTile<RANKS, kAByK>>
__global__ void __launch_bounds__(kNarrowThreads, 1) lora_narrow_sm90(const __grid_constant__ NarrowParams params) {
    extern __shared__ __align__(1024) char memory[];
    start_next_launch();
    const uint32_t ring = shared_address(memory);
    const RingBarriers<Tile::STAGES> barriers{ring + Tile::BARRIERS_AT};
    const int group = threadIdx.x / kWarpGroupSize, warp = threadIdx.x / kWarpSize % 4, lane = threadIdx.x % kWarpSize;
    const int tiles = ceil_div(params.M, kNarrowRows), k_blocks = ceil_div(params.K, kNarrowK);
    const int first_rank = blockIdx.y * RANKS;
    if (threadIdx.x == 0) {
        barriers.init(kNarrowWarps, 1 + kNarrowLoaders);
        prefetch_tensor_map(params.x);
    }
    __syncthreads();

    const int loader = int(threadIdx.x) - kNarrowConsumers;  // of the loading threads
    const FactorLoader<T, Tile> factor(params, first_rank, max_of(loader, 0));
    RingPosition<Tile::STAGES> slot;
#pragma unroll 1
    for (int index = blockIdx.x; index < tiles * params.batches; index += gridDim.x) {
        const int m = index % tiles * kNarrowRows, batch = index / tiles;
        const int inner = batch / params.extents[2];
        const int at[3] = {inner / params.extents[1], inner % params.extents[1], batch % params.extents[2]};
        float acc[RANKS / 8][4] = {};
#pragma unroll 1
        for (int block = 0; block < k_blocks; ++block, slot.advance()) {
            const uint32_t stage = ring + slot.stage * Tile::STAGE_BYTES;
            const uint32_t full = barriers.full(slot.stage);
            const int k = block * kNarrowK;
            if (loader >= 0) {
                barrier_wait(barriers.empty(slot.stage), slot.phase ^ 1);
                if (loader == 0) {
                    barrier_arrive_expect(full, Tile::X_BYTES);
                    tma_load(stage, params.x,
                             {kXByK ? k : m, kXByK ? m : k, at[2] * params.moves[2], at[1] * params.moves[1],
                              at[0] * params.moves[0]},
                             full);
                }
                factor.fetch(stage + Tile::X_BYTES, k);
                barrier_arrive_after_copies(full);
            } else if (block % kNarrowGroups == group) {
                barrier_wait(full, slot.phase);
                multiply_narrow<T, Tile, kXByK>(acc, stage, warp, lane);
                __syncwarp();
                if (lane == 0) barrier_arrive(barriers.empty(slot.stage));
            }
        }
        if (loader < 0) {
            write_narrow<Tile>(acc, params, ring, int64_t(batch) * params.M + m, params.M - m, first_rank, group,
                               threadIdx.x % kWarpGroupSize);
        }
    }
    await_launch_before();  // if this one is early: the next launch waits for this one alone
}

}  // namespace rawops
