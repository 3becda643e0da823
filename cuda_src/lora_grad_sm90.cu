// The gradients of the low-rank factors on Hopper, bfloat16: scaling * x^T @ y for two pairs at once, x in bfloat16 and
// y in float32. lora_grad.cu has the rest.
//
//   warp 8          TMA:  128 rows of x --> ring of stages
//   warpgroup 0, 1  64 rows of y --> as sums of bfloat16 values to shared memory; wgmma: sums += y^T @ x
//                   64 ranks come as such sums, through the ring, where what made y left them
//
// The blocks of a cluster share out the rows of COLS columns of an x, or each would read all of y. Then every one adds
// up a share of the columns from the sums of all, in the order of their ranks. The warpgroups have 64 rows of a stage
// each, so that one may convert while the other multiplies. wgmma has 64 rows: RANK ranks of the first part of y, of
// the second and, for a float32 result, of the third.
#include "common/launches.cuh"
#include "common/rank_parts.cuh"
#include "common/wgmma.cuh"

namespace rawops {

// As _lora_factors.py packs it; strides in elements.
struct HopperGradSide {
    TensorMap x;      // (M, cols)
    TensorMap parts;  // of y if it is made, (M, ranks): 64 first values of bfloat16, 64 second ones, and so on
    const void* elements;
    const float* y;  // (M, rank), rows on 16-byte boundaries
    void* out;       // (cols, rank)
    int64_t x_row, y_row, out_row, out_col;
    int cols, float_out;
};
struct HopperGradParams {
    HopperGradSide sides[2];
    int M, rank;
    float scaling;
};

constexpr int kGradRows = 64, kGradGroups = 2, kGradStageRows = kGradGroups * kGradRows, kGradRing = 128 << 10;
constexpr int kGradThreads = kGradGroups * kWarpGroupSize + kWarpSize;

// Shared memory: the ring, two buffers of y for each warpgroup, the barriers. The sums take over what the former have.
// kMade: y comes as parts, through the ring.
template <int RANK_, int PARTS_, bool kMade_> struct GradTile {
    static constexpr bool kMade = kMade_;
    using T = __nv_bfloat16;
    static constexpr int RANK = RANK_, CLUSTER = 2, SHARE = 64, COLS = CLUSTER * SHARE, PARTS = PARTS_;
    static constexpr int Y_TILES = ceil_div(RANK * PARTS, 64), Y_TILE_BYTES = kGradRows * 128;
    static constexpr int Y_BYTES = Y_TILES * Y_TILE_BYTES, X_BYTES = kGradStageRows * COLS * 2;
    static constexpr int STAGE_BYTES = X_BYTES + (kMade ? kGradGroups * Y_BYTES : 0);
    static constexpr int STAGES = kMade ? 3 : kGradRing / STAGE_BYTES, Y_AT = STAGES * STAGE_BYTES;
    static constexpr int BUFFERS_BYTES = kMade ? 0 : kGradGroups * 2 * Y_BYTES, BARRIERS_AT = Y_AT + BUFFERS_BYTES;
    static constexpr int ENTRIES = RANK / 2;  // of a row of y, that a thread converts
    static constexpr int PITCH = COLS + 4;    // of the sums
    using OperandY = WgmmaOperand<false, kGradRows>;
    using OperandX = WgmmaOperand<false, kGradStageRows>;
    static_assert(kGradGroups * 64 * PITCH * 4 <= BARRIERS_AT, "the sums have room");
    static_assert(!kMade || (RANK == 64 && PARTS == 2), "as they are made");
};

// The stages of a block.
template <class Tile> struct GradRows {
    int first, count;

    __device__ explicit GradRows(int M) {
        const int stages = ceil_div(M, kGradStageRows), slice = ceil_div(stages, Tile::CLUSTER);
        first = cluster_rank() * slice;
        count = clamp(stages - first, 0, slice);
    }
};

// The ranks of a thread in the next stage: half of those of one row.
template <class Tile> struct RowOfY {
    float values[Tile::ENTRIES];

    __device__ void read(const HopperGradSide& side, int m, int M, int first_rank, int rank, int thread) {
        const int row = m + thread / 2, begin = first_rank + thread % 2 * Tile::ENTRIES;
#pragma unroll
        for (int i = 0; i < Tile::ENTRIES; i += 4) {
            Vector<float, 4> four = {};
            const int left = row < M ? rank - begin - i : 0;
            if (left > 0) four = *reinterpret_cast<const Vector<float, 4>*>(side.y + row * side.y_row + begin + i);
#pragma unroll
            for (int j = 0; j < 4; ++j) values[i + j] = j < left ? four.data[j] : 0;
        }
    }
    // To shared memory as parts, rank beside rank.
    __device__ void store(uint32_t buffer, int thread) {
        const int row = thread / 2;
#pragma unroll
        for (int i = 0; i < Tile::ENTRIES; i += 8) {
            RankParts<__nv_bfloat16> parts;
#pragma unroll
            for (int j = 0; j < 8; ++j) values[i + j] = rounded_for_parts<typename Tile::T, Tile::PARTS>(values[i + j]);
            parts.cut(0, four_of(i));
            parts.cut(1, four_of(i + 4));
#pragma unroll
            for (int part = 0; part < Tile::PARTS; ++part) {
                const int entry = part * Tile::RANK + thread % 2 * Tile::ENTRIES + i;
                const uint32_t(&pairs)[4] = parts.values[part];
                const float four[4] = {__uint_as_float(pairs[0]), __uint_as_float(pairs[2]), __uint_as_float(pairs[1]),
                                       __uint_as_float(pairs[3])};
                store_shared(
                    buffer + entry / 64 * Tile::Y_TILE_BYTES + swizzled_offset<128>(row, entry % 64 / 8), four);
            }
        }
    }

private:
    __device__ float (&four_of(int i))[4] { return *reinterpret_cast<float(*)[4]>(values + i); }
};

// A warpgroup: its 64 rows of every stage.
template <class Tile>
__device__ inline void multiply_rows(float (&acc)[Tile::COLS / 2], const HopperGradParams& params,
                                     const HopperGradSide& side, int first_rank, uint32_t shared, int group,
                                     int thread) {
    const RingBarriers<Tile::STAGES> barriers{shared + Tile::BARRIERS_AT};
    const uint32_t buffers = shared + Tile::Y_AT + group * (2 * Tile::Y_BYTES);
    const GradRows<Tile> rows(params.M);
    RingPosition<Tile::STAGES> slot;
    RowOfY<Tile> y;
    const int own = rows.first * kGradStageRows + group * kGradRows;
    if constexpr (!Tile::kMade) y.read(side, own, params.M, first_rank, params.rank, thread);
    int previous = -1;
#pragma unroll 1
    for (int stage = 0, buffer = 0; stage < rows.count; ++stage, buffer ^= 1) {
        uint32_t place = buffers + buffer * Tile::Y_BYTES, pitch = Tile::Y_TILE_BYTES;
        if constexpr (Tile::kMade) {
            place = shared + slot.stage * Tile::STAGE_BYTES + Tile::X_BYTES + group * Tile::Y_TILE_BYTES;
            pitch = kGradGroups * Tile::Y_TILE_BYTES;
        } else {
            y.store(place, thread);
            y.read(side, own + (stage + 1) * kGradStageRows, params.M, first_rank, params.rank, thread);
            fence_async_proxy();
            sync_group<kWarpGroupSize>(1 + group);
        }
        barrier_wait(barriers.full(slot.stage), slot.phase);
        const uint64_t x =
            Tile::OperandX::descriptor(shared + slot.stage * Tile::STAGE_BYTES + group * kGradRows * 128);
        wgmma_fence();
#pragma unroll
        for (int tile = 0; tile < Tile::Y_TILES; ++tile) {
            const uint64_t part = Tile::OperandY::descriptor(place + tile * pitch);
#pragma unroll
            for (int step = 0; step < kGradRows / 16; ++step) {
                Wgmma<Tile::COLS>::template multiply<typename Tile::T, false, false>(
                    acc, Tile::OperandY::advance(part, 0, step), Tile::OperandX::advance(x, 0, step), 1);
            }
        }
        wgmma_commit();
        wgmma_wait<1>();  // the buffer that is filled next is free as well, after the barrier above
        if (previous >= 0 && thread == 0) barrier_arrive(barriers.empty(previous));
        previous = slot.stage;
        slot.advance();
    }
    wgmma_wait<0>();
    hold(acc);
}

// An entry of the result in float32, one product after the other: an infinity in x makes NaN of parts of y that are 0.
template <class Tile>
__device__ inline float exact_sum(const HopperGradParams& params, const HopperGradSide& side, int rank, int col) {
    const auto* x = static_cast<const typename Tile::T*>(side.elements) + col;
    float sum = 0;
#pragma unroll 4
    for (int m = 0; m < params.M; ++m) sum = fmaf(side.y[m * side.y_row + rank], widen(x[m * side.x_row]), sum);
    return sum;
}

// The block's share of the columns: four neighbouring ones of a rank at a time.
template <class Tile>
__device__ inline void write_sums(uint32_t sums, const HopperGradParams& params, const HopperGradSide& side,
                                  int first_rank, int first_col) {
    constexpr int COPIES = Tile::RANK * Tile::PARTS < 64 ? Tile::PARTS : 64 / Tile::RANK;  // in a warpgroup's rows
    constexpr int FOURS = Tile::SHARE / 4;
    const int share = cluster_rank() * Tile::SHARE;
    for (int i = threadIdx.x; i < Tile::RANK * FOURS; i += kGradGroups * kWarpGroupSize) {
        const bool by_rank = side.out_col == 1;  // neighbouring threads write neighbouring entries
        const int r = by_rank ? i % Tile::RANK : i / FOURS, c = share + (by_rank ? i / Tile::RANK : i % FOURS) * 4;
        const int rank = first_rank + r, col = first_col + c;
        if (rank >= params.rank || col >= side.cols) continue;
        float sum[4] = {};
#pragma unroll
        for (int block = 0; block < Tile::CLUSTER; ++block) {
#pragma unroll
            for (int part = 0; part < kGradGroups * COPIES; ++part) {
                const int row = part / COPIES * 64 + part % COPIES * Tile::RANK + r;
                float four[4];
                load_from_rank(four, sums + (row * Tile::PITCH + c) * 4, block);
#pragma unroll
                for (int j = 0; j < 4; ++j) sum[j] += four[j];
            }
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (col + j >= side.cols) break;
            if (sum[j] != sum[j]) sum[j] = exact_sum<Tile>(params, side, rank, col + j);
            const float value = params.scaling * sum[j];
            const int64_t at = (col + j) * side.out_row + rank * side.out_col;
            if (side.float_out) static_cast<float*>(side.out)[at] = value;
            else static_cast<typename Tile::T*>(side.out)[at] = narrow<typename Tile::T>(value);
        }
    }
}

// RANK ranks and COLS columns a cluster; the clusters that share columns are neighbours. y in PARTS values of bfloat16.
template <int RANK, int PARTS, bool kMade, class Tile = GradTile<RANK, PARTS, kMade>>
__global__ void __launch_bounds__(kGradThreads, 1) __cluster_dims__(Tile::CLUSTER, 1, 1)
    lora_grad_sm90(const __grid_constant__ HopperGradParams params) {
    extern __shared__ __align__(1024) char memory[];
    const uint32_t shared = shared_address(memory);
    const int thread = threadIdx.x % kWarpGroupSize, group = __shfl_sync(~0u, int(threadIdx.x) / kWarpGroupSize, 0);
    const int groups = ceil_div(params.rank, RANK), tiles = ceil_div(params.sides[0].cols, Tile::COLS);
    const int number = blockIdx.x / Tile::CLUSTER, first_rank = number % groups * RANK, tile = number / groups;
    const HopperGradSide& side = params.sides[tile >= tiles];
    const int first_col = (tile >= tiles ? tile - tiles : tile) * Tile::COLS;
    const RingBarriers<Tile::STAGES> barriers{shared + Tile::BARRIERS_AT};

    if (threadIdx.x == 0) {
        barriers.init(kGradGroups);
        prefetch_tensor_map(side.x);
    }
    for (int at = threadIdx.x * 16; at < Tile::BUFFERS_BYTES; at += kGradThreads * 16) {
        const float zeros[4] = {};
        store_shared(shared + Tile::Y_AT + at, zeros);
    }
    fence_async_proxy();
    __syncthreads();
    await_launch_before();

    float acc[Tile::COLS / 2] = {};
    if (group < kGradGroups) {
        multiply_rows<Tile>(acc, params, side, first_rank, shared, group, thread);
    } else if (thread == 0) {
        const GradRows<Tile> rows(params.M);
        RingPosition<Tile::STAGES> slot;
#pragma unroll 1
        for (int stage = 0; stage < rows.count; ++stage) {
            const int m = (rows.first + stage) * kGradStageRows;
            barrier_wait(barriers.empty(slot.stage), slot.phase ^ 1);
            barrier_arrive_expect(barriers.full(slot.stage), Tile::STAGE_BYTES);
#pragma unroll
            for (int col = 0; col < Tile::COLS; col += 64) {
                const uint32_t to = shared + slot.stage * Tile::STAGE_BYTES + col * kGradStageRows * 2;
                tma_load(to, side.x, {first_col + col, m, 0, 0, 0}, barriers.full(slot.stage));
            }
            if constexpr (Tile::kMade) {
#pragma unroll
                for (int part = 0; part < Tile::PARTS; ++part) {
                    const uint32_t to = shared + slot.stage * Tile::STAGE_BYTES + Tile::X_BYTES +
                                        part * kGradGroups * Tile::Y_TILE_BYTES;
                    const int from = (first_rank / Tile::RANK * Tile::PARTS + part) * Tile::RANK;
                    tma_load(to, side.parts, {from, m, 0, 0, 0}, barriers.full(slot.stage));
                }
            }
            slot.advance();
        }
    }
    __syncthreads();  // the ring has been read
    if (group < kGradGroups) {
        const int lane = thread % kWarpSize, row = group * 64 + thread / kWarpSize * 16 + lane / 4;
        auto* sums = reinterpret_cast<float*>(memory);
#pragma unroll
        for (int i = 0; i < Tile::COLS / 2; i += 2) {
            float* to = sums + (row + i / 2 % 2 * 8) * Tile::PITCH + i / 4 * 8 + lane % 4 * 2;
            *reinterpret_cast<Vector<float, 2>*>(to) = {acc[i], acc[i + 1]};
        }
    }
    cluster_sync();  // the sums of all blocks are there
    if (group < kGradGroups) write_sums<Tile>(shared, params, side, first_rank, first_col);
    cluster_sync();  // and have been read
}

}  // namespace rawops
