"""Which runs of `convergence.py` are compared in its summary.

A difference says something of two runs with the same weights and batches only: one text, and one seed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Record = dict[str, Any]


def beside_baseline(records: Iterable[Record]) -> list[Record]:
    """Return the runs over the last baseline's text, of the seeds that it has with it. Empty without a baseline."""
    records = list(records)
    texts = [r["params"].get("text") for r in records if r["variant"] == "baseline"]
    alike = [r for r in records if r["params"].get("text") in texts[-1:]]
    seeds = {r["params"]["seed"] for r in alike if r["variant"] == "baseline"}
    return [r for r in alike if r["params"]["seed"] in seeds]


def tabulate(records: Iterable[Record]) -> dict[str, dict[int, Record]]:
    """Return the last record of each variant and seed."""
    found: dict[str, dict[int, Record]] = {}
    for record in records:
        found.setdefault(record["variant"], {})[record["params"]["seed"]] = record
    return found
