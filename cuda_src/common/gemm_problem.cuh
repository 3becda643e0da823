// The parameters of every GEMM kernel, as _gemm_steps.py packs them, and the order in which blocks take the tiles.
#pragma once
#include "epilogue.cuh"

namespace rawops {

struct GemmCall {
    const void *a, *b;
    Scalar alpha;
    EpilogueCall epilogue;
};

struct GemmShape {
    Strides a, b;  // a: row is M, col is K; b: row is K, col is N
    EpilogueShape epilogue;
    int64_t partial_stride;  // elements between the partial results of two slices of K; 0: D is written at once
    int M, N, K, k_per_split;  // of slices on Hopper (kPartial), the last is what a block asks the L2 for ahead
    int batches, batch_extent[3];

    __device__ void batch_index(int batch, int (&index)[3]) const {
        if (batches == 1) {  // most often so, and divisions delay the first copies
            index[0] = index[1] = index[2] = 0;
            return;
        }
        index[2] = batch % batch_extent[2];
        index[1] = batch / batch_extent[2] % batch_extent[1];
        index[0] = batch / batch_extent[2] / batch_extent[1];
    }
};

struct GemmParams {
    GemmCall call;    // changes from call to call
    GemmShape shape;  // kept by a plan
};

struct TileIndex {
    int m, n;
};

// Blocks that run together cover few rows and few columns of tiles, so that their operands stay in the L2.
__device__ inline TileIndex grouped_raster(int index, int tiles_m, int tiles_n, int group_rows = 8) {
    const int group = group_rows >= tiles_m ? 0 : index / (group_rows * tiles_n);
    const int first = group * group_rows, rows = min_of(tiles_m - first, group_rows);
    const int rest = index - first * tiles_n;
    return rows == 1 ? TileIndex{first, rest} : TileIndex{first + rest % rows, rest / rows};
}

}  // namespace rawops
