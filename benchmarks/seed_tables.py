"""The tables of deterministic runs over seeds, 2 × 2 and fine-tuning, and of gradients; see `tables.py`.

A level is compared with bf16 of the same seed: the same first weights and batches. As such runs repeat to the last bit,
what differs is what the level does, and "another seed" is what a seed alone does: how far bf16's runs lie apart.
"""

from __future__ import annotations

from statistics import fmean, stdev

from gradient_noise import VARIANTS as OF_GRADIENTS
from intervals import extra_steps, over_seeds
from record_tables import RESULTS, Record, lines, read
from training_tables import ANOTHER, BASE, LONG_RUNS, by_name, comparable, within

MODES = {"bf16": "value", "FP8": "value_fp8"}  # of an evaluation, and where its loss is


def crossed(records: list[Record]) -> list[str]:
    """Return a row for each precision of training: losses evaluated both ways, and how far off bf16 of that seed."""
    rows: list[tuple[str, ...]] = []
    for model, title in LONG_RUNS.items():
        found = by_name(comparable(records, model))
        base = found.get(BASE, {})
        for name, runs in found.items():
            seeds = sorted(runs.keys() & base.keys())
            if not seeds:
                continue
            cells = [f"{title}, {name}", str(len(seeds))]
            means = {mode: [runs[s][key] for s in seeds] for mode, key in MODES.items()}
            theirs = [base[s]["value"] for s in seeds]
            for mode in MODES:
                gaps = [own / other - 1 for own, other in zip(means[mode], theirs, strict=True)]
                is_base = name == BASE and mode == "bf16"
                cells += [f"{fmean(means[mode]):.4f}", "" if is_base else within(over_seeds(gaps))]
            rows.append(tuple(cells))
        if len(base) > 1:
            losses = [r["value"] for r in base.values()]
            apart, deviation = (
                (max(losses) - min(losses)) / fmean(losses),
                stdev(losses) / fmean(losses),
            )
            note = f"{100 * apart:.2f} % apart, standard deviation {100 * deviation:.2f} %"
            rows.append((f"{title}, {ANOTHER}", str(len(base)), "", note, "", ""))
    return lines(("trained in", "seeds", "evaluated in bf16", "off", "in FP8", "off"), rows)


NOT_SHOWN = {
    "O0, first_last=2", "O0, last fifth in bf16",  # between two other rows
    "O0, tuned to 0.007",  # left all layers in bfloat16
}  # fmt: skip


def fine_tuning(records: list[Record]) -> list[str]:
    """Return a row for each variant of fine_tuning.py: how much worse its weights are than bf16's of the same seeds."""
    rows: list[tuple[str, ...]] = []
    alike: dict[str, list[Record]] = {}  # runs of as many steps and the same trained parameters
    for r in records:
        trained = "" if r["params"]["train"] == ["*"] else f" of `{' '.join(r['params']['train'])}`"
        alike.setdefault(f"{r['params']['steps']} steps{trained}", []).append(r)
    for title, own in alike.items():
        found = by_name(own)
        base = found.pop(BASE)
        for variant, runs in found.items():
            if variant in NOT_SHOWN:
                continue
            off = [r["loss_in_bf16"] - base[seed]["loss_in_bf16"] for seed, r in runs.items()]
            more = [
                100 * extra_steps(r["validation"], base[s]["validation"]) for s, r in runs.items()
            ]
            cells = []
            for (mean, half), digits in ((over_seeds(off), 4), (over_seeds(more), 1)):
                cells.append(
                    f"{mean:+.{digits}f}" + ("" if half is None else f" ± {half:.{digits}f}")
                )
            name = variant if len(alike) == 1 else f"{variant}, {title}"
            rows.append((name, str(len(runs)), *cells))
    return lines(("trained at", "seeds", "above bf16, nats", "more steps than bf16, %"), rows)


def gradient_noise(records: list[Record]) -> list[str]:
    """Return a row for each variant of gradient_noise.py, of all matrices."""
    found = {r["variant"]: r["kinds"]["all"] for r in records}
    keys, order = ("error", "steady", "cosine"), [v.name for v in OF_GRADIENTS]
    shown = sorted(found.keys() - {"current"}, key=order.index)
    rows = [(v, *(f"{found[v][key]:.3f}" for key in keys)) for v in shown]
    return lines(("", "error / noise", "steady / noise", "cosine"), rows)


TABLES = {}
if (RESULTS / "crossed.jsonl").exists():  # a table that no document shows is an error
    TABLES["crossed"] = lambda: crossed(read("crossed"))
if (RESULTS / "gradient_noise.jsonl").exists():
    TABLES["gradient-noise"] = lambda: gradient_noise(read("gradient_noise", model="smollm2-135m"))
if (RESULTS / "fine_tuning.jsonl").exists():
    TABLES["fine-tuning"] = lambda: fine_tuning(
        read("fine_tuning", model="smollm2-135m", train=["*"])
    )
