"""Memory of copies that are on their way is kept until they have come."""

import weakref

import numpy as np
import pytest

from rawops._runtime import held


class Event:
    """As CuPy's: `happened` is None for one that was recorded in a capture."""

    def __init__(self, happened) -> None:
        self.happened = happened

    @property
    def done(self) -> bool:
        if self.happened is None:
            raise RuntimeError("cudaErrorCapturedEvent")
        return self.happened


@pytest.mark.parametrize("happened", [False, None])
def test_memory_is_held_until_its_copy_has_come(monkeypatch, happened):
    monkeypatch.setattr(held, "_on_the_way", {})
    events, copies = [Event(happened), Event(False)], [np.zeros(3), np.zeros(3)]
    kept = [weakref.ref(x) for x in copies]
    for event in events:
        held.hold(event, copies.pop(0))
    held.hold(Event(True), None)
    assert all(x() is not None for x in kept)
    events[0].happened = True
    held.hold(Event(True), None)
    assert kept[0]() is None and kept[1]() is not None
    assert len(held._on_the_way) == 1
