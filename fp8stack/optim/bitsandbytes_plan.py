"""bitsandbytes' step on one GPU: gradients examined together, tensors stepped part after part.

A part is a run of rows of about 2^24 elements: zeros, which bitsandbytes updates, and one launch of fp8stack's own step
that applies the update to weight and master. Its table row is the whole tensor's, with the program it starts from.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8stack.formats import rows_cols, scale_shape
from fp8stack.kernels import step
from fp8stack.kernels.pointer_table import COLUMN
from fp8stack.kernels.reference import bitsandbytes_format
from fp8stack.kernels.reference.step import StepKind, StepTensors

from .gradients import gradient_parts
from .passes import apply_hyper, split_kind
from .plan import Plan, Segment
from .state import State, step_tensors

if TYPE_CHECKING:
    from .bitsandbytes import BitsandbytesOptimizer

PART = 2**24


class BitsandbytesPlan(Plan):
    """A plan that examines all gradients at once, as any does, and then steps part after part."""

    def __init__(self, optimizer: BitsandbytesOptimizer, *args: Any) -> None:
        self.optimizer = optimizer
        super().__init__(optimizer, *args)

    def launches_of(self, kind: StepKind, t: StepTensors, group: int) -> Any:
        return super().launches_of(kind, t, group)[0], group

    def _row_major(self) -> list[tuple[Tensor, Tensor]]:
        held = super()._row_major()
        self.copies = {parameter.data_ptr(): weight for parameter, weight in held}
        return held

    def step_segment(self, s: Segment) -> None:
        if s is self.segments[0]:  # all of them, so that the host waits for the GPU once
            _step_parts(self.optimizer, self, self.copies)


def _step_parts(optimizer: BitsandbytesOptimizer, plan: Plan, copies: dict[int, Tensor]) -> None:
    """Step the parameters of a plan. `copies`: of weights that are not row-major, by their address."""
    scalars = torch.stack((plan.hyper[:, 0], plan.hyper[:, 4], plan.steps), 1).tolist()
    settings = [optimizer.settings_of(group) for group in optimizer.param_groups]
    segments = [s for s in plan.segments for _ in s.parameters]
    chosen = [(i, p) for i, p in enumerate(plan.parameters) if scalars[i][1]]
    parts = [(i, *part) for i, p in chosen for part in _parts(p, optimizer.state[p])]
    if not parts:
        return
    _, _, blocks, elements = zip(*parts, strict=True)
    owner = torch.zeros(max(blocks) // step.BLOCKS + 1, dtype=torch.int32, device=plan.device)
    buffer = torch.empty(max(elements), dtype=torch.float32, device=plan.device)
    # A row is that of the whole tensor, and so is noise; a part's programs are counted from its first.
    places = torch.tensor([(i, here.start) for i, here, *_ in parts], device=plan.device)
    number, start = places.unbind(1)
    rows, hyper = plan.rows[number], apply_hyper(plan.hyper[number], -1.0)
    rows[:, COLUMN["grad"]] = buffer.data_ptr() - 4 * start * rows[:, COLUMN["cols"]]
    rows[:, COLUMN["first"]] = start * rows[:, COLUMN["blocks_per_row"]] // -step.BLOCKS
    for (i, here, count, _), row, numbers in zip(parts, rows.split(1), hyper.split(1), strict=True):
        p, s, (grad_mul, _, n) = plan.parameters[i], segments[i], scalars[i]
        weight = copies.get(p.data_ptr(), p.detach())
        gradient = gradient_parts(p.grad.contiguous())  # type: ignore[union-attr]
        moments = optimizer.moments_of(optimizer.param_groups[s.batch])
        t = _rows_of(step_tensors(weight, *gradient, moments, optimizer.state[p]), here)
        u = optimizer.update(settings[s.batch], t, buffer, grad_mul, int(n))
        if u is not None:
            dtypes = (*s.launch.dtypes[:2], u.dtype, None, None)
            launch = s.launch._replace(kind=split_kind(s.launch.kind)[1], dtypes=dtypes)
            programs = owner[: -(-count // step.BLOCKS)]
            step.step_table(launch, row, programs, numbers, s.amax[:1])


def _parts(weight: Tensor, state: State) -> Iterator[tuple[slice, int, int]]:
    """Yield (its rows, blocks, elements of its update) of each part of about `PART` elements.

    Parts are multiples of 256 rows, and so start with a block of bitsandbytes' and a program of the step.
    """
    rows, cols = rows_cols(weight.shape)
    length = max(PART // max(cols, 1) // bitsandbytes_format.BLOCK, 1) * bitsandbytes_format.BLOCK
    if "master_scale" in state:  # of the whole tensor
        length = max(rows, 1)
    for start in range(0, rows, length):
        size = min(length, rows - start), cols
        elements = 0 if weight.dtype is torch.float32 else prod(size)
        yield slice(start, start + size[0]), prod(scale_shape(size)), elements


def _rows_of(t: StepTensors, here: slice) -> StepTensors:
    """Return the tensors of some rows."""
    rows, cols = rows_cols(t.weight.shape)
    if here == slice(0, rows):
        return t
    blocks = slice(
        *(-(-row * cols // bitsandbytes_format.BLOCK) for row in (here.start, here.stop))
    )
    pieces = [x if x is None or x.ndim == 0 else x[blocks if x.ndim == 1 else here] for x in t]
    return StepTensors(*pieces)  # type: ignore[arg-type]
