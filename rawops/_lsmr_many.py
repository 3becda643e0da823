"""Several right-hand sides at once: columns that have stopped drop out, and the rest go on as a narrower problem."""

from __future__ import annotations

import numpy as np

from rawops._lsmr_engine import HISTORY, STOPPED, Engine, Settings


def solve_columns(engine: Engine, b, x0, settings: Settings, history: bool) -> tuple[list[dict], dict | None]:
    """Run all columns to their stops and leave their x in the engine.

    Returns
    -------
    list of dict
        The report of each column, see `Engine.run`.
    dict of array (iterations, columns), or None
        Norms by iteration.
    """
    columns, reports, log = [*range(engine.columns)], [{}] * engine.columns, _Log(engine.columns)
    current, done = engine, 0
    engine.start(b, x0, settings)
    while True:
        watch = log.watch(columns) if history else None
        found = current.run(settings.maxiter, watch, len(columns) // 2, done)
        for column, report in zip(columns, found, strict=True):
            reports[column] = report
        if current is not engine:
            engine.x[:, columns] = current.x.reshape(-1, len(columns))
        running = [i for i, report in enumerate(found) if report["phase"] != STOPPED]
        if not running:
            return reports, log.norms(reports) if history else None
        done = int(found[running[0]]["itn"])
        current, columns = current.narrow(running), [columns[i] for i in running]


class _Log:
    """The history of all columns, whichever of them are still there."""

    def __init__(self, columns: int) -> None:
        self._columns, self._chunks = columns, []

    def watch(self, columns: list[int]):
        """Return what takes the rows of a chunk in which these columns are left."""

        def add(rows, first: int) -> None:
            whole = np.full((len(rows), self._columns, len(HISTORY)), np.nan)
            whole[:, columns] = rows
            self._chunks.append(whole)

        return add

    def norms(self, reports: list[dict]) -> dict:
        """Return the norms by name, NaN where a column has stopped."""
        rows = np.concatenate(self._chunks) if self._chunks else np.empty((0, self._columns, len(HISTORY)))
        stops = np.array([report["itn"] for report in reports])
        rows[np.arange(len(rows))[:, None] >= stops] = np.nan
        return {name: rows[..., i] for i, name in enumerate(HISTORY)}
