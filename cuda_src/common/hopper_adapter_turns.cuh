// How a tile of the Hopper GEMM ends whose rows are sorted by adapter and whose consumers take turns: while one does
// all this, the other multiplies.
#pragma once
#include "adapters.cuh"
#include "hopper_finish.cuh"
#include "hopper_low_rank.cuh"

namespace rawops {

// acc += y @ b rank by rank on the CUDA cores, for the thread's rows g and g + 8 that are `inside`, whose y lie
// `distance` apart. b is at `place`, 32 bytes a column as TMA swizzles them; of its columns from .. to - 1 are added.
template <class T, int COUNT>
__device__ inline void add_ranks_one_by_one(float (&acc)[COUNT], const float* y, int distance, int ranks,
                                            const bool (&inside)[2], uint32_t place, int from, int to, int lane) {
#pragma unroll 1
    for (int rank = 0; rank < ranks; ++rank) {
        const int col = lane % 4 * 2;  // of the thread's first column, the others are eight apart
        int low = from - col, high = to - col;
        asm volatile("" : "+r"(low), "+r"(high));  // or there is a register for every column
        const uint32_t words = place + swizzled_offset<32>(col, rank / 8) + rank % 8 / 2 * 4;
        float values[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) values[half] = inside[half] ? y[half * distance + rank] : 0;
#pragma unroll
        for (int i = 0; i < COUNT / 2; ++i) {
            const int further = i / 2 * 8 + i % 2;
            const float2 pair = widen_pair<T>(load_word(words + further * 32));
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float& sum = acc[i / 2 * 4 + half * 2 + i % 2];
                const float more = fmaf(values[half], rank % 2 ? pair.y : pair.x, sum);
                if (inside[half] && further >= low && further < high) sum = more;
            }
        }
    }
}

// What a consumer adds to 64 of its rows: pass by pass, each with sixteen ranks of a slice, and in a pass adapter by
// adapter. All threads fetch b of an adapter, 32 bytes a column, to one of the BUFFERS places in the consumer's memory.
// There wgmma reads it, with zeros for y of the rows that have another one. Registers are scarce beside the sums
// of all rows and time is not: what can be read again is not kept.
template <class Tile, int BUFFERS> class AdaptersOfRows {
    using T = typename Tile::T;
    using Parts = RankFragments<T, 16, kPartsOfY<T, typename Tile::Out>>;
    using Operand = WgmmaOperand<true, 16, 32>;
    static constexpr int COLS = Tile::SHARE, BYTES = COLS * 32;
    using Sums = float[COLS / 2];

public:
    __device__ AdaptersOfRows(const Adapters& adapters_, int n_, int first_, const Consumer& self_)
        : adapters(adapters_), self(self_), n(n_), first(first_) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = first + i * kWarpSize + self.lane();
            slots[i] = row < adapters.M ? adapters.infos[row].slot : adapters.max_loras;
        }
    }

    // acc += y @ b. Rows without an adapter stay as they are.
    __device__ void add(Sums& acc) {
#pragma unroll 1
        for (slice = 0; slice < adapters.slice_count; ++slice) {
            from = adapters.slices[slice * 2];
            to = adapters.slices[slice * 2 + 1];
            if (from >= n + COLS || to <= n) continue;
#pragma unroll 1
            for (begin = 0;; begin += 16) {
                const uint64_t rows = rows_where(rank_of(slots[0]) > begin, rank_of(slots[1]) > begin);
                if (rows == 0) break;
                add_pass(acc, rows);
            }
        }
    }

