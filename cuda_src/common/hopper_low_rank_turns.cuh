// The low-rank part of a tile whose consumers take turns: while one adds it to its sums, the other multiplies.
//
// Registers are scarce beside the sums of all rows and time is not: ranks are added sixteen at a time, and y is read
// when it is needed. lora_b does not come through the ring, which would stand still until it is let go, but to the
// place of the staging tile.
#pragma once
#include "hopper_copies.cuh"
#include "hopper_low_rank.cuh"

namespace rawops {

template <class Tile> class RanksInTurn {
    using T = typename Tile::T;
    using LowRank = typename Tile::LowRank;
    using Staged = StagedLoraB<Tile>;
    using Fragments = RankFragments<T, 16, kPartsOfY<T, typename Tile::Out>>;
    using Sums = typename Tile::Finished;

public:
    __device__ RanksInTurn(const LowRankCall* low_rank_, const GemmShape& shape_, const Exchange<Tile>& exchange,
                           const Consumer& self_)
        : low_rank(*low_rank_), shape(shape_), self(self_), full(exchange.lora_b_of(self_.number)) {}

    // Starts the copy of lora_b for sixteen ranks, where the tile before has left. No warp reads that place any more.
    __device__ void fetch(const Work& work, int rank) const {
        if (!self.leads()) return;
        tma_store_wait_read();
        barrier_arrive_expect(full, Tile::LORA_B_BYTES);
        load_operand<LowRank::kBKMajor, Tile::SHARE * Tile::PARTS, Tile::PARTS, Tile::LORA_B_BOX, LowRank::RANK * 2>(
            place(), low_rank.b, {}, work.n, rank, full, shape.epilogue.cols);
    }

    // sum += scaling * y @ lora_b, whose first sixteen ranks are on their way.
    __device__ void add(Sums& sum, const Work& work) {
        const Staged staged{place()};
#pragma unroll 1
        for (int rank = 0; rank < low_rank.rank; rank += LowRank::RANK) {
            if (rank > 0) fetch(work, rank);
            barrier_wait(full, phase);
            phase ^= 1;
            if (uniform(staged.is_non_finite(self))) {
                add_parts<0, 1>(sum, work, rank);
                staged.make_finite(self);
                add_parts<1, Fragments::PARTS>(sum, work, rank);
            } else {
                add_parts<0, Fragments::PARTS>(sum, work, rank);
            }
            self.sync();  // no warp reads lora_b any more
        }
    }

private:
    const LowRankCall& low_rank;
    const GemmShape& shape;
    const Consumer& self;
    const uint32_t full;
    uint32_t phase = 0;

    __device__ uint32_t place() const { return shared_address(self.staging); }

    // Of y the values FIRST .. LAST - 1.
    template <int FIRST, int LAST> __device__ void add_parts(Sums& sum, const Work& work, int rank) const {
        const uint64_t lora_b = Staged::Operand::descriptor(place());
#pragma unroll
        for (int i = 0; i < Tile::ATOMS_M; ++i) {
            const int row = work.m + i * 64;
            float y[8];
            read_y(y, low_rank, rank, int64_t(work.number) * shape.M + row, shape.M - row, self);
            const Fragments fragments(y, low_rank.scaling, low_rank.rank - rank - self.lane() % 4 * 2);
            auto multiply_rows = [&](const float (&factor)[2]) {
#pragma unroll
                for (int k = 0; k < Staged::COLS / 2; ++k) sum[i][k] *= factor[k / 2 % 2];
            };
            const bool scaled = __any_sync(~0u, fragments.is_scaled());
            if (scaled) multiply_rows(fragments.factor);
            wgmma_fence();
#pragma unroll
            for (int part = FIRST; part < LAST; ++part) {
                Wgmma<Staged::COLS>::template multiply<T, LowRank::kBKMajor>(
                    sum[i], fragments.slices[0].values[part], lora_b, 1);
            }
            wgmma_commit();
            wgmma_wait<0>();
            hold(sum[i]);
            if (scaled) multiply_rows({1 / fragments.factor[0], 1 / fragments.factor[1]});
        }
    }
};

// Where there is none.
struct NoRanksInTurn {
    template <class... Arguments> __device__ explicit NoRanksInTurn(const Arguments&...) {}
    __device__ void fetch(const Work&, int) const {}
};

template <class Tile>
using RanksInTurnOf = typename Choose<Tile::kRanksInTurn, RanksInTurn<Tile>, NoRanksInTurn>::Type;

}  // namespace rawops
