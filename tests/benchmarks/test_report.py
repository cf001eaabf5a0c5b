"""benchmarks/report.py: a page of all records, that a browser shows, as it does the demo's; and clear errors."""

import re
import shutil
import subprocess

import corpus
import demo
import demo_report
import memory
import monitor_cost
import pytest
import report
import stability
from gpt import ModelConfig

BROWSERS = (
    "chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "chrome-headless-shell",
)  # fmt: skip
WIDTHS = """<script>addEventListener("load", () => {
    const drawn = [...document.querySelectorAll("svg")].map(s => s.getBoundingClientRect().width)
    document.body.dataset.widths = [...document.images].map(i => i.naturalWidth).concat(drawn) })</script>"""


@pytest.fixture(scope="module")
def page():
    return report.make_page(report.RESULTS)


def test_every_file_of_records_has_its_picture(page):
    files = [(s, report.RESULTS / s.file) for s in report.SECTIONS]
    present = [s for s, path in files if path.exists() and s.choose(report.read(path))]
    assert page.count("<img ") == len(present) >= 7
    for section in present:
        assert f'id="{section.key}"' in page
    undrawn = {path.name for path in report.RESULTS.glob("*.jsonl")} - {s.file for s in present}
    assert undrawn == set(re.search(r"without a picture here: (.*?)\.</p>", page)[1].split(", "))
    assert not re.search(r'(src|href)="(?!data:|#)', page), "the page stands alone"


def test_each_picture_says_by_which_command(page):
    pictures = re.findall(r"<img .*?</pre>", page, re.S)
    assert len(pictures) == page.count("<img ")
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


@pytest.mark.slow
def test_records_of_short_runs_are_drawn(tmp_path):
    tiny = ["--device", "cpu", "--model", "tiny"]
    chosen = ["--only", "current hybrid", "blockwise"]
    for benchmark, name, options in (
        (stability, "stability", ["--steps", "1", "--grid", "formats", "--bound", "9", *chosen]),
        (monitor_cost, "monitor_cost", ["--steps", "1", "--blocks", "1", "--only", "O2"]),
        (memory, "memory", ["--most", "2", "--only", "bf16 AdamW", "fp8stack O2"]),
    ):
        assert benchmark.main([*tiny, *options, "--output", str(tmp_path / f"{name}.jsonl")]) == 0
    page = report.make_page(tmp_path)
    shown = [s for s in report.SECTIONS if f'alt="{s.title}"' in page]
    assert [s.key for s in shown] == ["stability", "monitor", "batches"]


def test_long_runs_are_those_with_native_products():
    runs = (("bf16", None, 1), ("O2", "native", 2), ("O2", "te", 3), ("O2", "native", 4))
    rows = [
        {"variant": v, "compute": c, "value": x, "params": {"model": "gpt2", "seed": 0}}
        for v, c, x in runs
    ]
    assert [r["value"] for r in report.comparable_runs(rows, "gpt2")] == [1, 2, 4]


def test_what_is_missing_is_named(tmp_path):
    (tmp_path / "train_step.jsonl").write_text((report.RESULTS / "train_step.jsonl").read_text())
    page = report.make_page(tmp_path)
    assert page.count("<img ") == 1
    assert "Not recorded yet: Bytes a parameter (convergence.jsonl)" in page


@pytest.mark.parametrize(
    ("line", "match"),
    [("{", "line 2, is no record"), ('{"params": {}}', "'time'"), ("3", "is no record")],
)
def test_bad_records_are_named(line, match, tmp_path, capsys):
    good = (report.RESULTS / "train_step.jsonl").read_text().splitlines()[0]
    (tmp_path / "train_step.jsonl").write_text(f"{good}\n{line}\n")
    out = tmp_path / "page.html"
    assert report.main(["--results", str(tmp_path), "--out", str(out)]) == 2
    assert match in capsys.readouterr().err
    assert not out.exists()


def test_an_empty_folder_is_an_error(tmp_path, capsys):
    assert report.main(["--results", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 2
    assert "holds none of" in capsys.readouterr().err


def test_the_page_is_written_where_it_is_asked_for(tmp_path, capsys):
    out = tmp_path / "folder" / "page.html"
    assert report.main(["--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert out.read_text().startswith("<!doctype html>")
