"""fp8stack.integrations.accelerate: the real Accelerator on CPUs, as real processes."""

import subprocess
import sys

import pytest
from ranks import start_ranks
from workers_accelerate import (
    check_gpu,
    check_launchers,
    check_one_process,
    check_two_processes,
)

pytest.importorskip("accelerate")

ALONE = """
import sys
sys.modules |= dict.fromkeys(("accelerate", "transformers", "deepspeed"))
from fp8stack.integrations.accelerate import attach
from fp8stack.integrations.transformers import fp8_trainer
for call in (lambda: attach(None, None), lambda: fp8_trainer(None, "O2")):
    try:
        call()
    except ValueError as error:
        print(error)
"""


def test_neither_library_is_needed_to_import_and_errors_say_how_to_install_them():
    command = [sys.executable, "-c", ALONE]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "'fp8stack[accelerate]'" in result.stdout
    assert "'fp8stack[transformers]'" in result.stdout


@pytest.mark.slow
def test_one_process(tmp_path):
    start_ranks(check_one_process, (str(tmp_path),), nprocs=1)


@pytest.mark.slow
def test_two_processes(tmp_path):
    arguments = 2, str(tmp_path / "store"), str(tmp_path)
    start_ranks(check_two_processes, arguments, nprocs=2)


@pytest.mark.slow
def test_launchers_of_notebooks():
    start_ranks(check_launchers, nprocs=1)


@pytest.mark.gpu
def test_models_are_moved_first():
    start_ranks(check_gpu, nprocs=1)
