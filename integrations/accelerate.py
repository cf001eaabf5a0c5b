"""Accelerate: bring the model that an Accelerator trains to a level, on one process or under DDP, FSDP2 or DeepSpeed.

    from fp8stack.integrations.accelerate import prepare

    accelerator = Accelerator(mixed_precision="bf16")
    model, optimizer, loader = prepare(accelerator, model, optimizer, loader, opt_level="O2")

`prepare` calls `accelerator.prepare` and applies the level at the right moment. On one process and under DDP it does so
before (layers, gradients and states are per process), and registers DDP's FP8 hook after. Under FSDP2 it does so after
(states are DTensors of the sharded parameters). Under ZeRO it puts the level into DeepSpeed's configuration. `attach`
only registers that hook and verifies the result, for a model that was initialized by hand. Accelerate is neither
patched nor subclassed. Its own FP8 has to be off: two owners of the same layers undo each other.

Limits: FSDP1, Megatron-LM and XLA are refused. DDP holds gradients in full precision; only the wire is FP8.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

import fp8stack
from fp8stack.api import session_of
from fp8stack.comm import register_fp8_hook
from fp8stack.conflicts import ACCELERATE, check_option
from fp8stack.errors import ConfigError, ModelError
from fp8stack.integrations import deepspeed, fsdp
from fp8stack.integrations.deepspeed.section import find_section
from fp8stack.integrations.incompatibilities import TrainingRun, check, raise_or_warn
from fp8stack.integrations.incompatibilities.rows import comes_from
from fp8stack.integrations.verification import Verification, verify_initialized
from fp8stack.levels import recipe_for
from fp8stack.optim import BlockwiseOptimizer


def prepare(
    accelerator: Any,
    model: nn.Module,
    optimizer: Any,
    *others: Any,
    opt_level: str | None = None,
    **options: Any,
) -> tuple[Any, ...]:
    """Bring a model and its optimizer to a level and prepare them; return what `accelerator.prepare` returns.

    Args:
        accelerator: an `accelerate.Accelerator` without FP8 of its own.
        model, optimizer: bare, the optimizer built from the model's parameters. The model is moved to the accelerator's
            device first, as `accelerator.prepare` would. Under DeepSpeed the optimizer may be a `DummyOptim`.
        others: loaders and schedulers; a scheduler may have been made from the optimizer before.
        opt_level, options: as in `fp8stack.initialize`; "O2" if not given. Under DeepSpeed they are the section
            "fp8stack" of its configuration, and may be left out where it has one.

    Raises:
        ConfigError: an unknown level, option or value, FP8 of Accelerate's own, or a combination that is known to fail.
        ModelError: a model or optimizer that the level cannot be applied to. Nothing has been changed then, except that
            FSDP2 has sharded the model.
        UnsupportedDeviceError: a fallback under `strict`.
    """
    if getattr(model, "_is_accelerate_prepared", False):
        raise ModelError(
            "this model was prepared already. Pass the bare model to prepare, once; for one that was initialized "
            "before accelerator.prepare, call attach(accelerator, model)."
        )
    given, kind = (model, optimizer, *others), kind_of(accelerator)
    if kind == "DEEPSPEED":
        with sectioned(accelerator, optimizer, opt_level, options):
            return tuple(accelerator.prepare(*given))
    level = check_level(opt_level, options)
    if kind == "FSDP":
        prepared = accelerator.prepare(*given)
        initialize_sharded(prepared[0], prepared[1], level, options)
        return tuple(prepared)
    if accelerator.device_placement and not hasattr(model, "hf_device_map"):
        model.to(accelerator.device)  # the device decides whether FP8 can be multiplied
    _, ours = fp8stack.initialize(model, optimizer, level, **options)
    try:
        prepared = accelerator.prepare(model, ours, *others)
        attach(accelerator, prepared[0])
    except BaseException:
        fp8stack.restore(model)
        raise
    return tuple(prepared)


def attach(accelerator: Any, model: Any) -> Verification:
    """Finish a model that was initialized before `accelerator.prepare`; return what it trains with.

    Under DDP it registers the hook that averages gradients in FP8 (from O1 on); call it before the first backward. A
    DeepSpeed engine or an FSDP2 model gets its level from `prepare` and is only verified, as is a model on one process.

    Args:
        accelerator: an `accelerate.Accelerator`.
        model: what its `prepare` returned. Move a model to `accelerator.device` before `fp8stack.initialize`.

    Raises:
        ConfigError: for FP8 of Accelerate's own, or a way to share the work that is not supported.
        ModelError: if the model was not prepared or not initialized, has a communication hook already, or is no longer
            what was initialized.
    """
    kind = kind_of(accelerator)
    if not getattr(model, "_is_accelerate_prepared", False):
        raise ModelError(
            f"this {type(model).__name__} was not prepared. Call attach(accelerator, model) with the model that "
            "accelerator.prepare returned."
        )
    if kind == "DEEPSPEED":
        return deepspeed.verify(model)
    wrapped = getattr(model, "_orig_mod", model)  # compiled
    parallel = isinstance(wrapped, DistributedDataParallel)
    bare: Any = wrapped.module if parallel else wrapped
    bare = getattr(bare, "_orig_mod", bare)
    session, sharded = session_of(bare), isinstance(bare, FSDPModule)
    recipe = session.recipe
    if sharded and recipe.level != "O0" and not session.lasting:
        raise ModelError(
            f"this model was brought to {recipe.level} before FSDP2 replaced its parameters. Leave "
            "fp8stack.initialize out, and accelerator.prepare to fp8stack.integrations.accelerate.prepare."
        )
    if sharded:
        return fsdp.verify(bare)
    if not parallel:
        return verify_initialized(bare)
    reduces = {"DistributedDataParallel": True} if recipe.gradients == "fp8" else {}
    found = verify_initialized(bare, None, "DistributedDataParallel", reduces)
    try:
        if reduces:
            register_fp8_hook(wrapped)
    except RuntimeError as error:
        raise ModelError(
            f"gradients of this model cannot be reduced in FP8: {error}. DistributedDataParallel takes one "
            "communication hook, before its first backward: call attach once, and leave comm_hook out of "
            "DistributedDataParallelKwargs."
        ) from error
    return found


def kind_of(accelerator: Any) -> str:
    """Return Accelerate's name for how processes share the work, such as "MULTI_GPU" or "FSDP" (FSDP2).

    Raises:
        ConfigError: for a way that is not supported, FP8 of Accelerate's own, or an object that is no Accelerator.
    """
    if not comes_from(accelerator, "accelerate"):
        raise ConfigError(
            f"accelerator must be an accelerate.Accelerator, got {type(accelerator).__name__}. Accelerate is installed "
            "by pip install 'fp8stack[accelerate]'."
        )
    handlers = {n: f"{n.lower()}_recipe_handler" for n in ("TE", "AO", "MSAMP")}
    backend = next((n for n, h in handlers.items() if getattr(accelerator, h, None)), "")
    if backend or accelerator.mixed_precision == "fp8":
        raise ConfigError(
            f'Accelerator(mixed_precision="fp8") has {backend or "a backend"} convert the same layers, and FP8 cannot '
            'have two owners. Use mixed_precision="bf16" with fp8stack.'
        )
    kind = str(accelerator.distributed_type.value)
    if not (kind == "FSDP" and getattr(accelerator, "is_fsdp2", False)):
        check_option("distributed_type", kind, ACCELERATE)
    return kind


def initialize_sharded(
    model: nn.Module, optimizer: Any, opt_level: str, options: Mapping[str, Any]
) -> None:
    """Bring a model that FSDP2 has sharded to a level; Accelerate's wrapper of the optimizer gets the new one."""
    _, ours = fsdp.attach(model, optimizer.optimizer, opt_level, **options)
    optimizer.__setstate__({"optimizer": ours})  # also renews the methods that the wrapper keeps


