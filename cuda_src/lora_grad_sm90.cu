// The gradients of the low-rank factors on Hopper, bfloat16: scaling * x^T @ y for two pairs at once, x in bfloat16 and
// y in float32. lora_grad.cu has the rest.
//
//   warp 8          TMA:  64 rows of x --> ring of stages
//   warpgroup 0, 1  64 rows of y --> as sums of bfloat16 values to shared memory; wgmma: sums += y^T @ x
//
// A block walks over all rows of COLS columns of an x. The warpgroups take turns with the stages, so that one converts
// while the other multiplies. wgmma has 64 rows: RANK ranks of the first part of y, of the second and of the third.
#include "common/launches.cuh"
#include "common/rank_parts.cuh"
#include "common/wgmma.cuh"

namespace rawops {

// As _lora_grad.py packs it; strides in elements.
struct HopperGradSide {
    TensorMap x;     // (M, cols)
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

constexpr int kGradRows = 64, kGradGroups = 2, kGradThreads = kGradGroups * kWarpGroupSize + kWarpSize;

// Shared memory: the ring, two buffers of y for each warpgroup, the barriers. The sums take over the ring.
template <int RANK_, int COLS_> struct GradTile {
    using T = __nv_bfloat16;
    static constexpr int RANK = RANK_, COLS = COLS_, PARTS = RankParts<T>::COUNT;
    static constexpr int STAGE_BYTES = kGradRows * COLS * 2, STAGES = (80 << 10) / STAGE_BYTES;
    static constexpr int Y_TILES = ceil_div(RANK * PARTS, 64), Y_TILE_BYTES = kGradRows * 128;
    static constexpr int Y_BYTES = Y_TILES * Y_TILE_BYTES, Y_AT = STAGES * STAGE_BYTES;
    static constexpr int BARRIERS_AT = Y_AT + kGradGroups * 2 * Y_BYTES, BYTES = BARRIERS_AT + STAGES * 16;
    static constexpr int ENTRIES = RANK / 2;  // of a row of y, that a thread converts
    static constexpr int PITCH = COLS + 4;    // of the sums
    using OperandY = WgmmaOperand<false, kGradRows>;
    using OperandX = WgmmaOperand<false, kGradRows>;
    static_assert(kGradGroups * 64 * PITCH * 4 <= Y_AT, "the sums take over the ring");
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
            parts.cut(0, four_of(i));
            parts.cut(1, four_of(i + 4));
#pragma unroll
            for (int part = 0; part < Tile::PARTS; ++part) {
                const int entry = part * Tile::RANK + thread % 2 * Tile::ENTRIES + i;
                const uint32_t(&pairs)[4] = parts.values[part];
                const float four[4] = {__uint_as_float(pairs[0]), __uint_as_float(pairs[2]), __uint_as_float(pairs[1]),
                                       __uint_as_float(pairs[3])};
                store_shared(buffer + entry / 64 * Tile::Y_TILE_BYTES + swizzled_offset<128>(row, entry % 64 / 8), four);
            }
        }
    }

private:
    __device__ float (&four_of(int i))[4] { return *reinterpret_cast<float(*)[4]>(values + i); }
};

