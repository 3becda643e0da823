"""Warpgroup matrix instructions of Hopper: wgmma, its groups, and setmaxnreg.

A product is carried out when `wgmma.wait_group` covers it (completion "early": when it is issued); until then
its accumulator registers hold a NaN pattern. Operands in shared memory are found through the descriptor that
the kernel built, bit by bit, so a wrong descriptor gives wrong numbers here as it does on hardware.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field

import numpy as np

from ...errors import EmulatorError, RaceError
from ..lanes import Lanes
from ..parser import Imm, Vec
from . import instruction, options, unsupported
from .fragments import BITS, PACKED, a_matrix, accumulate, accumulator_registers, accumulators, decode
from .matrix import registers_reader, registers_writer, require_whole_warps

_ROWS = 64
_K_BYTES = 32  # of every row of an operand, whatever the type
_SPAN = {0: 0, 1: 128, 2: 64, 3: 32}  # descriptor bits 62-63: width of the swizzle in bytes
_PENDING = np.uint32(0x7FC0FFEE)  # NaN as float32 and as two float16: accumulators of a product in flight


@functools.lru_cache(256)
def _offsets(extent: int, k_major: bool, span: int, leading: int, stride: int) -> np.ndarray:
    """Byte offsets of an operand's 16-byte chunks, before the swizzle.

    Parameters
    ----------
    extent : int
        Elements along M or N.
    k_major : bool
        True gives chunks (extent, 2), else (16, extent / 8): 16-bit elements, rows along K.
    span : int
        Swizzle width in bytes, 0 for core matrices of 8 rows x 16 bytes.
    leading, stride : int
        The descriptor's LBO and SBO in bytes.
    """
    if k_major:
        row, chunk = np.ogrid[:extent, : _K_BYTES // 16]
        inner = row % 8 * (span or 16) + row // 8 * stride
        return inner + chunk * (16 if span else leading)
    k, chunk = np.ogrid[:16, : extent // 8]
    if not span:
        return chunk * stride + k % 8 * 16 + k // 8 * leading
    per_atom = span // 16
    return chunk % per_atom * 16 + chunk // per_atom * leading + k % 8 * span + k // 8 * stride


def swizzled(addresses: np.ndarray, span: int) -> np.ndarray:
    """Apply the shared-memory swizzle of 0, 32, 64 or 128 bytes: it acts on the absolute address."""
    if not span:
        return addresses
    return addresses ^ (((addresses >> 7) & (span // 16 - 1)) << 4)


def operand_chunks(descriptor: int, extent: int, k_major: bool) -> np.ndarray:
    """The shared addresses of an operand's 16-byte chunks, from its 64-bit matrix descriptor."""
    start, leading, stride = ((descriptor >> bit & 0x3FFF) << 4 for bit in (0, 16, 32))
    span = _SPAN[descriptor >> 62]
    return swizzled(start + _offsets(extent, k_major, span, leading, stride), span)


@dataclass(slots=True, eq=False)
class _Chain:
    """Accumulators that one or more products in flight add to."""

    values: np.ndarray
    in_flight: int = 0


@dataclass(slots=True, eq=False)
class _Source:
    """A shared-memory operand of a product in flight: where it is and what it was at issue."""

    index: np.ndarray
    bytes: np.ndarray


@dataclass(slots=True, eq=False)
class _Product:
    """One wgmma.mma_async of one warpgroup."""

    form: _Form
    lanes: Lanes
    chain: _Chain
    left: np.ndarray
    right: np.ndarray
    keep: bool  # scale-d: whether the accumulators take part
    sources: list[_Source]


@dataclass(slots=True)
class _Queue:
    """What a warpgroup has issued: the open group and the committed ones, oldest first."""

    open: list[_Product] = field(default_factory=list)
    groups: list[list[_Product]] = field(default_factory=list)

    def chain(self, registers: tuple) -> _Chain | None:
        """The chain that is in flight for these accumulator registers."""
        for product in (p for group in (*self.groups, self.open) for p in group):
            if product.form.registers == registers:
                return product.chain
        return None
