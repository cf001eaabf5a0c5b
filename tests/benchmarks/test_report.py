"""benchmarks/report.py: a page of all records that a browser shows without an error, and clear errors."""

import re
import shutil
import subprocess

import memory
import monitor_cost
import pytest
import report
import stability

WIDTHS = """<script>addEventListener("load", () => {
    document.body.dataset.widths = [...document.images].map(i => i.naturalWidth) })</script>"""


@pytest.fixture(scope="module")
def page():
    return report.make_page(report.RESULTS)


def test_every_file_of_records_has_its_picture(page):
    files = [(s, report.RESULTS / s.file) for s in report.SECTIONS]
    present = [s for s, path in files if path.exists() and s.choose(report.read(path))]
    assert page.count("<img ") == len(present) >= 7
    for section in present:
        assert f'id="{section.key}"' in page
    assert not re.search(r'(src|href)="(?!data:|#)', page), "the page stands alone"


def test_each_picture_says_by_which_command(page):
    pictures = re.findall(r"<img .*?</pre>", page, re.S)
    assert len(pictures) == page.count("<img ")
    assert all("<pre>python " in picture for picture in pictures)


def test_a_browser_shows_it(page, tmp_path):
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("needs Chromium")
    path = tmp_path / "report.html"
    path.write_text(page.replace("</html>", WIDTHS + "</html>"))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    options += [f"--user-data-dir={tmp_path}/profile", "--virtual-time-budget=20000", "--dump-dom"]
    shown = subprocess.run(
        [chromium, *options, path.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    assert "CONSOLE" not in shown.stderr
    widths = re.search(r'data-widths="([\d,]+)"', shown.stdout)[1].split(",")
    assert len(widths) == page.count("<img ")
    assert all(int(width) > 100 for width in widths)


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
    assert [r["value"] for r in report.last_runs(rows, "gpt2")] == [1, 4]


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
