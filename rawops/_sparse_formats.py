"""The arrays of a sparse matrix: what comes in, as compressed rows, and the second format made from the first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rawops._runtime import checks, dtypes
from rawops._runtime.kernel import KernelSpec
from rawops._sparse_measure import Measured, measure, module_of

VALUES = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
MAX_SIZE = 2**31 - 2**10  # rows or columns: indices are int32 on the device
_WIDE_POINTERS = 2**31 - 2**10  # entries from which row pointers are int64

GATHER = KernelSpec(
    source="sparse_gather.cu",
    entry="rawops::sparse_gather",
    template=("dtype",),
    choices={"dtype": VALUES},
    smoke=({"dtype": "float32"}, {"dtype": "complex128"}),
)


@dataclass
class Rows:
    """A matrix in compressed rows; for the other format, its transpose.

    Attributes
    ----------
    data : array (nnz,)
    indices : array (nnz,), int32
        Column of each entry, in any order within a row; entries of one place add up.
    indptr : array (rows + 1,), int32 or int64
    shape : tuple of int
    measured : Measured, optional
        Known from the checks of what came in.
    """

    data: Any
    indices: Any
    indptr: Any
    shape: tuple[int, int]
    measured: Measured | None = None

    @property
    def nnz(self) -> int:
        return self.indices.size

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.indices.nbytes + self.indptr.nbytes


def gather(device, data, order, starts=None):
    """Return data[order], or its sums from starts[i] to starts[i + 1], added in that order."""
    count = order.size if starts is None else starts.size - 1
    out = device.empty((count,), data.dtype)
    if count:
        kernel = GATHER.kernel(device, dtype=dtypes.name(data.dtype))
        addresses = [device.pointer(x) for x in (data, order, starts, out)]
        kernel.launch((-(-count // 256), 1, 1), (256, 1, 1), (*addresses, count))
    return out


def row_numbers(rows: Rows):
    """Return the row of each entry, int32."""
    xp = module_of(rows.indptr)
    entries = xp.arange(rows.nnz, dtype=rows.indptr.dtype)
    return xp.searchsorted(rows.indptr[1:], entries, side="right").astype(np.int32)


def column_order(rows: Rows):
    """Return the order of the entries by column, int64."""
    return module_of(rows.indices).argsort(rows.indices, kind="stable").astype(np.int64, copy=False)


def from_compressed(function: str, device, data, indices, indptr, shape: tuple[int, int], by: str) -> Rows:
    """Check compressed rows (or columns, with the shape turned round) and copy them. It synchronises once.

    Copies, since update_values writes there, and others may sort their own arrays in place.
    """
    xp = module_of(data)
    data = _values(function, data)
    indices_given = _integers(function, "indices", indices)
    indices = _counted(indices_given)
    indptr = _counted(_integers(function, "indptr", indptr))
    if indptr.size != shape[0] + 1:
        checks.fail(ValueError, function, "indptr", f"have one entry more than {by}s, {shape[0] + 1}", indptr.size)
    if indices.size != data.size:
        checks.fail(ValueError, function, "indices", f"have an entry for each of the {data.size} of data", indices.size)
    wide = np.int64 if data.size >= _WIDE_POINTERS else np.int32
    copies = device.empty(indices.shape, np.dtype(np.int32)), device.empty(indptr.shape, np.dtype(wide))
    found = None
    if shape[0] and data.size:
        found = measure(device, indices, indptr, shape[1], *copies)
        first, last, falls = found.first, found.last, found.drops > 0
    else:
        first, last = int(indptr[0]), int(indptr[-1])
        falls = bool((indptr[1:] < indptr[:-1]).any()) or last > data.size
        copies[1][...] = indptr
    if first != 0 or falls:
        rule = f"rise from 0 to at most the {data.size} entries of data"
        falls_between = first == 0 and last <= data.size
        checks.fail(ValueError, function, "indptr", rule, f"{first} to {last}" + ", with a fall" * falls_between)
    if found is not None and found.outside:
        _check_indices(function, "indices", indices_given[:last], shape[1])
    return Rows(xp.array(data[:last]), copies[0][:last], copies[1], shape, found)


def from_coordinates(function: str, device, data, row, col, shape) -> tuple[Rows, Any, Any]:
    """Sort coordinates by row and column and add up what falls on one place. It synchronises.

    Returns the compressed rows, the order in which they take the entries, and where each sum starts in that order
    (None where no two entries share a place).
    """
    xp = module_of(data)
    data = xp.ascontiguousarray(_values(function, data))
    row, col = _integers(function, "row", row), _integers(function, "col", col)
    for name, x, size in (("row", row, shape[0]), ("col", col, shape[1])):
        if x.size != data.size:
            checks.fail(ValueError, function, name, f"have an entry for each of the {data.size} of data", x.size)
        _check_indices(function, name, x, size)
    key = row.astype(np.int64) * max(shape[1], 1) + col.astype(np.int64, copy=False)  # uint64 would make it a float
    order = xp.argsort(key, kind="stable").astype(np.int64, copy=False)
    key, starts = key[order], None
    if key.size > 1:
        is_new = xp.concatenate([xp.ones(1, bool), key[1:] != key[:-1]])
        if not is_new.all():
            starts = xp.append(xp.flatnonzero(is_new), key.size).astype(np.int64)
            key = key[starts[:-1]]
    indptr = pointers(xp, key // max(shape[1], 1), shape[0])
    indices = (key % max(shape[1], 1)).astype(np.int32)
    return Rows(gather(device, data, order, starts), indices, indptr, shape), order, starts


def added_up(function: str, device, rows: Rows) -> Rows:
    """Return compressed rows without duplicates: these, or new ones with sums in float64. It synchronises."""
    row = row_numbers(rows)
    is_next = (rows.indices[1:] > rows.indices[:-1]) | (row[1:] != row[:-1])
    if bool(is_next.all()):
        return rows
    data = rows.data.astype(np.result_type(rows.data.dtype, np.float64), copy=False)
    return from_coordinates(function, device, data, row, rows.indices, rows.shape)[0]


def check_shape(function: str, shape) -> tuple[int, int]:
    """Return a shape as a pair of ints."""
    if not isinstance(shape, (tuple, list)) or len(shape) != 2:
        checks.fail(TypeError, function, "shape", "be (rows, columns)", repr(shape))
    rows, cols = (checks.int_range(function, "shape", size, 0, MAX_SIZE) for size in shape)
    return rows, cols


def value_dtype(function: str, argument: str, dtype) -> np.dtype:
    """Return the dtype in which values are kept: integers and bool become the float that NumPy gives with float32."""
    if dtype.kind in "iub":
        return np.result_type(dtype, np.float32)
    if dtypes.name(dtype) not in VALUES:
        checks.fail(TypeError, function, argument, f"have dtype {', '.join(VALUES)} or an integer type", dtype)
    return dtype


def _values(function: str, data):
    if data.ndim != 1:
        checks.fail(ValueError, function, "data", "have 1 dimension", f"shape {tuple(data.shape)}")
    return data.astype(value_dtype(function, "data", data.dtype), copy=False)


def _integers(function: str, name: str, x):
    if x.ndim != 1:
        checks.fail(ValueError, function, name, "have 1 dimension", f"shape {tuple(x.shape)}")
    if x.dtype.kind not in "iu":
        checks.fail(TypeError, function, name, "have an integer dtype", x.dtype)
    return x


def _counted(x):
    """Return integers as kernels read them: contiguous int32 or int64."""
    kind = x.dtype if x.dtype.name in ("int32", "int64") else np.dtype(np.int64)
    return module_of(x).ascontiguousarray(x, kind)


def _check_indices(function: str, name: str, x, size: int) -> None:
    if x.size:
        low, high = int(x.min()), int(x.max())
        if low < 0 or high >= size:
            rule = f"be {checks.places(size, 'rows' if name == 'row' else 'columns')}"
            checks.fail(ValueError, function, name, rule, f"{low} to {high}")


def pointers(xp, index, size: int):
    """Return the row pointers of entries with these row numbers."""
    wide = np.int64 if index.size >= _WIDE_POINTERS else np.int32
    indptr = xp.zeros(size + 1, wide)
    if size and index.size:
        indptr[1:] = xp.cumsum(xp.bincount(index, minlength=size))
    return indptr
