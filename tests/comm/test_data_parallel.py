"""Data parallelism whose gradients live in FP8, between real processes."""

import copy
import gc
import pickle
import warnings
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from helpers import TinyLM, TinyLMWithUnused, assert_same_bits, batch, need_gpus
from ranks import assert_equal_everywhere, assert_near, own_device, run_ranks, train_part
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fp8stack
from fp8stack.comm import DataParallel
from fp8stack.errors import CommError, ConfigError, GradientError
from fp8stack.tensor import BlockScaledTensor


def check_all(rank):
    world, device = dist.get_world_size(), own_device()
    for dtype in (torch.float32, torch.bfloat16):
        check_gradients(rank, world, device, dtype)
    for check in (
        check_odd_shapes,
        check_accumulation,
        check_unused,
        check_outputs,
        check_checkpoints,
        check_many_parameters,
        check_backwards,
        check_wrappers_come_and_go,
        check_failures,
        check_a_rank_that_fails_alone,
        check_uses_that_torch_allows,
    ):
        check(rank, world, device)
    for level in (None, "O1", "O2") if world == 2 or device.type == "cuda" else ("O2",):
        check_training(rank, world, device, level)


def test_one_rank(mesh):
    check_all(0)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_over_gloo(world):
    run_ranks(check_all, world)


@pytest.mark.gpu
@pytest.mark.gpus
@pytest.mark.parametrize("world", [1, 2])
def test_over_nccl(world):
    need_gpus(world)
    run_ranks(check_all, world, device="cuda")


def gradients(model):
    return [None if p.grad is None else p.grad + 0 for p in model.parameters()]


def flat(values):
    return torch.cat([v.flatten().double() for v in values])


def built(make, device, dtype=torch.float32):
    torch.manual_seed(0)
    return make().to(device, dtype)


