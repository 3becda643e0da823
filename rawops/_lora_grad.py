"""The backward pass of one LoRA adapter on a frozen weight: `lora_linear_backward`."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence

import numpy as np

from rawops._gemm_call import ZERO, Product
from rawops._gemm_config import DTYPES
from rawops._gemm_operands import Options, Request, check_given, number
from rawops._lora_product import NOTHING, LowRankProduct, check_weights
from rawops._runtime import arrays, checks, dtypes
from rawops._runtime.kernel import KernelSpec, ParamStruct

_FUNCTION = "lora_linear_backward"
_COLUMNS, _RANKS, _THREADS = 64, 16, 256  # of a block
_SHARED_BYTES = 8 * 4 * 16 * (128 + 64)  # the rings of its warps


def _side(name: str) -> dict[str, str]:
    return {
        **{f"{name}_{field}": "pointer" for field in ("x", "y", "out")},
        **{f"{name}_{field}": "int64" for field in ("x_row", "x_col", "y_row", "out_row", "out_col")},
        **{f"{name}_{field}": "int32" for field in ("cols", "float_out")},
    }


_PARAMS = ParamStruct("GradParams", **_side("a"), **_side("b"), M="int32", rank="int32", scaling="float32")
GRAD = KernelSpec(
    source="lora_grad.cu",
    entry="rawops::lora_grad",
    template=("dtype", "vectors"),
    choices={"dtype": ("float16", "bfloat16"), "vectors": (True, False)},
    smoke=({"dtype": "bfloat16", "vectors": True}, {"dtype": "float16", "vectors": False}),
    params=_PARAMS,
    spills={"sm_100a": 32, "sm_120a": 56},
)


class _InputGradient(LowRankProduct):
    """dX, which keeps dY = dO @ b^T where it makes that first, for the thread that asked."""

    def __init__(self, scaling: float) -> None:
        super().__init__(_FUNCTION, None, scaling)
        self._made = threading.local()

    def take_made(self):
        """Return dY of this thread's last call, None where it has not been made."""
        return self._made.__dict__.pop("dy", None)

    def _y_maker(self, device, request: Request, rank: int) -> tuple[int, Callable]:
        y_row, make_y = super()._y_maker(device, request, rank)

        def make_and_keep(operands: tuple) -> tuple:
            self._made.dy, _ = made = make_y(operands)
            return made

        return y_row, make_and_keep


def lora_linear_backward(dout, x, c, a, b, *, scaling: float = 1.0, out=None) -> tuple:
    """Return the gradients of x, a and b for ``x @ c + scaling * (x @ a) @ b`` with c frozen.

    ``dX = dO @ c^T + scaling * (dO @ b^T) @ a^T``, ``dA = scaling * x^T @ (dO @ b^T)`` and
    ``dB = scaling * (x @ a)^T @ dO``. dX is a `lora_linear` itself, with the factors' roles exchanged: one float32
    accumulator, one write. Where it makes ``dO @ b^T`` in float32 first, dA uses the same array. dA and dB are made in
    one launch, which reads x and dO once more.

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
        dB.

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
    Workspaces of ``rows * rank`` float32 entries are allocated from CuPy's pool.
    """
    given = _outs(out)
    named = {"dout": dout, "x": x, "c": c, "a": a, "b": b}
    check_given(_FUNCTION, **named)
    named |= {f"out[{i}]": o for i, o in enumerate(given)}
    taken, give = arrays.take(_FUNCTION, **named)
    device = arrays.device_of(_FUNCTION, **dict(zip(named, taken, strict=True)))
    inputs, outs = taken[:5], taken[5:]
    scaling = number(_FUNCTION, "scaling", scaling)
    _check(*inputs, outs)
    results = [
        device.empty(like.shape, like.dtype) if o is None or _overlaps(device, o, inputs) else o
        for o, like in zip(outs, (inputs[1], *inputs[3:]), strict=True)
    ]
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
    allowed = tuple(dict.fromkeys((dtype, "float32")))
    for i, (o, like) in enumerate(zip(outs, (x, a, b), strict=True)):
        if o is not None:
            checks.dtype(_FUNCTION, f"out[{i}]", o, allowed)
            checks.shape(_FUNCTION, f"out[{i}]", o, like.shape)


