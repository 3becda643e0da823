// The low-rank part of a tile of the Hopper GEMM: acc += scaling * (a @ lora_a) @ lora_b.
//
// y = a @ lora_a comes from memory, or it is made here: then the columns of lora_a ride along the K loop as one more
// narrow operand. Either way a thread has it in registers as wgmma leaves it, which is how wgmma of TF32 takes a first
// operand. lora_b fits TF32 exactly, and y goes in as the sum of two TF32 values, to 22 bits.
#pragma once
#include "hopper_tile.cuh"
#include "split_tf32.cuh"

namespace rawops {

// As lora.py packs it: the maps of lora_a (K, rank), where it rides, and lora_b (rank, N). Past the rank they read as
// zero. y: (batches * M, rank), rows on 16-byte boundaries.
struct LowRankCall {
    TensorMap a, b;
    const float* y;
    int64_t y_row;
    int rank;
    float scaling;
};

// y from memory: the consumer's rows, of which `rows` exist, begin at first_row.
template <class Tile>
__device__ inline void read_y(typename Tile::LowRank::Accumulators& y, const LowRankCall& low_rank, int64_t first_row,
                              int rows, const Consumer& self) {
    const int lane = self.lane(), row = self.warp_row() + lane / 4;
#pragma unroll
    for (int j = 0; j < Tile::LowRank::RANK / 8; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int rank = j * 8 + lane % 4 * 2, left = row + half * 8 < rows ? low_rank.rank - rank : 0;
            const float* from = low_rank.y + (first_row + row + half * 8) * low_rank.y_row + rank;
            const float2 pair = left > 0 ? *reinterpret_cast<const float2*>(from) : float2{0, 0};
            y[j * 4 + half * 2] = pair.x;
            y[j * 4 + half * 2 + 1] = left > 1 ? pair.y : 0;
        }
    }
}

// Sixteen ranks of lora_b as a K-major TF32 operand, and once more without infinities for the low part of y. The order
// of the ranks is free as long as both operands share it: here ranks 2t and 2t + 1 of eight take the places t and
// t + 4. That is how a thread has them, of y in its accumulators and of lora_b from ldmatrix.
template <class Tile> struct WideLoraB {
    using LowRank = typename Tile::LowRank;
    using Operand = WgmmaOperand<true, 32, 64>;
    static constexpr int COLS = Tile::SHARE * Tile::PARTS, BYTES = COLS * 64;  // of each of the two

    uint32_t address;

    // From the tile as TMA brings it, by the threads of a consumer.
    __device__ void fill(uint32_t tile, int slice, const Consumer& self) const {
        constexpr int ATOMS = COLS / 8, GROUP = ATOMS % 4 == 0 ? 4 : 2;  // that one ldmatrix reads
        const int lane = self.lane();
#pragma unroll 1
        for (int j = self.thread / kWarpSize * GROUP; j < ATOMS; j += 4 * GROUP) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                uint32_t pairs[4];
                ldmatrix<!LowRank::kBKMajor>(pairs, narrow_row(tile, slice * 2 + half, j + lane / 8 % GROUP, lane));
#pragma unroll
                for (int part = 0; part < GROUP; ++part) {
                    const auto* pair = reinterpret_cast<const typename Tile::T*>(&pairs[part]);
#pragma unroll
                    for (int place = 0; place < 2; ++place) {
                        const uint32_t to = address + lane % 4 * 4 +
                                            swizzled_offset<64>((j + part) * 8 + lane / 4, half * 2 + place);
                        const float b = widen(pair[place]);
                        store_shared(to, b);
                        store_shared(to + BYTES, finite_or_zero(b));
                    }
                }
            }
        }
    }

private:
    // The row that this lane names to ldmatrix, for eight ranks and the columns of atom j.
    static __device__ uint32_t narrow_row(uint32_t tile, int rank_atom, int j, int lane) {
        if constexpr (LowRank::kBKMajor) {
            return tile + swizzled_offset<LowRank::RANK * 2>(j * 8 + lane % 8, rank_atom);
        } else {
            constexpr int BOX = Tile::BOX_COLS, ROW_BYTES = BOX * 2;
            return tile + j * 8 / BOX * (LowRank::RANK * ROW_BYTES) +
                   swizzled_offset<ROW_BYTES>(rank_atom * 8 + lane % 8, j * 8 % BOX / 8);
        }
    }
};

// acc += scaling * y @ lora_b, sixteen ranks at a time. The consumer's staging tile lends its memory.
template <class Tile>
__device__ inline void add_rank_product(typename Tile::Finished& acc, const typename Tile::LowRank::Accumulators& y,
                                        const LowRankCall& low_rank, uint32_t lora_b, const Consumer& self) {
    using Wide = WideLoraB<Tile>;
    const Wide wide{shared_address(self.staging)};
    const uint64_t whole = Wide::Operand::descriptor(wide.address);
    const uint64_t finite = Wide::Operand::descriptor(wide.address + Wide::BYTES);
    const int slices = ceil_div(low_rank.rank, 16);
    if (self.leads()) tma_store_wait_read();  // of the tile before
#pragma unroll 1
    for (int slice = 0; slice < slices; ++slice) {
        uint32_t high[2][4], low[2][4];
#pragma unroll
        for (int candidate = 0; candidate < Tile::LowRank::RANK / 16; ++candidate) {  // registers have no index
            if (candidate != slice) continue;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int place = i % 2 * 2 + i / 2 % 2;
                split_tf32(high[i / 4][place], low[i / 4][place], low_rank.scaling * y[candidate * 8 + i]);
            }
        }
        self.sync();
        wide.fill(lora_b, slice, self);
        fence_async_proxy();
        self.sync();
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            using Product = Wgmma<Wide::COLS>;
            Product::multiply(acc[0], high[step], Wide::Operand::advance(whole, 0, step));
            Product::multiply(acc[0], low[step], Wide::Operand::advance(finite, 0, step));
        }
        wgmma_commit();
        wgmma_wait<0>();
    }
    hold(acc[0]);
}

}  // namespace rawops
