"""The micro-batch of a run: what `--micro-batch auto` finds by taking steps of other sizes, on all ranks alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fp8stack.optim import BlockwiseOptimizer

from . import batching, ranks
from .build import synchronized
from .watch import sampling

if TYPE_CHECKING:
    from .checkpoints import Checkpoint
    from .trainer import Trainer


def choose_split(trainer: Trainer, resumed: Checkpoint | None) -> batching.Split:
    """Return how a step is made up; with `--micro-batch auto`, after trying on a GPU.

    A run that goes on as it was keeps its micro-batch, and so its bits, if that still fits.

    Raises:
        ConfigError: if not even one sequence fits.
    """
    config, setup, device = trainer.config, trainer.setup, trainer.device
    target, wish, world = config.target_effective_batch_size, config.micro_batch, trainer.world
    if wish != "auto":
        return batching.split(target, int(wish), world, fixed=True)
    limit = min(config.max_batch_size, math.ceil(target / world))
    was = resumed.manifest if resumed else {}
    facts = {**trainer.facts(), "world": world}
    known = was.get("micro_batch") if facts.items() <= was.items() else None
    untried = setup.sharded or device.type == "cpu"
    if untried and known and known <= limit:  # a prediction might be less now
        return batching.split(target, known, world, fixed=True)
    if device.type == "cpu":
        return batching.split(target, min(limit, batching.CPU_SIZE), world)
    states: list[Any] = []  # in place of torch's, while sizes are tried
    try_size: Callable[[int], None] = partial(_try_step, trainer, states)
    search = batching.predict_largest if setup.sharded else batching.find_largest
    with sampling(config, trainer.model):  # such steps need most
        largest = search(try_size, min(limit, known or limit), ranks.least)
    states.clear()
    torch.cuda.reset_peak_memory_stats(device)
    return batching.split(target, largest, world, fixed=largest == known)


def _make_states(trainer: Trainer, states: list[Any]) -> None:
    """Make the states of an optimizer, or what takes as much; once."""
    optimizer = trainer.optimizer
    if isinstance(optimizer, BlockwiseOptimizer):
        optimizer.ensure_states()
    elif not optimizer.state and not states:  # which torch's makes at its first step
        states += [torch.zeros_like(p) for p in trainer.model.parameters() for _ in range(2)]


def _try_step(trainer: Trainer, states: list[Any], size: int) -> None:
    """Use the memory of a step: optimizer states, gradients, and forward and backward of a micro-batch."""
    length = trainer.setup.model.seq_len
    tokens = torch.zeros(size, length, dtype=torch.int64, device=trainer.device)
    try:
        _make_states(trainer, states)
        for _ in range(2):  # the second one with the gradients of the first
            with synchronized(trainer.forward, False), trainer.setup.autocast():
                loss = trainer.forward(tokens, tokens)
            loss.backward()
    finally:
        trainer.optimizer.zero_grad(set_to_none=True)
