"""Reorthogonalisation: each new v against the ones that are kept, by two skinny products on the device."""

from __future__ import annotations

import numpy as np

from rawops._lsmr_kernels import THREADS, Vectors, real_and_parts
from rawops._runtime.kernel import KernelSpec

_TYPES = {"R": ("float32", "float64"), "PARTS": (1, 2)}


def _spec(entry: str) -> KernelSpec:
    smoke = [{"R": "float32", "PARTS": 1}, {"R": "float64", "PARTS": 2}]
    return KernelSpec(
        source="lsmr_basis.cu", entry=f"rawops::{entry}", template=tuple(_TYPES), choices=_TYPES, smoke=smoke
    )


_PROJECT, _SUBTRACT, _KEEP = (_spec(f"lsmr_{name}") for name in ("project", "subtract", "keep"))


class Basis:
    """The last `capacity` vectors v of one right-hand side.

    Parameters
    ----------
    vectors : Vectors
    capacity : int
    states : array
        The solver's state, which says how many there are by now.
    v : array (rows,)
    """

    def __init__(self, vectors: Vectors, capacity: int, states, v) -> None:
        device = vectors.device
        self.capacity, self._states, self._v, self._device = capacity, states, v, device
        real, parts = real_and_parts(vectors.dtype)
        project, subtract, keep = (s.kernel(device, R=real, PARTS=parts) for s in (_PROJECT, _SUBTRACT, _KEEP))
        self._project, self._subtract, self._keep = project, subtract, keep
        self._kept = device.empty((capacity, *v.shape), vectors.dtype)
        self._coefficients = device.empty((capacity, parts), np.dtype("float64"))
        self._blocks = max(1, min(-(-v.shape[0] // THREADS), 1024))
        self.partials = vectors.partials(self._blocks)

    def orthogonalise(self):
        """Take out of v what lies along the kept vectors; return the partial sums of its squares."""
        states, kept, v, coefficients, partials = map(
            self._device.pointer, (self._states, self._kept, self._v, self._coefficients, self.partials)
        )
        rows, block = self._v.shape[0], (THREADS, 1, 1)
        self._project.launch((self.capacity, 1, 1), block, (states, kept, self.capacity, v, rows, coefficients))
        values = (states, kept, self.capacity, v, rows, coefficients, partials)
        self._subtract.launch((self._blocks, 1, 1), block, values)
        return self.partials

    def keep(self) -> None:
        """Keep v, normalised."""
        states, kept, v = map(self._device.pointer, (self._states, self._kept, self._v))
        values = (states, v, self._v.shape[0], kept, self.capacity)
        self._keep.launch((self._blocks, 1, 1), (THREADS, 1, 1), values)
