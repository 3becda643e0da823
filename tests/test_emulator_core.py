"""The emulator runs ordinary CUDA C++: results are those of NumPy, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
from emulation import SAXPY, launch

import rawops
from rawops.errors import MemoryFault

ARCHS = ("sm_80", "sm_90a")


@pytest.mark.parametrize("completion", ["late", "random"])
def test_barriers_named_by_registers(completion):
    source = """
extern "C" __global__ void k(const int* x, int* y) {
    __shared__ int s[256];
    int t = threadIdx.x, group = t / 64;
    s[t] = x[t];
    if (group == 3) group += 2;
    asm volatile("bar.sync %0, %1;" :: "r"(group + 1), "r"(64) : "memory");
    y[t] = s[t ^ 63];
    if (t < 32) asm volatile("bar.arrive %0, %1;" :: "r"(group + 7), "r"(256) : "memory");
    else asm volatile("bar.sync %0, 256;" :: "r"(group / 8 + 7) : "memory");
    y[t] += s[t % 32];
}
"""
    x, y = np.arange(256, dtype=np.int32) ** 2, np.zeros(256, np.int32)
    report = launch(source, 1, 256, x, y, completion=completion)
    assert np.array_equal(y, x[np.arange(256) ^ 63] + x[np.arange(256) % 32])
    assert report.barriers == 5


@pytest.mark.parametrize("threads", [128, 1000])
def test_unrolled_arithmetic(threads, rng):
    """Neighbouring instructions of one kind, which run as one, on all lanes and on some."""
    source = """
#include <cuda_fp16.h>
extern "C" __global__ void k(const float* x, const int* n, float* y, __half* h, int* m) {
    int t = threadIdx.x;
    float a[16], b[16]; int c[16];
    for (int i = 0; i < 16; ++i) { a[i] = x[16 * t + i]; c[i] = n[16 * t + i]; }
    for (int i = 0; i < 16; ++i) b[i] = fmaf(a[i], a[15 - i], a[i / 2]);
    if (t % 3) for (int i = 0; i < 16; ++i) { b[i] += a[i]; c[i] <<= i % 2 ? 3 : t & 7; }
    if (t >= 64) for (int i = 0; i < 16; ++i) { b[i] = b[(i + 1) % 16] * 3.0f; c[i] ^= 0x55; }
    for (int i = 1; i < 16; ++i) a[i] = a[i - 1] + a[i];
    for (int i = 0; i < 16; ++i) {
        y[16 * t + i] = b[i] + a[i];
        h[16 * t + i] = __float2half(b[i]);
        m[16 * t + i] = c[i];
    }
}
"""
    x = rng.standard_normal((threads, 16)).astype(np.float32)
    n = rng.integers(-1000, 1000, (threads, 16)).astype(np.int32)
    y, h, m = np.zeros_like(x), np.zeros(x.shape, np.float16), np.zeros_like(n)
    launch(source, 1, threads, x, n, y, h, m)
    t = np.arange(threads)[:, None]
    b = (x.astype(float) * x[:, ::-1] + x[:, np.arange(16) // 2]).astype(np.float32)
    b = np.where(t % 3, b + x, b)
    c = np.where(t % 3, n << np.where(np.arange(16) % 2, 3, t & 7), n)
    late = b.copy()
    for i in range(16):
        late[:, i] = late[:, (i + 1) % 16] * np.float32(3)
    b, c = np.where(t >= 64, late, b), np.where(t >= 64, c ^ 0x55, c)
    assert np.array_equal(y, b + np.cumsum(x, axis=1, dtype=np.float32))
    assert np.array_equal(h, b.astype(np.float16))
    assert np.array_equal(m, c)


def test_launches_alike_differ_in_grid_parameters_and_memory():
    source = """
