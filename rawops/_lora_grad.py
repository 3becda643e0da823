"""The backward pass of one LoRA adapter on a frozen weight: `lora_linear_backward`."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence

import numpy as np

from rawops._gemm_call import ZERO, Product
from rawops._gemm_config import DTYPES
from rawops._gemm_maps import k_major
from rawops._gemm_operands import MAX_SIZE, Operand, Options
from rawops._lora_factors import factor_gradients, operand_of, takes_parts
from rawops._lora_product import NOTHING, LowRankProduct, check_weights, row_of_y
from rawops._lora_sm90 import NARROW, NarrowProduct, row_of_parts
from rawops._runtime import arrays, checks, dtypes
from rawops._runtime.call import check_apart_once

_FUNCTION = "lora_linear_backward"
_MOST_RANKS_BESIDE = 32  # of Y and dY, which dX waits for; of more, Y is made after it


class _InputGradient(LowRankProduct):
    """dX, which keeps dY = dO @ b^T where it makes that first, for the thread that asked, and may make Y beside it."""

    def __init__(self, scaling: float) -> None:
        super().__init__(_FUNCTION, None, scaling)
        self._of_thread = threading.local()

    def run(self, operands: tuple, make_y: Callable[[int], bool] | None, wants_parts: bool) -> tuple:
        """Run and return dY and its parts, None where these have not been made, or not in one piece.

        `make_y` takes blocks and tells whether it launched.
        """
        own = self._of_thread
        own.dy, own.parts, own.make_y, own.wants_parts = None, None, make_y, wants_parts
        self(operands)
        dy, parts = own.__dict__.pop("dy"), own.__dict__.pop("parts")
        is_whole = dy is not None and dy.shape[:-1] == operands[0].shape[:-1]  # not the last one's of several products
        return (dy, parts) if is_whole else (None, None)

    def products_beside(self, rank: int) -> int:
        return 2 if rank <= _MOST_RANKS_BESIDE else 1

    def y_workspace(self, device, shape: tuple) -> tuple:
        self._of_thread.dy, _ = made = super().y_workspace(device, shape)
        return made

    def parts_of_y(self, device, y, rank: int) -> int:
        own = self._of_thread
        if not own.wants_parts:
            return 0
        own.parts = _parts_of(device, y.size // y.shape[-1], rank)
        return device.pointer(own.parts)

    def launch_beside(self, blocks: int) -> bool:
        own = self._of_thread
        make_y, own.make_y = own.make_y, None  # once, also if dX is made in several products
        return make_y is not None and make_y(blocks)


def lora_linear_backward(dout, x, c, a, b, *, scaling: float = 1.0, out=None) -> tuple:
    """Return the gradients of x, a and b for ``x @ c + scaling * (x @ a) @ b`` with c frozen.

    ``dX = dO @ c^T + scaling * (dO @ b^T) @ a^T``, ``dA = scaling * x^T @ (dO @ b^T)`` and
    ``dB = scaling * (x @ a)^T @ dO``. dX is a `lora_linear` itself, with the factors' roles exchanged: one float32
    accumulator, one write. Where it makes ``dO @ b^T`` in float32 first, dA uses the same array. dA and dB are made in
    one launch, which reads x and dO once more. On Hopper bfloat16 results take 16 bits of both intermediates.

    Parameters
    ----------
    dout : array (..., M, N)
        float16 or bfloat16, or float32 and float64, which run as products one after the other.
    x : array (..., M, K)
    c : array (K, N)
    a : array (K, rank)
    b : array (rank, N)
        As for `lora_linear`, all of one dtype and with any strides.
    scaling : float
        With 0, dA and dB are zero and `a` and `b` are not read.
    out : sequence of 3 arrays, optional
        Where dX, dA and dB go, None for what is to be allocated. dX has the inputs' dtype or float32, as have dA and
        dB. They may lie over inputs, not over each other.

    Returns
    -------
    tuple of array
        dX (..., M, K), dA (K, rank) and dB (rank, N).

    Raises
    ------
    TypeError, ValueError
        For dtypes, shapes or layouts that do not fit, before anything is launched.

    Notes
    -----
    Sums over the rows run in float32 in a fixed order: the same call gives the same bits. Nothing synchronises.
    Workspaces of ``rows * rank`` float32 entries, and for more than 32 ranks twice as many bfloat16 ones, are allocated
    from CuPy's pool.
    """
    given = _outs(out)
    named = {"dout": dout, "x": x, "c": c, "a": a, "b": b}
    checks.arrays_given(_FUNCTION, **named)
    written = {f"out[{i}]": o for i, o in enumerate(given)}
    named |= written
    taken, give = arrays.take(_FUNCTION, tuple(written), **named)
    device = arrays.device_of(_FUNCTION, **dict(zip(named, taken, strict=True)))
    inputs, outs = taken[:5], taken[5:]
    scaling = checks.number(_FUNCTION, "scaling", scaling)
    _check(*inputs, outs)
    check_apart_once(_FUNCTION, device, dict(zip(written, outs, strict=True)), written)
    results = [
        device.empty(like.shape, (like if o is None else o).dtype) if o is None or _overlaps(device, o, inputs) else o
        for o, like in zip(outs, (inputs[1], *inputs[3:]), strict=True)
    ]
    with device.current():
        _run(device, *inputs, scaling, results)
        for o, result in zip(outs, results, strict=True):
            if o is not None and o is not result:
                o[...] = result
    return tuple(give(result) if o is None else o for o, result in zip(given, results, strict=True))


def _outs(out) -> list:
    if out is None:
        return [None] * 3
    if not isinstance(out, Sequence) or len(out) != 3:
        checks.fail(ValueError, _FUNCTION, "out", "be three arrays or None each: dX, dA, dB", type(out).__name__)
    return list(out)


def _check(dout, x, c, a, b, outs) -> None:
    dtype = checks.dtype(_FUNCTION, "c", c, DTYPES)
    check_weights(_FUNCTION, c, a, b)
    for name, array, width in (("x", x, c.shape[0]), ("dout", dout, c.shape[1])):
        checks.dtype(_FUNCTION, name, array, (dtype,), "All operands have one dtype; convert one of them.")
        if array.ndim < 2 or array.shape[-1] != width:
            rule = f"have shape (..., M, {width}), as c is {tuple(c.shape)}"
            checks.fail(ValueError, _FUNCTION, name, rule, f"shape {tuple(array.shape)}")
    checks.shape(_FUNCTION, "dout", dout, (*x.shape[:-1], c.shape[1]), f"x has shape {tuple(x.shape)}.")
    if math.prod(x.shape[:-1]) > MAX_SIZE:
        checks.fail(ValueError, _FUNCTION, "x", f"have at most {MAX_SIZE} rows", math.prod(x.shape[:-1]))
    allowed = tuple(dict.fromkeys((dtype, "float32")))
    for i, (o, like) in enumerate(zip(outs, (x, a, b), strict=True)):
        if o is not None:
            checks.dtype(_FUNCTION, f"out[{i}]", o, allowed)
            checks.shape(_FUNCTION, f"out[{i}]", o, like.shape)
            checks.output(_FUNCTION, f"out[{i}]", o)


def _overlaps(device, out, inputs: tuple) -> bool:
    for x in inputs:
        low, high = arrays.distances(arrays.span(out), arrays.span(x))
        if out.size and x.size and low < device.pointer(x) - device.pointer(out) < high:
            return True
    return False


@functools.lru_cache(maxsize=256)
def _input_gradient(scaling: float) -> _InputGradient:
    """Return the product that all calls with this scaling share."""
    return _InputGradient(scaling)


@functools.lru_cache(maxsize=1)
def _step() -> Product:
    return Product(_FUNCTION, Options())


def _run(device, dout, x, c, a, b, scaling: float, results: list) -> None:
    dx, da, db = results
    if 0 in c.shape:
        dx[...] = da[...] = db[...] = 0
        return
    rows, rank = math.prod(x.shape[:-1]), a.shape[1]
    is_plain, is_wide = rank == 0 or rows == 0 or scaling == 0, x.dtype.itemsize > 2
    flat_x, flat_dout = x.reshape(rows, x.shape[-1]), dout.reshape(rows, dout.shape[-1])
    wants_parts = not is_plain and takes_parts(x.dtype, (da, db), rank)
    y = y_parts = None

    def make_y(blocks: int) -> bool:
        nonlocal y, y_parts
        y, y_parts = _narrow_product(device, flat_x, a, blocks, wants_parts)
        return y is not None

    operands = dout, c.T, dx, None, None, None, b.T, a.T
    beside = make_y if rank <= _MOST_RANKS_BESIDE else None
    dy, dy_parts = _input_gradient(scaling).run(operands, beside, wants_parts)
    if is_plain:
        da[...] = db[...] = 0
    elif is_wide:
        step, alpha = _step(), (0, scaling, 0)
        step((flat_x.T, step((flat_dout, b.T, *NOTHING)), da, *NOTHING[1:]), alpha, ZERO)
        step((step((flat_x, a, *NOTHING)).T, flat_dout, db, *NOTHING[1:]), alpha, ZERO)
    else:
        if y is None:
            y, y_parts = _low_rank(device, flat_x, a, wants_parts)
        if dy is None:
            dy, dy_parts = _low_rank(device, flat_dout, b.T, wants_parts)
        sides = (flat_x, dy.reshape(rows, -1), da), (flat_dout, y, db.T)
        made = None if dy_parts is None or y_parts is None else (dy_parts, y_parts)
        factor_gradients(device, sides, dtypes.as_float32(scaling), rank, made)


def _low_rank(device, x, a, wants_parts: bool) -> tuple:
    """Return x @ a in float32, and its parts if wanted and made."""
    y, parts = _narrow_product(device, x, a, device.sm_count, wants_parts)
    if y is None:
        y = _y_of(device, x, a)
        _step()((x, a, y[:, : a.shape[1]], *NOTHING[1:]))
    return y, parts


def _narrow_product(device, x, a, blocks: int, wants_parts: bool) -> tuple:
    """Return x @ a in float32, made by a `NarrowProduct`, and its parts if wanted; None where that cannot be."""
    if not NARROW.exists_on(device.capability):
        return None, None
    (rows, K), rank = x.shape, a.shape[1]
    x_operand, a_operand = operand_of(device, x), operand_of(device, a)
    x_major = k_major(x_operand, rows, K, x_operand.row, x_operand.col)
    a_major = k_major(a_operand, rank, K, a_operand.col, a_operand.row)
    if x_major is None or a_major is None:
        return None, None
    y, parts = _y_of(device, x, a), _parts_of(device, rows, rank) if wants_parts else None
    strides = (x_operand.row, x_operand.col, a_operand.row, a_operand.col)
    narrow = _narrow(device, x_operand.dtype, strides, (rows, K, rank), blocks)
    narrow.run(*(device.pointer(m) for m in (x, a, y)), parts=0 if parts is None else device.pointer(parts))
    return y, parts


def _parts_of(device, rows: int, rank: int):
    return device.empty((rows, row_of_parts(rank)), dtypes.numpy("bfloat16"))


def _y_of(device, x, a):
    return device.empty((x.shape[0], row_of_y(a.shape[1])), np.dtype("float32"))


@functools.lru_cache(maxsize=64)
def _narrow(device, dtype: str, strides: tuple, sizes: tuple, blocks: int) -> NarrowProduct:
    x, a = (Operand(dtype, 2, 0, *pair, [0, 0, 0]) for pair in (strides[:2], strides[2:]))
    return NarrowProduct(device, x, a, *sizes, (1, 1, 1), row_of_y(sizes[2]), blocks)
