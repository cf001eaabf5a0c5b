"""benchmarks/report.py: a page of all records, that a browser shows, as it does the demo's; and its pictures."""

import re
import shutil
import subprocess

import corpus
import demo
import demo_report
import pytest
import report
import report_pictures
from gpt import ModelConfig
from matplotlib.figure import Figure

BROWSERS = (
    "chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "chrome-headless-shell",
)  # fmt: skip
WIDTHS = """<script>addEventListener("load", () => {
    const drawn = [...document.querySelectorAll("svg")].map(s => s.getBoundingClientRect().width)
    document.body.dataset.widths = [...document.images].map(i => i.naturalWidth).concat(drawn) })</script>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    out = tmp_path_factory.mktemp("folder") / "new" / "page.html"
    assert report.main(["--out", str(out)]) == 0
    return out.read_text()


def test_every_file_of_records_has_its_picture_and_each_its_command(page):
    files = [(s, report.RESULTS / s.file) for s in report.SECTIONS]
    present = [s for s, path in files if path.exists() and s.choose(report.read(path))]
    assert page.count("<img ") == len(present) >= 7
    assert all(f'id="{section.key}"' in page for section in present)
    undrawn = {path.name for path in report.RESULTS.glob("*.jsonl")} - {s.file for s in present}
    assert undrawn == set(re.search(r"without a picture here: (.*?)\.</p>", page)[1].split(", "))
    assert not re.search(r'(src|href)="(?!data:|#)', page), "the page stands alone"
    pictures = re.findall(r"<img .*?</pre>", page, re.S)
    assert len(pictures) == len(present)
    assert all("<pre>python " in picture for picture in pictures)


def browse(page, folder):
    """Show a page to a browser; return the widths of its pictures there. Skips where no browser is installed."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no page was shown to a browser: none of {', '.join(BROWSERS)} is installed")
    path = folder / "shown.html"
    assert page.count("</html>") == 1
    path.write_text(page.replace("</html>", WIDTHS + "</html>"))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    options += [f"--user-data-dir={folder}/profile", "--virtual-time-budget=20000", "--dump-dom"]
    shown = subprocess.run(
        [browser, *options, path.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    assert "CONSOLE" not in shown.stderr
    return [float(w) for w in re.search(r'data-widths="([\d,.]+)"', shown.stdout)[1].split(",")]


def test_a_browser_shows_it(page, tmp_path):
    widths = browse(page, tmp_path)
    assert len(widths) == page.count("<img ")
    assert min(widths) > 100


def test_a_browser_shows_the_report_of_the_demo(tmp_path):
    model = ModelConfig(dim=32, layers=1, heads=2, kv_heads=1, ffn=64, seq_len=32)
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question.\n" * 600)
    text = corpus.load(tmp_path / "text.txt", model.seq_len)
    runs = [demo.Settings(level, model, steps=12, batch=2) for level in ("baseline", "O2")]
    records = [demo.train(settings, text, show_progress=False)[1] for settings in runs]
    widths = browse(demo_report.write_html(records, tmp_path).read_text(), tmp_path)
    assert len(widths) == 2
    assert min(widths) > 100


@pytest.mark.parametrize(
    ("line", "match"),
    [("{", "line 2, is no record"), ('{"params": {}}', "'time'"), (None, "holds none of")],
)
def test_bad_and_missing_records_are_named(line, match, tmp_path, capsys):
    if line:
        good = (report.RESULTS / "train_step.jsonl").read_text().splitlines()[0]
        (tmp_path / "train_step.jsonl").write_text(f"{good}\n{line}\n")
    out = tmp_path / "page.html"
    assert report.main(["--results", str(tmp_path), "--out", str(out)]) == 2
    assert match in capsys.readouterr().err
    assert not out.exists()


def run(variant, seed, losses):
    return {
        "variant": variant, "params": {"model": "gpt2", "seed": seed, "steps": 5}, "unit": "nats/token",
        "value": losses[max(losses)], "validation": [[step, x] for step, x in losses.items()],
    }  # fmt: skip


def test_losses_are_drawn_at_the_steps_that_runs_share_and_a_seed_as_its_mean():
    often, rare = range(50, 301, 50), range(100, 301, 100)
    rows = [run("bf16", s, {step: 100 / step for step in often}) for s in (0, 1)]
    rows += [run("bf16 again", s, {step: 101 / step for step in rare}) for s in (0, 1)]
    rows += [run("O2", 0, {step: x / step for step in rare}) for x in (104, 106)]
    figure = Figure()
    report_pictures.draw_losses(figure, rows)
    above, below = figure.axes
    drawn = {line.get_label(): line.get_xydata().tolist() for line in above.lines}
    assert list(drawn) == ["bf16", "bf16 again", "O2"]
    assert drawn["O2"] == [[step, pytest.approx(105 / step)] for step in rare]
    *_, off = [line.get_xydata().tolist() for line in below.lines]
    assert off == [[step, pytest.approx(5)] for step in rare]
    assert below.get_ylim()[1] > 5, "it is to be seen"
