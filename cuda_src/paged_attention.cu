// Attention of queries over keys and values in pages: decoding, several queries a sequence, or both in one launch.
//
// Each block takes one range of the line of tiles that paged_schedule.cuh makes of all sequences and KV heads. The
// query heads of a KV head are the rows of one MMA, so keys and values are read once for all of them. The warps of a
// block take tiles in turn, each through a ring of its own, which runs ahead into the block's next items; they meet
// only at the end of an item. An item that several blocks share is put together by one of them, always in the same
// order.
#include "common/launches.cuh"
#include "common/paged_finish.cuh"

namespace rawops {

template <class T_, class Stored, int HEAD_DIM_, int ACCESS, int ROWS_, int WARPS_, int STAGES_, int BLOCKS_,
          bool kRagged_, int HEADS_ = 1, int CLUSTER_ = 1>
struct PagedShape {
    using T = T_;
    using Tile = TokenTile<Stored, HEAD_DIM_, ACCESS>;
    static constexpr int HEAD_DIM = HEAD_DIM_, ROWS = ROWS_, WARPS = WARPS_, STAGES = STAGES_, BLOCKS = BLOCKS_;
    static constexpr int THREADS = WARPS * kWarpSize, CLUSTER = CLUSTER_;
    static constexpr int HEADS = HEADS_, TURNS = WARPS / HEADS;  // KV heads of an item; warps that each has
    static constexpr bool kRagged = kRagged_;
    static constexpr int RING_BYTES = STAGES * Tile::BYTES;  // of a warp
    // Of each warp's sums that have memory of their own. With 8 bits it goes to more warps.
    static constexpr int SPARE_ROWS = HEAD_DIM <= 128 && !Tile::kScaled ? 4 : 0;
    using Mail = PairMail<SPARE_ROWS + !SPARE_ROWS, HEAD_DIM>;  // with clusters
    static constexpr int AT_ONCE = WARPS * BLOCKS <= 8 ? 8 : __CUDA_ARCH__ >= 900 ? 5 : 3;  // as registers allow
    static_assert(CLUSTER == 1 || (CLUSTER == 2 && SPARE_ROWS > 0), "a pair of blocks has few rows");
    static_assert(WARPS % HEADS == 0, "each head has as many warps");
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
    static constexpr int HEADS = Shape::HEADS, TURNS = Shape::TURNS;
    static constexpr int KEPT = 256;  // lengths that fit into shared memory
    // Tiles of each warp that the L2 is asked for early: rows of 16 bits take so many requests that more would cost
    // what they save. And whether copies start before lengths are certain: with 8 bits there are not registers enough.
    static constexpr int PREFETCHED = Tile::kScaled ? STAGES : 1;
    static constexpr bool kCopiesEarly = !Tile::kScaled;
    // And whether they start from pages as they were, and the tiles after those are looked up only then, since to move
    // a page along is to wait for it: that floods the memory at once, and where an SM has one large block it costs more
    // than it saves.
    static constexpr bool kTrustsPages = kCopiesEarly && Shape::BLOCKS > 1;

    // And whether warps wait for each other every four tiles. Else they drift apart, and the block ends with the last.
    static constexpr bool kInStep = !Tile::kScaled && Shape::BLOCKS > 1;

    __device__ PagedBlock(const PagedParams& p, Meeting<WARPS>& meeting, typename Shape::Mail& mail_, Query* queries_,
                          char* rings)
        : params(p),
          mail(mail_),
          queries(queries_),
          end(p, meeting),
          warp(threadIdx.x / kWarpSize),
          turn(warp / HEADS),
          lane(threadIdx.x % kWarpSize),
          lengths{p.work.seq_lens, p.pool.capacity()},
          ring(shared_address(rings) + warp * Shape::RING_BYTES),
          spare(shared_address(rings) + WARPS * Shape::RING_BYTES),
          read(ring + (STAGES - 1) * Tile::BYTES),
          filled(read),
          empty(STAGES) {}

