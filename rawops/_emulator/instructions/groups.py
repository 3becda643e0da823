"""Groups of asynchronous operations: what is issued joins the open group, commit closes it, a wait drains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class GroupQueue(Generic[T]):
    """The open group and the committed ones, oldest first."""

    open: list[T] = field(default_factory=list)
    groups: list[list[T]] = field(default_factory=list)

    def commit(self) -> None:
        """Close the open group, even an empty one."""
        self.groups.append(self.open)
        self.open = []

    def drain(self, pending: int) -> Iterator[T]:
        """The operations of all groups but the `pending` youngest, which leave the queue."""
        while len(self.groups) > pending:
            yield from self.groups.pop(0)

    def __iter__(self) -> Iterator[T]:
        for group in self.groups:
            yield from group
        yield from self.open
