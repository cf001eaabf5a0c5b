"""`initialize` and `restore`: one call into a level and one call back.

    model, optimizer = fp8stack.initialize(model, optimizer, opt_level="O2")

`decide` makes every check and returns `Decisions`: which layers and weights change, and how. It changes nothing.
`carry_out` then makes the changes:

1. The optimizer is replaced by its low-precision counterpart, which shares the `param_groups` list and takes over the
   state (O2).
2. Linear layers change their class, so that they multiply in FP8 (O0).
3. Weights of Linear and Embedding layers become bfloat16; the optimizer keeps their remaining bits (O2).
4. Large matrices get a hook that turns each new gradient into FP8 blocks (O1).
5. RMSNorms and MLPs are joined with the casts around them (on a GPU).

Parameters keep their identity throughout, so ties, groups, schedulers, hooks and copies go on working. torch itself is
not patched anywhere. Planning, FSDP2 and DeepSpeed call `decide` and `carry_out` with arguments of their own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from . import capability, conflicts, conversion, errors
from .comm.fsdp import stop_fp8_all_gather
from .conversion import COPIED, Session
from .kernels.ops import kernel_backend
from .levels import Recipe, check_choice, recipe_for
from .nn.convert import LayerChoices, apply_gemms, choose_layers, skipped_modules
from .nn.coverage import KEPT, bare_modules, count, listed
from .nn.deferred_logits import fuse_loss, models_to_fuse
from .nn.finishing import finish_products
from .nn.frozen import FrozenWeight, can_swap
from .nn.matmuls import apply_matmuls
from .nn.mixin import take_off
from .nn.mlp import fuse
from .optim import BlockwiseOptimizer
from .optim.bitsandbytes import BitsandbytesOptimizer, check_bitsandbytes
from .optim.state_formats import is_large_matrix, master_for, zero_master, zero_moment
from .report import Report, note_selected, report_of, say
from .tensor_kinds import whole_shape

Model = TypeVar("Model", bound=nn.Module)

_MODELS: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""The models that are initialized; copies of them are not."""
_KEPT = "_fp8stack_session"
"""Model attribute that holds the `Session`. A module-level dict would keep models alive, since hooks refer to them."""


def initialize(
    model: Model,
    optimizer: torch.optim.Optimizer | None = None,
    opt_level: str = "O2",
    *,
    enabled: bool = True,
    strict: bool = False,
    preset: str | None = None,
    **overrides: Any,
) -> tuple[Model, Any]:
    """Bring a model and its optimizer to a level; return the same model, and the optimizer to step.

    Args:
        model: a bare module on one device, with floating-point parameters. Wrap it (DDP, compile) afterwards.
        optimizer: built from the model's parameters. May be None at O0. At O2 (and at O1 for Adam, AdamW and SGD) the
            returned optimizer is another object that shares `param_groups`; a scheduler built before drives it too.
        opt_level: "O0" (FP8 GEMMs), "O1" (also FP8 gradients), "O2" (also 8-bit states and 24-bit masters).
        enabled: False returns both arguments untouched.
        strict: raise where a part of the level would fall back, instead of warning once with the reason.
        preset: "fp8-lm" for that paper's state formats at O2.
        overrides: fields of `fp8stack.Recipe`, e.g. skip=["*head"], fp8_format="e4m3".

    Raises:
        ConfigError: an unknown level, preset, option or value.
        ModelError: a model or optimizer that the level cannot be applied to. Nothing is changed then.
        UnsupportedDeviceError: a fallback under `strict`, or a device that the level cannot run on at all.
    """
    check_choice("strict", strict, (False, True, None))
    if not check_choice("enabled", enabled, (False, True, None)):
        return model, optimizer
    recipe = recipe_for(opt_level, preset, **overrides)
    session = carry_out(model, optimizer, decide(model, optimizer, recipe, strict))
    if session.returned is not None:
        conversion.watch_parameters(model, session.returned, session)
    say(session.report)
    return model, session.returned


