"""A pause of Python's garbage collector."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_paused = 0
_was_enabled = False


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Leave cycles of objects where they are for a while.

    What the emulator decodes and binds is many small objects that stay. They set the collector off again and again,
    and it then walks through all objects there are: more than half of the time of a short launch.
    """
    global _paused, _was_enabled
    with _lock:
        if not _paused:
            _was_enabled = gc.isenabled()
            gc.disable()
        _paused += 1
    try:
        yield
    finally:
        with _lock:
            _paused -= 1
            if not _paused and _was_enabled:
                gc.enable()
