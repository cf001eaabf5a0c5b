"""The tables of short runs, from the records of `stability.py`: odd sizes, and formats; see `tables.py`."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

from record_tables import Record, lines, percent, read

# before the names of models with an odd size, in the records of stability.py
ODD_SIZES = "shapes: "


def odd_sizes(records: list[Record]) -> list[str]:
    """Return, for each odd size, how far O2's losses are off bf16's with whatever recipe, format and margin."""
    found: dict[str, dict[str, Record]] = {}
    for r in records:
        if (model := r["params"]["model"]).startswith(ODD_SIZES):
            found.setdefault(model.removeprefix(ODD_SIZES), {})[r["variant"]] = r
    rows = []
    for size, runs in found.items():
        gaps = [r["value"] for r in runs.values()]
        broken = sum(not r["finite"] or r["skipped_steps"] > 0 for r in runs.values())
        rows.append(
            (size, str(len(runs)), f"{percent(min(gaps))} to {percent(max(gaps))} %", str(broken))
        )
    heads = ("runs", "off bf16", "not finite, or a step skipped")
    return lines(("size", *heads), rows)


FORMATS = "formats: gpt2, "  # before a vocabulary, in the names of stability.py's models
SHORT = {"steps": 200, "compute": "native"}


def formats(records: list[Record]) -> list[str]:
    """Return how far O2's losses are off the mean of bf16's runs, by recipe, format and margin."""
    found = {
        (r["variant"], p["model"].removeprefix(FORMATS)): r
        for r in records
        if (p := r["params"])["model"].startswith(FORMATS) and p.items() >= SHORT.items()
    }
    sizes = sorted({size for _, size in found})
    own = [sorted({r["bf16_loss"] for (_, s), r in found.items() if s == size}) for size in sizes]
    base = [fmean(losses) for losses in own]
    ends = [
        f"{percent(losses[0] / mean - 1)} to {percent(losses[-1] / mean - 1)} %"
        for losses, mean in zip(own, base, strict=True)
    ]
    rows = [(f"bf16, {max(map(len, own), default=0)} runs", *ends, "")]
    for variant in sorted({variant for variant, _ in found}):
        runs = [found.get((variant, size)) for size in sizes]
        broken = sum(not r["finite"] or r["skipped_steps"] > 0 for r in runs if r)
        cells = [
            f"{percent(r['loss'] / mean - 1)} %" if r else "not measured"
            for r, mean in zip(runs, base, strict=True)
        ]
        rows.append((variant, *cells, str(broken)))
    heads = [f"vocabulary of {int(size):,}" for size in sizes]
    return lines(("recipe and format", *heads, "not finite, or a step skipped"), rows)


TABLES: dict[str, Callable[[], list[str]]] = {
    "odd-sizes": lambda: odd_sizes(read("stability")),
    "formats": lambda: formats(read("stability")),
}
