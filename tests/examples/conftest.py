"""Texts and flags that runs of the training application begin with."""

import pytest
from workers_gpt import write_text

SMALL = """--model tiny --seq-len 16 --steps 4 --warmup-steps 1 --target-effective-batch-size 4 --micro-batch 2
    --checkpoint-freq 2 --eval-freq 2 --eval-batches 2 --eval-batch-size 1 --log-freq 1 --device cpu"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a text, for all tests of a file."""
    folder = tmp_path_factory.mktemp("gpt")
    write_text(folder)
    return folder


@pytest.fixture
def flags(tmp_path):
    """Flags of a small run over a text, in a folder of the test's own; TensorBoard is theirs to choose."""
    return [*SMALL.split(), "--data", str(write_text(tmp_path)), "--out", str(tmp_path / "runs")]
