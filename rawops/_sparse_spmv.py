"""The kernels of y = alpha op(A) x + beta y: their instances and launches."""

from __future__ import annotations

import functools
from typing import Any, Protocol

from rawops._runtime import dtypes
from rawops._runtime.kernel import KernelSpec, ParamStruct
from rawops._sparse_formats import VALUES, Rows
from rawops._sparse_profile import Choice, Profile

_THREADS = 256
_BLOCKS_PER_SM = 8  # of 256 threads: all that an SM holds

_CALL_FIELDS = {
    **dict.fromkeys(("data", "indices", "indptr", "x", "y"), "pointer"),
    **{"alpha_real": "float64", "alpha_imag": "float64", "alpha": "pointer"},
    **{"beta_real": "float64", "beta_imag": "float64", "beta": "pointer"},
    "partials": "pointer",
    "nnz": "int64",
    "rows": "int32",
    "cols": "int32",
}
CALL = ParamStruct("SpmvCall", **_CALL_FIELDS)
TYPES = {"value": VALUES, "vector": VALUES, "pointer": ("int32", "int64")}
LANES = (2, 4, 8, 16, 32)


def smoke(value="float32", vector=None, pointer="int32", conjugate=False, **changes) -> dict:
    """Return the choices of an instance; x and y have the type of the values unless another is given."""
    return {"value": value, "vector": vector or value, "pointer": pointer, "conjugate": conjugate, **changes}


ROWS = KernelSpec(
    source="spmv_rows.cu",
    entry="rawops::spmv_rows",
    template=("value", "vector", "pointer", "lanes", "conjugate"),
    choices={**TYPES, "lanes": LANES, "conjugate": (False, True)},
    smoke=(
        *(smoke(lanes=lanes) for lanes in (2, 32)),
        smoke("float64", lanes=8),
        smoke("float16", "float32", lanes=8),
        smoke("complex128", "complex128", "int64", True, lanes=16),
    ),
    params=CALL,
)
SCATTER = KernelSpec(
    source="spmv_scatter.cu",
    entry="rawops::spmv_scatter",
    template=("value", "vector", "pointer", "lanes", "conjugate"),
    choices={**TYPES, "lanes": LANES, "conjugate": (False, True)},
    smoke=(smoke(lanes=8), smoke("bfloat16", lanes=8), smoke("complex64", "complex128", "int64", True, lanes=8)),
    params=CALL,
)
SCATTER_END = KernelSpec(
    source="spmv_scatter.cu",
    entry="rawops::spmv_scatter_end",
    template=("vector",),
    choices={"vector": VALUES},
    smoke=({"vector": "float32"}, {"vector": "complex64"}),
    params=CALL,
)
ACCUMULATOR = {"float16": "float32", "bfloat16": "float32"}  # of all others: the type itself


class Product(Protocol):
    """One direction of a matrix on its kernel.

    Attributes
    ----------
    num_partials : int
        Entries that `run` writes to `partials`.
    kept : list of array
        What it keeps beside the formats.
    """

    num_partials: int
    kept: list

    def run(self, x, y, alpha: tuple, beta: tuple, partials, conjugate: bool, early: bool = False) -> None:
        """Launch on contiguous vectors of one type; alpha and beta are (real, imaginary, address or 0).

        With `early`, where the kernel can, it begins before the launch before is complete: see common/launches.cuh.
        """


class ByRows:
    """Some threads a row."""

    def __init__(self, device, rows: Rows, choice: Choice, found: Profile) -> None:
        self.device, self.rows, self.lanes = device, rows, choice.lanes
        blocks = -(-rows.shape[0] * choice.lanes // _THREADS)
        self.num_partials = min(blocks, _BLOCKS_PER_SM * device.sm_count)
        self.kept: list[Any] = []
        self._pack, self._kernels = Packer(device, rows), {}

    def run(self, x, y, alpha: tuple, beta: tuple, partials, conjugate: bool, early: bool = False) -> None:
        key = x.dtype, conjugate
        if key not in self._kernels:
            self._kernels[key] = ROWS.kernel(self.device, **types_of(self.rows, x, conjugate), lanes=self.lanes)
        call = self._pack(x, y, alpha, beta, partials)
        self._kernels[key].launch((self.num_partials, 1, 1), (_THREADS, 1, 1), (call,), early=early)


class Scattered:
    """The transposed product from the rows of the other direction, by atomic additions into a workspace."""

    def __init__(self, device, rows: Rows, choice: Choice, found: Profile) -> None:
        self.device, self.rows, self.lanes = device, rows, choice.lanes
        limit = _BLOCKS_PER_SM * device.sm_count
        self._blocks = min(-(-rows.shape[0] * choice.lanes // _THREADS), limit)
        self.num_partials = min(-(-rows.shape[1] // _THREADS), limit)
        self._sums: dict[str, Any] = {}

    def run(self, x, y, alpha: tuple, beta: tuple, partials, conjugate: bool, early: bool = False) -> None:
        types = types_of(self.rows, x, conjugate)
        sums = self.device.pointer(self._workspace(types["vector"]))
        call = Packer(self.device, self.rows, transposed=True)(x, y, alpha, beta, partials)
        if self._blocks and self.rows.nnz:
            kernel = SCATTER.kernel(self.device, **types, lanes=self.lanes)
            kernel.launch((self._blocks, 1, 1), (_THREADS, 1, 1), (call, sums))
        kernel = SCATTER_END.kernel(self.device, vector=types["vector"])
        kernel.launch((self.num_partials, 1, 1), (_THREADS, 1, 1), (call, sums))

    @property
    def kept(self) -> list:
        return list(self._sums.values())

    def _workspace(self, vector: str):
        """Return the sums of a type, zero before and after every product."""
        if vector not in self._sums:
            dtype = dtypes.numpy(ACCUMULATOR.get(vector, vector))
            sums = self.device.empty((self.rows.shape[1],), dtype)
            sums[...] = 0
            self._sums[vector] = sums
        return self._sums[vector]


def types_of(rows: Rows, x, conjugate: bool) -> dict:
    """Return the template values that the arrays decide."""
    value = dtypes.name(rows.data.dtype)
    pointer = dtypes.name(rows.indptr.dtype)
    is_complex = value.startswith("complex")
    return {
        "value": value,
        "vector": dtypes.name(x.dtype),
        "pointer": pointer,
        "conjugate": conjugate and is_complex,
    }


class Packer:
    """Packs the SpmvCall of products with one format, whose addresses do not change."""

    def __init__(self, device, rows: Rows, transposed: bool = False) -> None:
        self._device, self._rows, self._is_transposed = device, rows, transposed

    @functools.cached_property
    def _format(self) -> tuple[int, ...]:
        return tuple(map(self._device.pointer, (self._rows.data, self._rows.indices, self._rows.indptr)))

    @functools.cached_property
    def _sizes(self) -> tuple[int, ...]:
        shape = self._rows.shape
        return self._rows.nnz, *(shape[::-1] if self._is_transposed else shape)

    def __call__(self, x, y, alpha: tuple, beta: tuple, partials) -> bytes:
        pointer = self._device.pointer
        return CALL.pack(*self._format, pointer(x), pointer(y), *alpha, *beta, pointer(partials), *self._sizes)


def pack(device, rows: Rows, x, y, alpha: tuple, beta: tuple, partials) -> bytes:
    """Return the SpmvCall of one product."""
    return Packer(device, rows)(x, y, alpha, beta, partials)