class Decisions(NamedTuple):
    """What is to be done to a model and its optimizer: all of it checked, nothing changed."""

    recipe: Recipe
    skipped: dict[nn.Module, str]
    quantized: set[nn.Parameter]
    formats: dict[nn.Parameter, tuple[str, str]]
    layers: LayerChoices
    bare: dict[nn.Module, str]  # what `coverage.bare_modules` returned
    fuse: bool  # RMSNorms and MLPs with the casts around them
    report: Report


def decide(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    recipe: Recipe,
    strict: bool = False,
    gathered_on: torch.device | None = None,
    notes: Sequence[str] = (),
    planned_for: torch.device | None = None,
    like_gpu: bool = False,
) -> Decisions:
    """Check everything and decide what happens to layers and states; raise as `initialize` does.

    gathered_on: the device on which sharded weights are gathered. The caller then stores the weights itself.
    notes: the caller's fallbacks. planned_for: where a model on the meta device will be. like_gpu: choose as on a GPU.
    """
    known, sharded = model in _MODELS, gathered_on is not None
    home = conversion.check_model(model, recipe, known, sharded, bool(planned_for))
    device = gathered_on or planned_for or home
    missing = _check_given(model, optimizer, recipe)
    compute, reason, fallbacks = choose_compute(recipe, device)
    skipped, idle = skipped_modules(model, recipe, sharded)
    bare = bare_modules(model, recipe, skipped, sharded)
    places = [conflicts.BF16_PRODUCTS if compute == "bf16" else conflicts.FP8_PRODUCTS]
    places += [conflicts.ON_CPU] if device.type == "cpu" else []
    fallbacks += conflicts.idle_options(recipe, *places)
    given = recipe
    recipe, partly = with_scales(recipe, compute, device)
    exact = compute == "bf16" and recipe.gradients == "keep"
    if isinstance(optimizer, torch.optim.LBFGS) and not exact:
        fallbacks.append(
            "LBFGS makes its steps from differences between gradients, and FP8 products and gradients are too coarse "
            'for that. Use another optimizer, or opt_level="O0" with compute="bf16"'
        )
    recipe, replaced = choose_stepper(recipe, optimizer, device)
    fallbacks += [*partly, *replaced, *idle]
    left_alone = {p for module in skipped for p in module.parameters(recurse=False)}
    groups = [] if optimizer is None else optimizer.param_groups
    owned = {p for group in groups for p in group["params"]} - left_alone
    large = {p for p in model.parameters() if is_large_matrix(p, recipe.min_numel)}
    quantized = {p for p in large & owned if p.requires_grad}
    formats = _formats_by_parameter(model, recipe, left_alone)
    stored = replace(recipe, master="keep") if gathered_on else recipe
    on_gpu = compute == "native" and (device.type == "cuda" or like_gpu)
    by_size = on_gpu and recipe.select == "auto"
    layers = choose_layers(model, stored, skipped, quantized, by_size, compute)
    coverage = count(model, layers, bare, skipped, recipe.min_numel)
    if missing:
        told = f"{len(missing)} trainable parameters are not in the optimizer and stay as they are"
        fallbacks.append(f"{told}: {missing[:3]}.{conversion.SEVERAL}".removesuffix("."))
    fallbacks += _without_effect(model, given, compute, layers, bare)
    fallbacks += notes
    fallbacks += coverage.fallbacks if compute != "bf16" else []
    if strict and fallbacks:
        raise errors.UnsupportedDeviceError(f"{'; '.join(fallbacks)} (strict=True)")
    report = report_of(recipe, layers, coverage, compute, reason, device, fallbacks)
    if recipe.master == "auto":
        asked = getattr(optimizer, "master", "auto")  # one of ours was made with it
        report.master = " or ".join(sorted({master_for(asked, group) for group in groups}))
    fused = on_gpu and recipe.fuse and gathered_on is None
    return Decisions(recipe, skipped, quantized, formats, layers, bare, fused, report)


