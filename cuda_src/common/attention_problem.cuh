// What every attention kernel is told, as _attention_call.py packs it, and where in it a block works.
//
// A row of a block's tile is one query of one head. With `packed` > 1 the query heads that share a KV head lie side by
// side in the tile: row r is query r / packed of head r % packed of the group. All strides count elements.
#pragma once
#include "base2.cuh"
#include "numeric.cuh"

namespace rawops {

// How a score differs from scale * q.k: bits of a template argument. kScoreMultiply has the scale applied before the
// row maximum is taken, which a scale that is not positive needs; the other bits imply it.
constexpr int kScoreSoftcap = 1, kScoreAlibi = 2, kScoreBias = 4, kScoreMultiply = 8;
// And a bit for what becomes of the weights: dropout.cuh.
constexpr int kScoreDropout = 16;

constexpr int kUnlimited = 1 << 30;  // a window bound that hides nothing; any length is less

struct AttentionStrides {
    int64_t batch, row, head, col;  // varlen: batch is 0
};

struct AttentionCall {  // changes from call to call
    const void *q, *k, *v;
    void* out;
    float* lse;                // null: not wanted
    const float* alibi_slopes; // (heads,) or (batches, heads)
    const void* bias;
    const int *cu_seqlens_q, *cu_seqlens_k;  // (batches + 1,); null: every sequence is as long as the arrays
    const int* seqlens_k;                    // (batches,) keys in use, where the storage holds more; null: all
    const int* block_table;                  // paged K and V: the page of every page_size keys
};

struct AttentionDropout {
    const uint64_t *seed_at, *offset_at;  // null: 0; added to the numbers below
    uint64_t seed, offset;
    int keep;     // of 2^16 weights
    float scale;  // of those that are kept: 2^16 / keep
};

struct AttentionShape {  // kept by a plan, but for dropout
    AttentionStrides q, k, v, out;  // paged: batch strides of k and v are from page to page
    AttentionStrides bias;          // row: query, col: key
    int64_t lse_batch, lse_head;    // its queries lie side by side
    int64_t out_split, lse_split;  // between the partial results of two ranges of keys
    int64_t alibi_batch, block_table_batch;
    int batches, heads, group, packed;  // heads: of q; group: query heads that share a KV head; packed: 1 or group
    int seqlen_q, seqlen_k;  // the longest ones with cu_seqlens
    int total_q, total_keys;    // rows that q and k have, with cu_seqlens
    int head_dim, head_dim_v;
    int row_tiles, splits;         // of a head and sequence
    int window_left, window_right; // or kUnlimited; causal is window_right = 0
    int page_shift;                // log2 of the page size
    int bias_is_float;             // else it has the type of q
    int out_pairs;                 // 1: two elements of out can be written at once; 2: 16 bytes
    float scale;     // plain scores: softmax_scale * log2(e); with softcap: softmax_scale / softcap
    float softcap;   // softcap * log2(e)
    AttentionDropout dropout;
};

struct AttentionParams {
    AttentionCall call;
    AttentionShape shape;
};

// The keys from `begin` to before `end`.
struct KeyRange {
    int begin, end;
    __device__ bool is_empty() const { return begin >= end; }
};

// One tile of rows of one sequence and head (or group of packed heads), and the share of its keys that is the block's.
struct AttentionBlock {
    int batch, kv_head, head;  // head: the first one of the tile
    int tile, split;
    int q_begin, q_len, k_begin, k_len;  // begins are rows of the storage; they are 0 without cu_seqlens

    // `index` counts, from fastest to slowest: row tiles, longest first; splits; heads; sequences. With cu_seqlens
    // there is one sequence more: the rows of storage past the last one, which see no key.
    __device__ AttentionBlock(const AttentionParams& params, int index)
        : AttentionBlock(params, index / params.shape.row_tiles,
                         params.shape.row_tiles - 1 - index % params.shape.row_tiles) {}

    // `unit` counts splits, heads and sequences. Divisions are slow, and most of them by 1.
    __device__ AttentionBlock(const AttentionParams& params, int unit, int tile_) : tile(tile_), split(0) {
        const AttentionCall& call = params.call;
        const AttentionShape& shape = params.shape;
        if (shape.splits > 1) {
            split = unit % shape.splits;
            unit /= shape.splits;
        }
        const int head_tiles = shape.packed == 1 ? shape.heads : shape.heads / shape.packed;
        batch = unit / head_tiles;
        head = (unit - batch * head_tiles) * shape.packed;
        kv_head = shape.group == 1 ? head : head / shape.group;
        q_begin = k_begin = 0;
        q_len = shape.seqlen_q;
        k_len = shape.seqlen_k;
        if (call.cu_seqlens_q) {
            q_begin = clamp(call.cu_seqlens_q[batch], 0, shape.total_q);
            const int end = batch < shape.batches ? call.cu_seqlens_q[batch + 1] : shape.total_q;
            q_len = clamp(end, q_begin, shape.total_q) - q_begin;
        }
        if (batch >= shape.batches) {
            k_len = 0;
            batch = 0;  // what is read of per-sequence arrays must exist
        } else if (call.cu_seqlens_k) {
            k_begin = clamp(call.cu_seqlens_k[batch], 0, shape.total_keys);
            k_len = clamp(call.cu_seqlens_k[batch + 1], k_begin, shape.total_keys) - k_begin;
        }
        if (call.seqlens_k && k_len > 0) k_len = min_of(k_len, call.seqlens_k[batch]);
    }

    __device__ int rows(const AttentionShape& shape) const { return q_len * shape.packed; }

    // Keys that query `i` sees.
    __device__ KeyRange visible(const AttentionShape& shape, int i) const {
        const int same = i + k_len - q_len;  // the key at the query's own place
        return {max_of(same - shape.window_left, 0), min_of(same + shape.window_right + 1, k_len)};
    }

    // Keys that any of the queries from `first` to `last` sees, in the block's split: whole multiples of `step`, but
    // for the ends.
    __device__ KeyRange keys(const AttentionShape& shape, int first, int last, int step) const {
        KeyRange all = {visible(shape, first).begin, visible(shape, last).end};
        if (shape.splits > 1 && !all.is_empty()) {
            const int origin = all.begin / step * step;
            const int share = ceil_div(ceil_div(all.end - origin, step), shape.splits) * step;
            all.begin = max_of(all.begin, origin + split * share);
            all.end = min_of(all.end, origin + (split + 1) * share);
        }
        return all;
    }
};

}  // namespace rawops
