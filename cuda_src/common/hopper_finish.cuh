// The way of a tile of the Hopper GEMM from the accumulators to D.
#pragma once
#include "hopper_tf32.cuh"
#include "hopper_tile.cuh"

namespace rawops {

// The columns of D that a consumer stages at a time.
template <class Tile> struct Pass {
    int begin, cols;

    __device__ explicit Pass(int number)
        : begin(number * Tile::PASS_COLS), cols(min_of(Tile::PASS_COLS, Tile::SHARE - begin)) {}
};

// To the staging tile straight from the accumulators. `finish_pair` makes two neighbouring columns of D from two of the
// accumulators, and up of a gated tile, with what `terms_of` gives for them.
template <class Tile, class TermsOf, class FinishPair>
__device__ inline void stage_pairs(const typename Tile::Finished& acc, const typename Tile::Factors& factors,
                                   const Pass<Tile>& pass, const Consumer& self, TermsOf terms_of,
                                   FinishPair finish_pair) {
    const int lane = self.lane();
#pragma unroll
    for (int at = 0; at < pass.cols; at += 16) {
        const int col = pass.begin + at, chunk = at % Tile::BOX_COLS / 8 + lane / 16;
        const decltype(terms_of(0)) terms[2] = {terms_of(col + lane % 4 * 2), terms_of(col + 8 + lane % 4 * 2)};
#pragma unroll
        for (int i = 0; i < Tile::ATOMS_M; ++i) {
            uint32_t packed[4];
#pragma unroll
            for (int group = 0; group < 2; ++group) {
                const auto columns = factors.columns(0, col + group * 8);
                const auto columns_of_up = factors.columns(Tile::PARTS - 1, col + group * 8);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const auto* values = &acc[i][col / 2 + group * 4 + half * 2];
                    const auto* ups = values + (Tile::PARTS - 1) * Tile::SHARE / 2;
                    float value[2], up[2];
#pragma unroll
                    for (int k = 0; k < 2; ++k) {
                        value[k] = factors.times(values[k], i, half, columns, k);
                        up[k] = factors.times(ups[k], i, half, columns_of_up, k);
                    }
                    finish_pair(value, up, terms[group]);
                    packed[group * 2 + half] = narrow_pair<typename Tile::Out>(value[0], value[1]);
                }
            }
            const int row = i * 64 + self.warp_row() + lane % 16;
            stmatrix(shared_address(self.staging) + at / Tile::BOX_COLS * Tile::BOX_BYTES +
                         swizzled_offset<Tile::BOX_COLS * 2>(row, chunk),
                     packed);
        }
    }
}

template <class Tile>
__device__ inline void stage_plain(const typename Tile::Finished& acc, const typename Tile::Factors& factors,
                                   float alpha, const Consumer& self, const Pass<Tile>& pass = Pass<Tile>(0)) {
    using Pair = float[2];
    stage_pairs<Tile>(
        acc, factors, pass, self, [](int) { return 0; },
        [&](Pair& value, Pair&, int) {
            value[0] *= alpha;
            value[1] *= alpha;
        });
}

// The bias of the columns of a tile, the gate's and then up's: each thread of the consumer loads some before the main
// loop, which hides it, and puts them into shared memory after it.
template <class Tile, bool kPresent = Tile::kFinish == kBiased> class TileBias {
public:
    template <class Params>
    __device__ TileBias(const Params& params, const Work& work, int n, const Consumer& self) {
        using Epilogue = typename Tile::Epilogue;
        const auto epilogue = Tile::Scaling::template epilogue<Epilogue>(params, work.batch, 1, work.m_end);
#pragma unroll
        for (int i = 0; i < PER_THREAD; ++i) {
            const int col = i * kWarpGroupSize + self.thread;
            values[i] = col < COLS ? epilogue.bias(n + col % Tile::SHARE, col >= Tile::SHARE) : 0;
        }
    }

    // A barrier of the consumer must follow.
    __device__ void put(const Consumer& self) const {
#pragma unroll
        for (int i = 0; i < PER_THREAD; ++i) {
            const int col = i * kWarpGroupSize + self.thread;
            if (col < COLS) store_shared(shared_address(self.slabs) + col * 4, values[i]);
        }
    }

    // Of two neighbouring columns.
    static __device__ float2 pair(int part, int col, const Consumer& self) {
        return load_pair(shared_address(self.slabs) + (part * Tile::SHARE + col) * 4);
    }

private:
    static constexpr int COLS = Tile::SHARE * Tile::PARTS, PER_THREAD = ceil_div(COLS, kWarpGroupSize);
    float values[PER_THREAD];
};
template <class Tile> class TileBias<Tile, false> {
public:
    template <class Params> __device__ TileBias(const Params&, const Work&, int, const Consumer&) {}
    __device__ void put(const Consumer&) const {}
};