def _overlaps(device, out, inputs: tuple) -> bool:
    def span(array) -> tuple[int, int]:
        steps = [(extent - 1) * s for extent, s in zip(array.shape, array.strides, strict=True)]
        first = device.pointer(array) + sum(s for s in steps if s < 0)
        return first, first + sum(abs(s) for s in steps) + array.dtype.itemsize

    low, high = span(out)
    return any(out.size and x.size and low < span(x)[1] and span(x)[0] < high for x in inputs)


@functools.lru_cache(maxsize=256)
def _input_gradient(scaling: float) -> _InputGradient:
    """Return the product that all calls with this scaling share."""
    return _InputGradient(scaling)


@functools.lru_cache(maxsize=1)
def _step() -> Product:
    return Product(_FUNCTION, Options())


def _run(device, dout, x, c, a, b, scaling: float, results: list) -> None:
    dx, da, db = results
    input_gradient = _input_gradient(scaling)
    input_gradient((dout, c.T, dx, None, None, None, b.T, a.T))
    made = input_gradient.take_made()
    rows, rank = math.prod(x.shape[:-1]), a.shape[1]
    if rank == 0:
        return
    if rows == 0 or scaling == 0:
        da[...] = db[...] = 0
        return
    x, dout = x.reshape(rows, x.shape[-1]), dout.reshape(rows, dout.shape[-1])
    if x.dtype.itemsize > 2:
        step, alpha = _step(), (0, scaling, 0)
        step((x.T, step((dout, b.T, *NOTHING)), da, *NOTHING[1:]), alpha, ZERO)
        step((step((x, a, *NOTHING)).T, dout, db, *NOTHING[1:]), alpha, ZERO)
        return
    dy = _low_rank(device, dout, b.T) if made is None else made.reshape(rows, -1)
    y = _low_rank(device, x, a)
    sides = [*_pack_side(device, x, dy, da), *_pack_side(device, dout, y, db.T)]
    vectors = all(_comes_in_eights(device, rows) for rows in (x, dout))
    kernel = GRAD.kernel(device, dtype=dtypes.name(x.dtype), vectors=vectors)
    tiles = -(-x.shape[1] // _COLUMNS) + -(-dout.shape[1] // _COLUMNS)
    kernel.launch(
        (tiles * -(-rank // _RANKS), 1, 1),
        (_THREADS, 1, 1),
        (_PARAMS.pack(*sides, rows, rank, scaling),),
        _SHARED_BYTES,
    )


def _low_rank(device, x, a):
    """Return x @ a in float32."""
    rank = a.shape[1]
    y = device.empty((x.shape[0], -(-rank // 4) * 4), np.dtype("float32"))  # rows on 16-byte boundaries
    return _step()((x, a, y[:, :rank], *NOTHING[1:]))


def _comes_in_eights(device, x) -> bool:
    """Tell whether eight neighbouring columns can always be read as one."""
    row, col = (s // x.dtype.itemsize for s in x.strides)
    return col == 1 and row % 8 == 0 and x.shape[1] % 8 == 0 and device.pointer(x) % 16 == 0


def _pack_side(device, x, y, out) -> tuple:
    x_strides = (s // x.dtype.itemsize for s in x.strides)
    out_strides = (s // out.dtype.itemsize for s in out.strides)
    pointers = (device.pointer(array) for array in (x, y, out))
    return (*pointers, *x_strides, y.strides[0] // 4, *out_strides, x.shape[1], int(out.dtype == np.dtype("float32")))
