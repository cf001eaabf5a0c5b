"""Everything that can be wrong with a model and an optimizer, found at the call and before anything is changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .errors import ConfigError, ModelError
from .formats import FLOATS
from .levels import Recipe
from .nn import GEMM_LAYERS, StoredEmbedding, StoredLinear
from .nn.matmuls import runs_matmuls
from .optim import SGD, Adam, AdamW, BlockwiseOptimizer, Muon
from .optim.bitsandbytes import (
    COUNTERPARTS,
    BitsandbytesOptimizer,
    check_bitsandbytes,
    check_states,
    missing_option,
)
from .optim.release import check_no_clipping, check_single_process
from .tensor import is_sharded

CONVERTED: dict[type[torch.optim.Optimizer], type[BlockwiseOptimizer]] = {
    torch.optim.Adam: Adam,
    torch.optim.AdamW: AdamW,
    torch.optim.SGD: SGD,
    **({torch.optim.Muon: Muon} if hasattr(torch.optim, "Muon") else {}),  # torch 2.9
}
"""Exact types that O2 converts (torch's AdamW is a subclass of its Adam; other subclasses may do anything)."""

_WRAPPERS = (
    "DistributedDataParallel",
    "DataParallel",
    "FullyShardedDataParallel",
    "DeepSpeedEngine",
)


COPIED = (
    "A copy of an initialized model (deepcopy, pickle) cannot be restored: load its "
    "fp8stack.checkpoint.master_state_dict into a fresh model."
)


def check_model(
    model: nn.Module,
    recipe: Recipe,
    initialized: bool = True,
    sharded: bool = False,
    planned: bool = False,
) -> torch.device:
    """Raise ModelError if `recipe` cannot be applied to `model`; return the device it is on.

    `initialized` says whether `restore` would know it, `sharded` whether its parameters may be DTensors, `planned`
    whether they may be on the meta device.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    if isinstance(model, torch.jit.ScriptModule):
        raise ModelError(
            "the model is one of torch.jit, whose layers cannot be changed. Initialize what it was scripted from."
        )
    wrapper = next((c.__name__ for c in type(model).__mro__ if c.__name__ in _WRAPPERS), None)
    if wrapper:
        raise ModelError(
            f"the model is wrapped in {wrapper}; initialize the bare model, then wrap it."
        )
    done = find_converted(model)
    if done:
        remedy = "Call fp8stack.restore(model, optimizer) first to change the level."
        if not initialized:
            remedy = (
                f"Restore the model that it was initialized in, if it is a part of one. {COPIED}"
            )
        raise ModelError(f"{done} is already converted by fp8stack. {remedy}")
    parameters = dict(model.named_parameters())
    if not parameters:
        raise ModelError("the model has no parameters, so there is nothing to convert.")
    for name, parameter in parameters.items():
        _check_parameter(name, parameter, recipe, sharded, planned)
    devices: dict[torch.device, str] = {}
    for name, parameter in parameters.items():
        devices.setdefault(parameter.device, name)
    if len(devices) > 1:
        found = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise ModelError(
            f"the parameters lie on several devices ({found}). Move the model to one: model.to(device)."
        )
    if recipe.gradients == "fp8":
        for name, module in model.named_modules():
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
                raise ModelError(
                    f"{name} is {type(module).__name__}(sparse=True), whose sparse gradients have no FP8 form. "
                    f'Use sparse=False, or initialize with gradients="keep".'
                )
    return next(iter(devices))


def find_converted(model: nn.Module) -> str:
    """Return the name of a module that `initialize` converted, or an empty string."""
    ours = (*GEMM_LAYERS, StoredLinear, StoredEmbedding)
    found = (n for n, m in model.named_modules() if isinstance(m, ours) or runs_matmuls(m))
    return next((name or "the model" for name in found), "")


def _check_parameter(
    name: str, parameter: nn.Parameter, recipe: Recipe, sharded: bool, planned: bool
) -> None:
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise ModelError(
            f"{name} is a lazy parameter without a shape; run one batch through the model first."
        )
    if parameter.is_meta and not planned:
        raise ModelError(
            f"{name} is on the meta device; materialize the model first: model.to_empty(device=...), then load weights."
        )
    if is_sharded(parameter.data) and not sharded:
        raise ModelError(
            f"{name} is sharded (DTensor); use fp8stack.integrations.fsdp.attach, or call fp8stack.initialize at O0 on "
            "the whole model, before fully_shard."
        )
    if not parameter.is_floating_point():
        raise ModelError(
            f"{name} is {parameter.dtype}; parameters must be floating point. Register it as a buffer instead."
        )
    if recipe.level != "O0" and parameter.requires_grad and parameter.dtype not in FLOATS:
        raise ModelError(
            f"{name} is {parameter.dtype}; {recipe.level} takes float32, bfloat16 and float16 parameters. "
            "Convert the model first: model.float()."
        )
    gradient = parameter.grad
    if recipe.gradients == "fp8" and gradient is not None:
        _check_gradient(name, gradient)


def _check_gradient(name: str, gradient: Tensor) -> None:
    if gradient.is_sparse or gradient.is_complex():
        kind = "sparse" if gradient.is_sparse else "complex"
        raise ModelError(
            f"{name} has a {kind} gradient, which has no FP8 form. Clear it with optimizer.zero_grad()."
        )


def check_optimizer(model: nn.Module, optimizer: Any, recipe: Recipe) -> list[str]:
    """Raise ModelError if `optimizer` does not fit; return the names of trainable parameters it does not own."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ModelError(
            f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}."
        )
    for index, group in enumerate(optimizer.param_groups):
        if not group["params"]:
            raise ModelError(f"parameter group {index} of the optimizer is empty. Leave it out.")
    owned = {p for group in optimizer.param_groups for p in group["params"]}
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    missing = [name for name, p in trainable.items() if p not in owned]
    if trainable and len(missing) == len(trainable):
        foreign = len(owned - set(model.parameters()))
        raise ModelError(
            f"the optimizer owns none of the model's {len(trainable)} trainable parameters"
            f"{f' ({foreign} parameters of something else)' if foreign else ''}. Build it from this model: "
            f"{type(optimizer).__name__}(model.parameters(), ...), after anything that replaces parameters."
        )
    if recipe.states != "keep":
        _check_convertible(optimizer, recipe)
    if recipe.step_in_backward:
        _check_release(optimizer, recipe)
    return missing


