// Which block works on what: KV heads, sequences and rows of queries in one line of tiles, cut into equal ranges.
//
// An item is one KV head of one sequence with up to 16 rows, a row being one query of one query head. Its keys are
// walked in tiles. All tiles of all items, in order, are numbered, and each block takes one range of numbers: this
// arithmetic is done here, from the lengths on the device, so a captured launch follows them as they change. All
// sequences of one head come before those of the next: the heads of a token, which are neighbours in memory, are then
// read by different blocks at about the same time.
#pragma once
#include "paged_pool.cuh"

namespace rawops {

constexpr int kItemRows = 16;  // one MMA

// Numbers of tokens stay below 2^30, windows too: sums and differences of two fit an int.
struct PagedWork {
    const int *seq_lens, *cu_seqlens_q;  // cu_seqlens_q: only with kRagged, else there is one query a sequence
    int batch, total_q, kv_heads, group;
    int window_left, window_right;
    int num_splits;  // 0: as many as balance the blocks
    int row_tiles;   // not kRagged: of 16 heads of a group
    int skipped;     // keys of each sequence that lie before its row of the table
    int prior_parts; // results that there are of them
};

// Where the lengths of all sequences are read: `seq_lens`, or a copy of it.
struct Lengths {
    const int* at;
    int capacity;  // tokens that a row of the table can name

    __device__ int of(int b, int skipped) const { return clamp(at[b] - skipped, 0, capacity); }
};

// Keys begin <= j < end, for a query or for a tile.
struct KeyRange {
    int begin, end;
};

template <int TOKENS, bool kRagged> struct Sequence {
    int q_begin, q_count, length;
    int first_key;  // that any query sees; tiles are counted from the one that holds it
    int tiles, row_tiles;

    __device__ Sequence() : q_begin(0), q_count(0), length(0), first_key(0), tiles(0), row_tiles(0) {}
    __device__ Sequence(const PagedWork& work, int b, const Lengths& lengths)
        : q_begin(b), q_count(1), length(lengths.of(b, work.skipped)), row_tiles(work.row_tiles) {
        if constexpr (kRagged) {
            q_begin = clamp(work.cu_seqlens_q[b], 0, work.total_q);
            q_count = clamp(work.cu_seqlens_q[b + 1], q_begin, work.total_q) - q_begin;
            row_tiles = ceil_div(q_count * work.group, kItemRows);
        }
        first_key = visible(work, 0).begin;
        tiles = max_of(ceil_div(length, TOKENS) - first_key / TOKENS, 1);  // one for no keys: zeros are to be written
    }

    __device__ int first_token(int tile) const { return (first_key / TOKENS + tile) * TOKENS; }

    // What query i sees: the window lies round the key that is as far from the last as the query from the last.
    __device__ KeyRange visible(const PagedWork& work, int i) const {
        const int own = i + length - q_count;
        return {clamp(own - work.window_left, 0, length), clamp(own + work.window_right + 1, 0, length)};
    }
};

// A place in the line: a tile of an item of a sequence.
template <int TOKENS, bool kRagged> struct Place {
    int b, head, rows, tile;
    Sequence<TOKENS, kRagged> sequence;

    __device__ void advance(const PagedWork& work, const Lengths& lengths, int steps) {
        tile += steps;
        while (tile >= sequence.tiles || (kRagged && sequence.row_tiles == 0)) {
            if (!kRagged || sequence.row_tiles != 0) {
                tile -= sequence.tiles;
                if (++rows < sequence.row_tiles) continue;
                rows = 0;
            }
            if (++b >= work.batch) {
                b = 0;
                if (++head >= work.kv_heads) return;
            }
            sequence = Sequence<TOKENS, kRagged>(work, b, lengths);
        }
    }
};

// Which blocks share the tiles of an item, and where its partial results lie.
struct Shares {
    int first, count;  // the blocks; one has the item to itself
    int first_slot;    // of the first block; the others use their even slots
};

// What a block takes where all items are cut alike, one query a sequence: each into as many parts, or each block has as
// many whole ones. This takes divisions but no lengths: it is known before they are read.
struct EvenCut {
    int blocks, used;                // of the grid, and those that have work
    int items, per_item, per_block;  // blocks of an item, items of a block: one of the two is 1
    int number, split;               // of this block, and of its part of its item
    int b, head, rows;               // its first item

    __device__ EvenCut(const PagedWork& work, int block, int blocks_)
        : blocks(blocks_), items(work.batch * work.kv_heads * work.row_tiles), per_item(work.num_splits), per_block(1) {
        if (per_item == 0) {
            per_item = max_of(int(unsigned(blocks) / max_of(items, 1)), 1);
            per_block = ceil_div(items, blocks);
        }
        used = unsigned(items) / max_of(per_block, 1) * per_item;
        number = used - 1 - block;
        const int whole = unsigned(max_of(number, 0)) / per_item, item = whole * per_block;
        split = number - whole * per_item;
        const int of_head = max_of(work.batch * work.row_tiles, 1);
        head = unsigned(item) / of_head;
        b = item - head * of_head;
        rows = 0;
        if (work.row_tiles > 1) rows = b, b = unsigned(rows) / work.row_tiles, rows -= b * work.row_tiles;
    }

