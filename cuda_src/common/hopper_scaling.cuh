// Scales in the Hopper GEMM: of blocks of K, whose sums are added up outside the tensor cores, and of rows and columns.
#pragma once
#include "hopper_gemm.cuh"
#include "scaling.cuh"
#include "wgmma_8bit.cuh"

namespace rawops {

// Issues part = a @ b of the next stage when it is full.
template <class Tile>
__device__ inline void multiply_stage(typename Tile::Value (&part)[Tile::BLOCK_N / 2],
                                      const RingPosition<Tile::STAGES>& slot, const Exchange<Tile>& exchange,
                                      const Consumer& self) {
    using A = typename Tile::OperandA;
    using B = typename Tile::OperandB;
    const uint32_t stage = exchange.ring + slot.stage * Tile::STAGE_BYTES;
    const uint64_t a = A::descriptor(stage + self.row / 64 * A::ROWS_64), b = B::descriptor(stage + Tile::A_BYTES);
    barrier_wait(exchange.barriers.full(slot.stage), slot.phase);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Tile::K_STEPS; ++step) {
        WgmmaAtom<typename Tile::T, Tile::BLOCK_N, true, true>::multiply(part, A::advance(a, 0, step),
                                                                         B::advance(b, 0, step), step > 0);
    }
    wgmma_commit();
}

// sum = a @ b over the next k_blocks stages, each of which the tensor cores add up in their own 14 bits or so. The other
// consumer keeps them busy while this one adds.
template <class Tile>
__device__ inline void multiply_promoted(typename Tile::Accumulators& sum, RingPosition<Tile::STAGES>& slot,
                                         int k_blocks, const Exchange<Tile>& exchange, const Consumer& self) {
#pragma unroll
    for (int i = 0; i < Tile::BLOCK_N / 2; ++i) sum[0][i] = 0;
#pragma unroll 1
    for (int block = 0; block < k_blocks; ++block) {
        typename Tile::Value part[Tile::BLOCK_N / 2];
        multiply_stage<Tile>(part, slot, exchange, self);
        wgmma_wait<0>();
        hold(part);
        if (self.leads()) barrier_arrive(exchange.barriers.empty(slot.stage));
#pragma unroll
        for (int i = 0; i < Tile::BLOCK_N / 2; ++i) sum[0][i] += part[i];
        slot.advance();
    }
}

// Scales of COLS columns in each of PARTS parts, held by the lanes of a warp in turn.
template <int PARTS, int COLS> struct ColumnScales {
    float held[PARTS][ceil_div(COLS, kWarpSize)];

    __device__ void load(const BlockScales& scales, int n, int cols, int lane) {
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
#pragma unroll
            for (int i = 0; i < ceil_div(COLS, kWarpSize); ++i) {
                const float* from = scales.of_column(n + part * cols + i * kWarpSize + lane, 0);
                held[part][i] = scales.b == nullptr ? 1 : *from;
            }
        }
    }
    // That of the lane's first (place 0) or second accumulator of the eight columns from `col` of a part on.
    __device__ float of(int part, int col, int place, int lane) const {
        return __shfl_sync(~0u, held[part][col / kWarpSize], col % kWarpSize + lane % 4 * 2 + place);
    }
};

__device__ inline void load_shared(float& value, uint32_t address) {
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
}
__device__ inline void load_shared(float (&pair)[2], uint32_t address) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair[0]), "=f"(pair[1]) : "r"(address) : "memory");
}

// The scales of a stage in shared memory: those of the tile's rows, then those of every column of each part, or of the
// two blocks of 128 in which a part's columns may lie.
template <class Tile, bool kEveryColumn> struct StagedScales {
    static constexpr bool kOneBlock = Tile::PARTS == 1 && Tile::COLS == kScaleBlock;
    static constexpr int STEP = Tile::COLS & -Tile::COLS;  // tiles start at multiples of it
    static constexpr bool kHalves = !kEveryColumn && Tile::PARTS == 1 && STEP == kScaleBlock / 2;
    static constexpr int COUNT = kEveryColumn ? Tile::COLS : 2;  // of a part
    static_assert(kEveryColumn || Tile::COLS <= kScaleBlock || (Tile::PARTS == 1 && Tile::COLS - STEP <= kScaleBlock),
                  "no more blocks than two");

    uint32_t rows, columns;

    __device__ StagedScales(const Exchange<Tile>& exchange, int stage)
        : rows(exchange.scales + stage * Tile::SCALE_BYTES), columns(rows + Tile::BLOCK_M * 4) {}
};

