"""A level for Lightning's Fabric, in one call in the place of `fabric.setup`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fp8stack
from fp8stack.comm import register_fp8_hook
from fp8stack.levels import recipe_for

from .package import check_strategy

_SHARDS = (
    "it shards in fabric.setup_module. Call that, build the optimizer, call fp8stack.integrations.fsdp.attach("
    "model.module, optimizer, opt_level), then fabric.setup_optimizers"
)


def setup(
    fabric: Any,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    opt_level: str = "O2",
    *,
    strict: bool = False,
    preset: str | None = None,
    **overrides: Any,
) -> Any:
    """Bring a model and its optimizer to a level, and set them up with Fabric; return what `fabric.setup` returns.

    Under DDP all ranks begin with the weights of rank 0, as always, and gradients are averaged in FP8 from O1 on.

    Args:
        fabric: launched, on one device or with DDP; its precision may be 32-true, bf16-mixed or bf16-true.
        model: bare. It is moved to the device of this rank.
        optimizer: built from the model's parameters. May be None at O0: the model alone is returned then.
        opt_level, strict, preset, overrides: as in `fp8stack.initialize`.

    Raises:
        ConfigError: for another strategy, with what to do instead, or an option that is not valid.
        ModelError, UnsupportedDeviceError: as `fp8stack.initialize`.
    """
    recipe, strategy = recipe_for(opt_level, preset, **overrides), fabric.strategy
    check_strategy(strategy, "setup()", ModelParallelStrategy=_SHARDS)
    model = fabric.to_device(strategy.precision.convert_module(model))
    if fabric.world_size > 1:  # as DDP will; the lower bits of weights are kept before it does
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), src=0)
    model, optimizer = fp8stack.initialize(
        model, optimizer, opt_level, strict=strict, preset=preset, **overrides
    )
    if optimizer is None:
        return fabric.setup(model)
    made = fabric.setup(model, optimizer)
    if recipe.gradients == "fp8":
        for part in made[0].modules():
            if isinstance(part, DistributedDataParallel):
                register_fp8_hook(part)
    return made
