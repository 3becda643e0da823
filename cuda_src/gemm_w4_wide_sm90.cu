// Many tokens times packed 4-bit weights on Hopper. The weights are the 64-row operand of wgmma, made in the registers
// that it takes them from, and the tokens (rows of a) the other one, as TMA brings them: the product is D transposed.
//
//   warpgroup 0, one thread   TMA: tokens, weights, scales --> ring of stages        waits for `empty`, ends `full`
//   the other warpgroups      ring --> registers --> wgmma --> part * scale --> sum  wait for `full`, end `empty`
//                             sum --> shared memory (WideFinish) --> epilogue --> D
//
// A consumer has a unit of 64 columns, and every SLICES-th stage; of a gated tile, half of the units have columns of
// the gate and the other half those of up. While the tensor cores work on one section of K, it dequantises the next.
// Two consumers begin half a stage apart, so that one has the tensor cores while the other adds up. Weights are exact
// in a's type; each group's sum is float32 and is scaled in float32. A block takes items blockIdx.x,
// blockIdx.x + gridDim.x, ...: the tiles of one slice of K after another.
#include "common/launches.cuh"
#include "common/w4_wide.cuh"

namespace rawops {

// The way of a consumer's sums to D by TMA, which completes it during the next tile: with alpha, bias, activation.
template <class Tile, class Epilogue, class Out>
__device__ inline void finish_staged(const typename Tile::Sums& sum, const float (&bias)[2], float alpha,
                                     const TensorMap& map, const WideWork& work, char* boxes,
                                     const WideConsumer<Tile>& self) {
    const uint32_t box = shared_address(boxes) + self.unit * Tile::BOX;
    const float factor = alpha * Tile::Weights::kFactor;
    const int token = self.lane % 4 * 2, chunk = self.column / 8;  // of 16 bytes
    if (self.leads()) tma_store_wait_read();  // of the tile before
    self.sync();
#pragma unroll
    for (int atom = 0; atom < Tile::TOKENS / 8; ++atom) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float* values = &sum[atom * 4 + i];
            float pair[2];
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const float value = fmaf(values[k * 2], factor, bias[k]);
                pair[k] = Epilogue::activated(value, value);
            }
            store_word(box + atom * 8 * 128 + swizzled_offset<128>(token + i, chunk) + self.column % 8 * 2,
                       narrow_pair<Out>(pair[0], pair[1]));
        }
    }
    fence_async_proxy();
    self.sync();
    if (self.leads()) {
        tma_store(map, {work.n + self.unit * Tile::UNIT, work.m, 0, 0, 0}, box);
        tma_store_commit();
    }
}

// Writes CHUNK tokens of a consumer, from chunk * CHUNK on, to the slab, or adds them to what is there.
template <class Tile>
__device__ inline void leave(const typename Tile::Sums& sum, int chunk, float* slab, bool adds,
                             const WideConsumer<Tile>& self) {
    constexpr int ATOMS = Tile::CHUNK / 8;
    float* own = slab + self.lane % 4 * 2 * Tile::SLAB_ROW + self.unit * Tile::UNIT + self.column;
#pragma unroll
    for (int atom = 0; atom < ATOMS; ++atom) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float* values = &sum[(chunk * ATOMS + atom) * 4 + i];
            auto& place = *reinterpret_cast<Vector<float, 2>*>(own + (atom * 8 + i) * Tile::SLAB_ROW);
            Vector<float, 2> total = {};
            if (adds) total = place;
            total.data[0] += values[0] * Tile::Weights::kFactor;
            total.data[1] += values[2] * Tile::Weights::kFactor;
            place = total;
        }
    }
}

