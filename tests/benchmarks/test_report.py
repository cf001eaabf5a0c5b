"""benchmarks/report.py: a page of all records, that a browser shows, as it does the demo's; and its pictures."""

import re
import subprocess

import corpus
import demo
import demo_report
import pytest
import report
from gpt import ModelConfig
from helpers import find_browser

WIDTHS = """<script>addEventListener("load", () => {
    const drawn = [...document.querySelectorAll("svg")].map(s => s.getBoundingClientRect().width)
    document.body.dataset.widths = [...document.images].map(i => i.naturalWidth).concat(drawn) })</script>"""


def assert_shown(page, pictures, folder):
    """Show a page to a browser, which draws all its pictures. Skips where no browser is installed."""
    browser = find_browser()
    path = folder / "shown.html"
    path.write_text(page.replace("</html>", WIDTHS + "</html>"))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    options += [f"--user-data-dir={folder}/profile", "--virtual-time-budget=20000", "--dump-dom"]
    shown = subprocess.run(
        [browser, *options, path.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    assert "CONSOLE" not in shown.stderr
    widths = re.search(r'data-widths="([\d,.]+)"', shown.stdout)[1].split(",")
    assert len(widths) == pictures
    assert min(map(float, widths)) > 100


def test_every_file_of_records_has_its_picture_and_each_its_command(tmp_path):
    out = tmp_path / "new" / "page.html"
    assert report.main(["--out", str(out)]) == 0
    page = out.read_text()
    files = [(s, report.RESULTS / s.file) for s in report.SECTIONS]
    present = [s for s, path in files if path.exists() and s.choose(report.read(path))]
    assert page.count("<img ") == len(present) >= 7
    assert all(f'id="{section.key}"' in page for section in present)
    undrawn = {path.name for path in report.RESULTS.glob("*.jsonl")} - {s.file for s in present}
    assert undrawn == set(re.search(r"without a picture here: (.*?)\.</p>", page)[1].split(", "))
    assert not re.search(r'(src|href)="(?!data:|#)', page), "the page stands alone"
    pictures = re.findall(r"<img .*?</pre>", page, re.S)
    assert all(re.search("<pre>(python|make) ", picture) for picture in pictures)
    assert_shown(page, len(pictures), tmp_path)


def test_a_browser_shows_the_report_of_the_demo(tmp_path):
    model = ModelConfig(dim=32, layers=1, heads=2, kv_heads=1, ffn=64, seq_len=32)
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question.\n" * 600)
    text = corpus.load(tmp_path / "text.txt", model.seq_len)
    runs = [demo.Settings(level, model, steps=12, batch=2) for level in ("baseline", "O2")]
    records = [demo.train(settings, text, show_progress=False)[1] for settings in runs]
    assert_shown(demo_report.write_html(records, [], tmp_path).read_text(), 1, tmp_path)


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
