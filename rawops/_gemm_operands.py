"""The arrays of a product: the checks that they fit together, and how the kernels see them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from rawops._gemm_config import ACTIVATIONS, DTYPES, FLOAT8, SHAPE
from rawops._runtime import checks, dtypes

ROLES = ("a", "b", "out", "c", "bias", "residual")  # in the order in which the kernels take their addresses
MAX_SIZE = 2**31 - 2**16  # leaves the kernels' int arithmetic room for a tile
PRECISIONS = {"tf32": ("float32",), "fast": FLOAT8}  # and the dtypes that have them

_MAX_BATCH_AXES = 3
_ALIGNED, _FLOAT32 = 1, 2  # OperandFlags in epilogue.cuh


@dataclass(frozen=True)
class Options:
    """What a product does beside multiplying: keywords of `gemm`. `sizes` are the (M, N, K, dtype) of a plan."""

    activation: str | None = None
    out_dtype: Any = None
    precision: str | None = None
    split_k: int | None = None
    sizes: tuple | None = None


@dataclass(frozen=True)
class Request:
    """A call to be checked and described.

    Attributes
    ----------
    function : str
        For messages, as `names`, the user's name of every role that has another.
    arrays : dict
        Arrays or None by role: those of `ROLES`, then those that another kernel takes beside them.
    addresses : list of int
        Of their first elements, in the same order.
    """

    function: str
    options: Options
    arrays: dict
    addresses: list
    names: dict

    def fail(self, kind: type[Exception], role: str, rule: str, got, hint: str = "") -> None:
        checks.fail(kind, self.function, self.names.get(role, role), rule, got, hint)


class Types:
    """Which dtypes go together: those of products whose operands have one type.

    Parameters
    ----------
    operands : tuple of str
        What a can have, that of which the function makes another product too.
    """

    def __init__(self, operands: tuple[str, ...] = DTYPES) -> None:
        self.operands = operands

    def of_operands(self, request: Request) -> str:
        """Check the dtypes of a and b; return that of a."""
        a, b = request.arrays["a"], request.arrays["b"]
        dtype = checks.dtype(request.function, "a", a, self.operands)
        checks.dtype(request.function, "b", b, (dtype,), "a and b have one dtype; convert one of them.")
        return dtype

    def of_result(self, dtype: str) -> tuple[str, ...]:
        """Return what the result can have for a of this dtype, the default first."""
        return tuple(dict.fromkeys((dtype, "float32")))

    def of_addends(self, dtype: str, out_dtype: str | None = None) -> tuple[str, ...]:
        """Return what c, bias and residual can have, where the result is known beside it."""
        return (dtype,) if dtype in ("float32", "float64") else (dtype, "float32")


@dataclass
class Operand:
    """An array as the kernels see it: strides in elements, batch axes as in the result; "tf32": to be rounded so."""

    dtype: str
    itemsize: int
    alignment: int  # the address modulo 16
    row: int
    col: int
    batch: list[int]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a product. N counts columns of b, `cols` those of the result: half as many for swiglu."""

    M: int
    N: int
    K: int
    cols: int
    batch: tuple[int, ...]

    @property
    def result(self) -> tuple[int, ...]:
        return (*self.batch, self.M, self.cols)

    @property
    def gate(self) -> int:
        """From a column of gate to that of up."""
        return self.cols if self.cols != self.N else 0


# --- checks of what a call's arrays do not change ---------------------------------------------------------------------


def check_options(function: str, options: Options, types: Types) -> None:
    """Check the options by themselves, and with the sizes of a plan."""
    for name, allowed in (("activation", ACTIVATIONS), ("precision", (None, *PRECISIONS))):
        checks.choice(function, name, getattr(options, name), allowed)
    if options.split_k is not None:
        split_count(function, options.split_k)
    if options.sizes is not None:
        _, N, _, dtype = options.sizes
        if options.activation == "swiglu" and N % 2:
            checks.fail(ValueError, function, "N", "be even for swiglu", N)
        check_precision(function, options.precision, dtype)
        if options.out_dtype is not None:
            _check_result(function, "out_dtype", options.out_dtype, dtype, types)


