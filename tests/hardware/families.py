"""The instruction families: which kernel on which operands, and how close the emulator has to come to the GPU."""

from functools import partial

import numpy as np
from hardware import operands
from hardware.family import BOTH, FOLDER, HOPPER, Family, lane_arguments
from hardware.matrices import MATRICES
from hardware.operands import LANES, UINT
from hardware.rules import bfloat16_ulps, close, exact, ulps
from hardware.tiles import TILES

RECORDED = FOLDER / "h200.npz"

# --- operands of some families ---------------------------------------------------------------------------------------


def integers(bits: int):
    return partial(operands.integers, bits=bits)


def floats(kind: str):
    return partial(operands.floats, kind=kind)


def pairs(kind: str):
    return partial(operands.pairs, kind=kind)


def to_round(kind: str, *limits: int):
    return partial(operands.to_round, kind=kind, limits=limits or (7, 8, 15, 16, 31, 32, 63, 64))


def ordinary(low: float, high: float):
    """Numbers spread evenly, and the awkward ones that are small or not finite."""

    def make(name: str) -> tuple[np.ndarray, ...]:
        spread = operands.stream(name + " spread").randint(int(low * 65536), int(high * 65536), LANES) / 65536
        awkward, *others = operands.floats(name, "f32")
        magnitude = np.abs(awkward.view(np.float32))
        awkward = np.where((magnitude < 2) | ~np.isfinite(magnitude), awkward, awkward & np.uint32(0x80000000))
        return np.where(np.arange(LANES) % 4 == 0, awkward, operands.encode(spread, "f32")), *others

    return make


def half_pairs_to_round(name: str) -> tuple[np.ndarray, ...]:
    low, high, other = (x.astype(np.uint32) for x in operands.to_round(name, "f16", limits=(8, 9)))
    return low | high << np.uint32(16), high | other << np.uint32(16), other | low << np.uint32(16)


def shuffle_operands(name: str) -> tuple[np.ndarray, ...]:
    """Values, source lanes in range and beyond, segment masks with clamps."""
    rng = operands.stream(name)
    clamps = np.array([0x1F, 0, 0x181F, 0x1800, 0x1C1F, 0x1C00, 0x1E1F, 0x0F, 0x101F, 0x0A17], np.uint32)
    sources = rng.randint(0, 40, LANES).astype(np.uint32)
    return operands.words(rng, 32, LANES), sources, clamps[rng.randint(0, len(clamps), LANES)]


def vote_operands(name: str) -> tuple[np.ndarray, ...]:
    """Few different values, and warps in which all lanes agree."""
    rng = operands.stream(name)
    a, b, c = rng.randint(-3, 4, (3, LANES))
    a[:32], a[32:64], a[64:96] = -9, 9, rng.randint(-(2**31), 2**31, 32)
    c[:128] = np.repeat(c[:4], 32)
    return tuple(x.astype(np.int32).view(np.uint32) for x in (a, b, c))


def words(*shapes: tuple[int, ...]):
    """Any 32-bit words, an array of each shape."""
    return lambda name: tuple(operands.words(operands.stream(f"{name} {i}"), 32, *s) for i, s in enumerate(shapes))


def row_offsets(name: str) -> tuple[np.ndarray, ...]:
    """Different rows of eight 16-bit elements in shared memory, one a lane."""
    return ((operands.stream(name).permutation(128)[:32] * 8).astype(np.uint32),)


# --- the families ----------------------------------------------------------------------------------------------------


def _lane_family(file: str, kernel: str, rows: int, bits: int, make_inputs, rule=exact, archs=BOTH) -> Family:
    """A kernel of lanes.cuh with so many rows of results of so many bits."""
    name, shape = f"{file} {kernel}", (rows, LANES)
    return Family(
        name, f"{file}.cu", f"{kernel}<>", make_inputs, shape, UINT[bits], rule, archs, arguments=lane_arguments
    )


