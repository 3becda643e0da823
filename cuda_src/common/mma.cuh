// Tensor-core instructions as one atom per type, and the fragments that feed them.
//
// Every atom multiplies 16 x K by K x 8. With g = lane / 4 and t = lane % 4, both operands are read in the same
// order, as MN x K blocks of 8 rows: register 0 is (mn g, k t), 1 is (mn g + 8, k t), 2 is (mn g, k t + K/2) and
// 3 is (mn g + 8, k t + K/2), where a register of 16-bit values holds k 2t and 2t + 1. That is an A fragment as it
// stands, and two B fragments: {0, 2} for columns 0..7 and {1, 3} for columns 8..15.
// The accumulator holds (row g, columns 2t and 2t + 1) in 0 and 1, and row g + 8 in 2 and 3.
#pragma once
#include "copy.cuh"

namespace rawops {

// The upper one of two lanes that are `step` apart gives its `low` for the other's `high`.
template <class V> __device__ inline void trade(V& low, V& high, int lane, int step) {
    const bool upper = lane & step;
    const V other = __shfl_xor_sync(~0u, upper ? low : high, step);
    if (upper) low = other;
    else high = other;
}

// r[j] of lane t of each quad becomes r[t] of lane j: what they have of four accumulators' columns, all of one.
template <class V> __device__ inline void transpose_quad(V (&r)[4], int lane) {
#pragma unroll
    for (int step = 1; step <= 2; step *= 2) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if ((i & step) == 0) trade(r[i], r[i | step], lane, step);
        }
    }
}

template <class T> struct MmaAtom;

// d += a @ b, where KIND is K and the types, and RA and RD are the kinds of registers of operands and accumulators.
#define RAWOPS_MMA(KIND, RA, RD)                                                                                     \
    asm volatile("mma.sync.aligned.m16n8" KIND " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"              \
                 : "+" RD(d[0]), "+" RD(d[1]), "+" RD(d[2]), "+" RD(d[3])                                            \
                 : RA(a[0]), RA(a[1]), RA(a[2]), RA(a[3]), RA(b0), RA(b1))

template <> struct MmaAtom<__half> {
    using Register = uint32_t;
    static constexpr int K = 16;
    static __device__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        RAWOPS_MMA("k16.row.col.f32.f16.f16.f32", "r", "f");
    }
};

template <> struct MmaAtom<__nv_bfloat16> {
    using Register = uint32_t;
    static constexpr int K = 16;
    static __device__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        RAWOPS_MMA("k16.row.col.f32.bf16.bf16.f32", "r", "f");
    }
};

// float32 values rounded to TF32 (10 bits of mantissa).
template <> struct MmaAtom<float> {
    using Register = uint32_t;
    static constexpr int K = 8;
    static __device__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        RAWOPS_MMA("k8.row.col.f32.tf32.tf32.f32", "r", "f");
    }
};

template <> struct MmaAtom<double> {
    using Register = double;
    static constexpr int K = 8;
    static __device__ void multiply(double (&d)[4], const double (&a)[4], double b0, double b1) {
#if __CUDA_ARCH__ >= 900
        RAWOPS_MMA("k8.row.col.f64.f64.f64.f64", "d", "d");
#else  // 8 x 8 x 4 is the one float64 shape before sm_90
        multiply_8x8x4(d[0], d[1], a[0], b0);
        multiply_8x8x4(d[2], d[3], a[1], b0);
        multiply_8x8x4(d[0], d[1], a[2], b1);
        multiply_8x8x4(d[2], d[3], a[3], b1);
#endif
    }

private:
    static __device__ void multiply_8x8x4(double& d0, double& d1, double a, double b) {
        asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, {%0,%1};"
                     : "+d"(d0), "+d"(d1)
                     : "d"(a), "d"(b));
    }
};

