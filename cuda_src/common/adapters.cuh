// Many adapters on one product: every row of the result gets y @ b of the adapter that it has.
//
// lora_shrink.cu has made y = scaling * x @ a and put the rows in the order of their adapters. So the 16 rows of an
// atom have one or a few adapters, and a warp runs through them one after the other, sixteen ranks at a time. y goes in
// as a sum of values of b's own type, so b is multiplied as it comes from memory.
#pragma once
#include "copy.cuh"
#include "epilogue.cuh"
#include "mma.cuh"

namespace rawops {

// As _lora_multi.py packs it. A slice is a range of columns of c with a low-rank part of its own.
struct Adapters {
    const void* b;           // (max_loras, N, slot_rank): the ranks of a column side by side, as many as the slice has
    const float* y;          // (slices, splits, capacity, slot_rank): the sum over the splits is y
    const int* ranks;        // (max_loras, slices)
    const int* non_finite;   // (max_loras,): whether b has an infinity or a NaN
    const int* slices;       // (slices, 2): first column and the one past the last
    const int* slots;        // of each row in their order; max_loras: it has none, and comes last
    const int* rows;         // which row of the result that is
    int64_t x_row;           // stride of x in that order
    int max_loras, slice_count, slot_rank, splits, capacity, M, N;
};

// The columns of b that belong to a warp's atoms: with PARTS == 2 the first half is gate, the second half up.
template <int ATOMS_, int PARTS> struct WarpColumns {
    static constexpr int ATOMS = ATOMS_, WIDTH = ATOMS / PARTS * 8;
    int n, cols;  // first column and number of columns of one part

    __device__ int begin(int atom) const { return n + atom * 8 % WIDTH + atom * 8 / WIDTH * cols; }
    __device__ int end(int atom) const { return (atom * 8 / WIDTH + 1) * cols; }
    __device__ bool meets(int from, int to) const {
        const bool first = from < min_of(n + WIDTH, cols) && to > n;
        return first || (PARTS == 2 && from < min_of(n + WIDTH, cols) + cols && to > n + cols);
    }
};

// y of a thread's two rows as sums of COUNT values of T, in the order in which an atom takes them, times `scale`.
template <class T> struct RankParts;

template <> struct RankParts<__nv_bfloat16> {
    static constexpr int COUNT = 3;
    static constexpr uint32_t kExponent = 0x7f807f80;
    uint32_t values[COUNT][4];
    static constexpr float scale[2] = {1, 1};

    // All 24 bits: each part is cut off the rest, which is exact.
    __device__ void split(int half, float (&y)[4]) {
#pragma unroll
        for (int part = 0; part < COUNT; ++part) {
            uint32_t cut[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                cut[i] = __float_as_uint(y[i]) & 0xffff0000;
                const float taken = __uint_as_float(cut[i]);
                y[i] = y[i] == taken ? 0 : y[i] - taken;
            }
            values[part][half] = cut[0] >> 16 | cut[1];
            values[part][half + 2] = cut[2] >> 16 | cut[3];
        }
    }
};

template <> struct RankParts<__half> {
    static constexpr int COUNT = 2;
    static constexpr uint32_t kExponent = 0x7c007c00;
    uint32_t values[COUNT][4];
    float scale[2];

    // 22 bits, of which the largest entry of a row comes to lie below 2^15: 65504 is no limit.
    __device__ void split(int half, float (&y)[4]) {
        uint32_t largest = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) largest = max(largest, __float_as_uint(y[i]) & 0x7fffffff);
        largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
        const int exponent = clamp(largest >> 23, 30, 254);
        scale[half] = __uint_as_float((exponent - 14) << 23);
        const float inverse = __uint_as_float((254 + 14 - exponent) << 23);
#pragma unroll
        for (int i = 0; i < 4; ++i) y[i] *= inverse;
#pragma unroll
        for (int part = 0; part < COUNT; ++part) {
            __half2 taken[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                taken[i] = __floats2half2_rn(y[i * 2], y[i * 2 + 1]);
                const float2 wide = __half22float2(taken[i]);
                y[i * 2] = y[i * 2] == wide.x ? 0 : y[i * 2] - wide.x;
                y[i * 2 + 1] = y[i * 2 + 1] == wide.y ? 0 : y[i * 2 + 1] - wide.y;
            }
            values[part][half] = *reinterpret_cast<uint32_t*>(&taken[0]);
            values[part][half + 2] = *reinterpret_cast<uint32_t*>(&taken[1]);
        }
    }
};

// Of two elements, those that are infinite or NaN become 0.
template <class T> __device__ inline uint32_t finite_or_zero(uint32_t pair) {
    constexpr uint32_t LOW = RankParts<T>::kExponent & 0xffff, HIGH = RankParts<T>::kExponent & 0xffff0000;
    return ((pair & LOW) == LOW ? 0 : pair & 0xffff) | ((pair & HIGH) == HIGH ? 0 : pair & 0xffff0000);
}

