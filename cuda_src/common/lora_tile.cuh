// The rank-r part of x @ c + scaling * (x @ a) @ b, as two pieces round the K loop of a tile: x @ a while it runs,
// and the product with b on its accumulators afterwards. In between, y = x @ a is a float32 tile in shared memory.
#pragma once
#include "mma_tile.cuh"
#include "split_tf32.cuh"

namespace rawops {

// The low-rank part as _lora_product.py packs it.
struct LoraOperands {
    const void *a, *b;  // (K, rank) and (rank, N), strides in elements
    const float* y;     // x @ a where another kernel has made it: (batches * M, rank), rows on 16-byte boundaries
    int64_t a_row, a_col, b_row, b_col, y_row;
    int rank;
    float scaling;
};

// The columns of lora_a that ride along the K loop: a narrow tile in every stage, and its product with x in registers
// of its own. The warps side by side along N see the same rows of x, so they share out the columns, 8 at least.
template <class Tile, int RANK, bool kKMajor, int ACCESS> struct LoraRider {
    using T = typename Tile::T;
    using Loader = OperandLoader<T, RANK, Tile::BLOCK_K, kKMajor, ACCESS, Tile::THREADS>;
    using Reader = FragmentReader<T, typename Loader::Tile, kKMajor>;
    using TileY = SharedTile<float, Tile::BLOCK_M, RANK>;
    static constexpr int BYTES = Loader::Tile::BYTES;
    static constexpr int ATOMS = max_of(RANK / 8 / Tile::WARPS_N, 1);  // of a warp, side by side
    static constexpr int WARPS = RANK / 8 / ATOMS;                     // along N, that have any

    Loader loader;
    Reader reader;
    int warp_n;
    float acc[Tile::ATOMS_M][ATOMS][4] = {};

    __device__ LoraRider(const LoraOperands& lora, int k_begin, int thread)
        : loader(static_cast<const T*>(lora.a), lora.a_col, lora.a_row, 0, lora.rank, k_begin, 0, thread),
          reader(thread / kWarpSize % Tile::WARPS_N % WARPS * ATOMS / 2 * 16, thread % kWarpSize),
          warp_n(thread / kWarpSize % Tile::WARPS_N) {}

    __device__ void fetch(uint32_t tile, int k_count) { loader.fetch(tile, k_count); }
    __device__ void store(uint32_t tile) const { loader.store(tile); }

    template <class Fragments> __device__ void multiply(uint32_t tile, int k_step, const Fragments& x) {
        if (WARPS < Tile::WARPS_N && warp_n >= WARPS) return;
#pragma unroll
        for (int j = 0; j < ATOMS; j += 2) {
            uint32_t a[4];
            reader.load(a, tile, j / 2, k_step);
            if (ATOMS == 1 && warp_n % 2 != 0) {  // the reader gives 16 columns, of which this warp has the second 8
                a[0] = a[1];
                a[2] = a[3];
            }
#pragma unroll
            for (int i = 0; i < Tile::ATOMS_M; ++i) {
                Tile::Atom::multiply(acc[i][j], x[i], a[0], a[2]);
                if constexpr (ATOMS > 1) Tile::Atom::multiply(acc[i][j + 1], x[i], a[1], a[3]);
            }
        }
    }

    // Writes x @ a where RankProduct reads it.
    __device__ void store_product(char* tile_y, int thread) const {
        if (WARPS < Tile::WARPS_N && warp_n >= WARPS) return;
        const int warp_m = thread / kWarpSize / Tile::WARPS_N, lane = thread % kWarpSize;
        const int first = TileY::offset(warp_m * Tile::WARP_M + lane / 4, warp_n * ATOMS * 8 + lane % 4 * 2);
#pragma unroll
        for (int i = 0; i < Tile::ATOMS_M; ++i) {
#pragma unroll
            for (int j = 0; j < ATOMS; ++j) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int offset = TileY::moved(first, i * 16 + half * 8, j * 8);
                    *reinterpret_cast<Vector<float, 2>*>(tile_y + offset) = {acc[i][j][half * 2],
                                                                             acc[i][j][half * 2 + 1]};
                }
            }
        }
    }
};

