"""Collectives between real processes: gloo on CPUs, NCCL where there are as many GPUs.

Starting ranks takes longer than most checks, so each number of ranks is started once and does them all.
"""

import faulthandler
import os
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from helpers import assert_same_bits, need_gpus
from ranks import assert_equal_everywhere, assert_near, drawn, own_device, run_ranks

from fp8stack import comm
from fp8stack.comm import nvlink
from fp8stack.errors import CommError, ConfigError
from fp8stack.tensor import BlockScaledTensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (1, 7, 127, 128, 129, 1000, 128 * 12 - 1, 128 * 12, 128 * 12 + 1)
SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG


def check_all(rank):
    """Run every collective with every dtype and odd sizes; all ranks end with the same bits, near the exact ones."""
    world, device = dist.get_world_size(), own_device()
    check_transports(rank, world, device)
    for dtype in DTYPES:
        for size in SIZES:
            parts = [drawn(r, size, dtype) for r in range(world)]
            exact = torch.stack(parts).double().sum(0)
            check_all_reduce(parts[rank].to(device), exact, world)
            check_reduce_scatter(rank, world, size, dtype, device)
            check_gather(parts, rank, world, device)
    check_special_values(rank, world, device)
    check_shapes(rank, world, device)
    check_blocks(rank, world, device)
    check_refusals(rank, world, device)
    check_statistics(rank, world, device)
    if world == 2:
        check_disagreement(rank, device)
    if world == 3:
        check_agreement_on_a_transport(rank, device)
    if world > 2:
        check_groups(rank, world, device)
    if world == 4:
        check_hierarchy(rank, world, device)


def test_one_rank(mesh):
    check_all(0)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_over_gloo(world):
    run_ranks(check_all, world)


@pytest.mark.gpu
@pytest.mark.gpus
@pytest.mark.parametrize("world", [1, 2, 4])
def test_over_nccl(world):
    need_gpus(world)
    run_ranks(check_all, world, device="cuda")


# --- numbers


def check_transports(rank, world, device):
    """Compare the bits of sums over NVLink with those of the process group's collectives."""
    with pytest.raises(ConfigError, match="transport='nccl' is not a choice"):
        comm.set_transport("nccl")
    if device.type != "cuda" or world == 1:
        comm.set_transport("nvlink")
        if world > 1:
            with pytest.raises(CommError, match="tensors are on cpu"):
                comm.all_reduce(torch.ones(3, device=device))
        comm.set_transport("auto")
        return
    for size in (5, 128 * 64 * world, 300_001, 2**20):
        for dtype in (*DTYPES, "blocks"):
            some, others = (
                summed(rank, world, size, dtype, transport, device)
                for transport in ("collective", "nvlink")
            )
            assert_same_bits(some, others)
    comm.set_transport("auto")
    check_streams(rank, world, device)
    graph, x = torch.cuda.CUDAGraph(), drawn(rank, 5000).to(device)
    kept = x.clone()
    with torch.cuda.graph(graph):
        comm.all_reduce(x)
    for _ in range(3):
        x.copy_(kept)
        graph.replay()
        assert_near(x, sum(drawn(r, 5000) for r in range(world)), 28)


def summed(rank, world, size, dtype, transport, device):
    """Return the results of sums."""
    comm.set_transport(transport)
    x = drawn(rank, size)
    x = BlockScaledTensor.quantize(x) if dtype == "blocks" else x.to(dtype)
    x = x.to(device)
    comm.all_reduce(x, AVG)
    comm.all_reduce(x)
    if dtype == "blocks":
        return x.parts()
    whole = drawn(rank, size * world).to(device, dtype)
    part = whole[:size].clone()
    comm.reduce_scatter_tensor(part, whole, AVG)
    return [x, part]


def check_streams(rank, world, device):
    """Sums in the background and at once, none of which is waited for before the next is called."""
    size = 3_000_000
    exact = sum(drawn(r, size) for r in range(world)).to(device)
    tensors = [drawn(rank, size).to(device) * 2.0**i for i in range(8)]
    works = [comm.all_reduce(x, async_op=i % 2 == 0) for i, x in enumerate(tensors)]
    for work in filter(None, works):
        work.wait()
    for i, x in enumerate(tensors):
        assert_near(x, exact * 2.0**i, 28)


