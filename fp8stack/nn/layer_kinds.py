"""The layers that are a product of their input and one matrix: torch's Linear, and transformers' Conv1D.

`nn.Linear` holds its weight as [out, in]. Conv1D, of which GPT-2 and its kin are made, holds it as [in, out]; it is no
convolution. Conv1D is known by its name, so that transformers is not imported.
"""

from __future__ import annotations

from torch import Tensor, nn

_CONV1D = ("transformers.pytorch_utils", "Conv1D")


def is_known(cls: type) -> bool:
    """Return whether a class is one of the two itself, so that it is known how it uses its weight."""
    return cls is nn.Linear or (cls.__module__, cls.__qualname__) == _CONV1D


def kind_of(module: nn.Module | None) -> type[nn.Module] | None:
    """Return which of the two classes `module` is of, or of what is made from it; None if it is no such layer."""
    return next(filter(is_known, type(module).__mro__), None)


def is_turned(layer: nn.Module) -> bool:
    """Return whether the weight of a layer is [in, out]."""
    return not isinstance(layer, nn.Linear)


def weight_of(layer: nn.Module) -> Tensor:
    """Return the weight of a layer as [out, in]: a view."""
    weight: Tensor = layer.weight  # type: ignore[assignment]
    return weight.t() if is_turned(layer) else weight


def sizes_of(layer: nn.Module) -> tuple[int, int]:
    """Return the numbers of features of a layer's output and of its input, as it tells them."""
    sizes = (layer.nf, layer.nx) if is_turned(layer) else (layer.out_features, layer.in_features)
    return sizes  # type: ignore[return-value]
