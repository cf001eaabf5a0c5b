"""Decide what each layer of a model becomes, then change its class; and change it back.

A layer is converted by assigning to `module.__class__`: parameters, hooks, names, ties and state_dict stay as they are,
`isinstance(layer, nn.Linear)` stays true, and nothing is copied. Only modules of exactly the class `nn.Linear`,
`nn.MultiheadAttention` or transformers' Conv1D (or `nn.Embedding`, for storage) are touched: a subclass may use its
weight in ways that cannot be known.

`choose_layers` only looks; the checks and the summary card are made from what it returns. `apply_gemms` and
`apply_storage` change the model.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from fp8stack.errors import did_you_mean
from fp8stack.levels import PRECISIONS, Recipe
from fp8stack.tensor_kinds import is_sharded, not_plain, whole_shape

from . import experts
from .attention import Bf16Attention, Fp8Attention, in_weights
from .bf16_storage import StoredLayer, StoredRows
from .casts import InputCodes, Products, WeightScale
from .forward_code import owners_read
from .frozen import choose_frozen
from .layer_kinds import is_known, is_turned, kind_of
from .linear import Bf16Layer, Fp8Layer
from .mixin import mix
from .precision import Precision
from .select import ALWAYS, NEVER, TOO_SMALL, LeastRows, least_rows_of
from .te import Engine, TeLayer

GEMM_LAYERS = (Fp8Layer, TeLayer, Bf16Layer, Fp8Attention, Bf16Attention, experts.Fp8Experts)
"""What `apply_gemms` makes of Linear and Conv1D layers, nn.MultiheadAttention, and experts of transformers."""
FAST_PATHS = (nn.TransformerEncoderLayer, nn.MultiheadAttention)
"""torch's modules that hand the weights in them to C++ in evaluation."""
RECURRENT = (nn.RNNBase, nn.RNNCellBase)
OWN_FORWARD = "its forward was set on the instance, which hides the class's; initialize before whatever does that"


@dataclass
class LayerChoices:
    """What happens to the layers of a model."""

    # Linear and Conv1D layers, attention and experts that change to FP8 (or bf16) GEMMs: name, module, and from how
    # many rows on it is in FP8 (None: always).
    gemm: list[tuple[str, nn.Module, LeastRows | None]] = field(default_factory=list)
    # Products that are in bfloat16 by the names of layers, as `Precision.of` returns them. Those with all of them are
    # not in `gemm`, and change to bf16 GEMMs.
    in_bf16: dict[str, str] = field(default_factory=dict)
    # Names of layers that make logits in bfloat16.
    heads: list[str] = field(default_factory=list)
    # Options without an effect, and what says so.
    idle: list[str] = field(default_factory=list)
    precision: Any = None  # a Precision
    # Such layers left out: name, reason and remedy.
    skipped: list[tuple[str, str]] = field(default_factory=list)
    # Weights to store in bfloat16.
    stored: list[tuple[str, nn.Parameter]] = field(default_factory=list)
    # Matrices that keep their dtype: name and reason.
    kept: list[tuple[str, str]] = field(default_factory=list)
    # Frozen weights, each with the reason for which it stays as it is, or "": to be kept in FP8.
    frozen: list[tuple[str, nn.Parameter, str]] = field(default_factory=list)


def choose_layers(
    model: nn.Module,
    recipe: Recipe,
    skipped: dict[nn.Module, str],
    quantized: set[nn.Parameter],
    by_size: bool = False,
    compute: str = "native",
) -> LayerChoices:
    """Return what `recipe` does to the layers of `model`, by class and size.

    `skipped` is what `skipped_modules` returned, `quantized` are the parameters whose states are converted. `by_size`
    leaves out layers for which FP8 does not pay, `compute` is what multiplies.
    """
    layers, excluded, unread = LayerChoices(), dict(skipped), dict[Any, str](skipped)
    for module in model.modules():
        if isinstance(module, FAST_PATHS):
            reason = f"{type(module).__name__} reads it itself in its fast path"
            excluded = dict.fromkeys(module.modules(), reason) | excluded
    precision = Precision(model, recipe, compute)
    layers.precision, layers.idle = precision, precision.idle
    least = least_rows_of(model) if by_size else {}
    seen: list[nn.Module] = []  # those that stay as they are, too: an option for them is no mistake
    for name, module in model.named_modules():
        known = isinstance(module, (nn.MultiheadAttention, *RECURRENT)) or kind_of(module)
        if not (known or experts.is_experts(module)):
            continue
        seen.append(module)
        rows, reason = least.get(name, ALWAYS), unread.get(module) or _unfit(module, compute)
        if by_size and not known and not reason:
            rows = experts.least_rows_of(module)
        if reason := reason or (TOO_SMALL if rows == NEVER else ""):
            layers.skipped.append((name, reason))
            inner = module._modules.get("out_proj")
            if type(inner) is NonDynamicallyQuantizableLinear:  # whose forward nobody calls
                unread.setdefault(inner, reason)
            continue
        products, reason = precision.of(module) if compute != "bf16" else ("", "")
        if products not in ("", PRECISIONS["bf16"]) and experts.is_experts(module):
            layers.idle.append(f"experts make no single products in bfloat16: {name} ({products})")
        elif products:
            layers.in_bf16[name] = products
            layers.heads += [name] * (module in precision.heads and "forward" in products)
            if products == PRECISIONS["bf16"]:
                layers.skipped.append((name, reason))
                continue
        layers.gemm.append((name, module, None if rows == ALWAYS else rows))
    unmet = precision.unmet(seen) if compute != "bf16" else ()
    layers.idle += [f"{x}: no effect (no layer there, or another option decides)" for x in unmet]
    if recipe.frozen == "fp8":
        chosen = {m for _, m, _ in layers.gemm}
        layers.frozen = choose_frozen(model, chosen, dict(layers.skipped), compute)
    if recipe.master != "keep":
        # The mode of matmuls=True, in which all of the model runs, takes weights of another dtype than activations.
        read = {} if recipe.matmuls is True else _read_by_hand(model)
        _choose_storage(model, layers, excluded, quantized, read)
    return layers


