// GEMM on the tensor cores of Hopper (wgmma): float16 and bfloat16 operands that TMA can read, in any of the layouts.
//
//   warpgroup 0, one thread   TMA:   a, b --> ring of stages                          waits for `empty`, ends `full`
//   warpgroups 1 and 2        wgmma: ring --> accumulators (registers)                waits for `full`, ends `empty`
//                             epilogue: accumulators --> staging tile --> TMA --> D
//
// One block stays on each SM and takes tiles blockIdx.x, blockIdx.x + gridDim.x, ... The ring runs on from tile to
// tile: while the consumers finish one, the first stages of the next arrive, and D leaves during the next main loop.
#include "common/gemm_problem.cuh"
#include "common/wgmma.cuh"

namespace rawops {

struct GemmMaps {
    TensorMap a, b, d;  // axes from the outermost: three of the batch, then the two of the matrix as they lie in memory
};

// How a tile leaves the registers. The numbers are those of _gemm_sm90.py.
enum Finish : int {
    kPlain,   // alpha alone; through the staging tile and TMA
    kStaged,  // any epilogue; the same way out
    kDirect,  // any epilogue, written by the threads: for a D that TMA cannot write, and for float32
};

// Consumers share a tile, 64 rows each, or (kPingPong) take turns: one multiplies while the other finishes its tile.
template <class T_, class Out_, int BLOCK_N_, int STAGES_, bool kAKMajor_, bool kBKMajor_, int kActivation,
          int kFinish_, bool kPingPong_>
struct HopperTile {
    using T = T_;
    using Out = Out_;
    using Epilogue = rawops::Epilogue<T, Out, kActivation>;
    static constexpr int BLOCK_M = 128, BLOCK_N = BLOCK_N_, BLOCK_K = 64, STAGES = STAGES_;
    static constexpr bool kAKMajor = kAKMajor_, kBKMajor = kBKMajor_;
    static constexpr int kFinish = kFinish_;
    static constexpr bool kPingPong = kPingPong_;
    using OperandA = WgmmaOperand<kAKMajor, BLOCK_K>;
    using OperandB = WgmmaOperand<kBKMajor, BLOCK_K>;
    static constexpr int K_STEPS = BLOCK_K / 16, ATOMS_M = kPingPong ? 2 : 1;  // 64 rows each
    static constexpr int ROWS = ATOMS_M * 64;                                 // of a consumer
    // A gated tile holds BLOCK_N / 2 columns of the gate, then the same columns of up: one thread has both.
    static constexpr int PARTS = Epilogue::kGated ? 2 : 1, COLS = BLOCK_N / PARTS;
    using Accumulators = float[ATOMS_M][BLOCK_N / 2];

    static constexpr int A_BYTES = BLOCK_M * BLOCK_K * 2, STAGE_BYTES = A_BYTES + BLOCK_N * BLOCK_K * 2;
    // D leaves in boxes as wide as the swizzle, so that staging it is free of bank conflicts.
    static constexpr int BOX_COLS = COLS % 64 == 0 ? 64 : COLS % 32 == 0 ? 32 : 16;
    static constexpr int BOX_BYTES = ROWS * BOX_COLS * 2, STAGING_BYTES = kFinish == kDirect ? 0 : ROWS * COLS * 2;
    // Any other epilogue sees the accumulators through a slab for each warp, CHUNK columns of D at a time.
    using Slab = SharedTile<float, 16, 32>;
    static constexpr int CHUNK = Slab::COLS / PARTS, CHUNKS = ceil_div(COLS, CHUNK);
    static constexpr int SLAB_BYTES = kFinish == kPlain ? 0 : Slab::BYTES;

    // Shared memory: the ring, the staging tiles and slabs of both consumers, the barriers.
    static constexpr int CONSUMER_BYTES = STAGING_BYTES + 4 * SLAB_BYTES;

