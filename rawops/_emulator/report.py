"""What a launch did: instructions, memory traffic, bank conflicts, divergence, by source line."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from .instructions import kind_of

if TYPE_CHECKING:
    from .context import Context
    from .program import Program

_SECTOR = 32
_KEY_SHIFT = 48  # warp numbers stand above addresses in sort keys


@dataclass(slots=True)
class Counters:
    """Counts of one instruction, of one source line, or of a whole launch.

    Attributes
    ----------
    instructions : int
        Warp instructions executed.
    global_requests, global_sectors, global_bytes : int
        Warp-wide accesses to global memory, 32-byte sectors they touched, different bytes they asked for.
    shared_requests, shared_conflicts : int
        Warp-wide accesses to shared memory, and the extra cycles their bank conflicts cost.
    divergent : int
        Branches at which a warp split.
    """

    instructions: int = 0
    global_requests: int = 0
    global_sectors: int = 0
    global_bytes: int = 0
    shared_requests: int = 0
    shared_conflicts: int = 0
    divergent: int = 0

    def add(self, other: Counters) -> None:
        """Add another's counts."""
        self.instructions += other.instructions
        self.global_requests += other.global_requests
        self.global_sectors += other.global_sectors
        self.global_bytes += other.global_bytes
        self.shared_requests += other.shared_requests
        self.shared_conflicts += other.shared_conflicts
        self.divergent += other.divergent

    @property
    def efficiency(self) -> float:
        """Global bytes asked for over bytes moved in sectors; 1 if nothing was moved."""
        moved = self.global_sectors * _SECTOR
        return self.global_bytes / moved if moved else 1.0


class LaunchReport:
    """What one launch did.

    Memory counters are collected with ``check=True`` only; the others always.

    Attributes
    ----------
    kernel, grid, block, arch, check
        What was launched, for which architecture it was compiled, whether memory traffic was counted.
    seconds : float
        Time the emulation took.
    total : Counters
        Sums over the launch.
    lines : dict
        `Counters` by source line, ``{(file, line): Counters}``.
    instructions : dict
        Warp instructions by class ("float", "memory", "matrix", ...).
    loads, stores : Counters
        The global traffic of each direction.
    barriers : int
        Barriers completed, counted once a block.
    flops : int
        Floating-point operations of matrix instructions.
    """

    def __init__(
        self, program: Program, kernel: str, grid: tuple[int, int, int], block: tuple[int, int, int], check: bool
    ) -> None:
        self.kernel, self.grid, self.block, self.arch = kernel, grid, block, program.target
        self.check = check
        self.seconds = 0.0
        self.barriers = 0
        self.flops = 0
        self.total, self.loads, self.stores = Counters(), Counters(), Counters()
        self.lines: dict[tuple[str, int], Counters] = {}
        self.instructions: dict[str, int] = {}
        self._program = program
        self._sites: dict[int, Counters] = {}
        self._ran = np.zeros(len(program.instructions) + 1, np.int64)
        self._patterns: dict[int, tuple[np.ndarray, np.ndarray, tuple[int, ...]]] = {}

    # ---- counting ------------------------------------------------------------------------------------

    def ran(self, start: int, end: int, warps: int) -> None:
        """So many warps executed the instructions from `start` up to `end`."""
        self._ran[start] += warps
        self._ran[end] -= warps

    def diverged(self, index: int, warps: int) -> None:
        """So many warps split at a branch."""
        self._site(index).divergent += warps

    def global_access(self, ctx: Context, addresses: np.ndarray, size: int, owners: np.ndarray, write: bool) -> None:
        """Count the sectors that an access touches."""
        base = addresses.min() & np.uint64(0xFFFFFFFFFFFFFFE0)
        requests, sectors, asked = self._pattern(ctx, addresses - base, size, owners, _coalescing)
        for counters in (self._site(ctx.current.index), self.stores if write else self.loads):
            counters.global_requests += requests
            counters.global_sectors += sectors
            counters.global_bytes += asked

    def shared_access(self, ctx: Context, addresses: np.ndarray, size: int, owners: np.ndarray) -> None:
        """Count the bank conflicts of an access."""
        base = addresses.min() & np.uint64(0xFFFFFFFFFFFFFFFC)
        requests, extra = self._pattern(ctx, addresses - base, size, owners, _conflicts)
        counters = self._site(ctx.current.index)
        counters.shared_requests += requests
        counters.shared_conflicts += extra

    def _pattern(
        self, ctx: Context, relative: np.ndarray, size: int, owners: np.ndarray, count: Any
    ) -> tuple[int, ...]:
        """`count`, remembered: in a loop an instruction mostly repeats its pattern, moved by a constant."""
        index = ctx.current.index
        known = self._patterns.get(index)
        if known is not None and known[1] is owners and np.array_equal(known[0], relative):
            return known[2]
        result = count(ctx, relative, size, owners)
        self._patterns[index] = relative, owners, result
        return result

    def _site(self, index: int) -> Counters:
        site = self._sites.get(index)
        if site is None:
            site = self._sites[index] = Counters()
        return site

    # ---- summing up ----------------------------------------------------------------------------------

    def finish(self, seconds: float) -> None:
        """Sum the counts up by line and class."""
        self.seconds = seconds
        self._patterns.clear()
        executed = np.cumsum(self._ran[:-1])
        kinds, lines = _classes(self._program)
        self.instructions.update(kinds.sums(executed))
        self.lines.update((line, Counters(count)) for line, count in lines.sums(executed).items())
        for index, site in self._sites.items():
            place = self._program.instructions[index].place
            self.lines[place.file, place.line].add(site)
        for counters in self.lines.values():
            self.total.add(counters)

    def table(self) -> list[dict[str, Any]]:
        """One row a source line, the costliest first, as plain dictionaries."""
        names = [item.name for item in fields(Counters)]
        rows = [
            {"file": file, "line": line, **{name: getattr(counters, name) for name in names}}
            for (file, line), counters in self.lines.items()
        ]
        return sorted(rows, key=lambda row: -row["instructions"])

    def __str__(self) -> str:
        total = self.total
        classes = ", ".join(f"{kind} {n}" for kind, n in sorted(self.instructions.items(), key=lambda i: -i[1]))
        moved = shared = "not counted without check=True"
        if self.check:
            moved = (
                f"{total.global_requests} requests, {total.global_sectors} sectors, "
                f"{total.efficiency:.0%} of the bytes moved were asked for"
            )
            shared = f"{total.shared_requests} requests, {total.shared_conflicts} extra cycles for bank conflicts"
        return "\n".join(
            (
                f"{self.kernel} grid {self.grid} block {self.block} {self.arch}: {self.seconds:.3f} s emulated",
                f"  warp instructions   {total.instructions} ({classes})",
                f"  global memory       {moved}",
                f"  shared memory       {shared}",
                f"  divergent branches  {total.divergent}",
                f"  barriers            {self.barriers}",
                f"  tensor-core FLOPs   {self.flops}",
            )
        )


