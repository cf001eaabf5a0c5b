"""Examples and their twins in examples/plain, which are the same scripts without fp8stack: short, hardly different, and
run as a stranger runs them."""

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import corpus
import pytest

EXAMPLES = Path(corpus.__file__).parent
DEEPSPEED = Path(__file__).parents[1] / "run_deepspeed_script.py"
TWINS = {  # options beside --steps, --data and --checkpoint; what else is to be there
    "03_gpt_ddp.py": ["--batch=1"],
    "04_gpt_fsdp2.py": ["--batch=1"],
    "04_gpt_titan.py": [],
    "05_deepspeed/train.py": ["--deepspeed_config=zero2.json"],
}


def differences(name):
    """Return how many lines a file has more than its twin, and fewer."""
    twins = [(folder / name).read_text().splitlines() for folder in (EXAMPLES / "plain", EXAMPLES)]
    lines = [line for line in difflib.ndiff(*twins) if line[2:].strip()]
    return [sum(line.startswith(f"{mark} ") for line in lines) for mark in "+-"]


@pytest.mark.parametrize("name", TWINS)
def test_fp8stack_is_at_most_five_lines(name):
    assert all(0 < count <= 5 for count in differences(name))
    assert len((EXAMPLES / name).read_text().splitlines()) <= 80


def test_a_deepspeed_config_gains_a_section():
    for stage in (1, 2, 3):
        added, removed = differences(f"05_deepspeed/zero{stage}.json")
        assert added <= 5
        assert removed == 0


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for index in range(30):
        text = f"for x in range({index}):\n    print(x)\n" * 60
        (folder / f"loop_{index}.py").write_text(text)
    return folder


def run(script, options):
    """Return the last loss that two ranks print.

    Their exit status says nothing: torch's threads sometimes abort a process that ends in order.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(DEEPSPEED)] if "deepspeed" in str(script) else []
    result = subprocess.run(
        [*command, str(script), "--steps=10", *options],
        capture_output=True,
        text=True,
        timeout=300,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(EXAMPLES), str(EXAMPLES.parent)]),
            "CUDA_VISIBLE_DEVICES": "",
            "DS_ACCELERATOR": "cpu",
            "FP8STACK_QUIET": "1",
            "OMP_NUM_THREADS": "1",
        },
    )
    losses = re.findall(r"step 10: loss ([\d.]+)", result.stdout)
    assert losses, result.stderr
    return float(losses[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", TWINS)
def test_twins_train_alike_and_resume(name, texts, tmp_path):
    if "deepspeed" in name:
        pytest.importorskip("deepspeed")
    options = [*TWINS[name], f"--data={texts}"]
    plain = run(EXAMPLES / "plain" / name, options)
    saved = [*options, f"--checkpoint={tmp_path / 'saved'}"]
    loss = run(EXAMPLES / name, saved)
    assert loss == pytest.approx(plain, rel=0.1)
    assert run(EXAMPLES / name, saved) < 0.9 * loss
