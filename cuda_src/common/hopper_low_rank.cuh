// The low-rank part of a tile of the Hopper GEMM: acc += scaling * (a @ lora_a) @ lora_b, RANK ranks at a time.
//
// y = a @ lora_a comes from memory, or it is made here: then the columns of lora_a ride along the K loop as one more
// narrow operand. Either way a thread has it in registers as wgmma leaves it, and that is how wgmma takes a first
// operand of 16 bits: y goes in as a sum of values of lora_b's own type. lora_b comes through the ring, in one more
// stage after those of K, or in more if its ranks are more than RANK. These do not ride, nor has a cluster room.
#pragma once
#include "hopper_tile.cuh"
#include "rank_parts.cuh"

namespace rawops {

// As _gemm_sm90_low_rank.py packs it: the maps of lora_a (K, rank), where it rides, and lora_b (rank, N). Past the
// rank they read as zero. y: (batches * M, rank), rows on 16-byte boundaries.
struct LowRankCall {
    TensorMap a, b;
    const void* elements;  // lora_a without a map
    const float* y;
    int64_t a_row, y_row;
    int rank;
    float scaling;
};

// y from memory, RANK ranks from `first` on: the consumer's rows, of which `rows` exist, begin at first_row.
template <int COUNT>
__device__ inline void read_y(float (&y)[COUNT], const LowRankCall& low_rank, int first, int64_t first_row, int rows,
                              const Consumer& self) {
    const int lane = self.lane(), row = self.warp_row() + lane / 4;
#pragma unroll
    for (int j = 0; j < COUNT / 4; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int rank = first + j * 8 + lane % 4 * 2, left = row + half * 8 < rows ? low_rank.rank - rank : 0;
            const float* from = low_rank.y + (first_row + row + half * 8) * low_rank.y_row + rank;
            const float2 pair = left > 0 ? *reinterpret_cast<const float2*>(from) : float2{0, 0};
            y[j * 4 + half * 2] = pair.x;
            y[j * 4 + half * 2 + 1] = left > 1 ? pair.y : 0;
        }
    }
}

// scaling * y as sums of values of T, for each sixteen ranks, and what the thread's rows g and g + 8 are to be
// multiplied with for that: 1 but for float16 whose range they leave. From the thread's `left` on there are no ranks:
// 0, which they need not be yet where a or scaling has an infinity or a NaN.
template <class T, int RANK, int PARTS_ = RankParts<T>::COUNT> struct RankFragments {
    static constexpr int PARTS = PARTS_;
    RankParts<T> slices[RANK / 16];
    float factor[2] = {1, 1};

    __device__ RankFragments(const float (&y)[RANK / 2], float scaling, int left) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if constexpr (is_same<T, __half>) choose_factor(half, y, scaling);
            const float scale = scaling * factor[half];
#pragma unroll
            for (int slice = 0; slice < RANK / 16; ++slice) {
                const float* own = y + slice * 8 + half * 2;
                float four[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float value = slice * 16 + i / 2 * 8 + i % 2 < left ? scale * own[i / 2 * 4 + i % 2] : 0;
                    four[i] = rounded_for_parts<T, PARTS>(value);
                }
                slices[slice].cut(half, four);
            }
        }
    }
    // The largest entry of a row is to lie in 2^-3 .. 2^15.
    __device__ void choose_factor(int half, const float (&y)[RANK / 2], float scaling) {
        uint32_t largest = 0;
#pragma unroll
        for (int i = 0; i < RANK / 4; ++i) {
            largest = max(largest, __float_as_uint(scaling * y[i / 2 * 4 + half * 2 + i % 2]) & 0x7fffffff);
        }
        largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
        const int exponent = largest >> 23;
        if ((exponent < 124 && largest != 0) || exponent > 141) {
            factor[half] = __uint_as_float((254 + 14 - clamp(exponent, 97, 254)) << 23);
        }
    }
    __device__ bool is_scaled() const { return factor[0] != 1 || factor[1] != 1; }
};

