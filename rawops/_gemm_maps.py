"""What of a product TMA can read and write, and how it sees it: the maps of matrices with three batch axes."""

from __future__ import annotations

import functools
from collections.abc import Callable

from rawops._gemm_sm90_specs import DIRECT, PARTIAL
from rawops._runtime import dtypes
from rawops._runtime.tensormap import TensorMap

SPAN = 128  # bytes of a swizzled row in shared memory, which is a block of K


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


def map_of(
    x, rows: tuple, cols: tuple, cols_inner: bool, box_rows: int, box_cols: int, extents: tuple, l2_promotion: int = 256
):
    """Return a function from an operand's address to its tensor map, whose boxes are `box_rows` x `box_cols`.

    rows and cols are (size, stride in elements), and `cols_inner` tells which of them is contiguous. The L2 fetches
    `l2_promotion` bytes at a time.
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
        l2_promotion=l2_promotion,
        tf32=x.dtype == "tf32",
    )


def encode(device, describe: list, addresses: tuple) -> list[bytes]:
    """Encode the maps of as many operands as there are addresses, for the GPU or the emulator."""
    encode = TensorMap.encode_emulated
    if not device.is_emulated:
        device.bind_context()  # which a thread may not have yet, and the driver wants
        encode = TensorMap.encode_driver
    return [encode(d(address=address)) for d, address in zip(describe, addresses, strict=False)]


def tensor_maps(device, operands: dict, problem, config, sizes: tuple, extents: tuple) -> Callable:
    """Return a function from the addresses of a, b and out to the GemmMaps of a kernel; `sizes` are M, N, K.

    problem and config are those of _gemm_sm90_config.py.
    """
    (M, N, K), (a, b, out) = sizes, (operands[role] for role in ("a", "b", "out"))
    block_k = box = SPAN // problem.itemsize
    b_rows = config.block_n // (2 if config.pairs else problem.parts) if problem.b_k_major else box
    a_rows = min(config.block_m, -(-M // 8) * 8) if problem.a_k_major else box
    a_depth = b_depth = block_k
    if config.squares:  # half of a tile's rows or columns, or half of the block of K where that is across
        a_rows, a_depth = _half_box(config.block_m, problem.a_k_major)
        b_rows, b_depth = _half_box(config.block_n, problem.b_k_major)
    first, second = (a, (M, a.row), (K, a.col)), (b, (N, b.col), (K, b.row))
    if problem.transposed:
        first, second = second, first
    fetched = bytes_fetched(problem, config)
    describe = [
        map_of(*first, problem.a_k_major, a_rows, a_depth, extents, fetched),
        map_of(*second, problem.b_k_major, b_rows, b_depth, extents, fetched),
    ]
    if problem.finish not in (DIRECT, PARTIAL):
        cols = box_cols(config.share(problem), widest=config.pass_cols(problem))
        describe.append(map_of(out, (M, out.row), (problem.N, out.col), True, config.rows, cols, extents))

    @functools.lru_cache(maxsize=64)
    def maps(a: int, b: int, out: int) -> bytes:
        first, second = (b, a) if problem.transposed else (a, b)
        return b"".join(encode(device, describe, (first, second, out))).ljust(3 * 128, b"\0")

    return maps


def _half_box(extent: int, is_k_major: bool) -> tuple[int, int]:
    """Return the box of half an operand, along MN and along K: see load_half in hopper_copies.cuh."""
    elements = SPAN // 2
    if is_k_major:
        return extent // 2, elements
    return (elements, elements // 2) if extent == elements else (elements, elements)


def bytes_fetched(problem, config) -> int:
    """Return how many bytes the L2 fetches at a time.

    A b that is read once, along K, comes 2 % faster by 256. Else rows that begin inside sectors come 15 % slower, and a
    row-major b of few rows, whose boxes have 128 bytes of a row, 5 %.
    """
    return 256 if problem.M <= 64 and problem.b_k_major and not config.halved else 128


def box_cols(share: int, widest: int = 64) -> int:
    """Return the width of the boxes that `share` columns of D leave in."""
    return next(cols for cols in (64, 32, 16) if cols <= widest and share % cols == 0)
