"""Tensor copies (cp.async.bulk.tensor) through the tensor maps of the emulator's own layout."""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...errors import EmulatorError, MemoryFault
from ..types import SIZE, UINT
from . import Run, instruction, options, unsupported
from .atomic import operation_of
from .bulk import barrier_at, chunks, deliver, receivers, send, writer
from .convert import to_tf32
from .wgmma import swizzled

if TYPE_CHECKING:
    from ..context import Context
    from ..lanes import Lanes
    from ..program import Instruction

# The layout that rawops._runtime.tensormap writes: magic, data type, rank, swizzle, fill, address, sizes - 1,
# strides of all axes but the innermost, box, element strides; axes innermost first, unused axes 0.
LAYOUT = struct.Struct("<8s4BxxxxQ5Ixxxx4Q5H5B33x")
MAGIC = b"rawopsTM"
_SWIZZLES = (0, 32, 64, 128)
# The driver's data types by number, as PTX types.
_TYPES = ("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16", "f32", "tf32")
_NAN_FILL = np.uint16(0x7FF7)  # repeated, whatever the type
_MODES = "1d 2d 3d 4d 5d tile"


@dataclass(frozen=True)
class TensorMap:
    """A decoded tensor map; sizes, strides in bytes, box and steps have the innermost axis first."""

    type: str
    swizzle: int
    fill_nan: bool
    address: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return SIZE[self.type]

    @property
    def row_bytes(self) -> int:
        """Bytes of the box along the innermost axis."""
        return self.box[0] * self.itemsize


@functools.lru_cache(256)
def decode_map(raw: bytes) -> TensorMap | None:
    """Decode 128 bytes, or return None if they are no tensor map of the emulator's."""
    magic, kind, rank, swizzle, fill, address, *rest = LAYOUT.unpack(raw)
    if magic != MAGIC:
        return None
    sizes, strides, box, steps = rest[:5], rest[5:9], rest[9:14], rest[14:19]
    return TensorMap(
        type=_TYPES[kind],
        swizzle=_SWIZZLES[swizzle],
        fill_nan=bool(fill),
        address=address,
        sizes=tuple(n + 1 for n in sizes[:rank]),
        strides=(SIZE[_TYPES[kind]], *strides[: rank - 1]),
        box=tuple(box[:rank]),
        steps=tuple(steps[:rank]),
    )


