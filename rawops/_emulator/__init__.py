"""An emulator of NVIDIA GPUs that executes PTX on NumPy.

It takes the PTX of a kernel and NumPy arrays, runs every thread of the grid, checks what hardware does not
check (bounds, races, uninitialised shared memory, barriers) and reports memory traffic by source line.
"""

from __future__ import annotations

from .launch import Dim3, Launch
from .memory import GlobalMemory
from .parser import parse
from .program import Program
from .report import Counters, LaunchReport

__all__ = ["Counters", "GlobalMemory", "LaunchReport", "Program", "emulate_launch", "parse"]


def emulate_launch(
    program: Program,
    grid: Dim3,
    block: Dim3,
    params: bytes,
    *,
    memory: GlobalMemory,
    shared_bytes: int = 0,
    check: bool = True,
    completion: str = "late",
    seed: int = 0,
    kernel_name: str | None = None,
    resident_lanes: int = 4096,
    max_steps: int = 50_000_000,
) -> LaunchReport:
    """Run a kernel.

    Parameters
    ----------
    program : Program
        From `parse`.
    grid, block : tuple of three ints
        Blocks of the grid, threads of a block.
    params : bytes
        The packed parameters, laid out as the entry's ``.param`` list says (natural alignment). Pointers
        are addresses from ``memory.map(array)``.
    memory : GlobalMemory
        The device's memory, kept from launch to launch.
    shared_bytes : int
        Dynamic shared memory of a block.
    check : bool
        Raise on races, uninitialised shared reads and barriers that not all threads reach, and count memory
        traffic. Out-of-bounds and misaligned accesses always raise.
    completion : {"late", "early", "random"}
        When asynchronous copies and matrix products complete: as late as the program allows, at issue, or
        late with the order of warps drawn from `seed`. A right kernel gives the same bits in all three.
    kernel_name : str, optional
        What messages call the kernel; by default the entry's name.
    resident_lanes : int
        About how many threads are executed together. A speed matter only: blocks that wait for each other
        through global memory get on whatever it is.
    max_steps : int
        Instructions, executed for a group of threads each, after which the launch is taken for one that never
        ends. The default is minutes of emulation.

    Raises
    ------
    MemoryFault, RaceError, UninitializedRead, BarrierError, UnsupportedPTX, EmulatorError
        With kernel, source line, block and thread in the message.
    """
    if completion not in ("late", "early", "random"):
        raise ValueError(f"emulate_launch: completion must be 'late', 'early' or 'random', got {completion!r}")
    launch = Launch(
        program,
        tuple(grid),
        tuple(block),
        params,
        memory=memory,
        shared_bytes=shared_bytes,
        check=check,
        completion=completion,
        seed=seed,
        kernel_name=kernel_name or program.entry.name,
        resident_lanes=resident_lanes,
        max_steps=max_steps,
    )
    return launch.run()
