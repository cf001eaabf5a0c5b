"""The documentation as a site: every page in it, every link in it leads somewhere, and Markdown that was understood."""

import functools
import http.server
import json
import re
import subprocess
import threading
from pathlib import Path

import pytest
from helpers import find_browser, run_python

import fp8stack

ROOT = Path(__file__).resolve().parents[2]
WIDTHS = (390, 1280)  # pixels, of a phone and of a laptop
MEASURE = """<body><script>
async function overflow(page, width) {
    const frame = document.createElement("iframe")
    Object.assign(frame, {src: page, width, height: 900, style: "border: 0"})
    const loaded = new Promise(done => { frame.onload = done })
    document.body.append(frame)
    await loaded
    await new Promise(done => setTimeout(done, 500))
    const beyond = frame.contentDocument.documentElement.scrollWidth - width
    frame.remove()
    return beyond
}
(async () => {
    const found = {}
    const measure = async (page, width) => { found[`${page} ${width}`] = await overflow(page, width) }
    await Promise.all(PAGES.flatMap(page => WIDTHS.map(width => measure(page, width))))
    document.body.dataset.found = JSON.stringify(found)
})()</script></body>"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Return the folder of the site that was built."""
    folder = tmp_path_factory.mktemp("site")
    command = ["-m", "mkdocs", "build", "--strict"]  # --quiet would undo --strict
    command += ["--config-file", ROOT / "mkdocs.yml", "--site-dir", folder]
    result = run_python(*command, cwd=folder, NO_MKDOCS_2_WARNING="1")
    assert result.returncode == 0, result.stderr
    return folder


def test_the_site_builds_without_a_warning(site):
    tmp_path, pages = site, {path.stem for path in (ROOT / "docs").glob("*.md")}
    for name in pages:
        page = (tmp_path / ("" if name == "index" else name) / "index.html").read_text()
        assert not re.search(r'src="http|fonts\.g', page), "the site loads nothing from elsewhere"
        article = page[page.index("<article") : page.index("</article")]
        text = re.sub(r"<(pre|code)\b.*?</\1>", "", article, flags=re.S)
        # what Python-Markdown leaves as it is where the forge sees lists, blocks of code and tables
        left = re.findall(r"\n(?:[-*] |\d+\. ).*|```.*|\|---.*|\*\*.*", text)
        assert not left, f"{name}: {left}"
    reference = (tmp_path / "reference/index.html").read_text()
    shown = {name.rpartition(".")[2] for name in re.findall(r'id="(fp8stack[.\w]+)"', reference)}
    assert {*fp8stack.__all__, *fp8stack.optim.__all__, *fp8stack.comm.__all__} - shown <= {
        "__version__",
        "levels",
    }


def test_nothing_is_cut_on_a_phone_or_a_laptop(site, tmp_path):
    """In a real browser no page is wider than the window: wide tables and code scroll by themselves."""
    browser = find_browser()
    pages = [str(path.relative_to(site)) for path in site.rglob("index.html")]
    measure = MEASURE.replace("PAGES", json.dumps(pages)).replace("WIDTHS", json.dumps(WIDTHS))
    (site / "measure.html").write_text(measure)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
        options += ["--window-size=1400,1000", "--virtual-time-budget=120000", "--dump-dom"]
        address = f"http://127.0.0.1:{server.server_address[1]}/measure.html"
        shown = subprocess.run(
            [browser, *options, address], capture_output=True, text=True, timeout=200
        )
        server.shutdown()
    (found,) = re.findall(r'data-found="([^"]*)"', shown.stdout)
    beyond = json.loads(found.replace("&quot;", '"'))
    assert len(beyond) == len(WIDTHS) * len(pages) >= 40
    assert {place: by for place, by in beyond.items() if by > 0} == {}


def test_files_that_the_architecture_names_exist():
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`((?:fp8stack|kernels|integrations|tests)/[\w/]*(?:\.py)?)`", text))
    assert len(named) > 30
    assert not [name for name in named if not (ROOT / name).exists()]
