"""What is shipped, what it costs to import, and that the layout's guards hold."""

import ast
import re
import tarfile
import zipfile

import code_size
import pytest
from helpers import run_python

ROOT = code_size.ROOT


def python(code):
    """Run code in a fresh interpreter without the repository on its path unless installed."""
    return run_python("-c", code, cwd=ROOT)


@pytest.mark.slow
def test_the_wheel_contains_every_module_and_nothing_else(release):
    (wheel,) = release.glob("dist/*.whl")
    shipped = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    folders = {"fp8stack": ROOT / "fp8stack", "fp8stack/kernels": ROOT / "kernels"}
    folders["fp8stack/integrations"] = ROOT / "integrations"
    names = [
        "corpus",
        "demo",
        "demo_report",
        "meters",
        "record",
        "gpt/__init__",
        "gpt/blocks",
        "gpt/model",
    ]
    expected = {"fp8stack/py.typed", *(f"fp8stack/examples/{name}.py" for name in names)}
    for prefix, folder in folders.items():
        for path in folder.rglob("*.py"):
            relative = path.relative_to(folder)
            if prefix != "fp8stack" or relative.parts[0] not in ("kernels", "integrations"):
                expected.add(f"{prefix}/{relative.as_posix()}")
    assert shipped == expected


@pytest.mark.slow
def test_the_demo_runs_from_the_wheel_with_nothing_but_torch(installed, tmp_path):
    absent, here = (tmp_path / name for name in ("absent", "here"))
    for folder in (absent, here):
        folder.mkdir()
    for name in ("matplotlib", "numpy", "rich", "tqdm", "yaml"):
        (absent / f"{name}.py").write_text("raise ModuleNotFoundError(__name__, name=__name__)\n")
    size = ["--steps", "2", "--batch", "1", "--seq-len", "32"]
    given = ["demo", "--levels", "O2", "baseline", "--device", "cpu", *size]
    without = {"python": installed / "python", "PYTHONPATH": str(absent)}
    done = run_python("-m", "fp8stack", *given, cwd=here, **without)
    assert done.returncode == 0, done.stderr
    assert "\nreport: runs/demo/report.html\n" in done.stdout
    assert (here / "runs/demo/report.html").read_text().startswith("<!doctype html>")


@pytest.mark.slow
def test_the_source_distributions_tests_run(release, installed, tmp_path):
    """All are found, so all that they import is there; some run, with the wheel that is installed."""
    (path,) = release.glob("dist/*.tar.gz")
    with tarfile.open(path) as file:
        file.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    # without this folder on the path, whose fp8stack/ has no kernels
    code = "import sys; del sys.path[0]; import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    options = ["-q", "-p", "no:cacheprovider", "--assert=plain", "-k"]
    options.append("codecs or tutorials or walk")
    alone = {"python": installed / "python", "PYTEST_XDIST_WORKER": ""}
    done = run_python("-c", code, *options, "tests", cwd=folder, **alone)
    assert done.returncode == 0, done.stdout
    passed, left_out = re.search(r"(\d+) passed.* (\d+) deselected", done.stdout).groups()
    assert int(passed) > 20
    assert int(left_out) > 6000


@pytest.mark.skipif((ROOT / "PKG-INFO").exists(), reason="a source distribution has no links")
def test_the_two_links_work():
    for name in ("kernels", "integrations"):
        link = ROOT / "fp8stack" / name
        assert link.is_symlink()
        assert link.resolve() == ROOT / name


@pytest.mark.parametrize(
    "code",
    [
        "import kernels.ops", "from kernels import ops", "from kernels import get_kernel",
        "import kernels; kernels.ops", "import integrations",
    ],
)  # fmt: skip
def test_the_folders_refuse_to_be_imported_by_themselves(code):
    result = python(f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}")
    assert result.returncode != 0
    assert "import fp8stack." in result.stderr.splitlines()[-1]


def test_transformers_takes_the_folder_for_no_package_of_its_own():
    """It probes for a package `kernels` when it is imported, and again when a model is made: by find_spec, the version
    in the metadata of what is installed, and then that in the module (5.0 cannot read one that is no number)."""
    pytest.importorskip("transformers")
    code = (
        "import kernels, torch, transformers as t; from transformers.utils import is_kernels_available; "
        "from packaging.version import parse; assert parse(kernels.__version__) < parse('0.0.1'); "
        "assert not is_kernels_available(); sizes = dict(hidden_size=32, num_hidden_layers=1, vocab_size=64); "
        "config = t.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, intermediate_size=64); "
        "x = torch.arange(8)[None]; loss = t.LlamaForCausalLM(config)(input_ids=x, labels=x).loss; "
        "loss.backward(); assert 3 < loss < 6; import inspect; inspect.getmodule(print), inspect.stack()"
    )
    result = python(f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}")
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_importing_touches_no_gpu_and_takes_a_fifth_of_torch_s_time_at_most(monkeypatch):
    """It imports no framework, nor its own two folders twice, which are on the path here.

    Both are timed in one process, in the processor's time: how fast the machine is just then counts for both alike.
    With bytecode, which the first import writes; machines for tests may be told to write none.
    """
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    code = "import sys, torch; before = set(sys.modules); import fp8stack, fp8stack.kernels.ops, fp8stack.integrations"
    code += "; print(*(set(sys.modules) - before))"
    result = python(code + "; assert not torch.cuda.is_initialized()")
    assert result.returncode == 0, result.stderr
    heavy = {
        "triton", "numpy", "deepspeed", "accelerate", "transformers", "bitsandbytes", "transformer_engine",
    }  # fmt: skip
    heavy |= {"torch._inductor", "torch.distributed.tensor", "matplotlib", "rich", "tqdm"}
    heavy |= {"kernels", "integrations"}
    assert not heavy & set(result.stdout.split())
    now = "time.process_time()"
    measure = f"import time; a = {now}; import torch; b = {now}; import fp8stack; c = {now}"
    ratios = []
    while len(ratios) < 2 or (len(ratios) == 2 and min(ratios) <= 1.2 < max(ratios)):
        ratios.append(float(python(f"{measure}; print((c - a) / (b - a))").stdout))
    # the median of three, which two that agree tell
    assert sorted(ratios)[len(ratios) // 3] <= 1.2, ratios


def test_lines_of_code_are_what_is_executed():
    assert (
        code_size.lines_of_code('"""Doc\nstring."""\n\n# comment\nx = (\n    1,\n)  # why\n') == 3
    )


def test_files_and_functions_stay_small():
    """Files up to 500 lines, functions up to 60 (kernels 120), docstrings aside."""
    for path in code_size.library_files():
        text = path.read_text()
        assert text.count("\n") < 500, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                limit = 120 if path.is_relative_to(ROOT / "kernels") else 60
                start = node.body[1] if ast.get_docstring(node) and node.body[1:] else node.body[0]
                assert node.end_lineno - start.lineno < limit, f"{path}:{node.name}"


def test_every_public_name_has_a_docstring():
    import fp8stack

    for name in fp8stack.__all__:
        assert (getattr(fp8stack, name).__doc__ or "").strip(), name
