"""Data parallelism whose gradients live in FP8, between real processes.

Starting ranks takes longer than most checks, so each number of ranks is started once and does them all.
"""

import copy
import gc
import pickle
import warnings
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers import TinyLM, TinyLMWithUnused, assert_same_bits, batch, build, need_gpus
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
        check_odd_shapes, check_accumulation, check_unused, check_outputs, check_checkpoints, check_backwards,
        check_wrappers_come_and_go, check_failures, check_a_rank_that_fails_alone, check_refusals,
    ):  # fmt: skip
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


class Net(nn.Module):
    """A model of parts, whose forward is a function of it and the inputs."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.run = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args, **kwargs):
        return self.run(self, *args, **kwargs)


def odd():
    """Return a model with parameters of all shapes: odd rows, vectors, scalars, a convolution."""

    def forward(self, x):
        h = self.norm(self.conv(x)).relu().flatten(1)
        return self.even(self.wide(h).tanh()) * self.scalar

    parts = {"conv": nn.Conv2d(3, 5, 3), "norm": nn.BatchNorm2d(5), "wide": nn.Linear(180, 256)}
    scalar = nn.Parameter(torch.tensor(1.5))
    return Net(forward, **parts, even=nn.Linear(256, 131), scalar=scalar)


def images(rank, device):
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(rank)).to(device)


def built(make, device, dtype=torch.float32, **options):
    """Return a model, and its wrapper."""
    torch.manual_seed(0)
    model = make().to(device, dtype)
    return model, DataParallel(model, **options)


def gradients(model):
    return [None if p.grad is None else p.grad + 0 for p in model.parameters()]


def flat(values):
    return torch.cat([v.flatten().double() for v in values if v is not None])


def assert_alike(model):
    """Fail unless all ranks have the same gradients; return them."""
    found = flat(gradients(model))
    assert_equal_everywhere(found)
    return found


def mean_gradient(world, device, dtype=torch.float32):
    """Return the mean over ranks that one model gives alone."""
    exact = []
    for r in range(world):
        model, _ = build(device=device, dtype=dtype)
        model(*batch(r, device)).backward()
        exact.append(flat(gradients(model)))
    return torch.stack(exact).mean(0)


def fail_in_backward(gradient):
    raise ArithmeticError("on purpose")


# --- gradients


def check_gradients(rank, world, device, dtype):
    """The mean over ranks to 28 dB, the same bits on all; only FP8 stays, in the bucket itself."""
    mean = mean_gradient(world, device, dtype)
    for options in ({}, {"bucket_cap_mb": 0.02}):
        model, parallel = built(TinyLM, device, dtype, **options)
        assert (len(parallel.buckets) > 1) == bool(options)
        for _ in range(3):
            model.zero_grad()
            parallel(*batch(rank, device)).backward()
            assert_near(assert_alike(model), mean, 27)
        numel, count = sum(p.numel() for p in model.parameters()), len(list(model.parameters()))
        held = sum(b.codes.nbytes + b.scales.nbytes for b in parallel.buckets)
        assert held <= 1.04 * numel + 132 * count + 132 * world * 99
        arenas = {b.codes.untyped_storage().data_ptr() for b in parallel.buckets}
        for p in model.parameters():
            assert type(p.grad) is BlockScaledTensor
            assert p.grad.dtype is dtype
            assert p.grad.codes.untyped_storage().data_ptr() in arenas
    assert list(parallel.state_dict()) == [f"module.{k}" for k in model.state_dict()]


def check_odd_shapes(rank, world, device):
    exact = []
    for r in range(world):
        torch.manual_seed(0)
        alone = odd().to(device)
        alone(images(r, device)).square().mean().backward()
        exact.append(gradients(alone))
    model, parallel = built(odd, device)
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
    # two forwards before a backward, with the buffers given out in between
    (parallel(images(rank, device)).sum() + parallel(images(rank, device)).mean()).backward()
    assert_alike(model)


def check_accumulation(rank, world, device):
    """Micro-batches without exchange, then one with; and a second backward on top of gradients that are there."""
    results = []
    for kind in (DistributedDataParallel, DataParallel):
        model, _ = build(device=device)
        parallel = kind(model)
        for _ in range(2):
            with parallel.no_sync():
                for micro in range(3):
                    parallel(*batch(10 * micro + rank, device)).backward()
                    if kind is DataParallel and micro == 0 and world > 1:
                        with pytest.raises(AssertionError):
                            assert_alike(model)
            parallel(*batch(90 + rank, device)).backward()
        results.append(assert_alike(model))
    assert_near(results[1], results[0], 25)


def check_unused(rank, world, device):
    model, parallel = built(TinyLMWithUnused, device)
    with pytest.raises(GradientError, match=r"no gradient reached extra\.bias, extra\.weight"):
        parallel(*batch(rank, device)).backward()
    model.zero_grad()
    parallel(*batch(rank, device)).backward()  # used this time
    assert model.extra.weight.grad is not None

    model, parallel = built(TinyLMWithUnused, device, find_unused_parameters=True)
    for step in range(4):
        model.zero_grad()
        model.calls = step
        parallel(*batch(rank, device)).backward()
        assert (model.extra.weight.grad is None) == (step % 2 == 0)
    model.zero_grad()
    model.calls = int(rank == world - 1)  # the last rank alone uses it
    parallel(*batch(rank, device)).backward()
    assert_near(model.extra.bias.grad, torch.full((8,), 1e-3 / world), 25)


def check_training(rank, world, device, level):
    """As stock DDP trains, and all ranks have the same weights; O2 steps on the bucket's own codes."""
    losses = []
    for kind in (DistributedDataParallel, DataParallel):
        model, optimizer = build(device=device)
        if rank and kind is DataParallel and level != "O2":  # all get the first rank's weights
            for p in model.parameters():
                nn.init.zeros_(p)
        if level is not None:
            model, optimizer = fp8stack.initialize(model, optimizer, level, compute="bf16")
        losses.append(train_part(kind(model), optimizer, rank, world, device))
        for p in model.parameters():
            assert_equal_everywhere(p)
    assert losses[1][-1] < 0.5 * losses[1][0]
    assert torch.allclose(losses[1], losses[0], rtol=0.06)


