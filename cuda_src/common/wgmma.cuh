// wgmma: one warpgroup multiplies 64 x 16 by 16 x N elements of 16 bits from shared memory into float32, or 64 x 8 by
// 8 x N of TF32, the first also from registers.
#pragma once
#include "hopper.cuh"

namespace rawops {

// An operand in shared memory as TMA brings it, in boxes whose rows are SPAN bytes along the contiguous axis and
// swizzled over as many. K-major: rows along MN, each 64 of K. MN-major: rows along K, each SPAN / 2 of MN, and one box
// after another. Everything is aligned to 8 * SPAN bytes, after which the swizzle repeats; other things may lie between
// such atoms.
template <bool kKMajor, int BLOCK_K, int SPAN = 128, int ITEM_BYTES = 2, int ATOM_ = 8 * SPAN,
          int BOX_ = BLOCK_K * SPAN>
struct WgmmaOperand {
    static constexpr int ATOM = ATOM_;                         // bytes to the next 8 rows
    static constexpr int BOX = BOX_;                           // MN-major: from one box to the next
    static constexpr int K_STEP = kKMajor ? 32 : 2 * ATOM;     // bytes to the next 16 of K
    static constexpr int ROWS_64 = kKMajor ? 8 * ATOM : BOX;   // bytes to the next 64 of MN
    static_assert(!kKMajor || BLOCK_K * ITEM_BYTES == SPAN, "a K-major tile is one box wide");
    static_assert(kKMajor || ITEM_BYTES == 2, "only 16-bit operands may be MN-major");

    // The descriptor: address, bytes between boxes (leading), bytes between atoms (stride), each >> 4; the swizzle.
    // In a cluster, the upper bits of a shared address tell the block's rank: they must not spill over.
    static __device__ uint64_t descriptor(uint32_t address) {
        constexpr uint64_t kLeading = kKMajor ? 1 : BOX >> 4, kStride = ATOM >> 4;
        constexpr uint64_t kSwizzle = SPAN == 128 ? 1 : SPAN == 64 ? 2 : 3;
        return kSwizzle << 62 | kStride << 32 | kLeading << 16 | (address & 0x3ffff) >> 4;
    }
    static __device__ uint64_t advance(uint64_t descriptor, int atoms, int k_steps) {
        return descriptor + (atoms * ROWS_64 + k_steps * K_STEP >> 4);
    }
};

// Orders this thread's accesses to accumulator registers before the products that follow.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most PENDING of the latest groups are unfinished.
template <int PENDING> __device__ inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Has arithmetic that stands before it done before a wait that follows. The compiler would have a warp wait for its
// products first, and then do what was to go on beside them; it moves nothing down across this sleep, which never
// happens: no shared address is negative.
__device__ inline void finish_before_waiting(uint32_t shared) {
    if (int(shared) < 0) asm volatile("nanosleep.u32 1;" ::: "memory");
}

// Keeps the compiler from moving reads of these registers to before this place.
template <int COUNT> __device__ inline void hold(float (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[i]));
}
template <int COUNT> __device__ inline void hold(int (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+r"(d[i]));
}

// The accumulators of one 16 x 8 part.
__device__ inline float (&four(float* d))[4] { return *reinterpret_cast<float(*)[4]>(d); }
__device__ inline const float (&four(const float* d))[4] { return *reinterpret_cast<const float(*)[4]>(d); }

// d += a @ b (d = a @ b with accumulate == 0) for one step of 16 along K. d[4 * j + i] of lane l in warp w of the group
// is row 16 * w + l / 4 + i / 2 * 8 and column 8 * j + l % 4 * 2 + i % 2. The instruction names every register, so each
// N needs a text of its own; what is not an accumulator comes first, as an output, so that its number does not depend
// on N, and what else there is comes last.
template <int N> struct Wgmma;

#define RAWOPS_WGMMA(N, FIRST, SECOND, THIRD, FOURTH)                                                                 \
    template <> struct Wgmma<N> {                                                                                     \
        template <class T, bool kAKMajor, bool kBKMajor>                                                              \
        static __device__ void multiply(float (&d)[N / 2], uint64_t a, uint64_t b, uint32_t accumulate) {             \
            if constexpr (is_same<T, __half>) RAWOPS_WGMMA_OF("f16", N, FIRST, SECOND)                                \
            else RAWOPS_WGMMA_OF("bf16", N, FIRST, SECOND)                                                            \
        }                                                                                                             \
        static __device__ void multiply_tf32(float (&d)[N / 2], uint64_t a, uint64_t b, uint32_t accumulate) {        \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n"                                                 \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k8.f32.tf32.tf32 {" RAWOPS_P##N                      \
                         "}, %0, %1, p, 1, 1;\n}"                                                                     \
                         : "+l"(a), "+l"(b), "+r"(accumulate), RAWOPS_V##N);                                          \
        }                                                                                                             \
        /* d += a @ b for 8 along K of TF32, K-major. a: row l / 4 and l / 4 + 8 at k l % 4, then at l % 4 + 4. */    \
        static __device__ void multiply(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b) {                      \
            uint32_t first = a[0], second = a[1];                                                                     \
            asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\n"                                                   \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k8.f32.tf32.tf32 {" RAWOPS_P##N                      \
                         "}, {%1, %2, " FIRST ", " SECOND "}, %0, p, 1, 1;\n}"                                        \
                         : "+l"(b), "+r"(first), "+r"(second), RAWOPS_V##N                                            \
                         : "r"(a[2]), "r"(a[3]));                                                                     \
        }                                                                                                             \
        /* The same of 16 bits, a in registers as an accumulator narrows to it. */                                    \
        template <class T, bool kBKMajor>                                                                             \
        static __device__ void multiply(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, uint32_t accumulate) { \
            uint32_t first = a[0];                                                                                    \
            if constexpr (is_same<T, __half>) RAWOPS_WGMMA_FROM("f16", N, FIRST, SECOND, THIRD, FOURTH)               \
            else RAWOPS_WGMMA_FROM("bf16", N, FIRST, SECOND, THIRD, FOURTH)                                           \
        }                                                                                                             \
    };
