"""Memory that the device still copies from or to is held until it has done so, whoever lets go of it before.

CuPy gives page-locked memory that nobody has to the next upload at once, which writes there before a device that is
behind has read it, or whose content a copy on its way to the host replaces.
"""

from __future__ import annotations

_on_the_way: dict[int, tuple] = {}  # of dictionaries single calls are safe in finalizers and threads


def hold(event, memory) -> None:
    """Hold memory until an event that has been recorded has happened; let go of what earlier ones have let happen."""
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
