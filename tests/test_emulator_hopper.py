"""The emulator's clusters, mbarriers and bulk copies."""

import numpy as np
import pytest
from hopper import launch, swizzle, tensor_map

from rawops.errors import BarrierError, EmulatorError, MemoryFault, RaceError, UninitializedRead

# ---- clusters ------------------------------------------------------------------------------------------------------

CLUSTER = """
__device__ u32 rank() { u32 r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
__device__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ u32 peer(u32 address, u32 of) {
  u32 out;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(out) : "r"(address), "r"(of));
  return out;
}
// Each block of the pair loads half of the tile and sends it to both.
__global__ void __cluster_dims__(2) multicast(const __grid_constant__ TMap map, u32* out) {
  __shared__ __align__(1024) u32 tile[16 * 32];
  __shared__ u64 bar;
  if (threadIdx.x == 0) { init(&bar, 1); fence_init(); }
  cluster_sync();
  if (threadIdx.x == 0) {
    expect(&bar, sizeof(tile));
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
                 " [%0], [%1, {%2, %3}], [%4], %5;"
                 ::"r"(at(tile + rank() * 256)), "l"(&map), "r"(0), "r"((int)rank() * 8), "r"(at(&bar)),
                 "h"((unsigned short)3) : "memory");
  }
  wait(&bar, 0);
  for (int i = threadIdx.x; i < 512; i += blockDim.x) out[blockIdx.x * 512 + i] = tile[i] + rank();
  cluster_sync();
}
__global__ void __cluster_dims__(4) dsmem(const float* x, float* out) {
  __shared__ float sums[4], part[4];
  float v = x[blockIdx.x * 32 + threadIdx.x];
  for (int i = 16; i; i /= 2) v += __shfl_xor_sync(~0u, v, i);
  if (threadIdx.x < 4)
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(peer(at(&sums[rank()]), threadIdx.x)), "f"(v) : "memory");
#ifndef NO_SYNC
  cluster_sync();
#endif
  if (threadIdx.x == 0) out[blockIdx.x] = sums[0] + sums[1] + sums[2] + sums[3];
  cluster_sync();
}
// Block 1 sends a word a lane to block 0, whose barrier counts them; then it arrives on that barrier itself.
__global__ void __cluster_dims__(2) remote(u32* out) {
  __shared__ u32 inbox[32];
  __shared__ u64 bar;
  if (threadIdx.x == 0) { init(&bar, 2); fence_init(); }
  cluster_sync();
  if (rank() == 1) {
    u32 there = peer(at(&bar), 0);
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];"
                 ::"r"(peer(at(&inbox[threadIdx.x]), 0)), "r"(threadIdx.x * 3), "r"(there) : "memory");
    if (threadIdx.x == 0)
      asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");
  } else {
    if (threadIdx.x == 0) expect(&bar, 128);
    wait(&bar, 0);
    out[threadIdx.x] = inbox[threadIdx.x];
  }
  cluster_sync();
}
"""


@pytest.mark.parametrize("completion", ["late", "early", "random"])
def test_multicast_to_a_cluster(completion, rng):
    src, out = rng.integers(0, 2**31, (16, 32)).astype(np.uint32), np.zeros((4, 512), np.uint32)
    map_ = tensor_map(src, (8, 32), swizzle=128)
    launch(CLUSTER, "multicast", (map_, out), grid=4, block=64, completion=completion)
    image = swizzle(src.reshape(-1).view(np.uint8), 128).view(np.uint32)
    assert np.array_equal(out, image + (np.arange(4, dtype=np.uint32) % 2)[:, None])


def test_distributed_shared_memory_sum(rng):
    x, out = rng.integers(-9, 9, (8, 32)).astype(np.float32), np.zeros(8, np.float32)
    launch(CLUSTER, "dsmem", (x, out), grid=8, block=32)
    assert np.array_equal(out, np.repeat(x.reshape(2, -1).sum(1), 4))


def test_distributed_shared_memory_without_a_barrier_is_refused():
    x, out = np.zeros((8, 32), np.float32), np.zeros(8, np.float32)
    with pytest.raises((RaceError, UninitializedRead)):
        launch(CLUSTER, "dsmem", (x, out), grid=8, block=32, options=["-DNO_SYNC"])


@pytest.mark.parametrize("completion", ["late", "early", "random"])
def test_remote_arrivals_and_st_async(completion):
    out = np.zeros(32, np.uint32)
    launch(CLUSTER, "remote", (out,), grid=2, block=32, completion=completion)
    assert np.array_equal(out, np.arange(32) * 3)


