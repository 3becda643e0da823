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
    int* done;  // counters, 0 between launches:
    const int *block_table, *seq_lens;
    int64_t prior_split, prior_lse_split;  // from part to part
    int64_t q_row, q_head, out_row, out_head, out_dim, table_stride;
    int batch, kv_heads, group;
    int skipped, capacity;  // tokens before a sequence's row of the table, and those that the row can name
    int page_shift, page_groups, num_pages;
    int parts, arrivals;  // arrivals: when the parts are complete
    float scale;          // times log2(e)
};

// Warpgroups that have arrived at their end there; items that are taken and blocks that are through here.
constexpr int kArrived = 0, kTaken = 1, kThrough = 2;

struct CascadeMaps {
    TensorMap k, v;  // as those of paged_prefill_sm90.cu
};

// Four neighbouring columns of a row of q and a head, in all parts.
template <class T, int D> class CommonResults {
public:
    __device__ explicit CommonResults(const CascadeParams& p) : params(p) {}

    // Whether they are complete. Afterwards, and a barrier later, all threads of the block may read them.
    __device__ bool are_there() const {
        int arrived;
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(arrived) : "l"(params.done + kArrived) : "memory");
        return arrived == params.arrivals;
    }

    // Leaves the result over the rest as one more part, of which join_left() makes what join() would.
    __device__ void leave(int query, int head, int group, const float4& own, float own_lse) const {
        *values_at(params.parts, query, head, group) = own;
        if (group == 0) *lse_at(params.parts, query, head) = own_lse;
    }
    __device__ void join_left(int query, int head, int group) const {
        const float4 own = load_now(values_at(params.parts, query, head, group));
        join(query, head, group, own, load_now(lse_at(params.parts, query, head)));
    }

    // In the order of the parts, the own one last; AT_ONCE are loaded together, past the end the last again.
    __device__ void join(int query, int head, int group, const float4& own, float own_lse) const {
        constexpr int AT_ONCE = 8;
        float top = -infinity(), total = 0, value[4] = {};
        auto raise = [&](float high) {
            const float factor = exp2_fast(top - (high == -infinity() ? 0 : high));
            top = high;
            total *= factor;
#pragma unroll
            for (float& x : value) x *= factor;
        };
        auto add = [&](float term_top, const float4& term) {
            if (term_top == -infinity()) return;
            const float factor = exp2_fast(term_top - top);
            total += factor;
            value[0] = fmaf(term.x, factor, value[0]), value[1] = fmaf(term.y, factor, value[1]);
            value[2] = fmaf(term.z, factor, value[2]), value[3] = fmaf(term.w, factor, value[3]);
        };
        const float* lse = lse_at(0, query, head);
        const float4* values = values_at(0, query, head, group);
        const int last = params.parts - 1;
#pragma unroll 1
        for (int begin = 0; begin <= last; begin += AT_ONCE) {
            float tops[AT_ONCE], high = top;
            float4 terms[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int part = min_of(begin + i, last);
                tops[i] = load_now(lse + part * params.prior_lse_split);
                terms[i] = load_now(values + part * (params.prior_split / 4));
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) high = fmaxf(high, tops[i] *= kLog2e);
            raise(high);
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                if (begin + i <= last) add(tops[i], terms[i]);
            }
        }
        raise(fmaxf(top, own_lse * kLog2e));
        add(own_lse * kLog2e, own);
        T* to = static_cast<T*>(params.out) + query * params.out_row + head * params.out_head;
        const float factor = total == 0 ? 0 : 1 / total;
#pragma unroll
        for (int i = 0; i < 4; ++i) to[(group * 4 + i) * params.out_dim] = narrow<T>(value[i] * factor);
        if (params.lse && group == 0) {
            params.lse[int64_t(head) * params.batch + query] = total == 0 ? -infinity() : (top + log2f(total)) * kLn2;
        }
    }

private:
    const CascadeParams& params;

    __device__ float4* values_at(int part, int query, int head, int group) const {
        const int64_t row = int64_t(query) * (params.kv_heads * params.group) + head;
        return reinterpret_cast<float4*>(params.prior + part * params.prior_split + row * D) + group;
    }
    __device__ float* lse_at(int part, int query, int head) const {
        return params.prior_lse + part * params.prior_lse_split + int64_t(head) * params.batch + query;
    }
    static __device__ float load_now(const float* from) {  // not from the L1
        float x;
        asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(from) : "memory");
        return x;
    }
    static __device__ float4 load_now(const float4* from) {
        float4 x;
        asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];"
                     : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                     : "l"(from)
                     : "memory");
        return x;
    }
};

}  // namespace rawops
