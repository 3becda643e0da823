// 8-bit keys and values: bytes to pairs of 16-bit floats, exactly, and new values to bytes.
#pragma once
#include <cuda_fp8.h>

#include "numeric.cuh"

namespace rawops {

// to_half: two pairs of float16, of bytes 0 and 1 and bytes 2 and 3, or with kAlternate of 0 and 2 and of 1 and 3.
template <class Stored> struct ByteFormat;

template <> struct ByteFormat<__nv_fp8_e4m3> {
    template <bool kAlternate> static __device__ void to_half(uint32_t (&pair)[2], uint32_t word) {
        const uint32_t ordered = kAlternate ? __byte_perm(word, 0, 0x3120) : word;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const auto two = static_cast<__nv_fp8x2_storage_t>(ordered >> i * 16);
            const __half2_raw half = __nv_cvt_fp8x2_to_halfraw2(two, __NV_E4M3);
            pair[i] = uint32_t(half.x) | uint32_t(half.y) << 16;
        }
    }
    static __device__ uint32_t from_float(float x) { return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3); }
};

template <> struct ByteFormat<__nv_fp8_e5m2> {  // the upper half of a float16
    template <bool kAlternate> static __device__ void to_half(uint32_t (&pair)[2], uint32_t word) {
        pair[0] = __byte_perm(word, 0, kAlternate ? 0x2404 : 0x1404);
        pair[1] = __byte_perm(word, 0, kAlternate ? 0x3414 : 0x3424);
    }
    static __device__ uint32_t from_float(float x) { return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E5M2); }
};

template <> struct ByteFormat<signed char> {  // 0x6400 is 1024 in float16, and its last bits count ones
    template <bool kAlternate> static __device__ void to_half(uint32_t (&pair)[2], uint32_t word) {
        word ^= 0x80808080;
        pair[0] = less_1152(__byte_perm(word, 0x64, kAlternate ? 0x4240 : 0x4140));
        pair[1] = less_1152(__byte_perm(word, 0x64, kAlternate ? 0x4341 : 0x4342));
    }
    static __device__ uint32_t less_1152(uint32_t biased) {
        const __half2 pair = __hsub2(reinterpret_cast<const __half2&>(biased), __float2half2_rn(1152));
        return reinterpret_cast<const uint32_t&>(pair);
    }
    static __device__ uint32_t from_float(float x) {
        int rounded;
        asm("cvt.rni.sat.s8.f32 %0, %1;" : "=r"(rounded) : "f"(x));  // to even; NaN becomes 0
        return rounded & 0xff;
    }
};

// The four bytes of a word as two pairs of T.
template <class T, class Stored, bool kAlternate>
__device__ inline void widen_word(uint32_t (&pair)[2], uint32_t word) {
    ByteFormat<Stored>::template to_half<kAlternate>(pair, word);
    if constexpr (!is_same<T, __half>) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float2 wide = __half22float2(reinterpret_cast<const __half2&>(pair[i]));
            const __nv_bfloat162 narrow = __floats2bfloat162_rn(wide.x, wide.y);
            pair[i] = reinterpret_cast<const uint32_t&>(narrow);
        }
    }
}

}  // namespace rawops
