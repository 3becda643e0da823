// What a cascade on Hopper is told of what sequences have of their own, and where results wait to be joined.
#pragma once
#include "base2.cuh"
#include "hopper.cuh"

namespace rawops {

struct CascadeParams {
    void* out;
    float* lse;  // none if not wanted
    // Results over ranges of the common keys, [parts][row of q][head][D], and their lse, [parts][head][row of q]; last
    // those over the rest.
    float *partial, *partial_lse;
    int* taken;  // items; 0 between calls
    const int *block_table, *seq_lens;
    int64_t split, lse_split;  // from part to part
    int64_t out_row, out_head, out_dim, table_stride;
    int batch, kv_heads, group;
    int skipped, capacity;  // tokens before a sequence's row of the table, and those that the row can name
    int page_shift, page_groups, num_pages;
    int parts;    // over the common keys
    float scale;  // times log2(e)

    // A part's result of D columns, and its lse.
    template <int D> __device__ float* row_at(int part, int query, int head) const {
        return partial + part * split + (int64_t(query) * (kv_heads * group) + head) * D;
    }
    __device__ float* lse_at(int part, int query, int head) const {
        return partial_lse + part * lse_split + int64_t(head) * batch + query;
    }
};

}  // namespace rawops
