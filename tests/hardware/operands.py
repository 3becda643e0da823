"""Operands for instructions: random ones and the awkward ones, as bit patterns, the same on every machine.

`numpy.random.RandomState` is used because its streams are frozen: what was recorded stays valid.
"""

import zlib
from itertools import product

import numpy as np

LANES = 256
UINT = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}

# exponent bits and mantissa bits
FORMATS = {"f64": (11, 52), "f32": (8, 23), "f16": (5, 10), "bf16": (8, 7), "e4m3": (4, 3), "e5m2": (5, 2)}


def stream(name: str) -> np.random.RandomState:
    """The random numbers that belong to a name."""
    return np.random.RandomState(zlib.crc32(name.encode()))


def words(rng, bits: int, *shape: int) -> np.ndarray:
    """Uniformly random bit patterns."""
    count = int(np.prod(shape)) * bits // 8
    return rng.randint(0, 256, count).astype(np.uint8).view(UINT[bits]).reshape(shape)


def encode(values, kind: str) -> np.ndarray:
    """Round numbers to a float format by truncation of float64 bits, which is exact for the small ones used here."""
    exponent_bits, mantissa_bits = FORMATS[kind]
    bits = np.asarray(values, np.float64).view(np.uint64)
    sign = bits >> np.uint64(63)
    exponent = (bits >> np.uint64(52) & np.uint64(0x7FF)).astype(np.int64) - 1023 + (1 << (exponent_bits - 1)) - 1
    mantissa = (bits & np.uint64((1 << 52) - 1)) >> np.uint64(52 - mantissa_bits)
    top = (1 << exponent_bits) - 1
    mantissa = np.where(exponent >= top, np.uint64(0), mantissa)
    body = np.clip(exponent, 0, top).astype(np.uint64) << np.uint64(mantissa_bits) | mantissa
    body = np.where(exponent <= 0, np.uint64(0), body)
    width = 1 + exponent_bits + mantissa_bits
    return (sign << np.uint64(width - 1) | body).astype(UINT[width])