// A warpgroup: every second stage from its own on.
template <class Tile>
__device__ inline void multiply_rows(float (&acc)[Tile::COLS / 2], const HopperGradParams& params,
                                     const HopperGradSide& side, int first_rank, uint32_t shared, int group,
                                     int thread) {
    const RingBarriers<Tile::STAGES> barriers{shared + Tile::BARRIERS_AT};
    const uint32_t buffers = shared + Tile::Y_AT + group * (2 * Tile::Y_BYTES);
    const int stages = ceil_div(params.M, kGradRows);
    RingPosition<Tile::STAGES> slot;
    RowOfY<Tile> y;
    slot.skip(group);
    y.read(side, group * kGradRows, params.M, first_rank, params.rank, thread);
    int previous = -1;
#pragma unroll 1
    for (int stage = group, buffer = 0; stage < stages; stage += kGradGroups, buffer ^= 1) {
        const uint32_t place = buffers + buffer * Tile::Y_BYTES;
        y.store(place, thread);
        y.read(side, (stage + kGradGroups) * kGradRows, params.M, first_rank, params.rank, thread);
        fence_async_proxy();
        sync_group<kWarpGroupSize>(1 + group);
        barrier_wait(barriers.full(slot.stage), slot.phase);
        const uint64_t x = Tile::OperandX::descriptor(shared + slot.stage * Tile::STAGE_BYTES);
        wgmma_fence();
#pragma unroll
        for (int tile = 0; tile < Tile::Y_TILES; ++tile) {
            const uint64_t part = Tile::OperandY::descriptor(place + tile * Tile::Y_TILE_BYTES);
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
        slot.skip(kGradGroups);
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

template <class Tile>
__device__ inline void write_sums(const float* sums, const HopperGradParams& params, const HopperGradSide& side,
                                  int first_rank, int first_col) {
    constexpr int COPIES = Tile::RANK * Tile::PARTS < 64 ? Tile::PARTS : 64 / Tile::RANK;  // in a warpgroup's rows
    for (int i = threadIdx.x; i < Tile::RANK * Tile::COLS; i += kGradGroups * kWarpGroupSize) {
        const bool by_rank = side.out_col == 1;  // neighbouring threads write neighbouring entries
        const int r = by_rank ? i % Tile::RANK : i / Tile::COLS, c = by_rank ? i / Tile::RANK : i % Tile::COLS;
        const int rank = first_rank + r, col = first_col + c;
        if (rank >= params.rank || col >= side.cols) continue;
        float sum = 0;
#pragma unroll
        for (int group = 0; group < kGradGroups; ++group) {
#pragma unroll
            for (int copy = 0; copy < COPIES; ++copy) {
                sum += sums[(group * 64 + copy * Tile::RANK + r) * Tile::PITCH + c];
            }
        }
        if (sum != sum) sum = exact_sum<Tile>(params, side, rank, col);
        sum *= params.scaling;
        const int64_t at = col * side.out_row + rank * side.out_col;
        if (side.float_out) static_cast<float*>(side.out)[at] = sum;
        else static_cast<typename Tile::T*>(side.out)[at] = narrow<typename Tile::T>(sum);
    }
}

// RANK ranks and COLS columns a block; the blocks that share columns are neighbours.
template <int RANK, int COLS, class Tile = GradTile<RANK, COLS>>
__global__ void __launch_bounds__(kGradThreads) lora_grad_sm90(const __grid_constant__ HopperGradParams params) {
    extern __shared__ __align__(1024) char memory[];
    const uint32_t shared = shared_address(memory);
    const int thread = threadIdx.x % kWarpGroupSize, group = __shfl_sync(~0u, int(threadIdx.x) / kWarpGroupSize, 0);
    const int groups = ceil_div(params.rank, RANK), tiles = ceil_div(params.sides[0].cols, COLS);
    const int first_rank = blockIdx.x % groups * RANK, tile = blockIdx.x / groups;
    const HopperGradSide& side = params.sides[tile >= tiles];
    const int first_col = (tile >= tiles ? tile - tiles : tile) * COLS;
    const RingBarriers<Tile::STAGES> barriers{shared + Tile::BARRIERS_AT};

    if (threadIdx.x == 0) {
        barriers.init(1);
        prefetch_tensor_map(side.x);
    }
    for (int at = threadIdx.x * 16; at < kGradGroups * 2 * Tile::Y_BYTES; at += kGradThreads * 16) {
        const float zeros[4] = {};
        store_shared(shared + Tile::Y_AT + at, zeros);
    }
    fence_async_proxy();
    __syncthreads();
    await_launch_before();

    float acc[COLS / 2] = {};
    if (group < kGradGroups) {
        multiply_rows<Tile>(acc, params, side, first_rank, shared, group, thread);
    } else if (thread == 0) {
        RingPosition<Tile::STAGES> slot;
#pragma unroll 1
        for (int m = 0; m < params.M; m += kGradRows) {
            barrier_wait(barriers.empty(slot.stage), slot.phase ^ 1);
            barrier_arrive_expect(barriers.full(slot.stage), Tile::STAGE_BYTES);
#pragma unroll
            for (int col = 0; col < COLS; col += 64) {
                const uint32_t to = shared + slot.stage * Tile::STAGE_BYTES + col * kGradRows * 2;
                tma_load(to, side.x, {first_col + col, m, 0, 0, 0}, barriers.full(slot.stage));
            }
            slot.advance();
        }
    }
    __syncthreads();  // the ring has been read

    auto* sums = reinterpret_cast<float*>(memory);
    if (group == kGradGroups) return;
    const int lane = thread % kWarpSize, row = group * 64 + thread / kWarpSize * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < COLS / 2; i += 2) {
        float* to = sums + (row + i / 2 % 2 * 8) * Tile::PITCH + i / 4 * 8 + lane % 4 * 2;
        *reinterpret_cast<Vector<float, 2>*>(to) = {acc[i], acc[i + 1]};
    }
    sync_group<3, kGradGroups * kWarpGroupSize>();
    write_sums<Tile>(sums, params, side, first_rank, first_col);
}

}  // namespace rawops
