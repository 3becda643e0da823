// The end of an item: the warps of a block put their sums together, and one of the blocks that share the item puts
// theirs together and writes the result.
#pragma once
#include "hopper.cuh"
#include "paged_rows.cuh"

namespace rawops {

struct PagedParams {
    const void* q;
    void* out;
    float* lse;     // none if not wanted
    void* partial;  // per block, 2 slots of PartialSlot; 0 between launches
    // Results over keys that come before all others, [parts][row of q][head][head_dim], and their lse,
    // [parts][head][row of q]; none if there are no parts.
    const float *prior, *prior_lse;
    int64_t prior_split, prior_lse_split;  // from part to part
    int64_t q_row, q_head, out_row, out_head, out_dim, lse_head, lse_row;  // q: pairs of columns on 4-byte boundaries
    PagePool pool;
    PagedWork work;
    ScoreRule rule;
};

// Rows of an item: 16 neighbours among queries x heads of the group. Not kRagged: of the one query.
template <int TOKENS, bool kRagged> struct ItemRows {
    int q_begin, group, head_begin, row_begin, count;

    __device__ ItemRows(const Place<TOKENS, kRagged>& place, const PagedWork& work)
        : q_begin(place.sequence.q_begin),
          group(work.group),
          head_begin(place.head * work.group),
          row_begin(place.rows * kItemRows),
          count(min_of(place.sequence.q_count * work.group - row_begin, kItemRows)) {}

    __device__ int query(int row) const { return kRagged ? (row_begin + row) / group : 0; }
    __device__ int head(int row) const {
        return head_begin + (kRagged ? (row_begin + row) % group : row_begin + row);
    }
};

// What a block leaves of an item that it shares: weighted values, and for each row the largest score and the sum. A
// word that is 0 is not there yet.
template <int HEAD_DIM> struct PartialSlot {
    float4 values[kItemRows * HEAD_DIM / 4];
    float2 top_and_sum[kItemRows];

    static __device__ float there(float x) { return x == 0 ? -0.0f : x; }
    __device__ void leave(int index, const float (&x)[4]) {
        asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(values + index), "f"(there(x[0])),
                     "f"(there(x[1])), "f"(there(x[2])), "f"(there(x[3]))
                     : "memory");
    }
    __device__ void leave_row(int row, float top, float sum) {
        asm volatile("st.relaxed.gpu.global.v2.f32 [%0], {%1, %2};" ::"l"(top_and_sum + row), "f"(there(top)),
                     "f"(there(sum))
                     : "memory");
    }
    // Reads what is wanted of another block's words, which may not be there yet.
    __device__ void look(int index, int row, bool wanted, float4& x, float2& top_sum) const {
        asm volatile(
            "{\n"
            ".reg .pred wanted;\n"
            "setp.ne.u32 wanted, %8, 0;\n"
            "@wanted ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%6];\n"
            "@wanted ld.relaxed.gpu.global.v2.f32 {%4, %5}, [%7];\n"
            "}"
            : "+f"(x.x), "+f"(x.y), "+f"(x.z), "+f"(x.w), "+f"(top_sum.x), "+f"(top_sum.y)
            : "l"(values + index), "l"(top_and_sum + row), "r"(int(wanted))
            : "memory");
    }
    __device__ void clear(int index, int rows) {
        values[index] = make_float4(0, 0, 0, 0);
        if (index < rows) top_and_sum[index] = make_float2(0, 0);
    }
    static __device__ bool is_there(const float4& x, const float2& top_sum) {
        bool there = true;
        const float words[6] = {x.x, x.y, x.z, x.w, top_sum.x, top_sum.y};
        for (float word : words) there &= __float_as_uint(word) != 0;
        return there;
    }
};

// What the warps of a block tell each other at the end of an item.
template <int WARPS> struct Meeting {
    float top[WARPS][kItemRows], sum[WARPS][kItemRows];
    uint32_t slot[WARPS];  // where the warp's weighted values are, 0 if it had no tile
};

// What the second block of a pair sends to the first: rows of weighted values, largest scores and sums.
template <int ROWS, int HEAD_DIM> struct PairMail {
    float4 values[ROWS * HEAD_DIM / 4];
    float2 top_and_sum[ROWS];
    uint64_t arrived;  // a barrier that is over when all of it is there

    __device__ uint32_t barrier() { return shared_address(&arrived); }

    // By all threads of both blocks, before anything is sent; then cluster_wait().
    __device__ void open(int rows) {
        if (threadIdx.x == 0) {
            barrier_init(barrier(), 1);
            barrier_init_fence();
            barrier_arrive_expect(barrier(), rows * (HEAD_DIM * 4 + 8));
        }
        __syncwarp();
        cluster_arrive();
    }
};