    static_assert(COLS % 16 == 0, "stmatrix stores 16 columns");
    static_assert(kBKMajor || COLS % 64 == 0, "boxes of an MN-major operand are 64 wide");
    static_assert(ATOMS_M * BLOCK_N <= 256, "accumulators fit in the registers of a consumer");
    static_assert(kFinish == kDirect || sizeof(Out) == 2, "staged elements have 16 bits");
    static_assert(Epilogue::WIDTH == 4, "stage_finished packs four");
};

// One tile: its place in D, and the batch it belongs to.
struct Work {
    int m, n, batch[3];

    // The corner of an operand's matrix. Where it is broadcast over an axis of the batch, its map has size 1.
    __device__ TensorCoordinates matrix_of(const Strides& strides) const {
        auto along = [&](int axis) { return strides.batch[axis] == 0 ? 0 : batch[axis]; };
        return {0, 0, along(2), along(1), along(0)};
    }
};

// All tiles of all batches, in the order in which they are taken.
template <class Tile> class Schedule {
public:
    int count;

    __device__ Schedule(const GemmShape& shape_, int group_)
        : shape(shape_),
          tiles_m(ceil_div(shape_.M, Tile::BLOCK_M)),
          tiles_n(ceil_div(shape_.epilogue.cols, Tile::COLS)),
          group(group_) {
        count = tiles_m * tiles_n * shape.batches;
    }

    __device__ Work at(int index) const {
        Work work;
        const TileIndex tile = grouped_raster(index % (tiles_m * tiles_n), tiles_m, tiles_n, group);
        shape.batch_index(index / (tiles_m * tiles_n), work.batch);
        work.m = tile.m * Tile::BLOCK_M;
        work.n = tile.n * Tile::COLS;
        return work;
    }

private:
    const GemmShape& shape;
    int tiles_m, tiles_n, group;
};

// Starts the copies of one operand's part of a stage, EXTENT elements along MN from `mn` on and 64 along K. They may
// come in PARTS parts, whose places in the matrix are `distance` apart.
template <bool kKMajor, int EXTENT, int PARTS = 1>
__device__ inline void load_operand(uint32_t destination, const TensorMap& map, TensorCoordinates from, int mn, int k,
                                    uint32_t full, int distance = 0) {
    constexpr int BOX = kKMajor ? EXTENT / PARTS : 64, BOXES = EXTENT / BOX;
#pragma unroll
    for (int box = 0; box < BOXES; ++box) {
        const int at = mn + box % (BOXES / PARTS) * BOX + box / (BOXES / PARTS) * distance;
        from.at[0] = kKMajor ? k : at;
        from.at[1] = kKMajor ? at : k;
        tma_load(destination + box * BOX * 128, map, from, full);
    }
}

// The producer: one thread that keeps the ring full.
template <class Tile>
__device__ inline void load_tiles(const GemmMaps& maps, const GemmShape& shape, const Schedule<Tile>& schedule,
                                  int k_blocks, uint32_t ring, RingBarriers<Tile::STAGES> barriers) {
    RingPosition<Tile::STAGES> slot;
#pragma unroll 1
    for (int index = blockIdx.x; index < schedule.count; index += gridDim.x) {
        const Work work = schedule.at(index);
        const TensorCoordinates a = work.matrix_of(shape.a), b = work.matrix_of(shape.b);
#pragma unroll 1
        for (int block = 0; block < k_blocks; ++block) {
            const uint32_t stage = ring + slot.stage * Tile::STAGE_BYTES, full = barriers.full(slot.stage);
            const int k = block * Tile::BLOCK_K;
            barrier_wait(barriers.empty(slot.stage), slot.phase ^ 1);
            barrier_arrive_expect(full, Tile::STAGE_BYTES);
            load_operand<Tile::kAKMajor, Tile::BLOCK_M>(stage, maps.a, a, work.m, k, full);
            load_operand<Tile::kBKMajor, Tile::BLOCK_N, Tile::PARTS>(stage + Tile::A_BYTES, maps.b, b, work.n, k, full,
                                                                     shape.epilogue.cols);
            slot.advance();
        }
    }
}

// A thread of a consumer warpgroup. The consumer's rows begin at `row` of the tile.
struct Consumer {
    int number, thread, row;
    char *staging, *slab;  // the consumer's tile of D, the warp's slab
    uint32_t turns;        // two barriers: the turn of consumer 0, that of consumer 1

