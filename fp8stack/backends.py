"""Which library multiplies and which one steps, with the reasons: the choices that a recipe leaves open."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from . import capability
from .capability_te import transformer_engine_recipe
from .checks import counterpart_of, recipe_on_bitsandbytes
from .errors import ConfigError, Fp8StackError, ModelError, UnsupportedDeviceError
from .kernels.ops import kernel_backend
from .levels import LEVELS, Recipe
from .nn.matmuls import RECIPES
from .nn.te import check_recipe
from .optim import BlockwiseOptimizer
from .optim.bitsandbytes import BitsandbytesOptimizer


class Compute(NamedTuple):
    """What multiplies: "te", "native" or "bf16"; why that one; and what falls back and why."""

    name: str
    reason: str
    fallbacks: list[str]


def choose_compute(recipe: Recipe, device: torch.device) -> Compute:
    """Choose what multiplies in Linear layers.

    Raises:
        UnsupportedDeviceError: where what the recipe names does not run on `device`.
        ConfigError: where it runs, but not with these options.
    """
    fallbacks = _missing_kernels(recipe, device)
    if recipe.compute == "bf16":
        return Compute("bf16", "asked for", fallbacks + _idle(recipe, _OF_FP8))
    if recipe.compute == "te":
        answer = capability.transformer_engine(device)
        if not answer:
            raise UnsupportedDeviceError(f'compute="te": {answer.reason}')
        check_recipe(recipe, device)
        if recipe.select == "auto":
            raise ConfigError('select="auto" times native layers. Use compute="native" with it.')
        return Compute("te", "asked for", fallbacks + _idle(recipe, ("weight_cache",)))
    answer = capability.fp8_gemm(device)
    if answer:
        own, why = capability.native_recipe(recipe.fp8_recipe, device), ""
        if own:
            reason = "asked for" if recipe.compute == "native" else answer.reason
            return Compute("native", reason, fallbacks)
        if recipe.compute == "auto":
            te = _te_for(recipe, device)
            if te:
                told = f"{own.reason}; {te.reason}"
                return Compute("te", told, fallbacks + _idle(recipe, ("weight_cache",)))
            why = f"; {te.reason}"
        raise UnsupportedDeviceError(
            f'fp8_recipe={recipe.fp8_recipe!r}: {own.reason}{why}. Use fp8_recipe="current".'
        )
    if recipe.compute == "native":
        raise UnsupportedDeviceError(
            f'compute="native": {answer.reason}. Use compute="auto" for bf16 GEMMs there.'
        )
    told = f"{answer.reason}; using bf16 GEMMs instead"
    return Compute("bf16", answer.reason, [*fallbacks, told, *_idle(recipe, ("matmuls",))])


_OF_FP8 = ("fp8_format", "fp8_recipe", "fp8_fast_accum", "weight_cache", "select", "matmuls")


def _idle(recipe: Recipe, names: tuple[str, ...]) -> list[str]:
    """Return what of the options `names` is given and has no effect."""
    defaults = LEVELS[recipe.level]
    given = [n for n in names if getattr(recipe, n) != getattr(defaults, n)]
    return [f"{n}={getattr(recipe, n)!r} has no effect on these GEMMs" for n in given]


def other_scaling(recipe: Recipe) -> list[str]:
    """Return what is said where bare parameters are multiplied with other scales than layers."""
    if not recipe.matmuls or recipe.fp8_recipe in RECIPES:
        return []
    return [
        f'products by bare parameters (matmuls=True) use "current" scaling; fp8_recipe={recipe.fp8_recipe!r} is '
        "for Linear layers only"
    ]


def _missing_kernels(recipe: Recipe, device: torch.device) -> list[str]:
    """Return what falls back for want of Triton; raise where the optimizer's kernels do not run at all."""
    if recipe.level != "O0":
        answer = capability.fp8_optimizer(device)
        if not answer:
            raise UnsupportedDeviceError(
                f"{recipe.level}: {answer.reason}. Move the model there, or use O0."
            )
    if device.type == "cuda":
        backend, why = kernel_backend()
        if backend == "reference":
            return [f"{why}; using the slower torch reference kernels instead of Triton"]
    return []


def _te_for(recipe: Recipe, device: torch.device) -> capability.Answer:
    """Return whether TransformerEngine can take what native layers cannot, with the reason."""
    for name, only in (("fp8_format", "e5m2"), ("select", "auto")):
        if getattr(recipe, name) == only:
            return capability.Answer(False, f'TransformerEngine has no {name}="{only}"')
    answer = capability.transformer_engine(device)
    return transformer_engine_recipe(recipe.fp8_recipe, device) if answer else answer


def choose_stepper(
    recipe: Recipe, optimizer: torch.optim.Optimizer | None, device: torch.device
) -> tuple[Recipe, list[str]]:
    """Return the recipe with the `optimizer_backend` that will step, and what falls back and why."""
    wanted = recipe.optimizer_backend
    if recipe.states == "keep" or optimizer is None:
        return recipe, []
    if isinstance(optimizer, BitsandbytesOptimizer):
        if wanted not in ("auto", optimizer.backend):
            raise ModelError(
                f"the optimizer was made for optimizer_backend={optimizer.backend!r}, the recipe says {wanted!r}. "
                "Leave it out of initialize(...), or pass torch's optimizer."
            )
        return replace(recipe, optimizer_backend=optimizer.backend), []
    own = replace(recipe, optimizer_backend="fp8stack")
    if wanted == "auto":
        fp8 = capability.fp8_hardware(device)
        ours = isinstance(optimizer, BlockwiseOptimizer) or counterpart_of(optimizer) is None
        if fp8 or recipe.states != "8bit" or recipe.offload != "none" or ours:
            return own, []
        why = f"{fp8.reason}, without FP8"
        try:
            other = recipe_on_bitsandbytes(recipe, "bitsandbytes", optimizer, device)
        except Fp8StackError as error:
            return own, [f"{why}; using fp8stack's optimizer, not bitsandbytes': {error}"]
        choice = 'optimizer_backend="fp8stack" keeps that'
        return other, [f"{why}; using bitsandbytes' optimizer instead of fp8stack's ({choice})"]
    if wanted == "fp8stack":
        return own, []
    if recipe.states != "8bit":
        return own, ["bitsandbytes has no 4-bit optimizer; using fp8stack's kernels instead"]
    return recipe_on_bitsandbytes(recipe, wanted, optimizer, device), []