class Odd(nn.Module):
    """Parameters of all shapes: rows that are no multiple of 128, vectors, scalars, a convolution."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3)
        self.norm = nn.BatchNorm2d(5)
        self.wide = nn.Linear(5 * 36, 256)
        self.even = nn.Linear(256, 131)
        self.scalar = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        h = self.norm(self.conv(x)).relu().flatten(1)
        return self.even(self.wide(h).tanh()) * self.scalar


def images(rank, device, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(4, 3, 8, 8, generator=generator).to(device, dtype)


def mean_gradient(world, device, dtype=torch.float32):
    """Return the mean over ranks that one model gives alone."""
    exact = []
    for r in range(world):
        model = built(TinyLM, device, dtype)
        model(*batch(r, device)).backward()
        exact.append(flat(gradients(model)))
    return torch.stack(exact).mean(0)


def check_gradients(rank, world, device, dtype):
    """The mean over ranks to 28 dB, the same bits on all; only FP8 stays, in the bucket itself."""
    mean = mean_gradient(world, device, dtype)
    for options in ({}, {"bucket_cap_mb": 0.02}):
        model = built(TinyLM, device, dtype)
        parallel = DataParallel(model, **options)
        assert (len(parallel.buckets) > 1) == bool(options)
        for _ in range(3):
            model.zero_grad()
            parallel(*batch(rank, device)).backward()
            found = gradients(model)
            assert_near(flat(found), mean, 27)
            for g in found:
                assert g.dtype is dtype
                assert_equal_everywhere(g)
        numel = sum(p.numel() for p in model.parameters())
        assert parallel.gradient_bytes <= 1.04 * numel + 132 * len(found) + 132 * world * 99
        arenas = {b.codes.untyped_storage().data_ptr() for b in parallel.buckets}
        for p in model.parameters():
            assert type(p.grad) is BlockScaledTensor
            assert p.grad.codes.untyped_storage().data_ptr() in arenas
    assert list(parallel.state_dict()) == [f"module.{k}" for k in model.state_dict()]


def check_odd_shapes(rank, world, device):
    exact = []
    for r in range(world):
        model = built(Odd, device)
        model(images(r, device)).square().mean().backward()
        exact.append(gradients(model))
    model = built(Odd, device)
    parallel = DataParallel(model)
    parallel(images(rank, device)).square().mean().backward()
    for i, found in enumerate(gradients(model)):
        assert_equal_everywhere(found)
        assert_near(found, torch.stack([e[i] for e in exact]).mean(0), 20)
    # buffers are the first rank's, whatever the others have seen
    model.norm.running_mean.add_(rank)
    parallel(images(0, device))
    assert_equal_everywhere(model.norm.running_mean)
    with torch.no_grad():
        model.norm.running_mean.add_(rank)
        parallel(images(0, device))  # nothing is exchanged without gradients
    model.zero_grad(set_to_none=False)
    assert all(p.grad.eq(0).all() for p in model.parameters())


def check_accumulation(rank, world, device):
    """Micro-batches without exchange, then one with; and a second backward on top of gradients that are there."""
    results = {}
    for kind in (DistributedDataParallel, DataParallel):
        model = built(TinyLM, device)
        parallel = kind(model)
        for _ in range(2):
            with parallel.no_sync():
                for micro in range(3):
                    parallel(*batch(10 * micro + rank, device)).backward()
                    if kind is DataParallel and micro == 0:
                        here = gradients(model)
                        assert world == 1 or not same_everywhere(here[0])
            parallel(*batch(90 + rank, device)).backward()
        results[kind] = flat(gradients(model))
        assert_equal_everywhere(results[kind])
    assert_near(results[DataParallel], results[DistributedDataParallel], 25)


def same_everywhere(tensor):
    first = tensor.clone()
    dist.broadcast(first, 0)
    differs = torch.tensor([float((first != tensor).any())], device=tensor.device)
    dist.all_reduce(differs)
    return not differs.item()


def check_unused(rank, world, device):
    model = built(TinyLMWithUnused, device)
    parallel = DataParallel(model)
    with pytest.raises(GradientError, match=r"no gradient reached extra\.bias, extra\.weight"):
        parallel(*batch(rank, device)).backward()
    model.zero_grad()
    parallel(*batch(rank, device)).backward()  # used this time
    assert model.extra.weight.grad is not None

    model = built(TinyLMWithUnused, device)
    parallel = DataParallel(model, find_unused_parameters=True)
    for step in range(4):
        model.zero_grad()
        model.calls = step
        parallel(*batch(rank, device)).backward()
        assert (model.extra.weight.grad is None) == (step % 2 == 0)
    model.zero_grad()
    model.calls = int(rank == world - 1)  # the last rank alone uses it
    parallel(*batch(rank, device)).backward()
    assert model.extra.bias.grad is not None
    assert_near(model.extra.bias.grad, torch.full((8,), 1e-3 / world), 25)

    model = built(TinyLMWithUnused, device)
    parallel = DataParallel(model, static_graph=True)
    for _ in range(3):
        model.zero_grad()
        model.calls = 0
        parallel(*batch(rank, device)).backward()
        assert model.extra.weight.grad is None
        assert_equal_everywhere(flat([g for g in gradients(model) if g is not None]))


@dataclass
class Answer:
    loss: torch.Tensor
    others: dict


class Talkative(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(9, 128), nn.Linear(128, 3)

    def forward(self, tokens, *, scale, note="", wrap=True):
        h = self.out(self.embed(tokens)) * scale
        answer = {"loss": h.square().mean(), "note": note, "n": 3}
        return Answer(answer.pop("loss"), answer) if wrap else [(answer,), None]


def check_outputs(rank, world, device):
    """Integers, keywords and outputs of any make pass through."""
    for wrap in (True, False):
        model = built(Talkative, device)
        parallel = DataParallel(model)
        tokens = torch.arange(9, device=device)
        answer = parallel(tokens, scale=1.0 + rank, note="x", wrap=wrap)
        loss = answer.loss if wrap else answer[0][0]["loss"]
        loss.backward()
        for g in gradients(model):
            assert_equal_everywhere(g)
        assert model.out.weight.grad.norm() > 0


class Checkpointed(nn.Module):
    def __init__(self, reentrant, shared=False):
        super().__init__()
        self.first = nn.Linear(128, 128)
        self.second = self.first if shared else nn.Linear(128, 128)
        self.reentrant = reentrant

    def forward(self, x):
        for layer in (self.first, self.second):
            x = checkpoint(layer, x, use_reentrant=self.reentrant).tanh()
        return x


def check_checkpoints(rank, world, device):
    x = torch.randn(
        4, 128, generator=torch.Generator().manual_seed(rank), requires_grad=True
    )  # fmt: skip
    results = []
    for reentrant in (True, False):
        model = built(lambda: Checkpointed(reentrant), device)  # noqa: B023
        parallel = DataParallel(model, bucket_cap_mb=0.001)
        for _ in range(2):
            model.zero_grad()
            parallel(x.to(device)).square().sum().backward()
        results.append(flat(gradients(model)))
        assert_equal_everywhere(results[-1])
    assert_same_bits(*results)
    model = built(lambda: Checkpointed(True, True), device)
    with pytest.raises(GradientError, match=r"first.*after its bucket was sent"):
        DataParallel(model)(x.to(device)).square().sum().backward()


class Hidden:
    """An output in which no tensor is found."""

    def __init__(self, loss):
        self.loss = loss


class Hiding(TinyLM):
    def forward(self, *args):
        return Hidden(super().forward(*args))


def check_backwards(rank, world, device):
    # outputs that are not found, and an evaluation before the backward
    model = built(Hiding, device)
    parallel = DataParallel(model)
    loss = parallel(*batch(rank, device)).loss
    with torch.no_grad():
        parallel(*batch(50, device))
    loss.backward()
    assert_equal_everywhere(flat(gradients(model)))
    # other ranks take no part in a backward of the bare module
    if rank == 0:
        model.zero_grad()
        model(*batch(rank, device)).loss.backward()
    dist.barrier()
    # gradients of other things than parameters, and with them
    model = built(Odd, device).eval()
    parallel = DataParallel(model)
    x = images(rank, device).requires_grad_()
    y = parallel(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert all(p.grad is None for p in model.parameters())
    (y.square().mean() + slope.square().sum()).backward()
    assert_equal_everywhere(flat(gradients(model)))
    # two forwards, the backward of the first fails, that of the second does not
    model = built(TinyLM, device)
    parallel = DataParallel(model, bucket_cap_mb=0.02, find_unused_parameters=True)
    first, second = (parallel(*batch(10 * i + rank, device)) for i in range(2))

    def fail(gradient):
        raise ArithmeticError("midway")

    handle = model.embed.weight.register_hook(fail)
    with pytest.raises(ArithmeticError, match="midway"):
        first.backward()
    handle.remove()
    model.zero_grad()
    second.backward()
    assert_equal_everywhere(flat(gradients(model)))


class Leaky(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(128, 4)

    def forward(self, x):
        return self.layer(x), self.layer.weight


def check_wrappers_come_and_go(rank, world, device):
    model = built(Leaky, device)
    x = torch.ones(2, 128, device=device)
    parallel = DataParallel(model)
    for _ in range(3):
        parallel(x)[0].sum().backward()
    assert not model.layer.weight._backward_hooks  # an output that is a parameter collects none
    del parallel
    gc.collect()
    assert not model.layer.weight._post_accumulate_grad_hooks
    model.zero_grad()
    for copied in (
        copy.deepcopy(DataParallel(model)),
        pickle.loads(pickle.dumps(DataParallel(model))),
    ):
        copied(x * (1 + rank))[0].sum().backward()
        assert_equal_everywhere(copied.module.layer.weight.grad + 0)
        assert model.layer.weight.grad is None


class Many(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.all = nn.ParameterList(nn.Parameter(torch.tensor(float(i))) for i in range(count))

    def forward(self, x):
        return (torch.stack(list(self.all)) * x).sum()


def check_many_parameters(rank, world, device):
    count = 10_000 if world == 2 else 300
    model = Many(count).to(device)
    DataParallel(model)(torch.full((count,), 1.0 + rank, device=device)).backward()
    found = torch.stack([p.grad.dequantize() for p in model.parameters()])
    assert found.eq((1 + world) / 2).all()


def check_a_rank_that_fails_alone(rank, world, device):
    """In the middle of a backward, and goes on: the others get NaN, and the next backwards are right."""

    def build():
        return nn.Sequential(*[nn.Linear(128, 128 + 64 * (i % 2), bias=False) for i in (0, 2, 4)])

    def fail(gradient):
        raise ArithmeticError("on one rank")

    for options in ({}, {"find_unused_parameters": True}):
        model = built(build, device)
        parallel = DataParallel(model, bucket_cap_mb=0.01, **options)
        alone = built(build, device)
        x = torch.ones(2, 128, device=device)
        handle = model[1].weight.register_hook(fail) if rank == 0 else None
        if handle is None:
            parallel(x).sum().backward()
            assert model[0].weight.grad.isnan().any() or world == 1
        else:
            with pytest.raises(ArithmeticError, match="on one rank"):
                parallel(x).sum().backward()
            handle.remove()
        for factor in (2, 3):
            for each in (model, alone):
                each.zero_grad()
            parallel(x * factor).sum().backward()
            alone(x * factor).sum().backward()
            for p, q in zip(model.parameters(), alone.parameters(), strict=True):
                assert_near(p.grad, q.grad, 25)


def check_uses_that_torch_allows(rank, world, device):
    """Two forwards before a backward with BatchNorm; an error that is kept; a step that is compiled whole."""
    model = built(Odd, device)
    parallel = DataParallel(model)
    (parallel(images(rank, device)).sum() + parallel(images(rank, device)).mean()).backward()
    assert_equal_everywhere(flat(gradients(model)))
    model = built(lambda: Sometimes(), device)
    parallel = DataParallel(model)
    kept = []
    for _ in range(2):
        with pytest.raises(GradientError, match="no gradient reached") as caught:
            parallel(torch.ones(2, 128, device=device)).sum().backward()
        kept.append(caught.value)
        model.zero_grad()
    model = built(lambda: nn.Linear(128, 128), device)
    parallel = DataParallel(model)

    def step(x):
        loss = parallel(x).square().mean()
        loss.backward()
        return loss

    torch.compile(step, backend="eager")(torch.ones(2, 128, device=device))
    assert_equal_everywhere(flat(gradients(model)))


class Sometimes(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.extra = nn.Linear(128, 128), nn.Linear(128, 128)

    def forward(self, x):
        return self.used(x)


def check_failures(rank, world, device):
    model = built(TinyLM, device)
    parallel = DataParallel(model)
    loss = parallel(*batch(rank, device))
    loss.register_hook(lambda g: g * (torch.inf if rank == 0 else 1.0))
    loss.backward()
    assert not any(torch.isfinite(g).all() for g in gradients(model) if g.ndim == 2)
    for g in gradients(model):
        assert_equal_everywhere(g.isfinite())

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            raise ArithmeticError("on purpose")

    with pytest.raises(ArithmeticError, match="on purpose"):
        Failing.apply(parallel(*batch(rank, device))).backward()
    model.zero_grad()
    parallel(*batch(rank, device)).backward()  # all is well again
    assert_equal_everywhere(flat(gradients(model)))

    sparse = DataParallel(nn.Embedding(9, 128, sparse=True).to(device))
    with pytest.raises(GradientError, match="weight is sparse"):
        sparse(torch.arange(3, device=device)).sum().backward()
    for make, message in (
        (lambda: DataParallel(nn.ReLU()), "no parameter of which is trained"),
        (lambda: DataParallel(model, bucket_cap_mb=0), "bucket_cap_mb must be above 0, got 0"),
        (lambda: DataParallel(nn.Linear(2, 2).double()), "weight is torch.float64"),
    ):
        with pytest.raises(ConfigError, match=message):
            make()
    weights = nn.Linear(4, 4).to(device, torch.bfloat16)
    nn.init.constant_(weights.weight, rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        DataParallel(weights)
    assert weights.weight.eq(0).all()
    told = ["not those of the first rank" in str(w.message) for w in caught]
    assert any(told) == (rank > 0)
    if world > 1:
        other = nn.Linear(4 + (rank == world - 1), 4).to(device)
        with pytest.raises(CommError, match=rf"rank {world - 1} trains 2 .*weight \(4, 5\)"):
            DataParallel(other)


def check_training(rank, world, device, level):
    """As stock DDP trains, and all ranks have the same weights; O2 steps on the bucket's own codes."""
    losses = {}
    for kind in (DistributedDataParallel, DataParallel):
        model = built(TinyLM, device)
        if rank and kind is DataParallel and level != "O2":  # all get the first rank's weights
            for p in model.parameters():
                nn.init.zeros_(p)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        if level is not None:
            model, optimizer = fp8stack.initialize(model, optimizer, level, compute="bf16")
        losses[kind] = train_part(kind(model), optimizer, rank, world, device)
        for p in model.parameters():
            assert_equal_everywhere(p.detach())
    ours, theirs = losses[DataParallel], losses[DistributedDataParallel]
    assert ours[-1] < 0.5 * ours[0]
    assert torch.allclose(ours, theirs, rtol=0.06)


def check_hosts(rank):
    """Two hosts of two ranks: the mean to 26 dB, the same bits on all, and rounding errors fed back."""
    fp8stack.comm.set_hierarchy(2)
    mean = mean_gradient(4, "cpu")
    apart = {}
    for error_feedback in ("none", "shard"):
        model = built(TinyLM, "cpu")
        parallel, total = DataParallel(model, bucket_cap_mb=0.02, error_feedback=error_feedback), 0
        for _ in range(6):
            model.zero_grad()
            parallel(*batch(rank)).backward()
            found = gradients(model)
            assert_near(flat(found), mean, 25.5)
            for g in found:
                assert_equal_everywhere(g)
            total = total + flat(found)
        apart[error_feedback] = float((total / 6 - mean).norm() / mean.norm())
    assert apart["shard"] < 0.9 * apart["none"], apart


@pytest.mark.slow
def test_gradients_by_way_of_hosts():
    run_ranks(check_hosts, 4)
