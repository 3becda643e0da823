"""Warp-level matrix instructions: mma, ldmatrix, stmatrix, movmatrix; all warps of a call at once."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from ...errors import BarrierError
from ..types import DTYPE, UINT
from . import Run, instruction, options, unsupported
from .fragments import (
    AS_READ,
    BITS,
    a_matrix,
    accumulate,
    accumulator_registers,
    accumulators,
    b_matrix,
)
from .warp import order_warps

if TYPE_CHECKING:
    from ..context import Context
    from ..lanes import Lanes
    from ..program import Instruction

_SHAPES = {
    "f64": "m8n8k4 m16n8k4 m16n8k8 m16n8k16",
    "tf32": "m16n8k4 m16n8k8",
    "f16": "m16n8k8 m16n8k16",
    "bf16": "m16n8k8 m16n8k16",
    "e4m3": "m16n8k16 m16n8k32",
    "e5m2": "m16n8k16 m16n8k32",
    "s8": "m8n8k16 m16n8k16 m16n8k32",
    "u8": "m8n8k16 m16n8k16 m16n8k32",
    "s4": "m8n8k32 m16n8k32 m16n8k64",
    "u4": "m8n8k32 m16n8k32 m16n8k64",
    "b1": "m8n8k128 m16n8k128 m16n8k256",
}


def require_whole_warps(ctx: Context, lanes: Lanes) -> None:
    """Raise unless every warp that is here is here with all its lanes."""
    warps = lanes.warps
    if lanes.n != 32 * len(warps):
        partial = warps[lanes.warp_bits[warps] != 0xFFFFFFFF][0]
        message = "all lanes of the warp have to execute this instruction, some have exited or gone elsewhere"
        raise ctx.error(BarrierError, message, int(partial) * 32)


def registers_reader(ctx: Context, operands, ptx_type: str):
    """``get(lanes)``: a list of registers as one array (count, warps, 32)."""
    gets = [ctx.reader(operand, ptx_type) for operand in operands]
    dtype = DTYPE[ptx_type]

    def get(lanes: Lanes) -> np.ndarray:
        values = np.empty((len(gets), lanes.n), dtype)
        for row, one in zip(values, gets, strict=True):
            row[:] = one(lanes)
        return values.reshape(len(gets), -1, 32)

    return get


def registers_writer(ctx: Context, operands, ptx_type: str):
    """``put(lanes, values)``: an array (count, warps, 32) into a list of registers."""
    puts = [ctx.writer(operand, ptx_type) for operand in operands]

    def put(lanes: Lanes, values: np.ndarray) -> None:
        for row, one in zip(values.reshape(len(puts), -1), puts, strict=True):
            one(lanes, row)

    return put


@instruction("mma.sync", scope="warp", kind="matrix")
def mma(ins: Instruction, ctx: Context) -> Run:
    """D = A * B + C on one fragment a warp."""
    shape = next((token for token in ins.opcode if re.fullmatch(r"m\d+n8k\d+", token)), "")
    types = [token for token in ins.opcode if token in BITS or token in ("f32", "s32")]
    if len(types) != 4 or shape not in _SHAPES.get(types[1], "").split() or ins.operands[0] is None:
        raise unsupported(ins)
    options(ins, f"sync aligned row col satfinite popc and xor kind::f8f6f4 {shape}", types)
    d_type, a_format, b_format, c_type = types
    rows, k = int(shape[1 : shape.index("n")]), int(shape[shape.index("k") + 1 :])
    word = "b64" if a_format == "f64" else "b32"
    d, a, b, c = (operand.items for operand in ins.operands)
    get_a, get_b = registers_reader(ctx, a, word), registers_reader(ctx, b, word)
    get_c = registers_reader(ctx, c, AS_READ.get(c_type, c_type))
    put_d = registers_writer(ctx, d, AS_READ.get(d_type, d_type))
    saturate, exclusive = "satfinite" in ins.opcode, "xor" in ins.opcode

    def run(lanes: Lanes) -> None:
        require_whole_warps(ctx, lanes)
        left, right = a_matrix(get_a(lanes), a_format, rows), b_matrix(get_b(lanes), b_format)
        start = accumulators(get_c(lanes), rows)
        if exclusive:  # popc(a ^ b) is the product with the complement, both ways
            left, right = np.concatenate((left, 1 - left), 2), np.concatenate((1 - right, right), 1)
        put_d(lanes, accumulator_registers(accumulate(left, right, start, d_type, saturate)))
        order_warps(ctx, lanes)
        ctx.launch.report.flops += 2 * rows * 8 * k * len(lanes.warps)

    return run


def _tile_space(ins: Instruction, ctx: Context) -> Run:
    """The address operand's space for ldmatrix and stmatrix, and how many 8x8 tiles move."""
    given = options(ins, "sync aligned m8n8 x1 x2 x4 trans shared shared::cta b16")
    count = next((int(token[1]) for token in ("x1", "x2", "x4") if token in given), 0)
    if not count or "b16" not in given:
        raise unsupported(ins)
    named = given & {"shared", "shared::cta"}
    return ctx.space("shared" if named else "generic"), count, "trans" in given


