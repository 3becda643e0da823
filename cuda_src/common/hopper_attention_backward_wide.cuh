// The gradients of flash attention on Hopper for heads of up to 256, whose dk and dv of 64 keys take the registers of a
// warpgroup each. So one has what becomes of P and the other what becomes of dS:
//
//   values                                             keys
//   P = exp(k @ q^T * scale - lse)                     dP = v @ dout^T
//   P --> shared memory ---------------------------->  dS = P * (dP - delta)
//   dv += P @ dout                                     dk += dS @ q
//   dq[:, :128] += dS^T @ k  <-- shared memory <-- dS  dq[:, 128:] += dS^T @ k
//
// There is no room to stage dq: registers are added to the float32 sum in global memory, 16 bytes a thread.
#pragma once
#include "hopper_attention_backward.cuh"

namespace rawops {

// The fields are those of HopperAttentionBackward.
template <class T_, int D_, int BLOCK_M_, int STAGES_, bool kInTurn_, int kScore_> struct HopperAttentionBackwardWide {
    using T = T_;
    static constexpr bool kInTurn = kInTurn_, kAddsAside = false;
    static constexpr int kScore = kScore_;
    static constexpr int D = D_, BLOCK_M = BLOCK_M_, BLOCK_N = 64, STAGES = STAGES_, CONSUMERS = 2;
    static constexpr int THREADS = (1 + CONSUMERS) * kWarpGroupSize;
    static constexpr int BOX = 64, BOXES = D / BOX, SPAN = 128;
    using OperandK = WgmmaOperand<true, BOX>;
    using OperandRows = WgmmaOperand<false, BLOCK_M>;
    using OperandKeys = WgmmaOperand<false, BLOCK_N>;
    using Scores = float[BLOCK_M / 2];
    using Gradient = float[D / 2];
    using Weights = uint32_t[BLOCK_M / 16][4];
    static_assert(BLOCK_M == 64, "each warpgroup makes half the columns of dq, of 64 rows");

    static constexpr int K_BYTES = BLOCK_N * D * 2, Q_BYTES = BLOCK_M * D * 2, DS_BYTES = BLOCK_N * BLOCK_M * 2;
    static constexpr int ROWS_BYTES = 2 * BLOCK_M * 4;
    static constexpr int K_AT = 0, V_AT = K_BYTES, Q_AT = 2 * K_BYTES, DOUT_AT = Q_AT + STAGES * Q_BYTES;
    static constexpr int DS_AT = DOUT_AT + STAGES * Q_BYTES, P_AT = DS_AT + DS_BYTES;
    static constexpr int ROWS_AT = P_AT + DS_BYTES, BARRIERS_AT = ROWS_AT + STAGES * ROWS_BYTES;
    static constexpr int WORK_AT = BARRIERS_AT + 2 * RingBarriers<STAGES>::BYTES + 80;  // of k, v, slots and parts
};

// Named barriers of a consumer and the warp that sees to its turns.
constexpr int kTurnId = 6, kAddedId = 8, kTurnThreads = kWarpGroupSize + kWarpSize;

template <class Tile> class BackwardConsumerWide : BackwardGroup<Tile> {
    using Group = BackwardGroup<Tile>;
    using typename Group::Gradient;
    using typename Group::Scores;
    using typename Group::T;
    using typename Group::Weights;
    using Group::exchange, Group::number, Group::thread, Group::slot, Group::leads;

public:
    using Group::Group;

    __device__ void run_values() {
        this->take([&](const AttentionBlock& work) {
            const int first_key = work.tile * Tile::BLOCK_N;
            Gradient dv;
            Scores s;
            const bool is_seen =
                this->pass(work, first_key, [&](const QueryTile& queries) { step_values(dv, s, work, queries); });
            if (!is_seen) this->clear(dv);
            this->store_dv(dv, work, this->own_key(first_key));
        });
    }

    __device__ void run_keys() {
        this->take([&](const AttentionBlock& work) {
            const int first_key = work.tile * Tile::BLOCK_N;
            Gradient dk;
            Scores ds;
            const bool is_seen =
                this->pass(work, first_key, [&](const QueryTile& queries) { step_keys(dk, ds, queries); });
            if (!is_seen) this->clear(dk);
            this->store_dk(dk, work, this->own_key(first_key));
        });
    }

private:
    // Named barriers of both warpgroups.
    static constexpr int kWeightsId = 1, kGradientsId = 4, kBoth = Tile::CONSUMERS * kWarpGroupSize;

    __device__ uint32_t ds() const { return exchange.shared + Tile::DS_AT; }
    __device__ uint32_t weights_at(int step) const {
        return exchange.shared + Tile::P_AT + (step * kWarpGroupSize + thread) * 16;
    }

    __device__ void step_values(Gradient& dv, Scores& s, const AttentionBlock& work, const QueryTile& queries) {
        Weights p, by_score;
        if (queries.begins) {
            multiply_scores(s, slot);
            wgmma_wait<0>();
            hold(s);
        }
        this->make_weights(s, p, by_score, work, queries);
#pragma unroll
        for (int step = 0; step < Tile::BLOCK_M / 16; ++step) store_quad(weights_at(step), by_score[step]);
        this->sync();
        if (leads()) barrier_arrive(exchange.q_barriers.empty(slot.stage));
        arrive_group<kBoth>(kWeightsId);
        barrier_wait(exchange.dout_barriers.full(slot.stage), slot.phase);
        this->multiply_rows(dv, p, this->dout(), queries.accumulate);
        sync_group<kBoth>(kGradientsId);
        add_queries(queries.place, [&] {
            hold(dv);
            if (leads()) barrier_arrive(exchange.dout_barriers.empty(slot.stage));
            multiply_scores(s, queries.goes_on ? after(slot) : slot, queries.goes_on);
        });
        hold(s);
    }

    __device__ void step_keys(Gradient& dk, Scores& ds_values, const QueryTile& queries) {
        Weights by_score, ds_narrow;
        if (queries.begins) {
            multiply_derivatives(ds_values, slot);
            wgmma_wait<0>();
            hold(ds_values);
        }
        this->sync();
        if (leads()) barrier_arrive(exchange.dout_barriers.empty(slot.stage));
        barrier_wait(exchange.q_barriers.full(slot.stage), slot.phase);
        sync_group<kBoth>(kWeightsId);
#pragma unroll
        for (int step = 0; step < Tile::BLOCK_M / 16; ++step) {
            const uint4 four = load_quad(weights_at(step));
            by_score[step][0] = four.x, by_score[step][1] = four.y;
            by_score[step][2] = four.z, by_score[step][3] = four.w;
        }
        this->differentiate(ds_values, by_score);
        narrow_weights<T>(ds_narrow, ds_values);
        this->put(ds_narrow, ds(), 0);
        this->multiply_rows(dk, ds_narrow, this->q(), queries.accumulate);
        // Whose weights come next has read dS, and so has this one: one tile of each is enough.
        sync_group<kBoth>(kGradientsId);
        add_queries(queries.place, [&] {
            hold(dk);
            if (leads()) barrier_arrive(exchange.q_barriers.empty(slot.stage));
            multiply_derivatives(ds_values, queries.goes_on ? after(slot) : slot, queries.goes_on);
        });
        hold(ds_values);
    }

    // Issues k @ q^T, and v @ dout^T. Where there is no next tile, of what happens to lie there, since a condition
    // costs registers.
    __device__ void multiply_scores(Scores& s, const RingPosition<Tile::STAGES>& at, bool exists = true) const {
        if (exists) barrier_wait(exchange.q_barriers.full(at.stage), at.phase);
        this->multiply_keys(s, exchange.shared + Tile::K_AT, exchange.shared + Tile::Q_AT + at.stage * Tile::Q_BYTES);
    }
    __device__ void multiply_derivatives(Scores& ds, const RingPosition<Tile::STAGES>& at, bool exists = true) const {
        if (exists) barrier_wait(exchange.dout_barriers.full(at.stage), at.phase);
        const uint32_t dout = exchange.shared + Tile::DOUT_AT + at.stage * Tile::Q_BYTES;
        this->multiply_keys(ds, exchange.shared + Tile::V_AT, dout);
    }

    // Makes the warpgroup's half of dq's columns, one box of them after the other, for want of registers, and adds them
    // to the sum in global memory. `release` comes when the product before these is complete.
    template <class Release> __device__ void add_queries(int place, Release release) const {
        constexpr int BOXES = Tile::BOXES / Tile::CONSUMERS, BOX_FLOATS = Tile::BLOCK_M * Tile::BOX;
        float* to = this->backward.dq + (int64_t(place) * Tile::BOXES + number * BOXES) * BOX_FLOATS + thread * 4;
#pragma unroll
        for (int box = 0; box < BOXES; ++box) {
            float part[Tile::BOX / 2];
            this->template multiply_part<Tile::BOX>(part, ds(), 0, number * BOXES + box);
            if (box == 0) {
                wgmma_wait<1>();
                release();
                if constexpr (Tile::kInTurn) sync_group<kTurnThreads>(kTurnId + number);
            }
            if (box == 0) wgmma_wait<1>();
            else wgmma_wait<0>();
            hold(part);
#pragma unroll
            for (int i = 0; i < Tile::BOX / 2; i += 4) {
                add_global(to + box * BOX_FLOATS + i * kWarpGroupSize, four(&part[i]));
            }
        }
        if constexpr (Tile::kInTurn) arrive_group<kTurnThreads>(kAddedId + number);
    }
};

// Of the warps that see to additions, this one does for a consumer: it gives the turn, and ends it after the additions.
template <class Tile>
__device__ inline void keep_turns(const AttentionParams& params, const AttentionBackwardParams& backward,
                                  const BackwardExchange<Tile>& exchange, int which) {
    serve_additions(params, backward, exchange, [&](int place, int tile) {
        int* turn = backward.turns + 2 * place + which;
        const bool leads = threadIdx.x % kWarpSize == 0;
        if (leads) await_turn(turn, tile);
        __syncwarp();
        arrive_group<kTurnThreads>(kTurnId + which);
        sync_group<kTurnThreads>(kAddedId + which);
        if (leads) end_turn(turn);
        __syncwarp();
    });
}

}  // namespace rawops
