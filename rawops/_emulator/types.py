"""PTX types as NumPy dtypes, and the 16-bit float formats as bits."""

from __future__ import annotations

import numpy as np

# Memory elements by size. Sixteen bytes travel as complex128, the one 16-byte dtype NumPy gathers and
# scatters natively; it is only ever copied, never computed with.
UINT = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
    8: np.dtype(np.uint64),
    16: np.dtype(np.complex128),
}
SINT = {1: np.dtype(np.int8), 2: np.dtype(np.int16), 4: np.dtype(np.int32), 8: np.dtype(np.int64)}

# What a reader hands out for each type. bfloat16 stays as its bits: NumPy has no such dtype.
DTYPE = {
    "pred": np.dtype(bool),
    "f16": np.dtype(np.float16),
    "f16x2": np.dtype(np.float16),
    "bf16": np.dtype(np.uint16),
    "bf16x2": np.dtype(np.uint16),
    "u16x2": np.dtype(np.uint16),
    "s16x2": np.dtype(np.int16),
    "f32": np.dtype(np.float32),
    "tf32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "b128": UINT[16],
}
for _bits in (8, 16, 32, 64):
    DTYPE[f"u{_bits}"] = DTYPE[f"b{_bits}"] = UINT[_bits // 8]
    DTYPE[f"s{_bits}"] = SINT[_bits // 8]

# Elements of a register that holds two packed values.
PACKED = frozenset({"f16x2", "bf16x2", "u16x2", "s16x2"})

SIZE = {name: dtype.itemsize * (2 if name in PACKED else 1) for name, dtype in DTYPE.items()}
SIZE.update({"e4m3x2": 2, "e5m2x2": 2, "e4m3": 1, "e5m2": 1})

CANONICAL_NAN = {"f16": np.uint16(0x7FFF), "bf16": np.uint16(0x7FFF), "f32": np.uint32(0x7FFFFFFF)}

_F16_VALUES = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)


def is_signed(ptx_type: str) -> bool:
    """Whether values of this type are sign-extended into a wider register."""
    return ptx_type[0] == "s"


def is_float(ptx_type: str) -> bool:
    """Whether the type is a floating-point type, packed or not."""
    return ptx_type[0] in "f" or ptx_type.startswith(("bf", "tf"))


def f16_to_f32(values: np.ndarray) -> np.ndarray:
    """float16 values as float32; a table is quicker than NumPy's cast."""
    return _F16_VALUES.take(np.asarray(values).view(np.uint16))


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bits (uint16) as float32 values."""
    return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_f16(values: np.ndarray) -> np.ndarray:
    """float32 (or float64) to float16, ties to even, NaN to the canonical 0x7fff."""
    values = np.asarray(values)
    result = values.astype(np.float16)
    nan = np.isnan(values)
    if nan.any():
        result.view(np.uint16)[nan] = CANONICAL_NAN["f16"]
    return result


def f32_to_bf16(values: np.ndarray) -> np.ndarray:
    """float32 to bfloat16 bits (uint16), ties to even, NaN to the canonical 0x7fff."""
    values = np.asarray(values, dtype=np.float32)
    bits = values.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    result = ((bits + odd + np.uint32(0x7FFF)) >> np.uint32(16)).astype(np.uint16)
    nan = np.isnan(values)
    if nan.any():
        result[nan] = CANONICAL_NAN["bf16"]
    return result


def widen(values: np.ndarray, ptx_type: str) -> np.ndarray:
    """Values of a 16-bit float type (as a reader gives them) as float32; other types unchanged."""
    if ptx_type.startswith("f16"):
        return f16_to_f32(values)
    if ptx_type.startswith("bf16"):
        return bf16_to_f32(values)
    return values


def narrow(values: np.ndarray, ptx_type: str) -> np.ndarray:
    """Round float32 values to a 16-bit float type, in the form a writer takes; other types unchanged."""
    if ptx_type.startswith("f16"):
        return f32_to_f16(values)
    if ptx_type.startswith("bf16"):
        return f32_to_bf16(values)
    return values
