// A matrix of dense blocks times a dense matrix on the tensor cores: see common/bsr_tile.cuh.
//
// One warp fetches, by TMA, what the others multiply, each at its own pace. It has a warpgroup, whose registers go to
// the others.
#include "common/bsr_tile.cuh"
#include "common/hopper.cuh"

namespace rawops {

constexpr int kCluster = 2;  // neighbouring groups, which need the same rows of x: each fetches a part for all

// The ring that the fetching warp fills.
template <class T, int WARPS, int STAGES> struct BsrBoxRing {
    using Chunk = BsrChunk<T, 32 / sizeof(T)>;
    static constexpr bool kRounded = true;

    uint32_t base;
    RingBarriers<STAGES> barriers;
    int chunk = -1;
    RingPosition<STAGES> at = {};
    int chunks, ahead[2];

    // The rows of x of a column, which never lies before the last one asked for.
    __device__ uint32_t reach(uint32_t column) {
        while (chunk < int(column / Chunk::COLUMNS)) next();
        return base + at.stage * Chunk::BYTES + column % Chunk::COLUMNS * Chunk::COLUMN_BYTES;
    }

    __device__ void next() {
        if (chunk >= 0) {
            __syncwarp();
            const int lane = threadIdx.x % kWarpSize;
            // Where somebody waits for it: what is still on its way to a block that is gone would hit the next one.
            if (lane < kCluster && chunk + STAGES <= chunks) barrier_arrive_at_rank(barriers.empty(at.stage), lane);
            at.advance();
        }
        ++chunk;
        barrier_wait(barriers.full(at.stage), at.phase);
    }

    __device__ void leave() {
        while (chunk + 1 < chunks) next();
    }

    // The stage that no chunk follows, when all warps of the cluster have left it; behind `leave`.
    __device__ uint32_t room() {
        if (chunk >= 0) at.advance();
        barrier_wait(barriers.empty(at.stage), at.phase ^ 1);
        return base + at.stage * Chunk::BYTES;
    }

    // How many chunks there are, read where it is needed: the compiler spills what outlives a change of registers.
    __device__ const int* count(const BsrPlan& plan, bool reads_a, int cluster) {
        const int first = plan.chunks[cluster];
        chunks = reads_a ? plan.chunks[cluster + 1] - first : 0;
        return plan.columns + int64_t(first) * Chunk::COLUMNS;
    }

    // The fetching warp, before any barrier. It looks up columns two chunks before it needs them.
    __device__ void look_ahead(const BsrPlan& plan, bool reads_a, int cluster, int lane) {
        const int* columns = count(plan, reads_a, cluster);
        ahead[0] = look_up(columns, 0, lane), ahead[1] = look_up(columns, 1, lane);
    }

    __device__ void fill(const BsrPlan& plan, bool reads_a, int cluster, const TensorMap& map, int lane) {
        const int* columns = count(plan, reads_a, cluster);
        const int span = plan.span;
        for (chunk = 0; chunk < chunks; ++chunk, at.advance()) {
            const int mine = ahead[0], count = __popc(__ballot_sync(~0u, mine >= 0));
            ahead[0] = ahead[1], ahead[1] = look_up(columns, chunk + 2, lane);
            const uint32_t full = barriers.full(at.stage), to = base + at.stage * Chunk::BYTES;
            barrier_wait(barriers.empty(at.stage), at.phase ^ 1);
            if (lane == 0) barrier_arrive_expect(full, count * Chunk::COLUMN_BYTES * Chunk::BOXES);
            for (int c = cluster_rank() * span; c < count; c += kCluster * span) {
                const int row = __shfl_sync(~0u, mine, c) * kTile;
#pragma unroll
                for (int box = 0; box < Chunk::BOXES; ++box) {
                    const TensorCoordinates from = {{int(blockIdx.y) * kWidth + box * Chunk::BOX_WIDTH, row, 0, 0, 0}};
                    const uint32_t box_to = to + box * Chunk::BOX_BYTES + c * Chunk::COLUMN_BYTES;
                    if (lane == 0) tma_load_multicast(box_to, map, from, full, (1 << kCluster) - 1);
                }
            }
        }
    }

    __device__ int look_up(const int* columns, int index, int lane) const {
        return index < chunks && lane < Chunk::COLUMNS ? columns[index * Chunk::COLUMNS + lane] : -1;
    }
};

// In a register for good: in a cluster, a shared address asks for the block's rank each time it is made.
__device__ inline uint32_t fixed(uint32_t address) {
    uint32_t same;
    asm volatile("mov.b32 %0, %1;" : "=r"(same) : "r"(address));
    return same;
}

// y = alpha times a warp's sums, of 16 bits, by way of 16 x 128 bytes of shared memory: eight lanes write a row.
template <class T, int ROWS, class Chunk>
__device__ inline void finish_rows(const BsrRows<T, ROWS, Chunk>& rows, const SpmmEnd<T>& end,
                                   const int (&tile_rows)[ROWS], int first_column, uint32_t room) {
    static_assert(sizeof(T) == 2 && kTile == 16 && kWidth == 64, "what stmatrix takes, in rows of 128 bytes");
    const int lane = rows.lane;
    const uint32_t to = room + swizzled_offset<128>(lane % 16, lane / 16);
    const int column = first_column + lane % 8 * 8;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
        for (int n = 0; n < kWidth / 8; n += 2) {
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* pair = rows.sums[r][n + i / 2] + i % 2 * 2;
                words[i] = narrow_pair<T>(end.alpha * pair[0], end.alpha * pair[1]);
            }
            stmatrix(to ^ n << 4, words);
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int from = i * 4 + lane / 8;
            const int64_t row = int64_t(tile_rows[r]) * kTile + from;
            uint32_t words[4];
            BsrReader<T, Chunk>::load_quad(words, room + swizzled_offset<128>(from, lane % 8));
            T* y_row = end.row_of(row);
            if (row < end.call.rows && column < end.shape.columns) {
                *reinterpret_cast<uint4*>(y_row + column) = make_uint4(words[0], words[1], words[2], words[3]);
            }
        }
        __syncwarp();
    }
}

