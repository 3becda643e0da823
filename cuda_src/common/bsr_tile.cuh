// What the tensor-core products of block-sparse matrices share: the plan, and a warp's walk over its tiles.
//
// A lies in tiles of 16 x 16, each in the order in which the lanes of a warp hold it. A block of threads takes a group
// of tile rows and 64 columns of the result, and each warp some of the rows. What their tiles meet of x, 16 rows for
// each tile column, goes once through a ring in shared memory, in chunks of some tile columns:
//
//              tile columns 3 5 9 ...         the ring
//   warp 0     [ A . . A | . A . . ]    chunk 0: 16 x 64 of x for 3, for 5, ...
//   warp 1     [ . . A . | A A . . ]    chunk 1
//
// Which rows of tiles a warp has, and so a group, is the plan's to say: where they differ much, those with many are
// dealt out. No other warp needs a warp's tiles: it reads them straight into registers, two of them while it
// multiplies two others. (More would not help: a warp can wait for few different things, and so waits for all loads of
// a row of them.) The ring is long, so that a warp with many tiles in a chunk does not keep the others waiting.
#pragma once
#include "mma.cuh"
#include "spmm.cuh"

namespace rawops {

constexpr int kTile = 16, kWidth = 64;

struct BsrPlan {
    const int* columns;  // of tiles, by cluster (of groups, on Hopper) and chunk; -1: none, which fills the last chunk
    const int* chunks;   // (clusters + 1): where those of each begin
    const int* pairs;    // of tiles, (warps of all groups + 1): where those of each begin, in order of their columns
    const int* places;   // of each tile: the place of its column among its cluster's, then a bit for each of ROWS; none
                         // has a bit where it fills the last pair
    const int* rows;     // (ROWS * warps of all groups): the tile row that each is; past the last: none
    int span;            // neighbouring columns, from a multiple of it on, that are all there if one of them is
};

// A chunk of the ring: boxes of 128 bytes a row, swizzled as TMA does it, with 16 rows for each tile column.
template <class T, int COLUMNS_> struct BsrChunk {
    static constexpr int COLUMNS = COLUMNS_, ROW_BYTES = 128;
    static constexpr int BOX_WIDTH = ROW_BYTES / int(sizeof(T)), BOXES = kWidth / BOX_WIDTH;
    static constexpr int COLUMN_BYTES = kTile * ROW_BYTES, BOX_BYTES = COLUMNS * COLUMN_BYTES;
    static constexpr int BYTES = BOXES * BOX_BYTES;
};

// B fragments of a tile column's rows of x, two registers for each part of 8 columns. 16 bits: part n is columns 8 n to
// 8 n + 7. 32 bits, to read 16 bytes at once: part n is columns n % 4, n % 4 + 4, ... of box n / 4, and the k that the
// atom has as t and t + 4 are rows 2 t and 2 t + 1, as in the tiles.
template <class T, class Chunk> struct BsrReader {
    static __device__ int offset(int lane) {
        if constexpr (sizeof(T) == 2) return swizzled_offset<128>(lane % 16, lane / 16);
        else return swizzled_offset<128>(lane % 4 * 2, lane / 4);
    }

    // x: the column's rows, plus the lane's offset. kRounded: float32 is TF32 already.
    template <bool kRounded> static __device__ void load(uint32_t (&b)[kWidth / 8][2], uint32_t x, int step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if constexpr (sizeof(T) == 2) {
                uint32_t r[4];
                ldmatrix<true>(r, x ^ i << 5);
                b[2 * i][0] = r[0], b[2 * i][1] = r[1], b[2 * i + 1][0] = r[2], b[2 * i + 1][1] = r[3];
            } else {
                const int box = i / 2, k = i % 2;  // row 2 t + k of 8
                uint32_t r[4];
                load_quad(r, (x ^ k * 144) + step * 1024 + box * Chunk::BOX_BYTES);
#pragma unroll
                for (int j = 0; j < 4; ++j) b[4 * box + j][k] = kRounded ? r[j] : round_to_tf32(r[j]);
            }
        }
    }

    static __device__ void load_quad(uint32_t (&r)[4], uint32_t address) {
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(address)
                     : "memory");
    }
};