    // Whether sequences are about equally long, all of them exactly if a block has whole items, and nearly all blocks
    // have work then.
    __device__ bool fits(int total, int longest) const {
        const int even = longest * items;
        if (per_item == 1) return total == even && unsigned(items) % per_block == 0 && nearly(used, blocks);
        return nearly(used, blocks) && nearly(total, even);
    }

private:
    static __device__ bool nearly(int less, int more) { return less >= more - more / 16; }
};

// Blocks are numbered from the last to the first: a block waits for those of higher numbers alone, which began before
// it. kMinTiles: the least that a block is worth.
template <int TOKENS, int kMinTiles, bool kRagged> class Schedule {
public:
    using Sequence = rawops::Sequence<TOKENS, kRagged>;
    Place<TOKENS, kRagged> begin;  // of this block's range
    int count;                     // tiles of the range, 0: nothing to do
    int number;                    // of the block

    __device__ Schedule() : count(0) {}
    // By all lanes of a warp alike.
    //
    // Where items can be cut alike, ranges end where items do: that spares blocks the end of one item and the start of
    // another in the middle of their work.
    __device__ Schedule(const PagedWork& work, const Lengths& lengths, const EvenCut& cut, int lane)
        : count(0), splits(work.num_splits) {
        int of_head = 0, longest = 0;
        for (int b = lane; b < work.batch; b += kWarpSize) {
            const Sequence sequence(work, b, lengths);
            of_head += in_line(sequence);
            longest = max_of(longest, sequence.tiles);
        }
        of_head = __reduce_add_sync(~0u, of_head), longest = __reduce_max_sync(~0u, longest);
        const int total = of_head * work.kv_heads, used = clamp(total / kMinTiles, 1, cut.blocks);
        if (!kRagged && (splits > 0 || (used == cut.blocks && cut.fits(total, longest)))) {
            number = cut.number;
            if (number < 0) return;
            begin = {cut.b, cut.head, cut.rows, 0, Sequence(work, cut.b, lengths)};
            quota = count = longest * cut.per_block, longer = 0;
            flat = number * quota;
            if (splits > 0 || cut.per_item > 1) take_part(cut.per_item, cut.split);
            return;
        }
        int at, split = 0;
        if (splits > 0) {
            number = cut.blocks - 1 - blockIdx.x;
            at = unsigned(number) / splits, split = number - at * splits;
        } else {
            number = used - 1 - blockIdx.x;
            if (number < 0) return;
            quota = unsigned(total) / used;
            longer = total - quota * used;
            count = quota + (number < longer);
            at = flat = number * quota + min_of(number, longer);
        }
        const int head = of_head > 0 ? unsigned(at) / of_head : work.kv_heads;
        if (head >= work.kv_heads) {
            count = 0;
            return;
        }
        begin = find(work, lengths, head, at - head * of_head, lane);
        if (splits > 0) take_part(splits, split);
    }

    __device__ bool splits_items() const { return splits > 0; }

    // Of the item of a place that is `done` tiles into the range.
    __device__ Shares shares(const Place<TOKENS, kRagged>& place, int done) const {
        if (splits) return {flat, splits, 2 * flat};
        const int item_begin = flat + done - place.tile;
        int owners[2];
#pragma unroll 1
        for (int i = 0; i < 2; ++i) owners[i] = owner(item_begin + (i ? place.sequence.tiles - 1 : 0));
        const int first_begin = owners[0] * quota + min_of(owners[0], longer);
        return {owners[0], owners[1] - owners[0] + 1, 2 * owners[0] + (first_begin != item_begin)};
    }

private:
    int flat;           // number of the range's first tile, or of the block that has the item's first split
    int quota, longer;  // `longer` blocks have quota + 1 tiles, the rest quota
    int splits;         // of each item, 0 where ranges are cut anywhere

    // What a sequence has in the line of a head: tiles, or items where those are cut.
    __device__ int in_line(const Sequence& sequence) const {
        return sequence.row_tiles * (kRagged && splits > 0 ? 1 : sequence.tiles);
    }

    // Takes one of as many parts of the item at `begin`.
    __device__ void take_part(int wanted, int split) {
        flat = number - split;
        splits = min_of(wanted, begin.sequence.tiles);
        begin.tile = share_begin(begin.sequence.tiles, split);
        count = split < splits ? share_begin(begin.sequence.tiles, split + 1) - begin.tile : 0;
    }

    __device__ int owner(int tile) const {
        const int in_longer = longer * (quota + 1);
        const bool is_longer = tile < in_longer;
        return (is_longer ? 0 : longer) +
               unsigned(is_longer ? tile : tile - in_longer) / (is_longer ? quota + 1 : quota);
    }

    // First tile of one of the splits of an item.
    __device__ int share_begin(int tiles, int split) const {
        const unsigned whole = unsigned(tiles) / splits, rest = tiles - whole * splits;
        return split * whole + min_of(split, rest);
    }

    // The place in the line of a head.
    __device__ Place<TOKENS, kRagged> find(const PagedWork& work, const Lengths& lengths, int head, int at,
                                           int lane) const {
        int before = 0, b = 0;
#pragma unroll 1
        for (;; b += kWarpSize) {
            const int own = b + lane < work.batch ? in_line(Sequence(work, b + lane, lengths)) : 0;
            int sum = own;
#pragma unroll
            for (int step = 1; step < kWarpSize; step *= 2) {
                const int other = __shfl_up_sync(~0u, sum, step);
                if (lane >= step) sum += other;
            }
            const uint32_t past = __ballot_sync(~0u, before + sum > at);
            if (past) {
                const int winner = __ffs(past) - 1;
                b += winner, before += __shfl_sync(~0u, sum - own, winner);
                break;
            }
            before += __shfl_sync(~0u, sum, kWarpSize - 1);
        }
        const Sequence sequence(work, b, lengths);
        int tile = at - before, rows = tile;
        if (splits == 0) {
            rows = unsigned(tile) / sequence.tiles;
            tile -= rows * sequence.tiles;
        }
        return {b, head, rows, tile, sequence};
    }
};

}  // namespace rawops