RELAXED = """
// Every warp of the pair arrives at the barrier of each block.
__global__ void __cluster_dims__(2) relaxed(u32* out) {
  __shared__ u64 bar;
  __shared__ u32 word;
  if (threadIdx.x == 0) {
    word = out[0];
    init(&bar, 4);
#ifndef NO_FENCE
    fence_init();
#endif
  }
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#ifdef EARLY
  out[threadIdx.x] = word;
#endif
  for (u32 of = 0; of < 2; ++of)
    if (threadIdx.x % 32 == 0)
      asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(peer(at(&bar), of)) : "memory");
  wait(&bar, 0);
  out[threadIdx.x] = word;
  cluster_sync();
}
"""


def test_a_fence_and_relaxed_arrivals_publish_barriers_alone():
    out = np.zeros(64, np.uint32)
    out[0] = 7
    launch(CLUSTER + RELAXED, "relaxed", (out,), grid=2, block=64)
    assert (out == 7).all()
    for option, message in (("-DNO_FENCE", "ordered after its mbarrier.init"), ("-DEARLY", "word")):
        with pytest.raises(RaceError, match=message):
            launch(CLUSTER + RELAXED, "relaxed", (out,), grid=2, block=64, options=[option])


# ---- mbarrier pipelines --------------------------------------------------------------------------------------------

RING = """
// Warp 0 fills a ring of three slots by bulk copies, two consumer warps add the slots up.
__global__ void ring(const float* x, float* out, int slots) {
  __shared__ __align__(128) float slot[3][64];
  __shared__ u64 full[3], empty[3];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 3; ++i) { init(&full[i], 1); init(&empty[i], 2); }
    fence_init();
  }
#ifndef NO_SYNC
  __syncthreads();
#endif
  if (warp == 0) {
    if (lane == 0)
      for (int i = 0; i < slots; ++i) {
#ifndef NO_EMPTY
        wait(&empty[i % 3], (i / 3 & 1) ^ 1);
#endif
        expect(&full[i % 3], 256);
        bulk_load(slot[i % 3], x + i * 64, 256, &full[i % 3]);
      }
    return;
  }
  float sum = 0;
  for (int i = 0; i < slots; ++i) {
    wait(&full[i % 3], i / 3 & 1);
    sum += slot[i % 3][(warp - 1) * 32 + lane];
    __syncwarp();
    if (lane == 0) arrive(&empty[i % 3]);
  }
  out[threadIdx.x - 32] = sum;
}
__global__ void async_arrive(const float* x, float* out) {
  __shared__ float tile[64];
  __shared__ u64 bar;
  if (threadIdx.x == 0) { init(&bar, 64); fence_init(); }
  __syncthreads();
  u32 mine = at(&tile[threadIdx.x]);
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(mine), "l"(x + threadIdx.x) : "memory");
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(at(&bar)) : "memory");
  wait(&bar, 0);
  out[threadIdx.x] = tile[63 - threadIdx.x];
}
// A try_wait that nobody can fulfil before it has timed out.
__global__ void time_out(u32* out) {
  __shared__ u64 bar;
  init(&bar, 1);
  u32 done, rounds = 0;
  do {
    asm volatile("{\\n.reg .pred p;\\nmbarrier.try_wait.parity.shared.b64 p, [%1], 0;\\nselp.u32 %0, 1, 0, p;\\n}"
                 : "=r"(done) : "r"(at(&bar)) : "memory");
    if (++rounds == 1) arrive(&bar);
  } while (!done);
  out[0] = rounds;
}
__global__ void tokens(u32* out) {
  __shared__ u64 bar;
  u64 state;
  u32 done = 0, pending;
  if (threadIdx.x == 0) init(&bar, 2);
  __syncthreads();
  asm volatile("mbarrier.arrive.shared.b64 %0, [%1];" : "=l"(state) : "r"(at(&bar)) : "memory");
  asm volatile("mbarrier.pending_count.b64 %0, %1;" : "=r"(pending) : "l"(state));
  while (!done)
    asm volatile("{\\n.reg .pred p;\\nmbarrier.test_wait.shared.b64 p, [%1], %2;\\nselp.u32 %0, 1, 0, p;\\n}"
                 : "=r"(done) : "r"(at(&bar)), "l"(state) : "memory");
  out[threadIdx.x] = pending;
}
"""


