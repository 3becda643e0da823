// What float8 e4m3 changes in the Hopper attention. wgmma takes bytes along K alone, and for the product with the
// values K is the keys, so their tiles have to be transposed: two warps beside the producer do it.
//
// The four bytes that a thread's register of weights holds are not those of four neighbouring keys, but what its
// accumulators have: of each 16 keys, 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 in lane t of a quad. The transposed tile has
// them in that order, place 4 t + 2 b + e for key 8 b + 2 t + e, which is also how ldmatrix and a byte permutation
// leave them.
#pragma once
#include <cuda_fp8.h>

#include "hopper_attention.cuh"
#include "mma.cuh"
#include "wgmma_e4m3.cuh"

namespace rawops {

template <> __device__ inline uint32_t nonfinite_mask<__nv_fp8_e4m3>(uint32_t word) {  // it has NaN, and no infinity
    return (((word & 0x7f7f7f7f) + 0x01010101) >> 7 & 0x01010101) * 0xff;
}

__device__ inline uint32_t pack_e4m3(float a, float b, float c, float d) {
    uint32_t word;
    asm("{\n.reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n}"
        : "=r"(word)
        : "f"(a), "f"(b), "f"(c), "f"(d));
    return word;
}

template <> struct AttentionAtom<__nv_fp8_e4m3> {
    using T = __nv_fp8_e4m3;
    template <int COUNT> static __device__ void narrow(uint32_t (&p)[COUNT / 16][4], const float (&s)[COUNT]) {
#pragma unroll
        for (int i = 0; i < COUNT / 4; ++i) {
            const float* low = s + (i / 4 * 4 + i % 4 / 2 * 2) * 4 + i % 2 * 2;  // of eight keys, then the next eight
            p[i / 4][i % 4] = pack_e4m3(low[0], low[1], low[4], low[5]);
        }
    }
    template <int N> static __device__ void multiply_keys(float (&s)[N / 2], uint64_t q, uint64_t k, bool accumulates) {
        WgmmaE4m3<N>::multiply(s, q, k, accumulates);
    }
    template <class Tile>
    static __device__ void multiply_values(typename Tile::Output& o, const uint32_t (&p)[4], uint64_t v, int step,
                                           bool accumulates) {
        const int box = step * 32 / Tile::SPAN_T, within = step * 32 % Tile::SPAN_T;
        WgmmaE4m3<Tile::DV>::multiply(o, p, v + (box * Tile::DV * Tile::SPAN_T + within >> 4), accumulates);
    }
    static __device__ void look(uint32_t& found, const uint4& words) {
        found |= nonfinite_mask<T>(words.x) | nonfinite_mask<T>(words.y) | nonfinite_mask<T>(words.z) |
                 nonfinite_mask<T>(words.w);
    }
    static __device__ bool is_suspect(uint32_t found) { return found != 0; }
    template <class Tile>
    static __device__ float2 nonfinite_pair(uint32_t tile, int key, int col, int thread) {
        const int place = key / 16 * 16 + key % 8 / 2 * 4 + key % 16 / 8 * 2 + key % 2;
        float values[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t at =
                tile + transposed_offset<Tile>(col + thread % 4 * 2 + i, place / 16) + place % 16 / 4 * 4;
            const uint32_t mask = nonfinite_mask<__nv_fp8_e4m3>(load_word(at)) >> place % 4 * 8;
            values[i] = __int_as_float(mask & 0xff ? 0x7fffffff : 0);
        }
        return {values[0], values[1]};
    }

    // Byte offset of 16 places of a column in a transposed tile.
    template <class Tile> static __device__ int transposed_offset(int col, int chunk) {
        constexpr int CHUNKS = Tile::SPAN_T / 16;
        return chunk / CHUNKS * Tile::DV * Tile::SPAN_T + swizzled_offset<Tile::SPAN_T>(col, chunk % CHUNKS);
    }
};

// How many times 16 columns a warp transposes at once. With three consumers, of narrower rows, one is as fast.
template <class Tile> __device__ constexpr int transposed_sets() {
    return Tile::CONSUMERS == 2 && Tile::BLOCK_N < 192 && Tile::DV % (2 * Tile::TRANSPOSERS * 16) == 0 ? 2 : 1;
}

// Transposes 16 columns of all keys, or two times 16, 32 keys at a time: up to six loads are under way together. Where
// keys lie differs by constants.
template <class Tile> __device__ inline void transpose_columns(uint32_t to, uint32_t from, int cols, int lane) {
    constexpr int PARTS = Tile::BLOCK_N / 32, GROUP = PARTS % 6 == 0 ? 6 : PARTS % 3 == 0 ? 3 : PARTS % 2 == 0 ? 2 : 1;
    constexpr int SETS = transposed_sets<Tile>();
    uint32_t source[SETS];
#pragma unroll
    for (int set = 0; set < SETS; ++set) {
        const int at = cols + set * Tile::TRANSPOSERS * 16, box = at / Tile::BOX_V, chunk = at % Tile::BOX_V / 16;
        source[set] = from + box * Tile::BLOCK_N * Tile::SPAN_V + swizzled_offset<Tile::SPAN_V>(lane, chunk);
    }
    const int col = cols + lane % 8 * 2 + lane / 8 % 2;
#pragma unroll
    for (int part = 0; part < PARTS; part += GROUP) {
        uint32_t r[SETS * GROUP][4];
#pragma unroll
        for (int i = 0; i < SETS * GROUP; ++i) {
            ldmatrix<true>(r[i], source[i / GROUP] + (part + i % GROUP) * 32 * Tile::SPAN_V);
        }
#pragma unroll
        for (int i = 0; i < SETS * GROUP; ++i) {
            uint32_t w[4];  // even columns of the first 16 keys, odd ones; then those of the other 16
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                w[j] = __byte_perm(r[i][j / 2 * 2], r[i][j / 2 * 2 + 1], j % 2 ? 0x7531 : 0x6420);
            }
            stmatrix(to + AttentionAtom<__nv_fp8_e4m3>::transposed_offset<Tile>(
                              col + i / GROUP * Tile::TRANSPOSERS * 16, (part + i % GROUP) * 2 + lane / 16),
                     w);
        }
    }
}