    __device__ int lane() const { return thread % kWarpSize; }
    __device__ int warp_row() const { return thread / kWarpSize * 16; }  // within each 64 rows
    __device__ bool leads() const { return thread == 0; }
    __device__ void sync() const { number == 0 ? sync_warp_group<1>() : sync_warp_group<2>(); }

    // A parity tells two phases of a stage apart and no more, so a consumer may not run ahead to its next tile: it
    // waits until the other one has seen the last stage of the tile before.
    __device__ void await_turn(uint32_t phase) const { barrier_wait(turns + number * 8, phase); }
    __device__ void end_turn() const {
        if (leads()) barrier_arrive(turns + (number ^ 1) * 8);
    }
};

// acc = a @ b over the next k_blocks stages of the ring. One batch of products stays in flight: a stage is let go when
// those of the next have been issued.
template <class Tile>
__device__ inline void multiply_stages(typename Tile::Accumulators& acc, RingPosition<Tile::STAGES>& slot, int k_blocks,
                                       uint32_t ring, RingBarriers<Tile::STAGES> barriers, const Consumer& self) {
    using A = typename Tile::OperandA;
    using B = typename Tile::OperandB;
    int previous = 0;
#pragma unroll 1
    for (int block = 0; block < k_blocks; ++block) {
        const uint32_t stage = ring + slot.stage * Tile::STAGE_BYTES;
        const uint64_t a = A::descriptor(stage + self.row / 64 * A::ROWS_64), b = B::descriptor(stage + Tile::A_BYTES);
        barrier_wait(barriers.full(slot.stage), slot.phase);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < Tile::K_STEPS; ++step) {
#pragma unroll
            for (int i = 0; i < Tile::ATOMS_M; ++i) {
                Wgmma<Tile::BLOCK_N>::template multiply<typename Tile::T, Tile::kAKMajor, Tile::kBKMajor>(
                    acc[i], A::advance(a, i, step), B::advance(b, 0, step), block > 0 || step > 0);
            }
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (block > 0 && self.leads()) barrier_arrive(barriers.empty(previous));
        previous = slot.stage;
        slot.advance();
    }
    if constexpr (Tile::kPingPong) self.end_turn();
    wgmma_wait<0>();
    if (k_blocks > 0 && self.leads()) barrier_arrive(barriers.empty(previous));
#pragma unroll
    for (int i = 0; i < Tile::ATOMS_M; ++i) wgmma_hold(acc[i]);
}

// To the staging tile straight from the accumulators.
template <class Tile>
__device__ inline void stage_plain(const typename Tile::Accumulators& acc, float alpha, const Consumer& self) {
    const int lane = self.lane();
#pragma unroll
    for (int i = 0; i < Tile::ATOMS_M; ++i) {
        const int row = i * 64 + self.warp_row() + lane % 16;
#pragma unroll
        for (int col = 0; col < Tile::COLS; col += 16) {
            uint32_t packed[4];
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) {
                const float* values = &acc[i][col / 2 + pair * 2];
                packed[pair] = narrow_pair<typename Tile::Out>(values[0] * alpha, values[1] * alpha);
            }
            const int chunk = col % Tile::BOX_COLS / 8 + lane / 16;
            stmatrix(shared_address(self.staging) + col / Tile::BOX_COLS * Tile::BOX_BYTES +
                         swizzled_offset<Tile::BOX_COLS * 2>(row, chunk),
                     packed);
        }
    }
}

// Writes the warp's columns chunk * CHUNK ... of atom i to its slab; of a gated tile, gate and up side by side.
template <class Tile>
__device__ inline void fill_slab(const float (&acc)[Tile::BLOCK_N / 2], int chunk, char* slab, int lane) {
#pragma unroll
    for (int col = 0; col < Tile::Slab::COLS; col += 8) {
        const int part = col / Tile::CHUNK, source = chunk * Tile::CHUNK + col % Tile::CHUNK;
        if (source >= Tile::COLS) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float* values = &acc[(part * Tile::COLS + source) / 2 + half * 2];
            const int offset = Tile::Slab::offset(lane / 4 + half * 8, col + lane % 4 * 2);
            *reinterpret_cast<Vector<float, 2>*>(slab + offset) = {values[0], values[1]};
        }
    }
}