extern "C" __global__ void k(int* x, int n, int base) {
    __shared__ int s[64];
    s[threadIdx.x] = base + threadIdx.x;
    __syncthreads();
    int i = (blockIdx.y * gridDim.x + blockIdx.x) * 64 + threadIdx.x;
    if (i < n) x[i] = s[63 - threadIdx.x] * gridDim.x;
}
"""
    for grid, base in (((3, 2), 10), ((2, 3), 500), ((6, 1), -7)):
        x = np.zeros(384, np.int32)
        launch(source, grid, 64, x, np.int32(384), np.int32(base))
        assert np.array_equal(x, np.tile(base + 63 - np.arange(64), 6) * grid[0])
        with pytest.raises(MemoryFault, match="past the end"):
            launch(source, (7, 1), 64, x, np.int32(385), np.int32(base))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("n", "block"), [(1, 32), (1000, 128), (5003, 96), (4096, 256)])
def test_saxpy(rng, arch, n, block):
    x, y = rng.standard_normal((2, n)).astype(np.float32)
    expected = (np.float32(1.7) * x.astype(np.float64) + y).astype(np.float32)
    report = launch(SAXPY, -(-n // block), block, np.float32(1.7), x, y, np.int32(n), arch=arch)
    np.testing.assert_array_equal(y, expected)
    assert report.loads.global_requests == 2 * -(-n // 32)
    assert report.arch == arch
    assert "saxpy" not in str(report) and "float" in report.instructions


BLOCK_SUM = """
extern "C" __global__ void k(const int* x, int* out, int n) {
    __shared__ int partial[8];
    int sum = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) sum += x[i];
    for (int offset = 16; offset > 0; offset >>= 1) sum += __shfl_xor_sync(~0u, sum, offset);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x < 32) {
        sum = threadIdx.x < blockDim.x / 32 ? partial[threadIdx.x] : 0;
        for (int offset = 4; offset > 0; offset >>= 1) sum += __shfl_down_sync(~0u, sum, offset);
        if (threadIdx.x == 0) atomicAdd(out, sum);
    }
}
"""


def test_reduction_with_shuffles(rng):
    x = rng.integers(-1000, 1000, 10007).astype(np.int32)
    out = np.zeros(1, np.int32)
    report = launch(BLOCK_SUM, 7, 256, x, out, np.int32(len(x)))
    assert out[0] == x.sum()
    assert report.barriers == 7


TREE = """
extern "C" __global__ void k(const float* x, float* out) {
    extern __shared__ float s[];
    int t = threadIdx.x;
    s[t] = x[blockIdx.x * blockDim.x + t];
    __syncthreads();
    for (int h = blockDim.x / 2; h > 0; h /= 2) {
        if (t < h) s[t] += s[t + h];
        __syncthreads();
    }
    if (t == 0) out[blockIdx.x] = s[0];
}
"""


@pytest.mark.parametrize("completion", ["late", "early", "random"])
def test_shared_memory_tree(rng, completion):
    x = rng.standard_normal((9, 128)).astype(np.float32)
    expected = x.copy()
    while expected.shape[1] > 1:
        half = expected.shape[1] // 2
        expected = expected[:, :half] + expected[:, half:]
    out = np.full(9, np.nan, np.float32)
    launch(TREE, 9, 128, x, out, shared_bytes=512, completion=completion, seed=3)
    np.testing.assert_array_equal(out, expected[:, 0])


DIVERGENT = """
extern "C" __global__ void k(const unsigned* x, unsigned* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    unsigned v = x[i], steps = 0;
    while (v != 1) {
        v = v % 2 ? 3 * v + 1 : v / 2;
        if (++steps == 60) break;
        if (v == 40) continue;
        steps += v == 10;
    }
    out[i] = steps;
}
"""


def test_divergent_loops():
    x = np.arange(1, 200, dtype=np.uint32)
    out = np.zeros_like(x)
    report = launch(DIVERGENT, 2, 128, x, out, np.int32(len(x)))

    def steps(v):
        count = 0
        while v != 1:
            v = 3 * v + 1 if v % 2 else v // 2
            count += 1
            if count == 60:
                break
            count += v == 10
        return count

    np.testing.assert_array_equal(out, [steps(int(v)) for v in x])
    assert report.total.divergent > 10


HISTOGRAM = """
extern "C" __global__ void k(const unsigned char* x, unsigned* bins, unsigned* order, int n) {
    __shared__ unsigned local[64];
    for (int b = threadIdx.x; b < 64; b += blockDim.x) local[b] = 0;
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        unsigned before = atomicAdd(&local[x[i] % 64], 1u);
        if (before == 0) atomicAdd(order, 1u);
    }
    __syncthreads();
    for (int b = threadIdx.x; b < 64; b += blockDim.x) atomicAdd(&bins[b], local[b]);
}
"""


def test_histogram(rng):
    x = rng.integers(0, 256, 3001).astype(np.uint8)
    bins, order = np.zeros(64, np.uint32), np.zeros(1, np.uint32)
    launch(HISTOGRAM, 2, 128, x, bins, order, np.int32(len(x)))
    np.testing.assert_array_equal(bins, np.bincount(x % 64, minlength=64))
    assert 64 <= order[0] <= 128


SCAN = """
extern "C" __global__ void k(const int* x, int* out, int n) {
    __shared__ int warp_sums[32];
    int i = threadIdx.x, lane = i % 32, warp = i / 32;
    int v = i < n ? x[i] : 0;
    for (int d = 1; d < 32; d *= 2) {
        int other = __shfl_up_sync(~0u, v, d);
        if (lane >= d) v += other;
    }
    if (lane == 31) warp_sums[warp] = v;
    __syncthreads();
    if (warp == 0) {
        int s = lane < blockDim.x / 32 ? warp_sums[lane] : 0;
        for (int d = 1; d < 32; d *= 2) {
            int other = __shfl_up_sync(~0u, s, d);
            if (lane >= d) s += other;
        }
        if (lane < blockDim.x / 32) warp_sums[lane] = s;
    }
    __syncthreads();
    if (warp > 0) v += warp_sums[warp - 1];
    if (i < n) out[i] = v;
}
"""


@pytest.mark.parametrize("completion", ["late", "random"])
def test_scan(rng, completion):
    x = rng.integers(-50, 50, 500).astype(np.int32)
    out = np.zeros_like(x)
    launch(SCAN, 1, 512, x, out, np.int32(len(x)), completion=completion)
    np.testing.assert_array_equal(out, np.cumsum(x))


TRANSPOSE = """
extern "C" __global__ void k(const float* x, float* y, int rows, int cols) {
    __shared__ float tile[32][PITCH];
    int c = blockIdx.x * 32 + threadIdx.x, r0 = blockIdx.y * 32;
    for (int j = threadIdx.y; j < 32; j += 8)
        if (r0 + j < rows && c < cols) tile[j][threadIdx.x] = x[(size_t)(r0 + j) * cols + c];
    __syncthreads();
    int r = r0 + threadIdx.x;
    for (int j = threadIdx.y; j < 32; j += 8) {
        int cc = blockIdx.x * 32 + j;
        if (r < rows && cc < cols) y[(size_t)cc * rows + r] = tile[threadIdx.x][j];
    }
}
"""


@pytest.mark.parametrize(("pitch", "conflicts"), [(32, 31), (33, 0)])
def test_transpose_and_bank_conflicts(rng, pitch, conflicts):
    x = rng.standard_normal((64, 96)).astype(np.float32)
    y = np.zeros((96, 64), np.float32)
    report = launch(TRANSPOSE.replace("PITCH", str(pitch)), (3, 2), (32, 8), x, y, np.int32(64), np.int32(96))
    np.testing.assert_array_equal(y, x.T)
    assert report.total.shared_requests == 2 * 6 * 32
    assert report.total.shared_conflicts == conflicts * 6 * 32
    assert report.loads.efficiency == report.stores.efficiency == 1
    if conflicts:
        assert max(report.table(), key=lambda row: row["shared_conflicts"])["line"] == 11


STRIDED = """
extern "C" __global__ void k(const float* x, float* y, int stride) {
    y[threadIdx.x] = x[threadIdx.x * stride];
}
"""


@pytest.mark.parametrize(("stride", "sectors"), [(1, 4), (2, 8), (8, 32), (0, 1)])
def test_coalescing_report(stride, sectors):
    x, y = np.arange(256, dtype=np.float32), np.zeros(32, np.float32)
    report = launch(STRIDED, 1, 32, x, y, np.int32(stride))
    assert report.loads.global_sectors == sectors
    np.testing.assert_array_equal(y, x[np.arange(32) * stride])
    report = launch(STRIDED, 1, 32, x, y, np.int32(stride), check=False)
    assert str(report).count("not counted without check=True") == 2


def test_arrays_that_the_emulator_allocates_lie_as_a_devices_do():
    """At multiples of 256, as CuPy's: what the report counts is then the same every time."""
    with rawops.emulate() as emu:
        kept = [emu.device.empty((size,), np.float16) for size in (1, 7, 100, 4099, 77, 3, 65536)]
        assert [emu.device.pointer(x) % 256 for x in kept] == [0] * len(kept)


