"""Everything that was measured, as one HTML page without files beside it: pictures, and the command behind each.

    python benchmarks/report.py                          # benchmarks/results/*.jsonl -> runs/report.html
    python benchmarks/report.py --results my/ --out page.html

A section is a picture of one file of records: memory, loss, step time over bytes, bandwidth over size, the roofline of
products, whole steps, frameworks, attention. Sections whose records are missing are left out, and named at the end of
the page. Each says on which GPU, with which versions, at which commit and by which command its records were made; where
runs of several days are in a picture, all are listed. Numbers are the records', not rounded twice.
"""

from __future__ import annotations

import argparse
import base64
import html
import io
import json
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import comm_tables
import matplotlib
from common import ROOT
from matplotlib.figure import Figure
from record_tables import by_variant

RESULTS = ROOT / "benchmarks" / "results"
Record = dict[str, Any]
OURS, PEER = "tab:orange", "0.7"
LEVELS = {
    "baseline": "black",
    "bf16": "black",
    "O0": "tab:blue",
    "O1": "tab:orange",
    "O2": "tab:red",
}
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
h1 { margin-bottom: 0 } h2 { margin-top: 3rem; border-top: 1px solid #ddd; padding-top: 1rem }
img { max-width: 100% } pre { background: #f6f6f6; padding: .6rem; overflow-x: auto; font-size: 13px }
details { color: #555; font-size: 14px } nav a { margin-right: 1rem }
"""


@dataclass(frozen=True)
class Section:
    """A picture of one file's records: which of them it shows, and how."""

    key: str
    title: str
    text: str
    file: str
    choose: Callable[[list[Record]], list[Record]]
    draw: Callable[[Figure, list[Record]], None]


# --- which records


def latest(records: Iterable[Record], **params: Any) -> list[Record]:
    """Return the records of the latest run among those with these parameters."""
    chosen = [r for r in records if params.items() <= r["params"].items()]
    last = max((r["time"] for r in chosen), default="")
    return [r for r in chosen if r["time"] == last]


def last_of_each(records: Iterable[Record], **params: Any) -> list[Record]:
    """Return the last record of every variant, since a run may have measured a few of them again."""
    return list(by_variant(r for r in records if params.items() <= r["params"].items()).values())


def last_runs(records: Iterable[Record], model: str) -> list[Record]:
    """Return the last record of every level and seed of a model."""
    chosen = (r for r in records if r["params"]["model"] == model)
    return list({(r["variant"], r["params"]["seed"]): r for r in chosen}.values())


# --- pictures


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
    """Mean validation curves, and below them each seed's difference to the baseline."""
    figure.set_size_inches(8, 6)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    curves: dict[str, dict[int, list[Any]]] = {}
    for r in rows:
        curves.setdefault(r["variant"], {})[r["params"]["seed"]] = r["validation"]
    base = curves.get("baseline") or curves["bf16"]
    for level, by_seed in curves.items():
        color = LEVELS[level]
        points = zip(*by_seed.values(), strict=True)
        mean = [(at[0][0], statistics.mean(loss for _, loss in at)) for at in points]
        above.plot(*zip(*mean, strict=True), color=color, marker=".", label=level)
        for seed, curve in by_seed.items():
            pairs = zip(curve, base[seed], strict=True)
            off = [(step, 100 * (loss / other - 1)) for (step, loss), (_, other) in pairs]
            below.plot(*zip(*off, strict=True), color=color, linewidth=0.8)
    below.axhspan(-0.5, 0.5, color="0.92", zorder=0)
    above.set(ylabel=f"validation loss, {rows[0]['unit']}")
    below.set(xlabel="step", ylabel="off the baseline, %", ylim=(-2, 2))
    above.legend(frameon=False)


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


def draw_whole_steps(figure: Figure, rows: list[Record]) -> None:
    sizes = [f"{r['resident']['total']:.1f}, {r['peak_gib']:.1f} GiB" for r in rows]
    labels = [f"{r['value']:.1f} ms, {size}" for r, size in zip(rows, sizes, strict=True)]
    bars(figure, rows, labels, "ms a step; bytes a parameter between steps; peak of memory")


def draw_frameworks(figure: Figure, rows: list[Record]) -> None:
    labels = [f"{r['value']:.1f} ms, {r['peak_gib']:.1f} GiB" for r in rows]
    bars(figure, rows, labels, "ms a step; and the peak of memory")


def draw_largest(figure: Figure, rows: list[Record]) -> None:
    labels = [f"{r['value'] / 1e9:.1f} B, {r['tokens_per_second']:,.0f} tokens/s" for r in rows]
    bars(figure, rows, labels, "parameters of the largest model that trains")


def draw_attention(figure: Figure, rows: list[Record]) -> None:
    labels = [f"{r['value']:.2f} ms, {r['peak_gib']:.2f} GiB" for r in rows]
    bars(figure, rows, labels, "ms, forward and backward", log=True)


SECTIONS = [
    Section(
        "memory", "Bytes a parameter", "What stays on the GPU between steps, counted on live tensors: weights, "
        "gradients, masters and optimizer states of each level.", "convergence.jsonl",
        lambda rows: [r for r in latest(rows, seed=0) if r["variant"] in LEVELS]
        or last_of_each(rows, seed=0), draw_levels,
    ),
    Section(
        "largest", "The largest model on one GPU", "Found by training: each bar is a model that took three steps, and "
        "one block more ran out of memory.", "memory.jsonl",
        lambda rows: [r for r in last_of_each(rows, model="largest", gib=None) if r["value"]], draw_largest,
    ),
    Section(
        "loss", "Loss", "Validation loss of every level, the mean of seeds, and how far each seed is off its "
        "baseline. The grey band is half a percent.", "convergence.jsonl", lambda rows: rows, draw_losses,
    ),
    Section(
        "optimizer", "An optimizer's step", "Time of one step over the bytes that it keeps, gradients included.",
        "optimizer_step.jsonl", lambda rows: last_of_each(rows, model="llama-3.2-1b", mode="step"), draw_bytes,
    ),
    Section(
        "wire", "Collectives", "Bytes of a bfloat16 tensor over the time it takes on four GPUs; fp8stack's are solid.",
        "comm.jsonl", lambda rows: latest(rows, ranks=4, graphs=False), draw_wire,
    ),
    Section(
        "roofline", "Products", "Forward and backward of single Linear layers.", "linear.jsonl",
        lambda rows: [r for r in rows if r["metric"] == "ms"], draw_roofline,
    ),
    Section(
        "steps", "Forward and backward of Llama blocks", "Four blocks of Llama-3-8B's size over 8,192 tokens.",
        "train_step.jsonl", lambda rows: latest(rows, model="llama"), draw_steps,
    ),
    Section(
        "whole", "A whole training step", "Forward, backward and optimizer of a Llama of 1.1 B parameters over 16,384 "
        "tokens.", "end_to_end.jsonl", lambda rows: latest(rows, model="llama-1b"), draw_whole_steps,
    ),
    *(
        Section(
            f"run-{model}", f"Long runs: {title}", "Validation loss of the training application at every level, and "
            "how far it is off that of bf16.", "training.jsonl", partial(last_runs, model=model), draw_losses,
        )
        for model, title in {"gpt2": "GPT-2 124M", "llama-1b": "Llama 1B"}.items()
    ),
    Section(
        "frameworks", "Inside frameworks", "A step of a Llama of 1.13 B parameters on two GPUs, in bf16 and at O2.",
        "frameworks.jsonl", latest, draw_frameworks,
    ),
    Section(
        "attention", "Attention", "Causal attention of Llama-3-8B's heads over 4,096 tokens.", "attention.jsonl",
        lambda rows: latest(rows, model="llama-4k"), draw_attention,
    ),
]  # fmt: skip


# --- the page


def picture(section: Section, rows: list[Record]) -> str:
    """Return the section's picture as an SVG within a page."""
    matplotlib.rcParams.update({"svg.hashsalt": "fp8stack"})
    figure = Figure(layout="constrained")
    section.draw(figure, rows)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    data = base64.b64encode(drawn.getvalue()).decode()
    return f'<img alt="{html.escape(section.title)}" src="data:image/svg+xml;base64,{data}">'


def conditions(rows: list[Record]) -> str:
    """Return how the records were made, each way once, the latest first."""
    ways = dict.fromkeys(
        (r["time"][:10], r["gpu"], r["torch"], r["git"], r["command"])
        for r in sorted(rows, key=lambda r: r["time"], reverse=True)
    )
    commands = "\n".join(dict.fromkeys(command for *_, command in ways))
    lines = [f"{day}: {gpu}, torch {torch}, commit {git}" for day, gpu, torch, git, _ in ways]
    told = "<br>".join(html.escape(line) for line in dict.fromkeys(lines))
    return f"<pre>{html.escape(commands)}</pre><details><summary>made on</summary>{told}</details>"


def read(path: Path) -> list[Record]:
    """Return the records of a file.

    Raises:
        ValueError: for a line that is no record, with its number.
    """
    records = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            record = json.loads(line)
            record["params"], record["time"], record["command"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}, is no record: {error!r}") from error
        records.append(record)
    return records


def make_page(results: Path) -> str:
    """Return the page of all records in a folder."""
    parts, contents, missing = [], [], []
    for section in SECTIONS:
        path = results / section.file
        rows = section.choose(read(path)) if path.exists() else []
        if not rows:
            missing.append(f"{section.title} ({section.file})")
            continue
        contents.append(f'<a href="#{section.key}">{html.escape(section.title)}</a>')
        parts.append(
            f'<h2 id="{section.key}">{html.escape(section.title)}</h2><p>{html.escape(section.text)}</p>'
            f"{picture(section, rows)}{conditions(rows)}"
        )
    if not parts:
        raise ValueError(f"{results} holds none of {', '.join(s.file for s in SECTIONS)}.")
    left = f"<p>Not recorded yet: {html.escape('; '.join(missing))}.</p>" if missing else ""
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>fp8stack: what was measured</title>'
        f"<style>{STYLE}</style><h1>fp8stack: what was measured</h1><nav>{''.join(contents)}</nav>"
        f"{''.join(parts)}{left}</html>\n"
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--results", type=Path, default=RESULTS, help="folder of records")
    add("--out", type=Path, default=Path("runs/report.html"))
    options = parser.parse_args(arguments)
    try:
        page = make_page(options.results)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(page)
    except (OSError, ValueError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
