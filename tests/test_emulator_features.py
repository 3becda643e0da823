"""Calls, vectors, warp functions, barriers, atomics, memory and programs in the emulator, each against NumPy."""

from __future__ import annotations

import gc
import sys
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from emulation import SAXPY, compile_ptx, launch

from rawops._emulator import GlobalMemory, parse
from rawops._emulator.pause import no_collection
from rawops.errors import EmulatorError, MemoryFault, UnsupportedPTX

ARCHS = ("sm_80", "sm_90a")

SWITCH = """
__constant__ float table[5] = {1.5f, -2.0f, 0.25f, 8.0f, 100.0f};
__device__ __noinline__ float helper(float a, int b) { return a * b - 1.0f; }
extern "C" __global__ void k(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float local[6];
    #pragma unroll 1
    for (int j = 0; j < 6; ++j) local[j] = x[i] + j;
    float r;
    switch (i % 8) {
        case 0: r = helper(x[i], i); break;
        case 1: r = table[i % 5]; break;
        case 2: r = local[(i / 8) % 6]; break;
        case 3: r = floorf(x[i] * 10.0f); break;
        case 4: r = helper(local[5], 2) + helper(local[1], 3); break;
        case 5: r = fabsf(x[i]); break;
        case 6: r = (float)(int)(x[i] * 100.0f); break;
        default: r = x[i] > 0 ? 1.0f : -1.0f;
    }
    y[i] = r;
}
"""


