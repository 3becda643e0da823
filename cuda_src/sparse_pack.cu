// The copy of a matrix that spmv_packed reads: where a block of columns begins in each row, windows of rows sorted by
// length, and the entries of 32 rows side by side.
#include "common/lookback.cuh"
#include "common/spmv.cuh"

namespace rawops {

// bounds (blocks + 1, rows): the entry from which on a row's columns lie in a block. Columns rise within a row.
template <class P>
__global__ void __launch_bounds__(256) pack_bounds(const int* __restrict__ indices, const P* __restrict__ indptr,
                                                   P* __restrict__ bounds, int rows, int blocks, int width) {
    const int64_t i = int64_t(blockIdx.x) * 256 + threadIdx.x;
    if (i >= (blocks + 1) * int64_t(rows)) return;
    const int block = int(i / rows), row = int(i % rows);
    P low = indptr[row], high = indptr[row + 1];
    if (block == blocks) low = high;
    while (low < high) {
        const P middle = low + (high - low) / 2;
        if (indices[middle] < int64_t(block) * width) low = middle + 1;
        else high = middle;
    }
    bounds[i] = low;
}

constexpr int kWindow = 1024;      // rows that are sorted together
constexpr int kWindowWarps = kWindow / kWarpSize;
constexpr int kWindowsAtOnce = 2;  // of a block of threads, where they are not sorted
constexpr int kPiece = 512;        // entries of a long row that a warp adds up
constexpr int kDepthBits = 31;     // of a word of two sums: depths, in 32 entries, and the number of pieces above them

__device__ inline Word depth_of(Word sum) { return sum & ((Word(1) << kDepthBits) - 1); }

// As in spmv_packed.cu.
struct __align__(8) Place {
    int start, depth;
};

struct Piece {
    int row, first, count, block;
    Place place;
    int unused[2];
};

// The keys of a block's threads, falling (bitonic). keys: two for each thread, which steps between warps use in turn.
__device__ inline uint32_t sort_keys(uint32_t key, uint32_t* keys) {
    const int place = threadIdx.x;
    int turn = 0;
    for (int size = 2; size <= kWindow; size *= 2) {
        for (int step = size / 2; step > 0; step /= 2) {
            uint32_t other;
            if (step < kWarpSize) {
                other = __shfl_xor_sync(~0u, key, step);
            } else {
                keys[turn + place] = key;
                __syncthreads();
                other = keys[turn + (place ^ step)];
                turn ^= kWindow;
            }
            const bool wants_larger = ((place & step) == 0) == ((place & size) == 0);
            if ((other > key) == wants_larger) key = other;
        }
    }
    return key;
}

// The sum over the lanes before this one; that of the whole warp goes to sums[warp].
template <class T> __device__ inline T sum_of_lanes_before(T value, Word* sums) {
    const int lane = threadIdx.x % kWarpSize;
    T sum = value;
    for (int step = 1; step < kWarpSize; step *= 2) {
        const T other = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += other;
    }
    if (lane == kWarpSize - 1) sums[threadIdx.x / kWarpSize] = sum;
    return sum - value;
}

// Makes what each warp has, in the order of warps, what is before each of them; returns the sum with theirs. A warp.
__device__ inline Word add_warps(Word sum, Word* sums) {
    __shared__ Word total;
    const int lane = threadIdx.x;
    const Word own = sums[lane];
    sums[lane] = sum + sum_of_lanes_before(own, &total);
    __syncwarp();
    return sum + total;
}

// Makes the sums of warps what is before each of them in the whole copy. Leaves the sum of this block of threads for
// those behind it, and the total of a block of columns at its last one. A warp.
template <bool kCuts, int COUNT, int PIECES>
__device__ inline void place_sums(Word (&slice_sums)[COUNT][kWindowWarps], Word (&piece_sums)[PIECES][kWindowWarps],
                                  Word* __restrict__ words, Word* __restrict__ totals, int number, int groups,
                                  int block) {
    const int lane = threadIdx.x;
    Word sum = 0;
    for (int i = 0; i < COUNT; ++i) sum = add_warps(sum, slice_sums[i]);
    for (int i = 0; i < COUNT && kCuts; ++i) sum = add_warps(sum, piece_sums[i]);
    if (lane == 0) leave_sum(words + number, number > 0 ? kOwnSum : kWholeSum, sum);
    const Word before = look_back_warp(words, number);
    for (int i = 0; i < COUNT; ++i) {
        slice_sums[i][lane] += before;
        if constexpr (kCuts) piece_sums[i][lane] += before;
    }
    if (lane == 0) {
        if (number > 0) leave_sum(words + number, kWholeSum, before + sum);
        if (number % groups == groups - 1) totals[block] = before + sum;
    }
}

// The depth of a slice, of the longest of its rows with `lanes` entries at a time; a length below 0 is none.
__device__ inline int depth_of_slice(int length, int lanes, int rows_per_slice) {
    int depth = length < 0 ? 0 : (length + lanes - 1) / lanes;
    for (int mask = rows_per_slice / 2; mask > 0; mask /= 2) {
        depth = max_of(depth, __shfl_xor_sync(~0u, depth, mask));
    }
    return depth;
}

// Where the slices of windows of rows are, and their rows, longest first (kSorted), or which of their rows there are. A
// row of more than `longest` entries is in no slice but in pieces, behind the slices of its block of threads. For
// those, where given: piece_ends (blocks, rows), how many pieces there are up to each row, and piece_stops, where a
// row's end. totals (blocks): what there is up to each block of columns, as a word of two sums. words and turns start
// as 0. Row r of block b has the entries bounds[b * stride + r] to bounds[(b + 1) * stride + r].
template <class P, bool kSorted, bool kCuts>
__global__ void __launch_bounds__(kWindow, 2)
    pack_windows(const P* __restrict__ bounds, int64_t stride, unsigned int rows, int groups, int longest, int lanes,
                 Place* __restrict__ places, int* __restrict__ slots, int* __restrict__ piece_ends,
                 int* __restrict__ piece_stops, Word* __restrict__ totals, Word* __restrict__ words,
                 Word* __restrict__ turns) {
    constexpr int COUNT = kSorted || kCuts ? 1 : kWindowsAtOnce;
    __shared__ uint32_t keys[kSorted ? 2 * kWindow : 1];
    __shared__ Word slice_sums[COUNT][kWindowWarps], piece_sums[kCuts ? COUNT : 1][kWindowWarps];
    __shared__ Word pieces[kCuts ? kWindow : 1];  // up to each row, from its warp's first on
    __shared__ int turn;
    if (threadIdx.x == 0) turn = take_turn(turns);
    __syncthreads();
    const int number = turn, block = number / groups, first_window = number % groups * COUNT;
    const int place = threadIdx.x, warp = place / kWarpSize;
    const int rows_per_slice = kWarpSize / lanes, slice_lane = place % rows_per_slice;
    int length[COUNT], depth[COUNT], sorted_row = 0;
    int slices_before[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const unsigned int row = (first_window + i) * unsigned(kWindow) + place;
        length[i] = -1;  // not there, or long
        if constexpr (kCuts) pieces[place] = 0;
        if (row >= rows) continue;
        const int64_t found = bounds[(block + 1) * stride + row] - bounds[block * stride + row];
        if (found <= longest) {
            length[i] = int(found);
        } else if constexpr (kCuts) {
            const uint64_t count = uint64_t(found + kPiece - 1) / kPiece;
            pieces[place] = Word(count) << kDepthBits | Word(found + kWarpSize - 1) / kWarpSize;
        }
    }
    if constexpr (kSorted) {
        const uint32_t key = sort_keys(uint32_t(length[0] + 1) << 10 | (kWindow - 1 - place), keys);
        length[0] = int(key >> 10) - 1;
        sorted_row = first_window * kWindow + kWindow - 1 - int(key & (kWindow - 1));
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        depth[i] = depth_of_slice(length[i], lanes, rows_per_slice);
        slices_before[i] = sum_of_lanes_before(slice_lane == 0 ? depth[i] : 0, slice_sums[i]);
        if constexpr (kCuts) pieces[place] += sum_of_lanes_before(pieces[place], piece_sums[i]);
    }
    __syncthreads();
    if (warp == 0) place_sums<kCuts>(slice_sums, piece_sums, words, totals, number, groups, block);
    __syncthreads();
    const int lane_bits = __ffs(rows_per_slice) - 1;
    const unsigned int slices = (rows - 1 >> lane_bits) + 1;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const unsigned int row = (first_window + i) * unsigned(kWindow) + place, slice = row >> lane_bits;
        const unsigned present = __ballot_sync(~0u, length[i] >= 0);
        if (slice >= slices) continue;
        if (kCuts && row < rows) {
            const Word sum = piece_sums[i][warp] + pieces[place];
            const int64_t at = int64_t(block) * rows + row;
            piece_ends[at] = int(sum >> kDepthBits), piece_stops[at] = int(depth_of(sum));
        }
        const int64_t index = int64_t(block) * slices + slice;
        if (slice_lane == 0) places[index] = {int(depth_of(slice_sums[i][warp] + slices_before[i])), depth[i]};
        if constexpr (kSorted) {
            slots[index * rows_per_slice + slice_lane] = length[i] < 0 ? -1 : sorted_row;
        } else if (slice_lane == 0) {
            slots[index] = int(present >> place % kWarpSize & (~0u >> (kWarpSize - rows_per_slice)));
        }
    }
}

