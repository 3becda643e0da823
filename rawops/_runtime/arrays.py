"""What comes in and what goes out: CuPy, anything with DLPack or the CUDA array interface, NumPy under emulation."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Container

import numpy as np

from rawops._runtime import device as devices
from rawops._runtime import dtypes
from rawops._runtime.checks import fail, on_elements

# torch's types that DLPack or CuPy's side of it lacks travel under the name of another type of their size
_CARRIERS = {"torch.bfloat16": "int16", "torch.float8_e4m3fn": "uint8", "torch.float8_e5m2": "uint8"}


_native: type | tuple = ()  # cupy.ndarray, from when `take` has first seen it
_get_current: Callable[[], int] = int  # the number of CuPy's current device, from then on; 0 until then


def signature(operands: tuple) -> tuple[list, list] | None:
    """Return all that a launch depends on, for arrays that can be launched on as they are: the fast path of the ops.

    Parameters
    ----------
    operands : tuple of array or None

    Returns
    -------
    list
        A key: for each array its shape, strides, dtype and alignment to 16 bytes, then the number of their device.
    list of int
        The addresses of the first elements, 0 for None; that of an empty array may be anything.

    Or None, where an array is not CuPy's, is not on the current device or has foreign bytes: what `take`, `device_of`
    and ``device.current()`` are for. Of arrays between elements, `checks.all_on_elements` is left to whoever plans.
    """
    native, key, addresses, ordinal = _native, [], [], None
    for x in operands:
        if x is None:
            key.append(None)
            addresses.append(0)
        elif isinstance(x, native):
            memory, dtype = x.data, x.dtype
            address = memory.ptr
            if not dtype.isnative:
                return None
            if memory.device_id != ordinal:
                if ordinal is not None or memory.device_id != _get_current():
                    return None
                ordinal = memory.device_id
            key += (x.shape, x.strides, dtype, address & 15)
            addresses.append(address)
        else:
            return None
    key.append(ordinal)
    return key, addresses


def take(function: str, written: Container[str] = ("out",), **named) -> tuple[list, Callable]:
    """Turn the arguments of an op into CuPy arrays (or NumPy arrays under emulation) without copying.

    What neither a kernel nor CuPy can read raises: other types of elements, and arrays between elements.

    Parameters
    ----------
    function : str
        The op's name, for messages.
    written : container of str
        The names of arrays that results go to. Other libraries' that say that they are read-only, as JAX's do, raise.
    **named
        Arrays by argument name; None stays None.

    Returns
    -------
    list
        The arrays in the order given.
    callable
        Turns a result into the kind of the first array; an ``out`` that was given comes back as the same object.
    """
    global _native, _get_current
    cupy = sys.modules.get("cupy")
    _native = native = cupy.ndarray if cupy is not None else ()
    if cupy is not None:
        _get_current = cupy.cuda.runtime.getDevice
    values, first = [], None
    for name, x in named.items():
        if x is not None:
            if first is None:
                first = x
            if name in written and type(x) is not native:
                _check_writeable(function, name, x)
            x = convert(function, name, x)
            on_elements(function, name, x, devices.emulated().pointer(x) if isinstance(x, np.ndarray) else x.data.ptr)
        values.append(x)
    out = named.get("out")
    if all(x is None or type(x) is native or isinstance(x, np.ndarray) for x in (first, out)):
        return values, _same
    return values, _exporter(first, out, dict(zip(named, values, strict=True)).get("out"))


def _check_writeable(function: str, name: str, x) -> None:
    """Raise ValueError for an array that says that it is read-only: CuPy forgets that of what it views."""
    try:
        is_read_only = bool(x.__cuda_array_interface__["data"][1])
    except Exception:  # it has no such interface; torch's raises where a gradient is asked for
        return
    if is_read_only:
        library = type(x).__module__.partition(".")[0]
        fail(ValueError, function, name, "be writeable", f"a read-only array of {library}")


def convert(function: str, name: str, x):
    """Return one array as `take` does, wherever its elements lie."""
    if type(x) is not _native:
        x = _convert(function, name, x)
    check_bytes(function, name, x)
    return x


def check_bytes(function: str, name: str, x) -> None:
    """Raise TypeError where a kernel cannot read the elements of an array: Python objects, and swapped bytes."""
    dtype = x.dtype
    if not dtype.isnative:
        hint = "Convert it with x.astype(x.dtype.newbyteorder('='))."
        fail(TypeError, function, name, "have native byte order", f"dtype {dtype.str}", hint)
    if dtype.hasobject:
        fail(TypeError, function, name, "have numbers for elements", f"dtype {dtype}")


def device_of(function: str, **named) -> devices.Device:
    """Return the device that all the given arrays are on; None arguments are left out."""
    found = first = None
    for name, x in named.items():
        if x is None:
            continue
        device = devices.emulated() if isinstance(x, np.ndarray) else devices.cuda(x.data.device_id)
        if found is None:
            found, first = device, name
        elif device is not found:
            fail(ValueError, function, name, f"be on the same device as {first} ({found})", str(device))
    return found


def current_of(x):
    """Return a context in which the device of x, CuPy's array or sparse matrix, is the current one; else a null one."""
    is_cupys = type(x).__module__.partition(".")[0] in ("cupy", "cupyx")
    return devices.cuda(x.data.device.id).current() if is_cupys else contextlib.nullcontext()


