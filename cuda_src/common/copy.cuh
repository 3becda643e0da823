// Global to shared memory: cp.async, the swizzled tile, and the loader that fills a tile with predicated edges. Loads
// that pass by the L1.
#pragma once
#include "numeric.cuh"

namespace rawops {

__device__ inline uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies `valid` bytes and fills the rest of BYTES with zeros; nothing past `valid` is read.
template <int BYTES> __device__ inline void cp_async(uint32_t destination, const void* source, int valid) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async moves 4, 8 or 16 bytes");
    if constexpr (BYTES == 16) {  // .cg passes by the L1, which a tile read once would only pollute
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(valid)
                     : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(destination), "l"(source), "n"(BYTES),
                     "r"(valid)
                     : "memory");
    }
}

// 16 bytes, without a count to be kept in a register.
__device__ inline void cp_async_16(uint32_t destination, const void* source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(destination), "l"(source) : "memory");
}

__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most PENDING of this thread's latest groups are still on their way.
template <int PENDING> __device__ inline void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Loads from the L2 that the compiler leaves in their order: it would have one wait for another to save registers.
__device__ inline int load_past_l1(const int* from) {
    int x;
    asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
    return x;
}
__device__ inline float load_past_l1(const float* from) {
    float x;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(from) : "memory");
    return x;
}
__device__ inline float4 load_past_l1(const float4* from) {
    float4 x;
    asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "l"(from)
                 : "memory");
    return x;
}

// Has the L2 forget a line of 128 bytes that nobody reads again, in place of writing it to memory later.
__device__ inline void discard_line(void* at) { asm volatile("discard.global.L2 [%0], 128;" ::"l"(at) : "memory"); }

// Has the L2 get a line, from Hopper on.
__device__ inline void prefetch_line(const void* at) {
#if __CUDA_ARCH__ >= 900
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at) : "memory");
#endif
}

// A row-major tile in shared memory whose 16-byte chunks are permuted within each row by XOR with the bit-reversed
// row index. Bit reversal makes every pattern in use free of bank conflicts: 8 rows of one chunk (ldmatrix), 4 rows
// of two chunks (32-bit and 64-bit fragments, float2 staging) and 2 rows of four (double2 staging).
// The base must be aligned to 128 bytes.
template <class T, int ROWS_, int COLS_> struct SharedTile {
    static constexpr int ROWS = ROWS_, COLS = COLS_;
    static constexpr int ROW_BYTES = COLS * int(sizeof(T));
    static constexpr int CHUNKS = ROW_BYTES / 16;
    static constexpr int BYTES = ROWS * ROW_BYTES;
    static_assert(CHUNKS >= 1 && (CHUNKS & (CHUNKS - 1)) == 0, "a row is a power of two of 16-byte chunks");

    static constexpr __device__ int offset(int row, int col) {
        const int byte = col * int(sizeof(T));
        const int reversed = (row & 1) << 2 | (row & 2) | (row >> 2 & 1);
        return row * ROW_BYTES + (byte ^ (reversed & (CHUNKS - 1)) << 4);
    }

    // The offset `rows` and `cols` further on, which must share no bit with the row and column of `from`: offset() is
    // linear over XOR, and the part that moves whole rows is an addition that folds into the instruction.
    static constexpr __device__ int moved(int from, int rows, int cols) {
        const int step = offset(rows, cols);
        return (from ^ (step & (ROW_BYTES - 1))) + (step & ~(ROW_BYTES - 1));
    }
};

// Byte offset in a box as TMA lays it out: rows of ROW_BYTES (32, 64 or 128), swizzled over as many. Eight neighbouring
// rows of one 16-byte chunk hit eight different banks. The box must start at a multiple of 8 * ROW_BYTES.
template <int ROW_BYTES> __device__ inline int swizzled_offset(int row, int chunk) {
    static_assert(ROW_BYTES == 32 || ROW_BYTES == 64 || ROW_BYTES == 128, "the swizzles of TMA");
    return row * ROW_BYTES + ((chunk ^ (row * ROW_BYTES / 128 & (ROW_BYTES / 16 - 1))) << 4);
}

template <int BYTES> struct BitsOf { using Type = uint32_t; };
template <> struct BitsOf<1> { using Type = unsigned char; };
template <> struct BitsOf<2> { using Type = uint16_t; };