template <class T, int WARPS, int ROWS, int STAGES>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(WARPS* kWarpSize + kWarpGroupSize, 1)
    spmm_bsr_sm90(const __grid_constant__ SpmvCall call, const __grid_constant__ DenseShape shape,
                  const __grid_constant__ BsrPlan plan, const __grid_constant__ TensorMap map) {
    using Ring = BsrBoxRing<T, WARPS, STAGES>;
    constexpr bool kNeedsMore = ROWS > 1;  // than the registers a thread that a block of so many warps starts with
    extern __shared__ __align__(1024) unsigned char storage[];
    __shared__ __align__(8) uint64_t ring_words[2 * STAGES];
    const int index = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const int cluster = blockIdx.x / kCluster, warp = blockIdx.x * WARPS + index;
    Ring ring = {fixed(shared_address(storage)), {fixed(shared_address(ring_words))}};
    if (threadIdx.x == 0) {
        prefetch_tensor_map(map);
        ring.barriers.init(WARPS * kCluster);
    }
    cluster_arrive_relaxed();
    if (index == WARPS) ring.look_ahead(plan, true, cluster, lane);
    if (index < WARPS) BsrRows<T, ROWS, typename Ring::Chunk>::ask_ahead(call, plan, warp, lane);
    cluster_wait();
    bool reads_a;  // asked here, and all else at the end: registers are scarce between
    {
        const SpmmEnd<T> end(call, shape);  // which waits for the launch before
        if (end.keeps_y) return;
        reads_a = end.reads_a;
    }
    if (index >= WARPS) {
        if constexpr (kNeedsMore) release_registers<WARPS == 8 ? 72 : 32>();
        if (index == WARPS) ring.fill(plan, reads_a, cluster, map, lane);
    } else {
        if constexpr (kNeedsMore) claim_registers<WARPS == 8 ? 216 : 112>();
        BsrRows<T, ROWS, typename Ring::Chunk> rows;
        ring.count(plan, reads_a, cluster);
        if (reads_a) rows.multiply(call, plan, warp, ring);
        int tile_rows[ROWS];
        rows.look_up(tile_rows, plan, warp);
        ring.leave();
        const uint32_t room = ring.room() + index * (kTile * 128);  // all that comes from the other block has come
        const SpmmEnd<T> end(call, shape);
        const int first_column = blockIdx.y * kWidth;
        if constexpr (sizeof(T) == 2) {
            if (!end.reads_y && shape.is_vector_y) {
                finish_rows(rows, end, tile_rows, first_column, room);
                return;
            }
        }
        rows.finish(end, tile_rows, first_column);
    }
}

}  // namespace rawops
