"""What plans take of a device: memory in few pieces, kernels found again, answers that need a wait and no copy."""

from __future__ import annotations

import threading

import numpy as np

from rawops._runtime import arrays

_INT64, _BYTE = np.dtype(np.int64), np.dtype(np.uint8)
_LEAST = 64  # numbers that there is room for, and of those that a kernel counts in
_ALIGNMENT = 256


class Answers:
    """Where the kernels of a device write what the host waits for, and count meanwhile; for one thread at a time.

    On a GPU the answers lie in pinned memory of the host, which kernels write like any other: a wait for the stream is
    all that reading them takes. What they count in is kept, and each kernel leaves zeros.
    """

    def __init__(self, device) -> None:
        self._device, self._lock = device, threading.RLock()
        self._numbers = self._counts = None
        self._left: list[tuple] = []
        self._address = self._zeros = self._room = 0
        self.kernels: dict = {}

    def __enter__(self) -> Answers:
        self._lock.acquire()
        return self

    def __exit__(self, error, *_) -> None:
        if error is not None:  # a kernel may still be writing: nobody else is to have that memory
            self._left.append((self._numbers, self._counts))
            self._numbers = self._counts = None
        self._lock.release()

    def address(self, count: int, clear: bool = False) -> int:
        """Return where a kernel writes so many int64, which are 0 before with `clear`."""
        if self._numbers is None or self._numbers.size < count:
            size = max(count, _LEAST)
            if self._device.is_emulated:
                self._numbers = np.empty(size, _INT64)
                self._address = self._device.pointer(self._numbers)
            else:
                self._numbers = _pinned(size)
                self._address = self._numbers.ctypes.data
        if clear:
            self._numbers[:count] = 0
        return self._address

    def zeros(self, count: int, more: int = 0) -> int:
        """Return the address of `count` int64 of 0, which the kernel leaves so, and of `more` that may be anything."""
        if self._counts is None or self._zeros != count or self._room < count + more:
            self._room, self._zeros = max(count + more, _LEAST), count
            self._counts = self._device.empty((self._room,), _INT64)
            self._counts[:count] = 0
        return self._device.pointer(self._counts)

    def wait(self, count: int) -> list[int]:
        """Return the first numbers, once the kernels launched so far are done."""
        if not self._device.is_emulated:
            _on_stream(self._device, lambda stream: stream.synchronize())
        return self._numbers[:count].tolist()


def answers(device) -> Answers:
    """Return the answers of a device, to be used in a ``with`` block."""
    return device.kept.get("sparse") or device.kept.setdefault("sparse", Answers(device))


def kernel(device, spec, *choices):
    """Return an instance by the values of its template, in order: as `spec.kernel`, in less time."""
    known = answers(device).kernels
    found = known.get((spec, choices))
    if found is None:
        found = spec.kernel(device, **dict(zip(spec.template, choices, strict=True)))
        known[spec, choices] = found
    return found


def spaces(device, *sizes: int, zeros: int = 0) -> tuple[list, list[int]]:
    """Return the arrays that hold spaces of so many bytes each, and where they begin; 0 for an empty one.

    The first `zeros` spaces are set to 0.
    """
    if device.is_emulated:  # an array each, so that it sees what is written past one
        found = [device.empty((size,), _BYTE) for size in sizes]
        for space in found[:zeros]:
            space.fill(0)
        return found, [device.pointer(space) for space in found]
    ends, total = [], 0
    for size in sizes:
        total += -(-size // _ALIGNMENT) * _ALIGNMENT
        ends.append(total)
    array = device.empty((total,), _BYTE)
    base = array.data.ptr
    if zeros and ends[zeros - 1]:
        _clear(device, base, ends[zeros - 1])
    return [array], [base + begin if size else 0 for begin, size in zip([0, *ends], sizes, strict=False)]


def zeros(device, count: int):
    """Return an array of int64 of 0."""
    found = device.empty((count,), _INT64)
    if device.is_emulated:
        found.fill(0)
    elif count:
        _clear(device, found.data.ptr, found.nbytes)
    return found


def uploaded(device, host: np.ndarray):
    """Return a copy of a small array on the device, for which nothing waits: the driver has its own copy meanwhile."""
    found = device.empty(host.shape, host.dtype)
    if device.is_emulated:
        found[...] = host
        return found
    copy, to_device = arrays.cupy_or_raise("SparseMatrix").cuda.runtime.memcpyAsync, 1
    _on_stream(device, lambda stream: copy(found.data.ptr, host.ctypes.data, host.nbytes, to_device, stream.ptr))
    return found


def _clear(device, address: int, size: int) -> None:
    clear = arrays.cupy_or_raise("SparseMatrix").cuda.runtime.memsetAsync
    _on_stream(device, lambda stream: clear(address, 0, size, stream.ptr))


def _on_stream(device, call) -> None:
    """Call with the device's current stream, the device being the current one."""
    with device.current():
        call(device.get_stream())


def _pinned(size: int) -> np.ndarray:
    cupy = arrays.cupy_or_raise("SparseMatrix")
    return np.frombuffer(cupy.cuda.alloc_pinned_memory(size * _INT64.itemsize), _INT64, size)