// The product of y with the columns of lora_b that belong to a tile, RANK ranks at a time through shared memory.
// Gate and up columns interleave as in the tile of c.
template <class Tile, int RANK, bool kKMajor, int ACCESS> struct RankProduct {
    using T = typename Tile::T;
    using LoaderY = OperandLoader<float, Tile::BLOCK_M, RANK, true, 16, Tile::THREADS>;
    using LoaderB = OperandLoader<T, Tile::BLOCK_N, 16, kKMajor, ACCESS, Tile::THREADS, Tile::GATE>;
    using TileY = typename LoaderY::Tile;
    using TileB = typename LoaderB::Tile;
    static constexpr int B_BYTES = RANK / 16 * TileB::BYTES;  // 16 ranks a tile: more need more registers on the way
    static_assert(Tile::ATOMS_N % 4 == 0, "one ldmatrix reads b for four atoms");

    // Both start the copy of the ranks from `begin` on; a later commit and wait complete it.
    static __device__ void fetch_b(const LoraOperands& lora, int begin, int n_begin, int cols, uint32_t tile,
                                   int thread) {
        LoaderB loader(static_cast<const T*>(lora.b), lora.b_col, lora.b_row, n_begin, cols, begin, cols * lora.b_col,
                       thread);
#pragma unroll 1
        for (int rank = 0; rank < RANK; rank += 16, tile += TileB::BYTES) {
            loader.fetch(tile, lora.rank - begin - rank);
            loader.store(tile);
        }
    }
    static __device__ void fetch_y(const LoraOperands& lora, int begin, int64_t first_row, int rows, uint32_t tile,
                                   int thread) {
        LoaderY loader(lora.y + first_row * lora.y_row, lora.y_row, 1, 0, rows, begin, 0, thread);
        loader.fetch(tile, lora.rank - begin);
    }

    // acc += scaling * y @ b for the ranks in the tiles, of which `ranks` exist.
    //
    // It runs on TF32 atoms: b fits TF32 exactly, and y goes in as the sum of two TF32 values, to 22 bits. The order
    // of the ranks within an atom is free as long as both operands share it: here ranks 2t and 2t + 1 take the places
    // t and t + 4, which is how ldmatrix pairs the values of b.
    static __device__ void add(typename Tile::Accumulators& acc, uint32_t tile_y, uint32_t tile_b, int ranks,
                               float scaling, int thread) {
        const int warp = thread / kWarpSize, lane = thread % kWarpSize;
        const int lane_y = TileY::offset(warp / Tile::WARPS_N * Tile::WARP_M + lane / 4, lane % 4 * 2);
        const int n = warp % Tile::WARPS_N * Tile::WARP_N;
        const int lane_b = kKMajor ? TileB::offset(n + lane, 0) : TileB::offset(lane % 8, n + lane / 8 * 8);
        const int k_steps = ceil_div(min_of(ranks, RANK), 8);
#pragma unroll 1  // registers would not do for more
        for (int k_step = 0; k_step < k_steps; ++k_step) {
            // What stands for ranks that there are not is 0 times what x or the scaling has of infinities.
            const int left = ranks - k_step * 8 - lane % 4 * 2;
            float b[Tile::ATOMS_N][2];
#pragma unroll
            for (int j = 0; j < Tile::ATOMS_N; j += 4) {
                uint32_t pairs[4];
                const int rank = k_step % 2 * 8;
                ldmatrix<!kKMajor>(pairs, tile_b + k_step / 2 * TileB::BYTES +
                                              (kKMajor ? TileB::moved(lane_b, j * 8, rank)
                                                       : TileB::moved(lane_b, rank, j * 8)));
#pragma unroll
                for (int part = 0; part < 4; ++part) {
                    const T* pair = reinterpret_cast<const T*>(&pairs[part]);
                    b[j + part][0] = widen(pair[0]);
                    b[j + part][1] = widen(pair[1]);
                }
            }
#pragma unroll
            for (int i = 0; i < Tile::ATOMS_M; ++i) {
                uint32_t high[4], low[4];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float2 y = load_pair(tile_y + TileY::moved(lane_y, i * 16 + half * 8, k_step * 8));
                    split_tf32(high[half], low[half], left > 0 ? scaling * y.x : 0);
                    split_tf32(high[half + 2], low[half + 2], left > 1 ? scaling * y.y : 0);
                }
#pragma unroll
                for (int j = 0; j < Tile::ATOMS_N; ++j) {
                    multiply_split(acc[i][j], high, low, b[j][0], b[j][1]);
                }
            }
        }
    }

private:
    static __device__ float2 load_pair(uint32_t address) {
        float2 pair;
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(address) : "memory");
        return pair;
    }
};

}  // namespace rawops
