"""The table of losses with fallbacks and with other libraries' optimizers, for `tables.py` to write.

It has a row for whatever `convergence.py --model 126m` has recorded, in a fixed order: the baseline, levels, fallbacks,
peers, anything else. Before there is a baseline there is no table, so no document has to have a place for it.
"""

from __future__ import annotations

import math
import statistics

from paired_runs import beside_baseline, tabulate
from record_tables import LARGE, RESULTS, Record, lines, losses, read

RECIPE = {
    "dim": LARGE,
    "steps": 1500,
    "batch": 16,
    "lr": 6e-4,
}  # of the fourth and the fifth command in convergence.py
KINDS = ("baseline", "O0", "O1", "O2", "fallback", "peer")
WEIGHTS = {"fp32": "float32 weights", "bf16": "bfloat16 weights"}


def runs() -> dict[str, dict[int, Record]]:
    """Return what is recorded of the larger model and is compared, by variant and seed."""
    return tabulate(beside_baseline(read("convergence", **RECIPE)))


def rank(variant: str) -> int:
    """Return the place of a variant's kind; kinds that are not known come last."""
    kind = variant.partition("/")[0]
    return KINDS.index(kind) if kind in KINDS else len(KINDS)


def name(variant: str) -> str:
    """Return what a row is called: "torchao 8bit, bfloat16 weights" for peer/torchao 8bit/bf16."""
    kind, *rest = variant.partition(" skip=")[0].split("/")
    if kind not in ("fallback", "peer"):
        return variant
    words = [rest[0], *(WEIGHTS.get(dtype, dtype) for dtype in rest[1:])]
    words += [f"skip={pattern}" for pattern in variant.split(" skip=")[1:]]
    return ", ".join(["fallback", *words] if kind == "fallback" else words)


def cells(values: dict[int, float], base: dict[int, float], record: Record) -> tuple[str, ...]:
    """Return mean, differences and bytes; a run that ended in NaN has no differences."""
    total = f"{record['bytes_per_parameter']['total']:.2f}"
    if not all(map(math.isfinite, values.values())):
        return ("not finite", "", "", total)
    return (*losses(values, base), total)


def peer_parity() -> list[str]:
    found = runs()
    if not found:
        return ["Not recorded yet."]
    values = {v: {seed: r["value"] for seed, r in by_seed.items()} for v, by_seed in found.items()}
    base, rows = values["baseline"], []
    for variant in sorted(found, key=rank):
        row = cells(values[variant], base, list(found[variant].values())[-1])
        if variant == "baseline":
            row = (f"{statistics.mean(base.values()):.4f}", "", "", row[-1])
        # a mean over some of the baseline's seeds is not beside its mean
        seeds = [f"seed {seed}" for seed in sorted(found[variant])]
        part = seeds if len(seeds) < len(base) else []
        rows.append((", ".join([name(variant), *part]), *row))
    heads = ("mean", "difference to the baseline", "seed by seed", "bytes/parameter")
    return lines(("", *heads), rows)


# a table that no document shows is an error
recorded = (RESULTS / "convergence.jsonl").exists() and runs()
TABLES = {"peer-parity": peer_parity} if recorded else {}
