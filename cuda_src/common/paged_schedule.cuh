// Which block works on what: sequences, KV heads and rows of queries in one line of tiles, cut into equal ranges.
//
// An item is one KV head of one sequence with up to ROWS rows, a row being one query of one query head. Its keys are
// walked in tiles. All tiles of all items, in order, are numbered, and each block takes one range of numbers: this
// arithmetic is done here, from the lengths on the device, so a captured launch follows them as they change.
#pragma once
#include "paged_pool.cuh"

namespace rawops {

constexpr int kItemRows = 16;  // one MMA
constexpr int kUnlimited = 0x7fffffff;

struct PagedWork {
    const int *seq_lens, *cu_seqlens_q;  // no cu_seqlens_q: one query a sequence
    int batch, total_q, kv_heads, group;
    int window_left, window_right;  // kUnlimited for none
    int num_splits;                 // 0: as many as balance the blocks
    int min_tiles;                  // the least that a block is worth
};

// Keys begin <= j < end, for a query or for a tile.
struct KeyRange {
    int begin, end;
};

template <int TOKENS> struct Sequence {
    int q_begin, q_count, length;
    int first_key;  // that any query sees; tiles are counted from the one that holds it
    int tiles, row_tiles, items;

    __device__ Sequence() : q_begin(0), q_count(0), length(0), first_key(0), tiles(0), row_tiles(0), items(0) {}
    __device__ Sequence(const PagedWork& work, int b, int capacity) : q_begin(b), q_count(1) {
        if (work.cu_seqlens_q) {
            q_begin = clamp(work.cu_seqlens_q[b], 0, work.total_q);
            q_count = clamp(work.cu_seqlens_q[b + 1], q_begin, work.total_q) - q_begin;
        }
        length = clamp(work.seq_lens[b], 0, capacity);
        first_key = visible(work, 0).begin;
        tiles = max_of(ceil_div(length, TOKENS) - first_key / TOKENS, 1);  // one for no keys: zeros are to be written
        row_tiles = ceil_div(q_count * work.group, kItemRows);
        items = work.kv_heads * row_tiles;
    }

    __device__ int first_token(int tile) const { return (first_key / TOKENS + tile) * TOKENS; }
    __device__ int head(int item) const { return row_tiles == 1 ? item : item / row_tiles; }

    // What query i sees: the window lies round the key that is as far from the last as the query from the last.
    __device__ KeyRange visible(const PagedWork& work, int i) const {
        const int64_t own = int64_t(i) + length - q_count;
        const int64_t begin = own - work.window_left, end = own + work.window_right + 1;
        return {int(begin < 0 ? 0 : begin > length ? length : begin), int(end < 0 ? 0 : end < length ? end : length)};
    }
};

// A place in the line: a tile of an item of a sequence.
template <int TOKENS> struct Place {
    int b, item, tile;
    Sequence<TOKENS> sequence;

    __device__ void advance(const PagedWork& work, int capacity, int steps) {
        tile += steps;
        while (tile >= sequence.tiles || item >= sequence.items) {
            if (item < sequence.items) tile -= sequence.tiles, ++item;
            if (item < sequence.items) continue;
            item = 0;
            if (++b >= work.batch) return;
            sequence = Sequence<TOKENS>(work, b, capacity);
        }
    }
};

// Which blocks share the tiles of an item, and where its partial results lie.
struct Shares {
    int first, count;  // the blocks; one has the item to itself
    int first_slot;    // of the first block; the others use their even slots
};

template <int TOKENS> class Schedule {
public:
    Place<TOKENS> begin;  // of this block's range
    int count;            // tiles of the range, 0: nothing to do

    // By all lanes of a warp alike.
    __device__ Schedule(const PagedWork& work, int capacity, int block, int blocks, int lane) : count(0) {
        const bool by_item = work.num_splits > 0;
        const int split = by_item ? block % work.num_splits : 0;
        int number = by_item ? block / work.num_splits : kUnlimited;
        const Count first = count_sequences(work, capacity, 0, lane, by_item);
        Found found = find(work, capacity, number, lane, by_item, first);
        if (!by_item) {
            const int total = found.before, used = clamp(total / work.min_tiles, 1, blocks);
            quota = total / used;
            longer = total % used;
            count = block < used ? quota + (block < longer) : 0;
            number = flat = block * quota + min_of(block, longer);
            found = find(work, capacity, number, lane, false, first);
        }
        if (found.b >= work.batch) {
            count = 0;
            return;
        }
        begin = {found.b, number - found.before, 0, Sequence<TOKENS>(work, found.b, capacity)};
        const int tiles = begin.sequence.tiles;
        if (by_item) {
            splits = min_of(work.num_splits, tiles);
            flat = block - split;
            begin.tile = int(int64_t(tiles) * split / splits);
            count = split < splits ? int(int64_t(tiles) * (split + 1) / splits) - begin.tile : 0;
        } else {
            begin.tile = begin.item % tiles;
            begin.item /= tiles;
        }
    }

    // Of the item of a place that is `done` tiles into the range.
    __device__ Shares shares(const PagedWork& work, const Place<TOKENS>& place, int done) const {
        if (work.num_splits) return {flat, splits, 2 * flat};
        const int item_begin = flat + done - place.tile;
        const int first = owner(item_begin), last = owner(item_begin + place.sequence.tiles - 1);
        const int first_begin = first * quota + min_of(first, longer);
        return {first, last - first + 1, 2 * first + (first_begin != item_begin)};
    }

private:
    struct Found {
        int b, before;
    };
    int flat;           // number of the range's first tile, or of the block that has the item's first split
    int quota, longer;  // `longer` blocks have quota + 1 tiles, the rest quota
    int splits;

    __device__ int owner(int tile) const {
        const int in_longer = longer * (quota + 1);
        return tile < in_longer ? tile / (quota + 1) : longer + (tile - in_longer) / quota;
    }

    // Tiles (or items) of this lane's sequence among 32, and of all of them up to it.
    struct Count {
        int own, sum;
    };
    static __device__ Count count_sequences(const PagedWork& work, int capacity, int base, int lane, bool by_item) {
        int own = 0;
        if (base + lane < work.batch) {
            const Sequence<TOKENS> sequence(work, base + lane, capacity);
            own = by_item ? sequence.items : sequence.items * sequence.tiles;
        }
        int sum = own;
#pragma unroll
        for (int step = 1; step < kWarpSize; step *= 2) {
            const int other = __shfl_up_sync(~0u, sum, step);
            if (lane >= step) sum += other;
        }
        return {own, sum};
    }

    // The sequence that holds a number, and how many lie before it; the end and the total for a number past the last.
    // `first` is the count of the first 32 sequences, most often all there are.
    static __device__ Found find(const PagedWork& work, int capacity, int number, int lane, bool by_item, Count first) {
        int before = 0;
        for (int base = 0; base < work.batch; base += kWarpSize) {
            const Count count = base == 0 ? first : count_sequences(work, capacity, base, lane, by_item);
            const uint32_t past = __ballot_sync(~0u, before + count.sum > number);
            if (past) {
                const int winner = __ffs(past) - 1;
                return {base + winner, before + __shfl_sync(~0u, count.sum - count.own, winner)};
            }
            before += __shfl_sync(~0u, count.sum, kWarpSize - 1);
        }
        return {work.batch, before};
    }
};

}  // namespace rawops