    // Plans while the launch before may still be at work, from lengths and pages as they are then. When that launch is
    // complete the first copies start, from the same pages or from those that are looked up then; if lengths, or the
    // pages that were trusted, have changed after all, everything is done once more. `kept` has room for KEPT lengths.
    __device__ void begin(int* kept) {
        const bool keeps = !Shape::kRagged && params.work.batch <= KEPT;
        const int b = threadIdx.x;
        const int length = keeps && b < params.work.batch ? load_past_l1(params.work.seq_lens + b) : 0;
        const EvenCut cut(params.work, blockIdx.x, gridDim.x);
        if (keeps) keep_lengths(kept, length);
        else await_launch_before();
        if (keeps) lengths.at = kept;
#pragma unroll 1
        for (bool is_early = keeps, is_new = true;;) {
            if (is_new) schedule = {params.work, lengths, cut, lane};
            ahead = {schedule.begin, schedule.count - turn};
            if (ahead.left > 0) ahead.place.advance(params.work, lengths, turn);
            const int* from[STAGES];
            int page[STAGES];
            look_up_all(from);
#pragma unroll
            for (int i = 0; i < STAGES; ++i) page[i] = wanted[i].page;
            if (is_early) {
                is_early = is_new = false;
                // The last quarter of the blocks begins when the launch before has ended, or nearly: it has no time.
                const bool has_time = blockIdx.x < gridDim.x - gridDim.x / 4;
#pragma unroll
                for (int i = 0; i < PREFETCHED; ++i) {
                    const Wanted& next = wanted[i];
                    if (has_time && next.head >= 0) Tile::prefetch(params.pool, next.page, next.token, next.head, lane);
                }
                if (schedule.count > 0) prefetch_query(Rows(schedule.begin, params.work));
                await_launch_before();
                if (!kTrustsPages) continue;
            }
            // What is asked for before the copies does not wait for them.
            const bool looks = !is_new && b < params.work.batch;
            const int length = looks ? load_past_l1(params.work.seq_lens + b) : 0;
            int now[STAGES];
#pragma unroll
            for (int i = 0; i < STAGES; ++i) {
                now[i] = kTrustsPages && !is_new && from[i] ? load_past_l1(from[i]) : page[i];
            }
            if (schedule.count > 0) read_query(Rows(schedule.begin, params.work));
            if (kCopiesEarly) refill<!kTrustsPages>();
            if (is_new) break;
            bool changed = (looks && length != kept[b]) || have_changed(kept, b + Shape::THREADS);
#pragma unroll
            for (int i = 0; i < STAGES; ++i) changed |= now[i] != page[i];
            if (!__syncthreads_or(changed)) break;
            cp_async_wait<0>();
            read = filled = ring + (STAGES - 1) * Tile::BYTES;
            empty = STAGES;
            keep_lengths(kept, length);
            is_new = true;
        }
        if (kTrustsPages) {
            const int* from[STAGES];
            look_up_all(from);
        }
        if constexpr (Shape::CLUSTER > 1) cluster_wait();  // the other block is there
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
            if (!is_first) {
                if (!is_past) read_query(rows);
                end.leave(state, sums_at(before.count), has_tiles, before.count);
                meet(before, shares);
            }
            if (is_past) break;
            tiles = min_of(place.sequence.tiles - place.tile, schedule.count - done);
            has_tiles = walk(place, rows, tiles, done, shares);
            before = rows;
            place.advance(params.work, lengths, tiles);
        }
        cp_async_wait<0>();
        if (schedule.count == 0) meet(before, shares);
    }

private:
    const PagedParams& params;
    typename Shape::Mail& mail;
    Query* queries;  // of the item's rows, by step and lane
    ItemEnd<T, Tile, Shape::ROWS, WARPS, HEADS, Shape::AT_ONCE, Shape::kRagged> end;
    const int warp, turn, lane;
    Lengths lengths;
    Schedule<Tile::TOKENS, TURNS, Shape::kRagged> schedule;
    const uint32_t ring, spare;
    uint32_t read, filled;  // the slots that were read and filled last
    int empty;              // how many from the one after `filled` on wait for a tile
    // The tiles that are fetched next, as many as the ring holds: where much is being copied, a look into the table
    // takes long.
    struct Wanted {
        int page, token, head;  // the page is that of this lane's token; no head: no tile
    };
    Wanted wanted[STAGES];
    struct Upcoming {
        Place place;
        int left;  // tiles of the block from there on, none if there is no such tile
    };
    Upcoming ahead;  // the tile after them
    Query query[ceil_div(STEPS, WARPS)];  // this warp's steps of the next item's
    State state;

    __device__ void meet(const Rows& rows, const Shares& shares) {
        const bool has_tiles = schedule.count > 0;
        if constexpr (Shape::CLUSTER > 1) {
            if (schedule.splits_items()) return end.meet_in_pair(rows, has_tiles, mail);
        }
        if (has_tiles) end.meet(rows, shares, schedule.number, rows.count <= Shape::SPARE_ROWS ? spare : 0);
    }

