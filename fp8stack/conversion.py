"""The checks of a model and its optimizer, and the changes that `initialize` makes to them.

The first half checks a model and an optimizer. (Options that do not go together are in `conflicts.py`.) The second half
makes changes and records each of them in a `Session`, which `restore` uses to undo them. Functions that check change
nothing, and functions that change check nothing: `api.py` calls all checks before the first change.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from . import conflicts, optim
from .comm import GradientHandle
from .errors import ModelError, warn
from .levels import Recipe
from .nn import GEMM_LAYERS, StoredEmbedding
from .nn.bf16_storage import CopiedWeight, StoredLayer
from .nn.convert import LayerChoices, apply_storage
from .nn.frozen import FrozenWeight, exchange, refuse_assign, show_values, thaw
from .nn.matmuls import MultipliesParameters
from .optim import BlockwiseOptimizer
from .optim.bitsandbytes import COUNTERPARTS, BitsandbytesOptimizer
from .optim.parameter_names import names_of
from .optim.state_dict import adopt, reformat, to_torch
from .optim.state_formats import MASTER_KEYS, is_large_matrix
from .optim.step_in_backward import check_single_process
from .report import Report, note_selected, say
from .tensor_kinds import check_dense, is_sharded, not_plain, renew_hooks

COUNTERPART_OF: dict[type[torch.optim.Optimizer], type[BlockwiseOptimizer]] = {
    getattr(torch.optim, name): getattr(optim, name)
    for name in conflicts.TORCH_OPTIMIZERS
    if hasattr(torch.optim, name)
}
"""fp8stack's optimizer for each of torch's that O2 converts."""

MADE_WITH = ("states", "master", "min_numel", "offload")
"""The options of fp8stack's optimizers that are fields of a recipe."""

