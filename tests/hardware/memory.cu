// Loads and stores of every width, sub-word extension, generic addresses, local memory, barriers that reduce.
#include "lanes.cuh"

// One lane copies 16 bytes a row by vectors of each shape, through global, shared and local memory.
template <class = void>
__global__ void vectors(const u32* x, u32* out, int n) {
  const int lane = blockIdx.x * blockDim.x + threadIdx.x;
  const u32* from = x + 4 * lane;
  u32* to = out + 4 * lane;
  __shared__ __align__(16) u32 staged[4 * 128];
  u32* own = staged + 4 * threadIdx.x;
  for (int i = 0; i < 4; ++i) own[i] = ~from[i];
#define NEXT to += 4 * n;
#define COPY(declare, load, store, from, step, to)                                                                    \
  for (int i = 0; i < 16; i += step)                                                                                  \
    asm volatile("{ " declare load " [%1]; " store "; }" ::"l"((char*)(to) + i), "l"((const char*)(from) + i)         \
                 : "memory");                                                                                         \
  NEXT
  COPY(".reg .u32 a; ", "ld.global.u8 a,", "st.global.u8 [%0], a", from, 1, to)
  COPY(".reg .u16 a; ", "ld.global.u16 a,", "st.global.u16 [%0], a", from, 2, to)
  COPY(".reg .u32 a; ", "ld.global.nc.u32 a,", "st.global.u32 [%0], a", from, 4, to)
  COPY(".reg .u64 a; ", "ld.volatile.global.u64 a,", "st.volatile.global.u64 [%0], a", from, 8, to)
  COPY(".reg .u16 a<4>; ", "ld.global.v2.u8 {a0, a1},", "st.global.v2.u8 [%0], {a1, a0}", from, 2, to)
  COPY(".reg .u16 a<4>; ", "ld.global.v4.u8 {a0, a1, a2, a3},", "st.global.v4.u8 [%0], {a3, a2, a0, a1}", from, 4, to)
  COPY(".reg .u16 a<4>; ", "ld.global.v2.u16 {a0, a1},", "st.global.v2.u16 [%0], {a1, a0}", from, 4, to)
  COPY(".reg .u16 a<4>; ", "ld.global.nc.v4.u16 {a0, a1, a2, a3},", "st.global.v4.u16 [%0], {a3, a2, a0, a1}", from, 8,
       to)
  COPY(".reg .u32 a<4>; ", "ld.global.v2.u32 {a0, a1},", "st.global.v2.u32 [%0], {a1, a0}", from, 8, to)
  COPY(".reg .f32 a<4>; ", "ld.global.nc.v4.f32 {a0, a1, a2, a3},", "st.global.v4.f32 [%0], {a3, a2, a0, a1}", from,
       16, to)
  COPY(".reg .u64 a<2>; ", "ld.global.v2.u64 {a0, a1},", "st.global.v2.u64 [%0], {a1, a0}", from, 16, to)
  COPY(".reg .b32 a<4>; ", "ld.v4.b32 {a0, a1, a2, a3},", "st.v4.b32 [%0], {a1, a2, a3, a0}", own, 16, to)
  COPY(".reg .u32 a; ", "ld.relaxed.gpu.global.u32 a,", "st.relaxed.gpu.global.u32 [%0], a", from, 4, to)
  COPY(".reg .u32 a; ", "ld.acquire.gpu.global.u32 a,", "st.release.gpu.global.u32 [%0], a", from, 4, to)
}

LANES(extension, u32, u32)
  *out = a, out += n;
  __shared__ u32 staged[256];
  staged[threadIdx.x] = a;
  u32 local[8];
  for (u32 i = 0; i < 8; ++i) local[(i + b) % 8] = a + i * c;
  *out = local[c % 8], out += n;
  const u64 address = (u64)(x + lane), near = (u64)(staged + threadIdx.x);
