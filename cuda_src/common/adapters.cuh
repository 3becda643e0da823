// Many adapters on one product: every row of the result gets y @ b of the adapter that it has.
//
// lora_shrink.cu has made y = scaling * x @ a and put the rows in the order of their adapters. So the 16 rows of an
// atom have one or a few adapters, and a warp runs through them one after the other, sixteen ranks at a time. y goes in
// as a sum of values of b's own type, so b is multiplied as it comes from memory.
#pragma once
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

// Sixteen ranks of one adapter in one slice, for the rows row .. end - 1 of an atom and the columns from .. to - 1.
struct RankStep {
    int row, end, slot, slice, rank, begin, from, to;
};

// All steps of a warp, which has 16 rows from `first` on.
template <class Columns> class RankSteps {
public:
    RankStep now;

    __device__ RankSteps(const Adapters& adapters_, int first, const Columns& columns_, int lane)
        : adapters(adapters_), columns(columns_), rows(min_of(adapters_.M - first, 16)) {
        own = lane < rows ? adapters.slots[first + lane] : adapters.max_loras;
        now.end = 0;
        now.slice = adapters.slice_count - 1;
        now.rank = now.begin = 0;
        advance();
    }
    __device__ bool any() const { return now.row < rows; }

    __device__ void advance() {
        now.begin += 16;
        while (now.begin >= now.rank) {
            if (++now.slice >= adapters.slice_count) {
                now.row = now.end;
                if (now.row >= rows) return;
                now.slot = __shfl_sync(~0u, own, now.row);
                if (now.slot == adapters.max_loras) {
                    now.row = rows;
                    return;
                }
                now.end = now.row + __popc(__ballot_sync(~0u, own == now.slot));
                now.slice = 0;
            }
            now.from = adapters.slices[now.slice * 2];
            now.to = adapters.slices[now.slice * 2 + 1];
            now.rank = now.begin = 0;
            if (columns.meets(now.from, now.to)) now.rank = adapters.ranks[now.slot * adapters.slice_count + now.slice];
        }
    }

private:
    const Adapters& adapters;
    const Columns& columns;
    int rows, own;
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

// Reads y for a step: a thread has ranks 4t .. 4t + 3 of rows g and g + 8, as it has them of b.
template <class T>
__device__ inline void read_ranks(RankParts<T>& parts, const Adapters& adapters, const RankStep& step, int first,
                                  int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = lane / 4 + half * 8, rank = step.begin + lane % 4 * 4;
        float y[4] = {};
        if (row >= step.row && row < step.end) {
            const int64_t plane = int64_t(adapters.capacity) * adapters.slot_rank;
            const float* from = adapters.y + step.slice * adapters.splits * plane +
                                int64_t(first + row) * adapters.slot_rank + rank;
#pragma unroll 4
            for (int split = 0; split < adapters.splits; ++split, from += plane) {
                const auto partial = *reinterpret_cast<const Vector<float, 4>*>(from);
#pragma unroll
                for (int i = 0; i < 4; ++i) y[i] += partial.data[i];
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) y[i] = rank + i < step.rank ? y[i] : 0;
        parts.split(half, y);
    }
}

// Of two elements, those that are infinite or NaN become 0.
template <class T> __device__ inline uint32_t finite_or_zero(uint32_t pair) {
    constexpr uint32_t LOW = RankParts<T>::kExponent & 0xffff, HIGH = RankParts<T>::kExponent & 0xffff0000;
    return ((pair & LOW) == LOW ? 0 : pair & 0xffff) | ((pair & HIGH) == HIGH ? 0 : pair & 0xffff0000);
}

// acc += y @ b for one step. b.read(atom) gives a thread's four ranks of column g of an atom; what it gives for other
// columns and ranks than those of the step does not matter. What is not of the step's rows and columns stays as it is.
template <class T, class Columns, class Source>
__device__ inline void add_step(float (&acc)[Columns::ATOMS][4], const Adapters& adapters, const RankStep& step,
                                const Columns& columns, const Source& b, int first, int lane) {
    RankParts<T> parts;
    read_ranks(parts, adapters, step, first, lane);
    const int count = step.rank - step.begin - lane % 4 * 4;  // of this thread's ranks
    const uint32_t masks[2] = {count >= 2 ? ~0u : count == 1 ? 0xffff : 0, count >= 4 ? ~0u : count == 3 ? 0xffff : 0};
    const bool non_finite = adapters.non_finite[step.slot] != 0;
    const int g = lane / 4;
    const bool inside[2] = {g >= step.row && g < step.end, g + 8 >= step.row && g + 8 < step.end};
#pragma unroll
    for (int atom = 0; atom < Columns::ATOMS; ++atom) {
        uint2 ranks = b.read(atom);
        ranks.x &= masks[0];
        ranks.y &= masks[1];
        float sum[4] = {};
#pragma unroll
        for (int part = 0; part < RankParts<T>::COUNT; ++part) {
            MmaAtom<T>::multiply(sum, parts.values[part], ranks.x, ranks.y);
            if (part == 0 && non_finite) {  // they have met the first part; the others would make NaN of infinity
                ranks.x = finite_or_zero<T>(ranks.x);
                ranks.y = finite_or_zero<T>(ranks.y);
            }
        }
        const int n = columns.begin(atom) + lane % 4 * 2 - step.from;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (inside[i / 2] && uint32_t(n + i % 2) < uint32_t(step.to - step.from)) {
                acc[atom][i] = fmaf(sum[i], parts.scale[i / 2], acc[atom][i]);
            }
        }
    }
}

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
