"""What the two backends of a step have in common: the parameters it is about, their gradients, and steps of two passes.

`optimizer.py` takes a step in the same order whatever it runs on. `triton_step.py` keeps tables of pointers between
steps and launches one kernel for all parameters of a format; `reference_step.py` goes through the parameters one by one
in plain torch. Both hand an algorithm its parameters as a batch, with the same methods.

Most algorithms update a batch at once. Some need something else between two passes, Muon its orthogonalization and
bitsandbytes its own update: the first pass updates the momentum and writes a direction instead of a weight, the second
one is a step of SGD without momentum, whose gradient is what became of that direction.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from fp8stack.errors import GradientError
from fp8stack.formats import FLOATS
from fp8stack.kernels.reference.step import StepKind, StepTensors
from fp8stack.kernels.reference.step_scalars import seed_of
from fp8stack.tensor import BlockScaledTensor, plain
from fp8stack.tensor_kinds import DENSE_LAYER, check_dense

from .sharded import first_element, local, local_state
from .state_formats import State, is_second

MATRICES = 2**26
"""Elements of matrices that are stepped together at most, where a step has two passes."""


class Entry(NamedTuple):
    """A parameter that has a gradient."""

    number: int  # its place among all parameters
    group: int  # the number of its group
    parameter: nn.Parameter
    state: State
    moments: tuple[str, ...]
    kind: StepKind

    def seed(self) -> int:
        """Return what makes its noise its own; in a part of a sharded parameter it is that of the whole."""
        return seed_of(self.number, first_element(self.parameter))

    def tensors(self) -> StepTensors:
        """Return what the step reads and writes; the weight may not lie in rows."""
        p, state = self.parameter, local_state(self.state)
        assert p.grad is not None
        value, scale = state.get("remainder", state.get("master")), state.get("master_scale")
        moments: list[Tensor | None] = [None, None, None, None]
        for name in self.moments:
            at = 2 * is_second(name)
            moments[at] = state.get(f"{name}_code", state.get(name))
            moments[at + 1] = state.get(f"{name}_scale")
        g = local(p.grad).contiguous()
        gradient = (g.codes, g.scale) if isinstance(g, BlockScaledTensor) else (plain(g), None)
        return StepTensors(local(p).detach(), value, scale, *gradient, *moments)


class Piece(NamedTuple):
    """Some rows of one parameter of a batch."""

    number: int  # of the parameter in the batch
    start: int  # the first row
    shape: tuple[int, int]  # how many rows, of how many elements


def apply_kind(kind: StepKind) -> StepKind:
    """Return the kind of a second pass: SGD without momentum."""
    return StepKind("sgd", False, "", "", kind.master)


def two_passes(
    kind: StepKind, t: StepTensors, u: Tensor
) -> tuple[tuple[StepKind, StepTensors], tuple[StepKind, StepTensors]]:
    """Return kind and tensors of both passes: the first writes its directions to `u`, which the second applies."""
    first = kind._replace(master=""), t._replace(weight=u, master=None, master_scale=None)
    applied = StepTensors(t.weight, t.master, t.master_scale, u, *[None] * 5)
    return first, (apply_kind(kind), applied)


def apply_hyper(hyper: Tensor, step_size: float | Tensor) -> Tensor:  # float32 [..., 16]
    """Return the scalars of the second pass: the gradient's factor is in the direction already."""
    hyper = hyper.clone()
    hyper[..., 0], hyper[..., 2] = 1.0, step_size
    return hyper


def check_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Raise GradientError unless a step can read the gradient.

    Raises:
        GradientError: if it is sparse or complex, or of another shape, device or dtype than a step takes.
    """
    if (
        type(gradient) in (Tensor, BlockScaledTensor)
        and type(parameter) in (Tensor, nn.Parameter)
        and gradient.layout is torch.strided
        and gradient.shape == parameter.shape
        and gradient.device == parameter.device
        and gradient.dtype in FLOATS
    ):
        return  # as nearly all, and a step has hundreds
    shape = tuple(parameter.shape)
    remedy = f"{DENSE_LAYER}, or torch's own optimizer for this parameter"
    check_dense(gradient, f"a parameter of shape {shape}", remedy)
    if gradient.shape != parameter.shape or gradient.device != parameter.device:
        raise GradientError(
            f"the gradient of a parameter of shape {shape} on {parameter.device} has shape {tuple(gradient.shape)} on "
            f"{gradient.device}. Was the parameter moved or resized after backward()? Clear it: optimizer.zero_grad()."
        )
    placed, there = (getattr(x, "placements", None) for x in (parameter, gradient))
    if placed != there:
        raise GradientError(
            f"a parameter of shape {shape} is placed {placed} and its gradient {there}. "
            "Make both DTensors of one mesh: DTensor.from_local."
        )
    if gradient.dtype not in FLOATS:
        raise GradientError(
            f"the gradient of a parameter of shape {shape} is {gradient.dtype}; fp8stack's optimizers take float32, "
            "bfloat16, float16 and block-scaled FP8 gradients."
        )