class Box:
    """The part of a tensor that one copy touches, in units of 16 bytes or, where its rows end inside one, elements.

    Hardware clips a load to the elements of the tensor, but a store only to the 16-byte chunks that begin in it: a
    store overwrites what lies behind a row that ends inside a chunk.

    Attributes
    ----------
    unit : int
        Bytes of a unit.
    addresses : ndarray of uint64
        Global address of every unit, in the order in which shared memory holds them.
    inside : ndarray of bool
        Whether the unit lies in the tensor.
    """

    def __init__(self, tensor: TensorMap, coordinates: tuple[int, ...], *, outward: bool) -> None:
        first, width = coordinates[0] * tensor.itemsize, tensor.sizes[0] * tensor.itemsize
        self.unit = 16 if outward or width % 16 == 0 else tensor.itemsize
        offsets = first + np.arange(tensor.row_bytes // self.unit) * self.unit
        inside = (offsets >= 0) & (offsets < width)
        for axis in range(1, len(coordinates)):
            step = tensor.steps[axis]
            position = coordinates[axis] + np.arange(-(-tensor.box[axis] // step)) * step
            valid = (position >= 0) & (position < tensor.sizes[axis])
            offsets = (position * tensor.strides[axis])[:, None] + offsets
            inside = valid[:, None] & inside
            offsets, inside = offsets.ravel(), inside.ravel()
        self.addresses = (offsets + tensor.address).astype(np.uint64)
        self.inside = inside
        self.nbytes = len(offsets) * self.unit
        self._row_bytes, self._swizzle = tensor.row_bytes, tensor.swizzle

    def places(self, address: int) -> np.ndarray:
        """The shared addresses of the 16-byte chunks of a box that begins at `address`.

        Swizzled rows begin a swizzle's width apart, also where they are shorter.
        """
        pitch = self._swizzle or self._row_bytes
        rows = chunks(address, self.nbytes // self._row_bytes * pitch, pitch)
        return swizzled((rows[:, None] + chunks(0, self._row_bytes)).ravel(), self._swizzle)


def load_map(ctx: Context, address: int, lane: int) -> TensorMap:
    """Read and decode the tensor map at a generic address."""
    if address % 64:
        raise ctx.error(MemoryFault, f"the tensor map at 0x{address:x} is not aligned to 64 bytes", lane)
    raw = ctx.space("generic").load(chunks(address, LAYOUT.size), 16, np.full(LAYOUT.size // 16, lane))
    tensor = decode_map(raw.tobytes())
    if tensor is None:
        raise ctx.error(EmulatorError, f"there is no tensor map of the emulator's at 0x{address:x}", lane)
    return tensor


class _TensorCopy:
    """What the forms of the instruction share: the tensor operand and the shared-memory side."""

    def __init__(self, ins: Instruction, ctx: Context, tensor_operand, shared_operand, *, outward: bool) -> None:
        self._ctx, self._outward = ctx, outward
        self._map, self._shared = ctx.address(tensor_operand), ctx.address(shared_operand)
        (coordinates,) = tensor_operand.extra
        self._coordinates = [ctx.reader(operand, "s32") for operand in coordinates.items]
        self.rank = next((int(token[0]) for token in ins.opcode if token in _MODES.split()[:5]), 0)
        if self.rank != len(self._coordinates):
            raise unsupported(ins, f"{len(self._coordinates)} coordinates")

    def orders(self, lanes: Lanes):
        """For each lane: its position, number, tensor map, box and shared address."""
        maps, there = self._map(lanes).tolist(), self._shared(lanes).tolist()
        columns = [np.broadcast_to(get(lanes), lanes.n).tolist() for get in self._coordinates]
        for i, lane in enumerate(lanes.ids.tolist()):
            tensor = load_map(self._ctx, maps[i], lane)
            if len(tensor.sizes) != self.rank:
                message = f"a tensor map of rank {len(tensor.sizes)} in a {self.rank}-d copy"
                raise self._ctx.error(EmulatorError, message, lane)
            if there[i] % 128:
                message = f"the shared address 0x{there[i]:x} of a tensor copy is not aligned to 128 bytes"
                raise self._ctx.error(MemoryFault, message, lane)
            coordinates = tuple(column[i] for column in columns)
            self._refuse_bad_corner(coordinates, tensor.itemsize, lane)
            yield i, lane, tensor, Box(tensor, coordinates, outward=self._outward), there[i]

    def _refuse_bad_corner(self, coordinates: tuple[int, ...], itemsize: int, lane: int) -> None:
        """Raise for corners at which hardware stops with an illegal instruction."""
        offset = coordinates[0] * itemsize
        if offset % 16:
            message = (
                f"the innermost coordinate {coordinates[0]} of a tensor copy is misaligned: "
                f"{offset} bytes are no multiple of 16"
            )
        elif self._outward and min(coordinates) < 0:
            message = f"a tensor store at {coordinates}: its coordinates, innermost first, must not be negative"
        else:
            return
        raise self._ctx.error(MemoryFault, message, lane)


@instruction("cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor", kind="async")
def tensor(ins: Instruction, ctx: Context) -> Run:
    """Copy a box of a tensor into shared memory, or out of it, or reduce it into the tensor."""
    options(
        ins,
        f"reduce async bulk tensor {_MODES} global shared::cta shared::cluster mbarrier::complete_tx::bytes "
        "bulk_group multicast::cluster L2::cache_hint add min max inc dec and or xor",
    )
    spaces = [token for token in ins.opcode if token in ("global", "shared::cta", "shared::cluster")]
    if len(spaces) != 2:
        raise unsupported(ins)
    return _outward(ins, ctx) if spaces[0] == "global" else _inward(ins, ctx)


def _inward(ins: Instruction, ctx: Context) -> Run:
    destination, source, bell, *extra = ins.operands
    copy, bar = _TensorCopy(ins, ctx, source, destination, outward=False), ctx.address(bell)
    mask = ctx.reader(extra[0], "u16") if "multicast::cluster" in ins.opcode else None

    def fetch(lane: int, tensor: TensorMap, box: Box) -> np.ndarray:
        fill = np.full(box.nbytes // 2, _NAN_FILL if tensor.fill_nan else 0, np.uint16)
        values = fill.view(UINT[box.unit])
        there = box.addresses[box.inside]
        if len(there):
            values[box.inside] = ctx.space("global").load(there, box.unit, np.full(len(there), lane))
        if tensor.type == "tf32":
            values = to_tf32(values.view(np.float32), "rn")
        return values.view(UINT[16])

    def run(lanes: Lanes) -> None:
        bars = bar(lanes).tolist()
        masks = np.broadcast_to(mask(lanes), lanes.n).tolist() if mask else [None] * lanes.n
        for i, lane, tensor, box, address in copy.orders(lanes):
            values = fetch(lane, tensor, box)
            for target, bell_address in receivers(address, bars[i], masks[i]):
                there = box.places(target)
                deliver(ctx, there, values, np.full(len(there), lane), barrier_at(ctx, bell_address, lane))

    return run


def _outward(ins: Instruction, ctx: Context) -> Run:
    destination, source = ins.operands[:2]
    copy = _TensorCopy(ins, ctx, destination, source, outward=True)
    reduces = ins.opcode[1] == "reduce"

    def run(lanes: Lanes) -> None:
        for _, lane, tensor, box, address in copy.orders(lanes):
            if not box.inside.any():
                continue
            size, targets, inside = box.unit, box.addresses, box.inside
            operation = operation_of(ins, tensor.type) if reduces else None
            if operation is not None and size != tensor.itemsize:
                size = tensor.itemsize
                parts = np.arange(0, box.unit, size, dtype=np.uint64)
                targets = (targets[:, None] + parts).ravel()
                inside = inside.repeat(len(parts))
            write = writer(ctx, targets[inside], lane, size, operation)

            def put(data: np.ndarray, write=write, inside=inside, size=size) -> None:
                write(data.view(UINT[size])[inside])

            send(ctx, lane, box.places(address), put)

    return run


# Offset and size of each field in LAYOUT, and what is stored in place of the new value v.
_FIELDS = {
    "global_address": (16, 8, 0),
    "rank": (9, 1, 1),  # PTX gives the rank less 1
    "global_dim": (24, 4, -1),
    "global_stride": (48, 8, 0),
    "box_dim": (80, 2, 0),
    "element_stride": (90, 1, 0),
    "swizzle_mode": (10, 1, 0),
    "fill_mode": (11, 1, 0),
}


@instruction("tensormap.replace", kind="async")
def replace(ins: Instruction, ctx: Context) -> Run:
    """Change a field of a tensor map in global or shared memory."""
    options(ins, "replace tile global shared::cta b1024 b32 b64", _FIELDS)
    field = next((token for token in ins.opcode if token in _FIELDS), None)
    if field is None:
        raise unsupported(ins)
    offset, size, added = _FIELDS[field]
    mem, *ordinal, value = ins.operands
    index = int(ordinal[0].value("u32")) if ordinal else 0
    space = ctx.space("global" if "global" in ins.opcode else "shared")
    address, get = ctx.address(mem), ctx.reader(value, ins.opcode[-1])

    start = offset + index * size
    unit, place = np.uint64(start // 16 * 16), slice(start % 16, start % 16 + size)

    def run(lanes: Lanes) -> None:
        new = (np.broadcast_to(get(lanes), lanes.n).astype(np.int64) + added).astype(UINT[size])
        there = address(lanes) + unit
        units = space.load(there, 16, lanes.ids)
        units.view(np.uint8).reshape(-1, 16)[:, place] = new.view(np.uint8).reshape(-1, size)
        space.store(there, units, lanes.ids)

    return run


@instruction("tensormap.cp_fenceproxy", scope="warp", kind="async")
def cp_fenceproxy(ins: Instruction, ctx: Context) -> Run:
    """Copy a tensor map from shared to global memory, once a warp, and make it known to the engines."""
    to, origin = ctx.address(ins.operands[0]), ctx.address(ins.operands[1])

    def run(lanes: Lanes) -> None:
        targets, starts = to(lanes).tolist(), origin(lanes).tolist()
        for i in np.unique(ctx.warp_of[lanes.ids], return_index=True)[1].tolist():
            owners = np.full(LAYOUT.size // 16, lanes.ids[i])
            values = ctx.shared.load(chunks(starts[i], LAYOUT.size), 16, owners)
            ctx.space("global").store(chunks(targets[i], LAYOUT.size), values, owners)

    return run
