"""The bytes that a model, its gradients and its optimizer keep from step to step, by kind.

Nothing is computed from a table of bytes: a model on the meta device goes through what `initialize` does, its optimizer
makes its states, gradients are put where they would be, and `fp8stack.memory.measure` counts it all, as it counts a
model that trains. Copies of weights (FP8 codes of native layers, bfloat16 under autocast) are made and counted too.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import nn
from torch.optim import Optimizer

from fp8stack.api import Decisions, carry_out, decide
from fp8stack.errors import ConfigError, Fp8StackWarning, ModelError
from fp8stack.levels import Recipe
from fp8stack.memory import MemoryUse, measure
from fp8stack.nn.attention import fp8_products
from fp8stack.nn.casts import Products, cast_weight
from fp8stack.nn.convert import skipped_modules
from fp8stack.nn.layer_kinds import kind_of
from fp8stack.nn.linear import Bf16Layer, Fp8Layer
from fp8stack.optim import BlockwiseOptimizer
from fp8stack.optim.state_formats import BITSANDBYTES, zero_moment
from fp8stack.tensor import BlockScaledTensor

KINDS = ("weights", "weight copies", "masters", "gradients", "m", "v", "host")
"""What stays; "host" is pinned memory of the host (`offload="cpu"`), the others are on the GPU."""

_PARTS = {"weight": "weights", "master": "masters", "grad": "gradients", "m": "m", "v": "v"}
_CPU = torch.device("cpu")  # has FP8 products and all states, whatever this machine has


@dataclass(frozen=True)
class Precision:
    """What trains: a level, or without a recipe torch's AdamW ("8bit": bitsandbytes')."""

    name: str
    weights: torch.dtype  # that the model is made in
    autocast: bool  # products in bfloat16 whatever the weights are in
    recipe: Recipe | None = None
    bitsandbytes: bool = False  # without a recipe: its 8-bit AdamW, not torch's

    @property
    def brief(self) -> str:
        weights = str(self.weights).removeprefix("torch.")
        if self.recipe is not None:
            return f"fp8stack, from {weights} weights"
        adamw = "bitsandbytes' 8-bit AdamW" if self.bitsandbytes else "AdamW"
        return f"{adamw} on {weights} weights{', bf16 autocast' * self.autocast}"


def at_level(recipe: Recipe, weights: torch.dtype = torch.float32) -> Precision:
    """Return what trains at a level, from weights of that dtype; products of float32 ones are under bf16 autocast."""
    return Precision(recipe.level, weights, weights is torch.float32, recipe)


BASELINES = {
    "fp32": Precision("fp32", torch.float32, False),
    "bf16": Precision("bf16", torch.float32, True),
    "8bit": Precision("8bit", torch.bfloat16, False, bitsandbytes=True),
}
"""What levels are compared with."""


@dataclass(frozen=True)
class Resident:
    """Bytes by kind (KINDS), and what the estimate has to know of layers and gradients."""

    bytes: dict[str, int]
    codes: int  # bytes of the weights' FP8 codes in one layout
    largest: int  # bytes of the largest gradient, in its parameter's dtype
    # Linear layers that multiply in FP8, which is their weight's gradient at least, and what they do not.
    fp8: dict[str, str]


def resident(model: nn.Module, precision: Precision, accumulate: bool = False) -> Resident:
    """Count what stays of `model`, which must be on the meta device and is converted on the way.

    accumulate: gradients of several micro-batches are added up, for which FP8 ones keep a residual.

    Raises:
        ConfigError, ModelError, UnsupportedDeviceError: what `initialize` would raise.
    """
    recipe, decisions = precision.recipe, None
    optimizer: Optimizer = torch.optim.AdamW(model.parameters())
    if recipe is not None:
        compute = "native" if recipe.compute == "te" else recipe.compute  # which keep as much
        backend = recipe.optimizer_backend.removesuffix("-paged")  # all of it on the GPU, at most
        here = replace(recipe, offload="none", compute=compute, optimizer_backend=backend)
        if idle := skipped_modules(model, here)[1]:
            raise ConfigError(f"{idle[0]}.")
        decisions, optimizer = at_the_level(model, optimizer, here, _CPU)
    if precision.bitsandbytes:
        _add_bitsandbytes_states(model, optimizer)
    counted = dict.fromkeys(KINDS, 0)
    for part, nbytes in use_after_step(model, optimizer, decisions, accumulate).bytes.items():
        counted[_PARTS.get(part, "m")] += nbytes  # "other" are counts of steps
    codes, fp8 = 0, dict[str, str]()
    for name, (module, own, key) in fp8_products(model).items():
        if recipe is None or not key:
            continue
        if own.reads_codes_only:
            weight = module.get_parameter(key)
            codes += _codes_of(weight.shape, weight.dtype, recipe, own.turned)
        if "wgrad" not in own.in_bf16:
            fp8[name] = own.in_bf16
    for module in model.modules():
        copied = precision.autocast or isinstance(module, Bf16Layer)
        if copied and kind_of(module) and not isinstance(module, Fp8Layer):
            weight = module.get_parameter("weight")
            counted["weight copies"] += 2 * weight.numel() * (weight.dtype is not torch.bfloat16)
    if recipe is not None and recipe.offload == "cpu":
        moved = ("masters", "m", "v")
        counted |= {"host": sum(counted[kind] for kind in moved), **dict.fromkeys(moved, 0)}
    largest = max((p.nbytes for p in model.parameters() if p.requires_grad), default=0)
    return Resident(counted, codes, largest, fp8)


def at_the_level(
    model: nn.Module, optimizer: Optimizer, recipe: Recipe, device: torch.device, gpu: bool = False
) -> tuple[Decisions, Optimizer]:
    """Bring a model on the meta device to a level for `device`; return what was decided, and what steps."""
    decisions = decide(model, optimizer, recipe, planned_for=device, like_gpu=gpu)
    with warnings.catch_warnings():  # they are in the report
        warnings.simplefilter("ignore", Fp8StackWarning)
        return decisions, carry_out(model, optimizer, decisions).returned or optimizer


def use_after_step(
    model: nn.Module,
    optimizer: Optimizer,
    decisions: Decisions | None = None,
    accumulate: bool = False,
) -> MemoryUse:
    """Count a model on the meta device as it is after a step, its gradients still there; none are left behind.

    decisions: what `initialize` decided, if the model is at a level.
    accumulate: FP8 gradients keep the residual of a sum.

    Raises:
        ModelError: for an optimizer that does not step on the meta device.
    """
    fp8 = decisions.quantized if decisions and decisions.recipe.gradients == "fp8" else set()
    for p in filter(lambda p: p.requires_grad, model.parameters()):
        p.grad = torch.empty_like(p)
        if p in fp8:
            p.grad = _quantized(p.shape, p.dtype).clone()
            if accumulate:
                p.grad.add_(p.grad)
    if isinstance(optimizer, BlockwiseOptimizer):
        optimizer.ensure_states()
    elif not optimizer.state:
        try:
            optimizer.step()
        except Exception as error:  # another library's: whatever it raises
            told = f"{type(optimizer).__name__} does not step on the meta device ({error!r})"
            raise ModelError(f"{told}. Return the model alone, to plan with AdamW.") from error
    if decisions and decisions.recipe.step_in_backward:
        model.zero_grad()  # each gradient is freed as soon as it was used
    use = measure(model, optimizer)
    model.zero_grad()
    return use


# Layers of a model have few shapes, and a cast on the meta device takes a hundredth of a second.


@lru_cache(maxsize=256)
def _codes_of(shape: torch.Size, dtype: torch.dtype, recipe: Recipe, turned: bool) -> int:
    """Return the bytes of a weight's codes and scales in the layout of backward."""
    weight = torch.empty(shape, dtype=dtype, device="meta")
    products = Products(recipe, turned=turned)
    cast = cast_weight(weight, products.options(False, dtype), True, 0)
    return cast.codes_t.nbytes + cast.scale_t.nbytes


@lru_cache(maxsize=256)
def _quantized(shape: torch.Size, dtype: torch.dtype) -> BlockScaledTensor:
    """Return an FP8 gradient on the meta device."""
    return BlockScaledTensor.quantize(torch.empty(shape, dtype=dtype, device="meta"))


def _add_bitsandbytes_states(model: nn.Module, optimizer: Optimizer) -> None:
    """Give a torch Adam the states that bitsandbytes' has: float32 for the small ones, its `min_8bit_size`."""
    for p in filter(lambda p: p.requires_grad, model.parameters()):
        states = "fp32" if p.numel() < 4096 else BITSANDBYTES
        for name in ("exp_avg", "exp_avg_sq"):
            optimizer.state[p].update(zero_moment(name, p, states))
