"""The documentation as a site: every page in it, every link in it leads somewhere, and Markdown that was understood."""

import dataclasses
import re
from pathlib import Path

import pytest
from browser import measure_overflow
from helpers import run_python

import fp8stack
from fp8stack.integrations import fsdp, msamp

ROOT = Path(__file__).resolve().parents[2]


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
    parts = (fp8stack, fp8stack.optim, fp8stack.comm, fp8stack.nn, fp8stack.monitor, fsdp, msamp)
    public = {name for part in parts for name in part.__all__}
    assert public - shown <= {"__version__", "levels"}
    options = {field.name for field in dataclasses.fields(fp8stack.Recipe)} - {"level"}
    assert options <= {*re.findall(r'title="fp8stack.levels.Recipe.(\w+)"', reference)}
    assert "*q_proj" in reference, "Markdown keeps the stars of patterns"


def test_nothing_is_cut_on_a_phone_or_a_laptop(site, tmp_path):
    """In a real browser no page is wider than the window: wide tables and code scroll by themselves."""
    pages = [str(path.relative_to(site)) for path in site.rglob("index.html")]
    beyond = measure_overflow(site, pages, tmp_path)
    assert len(beyond) == 2 * len(pages) >= 30
    assert {place: by for place, by in beyond.items() if by > 0} == {}


def test_files_that_the_architecture_names_exist():
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`((?:fp8stack|kernels|integrations|tests)/[\w/]*(?:\.py)?)`", text))
    assert len(named) > 30
    assert not [name for name in named if not (ROOT / name).exists()]
