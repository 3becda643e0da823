"""The memory spaces behind one interface: load, store and atomics on arrays of addresses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..errors import MemoryFault
from .types import UINT

if TYPE_CHECKING:
    from .context import Context

# Windows of the generic address space. Global allocations lie below 2**47.
SHARED_WINDOW = 1 << 56
LOCAL_WINDOW = 2 << 56
PARAM_WINDOW = 3 << 56
CONST_WINDOW = 4 << 56
WINDOWS = {
    "shared": SHARED_WINDOW,
    "shared::cluster": SHARED_WINDOW,
    "shared::cta": SHARED_WINDOW,
    "local": LOCAL_WINDOW,
    "param": PARAM_WINDOW,
    "const": CONST_WINDOW,
    "global": 0,
}

class Space:
    """A memory space of one context.

    In every method `addresses` is uint64 of shape (n,), `owners` the lane that makes each access (intp,
    shape (n,); a lane may own several), `size` the bytes of one access: 1, 2, 4, 8 or 16. Values are of
    dtype ``UINT[size]``. Alignment to `size`, bounds, initialisation, races and the counters of the report
    are taken care of inside; a wrong access raises.
    """

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx

    def reset(self) -> None:
        """Forget the last batch."""

    def load(self, addresses: np.ndarray, size: int, owners: np.ndarray, access: str = "load") -> np.ndarray:
        """The values at the addresses, shape (n,), dtype ``UINT[size]``."""
        view, index = self.locate(addresses, size, owners, access)
        return view.take(index)

    def store(
        self, addresses: np.ndarray, values: np.ndarray, owners: np.ndarray, access: str = "store"
    ) -> None:
        """Store values of dtype ``UINT[size]``; where addresses coincide the highest lane wins."""
        view, index = self.locate(addresses, values.itemsize, owners, access)
        view[index] = values

    def parts(
        self, addresses: np.ndarray, owners: np.ndarray
    ) -> Iterator[tuple[Space, np.ndarray, np.ndarray, slice | np.ndarray]]:
        """The space, its addresses, their owners and the positions they had, one item for each space hit.

        Only the generic space has more than itself to offer.
        """
        yield self, addresses, owners, slice(None)

    def locate(
        self, addresses: np.ndarray, size: int, owners: np.ndarray, access: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Check and count the accesses; return a typed view of the storage and the element indices in it.

        `access` is "load", "store", or with "strong " before it for volatile, relaxed, acquire and release
        ones (which do not race with each other), or "atomic".
        """
        raise NotImplementedError
