// Many adapters on one product: every row of the result gets y @ b of the adapter that it has.
//
// lora_shrink.cu has made y = scaling * x @ a and put the rows in the order of their adapters. So the 16 rows of an
// atom have one or a few adapters, and a warp runs through them one after the other, sixteen ranks at a time. y goes in
// as a sum of values of b's own type, so b is multiplied as it comes from memory.
#pragma once
#include "copy.cuh"
#include "epilogue.cuh"
#include "mma.cuh"
#include "rank_parts.cuh"

namespace rawops {

// What is known of a row, in the order of the adapters.
struct alignas(16) RowInfo {
    int slot, row, rank, non_finite;  // max_loras: it has none; where it was; rank in the first slice; of b in the slot
};

// As _lora_multi_product.py packs it. A slice is a range of columns of c with a low-rank part of its own.
struct Adapters {
    const void* b;         // (max_loras, N, slot_rank): the ranks of a column side by side, see place_of_rank
    const float* y;        // (slices, capacity, slot_rank)
    const int* ranks;      // (max_loras, slices)
    const int* slices;     // (slices, 2): first column and the one past the last
    const RowInfo* infos;  // of each row
    int64_t x_row;         // stride of x in that order
    int max_loras, slice_count, slot_rank, capacity, M, N;
    int first_from, first_to;  // columns of the first slice
};

// Where b has a rank of column n: the halves of sixteen change places in the last four of eight columns. So what lies
// side by side in memory is, once copied, swizzled as wgmma wants rows of 32 bytes.
__device__ inline int place_of_rank(int rank, int n) { return rank ^ (n & 4) * 2; }

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

// What a warp adds to its 16 rows, from `first` on: pass by pass, each with sixteen ranks of a slice, and in a pass
// adapter by adapter. A source brings b: fetch() starts the copy of the columns from .. to - 1 of an adapter's ranks to
// one of its buffers, and read(atom) gives of there a thread's four ranks of column g. What read() gives for other
// columns, and for ranks that the adapter does not have, does not matter.
template <class T, class Columns, class Source> class AdapterPasses {
public:
    // Starts to read y of the first pass and fetches its first adapters, for add() to find them there.
    __device__ AdapterPasses(const Adapters& adapters_, const Columns& columns_, const Source& source_, int first_,
                             int lane_)
        : adapters(adapters_), columns(columns_), source(source_), first(first_), lane(lane_), slice(-1), begin(0) {
        own = {adapters.max_loras, 0, 0, 0};
        if (lane < min_of(adapters.M - first, 16)) own = adapters.infos[first + lane];
        own.rank |= own.non_finite << 31;  // in one register
        rank = 0;
        advance();
    }

    __device__ int result_row() const { return own.row; }  // of row `lane`

    // acc += y @ b. Rows without an adapter stay as they are, bit for bit.
    __device__ void add(float (&acc)[Columns::ATOMS][4]) {
#pragma unroll 1
        while (slice < adapters.slice_count) {
            int buffer = 0;
            split_y();
#pragma unroll 1
            while (todo != 0) {
                const int row = __ffs(todo) - 1;
                const uint32_t members = rows_like(todo);
                cp_async_wait<Source::BUFFERS - 1>();
                __syncwarp();
                add_adapter(acc, members, __shfl_sync(~0u, rank, row), __shfl_sync(~0u, own.rank, row) < 0, buffer);
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
    float read[2][4];  // of y, before it is split
    int first, lane;
    RowInfo own;                 // of row `lane`
    int rank;                    // likewise, in the slice of the pass
    int slice, begin, from, to;  // of the pass
    uint32_t todo, unfetched;    // rows

    // The rows with the slot of the first one of a set.
    __device__ uint32_t rows_like(uint32_t set) const {
        return __ballot_sync(~0u, own.slot == __shfl_sync(~0u, own.slot, __ffs(set) - 1));
    }

    // To the next pass that has anything to do for this warp.
    __device__ void advance() {
        begin += 16;
        if (slice < 0) read_y(0, 0);  // most likely what is needed first
        todo = __ballot_sync(~0u, rank > begin);
        while (todo == 0) {
            if (++slice >= adapters.slice_count) return;
            begin = 0;
            if (slice == 0) {
                from = adapters.first_from;
                to = adapters.first_to;
                rank = columns.meets(from, to) ? own.rank & 0x7fffffff : 0;
            } else {
                from = adapters.slices[slice * 2];
                to = adapters.slices[slice * 2 + 1];
                const bool may = own.slot < adapters.max_loras && columns.meets(from, to);
                rank = may ? adapters.ranks[own.slot * adapters.slice_count + slice] : 0;
            }
            todo = __ballot_sync(~0u, rank > 0);
        }
        if (slice > 0 || begin > 0) read_y(slice, begin);
        unfetched = todo;
#pragma unroll
        for (int buffer = 0; buffer < Source::BUFFERS; ++buffer) fetch_next(buffer);
    }

    __device__ void fetch_next(int buffer) {
        if (unfetched != 0) {
            source.fetch(columns, __shfl_sync(~0u, own.slot, __ffs(unfetched) - 1), begin, from, to, buffer);
            unfetched &= ~rows_like(unfetched);
        }
        cp_async_commit();
    }

    // A thread has ranks 4t .. 4t + 3 of rows g and g + 8, as it has them of b; also what no adapter has.
    __device__ void read_y(int of_slice, int from_rank) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = first + lane / 4 + half * 8;
            const float* at = adapters.y + (int64_t(of_slice) * adapters.capacity + row) * adapters.slot_rank +
                              from_rank + lane % 4 * 4;
            Vector<float, 4> values = {};
            if (row < adapters.M) values = *reinterpret_cast<const Vector<float, 4>*>(at);
#pragma unroll
            for (int i = 0; i < 4; ++i) read[half][i] = values.data[i];
        }
    }
    __device__ void split_y() {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int count = __shfl_sync(~0u, rank, lane / 4 + half * 8) - begin - lane % 4 * 4;
#pragma unroll
            for (int i = 0; i < 4; ++i) read[half][i] = i < count ? read[half][i] : 0;
            y.split(half, read[half]);
        }
    }

    // The part of one adapter, whose rows are `members`.
    __device__ void add_adapter(float (&acc)[Columns::ATOMS][4], uint32_t members, int of_rank, bool of_non_finite,
                                int buffer) const {
        const int count = of_rank - begin - lane % 4 * 4;  // of this thread's ranks
        const uint32_t low = count >= 2 ? ~0u : count == 1 ? 0xffff : 0;
        const uint32_t high = count >= 4 ? ~0u : count == 3 ? 0xffff : 0;
        const bool inside[2] = {(members >> lane / 4 & 1) != 0, (members >> lane / 4 + 8 & 1) != 0};
        constexpr int GROUP = Source::GROUP;  // products that do not wait for each other
#pragma unroll
        for (int group = 0; group < Columns::ATOMS; group += GROUP) {
            uint2 b[GROUP];
            float sum[GROUP][4] = {};
#pragma unroll
            for (int i = 0; i < GROUP; ++i) {
                b[i] = source.read(group + i, buffer);
                b[i].x &= low;
                b[i].y &= high;
            }
#pragma unroll
            for (int part = 0; part < RankParts<T>::COUNT; ++part) {
#pragma unroll
                for (int i = 0; i < GROUP; ++i) MmaAtom<T>::multiply(sum[i], y.values[part], b[i].x, b[i].y);
                if (part > 0 || !of_non_finite) continue;
#pragma unroll
                for (int i = 0; i < GROUP; ++i) {  // they have met the first part, and would make NaN of infinity
                    b[i].x = finite_or_zero<T>(b[i].x);
                    b[i].y = finite_or_zero<T>(b[i].y);
                }
            }
#pragma unroll
            for (int i = 0; i < GROUP * 4; ++i) {
                const int atom = group + i / 4, half = i / 2 % 2, n = columns.begin(atom) + lane % 4 * 2 + i % 2 - from;
                if (inside[half] && uint32_t(n) < uint32_t(to - from)) {
                    acc[atom][i % 4] = fmaf(sum[i / 4][i % 4], y.scale[half], acc[atom][i % 4]);
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
        if (m < adapters.M) epilogue.finish(adapters.infos[m].row, n, value, up);
    }
};

}  // namespace rawops
