"""The one-launch sum over the GPUs of a host: its bits are those of the kernels around collectives."""

import pytest
import torch
from ranks import start_ranks
from workers_two_shot import check_rank, compare, drawn, memory_of, prepare, space_of

from fp8stack.kernels import two_shot
from fp8stack.kernels.reference.wire import Layout


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_that_share_memory_get_the_references_bits(world):
    """Each rank is a process in Triton's interpreter: the first, the last, and one between them."""
    if torch.cuda.is_available():
        pytest.skip("Triton compiles here")
    memories = [memory_of(world, "cpu").share_memory_() for _ in range(world)]
    start_ranks(check_rank, (world, memories), nprocs=world)


@pytest.mark.gpu
@pytest.mark.parametrize("world", [1, 2, 3, 4])
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


@pytest.mark.parametrize("launches", [1, 3])
@pytest.mark.parametrize("size", [100, 4096 * 6])
@pytest.mark.parametrize("scatter", [False, True])
def test_a_rank_that_comes_too_late_gets_what_is_right_or_nan(
    scatter, size, launches, kernel_device
):
    """The other one has given up on some launches: it must not have gone on writing as if nothing was."""
    memories = [memory_of(2, kernel_device) for _ in range(2)]
    spaces = [space_of(memories, kernel_device, rank, 1) for rank in range(2)]
    wholes = [drawn(rank, 2 * size, torch.float32) for rank in range(2)]
    found = []
    for rank, space in enumerate(spaces):
        for call in range(launches if rank == 0 else 1):
            x = wholes[rank].to(kernel_device) + call
            out = torch.empty(size, device=kernel_device) if scatter else x
            if scatter:
                two_shot.reduce_scatter(x, out, Layout(2, size, 2), space, call + 1, 1e-5)
            else:
                two_shot.all_reduce(x, None, x, None, Layout(1, 2 * size, 2), space, call + 1, 1e-5)
            if kernel_device == "cuda":
                torch.cuda.synchronize()
            if call == 0:
                found.append(out.cpu())
    assert spaces[0].missing.tolist() == [0, 1], "the first call that a rank was missing from"
    assert found[0].isnan().all()
    exact = wholes[0].double() + wholes[1]
    late, exact = found[1].double(), exact[size:] if scatter else exact
    finite = late.isfinite() & exact.isfinite()
    assert ((late - exact).abs()[finite] <= 0.1 * exact.abs().amax()).all()
    assert late.isnan().any() or (scatter and size < 4096)