struct PackFill {
    const void* data;
    const int* indices;
    const void* bounds;
    int64_t stride, nnz;
    const Place* places;  // of slices
    const int* slots;     // as pack_windows leaves them
    const int* piece_ends;  // which also says how many pieces there are; null where `pieces` are known
    const int* piece_stops;
    Piece* pieces;
    void* packed;
    void* columns;
    int* bases;
    int64_t* failed;      // where given, becomes 1 where 16 bits are too few
    int rows, slices_per_block, slices, piece_count, width, lanes;
};

constexpr int kQuad = 4;

// Entries of a lane that are on their way.
template <bool kBased> constexpr int kFillAhead = kBased ? 2 : 4;

// Four from `at` on, a multiple of four; none past `count`.
template <class T>
__device__ inline void load_quad(T (&quad)[kQuad], const T* __restrict__ from, int64_t at, int64_t count) {
    if (at + kQuad <= count) {
        const Vector<T, kQuad> found = *reinterpret_cast<const Vector<T, kQuad>*>(from + at);
#pragma unroll
        for (int i = 0; i < kQuad; ++i) quad[i] = found.data[i];
    } else {
#pragma unroll
        for (int i = 0; i < kQuad; ++i) quad[i] = at + i < count ? from[at + i] : T{};
    }
}

