"""Micro-batches: the largest that fits is found, also where memory really runs out, and steps are divided."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpt import batching
from gpt.batching import Split, find_largest, predict_largest, split

from fp8stack.errors import ConfigError

ROOT = Path(batching.__file__).parents[2]
REAL = """
import resource, sys, torch
sys.path[:0] = sys.argv[1:3]
from gpt import GPT, SIZES
from gpt.batching import find_largest
import dataclasses

torch.set_num_threads(1)
config = dataclasses.replace(SIZES["tiny"], vocab=8192, layers=1)
model = GPT(config)
tried = []

def try_step(size):
    tried.append(size)
    tokens = torch.zeros(size, config.seq_len, dtype=torch.int64)
    model(tokens, tokens).backward()
    model.zero_grad(set_to_none=True)

try_step(2)  # threads and modules come with the first one
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + 250 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
del tried[:]
found = find_largest(try_step, 4096)
try_step(max(1, found // 2))  # memory was given back after the attempts that failed; a heap has gaps
print(found, max(tried))
"""


@pytest.mark.parametrize("limit", [1, 2, 7, 64])
@pytest.mark.parametrize("fits", [1, 2, 3, 5, 6, 31, 100])
def test_the_largest_size_that_fits_is_found(fits, limit):
    tried = []

    def try_step(size):
        tried.append(size)
        assert 1 <= size <= limit
        if size > fits:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    assert find_largest(try_step, limit) == min(fits, limit)
    assert len(tried) == len(set(tried)) <= 13


def test_a_rank_that_has_less_decides_for_all():
    others = 5
    asked = []

    def try_step(size):
        asked.append(size)

    assert find_largest(try_step, 64, lambda fits: fits and asked[-1] <= others) == others


def test_nothing_that_fits_and_other_errors_are_raised():
    def never(size):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def wrong(size):
        raise RuntimeError("shapes differ")

    with pytest.raises(ConfigError, match="one sequence does not fit"):
        find_largest(never, 8)
    with pytest.raises(RuntimeError, match="shapes differ"):
        find_largest(wrong, 8)


@pytest.mark.parametrize("limit", [1, 5, 4096])
@pytest.mark.parametrize("room", [1000, 1010, 1700, 80_000, 2_000_000])
@pytest.mark.parametrize("fixed", [0, 7, 900])
def test_a_size_is_predicted_and_never_too_large(fixed, room, limit):
    """Steps of `fixed` + 100 a sequence, of a rank with that `room` and of one with a tenth more."""
    tried = []

    def measure(try_step, size):
        try_step(size)
        return (fixed + 100 * size) / room

    def least(size):
        return min(size, int(1.1 * size))

    fits = 1 if fixed + 100 > room / 2 else min(limit, (room - fixed) // 100)
    assert predict_largest(tried.append, limit, least, measure) == fits
    assert tried == [1, *sorted(set(tried))]
    assert len(tried) <= 8


def test_the_fullest_rank_bounds_what_is_predicted():
    tried = []

    def measure(try_step, size):
        try_step(size)
        return size / 1000

    assert predict_largest(tried.append, 4096, lambda size: min(size, 37), measure) == 37
    assert tried == [1, 1, 37]


def test_a_sequence_that_does_not_fit_is_said_and_other_errors_are_raised():
    def never(try_step, size):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def wrong(try_step, size):
        raise RuntimeError("shapes differ")

    with pytest.raises(ConfigError, match="one sequence does not fit"):
        predict_largest(print, 8, measure=never)
    with pytest.raises(RuntimeError, match="shapes differ"):
        predict_largest(print, 8, measure=wrong)


@pytest.mark.gpu
def test_a_prediction_fills_a_gpu_s_memory():
    """Steps that take 3 GB and 1.5 GB a sequence: what is found fits, and leaves little more than the margin."""
    tried = []

    def try_step(size):
        tried.append(size)
        torch.empty(3 * 10**9 + size * 15 * 10**8, dtype=torch.uint8, device="cuda")

    found = predict_largest(try_step, 4096)
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    assert tried[-1] == found
    taken = 3e9 + found * 1.5e9
    assert 0.9 * free - 3e9 <= taken <= free


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits the address space")
def test_a_real_step_runs_out_of_memory_and_goes_on():
    command = [sys.executable, "-c", REAL, str(ROOT / "examples"), str(ROOT)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    found, largest = map(int, result.stdout.split())
    assert 2 <= found < largest < 4096


@pytest.mark.parametrize(
    ("target", "largest", "world", "expected"),
    [
        (512, 64, 1, Split(64, 8, 1)),
        (512, 100, 1, Split(64, 8, 1)),  # 64 divides 512
        (512, 8, 4, Split(8, 16, 4)),
        (4, 64, 1, Split(4, 1, 1)),  # never more than a rank's share
        (
            509,
            100,
            1,
            Split(85, 6, 1),
        ),  # prime: 510 is the nearest above that 6 micro-batches can make
        (6, 64, 4, Split(2, 1, 4)),  # 8
        (1, 1, 2, Split(1, 1, 2)),
    ],
)
def test_a_step_is_divided(target, largest, world, expected):
    made = split(target, largest, world)
    assert made == expected
    assert made.effective >= target
    assert made.micro <= largest


def test_a_fixed_micro_batch_is_kept():
    assert split(10, 4, 1, fixed=True) == Split(4, 3, 1)
    assert split(2, 8, 2, fixed=True) == Split(8, 1, 2)
