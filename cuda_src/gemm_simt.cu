// Exact float32 GEMM on the CUDA cores (sm_80 and later), for operands of any strides.
//
// Shared memory holds a row of BLOCK_M (or BLOCK_N) values for each k, whatever the operand's own order, so that a
// thread's part of an outer product is a few 16-byte reads. An operand that is contiguous along K is transposed on its
// way, through registers. blockIdx is used as in gemm_sm80.cu.
#include "common/groups.cuh"
#include "common/ring.cuh"

namespace rawops {

// K rows of MN values. Where 4 values of K arrive together (kTransposed), the groups of a row are permuted, alike in 4
// rows, so that the lanes of a warp write into different banks.
template <int MN_, int K_, bool kTransposed> struct SimtTile {
    static constexpr int MN = MN_, K = K_, BYTES = MN * K * int(sizeof(float));
    static_assert(MN % 32 == 0 && K % 8 == 0 && K <= 32, "groups are permuted within 32 values");

    static constexpr __device__ int offset(int k, int mn) {
        return (k * MN + (kTransposed ? mn ^ k / 4 * (128 / K) : mn)) * int(sizeof(float));
    }
};

// Fills tiles of one operand, slice after slice along K. ACCESS is the width of one global access in bytes; an access
// of 4 takes any stride on both axes, wider ones need stride 1 along K (kKMajor) or MN.
// A gated tile holds MN / 2 columns of the operand's first half, then as many of the second.
template <int MN, int K, bool kKMajor, int ACCESS, int THREADS, bool kGated = false> struct SimtLoader {
    using Tile = SimtTile<MN, K, kKMajor>;
    static constexpr int WIDTH = ACCESS / int(sizeof(float));
    static constexpr int EXTENT = kGated ? MN / 2 : MN;  // of the operand's MN
    // One row a thread, whose pieces lie at constant distances, where lines of memory are asked for whole all the same.
    // Accesses of one value have any stride.
    static constexpr int SHARE = THREADS / K * WIDTH;
    static constexpr bool kOneRow = !kKMajor && WIDTH > 1 && SHARE >= 32 && EXTENT % SHARE == 0;
    static constexpr int PIECES_PER_ROW = kOneRow ? THREADS / K : (kKMajor ? K : MN) / WIDTH;  // of one step
    static constexpr int ROWS_PER_STEP = kOneRow ? 0 : THREADS / PIECES_PER_ROW, COLS_PER_STEP = kOneRow ? SHARE : 0;
    static constexpr int STEPS = MN * K / WIDTH / THREADS;
    static constexpr int ROWS = kKMajor ? EXTENT : K;  // evenly spaced
    static_assert(THREADS % PIECES_PER_ROW == 0 && MN * K % (WIDTH * THREADS) == 0, "all threads take whole pieces");
    static_assert(kOneRow || ROWS % ROWS_PER_STEP == 0 || STEPS == 1, "a step stays in one half");

    const float* source;  // this thread's first piece in the slice that comes next
    int64_t row_stride, col_stride, gate_offset;
    int mn_count;  // MN that exist from the tile's origin on (of one half, if gated)
    int row, col;  // this thread's first piece
    float pending[kKMajor ? STEPS : 1][WIDTH];

    __device__ SimtLoader(const float* operand, int64_t mn_stride, int64_t k_stride, int mn_begin, int mn_end,
                          int k_begin, int64_t gate_offset_, int thread)
        : source(operand + mn_begin * mn_stride + k_begin * k_stride),
          row_stride(kKMajor ? mn_stride : k_stride),
          col_stride(WIDTH > 1 ? 1 : kKMajor ? k_stride : mn_stride),
          gate_offset(gate_offset_),
          mn_count(mn_end - mn_begin),
          row(thread / PIECES_PER_ROW),
          col(thread % PIECES_PER_ROW * WIDTH) {
        source += row % ROWS * row_stride + (kKMajor ? col : col % EXTENT) * col_stride;
        if (kGated && (kKMajor ? row : col) >= EXTENT) source += gate_offset;
    }

    __device__ bool lies_inside() const { return mn_count >= EXTENT; }

    // Starts the copy of the next slice, of which k_count values of K exist. kWhole: the tile lies inside the operand,
    // and nothing is tested.
    template <bool kWhole> __device__ void fetch(uint32_t destination, int k_count) {
        copy<kWhole>(destination, k_count);
        source += K * (kKMajor ? col_stride : row_stride);
    }

    // Completes a fetch that went through registers.
    __device__ void store(uint32_t destination) const {
        if constexpr (kKMajor) {
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
#pragma unroll
                for (int i = 0; i < WIDTH; ++i) {
                    const uint32_t to = destination + Tile::offset(col + i, row + step * ROWS_PER_STEP);
                    asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(pending[step][i]) : "memory");
                }
            }
        }
    }