// The way of all consumers' sums to D through the slab, with any epilogue.
template <class Tile, class Epilogue>
__device__ inline void finish_by_slab(const typename Tile::Sums& sum, const Epilogue& epilogue, const WideWork& work,
                                      int rows, float* slab, const WideConsumer<Tile>& self) {
    constexpr int THREADS = Tile::CONSUMERS * kWarpGroupSize, PIECES = Tile::COLS / 4;
#pragma unroll 1
    for (int chunk = 0; chunk < Tile::TOKENS / Tile::CHUNK; ++chunk) {
        const int m = work.m + chunk * Tile::CHUNK;
        if (m >= rows) break;
        sync_group<1, THREADS>();  // the slab has been read
#pragma unroll 1
        for (int slice = 0; slice < Tile::SLICES; ++slice) {
#pragma unroll
            for (int candidate = 0; candidate < Tile::TOKENS / Tile::CHUNK; ++candidate) {  // registers have no index
                if (candidate == chunk && slice == self.slice) leave<Tile>(sum, candidate, slab, slice > 0, self);
            }
            sync_group<1, THREADS>();
        }
#pragma unroll 1
        for (int piece = threadIdx.x - kWarpGroupSize; piece < Tile::CHUNK * PIECES; piece += THREADS) {
            const int row = piece / PIECES, col = piece % PIECES * 4;
            const float* at = slab + row * Tile::SLAB_ROW + col;
            auto value = *reinterpret_cast<const Vector<float, 4>*>(at), up = value;
            if constexpr (Tile::kGated) up = *reinterpret_cast<const Vector<float, 4>*>(at + Tile::COLS);
            epilogue.finish(m + row, work.n + col, value.data, up.data);
        }
    }
}

// Four columns of a token: the sums of all slices in all blocks, in order.
template <class Tile> __device__ inline Vector<float, 4> total_of(const float* sums, int token, int col) {
    Vector<float, 4> part[Tile::CLUSTER * Tile::SLICES];
#pragma unroll
    for (int i = 0; i < Tile::CLUSTER * Tile::SLICES; ++i) {
        const float* from = sums + (i % Tile::SLICES * Tile::TOKENS + token) * Tile::SLAB_ROW + col;
        if constexpr (Tile::CLUSTER > 1) load_from_rank(part[i].data, shared_address(from), i / Tile::SLICES);
        else part[i] = *reinterpret_cast<const Vector<float, 4>*>(from);
    }
    Vector<float, 4> total = {};
#pragma unroll
    for (int i = 0; i < Tile::CLUSTER * Tile::SLICES * 4; ++i) total.data[i % 4] += part[i / 4].data[i % 4];
    return total;
}

// The way of all consumers' sums to D through the ring, of all tokens at once. The blocks of a cluster take the tokens
// in turn.
template <class Tile, class Epilogue>
__device__ inline void finish_by_ring(const typename Tile::Sums& sum, const Epilogue& epilogue, const WideWork& work,
                                      int rows, float* sums, const WideConsumer<Tile>& self) {
    constexpr int THREADS = Tile::CONSUMERS * kWarpGroupSize, PIECES = Tile::COLS / 4;
    sync_group<1, THREADS>();  // all stages have been read
#pragma unroll
    for (int chunk = 0; chunk < Tile::TOKENS / Tile::CHUNK; ++chunk) {
        const int token = self.slice * Tile::TOKENS + chunk * Tile::CHUNK;
        leave<Tile>(sum, chunk, sums + token * Tile::SLAB_ROW, false, self);
    }
    if constexpr (Tile::CLUSTER > 1) cluster_sync();
    else sync_group<1, THREADS>();
    const int tokens = min_of(Tile::TOKENS, rows - work.m);
#pragma unroll 1
    for (int piece = (Tile::CLUSTER > 1 ? cluster_rank() * THREADS : 0) + threadIdx.x - kWarpGroupSize;
         piece < tokens * PIECES; piece += Tile::CLUSTER * THREADS) {
        const int token = piece / PIECES, col = piece % PIECES * 4;
        auto value = total_of<Tile>(sums, token, col), up = value;
        if constexpr (Tile::kGated) up = total_of<Tile>(sums, token, Tile::COLS + col);
        epilogue.finish(work.m + token, work.n + col, value.data, up.data);
    }
    if constexpr (Tile::CLUSTER > 1) cluster_sync();  // the others read what this block has left
}

