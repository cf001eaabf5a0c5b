"""Layers and optimizers in data-parallel, sharded, tensor-parallel and pipelined training, in two processes."""

import copy
import warnings
from functools import partial
from unittest import mock

import pytest
import torch
from helpers import assert_same_bits, need_gpus
from layers import RECIPES, SwiGLU, fused, native, results
from ranks import assert_same_on_all_ranks, run_ranks
from torch import nn
from torch.distributed import pipelining
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

import fp8stack
from fp8stack.capability import native_recipe
from fp8stack.errors import Fp8StackWarning, ModelError, UnsupportedDeviceError
from fp8stack.nn.linear import product

STEPS, MICRO_BATCHES = 4, 2
SPLITS = torch.__version__ >= (2, 13)  # before, half a backward of an autograd.Function fails


class Net(nn.Module):
    """Blocks of two layers with a residual, and a head whose size is no multiple of 16."""

    def __init__(self, dim=32, blocks=2, out=10):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
            for _ in range(blocks)
        )
        self.head = nn.Linear(dim, out)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(F.layer_norm(x, x.shape[-1:]))
        return self.head(x)


def make(device, **overrides):
    """Return the model at O0, the same on every rank."""
    torch.manual_seed(0)
    options = {"compute": "native", **overrides}
    return fp8stack.initialize(Net().to(device), opt_level="O0", **options)[0]


def data(step, device):
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(24, 32, generator=generator)
    return x.to(device), x[:, :10].square().to(device)


