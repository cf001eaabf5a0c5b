"""Native layers in data-parallel and sharded training: two processes on a CPU, or two GPUs."""

from functools import partial

import pytest
import torch
from helpers import assert_same_bits, need_gpus
from layers import RECIPES
from ranks import run_ranks
from torch import nn
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

import fp8stack
from fp8stack.capability import native_recipe

STEPS, MICRO_BATCHES = 4, 2


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
    for p in model.parameters():
        others = [torch.empty_like(p) for _ in range(world)]
        torch.distributed.all_gather(others, p.detach())
        assert all(torch.equal(other, p) for other in others)
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
