// What a block of a cascade on Hopper makes of the keys and values that sequences have of their own: one query of each.
#pragma once
#include "cascade_fetch.cuh"
#include "launches.cuh"

namespace rawops {

// The warpgroup that multiplies what sequences have of their own.
template <class Tile> class OwnConsumer {
public:
    using T = typename Tile::T;

    __device__ OwnConsumer(const CascadeParams& params_, const OwnExchange<Tile>& exchange_)
        : params(params_),
          exchange(exchange_),
          meeting(exchange_.meeting),
          thread(threadIdx.x % kWarpGroupSize),
          warp(thread / kWarpSize),
          lane(thread % kWarpSize) {}

    __device__ void run() {
        RingPosition<Tile::PLACES> place;
        int parity = 0;
        await_launch_before();
#pragma unroll 1
        while (true) {
            const OwnItem item = exchange.work.take(place);
            if (uniform(item.length) < 0) break;
            walk(item, exchange.q + place.stage * Tile::Q_BYTES);
            end(item, parity ^= 1);
            exchange.work.release(place, thread == 0);
        }
    }

private:
    const CascadeParams& params;
    const OwnExchange<Tile>& exchange;
    OwnMeeting& meeting;
    static constexpr int kOwnId = 7;  // a named barrier that AttentionConsumer has not

    const int thread, warp, lane;
    RingPosition<Tile::STAGES> slot;
    // The sums of an item: lane 4 g + t has rows 2 t and 2 t + 1 of the eight, columns g and g + 8 of each warp's 16.
    float out[Tile::BOXES][4];
    float base[2], sum[2];

    __device__ void sync() const { sync_group<kOwnId>(); }

    __device__ void walk(const OwnItem& item, uint32_t q) {
#pragma unroll
        for (int i = 0; i < Tile::BOXES * 4; ++i) out[i / 4][i % 4] = 0;
#pragma unroll
        for (int j = 0; j < 2; ++j) base[j] = -infinity(), sum[j] = 0;
        if (item.length <= 0) return;
        float s[4];
        barrier_wait(exchange.barriers.full(slot.stage), slot.phase);
        multiply_keys(s, exchange.ring + slot.stage * Tile::STAGE_BYTES, q);
        wgmma_wait<0>();
        hold(s);
        int token = 0;
#pragma unroll 1
        for (; token + Tile::TOKENS < item.length; token += Tile::TOKENS) {
            weigh_and_add(s, item.length - token, token / Tile::TOKENS % 2);
            const uint32_t empty = exchange.barriers.empty(slot.stage);
            slot.advance();
            // the scores of the next stage beside the sums of this one
            barrier_wait(exchange.barriers.full(slot.stage), slot.phase);
            multiply_keys(s, exchange.ring + slot.stage * Tile::STAGE_BYTES, q);
            wgmma_wait<1>();
            hold_sums();
            if (lane == 0) barrier_arrive(empty);
            wgmma_wait<0>();
            hold(s);
        }
        weigh_and_add(s, item.length - token, token / Tile::TOKENS % 2);
        wgmma_wait<0>();
        hold_sums();
        if (lane == 0) barrier_arrive(exchange.barriers.empty(slot.stage));
        slot.advance();
    }

    __device__ void weigh_and_add(float (&s)[4], int tokens, int parity) {
        const uint32_t stage = exchange.ring + slot.stage * Tile::STAGE_BYTES;
        weigh(s, stage, tokens, parity);
        multiply_values(stage + Tile::K_BYTES);
    }

    __device__ void hold_sums() {
#pragma unroll
        for (int box = 0; box < Tile::BOXES; ++box) hold(out[box]);
    }

    // Makes weights of a stage's scores, of which so many tokens are to be seen, and brings the sums to their base.
    __device__ void weigh(float (&s)[4], uint32_t stage, int tokens, int parity) {
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
    }

    // Over the lanes of a row.
    template <class F> static __device__ void reduce(float (&x)[2], F f) {
#pragma unroll
        for (int step = 4; step < kWarpSize; step *= 2) {
#pragma unroll
            for (int j = 0; j < 2; ++j) x[j] = f(x[j], __shfl_xor_sync(~0u, x[j], step));
        }
    }

    __device__ void multiply_keys(float (&s)[4], uint32_t stage, uint32_t query) const {
        const uint64_t k = Tile::OperandK::descriptor(stage);
        const uint64_t q = Tile::OperandRows::descriptor(query);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < Tile::D / 16; ++step) {
            const int offset = step / 4 * Tile::ATOM + step % 4 * 32 >> 4;
            Wgmma<8>::template multiply<T, true, true>(s, k + offset, q + offset, step > 0);
        }
        wgmma_commit();
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
    }

    // Weights, tokens side by side.
    __device__ void store_weights(const float (&s)[4]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const T x = narrow<T>(s[i]);
            const uint32_t to =
                exchange.p + swizzled_offset<128>(lane % 4 * 2 + i % 2, warp * 2 + i / 2) + lane / 4 * 2;
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
            store_quad(values + row / 8 * Tile::ROWS_STEP + chunk / 8 * Tile::ATOM + row % 8 * 128 + chunk % 8 * 16,
                       zeros);
        }
    }

    // Leaves what the block has of an item as the last part.
    __device__ void end(const OwnItem& item, int parity) {
        reduce(sum, [](float a, float b) { return a + b; });
        if (lane < 4) meeting.sum[parity][warp][lane] = {sum[0], sum[1]};
        sync();
        float total[2] = {};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            const float2 other = meeting.sum[parity][w][lane % 4];
            total[0] += other.x, total[1] += other.y;
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int row = lane % 4 * 2 + j, head = item.head * params.group + row;
            if (row >= params.group) continue;
            const float factor = total[j] == 0 ? 0 : 1 / total[j];
            float* to = params.row_at<Tile::D>(params.parts, item.query, head) + warp * 16 + lane / 4;
#pragma unroll
            for (int i = j; i < Tile::BOXES * 4; i += 2) to[i / 4 * 64 + i / 2 % 2 * 8] = out[i / 4][i % 4] * factor;
            if (thread < 4) {
                *params.lse_at(params.parts, item.query, head) =
                    total[j] == 0 ? -infinity() : (base[j] + log2f(total[j])) * kLn2;
            }
        }
    }
};

}  // namespace rawops
