"""What the tests of collectives run in processes of their own: importable by name there, as test modules are not."""

import contextlib
import faulthandler
import os
import threading
import time
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers import assert_same_bits
from workers import leave_ranks

from fp8stack import comm
from fp8stack.comm import crossover, exchange, nvlink
from fp8stack.errors import CommError, ConfigError
from fp8stack.tensor import BlockScaledTensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (1, 7, 127, 128, 129, 1000, 128 * 12 - 1, 128 * 12, 128 * 12 + 1)


def enter(rank, world, store, device, timeout=60):
    """Join a group of `world` ranks; return the device of this one."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout),
    )
    return torch.device(device, rank) if device == "cuda" else torch.device(device)


def leave():
    """Leave the group when all are done, and end: torch's threads sometimes abort a process that ends in order."""
    leave_ranks()
    os._exit(0)


def drawn(rank, size, dtype=torch.float32, scale=1.0):
    """Return the same numbers for a rank in every process."""
    return (torch.randn(size, generator=torch.Generator().manual_seed(rank)) * scale).to(dtype)


def assert_equal_everywhere(tensor):
    """Compare the bits of a tensor on all ranks."""
    mine = tensor.contiguous().view(-1).view(torch.uint8)
    theirs = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(theirs, mine)
    for other in theirs:
        assert_same_bits(other, mine)


def assert_near(result, exact, decibels):
    """Check the signal-to-noise ratio, in dB."""
    exact = exact.double().to(result.device)
    noise = (result.double() - exact).square().sum()
    assert noise <= exact.square().sum() * 10 ** (-decibels / 10), (result, exact)


def check_collectives(rank, world, store, device):
    """Run every collective with every dtype and odd sizes; all ranks end with the same bits, near the exact ones."""
    device = enter(rank, world, store, device)
    check_crossover(rank, world, device)
    check_transports(rank, world, device)
    for dtype in DTYPES:
        for size in SIZES:
            parts = [drawn(r, size, dtype) for r in range(world)]
            exact = torch.stack(parts).double().sum(0)
            check_all_reduce(parts[rank].to(device), exact, world)
            check_reduce_scatter(rank, world, size, dtype, device)
            check_gathers(parts, rank, world, device)
    check_groups(rank, world, device)
    check_order(rank, world, device)
    check_special_values(rank, world, device)
    check_shapes(rank, world, device)
    check_blocks(rank, world, device)
    check_refusals(rank, world, device)
    check_overlap(rank, world, device)
    check_statistics(rank, world, device)
    check_hierarchy(rank, world, device)
    leave()


def check_agreement(rank, world, store):
    """Where one rank cannot, all hear why, and none is left waiting."""
    device = enter(rank, world, store, "cpu", timeout=20)

    def fail(group, device, made):
        raise RuntimeError(f"no luck on {rank}\nand a long dump")

    def succeed(group, device, made):
        return made

    steps = ("_look", "_allocate", "_map")
    for place, failing in enumerate(steps):
        for step in steps:
            setattr(nvlink, step, fail if step == failing and rank == place else succeed)
        link, mine = nvlink._connect(dist.group.WORLD, device)
        assert link == f"rank {place} says: no luck on {place}"
        assert mine == (f"no luck on {place}" if rank == place else "")
    nvlink._look = succeed
    nvlink._mapped = rank
    assert "different numbers of groups" in nvlink._connect(dist.group.WORLD, device)[1]
    nvlink._host = lambda: f"host{rank // 2}"
    assert nvlink._connect(dist.group.WORLD, device) == ("its ranks are on several hosts", "")
    leave()


