// The way of a tile of the Hopper GEMM from the accumulators to D.
#pragma once
#include "hopper_tile.cuh"

namespace rawops {

// To the staging tile straight from the accumulators.
template <class Tile>
__device__ inline void stage_plain(const typename Tile::Finished& acc, const typename Tile::Factors& factors,
                                   float alpha, const Consumer& self) {
    const int lane = self.lane();
#pragma unroll
    for (int i = 0; i < Tile::ATOMS_M; ++i) {
        const int row = i * 64 + self.warp_row() + lane % 16;
#pragma unroll
        for (int col = 0; col < Tile::SHARE; col += 16) {
            uint32_t packed[4];
#pragma unroll
            for (int group = 0; group < 2; ++group) {
                const auto columns = factors.columns(0, col + group * 8);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const auto* values = &acc[i][col / 2 + group * 4 + half * 2];
                    const float low = factors.times(values[0], i, half, columns, 0);
                    const float high = factors.times(values[1], i, half, columns, 1);
                    packed[group * 2 + half] = narrow_pair<typename Tile::Out>(low * alpha, high * alpha);
                }
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
__device__ inline void fill_slab(const typename Tile::Finished& acc, const typename Tile::Factors& factors, int i,
                                 int chunk, char* slab, int lane) {
    using Value = typename Tile::Epilogue::Value;
#pragma unroll
    for (int col = 0; col < Tile::Slab::COLS; col += 8) {
        const int part = col / Tile::CHUNK, source = chunk * Tile::CHUNK + col % Tile::CHUNK;
        if (source >= Tile::SHARE) continue;
        const auto columns = factors.columns(part, source);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const auto* values = &acc[i][(part * Tile::SHARE + source) / 2 + half * 2];
            const int offset = Tile::Slab::offset(lane / 4 + half * 8, col + lane % 4 * 2);
            *reinterpret_cast<Vector<Value, 2>*>(slab + offset) = {
                Value(factors.times(values[0], i, half, columns, 0)), Value(factors.times(values[1], i, half, columns, 1))};
        }
    }
}

// Calls visit(row, col, value, up) for groups of neighbouring columns. The loop is not unrolled: an epilogue is long.
template <class Tile, class Visit>
__device__ inline void for_each_group(const typename Tile::Finished& acc, const typename Tile::Factors& factors,
                                      const Consumer& self, Visit visit) {
    using Group = Vector<typename Tile::Epilogue::Value, Tile::Epilogue::WIDTH>;
    constexpr int WIDTH = Tile::Epilogue::WIDTH, GROUPS = Tile::CHUNK / WIDTH;
    const int lane = self.lane();
#pragma unroll 1
    for (int chunk = 0; chunk < Tile::ATOMS_M * Tile::CHUNKS; ++chunk) {
        __syncwarp();
#pragma unroll
        for (int candidate = 0; candidate < Tile::ATOMS_M * Tile::CHUNKS; ++candidate) {  // registers have no index
            if (candidate == chunk) {
                fill_slab<Tile>(acc, factors, candidate / Tile::CHUNKS, candidate % Tile::CHUNKS, self.slab, lane);
            }
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 16 * GROUPS / kWarpSize; ++i) {
            const int group = i * kWarpSize + lane, row = group / GROUPS, col = group % GROUPS * WIDTH;
            const int tile_row = chunk / Tile::CHUNKS * 64 + self.warp_row() + row;
            const int tile_col = chunk % Tile::CHUNKS * Tile::CHUNK + col;
            if (Tile::SHARE % Tile::CHUNK != 0 && tile_col >= Tile::SHARE) continue;
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
__device__ inline void stage_finished(const typename Tile::Finished& acc, const typename Tile::Factors& factors,
                                      const typename Tile::Epilogue& epilogue, const Work& work,
                                      const Consumer& self) {
    using Group = typename Tile::Epilogue::Group;
    for_each_group<Tile>(acc, factors, self, [&](int row, int col, Group& value, Group& up) {
        epilogue.transform(work.m + self.row + row, work.n + col, value, up);
        const int offset = col / Tile::BOX_COLS * Tile::BOX_BYTES + col % 8 * 2 +
                           swizzled_offset<Tile::BOX_COLS * 2>(row, col % Tile::BOX_COLS / 8);
        *reinterpret_cast<uint2*>(self.staging + offset) = {narrow_pair<typename Tile::Out>(value[0], value[1]),
                                                            narrow_pair<typename Tile::Out>(value[2], value[3])};
    });
}

// Writes the first `rows` rows of the staging tile: TMA would write those of the next group, too.
template <class Tile>
__device__ inline void store_rows(const typename Tile::Epilogue& epilogue, const Work& work, int rows, int cols,
                                  const Consumer& self) {
    constexpr int CHUNKS = Tile::SHARE / 8;  // of 16 bytes
    for (int chunk = self.thread; chunk < rows * CHUNKS; chunk += kWarpGroupSize) {
        const int row = chunk / CHUNKS, col = chunk % CHUNKS * 8;
        const int offset = col / Tile::BOX_COLS * Tile::BOX_BYTES +
                           swizzled_offset<Tile::BOX_COLS * 2>(row, col % Tile::BOX_COLS / 8);
        if (col < cols) {
            *reinterpret_cast<uint4*>(epilogue.place(work.m + self.row + row, work.n + col)) =
                *reinterpret_cast<const uint4*>(self.staging + offset);
        }
    }
}

// Finishes a tile and starts its way to D, which TMA completes while the next tile is multiplied.
template <class Tile>
__device__ inline void finish_work(const typename Tile::Finished& acc, const typename Tile::Factors& factors,
                                   const typename Tile::Epilogue& epilogue, float alpha, const TensorMap& map,
                                   const Work& work, const Consumer& self) {
    if constexpr (Tile::kFinish == kDirect) {
        using Group = typename Tile::Epilogue::Group;
        for_each_group<Tile>(acc, factors, self, [&](int row, int col, Group& value, Group& up) {
            epilogue.finish(work.m + self.row + row, work.n + col, value, up);
        });
    } else {
        if (self.leads()) tma_store_wait_read();  // of the tile before
        self.sync();
        if constexpr (Tile::kFinish == kPlain) stage_plain<Tile>(acc, factors, alpha, self);
        else stage_finished<Tile>(acc, factors, epilogue, work, self);
        fence_async_proxy();
        self.sync();
        if constexpr (Tile::kGrouped) {
            const int rows = work.m_end - work.m - self.row;
            if (rows < Tile::ROWS) return store_rows<Tile>(epilogue, work, rows, epilogue.cols() - work.n, self);
        }
        if (self.leads()) {
            const int group = Tile::kGrouped ? 0 : work.batch[2];  // the groups share one D
#pragma unroll
            for (int col = 0; col < Tile::SHARE; col += Tile::BOX_COLS) {
                const uint32_t box = shared_address(self.staging) + col / Tile::BOX_COLS * Tile::BOX_BYTES;
                tma_store(map, {work.n + col, work.m + self.row, group, work.batch[1], work.batch[0]}, box);
            }
            tma_store_commit();
        }
    }
}

}  // namespace rawops
