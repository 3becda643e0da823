"""Clusters: addresses of other blocks' shared memory, and the cluster barrier."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..lanes import Lanes, Wait
from ..shared import RANK_SHIFT
from ..spaces import WINDOWS
from . import Run, instruction, options
from .mbarrier import clock_of

if TYPE_CHECKING:
    from ..context import Context
    from ..program import Instruction

_OFFSET = np.uint64((1 << RANK_SHIFT) - 1)


@instruction("mapa", kind="integer")
def mapa(ins: Instruction, ctx: Context) -> Run:
    """The address of a shared variable in the block of a rank; generic unless the opcode names the space."""
    given = options(ins, "shared::cluster u32 u64")
    kind = ins.opcode[-1]
    window = np.uint64(0 if "shared::cluster" in given else WINDOWS["shared"])
    put, rank = ctx.writer(ins.operands[0], kind), ctx.reader(ins.operands[2], "u32")
    address = ctx.reader(ins.operands[1], kind)

    def run(lanes: Lanes) -> None:
        offset = np.asarray(address(lanes)).astype(np.uint64) & _OFFSET
        named = np.asarray(rank(lanes)).astype(np.uint64) + np.uint64(1)
        put(lanes, (named << np.uint64(RANK_SHIFT) | offset | window).astype(kind.replace("u", "uint")))

    return run


@instruction("getctarank", kind="integer")
def getctarank(ins: Instruction, ctx: Context) -> Run:
    """The rank of the block that a shared address belongs to."""
    options(ins, "shared::cluster u32 u64")
    put, address = ctx.writer(ins.operands[0], "u32"), ctx.reader(ins.operands[1], ins.opcode[-1])

    def run(lanes: Lanes) -> None:
        named = np.broadcast_to(address(lanes), lanes.n).astype(np.uint64) >> np.uint64(RANK_SHIFT) & np.uint64(0xFF)
        own = (ctx.block_of[lanes.ids] % ctx.cluster_size).astype(np.uint32)
        put(lanes, np.where(named > 0, named - np.uint64(1), own).astype(np.uint32))

    return run


class _ClusterBarrier:
    """The barrier of each resident cluster: phases, lanes that have arrived, the phase each lane waits for."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self.cluster_of = ctx.block_of // ctx.cluster_size
        count = ctx.R // ctx.cluster_size
        self.phase = np.zeros(count, np.int64)
        self.arrived = np.zeros(ctx.L, bool)
        self.mine = np.zeros(ctx.L, np.int64)
        self.clocks = self.released = None
        if ctx.races is not None:
            self.clocks = np.zeros((count, ctx.races.columns), np.int64)
            self.released = self.clocks.copy()
            self.inits, self.released_inits = self.clocks.copy(), self.clocks.copy()  # see Clocks.fence_inits

    def arrive(self, lanes: Lanes, release: bool) -> None:
        clusters = self.cluster_of[lanes.ids]
        self.arrived[lanes.ids] = True
        self.mine[lanes.ids] = self.phase[clusters]
        races = self._ctx.races
        if races is not None:
            agents, first = np.unique(races.agent_of[lanes.ids], return_index=True)
            self.inits[clusters[first], races.column(agents)] = races.inits_fenced[agents]
            for agent, cluster in zip(agents, clusters[first], strict=True):
                if release:
                    clock = clock_of(self._ctx, np.array([agent]))
                    np.maximum(self.clocks[cluster], clock, out=self.clocks[cluster])
        self.turn()

    def turn(self) -> None:
        """Open the barrier of each cluster all of whose living lanes have arrived."""
        missing = np.unique(self.cluster_of[self._ctx.alive & ~self.arrived])
        done = np.setdiff1d(np.unique(self.cluster_of[self.arrived]), missing)
        if not len(done):
            return
        self.phase[done] += 1
        self.arrived[np.isin(self.cluster_of, done)] = False
        self._ctx.launch.report.barriers += len(done) * self._ctx.cluster_size
        if self._ctx.races is not None:
            self.released[done], self.released_inits[done] = self.clocks[done], self.inits[done]
            self.clocks[done] = 0

    def passed(self, lanes: Lanes) -> np.ndarray:
        self.turn()  # lanes that exited have arrived
        return self.phase[self.cluster_of[lanes.ids]] > self.mine[lanes.ids]

    def acquire(self, lanes: Lanes) -> None:
        if self._ctx.races is not None:
            agents, first = np.unique(self._ctx.races.agent_of[lanes.ids], return_index=True)
            clusters = self.cluster_of[lanes.ids[first]]
            self._ctx.races.acquire(agents, self.released[clusters])
            self._ctx.races.inits_seen[agents] = self.released_inits[clusters]

    def missing(self, lanes: Lanes) -> int:
        cluster = self.cluster_of[lanes.ids[0]]
        return int(np.count_nonzero(self._ctx.alive & ~self.arrived & (self.cluster_of == cluster)))


@instruction("barrier.cluster", kind="barrier")
def barrier_cluster(ins: Instruction, ctx: Context) -> Run:
    """Arrive at the barrier of the cluster, or wait for it."""
    given = options(ins, "cluster arrive wait release relaxed acquire aligned")

    def barrier() -> _ClusterBarrier:
        return ctx.state("cluster", lambda: _ClusterBarrier(ctx))

    def arrive(lanes: Lanes) -> None:
        barrier().arrive(lanes, "relaxed" not in given)

    def wait(lanes: Lanes) -> list[Wait] | None:
        state = barrier()
        passed = state.passed(lanes)
        if passed.any():
            state.acquire(lanes.select(passed))
        if passed.all():
            return None

        def why(waiting: Lanes) -> str:
            return f"the cluster barrier ({state.missing(waiting)} threads have not arrived)"

        return [Wait(lanes.select(~passed), state.passed, why, state.acquire)]

    return arrive if "arrive" in given else wait