// Weighted sums of four neighbouring columns of a row, relative to a largest score.
struct Merged {
    float top = -infinity(), sum = 0, value[4] = {};

    __device__ float base() const { return top == -infinity() ? 0 : top; }
    __device__ void raise(float high) {
        const float factor = exp2_fast(top - (high == -infinity() ? 0 : high));
        top = high;
        sum *= factor;
        for (float& x : value) x *= factor;
    }
    __device__ void add(float term_top, float term_sum, const float4& term) {
        const float factor = exp2_fast(term_top - base());
        sum = fmaf(term_sum, factor, sum);
        value[0] = fmaf(term.x, factor, value[0]);
        value[1] = fmaf(term.y, factor, value[1]);
        value[2] = fmaf(term.z, factor, value[2]);
        value[3] = fmaf(term.w, factor, value[3]);
    }
};

// HEADS: KV heads of an item, which its warps have in turn. AT_ONCE: partial results that are read at once where there
// are many.
template <class T, class Tile, int ROWS, int WARPS, int HEADS, int AT_ONCE, bool kRagged> class ItemEnd {
public:
    using State = RowState<T, Tile, ROWS>;
    using Rows = ItemRows<Tile::TOKENS, kRagged>;
    using Slot = PartialSlot<Tile::HEAD_DIM>;
    using Sums = ChunkTile<Tile::HEAD_DIM / 4>;  // a warp's float32 sums
    static constexpr int GROUPS = Tile::HEAD_DIM / 4, THREADS = WARPS * kWarpSize;

    __device__ ItemEnd(const PagedParams& p, Meeting<WARPS>& m) : params(p), meeting(m) {}

    // Leaves a warp's sums in a slot of its ring.
    __device__ void leave(const State& state, uint32_t slot, bool has_tiles, int count) {
        const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
        __syncwarp();  // all lanes have read the slot
        if (lane == 0) meeting.slot[warp] = has_tiles ? slot : 0;
        if (!has_tiles) {
            if (lane < kItemRows) meeting.top[warp][lane] = -infinity(), meeting.sum[warp][lane] = 0;
            return;
        }
#pragma unroll
        for (int r = 0; r < State::OWN; ++r) {
            const int row = row_of_lane(r, lane);
            if (row >= count) continue;
            if (lane < 4) meeting.top[warp][row] = state.top[r], meeting.sum[warp][row] = state.sum[r];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int column = Fragments<T, Tile>::out_column(half, lane);
                const int from = Sums::offset(row, column / 4);
#pragma unroll
                for (int step = 0; step < State::STEPS; ++step) {
                    const uint32_t to = slot + Sums::moved(from, 0, step * 4) + column % 4 * 4;
                    const float x = state.out[step][r / 2][half * 2 + r % 2];
                    asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(x) : "memory");
                }
            }
        }
    }

    // By all threads of the block. Afterwards the warps' slots are free. Of an item that several blocks share, the one
    // with its first tiles gathers what the others leave. `room`: of those slots, if they lie side by side.
    __device__ void meet(const Rows& rows, const Shares& shares, int number, uint32_t room) {
        __syncthreads();
        const int size = rows.count * GROUPS;
        const bool gathers = number == shares.first && shares.count > 1;
        // As many sets of threads as there are share the other blocks' parts.
        const int sets = gathers && room != 0 ? max_of(THREADS / size, 1) : 1;
        const int set = sets > 1 ? threadIdx.x / size : 0;
        Merged merged;
#pragma unroll 1
        for (int index = threadIdx.x - set * size; index < size && set < sets; index += THREADS) {
            const int row = index / GROUPS, group = index % GROUPS;
            merged = set == 0 ? of_warps(row, group) : Merged();
            if (number != shares.first) {
                Slot* own = slot(shares, number - shares.first);
                own->leave(index, merged.value);
                if (group == 0) own->leave_row(row, merged.top, merged.sum);
                continue;
            }
            if (gathers) add_blocks(merged, shares, row, index, set, sets);
            if (sets == 1) write(rows, row, group, merged);
        }
        __syncthreads();
        if (!gathers) return;
        if (sets > 1) join_sets(merged, rows, size, set, sets, room);
#pragma unroll 1
        for (int i = 1 + set; i < shares.count && set < sets; i += sets) {
#pragma unroll 1
            for (int index = threadIdx.x - set * size; index < size; index += THREADS) {
                slot(shares, i)->clear(index, rows.count);
            }
        }
    }

    // The same where the two blocks of a cluster share an item: the second one sends what it has to the first one's
    // shared memory and is done, the first one writes. All threads of both come here; a block without tiles has the
    // rows too.
    template <class Mail> __device__ void meet_in_pair(const Rows& rows, bool has_tiles, Mail& mail) {
        __syncthreads();
        const bool is_first = cluster_rank() == 0;
#pragma unroll 1
        for (int index = threadIdx.x; index < rows.count * GROUPS; index += WARPS * kWarpSize) {
            const int row = index / GROUPS, group = index % GROUPS;
            Merged merged = has_tiles ? of_warps(row, group) : Merged();
            if (is_first) {
                barrier_wait(mail.barrier(), 0);
                const float2 sent = mail.top_and_sum[row];
                merged.raise(fmaxf(merged.top, sent.x));
                merged.add(sent.x, sent.y, mail.values[index]);
                write(rows, row, group, merged);
            } else {
                const float(&x)[4] = merged.value;
                const float4 values = make_float4(x[0], x[1], x[2], x[3]);
                send_to_rank(shared_address(&mail.values[index]), values, mail.barrier(), 0);
                if (group == 0) {
                    const float2 own = make_float2(merged.top, merged.sum);
                    send_to_rank(shared_address(&mail.top_and_sum[row]), own, mail.barrier(), 0);
                }
            }
        }
    }

