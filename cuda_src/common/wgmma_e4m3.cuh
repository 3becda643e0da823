// wgmma of float8 e4m3, K-major operands: 64 x 32 by 32 x N into float32, the first from shared memory or registers.
#pragma once
#include "wgmma.cuh"

namespace rawops {

// Accumulators lie as those of 16-bit operands. a of four registers: row l / 4 at k l % 4 * 4 and the three after, then
// row l / 4 + 8, then both at k + 16.
template <int N> struct WgmmaE4m3;

#define RAWOPS_WGMMA_E4M3(N, SECOND, THIRD, FOURTH)                                                                   \
    template <> struct WgmmaE4m3<N> {                                                                                 \
        static __device__ void multiply(float (&d)[N / 2], uint64_t a, uint64_t b, uint32_t accumulate) {             \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n"                                                 \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" RAWOPS_P##N                     \
                         "}, %0, %1, p, 1, 1;\n}"                                                                     \
                         : "+l"(a), "+l"(b), "+r"(accumulate), RAWOPS_V##N);                                          \
        }                                                                                                             \
        static __device__ void multiply(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, uint32_t accumulate) { \
            uint32_t first = a[0];                                                                                    \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\n"                                                 \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" RAWOPS_P##N                     \
                         "}, {%2, " SECOND ", " THIRD ", " FOURTH "}, %0, p, 1, 1;\n}"                                \
                         : "+l"(b), "+r"(accumulate), "+r"(first), RAWOPS_V##N                                        \
                         : "r"(a[1]), "r"(a[2]), "r"(a[3]));                                                          \
        }                                                                                                             \
    };

RAWOPS_WGMMA_E4M3(64, "%35", "%36", "%37")
RAWOPS_WGMMA_E4M3(96, "%51", "%52", "%53")
RAWOPS_WGMMA_E4M3(128, "%67", "%68", "%69")
RAWOPS_WGMMA_E4M3(160, "%83", "%84", "%85")
RAWOPS_WGMMA_E4M3(192, "%99", "%100", "%101")
RAWOPS_WGMMA_E4M3(224, "%115", "%116", "%117")
RAWOPS_WGMMA_E4M3(256, "%131", "%132", "%133")

}  // namespace rawops