class _Labels:
    """A label for each instruction of a program, to sum counts up by."""

    def __init__(self, labels: list[Any]) -> None:
        self._labels = list(dict.fromkeys(labels))
        numbers = {label: number for number, label in enumerate(self._labels)}
        self._numbers = np.array([numbers[label] for label in labels])

    def sums(self, counts: np.ndarray) -> dict[Any, int]:
        """The sum of the instructions' counts by label, where it is not 0."""
        sums = np.bincount(self._numbers, counts)
        return {self._labels[number]: int(sums[number]) for number in np.flatnonzero(sums).tolist()}


@lru_cache(64)
def _classes(program: Program) -> tuple[_Labels, _Labels]:
    """The class and the source line of every instruction."""
    code = program.instructions
    return _Labels([kind_of(ins) for ins in code]), _Labels([(ins.place.file, ins.place.line) for ins in code])


def _coalescing(ctx: Context, relative: np.ndarray, size: int, owners: np.ndarray) -> tuple[int, ...]:
    """Warp requests, sectors and different bytes of an access."""
    keys = (ctx.warp_of.take(owners).astype(np.uint64) << np.uint64(_KEY_SHIFT)) + relative
    keys.sort()
    fresh = np.ones(len(keys), bool)

    def distinct(values: np.ndarray) -> int:
        np.not_equal(values[1:], values[:-1], out=fresh[1:])
        return int(np.count_nonzero(fresh))

    asked = distinct(keys) * size
    sectors = distinct(keys >> np.uint64(5))
    return distinct(keys >> np.uint64(_KEY_SHIFT)), sectors, asked


def _conflicts(ctx: Context, relative: np.ndarray, size: int, owners: np.ndarray) -> tuple[int, ...]:
    """Warp requests, and extra cycles: in each phase, different words in the fullest bank minus one.

    Accesses of 8 and 16 bytes are made in half and quarter warps.
    """
    phase_lanes = 32 if size <= 4 else 128 // size
    phases = (owners // phase_lanes).astype(np.uint64)
    words = (phases << np.uint64(_KEY_SHIFT)) + (relative >> np.uint64(2))
    if size > 4:
        words = (words[:, None] + np.arange(size // 4, dtype=np.uint64)).ravel()
    words.sort()
    fresh = np.concatenate(([True], words[1:] != words[:-1]))
    words = words[fresh]
    phase = (words >> np.uint64(_KEY_SHIFT)).astype(np.intp)
    bank = (words & np.uint64(31)).astype(np.intp)
    load = np.bincount(phase * 32 + bank, minlength=32 * (int(phase[-1]) + 1)).reshape(-1, 32).max(axis=1)
    warps = phase * phase_lanes // 32  # ascending
    requests = 1 + int(np.count_nonzero(warps[1:] != warps[:-1]))
    return requests, int(np.maximum(load - 1, 0).sum())