def carry_out(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    decisions: Decisions,
    store: Callable[[Session], None] | None = None,
) -> Session:
    """Make the changes that were decided. An adapter's `store` is called before layers change their classes."""
    recipe, layers, compute = decisions.recipe, decisions.layers, decisions.report.compute
    # Warnings come before the first change, because a caller may have turned them into errors.
    for fallback in decisions.report.fallbacks:
        errors.warn(f"fp8stack {recipe.level}: {fallback}", stacklevel=3)
    modules = weakref.WeakSet(model.modules())
    session = Session(recipe, decisions.report, optimizer, optimizer, modules)
    if optimizer is not None:  # the first change, because it may still find something wrong
        session.returned = conversion.convert_optimizer(optimizer, session, decisions.formats)
    if isinstance(session.returned, BlockwiseOptimizer):
        session.returned.named_by = weakref.ref(model)
        conversion.refuse_other_optimizers(session)
    if store is not None:
        store(session)
    apply_gemms(model, layers, compute, recipe)
    if "" in decisions.bare.values() and compute != "bf16":
        alone = {model.get_submodule(name) for name, _ in layers.skipped} | decisions.skipped.keys()
        alone |= {m for m, why in decisions.bare.items() if why in KEPT}
        chosen = {m for m, why in decisions.bare.items() if not why}
        heads = [model.get_submodule(name) for name in layers.heads]
        bare = apply_matmuls(model, recipe, chosen, alone, heads)
        session.report.multiplied, session.report.left_alone = bare.used, bare.left
    conversion.freeze_weights(model, layers, session)
    if optimizer is not None:
        conversion.store_weights(model, layers, session)
        conversion.quantize_gradients(model, decisions.quantized, session)
        session.report.bytes_per_parameter = _planned_bytes(decisions.quantized, session)
    model.__dict__[_KEPT] = session
    _MODELS.add(model)
    if decisions.fuse:
        session.report.fused = fuse(model, decisions.skipped)
    if recipe.fuse_loss:
        session.report.fused_losses = fuse_loss(model)
    # last, as a fused MLP has one rule for its layers
    conversion.watch_rows(model, session)
    return session


def restore(model: Model, optimizer: torch.optim.Optimizer | None = None) -> tuple[Model, Any]:
    """Undo `initialize`: layers become plain again, and weights get back their dtype, with all the master's bits.

    Frozen weights that were kept in FP8 become ordinary weights with the values that they had in FP8.

    Returns the model, and the optimizer that was given to `initialize`, with its state in floating point. A scheduler
    built on either optimizer still drives it.

    Raises:
        ModelError: if the model is not initialized or was already sharded, `optimizer` belongs to another model, a
            converted module has since been sharded or parametrized, or a weight has another dtype or shape. Nothing is
            changed then.
    """
    if model not in _MODELS:
        remedy = ""
        if conversion.find_converted(model):
            remedy = f" Pass the model that was given to fp8stack.initialize. {COPIED}"
        raise errors.ModelError(
            f"this model is not initialized by fp8stack (or was restored already): nothing to undo.{remedy}"
        )
    session = session_of(model)
    if session.lasting:
        raise errors.ModelError(session.lasting)
    if optimizer is not None and optimizer not in (session.returned, session.source):
        raise errors.ModelError(
            "pass the optimizer that initialize returned for this model, not another."
        )
    if isinstance(session.returned, BlockwiseOptimizer):
        for parameter, _ in session.stored:
            session.returned.check_unchanged(parameter)
    frozen = [n for n, p in model.named_parameters() if isinstance(p, FrozenWeight)]
    if held := [name for name in frozen if not can_swap(model.get_parameter(name))]:
        told = f"outputs of a forward, or weak references, hold weights that are kept in FP8: {held[:3]}"
        raise errors.ModelError(f"{told}. Delete those first: torch cannot replace the weights.")
    take_off(model, removed=session.modules)
    _MODELS.remove(model)
    del model.__dict__[_KEPT]
    conversion.undo(session)
    return model, session.source


