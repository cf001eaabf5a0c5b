"""Muon's steps on one GPU: two launches, and a batch of matrix products between them, for each shape of matrix.

The plan's own table serves the first launch, which writes directions to a buffer where others write weights. A second
table of the same rows takes the orthogonalized directions as gradients. The buffers live while a shape is stepped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from fp8stack.kernels import step
from fp8stack.kernels.pointer_table import COLUMN, deal, upload_rows
from fp8stack.kernels.reference.step import StepKind, StepTensors

from . import plan
from .muon import BATCH, as_matrices, learning_rate_ratio, orthogonalize
from .passes import apply_hyper, apply_tensors, direction_tensors, split_kind

if TYPE_CHECKING:
    from .base import BlockwiseOptimizer


class Batch(NamedTuple):
    """Matrices that are orthogonalized together."""

    group: int
    shape: torch.Size
    apply: step.Launch  # the second launch
    number: int  # of the batch, where one would be too large


class MuonPlan(plan.Plan):
    """The tables and launches of matrices that Muon steps."""

    def __init__(
        self,
        optimizer: BlockwiseOptimizer,
        parameters: Sequence[tuple[int, int, nn.Parameter]],
        device: torch.device,
        family: str,
    ) -> None:
        self.groups_of_optimizer = optimizer.param_groups
        self._matrices: Counter[Any] = Counter()  # so far, by what a batch has in common
        super().__init__(optimizer, parameters, device, family)

    def launches_of(self, kind: StepKind, t: StepTensors, group: int) -> tuple[step.Launch, Batch]:
        direction, apply = split_kind(kind)
        buffer = self._buffer(t.weight.shape)
        first = step.launch_of(direction, direction_tensors(buffer, t))
        second = step.launch_of(apply, apply_tensors(buffer, t))
        batch = Batch(group, t.weight.shape, second, 0)
        size = max(1, BATCH // max(1, t.weight.numel()))
        number = self._matrices[first, batch] // size
        self._matrices[first, batch] += 1
        return first, batch._replace(number=number)

    def _buffer(self, shape: torch.Size) -> Tensor:
        """Return a tensor that stands for a direction, whose memory is not there yet."""
        return torch.empty(1, dtype=torch.bfloat16, device=self.device).expand(shape)

    def _build(self, keys: list[plan.Key], tensors: list[StepTensors]) -> None:
        super()._build(keys, tensors)
        start = 0
        for s in self.segments:
            buffer, mine = self._buffer(s.batch.shape), range(start, start + len(s.parameters))
            start += len(s.parameters)
            pieces = [apply_tensors(buffer, tensors[i]) for i in mine]
            rows = [step.table_row(t.weight.shape, **t._asdict()) for t in pieces]
            s.update = s.batch.apply
            s.weight_owner = deal(rows, step.programs, "first", self.device)
            s.weight_rows = upload_rows(rows, self.device)

    def step_segment(self, s: plan.Segment) -> None:
        if not s.batch.shape.numel():
            return
        group = self.groups_of_optimizer[s.batch.group]
        size = len(s.parameters), *s.batch.shape
        u = torch.empty(size, dtype=torch.bfloat16, device=self.device)
        s.rows[:, COLUMN["weight"]] = self._places(u)
        step.step_table(s.launch, s.rows, s.owner, s.hyper, s.amax, plan.FAST)
        o = orthogonalize(as_matrices(u), group).view(size)
        del u
        s.weight_rows[:, COLUMN["grad"]] = self._places(o)
        ratio = learning_rate_ratio(s.batch.shape, group)
        hyper = apply_hyper(s.hyper, s.hyper[:, 2] * ratio)
        step.step_table(s.update, s.weight_rows, s.weight_owner, hyper, s.amax, plan.FAST)

    def _places(self, stack: Tensor) -> Tensor:
        """Return the address of each tensor of a stack, int64."""
        numbers = torch.arange(len(stack), dtype=torch.int64, device=self.device)
        return numbers * (stack[0].numel() * stack.element_size()) + stack.data_ptr()
