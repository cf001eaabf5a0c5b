"""Bring a model that is sharded already to a level: classes, dtypes, states and collectives, in place."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from fp8stack.api import Decisions, carry_out, decide, session_of
from fp8stack.comm.fsdp import (
    compute_dtype_of,
    is_hybrid,
    reduces_in_fp8,
    register_fp8_all_gather,
    register_fp8_reduce_scatter,
    units_of,
)
from fp8stack.conversion import Session
from fp8stack.integrations.verification import Verification, verify_initialized
from fp8stack.levels import Recipe
from fp8stack.optim import BlockwiseOptimizer
from fp8stack.report import Report, say
from fp8stack.tensor import is_sharded

from .checks import check_decisions, check_kinds, check_owned, sharded_recipe

Model = TypeVar("Model", bound=nn.Module)


def attach(
    model: Model,
    optimizer: torch.optim.Optimizer | None = None,
    opt_level: str = "O2",
    *,
    fp8_all_gather: bool = False,
    strict: bool = False,
    preset: str | None = None,
    **overrides: Any,
) -> tuple[Model, Any]:
    """Bring a model that `fully_shard` has sharded to a level; return it and the optimizer to step.

    Call it before the first forward: FSDP2 then takes note of dtypes.

    Args:
        model: the root that was sharded, its parameters materialized.
        optimizer: built from the sharded parameters. May be None at O0, and stays the same at O0 and O1. O2 returns
            another one that shares `param_groups`; a scheduler built before drives it too.
        opt_level, preset: as in `fp8stack.initialize`.
        fp8_all_gather: gather the weights of FP8 layers as E4M3 blocks; see `fp8stack.comm.register_fp8_all_gather`.
        strict: raise where a part of the level would fall back, instead of warning with the reason.
        overrides: single fields of `fp8stack.Recipe`.

    Raises:
        ConfigError: an unknown level, preset, option or value, or one that sharded parameters cannot have.
        ModelError: a model or optimizer that the level cannot be applied to. Nothing has been changed then.
        UnsupportedDeviceError: a fallback under `strict`, or a device that the level cannot run on at all.
    """
    recipe = sharded_recipe(opt_level, preset, overrides)
    check_kinds(model, optimizer, recipe)
    other = " fully_shard_fp8 does both in one call; on one device there is fp8stack.initialize."
    for unit in units_of(model, "attach", (), other).values():
        unit.reshard()  # so that the model's parameters are the sharded ones
    check_owned(model, optimizer)
    return attach_sharded(model, optimizer, recipe, fp8_all_gather, strict, None)


def attach_sharded(
    model: Model,
    optimizer: torch.optim.Optimizer | None,
    recipe: Recipe,
    fp8_all_gather: bool,
    strict: bool,
    replicas: Any,
) -> tuple[Model, Any]:
    """Do what `attach` does to a model whose parameters are the sharded ones; average over `replicas`, if any."""
    units, notes = units_of(model, "attach"), []
    if on_wire(recipe) and not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        recipe = without_wire(recipe)
        notes.append(
            f"FSDP2 of torch {torch.__version__} has no set_custom_reduce_scatter; gradients are reduced without FP8"
        )
    if strict and on_wire(recipe) and is_hybrid(model):
        notes.append(
            "gradients are averaged over the replicas of a 2-D mesh without FP8; use fully_shard_fp8"
        )
    low, reason = _to_store(model, optimizer, recipe, units)
    if reason:
        notes.append(f"weights stay as they are and are their own masters: {reason}")
    parts: list[Any] = [p for p in model.parameters() if is_sharded(p)]
    with _bare_classes(units.values()) as put_back:
        device = device_of_kind(parts[0].device_mesh.device_type)
        decisions = decide(model, optimizer, without_wire(recipe), strict, device, notes)
    check_decisions(decisions, recipe, fp8_all_gather)

    def store(session: Session) -> None:
        _store_weights(model, low, session)

    session = carry_out(model, optimizer, decisions, store, stacklevel=4)
    put_back()
    if on_wire(recipe):
        register_fp8_reduce_scatter(model, replicas)
    if fp8_all_gather:
        register_fp8_all_gather(model)
    session.recipe = replace(decisions.recipe, gradients=recipe.gradients)
    session.lasting = (
        "this model was sharded by FSDP2 before it was initialized, which cannot be undone. Load the whole float32 "
        "weights of fp8stack.checkpoint.master_state_dict(model, optimizer) into a model made anew."
    )
    _describe(session.report, model, decisions, recipe, kept=bool(reason))
    say(session.report)
    return model, session.returned


def _describe(
    report: Report, model: nn.Module, decisions: Decisions, recipe: Recipe, kept: bool
) -> None:
    """Fill in what a report says of sharded weights and gradients."""
    names = [n for n, p in model.named_parameters() if p in decisions.quantized]
    report.device += f", FSDP2 on {dist.get_world_size()} ranks"
    if on_wire(recipe):
        report.gradients = "fp8 e4m3 block 128 on the wire, shards as their weights"
    if kept:
        report.kept = dict.fromkeys(names, "its own master: see fallbacks")
    elif recipe.master != "keep":
        report.stored = names


def on_wire(recipe: Recipe) -> bool:
    """Return whether gradients are reduced in FP8."""
    return recipe.gradients == "fp8"


def without_wire(recipe: Recipe) -> Recipe:
    """Return the recipe without FP8 gradients: those of sharded parameters are FP8 on the wire only."""
    return replace(recipe, gradients="keep")


def device_of_kind(kind: str) -> torch.device:
    """Return the device that this rank gathers weights on."""
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def verify(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Report:
    """Check on the live objects that what was asked for is what runs; return the report of the call.

    Raises:
        ModelError: with all that is wrong: layers that are FP8 no more, gradients that are not reduced in FP8, states
            that are not quantized or not sharded like their parameters, an optimizer of other parameters.
    """
    verify_sharded(model, None if optimizer is None else [optimizer])
    return session_of(model).report


def verify_sharded(model: nn.Module, stepped: Iterable[Any] | None = None) -> Verification:
    """Do what `verify` does, and return what was found; `stepped` are the optimizers that the caller steps."""
    units = units_of(model, "verify")
    for unit in units.values():
        unit.reshard()  # so that the model's parameters are the sharded ones
    reducers = {name or "the root": reduces_in_fp8(unit) for name, unit in units.items()}
    reducers = reducers if on_wire(session_of(model).recipe) else {}
    return verify_initialized(model, stepped, "FSDP2", reducers)


# --- classes and dtypes


@contextmanager
def _bare_classes(units: Iterable[Any]) -> Iterator[Any]:
    """Take FSDP2's classes off its modules for as long as these are looked at.

    Yields a function for later, which puts them over modules that have got another class since.
    """
    covers = {unit: type(unit) for unit in units}

    def put_back() -> None:
        for unit, cover in covers.items():
            if not isinstance(unit, cover.__bases__[0]):
                bases = (*cover.__bases__[:-1], type(unit))
                own = {"__deepcopy__": cover.__deepcopy__}
                unit.__class__ = type(f"FSDP{type(unit).__name__}", bases, own)

    try:
        for unit, cover in covers.items():
            unit.__class__ = cover.__bases__[-1]
        yield put_back
    finally:
        for unit, cover in covers.items():
            unit.__class__ = cover


def _to_store(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, recipe: Recipe, units: dict[str, Any]
) -> tuple[list[nn.Parameter], str]:
    """Return the parameters that are to become bfloat16, or why none can."""
    if recipe.master == "keep" or not isinstance(optimizer, torch.optim.Optimizer):
        return [], ""
    owned = {p for group in optimizer.param_groups for p in group["params"]}
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad and is_sharded(p)}
    low = [p for p in trainable.values() if p.dtype is not torch.bfloat16]
    if not low:
        return [], ""
    for name, p in trainable.items():
        if p not in owned:
            return [], f"{name} is not in the optimizer, and FSDP2 wants one dtype for a module"
        if weakref.getweakrefs(p):
            return [], f"{name} has weak references, which keep torch from exchanging what is in it"
    for name, unit in units.items():
        dtype, changeable = compute_dtype_of(unit)
        which = name or "the root"
        if not changeable:
            return [], f"{which} has run, when FSDP2 takes note of dtypes; attach before that"
        if dtype is None:
            return [], (
                f"{which} has no compute dtype of its own; shard it with "
                "MixedPrecisionPolicy(param_dtype=...), torch.bfloat16 or torch.float32"
            )
    return low, ""


def _store_weights(model: nn.Module, low: list[nn.Parameter], session: Session) -> None:
    """Make parameters bfloat16, their other bits the optimizer's, and all states, of which DCP loads what is there."""
    optimizer = session.returned
    if not isinstance(optimizer, BlockwiseOptimizer):
        return
    masters = {p: optimizer.master_weight(p) for p in low}
    if masters:
        model._apply(lambda t: t.bfloat16() if t in masters else t)  # as model.bfloat16() does
    for p in low:
        optimizer.set_master(p, masters.pop(p))
    optimizer.ensure_states()
