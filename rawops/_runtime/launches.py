"""A compiled instance on a device: how its arguments lie in memory, and how it is launched."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable

from rawops._runtime import compiler
from rawops._runtime.checks import fail

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_DEFAULT_SHARED = 48 * 1024
_CAPTURE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_FORMATS = {"p": {8: "Q"}, "r": {8: "Q"}, "b": {1: "?"}, "f": {4: "f", 8: "d"}, "h": {2: "e"}, "g": {2: "2s"}}
_FORMATS["i"] = {1: "b", 2: "h", 4: "i", 8: "q"}
_FORMATS["u"] = {size: code.upper() for size, code in _FORMATS["i"].items()}


class Layout:
    """How kernel arguments lie in one buffer: at the offsets that the compiler gave the parameters."""

    def __init__(self, parameters: tuple[compiler.Parameter, ...]) -> None:
        offset, code, self.offsets = 0, "<", []
        for p in parameters:
            start = -(-offset // p.align) * p.align
            code += f"{start - offset}x" + (_FORMATS[p.kind][p.size] if p.kind != "s" else f"{p.size}s")
            self.offsets.append(start)
            offset = start + p.size
        self.struct = struct.Struct(code)
        self.size = offset

    def new_buffer(self) -> tuple:
        """Return a buffer for `struct`, and an array of pointers to the parameters in it."""
        buffer = ctypes.create_string_buffer(max(self.size, 1))
        start = ctypes.addressof(buffer)
        pointers = (ctypes.c_void_p * max(len(self.offsets), 1))(*[start + o for o in self.offsets])
        return buffer, pointers


def check_shared(device, kernel: str, static_bytes: int, shared_bytes: int) -> None:
    """Raise ValueError where a block would want more shared memory than the device has."""
    limit = device.max_shared_bytes - static_bytes
    if shared_bytes > limit:
        rule = f"be at most {limit} bytes on {device} ({device.arch})"
        fail(ValueError, kernel, "shared_mem", rule, shared_bytes, "Use a smaller tile.")


# --- CUDA -----------------------------------------------------------------------------------------------------------


class CudaFunction:
    """A kernel instance loaded on one GPU, a `CudaDevice`."""

    def __init__(self, device, compiled: compiler.Compiled) -> None:
        from cupy.cuda import Module

        self.device, self.compiled = device, compiled
        self._ordinal = device.ordinal
        self._layout = Layout(compiled.parameters)
        self._pack_into = self._layout.struct.pack_into
        self._shared_limit = _DEFAULT_SHARED - compiled.resources.shared_bytes
        self._local = threading.local()
        self._lock = threading.Lock()
        with device.current(), _capture_allowed():
            self._module = Module()
            self._module.load(compiled.cubin)
            self._function = self._module.get_function(compiled.lowered)
        self._pointer = self._function.ptr

    def launch(self, grid, block, values: tuple, shared_bytes: int = 0, early: bool = False) -> None:
        """Launch on CuPy's current stream of the device; the current device stays what it was.

        An `early` launch begins when the one before says so, where the GPU can: see common/launches.cuh. All in one
        function, since a call of another one costs a good part of what is done here. Each thread has its own buffer,
        which the driver reads without Python's lock.
        """
        try:
            buffer, table = self._local.arguments
        except AttributeError:
            buffer, table = self._new_arguments()
        self._pack_into(buffer, 0, *values)
        (grid_x, grid_y, grid_z), (x, y, z) = grid, block
        if shared_bytes > self._shared_limit:
            self._opt_in(shared_bytes)
        device = self.device
        current = device.get_current()
        elsewhere = current != self._ordinal
        if elsewhere:
            device.set_current(self._ordinal)
        try:
            stream = device.get_stream().ptr
            launch = device.launch_early if early and device.capability >= 90 else device.launch_kernel
            launch(self._pointer, grid_x, grid_y, grid_z, x, y, z, shared_bytes, stream, table, 0)
        finally:
            if elsewhere:
                device.set_current(current)

    def bind(self, grid, block, values: tuple, shared_bytes: int = 0, early: bool = False) -> Callable[[], None]:
        """Return a function that makes this launch: as `launch`, but the arguments are packed once and for all."""
        buffer, pointers = self._layout.new_buffer()
        self._pack_into(buffer, 0, *values)
        if shared_bytes > self._shared_limit:
            self._opt_in(shared_bytes)
        device, ordinal, local = self.device, self._ordinal, self._local
        get_current, get_stream, table = device.get_current, device.get_stream, ctypes.addressof(pointers)
        fixed = (self._pointer, *grid, *block, shared_bytes)
        if early and device.capability >= 90:
            launch_on = device.launch_early.bind(*fixed, arguments=table)
        else:
            launch_kernel = device.launch_kernel

            def launch_on(stream: int) -> None:
                launch_kernel(*fixed, stream, table, 0)

        def launch(_kept=(buffer, pointers)) -> None:
            if get_current() == ordinal and hasattr(local, "arguments"):  # else this thread may lack the context
                launch_on(get_stream().ptr)
            else:
                self.launch(grid, block, values, shared_bytes, early)

        return launch

    def _new_arguments(self) -> tuple:
        self.device.bind_context()
        buffer, pointers = self._layout.new_buffer()
        self._local.keep = pointers
        self._local.arguments = arguments = buffer, ctypes.addressof(pointers)
        return arguments

    def _opt_in(self, shared_bytes: int) -> None:
        compiled = self.compiled
        check_shared(self.device, compiled.expression, compiled.resources.shared_bytes, shared_bytes)
        with self.device.current(), self._lock, _capture_allowed():
            if shared_bytes > self._shared_limit:
                self.device.set_attribute(self._pointer, _MAX_DYNAMIC_SHARED, shared_bytes)
                self._shared_limit = shared_bytes


class EarlyLaunch:
    """`driver.launchKernel` of CuPy with programmatic stream serialization, which CuPy cannot ask for."""

    _CONFIG = struct.Struct("<7I4xQQI4x")  # CUlaunchConfig: grid, block, shared bytes; stream, attributes, their number
    _ATTRIBUTE = struct.pack("<I4xi60x", 6, 1)  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: allowed

    def __init__(self) -> None:
        from cupy.cuda import driver

        self._error = driver.CUDADriverError
        self._attribute = ctypes.create_string_buffer(self._ATTRIBUTE)
        self._attributes = ctypes.addressof(self._attribute)
        self._launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
        self._launch.argtypes = [ctypes.c_char_p, *[ctypes.c_void_p] * 3]

    def __call__(self, function, grid_x, grid_y, grid_z, x, y, z, shared_bytes, stream, arguments, extra) -> None:
        sizes = (grid_x, grid_y, grid_z, x, y, z, shared_bytes)
        status = self._launch(self._CONFIG.pack(*sizes, stream, self._attributes, 1), function, arguments, extra)
        if status:
            raise self._error(status)

    def bind(self, function: int, *sizes: int, arguments: int) -> Callable[[int], None]:
        """Return a function that makes one launch on a stream."""
        configs = {}

        def launch_on(stream: int) -> None:
            config = configs.get(stream)
            if config is None:
                configs[stream] = config = self._CONFIG.pack(*sizes, stream, self._attributes, 1)
            status = launch(config, function, arguments, None)
            if status:
                raise self._error(status)

        launch = self._launch
        return launch_on


class _capture_allowed:
    """Let kernels load and be set up while any thread captures a stream: that is no part of a graph."""

    def __enter__(self):
        self._mode = ctypes.c_int(_CAPTURE_RELAXED)
        self._exchange()

    def __exit__(self, *error):
        self._exchange()

    def _exchange(self):
        # through ctypes, since importing cuda.bindings would take longer than the first launch of a cached kernel
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(self._mode))


# --- the emulator ---------------------------------------------------------------------------------------------------


class EmulatedFunction:
    """A kernel instance that the emulator runs, on an `EmulatedDevice`."""

    def __init__(self, device, compiled: compiler.Compiled) -> None:
        self.device, self.compiled, self._layout = device, compiled, Layout(compiled.parameters)
        self.program = device.emulator.parse(compiled.ptx, compiled.lowered)

    def launch(self, grid, block, values: tuple, shared_bytes: int = 0, early: bool = False) -> None:
        """Run with values in parameter order: ints, floats, and bytes for structs."""
        check_shared(self.device, self.compiled.expression, self.program.sizes["shared"], shared_bytes)
        report = self.device.emulator.emulate_launch(
            self.program,
            tuple(grid),
            tuple(block),
            self._layout.struct.pack(*values),
            memory=self.device.memory,
            shared_bytes=shared_bytes,
            kernel_name=self.compiled.expression,
            **self.device.options,
        )
        self.device.report.append(report)
