"""Show the records of a demo: a table in the terminal and a self-contained `report.html`.

The page has two pictures, drawn by matplotlib as SVG inside it: the loss curves with each level's
distance from the baseline below them, and the bytes per parameter as stacked bars. It needs no
network and no script. It follows the reader's light or dark theme: the ink of the pictures is
drawn in a colour that stands for the page's own text colour and is replaced by it.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from record import TOLERANCE, Record, compare_loss, find_baseline, find_deviations
from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

PARTS = ("weight", "master", "grad", "m", "v")
PART_COLOURS = ("#3f6b9c", "#7196c4", "#d08127", "#3d8b4a", "#6fae67")
LEVEL_COLOURS = {"baseline": "#8c8c8c", "O0": "#4e79a7", "O1": "#e0913b", "O2": "#d1495b"}
INK = "#123456"  # stands for the page's text colour, see above
STYLE = {
    "svg.fonttype": "none",  # text stays text: selectable, in the page's font
    "svg.hashsalt": "fp8stack",  # the same records give the same file
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
}


def tabulate(records: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the one table, as text."""
    baseline = find_baseline(records)
    header = ["level", "val loss", "vs base", "tokens/s", *PARTS, "total", "peak MiB"]
    rows = []
    for record in records:
        peak = record.peak_bytes
        rows.append(
            [
                record.level,
                f"{record.final_loss:.4f}",
                f"{compare_loss(record, baseline):+.2%}" if baseline else "",
                f"{record.tokens_per_second:,.0f}",
                *(f"{record.bytes_per_parameter[part]:.2f}" for part in (*PARTS, "total")),
                "" if peak is None else f"{peak / 2**20:,.0f}",
            ]
        )
    return header, rows