// Calls visit(row, col, value, up) for groups of neighbouring columns. The loop is not unrolled: an epilogue is long.
template <class Tile, class Visit>
__device__ inline void for_each_group(const typename Tile::Accumulators& acc, const Consumer& self, Visit visit) {
    using Group = Vector<float, Tile::Epilogue::WIDTH>;
    constexpr int WIDTH = Tile::Epilogue::WIDTH, GROUPS = Tile::CHUNK / WIDTH;
    const int lane = self.lane();
#pragma unroll 1
    for (int chunk = 0; chunk < Tile::ATOMS_M * Tile::CHUNKS; ++chunk) {
        __syncwarp();
#pragma unroll
        for (int candidate = 0; candidate < Tile::ATOMS_M * Tile::CHUNKS; ++candidate) {  // registers have no index
            if (candidate == chunk) {
                fill_slab<Tile>(acc[candidate / Tile::CHUNKS], candidate % Tile::CHUNKS, self.slab, lane);
            }
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 16 * GROUPS / kWarpSize; ++i) {
            const int group = i * kWarpSize + lane, row = group / GROUPS, col = group % GROUPS * WIDTH;
            const int tile_row = chunk / Tile::CHUNKS * 64 + self.warp_row() + row;
            const int tile_col = chunk % Tile::CHUNKS * Tile::CHUNK + col;
            if (Tile::COLS % Tile::CHUNK != 0 && tile_col >= Tile::COLS) continue;
            auto value = *reinterpret_cast<Group*>(self.slab + Tile::Slab::offset(row, col));
            auto up = value;
            if constexpr (Tile::PARTS == 2) {
                up = *reinterpret_cast<Group*>(self.slab + Tile::Slab::offset(row, Tile::CHUNK + col));
            }
            visit(tile_row, tile_col, value.data, up.data);
        }
    }
}

// The epilogue on its way to the staging tile.
template <class Tile>
__device__ inline void stage_finished(const typename Tile::Accumulators& acc, const typename Tile::Epilogue& epilogue,
                                      const Work& work, const Consumer& self) {
    using Group = typename Tile::Epilogue::Group;
    for_each_group<Tile>(acc, self, [&](int row, int col, Group& value, Group& up) {
        epilogue.transform(work.m + self.row + row, work.n + col, value, up);
        const int offset = col / Tile::BOX_COLS * Tile::BOX_BYTES + col % 8 * 2 +
                           swizzled_offset<Tile::BOX_COLS * 2>(row, col % Tile::BOX_COLS / 8);
        *reinterpret_cast<uint2*>(self.staging + offset) = {narrow_pair<typename Tile::Out>(value[0], value[1]),
                                                            narrow_pair<typename Tile::Out>(value[2], value[3])};
    });
}

// Finishes a tile and starts its way to D, which TMA completes while the next tile is multiplied.
template <class Tile>
__device__ inline void finish_work(const typename Tile::Accumulators& acc, const typename Tile::Epilogue& epilogue,
                                   float alpha, const TensorMap& map, const Work& work, const Consumer& self) {
    if constexpr (Tile::kFinish == kDirect) {
        using Group = typename Tile::Epilogue::Group;
        for_each_group<Tile>(acc, self, [&](int row, int col, Group& value, Group& up) {
            epilogue.finish(work.m + self.row + row, work.n + col, value, up);
        });
    } else {
        if (self.leads()) tma_store_wait_read();  // of the tile before
        self.sync();
        if constexpr (Tile::kFinish == kPlain) stage_plain<Tile>(acc, alpha, self);
        else stage_finished<Tile>(acc, epilogue, work, self);
        fence_async_proxy();
        self.sync();
        if (self.leads()) {
#pragma unroll
            for (int col = 0; col < Tile::COLS; col += Tile::BOX_COLS) {
                const uint32_t box = shared_address(self.staging) + col / Tile::BOX_COLS * Tile::BOX_BYTES;
                tma_store(map, {work.n + col, work.m + self.row, work.batch[2], work.batch[1], work.batch[0]}, box);
            }
            tma_store_commit();
        }
    }
}

