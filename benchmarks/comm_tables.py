"""What `comm.py` prints and draws: times and speed-ups by collective, variant and size."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

Numbers = dict[str, Any]  # of a cell of a table: a record, or a "note" on why there is none


def name_size(size: int) -> str:
    power = min((size.bit_length() - 1) // 10, 3)
    return f"{size / 1024**power:g} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def tabulate(records: list[Numbers]) -> dict[str, dict[str, dict[int, Numbers]]]:
    """Return records of collectives by collective, variant and size."""
    tables: dict[str, dict[str, dict[int, Numbers]]] = {}
    for r in records:
        if r.get("unit") == "ms":
            rows = tables.setdefault(r["params"]["collective"], {})
            rows.setdefault(r["variant"], {})[r["params"]["size"]] = r
    return tables


def show(cells: list[Numbers], sizes: list[int]) -> None:
    """Print a table for each collective, the copies and, for everything that was not measured, a reason."""
    console = Console(width=None if sys.stdout.isatty() else 200)
    for collective, rows in tabulate(cells).items():
        table = Table(collective, *map(name_size, sizes), box=box.SIMPLE)
        for name, row in rows.items():
            texts = {s: f"{r['value']:.3f} ms {r.get('speedup', 0):.2f}x" for s, r in row.items()}
            table.add_row(name, *(texts.get(s, "-").removesuffix(" 0.00x") for s in sizes))
        console.print(table)
    lines = [f"{c['variant']}: {c['note']}" for c in cells if "note" in c]
    lines += [f"{c['variant']}: {c['value']:.0f} GB/s" for c in cells if c.get("unit") == "GB/s"]
    console.print(*dict.fromkeys(lines), sep="\n", highlight=False, markup=False)


def draw(path: Path, picture: Path) -> None:
    """Draw the speed-ups over stock bf16 of the latest run in the records, ours as lines, the others dashed."""
    import matplotlib
    from matplotlib.figure import Figure

    records = [json.loads(line) for line in path.read_text().splitlines()]
    records = [r for r in records if r["time"] == records[-1]["time"] and "speedup" in r]
    if not (tables := tabulate(records)):
        sys.exit(f"{path} holds no run with stock bf16 in it")
    matplotlib.rcParams.update({"svg.hashsalt": "fp8stack", "svg.fonttype": "none"})
    figure = Figure(figsize=(5 * len(tables), 4), layout="tight")
    for place, (collective, rows) in enumerate(tables.items(), 1):
        plot = figure.add_subplot(1, len(tables), place)
        for name, row in rows.items():
            style = "-" if name.startswith(("nvlink", "collective")) else "--"
            speeds = [r["speedup"] for r in row.values()]
            plot.semilogx(list(row), speeds, style, base=2, marker=".", label=name)
        sizes = sorted({size for row in rows.values() for size in row})
        plot.set_xticks(sizes, [name_size(size) for size in sizes], rotation=45, ha="right")
        plot.set(title=collective, xlabel="bytes of bfloat16", ylabel="× as fast as stock bf16")
        plot.legend(fontsize="small")
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, metadata={"Date": None})
