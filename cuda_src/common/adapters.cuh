// Many adapters on one product: every row of the result gets y @ b of the adapter that it has.
//
// lora_shrink.cu has made y = scaling * x @ a and put the rows in the order of their adapters. So the 16 rows of an
// atom have one or a few adapters, and all atoms of a warp run through them one after the other.
#pragma once
#include "epilogue.cuh"
#include "split_tf32.cuh"

namespace rawops {

// As _lora_multi.py packs it. A slice is a range of columns of c with a low-rank part of its own.
struct Adapters {
    const void* b;      // (max_loras, N, slot_rank): the ranks of a column side by side, filled up to the slice's rank
    const float* y;     // (slices, splits, capacity, slot_rank): the sum over the splits is y
    const int* ranks;   // (max_loras, slices)
    const int* slices;  // (slices, 2): first column and the one past the last
    const int* slots;   // of each row in their order; max_loras: it has none, and comes last
    const int* rows;    // which row of the result that is
    int64_t x_row;      // stride of x in that order
    int max_loras, slice_count, slot_rank, splits, capacity, M, N;
};

// Columns of b from `begin` on, up to `end`.
struct Columns {
    int begin, end;
};

// Sixteen ranks of y for the rows row .. end - 1 of an atom; zero elsewhere. Ranks 4t and 4t + 1 of a thread take the
// places t and t + 4 of the first step, 4t + 2 and 4t + 3 those of the second, which is how b comes from memory.
__device__ inline void read_ranks(uint32_t (&high)[2][4], uint32_t (&low)[2][4], const Adapters& adapters, int slice,
                                  int begin, int rank, int first, int row, int end, int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int own = lane / 4 + half * 8;
        float y[4] = {};
        if (own >= row && own < end) {
            const float* from = adapters.y + (int64_t(slice) * adapters.splits * adapters.capacity + first + own) *
                                                 adapters.slot_rank + begin + lane % 4 * 4;
#pragma unroll 4
            for (int split = 0; split < adapters.splits; ++split) {
                const auto part = *reinterpret_cast<const Vector<float, 4>*>(from);
#pragma unroll
                for (int i = 0; i < 4; ++i) y[i] += part.data[i];
                from += int64_t(adapters.capacity) * adapters.slot_rank;
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float value = begin + lane % 4 * 4 + i < rank ? y[i] : 0;
            split_tf32(high[i / 2][half + i % 2 * 2], low[i / 2][half + i % 2 * 2], value);
        }
    }
}

// acc += y @ b for sixteen ranks of one adapter. What is not of its rows and of the slice's columns stays as it is, bit
// for bit, whatever b and y hold.
template <class T, int ATOMS, class ColumnsOf>
__device__ inline void add_ranks(float (&acc)[ATOMS][4], const Adapters& adapters, int slot, int slice, int begin,
                                 int rank, int first, int row, int end, int lane, ColumnsOf columns_of) {
    constexpr int GROUP = ATOMS % 8 == 0 ? 8 : ATOMS % 4 == 0 ? 4 : 2;  // atoms whose b is under way together
    const int from = adapters.slices[slice * 2], to = adapters.slices[slice * 2 + 1];
    const int own = begin + lane % 4 * 4, count = rank - own;  // this thread's ranks
    const T* b = static_cast<const T*>(adapters.b) + int64_t(slot) * adapters.N * adapters.slot_rank + own;
    const bool inside[2] = {lane / 4 >= row && lane / 4 < end, lane / 4 + 8 >= row && lane / 4 + 8 < end};
    uint32_t high[2][4], low[2][4];
    read_ranks(high, low, adapters, slice, begin, rank, first, row, end, lane);
#pragma unroll
    for (int group = 0; group < ATOMS; group += GROUP) {
        Vector<T, 4> values[GROUP];
        bool any = false;
#pragma unroll
        for (int j = 0; j < GROUP; ++j) {
            const Columns columns = columns_of(group + j);
            const int begins = max_of(columns.begin, from), ends = min_of(min_of(columns.begin + 8, columns.end), to);
            any |= begins < ends;
            const int n = columns.begin + lane / 4;
            values[j] = {};
            if (n >= begins && n < ends && count > 0) {
                values[j] = *reinterpret_cast<const Vector<T, 4>*>(b + int64_t(n) * adapters.slot_rank);
            }
        }
        if (!any) continue;
#pragma unroll
        for (int j = 0; j < GROUP; ++j) {
            float(&d)[4] = acc[group + j];
            float sum[4] = {d[0], d[1], d[2], d[3]}, v[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) v[i] = i < count ? widen(values[j].data[i]) : 0;
            multiply_split(sum, high[0], low[0], v[0], v[1]);
            multiply_split(sum, high[1], low[1], v[2], v[3]);
            const int n = columns_of(group + j).begin + lane % 4 * 2;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (inside[i / 2] && n + i % 2 >= from && n + i % 2 < to) d[i] = sum[i];
            }
        }
    }
}

// acc += y @ b for a warp: 16 rows from `first` on, and 8 * ATOMS columns, those of atom j from columns_of(j).
template <class T, int ATOMS, class ColumnsOf>
__device__ inline void add_adapters(float (&acc)[ATOMS][4], const Adapters& adapters, int first, int lane,
                                    ColumnsOf columns_of) {
    const int rows = min_of(adapters.M - first, 16);
    const int own = lane < rows ? adapters.slots[first + lane] : adapters.max_loras;
    int end;
#pragma unroll 1
    for (int row = 0; row < rows; row = end) {
        const int slot = __shfl_sync(~0u, own, row);
        if (slot == adapters.max_loras) break;
        end = row + __popc(__ballot_sync(~0u, own == slot));
#pragma unroll 1
        for (int slice = 0; slice < adapters.slice_count; ++slice) {
            const int rank = adapters.ranks[slot * adapters.slice_count + slice];
#pragma unroll 1
            for (int begin = 0; begin < rank; begin += 16) {
                add_ranks<T>(acc, adapters, slot, slice, begin, rank, first, row, end, lane, columns_of);
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
