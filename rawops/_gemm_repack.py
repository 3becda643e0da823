"""Operands that a GEMM kernel takes slowly or not at all are copied to rows on 16-byte boundaries first."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from rawops import _gemm_sm90
from rawops._gemm_operands import ROLES, Operand
from rawops._runtime.kernel import Function, KernelSpec, ParamStruct

_THREADS, _SIDE, _SIDE_OF_BYTES = 256, 64, 128  # of gemm_repack.cu
_MAX_GRID_Z = 65535
# Operations that a copy must spare for every byte that it moves. On an H200 a product of 2-byte accesses runs at
# 74 TFLOP/s, one of 8-byte accesses at 400, one through TMA at 650, and a copy moves 3.5 TB/s; elsewhere it is alike.
_OPS_PER_BYTE = {2: 24, 4: 24, 8: 330}
_OPS_PER_BYTE_TF32 = 77  # 160 TFLOP/s without wgmma, which takes TF32 only along K, and 390 with it
_OPS_PER_BYTE_FLOAT32 = 300  # 51 TFLOP/s where slices of K are transposed on their way, and 53 where they are not
_LAUNCH_BYTES = 16 << 20  # what the memory could move during the copy's launch
_LINE = 128  # bytes: rows that begin in the middle of one come slower, but short ones are not to become much longer

_PARAMS = ParamStruct(
    "RepackParams",
    **dict.fromkeys(("source", "target"), "pointer"),
    **dict.fromkeys(("row", "col", "batch0", "batch1", "batch2", "target_row"), "int64"),
    **dict.fromkeys(("rows", "cols", "extent0", "extent1", "extent2"), "int32"),
)
_SPECS = {
    transposes: KernelSpec(
        source="gemm_repack.cu",
        entry=f"rawops::gemm_repack{'_transposed' * transposes}",
        template=("bytes",),
        choices={"bytes": (1, 2, 4)},
        smoke=({"bytes": 1}, {"bytes": 2}, {"bytes": 4}),
        params=_PARAMS,
    )
    for transposes in (False, True)
}
_WHOLE = {  # by the bytes of an element: transposes that read 4 bytes, or 16, at a time
    itemsize: KernelSpec(
        source="gemm_repack.cu",
        entry=f"rawops::gemm_repack_{name}",
        template=(),
        choices={},
        smoke=({},),
        params=_PARAMS,
    )
    for itemsize, name in ((1, "bytes"), (4, "words"))
}


def pays(operations: int, access: int, copied_bytes: int, kind: str = "") -> bool:
    """Tell whether a product is faster after a copy; pure arithmetic.

    Parameters
    ----------
    operations : int
        Of the product.
    access : int
        Bytes that its kernel reads at a time without a copy.
    copied_bytes : int
        Size of what would be copied: it is read and written.
    kind : str
        Of the product: "tf32" and "float32" are copied on Hopper, for other reasons.
    """
    own = {"tf32": _OPS_PER_BYTE_TF32, "float32": _OPS_PER_BYTE_FLOAT32}
    ops_per_byte = own[kind] if kind in own else _OPS_PER_BYTE[access]
    return operations > ops_per_byte * (2 * copied_bytes + _LAUNCH_BYTES)


@dataclass(frozen=True)
class Copy:
    """One operand's copy, which starts `offset` bytes into a workspace and takes `size` bytes."""

    kernel: Function
    grid: tuple[int, int, int]
    numbers: tuple[int, ...]
    offset: int
    size: int

    def run(self, source: int, workspace: int) -> int:
        """Launch; return the address of the copy."""
        target = workspace + self.offset
        self.kernel.launch(self.grid, (_THREADS, 1, 1), (_PARAMS.pack(source, target, *self.numbers),))
        return target


