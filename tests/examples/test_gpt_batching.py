"""Micro-batches: the largest that fits is found, also where ranks differ, and steps are divided."""

from functools import partial

import pytest
import torch
from gpt.batching import Split, find_largest, predict_largest, split

from fp8stack.errors import ConfigError


@pytest.mark.parametrize("limit", [1, 7, 64])
@pytest.mark.parametrize("fits", [1, 2, 5, 31, 100])
def test_the_largest_size_that_fits_is_found(fits, limit):
    tried = []

    def try_step(size):
        tried.append(size)
        assert 1 <= size <= limit
        if size > fits:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    assert find_largest(try_step, limit) == min(fits, limit)
    assert len(tried) == len(set(tried)) <= 13


@pytest.mark.parametrize("limit", [1, 5, 4096])
@pytest.mark.parametrize("room", [1000, 1010, 1700, 2_000_000])
@pytest.mark.parametrize("fixed", [0, 7, 900])
def test_a_size_is_predicted_and_never_too_large(fixed, room, limit):
    """Steps of `fixed` + 100 a sequence."""
    tried = []

    def measure(try_step, size):
        try_step(size)
        return (fixed + 100 * size) / room

    fits = 1 if fixed + 100 > room / 2 else min(limit, (room - fixed) // 100)
    assert predict_largest(tried.append, limit, measure=measure) == fits
    assert tried == [1, *sorted(set(tried))]
    assert len(tried) <= 8


def test_no_more_is_tried_than_fits_on_every_rank():
    """Of this rank 79 sequences would fit, of another one 25."""
    tried = []

    def measure(try_step, size):
        try_step(size)
        return max(200, 100 + 100 * size) / 8000  # a gap that one sequence lies in

    def least(size):
        return min(size, 25)

    assert predict_largest(tried.append, 4096, least, measure) == tried[-1] == max(tried) == 25


def test_a_sequence_that_does_not_fit_is_said():
    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    for search in (
        partial(predict_largest, print, 8, measure=fail),
        partial(find_largest, fail, 8),
    ):
        with pytest.raises(ConfigError, match="one sequence does not fit"):
            search()


@pytest.mark.gpu
def test_a_prediction_fills_a_gpu_s_memory(monkeypatch):
    """Steps of 300 MB and 150 MB a sequence in 2 GB: what is found fits, and leaves little more than the margin."""
    torch.cuda.empty_cache()
    before, room = torch.cuda.memory_reserved(), 2 * 10**9

    def left():  # of what this test may use: others use the GPU too
        return room - torch.cuda.memory_reserved() + before, room

    monkeypatch.setattr(torch.cuda, "mem_get_info", left)
    tried = []

    def try_step(size):
        tried.append(size)
        torch.empty(3 * 10**8 + size * 15 * 10**7, dtype=torch.uint8, device="cuda")

    try:
        found = predict_largest(try_step, 4096)
    finally:
        torch.cuda.empty_cache()
    assert tried[-1] == found
    assert 0.85 * room <= 3e8 + found * 1.5e8 <= room


@pytest.mark.parametrize(
    ("target", "largest", "world", "fixed", "expected"),
    [
        (512, 100, 1, False, Split(64, 8, 1)),  # 64 divides 512
        (512, 8, 4, False, Split(8, 16, 4)),
        (4, 64, 1, False, Split(4, 1, 1)),  # never more than a rank's share
        (509, 100, 1, False, Split(85, 6, 1)),  # prime: 510 is the nearest that 6 can make
        (6, 64, 4, False, Split(2, 1, 4)),  # 8
        (10, 4, 1, True, Split(4, 3, 1)),
        (2, 8, 2, True, Split(8, 1, 2)),
    ],
)
def test_a_step_is_divided(target, largest, world, fixed, expected):
    made = split(target, largest, world, fixed)
    assert made == expected
    assert made.effective >= target
    assert made.micro <= largest
