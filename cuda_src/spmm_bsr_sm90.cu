// A matrix of dense blocks times a dense matrix on the tensor cores: see common/bsr_tile.cuh.
//
// One warp fetches, by TMA, what the others multiply: each walks at its own pace, which matters since a step holds
// tiles for some warps and none for others. SHARES blocks of a cluster have the same tile rows and neighbouring columns
// of the result: each fetches its part of the tiles for all of them.
#include "common/bsr_tile.cuh"
#include "common/hopper.cuh"

namespace rawops {

// 16 x 64 of x as TMA lays it out.
template <class T> struct BoxReader {
    int lane_offset;

    __device__ explicit BoxReader(int lane)
        : lane_offset(swizzled_offset<128>(lane % 8 + lane / 8 % 2 * 8, lane / 16)) {}

    __device__ void load(uint32_t (&b)[4], uint32_t box, int n, int) const {
        ldmatrix<true>(b, box + (lane_offset ^ n << 5));
    }
};

// Copies chunks of 16 bytes to the same place in all blocks of `mask`, and counts at the same barrier of each.
__device__ inline void bulk_load_shared(uint32_t destination, const void* source, int bytes, uint32_t barrier,
                                        uint16_t mask) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;"
        ::"r"(destination), "l"(source), "r"(bytes), "r"(barrier), "h"(mask)
        : "memory");
}

// Arrives at the same barrier of another block of the cluster.
__device__ inline void barrier_arrive_at(uint32_t barrier, int rank) {
    asm volatile(
        "{\n"
        ".reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];\n"
        "}" ::"r"(barrier), "r"(rank)
        : "memory");
}

template <class T, int WARPS, int ROWS, int STAGES, int SHARES> struct BsrPipeline {
    using Warp = BsrRows<T, ROWS>;
    static constexpr int COLUMNS = kStageColumns<T>;
    static_assert(sizeof(T) == 2, "a row of a box is 128 bytes");

    const SpmvCall& call;
    const BsrPlan& plan;
    const TensorMap& map;
    uint32_t ring;
    BsrColumn (*columns)[COLUMNS];  // of each stage
    RingBarriers<STAGES> barriers;

    __device__ void produce(int step, int last) const {
        const int lane = threadIdx.x % kWarpSize, rank = SHARES > 1 ? cluster_rank() : 0;
        const BsrColumn* found = plan.columns + int64_t(step) * plan.columns_a_step;
        RingPosition<STAGES> at;
        BsrColumn next = {-1, 0, 0, 0};
        if (step < last && lane < plan.columns_a_step) next = found[lane];
        for (; step < last; ++step, at.advance()) {
            const BsrColumn mine = next;
            const BsrColumn* const here = found;
            found += plan.columns_a_step;
            if (step + 1 < last && lane < plan.columns_a_step) next = found[lane];
            const bool is_there = mine.column >= 0;
            const int count = __popc(__ballot_sync(~0u, is_there));
            const int first = __shfl_sync(~0u, mine.first, 0), tiles = __shfl_sync(~0u, mine.step_tiles, 0);
            const uint32_t full = barriers.full(at.stage), x_to = ring + at.stage * Warp::STAGE_BYTES;
            barrier_wait(barriers.empty(at.stage), at.phase ^ 1);
            if (lane == 0) {
                const int column_bytes = plan.columns_a_step * int(sizeof(BsrColumn));
                barrier_arrive_expect(full, count * Warp::X_BYTES + tiles * Warp::TILE_BYTES + column_bytes);
                bulk_load(shared_address(columns[at.stage]), here, column_bytes, full);
                fetch_tiles(first, tiles, rank, x_to + Warp::STAGE_X_BYTES, full);
            }
            __syncwarp();
            if (is_there) {
                const TensorCoordinates from = {{int(blockIdx.y) * kWidth, mine.column * kTile, 0, 0, 0}};
                tma_load(x_to + lane * Warp::X_BYTES, map, from, full);
            }
        }
    }

    // This block's part of a step's tiles.
    __device__ void fetch_tiles(int first, int tiles, int rank, uint32_t to, uint32_t full) const {
        const int begin = tiles * rank / SHARES, count = tiles * (rank + 1) / SHARES - begin;
        if (count == 0) return;
        const char* from = static_cast<const char*>(call.data) + int64_t(first + begin) * Warp::TILE_BYTES;
        to += begin * Warp::TILE_BYTES;
        if constexpr (SHARES == 1) bulk_load(to, from, count * Warp::TILE_BYTES, full);
        else bulk_load_shared(to, from, count * Warp::TILE_BYTES, full, (1 << SHARES) - 1);
    }

    __device__ void consume(int step, int last, Warp& warp) const {
        const BoxReader<T> reader(warp.lane);
        RingPosition<STAGES> at;
        for (; step < last; ++step, at.advance()) {
            barrier_wait(barriers.full(at.stage), at.phase);
            warp.multiply(columns[at.stage], plan.columns_a_step, ring + at.stage * Warp::STAGE_BYTES, reader);
            __syncwarp();
            if constexpr (SHARES == 1) {
                if (warp.lane == 0) barrier_arrive(barriers.empty(at.stage));
            } else {
                if (warp.lane < SHARES) barrier_arrive_at(barriers.empty(at.stage), warp.lane);
            }
        }
    }
};

template <class T, int WARPS, int ROWS, int STAGES, int SHARES>
__global__ void __cluster_dims__(1, SHARES, 1) __launch_bounds__((WARPS + 1) * kWarpSize, 1)
    spmm_bsr_sm90(const __grid_constant__ SpmvCall call, const __grid_constant__ DenseShape shape,
                  const __grid_constant__ BsrPlan plan, const __grid_constant__ TensorMap map) {
    using Pipeline = BsrPipeline<T, WARPS, ROWS, STAGES, SHARES>;
    extern __shared__ __align__(1024) unsigned char ring[];
    __shared__ __align__(16) BsrColumn columns[STAGES][Pipeline::COLUMNS];
    __shared__ __align__(8) uint64_t barrier_words[2 * STAGES];
    bool reads_a;  // asked here, and all else at the end: registers are scarce between
    {
        const SpmmEnd<T> end(call, shape);
        if (end.keeps_y) return;  // in all blocks
        reads_a = end.reads_a;
    }
    const Pipeline pipeline = {call, plan, map, shared_address(ring), columns, {shared_address(barrier_words)}};
    if (threadIdx.x == 0) pipeline.barriers.init(WARPS * SHARES);
    __syncthreads();
    if constexpr (SHARES > 1) cluster_sync();
    const int index = threadIdx.x / kWarpSize;
    int step = 0, last = 0;
    if (reads_a) step = plan.steps[blockIdx.x], last = plan.steps[blockIdx.x + 1];
    if (index == WARPS) {
        pipeline.produce(step, last);
    } else {
        typename Pipeline::Warp warp(index);
        pipeline.consume(step, last, warp);
        warp.finish(SpmmEnd<T>(call, shape), int64_t(blockIdx.x) * WARPS * ROWS * kTile, blockIdx.y * kWidth);
    }
    if constexpr (SHARES > 1) cluster_sync();  // a block's shared memory lasts until its peers have arrived there
}

}  // namespace rawops
