// wgmma of every type, majorness and swizzle: one warpgroup, a 64 x N product.
//
// A (64, K) and B (N, K) come with K contiguous, D (64, N) goes out row by row. The kernel places the operands in
// shared memory as the layout under test wants them and says so in the descriptors.
#include "lanes.cuh"

struct Layout {
  u32 lines;    // rows for a K-major matrix, else steps of K
  u32 swizzle;  // 0, 32, 64, 128
  bool k_major;
};

// Byte offset of byte `at` of line `line`.
__device__ inline u32 place(const Layout& t, u32 line, u32 at) {
  if (t.swizzle == 0) return (at / 16) * (t.lines * 16) + (line / 8) * 128 + line % 8 * 16 + at % 16;
  const u32 linear = (at / t.swizzle) * (t.lines * t.swizzle) + line * t.swizzle + at % t.swizzle;
  return linear ^ (linear >> 3 & (t.swizzle - 16));
}

__device__ inline u64 descriptor(const Layout& t, u32 address) {
  const u32 column = t.lines * (t.swizzle ? t.swizzle : 16);  // from one block of columns to the next
  const u32 eight = t.swizzle ? 8 * t.swizzle : 128;          // from eight lines to the next eight
  // Without a swizzle the two strides change places when the matrix is not K-major.
  const bool exchange = t.swizzle == 0 && !t.k_major;
  const u64 leading = (exchange ? eight : column) / 16, stride = (exchange ? column : eight) / 16;
  const u64 mode = t.swizzle == 0 ? 0 : t.swizzle == 128 ? 1 : t.swizzle == 64 ? 2 : 3;
  return (address & 0x3ffff) >> 4 | leading << 16 | stride << 32 | mode << 62;
}

#define D4(at) "+r"(d[at]), "+r"(d[at + 1]), "+r"(d[at + 2]), "+r"(d[at + 3])
#define D8(at) D4(at), D4(at + 4)
#define D32 D8(0), D8(8), D8(16), D8(24)
#define LIST4 "{%0, %1, %2, %3}"
#define LIST8 "{%0, %1, %2, %3, %4, %5, %6, %7}"
#define LIST32                                                                                                        \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "   \
  "%24, %25, %26, %27, %28, %29, %30, %31}"

// One instruction of a type: D += A B, or D = A B for accumulate = 0. `rest` follows the operands.
#define PRODUCT(name, columns, count, D, LIST, a, b, p, shape, rest)                                                  \
  struct name {                                                                                                       \
    static constexpr u32 n = columns, words = count;                                                                  \
    template <int transpose_a, int transpose_b>                                                                       \
    static __device__ void issue(u32* d, u64 a_place, u64 b_place, u32 accumulate) {                                  \
      asm volatile("{ .reg .pred p; setp.ne.b32 p, %" p ", 0; wgmma.mma_async.sync.aligned." shape " " LIST           \
                   ", %" a ", %" b ", p" rest "; }"                                                                   \
                   : D                                                                                                \
                   : "l"(a_place), "l"(b_place), "r"(accumulate), "n"(transpose_a), "n"(transpose_b));                \
    }                                                                                                                 \
  };

PRODUCT(f16, 16, 8, D8(0), LIST8, "8", "9", "10", "m64n16k16.f32.f16.f16", ", 1, 1, %11, %12")
PRODUCT(f16_negative, 16, 8, D8(0), LIST8, "8", "9", "10", "m64n16k16.f32.f16.f16", ", -1, 1, %11, %12")
PRODUCT(f16_f16, 16, 4, D4(0), LIST4, "4", "5", "6", "m64n16k16.f16.f16.f16", ", 1, -1, %7, %8")
PRODUCT(f16_wide, 64, 32, D32, LIST32, "32", "33", "34", "m64n64k16.f32.f16.f16", ", 1, 1, %35, %36")
PRODUCT(bf16, 16, 8, D8(0), LIST8, "8", "9", "10", "m64n16k16.f32.bf16.bf16", ", 1, 1, %11, %12")
PRODUCT(bf16_wide, 64, 32, D32, LIST32, "32", "33", "34", "m64n64k16.f32.bf16.bf16", ", 1, 1, %35, %36")
PRODUCT(tf32, 16, 8, D8(0), LIST8, "8", "9", "10", "m64n16k8.f32.tf32.tf32", ", 1, 1")
PRODUCT(e4m3, 16, 8, D8(0), LIST8, "8", "9", "10", "m64n16k32.f32.e4m3.e4m3", ", 1, 1")
PRODUCT(e5m2, 16, 8, D8(0), LIST8, "8", "9", "10", "m64n16k32.f32.e5m2.e5m2", ", 1, 1")
PRODUCT(e4m3_e5m2, 16, 8, D8(0), LIST8, "8", "9", "10", "m64n16k32.f32.e4m3.e5m2", ", 1, 1")
PRODUCT(e4m3_f16, 16, 4, D4(0), LIST4, "4", "5", "6", "m64n16k32.f16.e4m3.e4m3", ", 1, 1")
PRODUCT(s8, 16, 8, D8(0), LIST8, "8", "9", "10", "m64n16k32.s32.s8.s8", "")
PRODUCT(u8_s8, 16, 8, D8(0), LIST8, "8", "9", "10", "m64n16k32.s32.u8.s8", "")

