"""One way to show results: rows of plain values, as a table for people or as JSON lines for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence


def show(title: str, rows: Sequence[Mapping[str, object]], *, as_json: bool = False, note: str = "") -> None:
    """Print rows that map column names to values.

    Parameters
    ----------
    title, note : str
        Above and below the table. JSON lines carry the title as ``"table"``, and the note is a line of its own.
    rows : sequence of mapping
        A column that a row lacks, or has None in, stays empty there. Numbers are shown with four digits.
    as_json : bool
        One JSON object a row, with unrounded numbers.
    """
    if as_json:
        for row in [*rows, *([{"note": note}] if note else [])]:
            print(json.dumps({"table": title, **row}), flush=True)
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    for name in columns:
        numeric = any(isinstance(row.get(name), int | float) for row in rows)
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_text(row.get(name)) for name in columns))
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False, markup=False)
    console.print(title, style="bold")
    console.print(table)
    if note:
        console.print(f"{note}\n")


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    return str(value)
