"""The table of long runs; see `tables.py`.

A level is compared with bf16 of the same seed: the same first weights and batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import permutations
from statistics import fmean
from typing import NamedTuple

from intervals import extra_steps, over_seeds
from record_tables import RESULTS, Record, lines, paired, percent, read, runs_by_seed

# --- long runs of the application

BASE, AGAIN = "bf16", "bf16 again"  # plain PyTorch, and the same with sums in another order
ANOTHER = "another seed"
LONG_RUNS = {"gpt2": "GPT-2 124M", "llama-1b": "Llama 1B"}
SETTINGS = ("batch", "seq", "steps", "lr", "warmup", "data", "deterministic", "compile")
ALL_IN_FP8 = {"select": "all"}  # flags that have a name
Runs = dict[str, dict[int, Record]]  # of each variant and seed


class Summary(NamedTuple):
    """A level's runs over seeds, beside those of bf16 with the same seeds; None: not compared, or not known."""

    variant: str
    seeds: int
    runs: int  # more than seeds where the same ran more than once
    loss: float
    gap: float | None  # mean over seeds, of bf16's loss
    error: float | None  # half its 95 % interval, of two seeds and more
    tokens: float | None  # a second, of runs that had a GPU to themselves
    faster: float | None  # × bf16
    peak: float  # GiB, the largest
    part: float | None  # × bf16
    estimate: float | None  # GiB
    off: float | None  # the estimate, of the peak


def summarize(rows: list[Record]) -> list[Summary]:
    """Return a line for each variant among a model's runs; speed and memory of "bf16 again" are not compared.

    Seeds are those that a level has, where there are levels, so that bf16's mean is beside theirs. A seed that ran more
    than once counts with its mean.
    """
    seeds = {r["params"]["seed"] for r in rows if r["variant"] not in (BASE, AGAIN)}
    rows = [r for r in rows if not seeds or r["params"]["seed"] in seeds]
    base = [r for r in rows if r["variant"] == BASE]
    found, base_losses = [], losses_by_seed(base)
    for variant in dict.fromkeys(map(named, rows)):
        own = [r for r in rows if named(r) == variant]
        losses = losses_by_seed(own)
        compared = {s: x for s, x in losses.items() if s in base_losses}
        gaps = [] if variant == BASE else paired(compared, base_losses)
        pairs = [(r, b) for r in own for b in base if r["params"]["seed"] == b["params"]["seed"]]
        alike = [] if variant == AGAIN else pairs
        # of one day's code, on one kind of GPU
        paced = [(r, b) for r, b in alike if all(r.get(k) == b.get(k) for k in ("git", "gpu"))]
        timed = [r for r in own if r["tokens_per_second"]]
        paces = [r["tokens_per_second"] for r in timed if r.get("gpu") == timed[-1].get("gpu")]
        peak, planned = max(r["peak_gib"] for r in own), own[-1]["estimate_gib"]
        found.append(Summary(
            variant, len(losses), len(own), fmean(losses.values()),
            *(over_seeds(gaps) if gaps else (None, None)), fmean(paces) if paces else None,
            mean_ratio(paced, "tokens_per_second"), peak, mean_ratio(alike, "peak_gib"), planned,
            planned and planned / peak - 1,
        ))  # fmt: skip
    return found


def losses_by_seed(runs: list[Record]) -> dict[int, float]:
    """Return each seed's loss, the mean of its runs."""
    return {seed: fmean(r["value"] for r in own) for seed, own in runs_by_seed(runs).items()}


def mean_ratio(pairs: list[tuple[Record, Record]], key: str) -> float | None:
    """Return the mean over pairs of runs of a number over bf16's."""
    ratios = [r[key] / base[key] for r, base in pairs if r[key] and base[key]]
    return fmean(ratios) if ratios else None


def named(record: Record) -> str:
    """Return what tells a variant's runs from others of a level: flags of the application, another library."""
    flags = record["params"].get("flags") or {}
    own = ["all in FP8"] if flags == ALL_IN_FP8 else [f"`{k}={v}`" for k, v in flags.items()]
    made_by = ["TransformerEngine"] if record.get("compute") == "te" else []
    return ", ".join([record["variant"], *made_by, *own])


def by_name(records: Iterable[Record]) -> Runs:
    found: Runs = {}
    for r in records:
        found.setdefault(named(r), {})[r["params"]["seed"]] = r
    return found


def comparable(records: Iterable[Record], model: str) -> list[Record]:
    """Return the runs of a model with the settings of its last one in bf16, plain levels first. Empty without bf16."""
    own = [r for r in records if r["params"]["model"] == model]
    settings = [[r["params"].get(name) for name in SETTINGS] for r in own]
    base = [s for s, r in zip(settings, own, strict=True) if r["variant"] == BASE]
    alike = [r for s, r in zip(settings, own, strict=True) if s in base[-1:]]
    order = (BASE, AGAIN, "O0", "O1", "O2")
    return sorted(alike, key=lambda r: (named(r) != r["variant"], order.index(r["variant"])))


def training(records: list[Record]) -> list[str]:
    """Return a row for each variant of each model, and one of what a seed alone does to the steps."""
    rows: list[tuple[str, ...]] = []
    for model, title in LONG_RUNS.items():
        runs = comparable(records, model)
        more = more_steps(runs)
        rows += [
            (f"{title}, {s.variant}", *training_cells(s, more.get(s.variant, "")))
            for s in summarize(runs)
        ]
        if another := more.get(ANOTHER):
            rows.append((f"{title}, {ANOTHER}", "", "", "", another, "", "", "", ""))
    heads = ("more steps", "tokens/s", "× bf16", "peak GiB", "× bf16")
    return lines(("", "loss", "off bf16", "seeds", *heads), rows)


def more_steps(runs: list[Record]) -> dict[str, str]:
    """Return by how much more steps each variant took to a validation loss that bf16 of the same seed has reached too.

    ANOTHER is the smallest and the largest among pairs of bf16's seeds, each both ways.
    """
    of_level = by_name(runs)
    base, found = of_level.pop(BASE, {}), {}

    def extra(run: Record, other: Record) -> float:
        return extra_steps(run["validation"], other["validation"])

    for name, own in of_level.items():
        if more := [extra(own[s], base[s]) for s in sorted(own.keys() & base.keys())]:
            found[name] = within(over_seeds(more))
    if apart := [extra(a, b) for a, b in permutations(base.values(), 2)]:
        found[ANOTHER] = f"{percent(min(apart))} to {percent(max(apart))} %"
    return found


def within(value: tuple[float, float | None]) -> str:
    """Return a mean and its interval, of fractions, in percent."""
    mean, half = value
    return percent(mean) + ("" if half is None else f" ± {100 * half:.2f}") + " %"


def training_cells(s: Summary, more: str) -> tuple[str, ...]:
    gap = "" if s.gap is None else within((s.gap, s.error))
    pace = "" if s.tokens is None else f"{s.tokens:,.0f}"
    count = str(s.seeds) + (f" ({s.runs} runs)" if s.runs > s.seeds else "")
    ratios = ["" if ratio is None else f"{ratio:.2f}" for ratio in (s.faster, s.part)]
    return (
        f"{s.loss:.4f}", gap, count, more, pace, ratios[0], f"{s.peak:.2f}", ratios[1],
    )  # fmt: skip


TABLES: dict[str, Callable[[], list[str]]] = {}
if (RESULTS / "training.jsonl").exists():  # a table that no document shows is an error
    TABLES["training"] = lambda: training(read("training"))
