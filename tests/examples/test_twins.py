"""Examples and their twins in examples/plain, which are the same scripts without fp8stack: short and hardly different.

They run as forks of a process that has imported torch; Accelerate starts its own, as it tells them more than torchrun.
"""

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import corpus
import pytest
from workers_scripts import run_script

EXAMPLES = Path(corpus.__file__).parent
SMALL = str(Path(__file__).parents[1] / "run_small.py")
ACCELERATE = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes=2", "--num_machines=1"]
ACCELERATE += ["--mixed_precision=bf16", "--dynamo_backend=no", "--main_process_port=0"]
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "FP8STACK_QUIET": "1", "OMP_NUM_THREADS": "1",
}  # fmt: skip


class Twin(NamedTuple):
    options: list[str]  # beside --steps, --data and `saves`
    ranks: int = 2  # 0: one process that is no rank
    saves: str = "--checkpoint"
    needs: str = "torch"


TWINS = {
    "03_gpt_ddp.py": Twin(["--batch=1"]),
    "04_gpt_fsdp2.py": Twin(["--batch=1"]),
    "04_gpt_titan.py": Twin([]),
    "05_deepspeed/train.py": Twin(["--deepspeed_config=zero2.json"], needs="deepspeed"),
    "06_accelerate/train.py": Twin(["--batch=1", "--accumulate=2"], needs="accelerate"),
    "07_hf_trainer/train.py": Twin(["--batch=1"], 0, "--output", "transformers"),
    "08_lightning/train.py": Twin(["--batch=1", "--devices=1"], 0, needs="lightning.pytorch"),
}


def differences(name):
    """Return how many lines a file has more than its twin, and fewer."""
    twins = [(folder / name).read_text().splitlines() for folder in (EXAMPLES / "plain", EXAMPLES)]
    lines = [line for line in difflib.ndiff(*twins) if line[2:].strip()]
    return [sum(line.startswith(f"{mark} ") for line in lines) for mark in "+-"]


@pytest.mark.parametrize("name", [*TWINS, *(f"05_deepspeed/zero{n}.json" for n in (1, 2, 3))])
def test_fp8stack_is_at_most_five_lines(name):
    added, removed = differences(name)
    assert 0 < added <= 5
    assert removed == 0 if name.endswith("json") else 0 < removed <= 5
    assert len((EXAMPLES / name).read_text().splitlines()) <= 80


@pytest.mark.slow
@pytest.mark.parametrize("name", TWINS)
def test_twins_train_alike_and_save(name, tmp_path):
    twin, saved, texts = TWINS[name], tmp_path / "fp8", tmp_path / "texts"
    pytest.importorskip(twin.needs)
    texts.mkdir()
    for index in range(30):
        text = f"for x in range({index}):\n    print(x)\n" * 60
        (texts / f"loop_{index}.py").write_text(text)

    def last_loss(folder, saved):
        """Run a script for 10 steps; return the last loss that it prints."""
        command = [SMALL, str(folder / name), "--steps=10", *twin.options, f"--data={texts}"]
        command.append(f"{twin.saves}={saved}")
        if twin.needs == "accelerate":
            # the root is not in the path: transformers would find kernels/ there
            environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(EXAMPLES)}
            launch = [sys.executable, *ACCELERATE, *command]
            # no exit status: torch's threads sometimes abort a process that ends in order
            done = subprocess.run(launch, capture_output=True, text=True, env=environment)
            printed = done.stdout + done.stderr
        else:
            printed = run_script(command, tmp_path / "log", twin.ranks, **ENVIRONMENT)
        losses = re.findall(r"\bloss'?:? '?([\d.]+)", printed)
        assert losses, printed
        return float(losses[-1])

    ours, expected = last_loss(EXAMPLES, saved), last_loss(EXAMPLES / "plain", tmp_path / "plain")
    assert ours == pytest.approx(expected, rel=0.1)
    assert saved.exists()
    if name == "04_gpt_fsdp2.py":  # a run goes on from its checkpoint
        assert last_loss(EXAMPLES, saved) < 0.9 * ours
