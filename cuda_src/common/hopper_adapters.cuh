// How a tile of the Hopper GEMM ends whose rows are sorted by adapter: the low-rank part, the epilogue, and the way
// back to the order of the result.
#pragma once
#include "adapters.cuh"
#include "hopper_finish.cuh"

namespace rawops {

// b by way of shared memory, where the staging tile is later: for each warp BUFFERS times the columns of its atoms, 32
// bytes each.
template <class Tile, int BUFFERS_> struct StagedRanks {
    using T = typename Tile::T;
    using Columns = WarpColumns<Tile::SHARE * Tile::PARTS / 8, Tile::PARTS>;
    static constexpr int BUFFERS = BUFFERS_, BYTES = Columns::ATOMS * 8 * 32;
    static constexpr int GROUP = Tile::CONSUMERS == 1 && Columns::ATOMS % 4 == 0 && Columns::ATOMS < 32 ? 4 : 2;

    const Adapters& adapters;
    uint32_t memory;
    int lane;

    __device__ StagedRanks(const Adapters& adapters_, const Consumer& self)
        : adapters(adapters_),
          memory(shared_address(self.staging) + self.thread / kWarpSize * (BUFFERS * BYTES)),
          lane(self.lane()) {}

    __device__ void fetch(const Columns& columns, int slot, int begin, int from, int to, int buffer) const {
        const T* b = static_cast<const T*>(adapters.b) + int64_t(slot) * adapters.N * adapters.slot_rank;
        const uint32_t place = memory + buffer * BYTES + lane * 16;
#pragma unroll
        for (int atom = 0; atom < Columns::ATOMS; atom += 2) {
            const int own = atom + lane / 16, n = columns.begin(own) + lane / 2 % 8;
            const bool exists = n >= from && n < min_of(to, columns.end(own));
            const T* source = b + int64_t(exists ? n : 0) * adapters.slot_rank + place_of_rank(begin + lane % 2 * 8, n);
            cp_async<16>(place + atom * 256, source, exists ? 16 : 0);
        }
    }
    __device__ uint2 read(int atom, int buffer) const {
        uint2 ranks;
        asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                     : "=r"(ranks.x), "=r"(ranks.y)
                     : "r"(memory + buffer * BYTES + atom * 256 + lane * 8)
                     : "memory");
        return ranks;
    }
};

// In the place of a LowRank of hopper_tile.cuh: rows sorted by adapter, or with kInOrder as they come. Then nothing but
// the end of a tile depends on the launch before.
template <int BUFFERS, bool kInOrder_> struct SortedRows {
    using Call = Adapters;
    static constexpr int RANK = 0, COLUMN_BYTES = 4 * 32 * BUFFERS, LOADERS = 0;  // of sixteen ranks, for each warp
    static constexpr bool kRides = false, kPacked = false, kSorted = true, kInOrder = kInOrder_, kBeside = false;
    using Accumulators = float[1];

    template <class Tile> using Staged = StagedRanks<Tile, BUFFERS>;
    template <class Tile>
    using Passes = AdapterPasses<typename Tile::T, typename Staged<Tile>::Columns, Staged<Tile>>;

    // Before the main loop, or its end, which hides what it takes to get there.
    template <class Tile>
    static __device__ Passes<Tile> begin(const Adapters& adapters, const GemmShape& shape, const Work& work,
                                         const Consumer& self) {
        static_assert(Tile::ATOMS_M == 1, "a warp has 16 rows");
        const int n = work.n + (Tile::CLUSTER > 1 ? cluster_rank() * Tile::SHARE : 0);
        await_launch_before();
        self.sync();  // the tile before has left
        return {adapters, {n, shape.epilogue.cols}, {adapters, self}, work.m + self.row + self.warp_row(), self.lane()};
    }

    template <class Tile>
    static __device__ void finish(Passes<Tile>& passes, typename Tile::Finished& sum,
                                  const typename Tile::Epilogue& epilogue, float alpha, const GemmParams& params,
                                  const Adapters& adapters, const Work& work, const Consumer& self) {
        passes.add(*reinterpret_cast<float(*)[Staged<Tile>::Columns::ATOMS][4]>(&sum[0]));
        const typename Tile::Factors factors(params, work, work.n, self, alpha);
        if constexpr (Tile::kFinish == kDirect) {
            using Group = typename Tile::Epilogue::Group;
            const RowsPutBack<typename Tile::Epilogue> put_back{epilogue, adapters};
            for_each_group<Tile>(sum, factors, self, [&](int row, int col, Group& value, Group& up) {
                put_back.finish(work.m + self.row + row, work.n + col, value, up);
            });
        } else {
            static_assert(Tile::kFinish == kPlain, "any other epilogue goes the direct way");
            self.sync();  // no warp reads ranks any more
            stage_plain<Tile>(sum, factors, alpha, self);
            __syncwarp();
            const int own_row = work.m + self.row + self.warp_row() + self.lane();
            const int result_row = kInOrder ? own_row : passes.result_row();
            put_back<Tile>(params, adapters.M - work.m - self.row, result_row, work, self);
        }
    }

private:
    // Copies the warp's rows of the staging tile to D.
    template <class Tile>
    static __device__ void put_back(const GemmParams& params, int rows, int result_row, const Work& work,
                                    const Consumer& self) {
        constexpr int CHUNKS = Tile::SHARE / 8, BOX_CHUNKS = Tile::BOX_COLS / 8;  // of 16 bytes
        const EpilogueShape& shape = params.shape.epilogue;
        auto* out = static_cast<typename Tile::Out*>(params.call.epilogue.out);
#pragma unroll 4
        for (int i = 0; i < CHUNKS / 2; ++i) {
            const int item = i * kWarpSize + self.lane(), row = item / CHUNKS, chunk = item % CHUNKS;
            const int own = self.warp_row() + row, n = work.n + chunk * 8;
            const int to = __shfl_sync(~0u, result_row, row);
            if (own >= rows || n >= shape.cols) continue;
            const char* from = self.staging + chunk / BOX_CHUNKS * Tile::BOX_BYTES +
                               swizzled_offset<Tile::BOX_COLS * 2>(own, chunk % BOX_CHUNKS);
            *reinterpret_cast<uint4*>(out + to * shape.out.row + n) = *reinterpret_cast<const uint4*>(from);
        }
    }
};

}  // namespace rawops
