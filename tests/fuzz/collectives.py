"""Collectives over three processes: equal bits on all ranks, within the bound of docs/comm.md, or refused on all.

The ranks are started with the first case and kept. Every case is drawn on each rank, and here, from one number: what is
called over which ranks, and what each of them gives. The ranks send back what they have; this process knows what all
gave, and judges it. In one case of six, a rank calls something else, under FP8STACK_DEBUG=1: all must be told.

Limits: gloo and the reference kernels, or Triton's where they run on a CPU; no more than 1,600 elements.
"""

import atexit
import os
import random
import tempfile
import warnings
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from fuzzing import Broken, main
from ranks import context_of_ranks

from fp8stack import comm
from fp8stack.errors import Fp8StackError
from fp8stack.formats import BLOCK, E4M3, LEAST_SCALE, rows_cols
from fp8stack.kernels.reference.quantize import as_blocks, dequantize_blocks, from_blocks
from fp8stack.tensor import BlockScaledTensor

WORLD, PATIENCE = 3, 60
GROUPS = ((0, 1, 2), (0, 1), (0, 2), (1, 2))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CALLS = ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor")
SIZES = (0, 1, 2, 7, 127, 128, 129, 300, 384, 385, 1000, 1536)


@dataclass
class Case:
    call: str
    dtype: torch.dtype
    average: bool
    shape: tuple[int, ...]  # of what is added up, or of a part
    ranks: tuple[int, ...]
    later: bool
    layout: str
    blocks: bool
    values: str
    seed: int
    odd: int | None = None  # the rank that calls something else
    way: str = ""  # in which


