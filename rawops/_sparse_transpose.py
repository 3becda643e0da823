"""The second format from the first: a stable sort by column on the device."""

from __future__ import annotations

import numpy as np

from rawops._runtime import dtypes
from rawops._runtime.kernel import KernelSpec
from rawops._sparse_formats import VALUES, Rows, module_of

# As in sparse_transpose.cu
_THREADS, _TILE, _DIGITS, _DIGIT_BITS, _PASSES = 512, 4096, 256, 8, 4
_BLOCKS_PER_SM = 4
_MOST_POINTERS = 2048  # of a block

DIGITS = KernelSpec(
    source="sparse_transpose.cu",
    entry="rawops::transpose_digits",
    template=("pointer",),
    choices={"pointer": ("int32", "int64")},
    smoke=({"pointer": "int32"}, {"pointer": "int64"}),
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

    It takes the memory of two more copies of the entries with both their indices meanwhile, and half a byte an entry
    and pass. Nothing synchronises.
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
    bits = max((size - 1).bit_length(), 1)
    passes = -(-bits // _DIGIT_BITS)
    bits = -(-bits // passes)
    # Digits of each pass, the turns of the tiles, and what they leave for one another
    state = module_of(data).zeros(_PASSES * _DIGITS + _PASSES + passes * tiles * _DIGITS, np.int64)
    counts = pointer(state)
    turns = counts + 8 * _PASSES * _DIGITS
    words = turns + 8 * _PASSES
    blocks = min(-(-rows.nnz // _THREADS), _BLOCKS_PER_SM * device.sm_count)
    tile_rows = device.empty((tiles + 1,), columns.dtype)
    sizes = rows.shape[0], rows.nnz, bits, passes, tiles
    values = pointer(columns), pointer(rows.indptr), *sizes, counts, pointer(tile_rows)
    DIGITS.kernel(device, pointer=kind).launch((blocks, 1, 1), (_THREADS, 1, 1), values)
    for i in range(passes):
        targets = [device.empty(columns.shape, dtype) for dtype in (columns.dtype, columns.dtype, data.dtype)]
        sources = [pointer(a) for a in (columns, row, data, rows.indptr, tile_rows)]
        shared = counts + 8 * i * _DIGITS, words + 8 * i * tiles * _DIGITS, turns + 8 * i
        values = (*sources, rows.nnz, i * bits, (1 << bits) - 1, *shared, *map(pointer, targets))
        SCATTER.kernel(device, **types, first=i == 0).launch((tiles, 1, 1), (_THREADS, 1, 1), values)
        columns, row, data = targets
    share = 256
    while share < _MOST_POINTERS and size > 8 * device.sm_count * share:
        share *= 2
    values = pointer(columns), rows.nnz, size, share, pointer(indptr)
    POINTERS.kernel(device, pointer=kind).launch((-(-(size + 1) // share), 1, 1), (256, 1, 1), values)
    return Rows(data, row, indptr, rows.shape[::-1])
