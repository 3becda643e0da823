// Attention of queries over keys and values in pages: decoding, several queries a sequence, or both in one launch.
//
// Each block takes one range of the line of tiles that paged_schedule.cuh makes of all sequences and KV heads. The
// query heads of a KV head are the rows of one MMA, so keys and values are read once for all of them. The warps of a
// block take tiles in turn, each through a ring of its own, which runs ahead into the block's next items; they meet
// only at the end of an item. An item that several blocks share is put together by the last of them to finish, always
// in the same order.
#include "common/launches.cuh"
#include "common/paged_finish.cuh"

namespace rawops {

template <class T_, class Stored, int HEAD_DIM_, int ACCESS, int ROWS_, int WARPS_, int STAGES_, int BLOCKS_,
          bool kRagged_>
struct PagedShape {
    using T = T_;
    using Tile = TokenTile<Stored, HEAD_DIM_, ACCESS>;
    static constexpr int HEAD_DIM = HEAD_DIM_, ROWS = ROWS_, WARPS = WARPS_, STAGES = STAGES_, BLOCKS = BLOCKS_;
    static constexpr int THREADS = WARPS * kWarpSize;
    static constexpr bool kRagged = kRagged_;
    static constexpr int RING_BYTES = STAGES * Tile::BYTES;  // of a warp
    // Of each warp's sums that have memory of their own. With 8 bits it goes to more warps.
    static constexpr int SPARE_ROWS = HEAD_DIM <= 128 && !Tile::kScaled ? 4 : 0;
    static constexpr int AT_ONCE = WARPS * BLOCKS > 8 ? 9 : 17;  // as registers allow
    static_assert(Tile::BYTES >= ROWS * HEAD_DIM * 4, "a warp leaves its sums in a slot of its ring");
};

template <class Shape> class PagedBlock {
public:
    using T = typename Shape::T;
    using Tile = typename Shape::Tile;
    using Place = rawops::Place<Tile::TOKENS, Shape::kRagged>;
    using Rows = ItemRows<Tile::TOKENS, Shape::kRagged>;
    using State = RowState<T, Tile, Shape::ROWS>;
    using Query = typename State::Query;
    static constexpr int STEPS = State::STEPS, WARPS = Shape::WARPS, STAGES = Shape::STAGES;

    __device__ PagedBlock(const PagedParams& p, Meeting<WARPS>& meeting, Query* queries_, char* rings)
        : params(p),
          queries(queries_),
          end(p, meeting),
          warp(threadIdx.x / kWarpSize),
          lane(threadIdx.x % kWarpSize),
          capacity(p.pool.capacity()),
          schedule(p.work, capacity, blockIdx.x, gridDim.x, lane),
          ring(shared_address(rings) + warp * Shape::RING_BYTES),
          spare(shared_address(rings) + WARPS * Shape::RING_BYTES),
          read(ring + (STAGES - 1) * Tile::BYTES),
          filled(read),
          empty(STAGES),
          ahead(schedule.begin),
          ahead_left(schedule.count - warp) {
        if (ahead_left > 0) ahead.advance(params.work, capacity, warp);
        look_up(wanted[0]);
    }

    // An item's sums are put together while the next one's first tiles and queries are on their way.
    __device__ void run() {
        Place place = schedule.begin;
        Rows before(place, params.work);
        Shares shares = {};
        bool has_tiles = false;
#pragma unroll 1
        for (int done = 0, tiles = 0;; done += tiles) {
            const bool is_first = tiles == 0, is_past = done >= schedule.count;
            const Rows rows(place, params.work);
            QueryPart query;
            if (!is_past) read_query(query, rows);
            if (!is_first) {
                end.leave(state, sums_at(before.count), has_tiles, before.count);
                end.meet(before, shares);
            }
            if (is_past) break;
            tiles = min_of(place.sequence.tiles - place.tile, schedule.count - done);
            has_tiles = walk(place, rows, query, tiles, done, shares);
            before = rows;
            place.advance(params.work, capacity, tiles);
        }
        cp_async_wait<0>();
    }

private:
    using QueryPart = Query[ceil_div(STEPS, WARPS)];

    const PagedParams& params;
    Query* queries;  // of the item's rows, by step and lane
    ItemEnd<T, Tile, Shape::ROWS, WARPS, Shape::AT_ONCE, Shape::kRagged> end;
    const int warp, lane, capacity;
    const Schedule<Tile::TOKENS, WARPS, Shape::kRagged> schedule;
    const uint32_t ring, spare;
    uint32_t read, filled;  // the slots that were read and filled last
    int empty;              // how many from the one after `filled` on wait for a tile
    // The tiles that are fetched next, as many as the ring holds once the first is on its way: where much is being copied,
    // a look into the table takes long.
    struct Wanted {
        int page, token, head;  // the page is that of this lane's token; no head: no tile
    };
    Wanted wanted[STAGES];
    Place ahead;  // the tile after them
    int ahead_left;
    bool has_begun = false;
    State state;

    // --- the ring ---

    // Finds the next tile, and where this lane's token of it lies: no page if the token is not to be read.
    __device__ void look_up(Wanted& next) {
        next = {-1, 0, -1};
        if (ahead_left <= 0) return;
        next.token = ahead.sequence.first_token(ahead.tile);
        next.head = ahead.head;
        const int token = next.token + lane % Tile::TOKENS;
        if (token >= ahead.sequence.first_key && token < ahead.sequence.length) {
            const int64_t row = ahead.b * params.pool.table_stride;
            next.page = params.pool.block_table[row + (token >> params.pool.page_shift)];
        }
        ahead_left -= WARPS;
        if (ahead_left > 0) ahead.advance(params.work, capacity, WARPS);
    }

    __device__ uint32_t after(uint32_t slot) const {
        return slot == ring + (STAGES - 1) * Tile::BYTES ? ring : slot + Tile::BYTES;
    }

    // Starts the copies of the next tiles into the empty slots, which all lanes have left.
    __device__ void refill() {
        __syncwarp();
#pragma unroll 1
        for (; empty > 0; --empty) {
            filled = after(filled);
            if (wanted[0].head >= 0) {
                Tile::fetch(params.pool, filled, wanted[0].page, wanted[0].token, wanted[0].head, lane);
                if (has_begun) {
#pragma unroll
                    for (int i = 1; i < STAGES; ++i) wanted[i - 1] = wanted[i];
                } else {
#pragma unroll
                    for (int i = 1; i < STAGES; ++i) look_up(wanted[i - 1]);
                }
                has_begun = true;
                look_up(wanted[STAGES - 1]);
            }
            cp_async_commit();
        }
    }

    // --- the tiles of an item ---

    // Where this warp leaves its sums of an item: in memory of their own if its rows are few, else in the slot that it
    // has just read, which is then refilled later.
    __device__ uint32_t sums_at(int rows) const {
        return rows <= Shape::SPARE_ROWS ? spare + warp * Shape::SPARE_ROWS * Shape::HEAD_DIM * 4 : read;
    }

    // Adds this warp's share of the item's tiles; false if it has none.
    __device__ bool walk(const Place& place, const Rows& rows, const QueryPart& query, int tiles, int done,
                         Shares& shares) {
        typename State::Bounds bounds;
#pragma unroll
        for (int r = 0; r < State::OWN; ++r) {
            const int row = row_of_lane(r, lane), i = rows.query(row);
            const bool exists = row < rows.count;
            bounds.seen[r] = exists ? place.sequence.visible(params.work, i) : KeyRange{0, 1 << 30};
            bounds.position[r] = i + place.sequence.length - place.sequence.q_count;
            bounds.slope[r] = exists && params.rule.alibi_slopes ? params.rule.alibi_slopes[rows.head(row)] * kLog2e : 0;
        }
        const PagePool& pool = params.pool;
        bounds.scaled_by_page = pool.scale_page != 0;
        bounds.k_scale = bounds.v_scale = 1;
        if (Tile::kScaled && !bounds.scaled_by_page) {
            if (pool.k_scale) bounds.k_scale = pool.k_scale[place.head * pool.scale_head];
            if (pool.v_scale) bounds.v_scale = pool.v_scale[place.head * pool.scale_head];
        }
        state.begin();
        const int first = place.sequence.first_token(place.tile), mine = (warp + WARPS - done % WARPS) % WARPS;
        const bool keeps_slot = rows.count > Shape::SPARE_ROWS;
#pragma unroll 1
        for (int tile = mine - WARPS;;) {
            refill();
            if (tile < mine) {  // the copies have started, and take longer than this
                shares = schedule.shares(params.work, place, done);
                share_query(query);
            }
            tile += WARPS;
            if (tile >= tiles) break;
            cp_async_wait<STAGES - 1>();
            __syncwarp();
            read = after(read);
            state.template add<Shape::kRagged>(queries, read, first + tile * Tile::TOKENS, bounds, params.rule, lane);
            ++empty;
            if (keeps_slot && tile + WARPS >= tiles) break;
        }
        state.finish(bounds);
        return mine < tiles;
    }

    // This warp's steps of the item's B fragments: lane 4 g + t has two pairs of columns of row g of every 8.
    __device__ void read_query(QueryPart& query, const Rows& rows) const {
#pragma unroll
        for (int n = 0; n < State::N; ++n) {
            const int row = lane / 4 + n * 8;
            const int64_t i = rows.q_begin + rows.query(row), head = rows.head(row);
            const uint16_t* from = static_cast<const uint16_t*>(params.q) + i * params.q_row + head * params.q_head;
#pragma unroll
            for (int part = 0; part < ceil_div(STEPS, WARPS) * 2; ++part) {
                const int step = warp + part / 2 * WARPS;
                const int column = step * 16 + Fragments<T, Tile>::query_column(part % 2 * 2, lane);
                const int count = row < rows.count ? params.pool.head_dim - column : 0;
                const uint32_t pair = count > 0 ? *reinterpret_cast<const uint32_t*>(from + column) : 0;
                query[part / 2].word[n * 2 + part % 2] = pair;
            }
        }
    }

    __device__ void share_query(const QueryPart& query) {
#pragma unroll
        for (int i = 0; i < ceil_div(STEPS, WARPS); ++i) {
            const int step = warp + i * WARPS;
            if (step < STEPS) queries[step * kWarpSize + lane] = query[i];
        }
        __syncthreads();
    }
};

template <class T, class Stored, int HEAD_DIM, int ACCESS, int ROWS, int WARPS, int STAGES, int BLOCKS, bool kRagged>
__global__ void __launch_bounds__(WARPS* kWarpSize, BLOCKS)
    paged_attention(const __grid_constant__ PagedParams params) {
    using Shape = PagedShape<T, Stored, HEAD_DIM, ACCESS, ROWS, WARPS, STAGES, BLOCKS, kRagged>;
    extern __shared__ __align__(128) char rings[];
    __shared__ Meeting<WARPS> meeting;
    __shared__ typename RowState<T, typename Shape::Tile, ROWS>::Query queries[HEAD_DIM / 16 * kWarpSize];
    start_next_launch();
    await_launch_before();
    PagedBlock<Shape>(params, meeting, queries, rings).run();
    if constexpr (kRagged) clear_rest<T>(params);
}

}  // namespace rawops
