// Rows of arrays with any strides, each taken by a team of threads in groups of neighbouring columns.
#pragma once
#include "base2.cuh"
#include "hopper.cuh"
#include "launches.cuh"

// The blocks of a row are a cluster. Architectures before sm_90 have none, and take no attribute that says so.
#if __CUDA_ARCH__ >= 900
#define ROW_BLOCKS(n) __cluster_dims__(n, 1, 1)
#else
#define ROW_BLOCKS(n)
#endif

namespace rawops {

// For kernels that are there twice: clusters, of one block too, start no faster than one in 2.6 ns on an H200, and with
// thousands of blocks of short rows that is what a launch takes.
template <bool> struct OnlyIf {};
template <> struct OnlyIf<true> {
    using Type = int;
};
template <int CLUSTER> using IfOneBlock = typename OnlyIf<CLUSTER == 1>::Type;
template <int CLUSTER> using IfCluster = typename OnlyIf<(CLUSTER > 1)>::Type;

// What the arrays of a launch have alike: axes before the last one, the first of which is as long as it takes.
struct RowShape {
    int64_t rows;
    int extent[3];  // of the other axes before the last one
    int cols;
};

// Where a row is along the axes.
struct RowIndex {
    int64_t at[4] = {};
    bool is_flat;  // along the first axis alone, as most are: spares three products of 64 bits for each array

    __device__ RowIndex(const RowShape& shape, int64_t row)
        : is_flat(shape.extent[0] == 1 && shape.extent[1] == 1 && shape.extent[2] == 1) {
        if (is_flat) {
            at[0] = row;
            return;
        }
#pragma unroll
        for (int axis = 3; axis > 0; --axis) {
            const int extent = shape.extent[axis - 1];
            if (extent == 1) continue;  // spares a division of 64 bits
            const int64_t outer = row / extent;
            at[axis] = row - outer * extent;
            row = outer;
        }
        at[0] = row;
    }
};

// An array as rows: strides in elements along the four axes before the last one, and along that.
struct RowArray {
    void* base;  // null where there is none
    int64_t step[4], col;

    template <class T> __device__ T* row(const RowIndex& index) const {
        int64_t offset = index.at[0] * step[0];
        if (!index.is_flat) {
#pragma unroll
            for (int axis = 1; axis < 4; ++axis) offset += index.at[axis] * step[axis];
        }
        return static_cast<T*>(base) + offset;
    }
};

// Writes to global memory at once: the compiler takes a vector apart where it has each entry to itself.
template <class Piece> __device__ inline void store_whole(Piece* to, const Piece& piece) {
    if constexpr (sizeof(Piece) == 16) {
        uint4 words;
        memcpy(&words, &piece, 16);
        asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words.x), "r"(words.y), "r"(words.z),
                     "r"(words.w)
                     : "memory");
    } else if constexpr (sizeof(Piece) == 8) {
        uint2 words;
        memcpy(&words, &piece, 8);
        asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(words.x), "r"(words.y) : "memory");
    } else {
        *to = piece;
    }
}

// How far a column is from the first one, in elements: an ACCESS of 0 is for any stride, others for 1.
template <int ACCESS> __device__ inline int64_t column_offset(int64_t column, int64_t col) {
    return ACCESS == 0 ? column * col : column;
}

// WIDTH neighbours as they lie in memory, ACCESS of them at a time: those take a column stride of 1 and addresses on
// multiples of their size, or of 16 bytes. An ACCESS of 0 is one at a time with any stride. Where ACCESS is not WIDTH,
// some may be missing at the end, with zeros instead.
template <class T, int WIDTH, int ACCESS = WIDTH> struct Columns {
    static constexpr int PIECE = clamp(ACCESS, 1, 16 / int(sizeof(T))), PIECES = WIDTH / PIECE;
    Vector<T, PIECE> piece[PIECES];

    __device__ void read(const T* from, int64_t col = 1, int count = WIDTH) {
        each_piece(count, [&](int i, bool exists) {
            piece[i] = {};
            const T* at = from + column_offset<ACCESS>(i * PIECE, col);
            if (exists) piece[i] = *reinterpret_cast<const Vector<T, PIECE>*>(at);
        });
    }
    __device__ void write(T* to, int64_t col = 1, int count = WIDTH) const {
        each_piece(count, [&](int i, bool exists) {
            T* at = to + column_offset<ACCESS>(i * PIECE, col);
            if (exists) store_whole(reinterpret_cast<Vector<T, PIECE>*>(at), piece[i]);
        });
    }
    __device__ T& operator[](int i) { return piece[i / PIECE].data[i % PIECE]; }
    template <class V> __device__ void widen_to(V (&values)[WIDTH]) const {
        if constexpr (is_same<T, __nv_bfloat16> && PIECE > 1) {
            // The upper one of a word is the word without its lower half, which takes one instruction instead of two.
            uint32_t words[WIDTH / 2];
            memcpy(words, piece, sizeof(words));
#pragma unroll
            for (int i = 0; i < WIDTH / 2; ++i) {
                values[2 * i] = __uint_as_float(words[i] << 16);
                values[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000);
            }
        } else {
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) values[i] = widen(piece[i / PIECE].data[i % PIECE]);
        }
    }
    template <class V> __device__ void narrow_from(const V (&values)[WIDTH]) {
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) piece[i / PIECE].data[i % PIECE] = narrow<T>(values[i]);
    }

