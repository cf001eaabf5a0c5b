"""Show the records of a demo: a table in the terminal and a self-contained `report.html`.

The page has the loss curves, each level's distance from the baseline, and the bytes per parameter as
stacked bars. Pictures are SVG and HTML that is written here, so the page needs no network, no
script, and no package to draw it. Colours and the size of text are the style sheet's, also in the
pictures: the page follows the reader's light or dark theme, and can be read on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from record import TOLERANCE, Record, compare_loss, find_baseline, judge

from fp8stack.cli.output import size, table

PARTS = ("weight", "master", "grad", "m", "v")
WIDTH, LEFT, RIGHT, TOP, BOTTOM = 720, 70, 28, 14, 40  # of a picture and its margins, in its units
Points = Sequence[tuple[float, float]]


def summarize(records: Sequence[Record]) -> dict[str, Any]:
    """Return the numbers that are compared, by level, and what they are of, as plain data."""
    baseline = find_baseline(records)
    levels = {
        record.level: {
            "validation_loss": record.final_loss,
            "difference": compare_loss(record, baseline) if baseline else None,
            "tokens_per_second": record.tokens_per_second,
            "bytes_per_parameter": record.bytes_per_parameter,
            "peak_bytes": record.peak_bytes,
            "skipped_steps": record.skipped_steps,
        }
        for record in records
    }
    data: dict[str, Any] = {"levels": levels}
    if records:
        last = records[-1]
        data["losses"] = judge(records)
        data["sample"] = {"level": last.level, "text": last.sample}
        data["conditions"] = last.conditions
    return data


def draw(data: dict[str, Any]) -> Iterator[str]:
    """Show the table, and what can be said of the losses."""
    rows = []
    for level, of in data["levels"].items():
        difference, peak = of["difference"], of["peak_bytes"]
        cells = [level, f"{of['validation_loss']:.4f}"]
        cells += [] if difference is None else [f"{difference:+.2%}"]
        cells += [f"{of['tokens_per_second']:,.0f}", f"{of['bytes_per_parameter']['total']:.2f}"]
        rows.append([*cells, "" if peak is None else size(peak)])
    if rows:
        compared = ["difference"] * (len(rows[0]) == 6)
        header = ["level", "loss", *compared, "tokens/s", "bytes/parameter", "peak"]
        yield table(header, rows, right=" ".join(header[1:]))
        if not data["problems"]:
            yield data["losses"]


def write_html(records: Sequence[Record], problems: Sequence[str], folder: Path) -> Path:
    """Write `report.html` into `folder` and return its path."""
    baseline, last = find_baseline(records), records[-1]
    page = PAGE.substitute(
        verdict=escape("; ".join(problems) or judge(records)),
        verdict_class="bad" if problems else "good" if baseline else "none",
        table=tabulate(records, baseline),
        legend="".join(f'<span class="{r.level}">{r.level}</span>' for r in records),
        losses=draw_losses(records),
        differences=draw_differences(records, baseline) if baseline and len(records) > 1 else "",
        bars=draw_bars(records),
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


def tabulate(records: Sequence[Record], baseline: Record | None) -> str:
    """Return the one table, without a column of differences where losses are not compared."""
    header = ["level", "val loss", "vs base", "tokens/s", *PARTS, "total", "peak MiB"]
    rows = [header]
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
    cells = [[c for i, c in enumerate(row) if baseline or header[i] != "vs base"] for row in rows]
    lines = [
        "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) + "</tr>"
        for tag, row in zip(["th"] + ["td"] * len(records), cells, strict=True)
    ]
    return "\n".join(lines)


# --- pictures


def draw_losses(records: Sequence[Record]) -> str:
    """Training loss, smoothed, as lines from the 5 % on; validation loss as dots.

    The steep fall of the first steps would leave no room for what differs later.
    """
    lines: dict[str, Points] = {}
    for record in records:
        first = len(record.train_loss) // 20
        smoothed = list(enumerate(smooth(record.train_loss), 1))[first:]
        lines[record.level] = finite(smoothed)
    dots = {record.level: finite(record.validation) for record in records}
    return draw_curves("loss over steps", 400, lines, dots)


def draw_differences(records: Sequence[Record], baseline: Record) -> str:
    """How far each level's validation loss is above the baseline's, in percent, and what is allowed."""
    lines = {}
    for record in records:
        pairs = zip(record.validation, baseline.validation, strict=True)
        lines[record.level] = finite([(x, 100 * (y / base - 1)) for (x, y), (_, base) in pairs])
    picture = draw_curves("distance over steps", 200, lines, lines, band=100 * TOLERANCE)
    return f"<h3>Distance from the baseline, %</h3>\n{picture}"


def smooth(losses: Sequence[float], keep: float = 0.9) -> list[float]:
    """Exponential moving average without the start-up bias towards zero."""
    smoothed, mean = [], 0.0
    for count, loss in enumerate(losses, 1):
        mean = keep * mean + (1 - keep) * loss
        smoothed.append(mean / (1 - keep**count))
    return smoothed


def finite(points: Points) -> Points:
    return [(x, y) for x, y in points if math.isfinite(y)]


def draw_curves(
    title: str,
    height: int,
    lines: dict[str, Points],
    dots: dict[str, Points],
    band: float | None = None,  # that a green area shows on both sides of 0
) -> str:
    """Return an SVG element of `lines` and `dots` by level, between ticks on both axes."""
    points = [point for curves in (lines, dots) for curve in curves.values() for point in curve]
    xs, ys = [x for x, _ in points] or [0], [y for _, y in points] or [0]
    ys += [-1.2 * band, 1.2 * band] if band else []
    x0, x1, y0, y1 = min(xs), max(xs), min(ys), max(ys)
    margin = 0.03 * (y1 - y0) or 0.5
    x1, y0, y1 = max(x1, x0 + 1), y0 - margin, y1 + margin
    right, bottom = WIDTH - RIGHT, height - BOTTOM

    def across(x: float) -> str:
        return f"{LEFT + (x - x0) / (x1 - x0) * (right - LEFT):.1f}"

    def down(y: float) -> str:
        return f"{bottom - (y - y0) / (y1 - y0) * (bottom - TOP):.1f}"

    parts = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{title}">']
    if band:
        tall = float(down(-band)) - float(down(band))
        parts.append(
            f'<rect class="band" x="{LEFT}" y="{down(band)}" width="{right - LEFT}" height="{tall:.1f}"/>'
        )
    for y in ticks(y0, y1, height // 66):
        parts.append(f'<path class="grid" d="M{LEFT} {down(y)}H{right}"/>')
        parts.append(f'<text class="y" x="{LEFT - 10}" y="{down(y)}">{y:g}</text>')
    for x in ticks(x0, x1, 5):
        parts.append(f'<path class="grid" d="M{across(x)} {bottom}v6"/>')
        parts.append(f'<text class="x" x="{across(x)}" y="{bottom + 12}">{x:g}</text>')
    for level, curve in lines.items():
        drawn = " ".join(f"{across(x)},{down(y)}" for x, y in curve)
        parts.append(f'<polyline class="{level}" points="{drawn}"/>')
        for x, y in dots[level]:
            parts.append(f'<circle class="{level}" cx="{across(x)}" cy="{down(y)}" r="5"/>')
    return "\n".join([*parts, "</svg>"])


def ticks(low: float, high: float, most: int) -> list[float]:
    """Return round numbers from `low` to `high`, at most about `most`."""
    wanted = (high - low) / most
    power = 10.0 ** math.floor(math.log10(wanted))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= 0.999 * wanted)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [round(i * step, 9) for i in range(first, last + 1)]


def draw_bars(records: Sequence[Record]) -> str:
    """Bytes per parameter, one bar a level, stacked by what they store; where there is room, with numbers."""
    longest = max(record.bytes_per_parameter["total"] for record in records)
    lines = ['<div class="legend">']
    lines += [f'<span class="{part}">{part}</span>' for part in PARTS]
    lines.append('</div>\n<div class="bars">')
    for record in records:
        held = [(part, record.bytes_per_parameter[part]) for part in PARTS]
        bar = "".join(
            f'<i class="{part}" style="width:{100 * n / longest:.2f}%">{f"{n:.1f}" if n > longest / 9 else ""}</i>'
            for part, n in held
            if n
        )
        total = record.bytes_per_parameter["total"]
        lines.append(f"<span>{record.level}</span><div>{bar}</div><b>{total:.1f}</b>")
    return "\n".join([*lines, "</div>"])


PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>fp8stack demo</title>
<style>
:root { color-scheme: light dark; --ink: #24292f; --paper: #ffffff; --quiet: #f4f6f8; --rule: #d0d7de;
  --good: #3d8b4a; --bad: #c9364a; --baseline: #8c8c8c; --O0: #3f6b9c; --O1: #b8690f; --O2: #c9364a;
  --weight: #2f5d8f; --master: #5b82b5; --grad: #b56a14; --m: #2f7a3c; --v: #57945a; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #d5d9de; --paper: #15181c; --quiet: #1e2227; --rule: #343a41;
    --good: #6fbf73; --bad: #ff7b86; --baseline: #9a9a9a; --O0: #7fb0e6; --O1: #e9a35a; --O2: #ff7b86; }
}
body { font: 16px/1.5 system-ui, sans-serif; max-width: 52rem; margin: 2rem auto; padding: 0 1rem;
  color: var(--ink); background: var(--paper); overflow-wrap: break-word; }
h1 { font-size: 1.6rem; line-height: 1.25; }
h2 { font-size: 1.15rem; margin-top: 2.2rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 0; }
.good, .bad, .none { border-left: 4px solid var(--rule); padding-left: .8rem; }
.good { border-color: var(--good); }
.bad { border-color: var(--bad); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; }
th, td { text-align: right; padding: .3rem .5rem; white-space: nowrap; border-bottom: 1px solid var(--rule); }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: var(--paper); }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; margin-top: .6rem; }
.legend span::before { content: ""; display: inline-block; width: .8em; height: .8em; margin-right: .4em;
  background: var(--own); }
svg { display: block; width: 100%; height: auto; }
svg text { font-size: 14px; fill: var(--ink); }
.x { text-anchor: middle; dominant-baseline: hanging; }
.y { text-anchor: end; dominant-baseline: central; }
.grid { stroke: var(--rule); vector-effect: non-scaling-stroke; }
.band { fill: var(--good); opacity: .15; }
polyline { fill: none; stroke: var(--own); stroke-width: 1.5; vector-effect: non-scaling-stroke; }
polyline.baseline { stroke-width: 4; opacity: .5; }
circle { fill: var(--own); }
.baseline { --own: var(--baseline); } .O0 { --own: var(--O0); } .O1 { --own: var(--O1); }
.O2 { --own: var(--O2); } .weight { --own: var(--weight); } .master { --own: var(--master); }
.grad { --own: var(--grad); } .m { --own: var(--m); } .v { --own: var(--v); }
.bars { display: grid; grid-template-columns: max-content minmax(0, 1fr) max-content; gap: .5rem .7rem;
  align-items: center; margin-top: .6rem; }
.bars div { display: flex; height: 1.7rem; }
.bars i { background: var(--own); color: #fff; font: .8rem/1.7rem system-ui, sans-serif; text-align: center;
  overflow: hidden; }
pre { font-size: .85rem; padding: 1rem; overflow-x: auto; background: var(--quiet); }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .3rem 1.2rem; }
dt { font-weight: 600; }
dd { margin: 0; }
@media (max-width: 600px) {
  body { margin: 1rem auto; }
  svg text { font-size: 24px; }
  circle { r: 7px; }
}
</style>
</head>
<body>
<h1>One GPT, trained with and without FP8</h1>
<p class="$verdict_class">$verdict</p>
<div class="wide" tabindex="0"><table>
$table
</table></div>
<p><small>Weight to total: bytes per parameter of the matrices, measured on the live tensors.
Peak: the most that memory grew over what was in use before the model was built; activations are
most of it in a small model, and a CPU adds the temporary copies of its FP8 emulation.</small></p>
<h2>Loss</h2>
<p>In nats per byte, over steps. Lines are of training (smoothed), dots of validation.</p>
<div class="legend">$legend</div>
$losses
$differences
<h2>Bytes per parameter</h2>
$bars
<h2>Conditions</h2>
<dl>
$conditions
</dl>
<h2>A sample written by the $sample_level model</h2>
<pre>$sample</pre>
</body>
</html>
""")