    // --- lengths, as planned with ---

    __device__ void keep_lengths(int* kept, int first) const {
        if (threadIdx.x < params.work.batch) kept[threadIdx.x] = first;
        for (int b = threadIdx.x + Shape::THREADS; b < params.work.batch; b += Shape::THREADS) {
            kept[b] = load_past_l1(params.work.seq_lens + b);
        }
        __syncthreads();
    }
    __device__ bool have_changed(const int* kept, int begin) const {
        bool has_changed = false;
        for (int b = begin; b < params.work.batch; b += Shape::THREADS) {
            has_changed |= kept[b] != load_past_l1(params.work.seq_lens + b);
        }
        return has_changed;
    }

    // --- the ring ---

    // Finds the next tile, and where this lane's token of it lies: no page if the token is not to be read. Returns the
    // place in the table, if any.
    __device__ const int* look_up(Wanted& next) {
        const int* from = nullptr;
        next = {-1, 0, -1};
        if (ahead.left <= 0) return from;
        const Place& place = ahead.place;
        next.token = place.sequence.first_token(place.tile);
        next.head = head_of(place);
        const int token = next.token + lane % Tile::TOKENS;
        if (token >= place.sequence.first_key && token < place.sequence.length) {
            const int64_t row = place.b * params.pool.table_stride;
            from = params.pool.block_table + row + (token >> params.pool.page_shift);
            next.page = load_past_l1(from);
        }
        ahead.left -= TURNS;
        if (ahead.left > 0) ahead.place.advance(params.work, lengths, TURNS);
        return from;
    }

    // The same for as many tiles as the ring holds, which mostly are of one item.
    __device__ void look_up_all(const int* (&from)[STAGES]) {
        const Place& place = ahead.place;
        constexpr int ALL = STAGES * TURNS;
        if (ahead.left > ALL && place.tile + ALL < place.sequence.tiles) {
            const int first = place.sequence.first_token(place.tile), head = head_of(place);
            const int* const row = params.pool.block_table + place.b * params.pool.table_stride;
#pragma unroll
            for (int i = 0; i < STAGES; ++i) {
                wanted[i] = {-1, first + i * TURNS * Tile::TOKENS, head};
                const int token = wanted[i].token + lane % Tile::TOKENS;
                from[i] = nullptr;
                if (token >= place.sequence.first_key && token < place.sequence.length) {
                    from[i] = row + (token >> params.pool.page_shift);
                    wanted[i].page = load_past_l1(from[i]);
                }
            }
            ahead.left -= ALL, ahead.place.tile += ALL;
            return;
        }
#pragma unroll
        for (int i = 0; i < STAGES; ++i) from[i] = look_up(wanted[i]);
    }

    __device__ int head_of(const Place& place) const { return place.head * HEADS + warp % HEADS; }

    __device__ uint32_t after(uint32_t slot) const {
        return slot == ring + (STAGES - 1) * Tile::BYTES ? ring : slot + Tile::BYTES;
    }