// Four of the eight from `shift`, 0 to 3, on.
template <class T>
__device__ inline void take_quad(T (&taken)[kQuad], const T (&first)[kQuad], const T (&second)[kQuad], int shift) {
    T all[2 * kQuad];
#pragma unroll
    for (int i = 0; i < kQuad; ++i) all[i] = first[i], all[kQuad + i] = second[i];
#pragma unroll
    for (int i = 0; i < kQuad + 1; ++i) all[i] = shift & 2 ? all[i + 2] : all[i];
#pragma unroll
    for (int i = 0; i < kQuad; ++i) taken[i] = shift & 1 ? all[i + 1] : all[i];
}

// A lane's entries from `entry` on in a row of its own, four at a time: neighbouring lanes read places that lie apart,
// so each load costs the L1 as many cycles as there are lanes.
template <class V> struct LaneReader {
    const V* data;
    const int* indices;
    int64_t at, stop, count;
    int shift;
    V values[kQuad] = {};
    int places[kQuad] = {};

    __device__ LaneReader(const V* data, const int* indices, int64_t entry, int64_t stop, int64_t count)
        : data(data), indices(indices), at(entry & ~int64_t(kQuad - 1)), stop(stop), count(count),
          shift(int(entry - at)) {
        load(values, places);
    }

    __device__ void load(V (&v)[kQuad], int (&p)[kQuad]) const {
        if (at >= stop) return;
        load_quad(v, data, at, count);
        load_quad(p, indices, at, count);
    }

    __device__ void next(V (&value)[kQuad], int (&place)[kQuad]) {
        V v[kQuad] = {};
        int p[kQuad] = {};
        at += kQuad;
        load(v, p);
        take_quad(value, values, v, shift);
        take_quad(place, places, p, shift);
#pragma unroll
        for (int i = 0; i < kQuad; ++i) values[i] = v[i], places[i] = p[i];
    }
};

// The first place of a number above `wanted`, which the last one is. A warp calls it, and looks at 32 places at a time.
__device__ inline int64_t first_above(const int* __restrict__ numbers, int64_t count, int wanted) {
    int64_t low = 0, step;
    do {
        step = (count + kWarpSize - 1) / kWarpSize;
        const int64_t at = (threadIdx.x % kWarpSize + 1) * step - 1;
        const int passed = __popc(__ballot_sync(~0u, at < count && numbers[low + at] <= wanted));
        low += passed * step, count -= passed * step;
        if (count > step) count = step;
    } while (step > 1);
    return low;
}

// Cuts piece `number` off its long row; one of no entries where there are fewer.
template <class P>
__device__ inline Piece find_piece(const PackFill& fill, const P* __restrict__ bounds, int number) {
    const int* const ends = fill.piece_ends;
    const int64_t count = int64_t(fill.slices / fill.slices_per_block) * fill.rows;
    if (number >= ends[count - 1]) return {};
    const int64_t place = first_above(ends, count, number);
    const int block = int(place / fill.rows), row = int(place % fill.rows), first = place > 0 ? ends[place - 1] : 0;
    const int64_t length = bounds[(block + 1) * fill.stride + row] - bounds[block * fill.stride + row];
    const int64_t left = length - int64_t(number - first) * kPiece;
    const int depth = int(((left < kPiece ? left : kPiece) + kWarpSize - 1) / kWarpSize);
    const int start = fill.piece_stops[place] - int((left + kWarpSize - 1) / kWarpSize);
    return {int(place), first, ends[place] - first, block, {start, depth}};
}

