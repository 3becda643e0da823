"""GPUs on paper: what an SM has room for, and how fast a board can be; and the arithmetic on these."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rawops._runtime.checks import fail

_WARP = 32
_REGISTERS = 65536  # of an SM
_REGISTER_STEP = 256  # in which a warp's are given out
_RESERVED_SHARED = 1024  # of every block, for the driver


@dataclass(frozen=True)
class Limits:
    """What an SM, and a block on it, has at most (CUDA programming guide, table of compute capabilities)."""

    threads: int
    blocks: int
    shared_bytes: int
    shared_bytes_a_block: int


LIMITS = {
    80: Limits(2048, 32, 164 << 10, 163 << 10),
    86: Limits(1536, 16, 100 << 10, 99 << 10),
    89: Limits(1536, 24, 100 << 10, 99 << 10),
    90: Limits(2048, 32, 228 << 10, 227 << 10),
    100: Limits(2048, 32, 228 << 10, 227 << 10),
    120: Limits(1536, 24, 100 << 10, 99 << 10),
}


def arch_name(capability: int) -> str:
    """Return NVRTC's name of a compute capability, with the architecture's own instructions where it has some."""
    return f"sm_{capability}a" if capability >= 90 else f"sm_{capability}"


@dataclass(frozen=True)
class Board:
    """A board by its datasheet, without sparsity.

    Attributes
    ----------
    bandwidth : float
        Bytes a second; 0 where it is not known, as for an architecture without a board.
    operations : dict
        Operations a second by precision.
    """

    name: str
    arch: str
    sm_count: int
    bandwidth: float
    operations: dict

    @property
    def capability(self) -> int:
        return int(self.arch.removeprefix("sm_").removesuffix("a"))

    @property
    def limits(self) -> Limits:
        return LIMITS[self.capability]


def _operations(half: float, tf32: float, single: float, double: float, eight: float | None) -> dict:
    peaks = {"float16": half, "bfloat16": half, "tf32": tf32, "float32": single, "float64": double}
    if eight is not None:
        peaks |= dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "int8"), eight)
    return {name: tera * 1e12 for name, tera in peaks.items()}


BOARDS = {
    board.name: board
    for board in (
        Board("H200", "sm_90a", 132, 4.8e12, _operations(989, 495, 67, 67, 1979)),
        Board("H100", "sm_90a", 132, 3.35e12, _operations(989, 495, 67, 67, 1979)),
        Board("A100", "sm_80", 108, 2.039e12, _operations(312, 156, 19.5, 19.5, None) | {"int8": 624e12}),
        Board("L40S", "sm_89", 142, 0.864e12, _operations(362, 183, 91.6, 1.4, 733)),
    )
}


def board_of(name: str, arch: str | None = None, sm_count: int | None = None) -> Board:
    """Return a board of the table, or with another architecture one whose speeds are not known."""
    board = BOARDS[name]
    if arch is not None and arch != board.arch:
        known = [arch_name(capability) for capability in LIMITS]
        if arch not in known:
            fail(ValueError, "explain", "--arch", f"be one of {', '.join(known)}", repr(arch))
        board = Board(arch, arch, board.sm_count, 0, {})
    if sm_count is not None and sm_count < 1:
        fail(ValueError, "explain", "--sm-count", "be at least 1", sm_count)
    return replace(board, sm_count=sm_count or board.sm_count)


def blocks_on_an_sm(limits: Limits, registers: int, threads: int, shared_bytes: int) -> dict[str, int]:
    """Return how many blocks an SM has room for, by what limits them."""
    warps = -(-threads // _WARP)
    a_warp = -(-registers * _WARP // _REGISTER_STEP) * _REGISTER_STEP
    return {
        "registers": _REGISTERS // (a_warp * warps),
        "shared memory": limits.shared_bytes // (shared_bytes + _RESERVED_SHARED),
        "threads": limits.threads // (warps * _WARP),
        "blocks": limits.blocks,
    }