SEMAPHORE = """
extern "C" __global__ void k(int* turn, int* log, int* next) {
    if (threadIdx.x == 0) {
        while (*(volatile int*)turn != gridDim.x - 1 - blockIdx.x) { }
        log[(*next)++] = blockIdx.x;
        __threadfence();
        atomicAdd(turn, 1);
    }
}
"""


@pytest.mark.parametrize("resident_lanes", [32, 96, 4096])
def test_blocks_wait_for_each_other(resident_lanes):
    turn, log, following = np.zeros(1, np.int32), np.full(7, -1, np.int32), np.zeros(1, np.int32)
    launch(SEMAPHORE, 7, 32, turn, log, following, resident_lanes=resident_lanes)
    np.testing.assert_array_equal(log, np.arange(7)[::-1])


# Two warps poll for what the others write after a barrier of their own.
POLL_BESIDE_A_BARRIER = """
extern "C" __global__ void k(int* flag, int* out) {
    if (threadIdx.x < 64) {
        int seen = 0, warp_sees = 0;
        #pragma unroll 1
        while (!warp_sees) {
            LOAD
            warp_sees = __any_sync(~0u, seen);
        }
        out[threadIdx.x] = warp_sees;
    } else {
        asm volatile("bar.sync 1, 64;" ::: "memory");
        if (threadIdx.x == 64) atomicExch(flag, 1);
    }
}
"""


