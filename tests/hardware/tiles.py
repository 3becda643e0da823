"""The families of tensor copies (TMA)."""

import numpy as np
from hardware import operands
from hardware.family import HOPPER, Family

from rawops._runtime import device as devices
from rawops._runtime.tensormap import TensorMap


def _corners(shape: tuple[int, ...], itemsize: int) -> np.ndarray:
    """Corners, innermost coordinate first, of boxes inside, across each edge and outside.

    The innermost coordinate is free only in steps of 16 bytes; anything else faults.
    """
    unit = 16 // itemsize
    last = shape[-1] // unit * unit - unit
    far = 125 * unit
    corners = [(0, 0, 0), (unit, 3, 1), (-unit, -2, -1), (last, 15, 4), (-2 * unit, 19, 5), (far, 0, 0), (0, -50, 2)]
    return np.array(corners, np.int32)


def _map(array, box: tuple[int, ...], swizzle: int, fill: str = "zero", steps: tuple[int, ...] = ()) -> TensorMap:
    device = devices.emulated() or devices.cuda(0)
    return TensorMap(
        device.pointer(array), array.dtype, array.shape, array.strides, box, swizzle, element_strides=steps, fill=fill
    )


def _encoded(tensor_map: TensorMap) -> bytes:
    return tensor_map.encode_emulated() if devices.emulated() else tensor_map.encode_driver()


def _load(dtype: str, shape, box, swizzle: int, fill: str = "zero", steps=(), cut: int = 0) -> Family:
    """Boxes of a tensor that lacks the last `cut` columns of its storage."""
    name = f"tiles load {dtype} {box} swizzle {swizzle} {fill} {steps}{f' cut {cut}' if cut else ''}"
    itemsize = np.dtype(dtype).itemsize
    steps = steps or (1,) * len(box)
    box_bytes = int(np.prod([-(-n // step) for n, step in zip(box, steps, strict=True)])) * itemsize

    def inputs(name: str) -> tuple[np.ndarray, ...]:
        tensor = operands.words(operands.stream(name), 8 * itemsize, *shape).view(dtype)
        return tensor, _corners(shape, itemsize)

    def arguments(inputs, out) -> tuple:
        tensor, corners = inputs
        tensor = tensor[..., : shape[-1] - cut]
        return _encoded(_map(tensor, box, swizzle, fill, steps)), corners, out, box_bytes

    blocks = len(_corners(shape, itemsize))
    return Family(
        name, "tma.cu", f"load<{len(box)}>", inputs, (blocks, box_bytes // 2), archs=HOPPER, grid=blocks,
        block=64, arguments=arguments,
    )  # fmt: skip


def _store(dtype: str, shape, box, swizzle: int, add: bool = False, cut: int = 0) -> Family:
    """Boxes inside, across the upper edges and outside; some overlap where they are added. `cut` as in `_load`.

    Negative coordinates fault.
    """
    width, height = box[-1], box[-2]
    rows, columns = shape[-2:]
    across = columns - width + 16 // np.dtype(dtype).itemsize, max(height, rows - height + 3), shape[0] - 1
    corners = [(0, 0, 0), across, (columns, 0, 0), (0, rows, 0)] + [(width // 2, 0, 0)] * add

    def arguments(inputs, out) -> tuple:
        return _encoded(_map(out[..., : shape[-1] - cut], box, swizzle)), *inputs, out

    return Family(
        f"tiles store {dtype} {box} swizzle {swizzle}{' add' if add else ''}{f' cut {cut}' if cut else ''}", "tma.cu",
        f"store<{len(box)}, {'true' if add else 'false'}>", lambda name: (np.array(corners, np.int32),), shape,
        np.dtype(dtype).type, archs=HOPPER, grid=len(corners), block=64, arguments=arguments,
    )  # fmt: skip


def _multicast() -> Family:
    def inputs(name: str) -> tuple[np.ndarray, ...]:
        return (operands.words(operands.stream(name), 32, 2, 64),)

    def arguments(inputs, out) -> tuple:
        return _encoded(_map(inputs[0], (1, 64), 0)), out, 256

    return Family(
        "tiles multicast", "tma.cu", "multicast<>", inputs, (2, 128), archs=HOPPER, grid=2, block=64,
        arguments=arguments,
    )  # fmt: skip


TILES = [
    _load("uint16", (20, 72), (8, 24), 0),
    _load("uint16", (20, 72), (8, 16), 32),
    _load("uint16", (20, 72), (8, 32), 64),
    _load("uint16", (20, 72), (16, 64), 128),
    _load("uint16", (20, 72), (16, 24), 64),
    _load("uint16", (20, 72), (8, 32), 64, cut=3),
    _load("float16", (20, 72), (8, 32), 64, "nan"),
    _load("float16", (20, 72), (8, 24), 0, "nan", cut=5),
    _load("float32", (20, 72), (8, 16), 64, "nan"),
    _load("float64", (20, 36), (8, 8), 64, "nan"),
    _load("uint32", (20, 72), (8, 8), 0, "zero", (2, 1)),
    _load("uint8", (20, 80), (8, 128), 128),
    _load("uint32", (5, 20, 40), (2, 4, 8), 32),
    _load("uint32", (5, 20, 40), (2, 3, 32), 128),
    _load("uint16", (5, 20, 72), (3, 2, 40), 0),
    _store("uint16", (20, 72), (8, 24), 0),
    _store("uint16", (20, 72), (8, 16), 32),
    _store("uint16", (20, 72), (8, 32), 64),
    _store("uint16", (20, 72), (16, 64), 128),
    _store("uint16", (20, 72), (16, 24), 64),
    _store("uint16", (20, 24), (8, 16), 0, cut=5),
    _store("uint32", (20, 36), (8, 16), 64, add=True),
    _store("uint32", (3, 20, 40), (2, 4, 16), 64),
    _multicast(),
]
