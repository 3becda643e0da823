// Sparse matrix times vector from a copy of the entries that a warp reads side by side: 32 rows to a slice (SELL).
//
// Entry k of the 32 rows of a slice lies side by side, so a lane adds up a row, loads are whole lines, and nothing is
// shared or waited for. Rows are sorted by length in windows, so that those of a slice are about as long; what a slice
// is longer than its row is filled up with entries that read nothing. A long row lies in pieces, each with the 32 lanes
// of a warp to itself; the last warp to arrive adds up the pieces of a row, in their order.
//
// Columns take 16 bits where that is enough: with x in shared memory, from the first column of its block; else from the
// lowest column of 32 entries side by side.
#include "common/copy.cuh"
#include "common/spmv.cuh"

namespace rawops {

// kShared: x in shared memory, by blocks of columns. kDirect: the same columns where x is too wide for that.
// kNear: x through the L1 and 16 bits a column. kFar: 32 bits.
enum PackedKind { kShared, kDirect, kNear, kFar };

// Where a slice or piece is and how many entries a lane has, in 32 entries.
struct __align__(8) Place {
    int start, depth;
};

struct PackedPlan {
    const void* data;
    const void* columns;     // uint16_t, or int for kFar; of entries that are not there: width, or all bits set
    const Place* places;     // of slices
    const int* bases;        // kNear: the lowest column of 32 entries
    const int* rows;         // of slices, -1 for none; where null, rows lie as they are
    const unsigned* present; // where `rows` is null: which rows of a slice there are
    const int* pieces;       // (pieces, 8), see Piece
    void* sums;              // (pieces), of the accumulator's type
    unsigned int* tickets;   // (pieces), as finish_part has them: of a row, that of its first piece
    const int* shares;       // (blocks of threads, 8), see Share; where null, all columns are one block
    int slice_count, piece_count;
    int width;               // columns of a block: kShared, kDirect
    int lane_bits;           // of the lanes that share a row of a slice
};

struct Piece {
    int row;           // in y
    int first, count;  // the pieces of its row
    int block;         // of columns
    Place place;
    int unused[2];
};

// What a block of threads has to do: `rank` among `ranks` that go round the pieces and slices of a block of columns.
struct Share {
    int first_column, first_row;  // of the block's columns, and of its rows in y
    int piece, pieces, slice, slices;
    int rank, ranks;
};

template <PackedKind kKind> constexpr bool kBlocked = kKind == kShared || kKind == kDirect;
template <PackedKind kKind> using PackedColumn = typename Choose<kKind == kFar, int, uint16_t>::Type;
template <PackedKind kKind> constexpr int kPackedThreads = kBlocked<kKind> ? 896 : 256;

// Blocks that an SM shall hold: narrow columns take registers, and those of sm_100 and newer spill for five blocks.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kNearBlocks = 4;
#else
constexpr int kNearBlocks = 5;
#endif
template <PackedKind kKind, class X>
constexpr int kPackedBlocks = kBlocked<kKind> ? 1 : sizeof(X) > 4 ? 4 : kKind == kNear ? kNearBlocks : 5;

// Entries of a lane that it loads at a time, ahead of the time that it multiplies those before.
template <PackedKind kKind, class X>
constexpr int kChunk = kBlocked<kKind> ? (sizeof(X) == 16 ? 2 : sizeof(X) == 8 ? 4 : 8) : sizeof(X) == 16 ? 4 : 8;

// Reads what is read once past the L1, which x needs. 16 bits land in a whole register: nothing waits to widen them.
__device__ inline int load_stream(const uint16_t* from) {
    int value;
    asm volatile("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=r"(value) : "l"(from));
    return value;
}

__device__ inline int load_stream(const int* from) {
    int value;
    asm volatile("ld.global.nc.L1::no_allocate.s32 %0, [%1];" : "=r"(value) : "l"(from));
    return value;
}

__device__ inline float load_stream(const float* from) {
    float value;
    asm volatile("ld.global.nc.L1::no_allocate.f32 %0, [%1];" : "=f"(value) : "l"(from));
    return value;
}

__device__ inline double load_stream(const double* from) {
    double value;
    asm volatile("ld.global.nc.L1::no_allocate.f64 %0, [%1];" : "=d"(value) : "l"(from));
    return value;
}

__device__ inline float2 load_stream(const float2* from) {
    float2 value;
    asm volatile("ld.global.nc.L1::no_allocate.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "l"(from));
    return value;
}

__device__ inline double2 load_stream(const double2* from) {
    double2 value;
    asm volatile("ld.global.nc.L1::no_allocate.v2.f64 {%0, %1}, [%2];" : "=d"(value.x), "=d"(value.y) : "l"(from));
    return value;
}

// Some entries of a lane.
template <class V, class X, PackedKind kKind, bool kConjugate> struct PackedChunk {
    using A = Accumulator<X>;
    static constexpr int COUNT = kChunk<kKind, X>;
    V value[COUNT];
    int column[COUNT];  // as it is stored

    // From entry k of a slice or piece on, which has `depth` from `start` on.
    __device__ void load(const PackedPlan& plan, int start, int depth, int k, int lane) {
        const V* data = static_cast<const V*>(plan.data);
        const auto* columns = static_cast<const PackedColumn<kKind>*>(plan.columns);
        const int64_t first = (int64_t(start) + k) * kWarpSize + lane;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            value[i] = V{};
            column[i] = kBlocked<kKind> ? plan.width : kKind == kNear ? 0xFFFF : -1;
            if (k + i < depth) {
                column[i] = load_stream(columns + first + i * kWarpSize);
                value[i] = load_stream(data + first + i * kWarpSize);
            }
        }
    }

    // x: from the block's first column on. `base`: kNear, of entry k + i in lane (k + i) % 32.
    __device__ A add_to(A sum, const X* x, const X* own, int width, int base, int k) const {
        A factor[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            factor[i] = A{};
            if constexpr (kKind == kShared) {
                factor[i] = widen(own[column[i]]);
            } else if constexpr (kKind == kDirect) {
                if (column[i] != width) factor[i] = widen(x[column[i]]);
            } else if constexpr (kKind == kNear) {
                const int first = __shfl_sync(~0u, base, k + i);
                if (column[i] != 0xFFFF) factor[i] = widen(x[first + column[i]]);
            } else {
                if (column[i] >= 0) factor[i] = widen(x[column[i]]);
            }
        }
#pragma unroll
        for (int i = 0; i < COUNT; ++i) sum = multiply_add(conjugated<kConjugate>(value[i]), factor[i], sum);
        return sum;
    }
};

// A block's part of x (where it is read at all), and a zero behind it for entries that are not there.
template <class X, int THREADS>
__device__ void load_x(X* own, const SpmvCall& call, int first, int width, bool reads_a) {
    const X* x = static_cast<const X*>(call.x) + first;
    const int count = reads_a ? min_of(width, call.cols - first) : 0;
    constexpr int VEC = 16 / int(sizeof(X));
    const int whole = reinterpret_cast<uint64_t>(x) % 16 == 0 ? count / VEC : 0;
    for (int i = threadIdx.x; i < whole; i += THREADS) cp_async<16>(shared_address(own + i * VEC), x + i * VEC, 16);
    for (int i = whole * VEC + threadIdx.x; i < count; i += THREADS) own[i] = x[i];
    if (threadIdx.x == 0) own[width] = X{};
    cp_async_commit();
}

// A slice or piece, with what is needed to read and to finish it.
struct PackedPlace {
    int start, depth;
    int row;   // of this lane; for pieces the first lanes have the fields of a Piece
    int base;  // kNear: of entry `lane`
};

// What a piece costs, in slices: those of blocked columns are short.
template <PackedKind kKind> constexpr int kPieceTurns = kBlocked<kKind> ? 2 : 4;

// A warp on its way through its slices and pieces. It knows two ahead where they are.
template <class V, class X, PackedKind kKind, bool kConjugate> struct PackedWalk {
    using A = Accumulator<X>;
    using Chunk = PackedChunk<V, X, kKind, kConjugate>;
    const PackedPlan& plan;
    const Share& share;
    RowEnd<X>& end;
    const X *x, *own;
    int lane, worker, free, even;
    int index, following, last = 0;  // in the share, pieces before slices: now, next and later
    PackedPlace now, next, later;
    int k = 0;
    A sum = {};

    __device__ int workers() const { return share.ranks * (kPackedThreads<kKind> / kWarpSize); }

    // The warp's next after number i. They take turns, but those that had a piece when the others had none left sit out
    // kPieceTurns - 1 of them: up to slice `even`, only `free` of them take part.
    __device__ int after(int i) const {
        if (i >= even || i + workers() < share.pieces) return i + workers();
        if (i < share.pieces ? worker < workers() - free : i + free >= even) return even + worker;
        return i < share.pieces ? i + workers() : i + free;
    }

    __device__ bool is_done() const { return index >= share.pieces + share.slices; }
    __device__ int slice(int i) const { return share.slice + i - share.pieces; }

    __device__ void find(int i, PackedPlace& place) {
        place.start = place.depth = 0;
        if (i >= share.pieces + share.slices) return;
        const Place found = i < share.pieces ? reinterpret_cast<const Piece*>(plan.pieces)[share.piece + i].place
                                             : plan.places[slice(i)];
        place.start = found.start;
        if (end.reads_a) place.depth = found.depth;
    }

    __device__ void complete(int i, PackedPlace& place) {
        place.row = -1;
        if (i >= share.pieces + share.slices) return;
        if constexpr (kKind == kNear) place.base = base_of(place, 0);
        if (i < share.pieces) {
            place.row = plan.pieces[8 * (share.piece + i) + (lane & 7)];
            return;
        }
        const int slot = slice(i) << (5 - plan.lane_bits), own_slot = lane >> plan.lane_bits;
        if (plan.rows != nullptr) place.row = plan.rows[slot + own_slot];
        else if (plan.present[slice(i)] >> own_slot & 1) place.row = slot + own_slot;
    }

    __device__ int base_of(const PackedPlace& place, int k) const {
        return k + lane < place.depth ? plan.bases[place.start + k + lane] : 0;
    }

    __device__ void finish() {
        if (index < share.pieces) {
            const int row = __shfl_sync(~0u, now.row, 0), first = __shfl_sync(~0u, now.row, 1);
            const int count = __shfl_sync(~0u, now.row, 2);
            finish_part(end, plan.sums, plan.tickets, share.piece + index, row, first, count, sum);
        } else {
            const int lanes = 1 << plan.lane_bits;
            sum = sum_lanes(sum, lanes);
            if (now.row >= 0 && (lane & (lanes - 1)) == 0) end.finish(share.first_row + int64_t(now.row), sum);
        }
        sum = A{};
        index = following;
        following = kBlocked<kKind> ? last : after(index);
        if constexpr (kBlocked<kKind>) last = after(last);
    }

    // Few warps, x beside them: while one of two chunks is multiplied, the other is on its way. They take turns, since
    // a copy would wait for the loads.
    __device__ void walk_ahead() {
        last = after(following);
        find(index, now), find(following, next), find(last, later);
        complete(index, now), complete(following, next);
        Chunk even, odd;
        even.load(plan, now.start, now.depth, 0, lane);
        if constexpr (kKind == kShared) {
            cp_async_wait<0>();
            __syncthreads();
        }
        while (!is_done()) {
            advance(even, odd);
            if (is_done()) break;
            advance(odd, even);
        }
    }

    __device__ void advance(const Chunk& chunk, Chunk& ahead) {
        const int then = k + Chunk::COUNT;
        const bool is_last = then >= now.depth;
        ahead.load(plan, is_last ? next.start : now.start, is_last ? next.depth : now.depth, is_last ? 0 : then, lane);
        sum = chunk.add_to(sum, x, own, plan.width, 0, k);
        k = is_last ? 0 : then;
        if (!is_last) return;
        finish();
        now = next;
        next = later;
        complete(following, next);
        find(last, later);
    }

    // Many warps, each with one chunk on its way.
    __device__ void walk() {
        find(index, next);
        while (!is_done()) {
            now = next;
            Chunk chunk;
            chunk.load(plan, now.start, now.depth, 0, lane);
            complete(index, now);
            find(following, next);
            while (true) {
                sum = chunk.add_to(sum, x, own, plan.width, now.base, k);
                k += Chunk::COUNT;
                if (k >= now.depth) break;
                chunk.load(plan, now.start, now.depth, k, lane);
                if (kKind == kNear && k % kWarpSize == 0) now.base = base_of(now, k);
            }
            k = 0;
            finish();
        }
    }
};

template <class V, class X, PackedKind kKind, bool kConjugate>
__global__ void __launch_bounds__(kPackedThreads<kKind>, (kPackedBlocks<kKind, X>))
    spmv_packed(const __grid_constant__ SpmvCall call, const __grid_constant__ PackedPlan plan) {
    constexpr int THREADS = kPackedThreads<kKind>;
    extern __shared__ __align__(16) char shared[];
    X* own = reinterpret_cast<X*>(shared);
    RowEnd<X> end(call);
    if (end.keeps_y) return;
    if (plan.shares != nullptr) end.reads_y = false;  // y are the parts of the sums: beta is for their end
    Share share = {0, 0, 0, plan.piece_count, 0, plan.slice_count, int(blockIdx.x), int(gridDim.x)};
    if constexpr (kBlocked<kKind>) {
        if (plan.shares != nullptr) share = reinterpret_cast<const Share*>(plan.shares)[blockIdx.x];
    }
    if constexpr (kKind == kShared) {
        load_x<X, THREADS>(own, call, share.first_column, plan.width, end.reads_a);
    }

    const X* x = static_cast<const X*>(call.x) + share.first_column;
    const int lane = threadIdx.x % kWarpSize;
    const int worker = share.rank * (THREADS / kWarpSize) + int(threadIdx.x) / kWarpSize;
    const int workers = share.ranks * (THREADS / kWarpSize), free = workers - share.pieces % workers;
    const int even = share.pieces + kPieceTurns<kKind> * free;
    PackedWalk<V, X, kKind, kConjugate> walk = {plan, share, end, x, own, lane, worker, free, even, worker, 0};
    walk.following = walk.after(worker);
    if constexpr (kBlocked<kKind>) walk.walk_ahead();
    else walk.walk();
    end.template store_partial<THREADS>(call.partials, blockIdx.x);
}

}  // namespace rawops