// A consumer warpgroup: its tiles, one after the other.
template <class Tile>
__device__ inline void multiply_tiles(const GemmMaps& maps, const GemmParams& params, const Schedule<Tile>& schedule,
                                      int k_blocks, float alpha, uint32_t ring, RingBarriers<Tile::STAGES> barriers,
                                      const Consumer& self) {
    constexpr int TURNS = Tile::kPingPong ? 2 : 1;
    const int first = Tile::kPingPong ? self.number : 0;
    uint32_t turn_phase = self.number ^ 1;  // the first turn of consumer 0 is its own
    RingPosition<Tile::STAGES> slot;
    slot.skip(first * k_blocks);
#pragma unroll 1
    for (int index = blockIdx.x + first * gridDim.x; index < schedule.count; index += TURNS * gridDim.x) {
        typename Tile::Accumulators acc;
        if (k_blocks == 0) {
#pragma unroll
            for (int i = 0; i < Tile::ATOMS_M * Tile::BLOCK_N / 2; ++i) acc[0][i] = 0;
        }
        if constexpr (Tile::kPingPong) self.await_turn(turn_phase);
        multiply_stages<Tile>(acc, slot, k_blocks, ring, barriers, self);
        const Work work = schedule.at(index);
        const typename Tile::Epilogue epilogue(params.call.epilogue, params.shape.epilogue, work.batch, alpha);
        finish_work<Tile>(acc, epilogue, alpha, maps.d, work, self);
        slot.skip((TURNS - 1) * k_blocks);
        turn_phase ^= 1;
    }
    if (self.leads()) tma_store_wait();
}

template <class T, class Out, int BLOCK_N, int STAGES, bool kAKMajor, bool kBKMajor, int kActivation, int kFinish,
          bool kPingPong>
__global__ void __launch_bounds__(3 * kWarpGroupSize, 1)
    gemm_sm90(const __grid_constant__ GemmMaps maps, const __grid_constant__ GemmParams params, int raster_group) {
    using Tile = HopperTile<T, Out, BLOCK_N, STAGES, kAKMajor, kBKMajor, kActivation, kFinish, kPingPong>;
    extern __shared__ __align__(1024) char shared[];
    char* finishing = shared + STAGES * Tile::STAGE_BYTES;
    const uint32_t ring = shared_address(shared);
    const RingBarriers<STAGES> barriers{shared_address(finishing) + 2 * Tile::CONSUMER_BYTES};
    const uint32_t turns = barriers.base + RingBarriers<STAGES>::BYTES;

    if (threadIdx.x == 0) {
        barrier_init(turns, 1);
        barrier_init(turns + 8, 1);
        barriers.init(kPingPong ? 1 : 2);
        prefetch_tensor_map(maps.a);
        prefetch_tensor_map(maps.b);
        if (kFinish != kDirect) prefetch_tensor_map(maps.d);
    }
    __syncthreads();

    const float alpha = float(params.call.alpha.read());
    const int k_blocks = alpha == 0 ? 0 : ceil_div(params.shape.K, Tile::BLOCK_K);  // 0: a and b are not read
    const Schedule<Tile> schedule(params.shape, raster_group);
    const int group = __shfl_sync(~0u, int(threadIdx.x) / kWarpGroupSize, 0);  // known to be uniform
    if (group == 0) {
        release_registers<40>();
        if (threadIdx.x == 0) load_tiles<Tile>(maps, params.shape, schedule, k_blocks, ring, barriers);
    } else {
        claim_registers<232>();
        const int number = group - 1, thread = threadIdx.x % kWarpGroupSize;
        char* staging = finishing + number * Tile::STAGING_BYTES;
        char* slab = finishing + 2 * Tile::STAGING_BYTES + (number * 4 + thread / kWarpSize) * Tile::SLAB_BYTES;
        const Consumer self{number, thread, kPingPong ? 0 : number * 64, staging, slab, turns};
        multiply_tiles<Tile>(maps, params, schedule, k_blocks, alpha, ring, barriers, self);
    }
}

}  // namespace rawops
