// mbarriers and proxies for the kernels about asynchronous copies.
#pragma once
#include "lanes.cuh"

__device__ inline u32 shared_of(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ inline void barrier_init(u64* barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_of(barrier)), "r"(count) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void barrier_expect(u64* barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_of(barrier)), "r"(bytes)
               : "memory");
}

__device__ inline void barrier_wait(u64* barrier, u32 parity) {
  asm volatile(
      "{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra again; }" ::"r"(
          shared_of(barrier)),
      "r"(parity)
      : "memory");
}

__device__ inline void make_visible_to_async() { asm volatile("fence.proxy.async;" ::: "memory"); }

__device__ inline void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
