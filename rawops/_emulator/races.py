"""Who has seen whose accesses: vector clocks over warps, and the shadow of shared memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ..errors import RaceError, UninitializedRead

if TYPE_CHECKING:
    from .context import Context
    from .program import Place

_NEVER = 1 << 30  # later than any tick: "has done nothing there is to see"

# A stamp is time << 32 | strong | author. The author is a lane, or a copy engine on behalf of one: see `Clocks.engine`.
# Stamp 0 is "never".
_STRONG = np.uint64(1 << 31)  # atomic, volatile, relaxed, acquire or release
_SHIFT = np.uint64(32)
_WHOLE = np.uint64(0xFFFFFFFF)
_ONE = np.uint64(1)
_PENDING = np.uint64(0x7FFFFFFF << 32)  # time of a copy that has been issued and not waited for


class Clocks:
    """Happens-before between the warps of a cluster.

    Time is one counter for all: every shared access takes the next tick. ``seen[agent, column]`` is the
    time up to which what the agent of that column did is ordered before anything `agent` does from now on;
    an access at time t by agent b does not race with a later one by agent a if ``t <= seen[a, b]``.

    Each block has W + 1 agents: its warps, and one last pseudo-agent for what copy engines do on its behalf
    (TMA). Agent numbers are ``block * (W + 1) + warp_in_block``; a column is the agent's place in its
    cluster. An agent's own column holds the time of its last warp-level synchronisation, which is what
    orders different lanes of a warp.

    Attributes
    ----------
    bounds : ndarray of uint64
        `seen` as the largest stamps of those times.
    on_behalf : uint64
        What is added to a lane for the author of an access by a copy engine on its behalf: a power of two above all
        lanes.
    author_columns : ndarray of intp
        The column of each author.
    """

    def __init__(self, ctx: Context) -> None:
        self.per_block = ctx.W + 1
        self.columns = ctx.cluster_size * self.per_block
        self.agent_of = ctx.block_of * self.per_block + ctx.warp_of % ctx.W
        self.column_of = self.column(self.agent_of)
        self.now = 0
        self._ctx = ctx
        agents = np.arange(ctx.R * self.per_block)
        self._is_warp = agents % self.per_block != ctx.W
        columns = np.arange(self.columns)
        self._own_block = (columns // self.per_block) == (self.column(agents) // self.per_block)[:, None]
        self.seen = np.zeros((len(agents), self.columns), np.int64)
        self.bounds = np.zeros(self.seen.shape, np.uint64)
        self.on_behalf = np.uint64(1 << ctx.L.bit_length())
        self.author_columns = np.zeros(2 * int(self.on_behalf), np.intp)
        self.author_columns[: ctx.L] = self.column_of
        self.author_columns[int(self.on_behalf) :][: ctx.L] = self.column(self.engine(ctx.block_of))
        self.limit = np.zeros(len(agents), np.uint64)
        self.lowest = np.uint64(0)
        self.fenced = np.zeros(len(agents), np.int64)
        self.inits_fenced = np.zeros(len(agents), np.int64)
        self.inits_seen = np.zeros((len(agents), self.columns), np.int64)  # as `seen`, of mbarrier.init alone
        self._proxy_fenced = np.zeros(ctx.L, np.int64)
        self.reset()

    def reset(self) -> None:
        """A new batch: everything done so far is seen by all; engines have done nothing."""
        self.foreign = self.any_fence = False
        self._first, self._indices = self.now, [0]  # which instruction took each tick since then
        self.fenced[:] = self.now
        self.seen[:] = self.now
        self.seen[:, ~self._is_warp[: self.columns]] = _NEVER
        self._refresh(slice(None))

    def tick(self) -> int:
        """The time of a new access by the current instruction."""
        self.now += 1
        self._indices.append(self._ctx.current.index)
        return self.now

    def place(self, time: int) -> Place:
        """The source line of the access that took a tick in this batch."""
        return self._ctx.program.instructions[self._indices[time - self._first]].place

    def agents(self, warps: np.ndarray) -> np.ndarray:
        """Agent numbers of resident warps (``block * W + warp``)."""
        return warps + warps // self._ctx.W

    def engine(self, blocks: np.ndarray) -> np.ndarray:
        """The pseudo-agents of resident blocks for asynchronous copies."""
        return blocks * self.per_block + self._ctx.W

    def column(self, agents: np.ndarray) -> np.ndarray:
        """The agents' columns in `seen`."""
        return agents % self.columns

    def release(self, agents: np.ndarray) -> np.ndarray:
        """What others learn by synchronising with each agent now: shape (n, columns).

        Combine several with ``np.maximum``; all must be of one cluster for that.
        """
        clocks = self.seen[agents]
        clocks[np.arange(len(agents)), self.column(agents)] = self.now
        return clocks

    def acquire(self, agents: np.ndarray, clocks: np.ndarray) -> None:
        """The agents learn `clocks`, shape (n, columns) or (columns,). Agents must not repeat."""
        own = self.seen[agents, self.column(agents)]
        self.seen[agents] = np.maximum(self.seen[agents], clocks)
        self.seen[agents, self.column(agents)] = np.maximum(own, self.now)
        self._refresh(agents)

    def sync_warps(self, warps: np.ndarray) -> None:
        """The lanes of each warp have synchronised with each other."""
        agents = self.agents(warps)
        self.seen[agents, self.column(agents)] = self.now
        self._refresh(agents)

    def act(self, agents: np.ndarray) -> None:
        """Engines are about to write: what they do has to be acquired from now on."""
        for agent in np.unique(agents):
            column = int(self.column(agent))
            rows = slice(agent - column, agent - column + self.columns)
            if self.seen[agent, column] == _NEVER:
                self.seen[rows, column] = self.now
                self._refresh(rows)

    def fence(self, agents: np.ndarray) -> None:
        """A fence: strong writes of these agents publish from now on what came before."""
        self.fenced[agents] = self.now
        self.any_fence = True

    def fence_inits(self, agents: np.ndarray) -> None:
        """A fence.mbarrier_init: the cluster barrier publishes, even by relaxed arrivals, which barriers are made."""
        self.inits_fenced[agents] = self.now

    def proxy_fence(self, ids: np.ndarray) -> None:
        """The lanes' ordinary writes so far may be read by copy engines and wgmma."""
        self._proxy_fenced[ids] = self.now

    def proxy_fenced(self, ids: np.ndarray) -> np.ndarray:
        """The time of each lane's last proxy fence."""
        return self._proxy_fenced[ids]

    def reaches_out(self) -> None:
        """Some block accesses another's shared memory: order has to be known across the cluster."""
        if not self.foreign:
            self.foreign = True
            self._refresh(slice(None))

    def _refresh(self, rows: slice | np.ndarray) -> None:
        """Recompute the limits: stamps up to `limit[agent]` are ordered before it whoever made them."""
        seen = self.seen[rows]
        self.bounds[rows] = (seen.view(np.uint64) << _SHIFT) | _WHOLE
        if not self.foreign and self.columns > self.per_block:
            seen = np.where(self._own_block[rows], seen, _NEVER)
        self.limit[rows] = (seen.min(axis=1).astype(np.uint64) << _SHIFT) | _WHOLE
        self.lowest = self.limit[self._is_warp].min()


