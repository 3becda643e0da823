// Joins the results of attention over disjoint sets of keys: each counts by the exponential of its lse.
#include "common/attention_softmax.cuh"

namespace rawops {

struct MergeState {
    const void* out;
    const float* lse;
    AttentionStrides out_strides, lse_strides;  // of lse: batch, row and head
};

struct MergeParams {
    MergeState first, second;   // the parts of one array lie `out_split` and `lse_split` apart, and second is not used
    int64_t out_split, lse_split;
    void* out;
    float* lse;                 // null: not wanted
    AttentionStrides out_strides, lse_strides;
    int parts, batches, rows, heads, cols;
};

// One warp a row and head. A part without keys is not read, so it may hold anything.
template <class In, class Out, bool kTwo>
__global__ void __launch_bounds__(128) attention_merge(const __grid_constant__ MergeParams params) {
    const int lane = threadIdx.x % kWarpSize;
    int64_t index = int64_t(blockIdx.x) * (blockDim.x / kWarpSize) + threadIdx.x / kWarpSize;
    const int head = int(index % params.heads);
    index /= params.heads;
    const int row = int(index % params.rows), batch = int(index / params.rows);
    if (batch >= params.batches) return;
    auto offset = [&](const AttentionStrides& s) { return batch * s.batch + row * s.row + head * s.head; };
    auto state = [&](int part) -> const MergeState& { return kTwo && part == 1 ? params.second : params.first; };
    auto lse_of = [&](int part) {
        return state(part).lse[offset(state(part).lse_strides) + (kTwo ? 0 : part * params.lse_split)];
    };

    auto source = [&](int part) {
        const AttentionStrides& s = state(part).out_strides;
        return static_cast<const In*>(state(part).out) + offset(s) + (kTwo ? 0 : part * params.out_split);
    };

    float max = -infinity();
    int filled = 0, last = 0;
    for (int part = 0; part < params.parts; ++part) {
        max = fmaxf(max, lse_of(part));
        if (lse_of(part) != -infinity()) ++filled, last = part;
    }
    float sum = 0.0f;
    for (int part = 0; part < params.parts; ++part) {
        if (lse_of(part) != -infinity()) sum += expf(lse_of(part) - max);
    }
    const float inverse = 1.0f / sum;
    Out* out = static_cast<Out*>(params.out) + offset(params.out_strides);
    if (filled == 1) {  // to the bit, whatever it holds
        for (int col = lane; col < params.cols; col += kWarpSize) {
            const In value = source(last)[col * state(last).out_strides.col];
            if constexpr (is_same<In, Out>) out[col * params.out_strides.col] = value;
            else out[col * params.out_strides.col] = narrow<Out>(widen(value));
        }
        if (params.lse && lane == 0) params.lse[offset(params.lse_strides)] = lse_of(last);
        return;
    }
    for (int col = lane; col < params.cols; col += kWarpSize) {
        float total = -0.0f;  // adds to a negative zero without a trace
        for (int part = 0; part < params.parts; ++part) {
            const float lse = lse_of(part);
            if (lse == -infinity()) continue;
            const float value = widen(source(part)[col * state(part).out_strides.col]);
            total = fmaf(expf(lse - max), value, total);
        }
        out[col * params.out_strides.col] = narrow<Out>(sum == 0.0f ? 0.0f : total * inverse);
    }
    if (params.lse && lane == 0) {
        params.lse[offset(params.lse_strides)] = sum == 0.0f ? -infinity() : max + logf(sum);
    }
}

}  // namespace rawops