// What a warp adds to its 16 rows, from `first` on: pass by pass, each with sixteen ranks of a slice, and in a pass
// adapter by adapter. A source brings b: fetch() starts the copy of the columns from .. to - 1 of an adapter's ranks to
// one of its buffers, and read(atom) gives of there a thread's four ranks of column g. What read() gives for other
// columns, and for ranks that the adapter does not have, does not matter.
template <class T, class Columns, class Source> class AdapterPasses {
public:
    int result_row;  // of row `lane`

    // Reads y of the first pass and fetches its first adapters, for add() to find them there.
    __device__ AdapterPasses(const Adapters& adapters_, const Columns& columns_, const Source& source_, int first_,
                             int lane_)
        : result_row(0),
          adapters(adapters_),
          columns(columns_),
          source(source_),
          first(first_),
          lane(lane_),
          slot(adapters_.max_loras),
          rank(0),
          slice(-1),
          begin(0),
          todo(0) {
        if (lane < min_of(adapters.M - first, 16)) {
            slot = adapters.slots[first + lane];
            result_row = adapters.rows[first + lane];
        }
        non_finite = slot < adapters.max_loras && adapters.non_finite[slot] != 0;
        advance();
    }

    // acc += y @ b. Rows without an adapter stay as they are, bit for bit.
    __device__ void add(float (&acc)[Columns::ATOMS][4]) {
#pragma unroll 1
        while (slice < adapters.slice_count) {
            int buffer = 0;
#pragma unroll 1
            while (todo != 0) {
                const int row = __ffs(todo) - 1;
                const uint32_t members = rows_like(todo);
                cp_async_wait<Source::BUFFERS - 1>();
                __syncwarp();
                add_adapter(acc, members, __shfl_sync(~0u, rank, row), __shfl_sync(~0u, non_finite, row), buffer);
                __syncwarp();
                todo &= ~members;
                fetch_next(buffer);
                buffer = buffer + 1 < Source::BUFFERS ? buffer + 1 : 0;
            }
            advance();
        }
    }

private:
    const Adapters& adapters;
    const Columns columns;
    Source source;
    RankParts<T> y;
    int first, lane;
    int slot, rank, non_finite;  // of row `lane`
    int slice, begin, from, to;  // of the pass
    uint32_t todo, unfetched;    // rows

    // The rows with the slot of the first one of a set.
    __device__ uint32_t rows_like(uint32_t set) const {
        return __ballot_sync(~0u, slot == __shfl_sync(~0u, slot, __ffs(set) - 1));
    }

    // To the next pass that has anything to do for this warp.
    __device__ void advance() {
        begin += 16;
        todo = __ballot_sync(~0u, rank > begin);
        while (todo == 0) {
            if (++slice >= adapters.slice_count) return;
            from = adapters.slices[slice * 2];
            to = adapters.slices[slice * 2 + 1];
            begin = rank = 0;
            if (slot < adapters.max_loras && columns.meets(from, to)) {
                rank = adapters.ranks[slot * adapters.slice_count + slice];
            }
            todo = __ballot_sync(~0u, rank > 0);
        }
        unfetched = todo;
#pragma unroll
        for (int buffer = 0; buffer < Source::BUFFERS; ++buffer) fetch_next(buffer);
        read_y();
    }

    __device__ void fetch_next(int buffer) {
        if (unfetched != 0) {
            source.fetch(columns, __shfl_sync(~0u, slot, __ffs(unfetched) - 1), begin, from, to, buffer);
            unfetched &= ~rows_like(unfetched);
        }
        cp_async_commit();
    }

    // A thread has ranks 4t .. 4t + 3 of rows g and g + 8, as it has them of b.
    __device__ void read_y() {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = lane / 4 + half * 8, own = begin + lane % 4 * 4, count = __shfl_sync(~0u, rank, row) - own;
            float values[4] = {};
            if (count > 0) {
                const int64_t plane = int64_t(adapters.capacity) * adapters.slot_rank;
                const float* at = adapters.y + slice * adapters.splits * plane +
                                  int64_t(first + row) * adapters.slot_rank + own;
#pragma unroll 8
                for (int split = 0; split < adapters.splits; ++split, at += plane) {
                    const auto part = *reinterpret_cast<const Vector<float, 4>*>(at);
#pragma unroll
                    for (int i = 0; i < 4; ++i) values[i] += part.data[i];
                }
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) values[i] = i < count ? values[i] : 0;
            y.split(half, values);
        }
    }

    // The part of one adapter, whose rows are `members`.
    __device__ void add_adapter(float (&acc)[Columns::ATOMS][4], uint32_t members, int of_rank, bool of_non_finite,
                                int buffer) const {
        const int count = of_rank - begin - lane % 4 * 4;  // of this thread's ranks
        const uint32_t low = count >= 2 ? ~0u : count == 1 ? 0xffff : 0;
        const uint32_t high = count >= 4 ? ~0u : count == 3 ? 0xffff : 0;
        const bool inside[2] = {(members >> lane / 4 & 1) != 0, (members >> lane / 4 + 8 & 1) != 0};
#pragma unroll
        for (int atom = 0; atom < Columns::ATOMS; ++atom) {
            uint2 b = source.read(atom, buffer);
            b.x &= low;
            b.y &= high;
            float sum[4] = {};
#pragma unroll
            for (int part = 0; part < RankParts<T>::COUNT; ++part) {
                MmaAtom<T>::multiply(sum, y.values[part], b.x, b.y);
                if (part == 0 && of_non_finite) {  // they have met the first part, and would make NaN of infinity
                    b.x = finite_or_zero<T>(b.x);
                    b.y = finite_or_zero<T>(b.y);
                }
            }
            const int n = columns.begin(atom) + lane % 4 * 2 - from;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (inside[i / 2] && uint32_t(n + i % 2) < uint32_t(to - from)) {
                    acc[atom][i] = fmaf(sum[i], y.scale[i / 2], acc[atom][i]);
                }
            }
        }
    }
};

// An epilogue whose rows are put back where they were.
template <class Epilogue> struct RowsPutBack {
    using Value = typename Epilogue::Value;
    static constexpr int WIDTH = Epilogue::WIDTH;
    static constexpr bool kGated = Epilogue::kGated;

    const Epilogue& epilogue;
    const Adapters& adapters;

    __device__ void finish(int m, int n, typename Epilogue::Group& value, typename Epilogue::Group& up) const {
        if (m < adapters.M) epilogue.finish(adapters.rows[m], n, value, up);
    }
};

}  // namespace rawops
