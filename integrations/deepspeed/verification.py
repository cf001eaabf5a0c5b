"""Is what was asked for what runs? A look at the engine itself, after everybody has had a hand in it.

FP8 that is silently off looks like FP8 that does not help, so every part is looked up where it acts: classes of layers
in the engine's module, the stage and optimizer of the engine, the methods that reduce gradients, dtypes of states.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fp8stack.errors import ModelError
from fp8stack.levels import Recipe
from fp8stack.nn import GEMM_LAYERS
from fp8stack.optim import BlockwiseOptimizer
from fp8stack.report import Report

from .reduction import Fp8Reduction
from .section import Section, stage_of


@dataclass
class Applied:
    """What was done for one engine: `engine.fp8stack`."""

    section: Section
    recipe: Recipe  # as ZeRO can have it
    report: Report
    left_out: list[str]  # trainable parameters that were not in the optimizer
    reduction: Fp8Reduction | None = None


@dataclass(frozen=True)
class Verification:
    """What `verify` found."""

    level: str
    stage: int
    layers: int  # Linear layers that multiply in FP8 (in bf16 where FP8 is missing)
    reduction: tuple[str, ...] = ()  # the methods that reduce gradients in FP8
    reduced: int = 0  # how often they have, on this rank
    optimizer: str = ""
    state_bytes: int = 0  # of optimizer states on this rank; 0 before the first step
    parameters: int = 0  # trainable ones that this rank steps, ZeRO's padding included

    def __str__(self) -> str:
        states = f"{self.state_bytes / self.parameters:.2f} B" if self.state_bytes else "no"
        return (
            f"fp8stack {self.level}: ZeRO-{self.stage}, {self.layers} converted layers, optimizer {self.optimizer}, "
            f"{states} states a parameter, gradients reduced "
            + (f"in FP8 ({self.reduced} times)" if self.reduction else "by DeepSpeed")
        )


def verify(engine: Any) -> Verification:
    """Return what runs in a DeepSpeed engine.

    Raises:
        ModelError: if that is not what the config's section "fp8stack" asks for; the message lists every difference.
    """
    applied = getattr(engine, "fp8stack", None)
    if not isinstance(applied, Applied):
        config = getattr(engine, "config", None) or {}
        asked = isinstance(config, dict) and "fp8stack" in config
        raise ModelError(
            ('the config has a section "fp8stack", and nobody has read it: ' if asked else "")
            + "this engine was not made by fp8stack. Make it with fp8stack.integrations.deepspeed.initialize, or call "
            "fp8stack.integrations.deepspeed.install() before deepspeed.initialize, Accelerate or Trainer."
        )
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    found = Verification(
        level=applied.recipe.level,
        stage=engine.zero_optimization_stage(),
        layers=sum(isinstance(module, GEMM_LAYERS) for module in engine.module.modules()),
        reduction=tuple(applied.reduction.names) if applied.reduction else (),
        reduced=applied.reduction.calls if applied.reduction else 0,
        optimizer=type(inner).__name__,
        state_bytes=_state_bytes(inner),
        parameters=sum(p.numel() for p in getattr(inner, "state", {})),
    )
    problems = _problems(engine, applied, inner, found)
    if problems:
        raise ModelError(
            f"fp8stack {found.level} was asked for, and this engine is otherwise: {'; '.join(problems)}."
        )
    return found


def _problems(engine: Any, applied: Applied, inner: Any, found: Verification) -> list[str]:
    problems = []
    if found.layers != len(applied.report.converted):
        problems.append(
            f"{len(applied.report.converted)} layers were converted, and {found.layers} are there: something replaced "
            "modules since"
        )
    stage = stage_of(engine.config)
    if found.stage != stage:
        problems.append(f"the config has ZeRO stage {stage}, the engine {found.stage}")
    reduction = applied.reduction
    if reduction is not None and not reduction.attached():
        problems.append("somebody replaced the methods that reduce gradients in FP8")
    elif reduction is not None and not reduction.calls:
        passed = engine.micro_steps
        if passed >= engine.gradient_accumulation_steps():
            problems.append(f"{passed} batches have passed, and no gradient was reduced in FP8")
    if applied.recipe.states == "keep":
        return problems
    if not isinstance(inner, BlockwiseOptimizer):
        problems.append(
            f"the optimizer is {type(inner).__name__}, not fp8stack's: something replaced it (Trainer and Accelerate "
            "do under DeepSpeed; pass optimizer_cls_and_kwargs, or describe it in the JSON)"
        )
        return problems
    missing = not_stepped(engine.module, _groups_of(engine))
    missing = [name for name in missing if name not in applied.left_out]
    if missing:
        problems.append(
            f"{len(missing)} trainable parameters are not stepped, such as {missing[0]}"
        )
    for parameter, entry in inner.state.items():
        coded = any(key.endswith("_code") for key in entry)
        plain = any(key in inner.moments for key in entry)
        if (coded or plain) and inner.quantizes(parameter) != coded:
            problems.append(f"states of {parameter.numel()} elements are not in {inner.states}")
    return problems


def not_stepped(model: nn.Module, groups: Iterable[Iterable[Any]]) -> list[str]:
    """Return the names of trainable parameters that are in none of the groups."""
    owned = {p for group in groups for p in group}
    return [n for n, p in model.named_parameters() if p.requires_grad and p not in owned]


def _groups_of(engine: Any) -> list[list[Any]]:
    """Return the model's parameters that the engine's optimizer steps, by group."""
    wrapper = engine.optimizer
    for name in ("fp16_groups", "bit16_groups", "bf16_groups"):
        if hasattr(wrapper, name):
            groups: list[list[Any]] = getattr(wrapper, name)
            return groups
    return [group["params"] for group in wrapper.param_groups]


def _state_bytes(inner: Any) -> int:
    states = getattr(inner, "state", {}).values()
    return sum(t.nbytes for entry in states for t in entry.values() if isinstance(t, torch.Tensor))
