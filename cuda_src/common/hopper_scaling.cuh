// Scales in the Hopper GEMM: of blocks of K, whose sums are added up outside the tensor cores, and of rows and columns.
#pragma once
#include "hopper_gemm.cuh"
#include "scaling.cuh"
#include "wgmma_8bit.cuh"

namespace rawops {

// sum = a @ b over the next k_blocks stages. The tensor cores' own sums, of about 14 bits, span SPAN of them.
template <class Tile>
__device__ inline void multiply_in_spans(typename Tile::Accumulators& sum, RingPosition<Tile::STAGES>& slot,
                                         int k_blocks, const Exchange<Tile>& exchange, const Consumer& self) {
    constexpr int SPAN = 4;
#pragma unroll
    for (int i = 0; i < Tile::BLOCK_N / 2; ++i) sum[0][i] = 0;
#pragma unroll 1
    for (int done = 0; done < k_blocks; done += SPAN) {
        typename Tile::Accumulators part;
        typename Tile::LowRank::Accumulators none;
        multiply_stages<Tile>(part, none, slot, min_of(k_blocks - done, SPAN), exchange, self);
#pragma unroll
        for (int i = 0; i < Tile::BLOCK_N / 2; ++i) sum[0][i] += part[0][i];
    }
}

// Scales of COLS columns in each of PARTS parts, held by the lanes of a warp in turn.
template <int PARTS, int COLS> struct ColumnScales {
    float held[PARTS][ceil_div(COLS, kWarpSize)];

    __device__ void load(const BlockScales& scales, int n, int cols, int lane, int block) {
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
#pragma unroll
            for (int i = 0; i < ceil_div(COLS, kWarpSize); ++i) {
                held[part][i] = scales.of_column(n + part * cols + i * kWarpSize + lane, block);
            }
        }
    }
    // That of the lane's first (place 0) or second accumulator of the eight columns from `col` of a part on.
    __device__ float of(int part, int col, int place, int lane) const {
        return __shfl_sync(~0u, held[part][col / kWarpSize], col % kWarpSize + lane % 4 * 2 + place);
    }
};

// Scales of blocks of 128 columns. The columns of a part lie in one of them or in two.
template <class Tile> struct ColumnBlockScales {
    static constexpr bool kOneBlock = Tile::PARTS == 1 && Tile::COLS == kScaleBlock;
    static constexpr int BLOCKS = kOneBlock ? 1 : 2, STEP = Tile::COLS & -Tile::COLS;  // tiles start at multiples of it
    static_assert(Tile::COLS <= kScaleBlock || (Tile::PARTS == 1 && Tile::COLS - STEP <= kScaleBlock), "no more");

    float held[Tile::PARTS][BLOCKS];
    int begin[Tile::PARTS];  // of this lane's columns, from the first block on

    __device__ void load(const BlockScales& scales, int n, int cols, int lane, int block) {
#pragma unroll
        for (int part = 0; part < Tile::PARTS; ++part) {
            const int first = n + part * cols + (Tile::PARTS > 1 ? lane % 4 * 2 : 0);
            begin[part] = first % kScaleBlock;
#pragma unroll
            for (int i = 0; i < BLOCKS; ++i) held[part][i] = scales.of_column(first / kScaleBlock + i, block);
        }
    }
    __device__ float of(int part, int col, int place, int) const {
        if constexpr (kOneBlock) return held[part][0];
        // Where tiles start at multiples of 16, all of these columns are in one block.
        const int at = begin[part] + col + (Tile::PARTS > 1 ? place : 0);
        return at < kScaleBlock ? held[part][0] : held[part][BLOCKS - 1];
    }
};

