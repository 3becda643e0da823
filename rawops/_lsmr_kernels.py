"""The kernels of LSMR, and the launches that its parts share."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from rawops._runtime.kernel import KernelSpec

MOST_COLUMNS = 65535  # of a grid
COLUMNS = (1, 8, 32)  # right-hand sides that a block of threads goes through side by side
THREADS = 256
MOST_PARTIALS = 2048  # more than this, of all columns, are shortened before many blocks, or a single one, add them up
SHORT = 64
_MOST_BLOCKS = 512

_VECTORS = {"R": ("float32", "float64"), "PARTS": (1, 2), "COLS": COLUMNS}
_SMOKE = [
    {"R": "float32", "PARTS": 1, "COLS": 1},
    {"R": "float64", "PARTS": 2, "COLS": 1},
    {"R": "float64", "PARTS": 1, "COLS": 32},
]


def _vector_kernel(entry: str) -> KernelSpec:
    return KernelSpec(
        source="lsmr.cu", entry=f"rawops::{entry}", template=tuple(_VECTORS), choices=_VECTORS, smoke=_SMOKE
    )


def _scalar_kernel(entry: str) -> KernelSpec:
    return KernelSpec(source="lsmr.cu", entry=f"rawops::{entry}", template=(), choices={}, smoke=[{}])


LOAD, COMBINE, UPDATE = (_vector_kernel(f"lsmr_{name}") for name in ("load", "combine", "update"))
BEGIN, SCALARS = (_scalar_kernel(f"lsmr_{name}") for name in ("begin", "scalars"))
SHORTEN = KernelSpec(
    source="lsmr.cu",
    entry="rawops::lsmr_shorten",
    template=("COLS",),
    choices={"COLS": COLUMNS},
    smoke=[{"COLS": 1}, {"COLS": 32}],
)

_GEMV = {"M": ("float32", "float64"), "MATRIX_PARTS": (1, 2), "R": ("float32", "float64"), "PARTS": (1, 2)}
_GEMV |= {"kDot": (True, False), "kConjugate": (True, False)}
GEMV = KernelSpec(
    source="lsmr_gemv.cu",
    entry="rawops::lsmr_gemv",
    template=tuple(_GEMV),
    choices=_GEMV,
    smoke=[
        dict(zip(_GEMV, values, strict=True))
        for values in (
            ("float32", 1, "float32", 1, True, False),
            ("float32", 1, "float64", 1, False, False),
            ("float64", 2, "float64", 2, True, True),
        )
    ],
)

DTYPES = ("float32", "float64", "complex64", "complex128")


def real_and_parts(dtype) -> tuple[str, int]:
    """Return the real type of a dtype and how many of it make an element."""
    dtype = np.dtype(dtype)
    return (dtype.name, 1) if dtype.kind == "f" else (f"float{dtype.itemsize * 4}", 2)


class Pair(NamedTuple):
    """The scalars of y = alpha A x + beta y on the device: 0-d float64 arrays, or (columns,) ones `stride` apart.

    `gate`, where there is one, are alpha and beta for A x alone, 0-d arrays for all columns together: 1 and 0 until all
    have stopped, then 0 and 1.
    """

    alpha: Any
    beta: Any
    stride: int = 0
    gate: tuple | None = None


class Vectors:
    """Launches on (rows, columns) arrays of one dtype; columns = 1 are plain vectors.

    Attributes
    ----------
    early : bool
        Launches may begin before the one before is complete, see common/launches.cuh: in graphs, where asking for it
        costs the host nothing.
    """

    def __init__(self, device, dtype, columns: int) -> None:
        self.device, self.dtype, self.columns = device, np.dtype(dtype), columns
        real, parts = real_and_parts(dtype)
        cols = next((c for c in COLUMNS if c >= columns), COLUMNS[-1])
        self.early = False
        self._choices = {"R": real, "PARTS": parts, "COLS": cols}
        self._rows = THREADS // cols  # that a block takes at a time
        self._column_blocks = -(-columns // cols)
        self._kernels: dict = {}
        self._constants: dict[float, Any] = {}

    def launch(self, spec: KernelSpec, grid: tuple, values: tuple) -> None:
        """Launch the kernel for these vectors."""
        if spec not in self._kernels:
            self._kernels[spec] = spec.kernel(self.device, **{name: self._choices[name] for name in spec.template})
        self._kernels[spec].launch(grid, (THREADS, 1, 1), values, early=self.early)

    def blocks(self, rows: int) -> int:
        """Return how many blocks share `rows` rows, which is how many partial sums each column gets."""
        return max(1, min(-(-rows // self._rows), _MOST_BLOCKS))

    def grid(self, rows: int) -> tuple[int, int, int]:
        """Return the grid of a kernel over `rows` rows."""
        return self.blocks(rows), self._column_blocks, 1

    def empty(self, rows: int):
        """Return a new array of `rows` rows."""
        return self.device.empty((rows,) if self.columns == 1 else (rows, self.columns), self.dtype)

    def partials(self, count: int):
        """Return a new array of `count` partial sums a column."""
        return self.device.empty((count, self.columns), np.dtype("float64"))

    def constants(self, alpha: float, beta: float) -> Pair:
        """Return numbers as the scalars of a product."""
        for value in (alpha, beta):
            if value not in self._constants:
                self._constants[value] = x = self.device.empty((self.columns,), np.dtype("float64"))
                x.fill(value)
        alpha, beta = self._constants[alpha], self._constants[beta]
        return Pair(alpha.reshape(()), beta.reshape(())) if self.columns == 1 else Pair(alpha, beta, 1)

    def load(self, source, target, partials) -> None:
        """Copy `source`, of any strides, and leave the partial sums of its squares."""
        rows, itemsize = target.shape[0], self.dtype.itemsize
        strides = [s // itemsize for s in (*source.strides, 0)][:2]
        pointer = self.device.pointer
        values = (pointer(source), *strides, pointer(target), rows, self.columns, pointer(partials))
        self.launch(LOAD, self.grid(rows), values)

    def combine(self, scalars: Pair, w, y, partials=None, slices: int = 1, scale=None) -> None:
        """Compute y = alpha * scale * (sum of the slices of w) + beta * y, with the partial sums of its squares."""
        rows, pointer = y.shape[0], self.device.pointer
        values = (pointer(scalars.alpha), pointer(scalars.beta), scalars.stride, pointer(w), slices, pointer(scale))
        values += (pointer(y), rows, self.columns, pointer(partials))
        self.launch(COMBINE, self.grid(rows), values)

    def shorten(self, partials, shorter) -> None:
        """Add partial sums up to fewer."""
        pointer = self.device.pointer
        values = (pointer(partials), partials.shape[0], self.columns, pointer(shorter))
        self.launch(SHORTEN, (shorter.shape[0], self._column_blocks, 1), values)
