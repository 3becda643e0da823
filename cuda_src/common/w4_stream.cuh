// A few tokens times packed 4-bit weights, K contiguous, a scale for each 128: what the kernels that stream the weights
// do with them in registers, and how the sums of a block become D.
//
// A lane has 32 neighbours along K of four columns, and the same 32 of its tokens. The order of K in a product is free
// as long as both operands share it, so that this makes its fragments of the MMA without an exchange.
#pragma once
#include "dequant.cuh"
#include "w4_problem.cuh"

namespace rawops {

template <class T_, class Scale_, int kFormat_, bool kHasZeros_, int TOKENS_, bool kGated_> struct StreamTile {
    using T = T_;
    using Scale = Scale_;
    using Weights = SmallWeights<T, kFormat_>;
    static constexpr int kFormat = kFormat_;
    using Offsets = typename Weights::Offsets[4];  // of a lane's columns
    static constexpr int TOKENS = TOKENS_, ATOMS = TOKENS / 8;
    static constexpr bool kHasZeros = kHasZeros_, kGated = kGated_;
    static constexpr int GROUP = 128, UNIT = 32, PARTS = kGated ? 2 : 1, COLS = UNIT / PARTS;  // of K, of b, of D
    static constexpr int COLUMNS = 4 / PARTS;  // of a lane, neighbours of a part
    using Accumulators = float[2][ATOMS][4];  // of 16 columns x 8 tokens
    static_assert(TOKENS % 8 == 0, "whole atoms");
};

// sum += tokens @ (q - zero), a group. load_tokens(to, q, atom): eight of the lane's 32 along K, in the pairs that the
// weights come out in.
template <class Tile, class LoadTokens>
__device__ inline void multiply_group(typename Tile::Accumulators& sum, const uint32_t (&words)[4][4],
                                      const typename Tile::Offsets& offsets, LoadTokens load_tokens) {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
        uint32_t b[Tile::ATOMS][4];
#pragma unroll
        for (int atom = 0; atom < Tile::ATOMS; ++atom) load_tokens(b[atom], q, atom);
#pragma unroll
        for (int step = 0; step < 2; ++step) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                uint32_t a[4];  // 16 columns x 16 of K
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int column = half * 2 + i % 2;
                    a[i] = Tile::Weights::pair_apart(words[column][q], step * 2 + i / 2, offsets[column]);
                }
#pragma unroll
                for (int atom = 0; atom < Tile::ATOMS; ++atom) {
                    MmaAtom<typename Tile::T>::multiply(sum[half][atom], a, b[atom][step * 2], b[atom][step * 2 + 1]);
                }
            }
        }
    }
}

// acc += scale * sum, for the lane's i-th column.
template <class Tile>
__device__ inline void add_scaled(typename Tile::Accumulators& acc, const typename Tile::Accumulators& sum, int i,
                                  float scale) {
#pragma unroll
    for (int j = 0; j < Tile::ATOMS * 2; ++j) {
        float& to = acc[i / 2][j / 2][i % 2 * 2 + j % 2];
        to = fmaf(scale, sum[i / 2][j / 2][i % 2 * 2 + j % 2], to);
    }
}

// The sums of a block: for each slice of K, TOKENS rows of the columns of all units, and a few floats between rows, so
// that lanes write to different banks. The gates of all units come before all of up.
template <class Tile> struct StreamSums {
    static constexpr int GAP = 4;
    float* sums;
    int slices, units;

    // The number of a lane's i-th column.
    __device__ int column(int unit, int lane, int i) const {
        const int part = i / Tile::COLUMNS;
        return (part * units + unit) * Tile::COLS + lane / 4 * Tile::COLUMNS + i % Tile::COLUMNS;
    }

    __device__ void leave(const typename Tile::Accumulators& acc, int slice, int unit, int lane, int rows) const {
#pragma unroll
        for (int j = 0; j < Tile::ATOMS * 2; ++j) {
            const int token = j / 2 * 8 + lane % 4 * 2 + j % 2;
            if (token >= rows) continue;
#pragma unroll
            for (int first = 0; first < 4; first += Tile::COLUMNS) {
                Vector<float, Tile::COLUMNS> values;
#pragma unroll
                for (int i = first; i < first + Tile::COLUMNS; ++i) {
                    values.data[i - first] = acc[i / 2][j / 2][i % 2 * 2 + j % 2] * Tile::Weights::kFactor;
                }
                *reinterpret_cast<decltype(values)*>(place(slice, token, column(unit, lane, first))) = values;
            }
        }
    }

    // By `threads` threads, after a barrier.
    template <class Epilogue>
    __device__ void finish(const Epilogue& epilogue, int rows, int thread, int threads) const {
        const int cols = units * Tile::COLS, n = blockIdx.x * cols;
#pragma unroll 1
        for (int piece = thread; piece < rows * (cols / 4); piece += threads) {
            const int token = piece / (cols / 4), col = piece % (cols / 4) * 4;
            auto value = total(token, col), up = value;
            if constexpr (Tile::kGated) up = total(token, cols + col);
            epilogue.finish(token, n + col, value.data, up.data);
        }
    }

private:
    __device__ float* place(int slice, int token, int column) const {
        return sums + (slice * Tile::TOKENS + token) * (units * Tile::UNIT + GAP) + column;
    }

    // Of four neighbouring columns.
    __device__ Vector<float, 4> total(int token, int column) const {
        Vector<float, 4> total = {};
#pragma unroll 4
        for (int slice = 0; slice < slices; ++slice) {
            const auto part = *reinterpret_cast<const Vector<float, 4>*>(place(slice, token, column));
#pragma unroll
            for (int i = 0; i < 4; ++i) total.data[i] += part.data[i];
        }
        return total;
    }
};

}  // namespace rawops
