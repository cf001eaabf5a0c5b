"""What is shipped, what it costs to import, and that the layout's guards hold."""

import ast
import io
import subprocess
import sys
import tokenize
import zipfile
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).resolve().parents[2]


def python(code, cwd=ROOT, **environment):
    """Run code in a fresh interpreter without the repository on its path unless installed."""
    import os

    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


@pytest.mark.slow
def test_the_wheel_contains_every_module_and_nothing_else(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    shipped = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    folders = {"fp8stack": ROOT / "fp8stack", "fp8stack/kernels": ROOT / "kernels"}
    folders["fp8stack/integrations"] = ROOT / "integrations"
    expected = {"fp8stack/py.typed"}
    for prefix, folder in folders.items():
        for path in folder.rglob("*.py"):
            relative = path.relative_to(folder)
            if prefix != "fp8stack" or relative.parts[0] not in ("kernels", "integrations"):
                expected.add(f"{prefix}/{relative.as_posix()}")
    assert shipped == expected


def test_the_two_links_work():
    for name in ("kernels", "integrations"):
        link = ROOT / "fp8stack" / name
        assert link.is_symlink()
        assert link.resolve() == ROOT / name


@pytest.mark.parametrize("name", ["kernels", "integrations"])
def test_the_folders_refuse_to_be_imported_by_themselves(name):
    result = python(f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {name}")
    assert result.returncode != 0
    assert f"import fp8stack.{name} instead" in result.stderr


def test_importing_is_cheap_and_touches_no_gpu():
    code = "import sys, torch; before = set(sys.modules); import fp8stack; print(*(set(sys.modules) - before))"
    result = python(code + "; assert not torch.cuda.is_initialized()")
    assert result.returncode == 0, result.stderr
    heavy = {
        "triton",
        "numpy",
        "deepspeed",
        "accelerate",
        "transformers",
        "bitsandbytes",
        "transformer_engine",
    }
    heavy |= {"torch._inductor", "torch.distributed.tensor", "matplotlib", "rich", "tqdm"}
    assert not heavy & set(result.stdout.split())


@pytest.mark.slow
def test_import_time_is_within_a_fifth_of_torch_s(monkeypatch):
    """Both in one process, in the processor's time: how fast the machine is just then counts for both alike.

    With bytecode, as it is from the second import on; machines for tests may be told to write none.
    """
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    python("import fp8stack")
    now = "time.process_time()"
    measure = f"import time; a = {now}; import torch; b = {now}; import fp8stack; c = {now}"
    ratios = [float(python(f"{measure}; print((c - a) / (b - a))").stdout) for _ in range(3)]
    assert median(ratios) <= 1.2, ratios


def lines_of_code(text):
    """Count lines that are not blank, comment or docstring: explaining more must not cost features."""
    prose = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(
            node
        ):
            prose.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    nothing = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    code = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (*nothing, tokenize.ENDMARKER):
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - prose)


def test_lines_of_code_are_what_is_executed():
    assert lines_of_code('"""Doc\nstring."""\n\n# comment\nx = (\n    1,\n)  # why\n') == 3


def test_the_library_stays_small():
    """The budget of CONTRIBUTING.md: 19,250 lines of code; files up to 500 lines, functions under 60 (kernels 120)."""
    total = 0
    for folder in ("fp8stack", "kernels", "integrations"):
        for path in (ROOT / folder).rglob("*.py"):
            if folder == "fp8stack" and path.relative_to(ROOT / folder).parts[0] in (
                "kernels",
                "integrations",
            ):
                continue
            text = path.read_text()
            assert text.count("\n") <= 500, path
            total += lines_of_code(text)
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef):
                    limit = 120 if folder == "kernels" else 60
                    body = node.body
                    documented = isinstance(body[0], ast.Expr) and isinstance(
                        body[0].value, ast.Constant
                    )
                    start = body[1] if documented and len(body) > 1 else body[0]
                    assert node.end_lineno - start.lineno < limit, f"{path}:{node.name}"
    assert total < 19_250


def test_every_public_name_has_a_docstring():
    import fp8stack

    for name in fp8stack.__all__:
        assert (getattr(fp8stack, name).__doc__ or "").strip(), name
