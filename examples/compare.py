"""Compare two runs of train_gpt.py: their losses, their speed and their memory.

    python examples/compare.py runs/tiny-bf16 runs/tiny-fp8-o2 --png difference.png

The first run is the baseline. Each run is a folder with run.json and metrics.jsonl (`gpt/logs.py` writes them), or a
metrics.jsonl alone.

1. Both loss curves are brought to the same points: those of the first run that the second one also reaches. Values of
   the second run are interpolated. Points are steps, or tokens where steps of the two runs, or of one run that was
   resumed with another batch, have different numbers of tokens.
2. Training losses are averaged over a window around each point.
3. A gap is the second run's loss over the first's, less one: of the last point, and of the mean over all points. The
   largest gap decides: above --warn the command warns, above --fail it exits with status 1. A lower loss is no gap.

Limits: a step whose loss is null was skipped by the optimizer; it is left out, with a note. A run that ends with such a
step, and one with a loss that is not a positive number, is refused with status 2.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from gpt.logs import METRICS, RUN

from fp8stack.errors import ConfigError, first_line, reason_of

Curve = list[tuple[float, float]]  # points (x, y), x growing
NAMES = {"loss": "training loss", "val_loss": "validation loss"}


@dataclass
class Run:
    """What was recorded of a run: lines of training and of evaluation, by step, in order."""

    name: str
    tokens_per_step: int | None
    training: dict[int, dict[str, Any]] = field(default_factory=dict)
    evaluation: dict[int, dict[str, Any]] = field(default_factory=dict)
    skipped: set[int] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def tokens(self) -> dict[int, float]:
        """Return the tokens up to each step; {} where they are unknown."""
        lines = {step: {**self.evaluation, **self.training}[step] for step in self.steps()}
        counts = [line.get("tokens") for line in lines.values()]
        if None not in counts and counts == sorted(set(counts)):
            return dict(zip(lines, counts, strict=True))
        return {step: step * self.tokens_per_step for step in lines if self.tokens_per_step}

    def steps(self) -> list[int]:
        return sorted({*self.training, *self.evaluation})

    def curve(self, key: str, xs: dict[int, float]) -> Curve:
        """Return "loss" or "val_loss" over `xs` of steps; over steps where `xs` is empty."""
        lines = self.training if key == "loss" else self.evaluation
        return [(xs.get(step, step), line[key]) for step, line in lines.items()]

    def numbers(self, key: str) -> list[float]:
        """Return a key's values in the training lines that have it."""
        return [line[key] for line in self.training.values() if line.get(key) is not None]