def split_count(function: str, split_k) -> int:
    return checks.int_range(function, "split_k", split_k, 1, 1024)


def check_bias(function: str, x, allowed: tuple[str, ...], N: int, groups: int | None = None) -> None:
    """Check a bias (N,); with `groups`, it may be (groups, N)."""
    checks.dtype(function, "bias", x, allowed)
    checks.shape(function, "bias", x, (N,) if groups is None or x.ndim == 1 else (groups, N))


def check_addend(function: str, role: str, x, allowed: tuple[str, ...], target: tuple) -> None:
    """Check c or the residual, which broadcasts to `target`."""
    checks.dtype(function, role, x, allowed)
    if x.ndim < 2:
        hint = "Make a vector a matrix with x[None, :] or x[:, None]."
        checks.fail(ValueError, function, role, "have at least 2 dimensions", f"shape {tuple(x.shape)}", hint)
    trailing = target[len(target) - x.ndim :] if x.ndim <= len(target) else None
    fits = trailing and all(have in (1, want) for have, want in zip(x.shape, trailing, strict=True))
    if not fits:
        checks.fail(ValueError, function, role, f"broadcast to shape {target}", f"shape {tuple(x.shape)}")


def check_precision(function: str, precision: str | None, dtype: str) -> None:
    if precision is not None and dtype not in PRECISIONS[precision]:
        hint = f"{precision!r} is for {' and '.join(PRECISIONS[precision])}."
        checks.fail(ValueError, function, "precision", f"be None for {dtype}", repr(precision), hint)


def _check_result(function: str, argument: str, wanted, dtype: str, types: Types) -> str:
    name = dtypes.shown(wanted)
    return checks.named_dtype(function, argument, name, types.of_result(dtype), f" for {dtype} inputs")


# --- checks of a call -----------------------------------------------------------------------------------------------


def check(request: Request, types: Types) -> tuple[str, str, Sizes]:
    """Check everything that the user can get wrong; return the dtypes of a and out, and the sizes."""
    options, arrays = request.options, request.arrays
    a, b = arrays["a"], arrays["b"]
    if options.sizes is not None:
        _check_plan(request, *options.sizes)
    dtype = types.of_operands(request)
    _check_shapes(request, dtype)
    N = b.shape[-1]
    cols = N // 2 if options.activation == "swiglu" else N
    sizes = Sizes(a.shape[-2], N, a.shape[-1], cols, _broadcast_batch(request))
    out_dtype = result_dtype(request, dtype, types)
    check_epilogue(request, types.of_addends(dtype, out_dtype), sizes)
    return dtype, out_dtype, sizes


def _check_shapes(request: Request, dtype: str) -> None:
    options = request.options
    a, b = request.arrays["a"], request.arrays["b"]
    for role, x in (("a", a), ("b", b)):
        if x.ndim < 2:
            hint = "Make a vector a matrix with x[None, :] or x[:, None]."
            request.fail(ValueError, role, "have at least 2 dimensions", f"shape {tuple(x.shape)}", hint)
        if max(x.shape[-2:]) > MAX_SIZE:
            request.fail(ValueError, role, f"have at most {MAX_SIZE} rows and columns", tuple(x.shape))
    if a.shape[-1] != b.shape[-2]:
        rule = f"have {a.shape[-1]} rows, as a has columns"
        request.fail(ValueError, "b", rule, f"shapes {tuple(a.shape)} @ {tuple(b.shape)}", "Transpose it?")
    if options.activation == "swiglu" and b.shape[-1] % 2:
        request.fail(ValueError, "b", "have an even number of columns for swiglu", b.shape[-1])
    check_precision(request.function, options.precision, dtype)


