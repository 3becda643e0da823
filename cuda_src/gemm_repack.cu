// Copies a matrix that a GEMM kernel takes slowly or not at all (rows off the 16-byte boundaries, the wrong axis
// contiguous, none contiguous) to one with contiguous rows on 16-byte boundaries.
#include "common/copy.cuh"

namespace rawops {

struct RepackParams {
    const void* source;
    void* target;
    int64_t row, col, batch[3];  // strides of the source in elements
    int64_t target_row;          // the target is contiguous but for the end of each row
    int rows, cols, extent[3];
};

// Calls visit(source, target) for each matrix of the batch that is this block's.
template <class T, class Visit> __device__ inline void for_each_matrix(const RepackParams& p, Visit visit) {
    const int batches = p.extent[0] * p.extent[1] * p.extent[2];
    for (int batch = blockIdx.z; batch < batches; batch += gridDim.z) {
        const int i = batch / p.extent[2];
        const int64_t from =
            i / p.extent[1] * p.batch[0] + i % p.extent[1] * p.batch[1] + batch % p.extent[2] * p.batch[2];
        const int64_t to = int64_t(batch) * p.rows * p.target_row;
        visit(static_cast<const T*>(p.source) + from, static_cast<T*>(p.target) + to);
    }
}

// A thread writes 16 bytes of a row; what lies behind the row's end is filled with zeros.
template <int BYTES>
__global__ void __launch_bounds__(256) gemm_repack(const __grid_constant__ RepackParams p) {
    using T = typename BitsOf<BYTES>::Type;
    constexpr int WIDTH = 16 / BYTES;
    const int chunks = ceil_div(p.cols, WIDTH);
    const int64_t item = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, row = item / chunks;
    const int col = int(item % chunks) * WIDTH, count = min_of(p.cols - col, WIDTH);
    if (row >= p.rows) return;
    for_each_matrix<T>(p, [&](const T* source, T* target) {
        source += row * p.row + col * p.col;
        Vector<T, WIDTH> group;
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) group.data[i] = i < count ? source[i * p.col] : T(0);
        *reinterpret_cast<Vector<T, WIDTH>*>(target + row * p.target_row + col) = group;
    });
}

// The same where the source's columns are contiguous: tiles of 64 x 64 pass through shared memory.
template <int BYTES>
__global__ void __launch_bounds__(256) gemm_repack_transposed(const __grid_constant__ RepackParams p) {
    using T = typename BitsOf<BYTES>::Type;
    constexpr int SIDE = 64, STEP = 256 / SIDE;
    __shared__ T tile[SIDE][SIDE + 4 / BYTES];  // a column's entries lie in different banks
    const int tiles = ceil_div(p.cols, SIDE);
    const int row = int(blockIdx.x / tiles) * SIDE, col = int(blockIdx.x % tiles) * SIDE;
    const int fast = threadIdx.x % SIDE, slow = threadIdx.x / SIDE;
    const int pitch = ceil_div(p.cols, 16 / BYTES) * (16 / BYTES);
    for_each_matrix<T>(p, [&](const T* source, T* target) {
        source += (row + fast) * p.row + (col + slow) * p.col;
#pragma unroll
        for (int i = 0; i < SIDE; i += STEP) {
            const bool exists = row + fast < p.rows && col + slow + i < p.cols;
            tile[fast][slow + i] = exists ? source[i * p.col] : T(0);
        }
        __syncthreads();
        target += (row + slow) * p.target_row + col + fast;
#pragma unroll
        for (int i = 0; i < SIDE; i += STEP) {
            if (row + slow + i < p.rows && col + fast < pitch) target[i * p.target_row] = tile[slow + i][fast];
        }
        __syncthreads();
    });
}

// Transposes 4 x 4 bytes: byte i of each word comes to word i.
__device__ inline void transpose_bytes(uint32_t (&w)[4]) {
    const uint32_t upper[2] = {__byte_perm(w[0], w[1], 0x5140), __byte_perm(w[0], w[1], 0x7362)};
    const uint32_t lower[2] = {__byte_perm(w[2], w[3], 0x5140), __byte_perm(w[2], w[3], 0x7362)};
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = __byte_perm(upper[i / 2], lower[i / 2], i % 2 ? 0x7632 : 0x5410);
}

