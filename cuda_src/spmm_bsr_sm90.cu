// A matrix of dense blocks times a dense matrix on the tensor cores: see common/bsr_tile.cuh.
//
// One warp fetches, by TMA, what the others multiply: each walks at its own pace, which matters since a step holds
// tiles for some warps and none for others.
#include "common/bsr_tile.cuh"
#include "common/hopper.cuh"

namespace rawops {

constexpr int kColumns = 16, kTiles = 80;  // of a stage

// 16 x 64 of x as TMA lays it out.
struct BoxReader {
    int lane_offset;

    __device__ explicit BoxReader(int lane) {
        const int offset = swizzled_offset<128>(lane % 8 + lane / 8 % 2 * 8, lane / 16);
        asm volatile("mov.b32 %0, %1;" : "=r"(lane_offset) : "r"(offset));  // once, not for each tile
    }
    __device__ uint32_t address(uint32_t box) const { return box + lane_offset; }
    __device__ void load(uint32_t (&b)[4], uint32_t address, int n, int) const { ldmatrix<true>(b, address ^ n << 5); }
};

template <class T, int WARPS, int ROWS, int STAGES> struct BsrPipeline {
    using Stage = BsrStage<T, kColumns, kTiles>;
    using Warp = BsrRows<T, ROWS, Stage>;
    static constexpr int COLUMNS = kColumns;
    static_assert(sizeof(T) == 2, "a row of a box is 128 bytes");

    const SpmvCall& call;
    const BsrPlan& plan;
    const TensorMap& map;
    uint32_t ring;
    BsrColumn (*columns)[COLUMNS];  // of each stage
    RingBarriers<STAGES> barriers;

    __device__ void produce(int step, int last) const {
        const int lane = threadIdx.x % kWarpSize;
        RingPosition<STAGES> at;
        int column = look_up(step, last, lane), next_column = look_up(step + 1, last, lane);
        BsrStep found = step < last ? plan.steps[step] : BsrStep{}, next = {};
        for (; step < last; ++step, at.advance()) {
            const int mine = column;
            const BsrStep tiles = found;
            if (step + 1 < last) next = plan.steps[step + 1];
            column = next_column, next_column = look_up(step + 2, last, lane);  // before anyone waits for it
            const int count = __popc(__ballot_sync(~0u, mine >= 0));
            const uint32_t full = barriers.full(at.stage), x_to = ring + at.stage * Stage::BYTES;
            barrier_wait(barriers.empty(at.stage), at.phase ^ 1);
            if (lane == 0) {
                const int column_bytes = plan.columns_a_step * int(sizeof(BsrColumn));
                const BsrColumn* from = plan.columns + int64_t(step) * plan.columns_a_step;
                const int bytes = count * Stage::COLUMN_BYTES + tiles.tiles * Stage::TILE_BYTES + column_bytes;
                barrier_arrive_expect(full, bytes);
                bulk_load(shared_address(columns[at.stage]), from, column_bytes, full);
                const char* tiles_from = static_cast<const char*>(call.data) + int64_t(tiles.first) * Stage::TILE_BYTES;
                bulk_load(x_to + Stage::X_BYTES, tiles_from, tiles.tiles * Stage::TILE_BYTES, full);
            }
            for (int c = 0; c < count; c += plan.span) {
                const int row = __shfl_sync(~0u, mine, c) * kTile;
                const TensorCoordinates from = {{int(blockIdx.y) * kWidth, row, 0, 0, 0}};
                if (lane == 0) tma_load(x_to + c * Stage::COLUMN_BYTES, map, from, full);
            }
            found = next;
        }
    }

    __device__ int look_up(int step, int last, int lane) const {
        if (step >= last || lane >= plan.columns_a_step) return -1;
        return plan.columns[int64_t(step) * plan.columns_a_step + lane].column;
    }

    __device__ void consume(int step, int last, Warp& warp) const {
        const BoxReader reader(warp.lane);
        RingPosition<STAGES> at;
        for (; step < last; ++step, at.advance()) {
            barrier_wait(barriers.full(at.stage), at.phase);
            warp.multiply(columns[at.stage], plan.columns_a_step, ring + at.stage * Stage::BYTES, reader);
            __syncwarp();
            if (warp.lane == 0) barrier_arrive(barriers.empty(at.stage));
        }
    }
};

template <class T, int WARPS, int ROWS, int STAGES>
__global__ void __launch_bounds__((WARPS + 1) * kWarpSize, 1)
    spmm_bsr_sm90(const __grid_constant__ SpmvCall call, const __grid_constant__ DenseShape shape,
                  const __grid_constant__ BsrPlan plan, const __grid_constant__ TensorMap map) {
    using Pipeline = BsrPipeline<T, WARPS, ROWS, STAGES>;
    extern __shared__ __align__(1024) unsigned char ring[];
    __shared__ __align__(16) BsrColumn columns[STAGES][Pipeline::COLUMNS];
    __shared__ __align__(8) uint64_t barrier_words[2 * STAGES];
    bool reads_a;  // asked here, and all else at the end: registers are scarce between
    {
        const SpmmEnd<T> end(call, shape);
        if (end.keeps_y) return;
        reads_a = end.reads_a;
    }
    const Pipeline pipeline = {call, plan, map, shared_address(ring), columns, {shared_address(barrier_words)}};
    if (threadIdx.x == 0) pipeline.barriers.init(WARPS);
    __syncthreads();
    const int index = threadIdx.x / kWarpSize;
    int step = 0, last = 0;
    if (reads_a) step = plan.groups[blockIdx.x], last = plan.groups[blockIdx.x + 1];
    if (index == WARPS) {
        pipeline.produce(step, last);
    } else {
        typename Pipeline::Warp warp(index);
        pipeline.consume(step, last, warp);
        warp.finish(SpmmEnd<T>(call, shape), int64_t(blockIdx.x) * WARPS * ROWS * kTile, blockIdx.y * kWidth);
    }
}

}  // namespace rawops
