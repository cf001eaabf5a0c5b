"""A level for Lightning's Fabric, in one call in the place of `fabric.setup`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fp8stack
from fp8stack.comm import register_fp8_hook
from fp8stack.errors import ConfigError

_OTHERS = {
    "DeepSpeedStrategy": 'put a section "fp8stack" into its config and call '
    "fp8stack.integrations.deepspeed.install() before fabric.setup",
    "FSDPStrategy": "FSDP1 has no rows to make blocks of; use ModelParallelStrategy (FSDP2)",
    "ModelParallelStrategy": "it shards in fabric.setup_module: call that, build the optimizer, call "
    "fp8stack.integrations.fsdp.attach(model.module, optimizer, opt_level), then fabric.setup_optimizers",
}


def setup(
    fabric: Any,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    opt_level: str = "O2",
    **options: Any,
) -> Any:
    """Bring a model and its optimizer to a level, and set them up with Fabric; return what `fabric.setup` returns.

    Under DDP all ranks begin with the weights of rank 0, as always, and gradients are averaged in FP8 from O1 on.

    Args:
        fabric: launched, on one device or with DDP; its precision may be 32-true, bf16-mixed or bf16-true.
        model: bare. It is moved to the device of this rank.
        optimizer: built from the model's parameters. May be None at O0: the model alone is returned then.
        opt_level, options: as in `fp8stack.initialize`.

    Raises:
        ConfigError: for another strategy, with what to do instead, or an option that is not valid.
        ModelError, UnsupportedDeviceError: as `fp8stack.initialize`.
    """
    strategy = fabric.strategy
    for kind in type(strategy).__mro__:
        if kind.__name__ in _OTHERS:
            raise ConfigError(
                f"setup() is for one device and DDP, got {kind.__name__}: {_OTHERS[kind.__name__]}."
            )
    model = fabric.to_device(strategy.precision.convert_module(model))
    if fabric.world_size > 1:  # as DDP will; the lower bits of weights are kept before it does
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), src=0)
    model, optimizer = fp8stack.initialize(model, optimizer, opt_level, **options)
    wire = fp8stack.recipe_for(opt_level, **{k: v for k, v in options.items() if k != "strict"})
    made = fabric.setup(model) if optimizer is None else fabric.setup(model, optimizer)
    if wire.gradients == "fp8":
        for part in made[0].modules():
            if isinstance(part, DistributedDataParallel):
                register_fp8_hook(part)
    return made
