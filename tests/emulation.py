"""What the tests of the emulator share: CUDA C++ and PTX as launches without the runtime, and refused ones."""

from __future__ import annotations

import re

import numpy as np
import pytest
from cuda.bindings import nvrtc
from cuda.pathfinder import find_nvidia_header_directory

from rawops._emulator import GlobalMemory, emulate_launch, parse

SAXPY = """
extern "C" __global__ void k(float a, const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i] + y[i];
}
"""


def compile_ptx(source: str, arch: str = "sm_80", name: str = "kernel.cu") -> str:
    """The PTX of CUDA C++ source."""
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), 0, [], [])
    include = f"-I{find_nvidia_header_directory('cudart')}"
    options = [o.encode() for o in (f"-arch={arch}", "-lineinfo", "-std=c++17", include)]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = bytes(bytearray(size + 1))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise AssertionError(log.decode())
    _, size = nvrtc.nvrtcGetPTXSize(program)
    ptx = bytes(bytearray(size + 1))
    nvrtc.nvrtcGetPTX(program, ptx)
    return ptx.rstrip(b"\0").decode()


def pack(memory: GlobalMemory, arguments) -> bytes:
    """Kernel parameters: arrays become pointers, the rest are NumPy scalars."""
    packed = bytearray()
    for argument in arguments:
        value = np.uint64(memory.map(argument)) if isinstance(argument, np.ndarray) else argument
        packed += bytes(-len(packed) % value.dtype.itemsize) + value.tobytes()
    return bytes(packed)


def launch(source, grid, block, *arguments, arch="sm_80", entry="k", **options):
    """Compile and run a kernel called k; arrays are changed in place."""
    memory = GlobalMemory()
    ptx = source if source.lstrip().startswith(".version") else compile_ptx(source, arch)
    program = parse(ptx, entry)
    grid, block = ((*d, 1, 1)[:3] if isinstance(d, tuple) else (d, 1, 1) for d in (grid, block))
    return emulate_launch(program, grid, block, pack(memory, arguments), memory=memory, **options)


def refused(kind, source, grid, block, *arguments, line, block_id=0, thread=0, match="", **options):
    """The message of the error that a launch raises, after checking what every message has to say."""
    with pytest.raises(kind) as caught:
        launch(source, grid, block, *arguments, **options)
    message = str(caught.value)
    assert re.search(rf"\bk\b.*kernel\.cu:{line}\b", message), message
    if thread is not None:
        assert f"block ({block_id}, 0, 0)" in message, message
        assert re.search(rf"thread(s)? (\({thread}, 0, 0\)|{thread}\b)", message), message
    assert re.search(match, message), message
    return message
