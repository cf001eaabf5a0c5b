"""What can be wrong with a model, an optimizer and options for FSDP2, found before anything is changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from fp8stack.api import Decisions
from fp8stack.conflicts import FSDP2, refuse_conflicts
from fp8stack.errors import ConfigError, ModelError
from fp8stack.levels import Recipe, recipe_for
from fp8stack.optim.sharded import check_placements
from fp8stack.tensor import is_sharded


def sharded_recipe(opt_level: str, preset: str | None, overrides: dict[str, Any]) -> Recipe:
    recipe = recipe_for(opt_level, preset, **overrides)
    refuse_conflicts(recipe, FSDP2)
    if recipe.states == "keep":
        return recipe
    return replace(recipe, optimizer_backend="fp8stack")


def check_kinds(model: Any, optimizer: Any, recipe: Recipe) -> None:
    """Raise ModelError for what is no model of FSDP2's, and for optimizers that need whole matrices."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    given = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
    refuse_conflicts(recipe, FSDP2, optimizer=given, model=model)


def check_owned(model: nn.Module, optimizer: Any) -> None:
    """Raise ModelError if the optimizer was built before the model was sharded."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return  # `decide` says so
    own, owned = set(model.parameters()), [p for g in optimizer.param_groups for p in g["params"]]
    strangers = [p for p in owned if p not in own and not is_sharded(p)]
    if strangers and any(is_sharded(p) for p in own - set(owned)):
        raise ModelError(
            f"{len(strangers)} of the {len(owned)} parameters of {type(optimizer).__name__} are not the model's any "
            f"more: fully_shard replaced them. Build it after fully_shard, {type(optimizer).__name__}"
            "(model.parameters(), ...), or let fully_shard_fp8 shard both."
        )


def check_decisions(decisions: Decisions, recipe: Recipe, fp8_all_gather: bool) -> None:
    """Raise for what sharded parameters and their collectives cannot have."""
    for p in decisions.quantized if recipe.states != "keep" else ():
        states, master = decisions.formats.get(p, (recipe.states, recipe.master))
        check_placements(p, states, master, states not in ("keep", "fp32"))
    if not fp8_all_gather:
        return
    if decisions.compute == "bf16" or not decisions.plan.gemm:
        raise ConfigError(
            "fp8_all_gather=True gathers the weights of FP8 layers, and there are none: "
            f"compute is {decisions.compute} ({decisions.report.compute_reason}). Leave it out, or call "
            "fp8stack.comm.register_fp8_all_gather(model, matrices=True) afterwards."
        )
    if not hasattr(FSDPModule, "set_custom_all_gather"):
        raise ConfigError(
            f"FSDP2 of torch {torch.__version__} has no set_custom_all_gather, which fp8_all_gather=True needs; "
            "update torch."
        )
