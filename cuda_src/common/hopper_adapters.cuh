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
        constexpr int ATOMS = Tile::SHARE * Tile::PARTS / 8;
        const int cols = params.shape.epilogue.cols;
        auto columns_of = [&](int atom) {
            const int part = atom * 8 / Tile::SHARE * cols;
            return Columns{part + work.n + atom * 8 % Tile::SHARE, part + cols};
        };
        add_adapters<typename Tile::T>(*reinterpret_cast<float(*)[ATOMS][4]>(&sum[0]), adapters,
                                       work.m + self.row + self.warp_row(), self.lane(), columns_of);
        if constexpr (Tile::kFinish == kDirect) {
            using Group = typename Tile::Epilogue::Group;
            const RowsPutBack<typename Tile::Epilogue> put_back{epilogue, adapters};
            for_each_group<Tile>(sum, self, [&](int row, int col, Group& value, Group& up) {
                put_back.finish(work.m + self.row + row, work.n + col, value, up);
            });
        } else {
            static_assert(Tile::kFinish == kPlain, "any other epilogue goes the direct way");
            self.sync();  // the tile before has left
            stage_plain<Tile>(sum, alpha, self);
            self.sync();
            put_rows_back<Tile>(params.call.epilogue, params.shape.epilogue, adapters, work, self);
        }
    }
};

}  // namespace rawops