// Transposes the values of every tile that comes, block by block. By warps 2 and 3.
template <class Tile> __device__ void transpose_values(const AttentionExchange<Tile>& exchange) {
    const int warp = uniform(threadIdx.x / kWarpSize) - 2, lane = threadIdx.x % kWarpSize;
    RingPosition<Tile::PLACES> slot_work;
    RingPosition<Tile::STAGES> slot;
#pragma unroll 1
    while (true) {
        const AttentionTask& work = exchange.work.take(slot_work);
        if (uniform(work.tile) < 0) break;
        const int blocks = uniform(work.keys.end - work.keys.first);
        __syncwarp();
        exchange.work.release(slot_work, lane == 0);
#pragma unroll 1
        for (int block = 0; block < blocks; ++block) {
            const uint32_t from = exchange.raw + slot.stage * Tile::V_BYTES;
            const uint32_t to = exchange.v + slot.stage * Tile::V_BYTES;
            barrier_wait(exchange.raw_barriers.full(slot.stage), slot.phase);
            barrier_wait(exchange.v_barriers.empty(slot.stage), slot.phase ^ 1);
#pragma unroll 1
            for (int cols = warp * 16; cols < Tile::DV; cols += transposed_sets<Tile>() * Tile::TRANSPOSERS * 16) {
                transpose_columns<Tile>(to, from, cols, lane);
            }
            fence_async_proxy();
            __syncwarp();
            if (lane == 0) {
                barrier_arrive(exchange.v_barriers.full(slot.stage));
                barrier_arrive(exchange.raw_barriers.empty(slot.stage));
            }
            slot.advance();
        }
    }
}

}  // namespace rawops
