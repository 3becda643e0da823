// mbarriers, bulk copies without a tensor map, and what the blocks of a cluster do to each other's shared memory.
#include "async.cuh"

// Two warps pass a buffer to and fro; then the arithmetic of one barrier's phase.
template <class = void>
__global__ void phases(const u32* x, u32* out) {
  __shared__ u32 staged[32];
  __shared__ u64 full, empty, lone;
  const u32 lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    barrier_init(&full, 32);
    barrier_init(&empty, 1);
    barrier_init(&lone, 3);
  }
  __syncthreads();
  for (u32 turn = 0; turn < 4; ++turn) {
    if (threadIdx.x < 32) {
      barrier_wait(&empty, turn % 2 ^ 1);
      staged[lane] = x[32 * turn + lane];
      asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_of(&full)) : "memory");
    } else {
      barrier_wait(&full, turn % 2);
      out[32 * turn + lane] = staged[31 - lane];
      __syncwarp();
      if (lane == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_of(&empty)) : "memory");
    }
  }
  if (threadIdx.x != 0) return;
  out += 128;
  const u32 at = shared_of(&lone);
  u64 state;
  u32 pending, done;
#define PENDING                                                                                                       \
  asm volatile("mbarrier.pending_count.b64 %0, %1;" : "=r"(pending) : "l"(state));                                    \
  *out++ = pending;
#define TEST                                                                                                          \
  asm volatile("{ .reg .pred p; mbarrier.test_wait.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p; }"              \
               : "=r"(done) : "r"(at), "l"(state) : "memory");                                                        \
  *out++ = done;
#define PARITY(parity)                                                                                                \
  asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p; }"       \
               : "=r"(done) : "r"(at), "r"(parity) : "memory");                                                       \
  *out++ = done;
  PARITY(0) PARITY(1)
  asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1];" : "=l"(state) : "r"(at) : "memory");
  PENDING TEST
  asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1], 2;" : "=l"(state) : "r"(at) : "memory");
  PENDING TEST PARITY(0) PARITY(1)
  asm volatile("mbarrier.arrive_drop.shared::cta.b64 %0, [%1];" : "=l"(state) : "r"(at) : "memory");
  PENDING TEST
  asm volatile("mbarrier.arrive.noComplete.release.cta.shared::cta.b64 %0, [%1], 1;" : "=l"(state) : "r"(at)
               : "memory");
  PENDING TEST
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 %0, [%1], 16;" : "=l"(state) : "r"(at) : "memory");
  PENDING TEST PARITY(0) PARITY(1)
  asm volatile("mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [%0], 16;" ::"r"(at) : "memory");
  TEST PARITY(0) PARITY(1)
  asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1], 2;" : "=l"(state) : "r"(at) : "memory");
  PENDING PARITY(0) PARITY(1)
}

// 512 bytes in, changed, out again, and reduced into what is there.
template <class = void>
__global__ void bulk(const u32* x, u32* out) {
  __shared__ __align__(128) u32 staged[128];
  __shared__ u64 barrier;
  if (threadIdx.x == 0) {
    barrier_init(&barrier, 1);
    barrier_expect(&barrier, 512);
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 512, [%2];" ::"r"(
                     shared_of(staged)), "l"(x), "r"(shared_of(&barrier))
                 : "memory");
  }
  __syncthreads();
  barrier_wait(&barrier, 0);
  out[threadIdx.x] = staged[127 - threadIdx.x];
  out[128 + threadIdx.x] = out[256 + threadIdx.x] = out[384 + threadIdx.x] = threadIdx.x * 0x01010101;
  __syncthreads();
  staged[threadIdx.x] ^= 0xffff;
  make_visible_to_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    make_visible_to_async();
    const u32 from = shared_of(staged);
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 256;" ::"l"(out + 128), "r"(from) : "memory");
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%0], [%1], 512;" ::"l"(out + 256),
                 "r"(from) : "memory");
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.xor.b32 [%0], [%1], 512;" ::"l"(out + 384),
                 "r"(from) : "memory");
    asm volatile("cp.async.bulk.commit_group;");
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
}

// Two blocks read, add to and write the other's shared memory; arrive at its barriers; copy to it.
template <class = void>
__global__ void __cluster_dims__(2) cluster(const u32* x, u32* out) {
  __shared__ __align__(16) u32 staged[64], counted[64], sent[64], copied[64];
  __shared__ u64 arrived, received, filled;
  const u32 thread = threadIdx.x, n = 64 * gridDim.x;
  u32 rank, there;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  x += blockIdx.x * 64;
  out += blockIdx.x * 64 + thread;
  staged[thread] = x[thread];
  counted[thread] = thread;
  if (thread == 0) {
    barrier_init(&arrived, 64);
    barrier_init(&received, 1);
    barrier_init(&filled, 1);
    barrier_expect(&received, 256);
    barrier_expect(&filled, 256);
  }
  make_visible_to_async();
  cluster_sync();
#define PEER(local)                                                                                                   \
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_of(local)), "r"(rank ^ 1));
  u32 value, old;
  PEER(staged + (thread ^ 5))
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(there) : "memory");
  PEER(counted + thread)
  asm volatile("atom.shared::cluster.add.u32 %0, [%1], %2;" : "=r"(old) : "r"(there), "r"(value % 1000) : "memory");
  out[0] = value, out[n] = old;
  u32 peer_barrier;
  PEER(&received)
  peer_barrier = there;
  PEER(sent + thread)
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(there), "r"(value + 1),
               "r"(peer_barrier) : "memory");
  PEER(&filled)
  peer_barrier = there;
  PEER(copied)
  if (thread == 0)
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], 256, [%2];" ::"r"(
                     there), "r"(shared_of(staged)), "r"(peer_barrier)
                 : "memory");
  PEER(&arrived)
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");
  barrier_wait(&arrived, 0);
  barrier_wait(&received, 0);
  barrier_wait(&filled, 0);
  out[2 * n] = sent[thread], out[3 * n] = copied[thread];
  cluster_sync();
  out[4 * n] = counted[thread];
  out += 5 * n;
#define REGISTER(name)                                                                                                \
  asm volatile("mov.u32 %0, %%" name ";" : "=r"(value));                                                              \
  *out = value, out += n;
  REGISTER("cluster_ctarank") REGISTER("cluster_nctarank") REGISTER("cluster_ctaid.x") REGISTER("cluster_nctaid.x")
  REGISTER("clusterid.x") REGISTER("nclusterid.x") REGISTER("ctaid.x") REGISTER("nctaid.x")
}
