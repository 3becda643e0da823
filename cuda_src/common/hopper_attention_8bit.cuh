// What float8 e4m3 changes in the Hopper attention. wgmma takes bytes along K alone, and for the product with the
// values K is the keys, so their tiles have to be transposed: two warps beside the producer do it.
//
// The four bytes that a thread's register of weights holds are not those of four neighbouring keys, but what its
// accumulators have: of each 16 keys, 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 in lane t of a quad. The transposed tile has
// them in that order, place 4 t + 2 b + e for key 8 b + 2 t + e, which is also how ldmatrix and a byte permutation
// leave them. Of each 16 columns the even ones come first, so that what stmatrix writes at once lies in other banks; a
// thread's accumulators are then of four columns in a row.
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
    // Writes one of the thread's two rows; it has four columns of every 16.
    template <class Out, int COUNT>
    static __device__ void store(const float (&acc)[COUNT], int half, float factor, Out* out, int cols, int lane) {
#pragma unroll
        for (int i = 0; i < COUNT / 8; ++i) {
            const float *even = acc + i * 8 + half * 2, *odd = even + 4;
            const int col = i * 16 + lane % 4 * 4;
            if (col >= cols) continue;
            const float4 four = {even[0] * factor, odd[0] * factor, even[1] * factor, odd[1] * factor};
            if constexpr (is_same<Out, float>) {
                *reinterpret_cast<float4*>(out + col) = four;
            } else {
                *reinterpret_cast<uint2*>(out + col) = {narrow_pair<Out>(four.x, four.y),
                                                        narrow_pair<Out>(four.z, four.w)};
            }
        }
    }

    // Byte offset of 16 places of a column in a transposed tile.
    template <class Tile> static __device__ int transposed_offset(int col, int chunk) {
        constexpr int CHUNKS = Tile::SPAN_T / 16;
        return chunk / CHUNKS * Tile::DV * Tile::SPAN_T + swizzled_offset<Tile::SPAN_T>(col, chunk % CHUNKS);
    }
};

// Transposes a stage of values: each of two warps takes 16 of every 32 columns, 32 keys at a time. All addresses come
// from two of the lane by constants: a warp that computes more than that is too slow for three consumers.
template <class Tile> class ValueTransposer {
public:
    __device__ ValueTransposer(int warp, int lane)
        : source(swizzled_offset<Tile::SPAN_V>(lane, warp)),
          target(AttentionAtom<__nv_fp8_e4m3>::transposed_offset<Tile>(warp * 16 + lane % 16, lane / 16)) {}

    // kSearches: returns what of the warp's values is NaN, 0 for nothing.
    template <bool kSearches> __device__ uint32_t transpose(uint32_t to, uint32_t from) const {
        uint32_t found = 0;
#pragma unroll
        for (int first = 0; first < LOADS; first += BATCH) {
            uint32_t r[BATCH][4];
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const int cols = (first + i) / PARTS * COLS, part = (first + i) % PARTS;
                const int box = cols / Tile::BOX_V, chunk = cols % Tile::BOX_V / 16;
                ldmatrix<true>(r[i], (from + source ^ chunk * 16) + (box * Tile::BLOCK_N + part * 32) * Tile::SPAN_V);
            }
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const int cols = (first + i) / PARTS * COLS, part = (first + i) % PARTS;
                const int box = part * 32 / Tile::SPAN_T, chunk = part * 32 % Tile::SPAN_T / 16;
                uint32_t w[4];  // even columns of the first 16 keys, odd ones; then those of the other 16
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    w[j] = __byte_perm(r[i][j / 2 * 2], r[i][j / 2 * 2 + 1], j % 2 ? 0x7531 : 0x6420);
                    if (kSearches) found |= nonfinite_mask<__nv_fp8_e4m3>(w[j]);
                }
                stmatrix((to + target ^ chunk * 16) + (box * Tile::DV + cols) * Tile::SPAN_T, w);
            }
        }
        return found;
    }

private:
    static constexpr int COLS = Tile::TRANSPOSERS * 16, PARTS = Tile::BLOCK_N / 32, LOADS = Tile::DV / COLS * PARTS;
    static constexpr int BATCH = LOADS % 4 == 0 ? 4 : LOADS % 3 == 0 ? 3 : 2;
    static_assert(Tile::DV % COLS == 0 && LOADS % BATCH == 0, "whole batches");
    int source, target;  // offsets of the first rows that the lane reads and writes
};

// Transposes the values of every tile that comes, block by block, and searches those that some row does not see all of
// for NaN, while they are in registers. By warps 2 and 3.
template <class Tile> __device__ void transpose_values(const AttentionExchange<Tile>& exchange) {
    const int warp = uniform(threadIdx.x / kWarpSize) - 2, lane = threadIdx.x % kWarpSize;
    const ValueTransposer<Tile> transposer(warp, lane);
    RingPosition<Tile::PLACES> slot_work;
    RingPosition<Tile::STAGES> slot;
#pragma unroll 1
    while (true) {
        const AttentionTask& work = exchange.work.take(slot_work);
        if (uniform(work.tile) < 0) break;
        const KeyBlocks keys = {uniform(work.keys.first), uniform(work.keys.end)};
        const KeyBlocks uncut = {uniform(work.uncut.first), uniform(work.uncut.end)};
        __syncwarp();
        exchange.work.release(slot_work, lane == 0);
#pragma unroll 1
        for (int block = keys.end - 1; block >= keys.first; --block) {
            const uint32_t from = exchange.raw + slot.stage * Tile::V_BYTES;
            const uint32_t to = exchange.v + slot.stage * Tile::V_BYTES;
            barrier_wait(exchange.raw_barriers.full(slot.stage), slot.phase);
            barrier_wait(exchange.v_barriers.empty(slot.stage), slot.phase ^ 1);
            if (uncut.has(block)) {
                transposer.template transpose<false>(to, from);
            } else {
                const bool is_found = __any_sync(~0u, transposer.template transpose<true>(to, from) != 0);
                if (lane == 0) store_word(exchange.findings(slot.stage, warp), is_found);
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
