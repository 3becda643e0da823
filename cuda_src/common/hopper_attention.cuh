// Flash attention on Hopper, a block's whole run.
//
//   warpgroup 0, one thread   TMA:   q --> its tile; k, v --> two rings of stages
//   the other warpgroups      wgmma: S = q @ k^T, softmax in registers, O += P @ v, O / l --> out; 64 rows each
//
// A consumer issues S of the next keys before O += P @ v of these, so that its softmax runs beside the latter; and
// consumers take turns at issuing, so that one multiplies while another is at its softmax. Keys come from last to
// first: the masked blocks of a causal tile, and those that are not whole, are the first ones.
#pragma once
#include "hopper_attention_rows.cuh"
#include "hopper_attention_tile.cuh"

namespace rawops {

// The producer: one thread that keeps the rings full.
template <class Tile> class AttentionProducer {
public:
    __device__ AttentionProducer(const AttentionMaps& maps_, const AttentionParams& params_,
                                 const AttentionExchange<Tile>& exchange_)
        : maps(maps_), params(params_), exchange(exchange_) {}

    __device__ void run(const AttentionSchedule<false>& schedule) {
        RingPosition<2> slot_work;
#pragma unroll 1
        for (int index = blockIdx.x; index < schedule.count; index = schedule.after(index)) {
            // One tile, but for sequences that are longer than stated, and the rows past the last one.
#pragma unroll 1
            for (int further = 0;; further += params.shape.row_tiles) {
                AttentionBlock& work = exchange.work.next(slot_work);
                work = schedule.at(index);
                work.tile += further;
                if (work.tile * Tile::BLOCK_M >= work.rows(params.shape)) break;
                exchange.work.put(slot_work);
                load(work);
            }
        }
        exchange.work.next(slot_work).tile = -1;  // the end
        exchange.work.put(slot_work);
    }

private:
    const AttentionMaps& maps;
    const AttentionParams& params;
    const AttentionExchange<Tile>& exchange;
    RingPosition<Tile::STAGES> slot_k, slot_v;
    RingPosition<1> slot_q;

    __device__ void load(const AttentionBlock& work) {
        const KeyBlocks blocks = KeyBlocks::of<Tile>(params.shape, work);
        if (blocks.first == blocks.end) return;
        const int batch = params.call.cu_seqlens_q ? 0 : work.batch;
        const TensorCoordinates keys = {0, work.k_begin, work.kv_head, batch, 0};
        auto load_k = [&](int block) {
            load_keys<Tile::BOX, Tile::BOXES>(exchange.k, exchange.k_barriers, slot_k, maps.k, keys, block);
        };
        auto load_v = [&](int block) {
            load_keys<Tile::BOX_V, Tile::BOXES_V>(exchange.v, exchange.v_barriers, slot_v, maps.v, keys, block);
        };
        load_k(blocks.end - 1);
        load_q({0, work.q_begin + work.tile * Tile::BLOCK_M, work.head, batch, 0});
#pragma unroll 1
        for (int block = blocks.end - 1; block > blocks.first; --block) {
            load_k(block - 1);
            load_v(block);
        }
        load_v(blocks.first);
    }

    __device__ void load_q(TensorCoordinates from) {
        barrier_wait(exchange.q_barriers.empty(0), slot_q.phase ^ 1);
        barrier_arrive_expect(exchange.q_barriers.full(0), Tile::CONSUMERS * Tile::Q_BYTES);
#pragma unroll
        for (int i = 0; i < Tile::CONSUMERS; ++i, from.at[1] += 64) {
            load_rows<64, Tile::BOX, Tile::BOXES>(exchange.q + i * Tile::Q_BYTES, maps.q, from,
                                                  exchange.q_barriers.full(0));
        }
        slot_q.advance();
    }

    template <int BOX, int BOXES>
    __device__ void load_keys(uint32_t ring, const RingBarriers<Tile::STAGES>& barriers,
                              RingPosition<Tile::STAGES>& slot, const TensorMap& map, TensorCoordinates from,
                              int block) {
        constexpr int BYTES = Tile::BLOCK_N * BOX * BOXES * 2;
        barrier_wait(barriers.empty(slot.stage), slot.phase ^ 1);
        barrier_arrive_expect(barriers.full(slot.stage), BYTES);
        from.at[1] += block * Tile::BLOCK_N;
        load_rows<Tile::BLOCK_N, BOX, BOXES>(ring + slot.stage * BYTES, map, from, barriers.full(slot.stage));
        slot.advance();
    }
};

// A consumer warpgroup at work on one tile after the other.
template <class Tile> class AttentionConsumer {
public:
    using T = typename Tile::T;
    using Softmax = OnlineSoftmax<Tile::kLags>;

    __device__ AttentionConsumer(const AttentionParams& params_, const AttentionExchange<Tile>& exchange_, int number_)
        : params(params_), exchange(exchange_), number(number_), thread(threadIdx.x % kWarpGroupSize) {
        if (Tile::kTurns && number == Tile::CONSUMERS - 1) arrive_group<2 * kWarpGroupSize>(1);  // the first turn
    }

    // Takes tiles until the producer has no more.
    __device__ void run() {
        RingPosition<2> slot_work;
#pragma unroll 1
        while (true) {
            const AttentionBlock& work = exchange.work.take(slot_work);
            if (uniform(work.tile) < 0) break;
            run(work);
            sync();
            exchange.work.release(slot_work, leads());
        }
    }

private:
    __device__ void run(const AttentionBlock& work) {
        const KeyBlocks blocks = KeyBlocks::of<Tile>(params.shape, work);
        const int first_row = work.tile * Tile::BLOCK_M + number * 64;
        const int row = first_row + thread / kWarpSize * 16 + thread % kWarpSize / 4;
        const KeyBlocks uncut = KeyBlocks::uncut<Tile>(params, work);
        const KeyBlocks whole = {ceil_div(work.visible(params.shape, first_row + 63).begin, Tile::BLOCK_N),
                                 work.visible(params.shape, first_row).end / Tile::BLOCK_N};  // seen by all rows
        const float scale = params.shape.scale;
        auto mask = [&](typename Tile::Scores& s, int block) {
            if (whole.has(block)) return;
            const KeyRange visible[2] = {work.visible(params.shape, row), work.visible(params.shape, row + 8)};
            mask_scores(s, visible, block * Tile::BLOCK_N + thread % 4 * 2);
        };

        Softmax softmax;
        typename Tile::Output o;
#pragma unroll
        for (int i = 0; i < Tile::DV / 2; ++i) o[i] = 0;
        if (blocks.first < blocks.end) {
            typename Tile::Scores s;
            typename Tile::Weights p;
            float correction[2];
            barrier_wait(exchange.q_barriers.full(0), slot_q.phase);
            slot_q.advance();
            barrier_wait(exchange.k_barriers.full(slot.stage), slot.phase);
            multiply_keys(s);
            bool is_tainted = !uncut.has(blocks.end - 1) && find_nonfinite(slot_v);
            wgmma_wait<0>();
            hold(s);
            release(exchange.k_barriers, slot);
            mask(s, blocks.end - 1);
            softmax.add(s, scale, correction);
            narrow_weights<T>(p, s);
#pragma unroll 1
            for (int block = blocks.end - 1;;) {
                if (uniform(is_tainted)) take_nonfinite(o, work, row, block);
                if (--block < blocks.first) break;
                barrier_wait(exchange.k_barriers.full(slot.stage), slot.phase);
                await_turn();
                multiply_keys(s);
                barrier_wait(exchange.v_barriers.full(slot_v.stage), slot_v.phase);
                multiply_values(o, p);
                end_turn();
                RingPosition<Tile::STAGES> next = slot_v;
                next.advance();
                is_tainted = !uncut.has(block) && find_nonfinite(next);
                wgmma_wait<1>();
                hold(s);
                release(exchange.k_barriers, slot);
                mask(s, block);
                const bool moves = softmax.add(s, scale, correction);
                wgmma_wait<0>();
                hold(o);
                release(exchange.v_barriers, slot_v);
                if (moves) {
#pragma unroll
                    for (int i = 0; i < Tile::DV / 2; ++i) o[i] *= correction[i / 2 % 2];
                }
                narrow_weights<T>(p, s);
            }
            if (leads()) barrier_arrive(exchange.q_barriers.empty(0));
            barrier_wait(exchange.v_barriers.full(slot_v.stage), slot_v.phase);
            multiply_values(o, p);
            softmax.complete();
            wgmma_wait<0>();
            hold(o);
            release(exchange.v_barriers, slot_v);
        }
        store(work, o, softmax, row);
    }

    const AttentionParams& params;
    const AttentionExchange<Tile>& exchange;
    // Named barriers: the turns are 1 to 3.
    static constexpr int kAllId = 4, kFirstId = 5;

    const int number, thread;
    RingPosition<Tile::STAGES> slot, slot_v;
    RingPosition<1> slot_q;

    __device__ bool leads() const { return thread == 0; }
    __device__ void sync() const { sync_group<kWarpGroupSize>(kFirstId + number); }
    __device__ void await_turn() const {
        if constexpr (Tile::kTurns) sync_group<2 * kWarpGroupSize>(1 + number);
    }
    __device__ void end_turn() const {
        if constexpr (Tile::kTurns) {
            arrive_group<2 * kWarpGroupSize>(1 + (number + 1 == Tile::CONSUMERS ? 0 : number + 1));
        }
    }
    __device__ void release(const RingBarriers<Tile::STAGES>& barriers, RingPosition<Tile::STAGES>& at) const {
        if (leads()) barrier_arrive(barriers.empty(at.stage));
        at.advance();
    }

    // Issues s = q @ k^T.
    __device__ void multiply_keys(typename Tile::Scores& s) const {
        using Operand = typename Tile::OperandK;
        const uint64_t q = Operand::descriptor(exchange.q + number * Tile::Q_BYTES);
        const uint64_t k = Operand::descriptor(exchange.k + slot.stage * Tile::K_BYTES);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < Tile::D / 16; ++step) {
            const int box = step * 16 / Tile::BOX, within = step * 16 % Tile::BOX * 2;
            Wgmma<Tile::BLOCK_N>::template multiply<T, true, true>(
                s, q + (box * 64 * Tile::SPAN + within >> 4), k + (box * Tile::BLOCK_N * Tile::SPAN + within >> 4),
                step > 0);
        }
        wgmma_commit();
    }

