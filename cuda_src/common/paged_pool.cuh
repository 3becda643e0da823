// Keys and values in pages: where a token lies, and the tile of tokens that a warp brings into shared memory.
//
// Token t of sequence b is slot t % page_size of page block_table[b, t / page_size]. A page holds keys, and
// value_offset elements on, values: [page_size, kv_heads, head_dim] (NHD) or [kv_heads, page_size, head_dim] (HND).
#pragma once
#include "mma.cuh"

namespace rawops {

struct PagePool {
    const void* pages;
    const int* block_table;
    const float *k_scale, *v_scale;  // of 8-bit keys and values; none: 1
    int64_t scale_page, scale_head;  // strides: one a head if scale_page is 0
    int64_t page_stride, value_offset, token_stride, head_stride, dim_stride;  // in elements
    int64_t table_stride;
    int num_pages, max_pages, page_shift, head_dim;

    __device__ int capacity() const { return max_pages << page_shift; }  // tokens that a row of the table can name
};

// Rows of 16-byte chunks, permuted within a row by XOR so that 8 rows of one chunk (ldmatrix), and 2 rows of four,
// lie in different banks. Any number of chunks: only the largest power of two that divides it takes part.
template <int CHUNKS> struct ChunkTile {
    static constexpr int ROW_BYTES = CHUNKS * 16;
    static constexpr int PERMUTED = CHUNKS % 8 == 0 ? 8 : CHUNKS % 4 == 0 ? 4 : CHUNKS % 2 == 0 ? 2 : 1;

    static constexpr __device__ int permutation(int row) {
        if (PERMUTED == 8) return (row & 1) << 2 | (row & 2) | (row >> 2 & 1);
        return row / (8 / PERMUTED) % PERMUTED;
    }
    static constexpr __device__ int offset(int row, int chunk) {
        return row * ROW_BYTES + ((chunk ^ permutation(row)) << 4);
    }
    // The offset `rows` and `chunks` further on, which must share no bit with the row and chunk of `from`.
    static constexpr __device__ int moved(int from, int rows, int chunks) {
        const int permuted = permutation(rows) ^ (chunks & (PERMUTED - 1));
        return (from ^ permuted << 4) + rows * ROW_BYTES + ((chunks & ~(PERMUTED - 1)) << 4);
    }
};

// The keys and values of TOKENS consecutive tokens of one head, HEAD_DIM columns each (zeros beyond the pool's
// head_dim), loaded by one warp. ACCESS is the bytes of one global access: 16, or one element of any stride.
template <class T_, int HEAD_DIM_, int ACCESS> struct TokenTile {  // T: as stored
    using T = T_;
    static constexpr int HEAD_DIM = HEAD_DIM_, TOKENS = 32 / int(sizeof(T));
    static constexpr int CHUNKS = HEAD_DIM * int(sizeof(T)) / 16, PER_CHUNK = 16 / int(sizeof(T));
    using Layout = ChunkTile<CHUNKS>;
    static constexpr int VALUES = TOKENS * Layout::ROW_BYTES;  // where values begin
    static constexpr bool kScaled = sizeof(T) == 1;
    static constexpr int SCALES = 2 * VALUES;  // of the tokens' keys, then of their values
    static constexpr int BYTES = SCALES + (kScaled ? TOKENS * 8 : 0);
    static_assert(TOKENS * CHUNKS % kWarpSize == 0 && TOKENS <= kWarpSize, "a warp loads a tile in whole steps");

    // Starts the copies of tokens token ... into `slot`. Lane `row` of the first TOKENS lanes knows its token's page,
    // or one that is none for a token not to be read: it becomes zeros.
    static __device__ void fetch(const PagePool& pool, uint32_t slot, int page, int token, int head, int lane) {
        const bool exists = static_cast<uint32_t>(page) < static_cast<uint32_t>(pool.num_pages);
        const uint32_t present = __ballot_sync(~0u, exists);
        if (kScaled && pool.scale_page != 0) {
            const int64_t at = exists ? page * pool.scale_page + head * pool.scale_head : 0;
            fetch_scale(slot + SCALES + lane * 4, pool.k_scale, at, exists);
            fetch_scale(slot + SCALES + TOKENS * 4 + lane * 4, pool.v_scale, at, exists);
        }
        if (ACCESS == 16 && present == ~0u && TOKENS >> pool.page_shift <= 1 && pool.head_dim == HEAD_DIM) {
            fetch_whole(pool, slot, page, token, head, lane);
            return;
        }
        const int64_t in_row = in_page(pool, token + lane % TOKENS) * pool.token_stride + head * pool.head_stride;
        const int64_t place = exists ? page * pool.page_stride + in_row : 0;
#pragma unroll 1
        for (int step = 0; step < STEPS; ++step) {
            const int index = lane + step * kWarpSize, row = index / CHUNKS, chunk = index % CHUNKS;
            const int64_t from = __shfl_sync(~0u, place, row);
            const int count = present >> row & 1 ? clamp(pool.head_dim - chunk * PER_CHUNK, 0, PER_CHUNK) : 0;
            const uint32_t to = slot + Layout::offset(row, chunk);
            const int64_t column = chunk * PER_CHUNK * (ACCESS == 16 ? 1 : pool.dim_stride);
            const T* key = static_cast<const T*>(pool.pages) + from + column;
            copy(to, key, count, pool.dim_stride);
            copy(to + VALUES, key + pool.value_offset, count, pool.dim_stride);
        }
    }

    // Has the L2 get what `fetch` will ask for, from Hopper on: rows of 16 bits as they are, 8 bits line by line.
    static __device__ void prefetch(const PagePool& pool, int page, int token, int head, int lane) {
        if (ACCESS != 16 || static_cast<uint32_t>(page) >= static_cast<uint32_t>(pool.num_pages)) return;
        const int64_t in_row = in_page(pool, token + lane % TOKENS) * pool.token_stride + head * pool.head_stride;
        const T* key = static_cast<const T*>(pool.pages) + page * pool.page_stride + in_row;
#if __CUDA_ARCH__ >= 900
#pragma unroll
        for (int i = lane / TOKENS; i < 2; i += kWarpSize / TOKENS) {
            const T* row = key + i * pool.value_offset;
            if constexpr (kScaled) {
#pragma unroll
                for (int line = 0; line < HEAD_DIM; line += 128) prefetch_line(row + line);
            } else if (pool.head_dim == HEAD_DIM) {
                constexpr int kRowBytes = HEAD_DIM * int(sizeof(T));
                asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(row), "n"(kRowBytes) : "memory");
            }
        }
#endif
    }

private:
    static constexpr int STEPS = TOKENS * CHUNKS / kWarpSize;

