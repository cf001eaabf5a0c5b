"""A step on one GPU, whose tables and launches are kept from step to step.

A table of pointers has a row for each parameter (`kernels/pointer_table.py`), sorted by launch: parameters of the same
formats share one, whatever group they are in, since every hyper-parameter is read from a table too. A step then is

    a check       are these the parameters, addresses and gradients of last time?   host; else upload, or make anew
    examine       largest gradient, or norm                                         one launch per gradient dtype
    scalars       skip or not, clip, bias corrections, step counts                  one launch
    step          everything else                                                   one launch per format

and the host never waits. Gradients usually change address every step: their columns are uploaded again, if so.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fp8stack.formats import scale_shape
from fp8stack.kernels import ops
from fp8stack.kernels.pointer_table import COLUMN, deal, upload, upload_rows
from fp8stack.kernels.reference.step import StepTensors
from fp8stack.tensor import BlockScaledTensor, BlockScaledView, plain

from .sharded import Share, assign, local, share_of
from .step import MATRICES, Entry, Piece, apply_hyper, apply_kind, check_gradient, two_passes

FAST = True
"""Let kernels use approximate reciprocals and roots; without, the bits are the reference's (see `kernels/step.py`)."""

_ADDRESS = Tensor.data_ptr
_FACE = attrgetter("dtype", "shape")
_NOWHERE = 16
_GRAD_COLUMNS = slice(COLUMN["grad"], COLUMN["blocks"] + 1)


class _Key(NamedTuple):
    """What parameters of one launch have in common."""

    launch: Any  # `kernels.step.Launch`, the one that reads the gradients
    share: Share | None
    # Where matrices are stepped together in two passes: the second launch, their group and shape, and the number of
    # the batch, where one would be too large.
    second: Any = None
    group: int = 0
    shape: torch.Size | None = None
    number: int = 0


