"""Where a launch goes: a CUDA device, or the emulator in its place."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import math
import struct
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from rawops import config
from rawops._runtime import checks, compiler, dtypes
from rawops._runtime.boards import LIMITS
from rawops._runtime.checks import fail

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_DEFAULT_SHARED = 48 * 1024
_CAPTURE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_FORMATS = {"p": {8: "Q"}, "b": {1: "?"}, "f": {4: "f", 8: "d"}, "h": {2: "e"}, "g": {2: "2s"}}
_FORMATS["i"] = {1: "b", 2: "h", 4: "i", 8: "q"}
_FORMATS["u"] = {size: code.upper() for size, code in _FORMATS["i"].items()}


def arch_name(capability: int) -> str:
    """Return NVRTC's name of a compute capability, with the architecture's own instructions where it has some."""
    return f"sm_{capability}a" if capability >= 90 else f"sm_{capability}"


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


_BYTE = np.dtype("uint8")
_FLOAT8 = frozenset(map(dtypes.numpy, ("float8_e4m3fn", "float8_e5m2")))

# --- CUDA -----------------------------------------------------------------------------------------------------------


class CudaDevice:
    """One GPU, seen through CuPy."""

    is_emulated = False

    def __init__(self, ordinal: int) -> None:
        import cupy
        from cupy.cuda import driver, runtime

        self.array_type = cupy.ndarray
        self.ordinal, self.functions = ordinal, weakref.WeakKeyDictionary()
        self.kept: dict = {}  # what an op keeps for all its calls, by the op's name
        self._loaded: list[CudaFunction] = []
        self.get_current, self.set_current = runtime.getDevice, runtime.setDevice
        self.get_stream, self.launch_kernel = cupy.cuda.get_current_stream, driver.launchKernel
        self.set_attribute = driver.funcSetAttribute
        attribute = functools.partial(runtime.deviceGetAttribute, device=ordinal)
        self.capability = 10 * attribute(75) + attribute(76)  # cudaDevAttrComputeCapabilityMajor, Minor
        self.sm_count = attribute(16)  # cudaDevAttrMultiProcessorCount
        self.max_shared_bytes = attribute(97)  # cudaDevAttrMaxSharedMemoryPerBlockOptin
        self.arch = arch_name(self.capability)

    def __repr__(self) -> str:
        return f"CUDA device {self.ordinal}"

    @functools.cached_property
    def name(self) -> str:
        from cupy.cuda import runtime

        return runtime.getDeviceProperties(self.ordinal)["name"].decode()

    @functools.cached_property
    def launch_early(self) -> EarlyLaunch:
        """As launch_kernel, for a kernel that may begin before the launch before it is complete."""
        return EarlyLaunch()

    def holds(self, x) -> bool:
        """Tell whether a CuPy array is in this device's memory, in the byte order that a kernel reads."""
        return x.data.device_id == self.ordinal and x.dtype.isnative

    def pointer(self, x) -> int:
        """Return the address of an array's first element, 0 for None and for an empty array."""
        return x.data.ptr if x is not None and x.size else 0

    def empty(self, shape, dtype):
        """Allocate an array from CuPy's pool on this device."""
        if dtype in _FLOAT8:  # which CuPy knows as views only
            return self.empty(shape, _BYTE).view(dtype)
        current = self.get_current()
        if current == self.ordinal:
            return self.array_type(shape, dtype)
        self.set_current(self.ordinal)
        try:
            return self.array_type(shape, dtype)
        finally:
            self.set_current(current)

    def zero(self):
        """Allocate one int32 of 0, on the current stream of this device."""
        found = self.empty((1,), np.dtype(np.int32))
        current = self.get_current()
        self.set_current(self.ordinal)
        try:
            found.fill(0)
        finally:
            self.set_current(current)
        return found

    def bind_context(self) -> None:
        """Give this thread its CUDA context, which the runtime does by itself and the driver does not."""
        self.set_current(self.get_current())

    def load(self, compiled: compiler.Compiled) -> CudaFunction:
        """Load a compiled instance on this device, for good: a captured graph may outlive whoever launched it."""
        function = CudaFunction(self, compiled)
        self._loaded.append(function)
        return function


class CudaFunction:
    """A kernel instance loaded on one GPU."""

    def __init__(self, device: CudaDevice, compiled: compiler.Compiled) -> None:
        import cupy

        self.device, self.compiled = device, compiled
        self._ordinal = device.ordinal
        self._layout = Layout(compiled.parameters)
        self._pack_into = self._layout.struct.pack_into
        self._shared_limit = _DEFAULT_SHARED - compiled.resources.shared_bytes
        self._local = threading.local()
        self._lock = threading.Lock()
        with cupy.cuda.Device(device.ordinal), _capture_allowed():
            self._module = cupy.cuda.Module()
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
        check_shared(self.device, self.compiled, shared_bytes)
        with self._lock, _capture_allowed():
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


def check_shared(device, compiled: compiler.Compiled, shared_bytes: int) -> None:
    """Raise ValueError where a block would want more shared memory than the device has."""
    limit = device.max_shared_bytes - compiled.resources.shared_bytes
    if shared_bytes > limit:
        rule = f"be at most {limit} bytes on {device} ({device.arch})"
        fail(ValueError, compiled.expression, "shared_mem", rule, shared_bytes, "Use a smaller tile.")


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


# What threads that come first at the same time all get: functools.cache alone would let each make and keep its own.
_devices: dict = {}


