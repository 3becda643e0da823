"""The instruction families: which kernel on which operands, and how close the emulator has to come to the GPU."""

import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from hardware import operands
from hardware.operands import FORMATS, LANES, UINT
from hardware.rules import Rule, exact, near_zero, reordered, within, within_ulps

from rawops import Kernel
from rawops._runtime import device as devices
from rawops._runtime.tensormap import TensorMap

FOLDER = Path(__file__).parent
RECORDED = FOLDER / "h200.npz"

BOTH = ("sm_80", "sm_90a")
HOPPER = ("sm_90a",)


def lanes_arguments(inputs: tuple, out) -> tuple:
    """The arguments of a kernel of lanes.cuh."""
    return (*inputs, out, LANES)


def plain_arguments(inputs: tuple, out) -> tuple:
    """Pointers to the inputs and to the output."""
    return (*inputs, out)


@dataclass(frozen=True)
class Family:
    """One kernel with its operands.

    Attributes
    ----------
    name : str
        Also the seed of the operands and the key in the recorded file.
    file, kernel : str
        Source file and kernel expression.
    make_inputs : callable
        Makes the input arrays, unsigned integers of the operands' width, from the name.
    shape, dtype
        Of the output, which starts as zeros.
    rule : callable
        Which entries of recorded and emulated output agree.
    archs : tuple of str
        Where the kernel compiles.
    arguments : callable
        Makes the kernel arguments of device inputs and output.
    """

    name: str
    file: str
    kernel: str
    make_inputs: Callable[[str], tuple[np.ndarray, ...]]
    shape: tuple[int, ...]
    dtype: type
    rule: Rule = exact
    archs: tuple[str, ...] = BOTH
    grid: int = 1
    block: int = LANES
    arguments: Callable[[tuple, object], tuple] = lanes_arguments

    def inputs(self) -> tuple[np.ndarray, ...]:
        return self.make_inputs(self.name)

    def fingerprint(self) -> int:
        """A checksum of the operands."""
        return zlib.crc32(b"".join(x.tobytes() for x in self.inputs()))

    def cuda_kernel(self) -> Kernel:
        return Kernel(FOLDER / self.file, self.kernel)

    def run(self, xp) -> np.ndarray:
        """Run on the GPU (`xp` is cupy) or in the active emulator (numpy) and return the output on the host."""
        inputs = tuple(xp.asarray(x) for x in self.inputs())
        out = xp.zeros(self.shape, self.dtype)
        self.cuda_kernel()(self.grid, self.block, self.arguments(inputs, out))
        return out if xp is np else xp.asnumpy(out)

    def describe(self, where: np.ndarray, want: np.ndarray, got: np.ndarray) -> str:
        """The first few entries that differ: row (with its instruction), lane, operands, both results."""
        instructions = _inline_assembly(self.cuda_kernel().compile(self.archs[-1]).ptx)
        by_lane = self.arguments is lanes_arguments and len(instructions) == self.shape[0]
        lines = [f"{len(where)} of {want.size} entries differ"]
        digits = 2 * want.itemsize
        for index in where[:: max(1, len(where) // 12)]:
            at = tuple(int(i) for i in index)
            line = f"{at}: GPU {want[at]:0{digits}x}, emulator {got[at]:0{digits}x}"
            if by_lane:
                values = ", ".join(f"{x[at[1]]:x}" for x in self.inputs())
                line += f"  {instructions[at[0]]}  of ({values})"
            lines.append(line)
        return "\n".join(lines)


def _inline_assembly(ptx: str) -> list[str]:
    blocks = re.findall(r"// begin inline asm\n(.*?)// end inline asm", ptx, re.DOTALL)
    return [" ".join(block.split()) for block in blocks]


# --- lane by lane ----------------------------------------------------------------------------------------------------


def lanes(file: str, kernel: str, rows: int, bits: int, make_inputs, rule=exact, archs=BOTH) -> Family:
    """A kernel of lanes.cuh with `rows` results of so many bits a lane."""
    name = f"{file} {kernel}"
    return Family(name, f"{file}.cu", f"{kernel}<>", make_inputs, (rows, LANES), UINT[bits], rule, archs)


def integers(bits: int):
    return partial(operands.integers, bits=bits)


def floats(kind: str):
    return partial(operands.floats, kind=kind)


def pairs(kind: str):
    return partial(operands.pairs, kind=kind)


def to_round(kind: str, limits: tuple[int, ...] = (7, 8, 15, 16, 31, 32, 63, 64)):
    return partial(operands.to_round, kind=kind, limits=limits)


def halves_to_round(name: str) -> tuple[np.ndarray, ...]:
    """Pairs of float16 for conversions to float8."""
    words = operands.to_round(name, "f16", limits=(8, 9))
    return tuple(low.astype(np.uint32) | high.astype(np.uint32) << np.uint32(16) for low, high in zip(words, words[1:] + words[:1], strict=True))


def ordinary(low: float, high: float):
    """Operands spread evenly, as small multiples of 2**-16, and the awkward ones."""

    def make(name: str) -> tuple[np.ndarray, ...]:
        spread = operands.stream(name + " spread").randint(int(low * 65536), int(high * 65536), LANES) / 65536
        awkward, *others = operands.floats(name, "f32")
        awkward = np.where(np.abs(awkward.view(np.float32)) < 2.0**20, awkward, awkward & np.uint32(0x80000000))
        return np.where(np.arange(LANES) % 4 == 0, awkward, operands.encode(spread, "f32")), *others

    return make


def shuffle_inputs(name: str) -> tuple[np.ndarray, ...]:
    rng = operands.stream(name)
    clamps = np.array([0x1F, 0, 0x181F, 0x1800, 0x1C1F, 0x1C00, 0x1E1F, 0x0F, 0x101F, 0x0A17], np.uint32)
    sources = rng.randint(0, 40, LANES).astype(np.uint32)
    return operands.words(rng, 32, LANES), sources, clamps[rng.randint(0, len(clamps), LANES)]


def vote_inputs(name: str) -> tuple[np.ndarray, ...]:
    """Few different values, and warps in which all lanes agree."""
    rng = operands.stream(name)
    a, b, c = rng.randint(-3, 4, (3, LANES))
    a[:32], a[32:64], a[64:96] = -9, 9, rng.randint(-(2**31), 2**31, 32)
    c[:128] = np.repeat(c[:4], 32)
    return tuple(x.astype(np.int32).view(np.uint32) for x in (a, b, c))


F32_NEAR_SUBNORMAL = 0.0
NARROW = (8, 9)  # float8 saturates near 448 and 57344

LANE_FAMILIES = [
    lanes("integer", "integer32", 29, 32, integers(32)),
    lanes("integer", "wide32", 5, 64, integers(32)),
    lanes("integer", "integer64", 20, 64, integers(64)),
    lanes("integer", "integer16", 23, 16, integers(16)),
    lanes("integer", "wide16", 5, 32, integers(16)),
    lanes("integer", "packed16", 7, 32, integers(32), archs=HOPPER),
    lanes("bits", "bits32", 44, 32, integers(32)),
    lanes("bits", "bits64", 17, 64, integers(64)),
    lanes("float32", "arithmetic", 32, 32, floats("f32")),
    lanes("float32", "division", 15, 32, floats("f32")),
    lanes("float32", "extremum", 15, 32, floats("f32"), archs=HOPPER),
    lanes("float32", "approximate", 10, 32, ordinary(-200, 200), within_ulps(np.float32)),
    lanes("float32", "logarithm", 2, 32, ordinary(0, 4), within_ulps(np.float32, absolute=2.0**-22)),
    lanes("float32", "trigonometric", 4, 32, ordinary(-6, 6), within(np.float32, absolute=2.0**-20)),
    lanes("float32", "hyperbolic", 1, 32, ordinary(-5, 5), within(np.float32, relative=2.0**-10.5)),
    lanes("float64", "float64", 33, 64, floats("f64")),
    lanes("half", "float16", 20, 16, floats("f16"), archs=HOPPER),
    lanes("half", "float16x2", 20, 32, pairs("f16"), archs=HOPPER),
    lanes("half", "bfloat16", 10, 16, floats("bf16"), archs=HOPPER),
    lanes("half", "bfloat16x2", 10, 32, pairs("bf16"), archs=HOPPER),
    lanes("half", "bfloat16_sm90", 3, 16, floats("bf16"), archs=HOPPER),
    lanes("half", "bfloat16x2_sm90", 3, 32, pairs("bf16"), archs=HOPPER),
]
