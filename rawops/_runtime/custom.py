"""`Kernel`: a user's own CUDA source, compiled, launched on arrays and reloaded."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Sequence

import ml_dtypes
import numpy as np

from rawops._runtime import arrays, checks, compiler, sources
from rawops._runtime import device as devices
from rawops._runtime.checks import fail
from rawops._runtime.copies import ByArguments
from rawops._runtime.kernel import Function, Instance

# what a number is rounded to, by kind and size of the parameter
_FLOATS = {("f", 4): np.float32, ("f", 8): np.float64, ("h", 2): np.float16, ("g", 2): ml_dtypes.bfloat16}


class Kernel(ByArguments):
    """A CUDA kernel of one's own: compiled by NVRTC on first launch, reloaded on demand.

    Parameters
    ----------
    source : str or Path
        A ``.cu`` file, or CUDA C++ text.
    expression : str
        The kernel to launch, with its template arguments: "saxpy<float>".
    options : sequence of str
        Further NVRTC options, such as ``-DN=4``.

    Notes
    -----
    The source may include files of its own (beside it, in an ``-I`` folder or in the working directory), the library's
    ``common/*.cuh``, and ``cuda_fp16.h``, ``cuda_bf16.h`` and ``cuda_fp8.h``. CCCL (``cuda/std``, ``cub``),
    ``cooperative_groups.h`` and ``mma.h`` need packages that do not come with rawops.

    Arguments are converted by the kernel's own parameter types: a Python number becomes the declared C++ type and
    must fit it; a pointer takes an array (its first element; strides are the kernel's business) or an integer
    address (True is none); a reference takes an array; a struct by value takes a size-one structured NumPy array or
    bytes of exactly its size.
    What the elements of an array are is not compared with the pointer's type: a kernel reads float16 as float if so
    told. A 0-d GPU array given for a number is read on the host, which synchronises. Nothing else does, and launches
    can be captured in a CUDA graph.

    Examples
    --------
    >>> k = rawops.Kernel("saxpy.cu", "saxpy<float>")            # doctest: +SKIP
    >>> k((blocks,), (256,), (2.0, x, y, n))                     # doctest: +SKIP
    """

    def __init__(self, source, expression: str, options: Sequence[str] = ()) -> None:
        if not isinstance(expression, str):
            fail(TypeError, "Kernel", "expression", "be a string such as 'saxpy<float>'", repr(expression))
        if not isinstance(options, (tuple, list)) or not all(isinstance(option, str) for option in options):
            fail(TypeError, "Kernel", "options", "be a tuple of strings", repr(options))
        if any(option.startswith(("-arch", "--gpu-architecture")) for option in options):
            rule = "leave the architecture to the device, or to compile(arch)"
            fail(ValueError, "Kernel", "options", rule, repr(options))
        self._instance = Instance(sources.user_source(source), expression, tuple(options), always_native=True)
        self._arch: str | None = None
        self._last: Function | None = None

    def __repr__(self) -> str:
        return f"Kernel {self._instance.expression} of {self._instance.source.name}"

    def __call__(self, grid, block, args=(), shared_mem: int = 0) -> None:
        """Launch on CuPy's current stream of the arrays' device, or run in the emulator on NumPy arrays.

        Parameters
        ----------
        grid, block : int or tuple of int
            Blocks in the grid, threads in a block; up to three numbers.
        args : tuple
            Kernel arguments in order.
        shared_mem : int
            Dynamic shared memory in bytes; above 48 KiB it is opted in.
        """
        name = self._instance.expression
        grid, block, shared_mem = _geometry(name, grid, block, shared_mem)
        if not isinstance(args, (tuple, list)):
            fail(TypeError, name, "args", "be a tuple", _shown(args))
        last, values = self._last, None
        if last is not None and not last.outdated:
            loaded = last.loaded  # once: a reload in another thread may change it, and the parameters with it
            values = _native_values(loaded, args)
        if values is None:
            loaded, values = self._convert(args)
        loaded.launch(grid, block, values, shared_mem)

    def _convert(self, args) -> tuple:
        """Find the device of the arguments and convert each of them, with every check, for what is loaded there."""
        name = self._instance.expression
        device, args = self._placed(args)
        self._last = function = self._instance.on(device)
        self._arch = device.arch
        if function.outdated:
            function.refresh()
        loaded = function.loaded
        parameters = loaded.compiled.parameters
        if len(args) != len(parameters):
            fail(TypeError, name, "args", f"have {len(parameters)} entries", len(args))
        pairs = enumerate(zip(parameters, args, strict=True))
        with device.current():  # where a 0-d array is read for its number
            return loaded, [_value(device, name, f"args[{i}]", parameter, arg) for i, (parameter, arg) in pairs]

    def compile(self, arch: str) -> compiler.Compiled:
        """Compile for an architecture ("sm_90a") without launching and return the result."""
        if not isinstance(arch, str):
            fail(TypeError, self._instance.expression, "arch", "be a name such as 'sm_90a'", repr(arch))
        compiled = self._instance.compile(arch)
        self._arch = arch
        return compiled

    @property
    def resources(self) -> compiler.Resources:
        """Registers, shared, local and spill bytes on the architecture compiled or launched last."""
        if self._arch is None:
            self._arch = arrays.current_device(self._instance.expression).arch
        return self.compile(self._arch).resources

    def _placed(self, args) -> tuple[devices.Device, list]:
        """Return the device of the arguments, and them with foreign arrays turned into CuPy's."""
        name, placed = self._instance.expression, list(args)
        named = {f"args[{i}]": arg for i, arg in enumerate(placed) if _is_array(arg)}
        if not named:
            return arrays.current_device(name), placed
        named = {key: arrays.convert(name, key, arg) for key, arg in named.items()}
        placed = [named.get(f"args[{i}]", arg) for i, arg in enumerate(placed)]
        return arrays.device_of(name, **named), placed


def _geometry(kernel: str, grid, block, shared_mem) -> tuple[tuple, tuple, int]:
    """Check the launch geometry and spell it out."""
    grid = grid if isinstance(grid, (tuple, list)) else (grid,)
    block = block if isinstance(block, (tuple, list)) else (block,)
    try:
        return _checked_geometry(kernel, shared_mem, len(grid), *grid, *block)
    except TypeError:  # what cannot be hashed is no integer either: without the cache, that is what is raised
        check = _checked_geometry.__wrapped__
    return check(kernel, shared_mem, len(grid), *grid, *block)


@functools.lru_cache(1024, typed=True)  # 1, 1.0 and True are one key otherwise, and inside tuples in any case
def _checked_geometry(kernel: str, shared_mem, rank: int, *extents) -> tuple[tuple, tuple, int]:
    shared_mem = checks.int_range(kernel, "shared_mem", shared_mem, 0, 2**31 - 1)
    grid = _extents(kernel, "grid", extents[:rank], (2**31 - 1, 65535, 65535))
    block = _extents(kernel, "block", extents[rank:], (1024, 1024, 64))
    if math.prod(block) > 1024:
        fail(ValueError, kernel, "block", "have at most 1024 threads", block)
    return grid, block, shared_mem


def _extents(kernel: str, name: str, values: tuple, limits: tuple[int, int, int]) -> tuple[int, int, int]:
    def fits(value, limit: int) -> bool:
        return isinstance(value, numbers.Integral) and not isinstance(value, bool) and 1 <= value <= limit

    if not 1 <= len(values) <= 3 or not all(map(fits, values, limits)):
        fail(ValueError, kernel, name, f"be 1 to 3 integers from 1 to {limits}", values)
    return (*map(int, values), 1, 1)[:3]


def _native_values(loaded, args) -> list | None:
    """Convert arguments that need no thought, as those of most calls; None where any of them does."""
    device, parameters = loaded.device, loaded.compiled.parameters
    if len(args) != len(parameters):
        return None
    values, placed = [], False
    for parameter, arg in zip(parameters, args, strict=True):
        kind = type(arg)
        if kind is int:
            fits = parameter.kind == "i" and parameter.size >= 4 and -(2**31) <= arg < 2**31
        elif kind is float:
            fits = parameter.kind == "f" and -3e38 < arg < 3e38
        else:
            fits = placed = kind is device.array_type and parameter.kind == "p" and device.holds(arg)
            arg = device.pointer(arg) if fits else arg
        if not fits:
            return None
        values.append(arg)
    return values if placed else None


def _is_array(x) -> bool:
    """Tell an array from a number, and from a structured or 0-d NumPy array that stands for a struct or a number."""
    if isinstance(x, np.ndarray):
        return x.ndim > 0 and not issubclass(x.dtype.type, np.void)
    return hasattr(type(x), "__dlpack__") or hasattr(type(x), "__cuda_array_interface__")


def _value(device, kernel: str, name: str, parameter: compiler.Parameter, arg):
    """Convert one argument of a user's kernel to what `Layout.pack` takes."""
    if parameter.kind in "pr":
        if _is_array(arg) or (device.is_emulated and isinstance(arg, np.ndarray)):
            arrays.check_bytes(kernel, name, arg)
            return device.pointer(arg)
        if parameter.kind == "r":
            return fail(TypeError, kernel, name, "be an array (the parameter is a reference)", repr(arg))
        if isinstance(arg, numbers.Integral) and not isinstance(arg, bool) and 0 <= arg < 2**64:
            return int(arg)
        return fail(TypeError, kernel, name, "be an array or an address (the parameter is a pointer)", repr(arg))
    if parameter.kind == "s":
        if isinstance(arg, (np.ndarray, np.generic)):
            arrays.check_bytes(kernel, name, arg)
        is_host = isinstance(arg, (bytes, bytearray, np.ndarray, np.generic))
        data = (arg.tobytes() if hasattr(arg, "tobytes") else bytes(arg)) if is_host else b""
        if len(data) != parameter.size:
            rule = f"be bytes or a size-one NumPy array of {parameter.size} bytes (the parameter is a struct)"
            fail(TypeError, kernel, name, rule, f"{type(arg).__name__} of {len(data)} bytes" if is_host else repr(arg))
        return data
    if (isinstance(arg, (np.ndarray, np.generic)) or _is_array(arg)) and arg.ndim == 0:
        arg = arg.item()
    if not isinstance(arg, numbers.Real):
        fail(TypeError, kernel, name, "be a number (the parameter is a scalar)", _shown(arg))
    return _number(kernel, name, parameter, arg)


def _number(kernel: str, name: str, parameter: compiler.Parameter, arg: numbers.Real):
    kind, size = parameter.kind, parameter.size
    if kind == "b":
        return bool(arg)
    if kind in "iu":
        if not (math.isfinite(arg) and arg == int(arg)):
            fail(TypeError, kernel, name, "be an integer (the parameter is one)", repr(arg))
        low, high = (-(2 ** (8 * size - 1)), 2 ** (8 * size - 1) - 1) if kind == "i" else (0, 2 ** (8 * size) - 1)
        if not low <= arg <= high:
            fail(ValueError, kernel, name, f"fit the parameter ({8 * size} bits, {low} to {high})", int(arg))
        return int(arg)
    dtype = _FLOATS[kind, size]
    try:
        with np.errstate(over="ignore"):
            value = dtype(float(arg))
    except OverflowError:
        value = dtype(math.inf)
    if math.isinf(value) and arg not in (math.inf, -math.inf):
        fail(ValueError, kernel, name, f"fit the parameter ({np.dtype(dtype).name})", repr(arg))
    return value.tobytes() if kind == "g" else float(value)


def _shown(arg) -> str:
    return f"{type(arg).__name__} of shape {tuple(arg.shape)}" if hasattr(arg, "shape") else repr(arg)
