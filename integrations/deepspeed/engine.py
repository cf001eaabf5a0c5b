"""Make DeepSpeed's engine for a model at a level: check, convert, hand over, attach, verify.

Everything that can be known to be wrong is found before the model is touched. If DeepSpeed then refuses, the model and
the optimizer are restored.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
from torch import nn

import fp8stack
from fp8stack.api import carry_out, decide
from fp8stack.conflicts import DEEPSPEED, broken_rules, refuse, wrappers_in
from fp8stack.conversion import Session
from fp8stack.errors import ConfigError, ModelError
from fp8stack.integrations.incompatibilities import TrainingRun, check, raise_or_warn
from fp8stack.integrations.verification import Verification, compare
from fp8stack.levels import Recipe
from fp8stack.optim import BlockwiseOptimizer
from fp8stack.report import Report, say

from . import optimizer as optimizers
from . import section as configs
from .reduction import Fp8Reduction

Started = tuple[Any, Any, Any, Any]  # engine, optimizer, loader, scheduler


def initialize(*args: Any, opt_level: str | None = None, **kwargs: Any) -> Started:
    """`deepspeed.initialize` at a level: takes its arguments and returns its (engine, optimizer, loader, scheduler).

    The level and its options are the config's section "fp8stack"; `opt_level` may stand for it, and is "O2" where both
    are missing. At O2 the optimizer may be torch's Adam, AdamW, SGD or (in stage 0) Muon, one of `fp8stack.optim`, a
    function that makes one, or the JSON's, whose type may also be "FP8AdamW". The caller's config is not changed.

    Raises:
        ConfigError: for a section with unknown keys or values, a DeepSpeed that is too old, or a combination that is
            known not to work (docs/incompatibilities.md; the section's "allow" lists those to be warned of only).
        ModelError: for a model or optimizer that the level cannot be applied to. Nothing has been changed then.
        UnsupportedDeviceError: for a fallback under `"strict": true`.
    """
    return _run(_original(), args, kwargs, opt_level, "O2")


class Handle(ExitStack):
    """What `install` returned: a context manager that takes it back at its end, as `remove()` does."""

    remove = ExitStack.close


def install() -> Handle:
    """Let `deepspeed.initialize` apply a config's section "fp8stack" (or its optimizer "FP8AdamW") from now on.

    Without either it does what it did. Returns a handle whose `remove()` takes this back; it is also a context manager.
    Installing twice is installing once, and the first handle removes it.
    """
    import deepspeed

    original, handle = _original(), Handle()
    if original is deepspeed.initialize:

        @functools.wraps(original)
        def initialize(*args: Any, **kwargs: Any) -> Any:
            return _run(original, args, kwargs, None, None)

        initialize.fp8stack_original = original  # type: ignore[attr-defined]
        deepspeed.initialize = initialize
        handle.callback(setattr, deepspeed, "initialize", original)
    return handle


def import_deepspeed() -> Any:
    """Return the module DeepSpeed; raise ConfigError if it cannot be imported."""
    try:
        return import_module("deepspeed")
    except ImportError as error:
        raise ConfigError(
            f"DeepSpeed cannot be imported ({error}). Install it: pip install 'fp8stack[deepspeed]'."
        ) from error


def _original() -> Callable[..., Any]:
    """Return DeepSpeed's own `initialize`; raise ConfigError if there is none, or one that is too old."""
    deepspeed = import_deepspeed()
    if tuple(int(part) for part in deepspeed.__version__.split(".")[:3]) < (0, 18, 3):
        raise ConfigError(
            f"DeepSpeed {deepspeed.__version__} is older than 0.18.3, the oldest that fp8stack works with. Update it."
        )
    return getattr(deepspeed.initialize, "fp8stack_original", deepspeed.initialize)  # type: ignore[no-any-return]


def _run(
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    opt_level: str | None,
    default: str | None,
) -> Started:
    """Start an engine with `original`'s arguments; as `original` does where neither section nor level asks for more."""
    arguments = dict(inspect.signature(original).bind(*args, **kwargs).arguments)
    config, section = configs.find_config(arguments), None
    if config is not None:
        level = opt_level if "fp8stack" in config else opt_level or default
        section = configs.find_section(config, level)
    if config is None or (section is None and optimizers.type_of(config) not in optimizers.OURS):
        return original(**arguments)  # type: ignore[no-any-return]  # which says so where a config is missing
    model: Any = arguments.get("model")
    refuse(broken_rules(wrappers_in(model), [DEEPSPEED]))
    given = arguments.get("optimizer")
    if section is not None:
        section = configs.fit_to_zero(optimizers.with_formats_of(given, section), config)
        raise_or_warn(check(TrainingRun(config, model, given, section.recipe), section.allow))
    recipe = None if section is None else section.recipe
    optimizer = _optimizer_of(arguments, config, recipe)
    optimizers.check_optimizer(optimizer, config, recipe)
    session = None if section is None else _convert(model, optimizer, section)
    if session is not None and session.returned is not None:
        optimizer = session.returned
    left_out: list[str] = []
    groups: list[tuple[dict[str, Any], dict[str, Any]]] = []  # and what they were
    if isinstance(optimizer, BlockwiseOptimizer):
        left_out = not_stepped(model, (g["params"] for g in optimizer.param_groups))
        groups = [(group, dict(group)) for group in optimizer.param_groups]
        configs.allow_ours(config)
        optimizer.portable = section is not None and section.checkpoint_format == "portable"
        if configs.stage_of(config):
            # a scheduler that was made already; DeepSpeed also takes functions that make one
            scheduled = hasattr(arguments.get("lr_scheduler"), "step")
            optimizers.prepare_groups(optimizer, model, scheduled)
    try:
        started: Started = original(
            **configs.with_config({**arguments, "optimizer": optimizer}, config)
        )
    except BaseException:
        for group, before in groups:
            group.clear()
            group.update(before)
        if groups:
            optimizer.param_groups[:] = [group for group, _ in groups]
        if session is not None:
            fp8stack.restore(model)
        raise
    if isinstance(optimizer, BlockwiseOptimizer):
        _take_back_first_step(started[0].optimizer, optimizer)
        for number, partition in optimizers.partitions_of(started[0].optimizer):
            optimizer.note_formats(optimizer.param_groups[number], [partition])
    if recipe is not None and session is not None:
        _attach(started[0], recipe, session, left_out)
    return started


def _optimizer_of(arguments: dict[str, Any], config: dict[str, Any], recipe: Recipe | None) -> Any:
    """Return the optimizer to convert; what was given where DeepSpeed can do with that."""
    given = arguments.get("optimizer")
    kind, changes = optimizers.type_of(config), recipe is not None and recipe.states != "keep"
    if isinstance(given, torch.optim.Optimizer) or not (changes or kind in optimizers.OURS):
        return given
    parameters = arguments.get("model_parameters")
    if parameters is None:
        parameters = (p for p in arguments["model"].parameters() if p.requires_grad)
    arguments["model_parameters"] = parameters = list(parameters)  # a generator ends
    if given is not None:
        return given(parameters)
    return optimizers.build(config, parameters, recipe) if kind else None


def _convert(model: Any, optimizer: Any, section: configs.Section) -> Session:
    """Convert layers and optimizer; gradients and weights themselves are ZeRO's."""
    from deepspeed.accelerator import get_accelerator

    device = torch.device(get_accelerator().device_name(int(os.environ.get("LOCAL_RANK", "0"))))
    ours = replace(section.recipe, gradients="keep")
    if ours.states == "keep":
        ours, optimizer = replace(ours, level="O0"), None
    elif isinstance(optimizer, BlockwiseOptimizer):
        # float32 partitions are their own masters, whatever it says
        ours = replace(ours, master=optimizer.master)
    return carry_out(model, optimizer, decide(model, optimizer, ours, section.strict, device))


def _take_back_first_step(wrapper: Any, inner: BlockwiseOptimizer) -> None:
    """Undo the step that DeepSpeed's 16-bit optimizer of stage 0 takes when it is made, which decays weights."""
    if not hasattr(wrapper, "fp32_groups"):
        return
    inner.state.clear()
    for ours, masters in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True):
        for weight, copy_of_it in zip(ours, masters, strict=True):
            copy_of_it.data.copy_(weight.data)


