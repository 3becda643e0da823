// Scales in the Hopper GEMM: of blocks of K, whose sums are added up outside the tensor cores, and of rows and columns.
#pragma once
#include "hopper_gemm.cuh"
#include "scaling.cuh"
#include "wgmma_8bit.cuh"

namespace rawops {

// sum = a @ b over the next k_blocks stages, each of which the tensor cores add up in their own 14 bits or so. `adder`
// is told of each stage, adds what has been multiplied to the sums, and lets the stage go. The other consumer keeps the
// tensor cores busy meanwhile, and where a consumer has two products, the second one does while the first is added.
template <class Tile, class Adder>
__device__ inline void multiply_promoted(typename Tile::Accumulators& sum, RingPosition<Tile::STAGES>& slot,
                                         int k_blocks, const Exchange<Tile>& exchange, const Consumer& self,
                                         Adder adder) {
    using A = typename Tile::OperandA;
    using B = typename Tile::OperandB;
#pragma unroll
    for (int i = 0; i < Tile::ATOMS_M * Tile::WIDTH / 2; ++i) sum[0][i] = 0;
#pragma unroll 1
    for (int block = 0; block < k_blocks; ++block) {
        typename Tile::Accumulators part;
        const uint32_t stage = exchange.ring + slot.stage * Tile::STAGE_BYTES;
        const uint64_t a = A::descriptor(stage + self.row / 64 * A::ROWS_64);
        const uint64_t b = B::descriptor(stage + Tile::A_BYTES + self.col * Tile::SPAN);
        barrier_wait(exchange.barriers.full(slot.stage), slot.phase);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < Tile::ATOMS_M; ++i) {
#pragma unroll
            for (int step = 0; step < Tile::K_STEPS; ++step) {
                WgmmaAtom<typename Tile::T, Tile::WIDTH, true, true>::multiply(part[i], A::advance(a, i, step),
                                                                               B::advance(b, 0, step), step > 0);
            }
            wgmma_commit();
        }
        adder.begin(slot.stage);
        if constexpr (Tile::ATOMS_M == 2) {
            wgmma_wait<1>();
            hold(part[0]);
            adder.add(sum[0], part[0]);
            finish_before_waiting(exchange.ring);
        }
        constexpr int LAST = Tile::ATOMS_M - 1;
        wgmma_wait<0>();
        hold(part[LAST]);
        if (!Adder::kReadsStage) adder.release(exchange.barriers.empty(slot.stage));
        adder.add(sum[LAST], part[LAST]);
        if (Adder::kReadsStage) adder.release(exchange.barriers.empty(slot.stage));
        slot.advance();
    }
}

// Adds without scales.
template <class Tile> struct PlainAdder {
    static constexpr bool kReadsStage = false;
    const Consumer& self;

    __device__ void begin(int) {}
    __device__ void add(float (&sum)[Tile::WIDTH / 2], const float (&part)[Tile::WIDTH / 2]) const {
#pragma unroll
        for (int i = 0; i < Tile::WIDTH / 2; ++i) sum[i] += part[i];
    }
    __device__ void release(uint32_t empty) const {
        if (self.leads()) barrier_arrive(empty);
    }
};

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
__device__ inline void load_shared(float (&value)[1], uint32_t address) { load_shared(value[0], address); }
__device__ inline void load_shared(float (&pair)[2], uint32_t address) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair[0]), "=f"(pair[1]) : "r"(address) : "memory");
}
__device__ inline void load_shared(float (&v)[4], uint32_t address) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
                 : "r"(address)
                 : "memory");
}

