// Rows of q, k and v in shared memory, and where they come from.
#pragma once
#include "attention_problem.cuh"
#include "copy.cuh"

namespace rawops {

// What a block of the tensor-core kernels works on: BLOCK_M rows of q against BLOCK_N keys at a time. A warp has all
// keys of its rows.
template <int HEAD_DIM_, int HEAD_DIM_V_, int BLOCK_M_, int BLOCK_N_> struct AttentionTile {
    static constexpr int HEAD_DIM = HEAD_DIM_, HEAD_DIM_V = HEAD_DIM_V_;
    static constexpr int BLOCK_M = BLOCK_M_, BLOCK_N = BLOCK_N_;
    static constexpr int WARPS = 4, THREADS = WARPS * kWarpSize, WARP_M = BLOCK_M / WARPS;
};

// A row-major tile as panels of 64 columns, or of 32 where those do not divide the head size.
template <class T, int ROWS_, int COLS_> struct RowTile {
    static constexpr int ROWS = ROWS_, COLS = COLS_, PANEL_COLS = COLS % 64 == 0 ? 64 : 32;
    using Panel = SharedTile<T, ROWS, PANEL_COLS>;
    static constexpr int BYTES = COLS / PANEL_COLS * Panel::BYTES;

    static constexpr __device__ int offset(int row, int col) {
        return panel(col) + Panel::offset(row, col % PANEL_COLS);
    }
    static constexpr __device__ int panel(int col) { return col / PANEL_COLS * Panel::BYTES; }
};

// Where row i begins. `col` is the stride along a row, 1 but for accesses of one element.
template <class T> struct StridedRows {
    static constexpr bool kEven = true;  // rows lie `row` apart
    const T* base;
    int64_t row, col;
    __device__ const T* at(int i) const { return base + i * row; }
    __device__ StridedRows with(const AttentionStrides& s) const { return {base, s.row, s.col}; }

    // What a thread looks up of COUNT rows, STEP apart, before it copies them: nothing.
    template <int COUNT, int STEP> struct Found {
        __device__ void look(const StridedRows&, int, int) {}
        __device__ const StridedRows& in(const StridedRows& rows) const { return rows; }
    };
};

// Row i is query i / packed of head i % packed.
template <class T> struct PackedRows {
    static constexpr bool kEven = false;
    const T* base;
    int64_t row, head, col;
    int packed;
    __device__ const T* at(int i) const { return base + i / packed * row + i % packed * head; }
};

// Starts the copy of rows `first` and on into a tile, zeros from row `end` and column `cols` on, where nothing is read.
// ACCESS is the width of one access to global memory in bytes; one of a single element is complete at once and takes
// any stride. Each of THREADS threads has a column, and every ROWS_PER_STEP-th row.
template <class Tile, int ACCESS, int THREADS, class T, template <class> class Rows>
__device__ inline void fetch_rows(uint32_t tile, const Rows<T>& rows, int first, int end, int cols, int thread) {
    constexpr int PIECE = max_of(ACCESS, 4) / int(sizeof(T)), PIECES_PER_ROW = Tile::COLS / PIECE;
    constexpr int ROWS_PER_STEP = THREADS / PIECES_PER_ROW;
    static_assert(ROWS_PER_STEP >= 1, "a row must not be split between steps");
    const int row = thread / PIECES_PER_ROW, col = thread % PIECES_PER_ROW * PIECE;
    if (THREADS % PIECES_PER_ROW != 0 && row >= ROWS_PER_STEP) return;
    const int valid = clamp(cols - col, 0, PIECE), left = end - first - row;
    const T* from = rows.base;
    if (Rows<T>::kEven && left > 0) from = rows.at(first + row) + col * rows.col;
#pragma unroll (Rows<T>::kEven ? 32 : 1)  // uneven rows are q's, once: they should not cost the main loop registers
    for (int step = 0; step < ceil_div(Tile::ROWS, ROWS_PER_STEP); ++step) {
        const int further = step * ROWS_PER_STEP;
        if (Tile::ROWS % ROWS_PER_STEP != 0 && row + further >= Tile::ROWS) break;
        const int count = further < left ? valid : 0;
        if constexpr (Rows<T>::kEven) {
            if (step > 0) from += ROWS_PER_STEP * rows.row;
        } else {
            if (count > 0) from = rows.at(first + row + further) + col * rows.col;
        }
        const uint32_t to = tile + Tile::offset(row + further, col);
        if constexpr (ACCESS >= 4) {
            cp_async<ACCESS>(to, from, count * int(sizeof(T)));
        } else {
            const uint16_t* bits = reinterpret_cast<const uint16_t*>(from);
            uint32_t pair = 0;
            if (count > 0) pair = bits[0];
            if (count > 1) pair |= uint32_t(bits[rows.col]) << 16;
            asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(pair) : "memory");
        }
    }
}

// The same, in the way that costs least: panel by panel, so that a thread's rows are a multiple of 8 apart, and with
// code of its own for tiles that have no end in them, as most have none.
template <class Tile, int ACCESS, int THREADS, class Rows>
__device__ inline void fetch_tile(uint32_t tile, const Rows& rows, int first, int end, int cols, int thread) {
    fetch_rows<Tile, ACCESS, THREADS>(tile, rows, first, end, cols, thread);
}
template <class Tile, int ACCESS, int THREADS, class T>
__device__ inline void fetch_tile(uint32_t tile, const StridedRows<T>& rows, int first, int end, int cols, int thread) {
    using Panel = typename Tile::Panel;
    constexpr int PIECE = 16 / int(sizeof(T)), PIECES_PER_ROW = Panel::COLS / PIECE;
    constexpr int ROWS_PER_STEP = THREADS / PIECES_PER_ROW, PANELS = Tile::COLS / Panel::COLS;
    if constexpr (ACCESS != 16 || Tile::ROWS % ROWS_PER_STEP != 0) {
        fetch_rows<Tile, ACCESS, THREADS>(tile, rows, first, end, cols, thread);
        return;
    }
    const int row = thread / PIECES_PER_ROW, col = thread % PIECES_PER_ROW * PIECE, left = end - first;
    const uint32_t to = tile + Panel::offset(row, col);
    const T* from = rows.at(first + row) + col;
    if (left >= Tile::ROWS && cols == Tile::COLS) {
#pragma unroll
        for (int further = 0; further < Tile::ROWS; further += ROWS_PER_STEP, from += ROWS_PER_STEP * rows.row) {
#pragma unroll
            for (int panel = 0; panel < PANELS; ++panel) {
                cp_async_16(to + further * Panel::ROW_BYTES + panel * Panel::BYTES, from + panel * Panel::COLS);
            }
        }
    } else {
#pragma unroll 1
        for (int further = 0; further < Tile::ROWS; further += ROWS_PER_STEP, from += ROWS_PER_STEP * rows.row) {
#pragma unroll
            for (int panel = 0; panel < PANELS; ++panel) {
                const int valid = row + further < left ? clamp(cols - panel * Panel::COLS - col, 0, PIECE) : 0;
                cp_async<16>(to + further * Panel::ROW_BYTES + panel * Panel::BYTES, from + panel * Panel::COLS,
                             valid * int(sizeof(T)));
            }
        }
    }
}

}  // namespace rawops