def _awkward_floats(kind: str) -> np.ndarray:
    """Zeros, subnormals, neighbours of powers of two, the largest, infinities, NaN with payloads; both signs."""
    exponent_bits, mantissa_bits = FORMATS[kind]
    one = ((1 << (exponent_bits - 1)) - 1) << mantissa_bits
    unit, infinity = 1 << mantissa_bits, ((1 << exponent_bits) - 1) << mantissa_bits
    body = [0, 1, 2, unit // 3, unit - 1, unit, unit + 1, one - 1, one, one + 1, one + unit // 2, one + unit]
    body += [one + unit + unit // 2, one - unit, one - unit - 1, 2 * unit + 1, one // 2, one + one // 2]
    body += [one + mantissa_bits * unit + 1, one - (mantissa_bits + 1) * unit, infinity - 1, infinity]
    body += [infinity + unit // 2, infinity + unit // 2 + 5, infinity + 3, infinity + unit - 1]
    sign = 1 << (exponent_bits + mantissa_bits)
    width = 1 + exponent_bits + mantissa_bits
    return np.array([s | b for s, b in product((0, sign), body)], UINT[width])


def _moderate_floats(rng, kind: str, n: int) -> np.ndarray:
    """Random mantissas with exponents near that of 1, so that sums round and cancel."""
    exponent_bits, mantissa_bits = FORMATS[kind]
    width = 1 + exponent_bits + mantissa_bits
    bias = (1 << (exponent_bits - 1)) - 1
    reach = min(mantissa_bits, bias) // 2 + 1
    exponent = rng.randint(bias - reach, bias + reach + 1, n).astype(UINT[width]) << UINT[width](mantissa_bits)
    keep = UINT[width](((1 << mantissa_bits) - 1) | 1 << (width - 1))
    return words(rng, width, n) & keep | exponent


def floats(name: str, kind: str, operands: int = 3, n: int = LANES) -> tuple[np.ndarray, ...]:
    """Operands of a float instruction: awkward ones, moderate ones, any bits, and lanes that mix the three."""
    rng = stream(name)
    awkward = _awkward_floats(kind)
    taken = rng.permutation(n)
    source = np.where(taken < n // 3, 0, np.where(taken < 2 * n // 3, 1, 3))
    result = []
    for _ in range(operands):
        which = np.where(source == 3, rng.randint(0, 3, n), source)
        choices = (awkward[rng.randint(0, len(awkward), n)], _moderate_floats(rng, kind, n))
        result.append(np.choose(which, (*choices, words(rng, awkward.itemsize * 8, n))))
    return tuple(result)


def pairs(name: str, kind: str, operands: int = 3) -> tuple[np.ndarray, ...]:
    """Operands of a packed instruction: two 16-bit floats a word."""
    return tuple(x.view(np.uint32) for x in floats(name, kind, operands, 2 * LANES))


def integers(name: str, bits: int, operands: int = 3) -> tuple[np.ndarray, ...]:
    """Operands of an integer instruction: limits, powers of two, small numbers (shift counts too), any bits."""
    rng = stream(name)
    edge = [0, 1, 2, 3, 7, 10, 31, 32, 33, 63, 64, 65, 127, 128, 255, 256, (1 << bits) - 1, (1 << bits) - 2]
    edge += [1 << (bits - 1), (1 << (bits - 1)) - 1, (1 << (bits - 1)) + 1, 1 << (bits // 2), (1 << (bits // 2)) - 1]
    edge = np.array([e & ((1 << bits) - 1) for e in edge], UINT[bits])
    result = []
    for _ in range(operands):
        small = rng.randint(0, 100, LANES).astype(UINT[bits])
        choices = (edge[rng.randint(0, len(edge), LANES)], small, words(rng, bits, LANES))
        result.append(np.choose(rng.choice(3, LANES, p=(0.4, 0.2, 0.4)), choices))
    return tuple(result)


def to_round(name: str, kind: str, operands: int = 3, limits=(7, 8, 15, 16, 31, 32, 63, 64)) -> tuple[np.ndarray, ...]:
    """Floats for conversions: halves, neighbours of integer limits, tiny ones, and those of `floats`."""
    rng = stream(name)
    powers = np.array([s * (2.0**p + d) for p in limits for d in (-1, -0.5, 0, 0.5, 1) for s in (1, -1)])
    result = []
    for any_float in floats(name + " any", kind, operands):
        halves = rng.randint(-40, 41, LANES) / 4
        scaled = rng.randint(-(2**20), 2**20, LANES) * 2.0 ** rng.randint(-36, -4, LANES)
        choices = [encode(v, kind) for v in (halves, powers[rng.randint(0, len(powers), LANES)], scaled)]
        result.append(np.choose(rng.randint(0, 4, LANES), (*choices, any_float)))
    return tuple(result)


def small_integers(rng, kind: str, *shape: int) -> np.ndarray:
    """Integers from -2 to 2 as bit patterns of a matrix operand's type: their products add up without rounding."""
    values = rng.randint(-2, 3, shape)
    if kind in ("s8", "u8"):
        return (values if kind == "s8" else values + 2).astype(np.int8).view(np.uint8)
    if kind == "s32":
        return values.astype(np.int32).view(np.uint32)
    return encode(values.astype(np.float64), "f32" if kind == "tf32" else kind)


def fractions(rng, kind: str, *shape: int) -> np.ndarray:
    """Numbers in (-1, 1) with random mantissas; any bits for the integer types, sums often near the limits."""
    if kind in ("s8", "u8"):
        return words(rng, 8, *shape)
    if kind == "s32":
        any_word = words(rng, 32, *shape)
        near_limits = (any_word | np.uint32(0x7FFF0000), any_word & np.uint32(0x8000FFFF))
        return np.choose(rng.randint(0, 3, shape), (any_word, *near_limits))
    values = rng.randint(-(2**52) + 1, 2**52, shape) * 2.0**-52
    return encode(values, "f32" if kind == "tf32" else kind)


def with_infinities(rng, kind: str, *shape: int) -> np.ndarray:
    """Small integers, and here and there an infinity or a NaN."""
    values = small_integers(rng, kind, *shape)
    exponent_bits, mantissa_bits = FORMATS["f32" if kind == "tf32" else kind]
    top = (1 << (exponent_bits + mantissa_bits)) - 1
    infinity = ((1 << exponent_bits) - 1) << mantissa_bits
    # e4m3 has no infinity, and its only NaN is all ones; tf32 looks at the upper 10 bits of the mantissa
    awkward = (top,) if kind == "e4m3" else (infinity, infinity, infinity + (1 << (mantissa_bits - 1)), top)
    sign = values.dtype.type(1 << (8 * values.itemsize - 1))
    chosen = np.array(awkward, values.dtype)[rng.randint(0, len(awkward), shape)]
    return np.where(rng.randint(0, 60, shape) == 0, chosen | (values & sign), values)
