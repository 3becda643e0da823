"""How far a long compilation is: a bar in a terminal, else a line now and then; on stderr, beside the results."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator

_PAUSE = 10.0  # seconds between lines


def shown(done: Iterable, what: str, total: int) -> Iterator:
    """Yield from `done` and show how many of `total` there have been."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import track

        yield from track(done, description=what, total=total, console=Console(stderr=True))
        return
    last = time.monotonic()
    for i, item in enumerate(done, 1):
        if time.monotonic() - last >= _PAUSE:
            last = time.monotonic()
            print(f"{what}: {i} of {total}", file=sys.stderr, flush=True)
        yield item