def plan(device, problem, described: dict, layouts: dict, extents: tuple) -> tuple[dict[int, Copy], dict]:
    """Decide which of a and b to copy.

    Parameters
    ----------
    device : Device
    problem : Problem
        Of _gemm_config.py.
    described : dict of Operand
    layouts : dict
        By operand whether its contiguous axis is K, the bytes of an access along it, and the columns from gate to up.
    extents : tuple of 3 int
        The batch axes.

    Returns
    -------
    dict of Copy
        By the operand's index; empty if nothing is to be copied.
    dict of Operand
        `described` with copies in the place of operands.
    """
    on_hopper = _gemm_sm90.SM90.exists_on(device.capability)
    is_packed = described["b"].itemsize != described["a"].itemsize
    if is_packed or not (problem.kind.startswith("16-bit") or (problem.kind in ("tf32", "float32") and on_hopper)):
        return {}, described
    if problem.kind == "float32":  # slices of K as they are to lie in shared memory; up must start on 16 bytes
        chosen = [r for r in ("a", "b") if layouts[r][0] and layouts[r][2] % 4 == 0]
    else:
        wanted = 16 if on_hopper else 8
        # TF32 wants a along K; a row-major b is the first operand of the transposes, unless it is gated.
        along_k = ("a", "b") if layouts["b"][2] else ("a",)
        tf32 = [r for r in along_k if problem.tf32 and not layouts[r][0]]
        chosen = [r for r in ("a", "b") if layouts[r][1] < wanted or r in tf32]
    sizes = {"a": problem.M * problem.K, "b": problem.N * problem.K}
    copied = sum(sizes[r] * described[r].itemsize * math.prod(_distinct(described[r], extents)) for r in chosen)
    operations = 2 * problem.M * problem.N * problem.K * problem.batches
    if not chosen or not pays(operations, problem.access, copied, problem.kind):
        return {}, described
    if problem.kind == "float32":
        majors = dict.fromkeys(chosen, False)
    else:  # where columns are contiguous, up must start on 16 bytes, too
        majors = {role: layouts[role][0] or layouts[role][2] % 8 != 0 or problem.tf32 for role in chosen}
    return copies_of(device, majors, described, problem, extents)


def copies_of(device, majors: dict, described: dict, problem, extents: tuple) -> tuple[dict[int, Copy], dict]:
    """Plan the copies of some operands, by role whether along K (True) or along the other axis; returns as `plan`."""
    copies, replaced, offset = {}, dict(described), 0
    for role, k_major in majors.items():
        x, mn = described[role], problem.M if role == "a" else problem.N
        strides = (x.row, x.col) if role == "a" else (x.col, x.row)
        copy, (mn_stride, k_stride), batch = _copy(device, x, (mn, problem.K), strides, k_major, extents, offset)
        row, col = (mn_stride, k_stride) if role == "a" else (k_stride, mn_stride)
        replaced[role] = replace(x, alignment=0, row=row, col=col, batch=batch)
        copies[ROLES.index(role)] = copy
        offset += copy.size
    return copies, replaced


def _distinct(x: Operand, extents: tuple) -> tuple:
    """Return the batch axes without those along which the operand repeats."""
    return tuple(n if stride else 1 for n, stride in zip(extents, x.batch, strict=True))


def _copy(device, x: Operand, sizes: tuple, strides: tuple, k_major: bool, extents: tuple, offset: int):
    """Plan a copy; sizes and strides are along MN and K. Returns it, and its strides: of MN and K, of the batch."""
    (rows, row), (cols, col) = zip(sizes, strides, strict=True)
    if not k_major:
        (rows, row), (cols, col) = (cols, col), (rows, row)
    width = 16 // x.itemsize
    unit = (_LINE if cols * x.itemsize >= 8 * _LINE else 16) // x.itemsize
    pitch = -(-cols // unit) * unit
    extents = _distinct(x, extents)
    transposes = row == 1 and col != 1 and rows > 1
    in_fours = x.alignment % (4 * x.itemsize) == 0 and all(n % 4 == 0 for n in (rows, col, *x.batch))
    whole = transposes and x.itemsize in _WHOLE and in_fours
    if transposes:
        side = _SIDE_OF_BYTES if x.itemsize == 1 and whole else _SIDE
        blocks = -(-rows // side) * -(-cols // side)
    else:
        blocks = -(-rows * (pitch // width) // _THREADS)
    kernel = _WHOLE[x.itemsize].kernel(device) if whole else _SPECS[transposes].kernel(device, bytes=x.itemsize)
    copy = Copy(
        kernel=kernel,
        grid=(blocks, 1, min(math.prod(extents), _MAX_GRID_Z)),
        numbers=(row, col, *x.batch, pitch, rows, cols, *extents),
        offset=offset,
        size=math.prod(extents) * rows * pitch * x.itemsize,
    )
    matrix = rows * pitch
    steps = (matrix * extents[1] * extents[2], matrix * extents[2], matrix)
    batch = [step if n > 1 else 0 for step, n in zip(steps, extents, strict=True)]
    return copy, ((pitch, 1) if k_major else (1, pitch)), batch


@dataclass(frozen=True)
class Repacked:
    """A product whose operands, by their index, are copied before into a workspace, one after the other."""

    copies: dict[int, Copy]
    product: object  # what runs on the copies
    workspace: Callable[[], tuple]  # the array and its address

    def run(self, operands: tuple, addresses: list, alpha: tuple, beta: tuple) -> None:
        _kept, workspace = self.workspace()
        addresses = list(addresses)
        for index, copy in self.copies.items():
            addresses[index] = copy.run(addresses[index], workspace)
        self.product.run(operands, addresses, alpha, beta)
