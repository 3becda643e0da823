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

// kMinTiles: the least that a block is worth.
template <int TOKENS, int kMinTiles, bool kRagged> class Schedule {
public:
    using Sequence = rawops::Sequence<TOKENS, kRagged>;
    Place<TOKENS, kRagged> begin;  // of this block's range
    int count;                     // tiles of the range, 0: nothing to do

    __device__ Schedule() : count(0) {}
    // By all lanes of a warp alike.
    __device__ Schedule(const PagedWork& work, const Lengths& lengths, int block, int blocks, int lane)
        : count(0), splits(work.num_splits) {
        Counts counts;
        Found found;
        bool by_item = splits > 0;
        int head = 0, number = 0x7fffffff;  // of a tile of the head, or of an item
#pragma unroll 1
        for (bool adds_up = true;; adds_up = false) {
            found = counts.find(work, lengths, number, lane, by_item);
            if (!adds_up) break;
            int of_head = found.before;
            number = by_item ? unsigned(block) / splits : divide(work, of_head, counts.longest(), block, blocks);
            if (!by_item && splits) {
                by_item = true;
                of_head = work.batch * work.row_tiles;
                counts.base = -1;  // items are counted from here on
            }
            head = of_head > 0 ? unsigned(number) / of_head : work.kv_heads;
            number -= head * of_head;
        }
        if (found.b >= work.batch || head >= work.kv_heads) {
            count = 0;
            return;
        }
        const Sequence sequence(work, found.b, lengths);
        int tile = number - found.before, rows = tile;
        if (splits) {
            const int split = unsigned(block) % splits;
            flat = block - split;
            splits = min_of(splits, sequence.tiles);
            tile = share_begin(sequence.tiles, split);
            count = split < splits ? share_begin(sequence.tiles, split + 1) - tile : 0;
        } else {
            rows = unsigned(tile) / sequence.tiles;
            tile -= rows * sequence.tiles;
        }
        begin = {found.b, head, rows, tile, sequence};
    }

    __device__ bool splits_items() const { return splits > 0; }

    // Of the item of a place that is `done` tiles into the range.
    __device__ Shares shares(const PagedWork& work, const Place<TOKENS, kRagged>& place, int done) const {
        if (splits) return {flat, splits, 2 * flat};
        const int item_begin = flat + done - place.tile;
        int owners[2];
#pragma unroll 1
        for (int i = 0; i < 2; ++i) owners[i] = owner(item_begin + (i ? place.sequence.tiles - 1 : 0));
        const int first_begin = owners[0] * quota + min_of(owners[0], longer);
        return {owners[0], owners[1] - owners[0] + 1, 2 * owners[0] + (first_begin != item_begin)};
    }

private:
    struct Found {
        int b, before;
    };
    int flat;           // number of the range's first tile, or of the block that has the item's first split
    int quota, longer;  // `longer` blocks have quota + 1 tiles, the rest quota
    int splits;         // of each item, 0 where ranges are cut anywhere

    // Divides the tiles of all heads. Returns the number that this block begins with: a tile's, or an item's if items are
    // split.
    //
    // Where sequences are about equally long, and nearly all blocks have work then, ranges end where items do: each
    // item is split alike, or each block has as many whole ones. That spares the blocks to put shared items together.
    __device__ int divide(const PagedWork& work, int of_head, int longest, int block, int blocks) {
        const int total = of_head * work.kv_heads;
        int used = clamp(total / kMinTiles, 1, blocks);
        if (!kRagged && used == blocks) {
            const int items = work.batch * work.kv_heads * work.row_tiles;
            const int wanted = unsigned(blocks) / items;
            if (wanted > 1 && nearly(items * wanted, blocks) && nearly(total, longest * items)) {
                splits = wanted;
                return unsigned(block) / splits;
            }
            const int even = unsigned(items) / unsigned(ceil_div(items, blocks));
            if (total == longest * items && nearly(even, blocks)) used = even;
        }
        quota = unsigned(total) / used;
        longer = total - quota * used;
        count = block < used ? quota + (block < longer) : 0;
        return flat = block * quota + min_of(block, longer);
    }
    static __device__ bool nearly(int less, int more) { return less >= more - more / 16; }

    __device__ int owner(int tile) const {
        const int in_longer = longer * (quota + 1);
        const bool is_longer = tile < in_longer;
        return (is_longer ? 0 : longer) + unsigned(is_longer ? tile : tile - in_longer) / (is_longer ? quota + 1 : quota);
    }

    // First tile of one of the splits of an item.
    __device__ int share_begin(int tiles, int split) const {
        const unsigned whole = unsigned(tiles) / splits, rest = tiles - whole * splits;
        return split * whole + min_of(split, rest);
    }

    // How many tiles, or items, each of 32 neighbouring sequences has, and all up to it. Kept from search to search.
    struct Counts {
        int base = -1, own, sum, most = 0;  // most: tiles of an item among this lane's sequences

        __device__ int longest() const { return __reduce_max_sync(~0u, most); }

        // The sequence that holds a number, and how many lie before it; the end and the total for one past the last.
        __device__ Found find(const PagedWork& work, const Lengths& lengths, int number, int lane, bool by_item) {
            int before = 0;
#pragma unroll 1
            for (int b = 0; b < work.batch; b += kWarpSize) {
                if (b != base) count(work, lengths, b, lane, by_item);
                const uint32_t past = __ballot_sync(~0u, before + sum > number);
                if (past) {
                    const int winner = __ffs(past) - 1;
                    return {b + winner, before + __shfl_sync(~0u, sum - own, winner)};
                }
                before += __shfl_sync(~0u, sum, kWarpSize - 1);
            }
            return {work.batch, before};
        }

        __device__ void count(const PagedWork& work, const Lengths& lengths, int b, int lane, bool by_item) {
            base = b;
            own = 0;
            if (b + lane < work.batch) {
                const Sequence sequence(work, b + lane, lengths);
                own = sequence.row_tiles * (by_item ? 1 : sequence.tiles);
                most = max_of(most, sequence.tiles);
            }
            sum = own;
#pragma unroll
            for (int step = 1; step < kWarpSize; step *= 2) {
                const int other = __shfl_up_sync(~0u, sum, step);
                if (lane >= step) sum += other;
            }
        }
    };
};

}  // namespace rawops
