"""What FP8 does to the tensors of a model: amax, scale, underflow, overflow and NaN of each layer's operands.

    with fp8stack.monitor.Monitor(model, every=100) as monitor:
        for step, batch in enumerate(loader):
            ...                                             # forward, backward, optimizer step
            if step % 100 == 0:
                log(monitor.metrics(), monitor.step)        # {"fp8/underflow": 0.0003, "fp8/amax": 11.4, ...}

Every `every`-th step, which is a forward of the model in training mode, each FP8 layer counts over its input x, its
weight w and its incoming gradient g (`kernels/reference/monitor.py`): one kernel each, which adds integers to a tensor
on the device. The host never waits: the numbers are copied to pinned memory when the next step begins or when they are
asked for, and `read` returns the last copy that has arrived, as a rule that of the sample before. Between samples a
layer pays for a look at one attribute.

Activation checkpointing recomputes x and w and counts them twice, which leaves all fractions as they are. Numbers are
those of this rank, and of fp8stack's own layers: TransformerEngine's are not watched, nor is what torch.compile has
compiled, where the hooks are left out of the graph, with one warning.
"""

from __future__ import annotations

import math
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from .errors import ConfigError, Fp8StackWarning, ModelError
from .formats import MiniFloat
from .kernels.ops import triton_runs_on
from .kernels.reference import monitor as reference
from .kernels.reference.monitor import FIELDS
from .nn.linear import Fp8Linear

KINDS = ("x", "w", "g")
Numbers = dict[str, dict[str, dict[str, float]]]

_watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class Monitor:
    """Samples the FP8 layers of a model (a bare one, as given to `initialize`) every `every` steps, from the first.

    A step begins with a forward of the model; where that is not called itself (Lightning calls `training_step`), say
    `by_hand=True` and call `begin_step` at each. Remove the monitor before the whole model is pickled; copies of the
    model are not watched.

    Raises:
        ConfigError: if `every` is not a positive integer.
        ModelError: if the model is watched already.
    """

    def __init__(self, model: nn.Module, every: int = 100, by_hand: bool = False) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ConfigError(f"every={every!r} must be a number of steps, 1 or more.")
        if model in _watched:
            raise ModelError("this model has a Monitor; remove() that first.")
        named = [(name, m) for name, m in model.named_modules() if isinstance(m, Fp8Linear)]
        if not named:
            _warn("the model has no FP8 layers of fp8stack's own: there is nothing to monitor")
        self.every, self.layers = every, [name for name, _ in named]
        self.step: int | None = None  # of the numbers that `read` returned last
        self._modules = [module for _, module in named]
        self._model = weakref.ref(model)
        self._steps, self._open = 0, -1  # forwards; the step being sampled
        self._new = self._seen = False  # counts that were not copied; any, in this sample
        self._counts: Tensor | None = None  # int64 [layers, kinds, fields], on the device
        self._copy: tuple[int, Tensor, torch.cuda.Event | None] | None = None  # on its way
        self._last: list[list[list[int]]] = []
        _watched.add(model)
        self._handle = None if by_hand else model.register_forward_pre_hook(self._before_forward)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> Monitor:
        return self  # whose hook ignores the copy

    def remove(self) -> None:
        """Stop sampling. What was sampled can still be read."""
        self._end_sample()
        if self._handle is not None:
            self._handle.remove()
        _watched.discard(self._model())  # type: ignore[arg-type]

    def read(self, wait: bool = False) -> Numbers:
        """Return the last sample that has arrived: {layer: {"x" | "w" | "g": {"amax": ..., ...}}}.

        With `wait`, wait for the one under way. Call it between steps: before backward there are no gradients. Operands
        that were not cast are left out. "underflow", "overflow": fractions of all elements; "nonfinite": how many.
        """
        self._start_copy()
        self._arrive(wait)
        return {
            layer: numbers
            for layer, rows in zip(self.layers, self._last, strict=False)
            if (numbers := {k: _numbers(r) for k, r in zip(KINDS, rows, strict=True) if r[-1]})
        }

    def metrics(self, wait: bool = False) -> dict[str, float]:
        """Return the numbers of `read` under flat names, for a logger: each layer's, and those of the model.

        fp8/fwd_scale and fp8/bwd_scale are the largest scales of inputs and gradients, fp8/amax is the largest input;
        fp8/underflow and fp8/overflow are fractions of the elements of all operands, fp8/nonfinite is their number.
        """
        layers = self.read(wait)
        if not layers:
            return {}
        flat = {
            f"fp8/{layer}/{kind}_{field}": value
            for layer, kinds in layers.items()
            for kind, numbers in kinds.items()
            for field, value in numbers.items()
        }
        rows = [row for layer in self._last for row in layer]
        under, over, bad, elements = (sum(row[i] for row in rows) for i in range(2, 6))

        def largest(kind: str, field: str) -> float:
            values = [kinds[kind][field] for kinds in layers.values() if kind in kinds]
            return max(values, key=lambda v: math.inf if math.isnan(v) else v, default=0.0)

        return {
            "fp8/fwd_scale": largest("x", "scale"),
            "fp8/bwd_scale": largest("g", "scale"),
            "fp8/amax": largest("x", "amax"),
            "fp8/underflow": under / elements,
            "fp8/overflow": over / elements,
            "fp8/nonfinite": float(bad),
            **flat,
        }

    # --- sampling

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():
            from torch._dynamo.comptime import comptime

            comptime(_warn_unseen)  # when traced; nothing of this is in the graph
            return
        if module is self._model() and module.training:
            self.begin_step()

    def begin_step(self) -> None:
        """End the step before, and sample the one that begins if it is its turn."""
        self._end_sample()
        if self._steps % self.every == 0:
            self._begin_sample()
        self._steps += 1

    def _begin_sample(self) -> None:
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
        if not self._new or self._counts is None:
            return
        self._new, event = False, None
        host = torch.empty(self._counts.shape, dtype=torch.int64, pin_memory=self._counts.is_cuda)
        host.copy_(self._counts, non_blocking=True)
        if self._counts.is_cuda:
            with torch.cuda.device(self._counts.device):
                event = torch.cuda.Event()
                event.record()
        self._copy = self._open, host, event

    def _arrive(self, wait: bool) -> None:
        """Take the numbers of a copy that has arrived, or wait for it."""
        if self._copy is None:
            return
        step, host, event = self._copy
        if event is not None and wait:
            event.synchronize()
        if event is None or event.query():
            self.step, self._last, self._copy = step, host.tolist(), None

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
            from .kernels import monitor as triton

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
        return _nothing, ()


def _nothing() -> None:
    return None


def _numbers(row: list[int]) -> dict[str, float]:
    amax, scale = torch.tensor(row[:2], dtype=torch.int32).view(torch.float32).tolist()
    under, over, bad, elements = row[2:]
    shares = {"underflow": under / elements, "overflow": over / elements}
    return {"amax": amax, "scale": scale, **shares, "nonfinite": float(bad)}


def _warn_unseen(_: Any = None) -> None:
    _warn("Monitor samples nothing under torch.compile and in CUDA graphs")


def _warn(message: str) -> None:
    warnings.warn(f"fp8stack: {message}", Fp8StackWarning, stacklevel=3)
