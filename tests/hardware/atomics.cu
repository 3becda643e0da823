// Atomics on shared and on global memory.
#include "lanes.cuh"

__device__ inline u32 shared_address(const void* p) {
  u32 address;
  asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(address) : "l"(p));
  return address;
}

// A cell of the lane's own, first c: append what the atomic returned and what it left, in global and shared memory.
#define OWN_(Word, letter, space, at, cell, text)                                                                     \
  {                                                                                                                   \
    Word old;                                                                                                         \
    cell = c;                                                                                                         \
    asm volatile("atom." space text : "=" letter(old) : at, letter(a), letter(b) : "memory");                         \
    const Word left = cell;                                                                                           \
    out[0] = old, out[n] = left, out += 2 * n;                                                                        \
  }
#define OWN(Word, letter, text)                                                                                       \
  OWN_(Word, letter, "global.", "l"(out), *out, text)                                                                 \
  OWN_(Word, letter, "shared.", "r"(shared_address(&own)), own, text)
#define OWN_U32(text) OWN(u32, "r", text)
#define OWN_U64(text) OWN(u64, "l", text)

LANES(atomic32, u32, u32)
  __shared__ u32 cells[256];
  u32& own = cells[threadIdx.x];
  OWN_U32("add.u32 %0, [%1], %2;")
  OWN_U32("add.s32 %0, [%1], %2;")
  OWN_U32("min.s32 %0, [%1], %2;")
  OWN_U32("min.u32 %0, [%1], %2;")
  OWN_U32("max.s32 %0, [%1], %2;")
  OWN_U32("max.u32 %0, [%1], %2;")
  OWN_U32("and.b32 %0, [%1], %2;")
  OWN_U32("or.b32 %0, [%1], %2;")
  OWN_U32("xor.b32 %0, [%1], %2;")
  OWN_U32("inc.u32 %0, [%1], %2;")
  OWN_U32("dec.u32 %0, [%1], %2;")
  OWN_U32("exch.b32 %0, [%1], %2;")
  OWN_U32("cas.b32 %0, [%1], %2, %3;")
END

LANES(atomic_float, u32, u32)
  __shared__ u32 cells[256];
  u32& own = cells[threadIdx.x];
  OWN_U32("add.f32 %0, [%1], %2;")
  OWN_U32("add.noftz.f16x2 %0, [%1], %2;")
END

LANES(atomic_bfloat16_sm90, u32, u32)
  __shared__ u32 cells[256];
  u32& own = cells[threadIdx.x];
  OWN_U32("add.noftz.bf16x2 %0, [%1], %2;")
END

LANES(atomic64, u64, u64)
  __shared__ u64 cells[256];
  u64& own = cells[threadIdx.x];
  OWN_U64("add.u64 %0, [%1], %2;")
  OWN_U64("min.s64 %0, [%1], %2;")
  OWN_U64("max.u64 %0, [%1], %2;")
  OWN_U64("and.b64 %0, [%1], %2;")
  OWN_U64("xor.b64 %0, [%1], %2;")
  OWN_U64("exch.b64 %0, [%1], %2;")
  OWN_U64("cas.b64 %0, [%1], %2, %3;")
  OWN_U64("add.f64 %0, [%1], %2;")
END

LANES(atomic16, u16, u16)
  __shared__ u16 cells[256];
  u16& own = cells[threadIdx.x];
  OWN(u16, "h", "add.noftz.f16 %0, [%1], %2;")
  OWN(u16, "h", "cas.b16 %0, [%1], %2, %3;")
END

// Cells that many lanes have in common, by operations whose result does not depend on the order. `out` starts as 0.
template <class = void>
__global__ void common(const u32* x, const u32* y, const u32* z, u32* out, int n) {
  __shared__ u32 cells[16];
  const u32 a = x[threadIdx.x], b = z[threadIdx.x] % 16, one = 0x3f800000, cut = 100;
#define COMMON(text, operand)                                                                                         \
  if (threadIdx.x < 16) cells[threadIdx.x] = 0;                                                                       \
  __syncthreads();                                                                                                    \
  asm volatile("red.global." text " [%0], %1;" ::"l"(out + b), "r"(operand) : "memory");                              \
  asm volatile("red.shared." text " [%0], %1;" ::"r"(shared_address(cells + b)), "r"(operand) : "memory");            \
  __syncthreads();                                                                                                    \
  if (threadIdx.x < 16) out[16 + threadIdx.x] = cells[threadIdx.x];                                                   \
  out += 32;
  COMMON("add.u32", a)
  COMMON("min.s32", a)
  COMMON("max.s32", a)
  COMMON("max.u32", a)
  COMMON("or.b32", a)
  COMMON("xor.b32", a)
  COMMON("inc.u32", cut)
  COMMON("dec.u32", cut)
  COMMON("add.f32", one)
}

// Vector reductions on global memory: four words of the lane's own, first (c, c, c, c).
template <class = void>
__global__ void vector_reduction(const u32* x, const u32* y, const u32* z, u32* out, int n) {
  const u32 a = x[threadIdx.x], b = y[threadIdx.x], c = z[threadIdx.x];
#define VECTOR(text)                                                                                                  \
  {                                                                                                                   \
    u32* own = out + 4 * threadIdx.x;                                                                                 \
    own[0] = own[1] = own[2] = own[3] = c;                                                                            \
    asm volatile("red.global.add." text ::"l"(own), "r"(a), "r"(b) : "memory");                                       \
    out += 4 * n;                                                                                                     \
  }
  VECTOR("v2.f32 [%0], {%1, %2};")
  VECTOR("v4.f32 [%0], {%1, %2, %2, %1};")
  VECTOR("noftz.v2.f16x2 [%0], {%1, %2};")
  VECTOR("noftz.v4.f16x2 [%0], {%1, %2, %2, %1};")
  VECTOR("noftz.v4.bf16x2 [%0], {%1, %2, %2, %1};")
}