// alpha, the bias of each column, the activation.
template <class Tile>
__device__ inline void stage_biased(const typename Tile::Finished& acc, const typename Tile::Factors& factors,
                                    float alpha, const Pass<Tile>& pass, const Consumer& self) {
    using Pair = float[2];
    struct Bias {
        float2 value, up;
    };
    stage_pairs<Tile>(
        acc, factors, pass, self,
        [&](int col) {
            return Bias{TileBias<Tile>::pair(0, col, self), TileBias<Tile>::pair(Tile::PARTS - 1, col, self)};
        },
        [&](Pair& value, Pair& up, const Bias& bias) {
            value[0] = Tile::Epilogue::activated(value[0] * alpha + bias.value.x, up[0] * alpha + bias.up.x);
            value[1] = Tile::Epilogue::activated(value[1] * alpha + bias.value.y, up[1] * alpha + bias.up.y);
        });
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
                Value(factors.times(values[0], i, half, columns, 0)),
                Value(factors.times(values[1], i, half, columns, 1))};
        }
    }
}

// The same for a tile of D's transpose, whose slab has rows of D in its columns: row and col are those of D.
template <class Tile, class Visit>
__device__ inline void visit_transposed(char* slab, int begin, const Consumer& self, Visit visit) {
    using Value = typename Tile::Epilogue::Value;
    const int group = self.lane() % 4, first = TransposedRows::row(group);
    const int col = TransposedRows::col(self.warp_row() / 16, group);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = i * 8 + self.lane() / 4;
        if (begin + row >= Tile::SHARE) continue;
        typename Tile::Epilogue::Group value, up = {};
#pragma unroll
        for (int v = 0; v < 4; ++v) {
            value[v] = *reinterpret_cast<Value*>(slab + Tile::Slab::offset(first + v % 2 * 8 + v / 2, row));
        }
        visit(begin + row, col, value, up);
    }
}

// Calls visit(row, col, value, up) for groups of neighbouring columns of a pass. The loop is not unrolled: an epilogue
// is long.
template <class Tile, class Visit>
__device__ inline void for_each_group(const typename Tile::Finished& acc, const typename Tile::Factors& factors,
                                      const Pass<Tile>& pass, const Consumer& self, Visit visit) {
    using Group = Vector<typename Tile::Epilogue::Value, Tile::Epilogue::WIDTH>;
    constexpr int WIDTH = Tile::Epilogue::WIDTH, GROUPS = Tile::CHUNK / WIDTH;
    const int lane = self.lane();
    char* slab = self.template slab<Tile>();
#pragma unroll 1
    for (int chunk = 0; chunk < Tile::ATOMS_M * Tile::CHUNKS; ++chunk) {
        const int begin = chunk % Tile::CHUNKS * Tile::CHUNK;
        if (Tile::PASSES > 1 && (begin < pass.begin || begin >= pass.begin + pass.cols)) continue;
        __syncwarp();
#pragma unroll
        for (int candidate = 0; candidate < Tile::ATOMS_M * Tile::CHUNKS; ++candidate) {  // registers have no index
            if (candidate == chunk) {
                fill_slab<Tile>(acc, factors, candidate / Tile::CHUNKS, candidate % Tile::CHUNKS, slab, lane);
            }
        }
        __syncwarp();
        if constexpr (Tile::kTransposed) {
            visit_transposed<Tile>(slab, begin, self, visit);
            continue;
        }
#pragma unroll
        for (int i = 0; i < 16 * GROUPS / kWarpSize; ++i) {
            const int group = i * kWarpSize + lane, row = group / GROUPS, col = group % GROUPS * WIDTH;
            const int tile_row = chunk / Tile::CHUNKS * 64 + self.warp_row() + row, tile_col = begin + col;
            if (Tile::SHARE % Tile::CHUNK != 0 && tile_col >= Tile::SHARE) continue;
            auto value = *reinterpret_cast<Group*>(slab + Tile::Slab::offset(row, col));
            auto up = value;
            if constexpr (Tile::PARTS == 2) {
                up = *reinterpret_cast<Group*>(slab + Tile::Slab::offset(row, Tile::CHUNK + col));
            }
            visit(tile_row, tile_col, value.data, up.data);
        }
    }
}
template <class Tile, class Visit>
__device__ inline void for_each_group(const typename Tile::Finished& acc, const typename Tile::Factors& factors,
                                      const Consumer& self, Visit visit) {
#pragma unroll
    for (int pass = 0; pass < Tile::PASSES; ++pass) for_each_group<Tile>(acc, factors, Pass<Tile>(pass), self, visit);
}