def train(model, device, rows=slice(None)):
    """Take steps of two micro-batches each on `rows` of the data; return the losses."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(STEPS):
        total = 0.0
        for micro in range(MICRO_BATCHES):
            model.require_backward_grad_sync = micro == MICRO_BATCHES - 1  # of DDP
            x, target = data(step * MICRO_BATCHES + micro, device)
            loss = F.mse_loss(model(x[rows]), target[rows])
            (loss / MICRO_BATCHES).backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total / MICRO_BATCHES)
    return torch.stack(losses)


def trained(model, device):
    """Return the losses of `train`, and the whole parameters."""
    losses = train(model, device)
    return [losses, *(getattr(p, "full_tensor", p.detach)() for p in model.parameters())]


def close(given, expected, tolerance, what):
    error = float((given - expected).norm() / expected.norm())
    assert error < tolerance, (what, error)


def train_replicas(rank, device, recipe):
    """DDP: ranks end with the same bits, close to those of one process."""
    world = torch.distributed.get_world_size()
    model, alone = (make(device, fp8_recipe=recipe) for _ in range(2))
    losses = train(nn.parallel.DistributedDataParallel(model), device, slice(rank, None, world))
    torch.distributed.all_reduce(losses)
    assert_same_on_all_ranks(model)
    plain, *parameters = trained(alone, device)
    assert plain[-1] < 0.8 * plain[0]
    close(losses / world, plain, 0.02, "losses")  # scales of half a batch are others
    for (name, p), q in zip(model.named_parameters(), parameters, strict=True):
        close(p.detach(), q, 0.1, name)


def train_shards(rank, device, recipe, mixed=False):
    """FSDP2: the same losses as the whole model on the same data, and no weight from before a step.

    `mixed`: it gathers weights in bfloat16, under activation checkpointing.
    """
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    given, options = [], {"mp_policy": policy} if mixed else {}
    world = torch.distributed.get_world_size()
    options["mesh"] = init_device_mesh(device.partition(":")[0], (world,))
    for choice in (True, False):  # whether to recompute, or to shard again after forward
        model = make(device, fp8_recipe=recipe)
        for block in model.blocks:
            if mixed and choice:
                checkpoint(block)
            fully_shard(block, reshard_after_forward=mixed or choice, **options)
        fully_shard(model, **options)
        given.append(trained(model, device))  # all ranks on the same rows: means change no gradient
    assert_same_bits(*given)
    plain = trained(make(device, fp8_recipe=recipe), device)
    assert plain[0][-1] < 0.8 * plain[0][0]
    for value, expected in zip(given[0][: 1 if mixed else None], plain, strict=not mixed):
        close(value, expected, 0.05 if mixed else 1e-4, "sharded and whole")


WORK = {
    "replicas": train_replicas,
    "shards": train_shards,
    "mixed shards": partial(train_shards, mixed=True),
}


def run(rank, device, work, *recipes):
    """Do this work for each recipe: starting a process takes longer than what it then does."""
    for recipe in recipes:
        WORK[work](rank, f"cuda:{rank}" if device == "cuda" else device, recipe)


@pytest.mark.gpus
@pytest.mark.slow
@pytest.mark.parametrize("work", WORK)
def test_two_ranks_train_as_one(work, device):
    recipes = RECIPES
    if device == "cuda":
        need_gpus(2)
        recipes = [r for r in RECIPES if native_recipe(r, device)]
        if not recipes:
            pytest.skip("these GPUs have no recipe")
    run_ranks(run, 2, device, work, *recipes, device=device)


# --- tensor parallelism and pipelines


class LM(nn.Module):
    """Embedding, norm, two layers with a residual, head."""

    def __init__(self, dim=256, vocab=512):
        super().__init__()
        self.embed, self.norm = nn.Embedding(vocab, dim), nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, x):
        h = self.embed(x)
        return self.head(h + self.down(F.gelu(self.up(self.norm(h)))))


def make_lm(sequence=None):
    """Return the model and torch's AdamW of it; under tensor parallelism, unless `sequence` is None."""
    torch.manual_seed(0)
    model = LM()
    if sequence is not None:
        shard_lm(model, sequence)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def shard_lm(model, sequence):
    """Shard over all ranks. The embedding gets whole gradients; in a sequence's parts, the norm partial sums."""
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }
    if sequence:
        between = {"output_layouts": Shard(1), "use_local_output": False}
        plan = {
            "embed": RowwiseParallel(input_layouts=Replicate(), **between),
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(**between),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
    world = torch.distributed.get_world_size()
    parallelize_module(model, init_device_mesh("cpu", (world,)), plan)


def tokens(step, rows=4):
    x = torch.randint(0, 64, (rows, 16), generator=torch.Generator().manual_seed(step))
    return x, (x * 7 + 3) % 64


def train_lm(model, optimizer, clip=None):
    """Return the losses of four steps, then the whole weights."""
    losses = []
    for step in range(4):
        x, target = tokens(step)
        loss = F.cross_entropy(model(x).flatten(0, 1), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            clip(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.detach())
    return [
        torch.stack(losses),
        *(getattr(p, "full_tensor", p.detach)() for p in model.parameters()),
    ]


LEVELS = [
    ("O0", {}), ("O0", {"fp8_recipe": "blockwise"}), ("O1", {}), ("O2", {}), ("O2", {"fp8_recipe": "delayed"}),
    ("O2", {"preset": "fp8-lm"}),
]  # fmt: skip


def tensor_parallel(rank):
    for sequence in (False, True):
        plain = train_lm(*make_lm(sequence))
        model, _ = make_lm(sequence)
        own = fp8stack.optim.AdamW(model.parameters(), lr=3e-3, states="fp32")
        for value, expected in zip(train_lm(model, own), plain, strict=True):
            close(value, expected, 1e-5, "gradients placed as their parameters")
        model, _ = make_lm(sequence)
        own = fp8stack.optim.AdamW(model.parameters(), lr=3e-3, min_numel=1)
        if sequence:  # of all parameters in one mesh
            train_lm(model, own, nn.utils.clip_grad_norm_)
        own = fp8stack.optim.AdamW(model.parameters(), lr=3e-3, max_grad_norm=0.5)
        train_lm(model, own)
        for level, options in LEVELS[2:4] if sequence else LEVELS:
            options = {"compute": "native", **options}
            model, optimizer = make_lm(sequence)
            with pytest.warns(Fp8StackWarning, match=r"sharded modules .*'embed'"):
                fp8stack.initialize(model, optimizer, level, **options)
            with pytest.raises(UnsupportedDeviceError, match="sharded modules"):
                fp8stack.initialize(*make_lm(sequence), level, strict=True, **options)
            model, optimizer = make_lm(sequence)
            with warnings.catch_warnings():
                warnings.simplefilter("error", Fp8StackWarning)
                told = ".*of the matrix parameters"  # multiply in FP8: few, or none
                warnings.filterwarnings("ignore", told, Fp8StackWarning)
                names = ["embed", "norm", "up", "down"] + ["head"] * sequence
                given = fp8stack.initialize(model, optimizer, level, skip=names, **options)
            report = fp8stack.get_report(model)
            assert report.converted == ([] if sequence else ["head"])
            losses = train_lm(*given)[0]
            close(losses, plain[0], 1e-6 if sequence else 5e-3, level)
            # initialized before it was sharded: the parameters that the optimizer has are gone
            model, optimizer = fp8stack.initialize(*make_lm(), level, skip=["*"], **options)
            shard_lm(model, sequence)
            with pytest.raises(ModelError, match=r"'embed.weight'.*after what replaces parameters"):
                train_lm(model, optimizer)
    # the remedy of a message: columns that blocks do not divide
    parameter = nn.Parameter(
        distribute_tensor(torch.ones(64, 128), init_device_mesh("cpu", (2,)), [Shard(1)])
    )
    optimizer = fp8stack.optim.AdamW([parameter], min_numel=1)
    parameter.grad = distribute_tensor(torch.ones(64, 128), parameter.device_mesh, [Replicate()])
    with pytest.raises(ModelError, match=r'optimizer.override\(parameter, states="fp32"\)'):
        optimizer.step()
    optimizer = fp8stack.optim.AdamW([parameter], min_numel=1)
    optimizer.override(parameter, states="fp32")
    optimizer.step()
    assert parameter.full_tensor().lt(1).all()


def test_models_of_tensor_parallelism_train_at_every_level_or_say_why_not():
    run_ranks(tensor_parallel, 2)


class Stage(nn.Module):
    """The layers of one stage; the first one looks up tokens, the last one has the head."""

    def __init__(self, number, last, dim=64):
        super().__init__()
        torch.manual_seed(number)
        self.embed = nn.Embedding(256, dim) if number == 0 else nn.Identity()
        self.into, self.up, self.down = (
            nn.Linear(dim, dim),
            nn.Linear(dim, 2 * dim),
            nn.Linear(2 * dim, dim),
        )
        self.head = nn.Linear(dim, 256) if number == last else nn.Identity()

    def forward(self, x):
        x = torch.tanh(self.into(self.embed(x)))  # `into` sees what a stage received
        return self.head(x + self.down(F.gelu(self.up(x))))


SCHEDULES = {  # stages a rank, and which
    "ScheduleGPipe": lambda rank: [rank],
    "Schedule1F1B": lambda rank: [rank],
}
if SPLITS:
    SCHEDULES["ScheduleInterleavedZeroBubble"] = lambda rank: [rank, rank + 2]
    SCHEDULES["ScheduleZBVZeroBubble"] = lambda rank: [rank, 3 - rank]


class Filled:
    """torch, whose new memory holds `value`."""

    def __init__(self, value):
        self.value = value

    def __getattr__(self, name):
        return getattr(torch, name)

    def empty_strided(self, *args, **kwargs):
        y = torch.empty_strided(*args, **kwargs)
        return y.fill_(self.value) if y.is_floating_point() else y


def train_pipeline(rank, schedule, level, value=0.0, **options):
    """Return the losses of three steps of four micro-batches, on the rank that has the last stage."""
    numbers = SCHEDULES[schedule](rank)
    stages, optimizers, last = [], [], 2 * len(numbers) - 1
    with mock.patch.object(pipelining._utils, "torch", Filled(value)):
        for number in numbers:
            model = Stage(number, last)
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
            if level:
                given = {"compute": "native", "min_numel": 1, **options}
                model, optimizer = fp8stack.initialize(model, optimizer, level, **given)
            optimizers.append(optimizer)
            stages.append(pipelining.PipelineStage(model, number, last + 1, torch.device("cpu")))
        make = getattr(pipelining, schedule)
        run = make(
            stages[0] if len(stages) == 1 else stages, 4,
            loss_fn=lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()),
        )  # fmt: skip
        found = []
        for step in range(3):
            x, target = tokens(step, 8)
            losses = []
            given = {"target": target, "losses": losses} if last in numbers else {}
            run.step(*[x] * (0 in numbers), **given)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            found += [torch.stack(losses).mean().detach()] if losses else []
    return found


def pipelines(rank):
    delayed = "O0", {"fp8_recipe": "delayed"}
    for schedule in SCHEDULES:
        first = schedule == "ScheduleGPipe"
        plain = train_pipeline(rank, schedule, None)
        for level, options in (*LEVELS[:-1], delayed) if first else (("O2", {}), delayed):
            losses = train_pipeline(rank, schedule, level, **options)
            for one, expected in zip(losses, plain, strict=True):
                close(one, expected, 0.02, (schedule, level, options))
        for value in (1e30, 1e-30, float("nan")) if first else (1e30,):
            assert train_pipeline(rank, schedule, "O0", value, fp8_recipe="delayed") == losses


def test_pipelines_train_at_every_level_and_learn_nothing_of_uninitialized_memory():
    """PipelineStage finds shapes by passes over such memory, which are not training's."""
    run_ranks(pipelines, 2)


@pytest.mark.skipif(not SPLITS, reason="torch 2.13 can")
@pytest.mark.parametrize(
    ("fuse", "recipe"), [*((False, r) for r in RECIPES), (True, "current"), (True, "delayed")]
)
def test_half_backwards_make_each_product_once(recipe, fuse, monkeypatch):
    """And both halves give the bits of a whole one, and the same histories."""
    made = []

    def counting(*args, **kwargs):
        made.append(args)
        return product(*args, **kwargs)

    monkeypatch.setattr(fp8stack.nn.linear, "product", counting)
    whole = fused(SwiGLU(), fp8_recipe=recipe) if fuse else native(SwiGLU(), fp8_recipe=recipe)
    halves = copy.deepcopy(whole)
    x, gradient = torch.randn(32, 32), torch.randn(32, 32)
    expected = results(whole, x, gradient)
    x.requires_grad_()
    y = halves(x) + 0
    made.clear()
    _, groups = stage_backward_input([y], [gradient], [x], halves.parameters())
    inputs = len(made)
    stage_backward_weight(halves.parameters(), groups)
    assert (inputs, len(made) - inputs) == ((3, 4) if fuse else (3, 3))
    assert_same_bits([x.grad, *(p.grad for p in halves.parameters())], expected[1:])
    one, other = (fp8stack.nn.scaling_state(model) for model in (whole, halves))
    assert_same_bits([one[key] for key in other], list(other.values()))