def _row_addresses(lanes: Lanes, addresses: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The row addresses that the first 8 * count lanes of each warp hold, and those lanes."""
    rows = addresses.reshape(-1, 32)[:, : 8 * count]
    return np.ascontiguousarray(rows).ravel(), lanes.ids.reshape(-1, 32)[:, : 8 * count].ravel()


def _transposed(tiles: np.ndarray) -> np.ndarray:
    """Transpose 8x8 tiles of 16-bit elements: words (..., 8, 4) in and out."""
    elements = np.ascontiguousarray(tiles).view(np.uint16)
    return np.ascontiguousarray(elements.swapaxes(-1, -2)).view(np.uint32)


@instruction("ldmatrix", scope="warp", kind="matrix")
def ldmatrix(ins: Instruction, ctx: Context) -> Run:
    """Load 8x8 tiles of 16-bit elements: lane l gets the elements 2 * (l % 4) + {0, 1} of row l // 4."""
    space, count, transpose = _tile_space(ins, ctx)
    address = ctx.address(ins.operands[1])
    put = registers_writer(ctx, ins.operands[0].items, "b32")

    def run(lanes: Lanes) -> None:
        require_whole_warps(ctx, lanes)
        addresses, owners = _row_addresses(lanes, address(lanes), count)
        tiles = space.load(addresses, 16, owners).view(np.uint32).reshape(-1, count, 8, 4)
        if transpose:
            tiles = _transposed(tiles)
        put(lanes, tiles.swapaxes(0, 1))
        order_warps(ctx, lanes)

    return run


@instruction("stmatrix", scope="warp", kind="matrix")
def stmatrix(ins: Instruction, ctx: Context) -> Run:
    """Store 8x8 tiles of 16-bit elements: `ldmatrix` the other way."""
    space, count, transpose = _tile_space(ins, ctx)
    address = ctx.address(ins.operands[0])
    get = registers_reader(ctx, ins.operands[1].items, "b32")

    def run(lanes: Lanes) -> None:
        require_whole_warps(ctx, lanes)
        addresses, owners = _row_addresses(lanes, address(lanes), count)
        tiles = get(lanes).reshape(count, -1, 8, 4)
        if transpose:
            tiles = _transposed(tiles)
        rows = np.ascontiguousarray(tiles.swapaxes(0, 1)).view(UINT[16])
        space.store(addresses, rows.ravel(), owners)
        order_warps(ctx, lanes)

    return run


@instruction("movmatrix", scope="warp", kind="matrix")
def movmatrix(ins: Instruction, ctx: Context) -> Run:
    """Transpose an 8x8 tile of 16-bit elements that lies across the registers of a warp."""
    options(ins, "sync aligned m8n8 trans b16")
    put, get = ctx.writer(ins.operands[0], "b32"), ctx.reader(ins.operands[1], "b32")

    def run(lanes: Lanes) -> None:
        require_whole_warps(ctx, lanes)
        put(lanes, _transposed(get(lanes).reshape(-1, 8, 4)).ravel())

    return run
