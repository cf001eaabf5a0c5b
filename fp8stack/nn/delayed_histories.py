"""The histories of delayed scaling, for checkpoints: scales that a model has learned of its own tensors.

They are in no `state_dict`, whose keys stay the plain model's. Without them a run that is resumed learns its scales
anew, and its first steps are rounded otherwise. Inputs and gradients are a rank's own, so each rank keeps its state.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fp8stack.errors import CheckpointError, Fp8StackWarning
from fp8stack.kernels.reference.delayed_state import DelayedState

from .linear import Fp8Linear


def scaling_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state of delayed scaling, empty where no layer scales so (copies).

    "LAYER.x" and "LAYER.g" are float32 [3 + amax_history_len] of input and gradient (`kernels/reference/cast_delayed`),
    "LAYER.casts" int64 [2] how often both were cast, and "LAYER.w" float32, 0-d, the weight's scale: 0 or absent if it
    has none.
    """
    state: dict[str, Tensor] = {}
    for name, (layer, both) in _delayed(model).items():
        state[f"{name}.casts"] = torch.tensor([history.casts for history in both.values()])
        for kind, history in both.items():
            if history.tensor is not None:
                state[f"{name}.{kind}"] = history.tensor.detach().clone()
        last = layer.products.w_state
        if last is not None and last.tensor is not None:
            state[f"{name}.w"] = last.tensor[0].detach().clone()
    return state


def load_scaling_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Take over what `scaling_state` returned, in a model with the same layers.

    Raises:
        CheckpointError: if the layers that scale so are others, or their histories of another length. Nothing is
            changed.
    """
    layers = _delayed(model)
    given = {key.rpartition(".")[0] for key in state}
    if layers.keys() != given:
        some = sorted(layers.keys() ^ given)[0]
        where = "the model" if some in layers else "the state"
        raise CheckpointError(
            f"the state of delayed scaling is of other layers: only {where} has {some!r}. Initialize the model as it "
            "was when the state was saved."
        )
    for name, (_, histories) in layers.items():
        for kind, history in histories.items():
            saved = state.get(f"{name}.{kind}")
            if saved is not None and saved.shape != (history.size,):
                raise CheckpointError(
                    f"the history of {name}.{kind} has {saved.numel()} elements, and the recipe's has {history.size}: "
                    "amax_history_len is another."
                )
    for name, (layer, histories) in layers.items():
        casts, device = state[f"{name}.casts"].tolist(), layer.weight.device
        for (kind, history), count in zip(histories.items(), casts, strict=True):
            # without one saved, there was no cast yet
            history.on(device).copy_(state.get(f"{name}.{kind}", torch.zeros(history.size)))
            history.casts = count
        last = layer.products.w_state
        if last is not None:
            last.on(device)[0] = state.get(f"{name}.w", 0.0)
            last.stream = None


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
        text = f"fp8stack: delayed scaling begins with empty histories: {error}"
        warnings.warn(text, Fp8StackWarning, stacklevel=3)


def _delayed(model: nn.Module) -> dict[str, tuple[Fp8Linear, dict[str, DelayedState]]]:
    """Return layers that scale so by name, with their histories of input and gradient."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, Fp8Linear):
            x, g = module.products.x_state, module.products.g_state
            if x is not None and g is not None:
                found[name] = module, {"x": x, "g": g}
    return found
