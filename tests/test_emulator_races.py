"""Races, barriers that threads do not reach, partners that are not there: what the emulator says of them."""

from __future__ import annotations

import numpy as np
import pytest
from emulation import launch, refused

from rawops.errors import BarrierError, EmulatorError, RaceError, UninitializedRead

REVERSE = """
extern "C" __global__ void k(const int* x, int* y) {
    __shared__ int s[128];
    s[threadIdx.x] = x[threadIdx.x];
    SYNC
    y[threadIdx.x] = s[127 - threadIdx.x];
}
"""


@pytest.mark.parametrize("completion", ["late", "random"])
@pytest.mark.parametrize("sync", ["", "__syncwarp();"])
def test_missing_syncthreads(sync, completion):
    x, y = np.arange(128, dtype=np.int32), np.zeros(128, np.int32)
    with pytest.raises((RaceError, UninitializedRead)) as caught:
        launch(REVERSE.replace("SYNC", sync), 1, 128, x, y, completion=completion)
    assert "kernel.cu:6" in str(caught.value)
    if completion == "late":
        message = refused(RaceError, REVERSE.replace("SYNC", sync), 1, 128, x, y, line=6)
        assert "a write by block (0, 0, 0), thread (127, 0, 0) at " in message
        assert message.count("kernel.cu:4") == 1


def test_right_synchronisation_is_accepted():
    x, y = np.arange(128, dtype=np.int32), np.zeros(128, np.int32)
    launch(REVERSE.replace("SYNC", "__syncthreads();"), 1, 128, x, y)
    np.testing.assert_array_equal(y, x[::-1])


def test_race_inside_a_warp():
    source = """
extern "C" __global__ void k(int* y) {
    __shared__ int s[32];
    s[threadIdx.x] = threadIdx.x;
    SYNC
    y[threadIdx.x] = s[31 - threadIdx.x];
}
"""
    refused(RaceError, source.replace("SYNC", ""), 1, 32, np.zeros(32, np.int32), line=6)
    launch(source.replace("SYNC", "__syncwarp();"), 1, 32, np.zeros(32, np.int32))


def test_write_after_read_race():
    source = """
extern "C" __global__ void k(int* y) {
    __shared__ int s[64];
    s[threadIdx.x] = threadIdx.x;
    __syncthreads();
    int v = s[63 - threadIdx.x];
    SYNC
    s[threadIdx.x] = v;
    __syncthreads();
    y[threadIdx.x] = s[threadIdx.x];
}
"""
    message = refused(RaceError, source.replace("SYNC", ""), 1, 64, np.zeros(64, np.int32), line=8)
    assert "a read by" in message and "kernel.cu:6" in message
    y = np.zeros(64, np.int32)
    launch(source.replace("SYNC", "__syncthreads();"), 1, 64, y)
    np.testing.assert_array_equal(y, np.arange(64)[::-1])


def test_write_write_race():
    source = """
extern "C" __global__ void k(int* y) {
    __shared__ int s;
    s = VALUE;
    __syncthreads();
    y[threadIdx.x] = s;
}
"""
    refused(RaceError, source.replace("VALUE", "threadIdx.x"), 1, 64, np.zeros(64, np.int32), line=4)
    for completion in ("late", "random"):  # all write the same
        launch(source.replace("VALUE", "7"), 1, 64, np.zeros(64, np.int32), completion=completion)


def test_neighbouring_bytes_do_not_race():
    source = """
extern "C" __global__ void k(unsigned char* y) {
    __shared__ unsigned char s[64];
    s[threadIdx.x] = threadIdx.x;
    s[threadIdx.x] += 1;
    y[threadIdx.x] = s[threadIdx.x];
}
"""
    y = np.zeros(64, np.uint8)
    launch(source, 1, 64, y)
    np.testing.assert_array_equal(y, np.arange(1, 65))


def test_uninitialised_shared_read():
    source = """
extern "C" __global__ void k(int* y) {
    __shared__ int s[64];
    if (threadIdx.x != 5) s[threadIdx.x] = 0;
    __syncthreads();
    y[threadIdx.x] = s[threadIdx.x ^ 1];
}
"""
    refused(UninitializedRead, source, 1, 64, np.zeros(64, np.int32), line=6, thread=4)


@pytest.mark.parametrize("threads", [32, 128])
@pytest.mark.parametrize(("limit", "tail"), [(16, ""), (16, "y[threadIdx.x] = 1;"), (64, "")])
def test_barrier_in_a_branch(threads, limit, tail):
    if limit >= threads:
        return
    source = f"""
extern "C" __global__ void k(int* y) {{
    if (threadIdx.x < {limit})
        __syncthreads();
    {tail}
}}
"""
    message = refused(BarrierError, source, 2, threads, np.zeros(128, np.int32), line=4)
    assert f"threads {limit}-{threads - 1}" in message


