// Integer names, accumulator types, conversions and small helpers that every kernel shares.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace rawops {

using int64_t = long long;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;

constexpr int kWarpSize = 32;

__host__ __device__ constexpr int ceil_div(int a, int b) { return a / b + (a % b != 0); }
__host__ __device__ constexpr int max_of(int a, int b) { return a > b ? a : b; }
__host__ __device__ constexpr int min_of(int a, int b) { return a < b ? a : b; }
__host__ __device__ constexpr int clamp(int value, int low, int high) { return min_of(max_of(value, low), high); }

// 16-bit and 32-bit floats accumulate in float32, float64 in itself.
template <class T> struct AccumulatorOf { using Type = float; };
template <> struct AccumulatorOf<double> { using Type = double; };
template <class T> using Accumulator = typename AccumulatorOf<T>::Type;

template <bool kFirst, class T, class U> struct Choose { using Type = T; };
template <class T, class U> struct Choose<false, T, U> { using Type = U; };

template <class T, class U> struct IsSame { static constexpr bool value = false; };
template <class T> struct IsSame<T, T> { static constexpr bool value = true; };
template <class T, class U> constexpr bool is_same = IsSame<T, U>::value;

__device__ inline int widen(int x) { return x; }
__device__ inline float widen(float x) { return x; }
__device__ inline double widen(double x) { return x; }
__device__ inline float widen(__half x) { return __half2float(x); }
__device__ inline float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

// Rounds to nearest even; past the largest float16 the result is inf.
template <class T> __device__ inline T narrow(float x) { return static_cast<T>(x); }
template <class T> __device__ inline T narrow(double x) { return static_cast<T>(x); }
template <class T> __device__ inline T narrow(int x) { return static_cast<T>(x); }
template <> __device__ inline __half narrow<__half>(float x) { return __float2half_rn(x); }
template <> __device__ inline __nv_bfloat16 narrow<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

// A number that is the same in all lanes, now in a register that the warp has once.
__device__ inline int uniform(int number) {
    int same;
    asm volatile("redux.sync.max.s32 %0, %1, 0xffffffff;" : "=r"(same) : "r"(number));
    return same;
}

// Elements that one instruction moves: the pointer must be aligned to the whole.
template <class T, int COUNT> struct alignas(sizeof(T) * COUNT) Vector {
    T data[COUNT];
};

}  // namespace rawops
