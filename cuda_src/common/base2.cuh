// Softmax in base 2: its constants and functions.
#pragma once

namespace rawops {

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

__device__ inline float infinity() { return __int_as_float(0x7f800000); }

// 2 ** x, with 0 for what float32 has no normal number for.
__device__ inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// log2(x) with an error of two ulps of 1, or of the result if that is larger.
__device__ inline float log2_fast(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// tanh with an absolute error of an ulp of 1, which is what a score's error comes from.
__device__ inline float tanh_fast(float x) { return 1.0f - __fdividef(2.0f, 1.0f + exp2_fast(2.0f * kLog2e * x)); }

}  // namespace rawops