def finish(model: nn.Module) -> bool:
    """Make all FP8 products of `model` in bfloat16 from now on, for example for the last part of a run.

    Nothing else changes: weights, masters, gradients and optimizer states stay as the level has them. Call it between
    two steps, on all ranks, with the model or its wrapper. It prints one line, and a second call does nothing, so a
    loop can call it in every step from some step on, in a resumed run, too. `restore` undoes it.

    Returns:
        Whether anything changed: not in a model without FP8 products, nor before `initialize`.
    """
    if not finish_products(model):
        return False
    stop_fp8_all_gather(model)
    for part, session in sessions_in(model).items():
        report = note_selected(session.report, part)
        report.gemm = report.compute = "bf16"
        report.compute_reason = "finished"
    say("fp8stack: products are in bfloat16 from now on (finish)")
    return True


def get_report(model: nn.Module) -> Report:
    """Return what `initialize` did to `model`: layers, reasons, bytes, fallbacks; and what stayed in bfloat16 since.

    Raises:
        ModelError: if the model is not initialized.
    """
    return note_selected(session_of(model).report, model)


def session_of(model: nn.Module) -> Session:
    """Return the record of the call that initialized `model`; raise ModelError if there was none."""
    if model not in _MODELS:
        raise errors.ModelError("this model was not initialized: call fp8stack.initialize first.")
    return model.__dict__[_KEPT]  # type: ignore[no-any-return]


def sessions_in(model: nn.Module) -> dict[nn.Module, Session]:
    """Return the parts of a model that are initialized, or the model itself, each with its record."""
    return {part: session_of(part) for part in model.modules() if part in _MODELS}


# --- decisions


def _check_given(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, recipe: Recipe
) -> list[str]:
    """Raise if the optimizer does not fit; return the trainable parameters that it does not own."""
    if optimizer is not None:
        if any(optimizer in (s.source, s.returned) for s in map(session_of, _MODELS)):
            raise errors.ModelError(
                "this optimizer belongs to an initialized model. Make one for each model, or fp8stack.restore that "
                "model first."
            )
        return conversion.check_optimizer(model, optimizer, recipe)
    if recipe.level != "O0":
        raise errors.ModelError(
            f"{recipe.level} converts gradients for an optimizer; pass it, or use O0."
        )
    return []


def _without_effect(
    model: nn.Module, recipe: Recipe, compute: str, layers: LayerChoices, bare: dict[nn.Module, str]
) -> list[str]:
    """Return what to say of options of a recipe that reach nothing in this model."""
    told = [*layers.idle]
    if recipe.frozen == "fp8" and all(why for _, _, why in layers.frozen):
        none = "no Linear layer's weight is frozen (requires_grad=False) at the call"
        none = listed({name: why for name, _, why in layers.frozen}) or none
        told.append(f'frozen="fp8" has no effect: {none}')
    by_hand = [m for m, why in bare.items() if not why]
    named = [type(m).__name__ for m in by_hand if layers.precision.of(m)[1]]
    if named and compute != "bf16":
        told.append(
            f"first_last and precision_for are about layers: products by bare parameters of {named[0]} are in FP8 "
            "nevertheless. Name it in skip=[...]"
        )
    found = layers.precision.heads or by_hand  # a product by an embedding may be a head
    if recipe.head not in ("auto", "fp8") and compute != "bf16" and not found:
        told.append(
            f'head="{recipe.head}" has no effect: no layer is known to make logits. Name it: skip=["its.name"]'
        )
    if recipe.fuse_loss and not models_to_fuse(model):
        told.append(
            "fuse_loss=True has no effect: no causal language model of transformers with a layer as its head. Call "
            "fp8stack.linear_cross_entropy in your own model"
        )
    return told


