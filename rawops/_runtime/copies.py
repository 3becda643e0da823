"""What `copy` and `pickle` make of the public classes: a new object by the same arguments, or an error that helps."""

from __future__ import annotations

import functools


class ByArguments:
    """Copied and pickled as the arguments that it was made with: a copy finds its kernels and workspaces anew."""

    _arguments: tuple[tuple, dict]

    def __new__(cls, *args, **keywords):
        made = super().__new__(cls)
        made._arguments = args, keywords
        return made

    def __reduce_ex__(self, protocol):
        args, keywords = self._arguments
        return functools.partial(type(self), *args, **keywords), ()


class NotCopied:
    """Neither copied nor pickled, since it stands for memory of a device; `instead` says what to do."""

    def __init_subclass__(cls, instead: str = "", **keywords) -> None:
        super().__init_subclass__(**keywords)
        if instead:
            cls._instead = instead

    def __reduce_ex__(self, protocol):
        name = type(self).__name__
        raise TypeError(f"{name}: cannot be copied or pickled, since it stands for memory of a device. {self._instead}")