private:
    template <bool kWhole> __device__ void copy(uint32_t destination, int k_count) {
        int mn_left = mn_count - (kKMajor ? 0 : col % EXTENT);
        if constexpr (!kWhole) asm volatile("" : "+r"(mn_left));  // what follows from it is not to wait in registers
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const int begin = step * ROWS_PER_STEP, begin_col = step * COLS_PER_STEP;
            const int rows = (kKMajor ? mn_left : k_count) - begin % ROWS;
            const int cols = kKMajor ? k_count - col : mn_left - begin_col % EXTENT;
            const int valid = kWhole ? WIDTH : row % ROWS < rows ? clamp(cols, 0, WIDTH) : 0;
            const float* from = source + begin % ROWS * row_stride + begin_col % EXTENT;
            if (begin >= ROWS || begin_col >= EXTENT) from += gate_offset;
            if constexpr (!kKMajor) {
                cp_async<ACCESS>(destination + Tile::offset(row + begin, col + begin_col), from,
                                 valid * int(sizeof(float)));
            } else if constexpr (kWhole) {
                const auto piece = *reinterpret_cast<const Vector<float, WIDTH>*>(from);
#pragma unroll
                for (int i = 0; i < WIDTH; ++i) pending[step][i] = piece.data[i];
            } else {
#pragma unroll
                for (int i = 0; i < WIDTH; ++i) pending[step][i] = i < valid ? from[i] : 0;
            }
        }
    }
};

// One thread's COUNT rows of A or columns of B in a tile: groups of 4, evenly spread.
template <class Tile, int COUNT> struct SimtReader {
    static constexpr int STRIDE = Tile::MN / (COUNT / 4);
    static_assert(COUNT % 4 == 0 && STRIDE % 32 == 0, "the tile permutes within the first group's part");
    int first;

    __device__ int index(int i) const { return first + i / 4 * STRIDE + i % 4; }

    // The group of 4 at row k.
    __device__ void read(float (&values)[COUNT], int group, uint32_t tile, int k) const {
        float* to = values + group * 4;
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
                     : "r"(tile + Tile::offset(k, first) + group * STRIDE * int(sizeof(float)))
                     : "memory");
    }
};

// Blocks on an SM that the registers must allow: 12 warps of up to 64 accumulators a thread, or 8 warps.
template <class Shape>
constexpr int simt_blocks =
    ceil_div(Shape::BLOCK_M * Shape::BLOCK_N / Shape::THREADS <= 64 ? 384 : 256, Shape::THREADS);

template <class Shape, bool kAKMajor, bool kBKMajor, int ACCESS_A, int ACCESS_B, int kActivation>
struct SimtProduct {
    using Epilogue = rawops::Epilogue<float, float, kActivation>;
    static constexpr int BLOCK_M = Shape::BLOCK_M, BLOCK_N = Shape::BLOCK_N, BLOCK_K = Shape::BLOCK_K;
    static constexpr int LANES_M = 8, LANES_N = 4;
    static constexpr int ROWS = Shape::WARP_M / LANES_M, COLS = Shape::WARP_N / LANES_N;  // of one thread
    static constexpr int TILE_COLS = Epilogue::kGated ? BLOCK_N / 2 : BLOCK_N, UP = Epilogue::kGated ? COLS / 2 : 0;
    // The loop over k is to stay in the instruction cache of a quarter of an SM. Transposed tiles are short, and where
    // their rows lie depends on k.
    static constexpr int UNROLL = ROWS * COLS < 128 || kAKMajor || kBKMajor ? BLOCK_K : 2;
    static constexpr bool kTakesTurns = Shape::THREADS == 256 && UNROLL < BLOCK_K;
    static_assert(ROWS <= COLS, "a is read beside b, group by group");
    using LoaderA = SimtLoader<BLOCK_M, BLOCK_K, kAKMajor, ACCESS_A, Shape::THREADS>;
    using LoaderB = SimtLoader<BLOCK_N, BLOCK_K, kBKMajor, ACCESS_B, Shape::THREADS, Epilogue::kGated>;
    using ReaderA = SimtReader<typename LoaderA::Tile, ROWS>;
    using ReaderB = SimtReader<typename LoaderB::Tile, COLS>;
    static constexpr int A_BYTES = LoaderA::Tile::BYTES, STAGE_BYTES = A_BYTES + LoaderB::Tile::BYTES;

