"""`fp8stack compare RUN_A RUN_B`: how far a run is from a baseline: losses, speed, memory.

    fp8stack compare runs/bf16 runs/fp8 --png difference.png

RUN_A is the baseline. Loss curves are brought to the same points, those of RUN_A that both runs reach: by step, or by
tokens where steps have different numbers of them, in the two runs or in one that was resumed with another batch;
RUN_B's values are interpolated. Training losses are then averaged over a window around each point. A gap is RUN_B's
loss over RUN_A's less one, of the last point and of the mean over all; the largest gap decides: over 5 % warns, over
10 % fails, with exit status 1. A lower loss is no gap.

Two runs of one name are told apart by the folders that they lie in.

Speed-up is the ratio of median tokens/s, memory that of the largest values. The format of runs is in `runs.py`.
"""

from __future__ import annotations

import argparse
from bisect import bisect_left
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from fp8stack.errors import ConfigError, reason_of

from .output import MissingLibraryError, add_command, counted, show, table
from .runs import Curve, Run, read_run, tell_apart

if TYPE_CHECKING:
    from rich.console import Console

    from .output import Commands

Pair = tuple[Curve, Curve]  # of both runs, at the same x
_NAMES = {"loss": "training loss", "val_loss": "validation loss"}


def add_parser(commands: Commands) -> None:
    brief = "the difference of two training runs: loss, speed, memory"
    add = add_command(commands, "compare", brief).add_argument
    add("a", metavar="RUN_A", help="the baseline: a run's folder, or its metrics.jsonl")
    add("b", metavar="RUN_B")
    add("--window", type=int, default=20, metavar="N", help="points that are averaged; 20")
    add("--warn", type=float, default=5.0, metavar="PERCENT", help="gap that warns; 5")
    add("--fail", type=float, default=10.0, metavar="PERCENT", help="gap that fails; 10")
    add("--png", metavar="FILE", help="draw the curves and their difference")


def run(options: argparse.Namespace) -> int:
    if options.window < 1:
        raise ConfigError(f"--window {options.window} must be at least 1.")
    if not 0 <= options.warn <= options.fail:
        raise ConfigError(f"--warn {options.warn:g} must be from 0 to --fail {options.fail:g}.")
    if options.png and not options.png.lower().endswith(".png"):
        raise ConfigError(f"--png {options.png}: a picture is a PNG. Name it {options.png}.png.")
    a, b = read_run(options.a), read_run(options.b)
    tell_apart(a, b)
    data, pairs = compare(a, b, options.window)
    worst = data["gap"]["percent"]
    verdict = "fail" if worst > options.fail else "warn" if worst > options.warn else "ok"
    data |= {"verdict": verdict, "limits": {"warn": options.warn, "fail": options.fail}}
    if options.png:
        plot(Path(options.png), data, pairs)
        data["picture"] = options.png
    show(options, data, draw)
    return int(verdict == "fail")


def compare(a: Run, b: Run, window: int) -> tuple[dict[str, Any], dict[str, Pair]]:
    """Return the comparison as plain data, and the curves that it is of by key.

    Raises:
        ConfigError: where the runs have no steps in common.
    """
    notes = [*a.notes, *b.notes]
    for run in (a, b):
        if run.skipped:
            steps = counted(len(run.skipped), "step")
            notes.append(f"{run.name}: {steps} without a loss left out")
    xs, axis = (a.tokens(), b.tokens()), "tokens"
    if not all(xs) or len({x / step for run in xs for step, x in run.items() if step}) < 2:
        if all(xs) != any(xs):
            notes.append("one run does not say its tokens_per_step; curves are compared by step")
        xs, axis = ({}, {}), "step"
    pairs = {"loss": align(a.curve("loss", xs[0]), b.curve("loss", xs[1]))}
    if not pairs["loss"][0]:
        raise ConfigError(
            f"{a.name} and {b.name} have no {axis} in common: {_reach(a, xs[0])} and {_reach(b, xs[1])}. "
            "Compare runs over the same steps."
        )
    points = len(pairs["loss"][0])
    if left_out := len(a.training) - points:
        notes.append(
            f"{counted(left_out, 'point')} of {a.name} left out: it is from {axis} {_reach(a, xs[0])}, "
            f"{b.name} from {_reach(b, xs[1])}"
        )
    if points < window:
        notes.append(
            f"the runs share {counted(points, 'point')}, fewer than --window {window}: each average is over a large "
            "part of them. Give a smaller --window"
        )
    if a.evaluation and b.evaluation:
        pairs["val_loss"] = align(a.curve("val_loss", xs[0]), b.curve("val_loss", xs[1]))
        if not pairs["val_loss"][0]:
            del pairs["val_loss"]
            notes.append("the runs were not evaluated over the same steps; training losses decide")
    losses, gaps = {}, []
    for key, pair in pairs.items():
        ys = [[y for _, y in (smooth(c, window) if key == "loss" else c)] for c in pair]
        losses[key] = {
            what: {"a": of[0], "b": of[1], "gap": 100 * (of[1] / of[0] - 1)}
            for what, of in (("final", [y[-1] for y in ys]), ("mean", [fmean(y) for y in ys]))
        }
        gaps += [(v["gap"], f"{what} {_NAMES[key]}") for what, v in losses[key].items()]
    percent, of = max(gaps)
    data = {
        "a": {**a.info, "name": a.name},
        "b": {**b.info, "name": b.name},
        "axis": axis,
        "points": points,
        "window": window,
        "losses": losses,
        "gap": {"percent": percent, "of": of},
        "tokens_per_second": _ratio(a, b, "tokens_per_second", median),
        "memory_gib": _ratio(a, b, "memory_gib", max),
        "notes": notes,
    }
    return data, pairs


