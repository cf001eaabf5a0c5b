"""The one-launch sum over the GPUs of a host: its bits are those of the kernels around collectives."""

import pytest
import torch
from workers_two_shot import check_rank, compare, memory_of, prepare, space_of

from fp8stack.kernels import two_shot
from fp8stack.kernels.reference.wire import Layout

WORLDS = pytest.mark.parametrize("world", [1, 2, 3, 4])


@WORLDS
def test_ranks_that_share_memory_get_the_references_bits(world):
    """Each rank is a process in Triton's interpreter."""
    if torch.cuda.is_available():
        pytest.skip("Triton compiles here")
    memories = [memory_of(world, "cpu").share_memory_() for _ in range(world)]
    torch.multiprocessing.spawn(check_rank, (world, memories), nprocs=world)


@pytest.mark.gpu
@WORLDS
@pytest.mark.parametrize("programs", [1, 5, 32])
def test_ranks_on_streams_of_a_gpu_get_the_references_bits(world, programs):
    memories = [memory_of(world, "cuda") for _ in range(world)]
    spaces = [space_of(memories, "cuda", rank, programs) for rank in range(world)]
    ranks = [prepare(rank, world, spaces[rank], "cuda") for rank in range(world)]
    streams = [torch.cuda.Stream() for _ in range(world)]
    torch.cuda.synchronize()
    # Between the launches of two ranks nothing may wait for the GPU: the first waits for the second.
    for calls in zip(*(calls for calls, _ in ranks), strict=True):
        for call, stream in zip(calls, streams, strict=True):
            with torch.cuda.stream(stream):
                call()
    torch.cuda.synchronize()
    for rank, (_, found) in enumerate(ranks):
        compare(found, rank, world, spaces[rank])


def test_a_rank_that_stays_away_is_noted_and_the_result_is_nan(kernel_device):
    memories = [memory_of(2, kernel_device) for _ in range(2)]
    space = space_of(memories, kernel_device, 0)
    x = torch.ones(20_000, device=kernel_device)
    two_shot.all_reduce(x, None, x, None, Layout(1, x.numel(), 2), space, 7, 1e-4)
    assert x.isnan().all()
    if kernel_device == "cuda":
        torch.cuda.synchronize()
    assert space.missing.tolist() == [0, 7]
    out = torch.ones(10_000, device=kernel_device)
    two_shot.reduce_scatter(x, out, Layout(2, 10_000, 2), space, 8, 1e-4)
    assert out.isnan().all()