    static __device__ int in_page(const PagePool& pool, int token) { return token & ((1 << pool.page_shift) - 1); }

    static __device__ void fetch_scale(uint32_t to, const float* scales, int64_t at, bool exists) {
        if (scales) {
            cp_async<4>(to, scales + at, exists ? 4 : 0);
        } else {
            asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(1.0f) : "memory");
        }
    }

    // The same where all tokens are there and in one page.
    static __device__ void fetch_whole(const PagePool& pool, uint32_t slot, int page, int token, int head, int lane) {
        constexpr bool kWholeRows = kWarpSize % CHUNKS == 0;  // in each step
        const int row = lane / CHUNKS, chunk = lane % CHUNKS, begin = Layout::offset(row, chunk);
        const int64_t place =
            page * pool.page_stride + in_page(pool, token) * pool.token_stride + head * pool.head_stride;
        const T* from = static_cast<const T*>(pool.pages) + place;
        const T* next = from + row * pool.token_stride + chunk * PER_CHUNK;
        const int64_t stride = kWarpSize / CHUNKS * pool.token_stride;
#pragma unroll
        for (int step = 0; step < STEPS; ++step, next += stride) {
            uint32_t to;
            if constexpr (kWholeRows) {
                to = slot + Layout::moved(begin, step * (kWarpSize / CHUNKS), 0);
            } else {
                const int index = lane + step * kWarpSize;
                to = slot + Layout::offset(index / CHUNKS, index % CHUNKS);
                next = from + index / CHUNKS * pool.token_stride + index % CHUNKS * PER_CHUNK;
            }
            cp_async<16>(to, next, 16);
            cp_async<16>(to + VALUES, next + pool.value_offset, 16);
        }
    }

    static __device__ void copy(uint32_t to, const T* from, int count, int64_t stride) {
        if constexpr (ACCESS == 16) {
            cp_async<16>(to, from, count * int(sizeof(T)));
        } else {
            using Bits = typename BitsOf<sizeof(T)>::Type;
            uint32_t words[4] = {};
#pragma unroll
            for (int i = 0; i < PER_CHUNK; ++i) {
                const uint32_t bits = i < count ? reinterpret_cast<const Bits*>(from)[i * stride] : 0;
                words[i * int(sizeof(T)) / 4] |= bits << i * int(sizeof(T)) % 4 * 8;
            }
            asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                         "r"(words[3])
                         : "memory");
        }
    }
};

}  // namespace rawops
