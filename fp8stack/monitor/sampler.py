"""The monitor: samples what casts to FP8 do to each layer's operands, and what a step does to its weight.

    monitor = Monitor(model, optimizer, every=100)
    ...
    log(monitor.metrics(), monitor.step)        # {"fp8/underflow": 0.0003, "fp8/amax": 11.4, ...}

Every `every`-th step, which is a forward of the model in training mode, each FP8 layer counts over its input x, its
weight w and its incoming gradient g (`kernels/reference/monitor.py`): one kernel each, which adds to a tensor on the
device. The host never waits: the numbers are copied to pinned memory when the next step begins or when they are asked
for, and `read` returns the last copy that has arrived, as a rule that of the sample before. Between samples a layer
pays for a look at one attribute.

Activation checkpointing recomputes x and w and counts them twice, which leaves all fractions as they are. Numbers are
those of this rank: of its batch, and under FSDP2 of its part of the weights' updates. Of TransformerEngine's layers,
which keep their casts to themselves, there are updates only; of what torch.compile has compiled, where the hooks are
left out of the graph, there is nothing. One warning says so.
"""

from __future__ import annotations

import math
import statistics
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from fp8stack.errors import ConfigError, Fp8StackWarning, ModelError, reason_of
from fp8stack.formats import MiniFloat
from fp8stack.kernels.ops import triton_runs_on
from fp8stack.kernels.reference import monitor as reference
from fp8stack.kernels.reference.monitor import FIELDS, SUMS
from fp8stack.nn.linear import Fp8Linear
from fp8stack.nn.te import TeLinear

from .advice import Finding, Layer, Numbers, find
from .outputs import check_writer, write
from .transfer import Transfer
from .updates import Updates

KINDS = ("x", "w", "g")

_watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class Monitor:
    """Samples the FP8 layers of a model (a bare one, as given to `initialize`) every `every` steps, from the first.

    A step begins with a forward of the model; where that is not called itself (Lightning calls `training_step`), say
    `by_hand=True` and call `begin_step` at each. Remove the monitor before the whole model is pickled; copies of the
    model are not watched.

    Args:
        model: as given to `initialize`.
        optimizer: as returned by it; with it, update/weight ratios are measured.
        every: steps from sample to sample. With gradient accumulation a micro-batch is a step.
        by_hand: `begin_step` is called by hand.
        to: where each sample is written when it has arrived: the path of a JSONL file, a TensorBoard writer, a W&B
            run, or a list of them. On several ranks give it on one. What finds no room on a disk is lost, with a
            warning.

    Raises:
        ConfigError: if `model` is no module, `every` not a positive integer, `optimizer` no optimizer of torch's, or
            something in `to` cannot be written to.
        ModelError: if the model is watched already.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        every: int = 100,
        by_hand: bool = False,
        to: Any = (),
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"model={type(model).__name__} is not a torch.nn.Module. Use Monitor(model, optimizer)."
            )
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ConfigError(f"every={every!r} must be a number of steps, 1 or more.")
        self.to = list(to) if isinstance(to, list | tuple) else [to]
        for writer in self.to:
            check_writer(writer)
        if model in _watched:
            raise ModelError("this model has a Monitor; remove() that first.")
        layers = {n: m for n, m in model.named_modules() if isinstance(m, Fp8Linear | TeLinear)}
        named = [(n, m) for n, m in layers.items() if isinstance(m, Fp8Linear)]
        if foreign := len(layers) - len(named):
            _warn(f"{foreign} layers are TransformerEngine's, whose casts the Monitor does not see")
        elif not named:
            _warn("the model has no FP8 layers of fp8stack's own: there is nothing to monitor")
        self.every, self.layers = every, [name for name, _ in named]
        self.step: int | None = None  # of the numbers that `read` returned last
        self._modules = [module for _, module in named]
        self._recipes = {n: Layer.of(m.products) for n, m in named}
        self._updates = None if optimizer is None else Updates(layers, optimizer)
        self._model = weakref.ref(model)
        self._steps, self._open = 0, -1  # forwards; the step being sampled
        self._new = self._seen = False  # counts that were not copied; any, in this sample
        self._counts: Tensor | None = None  # int64 [layers, kinds, fields], on the device
        self._copy: tuple[int, Transfer] | None = None  # on its way
        self._last: list[list[list[int]]] = []
        self._due, self._written = False, -1  # a sample to write; the step that was written last
        _watched.add(model)
        self._handle = None if by_hand else model.register_forward_pre_hook(self._before_forward)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> Monitor:
        return self  # whose hook ignores the copy

    def remove(self) -> None:
        """Stop sampling, and write what is left to write. What was sampled can still be read."""
        self._end_sample()
        self._write(last=True, wait=True)
        if self._updates is not None:
            self._updates.remove()
        if self._handle is not None:
            self._handle.remove()
        if (model := self._model()) is not None:
            _watched.discard(model)

    def read(self, wait: bool = False) -> Numbers:
        """Return the last sample that has arrived: {layer: {"x" | "w" | "g": {"amax": ..., ...}}}.

        With `wait`, wait for the one under way. Call it between steps: before backward there are no gradients. Operands
        that were not cast are left out. "underflow", "overflow": fractions of all elements; "dead_blocks": of blocks;
        "nonfinite": how many elements; "snr_db": left out where signal or error is zero; "update_ratio": of w, in the
        step after the sample.
        """
        self._start_copy()
        self._arrive(wait)
        numbers = {
            layer: {k: _numbers(r) for k, r in zip(KINDS, rows, strict=True) if r[-1]}
            for layer, rows in zip(self.layers, self._last, strict=False)
        }
        if self._updates is not None and self._updates.step == self.step:
            for layer, ratio in self._updates.ratios.items():
                numbers.setdefault(layer, {}).setdefault("w", {})["update_ratio"] = ratio
        return {layer: kinds for layer, kinds in numbers.items() if kinds}

    def metrics(self, wait: bool = False) -> dict[str, float]:
        """Return the numbers of `read` under flat names, for a logger: each layer's, and those of the model.

        fp8/fwd_scale and fp8/bwd_scale are the largest scales of inputs and gradients, fp8/amax is the largest input;
        fp8/underflow, fp8/overflow and fp8/dead_blocks are fractions of the elements (blocks) of all operands,
        fp8/nonfinite is their number; fp8/grad_snr_db is the lowest of all gradients, fp8/update_ratio the median of
        all layers. The last two are left out where there are none.
        """
        layers = self.read(wait)
        flat = {
            f"fp8/{layer}/{kind}_{field}": value
            for layer, kinds in layers.items()
            for kind, numbers in kinds.items()
            for field, value in numbers.items()
        }

        def all_of(kind: str, field: str) -> list[float]:
            values = (kinds.get(kind, {}).get(field) for kinds in layers.values())
            return [value for value in values if value is not None]

        def largest(kind: str, field: str) -> float:
            return max(
                all_of(kind, field), key=lambda v: math.inf if math.isnan(v) else v, default=0.0
            )

        def total(field: str) -> float:
            return sum(row[FIELDS.index(field)] for rows in self._last for row in rows)

        model: dict[str, float] = {}
        if total("elements"):
            model = {
                "fp8/fwd_scale": largest("x", "scale"),
                "fp8/bwd_scale": largest("g", "scale"),
                "fp8/amax": largest("x", "amax"),
                "fp8/underflow": total("underflow") / total("elements"),
                "fp8/overflow": total("overflow") / total("elements"),
                "fp8/nonfinite": float(total("nonfinite")),
                "fp8/dead_blocks": total("dead") / total("blocks"),
            }
        if snr := all_of("g", "snr_db"):
            model["fp8/grad_snr_db"] = min(snr)
        if ratios := all_of("w", "update_ratio"):
            model["fp8/update_ratio"] = statistics.median(ratios)
        return model | flat

    def advice(self, wait: bool = False) -> list[str]:
        """Return what is out of bounds in the numbers of `read`: layer, number, threshold, remedy; see `advice.py`."""
        return [finding.text() for finding in self.findings(wait)]

    def findings(self, wait: bool = False) -> list[Finding]:
        """Return the same as records: for an application that spells remedies as its own options, or filters them."""
        return find(self.read(wait), self._recipes)

    def log(self, writer: Any) -> None:
        """Write the metrics that have arrived, if any, to a JSONL file, a TensorBoard writer or a W&B run.

        Raises:
            ConfigError: if `writer` is none of these.
        """
        check_writer(writer)
        metrics = self.metrics()
        if metrics:
            write(writer, metrics, self.step or 0)

    # --- sampling

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():
            from torch._dynamo.comptime import comptime

            comptime(_warn_unseen)  # when traced; nothing of this is in the graph
            return
        if module is self._model() and module.training:
            self.begin_step()

    def begin_step(self, number: int | None = None) -> None:
        """End the step before, and sample the one that begins if it is its turn.

        `number` is that of the step, from 0, where it is not the count of calls: in a run that was resumed.
        """
        self._end_sample()
        self._steps = self._steps if number is None else number
        if self._updates is not None:
            self._updates.settle()
        turn = self._steps % self.every == 0
        self._write(last=turn)
        if turn:
            self._begin_sample()
        self._steps += 1

    def _begin_sample(self) -> None:
        self._due = bool(self.to)
        if self._updates is not None:
            self._updates.arm(self._steps)
        modules = [m for m in self._modules if isinstance(m, Fp8Linear)]  # restored ones are not
        if not modules:
            return
        device = modules[0].weight.device
        if self._counts is None or self._counts.device != device:
            shape = len(self.layers), len(KINDS), len(FIELDS)
            self._counts = torch.zeros(shape, dtype=torch.int64, device=device)
        self._counts.zero_()
        self._open, self._new, self._seen = self._steps, False, False
        for index, module in enumerate(self._modules):
            if isinstance(module, Fp8Linear):
                module.products.probe = _Probe(self, index)

    def _end_sample(self) -> None:
        if self._open < 0:
            return
        for module in self._modules:
            if isinstance(module, Fp8Linear):
                module.products.probe = None
        if not self._seen:
            _warn_unseen()
        self._start_copy()
        self._open = -1

    def _start_copy(self) -> None:
        """Send the counts of the open sample to the host, if there are new ones."""
        self._arrive(False)
        if self._new and self._counts is not None:
            self._new, self._copy = False, (self._open, Transfer(self._counts))

    def _arrive(self, wait: bool) -> None:
        """Take the numbers of copies that have arrived, or wait for them."""
        if self._copy is not None:
            step, transfer = self._copy
            numbers: Any = transfer.take(wait)
            if numbers is not None:
                self.step, self._last, self._copy = step, numbers, None
        if self._updates is not None:
            self._updates.arrive(wait)
            if not self.layers:
                self.step = self._updates.step

    def _write(self, last: bool, wait: bool = False) -> None:
        """Write a sample that has arrived as a whole, or what of it has if it is the `last` time."""
        if not self._due:
            return
        self._arrive(wait)
        busy = self._copy is not None or (self._updates is not None and self._updates.busy)
        if busy and not last:
            return
        if self.step is not None and self.step != self._written:
            self._written, metrics = self.step, self.metrics()
            for writer in self.to:
                try:
                    write(writer, metrics, self.step)
                except OSError as error:  # a full disk: no reason to end a training run
                    _warn(f"Monitor cannot write to {writer}: {reason_of(error)}")
        self._due = False

    def count(self, index: int, kind: str, x: Tensor, scale: Tensor, fmt: MiniFloat) -> None:
        """Add an operand of layer `index` to the open sample."""
        counts = self._counts
        if self._open < 0 or counts is None or x.device != counts.device:
            return
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return  # replays would count on, unasked
        self._new = self._seen = True
        out = counts[index, KINDS.index(kind)]
        squares = kind == "w" and scale.ndim > 0
        if triton_runs_on(x.device):
            from fp8stack.kernels import monitor as triton

            triton.count(x, scale, fmt, out, squares)
        else:
            reference.count(x, scale, fmt, out, squares)


class _Probe:
    """What a layer hands its operands to while it is sampled; lost when the layer is copied or pickled."""

    def __init__(self, monitor: Monitor, index: int) -> None:
        self.monitor, self.index = monitor, index

    def __call__(self, kind: str, x: Tensor, scale: Tensor, fmt: MiniFloat) -> None:
        self.monitor.count(self.index, kind, x, scale, fmt)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()


def _numbers(row: list[int]) -> dict[str, float]:
    amax, scale = torch.tensor(row[:2], dtype=torch.int32).view(torch.float32).tolist()
    signal, noise = torch.tensor(row[SUMS]).view(torch.float64).tolist()
    counts = dict(zip(FIELDS, row, strict=True))
    numbers = {
        "amax": amax,
        "scale": scale,
        "underflow": counts["underflow"] / counts["elements"],
        "overflow": counts["overflow"] / counts["elements"],
        "nonfinite": float(counts["nonfinite"]),
        "dead_blocks": counts["dead"] / counts["blocks"],
    }
    if signal and noise:
        numbers["snr_db"] = 10 * math.log10(signal / noise)
    return numbers


def _warn_unseen(_: Any = None) -> None:
    _warn("Monitor samples nothing under torch.compile and in CUDA graphs")


def _warn(message: str) -> None:
    warnings.warn(f"fp8stack: {message}", Fp8StackWarning, stacklevel=3)
