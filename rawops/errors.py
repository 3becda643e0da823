"""Every exception the library raises on its own account."""

from __future__ import annotations


class RawopsError(Exception):
    """Base of all errors that are the library's own."""


class UnsupportedError(RawopsError, NotImplementedError):
    """The device, the driver or NVRTC is too old for what was asked, or the combination does not exist."""


class OutOfPagesError(RawopsError):
    """A paged cache has too few free pages for what was asked; nothing of it was done."""


class CompileError(RawopsError):
    """NVRTC refused a kernel, or its source cannot be read.

    Attributes
    ----------
    log : str
        The whole NVRTC log.
    instance : str
        The name expression and architecture that was being compiled.
    """

    def __init__(self, message: str, *, log: str = "", instance: str = "") -> None:
        super().__init__(message)
        self.log = log
        self.instance = instance


class EmulatorError(RawopsError):
    """A kernel did in the emulator what hardware forbids or leaves undefined."""


class MemoryFault(EmulatorError):
    """An access outside an allocation, misaligned, read-only or to freed memory."""


class RaceError(EmulatorError):
    """Two unordered accesses to one shared-memory location, at least one of them a write."""


class UninitializedRead(EmulatorError):
    """Shared memory was read before anything was written there or before an asynchronous copy was waited for."""


class BarrierError(EmulatorError):
    """A barrier that not all threads reach, or threads that wait for ever."""


class UnsupportedPTX(EmulatorError):
    """An instruction the emulator does not know."""
