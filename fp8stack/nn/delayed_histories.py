"""The histories of delayed scaling, for checkpoints: scales that a model has learned of its own tensors.

They are in no `state_dict`, whose keys stay the plain model's. Without them a run that is resumed learns its scales
anew, and its first steps are rounded otherwise. Inputs and gradients are a rank's own, so each rank keeps its state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fp8stack.errors import CheckpointError, warn
from fp8stack.tensor_kinds import fault_of

from .attention import fp8_products


def scaling_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state of delayed scaling, empty where no layer scales so (copies).

    "LAYER.x" and "LAYER.g" are the states of input and gradient, float32 [3 + amax_history_len], laid out as in
    `kernels/reference/delayed_state`. "LAYER.casts", int64 [2], says how often each was cast. "LAYER.w", float32, 0-d,
    is the weight's scale: 0 or absent if it has none.
    """
    state: dict[str, Tensor] = {}
    for name, histories in _delayed(model).items():
        casts = [histories[kind].casts for kind in ("x", "g")]
        state[f"{name}.casts"] = torch.tensor(casts)
        for kind, history in histories.items():
            if history.tensor is not None:
                saved = history.tensor[0] if kind == "w" else history.tensor
                state[f"{name}.{kind}"] = saved.detach().clone()
    return state


@torch.no_grad()
def load_scaling_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Take over what `scaling_state` returned, in a model with the same layers.

    Raises:
        CheckpointError: if the layers that scale so are others, or their histories of another length. Nothing is
            changed.
    """
    check_scaling(state)
    layers = _delayed(model)
    given = {key.rpartition(".")[0] for key in state}
    if layers.keys() != given:
        some = sorted(layers.keys() ^ given)[0]
        where = "the model" if some in layers else "the state"
        raise CheckpointError(
            f"the state of delayed scaling is of other layers: only {where} has {some!r}. Initialize the model as it "
            "was when the state was saved."
        )
    for name, histories in layers.items():
        for kind in ("x", "g"):
            saved = state.get(f"{name}.{kind}")
            if saved is not None and saved.shape != (histories[kind].size,):
                raise CheckpointError(
                    f"the history of {name}.{kind} has {saved.numel()} elements, and the recipe's has "
                    f"{histories[kind].size}: amax_history_len is another."
                )
    owners = fp8_products(model)
    for name, histories in layers.items():
        device = next(owners[name].module.parameters()).device
        for kind, count in zip(("x", "g"), state[f"{name}.casts"].tolist(), strict=True):
            history = histories[kind]
            # without one saved, there was no cast yet
            history.on(device).copy_(state.get(f"{name}.{kind}", torch.zeros(history.size)))
            history.casts = count
        histories["w"].on(device)[0] = state.get(f"{name}.w", 0.0)
        histories["w"].stream = None


def check_scaling(state: Any) -> None:
    """Raise CheckpointError unless `state` is what `scaling_state` returns of some model."""
    for name, value in state.items() if isinstance(state, dict) else [("it", state)]:
        place, _, kind = name.rpartition(".") if isinstance(name, str) else ("", "", "")
        casts, problem = kind == "casts", f"is {value!r:.60}"
        if isinstance(value, Tensor) and not (problem := fault_of(value)):
            dtype, ndim = (torch.int64, 1) if casts else (torch.float32, int(kind != "w"))
            if value.dtype is not dtype or value.ndim != ndim or (casts and len(value) != 2):
                problem = f"is a tensor of shape {tuple(value.shape)}, {value.dtype}"
            elif value.numel() and not (value.min() >= 0 and value.max() < math.inf):
                problem = "holds NaN, infinities or negative numbers"
        known = isinstance(state, dict) and f"{place}.casts" in state
        if problem or not known or kind not in ("x", "g", "w", "casts"):
            raise CheckpointError(
                f"the state of delayed scaling is damaged: {name!r:.60} {problem or 'is unknown'}. Use an earlier "
                "checkpoint, or reset_scaling(model)."
            )


def reset_scaling(model: nn.Module) -> None:
    """Empty the histories of native layers, as of a new model: after passes that are not training's."""
    casts = {f"{name}.casts": torch.tensor([0, 0]) for name in _delayed(model)}
    load_scaling_state(model, casts)


def restore_scaling(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """As `load_scaling_state`, for a run that may be at another recipe now: what does not fit is a warning.

    Where no layer scales so there is nothing to load.
    """
    if not _delayed(model):
        return
    try:
        load_scaling_state(model, state)
    except CheckpointError as error:
        reset_scaling(model)
        warn(f"fp8stack: delayed scaling begins with empty histories: {error}", stacklevel=3)


def _delayed(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return what layers that scale so know, by name: the states of input, gradient and weight."""
    found = {}
    for name, (_, of, _) in fp8_products(model).items():
        if of.fp8_recipe == "delayed":
            found[name] = {"x": of.x_state, "g": of.g_state, "w": of.w_state}
    return found