@pytest.mark.parametrize("completion", ["late", "early", "random"])
def test_producer_consumer_ring(completion, rng):
    x, out = rng.integers(-9, 9, (10, 64)).astype(np.float32), np.zeros(64, np.float32)
    launch(RING, "ring", (x, out, 10), block=96, completion=completion)
    assert np.array_equal(out, x.sum(0))


@pytest.mark.parametrize("option", ["NO_EMPTY", "NO_SYNC"])
def test_a_ring_with_a_missing_wait_is_refused(option):
    x, out = np.zeros((10, 64), np.float32), np.zeros(64, np.float32)
    with pytest.raises(EmulatorError):
        launch(RING, "ring", (x, out, 10), block=96, options=[f"-D{option}"])


@pytest.mark.parametrize("completion", ["late", "early", "random"])
def test_cp_async_arrives_on_an_mbarrier(completion, rng):
    x, out = rng.standard_normal(64).astype(np.float32), np.zeros(64, np.float32)
    launch(RING, "async_arrive", (x, out), block=64, completion=completion)
    assert np.array_equal(out, x[::-1])


def test_try_wait_times_out_when_nothing_else_can_run():
    out = np.zeros(1, np.uint32)
    launch(RING, "time_out", (out,), block=1)
    assert out[0] == 2


def test_state_tokens():
    out = np.zeros(2, np.uint32)
    launch(RING, "tokens", (out,), block=2)
    assert sorted(out) in ([1, 2], [2, 2])


MISUSE = """
__global__ void k(u32* out, int which) {
  __shared__ u64 bar;
  if (which == 1) init(&bar, 4);
  if (which == 0) arrive(&bar);                                    // never initialised
  if (which == 1) asm volatile("mbarrier.arrive.shared.b64 _, [%0], 5;" ::"r"(at(&bar)) : "memory");
  if (which == 2) init(&bar, out[0]);  // which is 0; NVRTC 13.0 crashes on the constant
  out[0] = 1;
}
// A barrier for three: counts, drops, and bytes without a copy.
__global__ void counts(u32* out) {
  __shared__ u64 bar;
  init(&bar, 3);
  asm volatile("mbarrier.arrive.noComplete.shared.b64 _, [%0], 2;" ::"r"(at(&bar)) : "memory");
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], 16;" ::"r"(at(&bar)) : "memory");
  asm volatile("mbarrier.arrive_drop.shared.b64 _, [%0];" ::"r"(at(&bar)) : "memory");
  auto phase_is_over = [&](int parity) {
    u32 done;
    asm volatile("{\\n.reg .pred p;\\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\\nselp.u32 %0, 1, 0, p;\\n}"
                 : "=r"(done) : "r"(at(&bar)), "r"(parity) : "memory");
    return done;
  };
  out[0] = phase_is_over(0);
  asm volatile("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%0], 16;" ::"r"(at(&bar)) : "memory");
  out[1] = phase_is_over(0);
  asm volatile("mbarrier.arrive.shared.b64 _, [%0], 2;" ::"r"(at(&bar)) : "memory");  // of two, after the drop
  out[2] = phase_is_over(1);
  asm volatile("mbarrier.inval.shared.b64 [%0];" ::"r"(at(&bar)) : "memory");
}
"""


@pytest.mark.parametrize(
    ("which", "error", "message"),
    [
        (0, BarrierError, "no mbarrier was initialised at 0x400"),
        (1, BarrierError, "5 arrivals are more than fit"),
        (2, EmulatorError, "the count must be from 1"),
    ],
)
def test_misused_mbarriers(which, error, message):
    with pytest.raises(error, match=message):
        launch(MISUSE, "k", (np.zeros(1, np.uint32), which), block=1)


def test_mbarrier_counts_drops_and_bytes():
    out = np.zeros(3, np.uint32)
    launch(MISUSE, "counts", (out,), block=1)
    assert out.tolist() == [0, 1, 1]


# ---- bulk copies ---------------------------------------------------------------------------------------------------