def check_all_reduce(mine, exact, world):
    for op, divisor in ((SUM, 1), (AVG, world)):
        result = mine.clone()
        assert comm.all_reduce(result, op) is None
        if world == 1:
            assert_same_bits(result, mine)
        assert_equal_everywhere(result)
        # two roundings of few elements, and that of the output
        assert_near(result, exact / divisor, 20)
        later = mine.clone()
        work = comm.all_reduce(later, op, async_op=True)
        assert work.wait()
        assert work.is_completed() or mine.is_cuda
        assert_same_bits(later, result)
        assert work.get_future().wait()[0] is later


def check_reduce_scatter(rank, world, size, dtype, device):
    wholes = [drawn(r, size * world, dtype) for r in range(world)]
    exact = torch.stack(wholes).double().sum(0)[size * rank : size * (rank + 1)]
    result = torch.empty(size, dtype=dtype, device=device)
    comm.reduce_scatter_tensor(result, wholes[rank].to(device))
    assert_near(result, exact, 22)
    mean = torch.empty(size, dtype=torch.float32, device=device)
    comm.reduce_scatter_tensor(mean, wholes[rank].to(device), AVG, async_op=True).synchronize()
    assert_near(mean, exact / world, 22)


def check_gather(parts, rank, world, device):
    joined = torch.empty(len(parts[0]) * world, dtype=parts[0].dtype, device=device)
    comm.all_gather_into_tensor(joined, parts[rank].to(device))
    assert_equal_everywhere(joined)
    assert_near(joined, torch.cat(parts), 25)


def check_special_values(rank, world, device):
    for bad in (torch.nan, torch.inf, -torch.inf):
        x = torch.ones(1000, device=device)
        if rank == world - 1:
            x[300] = bad
        comm.all_reduce(x)
        assert_equal_everywhere(x)
        if world > 1:
            assert x[256:384].isnan().all()
            assert x.isnan().sum() == 128
        assert x[:256].eq(world).all()
    largest = torch.full((300,), 3e38, device=device)
    comm.all_reduce(largest)
    assert_equal_everywhere(largest)
    assert largest.isnan().all() == (world > 1)
    same = torch.full((300,), 3.0, device=device)  # a sum in FP8 would saturate
    comm.all_reduce(same)
    assert same.eq(3 * world).all()
    check_ends_of_dtypes(rank, world, device)
    # the sum is beyond float16, the mean is not
    large = torch.full((300 * world,), 60000.0, dtype=torch.float16, device=device)
    part = large[:300].clone()
    comm.reduce_scatter_tensor(part, large, AVG)
    comm.all_reduce(large, AVG)
    assert part.eq(60000).all()
    assert large.eq(60000).all()


def check_ends_of_dtypes(rank, world, device):
    """Means near the largest number are finite; the smallest numbers are within the limit of docs/comm.md."""
    for dtype in DTYPES:
        largest = torch.finfo(dtype).max
        parts = [torch.full((300,), 0.9 * largest * (1 - r / 8), dtype=dtype) for r in range(world)]
        exact = torch.stack(parts).double().mean(0)
        mean = parts[rank].to(device, copy=True)
        comm.all_reduce(mean, AVG)
        part = torch.empty(300, dtype=dtype, device=device)
        comm.reduce_scatter_tensor(part, parts[rank].repeat(world).to(device), AVG)
        for result in (mean, part):
            assert ((result.cpu().double() - exact).abs() <= exact / 8).all()
    for size in (1e-37, 1e-41, 1e-45):
        parts = [size * drawn(r, 300) for r in range(world)]
        exact, result = torch.stack(parts).double().sum(0), parts[rank].to(device, copy=True)
        comm.all_reduce(result)
        assert_equal_everywhere(result)
        assert result.any() or size < 1e-42
        sent = (torch.stack(parts).double().abs() / 16).clamp(min=2.0**-137).sum(0)
        bound = sent + ((exact.abs() + sent) / 16).clamp(min=2.0**-137)
        assert ((result.cpu().double() - exact).abs() <= bound).all()


