// ldmatrix, stmatrix and movmatrix in every form. The values tell where they came from.
#include "lanes.cuh"

__device__ inline u32 shared_of(const void* p) { return (u32)__cvta_generic_to_shared(p); }

#define LOAD(text, count, ...)                                                                                        \
  {                                                                                                                   \
    u32 d[4] = {0, 0, 0, 0};                                                                                          \
    asm volatile("ldmatrix.sync.aligned.m8n8." text : __VA_ARGS__ : "r"(shared_of(staged + rows[lane])) : "memory");  \
    for (int i = 0; i < count; ++i) *out = d[i], out += 32;                                                           \
  }

// `rows` holds the offset, in 16-bit elements, of the row that each lane points at.
template <class = void>
__global__ void load(const u32* rows, u32* out) {
  __shared__ __align__(16) u16 staged[1024];
  const u32 lane = threadIdx.x;
  for (u32 i = lane; i < 1024; i += 32) staged[i] = i;
  __syncwarp();
  out += lane;
  LOAD("x1.shared.b16 {%0}, [%1];", 1, "=r"(d[0]))
  LOAD("x1.trans.shared.b16 {%0}, [%1];", 1, "=r"(d[0]))
  LOAD("x2.shared.b16 {%0, %1}, [%2];", 2, "=r"(d[0]), "=r"(d[1]))
  LOAD("x2.trans.shared.b16 {%0, %1}, [%2];", 2, "=r"(d[0]), "=r"(d[1]))
  LOAD("x4.shared.b16 {%0, %1, %2, %3}, [%4];", 4, "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]))
  LOAD("x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];", 4, "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]))
  const u32 pair = lane * 0x00020002 + 0x00010000;
  u32 moved;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(moved) : "r"(pair));
  *out = moved;
}

#define STORE(text, ...)                                                                                              \
  for (u32 i = lane; i < 512; i += 32) ((u32*)staged)[i] = 0;                                                         \
  __syncwarp();                                                                                                       \
  asm volatile("stmatrix.sync.aligned.m8n8." text ::"r"(shared_of(staged + rows[lane])), __VA_ARGS__ : "memory");     \
  __syncwarp();                                                                                                       \
  for (u32 i = lane; i < 512; i += 32) out[i] = ((u32*)staged)[i];                                                    \
  __syncwarp();                                                                                                       \
  out += 512;

template <class = void>
__global__ void store(const u32* rows, u32* out) {
  __shared__ __align__(16) u16 staged[1024];
  const u32 lane = threadIdx.x, a = 0x00010000 + lane * 0x00020002, b = a + 0x00400040, c = b + 0x00400040,
            d = c + 0x00400040;
  STORE("x1.shared.b16 [%0], {%1};", "r"(a))
  STORE("x1.trans.shared.b16 [%0], {%1};", "r"(a))
  STORE("x2.shared.b16 [%0], {%1, %2};", "r"(a), "r"(b))
  STORE("x2.trans.shared.b16 [%0], {%1, %2};", "r"(a), "r"(b))
  STORE("x4.shared.b16 [%0], {%1, %2, %3, %4};", "r"(a), "r"(b), "r"(c), "r"(d))
  STORE("x4.trans.shared.b16 [%0], {%1, %2, %3, %4};", "r"(a), "r"(b), "r"(c), "r"(d))
}
