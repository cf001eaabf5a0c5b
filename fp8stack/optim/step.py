"""What the two backends of a step have in common: the parameters it is about, and what an algorithm may do with them.

`optimizer.py` takes a step in the same order whatever it runs on. `triton_step.py` keeps tables of pointers between
steps and launches one kernel for all parameters of a format; `reference_step.py` goes through the parameters one by one
in plain torch. Both hand an algorithm its parameters as a `Batch`.

Most algorithms update a batch at once. Some need something else between two passes, Muon its orthogonalization and
bitsandbytes its own update: the first pass updates the momentum and writes a direction instead of a weight, the second
one is a step of SGD without momentum, whose gradient is what became of that direction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fp8stack.formats import scale_shape
from fp8stack.kernels.reference.step import StepKind, StepTensors

from .gradients import gradient_parts
from .sharded import Share, local, local_state, reduce_largest, reduce_squares
from .state_formats import State, step_tensors

MATRICES = 2**26
"""Elements of matrices that are stepped together at most, where a step has two passes."""


class Entry(NamedTuple):
    """A parameter that has a gradient."""

    number: int  # its place among all parameters, which makes the noise of its rounding its own
    group: int  # the number of its group
    parameter: nn.Parameter
    state: State
    moments: tuple[str, ...]
    kind: StepKind

    def tensors(self) -> StepTensors:
        """Return what the step reads and writes; the weight may not lie in rows."""
        p = self.parameter
        assert p.grad is not None
        gradient = gradient_parts(local(p.grad).contiguous())
        return step_tensors(local(p).detach(), *gradient, self.moments, local_state(self.state))


class Piece(NamedTuple):
    """Some rows of one parameter of a batch."""

    number: int  # of the parameter in the batch
    start: int  # the first row
    shape: tuple[int, int]  # how many rows, of how many elements

    @property
    def blocks(self) -> int:
        return prod(scale_shape(self.shape))


class Batch(ABC):
    """Parameters that are stepped together: those of one launch, or a single one in plain torch."""

    entries: list[Entry]
    hyper: Tensor  # float32 [entries, 16], columns as `kernels.reference.step.HYPER`
    counts: Tensor  # float32 [entries]: the steps that each has taken, this one included
    divisible: bool  # whether `appliers` takes some rows of a parameter, or all of them only

    @property
    def kind(self) -> StepKind:
        return self.entries[0].kind

    @abstractmethod
    def step(self) -> None:
        """Update weights and states."""

    @abstractmethod
    def directions(self) -> Tensor:
        """Update the momenta of parameters of one shape; return the directions, bfloat16 [entries, *shape]."""

    @abstractmethod
    def apply(self, updates: Tensor, step_size: Tensor | float) -> None:
        """Decay the weights and subtract step_size × updates, which are stacked as `directions` returned them."""

    @abstractmethod
    def tensors(self, number: int) -> StepTensors:
        """Return the tensors of an entry as they are now, the weight in rows."""

    @abstractmethod
    def appliers(self, pieces: Sequence[Piece], update: Tensor) -> list[Callable[[], None]]:
        """Return for each piece what adds to it the float32 that the buffer `update` holds when it is called."""


class DeviceStep(ABC):
    """The step of the parameters of one device and one family of algorithms."""

    device: torch.device
    shares: list[Share | None]  # of all parameters of the optimizer
    stepped: list[nn.Parameter]  # those that have a gradient
    verdict: Tensor  # float32 [5], see `kernels/reference/step_scalars.py`

    @abstractmethod
    def set_groups(self, numbers: list[tuple[float, ...]], rates: list[tuple[int, Tensor]]) -> None:
        """Take the hyper-parameters of the groups, and (group, learning rate) of the rates that are on a GPU."""

    @abstractmethod
    def examine(self, scale: Tensor | None, found_inf: Tensor | None, clip: float | None) -> None:
        """Fill the verdict on these gradients, under a GradScaler's scale and verdict and with the norm to clip to."""

    @property
    @abstractmethod
    def squares(self) -> Tensor:
        """Sums of the squares of the gradients, float64, by share; what `examine` found, if there is a clip."""

    @abstractmethod
    def run(self, skipped: Tensor, step_batch: Callable[[Batch], None]) -> None:
        """Take the step that the verdict allows: `step_batch` for each batch. A step not taken is counted."""


def share_verdict(parts: Sequence[DeviceStep], want_norm: bool) -> None:
    """Let every device and every rank know the gradients of all: a step is taken by all or by none."""
    device, shares = parts[0].device, parts[0].shares
    if want_norm:
        squares = torch.stack([part.squares.to(device) for part in parts]).sum(0)
        norm = reduce_squares(dict(zip(shares, squares, strict=True))).sqrt().float()
        for part in parts:
            part.verdict[2:4].copy_(norm)
        return
    largest = torch.stack([part.verdict[3].to(device) for part in parts]).amax()
    reduce_largest(largest, shares)
    for part in parts:
        part.verdict[3].copy_(largest)


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