constexpr u32 depth = 128;  // bytes of K: four instructions

// Put a matrix of (rows, 128 bytes of K) where the layout wants it.
__device__ inline void stage(char* to, const char* from, u32 rows, const Layout& t) {
  for (u32 i = threadIdx.x; i < rows * depth / 2; i += blockDim.x) {
    const u32 row = i / (depth / 2), k = i % (depth / 2);
    const u32 at = t.k_major ? place(t, row, 2 * k) : place(t, k, 2 * row);
    *(u16*)(to + at) = ((const u16*)from)[i];
  }
}

__device__ inline void begin() {
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

template <class P>
__device__ void finish(u32 (&d)[P::words], u32* out) {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  for (u32 i = 0; i < P::words; ++i) asm volatile("" : "+r"(d[i]));
  for (u32 i = 0; i < P::words; ++i) out[i * 128 + threadIdx.x] = d[i];
}

template <class P, u32 swizzle_a, bool a_k_major, u32 swizzle_b, bool b_k_major>
__global__ void __launch_bounds__(128) product(const char* a, const char* b, u32* out) {
  __shared__ __align__(1024) char tile_a[64 * depth], tile_b[P::n * depth];
  constexpr u32 lines = depth / 2;  // 16-bit elements where K runs over the lines
  constexpr Layout of_a{a_k_major ? 64 : lines, swizzle_a, a_k_major};
  constexpr Layout of_b{b_k_major ? P::n : lines, swizzle_b, b_k_major};
  stage(tile_a, a, 64, of_a);
  stage(tile_b, b, P::n, of_b);
  const u32 at_a = (u32)__cvta_generic_to_shared(tile_a), at_b = (u32)__cvta_generic_to_shared(tile_b);
  u32 d[P::words];
  for (u32 i = 0; i < P::words; ++i) d[i] = 0x40e00000;  // the first instruction does not accumulate
  begin();
#pragma unroll
  for (u32 step = 0; step < 4; ++step) {
    const u64 from_a = descriptor(of_a, at_a + (a_k_major ? place(of_a, 0, 32 * step) : place(of_a, 16 * step, 0)));
    const u64 from_b = descriptor(of_b, at_b + (b_k_major ? place(of_b, 0, 32 * step) : place(of_b, 16 * step, 0)));
    P::template issue<!a_k_major, !b_k_major>(d, from_a, from_b, step);
  }
  finish<P>(d, out);
}

#define PRODUCT_RS(name, shape, rest)                                                                                 \
  struct name {                                                                                                       \
    static constexpr u32 words = 8;                                                                                   \
    static __device__ void issue(u32* d, const u32* a, u64 b, u32 accumulate) {                                       \
      asm volatile("{ .reg .pred p; setp.ne.b32 p, %13, 0; wgmma.mma_async.sync.aligned." shape " " LIST8             \
                   ", {%8, %9, %10, %11}, %12, p" rest "; }"                                                          \
                   : D8(0)                                                                                            \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                            \
    }                                                                                                                 \
  };

PRODUCT_RS(f16_rs, "m64n16k16.f32.f16.f16", ", 1, 1, 0")
PRODUCT_RS(bf16_rs, "m64n16k16.f32.bf16.bf16", ", 1, 1, 0")
PRODUCT_RS(tf32_rs, "m64n16k8.f32.tf32.tf32", ", 1, 1")
PRODUCT_RS(e4m3_rs, "m64n16k32.f32.e4m3.e4m3", ", 1, 1")
PRODUCT_RS(s8_rs, "m64n16k32.s32.s8.s8", "")

// A from registers: word r of a lane holds four bytes of K of row lane / 4 + 8 (r % 2), from byte 16 (r / 2) on.
template <class P>
__global__ void __launch_bounds__(128) product_rs(const char* a, const char* b, u32* out) {
  __shared__ __align__(1024) char tile_b[16 * depth];
  constexpr Layout of_b{16, 128, true};
  stage(tile_b, b, 16, of_b);
  u32 fragments[4][4], d[8] = {};
  const u32 lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
  for (u32 step = 0; step < 4; ++step)
    for (u32 r = 0; r < 4; ++r)
      fragments[step][r] = *(const u32*)(a + (row + r % 2 * 8) * depth + 32 * step + r / 2 * 16 + lane % 4 * 4);
  begin();
  const u32 at_b = (u32)__cvta_generic_to_shared(tile_b);
#pragma unroll
  for (u32 step = 0; step < 4; ++step) P::issue(d, fragments[step], descriptor(of_b, at_b + 32 * step), 1);
  finish<P>(d, out);
}
