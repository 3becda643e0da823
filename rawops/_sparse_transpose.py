"""The second format from the first: a stable sort by column on the device."""

from __future__ import annotations

import numpy as np

from rawops._runtime import dtypes
from rawops._runtime.kernel import KernelSpec
from rawops._sparse_formats import VALUES, Rows, module_of

# As in sparse_transpose.cu
_THREADS, _TILE, _DIGITS, _DIGIT_BITS = 256, 4096, 256, 8

COUNTS = KernelSpec(
    source="sparse_transpose.cu", entry="rawops::transpose_counts", template=(), choices={}, smoke=({},)
)
SCATTER = KernelSpec(
    source="sparse_transpose.cu",
    entry="rawops::transpose_scatter",
    template=("value", "pointer", "first"),
    choices={"value": VALUES, "pointer": ("int32", "int64"), "first": (True, False)},
    smoke=(
        {"value": "float32", "pointer": "int32", "first": True},
        {"value": "float32", "pointer": "int32", "first": False},
        {"value": "complex128", "pointer": "int64", "first": True},
    ),
)
POINTERS = KernelSpec(
    source="sparse_transpose.cu",
    entry="rawops::transpose_pointers",
    template=("pointer",),
    choices={"pointer": ("int32", "int64")},
    smoke=({"pointer": "int32"}, {"pointer": "int64"}),
)


def transposed(device, rows: Rows) -> Rows:
    """Return the compressed rows of the transpose. Entries of a column keep their order, so bits do too.

    It takes the memory of two more copies of the entries with both their indices meanwhile. Nothing synchronises.
    """
    pointer, size = device.pointer, rows.shape[1]
    kind = dtypes.name(rows.indptr.dtype)
    types = {"value": dtypes.name(rows.data.dtype), "pointer": kind}
    columns, row, data = rows.indices, None, rows.data
    indptr = device.empty((size + 1,), rows.indptr.dtype)
    if not rows.nnz:
        indptr[...] = 0
        return Rows(data.copy(), columns.copy(), indptr, rows.shape[::-1])
    tiles = -(-rows.nnz // _TILE)
    counts = device.empty((_DIGITS * tiles,), np.dtype(np.int32))
    shape = columns.shape
    passes = -(-max((size - 1).bit_length(), 1) // _DIGIT_BITS)
    bits = -(-(size - 1).bit_length() // passes)
    for i in range(passes):
        digit = i * bits, (1 << bits) - 1
        COUNTS.kernel(device).launch(
            (tiles, 1, 1), (_THREADS, 1, 1), (pointer(columns), rows.nnz, *digit, pointer(counts))
        )
        ends = module_of(counts).cumsum(counts, dtype=np.int64)
        targets = [device.empty(shape, dtype) for dtype in (columns.dtype, columns.dtype, data.dtype)]
        sources = [pointer(a) for a in (columns, row, data, rows.indptr)]
        values = (*sources, rows.shape[0], rows.nnz, *digit, *map(pointer, (counts, ends, *targets)))
        SCATTER.kernel(device, **types, first=i == 0).launch((tiles, 1, 1), (_THREADS, 1, 1), values)
        columns, row, data = targets
    POINTERS.kernel(device, pointer=kind).launch(
        (-(-(size + 1) // 256), 1, 1), (256, 1, 1), (pointer(columns), rows.nnz, size, pointer(indptr))
    )
    return Rows(data, row, indptr, rows.shape[::-1])
