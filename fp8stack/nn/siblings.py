"""Layers that one module gives the same input: a graph casts it once with delayed scaling, as eager mode does.

A compiler removes calls that are equal, but layers scale by histories of their own, which makes their casts differ.
`share_inputs` lets the queries', keys' and values' layers of an attention take one history in graphs, and gate and up
of an MLP. Names say which to look at; whether they get one tensor is seen in a dry run of the module's forward, on
zeros, up to the last of them. Each argument that is given a tensor gets another one, so that cross-attention shows.
What breaks off before, wants arguments by name only, or goes by the latest amax keeps its own histories. So does
whatever else calls these layers with other inputs later: the scale is then made for the larger one.

In a graph whose compiler leaves equal calls (aot_eager), the input is cast for each as before, with a newer history.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from .linear import Fp8Linear
from .mixed import class_below

SIBLINGS = (
    ("q_proj", "k_proj", "v_proj"),  # Hugging Face's Llama and its kin
    ("wq", "wk", "wv"),  # Meta's
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)


def share_inputs(model: nn.Module) -> None:
    """Let siblings that get one input take the history of the first one's in graphs."""
    for module in model.modules():
        for names in SIBLINGS:
            layers: list[Any] = [module._modules.get(name) for name in names]
            if all(map(_scales_by_history, layers)) and _same_input(module, names):
                for layer in layers[1:]:
                    layer.products.graph_state = layers[0].products.x_state


def _scales_by_history(layer: Any) -> bool:
    state = layer.products.x_state if isinstance(layer, Fp8Linear) else None
    return state is not None and not state.most_recent


class _Seen(Exception):
    """All siblings have been called."""


class _Stand(nn.Module):
    """Stands in for a layer: notes its input and gives zeros; the last one ends the run."""

    def __init__(self, layer: nn.Linear, inputs: list[Tensor], of: int) -> None:
        super().__init__()
        self.size, self.inputs, self.of = layer.out_features, inputs, of

    def forward(self, x: Tensor) -> Tensor:
        self.inputs.append(x)
        if len(self.inputs) == self.of:
            raise _Seen
        return x.new_zeros((*x.shape[:-1], self.size))


@torch.no_grad()
def _same_input(module: nn.Module, names: tuple[str, ...]) -> bool:
    """Does the module's forward give the layers of these names one tensor?"""
    if "forward" in vars(module):  # a wrapper's
        return False
    layers: list[Any] = [module._modules[name] for name in names]
    forward = class_below(module).forward
    inputs: list[Tensor] = []
    stands = {n: _Stand(m, inputs, len(names)) for n, m in zip(names, layers, strict=True)}
    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    twin._modules = {**module._modules, **stands}
    _, *parameters = inspect.signature(forward).parameters.values()
    given = []
    for parameter in parameters:
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            break
        tensor = parameter.default in (parameter.empty, None)
        like = layers[0].weight
        given.append(like.new_zeros((1, 2, like.shape[1])) if tensor else parameter.default)
    try:
        with torch.random.fork_rng(devices=[]):
            forward(twin, *given)
    except _Seen:
        return all(x is inputs[0] for x in inputs)
    except Exception:  # it wants other arguments than tensors before it gets there
        return False
    return False
