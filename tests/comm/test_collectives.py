"""Collectives between real processes: gloo on CPUs, NCCL where there are as many GPUs."""

import time

import pytest
import torch
import torch.distributed as dist
from helpers import need_gpus
from ranks import start_ranks
from workers_comm import (
    check_agreement,
    check_collectives,
    check_disagreement,
    check_large,
    note_failed_backward,
    note_failure,
    note_failure_on_gpus,
)

from fp8stack import comm
from fp8stack.comm import checks
from fp8stack.errors import CommError


def spawn(work, world, store, *arguments):
    start_ranks(work, (world, str(store), *arguments), nprocs=world)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_collectives_over_gloo(world, tmp_path):
    spawn(check_collectives, world, tmp_path / "store", "cpu")


@pytest.mark.gpu
@pytest.mark.gpus
@pytest.mark.parametrize("world", [1, 2, 4])
def test_collectives_over_nccl(world, tmp_path):
    need_gpus(world)
    spawn(check_collectives, world, tmp_path / "store", "cuda")


def test_ranks_agree_on_a_transport_whatever_happens_to_one(tmp_path):
    spawn(check_agreement, 3, tmp_path / "store")


def test_debug_mode_tells_ranks_that_disagree(tmp_path):
    spawn(check_disagreement, 2, tmp_path / "store", "cpu")


@pytest.mark.parametrize("how", ["dies", "stalls"])
def test_a_rank_that_is_gone_is_named(how, tmp_path):
    """Within the timeout of 3 s and the patience of 2 s, on every rank that is left."""
    with torch.multiprocessing.Manager() as manager:
        notes = manager.dict()
        start_ranks(note_failure, (3, str(tmp_path / "store"), how, notes), nprocs=3)
        notes = dict(notes)
    assert set(notes) == {0, 1}
    for rank, (message, seconds) in notes.items():
        assert (
            f"all_reduce of 1000 float32 elements over ranks 0, 1, 2 failed on rank {rank}"
            in message
        )
        assert "rank 2 did not take part" in message
        assert seconds < 10


def test_ranks_sign_out_after_a_failure(mesh, monkeypatch):
    """Or the next failure would find them alive."""
    monkeypatch.setattr(checks, "PATIENCE", 0.05)
    store = dist.distributed_c10d._get_default_store()
    key = f"fp8stack/failed/{dist.group.WORLD.group_name}/0"
    assert "all ranks are alive" in checks.explain("a sum", dist.group.WORLD, "no luck")
    assert store.check([key])
    deadline = time.monotonic() + 20
    while store.check([key]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not store.check([key])


@pytest.mark.gpu
@pytest.mark.gpus
@pytest.mark.parametrize("transport", ["nvlink", "collective"])
@pytest.mark.parametrize("how", ["dies", "stalls"])
def test_a_gpu_that_is_gone_is_named(how, transport, tmp_path, monkeypatch):
    """Within the timeout of 5 s, and some. NCCL raises errors, and does not end the process, if it may block."""
    need_gpus(2)
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    with torch.multiprocessing.Manager() as manager:
        notes = manager.dict()
        arguments = (2, str(tmp_path / "store"), how, transport, notes)
        start_ranks(note_failure_on_gpus, arguments, nprocs=2)
        notes = dict(notes)
    assert set(notes) == {0}
    message, seconds, finite = notes[0]
    assert "all_reduce of 1000 float32 elements over ranks 0, 1 failed on rank 0" in message
    assert "rank 1 did not take part" in message
    assert seconds < 12
    assert finite == (transport == "collective")  # who raises at once has written nothing


@pytest.mark.gpu
@pytest.mark.gpus
def test_tensors_of_more_elements_than_an_int32_counts(tmp_path):
    need_gpus(2)
    spawn(check_large, 2, tmp_path / "store")


def test_a_rank_that_is_gone_in_backward_is_named(tmp_path):
    with torch.multiprocessing.Manager() as manager:
        notes = manager.dict()
        arguments = (3, str(tmp_path / "store"), notes)
        start_ranks(note_failed_backward, arguments, nprocs=3)
        notes = dict(notes)
    assert set(notes) == {0, 1}
    for message in notes.values():
        assert "averaging of bucket 0 of" in message
        assert "rank 2 did not take part" in message


def test_without_a_process_group_the_error_is_torchs():
    with pytest.raises(ValueError, match="process group has not been initialized"):
        comm.all_reduce(torch.ones(3))


def test_other_things_than_tensors_are_refused(mesh):
    with pytest.raises(TypeError, match="takes tensors, got list"):
        comm.all_reduce([1.0])


def test_one_rank_keeps_every_bit(mesh):
    x = torch.randn(77, dtype=torch.float64).float()
    y = x.clone()
    work = comm.all_reduce(y, dist.ReduceOp.AVG, async_op=True)
    assert work.wait()
    assert work.is_completed()
    assert work.get_future().wait() == [y]
    assert torch.equal(x, y)
    assert issubclass(CommError, RuntimeError)
