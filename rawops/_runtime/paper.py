"""A device on paper: ops run on it as on any other, with arrays that take no memory, and what they launch is noted.

So what `python -m rawops explain` tells is what the op does: the same checks, the same choice of kernels, each compiled
for the architecture in question. No GPU is needed, and nothing runs.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rawops._runtime import compiler
from rawops._runtime import device as devices
from rawops._runtime.boards import Board
from rawops._runtime.launches import check_shared


class PaperArray(np.ndarray):
    """A shape, strides and an address. The elements are not there: nothing may read or write them."""

    __array_ufunc__ = None  # arithmetic raises
    _shift = 0  # from NumPy's address to that on paper

    def __array_finalize__(self, base) -> None:
        self._shift = getattr(base, "_shift", 0)

    def __setitem__(self, *_) -> None:
        raise TypeError("an array on paper has no elements")

    @property
    def address(self) -> int:
        return self.ctypes.data + self._shift


@dataclass(frozen=True)
class Noted:
    """One launch, with all of a block's shared memory."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    resources: compiler.Resources

    @property
    def blocks(self) -> int:
        return math.prod(self.grid)

    @property
    def threads(self) -> int:
        return math.prod(self.block)


class PaperDevice:
    """Stands where a GPU or the emulator would.

    Parameters
    ----------
    board : Board

    Attributes
    ----------
    launches : list of Noted
        In order.
    """

    is_emulated, runs_ptx = True, False  # it tells what the machine code takes
    array_type = np.ndarray
    ordinal, get_current = 0, int

    def __init__(self, board: Board) -> None:
        self.board, self.name = board, board.name
        self.arch, self.capability, self.sm_count = board.arch, board.capability, board.sm_count
        self.max_shared_bytes = board.limits.shared_bytes_a_block
        self.functions: dict = {}
        self.launches: list[Noted] = []
        self._addresses = itertools.count(1 << 44, 1 << 40)  # no two arrays overlap

    def __repr__(self) -> str:
        return f"{self.board.name} on paper"

    @contextlib.contextmanager
    def current(self) -> Iterator[PaperDevice]:
        """Have ops run here."""
        with devices.standing_in(self):
            yield self

    def array(self, shape: tuple[int, ...], dtype, offset: int = 0) -> PaperArray:
        """Make a contiguous array, `offset` bytes past an aligned address."""
        dtype = np.dtype(dtype)
        steps = np.cumprod([dtype.itemsize, *shape[:0:-1]], dtype=object)[::-1] if shape else ()
        one = np.empty(1, f"V{dtype.itemsize}").view(PaperArray)  # as_strided knows no types but NumPy's own
        x = np.lib.stride_tricks.as_strided(one, shape, [int(s) for s in steps], subok=True).view(dtype)
        x._shift = next(self._addresses) + offset - one.ctypes.data
        return x

    def empty(self, shape, dtype) -> PaperArray:
        return self.array(tuple(shape), dtype)

    def zero(self) -> PaperArray:
        return self.empty((1,), np.int32)

    def holds(self, x) -> bool:
        return isinstance(x, PaperArray)

    def pointer(self, x) -> int:
        return x.address if x is not None and x.size else 0

    def load(self, compiled: compiler.Compiled) -> PaperFunction:
        return PaperFunction(self, compiled)


class PaperFunction:
    """A compiled instance whose launches are noted."""

    def __init__(self, device: PaperDevice, compiled: compiler.Compiled) -> None:
        self.device, self.compiled = device, compiled

    def launch(self, grid, block, values: tuple, shared_bytes: int = 0, early: bool = False) -> None:
        resources = self.compiled.resources
        check_shared(self.device, self.compiled.expression, resources.shared_bytes, shared_bytes)
        total = shared_bytes + resources.shared_bytes
        self.device.launches.append(Noted(self.compiled.expression, tuple(grid), tuple(block), total, resources))
