"""Everything that was measured, as one HTML page without files beside it: pictures, and the command behind each.

    python benchmarks/report.py                          # benchmarks/results/*.jsonl -> runs/report.html
    python benchmarks/report.py --results my/ --out page.html
    python benchmarks/report.py --picture run-gpt2 --out docs/assets/long-runs.svg

A section is a picture of one file of records: memory, loss, step time over bytes, bandwidth over size, the roofline of
products, frameworks, attention. Sections whose records are missing are left out, and named at the end
of the page, as are files without a picture. Each says on which GPU, with which versions, at which commit and by which
command its records were made; where runs of several days are in a picture, all are listed. Numbers are the records',
not rounded twice.
"""

from __future__ import annotations

import argparse
import base64
import html
import io
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import report_pictures as pictures
from common import ROOT
from matplotlib.figure import Figure
from record_tables import by_variant, layers
from training_tables import LONG_RUNS, comparable, named

RESULTS = ROOT / "benchmarks" / "results"
Record = dict[str, Any]
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
h1 { margin-bottom: 0 } h2 { margin-top: 3rem; border-top: 1px solid #ddd; padding-top: 1rem }
img { max-width: 100% } pre { background: #f6f6f6; padding: .6rem; overflow-x: auto; font-size: 13px }
details { color: #555; font-size: 14px } nav a { margin-right: 1rem }
@media (prefers-color-scheme: dark) {
  body { background: #15181c; color: #e4e7eb } pre { background: #22272e } details { color: #9aa5b1 }
  a { color: #7fb4ff }
}
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


def plain_runs(records: Iterable[Record], model: str) -> list[Record]:
    """Return a model's long runs without flags of the application."""
    return [r for r in comparable(records, model) if named(r) == r["variant"]]


def last_pairs(records: Iterable[Record]) -> list[Record]:
    """Return the last record of every variant of every model."""
    return list({(r["params"]["model"], r["variant"]): r for r in records}.values())


SECTIONS = [
    Section(
        "memory", "Bytes a parameter", "What stays between steps, counted on live tensors of the demo: weights, "
        "gradients, masters and optimizer states of each level.", "demo.jsonl", last_of_each, pictures.draw_levels,
    ),
    Section(
        "optimizer", "An optimizer's step", "Time of one step over the bytes that it keeps, gradients included.",
        "optimizer_step.jsonl", lambda rows: last_of_each(rows, model="llama-3.2-1b", mode="step"), pictures.draw_bytes,
    ),
    Section(
        "wire", "Collectives", "Bytes of a bfloat16 tensor over the time it takes on four GPUs; fp8stack's are solid.",
        "comm.jsonl", lambda rows: latest(rows, ranks=4, graphs=False), pictures.draw_wire,
    ),
    Section(
        "roofline", "Products", "Forward and backward of single Linear layers.", "linear.jsonl",
        lambda rows: [r for r in rows if r["metric"] == "ms"], pictures.draw_roofline,
    ),
    Section(
        "steps", "Forward and backward of Llama blocks", "Four blocks of Llama-3-8B's size over 8,192 tokens.",
        "train_step.jsonl", lambda rows: list(layers(rows).values()), pictures.draw_steps,
    ),
    *(
        Section(
            f"run-{model}", f"Long runs: {title}", "Validation loss of the training application at every level, and "
            'how far it is off that of bf16; "bf16 again" is off by the order of its sums alone.', "training.jsonl",
            partial(plain_runs, model=model), pictures.draw_losses,
        )
        for model, title in LONG_RUNS.items()
    ),
    Section(
        "frameworks", "Inside frameworks", "A step of a Llama of 1.13 B parameters on two GPUs, in bf16 and at O2.",
        "frameworks.jsonl", latest, pictures.draw_frameworks,
    ),
    Section(
        "stability", "Formats and odd sizes", "Short runs at O2, each with another format, recipe, margin or "
        "size: how far the training loss of the last steps is off that of bf16.", "stability.jsonl",
        last_pairs, pictures.draw_stability,
    ),
    Section(
        "monitor", "A Monitor", "What sampling one step of a hundred adds to training.", "monitor_cost.jsonl",
        last_pairs, pictures.draw_monitor,
    ),
    Section(
        "attention", "Attention", "Causal attention of Llama-3-8B's heads over 4,096 tokens.", "attention.jsonl",
        lambda rows: latest(rows, model="llama-4k"), pictures.draw_attention,
    ),
]  # fmt: skip


# --- the page


THEME = b"""<style>svg{color:#1f2933;fill:currentColor}
@media (prefers-color-scheme:dark){svg{color:#e4e7eb}}</style>"""


def drawn(section: Section, rows: list[Record]) -> bytes:
    """Return the section's picture as an SVG, whose text and lines are light where the reader's theme is dark."""
    clear = {"axes.facecolor": "none", "legend.facecolor": "none", "figure.facecolor": "none"}
    matplotlib.rcParams.update({"svg.hashsalt": "fp8stack", **clear})
    figure = Figure(layout="constrained")
    section.draw(figure, rows)
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    head, tag, body = file.getvalue().partition(b"<defs>")
    return head + THEME + tag + body.replace(b"#000000", b"currentColor")


def picture(section: Section, rows: list[Record]) -> str:
    """Return the section's picture within a page."""
    data = base64.b64encode(drawn(section, rows)).decode()
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
        raise ValueError(
            f"{results} holds none of {', '.join(dict.fromkeys(s.file for s in SECTIONS))}."
        )
    left = f"<p>Not recorded yet: {html.escape('; '.join(missing))}.</p>" if missing else ""
    shown = {section.file for section in SECTIONS}
    if bare := sorted(path.name for path in results.glob("*.jsonl") if path.name not in shown):
        left += f"<p>Records without a picture here: {html.escape(', '.join(bare))}.</p>"
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
    keys = {section.key: section for section in SECTIONS}
    add("--picture", choices=keys, metavar="KEY", help="write this section's alone, as an SVG")
    options = parser.parse_args(arguments)
    try:
        if options.picture:
            section = keys[options.picture]
            page = drawn(section, section.choose(read(options.results / section.file)))
        else:
            page = make_page(options.results).encode()
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_bytes(page)
    except (OSError, ValueError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
