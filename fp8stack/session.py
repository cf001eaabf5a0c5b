"""The changes that `initialize` makes to an optimizer and to weights, and what it takes to undo them.

A `Session` is the record of one call. Nothing here decides or checks: `api.py` does, before the first change.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .checks import CONVERTED, counterpart_of, inconvertible_option
from .comm import GradientHandle
from .errors import ModelError
from .levels import Recipe
from .nn.convert import Conversion, LayerPlan, apply_storage
from .optim import BlockwiseOptimizer
from .optim.bitsandbytes import BitsandbytesOptimizer
from .optim.keeper import is_large_matrix
from .optim.state_dict import adopt, reformat, to_torch
from .report import Report


@dataclass
class Session:
    """What one `initialize` call changed, so that `restore` can undo it."""

    recipe: Recipe
    report: Report
    source: torch.optim.Optimizer | None  # the optimizer that was given
    returned: torch.optim.Optimizer | None
    conversion: Conversion = field(default_factory=Conversion)
    gradients: GradientHandle = field(default_factory=GradientHandle)
    # weights that became bfloat16, with the dtype they had
    stored: list[tuple[nn.Parameter, torch.dtype]] = field(default_factory=list)
    # group options that were changed, with what they were
    flags: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)
    hooks: list[RemovableHandle] = field(default_factory=list)
    lasting: str = ""  # why `restore` cannot undo it, and what else to do

    def __reduce__(self) -> Any:
        """None, in copies and pickles of the model that keeps it: they are not initialized."""
        return type(None), ()


def convert_optimizer(
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    session: Session,
    formats: dict[nn.Parameter, tuple[str, str]],
) -> torch.optim.Optimizer:
    """Return the optimizer that steps at this level; the given one where its states stay as they are."""
    if recipe.gradients == "keep" and recipe.states == "keep":
        return optimizer
    kind: Any = CONVERTED.get(type(optimizer))
    extra: dict[str, Any] = {}
    backend = recipe.optimizer_backend
    if backend.startswith("bitsandbytes") and not isinstance(optimizer, BitsandbytesOptimizer):
        kind = counterpart_of(optimizer)
        extra["paged"] = backend == "bitsandbytes-paged"
        extra["max_grad_norm"] = getattr(optimizer, "max_grad_norm", None)
    elif isinstance(optimizer, BlockwiseOptimizer):
        reformat(optimizer, {p: own for p, own in formats.items() if p not in optimizer.overrides})
        return optimizer
    if kind is None or inconvertible_option(optimizer):
        # torch's multi-tensor steps would dequantize all gradients at once; one at a time keeps the memory saved.
        for group in optimizer.param_groups:
            for flag in ("foreach", "fused"):
                if flag in group:
                    session.flags.append((group, flag, group[flag]))
                    group[flag] = False
        return optimizer
    names = (
        "lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov", "maximize", "ns_coefficients",
        "ns_steps", "adjust_lr_fn",
    )  # fmt: skip
    defaults = {name: optimizer.defaults[name] for name in names if name in optimizer.defaults}
    options = {name: optimizer.param_groups[0].get(name, value) for name, value in defaults.items()}
    new: BlockwiseOptimizer = kind(
        [dict(group) for group in optimizer.param_groups],
        **options,
        states=recipe.states,
        master=recipe.master,
        min_numel=recipe.min_numel,
        offload=recipe.offload,
        **extra,
    )
    new.defaults.update(defaults)  # which its groups need not have, but later ones get
    new.overrides.update(formats.items())
    new.overrides.update(getattr(optimizer, "overrides", {}))
    new.param_groups = optimizer.param_groups
    for group in new.param_groups:
        new.numbers_of(group)
    adopt(new, optimizer)
    optimizer.state.clear()
    _hand_over(optimizer, new, session)
    return new


def _hand_over(optimizer: torch.optim.Optimizer, new: BlockwiseOptimizer, session: Session) -> None:
    """Copy the user's hooks to the new optimizer, and let the old one say so if it is used by mistake."""
    for action in ("step", "state_dict", "load_state_dict"):
        for when in ("pre", "post"):
            hooks = f"_optimizer_{action}_{when}_hooks"
            getattr(new, hooks).update(getattr(optimizer, hooks))

    def refuse(*_: Any) -> None:
        raise ModelError(
            "this optimizer was handed to fp8stack.initialize; use the optimizer that it returned."
        )

    def mark_called(*_: Any) -> None:
        optimizer._opt_called = True  # type: ignore[attr-defined]  # what a scheduler looks for

    session.hooks.append(optimizer.register_step_pre_hook(refuse))
    session.hooks.append(optimizer.register_state_dict_pre_hook(refuse))
    session.hooks.append(optimizer.register_load_state_dict_pre_hook(refuse))
    session.hooks.append(new.register_step_post_hook(mark_called))


def store_weights(model: nn.Module, plan: LayerPlan, session: Session) -> None:
    """Turn the planned weights to bfloat16 and give their remaining bits to the optimizer."""
    apply_storage(model, plan, session.conversion)
    optimizer = session.returned
    for _, parameter in plan.stored:
        if not isinstance(optimizer, BlockwiseOptimizer):
            continue
        # more than the weight, where there is a master already
        value = optimizer.master_weight(parameter)
        if parameter.dtype is not torch.bfloat16:
            session.stored.append((parameter, parameter.dtype))
            change_dtype(parameter, parameter.detach().bfloat16())
        optimizer.set_master(parameter, value)


def change_dtype(parameter: nn.Parameter, value: Tensor) -> None:
    """Replace the storage of `parameter` by `value`, of another dtype; a gradient follows."""
    gradient, parameter.grad = parameter.grad, None
    parameter.data = value
    if gradient is not None:
        parameter.grad = gradient.to(value.dtype)


def quantize_gradients(model: nn.Module, quantized: set[nn.Parameter], session: Session) -> None:
    """Let gradients become FP8 as they arrive, or be used and freed at once."""
    if session.recipe.step_in_backward and isinstance(session.returned, BlockwiseOptimizer):
        session.returned.step_in_backward()
        return
    if session.recipe.gradients != "fp8":
        return
    names = {p: name for name, p in model.named_parameters()}
    session.gradients.attach(quantized, names)
    if isinstance(session.returned, BlockwiseOptimizer):
        handle, min_numel = session.gradients, session.recipe.min_numel

        def attach_new(parameters: list[nn.Parameter]) -> None:
            handle.attach((p for p in parameters if is_large_matrix(p, min_numel)), {})

        session.returned.on_new_parameters = attach_new


def return_state(returned: BlockwiseOptimizer, source: torch.optim.Optimizer) -> None:
    """Give the optimizer that was converted its state back: torch's in the dtypes it would hold."""
    if isinstance(source, BlockwiseOptimizer):  # of another backend
        adopt(source, returned)
        returned.state.clear()
        return
    for group in source.param_groups:  # one that was added since has not all of torch's options
        for name, value in source.defaults.items():
            group.setdefault(name, value)
    exported = to_torch(returned)["state"]
    index = 0
    for group in source.param_groups:
        for parameter in group["params"]:
            for key, value in exported.get(index, {}).items():
                step = key == "step"
                source.state[parameter][key] = (
                    _step_for(group, value) if step else value.to(parameter.dtype)
                )
            index += 1
    returned.state.clear()


def _step_for(group: dict[str, Any], step: Tensor) -> Tensor:
    """torch keeps the step count on the host unless a group is capturable or fused."""
    return step if group.get("capturable") or group.get("fused") else step.cpu()