SEVERAL = (
    " If several optimizers train the model, call initialize(model.part, its_optimizer) for each."
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

    `initialized` says whether `restore` would know it, `sharded` whether its parameters may be FSDP2's, `planned`
    whether they may be on the meta device.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise ModelError(
            "the model is one of torch.jit, whose layers cannot be changed. Initialize what it was scripted from."
        )
    conflicts.refuse(conflicts.broken_rules(conflicts.wrappers_in(model), [conflicts.INITIALIZE]))
    if done := find_converted(model):
        remedy = "Call fp8stack.restore(model, optimizer) first to change the level."
        if not initialized:
            remedy = f"Restore the model that it was initialized in, if it is part of one. {COPIED}"
        raise ModelError(f"{done} is already converted by fp8stack. {remedy}{SEVERAL}")
    # Tensor parallelism's parameters are left to torch, see `convert.skipped_modules`.
    classes = {k.__name__ for module in model.modules() for k in type(module).__mro__}
    sharded = sharded or "FSDPModule" not in classes
    devices: dict[torch.device, str] = {}
    for name, parameter in model.named_parameters():
        if problem := _problem_of(parameter, recipe, sharded, planned):
            raise ModelError(f"{name} {problem}")
        if recipe.gradients == "fp8" and parameter.grad is not None:
            check_dense(parameter.grad, name, "Clear it: optimizer.zero_grad()", ModelError)
        devices.setdefault(parameter.device, name)
    if not devices:
        raise ModelError("the model has no parameters, so there is nothing to convert.")
    if len(devices) > 1:
        found = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise ModelError(f"the model is on several devices ({found}). Use one: model.to(device).")
    for name, module in model.named_modules():
        embeds = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        if embeds and module.sparse and recipe.gradients == "fp8":
            told = f"{name or 'the model'} is {type(module).__name__}(sparse=True), and FP8 gradients are dense"
            raise ModelError(f'{told}. Use sparse=False, or opt_level="O0".')
    return next(iter(devices))


def find_converted(model: nn.Module) -> str:
    """Return the name of a module of `model` that is converted, or an empty string."""
    ours = (*GEMM_LAYERS, StoredLayer, StoredEmbedding, MultipliesParameters)
    return next((n or "the model" for n, m in model.named_modules() if isinstance(m, ours)), "")


def _problem_of(parameter: nn.Parameter, recipe: Recipe, sharded: bool, planned: bool) -> str:
    """Return why a level cannot be applied to a parameter, and what to do about it, or an empty string."""
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        return "is a lazy parameter without a shape; run one batch through the model first."
    if parameter.is_meta and not planned:
        return "is on the meta device; materialize the model: model.to_empty(device=...)."
    if is_sharded(parameter.data) and not sharded:
        return "is sharded by fully_shard (FSDP2); use fp8stack.integrations.fsdp.attach."
    if recipe.level != "O0" and parameter.requires_grad and (kind := not_plain(parameter)):
        is_wide = parameter.dtype is torch.float64
        remedy = "model.float()" if is_wide else "freeze it (requires_grad=False)"
        taken = f"{recipe.level} trains float32, bfloat16 and float16 parameters"
        return f"is {kind}; {taken}. Change that first: {remedy}."
    return ""


def check_optimizer(model: nn.Module, optimizer: Any, recipe: Recipe) -> list[str]:
    """Raise if `optimizer` does not fit the model or the recipe; return the trainable parameters it does not own."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        raise ModelError(f"optimizer must be a torch.optim.Optimizer, got {kind}.{SEVERAL}")
    for index, group in enumerate(optimizer.param_groups):
        if not group["params"]:
            raise ModelError(f"parameter group {index} of the optimizer is empty. Leave it out.")
    owned = {p for group in optimizer.param_groups for p in group["params"]}
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    missing = [name for name, p in trainable.items() if p not in owned]
    if trainable and len(missing) == len(trainable):
        told = f"the optimizer owns none of the model's {len(missing)} trainable parameters"
        remedy = "Build it from this model, after anything that replaces parameters"
        raise ModelError(f"{told}, but {len(owned)} others. {remedy}.")
    conflicts.refuse_conflicts(recipe, optimizer=optimizer)
    if recipe.step_in_backward:
        check_single_process()
    if recipe.states != "keep" and isinstance(optimizer, BlockwiseOptimizer):
        _check_formats(optimizer, recipe)
    return missing


def _check_formats(optimizer: BlockwiseOptimizer, recipe: Recipe) -> None:
    """Raise unless the recipe says what one of fp8stack's optimizers was made with."""
    made_with = {option: getattr(optimizer, option) for option in MADE_WITH}
    if isinstance(optimizer, BitsandbytesOptimizer) and recipe.optimizer_backend != "auto":
        made_with["optimizer_backend"] = optimizer.backend
    for option, own in made_with.items():
        wanted = getattr(recipe, option)
        near = ("split24", "split32") if wanted == "auto" else ()
        if own not in (wanted, *near):
            raise ModelError(
                f"the optimizer was made with {option}={own!r}, the recipe says {option}={wanted!r}. "
                f"Pass initialize(..., {option}={own!r}), or make the optimizer as the recipe says."
            )


def counterpart_on_bitsandbytes(
    optimizer: torch.optim.Optimizer,
) -> type[BitsandbytesOptimizer] | None:
    """Return bitsandbytes' optimizer of the same kind, None if it has none."""
    kind: Any = type(optimizer)
    return COUNTERPARTS.get(COUNTERPART_OF.get(kind, kind))


# --- changes


@dataclass
class Session:
    """The record of one `initialize` call: what it changed, so that `restore` can undo it."""

    recipe: Recipe
    report: Report
    source: torch.optim.Optimizer | None  # the optimizer that was given
    returned: torch.optim.Optimizer | None
    modules: weakref.WeakSet[nn.Module]  # of the model, as it was then
    gradients: GradientHandle = field(default_factory=GradientHandle)
    # weights that became bfloat16, with the dtype they had
    stored: list[tuple[nn.Parameter, torch.dtype]] = field(default_factory=list)
    undo: list[Callable[[], object]] = field(default_factory=list)  # hooks and options of groups
    lasting: str = ""  # why `restore` cannot undo it, and what else to do

    def __reduce__(self) -> Any:
        """Copies and pickles of a model hold None instead of its session: they count as not initialized."""
        return type(None), ()


class _Master:
    """What a layer holds whose weight became bfloat16: a copy of the layer gets all the master's bits.

    So averages and new optimizers over the copy work. If the optimizer was copied before, that has the masters.
    """

    def __init__(self, optimizer: BlockwiseOptimizer, parameter: nn.Parameter, dtype: torch.dtype):
        self.optimizer, self.parameter, self.dtype = optimizer, parameter, dtype

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        copied = memo.get(id(self.parameter), self.parameter)  # itself if the layer has another
        if copied is not self.parameter and id(self.optimizer) not in memo:
            change_dtype(copied, self.optimizer.master_weight(self.parameter).to(self.dtype))
            copied.__class__ = CopiedWeight

    def __reduce__(self) -> Any:
        return _unpickle, (self.parameter,)


def convert_optimizer(
    optimizer: torch.optim.Optimizer, session: Session, formats: dict[nn.Parameter, tuple[str, str]]
) -> torch.optim.Optimizer:
    """Return the optimizer that steps at this level; the given one where its states stay as they are."""
    recipe = session.recipe
    if recipe.gradients == "keep" and recipe.states == "keep":
        return optimizer
    kind: Any = COUNTERPART_OF.get(type(optimizer))
    extra: dict[str, Any] = {}
    backend = recipe.optimizer_backend
    if backend.startswith("bitsandbytes") and not isinstance(optimizer, BitsandbytesOptimizer):
        kind = counterpart_on_bitsandbytes(optimizer)
        clip = getattr(optimizer, "max_grad_norm", None)
        extra = {"paged": backend == "bitsandbytes-paged", "max_grad_norm": clip}
    elif isinstance(optimizer, BlockwiseOptimizer):
        reformat(optimizer, {p: own for p, own in formats.items() if p not in optimizer.overrides})
        return optimizer
    unlike = any(group.get(o) for group in optimizer.param_groups for o in conflicts.UNCONVERTED)
    if kind is None or unlike:
        # torch's multi-tensor steps would dequantize all gradients at once; one at a time saves that memory.
        for group in optimizer.param_groups:
            for flag in {"foreach", "fused"} & group.keys():
                session.undo.append(partial(group.__setitem__, flag, group[flag]))
                group[flag] = False
        return optimizer
    names = (
        "lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov", "maximize", "ns_coefficients",
        "ns_steps", "adjust_lr_fn",
    )  # fmt: skip
    defaults = {name: optimizer.defaults[name] for name in names if name in optimizer.defaults}
    options = {name: optimizer.param_groups[0].get(name, value) for name, value in defaults.items()}
    extra |= {name: getattr(recipe, name) for name in MADE_WITH}
    groups = [dict(group) for group in optimizer.param_groups]
    new: BlockwiseOptimizer = kind(groups, **options, **extra)
    new.defaults.update(defaults)  # what groups added later start from
    new.overrides.update(formats.items())
    new.overrides.update(getattr(optimizer, "overrides", {}))
    new.param_groups = optimizer.param_groups
    adopt(new, optimizer)
    optimizer.state.clear()
    _hand_over(optimizer, new, session)
    return new


def _hand_over(optimizer: torch.optim.Optimizer, new: BlockwiseOptimizer, session: Session) -> None:
    """Copy the user's hooks to the new optimizer, and make the old one raise if it is used by mistake."""

    def refuse(*_: Any) -> None:
        raise ModelError("fp8stack.initialize took it over: use the optimizer that it returned.")

    def mark_called(*_: Any) -> None:
        # Schedulers look for this flag on the optimizer they were made from.
        optimizer._opt_called = True  # type: ignore[attr-defined]

    for action in ("step", "state_dict", "load_state_dict"):
        for hooks in (f"_optimizer_{action}_pre_hooks", f"_optimizer_{action}_post_hooks"):
            getattr(new, hooks).update(getattr(optimizer, hooks))
        session.undo.append(getattr(optimizer, f"register_{action}_pre_hook")(refuse).remove)
    session.undo.append(new.register_step_post_hook(mark_called).remove)


_BARE = WeakTensorKeyDictionary()
"""Weights of unpickled models: bfloat16, with nobody who has the other bits."""


def _unpickle(parameter: nn.Parameter) -> None:
    """Make what an unpickled layer holds in place of a `_Master`, which is nothing; remember its weight."""
    _BARE[parameter] = True
    _watch_all_optimizers()


_KEEPERS: weakref.WeakValueDictionary[int, Session] = weakref.WeakValueDictionary()
"""The sessions whose optimizers hold masters, by their ids."""


def refuse_other_optimizers(session: Session) -> None:
    """Let steps of other optimizers raise for weights whose masters the returned one holds.

    A weight in bfloat16 loses such updates, as its other bits are not added to. That ends with `restore`, or with the
    model.
    """
    _watch_all_optimizers()
    _KEEPERS[id(session)] = session
    session.undo.append(partial(_KEEPERS.pop, id(session), None))


@cache
def _watch_all_optimizers() -> None:
    """Register what torch calls before each step of any optimizer, once.

    It stays: torch goes through its hooks while they run, and a model that is freed in the meantime, as the garbage
    collector likes, must not take one away.
    """
    register_optimizer_step_pre_hook(_refuse_without_masters)


def _keeps_master(optimizer: torch.optim.Optimizer, parameter: Tensor) -> bool:
    """Return whether a step of `optimizer` keeps the bits that the parameter itself has not."""
    return isinstance(optimizer, BlockwiseOptimizer) and bool(optimizer.master_format(parameter))


def _warn_of_bare_weights(optimizer: Any) -> None:
    owned = [p for group in optimizer.param_groups for p in group["params"] if p in _BARE]
    alone = [p for p in owned if p.dtype is torch.bfloat16 and not _keeps_master(optimizer, p)]
    for p in owned:  # told once
        del _BARE[p]
    if alone:
        warn(
            f"{type(optimizer).__name__} steps {len(alone)} weights in bfloat16 alone, which loses most of small "
            "updates: this model was pickled at O2, and the optimizer that had their other bits was not. Load "
            "fp8stack.checkpoint.master_state_dict into a fresh model; or call model.float(); or take an optimizer of "
            "fp8stack.optim.",
            stacklevel=4,
        )


def _refuse_without_masters(optimizer: Any, *_: Any) -> None:
    if _BARE:
        _warn_of_bare_weights(optimizer)
    for session in list(_KEEPERS.values()):
        owner: Any = session.returned  # none once DeepSpeed's engine steps
        if owner is None or optimizer in (owner, session.source):
            continue  # the latter has a hook of its own
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            state = owner.state.get(p)  # of another model's there is none
            held = state and state.keys() & set(MASTER_KEYS)
            if held and not _keeps_master(optimizer, p):
                name = names_of(owner.named_by()).get(p, "a weight")
                raise ModelError(
                    f"{type(optimizer).__name__} would step {name} in bfloat16 alone, and lose most of it: the other "
                    f"bits are in the {type(owner).__name__} that fp8stack returned. Step that one; or first call "
                    "fp8stack.restore(model, optimizer), and then initialize with the new optimizer."
                )


def store_weights(model: nn.Module, layers: LayerChoices, session: Session) -> None:
    """Turn the chosen weights to bfloat16 and give their remaining bits to the optimizer."""
    apply_storage(model, layers)
    optimizer, masters = session.returned, dict[nn.Parameter | None, _Master]()
    for _, parameter in layers.stored:
        if not isinstance(optimizer, BlockwiseOptimizer):
            continue
        # A master that exists already has more bits than the weight.
        value = optimizer.master_weight(parameter)
        if parameter.dtype is not torch.bfloat16:
            masters[parameter] = _Master(optimizer, parameter, parameter.dtype)
            session.stored.append((parameter, parameter.dtype))
            change_dtype(parameter, parameter.detach().bfloat16())
        optimizer.set_master(parameter, value)
    for module in model.modules():
        if held := [masters[p] for p in module._parameters.values() if p in masters]:
            module.__dict__["_fp8stack_master"] = held
            session.undo.append(partial(module.__dict__.pop, "_fp8stack_master"))


def freeze_weights(model: nn.Module, layers: LayerChoices, session: Session) -> None:
    """Turn the chosen frozen weights to FP8."""
    for _, parameter, reason in layers.frozen:
        if not reason:
            exchange(parameter, FrozenWeight.quantize(parameter))
            session.undo.append(partial(thaw, parameter))
    for module in model.modules():
        if isinstance(module._parameters.get("weight"), FrozenWeight):
            session.undo.append(module.register_state_dict_post_hook(show_values).remove)
            session.undo.append(module.register_load_state_dict_pre_hook(refuse_assign).remove)


def change_dtype(parameter: nn.Parameter, value: Tensor) -> None:
    """Replace the storage of `parameter` by `value`, of another dtype; a gradient follows."""
    gradient, parameter.grad = parameter.grad, None
    parameter.data = value
    if gradient is not None:
        parameter.grad = gradient.to(value.dtype)


def quantize_gradients(model: nn.Module, quantized: set[nn.Parameter], session: Session) -> None:
    """Register the hooks that turn each new gradient into FP8, or that step in backward and free it."""
    if session.recipe.step_in_backward and isinstance(session.returned, BlockwiseOptimizer):
        session.returned.step_in_backward()
        return
    if session.recipe.gradients != "fp8":
        return
    handle, min_numel = session.gradients, session.recipe.min_numel
    handle.attach(quantized, {p: name for name, p in model.named_parameters()})
    if session.returned is not None:
        renew = session.returned.register_step_pre_hook(lambda *_: renew_hooks(handle.hooks))
        session.undo.append(renew.remove)
    if isinstance(session.returned, BlockwiseOptimizer):

        def attach_new(parameters: list[nn.Parameter]) -> None:
            handle.attach((p for p in parameters if is_large_matrix(p, min_numel)), {})

        session.returned.on_new_parameters = attach_new


def watch_parameters(model: nn.Module, stepping: torch.optim.Optimizer, session: Session) -> None:
    """Look at the first step of `stepping` whether the model still has the parameters that were initialized.

    Raises there:
        ModelError: if others came in the place of some that the optimizer steps, and it does not step these.
    """
    known, model_of = set(model.parameters()), weakref.ref(model)

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not known or (now := model_of()) is None:
            return
        named = dict(now.named_parameters())
        owned = {p for group in optimizer.param_groups for p in group["params"]}
        new = [n for n, p in named.items() if p.requires_grad and p not in known and p not in owned]
        told = f"{len(new)} trainable parameters came since fp8stack.initialize and are not in the optimizer: {new[:3]}"
        if new and (known & owned) - set(named.values()):
            raise ModelError(
                f"{told}. It would step those that they replaced. Build it and call initialize after what replaces "
                "parameters (parallelize_module); after fully_shard, call fp8stack.integrations.fsdp.attach."
            )
        known.clear()  # not the hook: torch is going through them
        if new:
            warn(f"{told}. Does another step them?", stacklevel=4)

    session.undo.append(stepping.register_step_pre_hook(look).remove)


def watch_rows(model: nn.Module, session: Session) -> None:
    """Note which layers multiply in FP8 for many rows only; say at the first step how many had too few."""
    report, waiting = note_selected(session.report, model), [weakref.ref(model)]

    def look(*_: Any) -> None:
        if waiting and (now := waiting.pop()()) and (few := note_selected(report, now).few_rows):
            told = f"{len(few)} of {len(report.converted)} layers multiplied in bfloat16, which is"
            where = "fp8stack.get_report(model).few_rows"
            say(f"fp8stack: {told} faster for their size and rows of input (see {where})")

    if report.selected and session.returned is not None:
        session.undo.append(session.returned.register_step_pre_hook(look).remove)


def undo(session: Session) -> None:
    """Undo what the session recorded: hooks, weights with all the master's bits, the optimizer's state."""
    session.gradients.remove()
    for action in session.undo:
        action()
    returned, source = session.returned, session.source
    if not isinstance(returned, BlockwiseOptimizer) or source is None:
        return
    for parameter, dtype in session.stored:
        change_dtype(parameter, returned.master_weight(parameter).to(dtype))
    returned.on_new_parameters = None
    if session.recipe.step_in_backward and returned.release is not None:
        returned.release.remove()
    if isinstance(source, BlockwiseOptimizer):
        for parameter, _ in session.stored:
            for key in MASTER_KEYS:
                returned.state[parameter].pop(key, None)
        if source is not returned:  # of another backend
            adopt(source, returned)
            returned.state.clear()
        return
    for group in source.param_groups:  # groups added since lack some of torch's options
        for name, value in source.defaults.items():
            group.setdefault(name, value)
    # In the dtypes that torch's optimizer would hold itself.
    parameters = ((group, p) for group in source.param_groups for p in group["params"])
    exported = to_torch(returned)["state"]
    for index, (group, parameter) in enumerate(parameters):
        for key, value in exported.get(index, {}).items():
            if key != "step":
                value = value.to(parameter.dtype)
            elif not group.get("capturable") and not group.get("fused"):
                value = value.cpu()  # torch counts these steps on the host
            source.state[parameter][key] = value
    returned.state.clear()
