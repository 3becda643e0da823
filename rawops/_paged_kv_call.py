"""What the paged ops have alike: their plans, and checks of the arrays beside the pages."""

from __future__ import annotations

from dataclasses import dataclass

from rawops._runtime import checks


@dataclass(frozen=True)
class Plan:
    """A call whose arguments were checked.

    Attributes
    ----------
    launch : object
        What the op runs; None where there is nothing to compute.
    apart : tuple
        Pairs of operands that must not share memory, see `_runtime.call`.
    copies : bool
        Some operand has strides that the kernel does not take: it gets a copy.
    """

    device: object
    launch: object
    page_size: int
    apart: tuple = ()
    copies: bool = False


def check_vector(function: str, name: str, x, size: int, dtype: str) -> None:
    """Check the dtype and the shape (size,) of an array."""
    checks.dtype(function, name, x, (dtype,))
    checks.shape(function, name, x, (size,))


def has_unit_stride(x) -> bool:
    """Tell whether neighbours along the last axis are neighbours in memory."""
    return x.shape[-1] <= 1 or x.strides[-1] == x.dtype.itemsize


def in_order(x):
    """Return an array with unit stride along its last axis: itself, or a copy."""
    return x if x is None or has_unit_stride(x) else x.copy()


def contiguous(x):
    """Return an array in C order: itself, or a copy."""
    return x if x is None or x.flags.c_contiguous else x.copy()
