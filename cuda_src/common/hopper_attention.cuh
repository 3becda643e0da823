// Flash attention on Hopper, a block's whole run.
//
//   warpgroup 0, a thread     TMA: k, and v unless a warp does --> rings of stages
//                a thread     plans what comes next; TMA: q --> its tile
//                a warp       TMA: a tile's results --> out, where they have room in shared memory
//                a warp       with steps that are short: TMA: v --> a ring, and a search there for what is not finite
//   the other warpgroups      wgmma: S = q @ k^T, softmax in registers, O += P @ v, O / l --> q's place or out;
//                             64 rows each
//
// A consumer issues S of the next keys before O += P @ v of these, so that its softmax runs beside the latter; S of the
// next tile, too, so that O is written while it is under way. Consumers take turns at issuing, so that one multiplies
// while another is at its softmax. Keys come from last to first: the masked blocks of a causal tile, and those that are
// not whole, are the first ones.
#pragma once
#include "dropout.cuh"
#include "hopper_attention_copies.cuh"
#include "hopper_attention_rows.cuh"
#include "launches.cuh"

namespace rawops {

// Of values of 8 bits; hopper_attention_8bit.cuh.
template <class Tile> __device__ void transpose_values(const AttentionExchange<Tile>& exchange);

// A consumer warpgroup at work on one tile after the other.
template <class Tile> class AttentionConsumer {
public:
    using T = typename Tile::T;
    // Weights of e4m3 end at 448.
    using Softmax = OnlineSoftmax<Tile::kBytes ? 2 : 8, Tile::kBytes ? 4 : 0, Tile::kBytes ? 448 : 4096>;

    __device__ AttentionConsumer(const AttentionParams& params_, const AttentionExchange<Tile>& exchange_, int number_)
        : params(params_), exchange(exchange_), number(number_), thread(threadIdx.x % kWarpGroupSize) {
        if (Tile::kTurns && number == Tile::CONSUMERS - 1) arrive_group<2 * kWarpGroupSize>(1);  // the first turn
    }

    // Takes tiles until the producer has no more.
    __device__ void run() {
        RingPosition<Tile::PLACES> slot_work;
        await_launch_before();
#pragma unroll 1
        while (true) {
            const AttentionTask& work = exchange.work.take(slot_work);
            if (uniform(work.tile) < 0) break;
            if (uniform(work.has_keys())) {
                run_on(slot_work);
            } else {
                typename Tile::Output o;
                set_zero(o);
                store(work, o, Softmax());
                release_work(slot_work);
            }
        }
    }

private:
    // Works through tiles that have keys, up to one that has none. The scores of a tile's first keys are made beside
    // the last product with values of the tile before it.
    __device__ void run_on(RingPosition<Tile::PLACES>& slot_work) {
        typename Tile::Scores s;
        typename Tile::Weights p;
        typename Tile::Output o;
        Softmax softmax;
        int block = uniform(exchange.work.at(slot_work).keys.end) - 1;
        BlockNotes notes = exchange.work.at(slot_work).notes_of(block);
        bool is_tainted = begin(s, p, softmax, exchange.work.at(slot_work), block, notes);  // or may be: `confirm`
        bool has_sum = false;  // whether there is anything in o
#pragma unroll 1
        while (true) {
            bool turns_over = notes.is_last();
            if (is_tainted) is_tainted = confirm();
            if (is_tainted) {
                if (!has_sum) set_zero(o);
                take_nonfinite(o, exchange.work.at(slot_work), block);
                has_sum = true;
            } else if (kIsBare) {
                run_plain(s, o, p, softmax, scale_of(exchange.work.at(slot_work)), notes.plain(), notes.ends_plain(),
                          has_sum);
                block -= notes.plain();
                turns_over = notes.ends_plain();
            }
            int end = block;
            if (turns_over) end = uniform(exchange.work.take(after(slot_work)).keys.end);
            if (end == 0 && turns_over) break;  // no tile after this one, or none with keys
            // All that there is to know of the next block is asked for before the products, which do not wait for it.
            const AttentionTask& work = exchange.work.at(turns_over ? after(slot_work) : slot_work);
            block = end - 1;
            notes = work.notes_of(block);
            if (turns_over) await_q(work);
            begin_step(s, o, p, has_sum);
            has_sum = !turns_over;
            is_tainted = notes.is_cut();
            if (!kConfirms && is_tainted) is_tainted = uniform(find_nonfinite(after(slot_v)));
            wgmma_wait<1>();
            hold(s);
            const int place = place_q(before(slot_q));  // of the last tile's queries
            release_keys(notes.is_last());
            if (turns_over) {
                wgmma_wait<0>();
                hold(o);
                finish(slot_work, o, softmax, place);
                softmax = Softmax();
            }
            if (!kPlain || !notes.is_plain()) finish_scores(s, work, block);
            finish_step(s, o, p, softmax, scale_of(work), has_sum);
            if constexpr (kDrops) drop(p, work, block);
        }
        multiply_values(o, p, has_sum);
        wgmma_wait<0>();
        hold(o);
        release_values();
        finish(slot_work, o, softmax, place_q(before(slot_q)));
    }

    // Blocks that all rows see, with nothing to be asked between one and the next: most of the time goes here. Nobody
    // looks for a maximum: weights are relative to the bases as they are, which nearly always is right; if not, scores
    // are made again. `ends`: the last block is the tile's; `has_sum`: o holds something, or will then.
    __device__ void run_plain(typename Tile::Scores& s, typename Tile::Output& o, typename Tile::Weights& p,
                              Softmax& softmax, float scale, int count, bool ends, bool& has_sum) {
        float shift[2] = {softmax.shift(0), softmax.shift(1)};
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            begin_step(s, o, p, has_sum);
            has_sum = true;
            wgmma_wait<1>();
            hold(s);
            if constexpr (!kGuesses) {
                release_keys(ends && i + 1 == count);
                finish_step(s, o, p, softmax, scale, true);
                continue;
            }
            float total[2];
            const bool fits = Softmax::weigh(s, scale, shift, total);
            const bool is_right = __all_sync(~0u, !sync_group_or<kWarpGroupSize>(kFirstId + number, !fits));
            wgmma_wait<0>();
            hold(o);
            release_values();
            if constexpr (Tile::kBytes) AttentionAtom<T>::narrow(p, s);  // here, half of it is done before the wait
            if (is_right) {
                softmax.sum[0] += total[0], softmax.sum[1] += total[1];
            } else {
                float correction[2];
                const float lag[2] = {Softmax::lag_after(total[0]), Softmax::lag_after(total[1])};
                multiply_keys(s);
                wgmma_wait<0>();
                hold(s);
                if (softmax.add(s, scale, correction, lag)) rescale(o, correction);
                if constexpr (Tile::kBytes) AttentionAtom<T>::narrow(p, s);
                shift[0] = softmax.shift(0), shift[1] = softmax.shift(1);
            }
            release_keys(ends && i + 1 == count);
            if constexpr (!Tile::kBytes) AttentionAtom<T>::narrow(p, s);
        }
    }

