"""The kernel that joins results of attention over disjoint sets of keys."""

from __future__ import annotations

from collections.abc import Callable

from rawops._attention_config import DTYPES
from rawops._attention_operands import AXES, dense
from rawops._runtime.kernel import KernelSpec, ParamStruct

_THREADS = 128


def _strides(name: str) -> dict[str, str]:
    return {f"{name}_{axis}": "int64" for axis in AXES}


def _state(name: str) -> dict[str, str]:
    return {name: "pointer", f"{name}_lse": "pointer", **_strides(f"{name}_out"), **_strides(f"{name}_lse")}


PARAMS = ParamStruct(
    "MergeParams",
    **_state("first"),
    **_state("second"),
    out_split="int64",
    lse_split="int64",
    **{"out": "pointer", "lse": "pointer", **_strides("out"), **_strides("lse")},
    **dict.fromkeys(("parts", "batches", "rows", "heads", "cols"), "int32"),
)
MERGE = KernelSpec(
    source="attention_merge.cu",
    entry="rawops::attention_merge",
    template=("in_dtype", "out_dtype", "two"),
    choices={"in_dtype": DTYPES, "out_dtype": DTYPES, "two": (True, False)},
    smoke=(
        {"in_dtype": "float32", "out_dtype": "float16", "two": False},
        {"in_dtype": "float16", "out_dtype": "float16", "two": True},
    ),
    params=PARAMS,
)


def lse_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides (batch, row, head, col) of a C-contiguous lse (batch, heads, rows) or (heads, rows)."""
    return dense((1, *shape)[-3:], (0, 2, 1, None))


def merge_parts(device, dtype: str, shape: tuple, lse_shape: tuple, axes: tuple, out_strides: tuple) -> Callable:
    """Return a function that merges the parts along the first axis of two float32 arrays.

    It takes the addresses of the parts, of their lse, of out and of lse, 0 where that is not wanted.
    """
    kernel = MERGE.kernel(device, in_dtype="float32", out_dtype=dtype, two=False)
    parts, *sizes = shape
    extents = [1 if axis is None else sizes[axis] for axis in axes]
    lse = lse_strides(lse_shape[1:])
    split = dense(shape, (0,))[0], dense(lse_shape, (0,))[0]
    of_parts = (*dense(tuple(sizes), axes), *lse)
    rows = extents[0] * extents[1] * extents[2]
    grid = (-(-rows * 32 // _THREADS), 1, 1)
    nothing = (0,) * (2 + len(of_parts))

    def merge(source: int, source_lse: int, out: int, out_lse: int) -> None:
        numbers = (source, source_lse, *of_parts, *nothing, *split, out, out_lse, *out_strides, *lse, parts, *extents)
        kernel.launch(grid, (_THREADS, 1, 1), (PARAMS.pack(*numbers),))

    return merge
