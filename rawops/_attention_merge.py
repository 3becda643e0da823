"""The kernel that joins results of attention over disjoint sets of keys."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rawops._attention_config import DTYPES
from rawops._attention_operands import AXES, dense, strides_of
from rawops._runtime import arrays, checks
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


def merge_states(function: str, out_a, lse_a, out_b, lse_b) -> tuple:
    """Merge two results; see rawops.merge_attention_states."""
    named = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    checks.arrays_given(function, **named)
    (out_a, lse_a, out_b, lse_b), give = arrays.take(function, **named)
    device = arrays.device_of(function, out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    dtype = checks.dtype(function, "out_a", out_a, DTYPES)
    if out_a.ndim not in (3, 4):
        rule = "have 4 dimensions (batch, seqlen, heads, head_dim) or 3 (total, heads, head_dim)"
        checks.fail(ValueError, function, "out_a", rule, f"shape {tuple(out_a.shape)}")
    *batch, rows, heads, _ = out_a.shape
    checks.dtype(function, "out_b", out_b, (dtype,))
    checks.shape(function, "out_b", out_b, out_a.shape)
    for name, x in (("lse_a", lse_a), ("lse_b", lse_b)):
        checks.dtype(function, name, x, ("float32",))
        checks.shape(function, name, x, (*batch, heads, rows))
    out, lse = device.empty(out_a.shape, out_a.dtype), device.empty(lse_a.shape, np.dtype(np.float32))
    if lse.size:
        axes = (0, 1, 2, 3) if batch else (None, 0, 1, 2)
        lse_axes = (0, 2, 1, None) if batch else (None, 1, 0, None)
        numbers: list[int] = []
        for state, its_lse in ((out_a, lse_a), (out_b, lse_b)):
            numbers += [device.pointer(state), device.pointer(its_lse)]
            numbers += strides_of(state, axes)
            numbers += strides_of(its_lse, lse_axes)
        extents = [1 if axis is None else out_a.shape[axis] for axis in axes]
        numbers += [0, 0, device.pointer(out), device.pointer(lse), *dense(out.shape, axes)]
        numbers += [*lse_strides(lse.shape), 2, *extents]
        kernel = MERGE.kernel(device, in_dtype=dtype, out_dtype=dtype, two=True)
        kernel.launch((-(-lse.size * 32 // _THREADS), 1, 1), (_THREADS, 1, 1), (PARAMS.pack(*numbers),))
    return give(out), give(lse)
