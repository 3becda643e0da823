"""What a solve says about itself: its iterations as they come, and at the end whether the estimates were true."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from rawops._lsmr_engine import HISTORY, Settings
from rawops._runtime import arrays

MESSAGES = (
    "x = x0 (or 0) is the solution",
    "A x = b to the tolerances atol and btol",
    "the least-squares solution to the tolerance atol",
    "the condition estimate has passed conlim",
    "A x = b to machine precision",
    "the least-squares solution to machine precision",
    "the condition of A is too large for float64",
    "maxiter reached",
)
_SLACK = 10.0  # how far the truth may lie past an estimate before that is called false


class Iteration(NamedTuple):
    """The estimates after one iteration."""

    itn: int
    normr: float
    normar: float
    norma: float
    conda: float
    normx: float


class Status:
    """The end of a solve, seen from the residual itself and not from the recurrences.

    The norms are read from the device the first time one is asked for, which waits for it.

    Attributes
    ----------
    message : str
        What `istop` means, and of a 0 that `maxiter` of 0 or less has brought about, that.
    normr, normar : float
        True norms of b - A x (damped: with damp (x - x0) below it) and of A^H r - damp^2 (x - x0).
    converged : bool
        The stop code says solved (0, but not by `maxiter`, 1, 2, 4 or 5) and the true norms agree.
    is_false : bool
        The stop code says solved, and the true norms do not: for 1 and 4, r is ten times past its limit (with the
        largest singular value seen for ||A||) and A^H r ten times what the recurrences made of it; for 2 and 5, A^H r
        is ten times past its limit.
    """

    def __init__(self, istop: int, report: dict, squares, settings: Settings) -> None:
        self.istop = istop
        self._is_unsolved = istop == 0 and report["normb"] != 0 and report["normar"] != 0  # no iteration was allowed
        self.message = MESSAGES[7 if self._is_unsolved else istop]
        self._report, self._squares, self._settings = report, squares, settings
        self._norms: tuple[float, float] | None = None

    def _read(self) -> tuple[float, float]:
        if self._norms is None:
            residual, gradient, moved = map(float, arrays.to_host(self._squares))
            self._norms = math.hypot(math.sqrt(residual), self._settings.damp * math.sqrt(moved)), math.sqrt(gradient)
        return self._norms

    @property
    def normr(self) -> float:
        return self._read()[0]

    @property
    def normar(self) -> float:
        return self._read()[1]

    @property
    def is_false(self) -> bool:
        atol, btol, norma = self._settings.atol, self._settings.btol, self._report["norma"]
        eps = np.finfo(np.float64).eps
        if self.istop in (1, 4):
            size = self._report["maxrbar"] * self._report["normx"]  # norma grows with every iteration: too lenient here
            limit = max(btol, eps) * self._report["normb"] + max(atol, eps) * size
            return not (self.normr <= _SLACK * limit or self.normar <= _SLACK * self._report["normar"])
        if self.istop in (2, 5):
            return not self.normar <= _SLACK * max(atol, eps) * norma * self.normr
        return False

    @property
    def converged(self) -> bool:
        return self.istop in (0, 1, 2, 4, 5) and not self._is_unsolved and not self.is_false

    def __str__(self) -> str:
        text = f"istop {self.istop}: {self.message}; true ||r|| {self.normr:.4g}, ||A^H r|| {self.normar:.4g}"
        return f"{text}. False convergence: the estimates say solved, the true norms do not" if self.is_false else text

    def __repr__(self) -> str:
        return f"<Status {self}>"


class Progress:
    """Takes the iterations in as the host hears of them: for the callback, the history and the display."""

    def __init__(self, settings: Settings, shape: tuple, callback: Callable | None, history: bool, show: bool) -> None:
        self._callback = callback
        self._rows: list | None = [] if history else None
        self._display = _Display(settings, shape) if show else None
        self.is_wanted = callback is not None or history or show

    def __enter__(self) -> Progress:
        if self._display is not None:
            self._display.start()
        return self

    def __exit__(self, *error) -> None:
        if self._display is not None:
            self._display.stop()

    def add(self, rows, first: int) -> None:
        """Take the rows (iterations, 1, 5) of a chunk; `first` is the number of the first iteration."""
        iterations = [Iteration(first + i, *map(float, row)) for i, row in enumerate(rows[:, 0])]
        if self._rows is not None:
            self._rows += iterations
        if self._callback is not None:
            for iteration in iterations:
                self._callback(iteration)
        if self._display is not None:
            self._display.update(iterations[-1])

    def history(self) -> dict | None:
        """Return the norms by name, arrays over the iterations; None if nobody asked."""
        if self._rows is None:
            return None
        columns = np.array([row[1:] for row in self._rows], dtype=np.float64).reshape(-1, len(HISTORY))
        return dict(zip(HISTORY, columns.T, strict=True))

    def finish(self, status: Status) -> None:
        """Show how it ended."""
        if self._display is not None:
            self._display.finish(status)


class _Display:
    """What is solved, and a line that lives while the solver runs, 80 columns at most."""

    def __init__(self, settings: Settings, shape: tuple) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._console = Console(highlight=False, markup=False)
        columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}"), TimeElapsedColumn()
        self._bars = Progress(*columns, console=self._console)
        m, n = shape
        self._title = f"LSMR, {m} x {n}, damp {settings.damp:g}, atol {settings.atol:g}, btol {settings.btol:g}"
        self._task = self._bars.add_task("", total=max(settings.maxiter, 0))

    def start(self) -> None:
        self._console.print(self._title)
        self._bars.start()

    def stop(self) -> None:
        self._bars.stop()

    def update(self, last: Iteration) -> None:
        text = f"||r|| {last.normr:.3e}  ||A^H r|| {last.normar:.3e}  cond {last.conda:.1e}"
        self._bars.update(self._task, completed=last.itn, description=text)

    def finish(self, status: Status) -> None:
        self._console.print(str(status))