def to_host(x):
    """Return a CuPy array as NumPy's, which waits for the device; anything else as it is."""
    if not hasattr(x, "get"):
        return x
    with current_of(x):
        return x.get()


def span(x) -> tuple[int, int]:
    """Return where an array's memory begins and ends, in bytes from the address of its first element."""
    steps = [(extent - 1) * s for extent, s in zip(x.shape, x.strides, strict=True)]
    return sum(s for s in steps if s < 0), sum(s for s in steps if s > 0) + x.dtype.itemsize


def distances(target: tuple[int, int], x: tuple[int, int]) -> tuple[int, int]:
    """Return between which distances from the first element of one array to that of another their `span`s meet."""
    return target[0] - x[1], target[1] - x[0]


def overlap(a, b) -> bool:
    """Tell whether two device arrays may share memory: whether their `span`s meet."""
    return (np if isinstance(a, np.ndarray) else sys.modules["cupy"]).may_share_memory(a, b)


def current_device(function: str) -> devices.Device:
    """Return the device of a call without arrays: the active emulator, or CuPy's current GPU."""
    return devices.emulated() or devices.cuda(cupy_or_raise(function).cuda.runtime.getDevice())


def _same(x):
    return x


def _convert(function: str, name: str, x):
    if isinstance(x, np.ndarray):
        if devices.emulated() is not None:
            if isinstance(x, np.ma.MaskedArray):
                fail(TypeError, function, name, "have no mask", "a masked array", "Fill it first: x.filled(...).")
            return x
        cupy_or_raise(function)
        fail(
            TypeError,
            function,
            name,
            "be a GPU array",
            "a NumPy array",
            "Move it with cupy.asarray(...), or run it in the emulator inside rawops.emulate().",
        )
    if hasattr(x, "__dlpack__") or hasattr(x, "__cuda_array_interface__"):
        cupy = cupy_or_raise(function)
        if isinstance(x, cupy.ndarray):
            return x
        try:
            return _view(cupy, x)
        except Exception as error:
            message = f"{type(x).__module__}.{type(x).__qualname__} ({error})"
            fail(TypeError, function, name, "be a GPU array that CuPy can view", message)
    if devices.emulated() is not None:
        return fail(TypeError, function, name, "be an array", type(x).__name__, "Pass a NumPy array.")
    hint = "Pass a CuPy array, or anything with __dlpack__ or __cuda_array_interface__."
    return fail(TypeError, function, name, "be a GPU array", type(x).__name__, hint)


def _view(cupy, x):
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        carrier = _CARRIERS.get(str(x.dtype))
        if carrier:
            return cupy.from_dlpack(x.view(getattr(torch, carrier))).view(dtypes.numpy(str(x.dtype)[len("torch.") :]))
    return cupy.from_dlpack(x) if hasattr(x, "__dlpack__") else cupy.asarray(x)


def cupy_or_raise(function: str):
    """Return CuPy, or raise the one ImportError that says how to get it."""
    try:
        import cupy
    except ImportError as error:
        raise ImportError(
            f'{function}: GPU arrays need CuPy: pip install "rawops[cu13]" (CUDA 13 driver) or "rawops[cu12]"; '
            "without a GPU, pass NumPy arrays inside rawops.emulate()"
        ) from error
    return cupy


def _exporter(first, out, converted_out) -> Callable:
    """Return a function that gives CuPy results back as arrays of the library that `first` came from."""
    torch = sys.modules.get("torch")
    is_torch = torch is not None and isinstance(first, torch.Tensor)  # a subclass may live anywhere
    module = torch if is_torch else sys.modules[type(first).__module__.split(".")[0]]

    def give(x):
        if out is not None and x is converted_out:
            return out
        with devices.cuda(x.data.device_id).current():  # whose current stream the other library's is to wait for
            return export(x)

    def export(x):
        carrier = _CARRIERS.get(f"{module.__name__}.{x.dtype.name}")
        if carrier:
            return module.from_dlpack(x.view(carrier)).view(getattr(module, x.dtype.name))
        if hasattr(module, "from_dlpack"):
            return module.from_dlpack(x)
        if module.__name__ in ("jax", "jaxlib"):
            from jax import dlpack

            return dlpack.from_dlpack(x)
        if module.__name__ == "numba":
            from numba import cuda

            return cuda.as_cuda_array(x)
        return x

    return give