def apply_gemms(model: nn.Module, layers: LayerChoices, compute: str, recipe: Recipe) -> None:
    """Turn the planned layers to GEMMs of `compute`: "te", "native" or "bf16"."""
    inputs = InputCodes()
    scales: dict[torch.Tensor, WeightScale | None] = {}  # of weights that layers may share
    for name, in_bf16 in layers.in_bf16.items():
        module = model.get_submodule(name)
        if in_bf16 == PRECISIONS["bf16"] and not experts.is_experts(module):
            attends = isinstance(module, nn.MultiheadAttention)
            kind: Any = nn.MultiheadAttention if attends else kind_of(module)
            mix(module, Bf16Attention if attends else Bf16Layer, kind, layer_name=name)
    for name, module, least in layers.gemm:
        weight: Any = module._parameters.get("weight")
        in_bf16 = layers.in_bf16.get(name, "")
        attends = isinstance(module, nn.MultiheadAttention)
        # FSDP2's class may lie over it, and is put back afterwards.
        kind = nn.MultiheadAttention if attends else kind_of(module)
        if experts.is_experts(module):
            own = replace(recipe, fp8_recipe="current")
            pair = tuple(Products(own, name, least_rows=least) for _ in range(2))
            tried = module._modules.get("act_fn"), experts.activation_of(module)
            kind = experts.class_of_experts(module)
            mix(module, experts.Fp8Experts, kind, products=pair, tried=tried)
        elif compute == "te":
            mix(module, TeLayer, kind, te=Engine(recipe, weight, name))
        elif compute == "bf16":
            mix(module, Bf16Attention if attends else Bf16Layer, kind, layer_name=name)
        elif attends:
            device = next(module.parameters()).device
            three = tuple(
                Products(recipe, name, device, False, inputs, None, least, in_bf16)
                for _ in range(3)
            )
            mix(module, Fp8Attention, kind, layer_name=name, in_products=three)
        else:
            shared, turned = scales.get(weight), is_turned(module)
            products = Products(recipe, name, weight.device, turned, inputs, shared, least, in_bf16)
            scales[weight] = products.w_state
            mix(module, Fp8Layer, kind, products=products)


def apply_storage(model: nn.Module, layers: LayerChoices) -> None:
    """Let the modules around weights that are now bfloat16 compute in the dtype they had (call before the change)."""
    stored = {p: p.dtype for _, p in layers.stored if p.dtype is not torch.bfloat16}
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight not in stored:
            continue
        if type(module) is nn.Embedding:
            mix(module, StoredRows, output_dtype=stored[weight])
        elif is_known(type(module)):
            mix(module, StoredLayer)


def skipped_modules(
    model: nn.Module, recipe: Recipe, sharded: bool = False
) -> tuple[dict[nn.Module, str], list[str]]:
    """Return the modules to leave alone with the reasons, and what to warn of.

    They are those that `recipe.skip` names, with everything in them, and those of tensor parallelism. `sharded` says
    that sharded parameters are FSDP2's, which gathers them.
    """
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    skipped: dict[nn.Module, str] = {}
    idle = []
    for pattern in recipe.skip:
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            idle.append(
                f"skip={pattern!r} matches no module of the model.{did_you_mean(pattern, names)} "
                "Patterns are compared with whole names, such as blocks.0.head; *head matches any that end in it"
            )
        for name in matching:
            inner = model.get_submodule(name).modules()
            skipped.update(dict.fromkeys(inner, f'matches skip="{pattern}"'))
    split = {
        module: name for name, module in model.named_modules()
        if not sharded and module not in skipped and any(map(is_sharded, module._parameters.values()))
    }  # fmt: skip
    if split:
        idle.append(f"{len(split)} sharded modules (DTensor) are torch's: {[*split.values()][:3]}")
        skipped.update(dict.fromkeys(split, "its parameters are sharded (DTensor)"))
    return skipped, idle