def draw(seed):
    rng = random.Random(seed)
    call, size = rng.choice(CALLS), rng.choice(SIZES)
    case = Case(
        call, rng.choice(DTYPES), rng.random() < 0.5, rng.choice([(size,), (size // 4, 4), (2, size // 2)]),
        rng.choice(GROUPS), rng.random() < 0.3, rng.choice(["plain", "turned", "offset", "strided"]),
        call == "all_reduce" and rng.random() < 0.25,
        rng.choice(["normal", "scaled", "huge", "tiny", "spoiled", "zeros", "mixed", "equal"]), rng.getrandbits(40),
    )  # fmt: skip
    if rng.random() < 1 / 6:
        case.odd = rng.choice(case.ranks)
        ways = ["size", "shape", "dtype", "call", "int"]
        case.way = rng.choice(ways + ["op", "max"] * (call != "all_gather_into_tensor"))
    return case


def numbers(case, rank, shape):
    """Return what a rank gives, before it is laid out."""
    g = torch.Generator().manual_seed(case.seed + rank * (case.values != "equal"))
    x = torch.randn(shape, generator=g)
    x *= {"scaled": 2.0 ** (case.seed % 200 - 130), "tiny": 2.0 ** -(case.seed % 24 + 122)}.get(
        case.values, 1
    )
    if case.values == "huge":
        x = 0.9 * torch.finfo(case.dtype).max * x.sign()
    if case.values == "zeros":
        x *= torch.rand(shape, generator=g) < 0.05
    if case.values == "mixed":
        x *= 2.0 ** torch.randint(-120, 100, shape, generator=g)
    if case.values == "spoiled":
        for bad in (torch.nan, torch.inf, -torch.inf):
            x[torch.rand(shape, generator=g) < 0.002] = bad
    return x.to(case.dtype)


def laid_out(x, layout):
    """Return a tensor of the same values that lies otherwise."""
    if layout == "turned" and x.ndim == 2:
        return x.t().contiguous().t()
    if layout == "offset":
        return torch.cat([x.new_zeros(3), x.reshape(-1)])[3:].view(x.shape)
    if layout == "strided":
        return torch.stack([x, x], -1)[..., 0]
    return x.clone()


def exactly(x):
    """Return code × scale in float32, whatever the dtype of an FP8 tensor."""
    return dequantize_blocks(x.codes, x.scale, E4M3)


def whole(case):
    """Return the shape of what all parts are together."""
    return (len(case.ranks) * case.shape[0], *case.shape[1:])


# --- on a rank


def be_rank(rank, folder, pipe):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD,
        timeout=timedelta(seconds=PATIENCE // 2),
    )  # fmt: skip
    groups = {ranks: dist.new_group(ranks) for ranks in GROUPS}
    warnings.simplefilter("ignore")
    while (seed := pipe.recv()) is not None:
        case = draw(seed)
        os.environ["FP8STACK_DEBUG"] = str(int(case.odd is not None))
        try:
            pipe.send(("done", carry_out(case, rank, groups[case.ranks])))
        except Exception as error:
            kind = "refused" if isinstance(error, Fp8StackError) else "foreign"
            pipe.send((kind, f"{type(error).__name__}: {error}"))


def carry_out(case, rank, group):
    """Make the call; return what it left as numpy arrays, of which the first has the values."""
    op = dist.ReduceOp.AVG if case.average else dist.ReduceOp.SUM
    if rank == case.odd:
        case, op = changed(case, op)
    given = case.call == "reduce_scatter_tensor"
    x = laid_out(numbers(case, rank, whole(case) if given else case.shape), case.layout)
    if case.way == "int" and rank == case.odd:
        x = x.nan_to_num().clamp(-9, 9).int()
    if case.blocks:
        x = BlockScaledTensor.quantize(x.contiguous())
    if case.call == "all_reduce":
        out, work = x, comm.all_reduce(x, op, group, case.later)
    else:
        shape = case.shape if given else whole(case)
        out = laid_out(torch.full(shape, 7.0).to(case.dtype), case.layout)
        before = x.clone()
        more = (op,) if given else ()
        work = getattr(comm, case.call)(out, x, *more, group=group, async_op=case.later)
        if not torch.equal(before.nan_to_num(), x.nan_to_num()):
            raise AssertionError("the input was written to")
    if (work is not None) != (case.later and rank in case.ranks):
        raise AssertionError(f"async_op={case.later} returned {work}")
    if work is not None:
        work.wait()
    parts = (out.codes.view(torch.uint8), out.scale) if case.blocks else ()
    values = (exactly(out) if case.blocks else out).float().contiguous()
    return [values.numpy(), *(part.numpy() for part in parts)]


def changed(case, op):
    """Return what the odd rank calls."""
    rest = case.shape[1:]
    return {
        "size": (replace(case, shape=(case.shape[0] + 1, *(rest or ()))), op),
        "shape": (replace(case, shape=(1, *case.shape)), op),
        "dtype": (replace(case, dtype=DTYPES[DTYPES.index(case.dtype) - 1]), op),
        "op": (case, dist.ReduceOp.SUM if case.average else dist.ReduceOp.AVG),
        "call": (replace(case, call=CALLS[CALLS.index(case.call) - 1], blocks=False), op),
        "int": (replace(case, blocks=False), op),
        "max": (case, dist.ReduceOp.MAX),
    }[case.way]  # fmt: skip


# --- what is right


def bound_of(x, shape, own=False):
    """Return what sending `x` may be off by: float64, like x. `own`: in blocks of the rows of `shape`."""
    rows, cols = rows_cols(torch.Size(shape)) if own else (1, x.numel())
    blocks = as_blocks(x.reshape(rows, cols).abs())
    scale = (blocks.amax(-1, keepdim=True) / 448).clamp(min=LEAST_SCALE)
    spoiled = ~blocks.isfinite().all(-1, keepdim=True)
    bound = torch.maximum(blocks / 16, scale * 2.0**-10) * (1 + 2.0**-18)
    bound = torch.where(spoiled, torch.nan, bound)
    return from_blocks(bound, torch.Size((rows, cols))).reshape(x.shape)


def expected(case, rank):
    """Return the exact result of a rank, and what it may be off by; NaN where the result must be."""
    n, down = len(case.ranks), len(case.ranks) if case.average else 1
    shape = whole(case) if case.call == "reduce_scatter_tensor" else case.shape
    given = [numbers(case, r, shape) for r in case.ranks]
    if case.blocks:
        given = [exactly(BlockScaledTensor.quantize(x)) for x in given]
    given = [x.double() for x in given]
    if case.call == "all_gather_into_tensor":
        return torch.cat(given), torch.cat([bound_of(x, x.shape) for x in given])
    if case.call != "all_reduce":  # a part of each
        place, rows = case.ranks.index(rank), case.shape[0]
        given = [x[place * rows : (place + 1) * rows] for x in given]
    total, size = sum(given), sum(x.abs() for x in given)
    if case.blocks:  # sent as they are
        off = sum(torch.where(bound_of(x, x.shape, True).isnan(), torch.nan, 0.0) for x in given)
    else:
        off = sum(bound_of(x, x.shape) for x in given)
    off = (off + size * n * 2.0**-24) / down
    exact = total / down
    if case.call == "all_reduce":
        off = off + bound_of(exact.abs() + off, case.shape, case.blocks)
    return exact, off


def judge(case, answers):
    """Raise Broken unless the ranks have what is right."""
    n = len(case.ranks)
    for rank, (values, *_) in answers.items():
        exact, off = expected(case, rank)
        values = torch.from_numpy(values).double()
        info = torch.finfo(torch.float32 if case.blocks else case.dtype)
        off = off + (exact.abs() + off) * info.eps + info.smallest_normal * info.eps
        must = off.isnan()
        # what may be beyond float32 or the dtype on the way
        near = (exact.abs() + off) >= info.max * (1 - 2.0**-20)
        block = from_blocks(
            as_blocks(near.double().reshape(1, -1)).amax(-1, keepdim=True).expand(-1, -1, BLOCK),
            torch.Size((1, near.numel())),
        )
        free = (
            near | (block.reshape(near.shape) > 0)
            if not case.blocks
            else near.any().expand(near.shape)
        )
        if not values[must].isnan().all():
            raise Broken(f"rank {rank}: {case}: a number where NaN was promised")
        bad = ~(must | free) & ~((values - exact).abs() <= off)
        if bad.any():
            found = [float(t[bad][0]) for t in (values, exact, off)]
            raise Broken(f"rank {rank}: {case}: {found[0]} instead of {found[1]} ± {found[2]}")
        if case.call != "reduce_scatter_tensor":
            first = answers[case.ranks[0]]
            same = [a.tobytes() == b.tobytes() for a, b in zip(answers[rank], first, strict=True)]
            if not all(same):
                raise Broken(f"ranks {case.ranks[0]} and {rank} have other bits: {case}")
    return f"{case.call} over {n}"


# --- the ranks, as this process holds them

_running = []


def start():
    folder = tempfile.mkdtemp()
    context = context_of_ranks()
    for rank in range(WORLD):
        ours, theirs = context.Pipe()
        process = context.Process(target=be_rank, args=(rank, folder, theirs), daemon=True)
        process.start()
        _running.append((process, ours))
    atexit.register(stop)


def stop():
    for process, _ in _running:
        process.kill()
    _running.clear()


def one(rng):
    if not _running:
        start()
    seed = rng.getrandbits(60)
    case = draw(seed)
    for _, pipe in _running:
        pipe.send(seed)
    answers = {}
    for rank, (_, pipe) in enumerate(_running):
        if not pipe.poll(PATIENCE):
            stop()
            raise Broken(f"rank {rank} hangs: {case}")
        answers[rank] = pipe.recv()
    outside = [answers.pop(r) for r in range(WORLD) if r not in case.ranks]
    if any(kind != "done" for kind, _ in outside):
        raise Broken(f"a rank outside the group: {outside}: {case}")
    kinds = {kind for kind, _ in answers.values()}
    if case.odd is not None and kinds == {"refused"}:
        return "refused"
    if case.odd is not None or kinds != {"done"}:
        raise Broken(f"{answers}: {case}")
    return judge(case, {rank: result for rank, (_, result) in answers.items()})


if __name__ == "__main__":
    main(one)