def check_crossover(rank, world, device):
    """Below the crossover sums and gathers are bfloat16's, from it on FP8's; FP8 tensors stay FP8. Leaves it at 0."""
    with pytest.raises(ConfigError, match="0 or more; got -1"):
        comm.set_crossover(-1)
    comm.set_transport("collective")
    size = 128 * world
    for dtype in DTYPES:
        parts = [drawn(r, size, dtype).bfloat16().to(device, dtype) for r in range(world)]
        exact = torch.stack(parts).double().sum(0)
        for least, decibels, most in ((2 * size + 1, 44, 99), (2 * size, 24, 40), (0, 24, 40)):
            comm.set_crossover(least)
            whole, mine = parts[rank].clone(), torch.empty(128, dtype=dtype, device=device)
            comm.all_reduce(whole, async_op=True).wait()
            comm.reduce_scatter_tensor(mine, parts[rank], dist.ReduceOp.AVG)
            joined = torch.empty(size, dtype=dtype, device=device)
            comm.all_gather_into_tensor(joined, parts[rank][:128])
            assert_equal_everywhere(whole)
            assert_equal_everywhere(joined)
            for result, expected in (
                (whole, exact),
                (mine, exact.view(world, -1)[rank] / world),
                (joined, torch.cat([part[:128] for part in parts])),
            ):
                assert_near(result, expected, decibels)
                if world > 1 and decibels < most < 99:
                    noise = (result.double() - expected.double()).square().sum()
                    assert noise > expected.double().square().sum() * 10 ** (-most / 10)
    check_small(rank, world, device)
    comm.set_crossover(2**20)
    large = torch.full((300 * world,), 60000.0, dtype=torch.float16, device=device)
    part = large[:300].clone()
    comm.reduce_scatter_tensor(part, large, dist.ReduceOp.AVG)
    comm.all_reduce(large, dist.ReduceOp.AVG)  # the sum is no float16
    assert_near(part, torch.full_like(part, 60000.0), 40)
    assert_near(large, torch.full_like(large, 60000.0), 40)
    group, known = dist.group.WORLD, nvlink._Known("auto", "its GPUs are strangers")
    del crossover._CROSSOVERS[group]
    for transport, reason, least in (
        ("auto", known.link, 2**24), ("auto", nvlink._FAR, 0), ("collective", known.link, 0),
    ):  # fmt: skip
        nvlink._GROUPS[group] = nvlink._Known(transport, reason)
        assert crossover.crossover_of(group) == least
    del nvlink._GROUPS[group]
    comm.set_crossover(0)


