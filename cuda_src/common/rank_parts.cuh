// A float32 factor on tensor cores of 16 bits: a sum of values of the other factor's type, each multiplied on its own.
#pragma once
#include "numeric.cuh"

namespace rawops {

// Cuts the first 8 bits off y, a value of bfloat16 as a float has it; y keeps the rest, which is exact.
__device__ inline uint32_t cut_bfloat16(float& y) {
    const uint32_t bits = __float_as_uint(y) & 0xffff0000;
    const float taken = __uint_as_float(bits);
    y = y == taken ? 0 : y - taken;
    return bits;
}

// y of a thread's two rows as sums of COUNT values of T, in the order in which an atom takes them, times `scale`.
template <class T> struct RankParts;

template <> struct RankParts<__nv_bfloat16> {
    static constexpr int COUNT = 3;
    static constexpr uint32_t kExponent = 0x7f807f80;
    uint32_t values[COUNT][4];
    static constexpr float scale[2] = {1, 1};

    // All 24 bits.
    __device__ void cut(int half, float (&y)[4]) {
#pragma unroll
        for (int part = 0; part < COUNT; ++part) {
            uint32_t bits[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) bits[i] = cut_bfloat16(y[i]);
            values[part][half] = bits[0] >> 16 | bits[1];
            values[part][half + 2] = bits[2] >> 16 | bits[3];
        }
    }
    __device__ void split(int half, float (&y)[4]) { cut(half, y); }
};

template <> struct RankParts<__half> {
    static constexpr int COUNT = 2;
    static constexpr uint32_t kExponent = 0x7c007c00;
    uint32_t values[COUNT][4];
    float scale[2];

    // 22 bits of what is neither past 65504 nor so small that the second part has no bits left: below 2^-3.
    __device__ void cut(int half, float (&y)[4]) {
#pragma unroll
        for (int part = 0; part < COUNT; ++part) {
            __half2 taken[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                taken[i] = __floats2half2_rn(y[i * 2], y[i * 2 + 1]);
                const float2 wide = __half22float2(taken[i]);
                y[i * 2] = y[i * 2] == wide.x ? 0 : y[i * 2] - wide.x;
                y[i * 2 + 1] = y[i * 2 + 1] == wide.y ? 0 : y[i * 2 + 1] - wide.y;
            }
            values[part][half] = *reinterpret_cast<uint32_t*>(&taken[0]);
            values[part][half + 2] = *reinterpret_cast<uint32_t*>(&taken[1]);
        }
    }
    // Of anything: the largest entry of a row comes to lie below 2^15.
    __device__ void split(int half, float (&y)[4]) {
        uint32_t largest = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) largest = max(largest, __float_as_uint(y[i]) & 0x7fffffff);
        largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
        const int exponent = clamp(largest >> 23, 30, 254);
        scale[half] = __uint_as_float((exponent - 14) << 23);
        const float inverse = __uint_as_float((254 + 14 - exponent) << 23);
#pragma unroll
        for (int i = 0; i < 4; ++i) y[i] *= inverse;
        cut(half, y);
    }
};

// How many of these values y takes for a result of type Out: 16 bits of it, two values of bfloat16, where that has 8.
template <class T, class Out>
constexpr int kPartsOfY = is_same<T, __nv_bfloat16> && sizeof(Out) == 2 ? 2 : RankParts<T>::COUNT;

// For two values of bfloat16 to 16 bits. What is next to infinity stays finite.
template <class T, int PARTS> __device__ inline float rounded_for_parts(float x) {
    if constexpr (PARTS == RankParts<T>::COUNT) return x;
    const uint32_t bits = __float_as_uint(x), size = bits & 0x7fffffff;
    if (size >= 0x7f7fff80) return x;
    return __uint_as_float(bits + 0x7f + (bits >> 8 & 1) & 0xffffff00);
}

// Of two elements, those that are infinite or NaN become 0.
template <class T> __device__ inline uint32_t finite_or_zero(uint32_t pair) {
    constexpr uint32_t LOW = RankParts<T>::kExponent & 0xffff, HIGH = RankParts<T>::kExponent & 0xffff0000;
    return ((pair & LOW) == LOW ? 0 : pair & 0xffff) | ((pair & HIGH) == HIGH ? 0 : pair & 0xffff0000);
}

}  // namespace rawops