    // Issues the scores of the next keys and the product of these weights with their values.
    __device__ void begin_step(typename Tile::Scores& s, typename Tile::Output& o, const typename Tile::Weights& p,
                               bool has_sum) const {
        await_keys();
        await_turn();
        multiply_keys(s);
        multiply_values(o, p, has_sum);
        end_turn();
    }

    // Turns scores into weights, beside the product with earlier ones, and then brings the sum of these, if it is of
    // the same tile, to the same base.
    __device__ void finish_step(typename Tile::Scores& s, typename Tile::Output& o, typename Tile::Weights& p,
                                Softmax& softmax, float scale, bool has_sum) {
        float correction[2];
        const bool moves = softmax.add(s, scale, correction);
        wgmma_wait<0>();
        hold(o);
        release_values();
        if (moves && has_sum) rescale(o, correction);
        AttentionAtom<T>::narrow(p, s);
    }

    static __device__ void rescale(typename Tile::Output& o, const float (&correction)[2]) {
#pragma unroll
        for (int i = 0; i < Tile::DV / 2; ++i) o[i] *= correction[i / 2 % 2];
    }

    // The first block of the first tile: its weights. Tells whether its values are to be looked at one by one.
    __device__ bool begin(typename Tile::Scores& s, typename Tile::Weights& p, Softmax& softmax,
                          const AttentionTask& work, int block, BlockNotes notes) {
        float correction[2];
        await_q(work);
        await_keys();
        multiply_keys(s);
        bool is_tainted = notes.is_cut();
        if (!kConfirms && is_tainted) is_tainted = uniform(find_nonfinite(slot_v));
        wgmma_wait<0>();
        hold(s);
        release_keys(notes.is_last());
        if (!kPlain || !notes.is_plain()) finish_scores(s, work, block);
        softmax.add(s, scale_of(work), correction);
        AttentionAtom<T>::narrow(p, s);
        if constexpr (kDrops) drop(p, work, block);
        return is_tainted;
    }

