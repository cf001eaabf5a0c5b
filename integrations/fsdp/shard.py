"""Shard a whole model and bring it to a level in one call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from fp8stack.api import decide
from fp8stack.errors import ModelError
from fp8stack.levels import Recipe
from fp8stack.optim import BlockwiseOptimizer
from fp8stack.optim.sharded import collect, distribute
from fp8stack.tensor import is_sharded

from .checks import check_decisions, check_kinds, sharded_recipe
from .sharded import attach_sharded, device_of_kind, on_wire, without_wire

Model = TypeVar("Model", bound=nn.Module)


def fully_shard_fp8(
    model: Model,
    optimizer: torch.optim.Optimizer | None = None,
    opt_level: str = "O2",
    *,
    mesh: DeviceMesh | None = None,
    blocks: Iterable[nn.Module] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool | int | None = None,
    fp8_all_gather: bool = False,
    strict: bool = False,
    preset: str | None = None,
    **overrides: Any,
) -> tuple[Model, Any]:
    """Shard a whole model by `fully_shard` and bring it to a level; return it and the optimizer to step.

    Args:
        model: whole, on one device, the same on all ranks of a row of replicas.
        optimizer: built from the model's parameters; its groups and states go over to the sharded ones.
        mesh, reshard_after_forward: as in `fully_shard`. Of a 2-D mesh (HSDP) gradients are averaged over replicas in
            FP8 too, from O1 on.
        blocks: the modules to shard on their own; all elements of the model's outermost ModuleLists if None. The rest
            is sharded together.
        mp_policy: as in `fully_shard`. Without a param_dtype the model computes in the dtype that it has.
        fp8_all_gather, opt_level, strict, preset, overrides: see `attach`.

    Raises:
        ConfigError, ModelError, UnsupportedDeviceError: as `attach`. Nothing is sharded then.
    """
    recipe = sharded_recipe(opt_level, preset, overrides)
    check_kinds(model, optimizer, recipe)
    done = [n for n, m in model.named_modules() if isinstance(m, FSDPModule)]
    if done or any(is_sharded(p) for p in model.parameters()):
        name = done[0] if done and done[0] else "the model"
        raise ModelError(f"{name} is sharded already: call fp8stack.integrations.fsdp.attach.")
    kind = mesh.device_type if mesh is not None else _default_device()
    decisions = decide(model, optimizer, without_wire(recipe), strict, device_of_kind(kind))
    check_decisions(decisions, recipe, fp8_all_gather)
    policy = _policy(model, mp_policy or MixedPrecisionPolicy(), recipe)
    chosen = list(_blocks_of(model) if blocks is None else blocks)
    _check_blocks(model, chosen)

    replicas = None
    hooks = hasattr(FSDPModule, "set_custom_reduce_scatter")
    if mesh is not None and mesh.ndim == 2 and mesh.mesh_dim_names and hooks and on_wire(recipe):
        replicas, mesh = mesh.get_group(0), mesh[mesh.mesh_dim_names[1]]
    given = {"mesh": mesh, "reshard_after_forward": reshard_after_forward}
    options: Any = {k: v for k, v in given.items() if v is not None}
    places = {p: (m, n) for m in model.modules() for n, p in m._parameters.items() if p is not None}
    parts: list[nn.Module] = [*chosen, model]
    for module in parts:
        fully_shard(module, mp_policy=policy, **options)
    if optimizer is not None:
        _point(optimizer, {p: getattr(*place) for p, place in places.items()})
    return attach_sharded(model, optimizer, recipe, fp8_all_gather, strict, replicas)


def _default_device() -> str:
    """Return the type of device that `fully_shard` makes a mesh of."""
    accelerator = torch.accelerator.current_accelerator()
    return "cpu" if accelerator is None else accelerator.type


def _policy(model: nn.Module, policy: MixedPrecisionPolicy, recipe: Recipe) -> MixedPrecisionPolicy:
    """Return the policy with the dtype that the model has now, where its weights are to become bfloat16."""
    if recipe.master == "keep" or policy.param_dtype is not None:
        return policy
    dtypes = {p.dtype: n for n, p in model.named_parameters() if p.is_floating_point()}
    if len(dtypes) > 1:
        found = ", ".join(f"{name} is {dtype}" for dtype, name in dtypes.items())
        raise ModelError(
            f"the model has parameters of several dtypes ({found}), so what it computes in has to be said: "
            "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)."
        )
    return replace(policy, param_dtype=next(iter(dtypes)), cast_forward_inputs=False)


def _blocks_of(module: nn.Module) -> Iterator[nn.Module]:
    """Return the elements of the outermost ModuleLists that have parameters."""
    for child in module.children():
        if not isinstance(module, nn.ModuleList) or isinstance(
            child, (nn.ModuleList, nn.ModuleDict)
        ):
            yield from _blocks_of(child)
        elif next(child.parameters(), None) is not None:
            yield child


def _check_blocks(model: nn.Module, blocks: list[Any]) -> None:
    inside = set(model.modules()) - {model}
    for block in blocks:
        if block not in inside:
            raise ModelError(
                f"blocks has a {type(block).__name__} that is no module inside the {type(model).__name__}. "
                "Pass its own, such as model.layers."
            )


def _point(optimizer: torch.optim.Optimizer, sharded: dict[torch.Tensor, nn.Parameter]) -> None:
    """Let the groups and states of an optimizer be those of the sharded parameters."""
    for group in optimizer.param_groups:
        group["params"] = [sharded.get(p, p) for p in group["params"]]
    for old in list(optimizer.state):
        new: Any = sharded.get(old, old)
        if new is not old:
            part = collect(optimizer.state.pop(old), new, "?")
            optimizer.state[new] = distribute(part, new)
    if isinstance(optimizer, BlockwiseOptimizer):
        own = {sharded.get(p, p): formats for p, formats in optimizer.overrides.items()}
        optimizer.overrides = own
