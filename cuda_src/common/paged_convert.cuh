// 8-bit keys and values: pairs of bytes to pairs of 16-bit floats, exactly, and new values to bytes.
#pragma once
#include <cuda_fp8.h>

#include "numeric.cuh"

namespace rawops {

template <class Stored> struct ByteFormat;

template <> struct ByteFormat<__nv_fp8_e4m3> {
    static __device__ uint32_t to_half(uint32_t two) {
        const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two), __NV_E4M3);
        return uint32_t(pair.x) | uint32_t(pair.y) << 16;
    }
    static __device__ uint32_t from_float(float x) { return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3); }
};

template <> struct ByteFormat<__nv_fp8_e5m2> {  // the upper half of a float16
    static __device__ uint32_t to_half(uint32_t two) { return __byte_perm(two, 0, 0x1404); }
    static __device__ uint32_t from_float(float x) { return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E5M2); }
};

template <> struct ByteFormat<signed char> {  // 0x6400 is 1024 in float16, and its last bits count ones
    static __device__ uint32_t to_half(uint32_t two) {
        const uint32_t biased = __byte_perm(two ^ 0x8080, 0x64, 0x4140);
        const __half2 pair = __hsub2(reinterpret_cast<const __half2&>(biased), __float2half2_rn(1152));
        return reinterpret_cast<const uint32_t&>(pair);
    }
    static __device__ uint32_t from_float(float x) {
        int rounded;
        asm("cvt.rni.sat.s8.f32 %0, %1;" : "=r"(rounded) : "f"(x));  // to even; NaN becomes 0
        return rounded & 0xff;
    }
};

// Two values in the lower bytes of `two`, as a pair of T.
template <class T, class Stored> __device__ inline uint32_t widen_pair(uint32_t two) {
    const uint32_t half = ByteFormat<Stored>::to_half(two & 0xffff);
    if constexpr (is_same<T, __half>) return half;
    const float2 wide = __half22float2(reinterpret_cast<const __half2&>(half));
    const __nv_bfloat162 pair = __floats2bfloat162_rn(wide.x, wide.y);
    return reinterpret_cast<const uint32_t&>(pair);
}

}  // namespace rawops
