"""The names of an optimizer's parameters: checkpoints hold states by number, and names tell another order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from fp8stack.errors import CheckpointError


def parameters_of(model: nn.Module, remove_duplicate: bool = False) -> dict[str, nn.Parameter]:
    """Return parameters by what the model's state_dict calls them: without wrappers of activation checkpointing."""
    found = model.named_parameters(remove_duplicate=remove_duplicate)
    return {name.replace("_checkpoint_wrapped_module.", ""): p for name, p in found}


def names_of(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return what the model's state_dict calls its parameters, a tied one by its first name."""
    return {p: name for name, p in parameters_of(model, remove_duplicate=True).items()}


def names_of_owned(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of the optimizer's parameters in the order of its state_dict; "" for those of other models."""
    names = names_of(model)
    return [names.get(p, "") for group in optimizer.param_groups for p in group["params"]]


def check_order(optimizer: torch.optim.Optimizer, model: nn.Module, saved: Sequence[str]) -> None:
    """Raise CheckpointError if the states of some parameters would be loaded into other parameters of the model.

    States are assigned by number, so parameters of equal shape could change places unnoticed. Saved names that the
    model does not have come from another wrapper and are ignored. With a hook that rearranges states before they are
    loaded, nothing is checked.

    saved: names as `names_of_owned` returned them when the state was written.
    """
    if optimizer._optimizer_load_state_dict_pre_hooks:
        return
    own = [_bare(name) for name in names_of_owned(model, optimizer)]
    known = {_bare(name) for name in names_of(model).values()}
    for number, (was, name) in enumerate(zip(map(_bare, saved), own, strict=False)):
        if name and was != name and was in known:
            raise CheckpointError(
                f"the checkpoint has the optimizer's parameters in another order, or others: number {number} was "
                f"{was!r} and is {name!r}. Hand the optimizer those, in the order and groups, that it had when it was "
                "saved."
            )


def _bare(name: str) -> str:
    """Return a parameter's name without the names of modules that wrap the model."""
    return name.replace("_orig_mod.", "").removeprefix("module.")