private:
    // Calls visit(i, exists); nearly all groups are whole, and nothing is asked for each piece of those.
    template <class Visit> static __device__ void each_piece(int count, Visit visit) {
        if (ACCESS == WIDTH || count >= WIDTH) {
#pragma unroll
            for (int i = 0; i < PIECES; ++i) visit(i, true);
        } else {
#pragma unroll
            for (int i = 0; i < PIECES; ++i) visit(i, i * PIECE < count);
        }
    }
};
template <int ACCESS, int WIDTH, class T, class V>
__device__ inline void read_columns(V (&values)[WIDTH], const T* from, int64_t col = 1, int count = WIDTH) {
    Columns<T, WIDTH, ACCESS> columns;
    columns.read(from, col, count);
    columns.widen_to(values);
}
template <int ACCESS, int WIDTH, class T, class V>
__device__ inline void write_columns(const V (&values)[WIDTH], T* to, int64_t col = 1, int count = WIDTH) {
    Columns<T, WIDTH, ACCESS> columns;
    columns.narrow_from(values);
    columns.write(to, col, count);
}

// The threads that take a row: TEAM of a block, which is then a whole block if they are more than a warp, in each of
// CLUSTER blocks.
template <int TEAM_, int CLUSTER_> struct RowTeam {
    static constexpr int TEAM = TEAM_, CLUSTER = CLUSTER_;
    static constexpr int BLOCK = max_of(TEAM, 128);  // threads: 128 / TEAM rows, or one
    static_assert(CLUSTER == 1 || TEAM == BLOCK, "blocks that share a row have no other");

    int64_t row;
    int thread;  // of TEAM * CLUSTER
    bool exists;  // a team without a row takes the last one, and writes nothing: its warp needs it
    bool is_read = true;  // what the blocks of the cluster had to say has been read by all

    __device__ explicit RowTeam(int64_t rows)
        : row(int64_t(blockIdx.x) / CLUSTER * (BLOCK / TEAM) + threadIdx.x / TEAM),
          thread(int(threadIdx.x) % TEAM + (CLUSTER > 1 ? int(blockIdx.x) % CLUSTER * TEAM : 0)),
          exists(row < rows) {
        if (!exists) row = rows - 1;
    }

    // Brings together what each thread has, in an order that depends on nothing: all have the same bits after it.
    template <class V, class Join> __device__ V reduce(V x, Join join) {
#pragma unroll
        for (int step = min_of(TEAM, kWarpSize) / 2; step > 0; step /= 2) x = join(x, __shfl_xor_sync(~0u, x, step));
        if constexpr (TEAM > kWarpSize) {
            constexpr int WARPS = TEAM / kWarpSize;
            __shared__ V parts[WARPS];
            __syncthreads();  // those of the time before have been read
            if (threadIdx.x % kWarpSize == 0) parts[threadIdx.x / kWarpSize] = x;
            __syncthreads();
            x = parts[threadIdx.x % WARPS];
#pragma unroll
            for (int step = WARPS / 2; step > 0; step /= 2) x = join(x, __shfl_xor_sync(~0u, x, step));
        }
        if constexpr (CLUSTER > 1) {
            __shared__ V whole;
            finish();
            if (threadIdx.x == 0) whole = x;
            cluster_sync();
            x = value_at_rank(&whole, 0);
#pragma unroll
            for (int rank = 1; rank < CLUSTER; ++rank) x = join(x, value_at_rank(&whole, rank));
            cluster_arrive();
            is_read = false;
        }
        return x;
    }
    template <class V> __device__ V sum(V x) {
        return reduce(x, [](V a, V b) { return a + b; });
    }
    template <class V> __device__ V max(V x) {
        return reduce(x, [](V a, V b) { return fmax(a, b); });
    }

    // Before a block ends, and before it says something else: the others have read what it said.
    __device__ void finish() {
        if constexpr (CLUSTER > 1) {
            if (!is_read) cluster_wait();
            is_read = true;
        }
    }
};

