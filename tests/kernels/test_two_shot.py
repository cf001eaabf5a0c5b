"""The one-launch sum over the GPUs of a host: its bits are those of the kernels around collectives.

Ranks are processes that share memory in Triton's interpreter, or streams of one GPU.
"""

import pytest
import torch
from interpreter import quicken
from ranks import run_ranks

from fp8stack.formats import E4M3
from fp8stack.kernels import two_shot, workspace
from fp8stack.kernels.reference import wire as reference
from fp8stack.kernels.reference.quantize import quantize_blocks
from fp8stack.kernels.reference.wire import Layout

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def space_of(memories, device, rank, programs=2):
    """Return the workspace of a rank, given the memory of all as it sees them."""
    peers = torch.tensor([m.data_ptr() for m in memories], dtype=torch.int64, device=device)
    steps = torch.zeros((2, workspace.PROGRAMS), dtype=torch.int32, device=device)
    missing = torch.zeros(len(memories), dtype=torch.int32, pin_memory=device != "cpu")
    return workspace.Workspace(peers, steps, missing, rank, programs)


def memory_of(world, device):
    return torch.zeros(workspace.bytes_of(world), dtype=torch.uint8, device=device)


def drawn(rank, size, dtype):
    """Return the numbers of a rank, some of them special."""
    x = torch.randn(size, generator=torch.Generator().manual_seed(rank))
    x *= torch.rand(size, generator=torch.Generator().manual_seed(5)) * 100
    if size > 3000 and rank == 1:
        x[1000], x[2000], x[2500:2900] = torch.nan, torch.inf, 0.0
    return x.to(dtype)


def exchange(parts, layout, divisor):
    """Return the chunks that all ranks hold at the end, by the reference."""
    sent = torch.stack([reference.pack(x, layout) for x in parts]).transpose(0, 1).contiguous()
    return torch.stack([reference.reduce_pack(stripe, layout, divisor) for stripe in sent])


def cases(world):
    """Yield (size, dtype, divisor) of calls one after the other, of up to nine rounds."""
    last = 128 * 33 * world + 5
    # ranks wait for each other in the interpreter
    most = 70_000 if torch.cuda.is_available() else 25_000
    for size, dtype in ((1, 0), (130, 1), (4096 * world, 2), (last, 0), (most, 1)):
        yield size, DTYPES[dtype], float(world) if size % 2 else 1.0


def prepare(rank, world, space, device):
    """Return the calls of a rank, to be made one after the other, and what they write."""
    calls, out = [], []

    def add(*arguments):
        number = len(calls) + 1
        calls.append(lambda: two_shot.add_up(*arguments[:5], space, number, 60.0, *arguments[5:]))

    for size, dtype, divisor in cases(world):
        layout, x = Layout(1, size, world), drawn(rank, size, dtype).to(device)
        add(x, None, x, None, layout, divisor)
        parts = quantize_blocks(drawn(rank, size, dtype), E4M3)
        codes, scales = (part.view(-1).to(device) for part in parts)
        codes = codes.view(torch.uint8)
        add(codes, scales, codes, scales, layout, divisor)
        whole = drawn(rank, size * world, dtype).to(device)
        part = torch.empty(size, dtype=dtype, device=device)
        add(whole, None, part, None, Layout(world, size, world), divisor, True)
        out += [x, codes, scales, part]
    return calls, out


def expected(rank, world):
    """Yield what a rank gets, by the reference."""
    for size, dtype, divisor in cases(world):
        layout = Layout(1, size, world)
        chunks = exchange([drawn(r, size, dtype) for r in range(world)], layout, divisor)
        x = torch.empty(size, dtype=dtype)
        reference.unpack(chunks, x, layout)
        yield x
        codes = torch.empty(1, size, dtype=torch.uint8)
        scales = torch.empty(1, layout.blocks)
        reference.unpack(chunks, codes, layout, scales)
        yield codes.view(-1)
        yield scales.view(-1)
        rows, part = Layout(world, size, world), torch.empty(size, dtype=dtype)
        wholes = [reference.pack(drawn(r, size * world, dtype), rows) for r in range(world)]
        reference.reduce_unpack(torch.stack([w[rank] for w in wholes]), part, divisor)
        yield part


def check_rank(rank, world, memories):
    """Run a rank in the interpreter, and compare its results with the reference."""
    torch.set_num_threads(1)
    quicken()
    space = space_of(memories, "cpu", rank)
    calls, found = prepare(rank, world, space, "cpu")
    for call in calls:
        call()
    compare(found, rank, world, space)


def compare(found, rank, world, space):
    """Fail unless every result has the reference's bits and no rank was missing."""
    assert not space.missing.any()
    wanted = list(expected(rank, world))
    assert len(found) == len(wanted)
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        a, b = a.cpu().view(-1), b.reshape(-1)
        both_nan = a.float().isnan() & b.float().isnan()
        same = (a == b) | both_nan
        assert same.all(), (i, a[~same][:5], b[~same][:5])


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_that_share_memory_get_the_references_bits(world):
    """Each rank is a process in Triton's interpreter: the first, the last, and one between them."""
    if torch.cuda.is_available():
        pytest.skip("Triton compiles here")
    memories = [memory_of(world, "cpu").share_memory_() for _ in range(world)]
    run_ranks(check_rank, world, world, memories, device=None)


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
    two_shot.add_up(x, None, x, None, Layout(1, x.numel(), 2), space, 7, 1e-4)
    assert x.isnan().all()
    if kernel_device == "cuda":
        torch.cuda.synchronize()
    assert space.missing.tolist() == [0, 7]
    out = torch.ones(10_000, device=kernel_device)
    two_shot.add_up(x, None, out, None, Layout(2, 10_000, 2), space, 8, 1e-4, scatter=True)
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
            layout = Layout(2, size, 2) if scatter else Layout(1, 2 * size, 2)
            two_shot.add_up(x, None, out, None, layout, space, call + 1, 1e-5, scatter=scatter)
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