BULK = """
__device__ u32 peer(const void* p, u32 rank) {
  u32 out;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(out) : "r"(at(p)), "r"(rank));
  return out;
}
__device__ void cluster_sync() { asm volatile("barrier.cluster.arrive;\\nbarrier.cluster.wait;" ::: "memory"); }
// The blocks of a pair send each other their words, add the receiver's rank plus 1 there, and store what they hold.
__global__ void __cluster_dims__(2) exchange(const u32* x, u32* out) {
  __shared__ __align__(16) u32 mine[64], got[64];
  __shared__ u64 copied, added;
  u32 other, owner;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(other));
  other ^= 1;
  asm volatile("getctarank.shared::cluster.u32 %0, %1;" : "=r"(owner) : "r"(peer(got, other)));
  if (threadIdx.x == 0) {
    init(&copied, 1), init(&added, 1);
    fence_init();
    expect(&copied, 256), expect(&added, 256);
  }
  mine[threadIdx.x] = x[blockIdx.x * 64 + threadIdx.x];
  fence_async();
  cluster_sync();
  if (threadIdx.x == 0)
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], 256, [%2];"
                 ::"r"(peer(got, other)), "r"(at(mine)), "r"(peer(&copied, other)) : "memory");
  wait(&copied, 0);
  cluster_sync();
  asm volatile("red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%0], %1, [%2];"
               ::"r"(peer(&got[threadIdx.x], other)), "r"(owner + 1), "r"(peer(&added, other)) : "memory");
  wait(&added, 0);
  if (threadIdx.x == 0) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], 256;" ::"l"(x));
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 ::"l"(out + blockIdx.x * 64), "r"(at(got)), "r"(256) : "memory");
#ifndef NO_WAIT
    commit();
    wait_bulk();
#endif
  }
  cluster_sync();
}
__global__ void odd(const u32* x, int bytes) {
  __shared__ __align__(128) u32 words[64];
  __shared__ u64 bar;
  init(&bar, 1);
  bulk_load(words, x, bytes, &bar);
}
// Turns a map to the second of two tensors and loads its first box.
__global__ void retarget(const __grid_constant__ TMap given, TMap* map, const u32* x, u32* out) {
  __shared__ __align__(128) u32 tile[64];
  __shared__ u64 bar;
  for (int i = 0; i < 16; ++i) map->opaque[i] = given.opaque[i];
  asm volatile("tensormap.replace.tile.global_address.global.b1024.b64 [%0], %1;" ::"l"(map), "l"(x) : "memory");
  asm volatile("tensormap.replace.tile.global_dim.global.b1024.b32 [%0], 1, %1;" ::"l"(map), "r"(3) : "memory");
  asm volatile("fence.proxy.tensormap::generic.release.gpu;\\n"
               "fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
  init(&bar, 1);
  expect(&bar, 256);
  load_2d(tile, map, 0, 0, &bar);
  wait(&bar, 0);
  for (int i = 0; i < 64; ++i) out[i] = tile[i];
}
"""


@pytest.mark.parametrize("completion", ["late", "early", "random"])
def test_bulk_copies_between_blocks_and_out(completion, rng):
    x, out = rng.integers(0, 99, (4, 64)).astype(np.uint32), np.zeros((4, 64), np.uint32)
    launch(BULK, "exchange", (x, out), grid=4, block=64, completion=completion)
    assert np.array_equal(out, x[[1, 0, 3, 2]] + np.array([[1], [2], [1], [2]]))


def test_exit_with_a_bulk_store_in_flight_is_refused():
    x, out = np.zeros((2, 64), np.uint32), np.zeros((2, 64), np.uint32)
    with pytest.raises(EmulatorError, match="wait_group is missing"):
        launch(BULK, "exchange", (x, out), grid=2, block=64, options=["-DNO_WAIT"])


def test_exit_with_a_bulk_load_in_flight_is_refused():
    with pytest.raises(BarrierError, match="exited with copies to its shared memory in flight"):
        launch(BULK, "odd", (np.zeros(64, np.uint32), 64), block=1)


def test_bulk_copies_come_in_units_of_16_bytes():
    with pytest.raises(MemoryFault, match="is not in units of 16 bytes"):
        launch(BULK, "odd", (np.zeros(64, np.uint32), 24), block=1)


def test_a_tensor_map_can_be_changed_by_the_kernel(rng):
    x, out = rng.integers(1, 99, (4, 16)).astype(np.uint32), np.zeros((4, 16), np.uint32)
    storage, other = np.zeros(128, np.uint8), np.zeros((4, 16), np.uint32)
    launch(BULK, "retarget", (tensor_map(other, (4, 16)), storage, x, out), block=1)
    assert np.array_equal(out[:3], x[:3])
    assert not out[3].any()


def test_setmaxnreg_takes_what_hardware_takes():
    source = """__global__ void __launch_bounds__(128) k(u32* x) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
      x[threadIdx.x] = 1;
    }"""
    out = np.zeros(128, np.uint32)
    launch(source, "k", (out,))
    assert out.all()
