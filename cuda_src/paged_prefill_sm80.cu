// Chunked prefill: flash attention's forward pass, whose tiles of keys and values come from pages.
#include "common/attention_forward.cuh"

namespace rawops {

template <class T, int COUNT, int STEP> struct FoundRows;

// Row i is token i of a sequence: slot i % page_size of page table[i / page_size], and a row of zeros for a page that
// does not exist.
template <class T> struct PagedRows {
    const T *base, *zeros;
    const int* table;
    int64_t page, row, col;
    int page_shift, num_pages;
    __device__ bool has(int id) const { return static_cast<uint32_t>(id) < static_cast<uint32_t>(num_pages); }
    __device__ const T* in_page(int id, int i) const { return base + id * page + (i & ((1 << page_shift) - 1)) * row; }
    __device__ const T* at(int i) const {
        const int id = __ldg(table + (i >> page_shift));
        return has(id) ? in_page(id, i) : zeros;
    }
    __device__ PagedRows with(const AttentionStrides& s) const {
        return {base, zeros, table, s.batch, s.row, s.col, page_shift, num_pages};
    }

    // Pages of a thread's COUNT rows, STEP apart, -1 for rows that do not exist. Values have the pages of their keys.
    template <int COUNT, int STEP> struct Found {
        int pages[COUNT];
        __device__ void look(const PagedRows& rows, int first, int end) {
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                const int row = first + i * STEP;
                pages[i] = row < end ? load_past_l1(rows.table + (row >> rows.page_shift)) : -1;
            }
        }
        __device__ FoundRows<T, COUNT, STEP> in(const PagedRows& rows) const { return {rows, pages}; }
    };
};

template <class T, int COUNT, int STEP> struct FoundRows {
    PagedRows<T> rows;
    const int (&pages)[COUNT];
};

// fetch_tile of attention_tile.cuh for rows whose pages are known.
template <class Tile, int ACCESS, int THREADS, class T, int COUNT, int STEP>
__device__ inline void fetch_tile(uint32_t tile, const FoundRows<T, COUNT, STEP>& from, int first, int, int cols,
                                  int thread) {
    using Panel = typename Tile::Panel;
    constexpr int PIECE = 16 / int(sizeof(T)), PIECES_PER_ROW = Panel::COLS / PIECE, PANELS = Tile::COLS / Panel::COLS;
    static_assert(ACCESS == 16 && Tile::ROWS == COUNT * STEP && THREADS == STEP * PIECES_PER_ROW, "as looked up");
    const int row = thread / PIECES_PER_ROW, col = thread % PIECES_PER_ROW * PIECE;
    const uint32_t to = tile + Panel::offset(row, col);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const int page = from.pages[i];
        const bool exists = from.rows.has(page);
        const T* at = from.rows.in_page(exists ? page : 0, first + row + i * STEP) + col;
#pragma unroll
        for (int panel = 0; panel < PANELS; ++panel) {
            const int valid = clamp(cols - panel * Panel::COLS - col, 0, PIECE);
            cp_async<16>(to + i * STEP * Panel::ROW_BYTES + panel * Panel::BYTES, at + panel * Panel::COLS,
                         exists ? valid * int(sizeof(T)) : 0);
        }
    }
}

// What AttentionParams has no place for. The batch strides of k and v there are from page to page.
struct PagedPrefill {
    AttentionParams attention;
    const void* zeros;
    int num_pages;
};

// The grid is that of attention_sm80.cu. Out is float for the partial results of ranges of keys, which
// attention_merge.cu joins. Packed heads are those of few queries: an SM seldom has more than two blocks of them, and
// these may have the registers.
template <class T, class Out, class Tile, int kScore, bool kPacked>
__global__ void __launch_bounds__(Tile::THREADS, kPacked ? 2 : 0)
    paged_prefill(const __grid_constant__ PagedPrefill prefill) {
    const AttentionCall& call = prefill.attention.call;
    const AttentionShape& shape = prefill.attention.shape;
    const AttentionBlock block(prefill.attention, blockIdx.z * gridDim.x + blockIdx.x, gridDim.y - 1 - blockIdx.y);
    const int* table = call.block_table + block.batch * shape.block_table_batch;
    auto rows = [&](const void* pages, const AttentionStrides& s) {
        const T* base = static_cast<const T*>(pages) + block.kv_head * s.head;
        const T* zeros = static_cast<const T*>(prefill.zeros);
        return PagedRows<T>{base, zeros, table, s.batch, s.row, s.col, shape.page_shift, prefill.num_pages};
    };
    run_tiles<AttentionForward<T, PagedRows, Out, Tile, 16, kScore, kPacked>>(
        prefill.attention, block, rows(call.k, shape.k), rows(call.v, shape.v), gridDim.y);
}

}  // namespace rawops
