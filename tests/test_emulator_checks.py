"""What the emulator refuses: each error names the kernel, the source line, the block and the thread."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from emulation import compile_ptx, launch, pack, refused

from rawops._emulator import GlobalMemory, emulate_launch, parse
from rawops.errors import (
    EmulatorError,
    MemoryFault,
    UnsupportedPTX,
)

OFF_BY_ONE = """
extern "C" __global__ void k(const float* x, float* y) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    y[i] = x[i + OFFSET];
}
"""


@pytest.mark.parametrize(
    ("offset", "where", "block_id", "thread"),
    [
        (1, r"ends 4 bytes past the end of a float32 array of shape \(64,\)", 1, 31),
        (-1, "starts 4 bytes before", 0, 0),
    ],
)
@pytest.mark.parametrize("check", [True, False])
def test_out_of_bounds_load(offset, where, block_id, thread, check):
    x, y = np.zeros((2, 64), np.float32).copy()
    x, y = x.copy(), y.copy()
    source = OFF_BY_ONE.replace("OFFSET", str(offset))
    refused(MemoryFault, source, 2, 32, x, y, line=4, block_id=block_id, thread=thread, match=where, check=check)


def test_out_of_bounds_store_and_neighbouring_views():
    both = np.zeros(128, np.float32)
    y = both[:63]  # the rest of the buffer is not the kernel's
    source = OFF_BY_ONE.replace("OFFSET", "0")
    refused(MemoryFault, source, 2, 32, np.zeros(64, np.float32), y, line=4, block_id=1, thread=31, match="store")


def test_past_a_variable_of_the_module():
    source = '__device__ int v[4];\nextern "C" __global__ void k(int* y) { y[threadIdx.x] = v[threadIdx.x]; }\n'
    match = "it ends 4 bytes past the end of a 16-byte variable v"
    refused(MemoryFault, source, 1, 32, np.zeros(32, np.int32), line=2, thread=4, match=match)


def test_store_to_read_only_array():
    y = np.zeros(64, np.float32)
    y.flags.writeable = False
    source = OFF_BY_ONE.replace("OFFSET", "0")
    refused(MemoryFault, source, 2, 32, np.zeros(64, np.float32), y, line=4, match="read-only")


def session(source):
    """A function that launches a kernel of one block of 32 again and again, in one memory."""
    memory, program = GlobalMemory(), parse(compile_ptx(source), "k")

    def again(*arguments):
        emulate_launch(program, (1, 1, 1), (32, 1, 1), pack(memory, arguments), memory=memory)

    return again, memory


@pytest.mark.parametrize("offset", [0, 1])
def test_a_slice_is_no_larger_for_having_been_passed_whole(offset):
    again, _ = session(OFF_BY_ONE.replace("OFFSET", str(offset)))
    x, y = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    again(x, y)
    again(x[: 32 + offset], y[:32])
    with pytest.raises(MemoryFault, match=rf"load .* ends 4 bytes past the end of .* shape \({31 + offset},\)"):
        again(x[: 31 + offset], y)
    with pytest.raises(MemoryFault, match=r"store .* ends 4 bytes past"):
        again(x, y[:31])
    with pytest.raises(MemoryFault, match=r"load .* near an empty float32 array"):
        again(x[:0], y)
    again(x, y)


def test_a_read_only_view_is_so_after_a_writeable_one():
    again, _ = session(OFF_BY_ONE.replace("OFFSET", "0"))
    x, y = np.zeros(32, np.float32), np.zeros(32, np.float32)
    again(x, y)
    view = y.view()
    view.flags.writeable = False
    with pytest.raises(MemoryFault, match="read-only"):
        again(x, view)
    again(view, x)


def test_a_table_of_pointers_stays_good():
    again, memory = session("""
extern "C" __global__ void k(float* const* table, float* y) { y[threadIdx.x] = table[threadIdx.x % 2][threadIdx.x]; }
""")
    x, y = np.arange(64, dtype=np.float32), np.zeros(32, np.float32)
    table = np.array([memory.map(x[:32]), memory.map(x[32:])], np.uint64)
    for _ in range(2):
        again(table, y)
        np.testing.assert_array_equal(y, np.arange(32) + 32 * (np.arange(32) % 2))
        y[:] = 0


@pytest.mark.parametrize(
    ("index", "match"), [(0, "at 0x0 .*null pointer$"), (-1, "pointer -4 bytes"), (9, r"\+36 bytes")]
)
def test_null_pointer(index, match):
    source = """
extern "C" __global__ void k(float* y, const float* nothing, long long i) { y[threadIdx.x] = nothing[i]; }
"""
    with pytest.raises(MemoryFault, match=f"(?m)k, .*kernel.cu:2, block.*thread.* {match}"):
        launch(source, 1, 32, np.zeros(32, np.float32), np.uint64(0), np.int64(index))


def test_a_null_pointer_in_some_lanes():
    source = """
extern "C" __global__ void k(float* y, long long below) {
    float* p = threadIdx.x == 3 ? (float*)below : y + threadIdx.x;
    *p = 1;
}
"""
    refused(
        MemoryFault, source, 1, 32, np.zeros(32, np.float32), np.int64(-4), line=4, thread=3, match="null pointer -4"
    )


def test_misaligned_vector_load():
    source = """