def _check_plan(request: Request, M: int, N: int, K: int, dtype: str) -> None:
    for role, shape in (("a", (M, K)), ("b", (K, N))):
        x = request.arrays[role]
        if x.shape[-2:] != shape:
            request.fail(ValueError, role, f"have shape (..., {shape[0]}, {shape[1]})", tuple(x.shape))
    checks.dtype(request.function, "a", request.arrays["a"], (dtype,))


def _broadcast_batch(request: Request) -> tuple[int, ...]:
    a, b = request.arrays["a"], request.arrays["b"]
    try:
        batch = np.broadcast_shapes(tuple(a.shape[:-2]), tuple(b.shape[:-2]))
    except ValueError:
        shapes = f"shapes {tuple(a.shape)} @ {tuple(b.shape)}"
        return request.fail(ValueError, "b", "have batch axes that broadcast with those of a", shapes)
    if math.prod(batch) > MAX_SIZE:
        request.fail(ValueError, "a", f"make at most {MAX_SIZE} matrices with b", math.prod(batch))
    return batch


def result_dtype(request: Request, dtype: str, types: Types) -> str:
    given, out = request.options.out_dtype, request.arrays["out"]
    wanted = given if given is not None else out.dtype if out is not None else types.of_result(dtype)[0]
    name = _check_result(request.function, "out" if given is None else "out_dtype", wanted, dtype, types)
    if out is not None:
        checks.dtype(request.function, "out", out, (name,), "out and out_dtype name the same type.")
    return name


def check_epilogue(request: Request, allowed: tuple[str, ...], sizes: Sizes, groups: int | None = None) -> None:
    function, arrays = request.function, request.arrays
    for role, target in (("c", (*sizes.batch, sizes.M, sizes.N)), ("residual", sizes.result)):
        if arrays[role] is not None:
            check_addend(function, role, arrays[role], allowed, target)
    if arrays["bias"] is not None:
        check_bias(function, arrays["bias"], allowed, sizes.N, groups)
    out = arrays["out"]
    if out is not None:
        checks.shape(function, "out", out, sizes.result)
        checks.output(function, "out", out)


# --- descriptions ---------------------------------------------------------------------------------------------------


