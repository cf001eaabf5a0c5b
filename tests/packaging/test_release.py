"""What makes a release and what forges read: valid, of commands that exist, and complete."""

import importlib.util
import re
import tarfile

import code_size
import pytest
from helpers import run_python

ROOT = code_size.ROOT
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = ROOT / ".github/ISSUE_TEMPLATE"
SCHEMAS = {
    "github-workflows": WORKFLOWS,
    "github-issue-forms": [FORMS / "bug.yml", FORMS / "feature.yml"],
    "github-issue-config": [FORMS / "config.yml"],
    "citation-file-format": [ROOT / "CITATION.cff"],
}


@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_that_forges_read_are_valid(schema):
    check = ["-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}"]
    found = run_python(*check, *SCHEMAS[schema])
    assert found.returncode == 0, found.stdout


def test_workflows_call_what_there_is():
    made = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    for path in WORKFLOWS:
        text = path.read_text()
        assert set(re.findall(r"run: make ([\w-]+)", text)) <= set(made)
        assert all((ROOT / name).exists() for name in re.findall(r"run: python (\.\S+)", text))
        assert "permissions:\n  contents: read" in text
    versions = re.findall(r'"(3\.\d+)"', (ROOT / ".github/workflows/tests.yml").read_text())
    classifiers = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert set(versions) == set(classifiers)


def test_a_release_has_the_changelogs_section_as_notes(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("notes", ROOT / ".github/release_notes.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    (tmp_path / "fp8stack").mkdir()
    (tmp_path / "fp8stack/version.py").write_text('__version__ = "1.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(
        "# C\n\n## Unreleased\n\na\n\n## 1.2.0 - today\n\nb\n\n## 1.1.0\n\nc\n"
    )
    assert module.notes("v1.2.0") == "b"
    with pytest.raises(SystemExit, match="not the version of the package"):
        module.notes("v1.1.0")


@pytest.mark.slow
def test_the_source_distribution_has_all_that_its_tests_need(tmp_path):
    build = ["-m", "build", "--sdist", "--no-isolation", "--outdir", tmp_path, ROOT]
    run_python(*build).check_returncode()
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as file:
        shipped = {name.partition("/")[2] for name in file.getnames()}
    needed = {"Makefile", "README.md", "CHANGELOG.md", "mkdocs.yml", ".github/workflows/tests.yml"}
    for folder in ("tests", "examples", "benchmarks", "docs", "kernels", "integrations"):
        files = (p for p in (ROOT / folder).rglob("*") if p.is_file())
        needed |= {str(p.relative_to(ROOT)) for p in files if "__pycache__" not in p.parts}
    assert needed <= shipped
