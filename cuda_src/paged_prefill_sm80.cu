// Chunked prefill: flash attention's forward pass, whose tiles of keys and values come from pages.
#include "common/attention_forward.cuh"

namespace rawops {

// Row i is token i of a sequence: slot i % page_size of page table[i / page_size], and a row of zeros for a page that
// does not exist.
template <class T> struct PagedRows {
    static constexpr bool kEven = false;
    static constexpr int kUnroll = 4;
    const T *base, *zeros;
    const int* table;
    int64_t page, row, col;
    int page_shift, num_pages;
    __device__ const T* at(int i) const {
        const int id = table[i >> page_shift];
        if (static_cast<uint32_t>(id) >= static_cast<uint32_t>(num_pages)) return zeros;
        return base + id * page + (i & ((1 << page_shift) - 1)) * row;
    }
};

// What AttentionParams has no place for. The batch strides of k and v there are from page to page.
struct PagedPrefill {
    AttentionParams attention;
    const void* zeros;
    int num_pages;
};

// Out is float for the partial results of ranges of keys, which attention_merge.cu joins.
template <class T, class Out, class Tile, int kScore>
__global__ void __launch_bounds__(Tile::THREADS) paged_prefill(const __grid_constant__ PagedPrefill prefill) {
    using Forward = AttentionForward<T, PagedRows, Out, Tile, 16, kScore>;
    extern __shared__ __align__(128) char shared[];
    __shared__ __align__(16) char storage[sizeof(typename Forward::Work)];
    auto& work = *reinterpret_cast<typename Forward::Work*>(storage);
    const AttentionCall& call = prefill.attention.call;
    const AttentionShape& shape = prefill.attention.shape;
    if (threadIdx.x == 0) {
        const AttentionBlock block(prefill.attention, blockIdx.x);
        const int* table = call.block_table + block.batch * shape.block_table_batch;
        auto rows = [&](const void* pages, const AttentionStrides& s) {
            const T* base = static_cast<const T*>(pages) + block.kv_head * s.head;
            const T* zeros = static_cast<const T*>(prefill.zeros);
            return PagedRows<T>{base, zeros, table, s.batch, s.row, s.col, shape.page_shift, prefill.num_pages};
        };
        work.block = block;
        work.k = rows(call.k, shape.k);
        work.v = rows(call.v, shape.v);
    }
    __syncthreads();
#pragma unroll 1
    for (int tile = work.block.tile; tile * Tile::BLOCK_M < work.block.rows(shape);
         tile = work.first / Tile::BLOCK_M + shape.row_tiles) {
        Forward forward(prefill.attention, work, tile, shared_address(shared));
        forward.run();
        forward.finish();
    }
}

}  // namespace rawops
