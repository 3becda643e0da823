// New keys and values into their pages: a thread moves one 16-byte chunk (or one element) of both.
#include "common/paged_pool.cuh"

namespace rawops {

// Rows of new keys or values: strides in elements.
struct NewRows {
    const void* rows;
    int64_t token_stride, head_stride, dim_stride;
};

struct AppendParams {
    NewRows k, v;
    PagePool pool;
    const int *positions, *sequence_ids;  // no sequence_ids: token i is of sequence i
    int tokens, heads, batch;
};

// Where a token goes, from the pool's beginning; negative for nowhere.
__device__ inline int64_t find_slot(const AppendParams& params, int token) {
    const PagePool& pool = params.pool;
    const int position = params.positions[token];
    const int sequence = params.sequence_ids ? params.sequence_ids[token] : token;
    if (position < 0 || position >> pool.page_shift >= pool.max_pages) return -1;
    if (sequence < 0 || sequence >= params.batch) return -1;
    const int page = pool.block_table[sequence * pool.table_stride + (position >> pool.page_shift)];
    return page < 0 || page >= pool.num_pages ? -1 : int64_t(page) << pool.page_shift | (position & ((1 << pool.page_shift) - 1));
}

template <class T, int ACCESS>
__global__ void __launch_bounds__(128) paged_append(const __grid_constant__ AppendParams params) {
    constexpr int PIECE = ACCESS / int(sizeof(T));
    const PagePool& pool = params.pool;
    const int pieces = ceil_div(pool.head_dim, PIECE);
    const int64_t index = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, row = index / pieces;
    const int token = int(row / params.heads), head = int(row % params.heads), column = int(index % pieces) * PIECE;
    if (token >= params.tokens) return;
    const int64_t slot = find_slot(params, token);
    if (slot < 0) return;
    const int64_t page = slot >> pool.page_shift, in_page = slot & ((1 << pool.page_shift) - 1);
    T* to = static_cast<T*>(const_cast<void*>(pool.pages)) + page * pool.page_stride + in_page * pool.token_stride +
            head * pool.head_stride + column * pool.dim_stride;
    auto from = [&](const NewRows& rows) {
        return static_cast<const T*>(rows.rows) + token * rows.token_stride + head * rows.head_stride +
               column * rows.dim_stride;
    };
    const T *k = from(params.k), *v = from(params.v);
    if (column + PIECE <= pool.head_dim) {
        using Piece = Vector<T, PIECE>;
        const Piece key = *reinterpret_cast<const Piece*>(k), value = *reinterpret_cast<const Piece*>(v);
        *reinterpret_cast<Piece*>(to) = key;
        *reinterpret_cast<Piece*>(to + pool.value_offset) = value;
    } else {  // the tail of a head_dim that chunks do not divide
        for (int i = 0; column + i < pool.head_dim; ++i) to[i] = k[i], to[pool.value_offset + i] = v[i];
    }
}

}  // namespace rawops
