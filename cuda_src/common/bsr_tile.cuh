// What the tensor-core products of block-sparse matrices share: the plan, and a warp's part of a step.
//
// A lies in tiles of 16 x 16, each in the order in which the lanes of a warp hold it. A block of threads takes a group
// of tile rows and 64 columns of the result, and walks over the tile columns in which the group has tiles: of each it
// fetches 16 rows of x once, for all tile rows.
//
//              tile columns 3 5 9 ...          x
//   warp 0     [ A . . A | . A . . ]    16 x 64 of tile column 3
//   warp 1     [ . . A . | A A . . ]    16 x 64 of 5
//   ...          step 0     step 1      ...
//
// A step is some of these columns: their rows of x and all of their tiles, in one stage of a ring in shared memory.
#pragma once
#include "mma.cuh"
#include "spmm.cuh"

namespace rawops {

constexpr int kTile = 16, kWidth = 64;

struct BsrColumn {
    int column;     // of tiles; -1: none, which fills a group's last step
    uint32_t mask;  // the group's tile rows that have a tile here
    int first;      // of these tiles, counted from the step's first
    int unused;
};

struct BsrStep {
    int first, tiles;
};

struct BsrPlan {
    const BsrColumn* columns;  // by group and column
    const BsrStep* steps;
    const int* groups;  // (groups + 1): where the steps of each begin
    int columns_a_step;
    int span;  // neighbouring columns, from a multiple of it on, that are all there if one of them is
};

// What a stage of the ring holds: 16 rows of x for each of COLUMNS tile columns, and their tiles.
template <class T, int COLUMNS_, int TILES> struct BsrStage {
    static constexpr int COLUMNS = COLUMNS_;
    static constexpr int TILE_BYTES = kTile * kTile * int(sizeof(T));
    static constexpr int COLUMN_BYTES = kTile * kWidth * int(sizeof(T));
    static constexpr int X_BYTES = COLUMNS * COLUMN_BYTES, BYTES = X_BYTES + TILES * TILE_BYTES;
};

// A warp's ROWS tile rows of a group.
template <class T, int ROWS, class Stage> struct BsrRows {
    using Atom = MmaAtom<T>;
    static constexpr int K_STEPS = kTile / Atom::K;

    int lane, warp;
    float sums[ROWS][kWidth / 8][4];

    __device__ explicit BsrRows(int warp) : lane(threadIdx.x % kWarpSize), warp(warp) {
#pragma unroll
        for (int i = 0; i < ROWS * kWidth / 2; ++i) sums[i / (kWidth / 2)][i / 4 % (kWidth / 8)][i % 4] = 0;
    }

    // A step, whose rows of x and tiles lie from `stage` on. A Reader reads 16 x 16 of x as two B fragments.
    template <class Reader>
    __device__ void multiply(const BsrColumn* columns, int count, uint32_t stage, const Reader& reader) {
        uint32_t mask = 0, found = 0;
        if (lane < count) mask = columns[lane].mask, found = columns[lane].first;
        // Of this warp's rows: where the tiles begin, and in the low bits, which are zero in a number of bytes, which.
        const uint32_t rows = mask >> warp * ROWS & ((1u << ROWS) - 1);
        found = (found + __popc(mask & ((1u << warp * ROWS) - 1))) * Stage::TILE_BYTES | rows;
        for (uint32_t todo = __ballot_sync(~0u, rows != 0); todo != 0; todo &= todo - 1) {
            const int c = __ffs(todo) - 1;
            const uint32_t has = __shfl_sync(~0u, found, c);
            const uint32_t x = reader.address(stage + c * Stage::COLUMN_BYTES);
            const uint32_t tile = stage + Stage::X_BYTES + lane * 16 + (has & ~((1u << ROWS) - 1));
#pragma unroll
            for (int i = 0; i < K_STEPS * kWidth / 32; ++i) {  // 32 columns of the result at a time spare registers
                const int k = i % K_STEPS, half = i / K_STEPS * 2;
                uint32_t b[2][4];
                reader.load(b[0], x, half, k);
                reader.load(b[1], x, half + 1, k);
#pragma unroll
                for (int r = 0; r < ROWS; ++r) {
                    if ((has >> r & 1) == 0) continue;
                    const int before = __popc(has & ((1u << r) - 1)) * Stage::TILE_BYTES;
                    uint32_t a[4];
                    load_a(a, tile + before + k * (Stage::TILE_BYTES / K_STEPS));
#pragma unroll
                    for (int n = 0; n < 4; ++n) {
                        Atom::multiply(sums[r][2 * half + n], a, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
                    }
                }
            }
        }
    }

    static __device__ void load_a(uint32_t (&a)[4], uint32_t address) {
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                     : "r"(address)
                     : "memory");
        if constexpr (is_same<T, float>) {
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = round_to_tf32(a[i]);
        }
    }

    // `first_row` is that of the group, `first_column` that of the 64.
    __device__ void finish(const SpmmEnd<T>& end, int64_t first_row, int first_column) const {
#pragma unroll
        for (int i = 0; i < ROWS * 2; ++i) {
            const int64_t row = first_row + (warp * ROWS + i / 2) * kTile + i % 2 * 8 + lane / 4;
            if (row >= end.call.rows) continue;
            T* y_row = end.row_of(row);
#pragma unroll
            for (int n = 0; n < kWidth / 8; ++n) {
                const int column = first_column + n * 8 + lane % 4 * 2;
                const float pair[2] = {sums[i / 2][n][i % 2 * 2], sums[i / 2][n][i % 2 * 2 + 1]};
                if (column < end.shape.columns) end.finish_vector(y_row, column, pair);
            }
        }
    }
};

}  // namespace rawops
