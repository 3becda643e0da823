"""Where a launch goes: a CUDA device, or the emulator in its place."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import math
import weakref
from typing import Any

import numpy as np

from rawops import config
from rawops._runtime import checks, compiler, dtypes
from rawops._runtime.boards import LIMITS, arch_name
from rawops._runtime.checks import fail
from rawops._runtime.launches import CudaFunction, EarlyLaunch, EmulatedFunction

_BYTE = np.dtype("uint8")
_MOST_REPORTS = 64  # kept of a whole program in the emulator: each takes some 25 KB
_FLOAT8 = frozenset(map(dtypes.numpy, ("float8_e4m3fn", "float8_e5m2")))

# --- CUDA -----------------------------------------------------------------------------------------------------------


class _Current:
    """A ``with`` block in which a GPU is the thread's current one; after it the one before is current again."""

    __slots__ = ("_before", "_device")

    def __init__(self, device: CudaDevice) -> None:
        self._device = device

    def __enter__(self) -> None:
        device = self._device
        self._before = before = device.get_current()
        if before != device.ordinal:
            device.set_current(device.ordinal)

    def __exit__(self, *error) -> None:
        if self._before != self._device.ordinal:
            self._device.set_current(self._before)


def on_own_device(method):
    """Have a method run with its object's ``_device`` as the current one: CuPy works there, and takes memory there."""

    @functools.wraps(method)
    def run(self, *args, **options):
        device = self._device
        if device.get_current() == device.ordinal:
            return method(self, *args, **options)
        with device.current():
            return method(self, *args, **options)

    return run


class CudaDevice:
    """One GPU, seen through CuPy."""

    is_emulated = runs_ptx = False

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

    def current(self) -> _Current:
        """Return a context in which this is the current device, as CuPy wants it of the arrays that it works on."""
        return _Current(self)

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
        if self.get_current() == self.ordinal:
            return self.array_type(shape, dtype)
        with self.current():
            return self.array_type(shape, dtype)

    def zero(self):
        """Allocate one int32 of 0, on the current stream of this device."""
        with self.current():
            found = self.empty((1,), np.dtype(np.int32))
            found.fill(0)
        return found

    def bind_context(self) -> None:
        """Give this thread its CUDA context, which the runtime does by itself and the driver does not."""
        self.set_current(self.get_current())

    def load(self, compiled: compiler.Compiled) -> CudaFunction:
        """Load a compiled instance on this device, for good: a captured graph may outlive whoever launched it."""
        function = CudaFunction(self, compiled)
        self._loaded.append(function)
        return function


# What threads that come first at the same time all get: functools.cache alone would let each make and keep its own.
_devices: dict = {}


@functools.cache
def cuda(ordinal: int) -> CudaDevice:
    """Return the CUDA device with this number."""
    return _devices.setdefault(ordinal, CudaDevice(ordinal))


# --- the emulator ---------------------------------------------------------------------------------------------------

_SM_COUNTS = {80: 108, 86: 84, 89: 142, 90: 132}  # of the cards that the emulator stands in for, by capability


_NOTHING = contextlib.nullcontext()


class EmulatedDevice:
    """The emulator in the place of a GPU: NumPy arrays are its memory."""

    is_emulated = runs_ptx = True
    array_type = np.ndarray
    ordinal, get_current = 0, int  # it is the current device everywhere

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

    def current(self):
        """Return a context that changes nothing: NumPy works everywhere."""
        return _NOTHING

    def holds(self, x) -> bool:
        """Tell whether NumPy arrays are this emulator's here and now, and this one's elements a kernel's to read."""
        return emulated() is self and x.dtype.isnative and not x.dtype.hasobject

    def pointer(self, x) -> int:
        """Return the emulated address of an array's first element, 0 for None and for an empty array."""
        return self.memory.map(x) if x is not None and x.size else 0

    def empty(self, shape, dtype):
        """Allocate an array full of 0xff bytes, which are NaN in every float type, at a multiple of 256 bytes."""
        dtype = np.dtype(dtype)
        size = math.prod(shape) * dtype.itemsize
        buffer = np.full(size + 16, 0xFF, np.uint8)
        start = -buffer.ctypes.data % 16  # the memory maps a buffer to a multiple of 512 and its address modulo 16
        return buffer[start : start + size].view(dtype).reshape(shape)

    def zero(self):
        """Allocate one int32 of 0."""
        found = self.empty((1,), np.int32)
        found.fill(0)
        return found

    def load(self, compiled: compiler.Compiled) -> EmulatedFunction:
        """Decode a compiled instance."""
        return EmulatedFunction(self, compiled)


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
        check = checks.flag("emulate", "check", check)
        seed = checks.int_range("emulate", "seed", seed, 0, 2**63 - 1)
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
    device = emulate().device
    device.report = collections.deque(maxlen=_MOST_REPORTS)  # which nobody asks for
    return _devices.setdefault("emulator", device)


def emulated() -> EmulatedDevice | None:
    """Return the emulator that is active here, if one is."""
    device = _active.get()
    if device is None and config.current().emulate:
        return _default_emulator()
    return device
