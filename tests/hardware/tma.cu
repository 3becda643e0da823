// Tensor copies: tiles of two and three dimensions, in and out, with swizzles and boxes across the edge.
#include "async.cuh"

struct alignas(64) TensorMap {
  u64 opaque[16];
};

constexpr u32 capacity = 8192;

__device__ inline void fill(u32* tile, u32 first) {
  for (u32 i = threadIdx.x; i < capacity / 4; i += blockDim.x) tile[i] = first + i;
}

#define LOAD(rank, coordinates, ...)                                                                                  \
  asm volatile("cp.async.bulk.tensor." rank ".shared::cluster.global.tile.mbarrier::complete_tx::bytes "              \
               "[%0], [%1, " coordinates "], [%2];" ::"r"(shared_of(tile)), "l"(&map), "r"(shared_of(&barrier)),      \
               __VA_ARGS__                                                                                            \
               : "memory")

// Block b loads the box at coordinates 3b.. and writes out the raw tile and as many bytes after it, which no copy
// should have changed.
template <int rank>
__global__ void load(const __grid_constant__ TensorMap map, const int* coordinates, u32* out, u32 bytes) {
  __shared__ __align__(1024) u32 tile[capacity / 4];
  __shared__ u64 barrier;
  const int* at = coordinates + 3 * blockIdx.x;
  fill(tile, 0xabcd0000);
  make_visible_to_async();
  if (threadIdx.x == 0) barrier_init(&barrier, 1);
  __syncthreads();
  if (threadIdx.x == 0) {
    barrier_expect(&barrier, bytes);
    if (rank == 2)
      LOAD("2d", "{%3, %4}", "r"(at[0]), "r"(at[1]));
    else
      LOAD("3d", "{%3, %4, %5}", "r"(at[0]), "r"(at[1]), "r"(at[2]));
  }
  barrier_wait(&barrier, 0);
  for (u32 i = threadIdx.x; i < bytes / 2; i += blockDim.x) out[blockIdx.x * (bytes / 2) + i] = tile[i];
}

#define STORE(instruction, coordinates, ...)                                                                          \
  asm volatile(instruction ".bulk_group [%1, " coordinates "], [%0];" ::"r"(shared_of(tile)), "l"(&map),              \
               __VA_ARGS__                                                                                            \
               : "memory")

// Block b stores a tile of counting words to the box at coordinates 3b.., or adds it there.
template <int rank, bool add>
__global__ void store(const __grid_constant__ TensorMap map, const int* coordinates, u32* out) {
  __shared__ __align__(1024) u32 tile[capacity / 4];
  const int* at = coordinates + 3 * blockIdx.x;
  fill(tile, 0x10000 * (blockIdx.x + 1));
  make_visible_to_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    if (rank == 3)
      STORE("cp.async.bulk.tensor.3d.global.shared::cta.tile", "{%2, %3, %4}", "r"(at[0]), "r"(at[1]), "r"(at[2]));
    else if (add)
      STORE("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile", "{%2, %3}", "r"(at[0]), "r"(at[1]));
    else
      STORE("cp.async.bulk.tensor.2d.global.shared::cta.tile", "{%2, %3}", "r"(at[0]), "r"(at[1]));
    asm volatile("cp.async.bulk.commit_group;");
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
}

// Each block of a cluster of two loads one half of a tile and sends it to both.
template <class = void>
__global__ void __cluster_dims__(2) multicast(const __grid_constant__ TensorMap map, u32* out, u32 bytes) {
  __shared__ __align__(1024) u32 tile[capacity / 4];
  __shared__ u64 barrier;
  const u32 rank = blockIdx.x % 2;
  if (threadIdx.x == 0) {
    barrier_init(&barrier, 1);
    barrier_expect(&barrier, 2 * bytes);
  }
  cluster_sync();
  if (threadIdx.x == 0)
    asm volatile(
        "{ .reg .b16 both; mov.b16 both, 3; cp.async.bulk.tensor.2d.shared::cluster.global.tile"
        ".mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4}], [%2], both; }" ::"r"(
            shared_of(tile) + rank * bytes),
        "l"(&map), "r"(shared_of(&barrier)), "r"(0), "r"(rank)
        : "memory");
  barrier_wait(&barrier, 0);
  for (u32 i = threadIdx.x; i < 2 * bytes / 4; i += blockDim.x) out[blockIdx.x * 2 * bytes / 4 + i] = tile[i];
  cluster_sync();
}
