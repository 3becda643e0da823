// Products of stacked rows: row tiles of the groups that offsets on the device describe.
#pragma once
#include "gemm_problem.cuh"

namespace rawops {

// Group g has the rows offsets[g] .. offsets[g + 1] - 1 of a matrix; as _gemm_grouped.py packs it.
struct GroupOffsets {
    const void* offsets;
    int64_t stride;
    int count;  // of groups: there is one offset more
    int is_64_bit;

    // The offset, 0 or `rows` where it lies outside of the matrix.
    __device__ int read(int index, int rows) const {
        const int64_t at = index * stride;
        const int64_t row = is_64_bit ? static_cast<const int64_t*>(offsets)[at] : static_cast<const int*>(offsets)[at];
        return row < 0 ? 0 : row > rows ? rows : int(row);
    }
};

// A tile of a group: its first row, the first row that is not the group's, and its number among the columns of tiles.
struct GroupTile {
    int group, m, m_end, n;
};

// The parameters of the grouped kernels that need no tensor maps.
struct GroupedParams {
    GemmCall call;
    GemmShape shape;
    GroupOffsets groups;
};

// Where each group begins, in rows and in row tiles: a block's own table in shared memory. An offset smaller than one
// before it counts as that one, so that no row has two groups, whatever the offsets are.
class GroupTable {
public:
    __device__ GroupTable(char* shared, int count_)
        : count(count_), rows(reinterpret_cast<int*>(shared)), tiles(rows + count_ + 1) {}

    // A multiple of 128, which keeps the alignment of what lies behind.
    __device__ int bytes() const { return ceil_div((count + 1) * 2 * int(sizeof(int)), 128) * 128; }

    // By all threads of the block.
    __device__ void fill(const GroupOffsets& groups, int row_count, int block_m) {
        for (int g = threadIdx.x; g <= count; g += blockDim.x) rows[g] = groups.read(g, row_count);
        __syncthreads();
        if (threadIdx.x < kWarpSize) accumulate(block_m, threadIdx.x);
        __syncthreads();
    }

    __device__ int row_tiles() const { return tiles[count]; }

    // The tile with a number below row_tiles() * tiles_n. The tiles of a group come one after the other.
    __device__ GroupTile find(int index, int tiles_n, int raster_rows, int block_m) const {
        const int row_tile = index / tiles_n;  // the group's, if tiles came row by row
        int group = 0;
        for (int end = count; end - group > 1;) {
            const int middle = (group + end) / 2;
            if (tiles[middle] <= row_tile) group = middle;
            else end = middle;
        }
        const int first = tiles[group];
        const TileIndex tile =
            grouped_raster(index - first * tiles_n, tiles[group + 1] - first, tiles_n, raster_rows);
        return {group, rows[group] + tile.m * block_m, rows[group + 1], tile.n};
    }

private:
    // The running maximum of the offsets and the running sum of the groups' tiles, by one warp.
    __device__ void accumulate(int block_m, int lane) {
        int row_before = rows[0], tiles_before = 0;  // of the 32 groups before
        for (int first = 0; first <= count; first += kWarpSize) {
            const int g = first + lane;
            int row = max_of(row_before, g <= count ? rows[g] : 0);
            for (int step = 1; step < kWarpSize; step *= 2) row = max_of(row, __shfl_up_sync(~0u, row, step));
            const int neighbour = __shfl_up_sync(~0u, row, 1);
            int tile = ceil_div(row - (lane > 0 ? neighbour : row_before), block_m);
            for (int step = 1; step < kWarpSize; step *= 2) {
                const int other = __shfl_up_sync(~0u, tile, step);
                if (lane >= step) tile += other;
            }
            tile += tiles_before;
            if (g <= count) rows[g] = row, tiles[g] = tile;
            row_before = __shfl_sync(~0u, row, kWarpSize - 1);
            tiles_before = __shfl_sync(~0u, tile, kWarpSize - 1);
        }
    }

    int count;
    int *rows, *tiles;
};

}  // namespace rawops
