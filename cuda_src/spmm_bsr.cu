// A matrix of dense blocks times a dense matrix on the tensor cores, with cp.async: see common/bsr_tile.cuh.
#include "common/bsr_tile.cuh"

namespace rawops {

// The ring that all warps fill together.
template <class T, int WARPS, int STAGES> struct BsrCopyRing {
    using Chunk = BsrChunk<T, 16 / int(sizeof(T))>;
    static constexpr bool kRounded = false;
    static constexpr int THREADS = WARPS * kWarpSize, PIECE = 16 / int(sizeof(T)), PIECES_A_ROW = kWidth / PIECE;
    static constexpr int FETCHES = Chunk::BYTES / 16 / THREADS;
    static_assert(FETCHES * THREADS * 16 == Chunk::BYTES, "each thread fetches as many pieces of x");

    const SpmvCall& call;
    const DenseShape& shape;
    const int* columns;
    uint32_t base;
    int chunks;  // of the group
    int chunk = -1, fetched = 0, stage = STAGES - 1;
    int ahead[FETCHES];  // the columns of what a thread fetches next

    __device__ BsrCopyRing(const SpmvCall& call, const DenseShape& shape, const int* columns, uint32_t base, int chunks)
        : call(call), shape(shape), columns(columns), base(base), chunks(chunks) {
        look_up();
#pragma unroll
        for (int i = 0; i < STAGES - 1; ++i) fetch(i);
    }

    // The rows of x of a column, which never lies before the last one asked for.
    __device__ uint32_t reach(uint32_t column) {
        while (chunk < int(column / Chunk::COLUMNS)) next();
        return base + stage * Chunk::BYTES + column % Chunk::COLUMNS * Chunk::COLUMN_BYTES;
    }

    __device__ void next() {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        fetch(stage);
        stage = stage + 1 < STAGES ? stage + 1 : 0;
        ++chunk;
    }

    __device__ void leave() {
        while (chunk + 1 < chunks) next();
    }

    __device__ void look_up() {
#pragma unroll
        for (int i = 0; i < FETCHES; ++i) {
            const int c = (i * THREADS + threadIdx.x) / (kTile * PIECES_A_ROW);
            ahead[i] = fetched < chunks ? columns[fetched * Chunk::COLUMNS + c] : -1;
        }
    }

    __device__ void fetch(int to_stage) {
        const T* __restrict__ x = static_cast<const T*>(call.x);
#pragma unroll
        for (int i = 0; i < FETCHES; ++i) {
            if (ahead[i] < 0) continue;
            const int piece = i * THREADS + threadIdx.x, k = piece / PIECES_A_ROW % kTile;
            const int c = piece / PIECES_A_ROW / kTile, n = piece % PIECES_A_ROW * PIECE;
            const int row = ahead[i] * kTile + k, column = blockIdx.y * kWidth + n;
            const int valid = row < call.cols ? clamp(shape.columns - column, 0, PIECE) * int(sizeof(T)) : 0;
            const T* from = valid > 0 ? x + row * shape.x_row + column : x;
            const uint32_t box = base + to_stage * Chunk::BYTES + n / Chunk::BOX_WIDTH * Chunk::BOX_BYTES;
            const int offset = swizzled_offset<Chunk::ROW_BYTES>(c * kTile + k, n % Chunk::BOX_WIDTH / PIECE);
            cp_async<16>(box + offset, from, valid);
        }
        cp_async_commit();
        ++fetched;
        look_up();
    }
};

// x has neighbouring columns side by side and rows that begin at multiples of 16 bytes. `call.data` are the tiles.
template <class T, int WARPS, int ROWS, int STAGES>
__global__ void __launch_bounds__(WARPS* kWarpSize, 1)
    spmm_bsr(const __grid_constant__ SpmvCall call, const __grid_constant__ DenseShape shape,
             const __grid_constant__ BsrPlan plan) {
    using Ring = BsrCopyRing<T, WARPS, STAGES>;
    extern __shared__ __align__(1024) unsigned char storage[];
    const SpmmEnd<T> end(call, shape);
    if (end.keeps_y) return;
    BsrRows<T, ROWS, typename Ring::Chunk> rows;
    const int warp = blockIdx.x * WARPS + threadIdx.x / kWarpSize;
    if (end.reads_a) {
        const int first = plan.chunks[blockIdx.x], chunks = plan.chunks[blockIdx.x + 1] - first;
        Ring ring(call, shape, plan.columns + int64_t(first) * Ring::Chunk::COLUMNS, shared_address(storage), chunks);
        rows.multiply(call, plan, warp, ring);
        ring.leave();
    }
    int tile_rows[ROWS];
    rows.look_up(tile_rows, plan, warp);
    rows.finish(end, tile_rows, blockIdx.y * kWidth);
}

}  // namespace rawops