def _formats_by_parameter(
    model: nn.Module, recipe: Recipe, left_alone: set[nn.Parameter]
) -> dict[nn.Parameter, tuple[str, str]]:
    """Return (states, master) of the parameters that have formats of their own: skipped, or named in `states_for`.

    Raises:
        ConfigError: for a pattern that matches no parameter.
    """
    plain = ["keep" if own == "keep" else "fp32" for own in (recipe.states, recipe.master)]
    formats = dict.fromkeys(left_alone, (plain[0], plain[1]))
    names = dict(model.named_parameters(remove_duplicate=False))
    for pattern, states, master in recipe.states_for:
        matching = [
            p for name, p in names.items()
            if fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[0], pattern)
        ]  # fmt: skip
        if not matching:
            modules = [name for name, _ in model.named_modules() if name]
            meant = errors.did_you_mean(pattern, [*names, *modules])
            told = "matches no parameter, nor a module with parameters, by its whole name"
            raise errors.ConfigError(f"states_for[{pattern!r}] {told}.{meant}")
        formats.update(dict.fromkeys(matching, (states or recipe.states, master or recipe.master)))
    return formats


# --- what multiplies, and what steps


def choose_compute(recipe: Recipe, device: torch.device) -> tuple[str, str, list[str]]:
    """Return what multiplies in Linear layers ("te", "native" or "bf16"), why, and what falls back.

    Raises:
        UnsupportedDeviceError: where what the recipe names does not run on `device`.
    """
    fallbacks, asked, why = _missing_kernels(recipe, device), recipe.compute, []
    if asked == "bf16":
        return "bf16", "asked for", fallbacks
    if asked != "te":
        gemm = capability.fp8_gemm(device)
        if not gemm and asked == "auto":
            told = f"{gemm.reason}; using bf16 GEMMs instead"
            return "bf16", gemm.reason, [*fallbacks, told]
        own = gemm and capability.native_recipe(recipe.fp8_recipe, device)
        if own:
            return "native", gemm.reason if asked == "auto" else "asked for", fallbacks
        why.append(own.reason)
    if asked != "native":
        te = _te_for(recipe, device)
        why.append(te.reason)
        if te:
            return "te", "; ".join(why) if asked == "auto" else "asked for", fallbacks
    remedies = ['compute="auto"'] if asked != "auto" else []
    remedies += ['fp8_recipe="current"'] if recipe.fp8_recipe not in ("auto", "current") else []
    told = f'compute="{asked}", fp8_recipe={recipe.fp8_recipe!r}: {"; ".join(why)}'
    raise errors.UnsupportedDeviceError(f"{told}. Use {', or '.join(remedies)}.")


def with_scales(recipe: Recipe, compute: str, device: torch.device) -> tuple[Recipe, list[str]]:
    """Return the recipe with the scales and heads that "auto" stands for on `device`, and what falls back."""
    native, told = compute == "native", list[str]()
    if recipe.fp8_recipe == "auto" and compute != "bf16":
        by_token = native and capability.native_recipe("tokenwise", device)
        recipe = replace(recipe, fp8_recipe="tokenwise" if by_token else "current")
    if native and not (blocks := capability.native_recipe("blockwise", device)):
        asked = recipe.head, *(how for _, how in recipe.precision_for)
        told += [f'"forward-bf16" is "bf16" here: {blocks.reason}'] * ("forward-bf16" in asked)
        whole = [(name, how.removeprefix("forward-")) for name, how in recipe.precision_for]
        head = "fp8" if recipe.head == "fp8" else "bf16"
        recipe = replace(recipe, head=head, precision_for=whole)
    return recipe, told


def _missing_kernels(recipe: Recipe, device: torch.device) -> list[str]:
    """Return the fallback where Triton is missing; raise where the optimizer's kernels do not run at all."""
    answer = capability.fp8_optimizer(device)
    if recipe.level != "O0" and not answer:
        told = f"{recipe.level}: {answer.reason}"
        raise errors.UnsupportedDeviceError(f"{told}. Move the model there, or use O0.")
    if device.type == "cuda":  # elsewhere Triton need not be imported
        backend, why = kernel_backend()
        if backend == "reference":
            return [f"{why}; using the slower torch reference kernels instead of Triton"]
    return []