// Writes to the copy, 32 entries of a warp at a time: columns as it has them, and one that says so where none is there.
template <class V, class C, bool kBased> struct EntryWriter {
    const PackFill& fill;
    const Place& place;
    bool fails = false;

    __device__ void write(int k, V value, int column, bool is_there) {
        V* packed = static_cast<V*>(fill.packed);
        C* columns = static_cast<C*>(fill.columns);
        const int lane = threadIdx.x % kWarpSize;
        const int64_t at = (int64_t(place.start) + k) * kWarpSize + lane;
        packed[at] = value;
        if constexpr (kBased) {
            const int base = __reduce_min_sync(~0u, column);
            if (lane == 0) fill.bases[place.start + k] = base;
            column = is_there ? column - base : 0xFFFF;
            fails |= is_there && column >= 0xFFFF;
        } else if (!is_there) {
            column = fill.width > 0 ? fill.width : -1;
        }
        columns[at] = C(column);
    }
};

// A warp for each slice or piece. C: uint16_t or int; kBased: columns count from the lowest of 32.
template <class V, class P, class C, bool kSorted, bool kBased>
__global__ void __launch_bounds__(256) pack_fill(const __grid_constant__ PackFill fill) {
    const int number = blockIdx.x * 8 + threadIdx.x / kWarpSize;
    const int lane = threadIdx.x % kWarpSize;
    if (number >= fill.slices + fill.piece_count) return;
    const P* __restrict__ bounds = static_cast<const P*>(fill.bounds);
    const V* __restrict__ data = static_cast<const V*>(fill.data);
    int64_t entry = 0, stop = 0, step = 1;
    int first_column = 0;
    Place place;
    if (number >= fill.slices) {
        const int own = number - fill.slices;
        const Piece piece = fill.piece_ends == nullptr ? fill.pieces[own] : find_piece(fill, bounds, own);
        if (piece.count == 0) return;
        if (fill.piece_ends != nullptr && lane == 0) fill.pieces[own] = piece;
        const int64_t at = piece.block * fill.stride + piece.row % fill.rows;
        entry = bounds[at] + int64_t(own - piece.first) * kPiece;
        stop = bounds[at + fill.stride];
        if (entry + kPiece < stop) stop = entry + kPiece;
        entry += lane, step = kWarpSize, first_column = piece.block * fill.width;
        place = piece.place;
    } else {
        const int block = number / fill.slices_per_block, slice = number % fill.slices_per_block;
        const int rows_per_slice = kWarpSize / fill.lanes, slot = lane / fill.lanes;
        int row = slice * rows_per_slice + slot;
        if constexpr (kSorted) row = fill.slots[int64_t(number) * rows_per_slice + slot];
        else if (!(unsigned(fill.slots[number]) >> slot & 1)) row = -1;
        if (row >= 0) {
            entry = bounds[block * fill.stride + row] + lane % fill.lanes, step = fill.lanes;
            stop = bounds[(block + 1) * fill.stride + row];
        }
        first_column = block * fill.width;
        place = fill.places[number];
    }
    EntryWriter<V, C, kBased> to{fill, place};
    if (sizeof(V) <= 8 && step == 1 && fill.lanes == 1) {  // a slice
        LaneReader<V> reader(data, fill.indices, entry, stop, fill.nnz);
        for (int k = 0; k < place.depth; k += kQuad, entry += kQuad) {
            V value[kQuad];
            int column[kQuad];
            reader.next(value, column);
#pragma unroll
            for (int i = 0; i < kQuad; ++i) {
                if (k + i >= place.depth) break;
                const bool is_there = entry + i < stop;
                to.write(k + i, is_there ? value[i] : V{}, is_there ? column[i] - first_column : 0x7FFFFFFF, is_there);
            }
        }
    } else {
        constexpr int AHEAD = kFillAhead<kBased>;
        for (int k = 0; k < place.depth; k += AHEAD) {
            V value[AHEAD];
            int column[AHEAD];
            bool is_there[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; ++i, entry += step) {
                is_there[i] = entry < stop && k + i < place.depth;
                value[i] = is_there[i] ? data[entry] : V{};
                column[i] = is_there[i] ? fill.indices[entry] - first_column : 0x7FFFFFFF;
            }
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                if (k + i >= place.depth) break;
                to.write(k + i, value[i], column[i], is_there[i]);
            }
        }
    }
    if (to.fails && fill.failed != nullptr) *fill.failed = 1;
}

}  // namespace rawops
