// A row-major b of TF32 on Hopper: wgmma reads TF32 from shared memory along K alone, but from registers in any order.
// So the tile is one of D's transpose, and b the first operand: each thread takes its part from the stage.
#pragma once
#include "hopper_tile.cuh"

namespace rawops {

// A warp's 16 rows of a box, columns of D, that is 32 of them wide and has a row of 128 bytes for each k. Which row of
// the product a column makes is free; this choice has every two rows of a thread next to each other, l / 4 and 8
// below of lane l, and each half of a warp read from all banks.
struct TransposedRows {
    static constexpr int BOX_BYTES = 32 * 128, COUNT = 4;  // steps of 8 along K
    using Values = uint32_t[COUNT][4];

    // The first of four neighbouring columns, and the row of the first: the others are 8, 1 and 9 below.
    static __device__ int col(int warp, int group) {
        return warp / 2 * 32 + warp % 2 * 8 + group % 2 * 4 + group / 2 * 16;
    }
    static __device__ int row(int group) { return group % 2 * 4 + group / 2 * 2; }
    // The first of a thread's two columns: the other is that of the row 8 below.
    static __device__ int pair(int warp, int lane) {
        const int row = lane / 4;
        return warp / 2 * 32 + warp % 2 * 8 + row / 4 * 4 + row / 2 % 2 * 16 + row % 2 * 2;
    }

    uint32_t offsets[2];  // of this thread's parts at k and k + 4

    __device__ explicit TransposedRows(const Consumer& self) {
        const int lane = self.lane(), warp = (self.row + self.warp_row()) / 16, row = lane / 4;
        const int chunk = warp % 2 * 2 + row / 4 + row / 2 % 2 * 4;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int k = lane % 4 + i * 4;
            offsets[i] = warp / 2 * BOX_BYTES + swizzled_offset<128>(k, chunk) + row % 2 * 8;
        }
    }

    __device__ void load(Values& values, uint32_t stage) const {
#pragma unroll
        for (int step = 0; step < COUNT; ++step) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                             : "=r"(values[step][i * 2]), "=r"(values[step][i * 2 + 1])
                             : "r"(stage + offsets[i] + step * 1024)
                             : "memory");
            }
        }
    }
};

// acc = a @ b over the next k_blocks stages, as multiply_stages does it: the part of a stage is read while the products
// of the one before are in flight.
template <class Tile, class Exchange>
__device__ inline void multiply_transposed(typename Tile::Accumulators& acc, RingPosition<Tile::STAGES>& slot,
                                           int k_blocks, const Exchange& exchange, const Consumer& self) {
    using B = typename Tile::OperandB;
    const TransposedRows rows(self);
    TransposedRows::Values even, odd;
#pragma unroll
    for (int i = 0; i < Tile::BLOCK_N / 2; ++i) acc[0][i] = 0;
    auto load = [&](TransposedRows::Values& values) {
        barrier_wait(exchange.barriers.full(slot.stage), slot.phase);
        rows.load(values, exchange.ring + slot.stage * Tile::STAGE_BYTES);
    };
    auto multiply = [&](TransposedRows::Values& values, TransposedRows::Values& next, bool is_last) {
        const int stage = slot.stage;
        const uint64_t b = B::descriptor(exchange.ring + stage * Tile::STAGE_BYTES + Tile::A_BYTES);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < Tile::K_STEPS; ++step) {
            Wgmma<Tile::BLOCK_N>::multiply(acc[0], values[step], B::advance(b, 0, step));
        }
        wgmma_commit();
        slot.advance();
        if (!is_last) load(next);
        wgmma_wait<0>();
        if (self.leads()) barrier_arrive(exchange.barriers.empty(stage));
    };
    if (k_blocks > 0) load(even);
#pragma unroll 1
    for (int block = 0; block < k_blocks; block += 2) {
        multiply(even, odd, block + 1 == k_blocks);
        if (block + 1 < k_blocks) multiply(odd, even, block + 2 == k_blocks);
    }
    hold(acc[0]);
}

}  // namespace rawops
