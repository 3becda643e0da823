"""The kernels that make the gradients of both factors in one launch: scaling * x^T @ dY and scaling * dO^T @ Y."""

from __future__ import annotations

import functools

import numpy as np

from rawops._gemm_maps import encode, map_of, movable
from rawops._gemm_operands import Operand
from rawops._runtime import dtypes
from rawops._runtime.kernel import KernelSpec, ParamStruct

_COLUMNS, _RANKS, _THREADS = 64, 16, 256  # of a block
_SHARED_BYTES = 8 * 4 * 16 * (128 + 64)  # the rings of its warps
_HOPPER_ROWS, _HOPPER_COLUMNS, _CLUSTER = 128, 128, 2  # of a stage, of a cluster and its blocks
_HOPPER_THREADS, _HOPPER_RING = 288, 128 << 10
_HOPPER_RANKS, _STAGES_OF_MADE = (16, 32, 64), 3


def _side(name: str) -> dict[str, str]:
    return {
        **{f"{name}_{field}": "pointer" for field in ("x", "y", "out")},
        **{f"{name}_{field}": "int64" for field in ("x_row", "x_col", "y_row", "out_row", "out_col")},
        **{f"{name}_{field}": "int32" for field in ("cols", "float_out")},
    }


def _hopper_side(name: str) -> dict[str, str]:
    fields = _side(name)
    del fields[f"{name}_x_col"]
    return {f"{name}_map": "tensormap", f"{name}_parts": "tensormap", **fields}


_SIZES = {"M": "int32", "rank": "int32", "scaling": "float32"}
_PARAMS = ParamStruct("GradParams", **_side("a"), **_side("b"), **_SIZES)
_HOPPER_PARAMS = ParamStruct("HopperGradParams", **_hopper_side("a"), **_hopper_side("b"), **_SIZES)
GRAD = KernelSpec(
    source="lora_grad.cu",
    entry="rawops::lora_grad",
    template=("dtype", "vectors"),
    choices={"dtype": ("float16", "bfloat16"), "vectors": (True, False)},
    smoke=({"dtype": "bfloat16", "vectors": True}, {"dtype": "float16", "vectors": False}),
    params=_PARAMS,
    spills={"sm_100a": 32, "sm_120a": 56},
)
GRAD_SM90 = KernelSpec(
    source="lora_grad_sm90.cu",
    entry="rawops::lora_grad_sm90",
    template=("ranks", "parts", "made"),
    choices={"ranks": _HOPPER_RANKS, "parts": (2, 3), "made": (False, True)},
    smoke=(
        {"ranks": 16, "parts": 2, "made": False},
        {"ranks": 64, "parts": 2, "made": True},
        {"ranks": 64, "parts": 3, "made": False},
    ),
    min_arch=90,
    max_arch=90,
    params=_HOPPER_PARAMS,
)


def factor_gradients(device, sides: tuple, scaling: float, rank: int, made: tuple | None) -> None:
    """Launch for two sides: x (rows, cols) with 16 bits, y (rows, rank) in float32, out (cols, rank).

    `made`: both y as the parts of `_lora_sm90.row_of_parts`, where `takes_parts` says so.
    """
    operands = [operand_of(device, x) for x, *_ in sides]
    shapes = [x.shape for x, *_ in sides]
    rows = shapes[0][0]
    readable = all(movable(o, o.col, cols, o.row, rows) for o, (_, cols) in zip(operands, shapes, strict=True))
    if readable and operands[0].dtype == "bfloat16" and GRAD_SM90.exists_on(device.capability):
        return _on_hopper(device, operands, sides, scaling, rank, made)
    packed = [field for o, side in zip(operands, sides, strict=True) for field in _pack(device, o, *side)]
    vectors = readable and all(cols % 8 == 0 for _, cols in shapes)
    tiles = sum(-(-cols // _COLUMNS) for _, cols in shapes)
    kernel = GRAD.kernel(device, dtype=operands[0].dtype, vectors=vectors)
    params = _PARAMS.pack(*packed, rows, rank, scaling)
    kernel.launch((tiles * -(-rank // _RANKS), 1, 1), (_THREADS, 1, 1), (params,), _SHARED_BYTES)
    return None


def takes_parts(dtype, outs: tuple, rank: int) -> bool:
    """Tell whether the kernel on Hopper takes y as sums of two values: 16 bits for results of 8, many ranks."""
    return dtypes.name(dtype) == "bfloat16" and _parts(outs) == 2 and rank > _HOPPER_RANKS[-2]


def _parts(outs) -> int:
    """Return how many values of bfloat16 y takes: 16 bits of it for a result of 8, or all."""
    return 2 if all(out.dtype.itemsize == 2 for out in outs) else 3


def operand_of(device, x) -> Operand:
    """Describe a matrix on the device."""
    row, col = (s // x.dtype.itemsize for s in x.strides)
    return Operand(dtypes.name(x.dtype), x.dtype.itemsize, device.pointer(x) % 16, row, col, [])


def _pack(device, operand: Operand, x, y, out) -> tuple:
    pointers = (device.pointer(array) for array in (x, y, out))
    out_strides = (s // out.dtype.itemsize for s in out.strides)
    float_out = int(out.dtype == np.dtype("float32"))
    return (*pointers, operand.row, operand.col, y.strides[0] // 4, *out_strides, x.shape[1], float_out)


def _on_hopper(device, operands: list, sides: tuple, scaling: float, rank: int, made: tuple | None) -> None:
    ranks = next((step for step in _HOPPER_RANKS if step >= rank), _HOPPER_RANKS[-1])
    rows, groups, cols = sides[0][0].shape[0], -(-rank // ranks), _HOPPER_COLUMNS
    tiles = sum(-(-x.shape[1] // cols) for x, *_ in sides)
    packed = []
    for operand, side, y in zip(operands, sides, made or (None, None), strict=True):
        x, y_and_on = side[0], _pack(device, operand, *side)
        packed.append(_map(device, device.pointer(x), rows, x.shape[1], operand.row))
        packed.append(b"" if y is None else _map(device, device.pointer(y), rows, y.shape[1], y.shape[1]))
        packed += [field for i, field in enumerate(y_and_on) if i != 4]  # x_col is 1
    parts = _parts([out for *_, out in sides])
    y_bytes, stage = -(-ranks * parts // 64) * 64 * 128, _HOPPER_ROWS * cols * 2
    shared = _HOPPER_RING + 4 * y_bytes + _HOPPER_RING // stage * 16
    if made:
        shared = _STAGES_OF_MADE * (stage + 2 * y_bytes + 16)
    kernel = GRAD_SM90.kernel(device, ranks=ranks, parts=parts, made=made is not None)
    params = _HOPPER_PARAMS.pack(*packed, rows, rank, scaling)
    kernel.launch((tiles * groups * _CLUSTER, 1, 1), (_HOPPER_THREADS, 1, 1), (params,), shared, True)


@functools.lru_cache(maxsize=256)
def _map(device, address: int, rows: int, cols: int, row: int) -> bytes:
    operand = Operand("bfloat16", 2, 0, row, 1, [])
    describe = [map_of(operand, (rows, row), (cols, 1), True, _HOPPER_ROWS, 64, (1, 1, 1))]
    return encode(device, describe, (address,))[0]
