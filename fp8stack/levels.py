"""The levels O0, O1 and O2: one table of recipes that code, card and documentation read.

| level | GEMMs of Linear layers | gradients of matrices | weights        | Adam's m and v |
|-------|------------------------|-----------------------|----------------|----------------|
| O0    | FP8                    | the user's            | the user's     | the user's     |
| O1    | FP8                    | E4M3, block 128       | the user's     | the user's     |
| O2    | FP8                    | E4M3, block 128       | bf16 + 8 bits  | 8-bit blocks   |

A `Recipe` is frozen; `recipe_for("O2", skip=["*head"])` returns the level's recipe with fields overridden, and
refuses names and values it does not know.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from .conflicts import refuse_conflicts
from .errors import ConfigError, did_you_mean

CHOICES: Mapping[str, tuple[Any, ...]] = MappingProxyType({
    "compute": ("auto", "te", "native", "bf16"),
    "fp8_format": ("hybrid", "e4m3", "e5m2"),
    "fp8_recipe": ("auto", "current", "tokenwise", "rowwise", "delayed", "blockwise", "mxfp8", "nvfp4"),
    "amax_compute_algo": ("max", "most_recent"),
    "select": ("auto", "all"),
    "head": ("auto", "fp8", "forward-bf16", "bf16"),
    "wgrad": ("fp8", "bf16"),
    "frozen": ("keep", "fp8"),
    "gradients": ("keep", "fp8"),
    "states": ("keep", "8bit", "fp8", "4bit", "fp8-lm", "bf16", "fp32"),
    "master": ("keep", "auto", "split24", "split32", "fp16", "fp32", "none"),
    "optimizer_backend": ("auto", "fp8stack", "bitsandbytes", "bitsandbytes-paged"),
    "offload": ("none", "cpu"),
    "fuse": (True, False), "fuse_loss": (False, True), "matmuls": ("auto", True, False),
    "step_in_backward": (False, True), "fp8_fast_accum": (None, False, True),
})  # fmt: skip
PRECISIONS: Mapping[str, str] = MappingProxyType({
    "fp8": "", "forward-bf16": "forward", "backward-bf16": "dgrad wgrad", "wgrad-bf16": "wgrad",
    "bf16": "forward dgrad wgrad",
})  # fmt: skip
"""How a layer multiplies, and its products that are then in bfloat16 (`fp8stack/nn/precision.py`)."""

FINITE = sys.float_info.max
_LIMITS = {
    "fp8_margin": (0, 16), "first_last": (0, FINITE), "amax_history_len": (1, 2**16), "min_numel": (0, FINITE),
}  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """What a level does. Every field can be overridden in `fp8stack.initialize(...)`.

    Attributes:
        compute: how Linear layers multiply. "native": FP8 by fp8stack's own layers. "te": FP8 by TransformerEngine.
            "bf16": bfloat16. "auto": native where the device can, te for recipes that native layers do not have on this
            device, bf16 with a warning where there is no FP8; the card says which and why.
        fp8_format: "hybrid" (E4M3 forward, E5M2 for the gradients of activations), "e4m3" (E4M3 for both) or "e5m2"
            (E5M2 for activations and gradients; weights stay E4M3, since no GPU multiplies E5M2 by E5M2).
        fp8_recipe: where scales come from. "current": the tensor's own largest magnitude. "tokenwise": in forward, that
            of each token of an activation; all else as "current". "rowwise": that of each row of an operand as the
            product reads it. "delayed": that of the tensor's last `amax_history_len` casts, one a micro-batch.
            "blockwise": one for each 1×128 of activations and gradients and 128×128 of weights, and of activations in
            the products that give weights' gradients, E4M3 throughout. "mxfp8", "nvfp4": TransformerEngine's, on
            Blackwell. "auto": "tokenwise" where native layers multiply so, else "current".
        fp8_margin: with "delayed", scales leave room for 2^margin times the largest magnitude of the history.
        amax_history_len: with "delayed", how many casts count.
        amax_compute_algo: with "delayed", whether the "max" of these casts counts, or the "most_recent" one.
        fp8_fast_accum: True sums forward products with fewer bits (about 14 on Hopper's tensor cores), which is faster.
            Products of gradients are never summed so. None: False, except with TransformerEngine's "delayed", which
            always sums fast.
        select: on a GPU, "auto" multiplies in FP8 only where that is faster, by the sizes of a layer and its rows of
            input (`fp8stack/nn/select.py`); "all" always does.
        fuse: True joins RMSNorms and MLPs with the casts around them (`fp8stack/nn/mlp.py`): on a GPU, with native
            layers, and not for weights that FSDP2 or DeepSpeed hold.
        fuse_loss: True computes head and loss of transformers' causal language models together, in chunks, without the
            logits in memory (`fp8stack/nn/deferred_logits.py`). Your own models call `fp8stack.linear_cross_entropy`.
        matmuls: "auto" multiplies by bare parameters in FP8 too (x @ self.w, einsum, F.linear, stacks), in modules that
            own them, or that read another's weight, and have a product in their code; True anywhere in the forward
            pass.
        head: how the layer that makes logits multiplies (`fp8stack/nn/heads.py`): "fp8", "bf16", or "forward-bf16",
            logits in bfloat16 and the products of their gradients in FP8, with block scales; where there are none, and
            with TransformerEngine, that means "bf16". "auto": "forward-bf16" where such a layer is found.
        first_last: how many blocks at the start, and as many at the end of the model, multiply in bfloat16.
        wgrad: "bf16" makes the gradients of weights in bfloat16, "fp8" in FP8.
        precision_for: how single layers multiply: a dict from fnmatch patterns of module names to "fp8",
            "forward-bf16", "backward-bf16", "wgrad-bf16" or "bf16", e.g. `{"*q_proj": "forward-bf16"}`. The last
            pattern that matches counts, and overrides `head` and `first_last`; what `wgrad` says is added, except to
            "fp8".
        frozen: "fp8" keeps in E4M3, one byte an element, those weights of Linear layers that are frozen
            (requires_grad=False) when `initialize` is called, as the base of adapters (`fp8stack/nn/frozen.py`).
        gradients: "fp8" turns the gradient of every quantized matrix into E4M3 blocks during backward.
        states: "8bit", "fp8", "4bit", "fp8-lm", "bf16", "fp32"; see `fp8stack/optim/state_formats.py`.
        master: "split24" (bfloat16 weight + 8 bits), "split32", "fp16" (FP8-LM's), "fp32", "none" (stochastic
            rounding), or "auto": "split24", but "split32" in parameter groups with a learning rate below 1e-5, whose
            updates are too small for 24 bits. The rate is the group's at `initialize`, or the "initial_lr" of a
            scheduler made before.
        skip: fnmatch patterns of module names to leave entirely as they are, e.g. `("*head",)`.
        min_numel: matrices with fewer elements, and all vectors, keep full-precision gradients and states.
        states_for: formats of single parameters, a dict from fnmatch patterns of parameter or module names to states,
            or to a dict of "states" and "master", e.g. `{"*embed*": "fp32", "head": {"states": "4bit", "master":
            "none"}}`.
        step_in_backward: step each parameter when its gradient arrives, and free the gradient; only in one process,
            without accumulation, clipping by a global norm and GradScaler.
        offload: "cpu" keeps optimizer states and remainders in pinned host memory: 3 bytes a parameter less on the GPU.
            The step reads and writes them across the bus and takes as long as that transfer.
        optimizer_backend: the library that steps if states are "8bit". "fp8stack": its own kernels. "bitsandbytes",
            "bitsandbytes-paged": bitsandbytes' optimizers, see `fp8stack/optim/bitsandbytes.py`. "auto": bitsandbytes,
            with a warning, on a GPU without FP8 if it is installed; else fp8stack.
    """

    level: str
    compute: str = "auto"
    fp8_format: str = "hybrid"
    fp8_recipe: str = "auto"
    fp8_margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    fp8_fast_accum: bool | None = None
    select: str = "auto"
    fuse: bool = True
    fuse_loss: bool = False
    matmuls: Any = "auto"
    head: str = "auto"
    first_last: int = 0
    wgrad: str = "fp8"
    precision_for: Any = ()
    frozen: str = "keep"
    gradients: str = "keep"
    states: str = "keep"
    master: str = "keep"
    skip: tuple[str, ...] = ()
    min_numel: int = 4096
    states_for: Any = ()
    step_in_backward: bool = False
    offload: str = "none"
    optimizer_backend: str = "auto"

    def __post_init__(self) -> None:
        for name in CHOICES:
            object.__setattr__(self, name, check_choice(name, getattr(self, name)))
        for name, (least, most) in _LIMITS.items():
            number = check_number(name, getattr(self, name), least, most, whole=True)
            object.__setattr__(self, name, number)
        are_patterns = isinstance(self.skip, (list, tuple))
        if not are_patterns or not all(isinstance(pattern, str) for pattern in self.skip):
            raise ConfigError(f'skip={self.skip!r} must be a list of patterns, such as ["*head"].')
        object.__setattr__(self, "skip", tuple(self.skip))
        object.__setattr__(self, "states_for", _formats(self.states_for))
        object.__setattr__(self, "precision_for", _precisions(self.precision_for))
        refuse_conflicts(self)


OPTIONS = tuple(f.name for f in fields(Recipe) if f.name != "level")
"""The fields of a recipe that can be overridden."""


def check_choice(
    name: str, value: Any, known: tuple[Any, ...] | None = None, where: str = ""
) -> Any:
    """Return the one of `known` (by default of CHOICES[name]) that `value` is; enums of strings and NumPy's will do.

    Raises:
        ConfigError: if it is none of them.
    """
    known, value = CHOICES[name] if known is None else known, plain_number(value)
    for one in known:
        if isinstance(value, type(one)) and value == one:
            return one
    listed = ", ".join(f'"{k}"' if isinstance(k, str) else str(k) for k in known)
    meant = did_you_mean(str(value), map(str, known))
    told = f"{where}{name} must be one of {listed}"
    raise ConfigError(f"{told}; {name}={value!r} is not a choice.{meant}")


def check_number(
    name: str,
    value: Any,
    least: float = 0,
    most: float = FINITE,
    rule: str = "",
    whole: bool = False,
) -> Any:
    """Return `value`, a number of Python's or NumPy's, as a float, or as an int if it is to be `whole`.

    least, most: the range, which includes both. `rule` says it in words where they do not.

    Raises:
        ConfigError: if it is no number, or out of range.
    """
    plain = plain_number(value)
    right = type(plain) is int if whole else isinstance(plain, (int, float))
    # An integer of hundreds of digits is no float.
    right = right and (isinstance(plain, float) or abs(plain) <= FINITE)
    if not (right and least <= plain <= most):
        rule = rule or (f">= {least}" if most >= FINITE else f"from {least} to {most:,}")
        kind = "an integer" if whole else "a finite number" if most <= FINITE else "a number"
        raise ConfigError(f"{name}={value!r} must be {kind} {rule}.")
    return plain if whole else float(plain)


def plain_number(value: Any) -> Any:
    """Return a scalar of NumPy's as Python's."""
    numpy = type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0
    return value.item() if numpy else value


def _formats(given: Any) -> tuple[tuple[str, str, str], ...]:
    """Return `states_for` as (pattern, states, master), "" for what is not given."""
    held = isinstance(given, tuple)  # what this returned
    if held and all(isinstance(x, tuple) and list(map(type, x)) == [str] * 3 for x in given):
        pairs = ((p, {"states": states, "master": master}) for p, states, master in given)
        given = {p: {name: value for name, value in own.items() if value} for p, own in pairs}
    told = f'states_for={given!r} must be a dict of patterns and formats, or dicts of "states" and "master"'
    if not isinstance(given, Mapping):
        raise ConfigError(f'{told}, such as {{"*embed*": "fp32"}}.')
    result = []
    for pattern, value in given.items():
        formats = {"states": value} if isinstance(value, str) else value
        known = isinstance(formats, Mapping) and formats.keys() <= {"states", "master"}
        if not known or not isinstance(pattern, str):
            raise ConfigError(f"{told}: not {pattern!r}: {value!r}.")
        where = f"states_for[{pattern!r}]: "
        own = {n: check_choice(n, v, where=where) for n, v in formats.items()}
        result.append((pattern, own.get("states", ""), own.get("master", "")))
    return tuple(result)


def _precisions(given: Any) -> tuple[tuple[str, str], ...]:
    """Return `precision_for` as pairs of a pattern and one of PRECISIONS."""
    where = f"precision_for={given!r}: "
    pairs = given.items() if isinstance(given, Mapping) else given
    if not isinstance(given, (Mapping, list, tuple)) or not all(
        isinstance(pair, (tuple, list)) and len(pair) == 2 and pair[0] and isinstance(pair[0], str)
        for pair in pairs
    ):
        raise ConfigError(f'{where}give a dict of patterns, such as {{"*q_proj": "forward-bf16"}}.')
    return tuple((p, check_choice("precision", v, tuple(PRECISIONS), where)) for p, v in pairs)


LEVELS: Mapping[str, Recipe] = MappingProxyType({
    "O0": Recipe("O0"),
    "O1": Recipe("O1", gradients="fp8"),
    "O2": Recipe("O2", gradients="fp8", states="8bit", master="auto"),
})  # fmt: skip

_FP8_LM: Mapping[str, Any] = MappingProxyType({"states": "fp8-lm", "master": "fp16"})
PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType({"fp8-lm": _FP8_LM})
"""Named sets of overrides for O2. "fp8-lm" keeps the state formats of the FP8-LM paper."""


def recipe_for(opt_level: str, preset: str | None = None, **overrides: Any) -> Recipe:
    """Return the recipe of a level with a preset and single fields overridden.

    Raises:
        ConfigError: for an unknown level, preset, field or value; the message names the nearest known one.
    """
    check_choice("opt_level", opt_level, tuple(LEVELS))
    check_choice("preset", preset, (None, *PRESETS))
    if preset is not None and opt_level != "O2":
        raise ConfigError(f'preset={preset!r} names states, which only opt_level="O2" converts.')
    named = {} if preset is None else PRESETS[preset]
    for name in overrides:
        check_choice("option", name, OPTIONS)
    return replace(LEVELS[opt_level], **{**named, **overrides})