// Fills MN x K tiles of one operand, K-block after K-block. The tile keeps the operand's own order: rows are MN if K
// is contiguous (kKMajor), else K. ACCESS is the width of one global access in bytes; an access of one element takes
// any stride on both axes, wider ones need stride 1 along the row.
// GATE > 0: the tile interleaves two halves of the operand's MN axis, GATE rows of the first, GATE of the second.
template <class T, int MN, int K, bool kKMajor, int ACCESS, int THREADS, int GATE = 0> struct OperandLoader {
    using Tile = SharedTile<T, kKMajor ? MN : K, kKMajor ? K : MN>;
    static constexpr bool kAsync = ACCESS >= 4;  // cp.async moves no less; narrower accesses go through registers
    static constexpr bool kAnyStride = ACCESS == int(sizeof(T));
    static constexpr int PIECE = (kAsync ? ACCESS : 4) / int(sizeof(T));  // elements that one step moves
    static constexpr int PIECES_PER_ROW = Tile::COLS / PIECE;
    static constexpr int ROWS_PER_STEP = THREADS / PIECES_PER_ROW;
    static constexpr int STEPS = ceil_div(Tile::ROWS, ROWS_PER_STEP);
    static_assert(THREADS % PIECES_PER_ROW == 0, "a row must not be split between steps");

    using Bits = typename BitsOf<sizeof(T)>::Type;  // of an element that goes through registers

    const T* source;  // this thread's first column in row 0 of the K-block that comes next
    int64_t row_stride, col_stride, gate_offset;
    int mn_count;  // MN that exist from the tile's origin on (of one half, with GATE)
    int row, col;  // this thread's first piece
    uint32_t pending[kAsync ? 1 : STEPS];

    __device__ OperandLoader(const T* operand, int64_t mn_stride, int64_t k_stride, int mn_begin, int mn_end,
                             int k_begin, int64_t gate_offset_, int thread)
        : source(operand + mn_begin * mn_stride + k_begin * k_stride),
          row_stride(kKMajor ? mn_stride : k_stride),
          col_stride(!kAnyStride ? 1 : kKMajor ? k_stride : mn_stride),
          gate_offset(gate_offset_),
          mn_count(mn_end - mn_begin),
          row(thread / PIECES_PER_ROW),
          col(thread % PIECES_PER_ROW * PIECE) {
        source += kKMajor ? col * col_stride : folded(col) * col_stride + (in_second_half(col) ? gate_offset : 0);
    }

    // Starts the copy of the next K-block, of which k_count elements exist, into the tile at `destination`. kWhole: the
    // operand has all of the tile, which spares the checks of every access.
    template <bool kWhole = false> __device__ void fetch(uint32_t destination, int k_count) {
        const int rows_exist = kKMajor ? mn_count : k_count;
        const int cols = clamp(kKMajor ? k_count - col : mn_count - folded(col), 0, PIECE);
        const T* from = source + row * row_stride;
        const int first = Tile::offset(row, col);
#pragma unroll
        for (int step = 0; step < STEPS; ++step, from += ROWS_PER_STEP * row_stride) {
            const int r = row + step * ROWS_PER_STEP;
            if (Tile::ROWS % ROWS_PER_STEP != 0 && r >= Tile::ROWS) break;
            if (GATE > 0 && kKMajor) from = source + folded(r) * row_stride + (in_second_half(r) ? gate_offset : 0);
            const int valid = kWhole ? PIECE : (kKMajor ? folded(r) : r) < rows_exist ? cols : 0;
            if constexpr (kAsync) {
                const uint32_t to = destination + Tile::moved(first, step * ROWS_PER_STEP, 0);
                cp_async<ACCESS>(to, from, valid * int(sizeof(T)));
            } else {
                const Bits* bits = reinterpret_cast<const Bits*>(from);
                pending[step] = 0;
#pragma unroll
                for (int i = 0; i < PIECE; ++i) {
                    if (i < valid) pending[step] |= uint32_t(bits[i * col_stride]) << i * int(sizeof(T)) * 8;
                }
            }
        }
        source += K * (kKMajor ? col_stride : row_stride);
    }

    // Completes a fetch that went through registers.
    __device__ void store(uint32_t destination) const {
        if constexpr (!kAsync) {
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                const int r = row + step * ROWS_PER_STEP;
                if (Tile::ROWS % ROWS_PER_STEP != 0 && r >= Tile::ROWS) break;
                const int offset = Tile::moved(Tile::offset(row, col), step * ROWS_PER_STEP, 0);
                asm volatile("st.shared.b32 [%0], %1;" ::"r"(destination + offset), "r"(pending[step]) : "memory");
            }
        }
    }

private:
    // Index of tile column or row `mn` within its half.
    static __device__ int folded(int mn) {
        if constexpr (GATE == 0) return mn;
        else return mn / (2 * GATE) * GATE + mn % GATE;
    }
    static __device__ bool in_second_half(int mn) {
        if constexpr (GATE == 0) return false;
        else return mn / GATE % 2 != 0;
    }
};

}  // namespace rawops
