// A float32 factor at 22 bits on TF32 tensor cores: as the sum of two TF32 values, each multiplied on its own.
#pragma once
#include "mma.cuh"

namespace rawops {

// `high` is cut off and so never overflows; `low` is 0 where nothing is left, at infinity too.
__device__ inline void split_tf32(uint32_t& high, uint32_t& low, float value) {
    high = __float_as_uint(value) & 0xffffe000;
    const float cut = __uint_as_float(high);
    low = value == cut ? 0 : round_to_tf32(__float_as_uint(value - cut));
}

// What the low part meets: an infinite b has met the high part, and times a low part of 0 would only make a NaN.
__device__ inline float finite_or_zero(float b) { return b - b == 0.0f ? b : 0.0f; }

// d += (high + low) @ b for one atom.
__device__ inline void multiply_split(float (&d)[4], const uint32_t (&high)[4], const uint32_t (&low)[4], float b0,
                                      float b1) {
    MmaAtom<float>::multiply(d, high, __float_as_uint(b0), __float_as_uint(b1));
    MmaAtom<float>::multiply(d, low, __float_as_uint(finite_or_zero(b0)), __float_as_uint(finite_or_zero(b1)));
}

}  // namespace rawops