    // Issues o += p @ v.
    __device__ void multiply_values(typename Tile::Output& o, const typename Tile::Weights& p) const {
        using Operand = typename Tile::OperandV;
        const uint64_t v = Operand::descriptor(exchange.v + slot_v.stage * Tile::V_BYTES);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < Tile::BLOCK_N / 16; ++step) {
            Wgmma<Tile::DV>::template multiply<T, false>(o, p[step], Operand::advance(v, 0, step), true);
        }
        wgmma_commit();
    }

    // --- a value that is not finite, next to rows that do not see it: a weight of 0 would make it NaN

    // Whether a stage has one: the same for all consumers.
    __device__ bool find_nonfinite(const RingPosition<Tile::STAGES>& at) const {
        const uint32_t tile = exchange.v + at.stage * Tile::V_BYTES + thread * 16;
        uint32_t found = 0;
        barrier_wait(exchange.v_barriers.full(at.stage), at.phase);
#pragma unroll 4
        for (int i = 0; i < Tile::V_BYTES; i += kWarpGroupSize * 16) {
            if (Tile::V_BYTES % (kWarpGroupSize * 16) != 0 && i + thread * 16 >= Tile::V_BYTES) break;
            const uint4 words = load_quad(tile + i);
            found |= nonfinite_halves<T>(words.x) | nonfinite_halves<T>(words.y) | nonfinite_halves<T>(words.z) |
                     nonfinite_halves<T>(words.w);
        }
        return sync_group_or<kWarpGroupSize>(kFirstId + number, found);
    }

    // Adds such values of the coming stage to the rows that see them, and leaves zeros for the product.
    __device__ void take_nonfinite(typename Tile::Output& o, const AttentionBlock& work, int row, int block) const {
        const uint32_t tile = exchange.v + slot_v.stage * Tile::V_BYTES;
        const KeyRange visible[2] = {work.visible(params.shape, row), work.visible(params.shape, row + 8)};
#pragma unroll 1
        for (int key = 0; key < Tile::BLOCK_N; ++key) {
            const int at = block * Tile::BLOCK_N + key;
#pragma unroll
            for (int i = 0; i < Tile::DV / 2; i += 4) {
                const int col = i * 2, box = col / Tile::BOX_V, chunk = col % Tile::BOX_V / 8;
                const uint32_t word = load_word(tile + box * Tile::BLOCK_N * Tile::SPAN_V +
                                                swizzled_offset<Tile::SPAN_V>(key, chunk) + thread % 4 * 4);
                const uint32_t halves = nonfinite_halves<T>(word);
                const float2 values = widen_pair<T>(word);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    if (at < visible[half].begin || at >= visible[half].end) continue;
                    if (halves & 0x8000) o[i + half * 2] += values.x;
                    if (halves & 0x80000000) o[i + half * 2 + 1] += values.y;
                }
            }
        }
        sync_group<Tile::CONSUMERS * kWarpGroupSize>(kAllId);