// Four 8 x 8 matrices of 16-bit values (or 8 x 4 of 32-bit ones). Lane l gives the address of row l % 8 of matrix
// l / 8.
template <bool kTranspose> __device__ inline void ldmatrix(uint32_t (&r)[4], uint32_t address) {
    if constexpr (kTranspose) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(address)
                     : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(address)
                     : "memory");
    }
}

__device__ inline void load_shared(uint32_t& value, uint32_t address) {
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
}
__device__ inline void load_shared(double& value, uint32_t address) {
    asm volatile("ld.shared.f64 %0, [%1];" : "=d"(value) : "r"(address) : "memory");
}

// Rounds to the nearest TF32 value, ties away from zero, for a tensor core, which looks at the upper 19 bits only: what
// this leaves in the others is noise. Half a unit of the last place is added as a number, so infinity and NaN stay what
// they are, which an addition to the bits does not grant; cvt.rna does, with a branch's worth of predicates.
__device__ inline uint32_t round_to_tf32(uint32_t bits) {
    const float power = __uint_as_float(bits & 0xff800000);  // of two, or infinity
    return __float_as_uint(fmaf(power, 0x1p-11f, __uint_as_float(bits)));
}

// Reads fragments of 16 MN x one atom's K from a tile, for a warp whose part of the tile starts at row mn_begin
// (a multiple of the part's own power-of-two size). kPaired swaps registers 1 and 2: the two B fragments are then
// {0, 1} and {2, 3}, register pairs as the tensor core takes them, which saves the moves.
template <class T, class Tile, bool kKMajor, bool kPaired = false> struct FragmentReader {
    using Atom = MmaAtom<T>;
    using Register = typename Atom::Register;
    static constexpr bool kLdmatrix = sizeof(T) == 2 || (sizeof(T) < 8 && kKMajor);
    static_assert(sizeof(T) > 1 || kKMajor, "no instruction transposes bytes");

    int lane_offset;

    __device__ FragmentReader(int mn_begin, int lane) {
        if constexpr (kLdmatrix) {  // lane l gives row l % 8 of matrix l / 8, of 8 MN x half an atom's K
            const int mn = mn_half(lane / 8) * 8, k = k_half(lane / 8);
            lane_offset = kKMajor ? Tile::offset(mn_begin + mn + lane % 8, k * (Atom::K / 2))
                                  : Tile::offset(lane % 8 + k * 8, mn_begin + mn);
        } else if constexpr (kKMajor) {
            lane_offset = Tile::offset(mn_begin + lane / 4, lane % 4);
        } else {
            lane_offset = Tile::offset(lane % 4, mn_begin + lane / 4);
        }
    }

    __device__ void load(Register (&r)[4], uint32_t tile, int mn_step, int k_step) const {
        read(r, tile, mn_step, k_step);
        round(r);
    }

    // The two halves of load, for a caller that has work to do while shared memory answers.
    __device__ void read(Register (&r)[4], uint32_t tile, int mn_step, int k_step) const {
        if constexpr (kLdmatrix) {
            ldmatrix<!kKMajor>(r, tile + moved(mn_step * 16, k_step * Atom::K));
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int mn = mn_step * 16 + mn_half(i) * 8, k = k_step * Atom::K + k_half(i) * (Atom::K / 2);
                load_shared(r[i], tile + moved(mn, k));
            }
        }
    }

    static __device__ void round(Register (&r)[4]) {
        if constexpr (is_same<T, float>) {
#pragma unroll
            for (int i = 0; i < 4; ++i) r[i] = round_to_tf32(r[i]);
        }
    }

private:
    static constexpr __device__ int mn_half(int i) { return kPaired ? i / 2 : i % 2; }
    static constexpr __device__ int k_half(int i) { return kPaired ? i % 2 : i / 2; }

    __device__ int moved(int mn, int k) const {
        return kKMajor ? Tile::moved(lane_offset, mn, k) : Tile::moved(lane_offset, k, mn);
    }
};

}  // namespace rawops
