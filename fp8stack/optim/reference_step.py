"""A step in plain torch, one parameter at a time: on a CPU, and on GPUs without Triton."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp8stack.kernels.reference import norm
from fp8stack.kernels.reference.step import StepTensors
from fp8stack.kernels.reference.step import step as step_tensor
from fp8stack.kernels.reference.step_scalars import scalars

from .sharded import Share, share_of
from .step import Entry, Piece, apply_hyper, two_passes


class ReferenceStep:
    """One step of `entries`, which are all on `device` and of one family of algorithms; the next step makes another.

    shares: of all parameters of the optimizer.
    """

    verdict: Tensor  # float32 [5], see `kernels/reference/step_scalars.py`
    squares: Tensor  # of the gradients, summed by share: float64; where there is a norm to clip to

    def __init__(
        self, entries: list[Entry], device: torch.device, family: str, shares: list[Share | None]
    ) -> None:
        self.entries, self.device, self.family, self.shares = entries, device, family, shares
        self.stepped = [e.parameter for e in entries]
        self._tensors = [e.tensors() for e in entries]

    def set_groups(self, numbers: list[tuple[float, ...]], rates: list[tuple[int, Tensor]]) -> None:
        """Take the hyper-parameters of the groups, and (group, learning rate) of the rates that are on a GPU."""
        self._groups = torch.tensor(numbers, dtype=torch.float64).to(self.device)
        for g, rate in rates:
            self._groups[g, 0].copy_(rate)

    def examine(self, scale: Tensor | None, found_inf: Tensor | None, clip: float | None) -> None:
        """Fill the verdict on these gradients, under a GradScaler's scale and verdict and with the norm to clip to."""
        start = [1.0, math.inf if clip is None else clip, 0.0, 0.0, 0.0]
        self.verdict = torch.tensor(start, dtype=torch.float32, device=self.device)
        if scale is not None:
            self.verdict[0].copy_(1 / scale.to(self.device, torch.float32).reshape(()))
        if found_inf is not None:
            self.verdict[4].copy_(found_inf.reshape(()))
        gradients = [
            (share_of(e.parameter), (t.grad, t.grad_block_scale))
            for e, t in zip(self.entries, self._tensors, strict=True)
            if t.grad.numel()
        ]
        if clip is not None:
            zero = torch.zeros((), dtype=torch.float64, device=self.device)
            squares = dict.fromkeys(self.shares, zero)
            for share, parts in gradients:
                squares[share] = squares[share] + norm.sum_of_squares(*parts)
            self.squares = torch.stack(list(squares.values()))
            self.verdict[2:4].copy_(self.squares.sum().sqrt())
        elif gradients:
            largest = torch.stack([norm.largest(*parts) for _, parts in gradients]).amax()
            self.verdict[3].copy_(largest.abs())  # NaN without its sign

    def run(self, skipped: Tensor, step_batch: Callable[[ReferenceBatch], None]) -> None:
        """Take the step that the verdict allows: `step_batch` for each batch. A step not taken is counted."""
        steps = torch.stack([e.state["step"] for e in self.entries]).double()
        groups = self._groups[[e.group for e in self.entries]]
        seeds = torch.tensor([e.seed() for e in self.entries], device=self.device).int()
        present = torch.ones_like(seeds, dtype=torch.bool)
        hyper = scalars(self.family, groups, present, steps, self.verdict, skipped, seeds)
        rows = zip(self.entries, self._tensors, steps.split(1), hyper.split(1), strict=True)
        for entry, tensors, count, row in rows:
            # in a tensor of its own (DeepSpeed loads one for several), past the dict that would forget all tables
            dict.__setitem__(entry.state, "step", count[0].clone())
            if not tensors.grad.numel():
                continue
            # through a copy of the weight in rows, and of states that are not with it (offloaded)
            here: list[Any] = [x if x is None else x.to(self.device) for x in tensors]
            in_rows = StepTensors(*here)._replace(weight=tensors.weight.contiguous())
            step_batch(ReferenceBatch(entry, in_rows, row, count))
            for old, new in zip(tensors, in_rows, strict=True):
                # channels_last, or a transposed view: blocks are row-major
                if old is not None and new is not None and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class ReferenceBatch:
    """Parameters that are stepped together: here one."""

    # `appliers` takes all rows only: noise belongs to a place in the whole tensor
    divisible = False

    def __init__(
        self,
        entry: Entry,
        tensors: StepTensors,
        hyper: Tensor,  # float32 [entries, 16], columns as `kernels.reference.step.HYPER`
        counts: Tensor,  # float64 [entries]: the steps that each has taken, this one included
    ) -> None:
        self.entries, self.all, self.hyper, self.counts = [entry], tensors, hyper, counts
        self.kind = entry.kind

    def step(self) -> None:
        """Update weights and states."""
        step_tensor(self.kind, self.all, self.hyper[0])

    def directions(self) -> Tensor:
        """Update the momenta of parameters of one shape; return the directions, bfloat16 [entries, *shape]."""
        u = torch.zeros_like(self.all.weight, dtype=torch.bfloat16)
        first, _ = two_passes(self.kind, self.all, u)
        step_tensor(*first, self.hyper[0])
        return u.unsqueeze(0)

    def apply(self, updates: Tensor, step_size: Tensor | float) -> None:
        """Decay the weights and subtract step_size × updates, which are stacked as `directions` returned them."""
        _, second = two_passes(self.kind, self.all, updates.view(self.all.weight.shape))
        step_tensor(*second, apply_hyper(self.hyper, step_size)[0])

    def tensors(self, number: int) -> StepTensors:
        """Return the tensors of an entry as they are now, the weight in rows."""
        return self.all

    def appliers(self, pieces: Sequence[Piece], update: Tensor) -> list[Callable[[], None]]:
        """Return for each piece what adds to it the float32 that the buffer `update` holds when it is called."""
        update = update[: self.all.weight.numel()]
        return [partial(self.apply, update, -1.0)] * len(pieces)