#pragma unroll 1
        for (int i = number * kWarpGroupSize + thread; i < Tile::V_BYTES / 4; i += Tile::CONSUMERS * kWarpGroupSize) {
            const uint32_t word = load_word(tile + i * 4), halves = nonfinite_halves<T>(word) >> 15;
            store_word(tile + i * 4, word & ~(halves * 0xffff));
        }
        fence_async_proxy();
        sync_group<Tile::CONSUMERS * kWarpGroupSize>(kAllId);
    }

    // Writes the rows that exist, and the logarithms of their sums.
    __device__ void store(const AttentionBlock& work, const typename Tile::Output& o, const Softmax& softmax,
                          int row) const {
        const AttentionShape& shape = params.shape;
        const int lane = thread % kWarpSize;
        const int rows = work.rows(shape);
        T* out = static_cast<T*>(params.call.out) + work.batch * shape.out.batch + work.head * shape.out.head;
        float factor[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int at = row + half * 8;
            const float sum = softmax.sum[half];
            factor[half] = sum == 0 ? 0 : 1 / sum;
            if (params.call.lse && lane % 4 == 0 && at < rows) {
                params.call.lse[work.batch * shape.lse_batch + work.head * shape.lse_head + work.q_begin + at] =
                    sum == 0 ? -infinity() : (softmax.base[half] + log2f(sum)) * kLn2;
            }
        }
        store_rows(o, factor, out + work.q_begin * shape.out.row, shape.out.row, row, rows, shape.head_dim_v, lane);
    }
};

template <class Tile>
__device__ inline void run_attention(const AttentionMaps& maps, const AttentionParams& params, int section,
                                     int* taken) {
    extern __shared__ __align__(1024) char shared[];
    const AttentionExchange<Tile> exchange(shared);
    if (threadIdx.x == 0) {
        exchange.init();
        prefetch_tensor_map(maps.q);
        prefetch_tensor_map(maps.k);
        prefetch_tensor_map(maps.v);
    }
    __syncthreads();

    const int group = uniform(threadIdx.x / kWarpGroupSize);
    if (group == 0) {
        release_registers<Tile::PRODUCER_REGISTERS>();
        const AttentionSchedule<false> schedule(params, section, taken);
        if (threadIdx.x == 0) AttentionProducer<Tile>(maps, params, exchange).run(schedule);
    } else {
        claim_registers<Tile::REGISTERS>();
        AttentionConsumer<Tile>(params, exchange, group - 1).run();
    }
}

}  // namespace rawops