// A lane of the warp that brings them, block after block: where in memory its first scales are.
template <class Tile, bool kEveryColumn> struct ScaleLoader {
    using Staged = StagedScales<Tile, kEveryColumn>;
    static constexpr int COLUMN_STEPS = ceil_div(Staged::COUNT, kWarpSize);

    const ScaledParams& params;
    const float *a, *b[Tile::PARTS];
    int rows, columns[Tile::PARTS], lane;  // that exist from the lane's first ones on

    __device__ ScaleLoader(const ScaledParams& params_, const Work& work, int first_block, int lane_)
        : params(params_), lane(lane_) {
        const ScaleParams& scales = params.scales;
        const int m = work.m + lane;
        rows = params.shape.M - m;
        a = scales.a + scales.a_strides.offset(work.batch) + m * scales.a_strides.row +
            first_block * scales.a_strides.col;
#pragma unroll
        for (int part = 0; part < Tile::PARTS; ++part) {
            const int n = work.n + part * params.shape.epilogue.cols;
            const int index = (kEveryColumn ? n : n / kScaleBlock) + lane;
            columns[part] = scales.b_count - index;
            b[part] = scales.b + scales.b_strides.offset(work.batch) + index * scales.b_strides.col +
                      first_block * scales.b_strides.row;
        }
    }

    // Those of the next block; `full` ends when they are there, too. What does not exist becomes 0 and is not read.
    __device__ void load(const Staged& staged, uint32_t full) {
        const ScaleParams& scales = params.scales;
        if (scales.a != nullptr) {
            const float* from = a;
#pragma unroll
            for (int i = 0; i < Tile::BLOCK_M; i += kWarpSize, from += kWarpSize * scales.a_strides.row) {
                cp_async<4>(staged.rows + (i + lane) * 4, from, i < rows ? 4 : 0);
            }
            a += scales.a_strides.col;
        }
        if (scales.b != nullptr) {
#pragma unroll
            for (int part = 0; part < Tile::PARTS; ++part) {
                const float* from = b[part];
#pragma unroll 2
                for (int i = 0; i < COLUMN_STEPS; ++i, from += kWarpSize * scales.b_strides.col) {
                    const int column = i * kWarpSize + lane;
                    const uint32_t to = staged.columns + (part * Staged::COUNT + column) * 4;
                    if (column < Staged::COUNT) cp_async<4>(to, from, i * kWarpSize < columns[part] ? 4 : 0);
                }
                b[part] += scales.b_strides.row;
            }
        }
        barrier_arrive_after_copies(full);
    }
};

// sum += part * scales. `column` are those of two blocks, of which the second begins to_second columns after this lane's
// first one: SPLIT, where there are no others than the two halves. `columns` is where those of every column are.
template <class Tile, bool kEveryColumn, int SPLIT>
__device__ inline void add_scaled(float (&sum)[Tile::BLOCK_N / 2], const float (&part)[Tile::BLOCK_N / 2],
                                  const float (&row)[2], const float (&column)[Tile::PARTS][2],
                                  const int (&to_second)[Tile::PARTS], uint32_t columns) {
    using Staged = StagedScales<Tile, kEveryColumn>;
    float scale[Tile::PARTS][2][2];  // of a part's first block and of its second, both rows
#pragma unroll
    for (int i = 0; i < Tile::PARTS * 4; ++i) scale[i / 4][i / 2 % 2][i % 2] = row[i % 2] * column[i / 4][i / 2 % 2];
#pragma unroll
    for (int i = 0; i < Tile::BLOCK_N / 2; i += 4) {
        const int of_part = i * 2 / Tile::COLS, col = i * 2 % Tile::COLS;
        // Where tiles start at multiples of 16, all of these columns are in one block.
        const int begin = Staged::kOneBlock || Staged::kHalves ? SPLIT : to_second[of_part];
        float pair[2];
        if constexpr (kEveryColumn) load_shared(pair, columns + i * 8);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const bool second = (Tile::PARTS > 1 ? col + j % 2 : col / 16 * 16) >= begin;
            const float (&of_block)[2][2] = scale[of_part];
            const float factor = second ? of_block[1][j / 2] : of_block[0][j / 2];
            sum[i + j] += part[i + j] * (kEveryColumn ? row[j / 2] * pair[j % 2] : factor);
        }
    }
}