# --- forwards and backwards of all kinds


@dataclass
class Answer:
    loss: torch.Tensor
    others: dict


def check_outputs(rank, world, device):
    """Integers, keywords and outputs of any make pass through."""

    def forward(self, tokens, *, scale, note, wrap):
        loss = (self.out(self.embed(tokens)) * scale).square().mean()
        return wrap(loss, {"note": note, "n": 3})

    def make():
        return Net(forward, embed=nn.Embedding(9, 128), out=nn.Linear(128, 3))

    for wrap, loss_of in (
        (Answer, lambda answer: answer.loss),
        (lambda loss, others: [({"loss": loss, **others},), None], lambda a: a[0][0]["loss"]),
        (lambda loss, others: SimpleNamespace(loss=loss), lambda a: a.loss),  # not looked into
    ):
        model, parallel = built(make, device)
        tokens = torch.arange(9, device=device)
        answer = parallel(tokens, scale=1.0 + rank, note="x", wrap=wrap)
        with torch.no_grad():
            parallel(tokens, scale=2.0, note="in between", wrap=wrap)
        loss_of(answer).backward()
        assert assert_alike(model).norm() > 0


def check_checkpoints(rank, world, device):
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(4, 128, generator=generator).to(device).requires_grad_()

    def make(reentrant, shared=False):
        def forward(self, x):
            for layer in (self.first, self.second):
                x = checkpoint(layer, x, use_reentrant=reentrant).tanh()
            return x

        first, second = nn.Linear(128, 128), nn.Linear(128, 128)
        return Net(forward, first=first, second=first if shared else second)

    results = []
    for reentrant in (True, False):
        model, parallel = built(partial(make, reentrant), device, bucket_cap_mb=0.001)
        for _ in range(2):
            model.zero_grad()
            parallel(x).square().sum().backward()
        results.append(assert_alike(model))
    assert_same_bits(*results)
    _, parallel = built(partial(make, True, True), device)
    with pytest.raises(GradientError, match=r"first.*after its bucket was sent"):
        parallel(x).square().sum().backward()