def _te_for(recipe: Recipe, device: torch.device) -> capability.Answer:
    """Return whether TransformerEngine can multiply as `recipe` says, with the reason."""
    try:
        replace(recipe, compute="te")  # which finds options that do not go with it
    except errors.ConfigError as error:  # its remedy is for those who asked for "te" by name
        return capability.Answer(False, str(error).partition(". ")[0])
    answer = capability.transformer_engine(device)
    return capability.transformer_engine_recipe(recipe.fp8_recipe, device) if answer else answer


def choose_stepper(
    recipe: Recipe, optimizer: torch.optim.Optimizer | None, device: torch.device
) -> tuple[Recipe, list[str]]:
    """Return the recipe with the `optimizer_backend` that will step, and what falls back and why.

    Raises:
        ConfigError, ModelError, UnsupportedDeviceError: where bitsandbytes is asked for and cannot step.
    """
    if recipe.states == "keep" or optimizer is None:
        return recipe, []
    if isinstance(optimizer, BitsandbytesOptimizer):
        return replace(recipe, optimizer_backend=optimizer.backend), []
    own, asked = replace(recipe, optimizer_backend="fp8stack"), recipe.optimizer_backend
    kind, fp8 = conversion.counterpart_on_bitsandbytes(optimizer), capability.fp8_hardware(device)
    if asked == "auto":
        ours = kind is None or isinstance(optimizer, BlockwiseOptimizer)
        if ours or fp8 or recipe.states != "8bit" or recipe.offload != "none":
            return own, []
    elif asked == "fp8stack" or recipe.states == "4bit":  # the latter is told by `idle_options`
        return own, []
    try:
        if asked == "auto":
            recipe = replace(recipe, optimizer_backend="bitsandbytes")
        check_bitsandbytes(device, paged=asked == "bitsandbytes-paged")
        places = [] if kind else [conflicts.NOT_ON_BITSANDBYTES]
        conflicts.refuse_conflicts(recipe, *places, optimizer=optimizer)
    except errors.Fp8StackError as error:
        if asked != "auto":
            raise
        told = f"using fp8stack's optimizer, not bitsandbytes': {error}"
        return own, [f"{fp8.reason}, without FP8; {told}"]
    told = "using bitsandbytes' optimizer instead of fp8stack's"
    told = f'{fp8.reason}, without FP8; {told} (optimizer_backend="fp8stack" keeps that)'
    return recipe, [told] if asked == "auto" else []


# --- the report


def _planned_bytes(quantized: set[nn.Parameter], session: Session) -> float:
    """Return bytes per parameter over the quantized matrices, from the shapes and dtypes that training will hold."""
    optimizer, recipe, total, elements = session.returned, session.recipe, 0, 0
    for group in [] if optimizer is None else optimizer.param_groups:
        for parameter in quantized.intersection(group["params"]):
            meta = torch.empty(whole_shape(parameter), dtype=parameter.dtype, device="meta")
            elements += meta.numel()
            made = {"weight": meta}
            if not recipe.step_in_backward:
                # gradients of both formats are laid out as moments of the same name are
                made |= zero_moment("grad", meta, recipe.gradients)
            if not isinstance(optimizer, BlockwiseOptimizer):  # as torch's Adam family
                made |= {"exp_avg": meta, "exp_avg_sq": meta}
            elif not optimizer.offloads(parameter):
                made |= zero_master(meta, optimizer.master_format(parameter))
                for name in optimizer.moments_of(group):
                    made |= zero_moment(name, meta, optimizer.moment_format(parameter))
            total += sum(tensor.nbytes for tensor in made.values())
    return total / max(elements, 1)