@pytest.mark.parametrize("completion", ["late", "random"])
@pytest.mark.parametrize("operation", ["ld.global", "ld.acquire.gpu.global"])
def test_a_poll_lets_those_at_a_barrier_go_on(operation, completion):
    """Also one in a loop of several basic blocks, and one by a load that does not say that others may write."""
    load = f'asm volatile("{operation}.s32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");'
    out = np.zeros(64, np.int32)
    source = POLL_BESIDE_A_BARRIER.replace("LOAD", f"if (threadIdx.x % 32 == 0) {{ {load} }}")
    launch(source, 1, 128, np.zeros(1, np.int32), out, completion=completion, max_steps=30_000)
    assert (out == 1).all()


POLL_IN_SEVERAL_STEPS = """
extern "C" __global__ void k(volatile int* flag, int* out) {
    int odd = 0;
    if (blockIdx.x == 0) {
        #pragma unroll 1
        while (true) {
            const int seen = *flag;
            if (seen & 1) {
                odd += 1;
                __nanosleep(20);
            } else if (seen) {
                break;
            }
        }
        out[threadIdx.x] = 2;
    } else if (threadIdx.x == 0) {
        *flag = 2;
    }
}
"""


@pytest.mark.parametrize("completion", ["late", "random"])
def test_a_loop_of_several_steps_waits_for_another_block(completion):
    out = np.zeros(128, np.int32)
    launch(
        POLL_IN_SEVERAL_STEPS,
        2,
        128,
        np.zeros(1, np.int32),
        out,
        completion=completion,
        resident_lanes=128,
        max_steps=30_000,
    )
    assert (out == 2).all()


@pytest.mark.parametrize("completion", ["late", "random"])
def test_reading_on_is_not_taken_for_waiting(completion):
    """Many volatile loads without a store between them look like a poll but for the registers, which change."""
    source = """
extern "C" __global__ void k(volatile const int* x, int n, int* out) {
    int sum = 0;
    #pragma unroll 1
    for (int i = 0; i < n; ++i) sum += x[i];
    out[threadIdx.x] = sum;
}
"""
    x, out = np.ones(300, np.int32), np.zeros(64, np.int32)
    launch(source, 1, 64, x, np.int32(300), out, completion=completion)
    assert (out == 300).all()


LAST_BLOCK = """
__device__ unsigned arrived;
extern "C" __global__ void k(const float* x, float* partial, float* out) {
    __shared__ bool last;
    float s = x[blockIdx.x * 32 + threadIdx.x];
    for (int d = 16; d > 0; d /= 2) s += __shfl_xor_sync(~0u, s, d);
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = s;
        __threadfence();
        last = atomicInc(&arrived, gridDim.x - 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (last && threadIdx.x == 0) {
        float total = 0;
        for (int b = 0; b < gridDim.x; ++b) total += ((volatile float*)partial)[b];
        *out = total;
    }
}
"""


def test_last_block_finishes(rng):
    x = rng.integers(-9, 9, 32 * 11).astype(np.float32)
    for _ in range(2):  # the module's counter wraps back to zero
        out = np.full(1, np.nan, np.float32)
        launch(LAST_BLOCK, 11, 32, x, np.full(11, np.nan, np.float32), out)
        assert out[0] == x.sum()


LOCK = """
__device__ int mutex;
extern "C" __global__ void k(int* count) {
    if (threadIdx.x % 32 == 0) {
        while (atomicCAS(&mutex, 0, 1) != 0) { }
        __threadfence();
        *count = *(volatile int*)count + 1;
        __threadfence();
        atomicExch(&mutex, 0);
    }
}
"""


def test_lock():
    count = np.zeros(1, np.int32)
    launch(LOCK, 5, 128, count, resident_lanes=256)
    assert count[0] == 20


PRINT = """
#define N 3
extern "C" __global__ void k(const char* unused) {
    if (threadIdx.x < N && blockIdx.x == 1)
        printf("%s %d: %5.2f %lld %c %% %#x|%-4d|\\n", "thread", threadIdx.x, threadIdx.x * 1.25, 1ll << 40, 'z', 255,
               7);
}
"""


def test_printf(capsys):
    launch(PRINT, 2, 32, np.zeros(1, np.uint8))
    expected = "".join(f"thread {i}: {i * 1.25:5.2f} {1 << 40} z % 0xff|7   |\n" for i in range(3))
    assert capsys.readouterr().out == expected