class TritonStep:
    """The tables and launches of those of the parameters that have a gradient, on one device and of one family.

    What it is asked for in each step is what `ReferenceStep` is asked for.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        device: torch.device,
        family: str,
        shares: list[Share | None],
        everything: Sequence[Tensor],  # the parameters that a step is about, on whatever devices
    ) -> None:
        self.device, self.family, self.shares = device, family, shares
        self.everything = list(everything)
        # They have no gradient yet, and no row in the table, whatever their device and family.
        self.absent = [p for p in everything if p.grad is None]
        self._kernels = ops.triton_module("step")
        self._norms = ops.triton_module("norm")
        tensors = [e.tensors() for e in entries]
        keys = self._keys_of(entries, tensors)
        order = {key: i for i, key in enumerate(dict.fromkeys(keys))}
        places = sorted(range(len(keys)), key=lambda i: order[keys[i]])
        self.entries = [entries[i] for i in places]
        tensors = [tensors[i] for i in places]
        # Storages, so that memory a kernel was told of is not freed behind its back by an assignment to `.data`.
        self._alive = [
            x.untyped_storage() for t in tensors for name, x in t._asdict().items()
            if x is not None and name not in ("weight", "grad", "grad_block_scale")
        ]  # fmt: skip
        self._held: list[Tensor] = []  # contiguous copies of this step's gradients
        self._number()
        self._build([keys[i] for i in places], tensors)

    def _keys_of(self, entries: Sequence[Entry], tensors: Sequence[StepTensors]) -> list[_Key]:
        """Return what each parameter shares a launch by."""
        launch_of, keys = self._kernels.launch_of, list[_Key]()
        matrices: Counter[_Key] = Counter()  # so far
        for e, t in zip(entries, tensors, strict=True):
            if e.kind.algorithm != "muon":
                keys.append(_Key(launch_of(e.kind, t), share_of(e.parameter)))
                continue
            # It stands for a direction, whose memory is not there yet.
            u = torch.empty(1, dtype=torch.bfloat16, device=self.device).expand(t.weight.shape)
            first, second = (launch_of(*one) for one in two_passes(e.kind, t, u))
            key = _Key(first, share_of(e.parameter), second, e.group, t.weight.shape)
            number = matrices[key] // max(1, MATRICES // max(1, t.weight.numel()))
            matrices[key] += 1
            keys.append(key._replace(number=number))
        return keys

    def _build(self, keys: list[_Key], tensors: list[StepTensors]) -> None:
        """Make the table, and the batches of it that share a launch."""
        rows = [self._kernels.table_row(t.weight.shape, **t._asdict()) for t in tensors]
        device, parts, start = self.device, [], 0
        amax = torch.zeros(len(rows), 4, dtype=torch.int32, device=device)
        for key, run in groupby(keys):
            part = slice(start, start + len(list(run)))
            owner = deal(rows[part], self._kernels.BLOCKS, "first", device)
            spans = deal(rows[part], self._norms.SPAN, "first_span", device)
            parts.append((key, part, owner, spans))
            start = part.stop
        self.rows = upload_rows(rows, device)
        self.batches = [
            TritonBatch(self, key, part, rows[part], owner, spans, amax[part])
            for key, part, owner, spans in parts
        ]
        self.grads: list[list[Any]] = []  # where they are, by batch; uploaded at the first step
        self.stepped: list[nn.Parameter] = []
        self.partial = torch.zeros(
            sum(len(b.spans) for b in self.batches), dtype=torch.float64, device=device
        )

    def _number(self) -> None:
        """Make the vectors that hold a number for each parameter; a state's `step` becomes a view of one."""
        n, device = len(self.entries), self.device
        self.group_of = upload(array("q", [e.group for e in self.entries]), device).int()
        self.seeds = upload(array("q", [e.seed() for e in self.entries]), device).int()
        states = [e.state for e in self.entries]
        self.steps = torch.stack([s["step"] for s in states]).double()
        for state, view in zip(states, self.steps.unbind(), strict=True):
            dict.__setitem__(state, "step", view)  # past the dict that would forget all tables
        self.verdict = torch.zeros(5, dtype=torch.float32, device=device)
        self._norm, self._largest = self.verdict[2], self.verdict[3]
        self.norms = self.verdict[2:3]  # by share
        if self.shares != [None]:
            self.norms = torch.zeros(len(self.shares), dtype=torch.float32, device=device)
        self._given: tuple[bool, bool, float] | None = None
        self.hyper = torch.zeros(n, 16, dtype=torch.float32, device=device)
        self.numbers: list[tuple[float, ...]] = []
        self.groups: Tensor
        self._spare: Tensor | None = None

    # --- the host's part of every step

    def current(self, everything: Sequence[Tensor]) -> bool:
        """Return whether the tables fit the optimizer's parameters and their gradients, noting where these are now.

        This runs over every parameter at every step, so it does little for each: two addresses, dtype and shape.
        """
        if len(everything) != len(self.everything) or not all(
            map(is_, everything, self.everything)
        ):
            return False
        if any(p.grad is not None for p in self.absent):
            return False
        self._held = []
        found = []
        for b in self.batches:
            parts = b.parameters if b.share is None else [p.to_local() for p in b.parameters]  # type: ignore[attr-defined]
            weights = list(map(_ADDRESS, parts))
            for i in b.copied:
                weights[i] = b.weights[i]
            # An address may be the same after an assignment to `.data`: of a slice, or of memory freed before.
            if weights != b.weights or list(map(_FACE, parts)) != b.faces:
                return False
            addresses = self._locate(b)
            if addresses is None:
                return False
            found.append(addresses)
        if found == self.grads:
            return True
        self.stepped = []
        for b, addresses in zip(self.batches, found, strict=True):
            for p, address in zip(b.parameters, addresses, strict=True):
                if p.grad is None:
                    continue
                check_gradient(p, p.grad)
                if not b.fp8 and p.grad.dtype is not b.grad_dtype:
                    return False
                # Kernels for aligned rows were chosen by the first gradients; DDP's buckets, for one, move them.
                if b.launch.rows != "any" and (address[0] if b.fp8 else address) % 16:
                    return False
                if b.vectors and not p.grad.is_contiguous():
                    b.vectors = False
                    return self.current(everything)
                self.stepped.append(p)
        self.grads = found
        self._upload_grads()
        return True

    def _locate(self, batch: TritonBatch) -> list[Any] | None:
        """Return the address of each gradient of a batch, with that of its scale if FP8; 0 where there is none.

        None if one is of another kind than the tables were made for.
        """
        # unless one is missing, or of another kind
        with suppress(AttributeError, TypeError, RuntimeError):
            if batch.fp8:
                return [p.grad.addresses for p in batch.parameters]  # type: ignore[union-attr]
            grads: list[Any] = [p.grad for p in batch.parameters]
            if batch.share is not None:
                grads = [g.to_local() for g in grads]
            if batch.vectors or all(map(Tensor.is_contiguous, grads)):
                addresses = list(map(_ADDRESS, grads))
                if 0 not in addresses:  # an FP8 gradient has no address of its own
                    return addresses
        result: list[Any] = []
        for p in batch.parameters:
            g = p.grad
            if g is None:
                result.append((0, 0) if batch.fp8 else 0)
                continue
            check_gradient(p, g)
            g = local(g)
            if isinstance(g, BlockScaledTensor) is not batch.fp8:
                return None
            if isinstance(g, BlockScaledView) or not g.is_contiguous():
                g = plain(g).contiguous()
                self._held.append(g)  # until the next step
            if isinstance(g, BlockScaledTensor):
                result.append(g.addresses)
            else:  # an empty part of a sharded parameter has no address, but counts steps as the others do
                result.append(g.data_ptr() or _NOWHERE)
        return result

    def _upload_grads(self) -> None:
        """Upload where the gradients are; a parameter without one has no blocks, so that no kernel touches it."""
        columns = array("q")
        for b, addresses in zip(self.batches, self.grads, strict=True):
            for a, blocks in zip(addresses, b.blocks, strict=True):
                grad, scale = a if b.fp8 else (a, 0)
                columns.extend((grad, scale, blocks if grad else 0))
        host = flat = torch.frombuffer(columns, dtype=torch.int64).view(-1, 3)
        if self.device.type == "cuda":
            if torch.cuda.is_current_stream_capturing() and self._spare is not None:
                # The graph will read this memory at every replay: it is never written again.
                host, self._spare = self._spare.copy_(flat), None
                self._alive.append(host.untyped_storage())
            else:
                host = flat.pin_memory()
                if self._spare is None:  # nothing can be pinned while a graph is captured
                    self._spare = torch.empty(flat.shape, dtype=torch.int64, pin_memory=True)
        self.rows[:, _GRAD_COLUMNS].copy_(host, non_blocking=True)

    def set_groups(self, numbers: list[tuple[float, ...]], rates: list[tuple[int, Tensor]]) -> None:
        """Upload the hyper-parameters where they changed; learning rates on the GPU are copied there."""
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

    def examine(self, scale: Tensor | None, found_inf: Tensor | None, clip: float | None) -> None:
        """Write the largest gradient, or the norm of all, to the verdict; that of each share to `norms`."""
        max_norm = math.inf if clip is None else clip
        given = (scale is None, found_inf is None, max_norm)
        if given != self._given:  # constants stay from step to step
            self.verdict.copy_(upload(array("d", [1.0, max_norm, 0.0, 0.0, 0.0]), self.device))
            self._given = given
        if scale is not None:
            self.verdict[0].copy_(1 / scale.to(self.device, torch.float32).reshape(()))
        if found_inf is not None:
            self.verdict[4].copy_(found_inf.reshape(()))
        if clip is None:
            self._largest.zero_()
            for b in self.batches:
                self._norms.largest(b.rows, b.spans, b.grad_dtype, self._largest)
            return
        for share, out in zip(self.shares, self.norms, strict=True):
            mine = [b for b in self.batches if b.share == share]
            launches = [(b.grad_dtype, b.launch.rows, b.rows, b.spans) for b in mine]
            self._norms.total(launches, self.partial[: sum(len(b.spans) for b in mine)], out)
        self._largest.copy_(self._norm)

    @property
    def squares(self) -> Tensor:
        return self.norms.double().square()

    def run(self, skipped: Tensor, step_batch: Callable[[TritonBatch], None]) -> None:
        for b in self.batches:
            b.lay_out_rows()
        ops.triton_module("step_scalars").scalars(
            self.family, self.rows, self.groups, self.group_of, self.seeds, self.steps,
            self.verdict, skipped, self.hyper,
        )  # fmt: skip
        for b in self.batches:
            step_batch(b)
        for b in self.batches:
            for i, weight in b.in_rows.items():
                assign(b.parameters[i], weight)
            b.in_rows = {}