    __device__ void await_keys() const { barrier_wait(exchange.k_barriers.full(slot_k.stage), slot_k.phase); }
    // Waits for the queries of a tile. What follows a packed sequence in its last tile becomes zeros: whether the base
    // of some row of a warp moves decides how the others are rounded.
    __device__ void await_q(const AttentionTask& work) const {
        const int place = place_q(slot_q);
        barrier_wait(exchange.q_barriers.full(place), slot_q.phase);
        if (!params.call.cu_seqlens_q) return;
        const int rows = max_of(work.rows(params.shape) - work.tile * Tile::BLOCK_M - number * 64, 0);
        if (rows >= 64) return;
        constexpr int CHUNKS = Tile::SPAN / 16, BOXES = Tile::Q_BYTES / (64 * Tile::SPAN);
        constexpr uint32_t kZeros[4] = {};
#pragma unroll 1
        for (int i = rows * CHUNKS + thread; i < 64 * CHUNKS; i += kWarpGroupSize) {
#pragma unroll 1
            for (int box = 0; box < BOXES; ++box) {
                store_quad(exchange.q + place * Tile::Q_BYTES + box * 64 * Tile::SPAN + i * 16, kZeros);
            }
        }
        fence_async_proxy();
        sync();
    }

    // Writes a tile, whose queries were at `place`, and lets go of it.
    __device__ void finish(RingPosition<Tile::PLACES>& slot_work, const typename Tile::Output& o, Softmax& softmax,
                           int place) const {
        const AttentionTask& work = exchange.work.at(slot_work);
        softmax.complete();
        if constexpr (Tile::kStages) {
            const float factor[2] = {factor_of(work, softmax.sum[0]), factor_of(work, softmax.sum[1])};
            stage(o, factor, exchange.q + place * Tile::Q_BYTES);
            sync();
            barrier_arrive_if(leads(), exchange.staged_barriers.full(place));
            if (params.call.lse) {
                store_lse(work, softmax);
                sync();
            }
            exchange.work.release(slot_work, leads());
        } else {
            store(work, o, softmax);
            release_work(slot_work);
        }
    }

    // Puts results where the queries were.
    __device__ void stage(const typename Tile::Output& o, const float (&factor)[2], uint32_t to) const {
        using Out = typename Tile::Out;
        const int lane = thread % kWarpSize, row = thread / kWarpSize * 16 + lane % 16;
#pragma unroll
        for (int i = 0; i < Tile::DV / 2; i += 8) {
            const int box = i * 2 / Tile::BOX_V, chunk = i * 2 % Tile::BOX_V / 8 + lane / 16;
            uint32_t packed[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                packed[j] = narrow_pair<Out>(o[i + j * 2] * factor[j % 2], o[i + j * 2 + 1] * factor[j % 2]);
            }
            stmatrix(to + box * 64 * Tile::SPAN_V + swizzled_offset<Tile::SPAN_V>(row, chunk), packed);
        }
        fence_async_proxy();
    }