private:
    const Adapters& adapters;
    const Consumer& self;
    const int n, first;
    int slots[2];                // of rows `lane` and `lane + 32`
    int slice, begin, from, to;  // of the pass

    __device__ int rank_of(int slot) const {
        return slot < adapters.max_loras ? adapters.ranks[slot * adapters.slice_count + slice] : 0;
    }
    // The slot of the first row of a set.
    __device__ int slot_of(uint64_t set) const {
        const int row = __ffsll(set) - 1;
        return __shfl_sync(~0u, row < kWarpSize ? slots[0] : slots[1], row);
    }
    __device__ static uint64_t rows_where(bool low, bool high) {
        return __ballot_sync(~0u, low) | uint64_t(__ballot_sync(~0u, high)) << kWarpSize;
    }
    __device__ uint64_t rows_with(int slot) const { return rows_where(slots[0] == slot, slots[1] == slot); }

    __device__ void add_pass(Sums& acc, uint64_t todo) {
        uint64_t unfetched = todo;
#pragma unroll 1
        for (int step = 1 - BUFFERS; step < 0 || todo != 0; ++step) {
            if (step >= 0) {
                cp_async_wait<BUFFERS - 2>();
                fence_async_proxy();
                self.sync();
            }
            fetch_next(unfetched, (step + BUFFERS - 1) % BUFFERS);  // whose ranks have been read
            if (step < 0) continue;
            const int slot = slot_of(todo), buffer = step % BUFFERS;
            const uint64_t members = rows_with(slot);
            float y[8];
            bool is_exact = read_y(y, members, rank_of(slot));
            is_exact &= adapters.infos[first + __ffsll(todo) - 1].non_finite == 0;
            todo &= ~members;
            const bool careful = uniform(sync_group_or<kWarpGroupSize>(1 + self.number, !is_exact));
            if (careful) add_one_by_one(acc, members, rank_of(slot), buffer);
            else multiply(acc, y, buffer);
        }
        self.sync();  // the buffers have been read
    }

    // Columns of other slices, and ranks that the adapter does not have, become zero.
    __device__ void fetch_next(uint64_t& unfetched, int buffer) const {
        if (unfetched != 0) {
            const int slot = slot_of(unfetched), half = self.thread % 2, left = rank_of(slot) - begin - half * 8;
            const T* b = static_cast<const T*>(adapters.b) + int64_t(slot) * adapters.N * adapters.slot_rank;
            const uint32_t place = shared_address(self.staging) + buffer * BYTES;
#pragma unroll 1
            for (int col = self.thread / 2; col < COLS; col += kWarpGroupSize / 2) {
                const int at = n + col, bytes = at >= from && at < to ? clamp(left, 0, 8) * 2 : 0;
                const T* source = b + int64_t(at) * adapters.slot_rank + place_of_rank(begin + half * 8, at);
                cp_async<16>(place + swizzled_offset<32>(col, half), bytes > 0 ? source : b, bytes);
            }
            unfetched &= ~rows_with(slot);
        }
        cp_async_commit();
    }

    // y of the thread's rows g and g + 8 as wgmma leaves it, where they are members. Tells whether that is finite.
    __device__ bool read_y(float (&y)[8], uint64_t members, int rank) const {
        uint32_t largest = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = self.warp_row() + self.lane() / 4 + i % 2 * 8, at = begin + i / 2 * 8 + self.lane() % 4 * 2;
            const int64_t place = int64_t(slice) * adapters.capacity + first + row;
            const float* from_y = adapters.y + place * adapters.slot_rank + at;
            const int left = members >> row & 1 ? rank - at : 0;
            const float2 pair = left > 0 ? *reinterpret_cast<const float2*>(from_y) : float2{};
            y[i * 2] = pair.x;
            y[i * 2 + 1] = left > 1 ? pair.y : 0;
            largest = max(largest, __float_as_uint(y[i * 2]) & 0x7fffffff);
            largest = max(largest, __float_as_uint(y[i * 2 + 1]) & 0x7fffffff);
        }
        return largest < 0x7f800000;
    }

    __device__ void multiply(Sums& acc, const float (&y)[8], int buffer) const {
        const Parts parts(y, 1, 16);
        const uint64_t b = Operand::descriptor(shared_address(self.staging) + buffer * BYTES);
        const bool scaled = __any_sync(~0u, parts.is_scaled());
        auto multiply_rows = [&](const float (&factor)[2]) {
#pragma unroll
            for (int i = 0; i < COLS / 2; ++i) acc[i] *= factor[i / 2 % 2];
        };
        if (scaled) multiply_rows(parts.factor);
        wgmma_fence();
#pragma unroll
        for (int part = 0; part < Parts::PARTS; ++part) {
            Wgmma<COLS>::template multiply<T, true>(acc, parts.slices[0].values[part], b, 1);
        }
        wgmma_commit();
        wgmma_wait<0>();
        hold(acc);
        if (scaled) multiply_rows({1 / parts.factor[0], 1 / parts.factor[1]});
    }

    // The same where something is infinite or NaN, which would not stay in its row or column.
    __device__ void add_one_by_one(Sums& acc, uint64_t members, int of_rank, int buffer) const {
        const int own = self.warp_row() + self.lane() / 4;
        const float* y = adapters.y + (int64_t(slice) * adapters.capacity + first + own) * adapters.slot_rank + begin;
        const bool inside[2] = {(members >> own & 1) != 0, (members >> own + 8 & 1) != 0};
        add_ranks_one_by_one<T>(acc, y, 8 * adapters.slot_rank, min_of(of_rank - begin, 16), inside,
                                shared_address(self.staging) + buffer * BYTES, from - n, to - n, self.lane());
    }
};

