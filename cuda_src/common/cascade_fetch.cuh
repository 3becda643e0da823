// What a block of a cascade on Hopper keeps in shared memory for what sequences have of their own, and the warp that
// fetches it from pages.
#pragma once
#include "cascade_problem.cuh"
#include "hopper_attention_tile.cuh"
#include "launches.cuh"

namespace rawops {

template <class T_, int D_, int STAGES_> struct OwnTile {
    using T = T_;
    static constexpr int D = D_, STAGES = STAGES_;
    static constexpr int TOKENS = 64, ROWS = 8;
    static constexpr int BOX = 64, BOXES = D / BOX;
    static constexpr int ATOM = 8 * BOX * 2, ROWS_STEP = BOXES * ATOM;  // 8 tokens of a box, and of all
    static constexpr int K_BYTES = TOKENS * D * 2, STAGE_BYTES = 2 * K_BYTES;
    using OperandK = WgmmaOperand<true, BOX, 128, 2, ROWS_STEP>;
    using OperandV = WgmmaOperand<false, TOKENS, 128, 2, ROWS_STEP, ATOM>;
    using OperandRows = WgmmaOperand<true, BOX, 128>;  // queries, and weights
    static constexpr int PLACES = 3;  // of items
    static constexpr int Q_BYTES = BOXES * ATOM;
    static constexpr int Q_AT = STAGES * STAGE_BYTES, P_AT = Q_AT + PLACES * Q_BYTES, BARRIERS_AT = P_AT + ATOM;
    static_assert(D % BOX == 0, "whole boxes");
};

// One KV head of one sequence; no length: the end.
struct OwnItem {
    int query, head, length;
};

// What the warps that multiply tell each other.
struct OwnMeeting {
    float2 top[2][4][4];  // by parity of the stage, warp, and pair of rows
    float2 sum[2][4][4];  // by parity of the item
};

template <class Tile> struct OwnExchange {
    uint32_t ring, q, p;
    RingBarriers<Tile::STAGES> barriers;
    WorkRing<OwnItem, Tile::PLACES> work;
    OwnMeeting& meeting;

    static constexpr int ITEMS_AT =
        Tile::BARRIERS_AT + RingBarriers<Tile::STAGES>::BYTES + RingBarriers<Tile::PLACES>::BYTES;
    static constexpr int MEETING_AT = ITEMS_AT + ceil_div(Tile::PLACES * int(sizeof(OwnItem)), 16) * 16;

    __device__ explicit OwnExchange(char* shared)
        : ring(shared_address(shared)),
          q(ring + Tile::Q_AT),
          p(ring + Tile::P_AT),
          barriers{ring + Tile::BARRIERS_AT},
          work{reinterpret_cast<OwnItem*>(shared + ITEMS_AT), {barriers.base + barriers.BYTES}},
          meeting(*reinterpret_cast<OwnMeeting*>(shared + MEETING_AT)) {}

    // Rows of heads that a group has not stay zero.
    __device__ void clear_queries() const {
        const uint32_t zeros[4] = {};
        for (int i = threadIdx.x * 16; i < Tile::PLACES * Tile::Q_BYTES; i += blockDim.x * 16) store_quad(q + i, zeros);
        fence_async_proxy();
    }

    __device__ void init() const {
        barriers.init(kWarpGroupSize / kWarpSize);
        work.init(1);
    }
};

// The warp that fetches.
template <class Tile> class OwnProducer {
public:
    __device__ OwnProducer(const AttentionMaps& maps_, const CascadeParams& params_, const OwnExchange<Tile>& exchange_)
        : maps(maps_), params(params_), exchange(exchange_), lane(threadIdx.x % kWarpSize) {}

    // Whoever is free takes the next item. Pages are looked up one stage ahead.
    __device__ void run() {
        await_launch_before();
        item = blockIdx.x;
        length = length_of(item);
        page = look_up(item, 0);
        RingPosition<Tile::PLACES> place;
        const int items = params.batch * params.kv_heads;
#pragma unroll 1
        while (item < items) {
            const int head = item % params.kv_heads;
            OwnItem& work = exchange.work.next(place);
            if (lane == 0) work = {item / params.kv_heads, head, length};
            __syncwarp();
            const uint32_t q = exchange.q + place.stage * Tile::Q_BYTES;
            put(place);
            int ahead = look_up(item, Tile::TOKENS);
            if (length > 0) load(0, length, page, head, q);
            const int next = take();  // after the first copies: it takes long
#pragma unroll 1
            for (int token = Tile::TOKENS; token < length; token += Tile::TOKENS) {
                page = ahead;
                ahead = look_up(item, token + Tile::TOKENS);
                load(token, length, page, head);
            }
            item = next;
            length = length_of(item);
            page = look_up(item, 0);
        }
        OwnItem& work = exchange.work.next(place);
        if (lane == 0) work = {0, 0, -1};
        __syncwarp();
        put(place);
    }

private:
    const AttentionMaps& maps;
    const CascadeParams& params;
    const OwnExchange<Tile>& exchange;
    const int lane;
    RingPosition<Tile::STAGES> slot;
    bool is_first_round = true;
    int item = 0, length = 0, page = -1;  // page: of the lane's box of the next stage

    __device__ void put(RingPosition<Tile::PLACES>& place) const {
        if (lane == 0) barrier_arrive(exchange.work.barriers.full(place.stage));
        place.advance();
    }

    __device__ int length_of(int item) const {
        const int b = item / params.kv_heads;
        return b < params.batch ? clamp(__ldg(params.seq_lens + b) - params.skipped, 0, params.capacity) : 0;
    }

    // A lane has one box of a stage: of keys, or the next eight lanes of values.
    __device__ int box_rows() const { return min_of(1 << params.page_shift, Tile::TOKENS); }
    // Of any page that the table has room for: it is seen later whether there is one.
    __device__ int look_up(int item, int token) const {
        token += lane % 8 * box_rows();
        const int b = item / params.kv_heads;
        if (b >= params.batch || token >= params.capacity) return -1;
        return __ldg(params.block_table + b * params.table_stride + (token >> params.page_shift));
    }

    __device__ int take() const {
        const int taken = lane == 0 ? atomicAdd(params.taken, 1) : 0;
        return gridDim.x + __shfl_sync(~0u, taken, 0);
    }

    // Where the block has many common keys, which are through later, they get more of the memory at first: the last
    // stage of the first round is asked for when the first one has been used.
    __device__ void give_way() {
        constexpr int MANY = 512;
        is_first_round = false;
        if (params.skipped >= MANY * params.parts) barrier_wait(exchange.barriers.empty(0), 0);
    }

    // A stage of an item; with its first one, its queries to `q`.
    __device__ void load(int token, int length, int page, int head, uint32_t q = 0) {
        const int row = lane % 8 * box_rows(), in_page = (1 << params.page_shift) - 1;
        const bool exists =
            token + row < length && static_cast<uint32_t>(page) < static_cast<uint32_t>(params.num_pages);
        // or one far before the first, which TMA reads as zeros
        const int group = exists ? page * params.page_groups + ((token + row & in_page) >> 3) : -256;
        if (is_first_round && slot.stage == Tile::STAGES - 1) give_way();
        barrier_wait(exchange.barriers.empty(slot.stage), slot.phase ^ 1);
        const uint32_t full = exchange.barriers.full(slot.stage);
        if (lane == 0) barrier_arrive_expect(full, Tile::STAGE_BYTES + (q ? params.group * Tile::D * 2 : 0));
        __syncwarp();
        if (q && lane < Tile::BOXES) {
            const TensorCoordinates from = {lane * Tile::BOX, head * params.group, item / params.kv_heads, 0, 0};
            tma_load(q + lane * Tile::ATOM, maps.q, from, full);
        }
        if (lane < 16 && row < Tile::TOKENS) {
            const uint32_t to = exchange.ring + slot.stage * Tile::STAGE_BYTES + row * Tile::D * 2;
            if (lane < 8) tma_load_once(to, maps.k, {0, 0, 0, group, head}, full);
            else tma_load_once(to + Tile::K_BYTES, maps.v, {0, 0, 0, group, head}, full);
        }
        __syncwarp();
        slot.advance();
    }
};

}  // namespace rawops
