// How a tile of the Hopper GEMM ends whose rows are sorted by adapter: the low-rank part, the epilogue, and the way
// back to the order of the result.
#pragma once
#include "adapters.cuh"
#include "hopper_finish.cuh"

namespace rawops {

// Copies the staging tile to D, row by row; what it holds is plain.
template <class Tile>
__device__ inline void put_rows_back(const EpilogueCall& call, const EpilogueShape& shape, const Adapters& adapters,
                                     const Work& work, const Consumer& self) {
    constexpr int CHUNKS = Tile::SHARE / 8, BOX_CHUNKS = Tile::BOX_COLS / 8;  // of 16 bytes
    using Out = typename Tile::Out;
#pragma unroll 4
    for (int i = self.thread; i < Tile::ROWS * CHUNKS; i += kWarpGroupSize) {
        const int row = i / CHUNKS, chunk = i % CHUNKS, place = work.m + self.row + row, n = work.n + chunk * 8;
        if (place >= adapters.M || n >= shape.cols) continue;
        const char* from = self.staging + chunk / BOX_CHUNKS * Tile::BOX_BYTES +
                           swizzled_offset<Tile::BOX_COLS * 2>(row, chunk % BOX_CHUNKS);
        Out* to = static_cast<Out*>(call.out) + adapters.rows[place] * shape.out.row + n;
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    }
}

// b by way of shared memory: the columns of a warp's atoms, 32 bytes each. The staging tile lends its memory.
template <class Tile> struct StagedRanks {
    using T = typename Tile::T;
    using Columns = WarpColumns<Tile::SHARE * Tile::PARTS / 8, Tile::PARTS>;
    static constexpr int BYTES = Columns::ATOMS * 8 * 32;  // of a warp

    const Columns& columns;
    uint32_t memory;
    int lane;

    __device__ StagedRanks(const Columns& columns_, const Consumer& self)
        : columns(columns_),
          memory(shared_address(self.staging) + self.thread / kWarpSize * BYTES),
          lane(self.lane()) {}

    // Starts the copies of a step; a wait and __syncwarp() must follow.
    __device__ void fetch(const Adapters& adapters, const RankStep& step) const {
        const T* b = static_cast<const T*>(adapters.b) +
                     int64_t(step.slot) * adapters.N * adapters.slot_rank + step.begin + lane % 2 * 8;
#pragma unroll
        for (int atom = 0; atom < Columns::ATOMS; atom += 2) {
            const int mine = atom + lane / 16, n = columns.begin(mine) + lane / 2 % 8;
            const bool exists = n >= step.from && n < min_of(step.to, columns.end(mine));
            cp_async<16>(memory + mine * 256 + lane % 16 * 16, b + int64_t(exists ? n : 0) * adapters.slot_rank,
                         exists ? 16 : 0);
        }
    }
    __device__ uint2 read(int atom) const {
        uint2 ranks;
        asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                     : "=r"(ranks.x), "=r"(ranks.y)
                     : "r"(memory + atom * 256 + lane * 8)
                     : "memory");
        return ranks;
    }
};

// In the place of a LowRank of hopper_tile.cuh.
struct SortedRows {
    using Call = Adapters;
    static constexpr int RANK = 0;
    static constexpr bool kRides = false, kSorted = true;
    using Accumulators = float[1];

    template <class Tile>
    static __device__ void finish(typename Tile::Finished& sum, const typename Tile::Epilogue& epilogue, float alpha,
                                  const GemmParams& params, const Adapters& adapters, const Work& work,
                                  const Consumer& self) {
        using Staged = StagedRanks<Tile>;
        using Columns = typename Staged::Columns;
        static_assert(Tile::ATOMS_M == 1, "a warp has 16 rows");
        const int first = work.m + self.row + self.warp_row();
        const Columns columns{work.n, params.shape.epilogue.cols};
        const Staged b(columns, self);
        self.sync();  // the tile before has left
#pragma unroll 1
        for (RankSteps<Columns> steps(adapters, first, columns, self.lane()); steps.any(); steps.advance()) {
            __syncwarp();
            b.fetch(adapters, steps.now);
            cp_async_commit();
            cp_async_wait<0>();
            __syncwarp();
            add_step<typename Tile::T>(*reinterpret_cast<float(*)[Columns::ATOMS][4]>(&sum[0]), adapters, steps.now,
                                       columns, b, first, self.lane());
        }
        if constexpr (Tile::kFinish == kDirect) {
            using Group = typename Tile::Epilogue::Group;
            const RowsPutBack<typename Tile::Epilogue> put_back{epilogue, adapters};
            for_each_group<Tile>(sum, self, [&](int row, int col, Group& value, Group& up) {
                put_back.finish(work.m + self.row + row, work.n + col, value, up);
            });
        } else {
            static_assert(Tile::kFinish == kPlain, "any other epilogue goes the direct way");
            self.sync();  // no warp reads ranks any more
            stage_plain<Tile>(sum, alpha, self);
            self.sync();
            put_rows_back<Tile>(params.call.epilogue, params.shape.epilogue, adapters, work, self);
        }
    }
};

}  // namespace rawops
