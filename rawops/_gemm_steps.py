"""What the launches of a product are: prepared once for arrays of a kind, run with their addresses."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from rawops import _gemm_sm90
from rawops._gemm_config import CALL, REDUCE_THREADS
from rawops._gemm_operands import ROLES, Request
from rawops._runtime import arrays
from rawops._runtime.kernel import Function

_OUT = ROLES.index("out")
_IN_PLACE = ("c", "residual")  # out may be one of these, entry for entry

# Scalars as the kernels take them: the address and type of an array, and what its entry, or 1, is multiplied with.
ONE, ZERO = (0, 1.0, 0), (0, 0.0, 0)


class Repeat:
    """A call that is made again with the same arrays, as by a decoding loop: all that is left is its launch.

    It is told by the identity of the arrays, which it does not keep alive: with the first that dies it is forgotten,
    before another array can have the same identity. An array may change its shape in place, so these are compared.
    """

    def __init__(self, operands: tuple, alpha: tuple, beta: tuple, launch: Callable[[], None]) -> None:
        self.launch = launch
        self._scalars = alpha, beta
        self._ids = tuple(map(id, operands))
        self._shapes = [x.shape for x in operands if x is not None]
        self._alive = [weakref.ref(x, self._forget) for x in operands if x is not None]

    def _forget(self, _) -> None:
        self._ids = ()

    def is_of(self, operands: tuple, alpha: tuple, beta: tuple) -> bool:
        return (
            tuple(map(id, operands)) == self._ids
            and (alpha, beta) == self._scalars
            and [x.shape for x in operands if x is not None] == self._shapes
        )


def pack_call(addresses: list, alpha: tuple, beta: tuple, shape: bytes) -> bytes:
    """Pack GemmParams."""
    return CALL.pack(*addresses[:2], *alpha, *addresses[2:6], *beta) + shape


@dataclass(frozen=True)
class OneKernel:
    """A product in one launch. `tail` packs what the kernel takes behind GemmParams, and keeps what that points to."""

    kernel: Function
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    shape: bytes
    tail: Callable[[tuple, list], tuple[bytes, object]] | None
    early: bool = False  # see _gemm_sm90.Plan

    def run(self, operands: tuple, addresses: list, alpha: tuple, beta: tuple) -> None:
        params, _kept = pack_call(addresses, alpha, beta, self.shape), None
        if self.tail is not None:
            further, _kept = self.tail(operands, addresses)
            params += further
        self.kernel.launch(self.grid, self.block, (params,), self.shared_bytes, self.early)

    @property
    def bind(self) -> Callable[[list, tuple, tuple], Callable[[], None]] | None:
        """What returns the launch alone, for the same call again; None where there is more to do than that."""
        return self._bind if self.tail is None else None

    def _bind(self, addresses: list, alpha: tuple, beta: tuple) -> Callable[[], None]:
        values = (pack_call(addresses, alpha, beta, self.shape),)
        return self.kernel.bind(self.grid, self.block, values, self.shared_bytes, self.early)


@dataclass(frozen=True)
class SplitK:
    """Partial products, which are a product into a workspace, and the reduction that finishes them."""

    partial: OneKernel | OnHopper
    reduce: Function
    grid: tuple[int, int, int]
    shape: bytes
    slices: tuple[int, int, int]  # splits, batches * M, row stride
    workspace: Callable[[], tuple]  # the array and its address

    def run(self, operands: tuple, addresses: list, alpha: tuple, beta: tuple) -> None:
        _kept, workspace = self.workspace()
        splits, _, row_stride = self.slices
        self.partial.run(operands, [*addresses[:2], workspace, 0, 0, 0, *addresses[6:]], alpha, ZERO)
        params = pack_call(addresses, alpha, beta, self.shape)
        self.reduce.launch(self.grid, (REDUCE_THREADS, 1, 1), (params, workspace, splits, row_stride), early=True)


@dataclass(frozen=True)
class OnHopper:
    """A product in one launch of Hopper's own kernel. `tail` gives what its plan wants to know of a low-rank part."""

    plan: _gemm_sm90.Plan
    shape: bytes
    tail: Callable[[tuple, list], tuple[tuple, object]] | None = None

    def run(self, operands: tuple, addresses: list, alpha: tuple, beta: tuple) -> None:
        low_rank, _kept = ((), None) if self.tail is None else self.tail(operands, addresses)
        self.plan.run(*addresses[:3], pack_call(addresses, alpha, beta, self.shape), *low_rank)

    @property
    def bind(self) -> Callable[[list, tuple, tuple], Callable[[], None]] | None:
        """As for OneKernel."""
        return self._bind if self.tail is None else None

    def _bind(self, addresses: list, alpha: tuple, beta: tuple) -> Callable[[], None]:
        plan, block = self.plan, (self.plan.config.threads, 1, 1)
        params = pack_call(addresses, alpha, beta, self.shape)
        values = plan.maps(*addresses[:3]), params, plan.order
        return plan.kernel.bind(plan.grid, block, values, plan.shared_bytes, plan.early)


@dataclass(frozen=True)
class OwnSteps:
    """What a derived product does itself, from start to end."""

    run: Callable


@dataclass(frozen=True)
class Launch:
    """Everything about a call that does not change while its key stays the same.

    Attributes
    ----------
    overlaps : tuple
        For each input its index, and between which distances from out it overlaps out; None, or the distance
        at which it may.
    steps : object
        `run` takes all arrays and their addresses, alpha and beta. None where there is nothing to launch. Where one
        launch is all, `bind` takes addresses, alpha and beta, and returns what makes it again.
    span : tuple
        The first byte of an out that is given and the one past its last, from its address.
    bound : dict
        What it has returned, by what it has taken; None for a call that was made once.
    """

    device: object
    out_shape: tuple[int, ...]
    out_dtype: np.dtype
    overlaps: tuple
    steps: object
    span: tuple[int, int] = (0, 0)
    bound: dict = field(default_factory=dict)

    @property
    def bind(self) -> Callable | None:
        return getattr(self.steps, "bind", None)

    def collides(self, addresses: list, *scalars: tuple) -> bool:
        """Tell whether the result would overwrite what is still to be read, also alpha or beta where it is an array."""
        out = addresses[_OUT]
        low, high = self.span
        if any(address and low - 8 < address - out < high for address, *_ in scalars):
            return True
        for index, low, high, allowed in self.overlaps:
            distance = addresses[index] - out
            if low < distance < high and distance != allowed:
                return True
        return False


def overlaps(request: Request) -> tuple:
    """Return `Launch.overlaps`."""
    out = request.arrays["out"]
    if out is None:
        return ()
    span, found = arrays.span(out), []
    for index, (role, x) in enumerate(request.arrays.items()):
        if role == "out" or x is None or x.size == 0:
            continue
        same = x.shape == out.shape and x.strides == out.strides and x.dtype == out.dtype
        found.append((index, *arrays.distances(span, arrays.span(x)), 0 if same and role in _IN_PLACE else None))
    return tuple(found)