def check_level(opt_level: str | None, options: Mapping[str, Any]) -> str:
    """Return the level, "O2" if none is given; raise ConfigError for an unknown level, option or value."""
    level = "O2" if opt_level is None else opt_level
    recipe_for(level, **{name: value for name, value in options.items() if name != "strict"})
    return level


@contextmanager
def sectioned(
    accelerator: Any, optimizer: Any, opt_level: str | None, options: Mapping[str, Any]
) -> Iterator[None]:
    """Let DeepSpeed engines that are made in this context read a section "fp8stack" with these options.

    Raises:
        ConfigError: for an unknown option or value, options both here and in the configuration, or an optimizer that
            Accelerate would replace by its own.
    """
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    defaults = {"strict": False, "preset": None}
    options = {n: v for n, v in options.items() if n not in defaults or v is not defaults[n]}
    if "fp8stack" in config and options:
        raise ConfigError(
            f'options {sorted(options)} were passed, and the DeepSpeed config has a section "fp8stack": '
            f"{config['fp8stack']!r}. Give them in one place."
        )
    asked = config.get("fp8stack", options)
    section = find_section({"fp8stack": asked}, opt_level)
    # The engine is not told of `opt_level`, so the section has to name it.
    own: dict[str, Any] = {"fp8stack": {"opt_level": opt_level or "O2", **asked}}
    recipe = None if section is None else section.recipe
    ours = isinstance(optimizer, BlockwiseOptimizer)
    if recipe is not None and (ours or recipe.states != "keep"):
        # otherwise Accelerate takes its own optimizer under offload, before DeepSpeed is asked
        own["zero_force_ds_cpu_optimizer"] = config.get("zero_force_ds_cpu_optimizer", False)
    # the DeepSpeed adapter checks all other rows when the engine is made
    found = check(TrainingRun(config, optimizer=optimizer, recipe=recipe))
    raise_or_warn([f for f in found if f.row.name == "offload-replaces-optimizer"])
    before = {key: config[key] for key in own if key in config}
    config.update(own)
    try:
        with deepspeed.install():
            yield
    finally:
        for key in own:
            del config[key]
        config.update(before)