// sum = a @ b over the next k_blocks stages, each times its scales. The other consumer keeps the tensor cores busy
// while this one adds.
template <class Tile, bool kEveryColumn>
__device__ inline void multiply_scaled(typename Tile::Accumulators& sum, const BlockScales& scales, const Work& work,
                                       int cols, RingPosition<Tile::STAGES>& slot, int k_blocks,
                                       const Exchange<Tile>& exchange, const Consumer& self) {
    using Staged = StagedScales<Tile, kEveryColumn>;
    const int lane = self.lane(), first = self.row + self.warp_row() + lane / 4;
    int to_second[Tile::PARTS];  // columns from this lane's first one to the second block of 128
#pragma unroll
    for (int part = 0; part < Tile::PARTS; ++part) {
        const int n = work.n + part * cols;
        to_second[part] = kScaleBlock - n % kScaleBlock - (Tile::PARTS > 1 ? lane % 4 * 2 : 0);
    }
#pragma unroll
    for (int i = 0; i < Tile::BLOCK_N / 2; ++i) sum[0][i] = 0;
#pragma unroll 1
    for (int block = 0; block < k_blocks; ++block) {
        typename Tile::Value part[Tile::BLOCK_N / 2];
        multiply_stage<Tile>(part, slot, exchange, self);
        const Staged staged(exchange, slot.stage);
        float row[2] = {1, 1}, column[Tile::PARTS][2];
        if (scales.a != nullptr) {
            for (int half = 0; half < 2; ++half) load_shared(row[half], staged.rows + (first + half * 8) * 4);
        }
#pragma unroll
        for (int i = 0; i < Tile::PARTS * 2; ++i) {
            column[i / 2][i % 2] = 1;
            if (!kEveryColumn && scales.b != nullptr) load_shared(column[i / 2][i % 2], staged.columns + i * 4);
        }
        wgmma_wait<0>();
        hold(part);
        auto release = [&] {  // by warps, which read their scales each at a time of its own
            __syncwarp();
            if (lane == 0) barrier_arrive(exchange.barriers.empty(slot.stage));
        };
        if constexpr (!kEveryColumn) release();
        const uint32_t own_columns = staged.columns + lane % 4 * 8;
        if (Staged::kHalves && to_second[0] == kScaleBlock / 2) {
            add_scaled<Tile, kEveryColumn, kScaleBlock / 2>(sum[0], part, row, column, to_second, own_columns);
        } else {
            add_scaled<Tile, kEveryColumn, kScaleBlock>(sum[0], part, row, column, to_second, own_columns);
        }
        if constexpr (kEveryColumn) release();
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
            multiply_promoted<Tile>(sum, slot, k_blocks, exchange, self);
        } else {
            multiply_scaled<Tile, kPromotion == kColumnScaled>(sum, BlockScales(params, work.batch), work,
                                                               params.shape.epilogue.cols, slot, k_blocks, exchange,
                                                               self);
        }
    }

    // Lanes of the producer that load scales, and arrivals of a consumer that let a stage go.
    static constexpr bool kStaged = kPromotion >= kBlockScaled;
    static constexpr int LOADERS = kStaged ? kWarpSize : 0, RELEASES = kStaged ? 4 : 1;
    static constexpr __device__ int stage_bytes(int block_m, int block_n) {
        return kStaged ? (block_m + (kPromotion == kColumnScaled ? block_n : 4)) * 4 : 0;
    }
    template <class Tile>
    static __device__ void load(const ScaledParams& params, const Schedule<Tile>& schedule,
                                const Exchange<Tile>& exchange) {
        const int lane = threadIdx.x % kWarpSize;
        RingPosition<Tile::STAGES> slot;
#pragma unroll 1
        for (int index = schedule.first; index < schedule.count; index += schedule.step) {
            const Work work = schedule.at(index);
            ScaleLoader<Tile, kPromotion == kColumnScaled> loader(params, work, schedule.first_block, lane);
#pragma unroll 1
            for (int block = 0; block < schedule.k_blocks; ++block) {
                barrier_wait(exchange.barriers.empty(slot.stage), slot.phase ^ 1);
                loader.load({exchange, slot.stage}, exchange.barriers.full(slot.stage));
                slot.advance();
            }
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
                for (int i = 0; i < Tile::ATOMS_M * 2; ++i) {
                    const float* from = scales.of_row(m + i / 2 * 64 + i % 2 * 8, 0);
                    row[i / 2][i % 2] = scales.a == nullptr ? 1 : *from;
                }
                held.load(scales, work.n, params.shape.epilogue.cols, lane);
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