private:
    const PagedParams& params;
    Meeting<WARPS>& meeting;

    __device__ Slot* slot(const Shares& shares, int i) const {
        return static_cast<Slot*>(params.partial) + (i == 0 ? shares.first_slot : 2 * (shares.first + i));
    }

    // Without branches, which would have each load wait for the one before.
    __device__ Merged of_warps(int row, int group) const {
        constexpr int COUNT = WARPS / HEADS;
        const int first = HEADS > 1 && row >= params.work.group / HEADS;  // warp of the row's head
        Merged merged;
        float top[COUNT], sum[COUNT];
        float4 term[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int warp = first + i * HEADS;
            top[i] = meeting.top[warp][row], sum[i] = meeting.sum[warp][row];
            load_if_any(term[i], meeting.slot[warp], Sums::offset(row, group));
            merged.top = fmaxf(merged.top, top[i]);
        }
#pragma unroll
        for (int i = 0; i < COUNT; ++i) merged.add(top[i], sum[i], term[i]);
        return merged;
    }

    // Zeros without a slot.
    static __device__ void load_if_any(float4& x, uint32_t slot, int offset) {
        asm volatile(
            "{\n"
            ".reg .pred any;\n"
            "setp.ne.u32 any, %4, 0;\n"
            "mov.f32 %0, 0f00000000;\n"
            "mov.f32 %1, 0f00000000;\n"
            "mov.f32 %2, 0f00000000;\n"
            "mov.f32 %3, 0f00000000;\n"
            "@any ld.shared.v4.f32 {%0, %1, %2, %3}, [%5];\n"
            "}"
            : "=&f"(x.x), "=&f"(x.y), "=&f"(x.z), "=&f"(x.w)
            : "r"(slot), "r"(slot + offset)
            : "memory");
    }

    // Adds what every so manieth of the other blocks leaves, in their order.
    __device__ void add_blocks(Merged& merged, const Shares& shares, int row, int index, int set, int sets) const {
#pragma unroll 1
        for (int begin = 1 + set; begin < shares.count; begin += AT_ONCE * sets) {
            const int count = shares.count - begin;  // of which every so manieth
            float4 term[AT_ONCE] = {};
            float2 top_sum[AT_ONCE] = {};
            bool missing;
            do {
                missing = false;
                const Slot* from = slot(shares, begin);
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i, from += 2 * sets) {
                    const bool wanted = (i * sets < count) & !Slot::is_there(term[i], top_sum[i]);
                    from->look(index, row, wanted, term[i], top_sum[i]);
                }
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) missing |= (i * sets < count) & !Slot::is_there(term[i], top_sum[i]);
            } while (missing);
            float top[AT_ONCE], sum[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) top[i] = top_sum[i].x, sum[i] = top_sum[i].y;
            add_batch<AT_ONCE>(merged, ceil_div(count, sets), top, sum, term);
        }
    }

    // The first set of threads gets what the others have, in their order, and writes the result.
    __device__ void join_sets(Merged& merged, const Rows& rows, int size, int set, int sets, uint32_t room) const {
        const int index = threadIdx.x - set * size;
        float4* const values = static_cast<float4*>(__cvta_shared_to_generic(room));
        float2* const top_sums = reinterpret_cast<float2*>(values + THREADS);
        if (set > 0 && set < sets) {
            values[threadIdx.x] = make_float4(merged.value[0], merged.value[1], merged.value[2], merged.value[3]);
            top_sums[threadIdx.x] = make_float2(merged.top, merged.sum);
        }
        __syncthreads();
        if (set > 0) return;
#pragma unroll 1
        for (int from = index + size; from < sets * size; from += size) {
            const float2 other = top_sums[from];
            merged.raise(fmaxf(merged.top, other.x));
            merged.add(other.x, other.y, values[from]);
        }
        write(rows, index / GROUPS, index % GROUPS, merged);
    }

    // What an earlier launch has made of the keys before.
    __device__ void add_prior(Merged& merged, int64_t query, int64_t head, int group) const {
        const int head_dim = params.pool.head_dim, heads = params.work.kv_heads * params.work.group;
        if (group * 4 >= head_dim) return;
        const float* values = params.prior + (query * heads + head) * head_dim + group * 4;
        const float* lse = params.prior_lse + head * params.work.total_q + query;
        add_parts<4>(merged, params.work.prior_parts, [&](int i, float& top, float& sum, float4& term) {
            top = load_past_l1(lse + i * params.prior_lse_split) * kLog2e;
            sum = 1;
            term = load_past_l1(reinterpret_cast<const float4*>(values + i * params.prior_split));
        });
    }

    // Those of a batch are loaded at once; past the end, the last again.
    template <int BATCH, class Load> static __device__ void add_parts(Merged& merged, int count, const Load& load) {
#pragma unroll 1
        for (int begin = 0; begin < count; begin += BATCH) {
            float top[BATCH], sum[BATCH];
            float4 term[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; ++i) load(min_of(begin + i, count - 1), top[i], sum[i], term[i]);
            add_batch<BATCH>(merged, count - begin, top, sum, term);
        }
    }
    template <int BATCH>
    static __device__ void add_batch(Merged& merged, int count, const float (&top)[BATCH], const float (&sum)[BATCH],
                                     const float4 (&term)[BATCH]) {
        float high = merged.top;
#pragma unroll
        for (int i = 0; i < BATCH; ++i) high = fmaxf(high, i < count ? top[i] : -infinity());
        merged.raise(high);
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const bool is_empty = top[i] == -infinity() && sum[i] == sum[i];  // the sum of NaN scores is NaN
            if (i < count && !is_empty) merged.add(top[i], sum[i], term[i]);
        }
    }

    __device__ void write(const Rows& rows, int row, int group, Merged merged) const {
        const int64_t query = rows.q_begin + rows.query(row), head = rows.head(row);
        if (params.work.prior_parts > 0) add_prior(merged, query, head, group);
        T* out = static_cast<T*>(params.out) + query * params.out_row + head * params.out_head;
        const float factor = merged.sum == 0 ? 0 : __fdividef(1, merged.sum);  // no sum is less than 1, but 0
        float x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = merged.value[i] * factor;
        uint2* const four = reinterpret_cast<uint2*>(out + group * 4);
        if (params.out_dim == 1 && group * 4 + 4 <= params.pool.head_dim && reinterpret_cast<size_t>(four) % 8 == 0) {
            *four = make_uint2(pack_pair<T>(x[0], x[1]), pack_pair<T>(x[2], x[3]));
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int column = group * 4 + i;
                if (column < params.pool.head_dim) out[column * params.out_dim] = narrow<T>(x[i]);
            }
        }
        if (params.lse && group == 0) {
            const float lse = (merged.top + log2f(merged.sum)) * kLn2;
            params.lse[head * params.lse_head + query * params.lse_row] = merged.sum == 0 ? -infinity() : lse;
        }
    }
};

// Rows of q past the last sequence: zeros.
template <class T> __device__ inline void clear_rest(const PagedParams& params) {
    const PagedWork& work = params.work;
    const int heads = work.kv_heads * work.group, head_dim = params.pool.head_dim;
    for (int row = max_of(work.cu_seqlens_q[work.batch], 0) + blockIdx.x; row < work.total_q; row += gridDim.x) {
        for (int index = threadIdx.x; index < heads * head_dim; index += blockDim.x) {
            const int head = index / head_dim, column = index % head_dim;
            T* out = static_cast<T*>(params.out) + row * params.out_row + head * params.out_head;
            out[column * params.out_dim] = narrow<T>(0.0f);
            if (params.lse && column == 0) params.lse[head * params.lse_head + row * params.lse_row] = -infinity();
        }
    }
}

}  // namespace rawops
