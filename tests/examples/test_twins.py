"""Examples and their twins in examples/plain, which are the same scripts without fp8stack: short and hardly different.

One example of each launcher is run as a stranger runs it. The others and the twins run as forks of a process that has
imported torch, and so does an example that goes on from its checkpoint.
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
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
ACCELERATE = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes=2", "--num_machines=1"]
ACCELERATE += ["--mixed_precision=bf16", "--dynamo_backend=no", "--main_process_port=0"]

ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
    "FP8STACK_QUIET": "1",
    "OMP_NUM_THREADS": "1",
}


class Twin(NamedTuple):
    launch: list[str]
    options: list[str]  # beside --steps, --data and `saves`
    saves: str = "--checkpoint"
    needs: str = "torch"

    @property
    def ranks(self):
        """How many forks can be its processes, 0 for one that is no rank; None: accelerate says more to them."""
        return (
            None if self.needs == "accelerate" else 2 * (self.launch[: len(TORCHRUN)] == TORCHRUN)
        )


TWINS = {
    "03_gpt_ddp.py": Twin([*TORCHRUN, SMALL], ["--batch=1"]),
    "04_gpt_fsdp2.py": Twin([*TORCHRUN, SMALL], ["--batch=1"]),
    "04_gpt_titan.py": Twin([*TORCHRUN, SMALL], []),
    "05_deepspeed/train.py": Twin(
        [*TORCHRUN, SMALL], ["--deepspeed_config=zero2.json"], needs="deepspeed"
    ),
    "06_accelerate/train.py": Twin(
        [*ACCELERATE, SMALL], ["--batch=1", "--accumulate=2"], needs="accelerate"
    ),
    "07_hf_trainer/train.py": Twin([SMALL], ["--batch=1"], "--output", "transformers"),
    "08_lightning/train.py": Twin([SMALL], ["--batch=1", "--devices=1"], needs="lightning.pytorch"),
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


def arguments_of(twin, script, texts, saved):
    """Return a script and its arguments, for 10 steps."""
    return [str(script), "--steps=10", *twin.options, f"--data={texts}", f"{twin.saves}={saved}"]


def start(twin, *what):
    """Start a script."""
    return subprocess.Popen(
        [sys.executable, *twin.launch, *arguments_of(twin, *what)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            **ENVIRONMENT,
            "PYTHONPATH": str(EXAMPLES),  # not the root: transformers would find kernels/ there
        },
    )


def last_loss(output, errors=""):
    """Return the last loss that was printed."""
    losses = re.findall(r"\bloss'?:? '?([\d.]+)", output)
    assert losses, errors
    return float(losses[-1])


def end(process):
    """Return the last loss that it printed.

    The exit status of several ranks says nothing: torch's threads sometimes abort a process that ends in order.
    """
    return last_loss(*process.communicate(timeout=300))


def fork(twin, *what, output):
    """Run a script in processes that are forks; return the last loss."""
    command = [SMALL, *arguments_of(twin, *what)]
    return last_loss(run_script(command, output, twin.ranks, **ENVIRONMENT))


@pytest.mark.slow
@pytest.mark.parametrize("name", TWINS)
def test_twins_train_alike_and_save(name, texts, tmp_path):
    twin = TWINS[name]
    pytest.importorskip(twin.needs)
    example = EXAMPLES / name, texts, tmp_path / "fp8"
    plain = EXAMPLES / "plain" / name, texts, tmp_path / "plain"
    if name.startswith("04") or twin.needs == "deepspeed":  # torchrun starts the first one
        ours = fork(twin, *example, output=tmp_path / "log")
        expected = fork(twin, *plain, output=tmp_path / "plain log")
    else:
        process = start(twin, *example)
        if twin.ranks is None:
            expected = end(start(twin, *plain))
        else:
            expected = fork(twin, *plain, output=tmp_path / "log")
        ours = end(process)
    assert ours == pytest.approx(expected, rel=0.1)
    assert (tmp_path / "fp8").exists()
    if name == "04_gpt_fsdp2.py":  # a run goes on from its checkpoint
        again = fork(twin, EXAMPLES / name, texts, tmp_path / "fp8", output=tmp_path / "again")
        assert again < 0.9 * ours
