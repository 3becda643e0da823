"""y = alpha A x + beta y for a dense matrix x."""

from __future__ import annotations

from rawops._runtime.kernel import KernelSpec, ParamStruct
from rawops._sparse_formats import Rows
from rawops._sparse_spmv import CALL, TYPES, pack, types_of

SHAPE = ParamStruct("SpmmShape", **dict.fromkeys(("x_row", "x_col", "y_row", "y_col"), "int64"), columns="int32")
SPMM = KernelSpec(
    source="spmm_rows.cu",
    entry="rawops::spmm_rows",
    template=("value", "vector", "pointer", "conjugate"),
    choices={**TYPES, "conjugate": (False, True)},
    smoke=(
        {"value": "float32", "vector": "float32", "pointer": "int32", "conjugate": False},
        {"value": "complex64", "vector": "complex64", "pointer": "int32", "conjugate": True},
    ),
    params=CALL,
)
_MAX_BLOCKS = 65535


def multiply_dense(device, rows: Rows, x, y, alpha: tuple, beta: tuple, conjugate: bool) -> None:
    """Launch on matrices of one type and any strides; x is read and y written in place."""
    if not y.size:
        return
    kernel = SPMM.kernel(device, **types_of(rows, x, conjugate))
    strides = [stride // a.itemsize for a in (x, y) for stride in a.strides]
    call = pack(device, rows, x, y, alpha, beta, None)
    grid = (min(-(-rows.shape[0] // 8), _MAX_BLOCKS), -(-y.shape[1] // 32), 1)
    kernel.launch(grid, (256, 1, 1), (call, SHAPE.pack(*strides, y.shape[1])))
