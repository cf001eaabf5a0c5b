"""A level of fp8stack on a model that torch's `fully_shard` (FSDP2) has sharded.

    model, optimizer = fp8stack.integrations.fsdp.attach(model, optimizer, "O2")  # after fully_shard

O0 changes the classes of Linear layers, as on one device; FSDP2's own classes stay over them. O1 reduces gradients with
E4M3 blocks on the wire; what a rank keeps, its part of the sum, is in the parameter's dtype. O2 makes states DTensors
with the parameter's mesh and placements, and makes all of them at once, because torch.distributed.checkpoint loads only
into entries that exist.

FSDP2 wants one dtype for all trainable parameters of a module. So at O2 every one of them becomes bfloat16, vectors
too, and the optimizer keeps the bits below: 8 of a matrix, a float32 copy of a vector. FSDP2 gathers them in the
param_dtype of the mixed-precision policy, so that activations keep their dtype. Without a param_dtype the parameters
stay as they are, because bfloat16 weights would change the dtype that the model computes in.

Limits: `restore` cannot undo it. FSDP2 only: the flat vectors of FSDP1 have no rows to make blocks of.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from fp8stack.api import Model, carry_out, decide, session_of
from fp8stack.capability import indexed
from fp8stack.comm import fsdp as comm
from fp8stack.conflicts import FSDP2, refuse_conflicts
from fp8stack.conversion import Session
from fp8stack.errors import ConfigError, ModelError
from fp8stack.integrations.verification import Verification, verify_initialized
from fp8stack.levels import Recipe, recipe_for
from fp8stack.optim import BlockwiseOptimizer
from fp8stack.optim.sharded import check_placements
from fp8stack.report import say
from fp8stack.tensor_kinds import is_sharded

__all__ = ["attach", "verify"]


def attach(
    model: Model,
    optimizer: torch.optim.Optimizer | None = None,
    opt_level: str = "O2",
    *,
    strict: bool = False,
    preset: str | None = None,
    replicate_group: Any = None,
    **overrides: Any,
) -> tuple[Model, Any]:
    """Bring a model that `fully_shard` has sharded to a level; return it and the optimizer to step.

    Call it before the first forward: FSDP2 then takes note of dtypes.

    Args:
        model: the root that was sharded, its parameters materialized.
        optimizer: built from the sharded parameters. May be None at O0, and stays the same at O0 and O1. O2 returns
            another one that shares `param_groups`; a scheduler built before drives it too.
        opt_level, preset: as in `fp8stack.initialize`.
        strict: raise where a part of the level would fall back, instead of warning with the reason.
        replicate_group: for FP8 over the replicas of HSDP too, as in `fp8stack.comm.register_fp8_reduce_scatter`.
        overrides: single fields of `fp8stack.Recipe`.

    Raises:
        ConfigError: an unknown level, preset, option or value, or one that sharded parameters cannot have.
        ModelError: a model or optimizer that the level cannot be applied to. Nothing has been changed then.
        UnsupportedDeviceError: a fallback under `strict`, or a device that the level cannot run on at all.
    """
    recipe = recipe_for(opt_level, preset, **overrides)
    given = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
    refuse_conflicts(recipe, FSDP2, optimizer=given, model=model)
    if recipe.states != "keep":
        recipe = replace(recipe, optimizer_backend="fp8stack")
    units = comm.units_of(model, "attach", (), " On one device there is fp8stack.initialize.")
    recipe, notes = _reduction(model, recipe, replicate_group, strict)
    in_fp8 = recipe.gradients == "fp8"
    low, reason = _to_store(model, optimizer, recipe, units)
    if reason:
        notes.append(f"weights stay as they are and are their own masters: {reason}")
    parts: list[Any] = [p for p in model.parameters() if is_sharded(p)]
    if not parts:
        raise ModelError(
            "the modules that fully_shard was called on have no parameters. Call it on those that have, or on all of "
            "the model."
        )
    with _bare_classes(units.values()) as put_back:
        kind = parts[0].device_mesh.device_type
        own = replace(recipe, gradients="keep")  # those of shards are FP8 on the wire only
        decisions = decide(model, optimizer, own, strict, indexed(torch.device(kind)), notes)
    for p in decisions.quantized if recipe.states != "keep" else ():
        check_placements(p, *decisions.formats.get(p, (recipe.states, recipe.master)))
    session = carry_out(model, optimizer, decisions, partial(_store_weights, model, low))
    put_back()
    if in_fp8:
        comm.register_fp8_reduce_scatter(model, replicate_group)
    session.recipe, report = replace(decisions.recipe, gradients=recipe.gradients), session.report
    session.lasting = (
        "this model was sharded by FSDP2 before it was initialized, which cannot be undone. Load the whole float32 "
        "weights of fp8stack.checkpoint.master_state_dict(model, optimizer) into a model made anew."
    )
    report.device += f", FSDP2 on {dist.get_world_size()} ranks"
    if in_fp8:
        report.gradients = "fp8 e4m3 block 128 on the wire, shards as their weights"
    names = [n for n, p in model.named_parameters() if p in decisions.quantized]
    if reason:
        report.kept = dict.fromkeys(names, "its own master: see fallbacks")
    elif recipe.master != "keep":
        report.stored = names
    say(report)
    return model, session.returned


def verify(
    model: nn.Module, stepped: torch.optim.Optimizer | Iterable[Any] | None = None
) -> Verification:
    """Check on the live objects that what was asked for is what runs; return what runs.

    Args:
        model: what `attach` returned.
        stepped: the optimizer that is stepped, or all of them. None: it is not checked that the one returned is among
            them.

    Raises:
        ModelError: with all that is wrong: layers that are FP8 no more, gradients that are not reduced in FP8, states
            that are not quantized or not sharded like their parameters, an optimizer of other parameters.
    """
    units = comm.units_of(model, "verify")
    reducers = {name or "the root": comm.reduces_in_fp8(unit) for name, unit in units.items()}
    in_fp8 = session_of(model).recipe.gradients == "fp8"
    if isinstance(stepped, torch.optim.Optimizer):
        stepped = [stepped]
    return verify_initialized(model, stepped, "FSDP2", reducers if in_fp8 else {})


# --- checks and changes


def _reduction(
    model: nn.Module, recipe: Recipe, replicate_group: Any, strict: bool
) -> tuple[Recipe, list[str]]:
    """Return the recipe with the gradients that this FSDP2 can reduce, and what falls back."""
    notes: list[str] = []
    if recipe.gradients == "fp8" and not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        recipe = replace(recipe, gradients="keep")
        notes.append(
            f"FSDP2 of torch {torch.__version__} has no set_custom_reduce_scatter; gradients are reduced without FP8"
        )
    in_fp8 = recipe.gradients == "fp8"
    if replicate_group is not None:
        if not in_fp8:  # FSDP2 knows nothing of these replicas
            raise ConfigError(
                "replicate_group is averaged over by the FP8 reduce-scatter, which O0 and torch before 2.9 do not "
                "have. Shard over the 2-D mesh instead."
            )
        comm.check_replicas(model, replicate_group)
    elif strict and in_fp8 and comm.is_hybrid(model):
        notes.append(
            "gradients are averaged over the replicas of a 2-D mesh without FP8; "
            'shard over mesh["shard"] and pass replicate_group'
        )
    return recipe, notes


@contextmanager
def _bare_classes(units: Iterable[Any]) -> Iterator[Callable[[], None]]:
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
        dtype, changeable = comm.compute_dtype_of(unit)
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
