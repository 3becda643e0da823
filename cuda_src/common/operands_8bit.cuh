// Operands of 8 bits: what a kernel's template takes for their types, and the tensor-core instructions on them.
//
// A register of a fragment holds four neighbours along K, otherwise it is that of a 16-bit type: see mma.cuh.
#pragma once
#include <cuda_fp8.h>

#include "mma.cuh"

namespace rawops {

// An element of a product of A, the type of a, and B, that of b.
template <class A_, class B_> struct Bytes {
    using A = A_;
    using B = B_;
    unsigned char bits;
};
using Int8 = Bytes<signed char, signed char>;

// int8 accumulates in int32, which wraps past 2^31, and float8 in float32.
template <> struct AccumulatorOf<int> { using Type = int; };
template <> struct AccumulatorOf<Int8> { using Type = int; };

template <> struct MmaAtom<Int8> {
    using Register = uint32_t;
    static constexpr int K = 32;
    static __device__ void multiply(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        RAWOPS_MMA("k32.row.col.s32.s8.s8.s32", "r", "r");
    }
};

// Four float8 numbers as float16, which holds them all: the first two, then the others.
template <class T> __device__ inline void widen_to_half(uint32_t (&pairs)[2], uint32_t four) {
    const uint32_t high = __byte_perm(four, 0, 0x1404), low = __byte_perm(four, 0, 0x3424);  // in the upper bytes
    const uint32_t placed[2] = {high, low};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if constexpr (is_same<T, __nv_fp8_e5m2>) {
            pairs[i] = placed[i];  // the upper half of a float16
        } else {
            const uint32_t magnitude = placed[i] >> 1 & 0x3f803f80;
            __half2 scaled = __hmul2(*reinterpret_cast<const __half2*>(&magnitude), __float2half2_rn(256));
            const uint32_t is_nan = (magnitude + 0x00800080) & 0x40004000;  // all seven bits are set
            pairs[i] = *reinterpret_cast<uint32_t*>(&scaled) | (placed[i] & 0x80008000) | (is_nan | is_nan >> 1);
        }
    }
}

template <class A, class B> struct MmaAtom<Bytes<A, B>> {
    using Register = uint32_t;
    static constexpr int K = 32;
    static __device__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200  // others convert, too, and less well
        constexpr bool kWideA = is_same<A, __nv_fp8_e5m2>, kWideB = is_same<B, __nv_fp8_e5m2>;
        if constexpr (kWideA && kWideB) RAWOPS_MMA("k32.row.col.f32.e5m2.e5m2.f32", "r", "f");
        else if constexpr (kWideA) RAWOPS_MMA("k32.row.col.f32.e5m2.e4m3.f32", "r", "f");
        else if constexpr (kWideB) RAWOPS_MMA("k32.row.col.f32.e4m3.e5m2.f32", "r", "f");
        else RAWOPS_MMA("k32.row.col.f32.e4m3.e4m3.f32", "r", "f");
#else  // two products of float16: the order of K is free as long as both operands share it
        uint32_t wide_a[4][2], wide_b0[2], wide_b1[2];
#pragma unroll
        for (int i = 0; i < 4; ++i) widen_to_half<A>(wide_a[i], a[i]);
        widen_to_half<B>(wide_b0, b0);
        widen_to_half<B>(wide_b1, b1);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint32_t rows[4] = {wide_a[2 * half][0], wide_a[2 * half + 1][0], wide_a[2 * half][1],
                                      wide_a[2 * half + 1][1]};
            const uint32_t(&cols)[2] = half == 0 ? wide_b0 : wide_b1;
            MmaAtom<__half>::multiply(d, rows, cols[0], cols[1]);
        }
#endif
    }
};

}  // namespace rawops
