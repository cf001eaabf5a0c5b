"""The pictures of `report.py`: each function draws records into a figure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection

import comm_tables
from matplotlib.figure import Figure
from record_tables import Record, runs_by_seed

OURS, PEER = "tab:orange", "0.7"
LEVELS = {
    "baseline": "black",
    "bf16": "black",
    "bf16 again": "0.6",
    "O0": "tab:blue",
    "O1": "tab:orange",
    "O2": "tab:red",
}
OTHERS = (
    "tab:green", "tab:purple", "tab:brown", "tab:pink", "tab:olive", "tab:cyan", "navy", "magenta", "darkolivegreen",
    "mediumspringgreen", "deeppink", "darkkhaki", "blueviolet", "lightsalmon", "darkgoldenrod", "pink",
)  # fmt: skip
STYLES = {"level": "-", "fallback": "--", "peer": "-.", "other": ":"}


def bars(
    figure: Figure, rows: list[Record], labels: list[str], axis: str, log: bool = False
) -> None:
    """Draw a bar a record, the smallest value on top; fp8stack's in color."""
    order = sorted(range(len(rows)), key=lambda i: -rows[i]["value"])
    figure.set_size_inches(9, 1 + 0.28 * len(rows))
    plot = figure.add_subplot()
    names, values = ([rows[i][k] for i in order] for k in ("variant", "value"))
    drawn = plot.barh(names, values, color=[OURS if is_ours(n) else PEER for n in names])
    plot.bar_label(drawn, [labels[i] for i in order], padding=3, fontsize="small")
    plot.margins(x=0.35)
    plot.set(xlabel=axis, xscale="log" if log else "linear")
    if log:
        plot.set_xlim(min(values) / 2, max(values) * 8)


def is_ours(name: str) -> bool:
    ours = ("fp8stack", "native", "DataParallel", "hook", "O0", "O1", "O2")
    return name.startswith(ours) or " O2" in name


def draw_levels(figure: Figure, rows: list[Record]) -> None:
    """Bytes a parameter by kind, of each level."""
    figure.set_size_inches(8, 3)
    plot = figure.add_subplot()
    found = {r["variant"]: r["bytes_per_parameter"] for r in rows}
    by_level = {level: found[level] for level in LEVELS if level in found}
    left = dict.fromkeys(by_level, 0.0)
    for kind in dict.fromkeys(k for parts in by_level.values() for k in parts if k != "total"):
        sizes = [parts.get(kind, 0.0) for parts in by_level.values()]
        plot.barh(list(by_level), sizes, left=list(left.values()), label=kind)
        for level, size in zip(by_level, sizes, strict=True):
            left[level] += size
    for level, total in left.items():
        plot.text(total, level, f" {total:.2f}", va="center")
    plot.invert_yaxis()
    plot.margins(x=0.1)
    plot.set(xlabel="bytes a parameter")
    figure.legend(loc="outside right upper", frameon=False)


def draw_losses(figure: Figure, rows: list[Record]) -> None:
    """Mean validation curves, and below them each seed's difference to the baseline; a seed's own is its runs' mean."""
    figure.set_size_inches(8, 6)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    curves = {}
    for variant in dict.fromkeys(r["variant"] for r in rows):
        seeds = runs_by_seed(r for r in rows if r["variant"] == variant)
        curves[variant] = {
            seed: mean_curve([dict(r["validation"]) for r in runs]) for seed, runs in seeds.items()
        }
    base = curves["bf16"]
    ends, looks = [2.0], looks_of(list(curves))
    for level, by_seed in curves.items():
        mean = mean_curve(by_seed.values())
        color, style = looks[level]
        above.plot(list(mean), list(mean.values()), style, color=color, marker=".", label=level)
        for seed, curve in by_seed.items():
            other = base.get(seed, {})
            off = {step: 100 * (curve[step] / other[step] - 1) for step in curve if step in other}
            below.plot(list(off), list(off.values()), style, color=color, linewidth=0.8)
            last = [abs(x) for x in list(off.values())[-1:]]  # the first ones may be wild
            ends += [min(1.2 * x, 10.0) for x in last if math.isfinite(x)]  # and so may a peer be
    below.axhspan(-0.5, 0.5, color="0.5", alpha=0.15, zorder=0)
    above.set(ylabel=f"validation loss, {rows[0]['unit']}")
    below.set(xlabel="step", ylabel="off the baseline, %", ylim=(-max(ends), max(ends)))
    figure.legend(loc="outside right upper", frameon=False, fontsize="small", handlelength=3)


