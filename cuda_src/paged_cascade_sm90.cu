// The end of a cascade on Hopper: one query of each sequence over the keys and values that the sequence has of its own, and
// the join with the results over those that all have in common, which paged_prefill_sm90.cu makes at the same time: both
// launches have a block on each SM, of which that one is bound by the tensor cores and this one by the memory.
//
//   a warp        TMA: pages --> a ring of stages, 64 tokens of one KV head each
//   a warpgroup   wgmma: S^T = K Q^T, 64 tokens x 8 heads of a group; softmax; O^T += V^T P^T
//
// An item is a sequence and KV head, and one block's. What the block has of it waits in global memory, as one more part of
// the result, until the other launch is complete.
#include "common/cascade_fetch.cuh"
#include "common/launches.cuh"

namespace rawops {

// A warpgroup that multiplies.
template <class Tile> class OwnConsumer {
public:
    using T = typename Tile::T;

    __device__ OwnConsumer(const CascadeParams& params_, const OwnExchange<Tile>& exchange_)
        : params(params_),
          exchange(exchange_),
          meeting(exchange_.meeting),
          results(params_),
          thread(threadIdx.x),
          warp(thread / kWarpSize),
          lane(thread % kWarpSize) {}

    __device__ void run() {
        RingPosition<Tile::PLACES> place;
#pragma unroll 1
        while (true) {
            const OwnItem item = exchange.work.take(place);
            if (uniform(item.length) < 0) break;
            walk(item);
            exchange.work.release(place, thread == 0);
            end(item);
        }
        await_launch_before();
        join_last();
        if (thread == 0 && atomicAdd(params.counters + kThrough, 1) == gridDim.x - 1) {
            params.counters[kThrough] = params.counters[kTaken] = 0;
        }
    }

private:
    const CascadeParams& params;
    const OwnExchange<Tile>& exchange;
    OwnMeeting& meeting;
    const CascadeResults<T, Tile::D> results;
    const int thread, warp, lane;
    RingPosition<Tile::STAGES> slot;
    int left = 0;  // items that wait for the other launch
    // The sums of an item: lane 4 g + t has rows 2 t and 2 t + 1 of the eight, and columns g and g + 8 of each warp's 16.
    float out[Tile::BOXES][4];
    float base[2], sum[2];

    __device__ void sync() const { sync_group<1>(); }

    __device__ void walk(const OwnItem& item) {
        load_query(item);
#pragma unroll
        for (int i = 0; i < Tile::BOXES * 4; ++i) out[i / 4][i % 4] = 0;
#pragma unroll
        for (int j = 0; j < 2; ++j) base[j] = -infinity(), sum[j] = 0;
        sync();
#pragma unroll 1
        for (int token = 0; token < item.length; token += Tile::TOKENS) {
            barrier_wait(exchange.barriers.full(slot.stage), slot.phase);
            add(exchange.ring + slot.stage * Tile::STAGE_BYTES, item.length - token, token / Tile::TOKENS % 2);
            if (lane == 0) barrier_arrive(exchange.barriers.empty(slot.stage));
            slot.advance();
        }
    }

    __device__ void load_query(const OwnItem& item) const {
        constexpr int CHUNKS = Tile::D / 8;
#pragma unroll
        for (int i = thread; i < Tile::ROWS * CHUNKS; i += kWarpGroupSize) {
            const int row = i / CHUNKS, chunk = i % CHUNKS;
            uint4 x = {};
            if (row < params.group) {
                const int64_t from = item.query * params.q_row + (item.head * params.group + row) * params.q_head;
                x = __ldg(reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(params.q) + from) + chunk);
            }
            const uint32_t words[4] = {x.x, x.y, x.z, x.w};
            const uint32_t to = exchange.q + chunk / 8 * Tile::ATOM;
            store_quad(to + swizzled_offset<128>(row, chunk % 8), words);
        }
        fence_async_proxy();
    }

    // Adds a stage, of which so many tokens are to be seen.
    __device__ void add(uint32_t stage, int tokens, int parity) {
        float s[4];
        multiply_keys(s, stage);
        float high[2] = {-infinity(), -infinity()};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            s[i] = warp * 16 + i / 2 * 8 + lane / 4 < tokens ? s[i] * params.scale : -infinity();
            high[i % 2] = fmaxf(high[i % 2], s[i]);
        }
        reduce(high, [](float a, float b) { return fmaxf(a, b); });
        if (lane < 4) meeting.top[parity][warp][lane] = {high[0], high[1]};
        sync();
        float correction[2];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            const float2 other = meeting.top[parity][w][lane % 4];
            high[0] = fmaxf(high[0], other.x), high[1] = fmaxf(high[1], other.y);
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const float top = fmaxf(base[j], high[j]), safe = top == -infinity() ? 0 : top;
            correction[j] = exp2_fast(base[j] - safe);
            base[j] = top;
            s[j] = exp2_fast(s[j] - safe), s[j + 2] = exp2_fast(s[j + 2] - safe);
            sum[j] = fmaf(sum[j], correction[j], s[j] + s[j + 2]);
        }
        store_weights(s);
        if (tokens < Tile::TOKENS) clear_values(stage + Tile::K_BYTES, tokens);
        fence_async_proxy();
        sync();
