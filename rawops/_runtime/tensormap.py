"""TMA tensor maps: one description, checked by the driver's rules, and two encoders of it.

A tensor map is 128 opaque bytes that a kernel takes by value (``const __grid_constant__``). Only the driver
can encode one for a GPU; without a driver the same description is written in a layout of our own, which the
emulator reads.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
from dataclasses import dataclass, field

import numpy as np

from rawops.errors import UnsupportedError

# The driver's CUtensorMapDataType. Formats it has no name for travel as integers of their size.
_DATA_TYPES = {
    "uint8": 0, "int8": 0, "bool": 0, "float8_e4m3fn": 0, "float8_e5m2": 0, "uint16": 1, "int16": 1,
    "uint32": 2, "int32": 3, "uint64": 4, "int64": 5, "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9,
}  # fmt: skip
_TF32 = 11
_FLOATS = ("float16", "bfloat16", "float32", "float64")
_SWIZZLES = (0, 32, 64, 128)
_L2_PROMOTIONS = (0, 64, 128, 256)
_FILLS = ("zero", "nan")

# The emulator's layout: magic, data type, rank, swizzle, fill, address, sizes - 1, strides of all axes but the
# innermost, box, element strides; axes innermost first, unused axes 0.
EMULATED_LAYOUT = struct.Struct("<8s4BxxxxQ5Ixxxx4Q5H5B33x")
EMULATED_MAGIC = b"rawopsTM"


@dataclass(frozen=True)
class TensorMap:
    """A tensor in global memory and the box of it that one TMA instruction copies.

    Attributes
    ----------
    address : int
        Device address of element 0, a multiple of 16.
    dtype : numpy.dtype
        Element type; float8 and int8 travel as bytes.
    shape : tuple of int
        1 to 5 sizes, outermost first.
    strides : tuple of int
        Bytes from one element to the next along each axis: multiples of 16, except that the innermost one
        is the item size.
    box : tuple of int
        Elements along each axis that one copy covers, each at most 256; the innermost row of it is a
        multiple of 16 bytes and, when swizzled, no wider than the swizzle. In shared memory swizzled rows begin
        a swizzle's width apart, also where they are narrower.
    swizzle : {0, 32, 64, 128}
        Width in bytes of the swizzle pattern in shared memory.
    l2_promotion : {0, 64, 128, 256}
        Bytes that the L2 cache fetches at a time.
    element_strides : tuple of int, optional
        Step along each axis inside the box, 1 to 8; a box of n then holds ceil(n / step) elements.
    fill : {"zero", "nan"}
        What elements out of bounds read as.
    tf32 : bool
        Round float32 to TF32 on the way in.
    """

    address: int
    dtype: np.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0
    l2_promotion: int = 256
    element_strides: tuple[int, ...] = field(default=())
    fill: str = "zero"
    tf32: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", np.dtype(self.dtype))
        for name in ("shape", "strides", "box", "element_strides"):
            object.__setattr__(self, name, tuple(int(v) for v in getattr(self, name)))
        if not self.element_strides:
            object.__setattr__(self, "element_strides", (1,) * len(self.shape))
        self._check_tensor()
        self._check_box()

    def _check_tensor(self) -> None:
        rank, itemsize = len(self.shape), self.dtype.itemsize
        _require(self.dtype.name in _DATA_TYPES, "dtype", f"be one of {', '.join(_DATA_TYPES)}", self.dtype.name)
        _require(not self.tf32 or self.dtype.name == "float32", "tf32", "be False but for float32", self.dtype.name)
        _require(1 <= rank <= 5, "shape", "have 1 to 5 axes", self.shape)
        for name in ("strides", "box", "element_strides"):
            value = getattr(self, name)
            _require(len(value) == rank, name, f"have one entry an axis ({rank})", value)
        _require(self.address % 16 == 0, "address", "be a multiple of 16 bytes", hex(self.address))
        _require(all(1 <= n <= 2**32 for n in self.shape), "shape", "have sizes from 1 to 2**32", self.shape)
        _require(self.strides[-1] == itemsize, "strides", f"end in the item size ({itemsize})", self.strides)
        outer = self.strides[:-1]
        _require(
            all(s % 16 == 0 and 0 <= s < 2**40 for s in outer),
            "strides",
            "be multiples of 16 bytes below 2**40, except the innermost",
            self.strides,
            "Copy such a tensor, or read it with plain loads",
        )

    def _check_box(self) -> None:
        row = self.box[-1] * self.dtype.itemsize
        steps = self.element_strides
        _require(all(1 <= n <= 256 for n in self.box), "box", "have sizes from 1 to 256", self.box)
        _require(row % 16 == 0, "box", "have innermost rows of a multiple of 16 bytes", f"{row} bytes")
        _require(self.swizzle in _SWIZZLES, "swizzle", f"be one of {_SWIZZLES}", self.swizzle)
        if self.swizzle:
            limit = f"have innermost rows of at most the swizzle's {self.swizzle} bytes"
            _require(row <= self.swizzle, "box", limit, f"{row} bytes", "Use several boxes, or one more axis")
        _require(all(1 <= s <= 8 for s in steps), "element_strides", "be from 1 to 8", steps)
        _require(steps[-1] == 1, "element_strides", "end in 1 (hardware ignores the innermost)", steps)
        _require(self.l2_promotion in _L2_PROMOTIONS, "l2_promotion", f"be one of {_L2_PROMOTIONS}", self.l2_promotion)
        _require(self.fill in _FILLS, "fill", f"be one of {_FILLS}", repr(self.fill))
        _require(
            self.fill == "zero" or self.dtype.name in _FLOATS,
            "fill",
            "be 'zero' for a dtype that the driver does not know as floating point",
            f"{self.fill!r} with {self.dtype.name}",
        )

    @property
    def box_bytes(self) -> int:
        """Bytes that one load writes and counts at its mbarrier, elements out of bounds included."""
        elements = 1
        for size, step in zip(self.box, self.element_strides, strict=True):
            elements *= -(-size // step)
        return elements * self.dtype.itemsize

    @property
    def _data_type(self) -> int:
        return _TF32 if self.tf32 else _DATA_TYPES[self.dtype.name]

    def encode_driver(self) -> bytes:
        """Return the 128 bytes that the CUDA driver makes of this map."""
        rank = len(self.shape)
        storage = ctypes.create_string_buffer(256)  # the driver wants its target aligned to 128 bytes
        target = (ctypes.addressof(storage) + 127) & ~127
        status = _driver().cuTensorMapEncodeTiled(
            ctypes.c_void_p(target),
            ctypes.c_int(self._data_type),
            ctypes.c_uint32(rank),
            ctypes.c_void_p(self.address),
            (ctypes.c_uint64 * rank)(*self.shape[::-1]),
            (ctypes.c_uint64 * rank)(*self.strides[-2::-1]),
            (ctypes.c_uint32 * rank)(*self.box[::-1]),
            (ctypes.c_uint32 * rank)(*self.element_strides[::-1]),
            ctypes.c_int(0),
            ctypes.c_int(_SWIZZLES.index(self.swizzle)),
            ctypes.c_int(_L2_PROMOTIONS.index(self.l2_promotion)),
            ctypes.c_int(_FILLS.index(self.fill)),
        )
        if status:
            raise ValueError(f"tensor_map: the driver must accept the map, got error {status} for {self}")
        return ctypes.string_at(target, 128)

    def encode_emulated(self) -> bytes:
        """Return 128 bytes that the emulator's TMA reads."""

        def padded(values, count: int = 5) -> list[int]:
            inner_first = list(values)[::-1]
            return inner_first + [0] * (count - len(inner_first))

        return EMULATED_LAYOUT.pack(
            EMULATED_MAGIC,
            self._data_type,
            len(self.shape),
            _SWIZZLES.index(self.swizzle),
            _FILLS.index(self.fill),
            self.address,
            *padded(n - 1 for n in self.shape),
            *padded(self.strides[:-1], 4),
            *padded(self.box),
            *padded(self.element_strides),
        )


def _require(holds: bool, argument: str, rule: str, value: object, advice: str = "") -> None:
    if not holds:
        raise ValueError(f"tensor_map: {argument} must {rule}, got {value}." + (f" {advice}." if advice else ""))


@functools.cache
def _driver() -> ctypes.CDLL:
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        library = ctypes.CDLL(name)
        library.cuTensorMapEncodeTiled  # noqa: B018  absent from drivers older than CUDA 12
    except (OSError, AttributeError) as error:
        raise UnsupportedError(f"tensor_map: a CUDA 12 driver is needed to encode TMA descriptors ({error})") from error
    return library
