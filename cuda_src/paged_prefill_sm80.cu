// Chunked prefill: flash attention's forward pass, whose tiles of keys and values come from pages.
#include "common/attention_forward.cuh"

namespace rawops {

// Row i is token i of a sequence: slot i % page_size of page table[i / page_size], and a row of zeros for a page that
// does not exist.
template <class T> struct PagedRows {
    const T *base, *zeros;
    const int* table;
    int64_t page, row, col;
    int page_shift, num_pages;
    __device__ const T* at(int i) const {
        const int id = __ldg(table + (i >> page_shift));
        if (static_cast<uint32_t>(id) >= static_cast<uint32_t>(num_pages)) return zeros;
        return base + id * page + (i & ((1 << page_shift) - 1)) * row;
    }
};

// fetch_rows of attention_tile.cuh for pages: where all rows of a thread are is found out before the first is copied,
// so that one look into the table does not wait for another.
template <class Tile, int ACCESS, int THREADS, class T>
__device__ inline void fetch_rows(uint32_t tile, const PagedRows<T>& shared, int first, int end, int cols, int thread) {
    constexpr int PIECE = ACCESS / int(sizeof(T)), PIECES_PER_ROW = Tile::COLS / PIECE;
    constexpr int ROWS_PER_STEP = THREADS / PIECES_PER_ROW, STEPS = ceil_div(Tile::ROWS, ROWS_PER_STEP);
    const int row = thread / PIECES_PER_ROW, col = thread % PIECES_PER_ROW * PIECE;
    if (THREADS % PIECES_PER_ROW != 0 && row >= ROWS_PER_STEP) return;
    const PagedRows<T> rows = shared;  // into registers, once
    const T* from[STEPS];
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const int i = first + row + step * ROWS_PER_STEP;
        from[step] = i < end ? rows.at(i) : rows.zeros;
    }
    const int valid = clamp(cols - col, 0, PIECE) * int(sizeof(T));
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const int further = step * ROWS_PER_STEP;
        if (Tile::ROWS % ROWS_PER_STEP != 0 && row + further >= Tile::ROWS) break;
        const bool exists = first + row + further < end;
        cp_async<ACCESS>(tile + Tile::offset(row + further, col), from[step] + col, exists ? valid : 0);
    }
}

// What AttentionParams has no place for. The batch strides of k and v there are from page to page.
struct PagedPrefill {
    AttentionParams attention;
    const void* zeros;
    int num_pages;
};

// Out is float for the partial results of ranges of keys, which attention_merge.cu joins.
template <class T, class Out, class Tile, int kScore>
__global__ void __launch_bounds__(Tile::THREADS) paged_prefill(const __grid_constant__ PagedPrefill prefill) {
    using Forward = AttentionForward<T, PagedRows, Out, Tile, 16, kScore, true>;
    extern __shared__ __align__(128) char shared[];
    __shared__ __align__(16) char storage[sizeof(typename Forward::Work)];
    auto& work = *reinterpret_cast<typename Forward::Work*>(storage);
    const AttentionCall& call = prefill.attention.call;
    const AttentionShape& shape = prefill.attention.shape;
    AttentionBlock block(prefill.attention, blockIdx.x);
    const int* table = call.block_table + block.batch * shape.block_table_batch;
    auto rows = [&](const void* pages, const AttentionStrides& s) {
        const T* base = static_cast<const T*>(pages) + block.kv_head * s.head;
        const T* zeros = static_cast<const T*>(prefill.zeros);
        return PagedRows<T>{base, zeros, table, s.batch, s.row, s.col, shape.page_shift, prefill.num_pages};
    };
    PagedRows<T> k = rows(call.k, shape.k), v = rows(call.v, shape.v);
    int tile = block.tile;
    while (tile * Tile::BLOCK_M < block.rows(shape)) {
        Forward forward(prefill.attention, work, shared_address(shared));
        forward.run(block, k, v, tile);
        forward.finish();
        tile = work.first / Tile::BLOCK_M + shape.row_tiles;
        block = work.block, k = work.k, v = work.v;
        __syncthreads();
    }
}

}  // namespace rawops
