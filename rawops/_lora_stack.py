"""The adapters of a `MultiLoRA` on the device, slot by slot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rawops import _lora_beside
from rawops._lora_multi_config import padded_rank


@dataclass(frozen=True)
class Stack:
    """The adapters on the device, slot by slot; strides in elements.

    Attributes
    ----------
    a : array (max_loras, slices, slot_rank, a_row)
        Transposed: a row for each rank, filled up to K and to the slice's rank.
    columns : array (max_loras * N + MOST_COLUMNS, slot_rank)
        b transposed as well, slot by slot, and room for what a last tile lacks. A column has the ranks of the slice
        that it is in. The halves of sixteen ranks change places where `swapped` says so, as the kernels want them
        (place_of_rank in adapters.cuh).
    swapped : array (N, 1, 1, 1) uint16
        All bits of the last four of eight columns.
    ranks : array (max_loras, slices) int32
    scalings : array (max_loras,) float32
    non_finite : array (max_loras,) int32
        Whether b has an infinity or a NaN.
    slices : array (slices, 2) int32
    counters : array (2,) int32
        Zero between calls, see _lora_beside.py.
    first_slice : tuple of 2 int
        The columns of the first slice, for the host.
    """

    a: object
    columns: object
    swapped: object
    ranks: object
    scalings: object
    non_finite: object
    slices: object
    counters: object
    first_slice: tuple[int, int]

    @classmethod
    def empty(cls, device, dtype, sizes: tuple, max_loras: int, max_rank: int, slices: tuple) -> Stack:
        (K, N), slot_rank = sizes, padded_rank(max_rank)
        stack = cls(
            a=device.empty((max_loras, len(slices), slot_rank, -(-K // 8) * 8), dtype),
            columns=device.empty((max_loras * N + _lora_beside.MOST_COLUMNS, slot_rank), dtype),
            swapped=device.empty((N, 1, 1, 1), np.dtype("uint16")),
            ranks=device.empty((max_loras, len(slices)), np.dtype("int32")),
            scalings=device.empty((max_loras,), np.dtype("float32")),
            non_finite=device.empty((max_loras,), np.dtype("int32")),
            slices=device.empty((len(slices), 2), np.dtype("int32")),
            counters=device.empty((2,), np.dtype("int32")),
            first_slice=slices[0],
        )
        stack.ranks[...] = stack.counters[...] = stack.swapped[...] = 0
        for col in range(4, 8):
            stack.swapped[col::8] = 0xFFFF
        for i, bounds in enumerate(slices):
            for j, bound in enumerate(bounds):
                stack.slices[i, j] = bound
        return stack

    @property
    def b(self):
        """Return b as an array (max_loras, N, slot_rank)."""
        max_loras, N, slot_rank = len(self.a), len(self.swapped), self.columns.shape[-1]
        return self.columns[: max_loras * N].reshape(max_loras, N, slot_rank)

    def put_b(self, device, slot: int, start: int, stop: int, b) -> None:
        """Copy b (rank, stop - start) to the columns start .. stop - 1 of a slot."""
        rank, columns = b.shape[0], device.empty((stop - start, self.columns.shape[-1]), b.dtype)
        columns[:, :rank], columns[:, rank:] = b.T, 0
        halves = columns.view("uint16").reshape(stop - start, columns.shape[-1] // 16, 2, 8)
        halves = halves ^ ((halves ^ halves[:, :, ::-1]) & self.swapped[start:stop])
        self.b[slot, start:stop] = halves.reshape(columns.shape).view(b.dtype)

    def addresses(self, device) -> list[int]:
        return [
            device.pointer(x) for x in (self.a, self.columns, self.ranks, self.scalings, self.non_finite, self.slices)
        ]

    def beside(self, device) -> _lora_beside.Adapters | None:
        """Describe it for the kernel that makes x @ a beside x @ c, None where that cannot take it."""
        max_loras, N, slot_rank = self.b.shape
        if slot_rank > _lora_beside.RANKS or len(self.slices) > 1 or self.first_slice != (0, N) or max_loras == 0:
            return None
        *found, _ = self.addresses(device)
        return _lora_beside.Adapters(*found, device.pointer(self.counters), self.a.shape[-1], max_loras)


def has_non_finite(x):
    """Tell on the device whether a 16-bit array has an infinity or a NaN."""
    exponent = 0x7C00 if x.dtype.name == "float16" else 0x7F80
    return ((x.view("uint16") & exponent) == exponent).any()