// sum = a @ b over the next k_blocks stages, each times its scales. The other consumer keeps the tensor cores busy
// while this one adds. Scales are on their way one block ahead.
template <class Tile, class Columns>
__device__ inline void multiply_scaled(typename Tile::Accumulators& sum, const BlockScales& scales, const Work& work,
                                       int first_block, int cols, RingPosition<Tile::STAGES>& slot, int k_blocks,
                                       const Exchange<Tile>& exchange, const Consumer& self) {
    using A = typename Tile::OperandA;
    using B = typename Tile::OperandB;
    const int lane = self.lane(), m = work.m + self.row + self.warp_row() + lane / 4;
    float row[2], next_row[2];
    Columns columns, next_columns;
    auto fetch = [&](int block) {
        for (int half = 0; half < 2; ++half) next_row[half] = scales.of_row(m + half * 8, block);
        next_columns.load(scales, work.n, cols, lane, block);
    };
#pragma unroll
    for (int i = 0; i < Tile::BLOCK_N / 2; ++i) sum[0][i] = 0;
    if (k_blocks > 0) fetch(first_block);
#pragma unroll 1
    for (int block = 0; block < k_blocks; ++block) {
        const uint32_t stage = exchange.ring + slot.stage * Tile::STAGE_BYTES;
        const uint64_t a = A::descriptor(stage + self.row / 64 * A::ROWS_64), b = B::descriptor(stage + Tile::A_BYTES);
        typename Tile::Value part[Tile::BLOCK_N / 2];
        for (int half = 0; half < 2; ++half) row[half] = next_row[half];
        columns = next_columns;
        barrier_wait(exchange.barriers.full(slot.stage), slot.phase);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < Tile::K_STEPS; ++step) {
            WgmmaAtom<typename Tile::T, Tile::BLOCK_N, true, true>::multiply(part, A::advance(a, 0, step),
                                                                             B::advance(b, 0, step), step > 0);
        }
        wgmma_commit();
        fetch(first_block + min_of(block + 1, k_blocks - 1));
        wgmma_wait<0>();
        if (self.leads()) barrier_arrive(exchange.barriers.empty(slot.stage));
        hold(part);
#pragma unroll
        for (int i = 0; i < Tile::BLOCK_N / 2; i += 4) {
#pragma unroll
            for (int place = 0; place < 2; ++place) {
                const float column = columns.of(i * 2 / Tile::COLS, i * 2 % Tile::COLS, place, lane);
                sum[0][i + place] += part[i + place] * (row[0] * column);
                sum[0][i + place + 2] += part[i + place + 2] * (row[1] * column);
            }
        }
        slot.advance();
    }
}

// What a tile takes for its Scaling.
template <class Addend, int kPromotion, bool kVectors> struct HopperScaling : Scaling<Addend, kPromotion, false> {
    template <class Tile>
    static __device__ void multiply(typename Tile::Accumulators& sum, const ScaledParams& params, const Work& work,
                                    int first_block, RingPosition<Tile::STAGES>& slot, int k_blocks,
                                    const Exchange<Tile>& exchange, const Consumer& self) {
        static_assert(!Tile::kPingPong, "the consumers overlap without turns");
        if constexpr (kPromotion == kPromoted) {
            multiply_in_spans<Tile>(sum, slot, k_blocks, exchange, self);
        } else {
            using Columns = typename Choose<kPromotion == kColumnScaled, ColumnScales<Tile::PARTS, Tile::COLS>,
                                            ColumnBlockScales<Tile>>::Type;
            multiply_scaled<Tile, Columns>(sum, BlockScales(params, work.batch), work, first_block,
                                           params.shape.epilogue.cols, slot, k_blocks, exchange, self);
        }
    }

    // The scales of a thread's rows and columns, which meet its accumulators on their way out.
    template <class Tile> struct Factors {
        struct Columns {
            float of[2];
        };
        float row[Tile::ATOMS_M][2];
        ColumnScales<Tile::PARTS, Tile::SHARE> held;
        int lane;

        __device__ Factors(const ScaledParams& params, const Work& work, const Consumer& self) : lane(self.lane()) {
            if constexpr (kVectors) {
                const BlockScales scales(params, work.batch);
                const int m = work.m + self.row + self.warp_row() + lane / 4;
#pragma unroll
                for (int i = 0; i < Tile::ATOMS_M * 2; ++i) row[i / 2][i % 2] = scales.of_row(m + i / 2 * 64 + i % 2 * 8, 0);
                held.load(scales, work.n, params.shape.epilogue.cols, lane, 0);
            }
        }
        __device__ Columns columns(int part, int col) const {
            if constexpr (kVectors) return {held.of(part, col, 0, lane), held.of(part, col, 1, lane)};
            else return {};
        }
        template <class V> __device__ auto times(V value, int i, int half, const Columns& columns, int place) const {
            if constexpr (kVectors) return to_float(value) * (row[i][half] * columns.of[place]);
            else if constexpr (is_same<typename Tile::Epilogue::Value, int>) return value;
            else return to_float(value);
        }

    private:
        static __device__ float to_float(float x) { return x; }
        // Where it is written: the compiler would convert all accumulators before the first, for twice the registers.
        static __device__ float to_float(int x) {
            float value;
            asm volatile("cvt.rn.f32.s32 %0, %1;" : "=f"(value) : "r"(x));
            return value;
        }
    };
};

}  // namespace rawops