def check_small(rank, world, device):
    """What is different in bfloat16, and what stays FP8 below the crossover."""
    comm.set_crossover(2**20)
    x = torch.ones(20, 30, device=device).t()  # not contiguous
    if rank == 0:
        x[17, 3], x[2, 4] = torch.inf, torch.nan
    with comm.Statistics() as statistics:
        comm.all_reduce(x, dist.ReduceOp.AVG)
        row = statistics.collect().get("all_reduce", {})
    assert x[17, 3] == torch.inf
    assert x.isfinite().sum() == 598
    assert x[x.isfinite()].eq(1).all()
    if world > 1:
        assert (row["bytes"], row["blocks"]) == (2 * (world - 1) * 1200 // world, 5)
        assert row["non_finite"] == 2
    blocks = [BlockScaledTensor.quantize(drawn(rank, 300).to(device)) for _ in range(2)]
    comm.all_reduce(blocks[0])
    fed, errors = drawn(rank, 1024).to(device), []
    for _ in range(2):
        y = fed.clone()
        errors.append(comm.error_like(y))
        comm.all_reduce(y, error=errors[-1])
        comm.set_crossover(0)
    assert_same_bits(*errors)
    assert errors[0].any() or world == 1
    comm.all_reduce(blocks[1])
    assert_same_bits_all(blocks[0].parts(), blocks[1].parts())


def check_transports(rank, world, device):
    """Compare the bits of sums over NVLink, and in chunks, with those of the process group's collectives."""
    with pytest.raises(ConfigError, match="transport must be one of auto, nvlink, collective"):
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
            found = [
                summed(rank, world, size, dtype, transport, chunk, device)
                for transport, chunk in (("collective", 2**26), ("collective", 5000), ("nvlink", 0))
            ]
            whole, chunks, nvlink = found
            assert_same_bits_all(whole, nvlink)
            assert_same_bits_all(whole[:-1], chunks[:-1])  # whose stripes are others
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


def assert_same_bits_all(some, others):
    for a, b in zip(some, others, strict=True):
        assert_same_bits(a, b)


def summed(rank, world, size, dtype, transport, chunk, device):
    """Return the results of sums, and what they feed back."""
    comm.set_transport(transport)
    exchange.CHUNK, before = chunk or exchange.CHUNK, exchange.CHUNK
    x = drawn(rank, size)
    x = BlockScaledTensor.quantize(x) if dtype == "blocks" else x.to(dtype)
    x, error = x.to(device), comm.error_like(x.to(device)) + 0.01
    comm.all_reduce(x, dist.ReduceOp.AVG)
    comm.all_reduce(x, error=error)
    results = [*x.parts()] if dtype == "blocks" else [x]
    if dtype != "blocks":
        whole = drawn(rank, size * world).to(device, dtype)
        part = whole[:size].clone()
        comm.reduce_scatter_tensor(part, whole, dist.ReduceOp.AVG)
        results.append(part)
    exchange.CHUNK = before
    return [*results, error]


def check_all_reduce(mine, exact, world):
    for op, divisor in ((dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, world)):
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
    results = []
    for function in (comm.reduce_scatter_tensor, comm.reduce_scatter_single):
        results.append(torch.empty(size, dtype=dtype, device=device))
        function(results[-1], wholes[rank].to(device))
        assert_near(results[-1], exact, 22)
    assert_same_bits(*results)
    mean = torch.empty(size, dtype=torch.float32, device=device)
    work = comm.reduce_scatter_tensor(
        mean, wholes[rank].to(device), dist.ReduceOp.AVG, async_op=True
    )
    work.wait()
    assert_near(mean, exact / world, 22)


def check_gathers(parts, rank, world, device):
    size, mine = len(parts[0]), parts[rank].to(device)
    for function in (comm.all_gather_into_tensor, comm.all_gather_single):
        joined = torch.empty(size * world, dtype=mine.dtype, device=device)
        function(joined, mine)
        assert_equal_everywhere(joined)
        assert_near(joined, torch.cat(parts), 25)
    for given in ({"src": world - 1}, {"group_src": world - 1}):
        copied = mine.clone()
        comm.broadcast(copied, **given)
        assert_equal_everywhere(copied)
        assert_near(copied, parts[-1], 25)


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
    for tiny in (0.0, 1e-44):
        x = torch.full((300,), tiny, device=device)
        comm.all_reduce(x)
        assert_equal_everywhere(x)
        assert x.eq(0).all() or world == 1
    same = torch.full((300,), 3.0, device=device)  # a sum in FP8 would saturate
    comm.all_reduce(same)
    assert same.eq(3 * world).all()


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


def check_blocks(rank, world, device):
    """FP8 in, FP8 out: what was quantized is not rounded again before it is sent."""
    for shape in ((40, 256), (7, 200), (300,), ()):
        x = drawn(rank, shape).to(device)
        blocks = BlockScaledTensor.quantize(x)
        plain = blocks.dequantize()
        comm.all_reduce(blocks, dist.ReduceOp.AVG)
        assert_equal_everywhere(blocks.codes.view(torch.uint8))
        assert_equal_everywhere(blocks.scale)
        if len(shape) != 2 or shape[1] % 128 == 0:  # the same blocks
            comm.all_reduce(plain, dist.ReduceOp.AVG)
            assert_same_bits(blocks.dequantize(), plain)
        exact = torch.stack([drawn(r, shape) for r in range(world)]).double().mean(0)
        assert_near(blocks.dequantize(), exact, 20)
        work = comm.all_reduce(blocks, async_op=True)
        work.wait()
        assert_near(blocks.dequantize(), exact * world, 18)


def check_refusals(rank, world, device):
    x = torch.ones(8, device=device)
    codes = torch.zeros(128, 256, dtype=torch.float8_e4m3fn, device=device).t()
    turned = BlockScaledTensor(codes, torch.ones(256, 1, device=device))
    for error, call in (
        ("ReduceOp.SUM and ReduceOp.AVG", lambda: comm.all_reduce(x, dist.ReduceOp.MAX)),
        ("torch.int64", lambda: comm.all_reduce(torch.ones(8, dtype=torch.int64, device=device))),
        ("torch.complex64", lambda: comm.all_reduce(x.to(torch.complex64))),
        ("sparse", lambda: comm.all_reduce(x.to_sparse())),
        ("elements", lambda: comm.reduce_scatter_tensor(x, x.new_ones(8 * world + 1))),
        ("elements", lambda: comm.all_gather_into_tensor(x, x.new_ones(9))),
        ("src", lambda: comm.broadcast(x)),
        ("contiguous float32", lambda: comm.all_reduce(x, error=torch.zeros(3, device=device))),
        ("not contiguous", lambda: comm.all_reduce(turned)),
        ("dequantize", lambda: comm.reduce_scatter_tensor(x, BlockScaledTensor.quantize(x))),
    ):
        with pytest.raises(ConfigError, match=error):
            call()


def check_overlap(rank, world, device):
    """Many at a time, with ordinary collectives in between, finish as if they had come one after the other."""
    tensors = [drawn(rank + i, 500 + 37 * i).to(device) for i in range(12)]
    expected = [t.clone() for t in tensors]
    for t in expected:
        comm.all_reduce(t)
    works = []
    for i, t in enumerate(tensors):
        works.append(comm.all_reduce(t, async_op=True))
        if i % 3 == rank % 3:
            time.sleep(0.003)
        if i % 4 == 1:
            dist.barrier()
            between = torch.ones(4, device=device)
            comm.all_reduce(between)
            assert between.eq(world).all()
    for work in reversed(works):
        work.wait()
    for t, same in zip(tensors, expected, strict=True):
        assert_same_bits(t, same)


def check_order(rank, world, device):
    """A call returns before other ranks make theirs, and those of two groups may come in any order."""
    if world != 2:
        return
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    x, y, token = (torch.ones(500, device=device) for _ in range(3))
    if device.type == "cpu":  # NCCL's order is the stream's
        if rank == 0:
            work = comm.all_reduce(x, async_op=True, group=groups[0])
            dist.send(token, 1)
        else:
            dist.recv(token, 0)
            work = comm.all_reduce(x, async_op=True, group=groups[0])
        work.wait()
        assert x.eq(2).all()
        tensors = {0: x, 1: y}
        works = [
            comm.all_reduce(tensors[i], async_op=True, group=groups[i])
            for i in ((0, 1) if rank == 0 else (1, 0))
        ]
        for work in works:
            work.wait()
        assert x.eq(4).all()
        assert y.eq(2).all()
    with torch.inference_mode():
        made = torch.ones(300, device=device)
        comm.all_reduce(made, async_op=True).wait()
        assert made.eq(world).all()


def check_groups(rank, world, device):
    """Of a part of the ranks; who is not in it is told so as torch does."""
    if world < 3:
        return
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
        comm.broadcast(y, src=world - 1, group=group)
        comm.broadcast(y, group_src=1, group=group)
        for given in ({"src": 1}, {"group_src": 2}, {"src": -1}):
            with pytest.raises(ValueError, match="no rank of the group"):
                comm.broadcast(y, group=group, **given)
    else:
        assert comm.broadcast(x, 0, group) is None
        error = comm.error_like(x, group)
        assert comm.all_reduce(x, group=group, error=error) is None
        with pytest.raises(ConfigError, match=f"rank {rank} does not belong to the given"):
            comm.DataParallel(torch.nn.Linear(2, 2), group)
        assert result is None
        assert x.eq(rank + 1).all()
        assert any("does not belong to the given group" in str(w.message) for w in caught)


def check_hierarchy(rank, world, device):
    """Of two hosts of two ranks: the same bits everywhere, three roundings from the exact sum, and back."""
    if world != 4:
        return
    comm.set_hierarchy(2)
    for dtype in DTYPES:
        for size in (1, 130, 1000, 128 * 16 + 1):
            parts = [drawn(r, size, dtype) for r in range(world)]
            for op, divisor in ((dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, world)):
                x, y = parts[rank].clone().to(device), parts[rank].clone().to(device)
                comm.all_reduce(x, op)
                assert_equal_everywhere(x)
                assert_near(x, torch.stack(parts).double().sum(0) / divisor, 20)
                comm.all_reduce(y, op, async_op=True).wait()
                assert_same_bits(x, y)
    x = drawn(rank, 2**16).to(device)
    comm.all_reduce(x)
    exact = torch.stack([drawn(r, 2**16) for r in range(world)]).double().sum(0)
    assert_near(x, exact, 26.5)
    bad = torch.ones(1000, device=device)
    if rank == 2:
        bad[300] = torch.inf
    comm.all_reduce(bad)
    assert bad[256:384].isnan().all()
    assert bad.isnan().sum() == 128
    error, total = comm.error_like(bad), 0.0
    for _ in range(8):
        x = drawn(rank, 1000).to(device)
        comm.all_reduce(x, error=error)
        total = total + x.double()
    assert error.ne(0).any() == (rank < 4 and len(error) > 0)
    assert_equal_everywhere(total)
    with pytest.raises(ConfigError, match="must divide the group's 4 ranks, got 3"):
        comm.set_hierarchy(3)
    comm.set_hierarchy(4)
    flat = drawn(rank, 2**16).to(device)
    comm.all_reduce(flat)
    assert_near(flat, exact, 28)  # one rounding less again


def check_statistics(rank, world, device):
    """Calls, bytes that this rank sent, blocks of results, and those of them that are not finite."""
    n = 128 * 10 * world
    x = torch.ones(n, device=device)
    if rank == 0:
        x[[0, 300]] = torch.nan
    comm.all_reduce(x.clone())  # before: not counted
    with comm.Statistics() as statistics:
        comm.all_reduce(x)
        comm.all_reduce(x.clone(), async_op=True).wait()
        comm.all_gather_into_tensor(torch.empty(n * world, device=device), x)
        comm.reduce_scatter_tensor(
            torch.empty(10, device=device), torch.ones(10 * world, device=device)
        )
        comm.broadcast(x, src=0)
        first = statistics.collect()
        assert statistics.collect() == {}
        comm.all_reduce(x)
    if world == 1:
        assert first == {}  # nothing was sent
        return
    others = world - 1
    # 10 × 132 bytes; of collectives, to a multiple of 16
    chunk = 1320 if nvlink.link_of(dist.group.WORLD, device) else 1328
    expected = {
        "all_reduce": (2, 4 * others * chunk, 20 * world, 4),
        "all_gather_into_tensor": (1, others * 1320 * world, 10 * world * world, 2 * world),
        "reduce_scatter_tensor": (1, others * 144, 1, 0),
        "broadcast": (1, 132 * 10 * world * (rank == 0), 10 * world, 2),
    }
    assert set(first) == set(expected)
    for name, (calls, nbytes, blocks, bad) in expected.items():
        row = first[name]
        assert (row["calls"], row["blocks"], row["non_finite"]) == (calls, blocks, bad), name
        assert abs(row["bytes"] - nbytes) <= 16 * world, (name, row, nbytes)
        assert 0 < row["seconds"] < 60
    assert list(statistics.collect()) == ["all_reduce"]


# --- what goes wrong


def check_disagreement(rank, world, store, device):
    """In debug mode ranks that call different things are told so, on every rank."""
    os.environ["FP8STACK_DEBUG"] = "1"
    device = enter(rank, world, store, device)
    x = torch.ones(100 + rank, device=device)
    calls = (
        lambda: comm.all_reduce(x),
        lambda: comm.all_reduce(x[:50], dist.ReduceOp.AVG if rank else dist.ReduceOp.SUM),
        lambda: comm.all_reduce(x[:50].to(torch.bfloat16 if rank else torch.float32)),
        lambda: comm.broadcast(x[:50], 0) if rank else comm.all_reduce(x[:50]),
        lambda: comm.broadcast(x[:50], rank),
        lambda: comm.all_reduce(x[:50], error=None if rank else comm.error_like(x[:50])),
        lambda: set_first(comm.set_crossover, 9, 0),
        lambda: set_first(comm.set_transport, "collective", "auto"),
    )

    def set_first(choose, value, usual):
        """Choose on one rank what all have to choose."""
        choose(usual if rank else value)
        try:
            comm.all_reduce(x[:50])
        finally:
            choose(usual)

    for call, words in zip(
        calls,
        (
            "101 float32",
            "AVG",
            "bfloat16",
            "broadcast from rank 0",
            "rank 1 of 50",
            "with error feedback",
            "crossover 9",
            "transport collective",
        ),
        strict=True,
    ):
        with pytest.raises(CommError, match=words) as caught:
            call()
        assert "rank 0:" in str(caught.value)
    good = torch.ones(9, device=device)
    comm.all_reduce(good)
    assert good.eq(world).all()
    leave()


def note_failed_backward(rank, world, store, notes):
    """The last rank dies before a backward of DataParallel; note what the others are told."""
    enter(rank, world, store, "cpu", timeout=3)
    parallel = comm.DataParallel(torch.nn.Linear(128, 128))
    loss = parallel(torch.ones(2, 128)).sum()
    dist.barrier()
    if rank == world - 1:
        os._exit(0)
    try:
        loss.backward()
    except CommError as error:
        notes[rank] = str(error)
    with contextlib.suppress(Exception):
        threading.Event().wait(0.5)
    os._exit(0)


def note_failure(rank, world, store, how, notes):
    """The last rank dies or stalls before a collective; note what the others are told, and how long it took."""
    enter(rank, world, store, "cpu", timeout=3)
    x = torch.ones(1000)
    comm.all_reduce(x)
    comm.all_reduce(x, async_op=True).wait()
    dist.barrier()
    if rank == world - 1:
        if how == "dies":
            os._exit(0)
        time.sleep(8)
        os._exit(0)
    start, work = time.monotonic(), None
    try:
        work = comm.all_reduce(x, async_op=how == "stalls")
        if work is not None:
            work.wait()
    except CommError as error:
        notes[rank] = (str(error), time.monotonic() - start)
    if work is not None:
        assert isinstance(work.exception(), CommError)
        assert not work.is_success()
    # the group is broken: nothing can be left in order
    with contextlib.suppress(Exception):
        threading.Event().wait(0.5)
    os._exit(0)


def note_failure_on_gpus(rank, world, store, how, transport, notes):
    """As `note_failure`, over a transport between GPUs; note the error of a later call, as a kernel raises none."""
    faulthandler.dump_traceback_later(60, exit=True)  # who hangs says where
    device = enter(rank, world, store, "cuda", timeout=5)
    comm.set_transport(transport)
    comm.set_crossover(0)
    x = torch.ones(1000, device=device)
    comm.all_reduce(x)
    dist.barrier(device_ids=[rank])
    torch.cuda.synchronize()
    if rank == world - 1:
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
        notes[rank] = (str(error), time.monotonic() - start, finite)
    os._exit(0)


def check_large(rank, world, store):
    """More than 2^31 elements, over both transports."""
    # a thousand rounds, in each of which both GPUs have to be in this test's turn, whatever else they run
    device = enter(rank, world, store, "cuda", timeout=600)
    size = 2**31 + 1000
    whole = torch.empty(size, dtype=torch.bfloat16, device=device)
    part = torch.empty(size // world, dtype=torch.bfloat16, device=device)
    for transport in ("nvlink", "collective"):
        comm.set_transport(transport)
        whole.fill_(rank + 1)
        whole[-300:] *= 4  # a power of two: codes of a block with both are exact
        comm.reduce_scatter_tensor(part, whole)
        last = rank == world - 1
        assert_all(part[:-300], 3, transport)
        assert_all(part[-300:], 12 if last else 3, transport)
        comm.all_reduce(whole)
        assert_all(whole[:-300], 3, transport)
        assert_all(whole[-300:], 12, transport)
    leave()


def assert_all(tensor, value, what):
    wrong = tensor.ne(value)
    if wrong.any():  # NaN: a rank was missed
        first = int(wrong.int().argmax())
        count, nans = int(wrong.sum()), int(tensor.isnan().sum())
        raise AssertionError(
            f"{what}: {count} of {len(tensor)} are not {value}, {nans} are NaN; element {first} is {tensor[first]}"
        )