// The same of bytes whose columns begin on words and are whole ones: tiles of 128 x 128, four entries at a time.
__global__ void __launch_bounds__(256) gemm_repack_bytes(const __grid_constant__ RepackParams p) {
    constexpr int SIDE = 128, WARPS = 8, PASSES = SIDE / (4 * WARPS);
    __shared__ uint32_t tile[SIDE][SIDE / 4];  // word i of row r is at i ^ r / 4: lanes meet all banks, either way
    const int tiles = ceil_div(p.cols, SIDE), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = int(blockIdx.x / tiles) * SIDE, col = int(blockIdx.x % tiles) * SIDE;
    const int end = ceil_div(p.cols, 16) * 16;
    for_each_matrix<unsigned char>(p, [&](const unsigned char* source, unsigned char* target) {
        uint32_t words[PASSES][4];
#pragma unroll
        for (int i = 0; i < PASSES * 4; ++i) {
            const int r = row + lane * 4, c = col + (i / 4 * WARPS + warp) * 4 + i % 4;
            const bool exists = r < p.rows && c < p.cols;
            words[i / 4][i % 4] = exists ? *reinterpret_cast<const uint32_t*>(source + r + c * p.col) : 0;
        }
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            transpose_bytes(words[pass]);
#pragma unroll
            for (int i = 0; i < 4; ++i) tile[lane * 4 + i][(pass * WARPS + warp) ^ lane] = words[pass][i];
        }
        __syncthreads();
#pragma unroll
        for (int r = warp; r < SIDE; r += WARPS) {
            if (row + r >= p.rows || col + lane * 4 >= end) continue;
            *reinterpret_cast<uint32_t*>(target + (row + r) * p.target_row + col + lane * 4) = tile[r][lane ^ r / 4];
        }
        __syncthreads();
    });
}

// The same of numbers of 4 bytes whose columns begin on 16 bytes and are whole ones, four entries at a time.
__global__ void __launch_bounds__(256) gemm_repack_words(const __grid_constant__ RepackParams p) {
    constexpr int SIDE = 64, STEPS = 4;
    __shared__ __align__(16) float tile[SIDE * SIDE];  // groups of 4 are permuted: lanes meet all banks, either way
    auto at = [&](int row, int col) { return tile + row * SIDE + (col ^ row / 4 % 8 * 4); };
    const int tiles = ceil_div(p.cols, SIDE), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = int(blockIdx.x / tiles) * SIDE, col = int(blockIdx.x % tiles) * SIDE;
    const int rows = p.rows - row, cols = p.cols - col, end = ceil_div(cols, 4) * 4;
    // Read: a warp has 128 bytes of 4 columns. Written: 256 bytes of 2 rows.
    const int from_row = (warp % 2 * 8 + lane % 8) * 4, from_col = warp / 2 * 4 + lane / 8;
    const int to_row = warp * 2 + lane / 16, to_col = lane % 16 * 4;
    for_each_matrix<float>(p, [&](const float* source, float* target) {
        source += row + from_row + (col + from_col) * p.col;
        target += (row + to_row) * p.target_row + col + to_col;
        float4 piece[STEPS];
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            piece[i] = make_float4(0, 0, 0, 0);
            if (from_row < rows && from_col + i * 16 < cols)
                piece[i] = load_past_l1(reinterpret_cast<const float4*>(source + i * 16 * p.col));
        }
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            const float values[4] = {piece[i].x, piece[i].y, piece[i].z, piece[i].w};
#pragma unroll
            for (int v = 0; v < 4; ++v) *at(from_row + v, from_col + i * 16) = values[v];
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < STEPS; ++i) piece[i] = *reinterpret_cast<const float4*>(at(to_row + i * 16, to_col));
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            if (to_row + i * 16 < rows && to_col < end)
                *reinterpret_cast<float4*>(target + i * 16 * p.target_row) = piece[i];
        }
        __syncthreads();
    });
}

}  // namespace rawops