#define RAWOPS_WGMMA_OF(TYPE, N, TRANS_A, TRANS_B)                                                                    \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n"                                                          \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" RAWOPS_P##N                     \
                 "}, %0, %1, p, 1, 1, " TRANS_A ", " TRANS_B ";\n}"                                                   \
                 : "+l"(a), "+l"(b), "+r"(accumulate), RAWOPS_V##N                                                    \
                 : "n"(int(!kAKMajor)), "n"(int(!kBKMajor)));
#define RAWOPS_WGMMA_FROM(TYPE, N, SECOND, THIRD, FOURTH, TRANS_B)                                                    \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\n"                                                          \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" RAWOPS_P##N                     \
                 "}, {%2, " SECOND ", " THIRD ", " FOURTH "}, %0, p, 1, 1, " TRANS_B ";\n}"                           \
                 : "+l"(b), "+r"(accumulate), "+r"(first), RAWOPS_V##N                                                \
                 : "r"(a[1]), "r"(a[2]), "r"(a[3]), "n"(int(!kBKMajor)));
#define RAWOPS_D(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define RAWOPS_D8(i) RAWOPS_D(i), RAWOPS_D(i + 4)

#define RAWOPS_P8 "%3, %4, %5, %6"
#define RAWOPS_V8 RAWOPS_D(0)
#define RAWOPS_P16 "%3, %4, %5, %6, %7, %8, %9, %10"
#define RAWOPS_V16 RAWOPS_D8(0)
#define RAWOPS_P32 RAWOPS_P16 ", %11, %12, %13, %14, %15, %16, %17, %18"
#define RAWOPS_V32 RAWOPS_V16, RAWOPS_D8(8)
#define RAWOPS_P48 RAWOPS_P32 ", %19, %20, %21, %22, %23, %24, %25, %26"
#define RAWOPS_V48 RAWOPS_V32, RAWOPS_D8(16)
#define RAWOPS_P64 RAWOPS_P48 ", %27, %28, %29, %30, %31, %32, %33, %34"
#define RAWOPS_V64 RAWOPS_V48, RAWOPS_D8(24)
#define RAWOPS_P80 RAWOPS_P64 ", %35, %36, %37, %38, %39, %40, %41, %42"
#define RAWOPS_V80 RAWOPS_V64, RAWOPS_D8(32)
#define RAWOPS_P96 RAWOPS_P80 ", %43, %44, %45, %46, %47, %48, %49, %50"
#define RAWOPS_V96 RAWOPS_V80, RAWOPS_D8(40)
#define RAWOPS_P112 RAWOPS_P96 ", %51, %52, %53, %54, %55, %56, %57, %58"
#define RAWOPS_V112 RAWOPS_V96, RAWOPS_D8(48)
#define RAWOPS_P128 RAWOPS_P112 ", %59, %60, %61, %62, %63, %64, %65, %66"
#define RAWOPS_V128 RAWOPS_V112, RAWOPS_D8(56)
#define RAWOPS_P144 RAWOPS_P128 ", %67, %68, %69, %70, %71, %72, %73, %74"
#define RAWOPS_V144 RAWOPS_V128, RAWOPS_D8(64)
#define RAWOPS_P160 RAWOPS_P144 ", %75, %76, %77, %78, %79, %80, %81, %82"
#define RAWOPS_V160 RAWOPS_V144, RAWOPS_D8(72)
#define RAWOPS_P176 RAWOPS_P160 ", %83, %84, %85, %86, %87, %88, %89, %90"
#define RAWOPS_V176 RAWOPS_V160, RAWOPS_D8(80)
#define RAWOPS_P192 RAWOPS_P176 ", %91, %92, %93, %94, %95, %96, %97, %98"
#define RAWOPS_V192 RAWOPS_V176, RAWOPS_D8(88)
#define RAWOPS_P208 RAWOPS_P192 ", %99, %100, %101, %102, %103, %104, %105, %106"
#define RAWOPS_V208 RAWOPS_V192, RAWOPS_D8(96)
#define RAWOPS_P224 RAWOPS_P208 ", %107, %108, %109, %110, %111, %112, %113, %114"
#define RAWOPS_V224 RAWOPS_V208, RAWOPS_D8(104)
#define RAWOPS_P240 RAWOPS_P224 ", %115, %116, %117, %118, %119, %120, %121, %122"
#define RAWOPS_V240 RAWOPS_V224, RAWOPS_D8(112)
#define RAWOPS_P256 RAWOPS_P240 ", %123, %124, %125, %126, %127, %128, %129, %130"
#define RAWOPS_V256 RAWOPS_V240, RAWOPS_D8(120)