def print_table(records: Sequence[Record]) -> None:
    header, rows = tabulate(records)
    table = Table(
        title="weight to total: bytes per parameter, measured",
        box=box.SIMPLE_HEAD,
        padding=0,  # the box's own gap is enough, and the table fits into 80 columns
    )
    for name in header:
        table.add_column(name, justify="left" if name == "level" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def print_sample(records: Sequence[Record]) -> None:
    for record in records:
        if record.sample:
            title = f"written by the {record.level} model"
            Console().print(Panel(Text(record.sample), title=title))


def write_html(records: Sequence[Record], folder: Path) -> Path:
    """Write `report.html` into `folder` and return its path."""
    header, rows = tabulate(records)
    deviations = find_deviations(records)
    last = records[-1]
    page = PAGE.substitute(
        verdict=escape("; ".join(deviations) or praise(records)),
        verdict_class="bad" if deviations else "good",
        header="".join(f"<th>{escape(name)}</th>" for name in header),
        rows="\n".join(
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
        ),
        curves=draw(draw_curves, records, (8.2, 5.0)),
        bars=draw(draw_bars, records, (8.2, 0.9 + 0.5 * len(records))),
        sample_level=escape(last.level),
        sample=escape(last.sample),
        conditions="\n".join(
            f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>"
            for name, text in last.conditions.items()
        ),
    )
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def praise(records: Sequence[Record]) -> str:
    if find_baseline(records) is None:
        return "Trained without a baseline to compare with."
    return f"Every level ends within {TOLERANCE:.0%} of the baseline's validation loss or below it."


# --- pictures -------------------------------------------------------------------------------------


def draw_curves(figure: Figure, records: Sequence[Record]) -> None:
    """Loss of all levels over each other; below, how far each is from the baseline."""
    baseline = find_baseline(records)
    if baseline is None:
        draw_losses(figure.subplots(), records)
        return
    above, below = figure.subplots(2, sharex=True, height_ratios=(5, 2))
    draw_losses(above, records)
    above.set_xlabel("")
    for record in records:
        steps, losses = zip(*record.validation, strict=True)
        percent = [
            100 * (loss / reference - 1)
            for loss, (_, reference) in zip(losses, baseline.validation, strict=True)
        ]
        below.plot(steps, percent, ".-", color=LEVEL_COLOURS[record.level], linewidth=1.2)
    below.axhspan(-100 * TOLERANCE, 100 * TOLERANCE, color="#59a14f", alpha=0.12, linewidth=0)
    below.set(xlabel="step", ylabel="% from baseline")


def draw_losses(axes: Axes, records: Sequence[Record]) -> None:
    """Training loss, smoothed, as lines from the 5 % on; validation loss as dots.

    The steep fall of the first steps would leave no room for what differs later.
    """
    for record in records:
        wide = record.level == "baseline"  # drawn first and wide, it shows from under the others
        colour = LEVEL_COLOURS[record.level]
        first = len(record.train_loss) // 20
        axes.plot(
            range(first + 1, len(record.train_loss) + 1),
            smooth(record.train_loss)[first:],
            color=colour,
            linewidth=4 if wide else 1.2,
            alpha=0.45 if wide else 1,
            label=record.level,
        )
        axes.plot(*zip(*record.validation, strict=True), "o", color=colour, markersize=4)
    axes.set(xlabel="step", ylabel="loss, nats per byte")
    axes.legend(title="line: training · dots: validation")


def smooth(losses: Sequence[float], keep: float = 0.9) -> list[float]:
    """Exponential moving average without the start-up bias towards zero."""
    smoothed, mean = [], 0.0
    for count, loss in enumerate(losses, 1):
        mean = keep * mean + (1 - keep) * loss
        smoothed.append(mean / (1 - keep**count))
    return smoothed


def draw_bars(figure: Figure, records: Sequence[Record]) -> None:
    """Bytes per parameter, one bar a level, stacked by what they store."""
    axes = figure.subplots()
    levels = [record.level for record in records]
    left = [0.0] * len(records)
    for part, colour in zip(PARTS, PART_COLOURS, strict=True):
        sizes = [record.bytes_per_parameter[part] for record in records]
        bars = axes.barh(levels, sizes, left=left, color=colour, height=0.62, label=part)
        labels = [f"{size:.1f}" if size >= 0.8 else "" for size in sizes]
        axes.bar_label(bars, labels, label_type="center", color="white", fontsize=9)
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    axes.bar_label(bars, [f"{total:.1f}" for total in left], padding=6, fontweight="bold")
    axes.invert_yaxis()
    axes.margins(x=0.08)
    axes.tick_params(left=False)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("bytes per parameter")
    axes.legend(ncols=len(PARTS), loc="lower left", bbox_to_anchor=(0, 1))


def draw(painter, records: Sequence[Record], size: tuple[float, float]) -> str:
    """Run `painter` on a new figure of `size` inches; the SVG element, without its XML prologue."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(size, layout="constrained")
        painter(figure, records)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    return svg[svg.index("<svg") :].replace(INK, "currentColor")


PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>fp8stack demo</title>
<style>
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 52rem; margin: 2rem auto; padding: 0 1rem;
  color: light-dark(#24292f, #d5d9de); background: light-dark(#ffffff, #15181c); }
h1 { font-size: 1.6rem; margin-bottom: 0; }
h2 { font-size: 1.1rem; margin-top: 2.2rem; }
.good, .bad { border-left: 4px solid; padding-left: .8rem; }
.good { border-color: #59a14f; }
.bad { border-color: #d1495b; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; }
th, td { text-align: right; padding: .3rem .5rem; white-space: nowrap;
  border-bottom: 1px solid light-dark(#d0d7de, #343a41); }
th:first-child, td:first-child { text-align: left; }
svg { max-width: 100%; height: auto; }
pre { font-size: .85rem; padding: 1rem; overflow-x: auto;
  background: light-dark(#f4f6f8, #1e2227); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .3rem 1.2rem; }
dt { font-weight: 600; }
dd { margin: 0; }
</style>
</head>
<body>
<h1>One GPT, trained at each level of fp8stack</h1>
<p class="$verdict_class">$verdict</p>
<div class="wide"><table>
<thead><tr>$header</tr></thead>
<tbody>
$rows
</tbody>
</table></div>
<p><small>Weight to total: bytes per parameter of the matrices, measured on the live tensors.
Peak: the most that memory grew over what was in use before the model was built; activations are
most of it in a small model, and a CPU adds the temporary copies of its FP8 emulation.</small></p>
<h2>Loss</h2>
$curves
<h2>Memory per parameter</h2>
$bars
<h2>A sample written by the $sample_level model</h2>
<pre>$sample</pre>
<h2>Conditions</h2>
<dl>
$conditions
</dl>
</body>
</html>
""")
