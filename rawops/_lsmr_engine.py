"""The iteration of LSMR as launches, and the loop that runs ahead of the device without ever making it wait.

An iteration is the product with A, one block that finishes the norm of u and tests the last x, the product with A^H,
and the update of hbar, x and h. Iterations go out in chunks; the host reads the state of one chunk while the next one
runs. Iterations past the stop change nothing, so the result is that of the first stop whatever the size of a chunk.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from rawops._lsmr_basis import Basis
from rawops._lsmr_kernels import BEGIN, MOST_PARTIALS, SCALARS, SHORT, UPDATE, Pair, Vectors
from rawops._lsmr_operators import EmptyProduct
from rawops._lsmr_small import Small
from rawops._runtime.held import hold

# Where things lie in LsmrState of common/lsmr_state.cuh, in float64 numbers.
_STATE, _NOW, _NEXT = 81, 5, 43
_FORWARD, _ADJOINT = _NEXT + 8, _NOW + 10
_REPORT = ("istop", "itn", "normr", "normar", "norma", "conda", "normx", "phase", "normb", "maxrbar")
_READ = [*range(_NOW, _NOW + 8), _NOW + 12, _NOW + 35]
STOPPED = 2  # a phase
HISTORY = ("normr", "normar", "norma", "conda", "normx")

_CHUNK_US = 300.0  # a chunk lasts about this long: what is launched past the stop, and how late the host hears of it
_FEWEST_ITERATIONS, _MOST_ITERATIONS = 8, 32
_SMALL_ITERATIONS = 256  # of a kernel that ends at the stop by itself
_EAGER_ITERATIONS = 32  # from then on a graph repays its capture
_PATIENCE = 6  # iterations of few columns that cost what it takes to drop the others


class Settings(NamedTuple):
    """What may differ from solve to solve; ctol is 1 / conlim, or 0."""

    damp: float
    atol: float
    btol: float
    ctol: float
    maxiter: int


class Engine:
    """LSMR for one matrix, dtype and number of right-hand sides: workspace, launches and graph.

    Parameters
    ----------
    device : Device
    product : product of _lsmr_operators.py
    dtype : dtype
        Of the vectors.
    columns : int
        Right-hand sides. With 1 all vectors are one-dimensional.
    capacity : int
        How many v are kept to orthogonalise the next one; 0 is none.
    """

    def __init__(self, device, product, dtype, columns: int = 1, capacity: int = 0) -> None:
        self.device, self.columns, self.shape, self._unbound = device, columns, product.shape, product
        self.vectors = vectors = Vectors(device, dtype, columns)
        self.product = product.bind(vectors)
        self._plain, self._share = getattr(self.product, "plain", None), getattr(self.product, "share", None)
        self._is_captured = self.product.is_captured and not device.is_emulated
        m, n = product.shape
        self.u = vectors.empty(m)
        self.v, self.x, self.h, self.hbar = (vectors.empty(n) for _ in range(4))
        self.states = device.empty((columns, _STATE), np.dtype("float64"))
        self._gate = device.empty((3,), np.dtype("float64"))
        self._forward, self._adjoint = self._pair(_FORWARD), self._pair(_ADJOINT)
        self._partials = {t: vectors.partials(self.product.num_partials(t)) for t in (False, True)}
        self._shorter = {t: vectors.partials(SHORT) for t in (False, True)}
        self._b_partials, self._x_partials = vectors.partials(vectors.blocks(m)), vectors.partials(vectors.blocks(n))
        self._basis = Basis(vectors, capacity, self.states, self.v) if capacity and n else None
        self._small = Small.of(self, product) if self._basis is None else None
        self.chunk = self._chunk()
        self.history = device.empty((self.chunk, columns, len(HISTORY)), np.dtype("float64"))
        self._reader = (_EmulatedReader if device.is_emulated else _Reader)(self.states, self.history)
        self._graph, self._eager = None, 0

    def _pair(self, offset: int) -> Pair:
        alpha, beta = self.states[:, offset], self.states[:, offset + 1]
        gate = tuple(self._gate[i : i + 1].reshape(()) for i in (0, 1))
        if self.columns == 1:
            return Pair(alpha.reshape(()), beta.reshape(()), 0, gate)
        return Pair(alpha, beta, _STATE, gate)

    def _chunk(self) -> int:
        if not self._is_captured:
            return 1
        if self._small is not None:
            return _SMALL_ITERATIONS
        us = 10.0 + self.product.nbytes * self.columns / 3e6
        return int(np.clip(_CHUNK_US / us, _FEWEST_ITERATIONS, _MOST_ITERATIONS))

    # --- launches ---------------------------------------------------------------------------------------------------

    def _apply(self, transposed: bool, x, y, scalars: Pair):
        """Multiply, and return partial sums of |y|^2 that are few enough for whoever comes next."""
        partials = self._partials[transposed]
        self.product.apply(transposed, x, y, scalars, partials)
        return self._few(transposed, partials)

    def _take_away(self, product, x):
        """Compute u -= A x."""
        if isinstance(product, EmptyProduct):
            return self._b_partials
        product.apply(False, x, self.u, self.vectors.constants(-1, 1), self._partials[False])
        return self._few(False, self._partials[False])

    def _few(self, transposed: bool, partials):
        if partials.size <= MOST_PARTIALS:
            return partials
        self.vectors.shorten(partials, self._shorter[transposed])
        return self._shorter[transposed]

    def start(self, b, x0, settings: Settings) -> None:
        """Set out from b and x0, arrays of the vectors' dtype; None is zero."""
        pointer, vectors = self.device.pointer, self.vectors
        vectors.load(b, self.u, self._b_partials)
        b_partials = u_partials = self._b_partials if self._share is None else self._share(self._b_partials)
        if x0 is not None:
            vectors.load(x0, self.x, self._x_partials)
            u_partials = self._take_away(self._plain or self.product, self.x)
        if x0 is None or self._plain is not None:
            self.x.fill(0)
        values = (pointer(self.states), *settings, pointer(b_partials), b_partials.shape[0])
        self._one_block(BEGIN, (*values, pointer(u_partials), u_partials.shape[0], pointer(self._gate)))
        vectors.combine(self._forward, None, self.u)
        self._update(self._apply(True, self.u, self.v, self._adjoint))

    def _iterate(self) -> None:
        self._scalars(self._apply(False, self.v, self.u, self._forward))
        v_partials = self._apply(True, self.u, self.v, self._adjoint)
        self._update(v_partials if self._basis is None else self._basis.orthogonalise())

    def _scalars(self, u_partials=None) -> None:
        """Test the last x, and take the norm of u in if there is a new one."""
        pointer, x_partials = self.device.pointer, self._x_partials
        count = 0 if u_partials is None else u_partials.shape[0]
        values = (pointer(self.states), pointer(x_partials), x_partials.shape[0], pointer(u_partials), count)
        self._one_block(SCALARS, (*values, pointer(self.history), self.chunk, pointer(self._gate)))

    def _update(self, v_partials) -> None:
        pointer, rows = self.device.pointer, self.shape[1]
        values = (pointer(self.states), pointer(v_partials), v_partials.shape[0])
        values += (*map(pointer, (self.v, self.x, self.h, self.hbar)), rows, self.columns, pointer(self._x_partials))
        blocks, *others = self.vectors.grid(rows)
        self.vectors.launch(UPDATE, (blocks + 1, *others), values)
        if self._basis is not None:
            self._basis.keep()

    def _one_block(self, spec, values: tuple) -> None:
        self.vectors.launch(spec, (self.columns, 1, 1), values)

    # --- the loop ---------------------------------------------------------------------------------------------------

    def run(self, maxiter: int, watch: Callable | None = None, enough: int = 0, done: int = 0) -> list[dict]:
        """Iterate until every column has stopped, or for a while no more than `enough` have not.

        Parameters
        ----------
        maxiter, done : int
            How many iterations to go to, and how many there have been.
        watch : callable, optional
            Takes the rows of history that a chunk added, (iterations, columns, 5), and the number of the first.

        Returns
        -------
        list of dict
            For each column its stop code, counter and norms, and in which phase it is.
        """
        launched, seen, tickets, depth, few = done, done, deque(), self._reader.depth, None
        while True:
            while not tickets or (len(tickets) < depth and launched < maxiter):
                launched += self._launch(min(self.chunk, maxiter - launched))
                tickets.append(self._reader.record(watch is not None))
            states, history = self._reader.wait(tickets.popleft())
            if watch is not None:
                seen = self._show(states, history, seen, watch)
            reports = [dict(zip(_REPORT, row, strict=True)) for row in states[:, _READ].tolist()]
            running = sum(report["phase"] != STOPPED for report in reports)
            if running == 0:
                return reports
            if running <= enough:
                count = int(max(report["itn"] for report in reports))
                few = count if few is None else few
                if count - few >= _PATIENCE:
                    if not tickets:
                        return reports
                    depth = 0  # only what is under way

    def _launch(self, count: int) -> int:
        """Launch a chunk of `count` iterations, or a graph, which may have more of them; return how many they are."""
        if self._graph is None and self._eager >= _EAGER_ITERATIONS and self._is_captured:
            self._capture()
        if self._small is not None:
            self._small.launch(count)
            return count
        if self._graph is not None:
            self._graph.launch()
            return self.chunk
        for _ in range(count):
            self._iterate()
        self._scalars()
        self._eager += count
        return count

    def _capture(self) -> None:
        import cupy

        with cupy.cuda.Stream(non_blocking=True) as stream:
            stream.begin_capture()
            self.vectors.early = True
            try:
                for _ in range(self.chunk):
                    self._iterate()
                self._scalars()
            finally:
                self.vectors.early = False
                graph = stream.end_capture()
        self._graph = graph  # of whole iterations: none that an exception has cut short

    def _show(self, states, history, seen: int, watch: Callable) -> int:
        last = int(states[:, _NOW + 1].max())
        if last > seen:
            watch(history[[i % self.chunk for i in range(seen, last)]], seen + 1)
        return last

    def narrow(self, columns: list[int]) -> Engine:
        """Return an engine that goes on with some of the columns alone; to be called between chunks."""
        engine = Engine(self.device, self._unbound, self.vectors.dtype, len(columns))
        kept = columns if len(columns) > 1 else columns[0]
        for name in ("u", "v", "x", "h", "hbar"):
            getattr(engine, name)[...] = getattr(self, name)[:, kept]
        engine.states[...] = self.states[columns]
        engine._gate[...] = self._gate
        engine._gate[2] = 0  # of its columns none has stopped
        return engine

    # --- afterwards -------------------------------------------------------------------------------------------------

    def start_of(self, reports: list[dict], x0):
        """Return x0 as it is part of x = x0 + N^-1 y: with b = 0 the solution is 0, as SciPy has it, and x0 no part."""
        cleared = [i for i, report in enumerate(reports) if report["normb"] == 0 and report["normar"] != 0]
        if x0 is None or self._plain is None or not cleared:
            return x0
        x0 = x0.copy()
        x0.reshape(x0.shape[0], -1)[:, cleared] = 0
        return x0

    def residuals(self, b, x0, damp: float):
        """Compute what the recurrences only estimate, once the solve is over.

        Returns
        -------
        array (3, columns)
            The squares of the norms of r = b - A x, of A^H r - damp^2 (x - x0), and, if damp is not 0, of x - x0; with
            a preconditioner, of the same for A N^-1 and y.
        """
        squares = self.device.empty((3, self.columns), np.dtype("float64"))
        squares.fill(0)
        vectors, start = self.vectors, x0 if self._plain is None else None
        vectors.load(b, self.u, self._b_partials)
        if x0 is not None and start is None:
            vectors.load(x0, self.h, self._x_partials)
            self._take_away(self._plain, self.h)
        vectors.shorten(self._take_away(self.product, self.x), squares[:1])
        partials = self._apply(True, self.u, self.v, vectors.constants(1, 0))
        if damp != 0:
            self.hbar[...] = self.x if start is None else self.x - start
            vectors.load(self.hbar, self.h, self._x_partials)
            vectors.shorten(self._x_partials, squares[2:])
            partials = self._x_partials
            square = min(damp * damp, float(np.finfo(self.vectors.dtype).max))  # times 0, infinity would be NaN
            vectors.combine(vectors.constants(-square, 1), self.h, self.v, partials)
        vectors.shorten(partials, squares[1:2])
        return squares

    def solution(self, x0):
        """Return x, in the engine's workspace unless there is a preconditioner."""
        if self._plain is None:
            return self.x
        x = self.product.solve(self.x)
        return x.copy() if x0 is None else x + x0


