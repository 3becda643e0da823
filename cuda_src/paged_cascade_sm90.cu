// A cascade on Hopper: one query of each sequence over the keys and values that all sequences have in common, and over
// those that each has of its own. The one is bound by the tensor cores and the other by the memory, so a block has
// warps for either:
//
//   warpgroup 0        two warps and a thread as in paged_prefill_sm90.cu: pages --> rings of keys and values
//                      a warp: TMA: pages --> a ring of stages, 64 tokens that one sequence has of its own each
//   warpgroups 1, 2    64 rows of queries each over a range of the common keys
//   warpgroup 3        wgmma: S^T = K Q^T, 64 tokens x 8 heads of a group; softmax; O^T += V^T P^T
//
// Results over ranges of the common keys, and over what a sequence has of its own, are parts in global memory, which
// the next launch joins.
#include "common/cascade_own.cuh"
#include "common/hopper_attention_pages.cuh"

namespace rawops {

struct CascadeMaps {
    AttentionMaps common, own;
};

// CLUSTER: blocks whose tiles have the same keys, each of which fetches its share of them for all.
template <class Tile_, class Own_, int CLUSTER_> struct CascadeBlock : Tile_ {
    using Own = Own_;
    static constexpr int CLUSTER = CLUSTER_;
    static constexpr int COPIERS = 2, READERS = COPIERS + Tile_::CONSUMERS;  // and a warp that fetches what is Own's
    static constexpr int THREADS = Tile_::THREADS + kWarpGroupSize;
    static constexpr int PRODUCER_REGISTERS = 80, REGISTERS = 168, OWN_REGISTERS = 96;
    static constexpr int OWN_AT = ceil_div(Tile_::WORK_AT + Tile_::PLACES * int(sizeof(AttentionTask)), 1024) * 1024;
};

// Has the L2 get the pages' numbers: where much is being copied, a look into memory takes more than a microsecond.
__device__ inline void prefetch_table(const AttentionParams& params) {
    constexpr int kLine = 32;  // entries
    const int pages = params.shape.seqlen_k >> params.shape.page_shift;
    const int64_t row = params.shape.block_table_batch;
    for (int i = threadIdx.x * kLine; i < pages; i += blockDim.x * kLine) prefetch_line(params.call.block_table + i);
    if (pages >= row) return;
    // and of those that sequences have of their own
    for (int b = blockIdx.x + threadIdx.x * gridDim.x; b < params.shape.total_q; b += blockDim.x * gridDim.x) {
        prefetch_line(params.call.block_table + b * row + pages);
    }
}

template <class T, int D, int BLOCK_N, int STAGES, int OWN_STAGES, int CLUSTER,
          class Tile = CascadeBlock<HopperAttention<T, D, D, 2, BLOCK_N, STAGES, true, 0, float, true>,
                                    OwnTile<T, D, OWN_STAGES>, CLUSTER>>
__global__ void __launch_bounds__(Tile::THREADS, 1) __cluster_dims__(CLUSTER, 1, 1)
    paged_cascade_sm90(const __grid_constant__ CascadeMaps maps, const __grid_constant__ AttentionParams common,
                       const __grid_constant__ CascadeParams own, int section, int* taken) {
    extern __shared__ __align__(1024) char shared[];
    start_next_launch();
    if (threadIdx.x < kWarpGroupSize) fetch_parameters(common);
    else fetch_parameters(own);
    prefetch_table(common);
    const AttentionExchange<Tile> exchange(shared);
    const OwnExchange<typename Tile::Own> own_exchange(shared + Tile::OWN_AT);
    if (threadIdx.x == 0) {
        exchange.init();
        prefetch_tensor_map(maps.common.q);
        prefetch_tensor_map(maps.common.k);
        prefetch_tensor_map(maps.common.v);
    }
    if (threadIdx.x == kWarpSize) {
        own_exchange.init();
        prefetch_tensor_map(maps.own.q);
        prefetch_tensor_map(maps.own.k);
        prefetch_tensor_map(maps.own.v);
    }
    own_exchange.clear_queries();
    __syncthreads();
    if constexpr (CLUSTER > 1) {  // the fence of the barriers has published them
        cluster_arrive_relaxed();
        cluster_wait();
    }

    const int group = uniform(threadIdx.x / kWarpGroupSize);
    if (group == 0) {
        release_registers<Tile::PRODUCER_REGISTERS>();
        if (threadIdx.x / kWarpSize == Tile::COPIERS) {
            OwnProducer<typename Tile::Own>(maps.own, own, own_exchange).run();
        } else {
            const AttentionSchedule<false> schedule(common, section, taken);
            PagedProducer<Tile>(maps.common, common, exchange).run(schedule, NoScales());
        }
    } else if (group <= Tile::CONSUMERS) {
        claim_registers<Tile::REGISTERS>();
        AttentionConsumer<Tile>(common, exchange, group - 1).run();
    } else {
        release_registers<Tile::OWN_REGISTERS>();
        OwnConsumer<typename Tile::Own>(own, own_exchange).run();
    }
    if constexpr (CLUSTER > 1) {  // a block stays as long as the other one may write to it
        __syncwarp();
        cluster_arrive_relaxed();
        cluster_wait();
    }
}

// Joins all parts in their order; a thread has four columns of a row. Parts that have been read are discarded: else
// they would be written to memory when other lines want their place in the L2.
template <class T, int D>
__global__ void __launch_bounds__(256) paged_cascade_join(const __grid_constant__ CascadeParams params) {
    constexpr int GROUPS = D / 4, AT_ONCE = 17, LINES = D * 4 / 128;
    start_next_launch();
    const int index = blockIdx.x * blockDim.x + threadIdx.x, heads = params.kv_heads * params.group;
    const int query = index / GROUPS / heads, head = index / GROUPS % heads, columns = index % GROUPS;
    fetch_parameters(params);
    await_launch_before();
    if (index == 0) *params.taken = 0;
    const bool exists = query < params.batch;
    const int parts = exists ? params.parts + 1 : 0;
    float high = -infinity(), total = 0, value[4] = {};
#pragma unroll 1
    for (int first = 0; first < parts; first += AT_ONCE) {
        float lse[AT_ONCE], next = high;
        float4 x[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            lse[i] = -infinity();
            if (first + i >= parts) continue;
            lse[i] = __ldcg(params.lse_at(first + i, query, head));
            x[i] = __ldcg(reinterpret_cast<const float4*>(params.row_at<D>(first + i, query, head)) + columns);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) next = fmaxf(next, lse[i]);
        if (next == -infinity()) continue;
        const float correction = exp2_fast((high - next) * kLog2e);
        high = next;
        total *= correction;
#pragma unroll
        for (int j = 0; j < 4; ++j) value[j] *= correction;
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (lse[i] == -infinity()) continue;
            const float factor = exp2_fast((lse[i] - high) * kLog2e);
            total += factor;
            value[0] = fmaf(x[i].x, factor, value[0]), value[1] = fmaf(x[i].y, factor, value[1]);
            value[2] = fmaf(x[i].z, factor, value[2]), value[3] = fmaf(x[i].w, factor, value[3]);
        }
    }
    if (exists) {
        T* to = static_cast<T*>(params.out) + query * params.out_row + head * params.out_head;
        const float factor = total == 0 ? 0 : 1 / total;
#pragma unroll
        for (int i = 0; i < 4; ++i) to[(columns * 4 + i) * params.out_dim] = narrow<T>(value[i] * factor);
        if (params.lse && columns == 0) {
            params.lse[int64_t(head) * params.batch + query] = total == 0 ? -infinity() : high + log2f(total) * kLn2;
        }
    }
    __syncwarp();  // all lanes of a row have read it
#pragma unroll 1
    for (int i = columns; i < parts * LINES; i += GROUPS) {
        discard_line(params.row_at<D>(i / LINES, query, head) + i % LINES * (D / LINES));
    }
}

}  // namespace rawops
