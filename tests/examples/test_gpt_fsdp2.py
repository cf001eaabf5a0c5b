"""The example of FSDP2, run as a stranger runs it, and its distance from the same script without fp8stack."""

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import corpus
import pytest

EXAMPLES = Path(corpus.__file__).parent
NAME = "04_gpt_fsdp2.py"


def read(path):
    return path.read_text().splitlines()


def run(script, data, checkpoint):
    """Return the last loss that two ranks print, and whether they saved.

    Their exit status says nothing: torch's threads sometimes abort a process that ends in order.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    options = ["--steps=10", "--batch=1", f"--data={data}", f"--checkpoint={checkpoint}"]
    path = os.pathsep.join([str(EXAMPLES), str(EXAMPLES.parent)])
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "CUDA_VISIBLE_DEVICES": "",
        "FP8STACK_QUIET": "1",
    }
    result = subprocess.run(
        [*command, str(script), *options],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment | {"OMP_NUM_THREADS": "1"},
    )
    losses = re.findall(r"step 10: loss ([\d.]+)", result.stdout)
    assert losses, result.stderr
    assert (checkpoint / ".metadata").exists(), result.stderr
    return float(losses[0])


def test_fp8stack_is_at_most_five_lines():
    lines = list(difflib.ndiff(read(EXAMPLES / "plain" / NAME), read(EXAMPLES / NAME)))
    for mark in "+-":
        assert 0 < sum(line.startswith(f"{mark} ") for line in lines) <= 5
    assert len(read(EXAMPLES / NAME)) <= 80


@pytest.mark.slow
def test_both_train_save_and_resume(tmp_path):
    data = tmp_path / "texts"
    data.mkdir()
    for index in range(30):
        text = f"for x in range({index}):\n    print(x)\n" * 60
        (data / f"loop_{index}.py").write_text(text)
    plain = run(EXAMPLES / "plain" / NAME, data, tmp_path / "plain")
    loss = run(EXAMPLES / NAME, data, tmp_path / "fp8")
    assert loss == pytest.approx(plain, rel=0.05)
    assert run(EXAMPLES / NAME, data, tmp_path / "fp8") < 0.9 * loss