// In the place of a LowRank of hopper_tile.cuh.
template <int BUFFERS> struct RowsInTurn : NotSorted {
    using Call = Adapters;
    static constexpr int RANK = 0, COLUMN_BYTES = 32 * BUFFERS;
    static constexpr bool kRides = false, kPacked = false, kSorted = true;
    using Accumulators = float[1];

    template <class Tile>
    static __device__ void finish(int, typename Tile::Finished& sum, const typename Tile::Epilogue&, float alpha,
                                  const GemmParams& params, const Adapters& adapters, const Work& work,
                                  const Consumer& self) {
        static_assert(Tile::kPingPong && Tile::kFinish == kPlain, "or nothing hides it, or registers do not suffice");
        await_launch_before();
#pragma unroll
        for (int i = 0; i < Tile::ATOMS_M; ++i) {
            const int first = work.m + i * 64;
            if (first < adapters.M) {
                AdaptersOfRows<Tile, BUFFERS>(adapters, work.n, first, self).add(sum[i]);
            }
        }
        put_back<Tile>(sum, alpha, params, adapters, work, self);
    }

private:
    // alpha times the sums, each row to where it was. Lanes exchange what they have, so that each writes 16 bytes: not
    // by way of shared memory, which the other consumer's products have no time to share.
    template <class Tile>
    static __device__ void put_back(const typename Tile::Finished& sum, float alpha, const GemmParams& params,
                                    const Adapters& adapters, const Work& work, const Consumer& self) {
        using Out = typename Tile::Out;
        constexpr int BLOCKS = Tile::SHARE / 8, REST = BLOCKS % 4;  // of eight columns
        static_assert(REST % 2 == 0);
        const EpilogueShape& shape = params.shape.epilogue;
        const int t = self.lane() % 4;
        int rows[Tile::ATOMS_M * 2];
#pragma unroll
        for (int i = 0; i < Tile::ATOMS_M * 2; ++i) {
            const int m = work.m + i / 2 * 64 + self.warp_row() + i % 2 * 8 + self.lane() / 4;
            rows[i] = m < adapters.M ? adapters.infos[m].row : -1;
        }
#pragma unroll
        for (int i = 0; i < Tile::ATOMS_M * 2; ++i) {
            const bool exists = rows[i] >= 0;
            Out* d = static_cast<Out*>(params.call.epilogue.out) + rows[i] * shape.out.row;
            auto pair = [&](int block) {
                const float* values = &sum[i / 2][block * 4 + i % 2 * 2];
                return narrow_pair<Out>(alpha * values[0], alpha * values[1]);
            };
#pragma unroll
            for (int block = 0; block < BLOCKS - REST; block += 4) {
                uint32_t words[4] = {pair(block), pair(block + 1), pair(block + 2), pair(block + 3)};
                transpose_quad(words, t);
                const int col = work.n + (block + t) * 8;
                if (exists && col < shape.cols) {
                    *reinterpret_cast<uint4*>(d + col) = make_uint4(words[0], words[1], words[2], words[3]);
                }
            }
            if constexpr (REST == 2) {
                uint32_t words[2] = {pair(BLOCKS - 2), pair(BLOCKS - 1)};
                trade(words[0], words[1], t, 1);
                const int col = work.n + (BLOCKS - 2 + t % 2) * 8 + t / 2 * 4;
                if (exists && col < shape.cols) *reinterpret_cast<uint2*>(d + col) = make_uint2(words[0], words[1]);
            }
        }
    }
};

}  // namespace rawops