// Where a column of a pass begins in the staging tile, for a row.
template <class Tile> __device__ inline int staging_offset(const Pass<Tile>& pass, int row, int col) {
    const int at = col - pass.begin;
    return at / Tile::BOX_COLS * Tile::BOX_BYTES + at % 8 * 2 +
           swizzled_offset<Tile::BOX_COLS * 2>(row, at % Tile::BOX_COLS / 8);
}

// The epilogue on its way to the staging tile.
template <class Tile>
__device__ inline void stage_finished(const typename Tile::Finished& acc, const typename Tile::Factors& factors,
                                      const typename Tile::Epilogue& epilogue, const Work& work,
                                      const Pass<Tile>& pass, const Consumer& self) {
    using Group = typename Tile::Epilogue::Group;
    for_each_group<Tile>(acc, factors, pass, self, [&](int row, int col, Group& value, Group& up) {
        epilogue.transform(work.m + self.row + row, work.n + col, value, up);
        *reinterpret_cast<uint2*>(self.staging + staging_offset<Tile>(pass, row, col)) = {
            narrow_pair<typename Tile::Out>(value[0], value[1]), narrow_pair<typename Tile::Out>(value[2], value[3])};
    });
}

// Writes the first `rows` rows of the staging tile: TMA would write those of the next group, too.
template <class Tile>
__device__ inline void store_rows(const typename Tile::Epilogue& epilogue, const Work& work, int rows,
                                  const Pass<Tile>& pass, const Consumer& self) {
    const int chunks = pass.cols / 8;  // of 16 bytes
    for (int chunk = self.thread; chunk < rows * chunks; chunk += kWarpGroupSize) {
        const int row = chunk / chunks, col = pass.begin + chunk % chunks * 8;
        if (work.n + col < epilogue.cols()) {
            *reinterpret_cast<uint4*>(epilogue.place(work.m + self.row + row, work.n + col)) =
                *reinterpret_cast<const uint4*>(self.staging + staging_offset<Tile>(pass, row, col));
        }
    }
}

// Starts the way of the staging tile to D, which TMA completes while the next tile is multiplied. By one thread.
template <class Tile>
__device__ inline void store_staged(const TensorMap& map, const Work& work, const Pass<Tile>& pass,
                                    const Consumer& self) {
    const int group = Tile::kGrouped ? 0 : work.batch[2];  // the groups share one D
#pragma unroll
    for (int col = 0; col < pass.cols; col += Tile::BOX_COLS) {
        if (Tile::kSpreads && col >= work.boxes * kBox) break;
        const uint32_t box = shared_address(self.staging) + col / Tile::BOX_COLS * Tile::BOX_BYTES;
        tma_store(map, {work.n + pass.begin + col, work.m + self.row, group, work.batch[1], work.batch[0]}, box);
    }
    tma_store_commit();
}

// Writes alpha times the accumulators, float32, where they are all of D: lanes fill sectors of 32 bytes.
template <class Tile>
__device__ inline void write_plain(const typename Tile::Finished& acc, const typename Tile::Epilogue& epilogue,
                                   float alpha, const Work& work, const Consumer& self) {
    const int lane = self.lane(), cols = epilogue.cols();
    auto write = [&](float* to, int left, float first, float second) {
        if (left > 1) *reinterpret_cast<float2*>(to) = {first * alpha, second * alpha};
        else if (left == 1) *to = first * alpha;
    };
    if constexpr (Tile::kTransposed) {
        const int n = work.m + self.row + TransposedRows::pair(self.warp_row() / 16, lane), m = work.n + lane % 4 * 2;
#pragma unroll
        for (int group = 0; group < Tile::SHARE / 8; ++group) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float* values = &acc[0][group * 4 + i];
                const int row = m + group * 8 + i;
                if (epilogue.has_row(row)) write(epilogue.place(row, n), cols - n, values[0], values[2]);
            }
        }
    } else {
        const int m = work.m + self.row + self.warp_row() + lane / 4, n = work.n + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < Tile::ATOMS_M * 2; ++i) {
            const int row = m + i / 2 * 64 + i % 2 * 8;
            if (!epilogue.has_row(row)) continue;
            float* to = epilogue.place(row, n);
            auto write_row = [&](int left) {
#pragma unroll
                for (int group = 0; group < Tile::SHARE / 8; ++group) {
                    const float* values = &acc[i / 2][group * 4 + i % 2 * 2];
                    write(to + group * 8, left - group * 8, values[0], values[1]);
                }
            };
            if (work.n + Tile::SHARE <= cols) write_row(Tile::SHARE);  // a constant, so that it is nothing but stores
            else write_row(cols - n);
        }
    }
}

