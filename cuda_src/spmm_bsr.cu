// A matrix of dense blocks times a dense matrix on the tensor cores, with cp.async: see common/bsr_tile.cuh.
#include "common/bsr_tile.cuh"

namespace rawops {

// 16 x 64 of x, its chunks permuted as in SharedTile.
template <class T> struct TileReader {
    FragmentReader<T, SharedTile<T, kTile, kWidth>, false, true> reader;

    __device__ explicit TileReader(int lane) : reader(0, lane) {}
    __device__ uint32_t address(uint32_t tile) const { return tile; }
    __device__ void load(uint32_t (&b)[4], uint32_t tile, int n, int k) const { reader.load(b, tile, n, k); }
};

template <class T, int WARPS, int ROWS, int STAGES> struct BsrGroup {
    using Stage = BsrStage<T, 16 / int(sizeof(T)), 128 / int(sizeof(T))>;
    using Warp = BsrRows<T, ROWS, Stage>;
    using XTile = SharedTile<T, kTile, kWidth>;
    static constexpr int THREADS = WARPS * kWarpSize, COLUMNS = Stage::COLUMNS;
    static constexpr int CHUNK = 16 / int(sizeof(T)), CHUNKS = XTile::BYTES / 16;  // of a tile column's rows of x
    static constexpr int FETCHES = COLUMNS * CHUNKS / THREADS;
    static_assert(COLUMNS * CHUNKS % THREADS == 0, "each thread fetches as many chunks of x");

    const SpmvCall& call;
    const DenseShape& shape;
    const BsrPlan& plan;
    uint32_t ring;
    BsrColumn (*columns)[COLUMNS];  // of each stage

    // What a thread has to know of a step before it can fetch: read one step ahead.
    struct Next {
        int column[FETCHES];
        BsrStep step;
    };

    __device__ Next look_up(int step) const {
        Next next;
        const BsrColumn* found = plan.columns + int64_t(step) * plan.columns_a_step;
#pragma unroll
        for (int i = 0; i < FETCHES; ++i) {
            const int c = (i * THREADS + threadIdx.x) / CHUNKS;
            next.column[i] = c < plan.columns_a_step && found[c].mask != 0 ? found[c].column : -1;
        }
        next.step = plan.steps[step];
        return next;
    }

    __device__ void fetch(const Next& next, int step, int stage) const {
        const uint32_t x_to = ring + stage * Stage::BYTES, tiles_to = x_to + Stage::X_BYTES;
        const T* __restrict__ x = static_cast<const T*>(call.x);
#pragma unroll
        for (int i = 0; i < FETCHES; ++i) {
            if (next.column[i] < 0) continue;
            const int c = (i * THREADS + threadIdx.x) / CHUNKS, chunk = (i * THREADS + threadIdx.x) % CHUNKS;
            const int k = chunk / XTile::CHUNKS, n = chunk % XTile::CHUNKS * CHUNK;
            const int row = next.column[i] * kTile + k, column = blockIdx.y * kWidth + n;
            const int valid = row < call.cols ? clamp(shape.columns - column, 0, CHUNK) * int(sizeof(T)) : 0;
            const T* from = valid > 0 ? x + row * shape.x_row + column : x;
            cp_async<16>(x_to + c * XTile::BYTES + XTile::offset(k, n), from, valid);
        }
        const char* tiles = static_cast<const char*>(call.data) + int64_t(next.step.first) * Stage::TILE_BYTES;
        for (int at = threadIdx.x * 16; at < next.step.tiles * Stage::TILE_BYTES; at += THREADS * 16) {
            cp_async<16>(tiles_to + at, tiles + at, 16);
        }
        if (threadIdx.x < plan.columns_a_step) {
            const BsrColumn* from = plan.columns + int64_t(step) * plan.columns_a_step + threadIdx.x;
            cp_async<16>(shared_address(&columns[stage][threadIdx.x]), from, 16);
        }
    }

    __device__ void walk(int step, int last, Warp& warp) const {
        const TileReader<T> reader(warp.lane);
        Next next = {};
        int fetched = step;
        if (fetched < last) next = look_up(fetched);
        auto advance = [&](int stage) {
            if (fetched < last) {
                fetch(next, fetched, stage);
                if (++fetched < last) next = look_up(fetched);
            }
            cp_async_commit();
        };
#pragma unroll
        for (int stage = 0; stage < STAGES - 1; ++stage) advance(stage);
        for (int stage = 0; step < last; ++step) {
            cp_async_wait<STAGES - 2>();
            __syncthreads();
            advance(stage == 0 ? STAGES - 1 : stage - 1);
            warp.multiply(columns[stage], plan.columns_a_step, ring + stage * Stage::BYTES, reader);
            stage = stage + 1 < STAGES ? stage + 1 : 0;
        }
    }
};

// x has neighbouring columns side by side and rows that begin at multiples of 16 bytes. `call.data` are the tiles.
template <class T, int WARPS, int ROWS, int STAGES>
__global__ void __launch_bounds__(WARPS* kWarpSize, 1)
    spmm_bsr(const __grid_constant__ SpmvCall call, const __grid_constant__ DenseShape shape,
             const __grid_constant__ BsrPlan plan) {
    using Group = BsrGroup<T, WARPS, ROWS, STAGES>;
    extern __shared__ __align__(128) unsigned char ring[];
    __shared__ __align__(16) BsrColumn columns[STAGES][Group::COLUMNS];
    const SpmmEnd<T> end(call, shape);
    if (end.keeps_y) return;
    typename Group::Warp warp(threadIdx.x / kWarpSize);
    const Group group = {call, shape, plan, shared_address(ring), columns};
    if (end.reads_a) group.walk(plan.groups[blockIdx.x], plan.groups[blockIdx.x + 1], warp);
    warp.finish(end, int64_t(blockIdx.x) * WARPS * ROWS * kTile, blockIdx.y * kWidth);
}

}  // namespace rawops