def _attach(engine: Any, recipe: Recipe, session: Session, left_out: list[str]) -> None:
    """Replace the reduction of gradients, show the card and make sure that it is true."""
    report, stage = session.report, engine.zero_optimization_stage()
    applied = engine.fp8stack = Applied(recipe, report, left_out)
    report.level, report.bytes_per_parameter = recipe.level, 0.0
    report.gradients = "DeepSpeed's"
    if recipe.gradients == "fp8":
        applied.reduction = Fp8Reduction(engine)
        report.gradients += ", fp8 e4m3 block 128 on the wire"
    # the engine's from here on: `restore` has only layers to undo, and a model keeps no partitions alive
    session.source = session.returned = None
    if recipe.states != "keep":
        report.states += f" in ZeRO-{stage} partitions" if stage else ""
        theirs = recipe.master in ("keep", "fp32")
        report.master = "DeepSpeed's" if theirs else f"{report.master} of ZeRO's bfloat16"
    say(report)
    verify(engine)


# --- verification


@dataclass
class Applied:
    """What was done for one engine: `engine.fp8stack`."""

    recipe: Recipe  # as ZeRO can have it
    report: Report
    left_out: list[str]  # trainable parameters that were not in the optimizer
    reduction: Fp8Reduction | None = None


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
    recipe, reduction, stage = applied.recipe, applied.reduction, engine.zero_optimization_stage()
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    differences, passed = [], engine.micro_steps
    calls = reduction.calls if reduction else None
    if calls == 0 and passed >= engine.gradient_accumulation_steps():
        differences.append(f"{passed} batches have passed, and no gradient was reduced in FP8")
    if recipe.states != "keep" and not isinstance(inner, BlockwiseOptimizer):
        differences.append(
            f"the optimizer is {type(inner).__name__}, not fp8stack's: something replaced it (Trainer and Accelerate "
            "do under DeepSpeed; pass optimizer_cls_and_kwargs, or describe it in the JSON)"
        )
    elif recipe.states != "keep":
        missing = not_stepped(engine.module, _groups_of(engine.optimizer))
        missing = [name for name in missing if name not in applied.left_out]
        differences += [f"{name} is trainable, and not stepped" for name in missing]
    return compare(
        engine.module,
        applied.report,
        inner,
        f"DeepSpeed ZeRO-{stage}",
        reduction.attached() if reduction else {},
        differences,
        stage=stage,
        reduced=calls or 0,
    )


def not_stepped(model: nn.Module, groups: Iterable[Iterable[Any]]) -> list[str]:
    """Return the names of trainable parameters that are in none of the groups."""
    owned = {p for group in groups for p in group}
    return [n for n, p in model.named_parameters() if p.requires_grad and p not in owned]


def _groups_of(wrapper: Any) -> list[list[Any]]:
    """Return the model's parameters that DeepSpeed's optimizer steps, by group."""
    for name in ("fp16_groups", "bit16_groups", "bf16_groups"):
        if hasattr(wrapper, name):
            return list(getattr(wrapper, name))
    return [group["params"] for group in wrapper.param_groups]
