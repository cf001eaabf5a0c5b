"""Ranks of the two-shot kernel: processes that share memory in Triton's interpreter, streams of one GPU on a GPU."""

import os

import torch
from interpreter import quicken

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


def drawn(rank, size, dtype, call=0):
    """Return the numbers of a rank, some of them special."""
    x = torch.randn(size, generator=torch.Generator().manual_seed(rank + 17 * call))
    x *= torch.rand(size, generator=torch.Generator().manual_seed(5)) * 100
    if size > 3000 and rank == 1:
        x[1000], x[2000], x[2500:2900] = torch.nan, torch.inf, 0.0
    return x.to(dtype)


def exchange(parts, layout, divisor, error=None):
    """Return the chunks that all ranks hold at the end, by the reference."""
    sent = torch.stack([reference.pack(x, layout) for x in parts])
    stripes = [
        reference.reduce_pack(
            sent[:, j].contiguous(), layout, divisor, None if error is None else error[j]
        )
        for j in range(layout.world)
    ]
    return torch.stack(stripes)


def cases(world):
    """Yield (size, dtype, divisor) of calls one after the other, of up to nine rounds."""
    for size, dtype in (
        (1, 0),
        (130, 1),
        (4096 * world, 2),
        (128 * 33 * world + 5, 0),
        (70_000, 1),
    ):
        yield size, DTYPES[dtype], float(world) if size % 2 else 1.0


def prepare(rank, world, space, device):
    """Return the calls of a rank, to be made one after the other, and what they write."""
    calls, out = [], []

    def add(function, *arguments):
        number = len(calls) + 1
        calls.append(lambda: function(*arguments[:-2], space, number, 60.0, *arguments[-2:]))

    for size, dtype, divisor in cases(world):
        layout, x = Layout(1, size, world), drawn(rank, size, dtype).to(device)
        add(two_shot.all_reduce, x, None, x, None, layout, divisor, None)
        parts = quantize_blocks(drawn(rank, size, dtype), E4M3)
        codes, scales = (part.view(-1).to(device) for part in parts)
        codes = codes.view(torch.uint8)
        add(two_shot.all_reduce, codes, scales, codes, scales, layout, divisor, None)
        whole = drawn(rank, size * world, dtype).to(device)
        part = torch.empty(size, dtype=dtype, device=device)
        rows = Layout(world, size, world)
        add(lambda *a: two_shot.reduce_scatter(*a[:-1]), whole, part, rows, divisor, None)
        error = torch.ones(layout.per * 128, device=device)
        y = drawn(rank, size, dtype, 1).to(device)
        add(two_shot.all_reduce, y, None, y, None, layout, divisor, error)
        out += [x, codes, scales, part, y, error]
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
        reference.unpack_codes(chunks, codes.view(E4M3.dtype), scales, layout)
        yield codes.view(-1)
        yield scales.view(-1)
        rows, part = Layout(world, size, world), torch.empty(size, dtype=dtype)
        wholes = [reference.pack(drawn(r, size * world, dtype), rows) for r in range(world)]
        reference.reduce_unpack(torch.stack([w[rank] for w in wholes]), part, divisor)
        yield part
        error = torch.ones(world, layout.per * 128)
        chunks = exchange([drawn(r, size, dtype, 1) for r in range(world)], layout, divisor, error)
        x = torch.empty(size, dtype=dtype)
        reference.unpack(chunks, x, layout)
        yield x
        yield error[rank]


def check_rank(rank, world, memories):
    """Run a rank in the interpreter, and compare its results with the reference."""
    torch.set_num_threads(1)
    quicken()
    space = space_of(memories, "cpu", rank)
    calls, found = prepare(rank, world, space, "cpu")
    for call in calls:
        call()
    compare(found, rank, world, space)
    os._exit(0)


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