    static __device__ void set_zero(typename Tile::Output& o) {
#pragma unroll
        for (int i = 0; i < Tile::DV / 2; ++i) o[i] = 0;
    }

    // The first of the thread's two rows.
    __device__ int row_of(const AttentionBlock& work) const {
        return work.tile * Tile::BLOCK_M + number * 64 + thread / kWarpSize * 16 + thread % kWarpSize / 4;
    }

    __device__ float scale_of(const AttentionTask& work) const {
        return Tile::kBytes ? work.scale : kPlain ? params.shape.scale : 1.0f;
    }

    // Puts zeros in the place of a block's weights that dropout takes.
    __device__ void drop(typename Tile::Weights& p, const AttentionTask& work, int block) const {
        const Dropout dropout(params.shape, work.batch, work.head);
        const int row = work.tile * Tile::BLOCK_M + number * 64 + thread / kWarpSize * 16;
#pragma unroll
        for (int step = 0; step < Tile::BLOCK_N / 16; ++step) {
            const DropoutNumbers numbers =
                dropout.of_queries(row, block * Tile::BLOCK_N + step * 16, thread % kWarpSize);
#pragma unroll
            for (int part = 0; part < 4; ++part) p[step][part] &= numbers.mask(part);
        }
    }

    // Scores of a block out of its products, and its mask.
    __device__ void finish_scores(typename Tile::Scores& s, const AttentionTask& work, int block) const {
        const int column = block * Tile::BLOCK_N + thread % 4 * 2;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = row_of(work) + half * 8;
            const KeyRange visible = Tile::visible(params.shape, work, row);
            if constexpr (kPlain) {
                mask_scores(s, half, visible, column);
            } else {  // the last row stands for those that do not exist
                const int existing = min_of(row, work.rows(params.shape) - 1);
                const RowScore<T, Tile::kScore> score(params, work, existing, work.head);
                make_scores(s, half, score, visible, column);
            }
        }
    }

    static constexpr bool kDrops = (Tile::kScore & kScoreDropout) != 0;
    static constexpr bool kPlain = (Tile::kScore & ~kScoreDropout) == 0;
    static constexpr bool kGuesses = Tile::DV <= 128;  // wider rows leave no registers for scores made again
    static constexpr bool kConfirms = Tile::kSearches || Tile::kBytes;  // that values are tainted; others have searched
    static constexpr bool kIsBare = Tile::kScore == 0;  // nothing becomes of scores that all rows see, nor of weights

    const AttentionParams& params;
    const AttentionExchange<Tile>& exchange;
    // Named barriers: the turns are 1 to 3.
    static constexpr int kAllId = 4, kFirstId = 5;

    const int number, thread;
    RingPosition<Tile::K_STAGES> slot_k;  // of the keys that come next
    RingPosition<Tile::STAGES> slot_v;    // of the values that come next
    RingPosition<Tile::Q_SLOTS> slot_q;

    __device__ int place_q(const RingPosition<Tile::Q_SLOTS>& at) const { return at.stage * Tile::CONSUMERS + number; }

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
    __device__ void release_work(RingPosition<Tile::PLACES>& at) const {
        sync();
        exchange.work.release(at, leads());
    }
    // Lets go of a stage, in all blocks that fill it.
    __device__ void release(uint32_t empty) const {
        const int rank = thread / kWarpSize;
        if constexpr (Tile::CLUSTER == 1) barrier_arrive_if(leads(), empty);
        else barrier_arrive_at_rank_if(rank < Tile::CLUSTER && thread % kWarpSize == 0, empty, rank);
    }
    __device__ void release_values() {
        release(exchange.v_barriers.empty(slot_v.stage));
        slot_v.advance();
    }
    __device__ void release_keys(bool with_q) {
        release(exchange.k_barriers.empty(slot_k.stage));
        slot_k.advance();
        if (!Tile::kStages) barrier_arrive_if(with_q && leads(), exchange.q_barriers.empty(place_q(slot_q)));
        if (with_q) slot_q.advance();
    }

    // Issues s = q @ k^T.
    __device__ void multiply_keys(typename Tile::Scores& s) const {
        const uint64_t q = Tile::OperandQ::descriptor(exchange.q + place_q(slot_q) * Tile::Q_BYTES);
        const uint64_t k = Tile::OperandK::descriptor(exchange.k + slot_k.stage * Tile::K_BYTES);
        wgmma_fence();
#pragma unroll
        for (int byte = 0; byte < Tile::D * Tile::ITEM; byte += 32) {
            const int box = byte / Tile::SPAN, within = byte % Tile::SPAN;
            AttentionAtom<T>::template multiply_keys<Tile::BLOCK_N>(
                s, q + (box * 64 * Tile::SPAN + within >> 4), k + (box * Tile::BOX_STEP + within >> 4), byte > 0);
        }
        wgmma_commit();
    }

    // Issues o += p @ v, or o = p @ v without a sum.
    __device__ void multiply_values(typename Tile::Output& o, const typename Tile::Weights& p, bool has_sum) const {
        using Operand = typename Tile::OperandV;
        const uint64_t v = Operand::descriptor(exchange.v + slot_v.stage * Tile::V_BYTES);
        barrier_wait(exchange.v_barriers.full(slot_v.stage), slot_v.phase);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < Tile::BLOCK_N * Tile::ITEM / 32; ++step) {
            AttentionAtom<T>::template multiply_values<Tile>(o, p[step], v, step, step > 0 || has_sum);
        }
        wgmma_commit();
    }

    // --- a value that is not finite, next to rows that do not see it: a weight of 0 would make it NaN

    // Whether a stage has one, or what may be one: the same for all consumers.
    __device__ bool find_nonfinite(const RingPosition<Tile::STAGES>& at) const {
        barrier_wait(exchange.v_barriers.full(at.stage), at.phase);
        const bool found = is_suspect<Tile, kWarpGroupSize>(exchange.v + at.stage * Tile::V_BYTES, thread);
        return sync_group_or<kWarpGroupSize>(kFirstId + number, found);
    }
    // The same of the coming stage, where warps of warpgroup 0 search it.
    __device__ bool confirm() const {
        return !kConfirms || uniform(exchange.found(slot_v));
    }

    // Adds such values of the coming stage to the rows that see them, and leaves zeros for the product.
    __device__ void take_nonfinite(typename Tile::Output& o, const AttentionBlock& work, int block) const {
        const int row = row_of(work);
        const uint32_t tile = exchange.v + slot_v.stage * Tile::V_BYTES;
        const KeyRange visible[2] = {Tile::visible(params.shape, work, row),
                                     Tile::visible(params.shape, work, row + 8)};
#pragma unroll 1
        for (int key = 0; key < Tile::BLOCK_N; ++key) {
            const int at = block * Tile::BLOCK_N + key;
#pragma unroll
            for (int i = 0; i < Tile::DV / 2; i += 4) {
                const float2 values = AttentionAtom<T>::template nonfinite_pair<Tile>(tile, key, i * 2, thread);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    if (at < visible[half].begin || at >= visible[half].end) continue;
                    o[i + half * 2] += values.x;
                    o[i + half * 2 + 1] += values.y;
                }
            }
        }
        sync_group<Tile::CONSUMERS * kWarpGroupSize>(kAllId);