class _Reader:
    """Copies of the state and of the history in pinned memory, two in flight."""

    depth = 2

    def __init__(self, *sources) -> None:
        import cupy

        self._sources, self._slots, self._next = sources, [], 0
        for _ in range(2):
            copies = []
            for source in sources:
                memory = cupy.cuda.alloc_pinned_memory(source.nbytes)
                copies.append(np.frombuffer(memory, source.dtype, source.size).reshape(source.shape))
            self._slots.append((cupy.cuda.Event(block=False, disable_timing=True), copies))
        self._get_stream, self._copy = cupy.cuda.get_current_stream, cupy.cuda.runtime.memcpyAsync
        weakref.finalize(self, _hold_all, self._slots).atexit = False

    def record(self, with_history: bool) -> int:
        """Have the device copy its state as it is after all that has been launched; return a ticket."""
        self._next ^= 1
        event, copies = self._slots[self._next]
        stream = self._get_stream()
        for source, copy in zip(self._sources[: 1 + with_history], copies, strict=False):
            self._copy(copy.ctypes.data, source.data.ptr, source.nbytes, 2, stream.ptr)  # device to host
        event.record(stream)
        return self._next + 1

    def wait(self, ticket: int) -> list:
        """Return the copies of a ticket."""
        event, copies = self._slots[ticket - 1]
        event.synchronize()
        return copies


def _hold_all(slots: list[tuple]) -> None:
    """Hold the slots of a reader that is gone until their copies have come."""
    for event, copies in slots:
        hold(event, copies)


class _EmulatedReader:
    """The same where nothing runs by itself."""

    depth = 1

    def __init__(self, *sources) -> None:
        self._sources = sources

    def record(self, with_history: bool) -> int:
        return 1

    def wait(self, ticket: int) -> tuple:
        return self._sources