def _unfit(module: nn.Module, compute: str) -> str:
    """Return why this layer cannot run FP8 GEMMs and what to do about it, or an empty string."""
    if isinstance(module, RECURRENT):
        return "one kernel of torch's or cuDNN's makes its products step by step, and takes no FP8"
    if "forward" in vars(module):
        return OWN_FORWARD
    if experts.is_experts(module):
        other = "" if compute == "native" else f'compute="{compute}" leaves experts to transformers'
        return other or experts.unfit(module)
    attends = isinstance(module, nn.MultiheadAttention)
    names = in_weights(module) if attends else ("weight",)
    weights: list[Any] = [module._parameters.get(name) for name in names]
    if any(weight is None for weight in weights):  # such a module may be of a class of its own
        return "its weight is computed (weight_norm, ...); remove that before initialize"
    if not is_known(type(module)) and type(module) is not nn.MultiheadAttention:
        below = "transformers' Conv1D" if is_turned(module) else "nn.Linear"
        below = "nn.MultiheadAttention" if attends else below
        return (
            f"is a {type(module).__name__}, a subclass of {below} that may use its weight otherwise"
        )
    if kind := next(filter(None, map(not_plain, weights)), ""):
        return f"its weight is {kind}; FP8 GEMMs take float32, bfloat16 and float16"
    if isinstance(module, nn.MultiheadAttention):
        if compute == "te":
            return 'TransformerEngine has layers for Linear only; compute="native" takes it'
        if module.bias_k is not None or module.add_zero_attn:
            return "it has add_bias_kv or add_zero_attn, which only torch's own forward computes"
        return (reason := _unfit(module.out_proj, compute)) and f"its out_proj: {reason}"
    labels = ("nx", "nf") if is_turned(module) else ("out_features", "in_features")
    for label, size in zip(labels, whole_shape(weights[0]), strict=True):
        if size == 0:
            return f"it has 0 {label}: there is nothing to multiply"
    return ""


def _choose_storage(
    model: nn.Module,
    layers: LayerChoices,
    excluded: dict[nn.Module, str],
    quantized: set[nn.Parameter],
    obstacles: dict[nn.Parameter, str],
) -> None:
    """Fill in which weights become bfloat16 + remainder: of plain Linear, Conv1D and Embedding layers only.

    Any other owner or reader may hand the weight to an operation that wants it in the dtype of the activations, so it
    keeps its dtype and is its own master. A model that is already bfloat16 has nothing to convert: all its matrices
    qualify.

    obstacles: by weight, why it keeps its dtype; those of its owners are added.
    """
    taken = {module for _, module, _ in layers.gemm if experts.is_experts(module)}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if module in taken and name in experts.stacks_of(module):
                continue
            if parameter is not None and (reason := _storage_obstacle(module, name, excluded)):
                obstacles.setdefault(parameter, reason)
    storages = Counter(_storage_of(p) for p in model.parameters() if not not_plain(p))
    for name, parameter in model.named_parameters():
        if parameter not in quantized:
            continue
        reason = obstacles.get(parameter, "")
        if not reason and storages[_storage_of(parameter)] > 1:
            reason = "shares its storage with another parameter; tie them: a.weight = b.weight"
        if reason and parameter.dtype is not torch.bfloat16:  # whose storage stays as it is
            layers.kept.append((name, reason))
        else:
            layers.stored.append((name, parameter))


def _read_by_hand(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return the weights that a forward around their layers reads, as h @ self.embed.weight.t() does, and which does.

    `getattr`, or a layer in a variable of another name, are not found: skip="layer" is then for the user to say.
    """
    found: dict[Any, str] = {}
    owners = {kind: owners_read(kind) for kind in {type(m) for m in model.modules()}}
    for module in model.modules():
        kind = type(module)
        told = f"{kind.__name__} reads it itself"
        for name, inner in module.named_modules() if owners[kind] else ():
            if name.rpartition(".")[2] in owners[kind]:
                found.setdefault(inner._parameters.get("weight"), told)
    return found


def _storage_of(parameter: nn.Parameter) -> int:
    """Return where the storage of `parameter` is; one on the meta device has no address."""
    storage = getattr(parameter.data, "_local_tensor", parameter).untyped_storage()
    return storage.data_ptr() or int(storage._cdata)


def _storage_obstacle(module: nn.Module, name: str, excluded: dict[nn.Module, str]) -> str:
    """Return why the parameter `name` of `module` keeps its dtype, or an empty string."""
    if module in excluded:
        return excluded[module]
    if not (type(module) is nn.Embedding or is_known(type(module))) or name != "weight":
        return f"{type(module).__name__} uses it directly"
    if "forward" in vars(module):
        return OWN_FORWARD
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        return "Embedding with max_norm rewrites its weight in the forward pass"
    return ""