#pragma unroll 1
        for (int i = number * kWarpGroupSize + thread; i < Tile::V_BYTES / 4; i += Tile::CONSUMERS * kWarpGroupSize) {
            const uint32_t word = load_word(tile + i * 4);
            store_word(tile + i * 4, word & ~nonfinite_mask<T>(word));
        }
        fence_async_proxy();
        sync_group<Tile::CONSUMERS * kWarpGroupSize>(kAllId);
    }

    // Writes the rows that exist.
    __device__ void store(const AttentionTask& work, const typename Tile::Output& o, const Softmax& softmax) const {
        const AttentionShape& shape = params.shape;
        const int row = row_of(work), rows = work.rows(shape);
        auto* out = static_cast<typename Tile::Out*>(params.call.out) + work.split * shape.out_split +
                    work.batch * shape.out.batch + work.head * shape.out.head + work.q_begin * shape.out.row;
        store_lse(work, softmax);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int at = row + half * 8;
            const int query = Tile::query(shape, at);
            const int head = Tile::kPaged ? at - query * shape.packed : 0;  // from the first of the tile
            AttentionAtom<T>::store(o, half, factor_of(work, softmax.sum[half]),
                                    out + query * shape.out.row + head * shape.out.head,
                                    at < rows ? shape.head_dim_v : 0, thread % kWarpSize);
        }
    }

    // What a row with this sum of weights is to be multiplied by.
    __device__ float factor_of(const AttentionTask& work, float sum) const {
        const float gain = Tile::kBytes ? work.scale_v : kDrops ? params.shape.dropout.scale : 1.0f;
        return sum == 0 ? 0 : __fdividef(gain, sum);
    }

    // Writes the logarithms of the rows' sums.
    __device__ void store_lse(const AttentionTask& work, const Softmax& softmax) const {
        if (!params.call.lse) return;
        const AttentionShape& shape = params.shape;
        const int row = row_of(work), rows = work.rows(shape);
        const int64_t lse_at = work.split * shape.lse_split + work.batch * shape.lse_batch +
                               work.head * shape.lse_head + work.q_begin;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int at = row + half * 8, query = Tile::query(shape, at);
            const int head = Tile::kPaged ? at - query * shape.packed : 0;
            const float sum = softmax.sum[half];
            if (thread % 4 == 0 && at < rows) {
                params.call.lse[lse_at + head * shape.lse_head + query] =
                    sum == 0 ? -infinity() : (softmax.base[half] - Softmax::kGain + log2_fast(sum)) * kLn2;
            }
        }
    }
};