class TritonBatch:
    """The parameters of one launch, and the rows of the tables that are theirs; used as a `ReferenceBatch` is."""

    divisible = True

    def __init__(
        self,
        step: TritonStep,
        key: _Key,
        part: slice,  # of the table, of the scalars and of the maxima
        rows: list[dict[str, int]],
        owner: Tensor,  # int32 [programs of the step]
        spans: Tensor,  # int32 [programs that read gradients]
        amax: Tensor,
    ) -> None:
        self.launch, self.share = key.launch, key.share
        self.owner, self.spans, self.amax = owner, spans, amax
        self.second, self.shape = key.second, key.shape
        self.entries, self.rows, self.hyper = step.entries[part], step.rows[part], step.hyper[part]
        self.counts, self.kind = step.steps[part], self.entries[0].kind
        self._step_table = step._kernels.step_table
        self._blocks = step._kernels.BLOCKS  # of a program
        # The second pass of two has a table of its own: in the first one's, directions are written in place of weights.
        self.second_rows = self.rows.clone() if key.second else self.rows
        self.parameters = [e.parameter for e in self.entries]
        self.weights = [row["weight"] for row in rows]  # addresses
        self.faces = list(map(_FACE, map(local, self.parameters)))
        self.blocks = [row["blocks"] for row in rows]
        # Those that are not laid out in rows are copied for the step.
        self.copied = [i for i, p in enumerate(self.parameters) if not local(p).is_contiguous()]
        self.in_rows: dict[int, Tensor] = {}
        self.grad_dtype: torch.dtype = key.launch.dtypes[2]
        self.fp8 = self.grad_dtype is torch.float8_e4m3fn
        # A vector's gradient at the address of the last one is laid out as the last one was.
        self.vectors = all(p.ndim < 2 for p in self.parameters)

    def lay_out_rows(self) -> None:
        """Lay out as rows the weights that are not (channels_last, transposed): blocks are row-major."""
        for i in self.copied:
            weight = local(self.parameters[i]).detach().contiguous()
            self.second_rows[i, COLUMN["weight"]].fill_(weight.data_ptr())
            self.in_rows[i] = weight

    def step(self) -> None:
        self._step_table(self.launch, self.rows, self.owner, self.hyper, self.amax, FAST)

    def directions(self) -> Tensor:
        assert self.shape is not None
        size = len(self.entries), *self.shape
        u = torch.empty(size, dtype=torch.bfloat16, device=self.rows.device)
        self.rows[:, COLUMN["weight"]] = _places(u)
        self.step()
        return u

    def apply(self, updates: Tensor, step_size: Tensor | float) -> None:
        self.second_rows[:, COLUMN["grad"]] = _places(updates)
        hyper = apply_hyper(self.hyper, step_size)
        self._step_table(self.second, self.second_rows, self.owner, hyper, self.amax, FAST)

    def tensors(self, number: int) -> StepTensors:
        tensors = self.entries[number].tensors()
        return tensors._replace(weight=self.in_rows.get(number, tensors.weight))

    def appliers(self, pieces: Sequence[Piece], update: Tensor) -> list[Callable[[], None]]:
        places = [(piece.number, piece.start) for piece in pieces]
        number, start = torch.tensor(places, device=update.device).unbind(1)
        # A row is that of the whole tensor, and so is noise; a piece's programs are counted from its first.
        rows, hyper = self.rows[number], apply_hyper(self.hyper[number], -1.0)
        skipped = update.element_size() * start * rows[:, COLUMN["cols"]]
        rows[:, COLUMN["grad"]] = update.data_ptr() - skipped
        rows[:, COLUMN["first"]] = start * rows[:, COLUMN["blocks_per_row"]] // -self._blocks
        programs = [-(-math.prod(scale_shape(p.shape)) // self._blocks) for p in pieces]
        owner = torch.zeros(max(programs), dtype=torch.int32, device=update.device)
        dtypes = (*self.launch.dtypes[:2], update.dtype, None, None)
        launch = self.launch._replace(kind=apply_kind(self.kind), dtypes=dtypes)
        return [
            partial(self._step_table, launch, row, owner[:count], scalars, self.amax[:1])
            for row, count, scalars in zip(rows.split(1), programs, hyper.split(1), strict=True)
        ]


def _places(stack: Tensor) -> Tensor:
    """Return the address of each tensor of a stack, int64."""
    numbers = torch.arange(len(stack), dtype=torch.int64, device=stack.device)
    return numbers * (stack[0].numel() * stack.element_size()) + stack.data_ptr()