// Blocks that an SM should have room for, so that enough loads are on their way: as registers allow, of which a group
// takes Load::WORDS.
template <class Team, class Load, class V, int GROUPS> __host__ __device__ constexpr int row_blocks() {
    const int words = (GROUPS > 0 ? GROUPS : 8) * Load::WORDS;
    return max_of(1, (sizeof(V) == 8 || words > 32 ? 512 : words > 16 ? 768 : 1280) / Team::BLOCK);
}

// The same columns, of which the compiler knows nothing: it would keep what it made of them for the next time, which
// takes twice the registers.
template <class Raw> __device__ inline Raw unknown(const Raw& raw) {
    constexpr int WORDS = int(sizeof(Raw)) / 4;
    uint32_t words[WORDS];
    memcpy(words, &raw, sizeof(Raw));
#pragma unroll
    for (int i = 0; i < WORDS; ++i) asm volatile("" : "+r"(words[i]));
    Raw same;
    memcpy(&same, words, sizeof(Raw));
    return same;
}

// Columns that a thread has side by side, 16 bytes, however they are read: sums come in the same order.
template <class T> constexpr int kGroup = 16 / int(sizeof(T));

// The columns of a row that a thread of its team has: GROUPS groups in registers, or, with 0, as many as there are,
// loaded anew each time. Load::read(column, count) returns a group as it lies in memory, of which `count` columns
// exist, all if that is more, and Load::widen turns it into values.
template <class V, int GROUPS, class Team, class Load> class TeamRow {
public:
    static constexpr int WIDTH = Load::WIDTH;
    using Group = V[WIDTH];
    Team& team;

    __device__ TeamRow(Team& team_, int cols_, const Load& load_)
        : team(team_), first(team_.thread * WIDTH), cols(cols_), load(load_) {
        if constexpr (GROUPS > 0) {
#pragma unroll
            for (int g = 0; g < GROUPS; ++g) {
                const int column = first + g * STEP;
                if (column < cols) held[g] = load.read(column, cols - column);
            }
        }
    }

    // Calls visit(values, column, count) for each group.
    template <class Visit> __device__ void each(Visit visit) const {
        Group values;
        if constexpr (GROUPS > 0) {
#pragma unroll
            for (int g = 0; g < GROUPS; ++g) {
                const int column = first + g * STEP;
                if (column < cols) {
                    load.widen(values, unknown(held[g]));
                    visit(values, column, cols - column);
                }
            }
        } else {
#pragma unroll 2
            for (int64_t column = first; column < cols; column += STEP) {
                load.widen(values, load.read(int(column), cols - int(column)));
                visit(values, int(column), cols - int(column));
            }
        }
    }

    // Calls visit(value) for each value.
    template <class Visit> __device__ void each_value(Visit visit) const {
        each([&](const Group& values, int, int count) {
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) {
                if (Load::ACCESS == WIDTH || i < count) visit(values[i]);
            }
        });
    }

    // The sum of a term of each value, over the row.
    template <class Term> __device__ V sum(Term term) const {
        V total = 0;
        each_value([&](V value) { total += term(value); });
        return team.sum(total);
    }

private:
    static constexpr int STEP = Team::TEAM * Team::CLUSTER * WIDTH;
    int first, cols;
    Load load;
    typename Load::Raw held[max_of(GROUPS, 1)];
};

// The columns of one array.
template <class T, int ACCESS_> struct OneArray {
    static constexpr int WIDTH = kGroup<T>, ACCESS = ACCESS_;
    static constexpr int WORDS = ACCESS == WIDTH ? 4 : 8;  // a group takes, what says which columns exist included
    using Raw = Columns<T, WIDTH, ACCESS>;
    const T* row;
    int64_t col;

    __device__ Raw read(int column, int count) const {
        Raw raw;
        raw.read(row + column_offset<ACCESS>(column, col), col, count);
        return raw;
    }
    template <class V> __device__ void widen(V (&values)[WIDTH], const Raw& raw) const { raw.widen_to(values); }
};

}  // namespace rawops
