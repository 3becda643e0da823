// The low-rank part of a tile of the Hopper GEMM: acc += scaling * (a @ lora_a) @ lora_b.
//
// The columns of lora_a ride along the K loop as one more narrow operand, so that y = a @ lora_a ends up in registers
// of its own. Accumulators of wgmma lie as mma.sync wants its first factor, and so the product with lora_b needs no
// way through memory: it runs on mma.sync, onto the accumulators of a @ b.
#pragma once
#include "hopper_tile.cuh"
#include "split_tf32.cuh"

namespace rawops {

// As lora.py packs it: the maps of lora_a (K, rank) and lora_b (rank, N). Past the rank they read as zero.
struct LowRankCall {
    TensorMap a, b;
    int rank;
    float scaling;
};

// Where ldmatrix finds the part of lora_b for ranks 8 * k_step ... and the columns of atom j ...: this lane's row.
template <class Tile> __device__ inline uint32_t lora_b_row(uint32_t tile, int k_step, int j, int lane) {
    constexpr int RANK = Tile::LowRank::RANK;
    if constexpr (Tile::LowRank::kBKMajor) {
        return tile + swizzled_offset<RANK * 2>(j * 8 + lane % 8, k_step);
    } else {
        constexpr int BOX = Tile::BOX_COLS, ROW_BYTES = BOX * 2;
        return tile + j * 8 / BOX * (RANK * ROW_BYTES) +
               swizzled_offset<ROW_BYTES>(k_step * 8 + lane % 8, j * 8 % BOX / 8);
    }
}

// The order of the ranks within an atom is free as long as both operands share it: here ranks 2t and 2t + 1 take the
// places t and t + 4. That is how a thread has them, of y in its accumulators and of lora_b from ldmatrix.
template <class Tile>
__device__ inline void add_rank_product(typename Tile::Finished& acc, const typename Tile::LowRank::Accumulators& y,
                                        const LowRankCall& low_rank, uint32_t tile_b, int lane) {
    constexpr int ATOMS = Tile::SHARE * Tile::PARTS / 8, GROUP = ATOMS % 4 == 0 ? 4 : 2;  // that one ldmatrix feeds
    const int k_steps = ceil_div(low_rank.rank, 8);
#pragma unroll 1
    for (int k_step = 0; k_step < k_steps; ++k_step) {
        uint32_t high[4], low[4];
#pragma unroll
        for (int candidate = 0; candidate < Tile::LowRank::RANK / 8; ++candidate) {  // registers have no index
            if (candidate == k_step) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int place = i % 2 * 2 + i / 2;
                    split_tf32(high[place], low[place], low_rank.scaling * y[candidate * 4 + i]);
                }
            }
        }
#pragma unroll
        for (int j = 0; j < ATOMS; j += GROUP) {
            uint32_t pairs[4];
            const uint32_t row = lora_b_row<Tile>(tile_b, k_step, j + lane / 8 % GROUP, lane);
            ldmatrix<!Tile::LowRank::kBKMajor>(pairs, row);
#pragma unroll
            for (int part = 0; part < GROUP; ++part) {
                using T = typename Tile::T;
                const T* pair = reinterpret_cast<const T*>(&pairs[part]);
                multiply_split(four(&acc[0][(j + part) * 4]), high, low, widen(pair[0]), widen(pair[1]));
            }
        }
    }
}

}  // namespace rawops