// The scales of a stage in shared memory: those of the tile's rows, then those of every column of each part, or of the
// blocks of 128 in which a part's columns may lie.
template <class Tile, bool kEveryColumn> struct StagedScales {
    static constexpr int STEP = min_of(Tile::COLS & -Tile::COLS, kScaleBlock);  // tiles start at multiples of it
    static constexpr int BLOCKS = Tile::PARTS == 2 ? 2 : ceil_div(kScaleBlock - STEP + Tile::COLS, kScaleBlock);
    static constexpr int COUNT = kEveryColumn ? Tile::COLS : BLOCKS == 3 ? 4 : BLOCKS;  // of a part, read together
    static_assert(kEveryColumn || Tile::PARTS == 1 || Tile::COLS <= kScaleBlock, "a part has no more blocks than two");

    uint32_t rows, columns;

    // Rows that one lane has accumulators of, r and r + 8, lie side by side.
    static __device__ int place_of_row(int row) { return (row & ~15) + row % 8 * 2 + row / 8 % 2; }

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

    // Starts the copies of those of the next block. What does not exist becomes 0 and is not read.
    __device__ void load(const Staged& staged) {
        const ScaleParams& scales = params.scales;
        if (scales.a != nullptr) {
            const float* from = a;
#pragma unroll
            for (int i = 0; i < Tile::BLOCK_M; i += kWarpSize, from += kWarpSize * scales.a_strides.row) {
                cp_async<4>(staged.rows + (i + Staged::place_of_row(lane)) * 4, from, i < rows ? 4 : 0);
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
    }
};

// Adds what has been multiplied with its scales. The tile begins START columns behind the beginning of its first block
// of 128, as far as that matters: what selects between blocks takes as long as what it selects for.
template <class Tile, bool kEveryColumn, int START> class ScaledAdder {
public:
    static constexpr bool kReadsStage = kEveryColumn;  // until everything has been added
    using Sums = float[Tile::BLOCK_N / 2];
    using Staged = StagedScales<Tile, kEveryColumn>;
    static constexpr int BLOCKS = Staged::BLOCKS;

    __device__ ScaledAdder(const BlockScales& scales_, const Work& work, int cols, const Exchange<Tile>& exchange_,
                           const Consumer& self)
        : scales(scales_), exchange(exchange_), lane(self.lane()) {
        first_row = Staged::place_of_row(self.row + self.warp_row() + lane / 4);
        if constexpr (Tile::PARTS == 2) {
#pragma unroll
            for (int i = 0; i < 2; ++i) to_second[i] = kScaleBlock - (work.n + i * cols) % kScaleBlock - lane % 4 * 2;
        }
    }

    __device__ void begin(int stage) {
        __syncwarp();  // or the compiler puts the loads, and the wait for them, behind the first of the products
        const Staged staged(exchange, stage);
        row[0] = row[1] = 1;
        if (scales.a != nullptr) load_shared(row, staged.rows + first_row * 4);
        if constexpr (kEveryColumn) {
            columns = staged.columns + lane % 4 * 8;
        } else {
            float column[Tile::PARTS * Staged::COUNT];
#pragma unroll
            for (int i = 0; i < Tile::PARTS * BLOCKS; ++i) column[i] = 1;
            if (scales.b != nullptr) load_shared(column, staged.columns);
#pragma unroll
            for (int i = 0; i < Tile::PARTS * BLOCKS; ++i) {
                for (int half = 0; half < 2; ++half) scale[i / BLOCKS][i % BLOCKS][half] = row[half] * column[i];
            }
        }
    }

    __device__ void add(Sums& sum, const Sums& part) const {
        if constexpr (kEveryColumn) add_columns(sum, part);
        else if constexpr (Tile::PARTS == 2) add_selected(sum, part);
        else add_blocks(sum, part);
    }

    // By warps, which read their scales each at a time of its own.
    __device__ void release(uint32_t empty) const {
        __syncwarp();
        if (lane == 0) barrier_arrive(empty);
    }

private:
    const BlockScales& scales;
    const Exchange<Tile>& exchange;
    const int lane;
    int first_row, to_second[2];
    uint32_t columns;
    float row[2], scale[Tile::PARTS][BLOCKS][2];

    __device__ void add_columns(Sums& sum, const Sums& part) const {
#pragma unroll
        for (int i = 0; i < Tile::BLOCK_N / 2; i += 4) {
            float pair[2];
            load_shared(pair, columns + i * 8);
#pragma unroll
            for (int j = 0; j < 4; ++j) sum[i + j] += part[i + j] * (row[j / 2] * pair[j % 2]);
        }
    }

    __device__ void add_blocks(Sums& sum, const Sums& part) const {
#pragma unroll
        for (int i = 0; i < Tile::BLOCK_N / 2; ++i) {
            sum[i] += part[i] * scale[0][(START + i / 4 * 8) / kScaleBlock][i / 2 % 2];
        }
    }

    // Gate and up lie in two blocks each at most, of which the second begins anywhere: to_second columns after this
    // lane's first one.
    __device__ void add_selected(Sums& sum, const Sums& part) const {
#pragma unroll
        for (int i = 0; i < Tile::BLOCK_N / 2; ++i) {
            const int of_part = i * 2 / Tile::COLS, col = i / 4 * 8 % Tile::COLS + i % 2;
            const float first = scale[of_part][0][i / 2 % 2], second = scale[of_part][1][i / 2 % 2];
            sum[i] += part[i] * (col >= to_second[of_part] ? second : first);
        }
    }
};

// What a tile takes for its Scaling.
template <class Addend, int kPromotion, bool kVectors> struct HopperScaling : Scaling<Addend, kPromotion, false> {
    template <class Tile>
    static __device__ void multiply(typename Tile::Accumulators& sum, const ScaledParams& params, const Work& work,
                                    RingPosition<Tile::STAGES>& slot, int k_blocks, const Exchange<Tile>& exchange,
                                    const Consumer& self) {
        static_assert(!Tile::kPingPong, "the consumers share a tile");
        if constexpr (kPromotion == kPromoted) {
            multiply_promoted<Tile>(sum, slot, k_blocks, exchange, self, PlainAdder<Tile>{self});
        } else {
            const BlockScales scales(params, work.batch);
            constexpr bool kBranches = kPromotion == kBlockScaled && Tile::PARTS == 1;
            multiply_from<Tile, 0, kBranches ? kScaleBlock : 0>(sum, scales, work, params.shape.epilogue.cols, slot,
                                                                k_blocks, exchange, self);
        }
    }

    // For a tile that begins LOW to HIGH columns behind the beginning of a block.
    template <class Tile, int LOW, int HIGH>
    static __device__ void multiply_from(typename Tile::Accumulators& sum, const BlockScales& scales, const Work& work,
                                         int cols, RingPosition<Tile::STAGES>& slot, int k_blocks,
                                         const Exchange<Tile>& exchange, const Consumer& self) {
        constexpr int MIDDLE = (LOW + HIGH) / 2;
        if constexpr (HIGH - LOW <= StagedScales<Tile, kPromotion == kColumnScaled>::STEP) {
            using Adder = ScaledAdder<Tile, kPromotion == kColumnScaled, LOW>;
            multiply_promoted<Tile>(sum, slot, k_blocks, exchange, self, Adder(scales, work, cols, exchange, self));
        } else if (work.n % kScaleBlock < MIDDLE) {
            multiply_from<Tile, LOW, MIDDLE>(sum, scales, work, cols, slot, k_blocks, exchange, self);
        } else {
            multiply_from<Tile, MIDDLE, HIGH>(sum, scales, work, cols, slot, k_blocks, exchange, self);
        }
    }

    // Whether consumers share out columns. With scales in each stage they would be slower by that: of a product's
    // scales a lane would have more to load, and what it loads waits in line behind the products.
    static constexpr bool kByColumns = kPromotion == kPromoted;

    // Arrivals of the warp that brings a stage's scales, and those of a consumer that let the stage go.
    static constexpr bool kStaged = kPromotion >= kBlockScaled, kLagging = kPromotion == kBlockScaled;
    static constexpr int LOADERS = kLagging ? 1 : kStaged ? kWarpSize : 0, RELEASES = kStaged ? 4 : 1;
    static constexpr __device__ int stage_bytes(int block_m, int block_n) {
        return kStaged ? (block_m + (kPromotion == kColumnScaled ? block_n : 4)) * 4 : 0;
    }
    // The arrivals of 32 lanes take as long as all that a consumer reads of the scales of blocks. So one lane arrives
    // for all, a stage later, when their copies are there. Where every column has a scale, they let a stage go too late
    // for that.
    template <class Tile>
    static __device__ void load(const ScaledParams& params, const Schedule<Tile>& schedule,
                                const Exchange<Tile>& exchange) {
        const int lane = threadIdx.x % kWarpSize;
        RingPosition<Tile::STAGES> slot, last;
        bool pending = false;
        auto arrive = [&] {
            __syncwarp();
            if (lane == 0) barrier_arrive(exchange.barriers.full(last.stage));
            last.advance();
        };
#pragma unroll 1
        for (int index = schedule.first; index < schedule.count; index += schedule.step) {
            const Work work = schedule.at(index);
            ScaleLoader<Tile, kPromotion == kColumnScaled> loader(params, work, schedule.first_block, lane);
#pragma unroll 1
            for (int block = 0; block < schedule.k_blocks; ++block) {
                barrier_wait(exchange.barriers.empty(slot.stage), slot.phase ^ 1);
                loader.load({exchange, slot.stage});
                if constexpr (kLagging) {
                    cp_async_commit();
                    if (pending) {
                        cp_async_wait<1>();
                        arrive();
                    }
                    pending = true;
                } else {
                    barrier_arrive_after_copies(exchange.barriers.full(slot.stage));
                }
                slot.advance();
            }
        }
        if (pending) {
            cp_async_wait<0>();
            arrive();
        }
    }

    // The scales of a thread's rows and columns, which meet its accumulators on their way out. Like the bias they are
    // loaded before the main loop, which hides it: they meet nothing, and so are waited for, until it ends.
    template <class Tile> struct Factors {
        struct Columns {
            float of[2];
        };
        float alpha, factor;  // what is left of alpha for what comes after, and what is not
        float row[Tile::ATOMS_M][2];
        ColumnScales<Tile::PARTS, Tile::SHARE> held;
        int lane;

        __device__ Factors(const ScaledParams& params, const Work& work, int n, const Consumer& self, float alpha_)
            : alpha(kVectors ? 1 : alpha_), factor(alpha_), lane(self.lane()) {
            if constexpr (kVectors) {
                const BlockScales scales(params, work.batch, alpha_ != 0);
                const int m = work.m + self.row + self.warp_row() + lane / 4;
#pragma unroll
                for (int i = 0; i < Tile::ATOMS_M * 2; ++i) {
                    const float* from = scales.of_row(m + i / 2 * 64 + i % 2 * 8, 0);
                    row[i / 2][i % 2] = scales.a == nullptr ? 1 : *from;
                }
                held.load(scales, n, params.shape.epilogue.cols, lane);
            }
        }
        __device__ Columns columns(int part, int col) const {
            if constexpr (kVectors) return {held.of(part, col, 0, lane), held.of(part, col, 1, lane)};
            else return {};
        }
        template <class V> __device__ auto times(V value, int i, int half, const Columns& columns, int place) const {
            if constexpr (kVectors) return to_float(value) * (row[i][half] * factor * columns.of[place]);
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