    // Starts the copies of the next tiles into the empty slots, which all lanes have left.
    template <bool kLooks = true> __device__ void refill() {
        __syncwarp();
#pragma unroll 1
        for (; empty > 0; --empty) {
            filled = after(filled);
            if (wanted[0].head >= 0) {
                Tile::fetch(params.pool, filled, wanted[0].page, wanted[0].token, wanted[0].head, lane);
#pragma unroll
                for (int i = 1; i < STAGES; ++i) wanted[i - 1] = wanted[i];
                if (kLooks) look_up(wanted[STAGES - 1]);
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
    __device__ bool walk(const Place& place, const Rows& rows, int tiles, int done, Shares& shares) {
        typename State::Bounds bounds;
#pragma unroll
        for (int r = 0; r < State::OWN; ++r) {
            const int row = row_of_lane(r, lane), i = rows.query(row);
            const bool exists = row < rows.count;
            bounds.seen[r] = exists ? place.sequence.visible(params.work, i) : KeyRange{0, 1 << 30};
            bounds.position[r] = i + place.sequence.length - place.sequence.q_count;
            bounds.slope[r] =
                exists && params.rule.alibi_slopes ? params.rule.alibi_slopes[rows.head(row)] * kLog2e : 0;
        }
        const PagePool& pool = params.pool;
        bounds.scaled_by_page = pool.scale_page != 0;
        bounds.k_scale = bounds.v_scale = 1;
        if (Tile::kScaled && !bounds.scaled_by_page) {
            const int64_t at = head_of(place) * pool.scale_head;
            if (pool.k_scale) bounds.k_scale = pool.k_scale[at];
            if (pool.v_scale) bounds.v_scale = pool.v_scale[at];
        }
        state.begin();
        const int first = place.sequence.first_token(place.tile), mine = (turn + TURNS - done % TURNS) % TURNS;
        const bool keeps_slot = rows.count > Shape::SPARE_ROWS;
#pragma unroll 1
        for (int tile = mine - TURNS;;) {
            refill();
            if (tile < mine) {  // the copies have started, and take longer than this
                shares = schedule.shares(place, done);
                share_query();
            }
            tile += TURNS;
            if (tile >= tiles) break;
            cp_async_wait<STAGES - 1>();
            __syncwarp();
            read = after(read);
            state.template add<Shape::kRagged>(queries, read, first + tile * Tile::TOKENS, bounds, params.rule, lane);
            ++empty;
            if (kInStep && tile / TURNS % 4 == 3 && tile / TURNS < tiles / TURNS) __syncthreads();
            if (keeps_slot && tile + TURNS >= tiles) break;
        }
        state.finish(bounds);
        return mine < tiles;
    }

    __device__ const uint16_t* query_row(const Rows& rows, int row) const {
        const int64_t i = rows.q_begin + rows.query(row), head = rows.head(row);
        return static_cast<const uint16_t*>(params.q) + i * params.q_row + head * params.q_head;
    }

    // Has the L2 get the first item's queries, by one warp: 8 rows of up to 4 lines.
    __device__ void prefetch_query(const Rows& rows) const {
        const int row = lane % 8, column = lane / 8 * 64;
        if (warp == 0 && row < rows.count && column < params.pool.head_dim) {
            prefetch_line(query_row(rows, row) + column);
        }
    }

    // This warp's steps of the item's B fragments: lane 4 g + t has two pairs of columns of row g of every 8.
    __device__ void read_query(const Rows& rows) {
#pragma unroll
        for (int n = 0; n < State::N; ++n) {
            const int row = lane / 4 + n * 8;
            const uint16_t* from = query_row(rows, row);
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

    __device__ void share_query() {
#pragma unroll
        for (int i = 0; i < ceil_div(STEPS, WARPS); ++i) {
            const int step = warp + i * WARPS;
            if (step < STEPS) queries[step * kWarpSize + lane] = query[i];
        }
        __syncthreads();
    }
};

template <class Shape> __device__ inline void attend(const PagedParams& params) {
    extern __shared__ __align__(128) char rings[];
    __shared__ Meeting<Shape::WARPS> meeting;
    __shared__ typename PagedBlock<Shape>::Query queries[Shape::HEAD_DIM / 16 * kWarpSize];
    __shared__ int kept[PagedBlock<Shape>::KEPT];
    __shared__ typename Shape::Mail mail;
    start_next_launch();
    if constexpr (Shape::CLUSTER > 1) mail.open(params.work.group);
    PagedBlock<Shape> block(params, meeting, mail, queries, rings);
    block.begin(kept);
    block.run();
    if constexpr (Shape::kRagged) clear_rest<typename Shape::T>(params);
}

template <class T, class Stored, int HEAD_DIM, int ACCESS, int ROWS, int WARPS, int STAGES, int BLOCKS, bool kRagged,
          int HEADS>
__global__ void __launch_bounds__(WARPS* kWarpSize, BLOCKS)
    paged_attention(const __grid_constant__ PagedParams params) {
    attend<PagedShape<T, Stored, HEAD_DIM, ACCESS, ROWS, WARPS, STAGES, BLOCKS, kRagged, HEADS>>(params);
}

#if __CUDA_ARCH__ >= 900
// One query a sequence and few rows an item; where items are split, the blocks of a cluster have one, and its results
// do not go through global memory.
template <class T, int HEAD_DIM, int ACCESS, int WARPS, int STAGES, int BLOCKS, int CLUSTER>
__global__ void __launch_bounds__(WARPS* kWarpSize, BLOCKS) __cluster_dims__(CLUSTER, 1, 1)
    paged_attention_in_clusters(const __grid_constant__ PagedParams params) {
    attend<PagedShape<T, T, HEAD_DIM, ACCESS, 8, WARPS, STAGES, BLOCKS, false, 1, CLUSTER>>(params);
}
#endif

}  // namespace rawops