@pytest.mark.parametrize("completion", ["late", "random"])
def test_switch_calls_local_arrays_and_constants(rng, completion):
    n = 203
    x = rng.standard_normal(n).astype(np.float32)
    y = np.full(n, np.nan, np.float32)
    launch(SWITCH, 2, 128, x, y, np.int32(n), completion=completion)
    table = np.array([1.5, -2, 0.25, 8, 100], np.float32)
    f = np.float32

    def expected(i, v):
        local = [v + f(j) for j in range(6)]
        fused = lambda a, b: f(float(a) * float(b) - 1)  # noqa: E731
        return [
            lambda: fused(v, i),
            lambda: table[i % 5],
            lambda: local[(i // 8) % 6],
            lambda: np.floor(v * f(10)),
            lambda: fused(local[5], 2) + fused(local[1], 3),
            lambda: abs(v),
            lambda: f(int(v * f(100))),
            lambda: f(1 if v > 0 else -1),
        ][i % 8]()

    np.testing.assert_array_equal(y, [expected(i, v) for i, v in enumerate(x)])


VECTORS = """
#include <cuda_fp16.h>
#include <cuda_bf16.h>
extern "C" __global__ void k(const uint4* a, uint4* b, const __half2* h, __half2* ho, const __nv_bfloat16* f,
                             __nv_bfloat16* fo, const double* d, double* dout) {
    int i = threadIdx.x;
    uint4 v = a[i];
    b[i] = make_uint4(v.w, v.z, v.y, v.x);
    ho[i] = __hfma2(h[i], h[i], __hadd2(h[i], h[(i + 1) % 64]));
    fo[i] = __hmul(f[i], f[(i + 3) % 64]);
    dout[i] = d[i] / d[(i + 1) % 64] + sqrt(fabs(d[i]));
}
"""


@pytest.mark.parametrize("arch", ARCHS)
def test_vectors_and_halves(rng, arch):
    a = rng.integers(0, 1 << 32, (64, 4)).astype(np.uint32)
    b = np.zeros_like(a)
    h = rng.standard_normal((64, 2)).astype(np.float16)
    ho = np.zeros_like(h)
    f = rng.standard_normal(64).astype(ml_dtypes.bfloat16)
    fo = np.zeros_like(f)
    d = rng.standard_normal(64)
    do = np.zeros(64)
    launch(VECTORS, 1, 64, a, b, h, ho, f, fo, d, do, arch=arch)
    np.testing.assert_array_equal(b, a[:, ::-1])
    added = (h.astype(np.float32) + np.roll(h, -1, 0).astype(np.float32)).astype(np.float16)
    np.testing.assert_array_equal(ho, (h.astype(np.float64) ** 2 + added).astype(np.float16))
    product = f.astype(np.float32) * np.roll(f, -3).astype(np.float32)
    np.testing.assert_array_equal(fo.view(np.uint16), product.astype(ml_dtypes.bfloat16).view(np.uint16))
    np.testing.assert_array_equal(do, d / np.roll(d, -1) + np.sqrt(np.abs(d)))


WARP = """
extern "C" __global__ void k(const int* x, unsigned* out) {
    int i = threadIdx.x, lane = i % 32;
    unsigned r = __ballot_sync(~0u, x[i] > 0);
    r ^= __popc(__match_any_sync(~0u, x[i] & 3)) << 8;
    if (lane < 12) {
        int m = __reduce_max_sync(0xfff, x[i]);
        r += m + __shfl_sync(0xfff, x[i], 3, 4);
        r += __any_sync(0xfff, x[i] == 5) * 1000 + __all_sync(0xfff, x[i] < 100) * 5000;
    } else {
        __syncwarp(0xfffff000);
        r += __reduce_add_sync(0xfffff000, (unsigned)x[i]);
    }
    out[i] = r;
}
"""


@pytest.mark.parametrize("completion", ["late", "random"])
def test_warp_functions_with_partial_masks(rng, completion):
    x = rng.integers(-50, 101, 96).astype(np.int32)
    out = np.zeros(96, np.uint32)
    launch(WARP, 1, 96, x, out, completion=completion)
    for w in range(3):
        v = x[32 * w : 32 * w + 32]
        ballot = sum(int(a > 0) << j for j, a in enumerate(v))
        for lane in range(32):
            r = ballot ^ (int(np.sum((v & 3) == (v[lane] & 3))) << 8)
            low = v[:12]
            if lane < 12:
                r += int(low.max()) + int(v[lane // 4 * 4 + 3])
                r += int((low == 5).any()) * 1000 + int((low < 100).all()) * 5000
            else:
                r += int(v[12:].sum())
            assert out[32 * w + lane] == r & 0xFFFFFFFF


COUNTING_BARRIERS = """
extern "C" __global__ void k(const int* x, int* out) {
    int v = x[blockIdx.x * blockDim.x + threadIdx.x];
    int n = __syncthreads_count(v > 0);
    int any = __syncthreads_or(v == 77), all = __syncthreads_and(v > -100);
    if (threadIdx.x == 0) { out[3 * blockIdx.x] = n; out[3 * blockIdx.x + 1] = any; out[3 * blockIdx.x + 2] = all; }
}
"""


@pytest.mark.parametrize("completion", ["late", "random"])
def test_barrier_reductions(rng, completion):
    x = rng.integers(-110, 110, (4, 64)).astype(np.int32)
    x[2] = np.abs(x[2])
    out = np.zeros((4, 3), np.int32)
    launch(COUNTING_BARRIERS, 4, 64, x, out, completion=completion)
    expected = np.stack([(x > 0).sum(1), (x == 77).any(1), (x > -100).all(1)], axis=1)
    np.testing.assert_array_equal(out, expected)


NAMED_BARRIERS = """
extern "C" __global__ void k(int* out) {
    __shared__ int ring[32];
    int lane = threadIdx.x % 32;
    if (threadIdx.x < 32) {
        for (int i = 0; i < 5; ++i) {
            if (i > 0) asm volatile("bar.sync 2, 64;" ::: "memory");
            ring[lane] = i * 100 + lane;
            asm volatile("bar.arrive 1, 64;" ::: "memory");
        }
    } else {
        for (int i = 0; i < 5; ++i) {
            asm volatile("bar.sync 1, 64;" ::: "memory");
            out[i * 32 + lane] = ring[31 - lane];
            if (i < 4) asm volatile("bar.arrive 2, 64;" ::: "memory");
        }
    }
}
"""


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("completion", ["late", "random"])
def test_producer_and_consumer_over_named_barriers(completion, seed):
    out = np.zeros((5, 32), np.int32)
    launch(NAMED_BARRIERS, 1, 64, out, completion=completion, seed=seed)
    np.testing.assert_array_equal(out, np.arange(5)[:, None] * 100 + np.arange(32)[::-1])


FLAGS = """
extern "C" __global__ void k(int* out) {
    __shared__ int data[32];
    __shared__ volatile int flag;
    if (threadIdx.x == 0) flag = 0;
    __syncthreads();
    if (threadIdx.x < 32) {
        data[threadIdx.x] = threadIdx.x * 3;
        __threadfence_block();
        __syncwarp();
        if (threadIdx.x == 0) { __threadfence_block(); flag = 1; }
    } else {
        while (flag == 0) { }
        __threadfence_block();
        out[threadIdx.x - 32] = data[63 - threadIdx.x];
    }
}
"""


def test_flags_in_shared_memory_order():
    out = np.zeros(32, np.int32)
    launch(FLAGS, 1, 64, out)
    np.testing.assert_array_equal(out, np.arange(32)[::-1] * 3)


ATOMICS = """
extern "C" __global__ void k(const int* x, int* i, unsigned* u, float* f, double* d, unsigned long long* q) {
    int v = x[blockIdx.x * blockDim.x + threadIdx.x];
    atomicMin(&i[0], v); atomicMax(&i[1], v); atomicXor(&i[2], v); atomicOr(&i[3], v); atomicAnd(&i[4], v);
    atomicSub(&i[5], v);
    atomicDec(&u[0], 17); atomicInc(&u[1], 17);
    atomicAdd(f, (float)v); atomicAdd(d, 0.5 * v); atomicAdd(q, 1ull << 33);
    q[1 + blockIdx.x * blockDim.x + threadIdx.x] = atomicMax(q + 200, (unsigned long long)(v + 1000));
}
"""


def test_atomics(rng):
    x = rng.integers(-500, 500, 128).astype(np.int32)
    i = np.array([0, 0, 0, 0, -1, 0], np.int32)
    u = np.array([3, 0], np.uint32)
    f, d, q = np.zeros(1, np.float32), np.zeros(1), np.zeros(201, np.uint64)
    launch(ATOMICS, 2, 64, x, i, u, f, d, q)
    both = [int(x.min(initial=0)), int(x.max(initial=0)), int(np.bitwise_xor.reduce(x))]
    both += [int(np.bitwise_or.reduce(x)), int(np.bitwise_and.reduce(x)), -int(x.sum())]
    assert i.tolist() == both
    dec, inc = 3, 0
    for _ in range(128):
        dec = 17 if dec == 0 or dec > 17 else dec - 1
        inc = 0 if inc >= 17 else inc + 1
    assert u.tolist() == [dec, inc]
    assert f[0] == x.sum() and d[0] == 0.5 * x.sum() and q[0] == 128 << 33
    running = np.concatenate(([0], np.maximum.accumulate(x + 1000)))
    np.testing.assert_array_equal(q[1:129], np.maximum(running[:-1], 0))


def test_special_registers():
    source = """
    extern "C" __global__ void k(int* out) {
        int t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
        int b = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
        int* o = out + 5 * (b * blockDim.x * blockDim.y * blockDim.z + t);
        unsigned lane, mask; long long c0 = clock64();
        asm("mov.u32 %0, %%laneid;" : "=r"(lane)); asm("mov.u32 %0, %%lanemask_lt;" : "=r"(mask));
        o[0] = lane; o[1] = __popc(mask); o[2] = t / 32 == threadIdx.y; o[3] = warpSize; o[4] = clock64() > c0;
    }
    """
    out = np.zeros((2 * 3 * 2, 32 * 2 * 2, 5), np.int32)
    launch(source, (2, 3, 2), (32, 2, 2), out)
    lane = np.arange(128) % 32
    assert (out[:, :, 0] == lane).all() and (out[:, :, 1] == lane).all()
    np.testing.assert_array_equal(out[0, :, 2], np.arange(128) // 32 == np.arange(128) // 32 % 2)
    assert (out[:, :, 3] == 32).all() and (out[:, :, 4] == 1).all()


def test_views_alias_and_negative_strides_map():
    base = np.arange(100, dtype=np.int32)
    memory = GlobalMemory()
    assert memory.map(base[10:20]) - memory.map(base) == 40
    assert memory.map(base[::-1]) == memory.map(base) + 99 * 4
    assert memory.map(base.reshape(10, 10).T) == memory.map(base)
    assert memory.map(base) % 16 == base.ctypes.data % 16
    assert memory.map(np.lib.stride_tricks.as_strided(base[4:], (3, 2), (8, 4))) == memory.map(base) + 16
    empty, scalar = np.zeros(0, np.float32), np.array(3.0)
    assert memory.map(empty) > 0 and memory.map(scalar) > 0 and memory.map(base[:0]) == memory.map(base)


def test_what_is_discarded_is_no_number():
    source = """extern "C" __global__ void k(float* x, int offset) {
        asm volatile("discard.global.L2 [%0], 128;" ::"l"(x + offset) : "memory");
    }"""
    x = np.arange(96, dtype=np.float32)
    launch(source, 1, 1, x, np.int32(32))
    assert np.isnan(x[32:64]).all()
    np.testing.assert_array_equal(x[:32], np.arange(32))
    np.testing.assert_array_equal(x[64:], np.arange(64, 96))
    with pytest.raises(MemoryFault, match="misaligned"):
        launch(source, 1, 1, x, np.int32(4))


def test_memory_forgets_arrays_that_are_gone():
    memory = GlobalMemory()
    addresses = [memory.map(np.zeros(4)) for _ in range(5000)]
    assert len(set(addresses)) == 5000
    assert len(memory._found[0]) < 4200


def test_threads_map_arrays_apart():
    """Each array has a place of its own, whatever threads of one program come at the same time."""
    interval = sys.getswitchinterval()
    memory, arrays = GlobalMemory(), [np.zeros(i % 7 + 1) for i in range(1600)]
    try:
        sys.setswitchinterval(1e-6)
        with ThreadPoolExecutor(8) as pool:
            places = list(pool.map(memory.map, arrays, chunksize=1))
    finally:
        sys.setswitchinterval(interval)
    assert len(set(places)) == len(arrays)
    assert all(memory.find(place).host == x.ctypes.data for place, x in zip(places, arrays, strict=True))


def test_program_is_cached_and_names_its_kernels():
    ptx = compile_ptx(SAXPY)
    assert parse(ptx, "k") is parse(str(ptx), "k")
    with pytest.raises(UnsupportedPTX, match="no kernel 'nope'; it has: k"):
        parse(ptx, "nope")


NESTED = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 out)
{
    .reg .b32 %r<4>, x;
    .reg .b64 %rd<2>;
    mov.b32 x,5;
    {
        mov.b32 %r1, x;
        .reg .b32 x;
        mov.b32 x, 7;
        { mov.b32 %r2,x; }
    }
    mov.b32 %r3, x;
    ld.param.u64 %rd1, [out];
    st.global.v4.b32 [%rd1], {%r1, %r2, %r3, x};
    ret;
}
"""


def test_a_name_stands_for_what_was_declared_last():
    out = np.zeros(4, np.int32)
    launch(NESTED, 1, 1, out)
    np.testing.assert_array_equal(out, [5, 7, 5, 5])


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_is_as_before(enabled):
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(KeyError), no_collection():
            with no_collection():
                pass
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() is enabled
        launch(NESTED, 1, 1, np.zeros(4, np.int32))
        assert gc.isenabled() is enabled
    finally:
        gc.enable()


MODULE = """
__device__ int numbers[4] = {10, 20, 30, 40};
__device__ int* pointer = numbers + 1;
__constant__ const char* words[2] = {"ab", "xyz"};
__device__ __noinline__ int inner(int a) { return a * 2 + (a > 5 ? numbers[a & 3] : 0); }
__device__ __noinline__ int outer(int a, long long b) { return inner(a + 1) - inner((int)b); }
extern "C" __global__ void k(int* out) {
    int i = threadIdx.x;
    out[i] = outer(i, i * 3) + pointer[i % 3] + words[i % 2][i % 2];
}
"""


@pytest.mark.parametrize("completion", ["late", "random"])
def test_module_variables_and_nested_calls(completion):
    out = np.zeros(64, np.int32)
    launch(MODULE, 1, 64, out, completion=completion)
    numbers, words = [10, 20, 30, 40], [b"ab", b"xyz"]

    def inner(a):
        return a * 2 + (numbers[a & 3] if a > 5 else 0)

    expected = [inner(i + 1) - inner(3 * i) + numbers[1 + i % 3] + words[i % 2][i % 2] for i in range(64)]
    np.testing.assert_array_equal(out, expected)


def test_recursion_is_refused_and_assertions_are_reported():
    source = """
    __device__ __noinline__ int f(int n) { return n < 2 ? 1 : f(n - 1) + f(n - 2); }
    extern "C" __global__ void k(int* out) { out[threadIdx.x] = f(threadIdx.x); }
    """
    with pytest.raises(UnsupportedPTX, match="recursion"):
        launch(source, 1, 32, np.zeros(32, np.int32))
    source = """
    #define assert(x) ((x) ? (void)0 : __assertfail(#x, "here.cu", 7, "k", 1))
    extern "C" __device__ void __assertfail(const char*, const char*, unsigned, const char*, size_t);
    extern "C" __global__ void k(int* out) { assert(out[threadIdx.x] == 0); }
    """
    with pytest.raises(EmulatorError, match=r"assertion failed: out\[threadIdx\.x\] == 0 \(here\.cu:7\)"):
        launch(source, 1, 32, np.arange(32, dtype=np.int32))


GENERIC = """
extern "C" __global__ void k(const int* x, int* out) {
    __shared__ int s[32];
    int local[4] = {1, 2, 3, 4};
    s[threadIdx.x] = threadIdx.x * 10;
    __syncthreads();
    const int* from = threadIdx.x % 3 == 0 ? x + threadIdx.x : threadIdx.x % 3 == 1 ? s + 31 - threadIdx.x : local + 1;
    asm volatile("" : "+l"(from));
    local[1] = threadIdx.x;
    int* to = threadIdx.x < 16 ? out : s;
    asm volatile("" : "+l"(to));
    to[threadIdx.x] = *from;
    atomicAdd(to + threadIdx.x, 1);
    __syncthreads();
    if (threadIdx.x >= 16) out[threadIdx.x] = s[threadIdx.x] + __isShared(to) * 1000 + __isGlobal(x) * 2000;
}
"""


def test_generic_addresses_of_several_spaces_at_once():
    x, out = np.arange(100, 132, dtype=np.int32), np.zeros(32, np.int32)
    launch(GENERIC, 1, 32, x, out, check=False)
    i = np.arange(32)
    expected = np.where(i % 3 == 0, x, np.where(i % 3 == 1, (31 - i) * 10, i)) + 1 + (i >= 16) * 3000
    np.testing.assert_array_equal(out, expected)


def test_a_barrier_opens_without_threads_that_exited_unless_checked():
    source = """
    extern "C" __global__ void k(int* out, int n) {
        __shared__ int s[128];
        if (threadIdx.x >= n) return;
        s[threadIdx.x] = threadIdx.x;
        __syncthreads();
        out[threadIdx.x] = s[n - 1 - threadIdx.x];
    }
    """
    out = np.zeros(70, np.int32)
    launch(source, 1, 128, out, np.int32(70), check=False)
    np.testing.assert_array_equal(out, np.arange(70)[::-1])


def test_random_order_depends_on_the_seed_alone(rng):
    source = """
    extern "C" __global__ void k(int* next, int* order) {
        if (threadIdx.x % 32 == 0) order[atomicAdd(next, 1)] = threadIdx.x / 32;
    }
    """
    orders = []
    for seed in (1, 1, 2):
        order = np.full(16, -1, np.int32)
        launch(source, 1, 512, np.zeros(1, np.int32), order, completion="random", seed=seed)
        orders.append(order.tolist())
        assert sorted(orders[-1]) == list(range(16))
    assert orders[0] == orders[1] != orders[2]