template <class Tile, class Out, int kActivation>
__device__ inline void run_wide(const WideMaps& maps, const W4Params& params, int raster_rows) {
    using Epilogue = Epilogue<typename Tile::T, Out, kActivation>;
    constexpr bool kStaged = Tile::kFinish == kByBox;
    extern __shared__ __align__(1024) char shared[];
    const RingBarriers<Tile::STAGES> barriers{shared_address(shared) + Tile::BARRIERS_AT};
    start_next_launch();
    WideSchedule<Tile> schedule(params.shape, raster_rows);
    if (threadIdx.x == 0) {
        barriers.init(Tile::UNITS * 4);  // warps
        prefetch_tensor_map(maps.tokens);
        prefetch_tensor_map(maps.weights);
        ask_ahead<Tile>(maps, schedule, params.shape.epilogue.cols);
    }
    __syncthreads();
    await_launch_before();
    const float alpha = params.call.alpha.read();
    if (alpha == 0) schedule.skip_operands();
    const int warpgroup = __shfl_sync(~0u, int(threadIdx.x) / kWarpGroupSize, 0);  // known to be uniform
    if (warpgroup == 0) {
        release_registers<Tile::PRODUCER_REGISTERS>();
        const int cols = params.shape.epilogue.cols;
        if (threadIdx.x == 0) load_wide<Tile>(maps, schedule, cols, shared_address(shared), barriers);
        if constexpr (Tile::CLUSTER > 1) {  // whose barriers count these warps, too
            __syncwarp();
            cluster_sync();
            cluster_sync();
        }
        return;
    }
    claim_registers<Tile::CONSUMER_REGISTERS>();
    const WideConsumer<Tile> self(warpgroup - 1, threadIdx.x % kWarpGroupSize, params.groups.zero_sign);
    RingPosition<Tile::STAGES> slot;
    const bool partial = params.shape.partial_stride != 0;
#pragma unroll 1
    for (int index = schedule.first; index < schedule.count; index += schedule.step) {
        const WideWork work = schedule.at(index);
        EpilogueCall target = params.call.epilogue;
        target.out = static_cast<Out*>(target.out) + work.slice * params.shape.partial_stride;
        const int batch[3] = {};
        const Epilogue epilogue(target, params.shape.epilogue, batch, partial ? 1.0f : alpha);
        float bias[2] = {};
        if constexpr (kStaged) {  // loaded while the main loop runs
            const int n = work.n + self.unit * Tile::UNIT + self.column;
            for (int i = 0; i < 2; ++i) bias[i] = epilogue.bias(n + i, false);
        }
        typename Tile::Sums sum;
        self.multiply(sum, work.blocks, shared_address(shared), slot, barriers);
        slot.skip(work.blocks);
        if constexpr (kStaged) {
            finish_staged<Tile, Epilogue, Out>(sum, bias, alpha, maps.d, work, shared + Tile::FINISH_AT, self);
        } else if constexpr (Tile::kFinish == kByRing) {
            finish_by_ring<Tile>(sum, epilogue, work, params.shape.M, reinterpret_cast<float*>(shared), self);
        } else {
            float* slab = reinterpret_cast<float*>(shared + Tile::FINISH_AT);
            finish_by_slab<Tile>(sum, epilogue, work, params.shape.M, slab, self);
        }
    }
    if (kStaged && self.leads()) tma_store_wait_read();  // the block's memory ends with it
}

template <class T, class Out, class Scale, int kFormat, bool kHasZeros, int GROUP, int TOKENS, int UNITS, int SLICES,
          int STAGES, bool kBKMajor, int kActivation, int kFinish,
          class Tile = WideTile<T, Scale, kFormat, kHasZeros, GROUP, TOKENS, UNITS, SLICES, STAGES, kBKMajor,
                                kActivation == kSwiglu, kFinish, 1>>
__global__ void __launch_bounds__(Tile::THREADS, 1)
    gemm_w4_wide_sm90(const __grid_constant__ WideMaps maps, const __grid_constant__ W4Params params, int raster_rows) {
    run_wide<Tile, Out, kActivation>(maps, params, raster_rows);
}

template <class T, class Out, class Scale, int kFormat, bool kHasZeros, int GROUP, int TOKENS, int UNITS, int SLICES,
          int STAGES, bool kBKMajor, int kActivation,
          class Tile = WideTile<T, Scale, kFormat, kHasZeros, GROUP, TOKENS, UNITS, SLICES, STAGES, kBKMajor,
                                kActivation == kSwiglu, kByRing, 2>>
__global__ void __launch_bounds__(Tile::THREADS, 1) __cluster_dims__(2, 1, 1)
    gemm_w4_wide_sm90_pairs(const __grid_constant__ WideMaps maps, const __grid_constant__ W4Params params,
                            int raster_rows) {
    run_wide<Tile, Out, kActivation>(maps, params, raster_rows);
}

}  // namespace rawops