    // Adds the products of 4 columns, each of which shares its row or its column with the one before: of its operands
    // two are left to fetch, and registers have two banks. The compiler's own order has one in six fetch three.
    static __device__ void multiply_group(float (&acc)[ROWS][COLS], const float (&a)[ROWS], const float (&b)[COLS],
                                          int group) {
#pragma unroll
        for (int j = group * 4; j < group * 4 + 4; ++j) {
#pragma unroll
            for (int step = 0; step < ROWS; ++step) {
                const int i = j % 2 ? ROWS - 1 - step : step;
                asm volatile("fma.rn.f32 %0, %1, %2, %0;" : "+f"(acc[i][j]) : "f"(a[i]), "f"(b[j]));
            }
        }
    }

    // Writes a thread's part of D, as many columns in each of its rows.
    static __device__ void finish_rows(float (&acc)[ROWS][COLS], const Epilogue& epilogue, const ReaderA& reader_a,
                                       const ReaderB& reader_b, int m_begin, int n_begin) {
#pragma unroll 1  // one copy of the epilogue, which always finishes row 0: the rows move up
        for (int i = 0; i < ROWS; ++i) {
#pragma unroll
            for (int j = 0; j < COLS - UP; j += 4) {
                float value[4], up[4];
#pragma unroll
                for (int v = 0; v < 4; ++v) value[v] = acc[0][j + v], up[v] = acc[0][j + v + UP];
                epilogue.finish(m_begin + reader_a.index(i), n_begin + reader_b.index(j), value, up);
            }
#pragma unroll
            for (int r = 0; r + 1 < ROWS; ++r) {
#pragma unroll
                for (int j = 0; j < COLS; ++j) acc[r][j] = acc[r + 1][j];
            }
        }
    }

    // The tile at m_begin and n_begin of one product of the batch, of rows below m_end.
    static __device__ void run(const GemmCall& call, const GemmShape& shape, float alpha, char* shared, int batch,
                               int m_begin, int m_end, int n_begin) {
        // Neighbouring lanes share rows, and each half of a warp reads 8 groups of A and 2 of B: every read of 16 bytes
        // a lane takes two cycles of the shared memory, not four.
        const int thread = threadIdx.x, warp = thread / kWarpSize, lane = thread % kWarpSize;
        const int lane_m = lane / 2 % LANES_M, lane_n = lane % 2 + lane / 16 * 2;
        const ReaderA reader_a{(warp / Shape::WARPS_N * LANES_M + lane_m) * 4};
        const ReaderB reader_b{(warp % Shape::WARPS_N * LANES_N + lane_n) * 4};
        const int cols = shape.epilogue.cols, k_begin = blockIdx.y * shape.k_per_split;
        const int k_count = alpha == 0 ? 0 : min_of(shape.K - k_begin, shape.k_per_split);  // 0: a and b are not read
        int index[3];
        shape.batch_index(batch, index);
        LoaderA loader_a(static_cast<const float*>(call.a) + shape.a.offset(index), shape.a.row, shape.a.col, m_begin,
                         m_end, k_begin, 0, thread);
        LoaderB loader_b(static_cast<const float*>(call.b) + shape.b.offset(index), shape.b.col, shape.b.row, n_begin,
                         cols, k_begin, cols * shape.b.col, thread);
        // The second of a scheduler's two warps starts its copies in the middle of a slice: one multiplies meanwhile.
        const int turn = kTakesTurns ? __shfl_sync(~0u, warp / 4, 0) : 0;
        float acc[ROWS][COLS] = {};

        const uint32_t ring = shared_address(shared);
        const bool inside = loader_a.lies_inside() && loader_b.lies_inside();
        auto fetch = [&](uint32_t stage, int block) {
            const int k_left = k_count - block * BLOCK_K;
            if (inside && k_left >= BLOCK_K) {
                loader_a.template fetch<true>(stage, k_left);
                loader_b.template fetch<true>(stage + A_BYTES, k_left);
            } else {
                loader_a.template fetch<false>(stage, k_left);
                loader_b.template fetch<false>(stage + A_BYTES, k_left);
            }
        };
        auto store = [&](uint32_t stage) {
            loader_a.store(stage);
            loader_b.store(stage + A_BYTES);
        };
        // Values of the next k are read while the current ones multiply, across stages too. Those of b are needed one
        // group after the other, and take the places of those that are done with.
        float a[2][ROWS], b[COLS];
        auto add_product = [&](int k, uint32_t next, int next_k) {
#pragma unroll
            for (int group = 0; group < COLS / 4; ++group) {
                multiply_group(acc, a[k % 2], b, group);
                reader_b.read(b, group, next + A_BYTES, next_k);
                if (group < ROWS / 4) reader_a.read(a[(k + 1) % 2], group, next, next_k);
                if (group == 2) __syncwarp();  // or the compiler puts reads off until they are waited for
            }
        };
        auto begin = [&](uint32_t stage) {
#pragma unroll
            for (int group = 0; group < ROWS / 4; ++group) reader_a.read(a[0], group, stage, 0);
#pragma unroll
            for (int group = 0; group < COLS / 4; ++group) reader_b.read(b, group, stage + A_BYTES, 0);
        };
        auto multiply = [&](uint32_t stage, const RingStart<decltype(fetch)>& start) {
            auto add_products = [&](int k_begin, int k_end) {
#pragma unroll 1
                for (int i = k_begin; i < k_end; i += UNROLL) {
#pragma unroll
                    for (int k = 0; k < UNROLL; ++k) add_product(k, stage, i + k + 1);
                }
            };
            constexpr int MIDDLE = kTakesTurns ? BLOCK_K / 2 : 0, LAST = BLOCK_K - UNROLL;
            if (turn == 0) start();
            add_products(0, MIDDLE);
            if (turn != 0) start();
            add_products(MIDDLE, LAST);
#pragma unroll
            for (int k = LAST; k < BLOCK_K - 1; ++k) add_product(k, stage, k + 1);
        };
        auto finish = [&](uint32_t next) { add_product(BLOCK_K - 1, next, 0); };
        run_ring<Shape::STAGES, STAGE_BYTES, true>(ring, ceil_div(k_count, BLOCK_K), fetch, store, begin, multiply,
                                                   finish);

        if constexpr (kAKMajor != kBKMajor) {  // made anew: it would lie in registers, which are too few there
            asm volatile("" : "+r"(batch));
            shape.batch_index(batch, index);
        }
        EpilogueCall target = call.epilogue;
        target.out = static_cast<float*>(target.out) + blockIdx.y * shape.partial_stride;
        const Epilogue epilogue(target, shape.epilogue, index, shape.partial_stride != 0 ? 1.0f : alpha, m_end);
        finish_rows(acc, epilogue, reader_a, reader_b, m_begin, n_begin);
    }
};