// Writes sums as they lie in registers: 16 rows x 8 columns are 512 bytes, four numbers of one lane after those of the
// one before. Whole lines take an SM half as long as sectors of eight rows. Where they go is found before the main
// loop, since parameters take a while to arrive; the shuffles keep the compiler from putting that off.
template <class Tile, bool kPresent = Tile::kFinish == kPartial> class SumsOut {
public:
    template <class Params> __device__ SumsOut(const Params& params, const Work& work, int n, const Consumer& self) {
        static_assert(Tile::ATOMS_M == 1, "a warp has 16 rows");
        const typename Tile::Epilogue epilogue(params.call.epilogue, params.shape.epilogue, work.batch, 1);
        const int row = work.m + self.row + self.warp_row();
        const uint64_t place = reinterpret_cast<uint64_t>(epilogue.place(row, n));  // columns are 16 numbers apart
        to = reinterpret_cast<float4*>(__shfl_sync(~0u, place, 0)) + self.lane();
        __builtin_assume(__isGlobal(to));
        groups = __shfl_sync(~0u, epilogue.has_row(row) ? ceil_div(epilogue.cols() - n, 8) : 0, 0);
    }

    __device__ void write(const typename Tile::Finished& sum) const {
#pragma unroll
        for (int group = 0; group < Tile::SHARE / 8; ++group) {
            const float* values = &sum[0][group * 4];
            if (group < groups) to[group * kWarpSize] = {values[0], values[1], values[2], values[3]};
        }
    }

private:
    float4* to;
    int groups;  // of eight columns
};
template <class Tile> class SumsOut<Tile, false> {
public:
    template <class Params> __device__ SumsOut(const Params&, const Work&, int, const Consumer&) {}
    __device__ void write(const typename Tile::Finished&) const {}
};

// Finishes a tile.
template <class Tile>
__device__ inline void finish_work(const typename Tile::Finished& acc, const typename Tile::Factors& factors,
                                   const typename Tile::Epilogue& epilogue, float alpha, const TileBias<Tile>& bias,
                                   const TensorMap& map, const Work& work, const Consumer& self) {
    if constexpr (Tile::kFinish == kDirect) {
        constexpr bool kMayBePlain = is_same<typename Tile::Out, float> && is_same<typename Tile::Value, float> &&
                                     is_same<typename Tile::Scaling, NoScaling> && Tile::PARTS == 1;
        if constexpr (kMayBePlain) {
            if (epilogue.is_plain()) return write_plain<Tile>(acc, epilogue, alpha, work, self);
        }
        using Group = typename Tile::Epilogue::Group;
        for_each_group<Tile>(acc, factors, self, [&](int row, int col, Group& value, Group& up) {
            if constexpr (Tile::kTransposed) epilogue.finish(work.n + row, work.m + self.row + col, value, up);
            else epilogue.finish(work.m + self.row + row, work.n + col, value, up);
        });
        return;
    }
    bias.put(self);
#pragma unroll
    for (int number = 0; number < Tile::PASSES; ++number) {
        const Pass<Tile> pass(number);
        if (self.leads()) tma_store_wait_read();  // of the pass before
        self.sync();
        if constexpr (Tile::kFinish == kPlain) stage_plain<Tile>(acc, factors, alpha, self, pass);
        if constexpr (Tile::kFinish == kBiased) stage_biased<Tile>(acc, factors, alpha, pass, self);
        if constexpr (Tile::kFinish == kStaged) stage_finished<Tile>(acc, factors, epilogue, work, pass, self);
        fence_async_proxy();
        self.sync();
        const int rows = work.m_end - work.m - self.row;
        if (Tile::kGrouped && rows < Tile::ROWS) {
            store_rows<Tile>(epilogue, work, rows, pass, self);
        } else if (self.leads()) {
            store_staged<Tile>(map, work, pass, self);
        }
    }
}

}  // namespace rawops
