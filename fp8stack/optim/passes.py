"""A step in two passes, with something else between them: Muon's orthogonalization, an update by bitsandbytes.

The first updates the momentum and writes a direction instead of a weight; the second is a step of SGD without momentum,
whose gradient is what became of that direction.
"""

from __future__ import annotations

from torch import Tensor

from fp8stack.kernels.reference.step import StepKind, StepTensors


def split_kind(kind: StepKind) -> tuple[StepKind, StepKind]:
    """Return the kinds of the two passes: one that updates the momentum, one that applies a direction."""
    return kind._replace(master=""), StepKind("sgd", False, "", "", kind.master)


def direction_tensors(u: Tensor, t: StepTensors) -> StepTensors:
    """Return the tensors of the first pass, which writes the direction to `u`."""
    return t._replace(weight=u, master=None, master_scale=None)


def apply_tensors(direction: Tensor, t: StepTensors) -> StepTensors:
    """Return the tensors of the second pass, whose gradient is the direction."""
    return StepTensors(t.weight, t.master, t.master_scale, direction, *[None] * 5)


def apply_hyper(hyper: Tensor, step_size: float | Tensor) -> Tensor:  # float32 [..., 16]
    """Return the scalars of the second pass: the gradient's factor is in the direction already."""
    hyper = hyper.clone()
    hyper[..., 0], hyper[..., 2] = 1.0, step_size
    return hyper