def read_run(path: Path) -> Run:
    """Read a run's folder, or its metrics file.

    Raises:
        ConfigError: for a file that is missing or not as described; the message names file and line.
    """
    metrics = path / METRICS if path.is_dir() else path
    try:
        lines = metrics.read_text(encoding="utf-8").rstrip("\n").split("\n")
        facts = metrics.with_name(RUN)
        info = json.loads(facts.read_text(encoding="utf-8")) if facts.is_file() else {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{metrics}, {RUN}: {reason_of(error)} Give a run's folder.") from error
    run = Run(info.get("name") or str(path), info.get("tokens_per_step"))
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
            step, key = int(line["step"]), "loss" if "loss" in line else "val_loss"
            value = line[key]
            is_positive = value is not None and 0 < value < math.inf
        except (ValueError, KeyError, TypeError) as error:
            if number < len(lines):
                raise ConfigError(
                    f"{metrics}, line {number} is no line of a log: {first_line(error)}."
                ) from error
            run.notes.append(f"{metrics}, line {number} is cut off and left out")
            continue
        if key == "loss":  # the later line of a step counts, as a resumed run writes it
            run.training.pop(step, None)
            run.skipped.discard(step)
        if key == "loss" and value is None:
            run.skipped.add(step)
        elif not is_positive:
            raise ConfigError(_diverged(run, metrics, key, value, step))
        else:
            (run.training if key == "loss" else run.evaluation)[step] = line
    if run.skipped and max(run.skipped) > max(run.training, default=0):
        raise ConfigError(_diverged(run, metrics, "loss", None, max(run.skipped)))
    if not run.training:
        raise ConfigError(f'{metrics} has no training lines, which have "step" and "loss".')
    if run.skipped:
        run.notes.append(f"{run.name}: {len(run.skipped)} skipped steps left out")
    run.training, run.evaluation = (
        dict(sorted(of.items())) for of in (run.training, run.evaluation)
    )
    return run


def _diverged(run: Run, path: Path, key: str, value: float | None, step: int) -> str:
    return (
        f"{path}: {key} is {value!r} at step {step} of {run.name}: the run diverged. Compare runs whose losses are "
        "above 0; cut the lines from there on to compare what came before."
    )


def align(a: Curve, b: Curve) -> tuple[Curve, Curve]:
    """Return both curves at the x of `a` that lie within `b`, whose values are interpolated between neighbours."""
    xs = [x for x, _ in b]
    kept = [(x, y) for x, y in a if xs and xs[0] <= x <= xs[-1]]
    others = []
    for x, _ in kept:
        i = bisect_left(xs, x)
        (x1, y1), (x0, y0) = b[i], b[max(i - 1, 0)]
        share = (x - x0) / (x1 - x0) if x1 > x0 else 1.0
        others.append((x, y0 + share * (y1 - y0)))
    return kept, others


def smooth(curve: Curve, window: int) -> Curve:
    """Return means over `window` points around each point; fewer at the ends."""
    before, after = window // 2, (window - 1) // 2
    ys = [y for _, y in curve]
    return [(x, fmean(ys[max(i - before, 0) : i + after + 1])) for i, (x, _) in enumerate(curve)]


def compare(a: Run, b: Run, window: int) -> tuple[dict[str, Any], dict[str, tuple[Curve, Curve]]]:
    """Return the comparison as plain data, and the pairs of curves behind it, by key.

    Raises:
        ConfigError: where the runs have no steps in common.
    """
    notes = [*a.notes, *b.notes]
    xs, axis = (a.tokens(), b.tokens()), "tokens"
    sizes = {x / step for run in xs for step, x in run.items() if step}
    if not all(xs) or len(sizes) < 2:  # every step has as many tokens: steps say the same
        if all(xs) != any(xs):
            notes.append("one run does not say its tokens; curves are compared by step")
        xs, axis = ({}, {}), "step"
    pairs = {}
    for key in NAMES:
        pair = align(a.curve(key, xs[0]), b.curve(key, xs[1]))
        if pair[0]:
            pairs[key] = pair
    if "loss" not in pairs:
        raise ConfigError(
            f"{a.name} and {b.name} have no {axis} in common. Compare runs over the same steps."
        )
    points = len(pairs["loss"][0])
    if points < len(a.training):
        notes.append(
            f"{len(a.training) - points} points of {a.name} left out, which {b.name} does not reach"
        )
    if points < window:
        notes.append(f"the runs share fewer points than --window {window}: give a smaller one")
    if "val_loss" not in pairs and a.evaluation and b.evaluation:
        notes.append("the runs were not evaluated over the same steps; training losses decide")
    losses: dict[str, Any] = {}
    for key, pair in pairs.items():
        ys = [[y for _, y in (smooth(curve, window) if key == "loss" else curve)] for curve in pair]
        for what, (of_a, of_b) in (("final", (ys[0][-1], ys[1][-1])), ("mean", map(fmean, ys))):
            gap = 100 * (of_b / of_a - 1)
            losses[f"{what} {NAMES[key]}"] = {"a": of_a, "b": of_b, "gap": gap}
    largest = max(losses, key=lambda name: losses[name]["gap"])
    data = {
        "a": a.name,
        "b": b.name,
        "axis": axis,
        "points": points,
        "window": window,
        "losses": losses,
        "gap": {"percent": losses[largest]["gap"], "of": largest},
        "tokens_per_second": _ratio(a, b, "tokens_per_second", median),
        "memory_gib": _ratio(a, b, "memory_gib", max),
        "notes": notes,
    }
    return data, pairs


def _ratio(a: Run, b: Run, key: str, of: Any) -> dict[str, float] | None:
    if not (a.numbers(key) and b.numbers(key)):
        return None
    first, second = of(a.numbers(key)), of(b.numbers(key))
    return {"a": first, "b": second, "ratio": second / first if first else math.nan}


def print_table(data: dict[str, Any]) -> None:
    """Print losses, speed and memory of both runs, and the verdict."""
    rows = [("", data["a"], data["b"], "B / A")]
    for name, v in data["losses"].items():
        rows.append((name, f"{v['a']:.4f}", f"{v['b']:.4f}", f"{v['gap']:+.2f} %"))
    for key, label in (("tokens_per_second", "tokens/s"), ("memory_gib", "memory, GiB")):
        if v := data[key]:
            rows.append((label, f"{v['a']:,.1f}", f"{v['b']:,.1f}", f"{v['ratio']:.2f} ×"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("   ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    print(
        f"{data['points']} points by {data['axis']}, training losses averaged over {data['window']}."
    )
    for note in data["notes"]:
        print(f"note: {note}")
    gap, (warn, fail) = data["gap"], data["limits"]
    text = {"ok": "within limits", "warn": "a warning", "fail": "failed"}[data["verdict"]]
    print(
        f"largest gap: {gap['percent']:+.2f} % ({gap['of']}): {text} "
        f"(over {warn:g} % warns, over {fail:g} % fails)"
    )


def plot(path: str, data: dict[str, Any], pairs: dict[str, tuple[Curve, Curve]]) -> None:
    """Draw both curves, and below them their difference in percent."""
    from matplotlib.figure import Figure  # a picture alone needs it

    figure = Figure(figsize=(8, 6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for key, pair in pairs.items():
        style = "-" if key == "loss" else "o--"
        shown = [smooth(curve, data["window"]) if key == "loss" else curve for curve in pair]
        for name, color, raw, curve in zip("ab", ("0.5", "tab:blue"), pair, shown, strict=True):
            if key == "loss":
                top.plot(*zip(*raw, strict=True), color=color, alpha=0.25, linewidth=0.8)
            label = f"{data[name]}, {NAMES[key]}"
            top.plot(*zip(*curve, strict=True), style, color=color, markersize=4, label=label)
        gap = [100 * (y / base - 1) for (_, base), (_, y) in zip(*shown, strict=True)]
        bottom.plot([x for x, _ in shown[0]], gap, style, markersize=4, label=NAMES[key])
    for limit, color in zip((0, *data["limits"]), ("0.5", "tab:orange", "tab:red"), strict=True):
        bottom.axhline(limit, color=color, linewidth=0.8, linestyle=":" if limit else "-")
    top.set_ylabel("loss")
    bottom.set(xlabel=data["axis"], ylabel="B over A, %")
    top.legend()
    bottom.legend()
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:  # a ValueError names the formats that there are
        raise ConfigError(f"--png {path} cannot be written: {reason_of(error)}") from error


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare two runs of train_gpt.py.")
    parser.add_argument(
        "a", metavar="RUN_A", type=Path, help="the baseline: a run's folder, or its metrics.jsonl"
    )
    parser.add_argument("b", metavar="RUN_B", type=Path)
    parser.add_argument(
        "--window", type=int, default=20, metavar="N", help="points that are averaged; 20"
    )
    parser.add_argument(
        "--warn", type=float, default=5.0, metavar="PERCENT", help="gap that warns; 5"
    )
    parser.add_argument(
        "--fail", type=float, default=10.0, metavar="PERCENT", help="gap that fails; 10"
    )
    parser.add_argument("--png", metavar="FILE", help="draw the curves and their difference")
    parser.add_argument("--json", action="store_true", help="print one JSON object, no table")
    options = parser.parse_args(arguments)
    try:
        if options.window < 1 or not 0 <= options.warn <= options.fail:
            raise ConfigError("--window must be at least 1, and --warn from 0 to --fail.")
        a, b = read_run(options.a), read_run(options.b)
        if a.name == b.name:  # tell them apart by where they are
            a.name, b.name = str(options.a), str(options.b)
        data, pairs = compare(a, b, options.window)
        worst, limits = data["gap"]["percent"], (options.warn, options.fail)
        verdict = "fail" if worst > options.fail else "warn" if worst > options.warn else "ok"
        data |= {"verdict": verdict, "limits": limits}
        if options.png:
            plot(options.png, data, pairs)
    except ConfigError as error:
        parser.exit(2, f"compare.py: error: {' '.join(str(error).split())}\n")
    if options.json:
        print(json.dumps(data, indent=2))
    else:
        print_table(data)
    return int(verdict == "fail")


if __name__ == "__main__":
    sys.exit(main())
