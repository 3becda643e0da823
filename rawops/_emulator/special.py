"""Special registers: where a thread is, and what time it is."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from ..errors import UnsupportedPTX

if TYPE_CHECKING:
    from .context import Context

_AXES = {"x": 0, "y": 1, "z": 2}
SM_COUNT = 132


def is_volatile(name: str) -> bool:
    """Whether the register has to be looked up at every read: it may change while a block runs, or by launch."""
    return name.startswith(("clock", "globaltimer", "nctaid", "nclusterid"))


def special_register(ctx: Context, name: str) -> np.ndarray | int:
    """The register's value for every lane (uint32, uint64 for 64-bit ones), or one for all.

    Arrays that depend on the block stay up to date from batch to batch.
    """
    base, _, axis = name.partition(".")
    if axis in _AXES:
        return _vector(ctx, name, base, _AXES[axis])
    launch = ctx.launch
    lane = ctx.lane_of.astype(np.uint32)
    match name:
        case "laneid":
            return lane
        case "warpid":
            return (ctx.warp_of % ctx.W).astype(np.uint32)
        case "nwarpid":
            return 64
        case "lanemask_eq":
            return np.uint32(1) << lane
        case "lanemask_lt":
            return (np.uint32(1) << lane) - np.uint32(1)
        case "lanemask_le":
            return (np.uint32(2) << lane) - np.uint32(1)
        case "lanemask_gt":
            return ~((np.uint32(2) << lane) - np.uint32(1))
        case "lanemask_ge":
            return ~((np.uint32(1) << lane) - np.uint32(1))
        case "smid":
            return ctx.smid
        case "nsmid":
            return SM_COUNT
        case "gridid":
            return 0
        case "clock" | "clock64" | "clock_hi" | "globaltimer" | "globaltimer_lo" | "globaltimer_hi":
            launch.steps += 1
            return _time(launch.steps, name)
        case "dynamic_smem_size":
            return launch.dynamic_shared
        case "total_smem_size" | "aggr_smem_size":
            return ctx.shared.size
        case "cluster_ctarank":
            return (ctx.block_of % ctx.cluster_size).astype(np.uint32)
        case "cluster_nctarank":
            return ctx.cluster_size
        case "is_explicit_cluster":
            return int(ctx.cluster_size > 1)
        case "WARP_SZ":
            return 32
    raise ctx.error(UnsupportedPTX, f"the emulator does not know the special register %{name}")


def _vector(ctx: Context, name: str, base: str, axis: int) -> np.ndarray | int:
    launch = ctx.launch
    match base:
        case "tid":
            return launch.thread_coordinates(ctx.thread_of)[axis].astype(np.uint32)
        case "ntid":
            return launch.block[axis]
        case "ctaid":
            return ctx.ctaid[axis]
        case "nctaid":
            return launch.grid[axis]
        case "clusterid":
            return ctx.clusterid[axis]
        case "nclusterid":
            return launch.grid[axis] // launch.cluster[axis]
        case "cluster_ctaid":
            rank = ctx.block_of % ctx.cluster_size
            x, y, _ = launch.cluster
            return (rank % x, rank // x % y, rank // (x * y))[axis].astype(np.uint32)
        case "cluster_nctaid":
            return launch.cluster[axis]
    raise ctx.error(UnsupportedPTX, f"the emulator does not know the special register %{name}")


def _time(steps: int, name: str) -> int:
    """Clocks count executed instructions: they advance, and are the same in every run."""
    value = time.time_ns() if name.startswith("globaltimer") else steps
    if name.endswith("_hi"):
        return value >> 32
    return value & 0xFFFFFFFF if name in ("clock", "globaltimer_lo") else value