class Shadow:
    """Last write and last reads of every granule of shared memory, and the rules on them.

    The granule is the smallest access the program makes to shared memory, so wide accesses of programs
    without narrow ones cost no more than narrow ones. Of several lanes of a warp that read a granule only
    one is remembered: a later write by another lane of that warp may go unreported, never the reverse.
    """

    def __init__(self, ctx: Context, clocks: Clocks, nbytes: int, granule: int) -> None:
        self._ctx = ctx
        self._clocks = clocks
        self._granule = granule
        self._writes = np.zeros(nbytes // granule, np.uint64)
        self._last_read = np.zeros_like(self._writes)
        self._reads = np.zeros((clocks.columns, nbytes // granule), np.uint64)
        self._engine, self._authors = clocks.on_behalf, np.uint64(2 * int(clocks.on_behalf) - 1)
        self._published: dict[int, np.ndarray] = {}

    def reset(self) -> None:
        """All of shared memory is uninitialised again."""
        self._writes[:] = 0
        self._published.clear()

    def read(self, index: np.ndarray, size: int, owners: np.ndarray, strong: bool, cross_proxy: bool = False) -> None:
        """Lanes read the elements `index` of `size` bytes: refuse what is unwritten or unordered.

        With `cross_proxy` a copy engine or wgmma reads for them: refuse what its writer has not fenced since, too.
        """
        clocks = self._clocks
        index, k = self._rows(index, size)
        if strong and self._published:
            self._acquire(index * k, owners)
        stamps = _wide(self._writes, k).take(index, axis=0)
        # One unsigned comparison: 0 (never written) wraps round to the largest value.
        if not (stamps - _ONE < clocks.lowest).all():
            self._examine(stamps.reshape(-1, k), owners, strong, "read")
        if cross_proxy:
            self._refuse_unfenced(stamps.ravel(), owners, k)
        stamp = self._stamp(owners, strong, k)
        rows = clocks.column_of.take(owners) * (len(self._writes) // k) + index
        _wide(self._reads.ravel(), k)[rows] = stamp
        _wide(self._last_read, k)[index] = stamp

    def write(
        self,
        index: np.ndarray,
        size: int,
        owners: np.ndarray,
        strong: bool,
        unchanged: Callable[[], np.ndarray] | None = None,
    ) -> np.ndarray:
        """Lanes write: refuse what is unordered. Returns which lanes lost to another of this instruction.

        `unchanged` says which lanes write what is there already: an earlier write is then no conflict.
        """
        clocks = self._clocks
        index, k = self._rows(index, size)
        self._check_write(index, k, owners, strong, unchanged)
        stamp = self._stamp(owners, strong, k)
        view = _wide(self._writes, k)
        view[index] = stamp
        if strong and clocks.any_fence:
            self._publish(index * k, owners)
        lost = view.take(index, axis=0) != stamp
        return lost if k == 1 else lost[:, 0]

    def _refuse_unfenced(self, stamps: np.ndarray, owners: np.ndarray, k: int) -> None:
        if np.bitwise_and.reduce(stamps) & self._engine:
            return  # all of it was brought by engines
        lanes = self._lanes(stamps)
        unfenced = (stamps >> _SHIFT).astype(np.int64) > self._clocks.proxy_fenced(lanes)
        unfenced &= (stamps & self._engine) == 0
        if unfenced.any():
            at = np.flatnonzero(unfenced)[0]
            place = self._clocks.place(int(stamps[at] >> _SHIFT))
            raise self._ctx.error(
                RaceError,
                f"the async proxy reads shared memory that {self._ctx.who(lanes[at])} wrote at {place} "
                "without a fence.proxy.async after it",
                owners[at // k],
            )

    def pend(self, index: np.ndarray, size: int, owners: np.ndarray) -> None:
        """An asynchronous copy will write: checked like a write now, unreadable until it lands."""
        index, k = self._rows(index, size)
        self._check_write(index, k, owners, False)
        self._clocks.tick()
        stamp = owners.view(np.uint64) | _PENDING
        _wide(self._writes, k)[index] = stamp if k == 1 else stamp[:, None]

    def land(self, index: np.ndarray, size: int, owners: np.ndarray, engine: bool) -> None:
        """The copy has been made, by the owners themselves or by an engine for them."""
        index, k = self._rows(index, size)
        if engine:
            self._clocks.act(self._clocks.engine(np.unique(self._ctx.block_of[owners])))
        stamp = self._stamp(owners, False, k)
        _wide(self._writes, k)[index] = stamp | self._engine if engine else stamp

    def _rows(self, index: np.ndarray, size: int) -> tuple[np.ndarray, int]:
        """Element indices as rows of k granules each; an access smaller than a granule counts as one."""
        if size >= self._granule:
            return index, size // self._granule
        return index * size // self._granule, 1

    def _stamp(self, owners: np.ndarray, strong: bool, k: int) -> np.ndarray:
        base = np.uint64(self._clocks.tick() << 32)
        stamp = owners.view(np.uint64) | (base | _STRONG if strong else base)
        return stamp if k == 1 else stamp[:, None]

    def _check_write(
        self,
        index: np.ndarray,
        k: int,
        owners: np.ndarray,
        strong: bool,
        unchanged: Callable[[], np.ndarray] | None = None,
    ) -> None:
        lowest = self._clocks.lowest
        stamps = _wide(self._writes, k).take(index, axis=0)
        if not (stamps <= lowest).all():
            changed = ~unchanged() if unchanged is not None else slice(None)
            self._examine(stamps.reshape(-1, k)[changed], owners[changed], strong, "write")
        stamps = _wide(self._last_read, k).take(index, axis=0)
        if not (stamps <= lowest).all():
            self._examine_readers(stamps.reshape(-1, k), index, owners, strong)

    def _examine(self, stamps: np.ndarray, owners: np.ndarray, strong: bool, access: str) -> None:
        """Look closely at earlier writes that are not ordered for everybody."""
        clocks = self._clocks
        columns = clocks.author_columns.take((stamps & self._authors).view(np.int64))
        columns += (clocks.agent_of.take(owners) * clocks.columns)[:, None]
        bounds = clocks.bounds.take(columns)  # of each lane for each author
        ordered = stamps - _ONE < bounds if access == "read" else stamps <= bounds
        if ordered.all():
            return
        row, col = np.nonzero(~ordered)
        stamps, owners = stamps[row, col], owners[row]
        if access == "read":
            self._refuse_unwritten(stamps, owners)
        elif (stamps >= _PENDING).any():
            self._report(stamps, owners, np.flatnonzero(stamps >= _PENDING)[0], access, "a pending copy by")
        ordered = (stamps & self._authors).view(np.int64) == owners  # and no engine's
        if strong:
            ordered |= (stamps & _STRONG) != 0
        if not ordered.all():
            self._report(stamps, owners, np.flatnonzero(~ordered)[0], access, "a write by")

    def _refuse_unwritten(self, stamps: np.ndarray, owners: np.ndarray) -> None:
        for bad, what in (
            (stamps == 0, "read of shared memory that nothing was written to"),
            (stamps >= _PENDING, "read of an asynchronous copy not yet waited for"),
        ):
            if bad.any():
                raise self._ctx.error(UninitializedRead, what, owners[np.flatnonzero(bad)[0]])

    def _examine_readers(self, stamps: np.ndarray, index: np.ndarray, owners: np.ndarray, strong: bool) -> None:
        """Look closely at earlier reads that are not ordered for everybody."""
        clocks = self._clocks
        limit = clocks.limit.take(clocks.agent_of.take(owners))[:, None]
        row, col = np.nonzero(stamps > limit)
        if not len(row):
            return
        owners = owners[row]
        reads = self._reads.take(index[row] * stamps.shape[1] + col, axis=1)  # (columns, accesses)
        agents = clocks.agent_of[owners]
        one = agents[:1] if (agents == agents[0]).all() else agents
        ordered = reads <= clocks.bounds[one].T
        if ordered.all():
            return
        ordered |= self._lanes(reads) == owners
        if strong:
            ordered |= (reads & _STRONG) != 0
        if not ordered.all():
            access, column = np.argwhere(~ordered.T)[0]
            self._report(reads[column], owners, access, "write", "a read by")

    def _report(self, stamps: np.ndarray, owners: np.ndarray, at: int, access: str, what: str) -> None:
        """Raise the race of `owners[at]` with the access that made `stamps[at]`."""
        ctx, stamp = self._ctx, int(stamps[at])
        time, lane = stamp >> 32, int(self._lanes(stamps[at]))
        place = f" at {self._clocks.place(time)}" if time <= self._clocks.now else ""
        raise ctx.error(
            RaceError,
            f"{access} of shared memory races with {what} {ctx.who(lane)}{place}: nothing orders the two",
            owners[at],
        )

    def _publish(self, granules: np.ndarray, owners: np.ndarray) -> None:
        """A strong write after a fence: whoever reads it strongly learns what the fence ordered."""
        clocks = self._clocks
        keys, first = np.unique(granules, return_index=True)
        agents = clocks.agent_of[owners[first]]
        published = clocks.seen[agents]
        published[np.arange(len(agents)), clocks.column(agents)] = clocks.fenced[agents]
        for key, learned in zip(keys.tolist(), published, strict=True):
            old = self._published.get(key)
            self._published[key] = learned if old is None else np.maximum(old, learned)

    def _acquire(self, granules: np.ndarray, owners: np.ndarray) -> None:
        """A strong read: learn what was published there."""
        clocks = self._clocks
        agents = clocks.agent_of[owners]
        for key in np.unique(granules).tolist():
            learned = self._published.get(key)
            if learned is not None:
                clocks.acquire(np.unique(agents[granules == key]), learned)

    def _lanes(self, stamps: np.ndarray) -> np.ndarray:
        """The lanes that made the accesses, or had engines make them."""
        return (stamps & (self._engine - _ONE)).astype(np.intp)


def _wide(granules: np.ndarray, k: int) -> np.ndarray:
    """Granules in rows of k; a row of one is left a scalar, which NumPy gathers faster."""
    return granules if k == 1 else granules.reshape(-1, k)
