// What a cascade's end on Hopper is told, and how the results over the common keys and over the rest become one.
#pragma once
#include "base2.cuh"
#include "hopper.cuh"

namespace rawops {

struct CascadeParams {
    const void* q;
    void* out;
    float* lse;  // none if not wanted
    // Results over the common keys, [parts][row of q][head][D], and their lse, [parts][head][row of q], and room for those
    // over the rest.
    float *prior, *prior_lse;
    int* counters;  // 0 between launches
    const int *block_table, *seq_lens;
    int64_t prior_split, prior_lse_split;  // from part to part
    int64_t q_row, q_head, out_row, out_head, out_dim, table_stride;
    int batch, kv_heads, group;
    int skipped, capacity;  // tokens before a sequence's row of the table, and those that the row can name
    int page_shift, page_groups, num_pages;
    int parts;
    float scale;  // times log2(e)
};

// Of items that are taken, and of blocks that are through.
constexpr int kTaken = 0, kThrough = 1;

struct CascadeMaps {
    TensorMap k, v;  // as those of paged_prefill_sm90.cu
};

// The results of a row of q and a head: over ranges of the common keys, and last over the rest.
template <class T, int D> class CascadeResults {
public:
    __device__ explicit CascadeResults(const CascadeParams& p) : params(p) {}

    // Four neighbouring columns of a part, and its lse.
    __device__ float4* values_at(int part, int query, int head, int group) const {
        const int64_t row = int64_t(query) * (params.kv_heads * params.group) + head;
        return reinterpret_cast<float4*>(params.prior + part * params.prior_split + row * D) + group;
    }
    __device__ float* lse_at(int part, int query, int head) const {
        return params.prior_lse + part * params.prior_lse_split + int64_t(head) * params.batch + query;
    }

    // Leaves those over the rest.
    __device__ void leave(int query, int head, int group, const float4& values, float lse) const {
        *values_at(params.parts, query, head, group) = values;
        if (group == 0) *lse_at(params.parts, query, head) = lse;
    }

    // Joins all parts in their order, and writes the result. load_lse and load take the number of a part.
    template <class LoadLse, class Load>
    __device__ void join(int query, int head, int group, const LoadLse& load_lse, const Load& load) const {
        float high = -infinity(), total = 0, value[4] = {};
#pragma unroll 1
        for (int part = 0; part <= params.parts; ++part) high = fmaxf(high, load_lse(part));
#pragma unroll 1
        for (int part = 0; part <= params.parts; ++part) {
            const float lse = load_lse(part);
            if (lse == -infinity()) continue;
            const float factor = exp2_fast((lse - high) * kLog2e);
            const float4 x = load(part);
            total += factor;
            value[0] = fmaf(x.x, factor, value[0]), value[1] = fmaf(x.y, factor, value[1]);
            value[2] = fmaf(x.z, factor, value[2]), value[3] = fmaf(x.w, factor, value[3]);
        }
        T* to = static_cast<T*>(params.out) + query * params.out_row + head * params.out_head;
        const float factor = total == 0 ? 0 : 1 / total;
#pragma unroll
        for (int i = 0; i < 4; ++i) to[(group * 4 + i) * params.out_dim] = narrow<T>(value[i] * factor);
        if (params.lse && group == 0) {
            params.lse[int64_t(head) * params.batch + query] = total == 0 ? -infinity() : high + log2f(total) * kLn2;
        }
    }

private:
    const CascadeParams& params;
};

}  // namespace rawops