def align(a: Curve, b: Curve) -> Pair:
    """Return both curves at the x of `a` that are within `b`, whose values are interpolated between neighbours."""
    xs, points = [x for x, _ in b], []
    for x, y in a:
        if not xs or not xs[0] <= x <= xs[-1]:
            continue
        i = bisect_left(xs, x)
        (x1, y1), (x0, y0) = b[i], b[max(i - 1, 0)]
        share = (x - x0) / (x1 - x0) if x1 > x0 else 1.0
        points.append((x, y, y0 + share * (y1 - y0)))
    return [(x, y) for x, y, _ in points], [(x, y) for x, _, y in points]


def smooth(curve: Curve, window: int) -> Curve:
    """Return means over `window` points around each, fewer at the ends: half of them before it."""
    before, after = window // 2, (window - 1) // 2
    ys = [y for _, y in curve]
    return [(x, fmean(ys[max(i - before, 0) : i + after + 1])) for i, (x, _) in enumerate(curve)]


def draw(console: Console, data: dict[str, Any]) -> None:
    """Show losses, speed and memory of both runs."""
    names = [data[key]["name"] for key in "ab"]
    rows = [
        (f"{what} {_NAMES[key]}", f"{v['a']:.4f}", f"{v['b']:.4f}", f"{v['gap']:+.2f} %")
        for key, of in data["losses"].items()
        for what, v in of.items()
    ]
    for key, label in (("tokens_per_second", "tokens/s"), ("memory_gib", "memory, GiB")):
        if ratio := data[key]:
            rows.append(
                (label, f"{ratio['a']:,.1f}", f"{ratio['b']:,.1f}", f"{ratio['ratio']:.2f} ×")
            )
    console.print(table(("", *names, "B / A"), rows, right="*"))
    console.print(
        f"{counted(data['points'], 'point')} by {data['axis']}, training losses averaged over {data['window']}."
    )
    for note in data["notes"]:
        console.print(f"note: {note}")
    gap, limits = data["gap"], data["limits"]
    text = {"ok": "within limits", "warn": "a warning", "fail": "failed"}[data["verdict"]]
    console.print(
        f"largest gap: {gap['percent']:+.2f} % ({gap['of']}): {text} "
        f"(over {limits['warn']:g} % warns, over {limits['fail']:g} % fails)"
    )


def plot(path: Path, data: dict[str, Any], pairs: dict[str, Pair]) -> None:
    """Draw both curves, and below them their difference in percent.

    Raises:
        MissingLibraryError: without matplotlib.
        ConfigError: for a file that cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingLibraryError("a picture", "matplotlib", "plot") from None
    figure = Figure(figsize=(8, 6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    smoothed = [smooth(curve, data["window"]) for curve in pairs["loss"]]
    for run, color, raw, curve in zip(
        "ab", ("0.5", "tab:blue"), pairs["loss"], smoothed, strict=True
    ):
        top.plot(*zip(*raw, strict=True), color=color, alpha=0.25, linewidth=0.8)
        top.plot(*zip(*curve, strict=True), color=color, label=data[run]["name"])
    shown = {"loss": smoothed, **{k: p for k, p in pairs.items() if k != "loss"}}
    for run, color, curve in zip(
        "ab", ("0.5", "tab:blue"), pairs.get("val_loss", ()), strict=False
    ):
        label = f"{data[run]['name']}, validation"
        top.plot(*zip(*curve, strict=True), "o--", color=color, markersize=4, label=label)
    for key, (of_a, of_b) in shown.items():
        gap = [100 * (y / base - 1) for (_, base), (_, y) in zip(of_a, of_b, strict=True)]
        style = "-" if key == "loss" else "o--"
        bottom.plot([x for x, _ in of_a], gap, style, markersize=4, label=_NAMES[key])
    limits = data["limits"]
    for limit, color in ((limits["warn"], "tab:orange"), (limits["fail"], "tab:red")):
        bottom.axhline(limit, color=color, linewidth=0.8, linestyle=":")
    bottom.axhline(0, color="0.5", linewidth=0.8)
    top.set_ylabel("loss")
    bottom.set(xlabel=data["axis"], ylabel="B over A, %")
    top.legend()
    bottom.legend()
    try:
        figure.savefig(path, dpi=120, format="png")
    except OSError as error:
        raise ConfigError(f"--png {path} cannot be written: {reason_of(error)}") from error


def _ratio(a: Run, b: Run, key: str, of: Any) -> dict[str, float] | None:
    values = a.numbers(key), b.numbers(key)
    if not all(values) or not (first := of(values[0])):
        return None
    return {"a": first, "b": of(values[1]), "ratio": of(values[1]) / first}


def _reach(run: Run, xs: dict[int, float]) -> str:
    curve = run.curve("loss", xs)
    return f"{curve[0][0]:g} to {curve[-1][0]:g}"
