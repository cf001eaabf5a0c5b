"""The launches of an optimizer's step on one GPU, kept from step to step.

A plan holds a table of pointers with a row for each parameter (`kernels/pointer_table.py`), sorted by launch:
parameters of the same formats share one, whatever group they are in, since every hyper-parameter is read from a table
too. A step then is

    a check       are these the parameters, addresses and gradients of last time?   host; else upload, or plan anew
    examine       largest gradient, or norm                                         one launch per gradient dtype
    scalars       skip or not, clip, bias corrections, step counts                  one launch
    step          everything else                                                   one launch per format

and the host never waits. Gradients usually change address every step: their columns are uploaded again, if so.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from fp8stack.kernels import norm, step, step_scalars
from fp8stack.kernels.pointer_table import COLUMN, deal, upload, upload_rows
from fp8stack.kernels.reference.step import StepKind, StepTensors
from fp8stack.tensor import BlockScaledTensor

from .gradients import check_gradient, gradient_parts
from .sharded import Share, local, local_state, share_of, shares_of
from .state import step_tensors

if TYPE_CHECKING:
    from .base import BlockwiseOptimizer

FAST = True
"""Let kernels use approximate reciprocals and roots; without, the bits are the reference's (see `kernels/step.py`)."""

_ADDRESS = Tensor.data_ptr
_NOWHERE = 16
_GRAD_COLUMNS = slice(COLUMN["grad"], COLUMN["blocks"] + 1)


class Outdated(Exception):
    """The gradients or parameters are no longer of the kind that a plan was made for."""


class Key(NamedTuple):
    """What parameters of one segment have in common."""

    launch: step.Launch
    batch: Any  # for plans that work on several parameters at once
    share: Share | None


@dataclass
class Segment:
    """The parameters of one launch, and the rows of the tables that are theirs."""

    launch: step.Launch
    share: Share | None  # of sharded parameters
    parameters: list[nn.Parameter]
    weights: list[int]  # addresses
    blocks: list[int]
    copied: list[int]  # which parameters are not laid out in rows, and are copied for the step
    owner: Tensor  # int32 [programs of the step]
    spans: Tensor  # int32 [programs that read gradients]
    rows: Tensor  # the launch's part of the table, of the scalars and of the maxima
    hyper: Tensor
    amax: Tensor
    batch: Any

    def __post_init__(self) -> None:
        dtype = self.launch.dtypes[2]
        assert dtype is not None
        self.grad_dtype: torch.dtype = dtype
        # What weights are updated by, which is not what reads gradients in every plan.
        self.update, self.weight_rows = self.launch, self.rows
        self.weight_owner = self.owner
        self.fp8 = dtype is torch.float8_e4m3fn
        # A vector's gradient at the address of the last one is laid out as the last one was.
        self.vectors = all(p.ndim < 2 for p in self.parameters)

    def locals(self) -> list[Tensor]:
        """Return this rank's parts of sharded parameters."""
        return [p.to_local() for p in self.parameters]  # type: ignore[attr-defined]