def mean_curve(curves: Collection[dict[int, float]]) -> dict[int, float]:
    """Return the mean at the steps that all have."""
    shared = [step for step in next(iter(curves)) if all(step in curve for curve in curves)]
    return {step: statistics.mean(curve[step] for curve in curves) for step in shared}


def looks_of(variants: list[str]) -> dict[str, tuple[str, str]]:
    """Return color and line style of each: a level's are its own everywhere, others' styles tell their kinds."""
    others = [v for v in variants if v not in LEVELS]
    looks = {v: (LEVELS[v], STYLES["level"]) for v in variants if v in LEVELS}
    for i, variant in enumerate(others):
        kind = variant.partition("/")[0]
        style = STYLES[kind if kind in ("fallback", "peer") else "other"]
        looks[variant] = OTHERS[i % len(OTHERS)], style
    return looks


def draw_bytes(figure: Figure, rows: list[Record]) -> None:
    """Step time over the bytes that an optimizer keeps; the line is what a copy of them takes."""
    figure.set_size_inches(8, 5)
    plot = figure.add_subplot()
    for r in rows:
        x, y, name = r["extra"]["bytes"]["total"], r["value"], r["variant"]
        plot.plot(x, y, "o", color=OURS if is_ours(name) else PEER)
        plot.annotate(name, (x, y), (4, 3), textcoords="offset points", fontsize=7)
    copy = next((r["extra"]["copy_tb_s"] for r in rows if r["extra"].get("copy_tb_s")), None)
    if copy:
        most = max(r["extra"]["bytes"]["total"] for r in rows)
        count = rows[0]["params"]["n_params"]
        line = [2 * x * count / copy / 1e9 for x in (0, most)]  # read and written
        plot.plot([0, most], line, "k:", label=f"a copy of them, at {copy:.2f} TB/s")
        plot.legend(frameon=False)
    plot.set(xlabel="bytes a parameter, gradient included", ylabel="ms a step", yscale="log")


def draw_wire(figure: Figure, rows: list[Record]) -> None:
    """Bytes of the bfloat16 tensor over the time, by its size."""
    collectives = comm_tables.tabulate(rows)
    figure.set_size_inches(5 * len(collectives), 4)
    for plot, (name, kinds) in zip(
        figure.subplots(1, len(collectives), squeeze=False)[0], collectives.items(), strict=True
    ):
        for variant, row in kinds.items():
            style = "-" if variant.startswith(("nvlink", "collective")) else "--"
            speed = [r["params"]["size"] / r["value"] / 1e6 for r in row.values()]
            plot.loglog(list(row), speed, style, base=2, marker=".", label=variant)
        sizes = sorted({size for row in kinds.values() for size in row})
        plot.set_xticks(sizes, [comm_tables.name_size(s) for s in sizes], rotation=45, ha="right")
        plot.minorticks_off()
        plot.set(title=name, xlabel="bytes of the tensor in bfloat16", ylabel="GB/s of them")
        plot.legend(fontsize="x-small", loc="lower right")


