"""`Kernel`: a user's own CUDA source, compiled, launched on arrays and reloaded."""

from __future__ import annotations

import numbers
from collections.abc import Iterable

import numpy as np

from rawops._runtime import arrays, compiler, sources
from rawops._runtime import device as devices
from rawops._runtime.checks import fail
from rawops._runtime.kernel import Instance


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
        grid, block = self._extents("grid", grid), self._extents("block", block)
        device = self._device(args)
        function = self._instance.on(device)
        self._arch = device.arch
        function.launch(grid, block, self._values(device, function.compiled.parameters, args), shared_mem)

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
        values = (value,) if isinstance(value, numbers.Integral) else tuple(value)
        limits = (2**31 - 1, 65535, 65535) if name == "grid" else (1024, 1024, 64)
        if not 1 <= len(values) <= 3 or any(not 1 <= v <= m for v, m in zip(values, limits, strict=False)):
            fail(ValueError, self._instance.expression, name, f"be 1 to 3 numbers from 1 to {limits}", value)
        values = tuple(int(v) for v in values) + (1,) * (3 - len(values))
        if name == "block" and values[0] * values[1] * values[2] > 1024:
            fail(ValueError, self._instance.expression, name, "have at most 1024 threads", value)
        return values

    def _device(self, args) -> devices.Device:
        # a structured NumPy array is a by-value struct, not memory of a device
        named = {f"args[{i}]": a for i, a in enumerate(args) if _is_array(a)}
        taken, _ = arrays.take(self._instance.expression, **named)
        if taken:
            return arrays.device_of(self._instance.expression, **dict(zip(named, taken, strict=True)))
        return arrays.current_device(self._instance.expression)

    def _values(self, device, parameters, args) -> tuple:
        name = self._instance.expression
        if len(args) != len(parameters):
            fail(TypeError, name, "args", f"have {len(parameters)} entries", len(args))
        return tuple(_value(device, name, i, p, arg) for i, (p, arg) in enumerate(zip(parameters, args, strict=True)))


def _is_array(x) -> bool:
    if isinstance(x, np.ndarray):
        return x.dtype.fields is None and x.dtype.kind != "V" and x.ndim > 0
    return hasattr(x, "__cuda_array_interface__") or (hasattr(x, "__dlpack__") and not isinstance(x, np.generic))


def _value(device, kernel: str, index: int, parameter: compiler.Parameter, arg):
    """Convert one argument of a user's kernel to what `Layout.pack` takes."""
    name, kind, size = f"args[{index}]", parameter.kind, parameter.size
    if kind == "p":
        if _is_array(arg):
            (x,), _ = arrays.take(kernel, **{name: arg})
            return device.pointer(x)
        if isinstance(arg, numbers.Integral) and arg >= 0:
            return int(arg)
        fail(TypeError, kernel, name, "be an array or an address (the parameter is a pointer)", repr(arg))
    if kind == "s":
        data = bytes(arg) if isinstance(arg, (bytes, bytearray)) else getattr(arg, "tobytes", lambda: b"")()
        if len(data) != size:
            rule = f"be bytes or a size-one NumPy array of {size} bytes (the parameter is a struct)"
            fail(TypeError, kernel, name, rule, f"{type(arg).__name__} of {len(data)} bytes")
        return data
    if _is_array(arg) or isinstance(arg, np.ndarray):
        if getattr(arg, "size", 0) != 1 or arg.ndim:
            fail(TypeError, kernel, name, "be a number (the parameter is a scalar)", type(arg).__name__)
        arg = arg.item()
    if isinstance(arg, np.bool_):
        arg = bool(arg)
    if not isinstance(arg, numbers.Real):
        fail(TypeError, kernel, name, "be a number (the parameter is a scalar)", repr(arg))
    if kind == "f":
        return float(np.float32(arg)) if size == 4 else float(arg)
    if arg != int(arg):
        fail(TypeError, kernel, name, "be an integer (the parameter is one)", repr(arg))
    low, high = (-(2 ** (8 * size - 1)), 2 ** (8 * size - 1) - 1) if kind == "i" else (0, 2 ** (8 * size) - 1)
    if kind != "b" and not low <= arg <= high:
        fail(ValueError, kernel, name, f"fit the parameter ({8 * size} bits, {low} to {high})", int(arg))
    return bool(arg) if kind == "b" else int(arg)
