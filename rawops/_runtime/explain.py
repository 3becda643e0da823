"""What `python -m rawops explain` shows of any op.

An op that can be explained has a module ``_<op>_explain.py`` with two functions: ``add_arguments(parser)`` and
``explain(options, device) -> Explanation``. The second runs the op on a `PaperDevice` and adds what it knows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rawops._runtime.boards import Board, blocks_on_an_sm
from rawops._runtime.paper import Noted


@dataclass
class Explanation:
    """A call taken apart.

    Attributes
    ----------
    title : str
        The call.
    why : list of str
        Sentences: what was decided, and for what reason.
    facts : list of tuple
        Name, value and the arithmetic that leads to it.
    candidates : list of dict
        Rows of a table: what there was to choose from, the chosen one first.
    """

    title: str
    why: list[str] = field(default_factory=list)
    facts: list[tuple[str, object, str]] = field(default_factory=list)
    candidates: list[dict] = field(default_factory=list)

    def add(self, name: str, value, how: str = "") -> None:
        self.facts.append((name, value, how))


def launch_row(launch: Noted, board: Board) -> dict:
    """Describe a launch, its resources and its occupancy."""
    r = launch.resources
    room = blocks_on_an_sm(board.limits, r.registers, launch.threads, launch.shared_bytes)
    resident = min(room.values())
    return {
        "kernel": launch.kernel.removeprefix("rawops::"),
        "grid": "x".join(map(str, launch.grid)),
        "threads": launch.threads,
        "registers": r.registers,
        "spill_bytes": r.spill_bytes,
        "shared_bytes": launch.shared_bytes,
        "blocks_per_sm": resident,
        "limited_by": min(room, key=room.get),
        "block_waves": -(-launch.blocks // (resident * board.sm_count)),
    }


def add_roofline(explanation: Explanation, board: Board, precision: str, operations: float, size: float) -> None:
    """Add the least work of a call, and how long the board needs for it at least."""
    explanation.add("operations", operations, "a multiplication and an addition for each product")
    explanation.add("bytes", size, "every operand read once, the result written once")
    peak = board.operations.get(precision)
    if not peak:
        explanation.add("floors", "unknown", f"no speed is known of {board.name} with {precision}")
        return
    compute, memory = operations / peak * 1e6, size / board.bandwidth * 1e6
    explanation.add("compute_floor_us", compute, f"{operations:.4g} / {peak:.4g} operations a second, {precision}")
    explanation.add("memory_floor_us", memory, f"{size:.4g} / {board.bandwidth:.4g} bytes a second")
    limit = "the arithmetic" if compute > memory else "the memory"
    intensity = operations / max(size, 1)  # without operands there are no operations either
    explanation.add("limited_by", limit, f"{intensity:.4g} operations a byte, balance {peak / board.bandwidth:.4g}")


def add_waves(explanation: Explanation, counts: dict[str, int], at_a_time: int, limit: str) -> None:
    """Add wave quantisation: the tiles as a product of `counts`, of which `at_a_time` run together."""
    tiles = 1
    for n in counts.values():
        tiles *= n
    waves = -(-tiles // at_a_time)
    last = tiles - (waves - 1) * at_a_time
    explanation.add("tiles", tiles, " x ".join(f"{n} {name}" for name, n in counts.items()))
    explanation.add("tiles_at_a_time", at_a_time, limit)
    explanation.add("waves", waves, f"ceil({tiles} / {at_a_time}), {last} tiles in the last")
    explanation.add("wave_efficiency", tiles / (waves * at_a_time), f"{tiles} / ({waves} x {at_a_time})")