#pragma unroll
        for (int i = 0; i < Tile::BOXES * 4; ++i) out[i / 4][i % 4] *= correction[i % 2];
        multiply_values(stage + Tile::K_BYTES);
    }

    // Over the lanes of a row.
    template <class F> static __device__ void reduce(float (&x)[2], F f) {
#pragma unroll
        for (int step = 4; step < kWarpSize; step *= 2) {
#pragma unroll
            for (int j = 0; j < 2; ++j) x[j] = f(x[j], __shfl_xor_sync(~0u, x[j], step));
        }
    }

    __device__ void multiply_keys(float (&s)[4], uint32_t stage) const {
        const uint64_t k = Tile::OperandK::descriptor(stage);
        const uint64_t q = Tile::OperandRows::descriptor(exchange.q);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < Tile::D / 16; ++step) {
            const int offset = step / 4 * Tile::ATOM + step % 4 * 32 >> 4;
            Wgmma<8>::template multiply<T, true, true>(s, k + offset, q + offset, step > 0);
        }
        wgmma_commit();
        wgmma_wait<0>();
        hold(s);
    }

    __device__ void multiply_values(uint32_t values) {
        const uint64_t p = Tile::OperandRows::descriptor(exchange.p);
        wgmma_fence();
#pragma unroll
        for (int box = 0; box < Tile::BOXES; ++box) {
            const uint64_t v = Tile::OperandV::descriptor(values + box * Tile::ATOM);
#pragma unroll
            for (int step = 0; step < Tile::TOKENS / 16; ++step) {
                Wgmma<8>::template multiply<T, false, true>(out[box], Tile::OperandV::advance(v, 0, step),
                                                            p + (step * 32 >> 4), true);
            }
        }
        wgmma_commit();
        wgmma_wait<0>();
#pragma unroll
        for (int box = 0; box < Tile::BOXES; ++box) hold(out[box]);
    }

    // Weights, tokens side by side.
    __device__ void store_weights(const float (&s)[4]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const T x = narrow<T>(s[i]);
            const uint32_t to = exchange.p + swizzled_offset<128>(lane % 4 * 2 + i % 2, warp * 2 + i / 2) + lane / 4 * 2;
            asm volatile("st.shared.b16 [%0], %1;" ::"r"(to), "h"(reinterpret_cast<const uint16_t&>(x)) : "memory");
        }
    }

    // Zeros for what lies in a page past the sequence's end: weights of 0 would not hide what is not finite.
    __device__ void clear_values(uint32_t values, int tokens) const {
        constexpr int CHUNKS = Tile::D / 8;
        const uint32_t zeros[4] = {};
#pragma unroll 1
        for (int i = tokens * CHUNKS + thread; i < Tile::TOKENS * CHUNKS; i += kWarpGroupSize) {
            const int row = i / CHUNKS, chunk = i % CHUNKS;
            store_quad(values + row / 8 * Tile::ROWS_STEP + chunk / 8 * Tile::ATOM + row % 8 * 128 + chunk % 8 * 16, zeros);
        }
    }

    // --- the end of an item

    __device__ void end(const OwnItem& item) {
        reduce(sum, [](float a, float b) { return a + b; });
        if (lane < 4) meeting.sum[warp][lane] = {sum[0], sum[1]};
        if (thread < 4) meeting.base[lane] = {base[0], base[1]};
#pragma unroll
        for (int i = 0; i < Tile::BOXES * 4; ++i) {
            const int row = lane % 4 * 2 + i % 2, column = i / 4 * 64 + warp * 16 + i / 2 % 2 * 8 + lane / 4;
            store_shared(exchange.out + (row * Tile::OUT_ROW + column) * 4, out[i / 4][i % 4]);
        }
        sync();
#pragma unroll 1
        for (int i = thread; i < params.group * Tile::GROUPS; i += kWarpGroupSize) {
            const int row = i / Tile::GROUPS, group = i % Tile::GROUPS;
            float lse;
            const float4 values = of_row(row, group, lse);
            results.leave(item.query, item.head * params.group + row, group, values, lse);
        }
        if (thread == 0) meeting.waiting[left] = {item.query, item.head * params.group};
        if (++left == OwnMeeting::kLeft) {
            await_launch_before();
            join_waiting();
        }
    }

    // Four columns of a row.
    __device__ float4 of_row(int row, int group, float& lse) const {
        auto half = [&](const float2 (&pairs)[4]) { return row % 2 ? pairs[row / 2].y : pairs[row / 2].x; };
        float total = 0;
#pragma unroll
        for (int w = 0; w < 4; ++w) total += half(meeting.sum[w]);
        const uint4 x = load_quad(exchange.out + (row * Tile::OUT_ROW + group * 4) * 4);
        const float factor = total == 0 ? 0 : 1 / total;
        lse = total == 0 ? -infinity() : (half(meeting.base) + log2f(total)) * kLn2;
        return make_float4(__uint_as_float(x.x) * factor, __uint_as_float(x.y) * factor, __uint_as_float(x.z) * factor,
                           __uint_as_float(x.w) * factor);
    }

    // Joins what waits, in the middle of the block's work.
    __device__ void join_waiting() {
        sync();
#pragma unroll 1
        for (int i = thread; i < left * params.group * Tile::GROUPS; i += kWarpGroupSize) {
            const int group = i % Tile::GROUPS, row = i / Tile::GROUPS % params.group;
            const int2 item = meeting.waiting[i / Tile::GROUPS / params.group];
            const int head = item.y + row;
            auto load_lse = [&](int part) { return load_past_l1(results.lse_at(part, item.x, head)); };
            auto load = [&](int part) { return __ldcg(results.values_at(part, item.x, head, group)); };
            results.join(item.x, head, group, load_lse, load);
        }
        left = 0;
    }

    // The same at its end: all parts of all items come at once into what was the ring.
    __device__ void join_last() {
        const int parts = params.parts + 1, rows = params.group, columns = rows * Tile::GROUPS;
        const int of_item = parts * (columns * 16 + rows * 4), at_once = Tile::Q_AT / of_item;
        if (at_once == 0) {
            join_waiting();
            return;
        }
        sync();
#pragma unroll 1
        for (int begin = 0; begin < left; begin += at_once) {
            const int count = min_of(left - begin, at_once);
            const uint32_t values = exchange.ring, sums = values + count * parts * columns * 16;
            fetch_parts(begin, count, values, sums);
            cp_async_wait<0>();
            sync();
#pragma unroll 1
            for (int at = thread; at < columns; at += kWarpGroupSize) {
                const int row = at / Tile::GROUPS, group = at % Tile::GROUPS;
#pragma unroll 1
                for (int n = 0; n < count; ++n) {
                    const int2 item = meeting.waiting[begin + n];
                    const uint32_t first = values + (n * parts * columns + at) * 16;
                    const uint32_t first_lse = sums + (n * parts * rows + row) * 4;
                    auto load_lse = [&](int part) { return __uint_as_float(load_word(first_lse + part * rows * 4)); };
                    auto load = [&](int part) {
                        const uint4 x = load_quad(first + part * columns * 16);
                        return make_float4(__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z),
                                           __uint_as_float(x.w));
                    };
                    results.join(item.x, item.y + row, group, load_lse, load);
                }
            }
            sync();
        }
    }

    // Starts copies of all parts of some items, by item, part and row; their lse are there on return.
    __device__ void fetch_parts(int begin, int count, uint32_t values, uint32_t sums) const {
        const int parts = params.parts + 1, rows = params.group, columns = rows * Tile::GROUPS;
#pragma unroll 1
        for (int at = thread; at < columns; at += kWarpGroupSize) {
            uint32_t to = values + at * 16;
#pragma unroll 1
            for (int n = 0; n < count; ++n) {
                const int2 item = meeting.waiting[begin + n];
                const float4* from = results.values_at(0, item.x, item.y + at / Tile::GROUPS, at % Tile::GROUPS);
#pragma unroll 4
                for (int part = 0; part < parts; ++part, to += columns * 16, from += params.prior_split / 4) {
                    cp_async_16(to, from);
                }
            }
        }
        cp_async_commit();
        const int row = thread % rows, first = thread / rows, step = kWarpGroupSize / rows;
        if (first >= step) return;
#pragma unroll 1
        for (int part = first; part < parts; part += step) {
#pragma unroll 1
            for (int n = 0; n < count; n += 4) {  // loaded before one is stored, which would wait
                float lse[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int2 item = meeting.waiting[begin + min_of(n + i, count - 1)];
                    lse[i] = load_past_l1(results.lse_at(part, item.x, item.y + row));
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if (n + i < count) store_shared(sums + (((n + i) * parts + part) * rows + row) * 4, lse[i]);
                }
            }
        }
    }
};

template <class T, int D, int STAGES, class Tile = OwnTile<T, D, STAGES>>
__global__ void __maxnreg__(88)
    paged_cascade_sm90(const __grid_constant__ CascadeMaps maps, const __grid_constant__ CascadeParams params) {
    extern __shared__ __align__(1024) char shared[];
    start_next_launch();
    const OwnExchange<Tile> exchange(shared);
    OwnProducer<Tile> producer(maps, params, exchange);
    const bool fetches = uniform(threadIdx.x / kWarpGroupSize) == 1;
    if (fetches) producer.begin();
    if (threadIdx.x == 0) {
        exchange.init();
        prefetch_tensor_map(maps.k);
        prefetch_tensor_map(maps.v);
    }
    __syncthreads();
    if (fetches) producer.run();
    else OwnConsumer<Tile>(params, exchange).run();
}

}  // namespace rawops
