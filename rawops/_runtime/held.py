"""Memory that the device still copies from or to is held until it has done so, whoever lets go of it before.

CuPy gives page-locked memory that nobody holds to the next upload at once. A device that is behind would then read
what was uploaded last in place of what it was given, or upload what a late copy to the host has left there.
"""

from __future__ import annotations

_on_the_way: dict[int, tuple] = {}  # single operations on a dict are safe in finalizers and threads


def hold(event, memory) -> None:
    """Hold memory until a recorded event has happened, and let go of what is held for events that have."""
    entry = event, memory
    _on_the_way[id(entry)] = entry
    for key, (before, _) in list(_on_the_way.items()):
        if _has_happened(before):
            _on_the_way.pop(key, None)


def _has_happened(event) -> bool:
    try:
        return event.done
    except RuntimeError:  # recorded in a capture: each replay of the graph copies again
        return False
