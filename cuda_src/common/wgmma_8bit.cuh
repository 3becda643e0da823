// wgmma on operands of 8 bits, both K-major: 64 x 32 by 32 x N from shared memory into float32 or int32.
#pragma once
#include "operands_8bit.cuh"
#include "wgmma.cuh"

namespace rawops {

// The accumulators lie as those of 16-bit operands; a step is 32 along K.
template <int N> struct WgmmaBytes;

#define RAWOPS_WGMMA_BYTES(N)                                                                                         \
    template <> struct WgmmaBytes<N> {                                                                                \
        template <class A, class B>                                                                                   \
        static __device__ void multiply(float (&d)[N / 2], uint64_t a, uint64_t b, uint32_t accumulate) {             \
            constexpr bool kWideA = is_same<A, __nv_fp8_e5m2>, kWideB = is_same<B, __nv_fp8_e5m2>;                    \
            if constexpr (kWideA && kWideB) RAWOPS_WGMMA_OF_BYTES("f32.e5m2.e5m2", N, ", 1, 1");                      \
            else if constexpr (kWideA) RAWOPS_WGMMA_OF_BYTES("f32.e5m2.e4m3", N, ", 1, 1");                           \
            else if constexpr (kWideB) RAWOPS_WGMMA_OF_BYTES("f32.e4m3.e5m2", N, ", 1, 1");                           \
            else RAWOPS_WGMMA_OF_BYTES("f32.e4m3.e4m3", N, ", 1, 1");                                                 \
        }                                                                                                             \
        static __device__ void multiply(int (&d)[N / 2], uint64_t a, uint64_t b, uint32_t accumulate);                \
    };
#define RAWOPS_WGMMA_OF_BYTES(TYPES, N, SIGNS)                                                                        \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n"                                                          \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k32." TYPES " {" RAWOPS_P##N "}, %0, %1, p" SIGNS ";\n}"     \
                 : "+l"(a), "+l"(b), "+r"(accumulate), RAWOPS_V##N)
#define RAWOPS_EVERY_N(OF)                                                                                            \
    OF(16) OF(32) OF(48) OF(64) OF(80) OF(96) OF(112) OF(128) OF(144) OF(160) OF(176) OF(192) OF(208) OF(224) OF(240) \
    OF(256)

RAWOPS_EVERY_N(RAWOPS_WGMMA_BYTES)

#undef RAWOPS_D
#define RAWOPS_D(i) "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3])  // from here on they are integers
#define RAWOPS_WGMMA_INT8(N)                                                                                          \
    __device__ inline void WgmmaBytes<N>::multiply(int (&d)[N / 2], uint64_t a, uint64_t b, uint32_t accumulate) {    \
        RAWOPS_WGMMA_OF_BYTES("s32.s8.s8", N, "");                                                                    \
    }

RAWOPS_EVERY_N(RAWOPS_WGMMA_INT8)

template <class A, class B, int N> struct WgmmaAtom<Bytes<A, B>, N, true, true> {
    using D = Accumulator<Bytes<A, B>>[N / 2];
    static __device__ void multiply(D& d, uint64_t a, uint64_t b, uint32_t accumulate) {
        if constexpr (is_same<Bytes<A, B>, Int8>) WgmmaBytes<N>::multiply(d, a, b, accumulate);
        else WgmmaBytes<N>::template multiply<A, B>(d, a, b, accumulate);
    }
};

}  // namespace rawops