template <class Tile, class Producer = AttentionProducer<Tile>, class Scales = NoScales>
__device__ inline void run_attention(const AttentionMaps& maps, const AttentionParams& params, int section, int* taken,
                                     const Scales& scales = Scales(), const TensorMap* out_map = nullptr) {
    extern __shared__ __align__(1024) char shared[];
    start_next_launch();
    const AttentionExchange<Tile> exchange(shared);
    if (threadIdx.x == 0) {
        exchange.init();
        prefetch_tensor_map(maps.q);
        prefetch_tensor_map(maps.k);
        prefetch_tensor_map(maps.v);
        if (Tile::kStages) prefetch_tensor_map(*out_map);
    }
    __syncthreads();

    const int group = uniform(threadIdx.x / kWarpGroupSize);
    if (group == 0) {
        release_registers<Tile::PRODUCER_REGISTERS>();
        const AttentionSchedule<false> schedule(params, section, taken);
        if (threadIdx.x < Producer::THREADS) Producer(maps, params, exchange).run(schedule, scales);
        if (Tile::kBytes && threadIdx.x >= 2 * kWarpSize) transpose_values<Tile>(exchange);
        if constexpr (Tile::kStages) {
            if (threadIdx.x / kWarpSize == 2) store_staged<Tile>(*out_map, params, exchange);
        }
    } else {
        claim_registers<Tile::REGISTERS>();
        AttentionConsumer<Tile>(params, exchange, group - 1).run();
    }
}

}  // namespace rawops