template <class Shape, bool kAKMajor, bool kBKMajor, int ACCESS_A, int ACCESS_B, int kActivation>
__global__ void __launch_bounds__(Shape::THREADS, simt_blocks<Shape>)
    gemm_simt(const __grid_constant__ GemmParams params) {
    using Product = SimtProduct<Shape, kAKMajor, kBKMajor, ACCESS_A, ACCESS_B, kActivation>;
    extern __shared__ __align__(128) char shared[];
    const GemmShape& shape = params.shape;
    const int tiles_m = ceil_div(shape.M, Product::BLOCK_M);
    const int tiles_n = ceil_div(shape.epilogue.cols, Product::TILE_COLS);
    const TileIndex tile = grouped_raster(blockIdx.x, tiles_m, tiles_n);
    const float alpha = params.call.alpha.read();
    for (int batch = blockIdx.z; batch < shape.batches; batch += gridDim.z) {
        Product::run(params.call, shape, alpha, shared, batch, tile.m * Product::BLOCK_M, shape.M,
                     tile.n * Product::TILE_COLS);
    }
}

template <class Shape, bool kAKMajor, bool kBKMajor, int ACCESS_A, int ACCESS_B, int kActivation>
__global__ void __launch_bounds__(Shape::THREADS, simt_blocks<Shape>)
    gemm_grouped_simt(const __grid_constant__ GroupedParams params) {
    using Product = SimtProduct<Shape, kAKMajor, kBKMajor, ACCESS_A, ACCESS_B, kActivation>;
    extern __shared__ __align__(128) char shared[];
    const GemmShape& shape = params.shape;
    GroupTable table(shared, params.groups.count);
    table.fill(params.groups, shape.M, Product::BLOCK_M);
    const int tiles_n = ceil_div(shape.epilogue.cols, Product::TILE_COLS);
    if (blockIdx.x >= table.row_tiles() * tiles_n) return;
    const GroupTile tile = table.find(blockIdx.x, tiles_n, 8, Product::BLOCK_M);
    Product::run(params.call, shape, params.call.alpha.read(), shared + table.bytes(), tile.group, tile.m, tile.m_end,
                 tile.n * Product::TILE_COLS);
}

}  // namespace rawops
