"""What of a product TMA can read and write, and how it sees it: the maps of matrices with three batch axes."""

from __future__ import annotations

import functools

from rawops._runtime import dtypes
from rawops._runtime.tensormap import TensorMap


def k_major(x, mn: int, k: int, mn_stride: int, k_stride: int) -> bool | None:
    """Tell which axis of an operand is contiguous, K (True) or the other one; None where TMA cannot read it."""
    if movable(x, k_stride, k, mn_stride, mn):
        return True
    return False if movable(x, mn_stride, mn, k_stride, k) else None


def movable(x, inner_stride: int, inner: int, outer_stride: int, outer: int) -> bool:
    """Tell whether TMA can move a matrix: contiguous along one axis, everything else on 16-byte boundaries."""
    steps = [*x.batch, outer_stride if outer > 1 else 0]
    return (
        (inner_stride == 1 or inner == 1)
        and x.alignment == 0
        and all(s >= 0 and s * x.itemsize % 16 == 0 for s in steps)
        and (outer == 1 or outer_stride > 0)
    )


def map_of(x, rows: tuple, cols: tuple, cols_inner: bool, box_rows: int, box_cols: int, extents: tuple):
    """Return a function from an operand's address to its tensor map, whose boxes are `box_rows` x `box_cols`.

    rows and cols are (size, stride in elements), and `cols_inner` tells which of them is contiguous.
    """
    outer, inner, box = (rows, cols, (box_rows, box_cols)) if cols_inner else (cols, rows, (box_cols, box_rows))
    batch = [s if n > 1 else 0 for n, s in zip(extents, (*x.batch, 0, 0, 0)[:3], strict=True)]
    sizes = tuple(extent if stride else 1 for extent, stride in zip(extents, batch, strict=True))
    pitch = 16 // x.itemsize  # stands in for the stride of an axis of one entry
    strides = [*(s or pitch for s in batch), outer[1] if outer[0] > 1 else pitch]
    return functools.partial(
        TensorMap,
        dtype=dtypes.numpy("float32" if x.dtype == "tf32" else x.dtype),
        shape=(*sizes, outer[0], inner[0]),
        strides=(*(s * x.itemsize for s in strides), x.itemsize),
        box=(1, 1, 1, *box),
        swizzle=box[1] * x.itemsize,
        tf32=x.dtype == "tf32",
    )


def encode(device, describe: list, addresses: tuple) -> list[bytes]:
    """Encode the maps of as many operands as there are addresses, for the GPU or the emulator."""
    encode = TensorMap.encode_emulated
    if not device.is_emulated:
        device.bind_context()  # which a thread may not have yet, and the driver wants
        encode = TensorMap.encode_driver
    return [encode(d(address=address)) for d, address in zip(describe, addresses, strict=False)]
