"""Every command in a block of shell in the documentation is run, or is listed here with the reason why it is not.

They run as they are shown, in this process; options after them make training short.
"""

import contextlib
import io
import json
import logging
import re
import runpy
import shlex
from pathlib import Path

import compare
import engines
import pytest
import torch
import train_gpt
from gpt import tokenize_data
from ranks import run_ranks

from fp8stack.__main__ import main as fp8stack_main
from fp8stack.cli import machine

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{p.name}" for p in ROOT.glob("docs/*.md"))]
PROGRAMS = {
    "fp8stack": fp8stack_main,
    "python examples/train_gpt.py": train_gpt.main,
    "python examples/compare.py": compare.main,
    "python examples/gpt/tokenize_data.py": tokenize_data.main,
}
FEWER = ["--steps", "8", "--target-effective-batch-size", "4", "--micro-batch", "2"]
SMALL = [*FEWER, "--model", "tiny", "--seq-len", "32", "--eval-batches", "2", "--device", "cpu"]

COMPARED = "python examples/train_gpt.py --model tiny"
HERE = {
    "docs/tutorial-script.md": [
        "fp8stack doctor", "fp8stack plan train.py:build_model", "fp8stack inspect run.pt",
        "fp8stack convert run.pt --to fp32",
    ],
    "docs/tutorial-deepspeed.md": ["fp8stack doctor --deepspeed ds_config.json --model train.py:build_model"],
    "docs/checkpoints.md": ["fp8stack convert run.pt --to safetensors", "fp8stack inspect run.pt"],
    "docs/training.md": [
        "python examples/train_gpt.py",
        "python examples/train_gpt.py --config examples/configs/tiny.yaml --opt-level O1",
        "python examples/train_gpt.py --model gpt2 --data my_texts/ --opt-level off",
        "python examples/train_gpt.py --help", "python examples/train_gpt.py --resume latest",
        "python examples/train_gpt.py --list-checkpoints",
        "python examples/train_gpt.py --resume latest --opt-level off", f"{COMPARED} --no-fp8", COMPARED,
        "python examples/compare.py runs/tiny-bf16 runs/tiny-fp8-o2 --png difference.png",
    ],
}  # fmt: skip
ELSEWHERE = {  # the test that runs a page's other commands
    "docs/cli.md": "tests/cli/test_documentation.py",
}
NOT_RUN = {  # a command, or how several begin, and why
    "fp8stack demo": "trains for minutes; tests/examples/test_demo.py runs it with less",
    "make test": "these tests",
    "make lint": "a step of its own in .ci",
    "make test-gpu": "a GPU",
    "pip install fp8stack": "the index; tests/packaging builds and installs the wheel",
    'pip install "fp8stack[': "the index, too",
    "torchrun --nproc-per-node 1 train.py": "DeepSpeed's script; a rank of this file's is what torchrun starts",
    "pip install -e": "would change the installation under test; tests/packaging builds and installs the wheel",
    "torchrun --nproc-per-node 8 ": "eight GPUs; tests/examples/test_gpt_resume.py has two ranks",
    "sbatch ": "Slurm; tests/examples/test_gpt_slurm.py runs the scripts without it",
    "python examples/gpt/tokenize_data.py --data fineweb-edu ": "the network, and ten gigabytes of text",
    "python examples/train_gpt.py --data data/fineweb-edu ": "the shards that the line before it writes",
}


def shown(page):
    """Return the commands in a page's blocks of shell, without comments."""
    blocks = re.findall(r"```(?:sh|bash|shell)\n(.*?)```", (ROOT / page).read_text(), re.S)
    return [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines()]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Be in an empty folder with the repository's examples; return what runs a command with more options."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "device", lambda: torch.device("cpu"))
    (tmp_path / "examples").symlink_to(ROOT / "examples")

    def run_command(page, command, *more):
        assert command in HERE[page]
        program = next(p for p in sorted(PROGRAMS, key=len) if f"{command} ".startswith(f"{p} "))
        arguments = [*shlex.split(command.removeprefix(program)), *more]
        assert PROGRAMS[program](arguments) == 0, arguments

    return run_command


def test_every_command_is_run_or_has_its_reason():
    for page in PAGES:
        for command in shown(page):
            refused = [c for c in NOT_RUN if command.startswith(c)]
            assert command in HERE.get(page, ()) or page in ELSEWHERE or refused, command
    for page, commands in HERE.items():
        assert set(commands) <= set(shown(page)), "a page has changed"
    for start in NOT_RUN:
        assert any(c.startswith(start) for page in PAGES for c in shown(page)), start
    said = " ".join([*NOT_RUN.values(), *ELSEWHERE.values()])
    for path in re.findall(r"tests/[\w/.]+\w|\.ci\b", said):
        assert (ROOT / path).exists(), path


def code(page, language="python"):
    """Return a page's blocks in a language."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.S)


def test_the_first_hour_is_as_shown(run, tmp_path, capsys, caplog, monkeypatch):
    page, names = "docs/tutorial-script.md", {}
    monkeypatch.delenv("FP8STACK_QUIET", raising=False)
    script, *rest = code(page)
    (tmp_path / "train.py").write_text(script)
    doctor, plan, inspect, convert = HERE[page]
    run(page, doctor, "--no-self-test")
    run(page, plan)
    with caplog.at_level(logging.INFO, "fp8stack"):
        for block in (script, *rest):
            exec(compile(block, page, "exec"), names)
    (card,) = code(page, "text")
    printed = re.sub(r"^fp8stack \S+ ·", "fp8stack 0.1.0 ·", caplog.records[0].getMessage())
    assert torch.cuda.is_available() or printed.split() == card.split()
    assert names["saved"] == {"step": 60}
    losses = names["results"]
    assert losses["baseline"] < 2.5, "from log(256), which is 5.5"
    assert all(abs(losses[level] / losses["baseline"] - 1) < 0.02 for level in ("O0", "O2"))
    run(page, inspect)
    run(page, convert)
    names["build_model"]().load_state_dict(torch.load("run_fp32.pt", weights_only=True))
    assert "8-bit block 128" in capsys.readouterr().out


def be_rank_under_deepspeed(rank):
    engines.import_deepspeed()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path("train.py", run_name="__main__")
    return printed.getvalue()


@pytest.mark.slow
def test_the_deepspeed_script_trains_as_shown(run, tmp_path, capsys):
    pytest.importorskip("deepspeed")
    page = "docs/tutorial-deepspeed.md"
    ((config,), (script,)) = (code(page, language) for language in ("json", "py"))
    (tmp_path / "ds_config.json").write_text(config)
    (tmp_path / "train.py").write_text(script)
    run(page, *HERE[page])
    assert "Nothing known stands against it." in capsys.readouterr().out
    (printed,) = run_ranks(be_rank_under_deepspeed, 1)
    losses = [float(x) for x in re.findall(r"^step \d+: loss ([\d.]+)$", printed, re.M)]
    assert len(losses) == 6
    assert losses[-1] < 0.6 * losses[0]
    assert "fp8stack O2: DeepSpeed ZeRO-2, 3 converted layers" in printed
    assert (tmp_path / "checkpoints" / "latest").exists()


def test_a_checkpoint_is_converted_and_shown_from_its_file_alone(run, tmp_path, capsys):
    page = "docs/checkpoints.md"
    exec(compile(code(page)[0], page, "exec"), {})
    convert, inspect = HERE[page]
    pytest.importorskip("safetensors")
    run(page, convert)
    assert (tmp_path / "run.safetensors").stat().st_size > 4 * (256 * 512 + 512 * 64), "float32"
    capsys.readouterr()
    run(page, inspect)
    assert capsys.readouterr().out.startswith("run.pt: fp8stack.checkpoint, ")


def test_two_runs_are_compared_as_shown(run, tmp_path, capsys):
    page = "docs/training.md"
    *_, plain, fp8, both = HERE[page]
    for command in (plain, fp8):
        run(page, command, *SMALL)
    capsys.readouterr()
    run(page, both)
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split()[:2] == ["tiny-bf16", "tiny-fp8-o2"]
    assert [re.split(r"  +", line.strip())[0] for line in rows[:6]] == [
        "final training loss", "mean training loss", "final validation loss", "mean validation loss",
        "tokens/s", "memory, GiB",
    ]  # fmt: skip
    assert (tmp_path / "difference.png").read_bytes().startswith(b"\x89PNG")


def write_texts(folder):
    (folder / "my_texts").mkdir()
    (folder / "my_texts" / "a.txt").write_text("to be or not to be, that is the question.\n" * 600)


def test_the_application_runs_as_shown(run, tmp_path, capsys):
    page = "docs/training.md"
    write_texts(tmp_path)
    first, configured, plain, helped, latest, listed, onward, *_ = HERE[page]
    run(page, first, *SMALL)
    run(page, configured, *SMALL)
    run(page, plain, *SMALL)
    made = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert made == ["tiny-bf16", "tiny-fp8-o1", "tiny-fp8-o2"]
    with pytest.raises(SystemExit) as stopped:
        run(page, helped)
    assert stopped.value.code == 0
    capsys.readouterr()
    run(page, listed, "--model", "tiny")
    assert {*made} <= {*re.findall(r"tiny-\w+(?:-o\d)?", capsys.readouterr().out)}
    (tmp_path / "runs" / "tiny-bf16").rename(tmp_path / "plain")  # so that O2's goes on below
    for command, steps, run_of in ((latest, 10, "tiny-fp8-o2"), (onward, 12, "tiny-bf16")):
        run(page, command, *SMALL, "--steps", str(steps), "--data", "stdlib")
        log = (tmp_path / "runs" / run_of / "metrics.jsonl").read_text().splitlines()
        assert json.loads(log[-1])["step"] == steps
        said = rf"^resumed from runs/tiny-fp8-o2/.*\bstep {steps - 2}\b"
        assert re.search(said, capsys.readouterr().out, re.M)