// The columns of lora_b that belong to a tile as TMA has brought them, RANK ranks.
template <class Tile> struct StagedLoraB {
    using T = typename Tile::T;
    using LowRank = typename Tile::LowRank;
    static constexpr int COLS = Tile::SHARE * Tile::PARTS;
    static constexpr int READERS = Tile::kPingPong ? 1 : Tile::CONSUMERS;  // consumers
    using Operand = WgmmaOperand<LowRank::kBKMajor, LowRank::RANK,
                                 LowRank::kBKMajor ? LowRank::RANK * 2 : Tile::LORA_B_BOX * 2>;

    uint32_t address;

    // Tells all threads of a consumer whether there is an infinity or a NaN.
    __device__ bool is_non_finite(const Consumer& self) const {
        constexpr uint32_t kUnit = is_same<T, __half> ? 0x04000400 : 0x00800080;  // the exponent's last bit
        uint32_t found = 0;
#pragma unroll 4
        for (int at = self.thread * 16; at < Tile::LORA_B_BYTES; at += kWarpGroupSize * 16) {
            const uint4 eight = load_quad(address + at);
            found |= (eight.x & 0x7fff7fff) + kUnit | (eight.y & 0x7fff7fff) + kUnit;
            found |= (eight.z & 0x7fff7fff) + kUnit | (eight.w & 0x7fff7fff) + kUnit;
        }
        return sync_group_or<kWarpGroupSize>(1 + self.number, found & 0x80008000);
    }
    // Makes them 0, when no product of any consumer reads them any more.
    __device__ void make_finite(const Consumer& self) const {
        sync_readers(self);
        const int first = Tile::kPingPong ? self.thread : self.number * kWarpGroupSize + self.thread;
#pragma unroll 1
        for (int at = first * 4; at < Tile::LORA_B_BYTES; at += READERS * kWarpGroupSize * 4) {
            store_word(address + at, finite_or_zero<T>(load_word(address + at)));
        }
        fence_async_proxy();
        sync_readers(self);
    }
    static __device__ void sync_readers(const Consumer& self) {
        if constexpr (Tile::kPingPong) self.sync();
        else sync_group<3, Tile::CONSUMERS * kWarpGroupSize>();
    }
};

// acc += scaling * y @ lora_b, RANK ranks of both, of which the first `ranks` exist. An infinite entry of lora_b meets
// the first of the parts of y alone: times one that is 0 it would make a NaN.
template <class Tile>
__device__ inline void add_rank_product(typename Tile::Finished& acc, const typename Tile::LowRank::Accumulators& y,
                                        const LowRankCall& low_rank, int ranks, uint32_t address,
                                        const Consumer& self) {
    using T = typename Tile::T;
    using LowRank = typename Tile::LowRank;
    using Staged = StagedLoraB<Tile>;
    const Staged staged{address};
    const uint64_t lora_b = Staged::Operand::descriptor(address);
    using Fragments = RankFragments<T, LowRank::RANK, kPartsOfY<T, typename Tile::Out>>;
    Fragments fragments(y, low_rank.scaling, ranks - self.lane() % 4 * 2);
    auto multiply_rows = [&](const float (&factor)[2]) {
#pragma unroll
        for (int i = 0; i < Staged::COLS / 2; ++i) acc[0][i] *= factor[i / 2 % 2];
    };
    auto multiply = [&](int part) {
        wgmma_fence();
#pragma unroll
        for (int slice = 0; slice < LowRank::RANK / 16; ++slice) {
            Wgmma<Staged::COLS>::template multiply<T, LowRank::kBKMajor>(
                acc[0], fragments.slices[slice].values[part], Staged::Operand::advance(lora_b, 0, slice), 1);
        }
        wgmma_commit();
    };

    const bool scaled = __any_sync(~0u, fragments.is_scaled());
    if (scaled) multiply_rows(fragments.factor);
    multiply(0);
    if (staged.is_non_finite(self)) {
        wgmma_wait<0>();
        staged.make_finite(self);
    }
#pragma unroll
    for (int part = 1; part < Fragments::PARTS; ++part) multiply(part);
    wgmma_wait<0>();
    hold(acc[0]);
    if (scaled) multiply_rows({1 / fragments.factor[0], 1 / fragments.factor[1]});
}

}  // namespace rawops