def check_backwards(rank, world, device):
    # other ranks take no part in a backward of the bare module
    model, parallel = built(TinyLM, device)
    parallel(*batch(rank, device)).backward()
    if rank == 0:
        model.zero_grad()
        model(*batch(rank, device)).backward()
    dist.barrier()
    # gradients with respect to inputs, then to parameters through them
    model, parallel = built(odd, device)
    model.eval()
    x = images(rank, device).requires_grad_()
    y = parallel(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert all(p.grad is None for p in model.parameters())
    (y.square().mean() + slope.square().sum()).backward()
    assert_alike(model)
    # two forwards, the backward of the first fails, that of the second does not
    model, parallel = built(TinyLM, device, bucket_cap_mb=0.02, find_unused_parameters=True)
    first, second = (parallel(*batch(10 * i + rank, device)) for i in range(2))
    handle = model.embed.weight.register_hook(fail_in_backward)
    with pytest.raises(ArithmeticError, match="on purpose"):
        first.backward()
    handle.remove()
    model.zero_grad()
    second.backward()
    assert_alike(model)
    # a step that is compiled whole
    model, parallel = built(partial(nn.Linear, 128, 128), device)

    def step(x):
        loss = parallel(x).square().mean()
        loss.backward()
        return loss

    torch.compile(step, backend="eager")(torch.ones(2, 128, device=device))
    assert_alike(model)


def with_weight(self, x):
    return self.layer(x), self.layer.weight


def check_wrappers_come_and_go(rank, world, device):
    model, parallel = built(lambda: Net(with_weight, layer=nn.Linear(128, 4)), device)
    x = torch.ones(2, 128, device=device)
    for _ in range(3):
        parallel(x)[0].sum().backward()
    assert not model.layer.weight._backward_hooks  # an output that is a parameter collects none
    del parallel
    gc.collect()
    assert not model.layer.weight._post_accumulate_grad_hooks
    model.zero_grad()
    for twin in (copy.deepcopy, lambda wrapper: pickle.loads(pickle.dumps(wrapper))):
        copied = twin(DataParallel(model))
        copied(x * (1 + rank))[0].sum().backward()
        assert_alike(copied)
        assert model.layer.weight.grad is None


# --- failures


def check_failures(rank, world, device):
    model, parallel = built(TinyLM, device)
    loss = parallel(*batch(rank, device))
    loss.register_hook(lambda g: g * (torch.inf if rank == 0 else 1.0))
    loss.backward()
    for g in gradients(model):
        assert_equal_everywhere(g.isfinite())
        assert g.ndim != 2 or not g.isfinite().all()
    loss = parallel(*batch(rank, device)) * 1
    loss.register_hook(fail_in_backward)
    with pytest.raises(ArithmeticError, match="on purpose"):
        loss.backward()
    model.zero_grad()
    parallel(*batch(rank, device)).backward()  # all is well again
    assert_alike(model)
    # an error that is kept, with the frames of its traceback
    make = partial(Net, lambda self, x: self.used(x))
    layers = {"used": nn.Linear(128, 128), "extra": nn.Linear(128, 128)}
    model, parallel = built(partial(make, **layers), device)
    kept = []
    for _ in range(2):
        with pytest.raises(GradientError, match="no gradient reached") as caught:
            parallel(torch.ones(2, 128, device=device)).sum().backward()
        kept.append(caught.value)
        model.zero_grad()


def check_a_rank_that_fails_alone(rank, world, device):
    """In the middle of a backward, and goes on: the others get NaN, and the next backwards are right."""

    def build():
        return nn.Sequential(*[nn.Linear(128, 128 + 64 * (i % 2), bias=False) for i in (0, 2, 4)])

    x = torch.ones(2, 128, device=device)
    for options in ({}, {"find_unused_parameters": True}):
        model, parallel = built(build, device, bucket_cap_mb=0.01, **options)
        alone = copy.deepcopy(model)
        if rank == 0:
            handle = model[1].weight.register_hook(fail_in_backward)
            with pytest.raises(ArithmeticError, match="on purpose"):
                parallel(x).sum().backward()
            handle.remove()
        else:
            parallel(x).sum().backward()
            assert model[0].weight.grad.isnan().any()
        for factor in (2, 3):
            for each in (model, alone):
                each.zero_grad()
            parallel(x * factor).sum().backward()
            alone(x * factor).sum().backward()
            for p, q in zip(model.parameters(), alone.parameters(), strict=True):
                assert_near(p.grad, q.grad, 25)


def check_refusals(rank, world, device):
    sparse = DataParallel(nn.Embedding(9, 128, sparse=True).to(device))
    with pytest.raises(GradientError, match="weight is sparse"):
        sparse(torch.arange(3, device=device)).sum().backward()
    for make, message in (
        (lambda: DataParallel(nn.ReLU()), "of which nothing is trained"),
        (
            lambda: DataParallel(TinyLM(), bucket_cap_mb=0),
            "bucket_cap_mb=0 must be a finite number above 0",
        ),
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
