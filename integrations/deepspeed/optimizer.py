"""The optimizer that DeepSpeed gets: built from the JSON if that describes one, with groups ready for ZeRO.

ZeRO makes one flat tensor of each parameter group. Before it does, we split the groups: matrices, embeddings, small
parameters, and parameters with formats of their own (`skip`, `states_for`) get separate ones. So vectors keep float32
states, and no block mixes an embedding's rows with other weights. Groups are split in place, in the list that
schedulers share. A scheduler that was made before keeps one learning rate for each group it saw; then groups stay as
they are, and vectors are quantized with the matrices of their group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fp8stack import optim
from fp8stack.conflicts import ZERO, broken_rules, refuse, settings_of_optimizer
from fp8stack.conversion import MADE_WITH
from fp8stack.errors import ConfigError, ModelError, did_you_mean
from fp8stack.integrations.incompatibilities import TrainingRun
from fp8stack.levels import Recipe
from fp8stack.optim import BlockwiseOptimizer
from fp8stack.optim.state_formats import is_large_matrix

from .section import Section, stage_of

OURS: dict[str, Callable[..., torch.optim.Optimizer]] = {"FP8AdamW": optim.AdamW}
"""fp8stack's own optimizers, by the type that a JSON may give."""
_TORCH_S: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "lion": optim.Lion,
}  # fmt: skip
# Options that tell DeepSpeed or torch how to compute the same step. fp8stack has one way, so they are dropped.
_IMPLEMENTATION = ("torch_adam", "fused", "foreach", "adam_w_mode", "bias_correction")


def type_of(config: Mapping[str, Any]) -> str:
    """Return the type of the optimizer that the JSON describes, or an empty string."""
    return str((config.get("optimizer") or {}).get("type") or "")


def with_formats_of(given: Any, section: Section) -> Section:
    """Return the section with the formats of `given`, if it is fp8stack's; formats that the user set there stay."""
    if not isinstance(given, BlockwiseOptimizer) or section.recipe.states == "keep":
        return section
    own = {name: getattr(given, name) for name in MADE_WITH if name not in section.given}
    return replace(section, recipe=replace(section.recipe, **own))


def build(
    config: Mapping[str, Any], parameters: Iterable[Any], recipe: Recipe | None
) -> torch.optim.Optimizer:
    """Make the optimizer that the JSON describes; if it is fp8stack's, in the recipe's formats.

    DeepSpeed's "Adam" is AdamW unless `"adam_w_mode": false`.

    Raises:
        ConfigError: for a type or option that has no low-precision counterpart.
    """
    name, level = type_of(config), "O2" if recipe is None else recipe.level
    options = dict(config["optimizer"].get("params") or {})
    kind = OURS.get(name) or _TORCH_S.get(name.lower())
    if kind is None:
        known = [*OURS, "AdamW", "Adam", "SGD", "Lion"]
        raise ConfigError(
            f'"optimizer": {{"type": {name!r}}} in the DeepSpeed config has no low-precision counterpart, which '
            f"{level} needs.{did_you_mean(name, known)} Use one of {', '.join(known)}, or opt_level O1."
        )
    if name.lower() == "adam" and options.get("adam_w_mode", True):
        kind = torch.optim.AdamW
    if not options.get("bias_correction", True):
        raise ConfigError(
            f'"optimizer": {{"params": {{"bias_correction": false}}}} in the DeepSpeed config: {name} at {level} '
            "corrects its bias, as torch's does. Leave it out."
        )
    if name in OURS and recipe is not None and recipe.states != "keep":
        options = {**{key: getattr(recipe, key) for key in MADE_WITH}, **options}
    options = {  # lists are betas
        name: tuple(value) if isinstance(value, list) else value
        for name, value in options.items()
        if name not in _IMPLEMENTATION
    }
    try:
        for value in options.values():  # torch takes integers that no float can hold
            if isinstance(value, int):
                float(value)
        return kind(parameters, **options)
    except (TypeError, ValueError, OverflowError) as error:  # of an option or a value
        raise ConfigError(
            f'"optimizer": {{"params": {config["optimizer"].get("params")!r:.200}}} in the DeepSpeed config does not '
            f"fit {name} at {level}: {error}."
        ) from error


def check_optimizer(optimizer: Any, config: Mapping[str, Any], recipe: Recipe | None) -> None:
    """Raise for an optimizer that cannot step flat partitions: it has states, needs whole matrices or a scale a tensor.

    Raises:
        ConfigError: for such a format of the optimizer or a group.
        ModelError: for Muon, or an optimizer that has states.
    """
    stage = stage_of(config)
    changes = recipe is not None and recipe.states != "keep"
    if not isinstance(optimizer, torch.optim.Optimizer if changes else BlockwiseOptimizer):
        return
    if optimizer.state and (stage or TrainingRun(config).half):
        raise ModelError(
            f"{type(optimizer).__name__} has states of {len(optimizer.state)} parameters, and DeepSpeed steps others: "
            "ZeRO's partitions, or float32 copies. They would be lost. Pass an optimizer that has not stepped; "
            "engine.load_checkpoint brings states."
        )
    if stage:
        refuse(broken_rules(settings_of_optimizer(optimizer), [ZERO]))


def prepare_groups(optimizer: BlockwiseOptimizer, model: nn.Module, scheduled: bool) -> None:
    """Mark groups as flat for ZeRO, and split them by kind and formats, unless a scheduler knows them already.

    Frozen parameters get no group of their own: ZeRO takes no group without a trainable parameter.
    """
    if scheduled or any("initial_lr" in group for group in optimizer.param_groups):
        for group in optimizer.param_groups:
            group["flat"] = True
        return
    tables = (nn.Embedding, nn.EmbeddingBag)
    embeddings = {m.weight for m in model.modules() if isinstance(m, tables)}

    def kind(p: Tensor) -> tuple[str, str, str]:
        if not is_large_matrix(p, optimizer.min_numel):
            return "small", *optimizer.formats_of(p)
        return "embedding" if p in embeddings else "matrix", *optimizer.formats_of(p)

    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        parts: dict[tuple[str, str, str], list[Tensor]] = {}
        for p in sorted(group["params"], key=lambda p: not p.requires_grad):
            of = kind(p) if p.requires_grad or not parts else next(iter(parts))
            parts.setdefault(of, []).append(p)
        ordered = sorted(parts.items(), key=lambda item: item[0][0] == "small")
        for (what, states, master), part in ordered:
            own = {"flat": what != "small", "states": states, "master": master}
            groups.append({**group, **own, "params": part})
    optimizer.param_groups[:] = groups


def partitions_of(wrapper: Any) -> Iterator[tuple[int, Tensor]]:
    """Yield the flat tensors of ZeRO that the optimizer steps, each after the number of its group."""
    for i, partition in enumerate(getattr(wrapper, "fp32_partitioned_groups_flat", ())):
        yield wrapper.sub_group_to_group_id[i], partition  # stage 3 cuts groups
    for name in ("single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
        yield from enumerate(getattr(wrapper, name, ()))
