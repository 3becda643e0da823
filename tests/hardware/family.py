"""What an instruction family is: a kernel, its operands, and how to compare two outputs."""

import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from hardware.operands import LANES
from hardware.rules import Rule, exact

from rawops import Kernel

FOLDER = Path(__file__).parent

BOTH = ("sm_80", "sm_90a")
HOPPER = ("sm_90a",)


def lane_arguments(inputs: tuple, out) -> tuple:
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
        Makes the input arrays from the name.
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
    dtype: type = np.uint32
    rule: Rule = exact
    archs: tuple[str, ...] = BOTH
    grid: int = 1
    block: int = LANES
    arguments: Callable[[tuple, object], tuple] = plain_arguments

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

    def differences(self, want: np.ndarray, got: np.ndarray) -> str:
        """What differs beyond the rule: the entries with operands and instruction, a few of each row; "" if none."""
        agree = self.rule(want, got).reshape(*want.shape, -1).all(-1)
        where = np.argwhere(~agree)
        if not len(where):
            return ""
        lines = [f"{self.name}: {len(where)} of {want.size} entries differ"]
        instructions = self._rows()
        for row in np.unique(where[:, 0]):
            here = where[where[:, 0] == row]
            lines.append(f"  row {row}: {len(here)} differ" + (f": {instructions[row]}" if instructions else ""))
            lines += [self._entry(tuple(int(i) for i in index), want, got, bool(instructions)) for index in here[:3]]
        return "\n".join(lines[:80])

    def _rows(self) -> list[str]:
        """The instruction of each row, if the kernel is one of lanes.cuh with nothing but rows."""
        if self.arguments is not lane_arguments:
            return []
        ptx = self.cuda_kernel().compile(self.archs[-1]).ptx
        blocks = re.findall(r"// begin inline asm\n(.*?)// end inline asm", ptx, re.DOTALL)
        return [" ".join(block.split()) for block in blocks] if len(blocks) == self.shape[0] else []

    def _entry(self, at: tuple[int, ...], want: np.ndarray, got: np.ndarray, by_lane: bool) -> str:
        digits = 2 * want.itemsize
        line = f"    {at[1:]}: GPU {want[at]:0{digits}x}, emulator {got[at]:0{digits}x}"
        return line + (f", of {', '.join(f'{x[at[1]]:x}' for x in self.inputs())}" if by_lane else "")
