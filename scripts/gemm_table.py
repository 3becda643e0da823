"""Print the table of docs/gemm.md: what `python -m rawops explain gemm` says of some products on an H200."""

import contextlib
import io
import json

from rawops.__main__ import main

SIZES = [
    "8192 8192 8192",
    "4096 4096 4096",
    "2048 6144 4096",
    "512 28672 4096",
    "2048 28672 4096 --activation swiglu",
    "4096 4096 4096 --layout nn --out-dtype float32",
    "4096 4096 64",
    "64 28672 4096",
    "64 4096 4096",
    "16384 4096 4096 --groups 32",
    "512 4096 4096 --groups 128",
]
COLUMNS = ["M N K", "tile", "stages", "cluster", "threads", "registers", "shared KB", "blocks", "waves", "busy"]


def row(arguments: str) -> list[str]:
    """Explain one product."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main(["explain", "gemm", *arguments.split(), "--json"])
    found = json.loads(out.getvalue())
    launch = found["launches"][-1]
    shared, blocks = f"{launch['shared_bytes'] / 1024:.0f}", launch["grid"].split("x")[0]
    cells = [arguments, found["tile"], found["stages"], found["cluster"], launch["threads"], launch["registers"]]
    return [*map(str, cells), shared, blocks, str(found["waves"]), f"{found['wave_efficiency']:.0%}"]


for cells in (COLUMNS, ["---"] * len(COLUMNS), *map(row, SIZES)):
    print(f"| {' | '.join(cells)} |")