_SCALAR = [
    ("integer", "integer32", 29, 32, integers(32)),
    ("integer", "wide32", 5, 64, integers(32)),
    ("integer", "integer64", 20, 64, integers(64)),
    ("integer", "integer16", 23, 16, integers(16)),
    ("integer", "wide16", 5, 32, integers(16)),
    ("integer", "packed16", 7, 32, integers(32), exact, HOPPER),
    ("bits", "bits32", 44, 32, integers(32)),
    ("bits", "bits64", 17, 64, integers(64)),
    ("float32", "arithmetic", 32, 32, floats("f32")),
    ("float32", "division", 15, 32, floats("f32")),
    ("float32", "extremum", 15, 32, floats("f32"), exact, HOPPER),
    # NVIDIA's own bounds are absolute for lg2 near 1 and for sin and cos, and relative and wide (2**-11) for tanh
    ("float32", "approximate", 10, 32, ordinary(-200, 200), ulps(np.float32)),
    ("float32", "logarithm", 2, 32, ordinary(0, 4), ulps(np.float32, near_zero=2.0**-22)),
    ("float32", "trigonometric", 4, 32, ordinary(-6, 6), close(np.float32, absolute=2.0**-20)),
    ("float32", "hyperbolic", 1, 32, ordinary(-5, 5), close(np.float32, relative=2.0**-16)),
    ("float64", "float64", 33, 64, floats("f64")),
    ("half", "float16", 20, 16, floats("f16"), exact, HOPPER),
    ("half", "float16x2", 20, 32, pairs("f16"), exact, HOPPER),
    ("half", "bfloat16", 10, 16, floats("bf16"), exact, HOPPER),
    ("half", "bfloat16x2", 10, 32, pairs("bf16"), exact, HOPPER),
    ("half", "bfloat16_sm90", 3, 16, floats("bf16"), exact, HOPPER),
    ("half", "bfloat16x2_sm90", 3, 32, pairs("bf16"), exact, HOPPER),
    ("half", "float16_approximate", 2, 16, to_round("f16", 4, 5), ulps(np.float16)),
    ("half", "float16x2_approximate", 2, 32, half_pairs_to_round, ulps(np.float16)),
    ("half", "bfloat16_approximate", 2, 16, to_round("bf16", 4, 5), bfloat16_ulps, HOPPER),
    ("half", "bfloat16x2_approximate", 2, 32, pairs("bf16"), bfloat16_ulps, HOPPER),
    ("compare", "compare32", 43, 32, floats("f32")),
    ("compare", "compare64", 24, 64, floats("f64")),
    ("compare", "compare16", 24, 16, floats("f16")),
    ("compare", "compare16_sm90", 14, 16, floats("bf16"), exact, HOPPER),
    ("compare", "compare16x2", 16, 32, pairs("f16")),
    ("convert", "float32_to_32", 28, 32, to_round("f32")),
    ("convert", "float32_to_16", 8, 16, to_round("f32")),
    ("convert", "float32_sm90", 3, 32, floats("f32"), exact, HOPPER),
    ("convert", "float32_to_float8", 4, 16, to_round("f32", 8, 9, 15, 16), exact, HOPPER),
    ("convert", "float16x2_to_float8", 3, 16, half_pairs_to_round, exact, HOPPER),
    ("convert", "float8_to_float16x2", 3, 32, integers(16), exact, HOPPER),
    ("convert", "float16_to_32", 16, 32, to_round("f16", 7, 8, 15)),
    ("convert", "float16_to_16", 16, 16, to_round("f16", 7, 8, 15)),
    ("convert", "bfloat16_sm90", 9, 32, to_round("bf16", 7, 8, 31, 32), exact, HOPPER),
    ("convert", "integer_to_32", 25, 32, integers(32)),
    ("convert", "integer_to_16", 8, 16, integers(32)),
    ("convert", "float64_to_64", 12, 64, to_round("f64", 31, 52, 53, 63, 64)),
    ("convert", "float64_to_32", 14, 32, to_round("f64", 24, 31, 32, 127, 128)),
    ("convert", "integer64_to_64", 8, 64, integers(64)),
    ("convert", "integer64_to_32", 13, 32, integers(64)),
    ("convert", "integer_to_64", 5, 64, integers(32)),
    ("convert", "float32_to_64", 10, 64, to_round("f32", 31, 32, 63, 64)),
    ("convert", "float16_to_64", 2, 64, floats("f16")),
    ("warp", "shuffle", 16, 32, shuffle_operands),
    ("warp", "vote", 24, 32, vote_operands),
    ("warp", "divergent", 5, 32, vote_operands),
    ("warp", "elect", 2, 32, vote_operands, exact, HOPPER),
    ("atomics", "atomic32", 52, 32, integers(32)),
    ("atomics", "atomic_float", 8, 32, floats("f32")),
    ("atomics", "atomic_bfloat16_sm90", 4, 32, pairs("bf16"), exact, HOPPER),
    ("atomics", "atomic64", 32, 64, floats("f64")),
    ("atomics", "atomic16", 8, 16, floats("f16")),
    ("memory", "extension", 12, 32, integers(32)),
    ("memory", "barrier", 6, 32, vote_operands),
]

_TRIPLE = ((LANES,), (LANES,), (LANES,))

_MEMORY = [
    Family("atomics common", "atomics.cu", "common<>", words(*_TRIPLE), (9 * 32,), arguments=lane_arguments),
    Family(
        "atomics vector_reduction", "atomics.cu", "vector_reduction<>", floats("f32"), (5, 4 * LANES), archs=HOPPER,
        arguments=lane_arguments,
    ),
    Family(
        "memory vectors", "memory.cu", "vectors<>", words((512,)), (14, 512), block=128,
        arguments=lambda inputs, out: (*inputs, out, 128),
    ),
    Family("memory copies", "memory.cu", "copies<>", words((256,)), (20, 64), block=64),
    Family("matrix_moves load", "matrix_moves.cu", "load<>", row_offsets, (15, 32), block=32),
    Family("matrix_moves store", "matrix_moves.cu", "store<>", row_offsets, (6, 512), archs=HOPPER, block=32),
    Family("asynchronous phases", "asynchronous.cu", "phases<>", words((128,)), (150,), archs=HOPPER, block=64),
    Family("asynchronous bulk", "asynchronous.cu", "bulk<>", words((128,)), (512,), archs=HOPPER, block=128),
    Family(
        "asynchronous cluster", "asynchronous.cu", "cluster<>", words((256,)), (13, 256), archs=HOPPER, grid=4,
        block=64,
    ),
]  # fmt: skip


FAMILIES = [*(_lane_family(*entry) for entry in _SCALAR), *_MEMORY, *MATRICES, *TILES]