def _check_release(optimizer: torch.optim.Optimizer, recipe: Recipe) -> None:
    """Raise unless `optimizer` can step each parameter in backward."""
    check_single_process()
    ours = isinstance(optimizer, BlockwiseOptimizer)
    if recipe.gradients == "keep" and recipe.states == "keep" and not ours:
        raise ConfigError(
            f"step_in_backward=True needs one of fp8stack's optimizers, and {recipe.level} leaves yours as it is. "
            'Use opt_level="O1" or "O2".'
        )
    if not ours and (type(optimizer) not in CONVERTED or inconvertible_option(optimizer)):
        known = ", ".join(f"torch.optim.{t.__name__}" for t in CONVERTED)
        raise ModelError(
            f"step_in_backward=True steps with fp8stack's counterparts of {known}, not with "
            f"{type(optimizer).__name__}{inconvertible_option(optimizer) and ' with these options'}."
        )
    if isinstance(optimizer, BlockwiseOptimizer):
        check_no_clipping(optimizer)


def needs_whole_matrices(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether steps of `optimizer` depend on all of a matrix, which no rank has where it is sharded."""
    return issubclass(CONVERTED.get(type(optimizer), type(optimizer)), Muon) and any(
        group.get("algorithm", "muon") == "muon" for group in optimizer.param_groups
    )


def _check_convertible(optimizer: torch.optim.Optimizer, recipe: Recipe) -> None:
    """Raise unless O2 can take over `optimizer`."""
    if isinstance(optimizer, BlockwiseOptimizer):
        for name in ("states", "master", "min_numel", "offload"):
            own, wanted = getattr(optimizer, name), getattr(recipe, name)
            if own != wanted:
                raise ModelError(
                    f"the optimizer was made with {name}={own!r}, the recipe says {name}={wanted!r}. "
                    f"Make it with {name}={wanted!r}, or initialize(..., {name}={own!r})."
                )
        return
    kind = type(optimizer)
    if kind not in CONVERTED:
        known = ", ".join(f"torch.optim.{t.__name__}" for t in CONVERTED)
        raise ModelError(
            f"O2 converts {known} (and takes fp8stack.optim's own), not {kind.__module__}.{kind.__qualname__}. "
            'Use one of these, or opt_level="O1", which leaves optimizer states alone.'
        )
    reason = inconvertible_option(optimizer)
    if reason:
        raise ModelError(f'{kind.__name__} has {reason}. Switch it off, or use opt_level="O1".')


def inconvertible_option(optimizer: torch.optim.Optimizer) -> str:
    """Return the option of a torch optimizer that fp8stack's counterpart does not have, or an empty string."""
    for option, why in (
        ("amsgrad", "a third state"),
        ("differentiable", "a step recorded by autograd"),
    ):
        if any(group.get(option) for group in optimizer.param_groups):
            return f"{option}=True, which needs {why} that fp8stack's optimizers do not have"
    return ""


def counterpart_of(optimizer: torch.optim.Optimizer) -> type[BitsandbytesOptimizer] | None:
    """Return bitsandbytes' optimizer of the same kind, None if it has none."""
    kind: Any = type(optimizer)
    return COUNTERPARTS.get(CONVERTED.get(kind, kind))


def recipe_on_bitsandbytes(
    recipe: Recipe, backend: str, optimizer: torch.optim.Optimizer, device: torch.device
) -> Recipe:
    """Return `recipe` with a backend of bitsandbytes.

    Raises:
        ConfigError, ModelError, UnsupportedDeviceError: what stands in the way.
    """
    recipe, paged = replace(recipe, optimizer_backend=backend), backend == "bitsandbytes-paged"
    check_bitsandbytes(device, paged)
    kind, counterpart = type(optimizer), counterpart_of(optimizer)
    if counterpart is None:
        raise ModelError(
            f"bitsandbytes has no counterpart of {kind.__module__}.{kind.__qualname__}. Use AdamW, Adam or SGD of "
            'torch or fp8stack.optim, fp8stack.optim.Lion, or optimizer_backend="fp8stack".'
        )
    missing = missing_option(counterpart.counterpart, optimizer.param_groups, paged)
    if missing:
        raise ModelError(f'{missing}. Use optimizer_backend="fp8stack".')
    if getattr(optimizer, "release", None) is not None:
        raise ModelError(
            "this optimizer steps in backward on its own. Leave that to initialize (step_in_backward=True), "
            'or use optimizer_backend="fp8stack".'
        )
    own = [states for states, _ in getattr(optimizer, "overrides", {}).values()]
    for states in [*own, *(group.get("states", "8bit") for group in optimizer.param_groups)]:
        check_states(states)
    return recipe
