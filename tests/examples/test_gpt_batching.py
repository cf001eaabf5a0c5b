"""Micro-batches: the largest that fits is found, also where memory really runs out, and steps are divided."""

import json
import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from gpt import batching, fitting, host
from gpt.batching import Split, cautious, find_largest, predict_largest, split
from gpt.trainer import Trainer
from workers_gpt import assert_empty, configure, write_text

from fp8stack.errors import ConfigError
from fp8stack.nn import Fp8Linear

ROOT = Path(batching.__file__).parents[2]
MEASURED = """
import sys, torch
sys.path[:0] = sys.argv[1:3]
from gpt import batching, host

host.memory_free = lambda: 2**31  # for two ranks
measure = batching.part_of_host()
blocks = []

def try_step(size):
    blocks.append(torch.ones(size * 2**18))  # MiB each
    blocks.clear()

sizes = (128, 256, 128) if measure else ()
print([measure(try_step, size) * batching.MARGIN * 1024 for size in sizes])
"""
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


@pytest.mark.parametrize("limit", [1, 5, 4096])
@pytest.mark.parametrize("room", [1000, 1010, 1700, 80_000, 2_000_000])
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


@pytest.mark.parametrize(
    "others", [(900, 100, 40_000), (0, 100, 3700), (3000, 10, 9000), (0, 1, 150)], ids=str
)
def test_ranks_that_differ_try_the_same_sizes(others):
    """Of this rank 79 sequences fit, of the other one fewer: all that is tried fits on both, and hardly more would."""
    meeting, given = threading.Barrier(2, timeout=60), {}
    found, tried = {}, {0: [], 1: []}
    ranks = {0: (100, 100, 8000), 1: others}  # fixed, of a sequence, room

    def least(rank, size):
        given[rank] = size
        meeting.wait()
        smallest = min(given.values())
        meeting.wait()
        return smallest

    def search(rank):
        fixed, each, room = ranks[rank]

        def measure(try_step, size):
            try_step(size)
            return max(2 * each, fixed + each * size) / room  # a gap that one sequence lies in

        found[rank] = predict_largest(tried[rank].append, 4096, partial(least, rank), measure)

    threads = [threading.Thread(target=search, args=(rank,)) for rank in ranks]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    fits = min((room - fixed) // each for fixed, each, room in ranks.values())
    assert tried[0] == tried[1]
    assert 0.9 * fits <= found[0] == found[1] == tried[0][-1] <= fits


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


def test_sizes_are_tried_as_in_the_step_that_needs_most_and_leave_nothing_behind(
    tmp_path, monkeypatch
):
    """The first step is sampled, and so computed without fused layers, which need less."""
    write_text(tmp_path)
    try_step, probes = fitting._try_step, []

    def look(trainer, states, size):
        try_step(trainer, states, size)
        probes.append({layer.products.probe is None for layer in layers(trainer.model)})

    def layers(model):
        return [module for module in model.modules() if isinstance(module, Fp8Linear)]

    monkeypatch.setattr(fitting, "_try_step", look)
    options = {"opt_level": "O2", "fuse": True, "fp8_recipe": "delayed", "micro_batch": "auto"}
    trainer = Trainer(configure(tmp_path, **options))
    assert probes == [{False}] * 3
    assert all(layer.products.probe is None for layer in layers(trainer.model))
    assert trainer.monitor.metrics(1) == {}
    assert_empty(trainer.model)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits the address space")
def test_a_real_step_runs_out_of_memory_and_goes_on():
    command = [sys.executable, "-c", REAL, str(ROOT / "examples"), str(ROOT)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    found, largest = map(int, result.stdout.split())
    assert 2 <= found < largest < 4096


# --- memory of a CPU, whose system kills what takes too much


@pytest.mark.parametrize("limit", [1, 7, 64])
@pytest.mark.parametrize("fits", [1, 2, 5, 31, 100])
@pytest.mark.parametrize("constant", [0.0, 0.4])
def test_sizes_beyond_a_cpu_s_memory_are_not_tried(constant, fits, limit):
    tried = []

    def measure(try_step, size):
        try_step(size)
        return constant + (1 - constant) * size / (fits + 0.5)

    found = find_largest(cautious(tried.append, measure), limit)
    assert max(tried) <= fits
    # a single sequence that takes more than half tells nothing of a second one
    alone = measure(lambda _: None, 1) > 0.5
    assert found == (1 if alone else min(fits, limit))


def test_what_a_step_takes_of_a_cpu_s_memory_is_measured():
    command = [sys.executable, "-c", MEASURED, str(ROOT / "examples"), str(ROOT)]
    environment = {**os.environ, "LOCAL_WORLD_SIZE": "2"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert result.returncode == 0, result.stderr
    if result.stdout.strip() == "[]":
        pytest.skip("this system does not tell")
    for size, part in zip((128, 256, 128), json.loads(result.stdout), strict=True):
        assert part == pytest.approx(size, abs=20)


def test_where_there_is_no_memory_nothing_fits(monkeypatch):
    """A control group may have more than its limit."""
    for free in (0, -(2**30)):
        monkeypatch.setattr(host, "memory_free", lambda free=free: free)
        monkeypatch.setattr(host, "memory_peak", lambda forget=False: 2**20 * (not forget))
        measure = batching.part_of_host()
        assert measure(lambda _: None, 1) > 1000


def test_limits_of_control_groups_count(tmp_path, monkeypatch):
    """In version 2 and 1, below a group without a limit, and where the path is the host's."""
    for proc, kinds, folder, names in (
        ("0::/a/b", "", "a/b", ("memory.max", "memory.current", "inactive_file")),
        ("4:memory:/host/own", "memory", "", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
    ):  # fmt: skip
        root = tmp_path / (kinds or "unified")
        (root / "self").mkdir(parents=True)
        (root / "self/cgroup").write_text(f"{proc}\n1:cpu:/\n")
        (root / "meminfo").write_text("MemTotal: 2000 kB\nMemAvailable: 1000 kB\n")
        monkeypatch.setattr(host, "PROC", root)
        monkeypatch.setattr(host, "CGROUPS", root / "groups")
        assert (host.memory_in_all(), host.memory_free()) == (2_048_000, 1_024_000)
        group = root / "groups" / kinds / folder
        group.mkdir(parents=True)
        most, used, cache = names
        (group / most).write_text("900000\n")
        (group / used).write_text("500000\n")
        (group / "memory.stat").write_text(f"anon 1\n{cache} 100000\n")
        assert (host.memory_in_all(), host.memory_free()) == (900_000, 500_000)
        (group / most).write_text("max\n")
        assert (host.memory_in_all(), host.memory_free()) == (2_048_000, 1_024_000)
    monkeypatch.setattr(host, "PROC", tmp_path / "nowhere")
    assert (host.memory_in_all(), host.memory_free(), host.memory_peak()) == (None, None, None)


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
