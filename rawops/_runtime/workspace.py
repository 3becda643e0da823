"""Memory that the blocks of one launch share: it is kept, since a captured graph may use it."""

from __future__ import annotations

import threading

import numpy as np


class Workspace:
    """Where blocks leave partial results and count what they take; grows as needed, calls that share it are in order.

    `shares` and `zeros` are 0 between launches: each launch leaves them so. What was given out stays allocated, since
    a captured graph may use it.
    """

    def __init__(self) -> None:
        self._arrays: dict[str, list] = {"shares": [], "partial": [], "prior": [], "zeros": []}
        self._lock = threading.Lock()

    def shares(self, device, floats: int) -> int:
        """Return the address of `floats` float32 for parts of items, 0 between launches."""
        return self._at_least(device, "shares", floats)

    def partial(self, device, floats: int) -> int:
        """Return the address of `floats` float32 for partial results."""
        return self._at_least(device, "partial", floats)

    def zeros(self, device, count: int) -> int:
        """Return the address of `count` int32 that are 0 between launches."""
        return self._at_least(device, "zeros", count, "int32")

    def prior(self, device, floats: int) -> int:
        """Return the address of `floats` float32 that one launch leaves for the next, which has partial results too."""
        return self._at_least(device, "prior", floats)

    def _at_least(self, device, name: str, count: int, dtype: str = "float32") -> int:
        found = self._arrays[name]
        if not found or found[-1].size < count:
            with self._lock:
                if not found or found[-1].size < count:
                    found.append(_zeros(device, 1 << (count - 1).bit_length(), dtype))
        return device.pointer(found[-1])


def _zeros(device, count: int, dtype: str):
    """Make zeros that are ready for every stream, in a capture too: the first call alone waits for them.

    Their memory belongs to a stream of their own: what was freed on the current one may still be in use there.
    """
    if device.is_emulated:
        return np.zeros(count, dtype)  # which the emulator puts on a boundary of 512 bytes, as CuPy does
    import cupy

    with device.current(), cupy.cuda.Stream(non_blocking=True) as stream:
        x = device.empty((count,), dtype)
        x.fill(0)
        stream.synchronize()
    return x


_PER_THREAD_STREAM = 2  # cudaStreamPerThread: one handle, a stream for each thread
_workspaces: dict[tuple, Workspace] = {}


def workspace_of_stream(device) -> Workspace:
    """Return the workspace that all calls on the current stream of a device share."""
    if device.is_emulated:
        return Workspace()
    stream = device.get_stream().ptr
    key = (device.ordinal, stream, threading.get_ident() if stream == _PER_THREAD_STREAM else 0)
    found = _workspaces.get(key)
    return found if found is not None else _workspaces.setdefault(key, Workspace())