class Plan:
    """The table and launches for those of `parameters` that have a gradient; all on one device."""

    def __init__(
        self,
        optimizer: BlockwiseOptimizer,
        parameters: Sequence[tuple[int, int, nn.Parameter]],  # (its number, its group's, itself)
        device: torch.device,
        family: str,
    ) -> None:
        self.device, self.family = device, family
        self.everything = [p for *_, p in parameters]
        self.shares = shares_of(optimizer.param_groups)
        self.absent = []  # they have no gradient yet, and no row in the table
        families = [optimizer.family_of(group) for group in optimizer.param_groups]
        entries = []
        for index, g, p in parameters:
            if p.grad is None:  # whatever its device and family, which may have no plan yet
                self.absent.append(p)
                continue
            if p.device != device or families[g] != family:
                continue
            group, weight = optimizer.param_groups[g], local(p).detach()
            state = optimizer.ensure_state(group, p)
            check_gradient(p, p.grad)
            kind, moments = optimizer.step_kind(group, p), optimizer.moments_of(group)
            gradient = gradient_parts(local(p.grad).contiguous())
            tensors = step_tensors(weight, *gradient, moments, local_state(state))
            key = Key(*self.launches_of(kind, tensors, g), share_of(p))
            entries.append((key, index, g, p, state, tensors))
        order = {key: i for i, key in enumerate(dict.fromkeys(e[0] for e in entries))}
        entries.sort(key=lambda e: order[e[0]])
        self.parameters = [e[3] for e in entries]
        self.indices = [e[1] for e in entries]
        # Storages, so that memory a kernel was told of is not freed behind its back by an assignment to `.data`.
        self._alive = [
            x.untyped_storage() for e in entries for n, x in e[5]._asdict().items()
            if x is not None and n not in ("weight", "grad", "grad_block_scale")
        ]  # fmt: skip
        self._held: list[Tensor] = []  # contiguous copies of this step's gradients
        self._build([e[0] for e in entries], [e[5] for e in entries])
        self._number([e[2] for e in entries], [e[4] for e in entries])

    def launches_of(self, kind: StepKind, t: StepTensors, group: int) -> tuple[step.Launch, Any]:
        """Return the launch that reads the gradient of `t`, and what else must be equal to share it."""
        return step.launch_of(kind, t), None

    def _build(self, keys: list[Key], tensors: list[StepTensors]) -> None:
        """Make the table, and the segments of it that share a launch."""
        rows = [step.table_row(t.weight.shape, **t._asdict()) for t in tensors]
        runs = [(k, len(list(run))) for k, run in groupby(keys)]
        n, device, start = len(rows), self.device, 0
        self.hyper = torch.zeros(n, 16, dtype=torch.float32, device=device)
        amax = torch.zeros(n, 4, dtype=torch.int32, device=device)
        dealt = []
        for key, length in runs:
            part = slice(start, start + length)
            owner = deal(rows[part], step.programs, "first", device)
            dealt.append((key, part, owner, deal(rows[part], norm.spans, "first_span", device)))
            start += length
        self.rows = upload_rows(rows, device)
        self.segments = []
        for (launch, batch, share), part, owner, spans in dealt:
            parameters, mine = self.parameters[part], rows[part]
            copied = [i for i, p in enumerate(parameters) if not local(p).is_contiguous()]
            self.segments.append(
                Segment(
                    launch, share, parameters, [r["weight"] for r in mine], [r["blocks"] for r in mine],
                    copied, owner, spans, self.rows[part], self.hyper[part], amax[part], batch,
                )
            )  # fmt: skip
        self.grads: list[list[Any]] = []  # where they are, by segment; uploaded at the first step
        self.stepped: list[nn.Parameter] = []  # the parameters that have one

    def _number(self, groups: list[int], states: list[dict[str, Any]]) -> None:
        """Make the vectors that hold a number for each parameter; a state's `step` becomes a view of one."""
        n, device = len(states), self.device
        self.group_of = upload(array("q", groups), device).int()
        self.index = upload(array("q", self.indices), device).int()
        self.steps = (
            torch.stack([s["step"] for s in states]) if n else torch.empty(0, device=device)
        )
        for state, view in zip(states, self.steps.unbind(), strict=True):
            dict.__setitem__(state, "step", view)
        self.verdict = torch.zeros(5, device=device)
        self._norm, self._largest = self.verdict[2], self.verdict[3]
        self.norms = self.verdict[2:3]  # by share
        if self.shares != [None]:
            self.norms = torch.zeros(len(self.shares), device=device)
        self._given: tuple[bool, bool, float] | None = None
        self.partial = torch.zeros(
            sum(len(s.spans) for s in self.segments), dtype=torch.float64, device=device
        )
        self.numbers: list[tuple[float, ...]] = []
        self.groups: Tensor
        self._spare: Tensor | None = None
        if device.type == "cuda":  # nothing can be pinned while a graph is captured
            self._spare = torch.empty(n, 3, dtype=torch.int64, pin_memory=True)

    # --- the host's part of every step

    def current(self, everything: Sequence[Tensor]) -> bool:
        """Return whether the plan fits the optimizer's parameters and their gradients, noting where these are now.

        This runs over every parameter at every step, so it does little for each: two addresses and two comparisons.
        """
        if len(everything) != len(self.everything) or not all(
            map(is_, everything, self.everything)
        ):
            return False
        if any(p.grad is not None for p in self.absent):
            return False
        self._held = []
        found = []
        for s in self.segments:
            weights = list(map(_ADDRESS, s.parameters if s.share is None else s.locals()))
            for i in s.copied:
                weights[i] = s.weights[i]
            if weights != s.weights:
                return False
            try:
                found.append(self._locate(s))
            except Outdated:
                return False
        if found == self.grads:
            return True
        self.stepped = []
        for s, addresses in zip(self.segments, found, strict=True):
            for p, address in zip(s.parameters, addresses, strict=True):
                if p.grad is None:
                    continue
                check_gradient(p, p.grad)
                if not s.fp8 and p.grad.dtype is not s.grad_dtype:
                    return False
                # Kernels for aligned rows were chosen by the first gradients; DDP's buckets, for one, move them.
                if s.launch.rows != "any" and (address[0] if s.fp8 else address) % 16:
                    return False
                if s.vectors and not p.grad.is_contiguous():
                    s.vectors = False
                    return self.current(everything)
                self.stepped.append(p)
        self.grads = found
        self._upload_grads()
        return True

    def _locate(self, segment: Segment) -> list[Any]:
        """Return the address of each gradient of a segment, with that of its scale if FP8; 0 where there is none."""
        try:
            if segment.fp8:
                return [p.grad.addresses for p in segment.parameters]  # type: ignore[union-attr]
            grads: list[Any] = [p.grad for p in segment.parameters]
            if segment.share is not None:
                grads = [g.to_local() for g in grads]
            if segment.vectors or all(map(Tensor.is_contiguous, grads)):
                addresses = list(map(_ADDRESS, grads))
                if 0 not in addresses:  # an FP8 gradient has no address of its own
                    return addresses
        except (AttributeError, TypeError, RuntimeError):
            pass  # one is missing, or of another kind
        result: list[Any] = []
        for p in segment.parameters:
            g = p.grad
            if g is None:
                result.append((0, 0) if segment.fp8 else 0)
                continue
            check_gradient(p, g)
            g = local(g)
            if isinstance(g, BlockScaledTensor) is not segment.fp8:
                raise Outdated
            if not g.is_contiguous():
                g = g.contiguous()
                self._held.append(g)  # until the next step
            if isinstance(g, BlockScaledTensor):
                result.append(g.addresses)
            else:  # an empty part of a sharded parameter has no address, but counts steps as the others do
                result.append(g.data_ptr() or _NOWHERE)
        return result

    def _upload_grads(self) -> None:
        """Upload where the gradients are; a parameter without one has no blocks, so that no kernel touches it."""
        columns = array("q")
        for s, addresses in zip(self.segments, self.grads, strict=True):
            for a, blocks in zip(addresses, s.blocks, strict=True):
                grad, scale = a if s.fp8 else (a, 0)
                columns.extend((grad, scale, blocks if grad else 0))
        flat = torch.frombuffer(columns, dtype=torch.int64).view(-1, 3)
        if self.device.type == "cuda":
            if torch.cuda.is_current_stream_capturing() and self._spare is not None:
                # The graph will read this memory at every replay: it is never written again.
                host, self._spare = self._spare.copy_(flat), None
                self._alive.append(host.untyped_storage())
            else:
                host = flat.pin_memory()
                if self._spare is None:
                    self._spare = torch.empty(flat.shape, dtype=torch.int64, pin_memory=True)
        else:
            host = flat
        self.rows[:, _GRAD_COLUMNS].copy_(host, non_blocking=True)

    def set_groups(
        self, numbers: list[tuple[float, ...]], rates: Iterable[tuple[int, Tensor]]
    ) -> None:
        """Upload the hyper-parameters of the groups where they changed; learning rates on the GPU are copied there."""
        if numbers != self.numbers:
            flat = array("d", (x for row in numbers for x in row))
            table = upload(flat, self.device).view(len(numbers), -1)
            if self.numbers and len(numbers) == len(self.numbers):
                self.groups.copy_(table)  # in place: a captured graph may read it
            else:
                self.groups = table
            self.numbers = numbers
        for group, rate in rates:
            self.groups[group, 0].copy_(rate)

    # --- the device's part

    def set_verdict(self, scale: Tensor | None, found_inf: Tensor | None, max_norm: float) -> None:
        """Note a GradScaler's scale and verdict, and the norm to clip to."""
        given = (scale is None, found_inf is None, max_norm)
        if given != self._given:  # constants stay from step to step
            self.verdict.copy_(upload(array("d", [1.0, max_norm, 0.0, 0.0, 0.0]), self.device))
            self._given = given
        if scale is not None:
            self.verdict[0].copy_(1 / scale.to(self.device, torch.float32).reshape(()))
        if found_inf is not None:
            self.verdict[4].copy_(found_inf.reshape(()))

    def examine(self, want_norm: bool) -> None:
        """Write the plan's largest gradient, or the norm of all, to the verdict; that of each share to `norms`."""
        with on_device(self.device):
            if not want_norm:
                self._largest.zero_()
                for s in self.segments:
                    norm.largest(s.rows, s.spans, s.grad_dtype, self._largest)
                return
            for share, out in zip(self.shares, self.norms, strict=True):
                self._total(share, out)
            self._largest.copy_(self._norm)

    def _total(self, share: Share | None, out: Tensor) -> None:
        """Write the norm of this rank's gradients of one share."""
        mine = [s for s in self.segments if s.share == share]
        count = sum(len(s.spans) for s in mine)
        launches = [(s.grad_dtype, s.launch.rows, s.rows, s.spans) for s in mine]
        norm.total(launches, self.partial[:count], out)

    def run(self, skipped: Tensor) -> None:
        """Take the step that the verdict allows."""
        held = self._row_major()
        with on_device(self.device):
            step_scalars.scalars(
                self.family, self.rows, self.groups, self.group_of, self.index, self.steps,
                self.verdict, skipped, self.hyper,
            )  # fmt: skip
            for s in self.segments:
                self.step_segment(s)
        for parameter, weight in held:
            parameter.copy_(weight)

    def step_segment(self, s: Segment) -> None:
        """Step the parameters of one launch."""
        step.step_table(s.launch, s.rows, s.owner, s.hyper, s.amax, FAST)

    def _row_major(self) -> list[tuple[Tensor, Tensor]]:
        """Lay out as rows the weights that are not (channels_last, transposed): blocks are row-major."""
        held = []
        for s in self.segments:
            for i in s.copied:
                parameter = local(s.parameters[i]).detach()
                weight = parameter.contiguous()
                s.weight_rows[i, COLUMN["weight"]].fill_(weight.data_ptr())
                held.append((parameter, weight))
        return held


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make `device` the current one, if it is a GPU: Triton launches there."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