def test_two_barriers_that_do_not_meet():
    source = """
extern "C" __global__ void k(int* y) {
    if (threadIdx.x < 32) asm volatile("bar.sync 1, 64;");
    else asm volatile("bar.sync 2, 64;");
    y[threadIdx.x] = 1;
}
"""
    message = refused(BarrierError, source, 1, 64, np.zeros(64, np.int32), line="[34]", match="deadlock")
    assert "barrier 1 (32 of 64 threads arrived)" in message
    assert "barrier 2 (32 of 64 threads arrived)" in message
    assert "threads 32-63" in message


def test_a_loop_that_never_ends():
    source = """
extern "C" __global__ void k(int* x, int n) {
    for (unsigned i = threadIdx.x; i >= 0; i += n) x[i % 32] += 1;
}
"""
    with pytest.raises(EmulatorError, match=r"kernel.cu:3.*goes on after 2000 steps: does this loop end") as caught:
        launch(source, 1, 32, np.zeros(32, np.int32), np.int32(1), max_steps=2000)
    assert "block (0, 0, 0), thread (0, 0, 0)" in str(caught.value)


def test_barrier_number_that_differs_inside_a_warp():
    source = """
extern "C" __global__ void k(int n) {
    asm volatile("bar.sync %0, 32;" :: "r"(threadIdx.x % n));
}
"""
    with pytest.raises(BarrierError, match="barrier number or count differs inside a warp"):
        launch(source, 1, 32, np.int32(2))


def test_shuffle_without_its_partners():
    source = """
extern "C" __global__ void k(int* y) {
    if (threadIdx.x < 16) y[threadIdx.x] = __shfl_xor_sync(~0u, threadIdx.x, 1);
    else { __syncwarp(); y[threadIdx.x] = 2; }
}
"""
    refused(BarrierError, source, 1, 32, np.zeros(32, np.int32), line="[34]", match="divergent", thread=None)


@pytest.mark.parametrize("shuffle", ["__shfl_xor_sync(~0u, t, 1)", "__ballot_sync(~0u, 1)", "(__syncwarp(), 1)"])
@pytest.mark.parametrize("others", ["", "else z[t] = t * t;"])
def test_partners_that_have_exited(shuffle, others):
    source = f"""
extern "C" __global__ void k(int* y, int* z) {{
    const int t = threadIdx.x;
    if (t < 16) y[t] = {shuffle}; {others}
}}
"""
    arrays = np.zeros((2, 64), np.int32)
    match = "mask 0xffffffff names lanes 16-31 that exited"
    refused(BarrierError, source, 1, 64, *arrays, line=4, match=match)
    launch(source, 1, 64, *arrays, check=False)
    launch(source, 1, 16, *arrays)  # lanes that never were are nobody's partners


def test_partners_that_wait_elsewhere():
    source = """
extern "C" __global__ void k(int* y) {
    if (threadIdx.x < 16) { __syncwarp(0xffffff); y[threadIdx.x] = 1; }
    __syncthreads();
    y[threadIdx.x] = 2;
}
"""
    match = r"0-15 at bar.warp.sync with member mask 0x00ffffff, which lanes 16-23 of the warp do not reach"
    refused(BarrierError, source, 1, 32, np.zeros(32, np.int32), line="3", match=match, thread=None)


def test_a_lane_outside_its_own_mask():
    source = """
extern "C" __global__ void k(int* y) {
    y[threadIdx.x] = __shfl_xor_sync(0xffff, threadIdx.x, 1);
}
"""
    match = "mask 0x0000ffff leaves out the lane itself"
    refused(BarrierError, source, 1, 32, np.zeros(32, np.int32), line=3, thread=16, match=match)


@pytest.mark.parametrize("shuffle", ["__shfl_sync(0xffff, t, 20)", "__shfl_xor_sync(0xffff, t, 20)"])
def test_shuffle_from_a_lane_that_takes_no_part(shuffle):
    source = f"""
extern "C" __global__ void k(int* y) {{
    const int t = threadIdx.x;
    if (t < 16) y[t] = {shuffle};
}}
"""
    match = "read of lane 20 of the warp, which takes no part"
    refused(UninitializedRead, source, 1, 32, np.zeros(32, np.int32), line=4, match=match)


def test_reduction_of_half_a_warp_may_read_past_its_lanes():
    source = """
extern "C" __global__ void k(float* y) {
    float v = threadIdx.x;
    if (threadIdx.x >= 16) return;
    for (int i = 8; i; i /= 2) v += __shfl_down_sync(0xffff, v, i);
    y[threadIdx.x] = v;
}
"""
    y = np.zeros(16, np.float32)
    launch(source, 1, 32, y)
    assert y[0] == 120
    assert np.isnan(y[8:]).all()


@pytest.mark.parametrize("resident_lanes", [32, 4096])
def test_waiting_for_what_never_comes(resident_lanes):
    source = """
extern "C" __global__ void k(volatile int* flag) {
    while (*flag == 0) { }
}
"""
    with pytest.raises(BarrierError, match="polling memory that nobody changes") as caught:
        launch(source, 3, 32, np.zeros(1, np.int32), resident_lanes=resident_lanes)
    assert "kernel.cu:3" in str(caught.value)