// A warp's ROWS tile rows of a group.
template <class T, int ROWS, class Chunk> struct BsrRows {
    using Atom = MmaAtom<T>;
    static constexpr int K_STEPS = kTile / Atom::K;

    struct Tile {
        uint4 a[K_STEPS];
        uint32_t place;
    };

    int lane;
    float sums[ROWS][kWidth / 8][4];

    __device__ BsrRows() : lane(threadIdx.x % kWarpSize) {
#pragma unroll
        for (int i = 0; i < ROWS * kWidth / 2; ++i) sums[i / (kWidth / 2)][i / 4 % (kWidth / 8)][i % 4] = 0;
    }

    // Has the L2 get the first tiles of a warp.
    static __device__ void ask_ahead(const SpmvCall& call, const BsrPlan& plan, int warp, int lane) {
        constexpr int LINE = 128, TILE_BYTES = K_STEPS * kWarpSize * 16;
        const int first = plan.pairs[warp], bytes = 2 * TILE_BYTES * min(plan.pairs[warp + 1] - first, 2);
        const char* tiles = static_cast<const char*>(call.data) + int64_t(first) * (2 * TILE_BYTES);
        if (lane * LINE < bytes) prefetch_line(tiles + lane * LINE);
        if (lane == 0 && bytes > 0) prefetch_line(plan.places + 2 * int64_t(first));
        if (lane == 0) prefetch_line(plan.rows + warp * ROWS);
    }

    static __device__ void look_up(int (&tile_rows)[ROWS], const BsrPlan& plan, int warp) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) tile_rows[r] = plan.rows[warp * ROWS + r];
    }

    // All of the tiles of a warp, counted over all groups; a `leave` of the ring must follow. A ring gives the shared
    // address of a column's rows of x.
    template <class Ring> __device__ void multiply(const SpmvCall& call, const BsrPlan& plan, int warp, Ring& ring) {
        const int offset = BsrReader<T, Chunk>::offset(lane), last = plan.pairs[warp + 1];
        int pair = plan.pairs[warp];
        Tile found[2], next[2];
        if (pair < last) fetch(next, call, plan, pair);
        while (pair < last) {
#pragma unroll
            for (int i = 0; i < 2; ++i) found[i] = next[i];
            if (++pair < last) fetch(next, call, plan, pair);
#pragma unroll
            for (int i = 0; i < 2; ++i) multiply<Ring::kRounded>(found[i], ring.reach(found[i].place >> ROWS) + offset);
        }
    }

    __device__ void fetch(Tile (&tiles)[2], const SpmvCall& call, const BsrPlan& plan, int pair) const {
        const uint4* from = static_cast<const uint4*>(call.data) + int64_t(pair) * (2 * K_STEPS * kWarpSize) + lane;
#pragma unroll
        for (int i = 0; i < 2 * K_STEPS; ++i) tiles[i / K_STEPS].a[i % K_STEPS] = load_now(from + i * kWarpSize);
        load_now(tiles[0].place, tiles[1].place, plan.places + 2 * int64_t(pair));
    }

    // Loads that stay where they are written, before what the compiler would put first.
    static __device__ uint4 load_now(const uint4* from) {
        uint4 r;
        asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                     : "l"(from));
        return r;
    }
    static __device__ void load_now(uint32_t& first, uint32_t& second, const int* from) {
        asm volatile("ld.global.nc.v2.b32 {%0, %1}, [%2];" : "=r"(first), "=r"(second) : "l"(from));
    }

    // A tile times its column's rows of x. What a branch holds is so much that the compiler leaves the branch there: in
    // its place would come predicated products for every r, which take their time whether or not they are done.
    template <bool kRounded> __device__ void multiply(const Tile& tile, uint32_t x) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if ((tile.place >> r & 1) == 0) continue;
            uint32_t b[K_STEPS][kWidth / 8][2];
#pragma unroll
            for (int k = 0; k < K_STEPS; ++k) BsrReader<T, Chunk>::template load<kRounded>(b[k], x, k);
#pragma unroll
            for (int k = 0; k < K_STEPS; ++k) {
                uint32_t a[4] = {tile.a[k].x, tile.a[k].y, tile.a[k].z, tile.a[k].w};
                if constexpr (is_same<T, float>) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) a[i] = round_to_tf32(a[i]);
                }
#pragma unroll
                for (int n = 0; n < kWidth / 8; ++n) Atom::multiply(sums[r][n], a, b[k][n][0], b[k][n][1]);
            }
        }
    }

    // `tile_rows` are the warp's, `first_column` is that of the 64.
    __device__ void finish(const SpmmEnd<T>& end, const int (&tile_rows)[ROWS], int first_column) const {
        constexpr int VEC = 16 / int(sizeof(T));
        const int t = lane % 4;
#pragma unroll
        for (int i = 0; i < ROWS * 2; ++i) {
            const int64_t row = int64_t(tile_rows[i / 2]) * kTile + i % 2 * 8 + lane / 4;
            T* y_row = end.row_of(row);
#pragma unroll
            for (int n = 0; n < kWidth / 8; n += 4) {
                float pairs[2][4];  // columns 2 t, then 2 t + 1 of each part
#pragma unroll
                for (int j = 0; j < 8; ++j) pairs[j % 2][j / 2] = sums[i / 2][n + j / 2][i % 2 * 2 + j % 2];
                float values[8 / VEC][VEC];
                if constexpr (sizeof(T) == 2) {  // from 2 columns of each part to all of that with this lane's number
                    transpose_quad(pairs[0], t);
                    transpose_quad(pairs[1], t);
#pragma unroll
                    for (int j = 0; j < 8; ++j) values[0][j] = pairs[j % 2][j / 2];
                } else {
#pragma unroll
                    for (int j = 0; j < 8; ++j) values[j / 4][j % 4] = pairs[j / 4][j % 4];
                }
#pragma unroll
                for (int j = 0; j < 8 / VEC; ++j) {
                    const int column = first_column + n * 8 + t * 8 + j * VEC;
                    if (row < end.call.rows && column < end.shape.columns) end.finish_vector(y_row, column, values[j]);
                }
            }
        }
    }
};

}  // namespace rawops