def check_shapes(rank, world, device):
    comm.all_reduce(torch.empty(0, device=device))
    comm.all_reduce(torch.empty(0, device=device), async_op=True).wait()
    leaf = torch.ones(5, 7, device=device, requires_grad=True)
    comm.all_reduce(leaf)
    assert leaf.eq(world).all()
    turned = drawn(rank, 60).view(6, 10).to(device)
    expected = turned.clone()
    comm.all_reduce(expected.t().contiguous().t())
    whole = turned.t().contiguous()
    comm.all_reduce(whole)
    comm.all_reduce(turned.t())  # a view, written through
    assert_same_bits(turned.t().contiguous(), whole)
    spread, rows = torch.empty(4, 2 * world, device=device).t(), torch.ones(8, device=device)
    comm.all_gather_into_tensor(spread, rows)
    assert spread.eq(1).all()
    part = torch.empty(4, 2, device=device).t()
    comm.reduce_scatter_tensor(part, torch.ones(8 * world, device=device))
    assert part.eq(world).all()
    single = drawn(rank, (7, 1)).to(device)
    comm.all_reduce(single)
    assert_equal_everywhere(single)
    odd = drawn(rank, 1003).to(device)
    aligned = odd[3:].clone()
    comm.all_reduce(odd[3:])
    comm.all_reduce(aligned)
    assert_same_bits(odd[3:].clone(), aligned)
    with torch.inference_mode():
        made = torch.ones(300, device=device)
        comm.all_reduce(made, async_op=True).wait()
        assert made.eq(world).all()


def check_blocks(rank, world, device):
    """FP8 in, FP8 out: codes are not rounded again before they are sent."""
    for shape in ((40, 256), (7, 200), (300,), ()):
        x = drawn(rank, shape).to(device)
        blocks = BlockScaledTensor.quantize(x)
        plain = blocks.dequantize()
        comm.all_reduce(blocks, AVG)
        assert_equal_everywhere(blocks.codes.view(torch.uint8))
        assert_equal_everywhere(blocks.scale)
        if len(shape) != 2 or shape[1] % 128 == 0:  # the same blocks
            comm.all_reduce(plain, AVG)
            assert_same_bits(blocks.dequantize(), plain)
        exact = torch.stack([drawn(r, shape) for r in range(world)]).double().mean(0)
        assert_near(blocks.dequantize(), exact, 20)
        work = comm.all_reduce(blocks, async_op=True)
        work.wait()
        assert_near(blocks.dequantize(), exact * world, 18)


def check_statistics(rank, world, device):
    """Calls, seconds, and bytes that this rank sent: 132 a block."""
    n = 128 * 10 * world
    x = torch.ones(n, device=device)
    comm.all_reduce(x.clone())  # before: not counted
    with comm.Statistics() as statistics:
        comm.all_reduce(x)
        comm.all_reduce(x.clone(), async_op=True).wait()
        comm.all_gather_into_tensor(torch.empty(n * world, device=device), x)
        comm.reduce_scatter_tensor(x.new_empty(10), x.new_ones(10 * world))
        first = statistics.collect()
        assert statistics.collect() == {}
        comm.all_reduce(x)
    if world == 1:
        assert first == {}  # nothing was sent
        return
    others = world - 1
    # of collectives, to a multiple of 16
    chunk = 1320 if nvlink.link_of(dist.group.WORLD, device) else 1328
    expected = {
        "all_reduce": (2, 4 * others * chunk),
        "all_gather_into_tensor": (1, others * 1320 * world),
        "reduce_scatter_tensor": (1, others * 144),
    }
    assert set(first) == set(expected)
    for name, (calls, nbytes) in expected.items():
        row = first[name]
        assert row["calls"] == calls, name
        assert abs(row["bytes"] - nbytes) <= 16 * world, (name, row, nbytes)
        assert 0 < row["seconds"] < 60
    assert list(statistics.collect()) == ["all_reduce"]


