// The copy of a matrix that spmv_packed reads: where a block of columns begins in each row, windows of rows sorted by
// length, and the entries of 32 rows side by side.
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

constexpr int kWindow = 1024;  // rows that are sorted together

// depths: of slices; their rows, longest first (kSorted), or which of their rows there are. A row of more than
// `longest` entries is in no slice but in pieces, whose number goes to piece_counts (blocks, rows) where that is given.
// Row r of block b has the entries bounds[b * stride + r] to bounds[(b + 1) * stride + r].
template <class P, bool kSorted>
__global__ void __launch_bounds__(kWindow)
    pack_windows(const P* __restrict__ bounds, int64_t stride, int rows, int longest, int lanes, int piece,
                 int* __restrict__ depths, int* __restrict__ slots, int* __restrict__ piece_counts) {
    __shared__ uint32_t keys[kWindow];
    const int place = threadIdx.x, row = blockIdx.x * kWindow + place;
    int length = -1;  // not there, or long
    if (row < rows) {
        const int64_t found = bounds[(blockIdx.y + 1) * stride + row] - bounds[blockIdx.y * stride + row];
        const bool is_long = found > longest;
        if (!is_long) length = int(found);
        if (piece_counts != nullptr) {
            piece_counts[blockIdx.y * int64_t(rows) + row] = is_long ? int((found + piece - 1) / piece) : 0;
        }
    }
    uint32_t key = uint32_t(length + 1) << 10 | (kWindow - 1 - place);
    if constexpr (kSorted) {  // bitonic, falling
        keys[place] = key;
        for (int size = 2; size <= kWindow; size *= 2) {
            for (int step = size / 2; step > 0; step /= 2) {
                __syncthreads();
                const int other = place ^ step;
                const uint32_t mine = keys[place], theirs = keys[other];
                const bool wants_larger = ((place & step) == 0) == ((place & size) == 0);
                __syncthreads();
                if ((theirs > mine) == wants_larger) keys[place] = theirs;
            }
        }
        key = keys[place];
    }
    const int own = int(key >> 10) - 1;
    int depth = own < 0 ? 0 : (own + lanes - 1) / lanes;
    const int rows_per_slice = kWarpSize / lanes, slice_lane = place % rows_per_slice;
    for (int mask = rows_per_slice / 2; mask > 0; mask /= 2) depth = max_of(depth, __shfl_xor_sync(~0u, depth, mask));
    const unsigned present = __ballot_sync(~0u, own >= 0) >> (place % kWarpSize - slice_lane);
    const int64_t slices = (rows + rows_per_slice - 1) / rows_per_slice;
    const int64_t slice = (blockIdx.x * kWindow + place) / rows_per_slice;
    if (slice >= slices) return;
    if (slice_lane == 0) depths[blockIdx.y * slices + slice] = depth;
    if constexpr (kSorted) {
        const int sorted_row = blockIdx.x * kWindow + kWindow - 1 - int(key & (kWindow - 1));
        slots[(blockIdx.y * slices + slice) * rows_per_slice + slice_lane] = own < 0 ? -1 : sorted_row;
    } else if (slice_lane == 0) {
        slots[slice] = int(present & (~0u >> (kWarpSize - rows_per_slice)));
    }
}

struct Piece {
    int row, first, count, block;  // as in spmv_packed.cu
};

// Cuts long rows. piece_ends (blocks * rows): running sums of the counts.
template <class P>
__global__ void __launch_bounds__(256)
    pack_pieces(const P* __restrict__ bounds, int64_t stride, int rows, int blocks, int piece, int count,
                const int64_t* __restrict__ piece_ends, Piece* __restrict__ pieces, int* __restrict__ depths) {
    const int number = blockIdx.x * 256 + threadIdx.x;
    if (number >= count) return;
    int64_t low = 0, high = int64_t(blocks) * rows;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (piece_ends[middle] <= number) low = middle + 1;
        else high = middle;
    }
    const int block = int(low / rows), row = int(low % rows);
    const int first = low > 0 ? int(piece_ends[low - 1]) : 0;
    pieces[number] = {int(low), first, int(piece_ends[low]) - first, block};
    const int64_t length = bounds[(block + 1) * stride + row] - bounds[block * stride + row];
    const int64_t left = length - int64_t(number - first) * piece;
    depths[number] = int(((left < piece ? left : piece) + kWarpSize - 1) / kWarpSize);
}

struct PackFill {
    const void* data;
    const int* indices;
    const void* bounds;
    int64_t stride;
    const int* starts;  // of slices and pieces
    const int* slots;   // as pack_windows leaves them
    const Piece* pieces;
    void* packed;
    void* columns;
    int* bases;
    int* failed;        // where given, becomes 1 where 16 bits are too few
    int rows, slices_per_block, slices, piece_count, width, lanes, piece;
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
    if (number >= fill.slices) {
        const Piece piece = fill.pieces[number - fill.slices];
        const int64_t at = piece.block * fill.stride + piece.row % fill.rows;
        entry = bounds[at] + int64_t(number - fill.slices - piece.first) * fill.piece;
        stop = bounds[at + fill.stride];
        if (entry + fill.piece < stop) stop = entry + fill.piece;
        entry += lane, step = kWarpSize, first_column = piece.block * fill.width;
    } else {
        const int block = number / fill.slices_per_block, slice = number % fill.slices_per_block;
        const int rows_per_slice = kWarpSize / fill.lanes, place = lane / fill.lanes;
        int row = slice * rows_per_slice + place;
        if constexpr (kSorted) row = fill.slots[int64_t(number) * rows_per_slice + place];
        else if (!(unsigned(fill.slots[number]) >> place & 1)) row = -1;
        if (row >= 0) {
            entry = bounds[block * fill.stride + row] + lane % fill.lanes, step = fill.lanes;
            stop = bounds[(block + 1) * fill.stride + row];
        }
        first_column = block * fill.width;
    }
    V* packed = static_cast<V*>(fill.packed);
    C* columns = static_cast<C*>(fill.columns);
    const int start = fill.starts[number], depth = fill.starts[number + 1] - start;
    bool fails = false;
    for (int k = 0; k < depth; ++k, entry += step) {
        const int64_t at = (int64_t(start) + k) * kWarpSize + lane;
        const bool is_there = entry < stop;
        packed[at] = is_there ? data[entry] : V{};
        int column = is_there ? fill.indices[entry] - first_column : 0x7FFFFFFF;
        if constexpr (kBased) {
            int base = column;
            for (int mask = 16; mask > 0; mask /= 2) base = min_of(base, __shfl_xor_sync(~0u, base, mask));
            if (lane == 0) fill.bases[start + k] = base;
            column = is_there ? column - base : 0xFFFF;
            fails |= is_there && column >= 0xFFFF;
        } else if (!is_there) {
            column = fill.width > 0 ? fill.width : -1;
        }
        columns[at] = C(column);
    }
    if (fails && fill.failed != nullptr) *fill.failed = 1;
}

}  // namespace rawops