def describe(request: Request, sizes: Sizes, out_dtype: str) -> dict[str, Operand]:
    """Describe every array that is present, with batch strides of the result's batch shape, and the result."""
    targets = {"c": (*sizes.batch, sizes.M, sizes.N), "residual": sizes.result, "out": sizes.result}
    found = {}
    for (role, x), address in zip(request.arrays.items(), request.addresses, strict=True):
        if x is None:
            if role == "out":
                found[role] = contiguous(sizes.result, out_dtype)
            continue
        itemsize = x.dtype.itemsize
        address = address if x.size else 0
        strides = [s // itemsize for s in x.strides]
        if role == "bias":
            groups = strides[:-1] if x.shape[0] > 1 else [0] * (x.ndim - 1)
            found[role] = Operand(dtypes.name(x.dtype), itemsize, address % 16, 0, strides[-1], groups or [0])
            continue
        target = targets.get(role, (*sizes.batch, *x.shape[-2:]))
        strides = [0] * (len(target) - x.ndim) + [
            s if extent != 1 else 0 for s, extent in zip(strides, x.shape, strict=True)
        ]
        *batch, row, col = strides
        if col == 0 and target[-1] == 1:
            col = 1  # so that one column counts as contiguous
        is_tf32 = role in ("a", "b") and request.options.precision == "tf32"
        dtype = "tf32" if is_tf32 else dtypes.name(x.dtype)
        found[role] = Operand(dtype, itemsize, address % 16, row, col, batch)
    return found


def contiguous(shape: tuple[int, ...], dtype: str) -> Operand:
    """Describe a row-major array that is yet to be allocated."""
    strides = [1]
    for extent in reversed(shape[1:]):
        strides.insert(0, strides[0] * extent)
    *batch, row, col = strides
    return Operand(dtype, dtypes.itemsize(dtype), 0, row, col, batch)


def fold_batch(operands: dict[str, Operand], sizes: Sizes) -> tuple[int, tuple[int, int, int]] | None:
    """Merge batch axes that every operand steps through evenly, and those that only stack rows of a into M.

    Returns M and three extents; the operands' batch strides change to match. None if more than three axes are left.
    """
    M = sizes.M
    stacked = [x for role, x in operands.items() if role != "bias"]
    fixed = [operands[role] for role in ("b", "scale_b") if role in operands]
    axes = [(extent, [x.batch[i] for x in stacked]) for i, extent in enumerate(sizes.batch) if extent != 1]
    merged: list[tuple[int, list[int]]] = []
    for extent, strides in reversed(axes):
        if merged and all(s == t * merged[0][0] for s, t in zip(strides, merged[0][1], strict=True)):
            merged[0] = (merged[0][0] * extent, merged[0][1])
        else:
            merged.insert(0, (extent, strides))
    if merged:
        extent, strides = merged[-1]
        step = dict(zip((id(x) for x in stacked), strides, strict=True))
        rows = [x for x in stacked if all(x is not y for y in fixed)]
        even = all(M == 1 or step[id(x)] == M * x.row for x in rows)
        if all(step[id(x)] == 0 for x in fixed) and even and M * extent <= MAX_SIZE:
            for x in rows:
                x.row = step[id(x)] if M == 1 else x.row
            M *= extent
            merged.pop()
    if len(merged) > _MAX_BATCH_AXES:
        return None
    merged = [(1, [0] * len(stacked))] * (_MAX_BATCH_AXES - len(merged)) + merged
    for i, x in enumerate(stacked):
        x.batch = [strides[i] for _, strides in merged]
    if "bias" in operands:
        operands["bias"].batch = [0] * _MAX_BATCH_AXES
    return M, tuple(extent for extent, _ in merged)


def layout_of(x: Operand, mn: int, k: int, mn_stride: int, k_stride: int, gate: int) -> tuple[bool, int]:
    """Choose the contiguous axis of an operand and the widest access along it that is always aligned.

    Returns whether that axis is K, and the access in bytes: one element if neither axis is contiguous. An axis of one
    entry is contiguous whatever its stride.
    """

    def access(extent, stride, slow_extent, slow_stride, halves):
        if stride != 1 and extent > 1:
            return 0
        steps = (*x.batch, halves, slow_stride if slow_extent > 1 else 0)
        return math.gcd(16, x.alignment, *(s * x.itemsize for s in steps))

    along_k = access(k, k_stride, mn, mn_stride, 0)
    along_mn = access(mn, mn_stride, k, k_stride, gate)
    if not along_k and not along_mn:
        return abs(k_stride) <= abs(mn_stride), x.itemsize
    return along_k >= along_mn, max(along_k, along_mn)


def pack_shape(operands, sizes, extents, k_per_split, gate, partial_stride=0) -> bytes:
    """Pack GemmShape; `sizes` are M, N, K and the columns of the result, `gate` those from gate to up."""
    M, N, K, cols = sizes
    width = 2 if operands["a"].dtype == "float64" else 4  # columns that a thread finishes together
    strides, flags = [], {}
    for name in ("a", "b", "out", "c", "residual"):
        x = operands.get(name)
        strides += [0] * 5 if x is None else [x.row, x.col, *x.batch]
    for name in ("out", "c", "bias", "residual"):
        x = operands.get(name)
        flags[name] = 0
        if x is not None:
            halves = gate if name in ("c", "bias") else 0
            whole = math.gcd(x.alignment, *(s * x.itemsize for s in (x.row, *x.batch, halves)))
            flags[name] |= _ALIGNED if x.col == 1 and whole % (width * x.itemsize) == 0 else 0
            flags[name] |= _FLOAT32 if x.dtype == "float32" else 0
    bias = operands.get("bias")
    return SHAPE.pack(
        *strides,
        *((bias.col, bias.batch[-1]) if bias else (0, 0)),
        *(M, cols, *flags.values()),
        partial_stride,
        *(M, N, K, k_per_split, math.prod(extents), *extents),
    )