def check_groups(rank, world, device):
    """Of a part of the ranks; a rank that is not in it is told so as torch does."""
    members = [0, world - 1]
    group = dist.new_group(members)
    both = torch.ones(9, device=device)  # of all, when some ranks know more groups than others
    comm.all_reduce(both, async_op=True).wait()
    assert both.eq(world).all()
    x = torch.full((200,), float(rank + 1), device=device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = comm.all_reduce(x, group=group)
    if rank in members:
        assert x.eq(1 + world).all()
        y = torch.full((200,), float(rank + 1), device=device)
        comm.all_reduce(y, group=group, async_op=True).wait()
        assert_same_bits(x, y)
    else:
        with pytest.raises(ConfigError, match=f"rank {rank} does not belong to the given"):
            comm.DataParallel(torch.nn.Linear(2, 2), group)
        assert result is None
        assert x.eq(rank + 1).all()
        assert any("does not belong to the given group" in str(w.message) for w in caught)


def check_hierarchy(rank, world, device):
    """Of two hosts of two ranks: the same bits everywhere, three roundings from the exact sum, and back."""
    comm.set_hierarchy(2)
    for dtype in DTYPES:
        for size in (1, 130, 1000, 128 * 16 + 1):
            parts = [drawn(r, size, dtype) for r in range(world)]
            check_all_reduce(parts[rank].to(device), torch.stack(parts).double().sum(0), world)
    x = drawn(rank, 2**16).to(device)
    with comm.Statistics() as statistics:
        comm.all_reduce(x)
    chunk = 2**16 // 4 // 128 * 132
    assert (
        statistics.collect()["all_reduce"]["bytes"] == 2 * 1 * 2 * chunk + 2 * chunk
    )  # inside, across
    exact = torch.stack([drawn(r, 2**16) for r in range(world)]).double().sum(0)
    assert_near(x, exact, 26.5)
    bad = torch.ones(1000, device=device)
    if rank == 2:
        bad[300] = torch.inf
    comm.all_reduce(bad)
    assert bad[256:384].isnan().all()
    assert bad.isnan().sum() == 128
    with pytest.raises(ConfigError, match="must divide the group's 4 ranks, got 3"):
        comm.set_hierarchy(3)
    comm.set_hierarchy(4)
    flat = drawn(rank, 2**16).to(device)
    comm.all_reduce(flat)
    assert_near(flat, exact, 28)  # one rounding less again


@pytest.mark.gpu
@pytest.mark.gpus
def test_tensors_of_more_elements_than_an_int32_counts():
    need_gpus(2)
    # a thousand rounds, in each of which both GPUs have to be in this test's turn, whatever else they run
    run_ranks(check_large, 2, device="cuda", timeout=600)


def check_large(rank):
    """More than 2^31 elements, over both transports."""
    size = 2**31 + 1000
    whole = torch.empty(size, dtype=torch.bfloat16, device=own_device())
    part = torch.empty(size // 2, dtype=torch.bfloat16, device=own_device())
    for transport in ("nvlink", "collective"):
        comm.set_transport(transport)
        whole.fill_(rank + 1)
        whole[-300:] *= 4  # a power of two: codes of a block with both are exact
        comm.reduce_scatter_tensor(part, whole)
        assert part[:-300].eq(3).all(), transport  # NaN: a rank was missed
        assert part[-300:].eq(12 if rank == 1 else 3).all(), transport
        comm.all_reduce(whole)
        assert whole[:-300].eq(3).all(), transport
        assert whole[-300:].eq(12).all(), transport


# --- errors


def check_refusals(rank, world, device):
    x = torch.ones(8, device=device)
    for error, call in (
        ("ReduceOp.SUM and ReduceOp.AVG", lambda: comm.all_reduce(x, dist.ReduceOp.MAX)),
        ("torch.int64", lambda: comm.all_reduce(torch.ones(8, dtype=torch.int64, device=device))),
        ("torch.complex64", lambda: comm.all_reduce(x.to(torch.complex64))),
        ("sparse", lambda: comm.all_reduce(x.to_sparse())),
        ("elements", lambda: comm.reduce_scatter_tensor(x, x.new_ones(8 * world + 1))),
        ("elements", lambda: comm.all_gather_into_tensor(x, x.new_ones(9))),
        ("dequantize", lambda: comm.reduce_scatter_tensor(x, BlockScaledTensor.quantize(x))),
    ):
        with pytest.raises(ConfigError, match=error):
            call()
    with pytest.raises(TypeError, match="takes tensors, got list"):
        comm.all_reduce([1.0])


def check_disagreement(rank, device):
    """With FP8STACK_DEBUG=1, ranks that call different collectives are told so, on every rank."""
    os.environ["FP8STACK_DEBUG"] = "1"
    x = torch.ones(100 + rank, device=device)

    def gather(x):
        comm.all_gather_into_tensor(x.new_empty(2 * len(x)), x)

    for words, call in (
        ("101 float32", lambda: comm.all_reduce(x)),
        ("AVG", lambda: comm.all_reduce(x[:50], AVG if rank else SUM)),
        ("bfloat16", lambda: comm.all_reduce(x[:50].to((torch.float32, torch.bfloat16)[rank]))),
        (
            "all_gather_into_tensor of 50",
            lambda: gather(x[:50]) if rank else comm.all_reduce(x[:50]),
        ),
        ("refused: .*torch.int64", lambda: comm.all_reduce(x[:50].long() if rank else x[:50])),
        (
            r"50 float32 elements \[5, 10\]",
            lambda: comm.all_reduce(x[:50].view(5, 10) if rank else x[:50]),
        ),
    ):
        with pytest.raises(CommError, match=words) as caught:
            call()
        assert "rank 0:" in str(caught.value)
    comm.set_transport("auto" if rank else "collective")
    with pytest.raises(CommError, match="transport collective"):
        comm.all_reduce(x[:50])
    comm.set_transport("auto")
    with pytest.raises(ConfigError, match="torch\\.int64"):  # on all ranks alike
        comm.all_reduce(x[:50].long())
    good = torch.ones(9, device=device)
    comm.all_reduce(good)
    assert good.eq(2).all()
    os.environ["FP8STACK_DEBUG"] = "0"


def check_agreement_on_a_transport(rank, device):
    """Where one rank cannot use NVLink, all hear why, and none is left waiting."""

    def fail(group, device, made):
        raise RuntimeError(f"no luck on {rank}\nand a long dump")

    def succeed(group, device, made):
        return made

    steps = ("_look", "_allocate", "_map")
    with pytest.MonkeyPatch.context() as patch:
        for place, failing in enumerate(steps):
            for step in steps:
                patch.setattr(nvlink, step, fail if step == failing and rank == place else succeed)
            link, mine = nvlink._connect(dist.group.WORLD, device)
            assert link == f"rank {place} says: no luck on {place}"
            assert mine == (f"no luck on {place}" if rank == place else "")
        patch.setattr(nvlink, "_look", succeed)
        patch.setattr(nvlink, "_mapped", rank)
        assert "a different number of groups" in nvlink._connect(dist.group.WORLD, device)[1]
        patch.setattr(nvlink, "_host", lambda: f"host{rank // 2}")
        far = "its ranks are on several hosts"
        assert nvlink._connect(dist.group.WORLD, device) == (far, "")


def lose_a_rank(rank):
    """The last rank dies; return the errors of the others' collectives and backwards."""
    parallel = comm.DataParallel(torch.nn.Linear(128, 128))
    loss = parallel(torch.ones(2, 128)).sum()
    dist.barrier()
    if rank == 2:
        os._exit(0)
    errors = []
    layer, x = torch.nn.Linear(8, 8), torch.ones(1000)
    for call in (
        loss.backward,
        lambda: comm.all_reduce(x, async_op=True),
        lambda: comm.DataParallel(layer),
    ):
        with pytest.raises(CommError) as caught:
            call()
        errors.append(str(caught.value))
    return errors


def test_errors_of_torch_name_the_collective_and_its_ranks():
    results = run_ranks(lose_a_rank, 3, timeout=10)
    assert results.pop() is None
    for rank, (backward, call, made) in enumerate(results):
        assert "comparison of models" in made
        assert "averaging of bucket 0 of" in backward
        assert "all_reduce of 1000 float32 elements" in call
        assert all(
            f" over ranks 0, 1, 2 failed on rank {rank}: " in e for e in (backward, call, made)
        )


def lose_a_gpu(rank, how, transport):
    """As `lose_a_rank`; return the error, the seconds it took, and whether a sum is finite that a rank is missing from.

    The kernel over NVLink raises no error; the next call does.
    """
    faulthandler.dump_traceback_later(60, exit=True)  # a rank that hangs says where
    comm.set_transport(transport)
    x = torch.ones(1000, device=own_device())
    comm.all_reduce(x)
    dist.barrier(device_ids=[rank])
    torch.cuda.synchronize()
    if rank == 1:
        if how == "stalls":
            time.sleep(14)
        os._exit(0)
    time.sleep(1)
    start, finite = time.monotonic(), True
    try:
        comm.all_reduce(x)
        torch.cuda.synchronize()
        finite = bool(x.isfinite().any())
        comm.all_reduce(x)
    except CommError as error:
        return str(error), time.monotonic() - start, finite


@pytest.mark.gpu
@pytest.mark.gpus
@pytest.mark.parametrize("transport", ["nvlink", "collective"])
@pytest.mark.parametrize("how", ["dies", "stalls"])
def test_a_gpu_that_is_gone(how, transport, monkeypatch):
    """Within the timeout of 5 s, and some. NCCL raises errors, and does not end the process, if it may block."""
    need_gpus(2)
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    group = {"device": "cuda", "timeout": 5, "barrier": False}
    (message, seconds, finite), _ = run_ranks(lose_a_gpu, 2, how, transport, **group)
    assert "all_reduce of 1000 float32 elements over ranks 0, 1 failed on rank 0" in message
    assert transport == "collective" or "it saw nothing of rank 1 within" in message
    assert seconds < 12
    assert finite == (transport == "collective")  # a call that raises at once has written nothing


def test_without_a_process_group_the_error_is_torchs():
    with pytest.raises(ValueError, match="process group has not been initialized"):
        comm.all_reduce(torch.ones(3))