extern "C" __global__ void k(const float* x, float4* y) {
    y[threadIdx.x] = *(const float4*)(x + 1 + 4 * threadIdx.x);
}
"""
    x, y = np.zeros(200, np.float32), np.zeros((32, 4), np.float32)
    refused(MemoryFault, source, 1, 32, x, y, line=3, match="16-byte access .* misaligned")


def test_use_after_free():
    memory = GlobalMemory()
    x, y = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    params = pack(memory, (x, y))
    program = parse(compile_ptx(OFF_BY_ONE.replace("OFFSET", "0")), "k")
    emulate_launch(program, (2, 1, 1), (32, 1, 1), params, memory=memory)
    assert y[5] == 5
    del x
    with pytest.raises(MemoryFault, match=r"float32 array of shape \(64,\) that has been freed"):
        emulate_launch(program, (2, 1, 1), (32, 1, 1), params, memory=memory)


def test_shared_out_of_bounds():
    source = """
extern "C" __global__ void k(float* y) {
    extern __shared__ float s[];
    s[threadIdx.x] = 1;
    y[threadIdx.x] = s[threadIdx.x];
}
"""
    refused(
        MemoryFault, source, 1, 64, np.zeros(64, np.float32), line=4, thread=63, shared_bytes=252,
        match="4 bytes past the block's 252 bytes",
    )  # fmt: skip


def test_an_access_wider_than_all_there_is():
    source = """
__constant__ __align__(4) char s[2] = {1, 2};
extern "C" __global__ void k(int* y) {
    y[threadIdx.x] = *(const volatile int*)s;
}
"""
    match = "4-byte access at offset 0 of constant memory is out of bounds: there are 2 bytes"
    refused(MemoryFault, source, 1, 32, np.zeros(32, np.int32), line=4, match=match)


def test_trap_and_assert():
    source = """
#include <cassert>
extern "C" __global__ void k(const int* x) {
    if (x[threadIdx.x] == 9) __trap();
}
"""
    x = np.arange(32, dtype=np.int32)
    refused(EmulatorError, source.replace("#include <cassert>", ""), 1, 32, x, line=4, thread=9, match="trap")


def test_unknown_instruction_is_named():
    ptx = compile_ptx(OFF_BY_ONE.replace("OFFSET", "0"))
    ptx = ptx.replace("st.global", "frobnicate.b32 %f1, %f1;\n\tst.global", 1).lstrip("/ \n")
    start = ptx.index(".version")
    with pytest.raises(UnsupportedPTX, match=r"kernel\.cu:4: .*frobnicate\.b32"):
        launch(ptx[start:], 2, 32, np.zeros(64, np.float32), np.zeros(64, np.float32))


def test_wrong_launches():
    x, y = np.zeros(64, np.float32), np.zeros(64, np.float32)
    source = OFF_BY_ONE.replace("OFFSET", "0")
    with pytest.raises(EmulatorError, match="params must have 16 bytes, got 8"):
        launch(source, 2, 32, x)
    with pytest.raises(EmulatorError, match="1 to 1024 threads"):
        launch(source, 2, 2048, x, y)
    for grid in ((1, 65536), (1, 1, 65536)):
        with pytest.raises(EmulatorError, match="at most 65535 along y and z"):
            launch(source, grid, 32, x, y)
    with pytest.raises(ValueError, match="completion must be"):
        launch(source, 2, 32, x, y, completion="soon")


def test_blocks_that_the_kernel_is_not_compiled_for():
    y = np.zeros(128, np.int32)
    source = 'extern "C" __global__ void BOUND k(int* y) { y[threadIdx.x] = 1; }'
    bounded = source.replace("BOUND", "__launch_bounds__(64)")
    launch(bounded, 1, (16, 4), y)
    with pytest.raises(EmulatorError, match=r"at most 64 threads .* got block \(32, 4, 1\) of 128"):
        launch(bounded, 1, (32, 4), y)
    fixed = ".reqntid 64, 1, 1"
    ptx = compile_ptx(bounded)
    ptx = ptx[ptx.index(".version") :].replace(".maxntid 64", fixed)
    assert fixed in ptx
    launch(ptx, 1, 64, y)
    with pytest.raises(EmulatorError, match=r"compiled for a block of \(64, 1, 1\) .* got block \(32, 1, 1\)"):
        launch(ptx, 1, 32, y)


@pytest.mark.parametrize(
    ("table", "chosen", "line"),
    [
        ("__device__ F table[] = {f, g};", "table[x[0]]", 7),
        ("__constant__ F table[] = {f, g};", "table[x[0]]", 7),
        ("", "(x[0] ? f : g)", 7),
    ],
)
def test_pointers_to_functions(table, chosen, line):
    source = f"""
__device__ __noinline__ int f(int x) {{ return x + 1; }}
__device__ __noinline__ int g(int x) {{ return x * 2; }}
typedef int (*F)(int);
{table}
extern "C" __global__ void k(int* x) {{
    x[1] = {chosen}(x[1]);
}}
"""
    with pytest.raises(UnsupportedPTX, match=rf"kernel.cu:{line}: .* pointers to functions: .*_Z1[fg]i"):
        launch(source, 1, 32, np.zeros(2, np.int32))


def test_launches_of_other_threads_leave_what_is_mapped_alone():
    """Two views of one buffer, for one launch, with a launch of another thread between."""
    memory, buffer = GlobalMemory(), np.zeros(100, np.float32)
    spans = []
    for view in (buffer[:10], buffer[60:]):
        start = memory.map(view)
        spans.append((start, start + view.nbytes))
        other = threading.Thread(target=memory.begin)
        other.start()
        other.join()
    assert memory.find(spans[0][0]).ranges(True, memory.begin()) == tuple(spans)
    memory.map(buffer[:10])
    assert memory.find(spans[0][0]).ranges(True, memory.begin()) == tuple(spans[:1])