@functools.cache
def cuda(ordinal: int) -> CudaDevice:
    """Return the CUDA device with this number."""
    return _devices.setdefault(ordinal, CudaDevice(ordinal))


# --- the emulator ---------------------------------------------------------------------------------------------------

_SM_COUNTS = {80: 108, 86: 84, 89: 142, 90: 132}  # of the cards that the emulator stands in for, by capability


class EmulatedDevice:
    """The emulator in the place of a GPU: NumPy arrays are its memory."""

    is_emulated = True
    array_type = np.ndarray

    def __init__(self, arch: str, **options) -> None:
        capabilities = {arch_name(c): c for c in _SM_COUNTS}
        self.arch = checks.choice("emulate", "arch (or RAWOPS_EMULATE_ARCH)", arch, tuple(capabilities))
        self.capability = capabilities[arch]
        self.sm_count = _SM_COUNTS[self.capability]
        self.max_shared_bytes = LIMITS[self.capability].shared_bytes_a_block
        from rawops import _emulator  # here, since it takes a tenth of a second that a GPU does not need

        self.emulator = _emulator
        self.memory = _emulator.GlobalMemory()
        self.functions: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self.kept: dict = {}
        self.report: list = []
        self.options = options

    def __repr__(self) -> str:
        return f"emulated {self.arch}"

    @property
    def name(self) -> str:
        return repr(self)

    def holds(self, x) -> bool:
        """Tell whether NumPy arrays are this emulator's here and now, and this one's elements a kernel's to read."""
        return emulated() is self and x.dtype.isnative and not x.dtype.hasobject

    def pointer(self, x) -> int:
        """Return the emulated address of an array's first element, 0 for None and for an empty array."""
        return self.memory.map(x) if x is not None and x.size else 0

    def empty(self, shape, dtype):
        """Allocate an array full of 0xff bytes, which are NaN in every float type."""
        dtype = np.dtype(dtype)
        size = math.prod(shape) * dtype.itemsize
        buffer = np.full(size + 256, 0xFF, np.uint8)
        start = -buffer.ctypes.data % 256  # the alignment of CuPy's pool
        return buffer[start : start + size].view(dtype).reshape(shape)

    def zero(self):
        """Allocate one int32 of 0."""
        found = self.empty((1,), np.int32)
        found.fill(0)
        return found

    def load(self, compiled: compiler.Compiled) -> EmulatedFunction:
        """Decode a compiled instance."""
        return EmulatedFunction(self, compiled)


class EmulatedFunction:
    """A kernel instance that the emulator runs."""

    def __init__(self, device: EmulatedDevice, compiled: compiler.Compiled) -> None:
        self.device, self.compiled, self._layout = device, compiled, Layout(compiled.parameters)
        self.program = device.emulator.parse(compiled.ptx, compiled.lowered)

    def launch(self, grid, block, values: tuple, shared_bytes: int = 0, early: bool = False) -> None:
        """Run with values in parameter order: ints, floats, and bytes for structs."""
        check_shared(self.device, self.compiled, shared_bytes)
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


Device = Any  # CudaDevice or EmulatedDevice: the same attributes and methods

_active: contextvars.ContextVar[EmulatedDevice | None] = contextvars.ContextVar("rawops_emulator", default=None)


class emulate:
    """Run kernels on NumPy arrays in the emulator instead of a GPU.

    Inside the ``with`` block, and in its thread (or asyncio task) alone; ``RAWOPS_EMULATE=1`` in the environment has
    the emulator run the kernels of all threads.

    Parameters
    ----------
    arch : str
        The architecture to stand in for: "sm_80" (default, or ``RAWOPS_EMULATE_ARCH``), "sm_86", "sm_89" or "sm_90a".
    check : bool
        Raise on races, uninitialised shared memory and bad barriers too, and fill the report; out-of-bounds and
        misaligned accesses always raise.
    completion : {"late", "early", "random"}
        When asynchronous copies and matrix products land: as late as the program allows, at once, or late with the
        order of the warps permuted by `seed`. A right kernel gives the same bits in all three.
    seed : int
        For ``completion="random"``.

    Attributes
    ----------
    report : list of LaunchReport
        One entry a launch, in order.

    Examples
    --------
    >>> with rawops.emulate(arch="sm_80") as emu:          # doctest: +SKIP
    ...     d = rawops.gemm(a, b)                          # NumPy arrays
    >>> print(emu.report[0])                               # doctest: +SKIP
    """

    def __init__(self, arch: str | None = None, *, check: bool = True, completion: str = "late", seed: int = 0) -> None:
        if completion not in ("late", "early", "random"):
            fail(ValueError, "emulate", "completion", "be 'late', 'early' or 'random'", repr(completion))
        arch = arch or config.current().emulate_arch
        self.device = EmulatedDevice(arch, check=check, completion=completion, seed=seed)
        self._tokens: list = []

    @property
    def report(self) -> list:
        return self.device.report

    def __enter__(self) -> emulate:
        self._tokens.append(_active.set(self.device))
        return self

    def __exit__(self, *error) -> None:
        _active.reset(self._tokens.pop())


@contextlib.contextmanager
def standing_in(device):
    """Have `device` take the place of the emulator: it has its attributes and methods."""
    token = _active.set(device)
    try:
        yield
    finally:
        _active.reset(token)


@functools.cache
def _default_emulator() -> EmulatedDevice:
    return _devices.setdefault("emulator", emulate().device)


def emulated() -> EmulatedDevice | None:
    """Return the emulator that is active here, if one is."""
    device = _active.get()
    if device is None and config.current().emulate:
        return _default_emulator()
    return device
