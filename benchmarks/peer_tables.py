"""The table of losses with fallbacks and with other libraries' optimizers, for `tables.py` to write.

It has a row for whatever `convergence.py --model 126m` has recorded, in a fixed order: the baseline, levels, fallbacks,
peers. Before the first record it says so in a line.
"""

from __future__ import annotations

import math
import statistics

from record_tables import LARGE, Record, by_seed, by_variant, lines, losses, read

RECIPE = {
    "dim": LARGE,
    "steps": 1500,
    "batch": 16,
    "lr": 6e-4,
}  # of the command in docs/measured.md
KINDS = {"baseline": "", "O0": "", "O1": "", "O2": "", "fallback": "fallback, ", "peer": ""}
WEIGHTS = {"fp32": "float32 weights", "bf16": "bfloat16 weights"}


def name(variant: str) -> str:
    """Return what a row is called: "torchao 8bit, bfloat16 weights" for peer/torchao 8bit/bf16."""
    kind, *rest = variant.split("/")
    if kind not in ("fallback", "peer"):
        return variant
    return KINDS[kind] + ", ".join([rest[0], *(WEIGHTS[dtype] for dtype in rest[1:])])


def cells(values: dict[int, float], base: dict[int, float], record: Record) -> tuple[str, ...]:
    """Return mean, differences and bytes; a run that ended in NaN has no differences."""
    total = f"{record['bytes_per_parameter']['total']:.2f}"
    if not all(map(math.isfinite, values.values())):
        return ("not finite", "", "", total)
    return (*losses(values, base), total)


def peer_parity() -> list[str]:
    found = by_seed("convergence", **RECIPE)
    if not found:
        return ["Not recorded yet."]
    last, base = by_variant(read("convergence", **RECIPE)), found["baseline"]
    order = list(KINDS)
    rows = []
    for variant in sorted(found, key=lambda v: order.index(v.split("/")[0])):
        row = cells(found[variant], base, last[variant])
        if variant == "baseline":
            row = (f"{statistics.mean(base.values()):.4f}", "", "", row[-1])
        rows.append((name(variant), *row))
    heads = ("mean", "difference to the baseline", "seed by seed", "bytes/parameter")
    return lines(("", *heads), rows)


TABLES = {"peer-parity": peer_parity}