#define EXTEND(text)                                                                                                  \
  {                                                                                                                   \
    u32 d;                                                                                                            \
    asm volatile(text : "=r"(d) : "l"(address), "l"(near) : "memory");                                                \
    *out = d, out += n;                                                                                               \
  }
  EXTEND("ld.global.s8 %0, [%1];")
  EXTEND("ld.global.u8 %0, [%1+3];")
  EXTEND("ld.global.s16 %0, [%1+2];")
  EXTEND("ld.global.u16 %0, [%1+2];")
  EXTEND("ld.s8 %0, [%2+1];")
  EXTEND("ld.s16 %0, [%2+2];")
  EXTEND("{ .reg .pred p; isspacep.shared p, %2; selp.b32 %0, 1, 0, p; isspacep.global p, %2; @p or.b32 %0, %0, 2; }")
  EXTEND("{ .reg .pred p; isspacep.shared p, %1; selp.b32 %0, 1, 0, p; isspacep.global p, %1; @p or.b32 %0, %0, 2; }")
  EXTEND("{ .reg .u64 t; cvta.to.shared.u64 t, %2; ld.shared.u32 %0, [t]; }")
  EXTEND("{ .reg .u64 t; cvta.to.global.u64 t, %1; ld.global.u32 %0, [t]; }")
END

// Barriers of the whole block and of named parts, with reductions.
LANES(barrier, u32, u32)
  __shared__ u32 staged[256];
  staged[threadIdx.x] = a;
  asm volatile("bar.sync 0;" ::: "memory");
  *out = staged[255 - threadIdx.x], out += n;
  asm volatile("barrier.sync 3, 256;" ::: "memory");
  ROW_RR("{ .reg .pred p; setp.lt.s32 p, %1, %2; bar.red.popc.u32 %0, 0, p; }")
  ROW_RR("{ .reg .pred p; setp.lt.s32 p, %1, %2; bar.red.and.pred p, 1, p; selp.b32 %0, 1, 0, p; }")
  ROW_RR("{ .reg .pred p; setp.lt.s32 p, %1, %2; bar.red.or.pred p, 1, 256, p; selp.b32 %0, 1, 0, p; }")
  ROW_RR("{ .reg .pred p; setp.lt.s32 p, %1, %2; barrier.red.popc.u32 %0, 2, 256, !p; }")
  // the upper half produces, the lower half consumes
  if (threadIdx.x < 128) {
    asm volatile("bar.sync 5, 256;" ::: "memory");
    *out = staged[255 - threadIdx.x];
  } else {
    staged[threadIdx.x] = b;
    asm volatile("bar.arrive 5, 256;" ::: "memory");
    *out = c;
  }
END

// cp.async of each size, with fewer source bytes than are written, in two groups.
template <class = void>
__global__ void copies(const u32* x, u32* out) {
  __shared__ __align__(16) u32 staged[5 * 4 * 64];
  const u32* from = x + 4 * threadIdx.x;
  const u32 to = (u32)__cvta_generic_to_shared(staged + 4 * threadIdx.x);
  constexpr u32 row = 4 * 4 * 64;
  for (int i = 0; i < 16; i += 4)
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to + i), "l"((const char*)from + i) : "memory");
  for (int i = 0; i < 16; i += 8)
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to + row + i), "l"((const char*)from + i),
                 "r"(threadIdx.x % 9)
                 : "memory");
  asm volatile("cp.async.commit_group;");
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(to + 2 * row), "l"(from) : "memory");
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + 3 * row), "l"(from), "r"(threadIdx.x % 17)
               : "memory");
  asm volatile("{ .reg .pred p; setp.gt.u32 p, %2, 20; cp.async.cg.shared.global.L2::128B [%0], [%1], 16, p; }" ::"r"(
                   to + 4 * row), "l"(from), "r"(threadIdx.x)
               : "memory");
  asm volatile("cp.async.commit_group;");
  asm volatile("cp.async.wait_group 1;" ::: "memory");
  for (int i = 0; i < 8; ++i) out[8 * threadIdx.x + i] = staged[4 * threadIdx.x + i % 4 + i / 4 * 256];
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
  out += 8 * 64;
  for (int i = 0; i < 12; ++i) out[64 * i + threadIdx.x] = staged[512 + 64 * i + 63 - threadIdx.x];
}
