"""The layers that are a product of their input and one matrix: torch's Linear, and transformers' Conv1D.

NonDynamicallyQuantizableLinear is torch's Linear under another name, which nn.MultiheadAttention has as its out_proj.

`nn.Linear` holds its weight as [out, in]. Conv1D, of which GPT-2 and its kin are made, holds it as [in, out]; it is no
convolution. Conv1D is known by its name, so that transformers is not imported.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

_CONV1D = ("transformers.pytorch_utils", "Conv1D")


def is_known(cls: type) -> bool:
    """Return whether a class is one of these itself, so that it is known how it uses its weight."""
    linear = cls is nn.Linear or cls is NonDynamicallyQuantizableLinear
    return linear or (cls.__module__, cls.__qualname__) == _CONV1D


def kind_of(module: nn.Module | None) -> type[nn.Module] | None:
    """Return which of these classes `module` is of, or of what is made from it; None if it is no such layer."""
    return next(filter(is_known, type(module).__mro__), None)


def is_turned(layer: nn.Module) -> bool:
    """Return whether the weight of a layer is [in, out]."""
    return not isinstance(layer, nn.Linear)


def weight_of(layer: nn.Module) -> Tensor:
    """Return the weight of a layer as [out, in]: a view."""
    weight: Tensor = layer.weight  # type: ignore[assignment]
    return weight.t() if is_turned(layer) else weight


def sizes_of(layer: nn.Module) -> tuple[int, int]:
    """Return the numbers of features of a layer's output and of its input, as it tells them.

    Those of an nn.MultiheadAttention are its in-projection's.
    """
    if isinstance(layer, nn.MultiheadAttention):
        return 3 * layer.embed_dim, layer.embed_dim
    return (layer.nf, layer.nx) if is_turned(layer) else (layer.out_features, layer.in_features)  # type: ignore[return-value]
