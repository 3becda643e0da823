"""`Kernel`: a user's own CUDA source, compiled, launched on arrays and reloaded."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable

import ml_dtypes
import numpy as np

from rawops._runtime import arrays, checks, compiler, sources
from rawops._runtime import device as devices
from rawops._runtime.checks import fail
from rawops._runtime.kernel import Instance

# what a number is rounded to, by kind and size of the parameter
_FLOATS = {("f", 4): np.float32, ("f", 8): np.float64, ("h", 2): np.float16, ("g", 2): ml_dtypes.bfloat16}


class Kernel:
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
    Arguments are converted by the kernel's own parameter types: a Python number becomes the declared C++ type and
    must fit it; a pointer takes an array (its first element; strides are the kernel's business) or an integer
    address; a struct by value takes a size-one structured NumPy array or bytes of exactly its size. A 0-d GPU array
    given for a number is read on the host, which synchronises. Nothing else does, and launches can be captured in a
    CUDA graph.

    Examples
    --------
    >>> k = rawops.Kernel("saxpy.cu", "saxpy<float>")            # doctest: +SKIP
    >>> k((blocks,), (256,), (x, y, n))                          # doctest: +SKIP
    """

    def __init__(self, source, expression: str, options: Iterable[str] = ()) -> None:
        self._instance = Instance(sources.user_source(source), expression, tuple(options))
        self._arch: str | None = None

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
        grid, block = self._extents("grid", grid), self._extents("block", block)
        shared_mem = checks.int_range(name, "shared_mem", shared_mem, 0, 2**31 - 1)
        device, args = self._placed(args)
        function = self._instance.on(device)
        self._arch = device.arch
        parameters = function.compiled.parameters
        if len(args) != len(parameters):
            fail(TypeError, name, "args", f"have {len(parameters)} entries", len(args))
        values = [
            arg if _fits(parameter, arg) else _value(device, name, i, parameter, arg)
            for i, (parameter, arg) in enumerate(zip(parameters, args, strict=True))
        ]
        function.launch(grid, block, values, shared_mem)

    def compile(self, arch: str) -> compiler.Compiled:
        """Compile for an architecture ("sm_90a") without launching and return the result."""
        self._arch = arch
        return self._instance.compile(arch)

    @property
    def resources(self) -> compiler.Resources:
        """Registers, shared, local and spill bytes on the architecture compiled or launched last."""
        if self._arch is None:
            self._arch = arrays.current_device(self._instance.expression).arch
        return self.compile(self._arch).resources

    def _extents(self, name: str, value) -> tuple[int, int, int]:
        values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
        if name == "grid" and len(values) == 1 and type(values[0]) is int and 0 < values[0] < 2**31:
            return values[0], 1, 1
        limits = (2**31 - 1, 65535, 65535) if name == "grid" else (1024, 1024, 64)
        fits = (isinstance(v, numbers.Integral) and 1 <= v <= m for v, m in zip(values, limits, strict=False))
        if not 1 <= len(values) <= 3 or not all(fits):
            fail(ValueError, self._instance.expression, name, f"be 1 to 3 integers from 1 to {limits}", value)
        x, y, z = (*map(int, values), 1, 1)[:3]
        if name == "block" and x * y * z > 1024:
            fail(ValueError, self._instance.expression, name, "have at most 1024 threads", value)
        return x, y, z

    def _placed(self, args) -> tuple[devices.Device, list]:
        """Return the device of the arguments, and them with foreign arrays turned into CuPy's."""
        name, placed = self._instance.expression, list(args)
        named = {f"args[{i}]": arg for i, arg in enumerate(placed) if type(arg) not in _PLAIN and _is_array(arg)}
        if not named:
            return arrays.current_device(name), placed
        taken, _ = arrays.take(name, **named)
        named = dict(zip(named, taken, strict=True))
        placed = [named.get(f"args[{i}]", arg) for i, arg in enumerate(placed)]
        return arrays.device_of(name, **named), placed


_PLAIN = (int, float, bool, bytes)


def _fits(parameter: compiler.Parameter, arg) -> bool:
    """Tell at a glance that a plain number can be packed as it is; `_value` looks at everything else."""
    if type(arg) is int:
        return parameter.kind == "i" and -(2**31) <= arg < 2**31 and parameter.size >= 4
    return type(arg) is float and parameter.kind == "f" and -3e38 < arg < 3e38


def _is_array(x) -> bool:
    """Tell an array from a number, and from a structured or 0-d NumPy array that stands for a struct or a number."""
    if isinstance(x, np.ndarray):
        return x.ndim > 0 and not issubclass(x.dtype.type, np.void)
    return hasattr(type(x), "__dlpack__") or hasattr(type(x), "__cuda_array_interface__")


def _value(device, kernel: str, index: int, parameter: compiler.Parameter, arg):
    """Convert one argument of a user's kernel to what `Layout.pack` takes."""
    name = f"args[{index}]"
    if parameter.kind == "p":
        if _is_array(arg) or (device.is_emulated and isinstance(arg, np.ndarray)):
            return device.pointer(arg)
        if isinstance(arg, numbers.Integral) and 0 <= arg < 2**64:
            return int(arg)
        return fail(TypeError, kernel, name, "be an array or an address (the parameter is a pointer)", repr(arg))
    if parameter.kind == "s":
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