def draw_roofline(figure: Figure, rows: list[Record]) -> None:
    """TFLOP/s of a layer's forward and backward over the operations for each byte that it has to move."""
    figure.set_size_inches(8, 5)
    plot = figure.add_subplot()
    for library in dict.fromkeys(r["params"]["library"].split()[0] for r in rows):
        points = [
            (intensity(r), operations(r) / r["value"] / 1e9)
            for r in rows
            if r["params"]["library"].split()[0] == library
        ]
        plot.plot(*zip(*points, strict=True), "o", label=library, alpha=0.8)
    plot.set(
        xlabel="operations a byte (bfloat16 in and out, once)",
        ylabel="TFLOP/s, forward and backward",
        xscale="log",
        yscale="log",
    )
    ends = min(map(intensity, rows)) / 1.2, max(map(intensity, rows)) * 1.2
    measured = rows[-1]["extra"]  # what this GPU reaches, in the same run
    for name, style in {"fp8": "k-", "bf16": "k--"}.items():
        peak, slope = measured[f"{name}_tflop_s"], measured["copy_tb_s"]
        corner = max(ends[0], peak / slope)
        plot.plot([ends[0], corner, ends[1]], [min(peak, slope * ends[0]), peak, peak], style, linewidth=0.8,
                  label=f"{name} products alone: {peak:,.0f}; copies: {slope:.1f} TB/s")  # fmt: skip
    plot.legend(frameon=False)


def operations(record: Record) -> float:
    p = record["params"]
    return 6.0 * p["tokens"] * p["in"] * p["out"]


def intensity(record: Record) -> float:
    p = record["params"]
    # forward: x, w, y; backward: their gradients, and x and w again
    moved = 2 * (3 * p["tokens"] * p["in"] + 2 * p["tokens"] * p["out"] + 3 * p["in"] * p["out"])
    return operations(record) / moved


def draw_steps(figure: Figure, rows: list[Record]) -> None:
    peaks = [r["extra"]["peak_gib"] for r in rows]
    memory = ["" if peak is None else f", {peak:.1f} GiB" for peak in peaks]
    labels = [f"{r['value']:.1f} ms{m}" for r, m in zip(rows, memory, strict=True)]
    bars(figure, rows, labels, "ms, forward and backward")


def draw_frameworks(figure: Figure, rows: list[Record]) -> None:
    labels = [f"{r['value']:.1f} ms, {r['peak_gib']:.1f} GiB" for r in rows]
    bars(figure, rows, labels, "ms a step; and the peak of memory")


def draw_attention(figure: Figure, rows: list[Record]) -> None:
    labels = [f"{r['value']:.2f} ms, {r['peak_gib']:.2f} GiB" for r in rows]
    bars(figure, rows, labels, "ms, forward and backward", log=True)


def draw_stability(figure: Figure, rows: list[Record]) -> None:
    """Gaps of all runs, a line for each model and size; the grey band is 5 %."""
    titles = list(dict.fromkeys(r["params"]["model"] for r in rows))
    figure.set_size_inches(9, 1 + 0.4 * len(titles))
    plot = figure.add_subplot()
    for name in dict.fromkeys(r["variant"].partition(",")[0] for r in rows):
        own = [r for r in rows if r["variant"].partition(",")[0] == name]
        gaps = [100 * r["value"] for r in own]
        plot.plot(
            gaps, [titles.index(r["params"]["model"]) for r in own], "o", alpha=0.6, label=name
        )
    plot.set_yticks(range(len(titles)), titles)
    plot.axvspan(-5, 5, color="0.5", alpha=0.15, zorder=0)
    plot.set(xlabel="off the loss of bf16, %")
    figure.legend(loc="outside right upper", frameon=False, fontsize="small")


def draw_monitor(figure: Figure, rows: list[Record]) -> None:
    named = [{**r, "variant": f"{r['params']['model']}, {r['variant']}"} for r in rows]
    labels = [f"{r['value']:+.2%}, a sampled step {r['sampled_ms']:.0f} ms" for r in rows]
    bars(
        figure, [{**r, "value": 100 * r["value"]} for r in named], labels, "% of the time of steps"
    )