RAWOPS_WGMMA(8, "%7", "%8", "%9", "%10")
RAWOPS_WGMMA(16, "%11", "%12", "%13", "%14")
RAWOPS_WGMMA(32, "%19", "%20", "%21", "%22")
RAWOPS_WGMMA(48, "%27", "%28", "%29", "%30")
RAWOPS_WGMMA(64, "%35", "%36", "%37", "%38")
RAWOPS_WGMMA(80, "%43", "%44", "%45", "%46")
RAWOPS_WGMMA(96, "%51", "%52", "%53", "%54")
RAWOPS_WGMMA(112, "%59", "%60", "%61", "%62")
RAWOPS_WGMMA(128, "%67", "%68", "%69", "%70")
RAWOPS_WGMMA(144, "%75", "%76", "%77", "%78")
RAWOPS_WGMMA(160, "%83", "%84", "%85", "%86")
RAWOPS_WGMMA(176, "%91", "%92", "%93", "%94")
RAWOPS_WGMMA(192, "%99", "%100", "%101", "%102")
RAWOPS_WGMMA(208, "%107", "%108", "%109", "%110")
RAWOPS_WGMMA(224, "%115", "%116", "%117", "%118")
RAWOPS_WGMMA(240, "%123", "%124", "%125", "%126")
RAWOPS_WGMMA(256, "%131", "%132", "%133", "%134")

// The step that a type has, 32 bytes along K; wgmma_8bit.cuh adds those of bytes.
template <class T, int N, bool kAKMajor, bool kBKMajor> struct WgmmaAtom {
    static __device__ void multiply(float (&d)[N / 2], uint64_t a, uint64_t b, uint32_t accumulate) {
        Wgmma<N>::template multiply<T, kAKMajor, kBKMajor>(d, a, b, accumulate);
    }
};
template <int N> struct WgmmaAtom<float, N, true, true> {  // what TMA has rounded to TF32
    static __device__ void multiply(float (&d)[N / 2], uint64_t a, uint64_t b, uint32_t accumulate) {
        Wgmma<N>::multiply_tf32(d, a, b, accumulate);
    }
};

}  // namespace rawops
