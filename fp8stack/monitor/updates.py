"""How far an optimizer step moves the weights of layers: ‖Δw‖ / ‖w‖, of a sample of their elements.

A copy of all weights would cost as much memory as the weights. So up to 2^14 elements of each weight are kept from
before the step to after it, 64 KiB a layer. They are taken at equal distances through the matrix; the distance has no
factor in common with the number of columns, so that all columns are met. Both norms are of the same elements. If the
squares of n elements come from a distribution of kurtosis k, the norm of the sample is off by sqrt((k - 1) / n) / 2 of
itself (one standard deviation): 0.6 % for Gaussian numbers, 4 % where k is 100. A weight of up to 2^14 elements is read
as a whole.

The ratio is that of the values in which the optimizer accumulates: with fp8stack's own optimizers the bfloat16 weight
and its remainder, or another master. The weight alone would show little but its rounding. With `master="none"` the
weight itself moves, in random steps of 2^-8, and the ratio is larger than that of the update that was added.

The hooks on the optimizer do nothing but in a sampled step, and the results are copied to the host without waiting. A
step that is skipped because of its gradients moves nothing: its ratio is 0. Left out are
weights that the optimizer does not own (DeepSpeed's ZeRO steps copies) and states in host memory (`offload="cpu"`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fp8stack.errors import ConfigError, Fp8StackWarning
from fp8stack.optim import BlockwiseOptimizer
from fp8stack.optim.sharded import local, local_state
from fp8stack.optim.state_formats import MASTER_KEYS, decode_master

SAMPLE = 2**14
"""Elements of a weight that are compared, at most."""


class Arrivals:
    """Numbers of the device that the host reads without waiting: the last that arrived, and a copy on its way.

    `values` are nested lists, and `label` is what they were sent with; None and [] before the first have arrived.
    """

    def __init__(self) -> None:
        self.label: Any = None
        self.values: list[Any] = []
        self._pending: tuple[Any, Tensor, torch.cuda.Event | None] | None = None

    def send(self, label: Any, values: Tensor) -> None:
        """Copy `values` to the host behind the work that is queued now; an earlier copy still on its way is dropped."""
        self.take()
        host, event = values.to("cpu", non_blocking=True, copy=True), None  # pinned, from a GPU
        if values.is_cuda:
            event = torch.cuda.current_stream(values.device).record_event()
        self._pending = label, host, event

    def take(self, wait: bool = False) -> None:
        """Take the copy if it has arrived; with `wait`, wait for it."""
        if self._pending is None:
            return
        label, host, event = self._pending
        if event is not None and wait:
            event.synchronize()
        if event is None or event.query():
            self.label, self.values, self._pending = label, host.tolist(), None


class Updates:
    """Measures the steps of an optimizer that `arm` asks for, on the weights of layers, by name; none without one.

    Raises:
        ConfigError: for what is no optimizer of torch's, or only wraps one.
    """

    def __init__(self, layers: Mapping[str, Any], optimizer: Any) -> None:
        self._layers, self._optimizer, self._handles = dict(layers), optimizer, list[Any]()
        self._before: dict[str, tuple[Tensor, Tensor]] = {}  # weights, and their samples
        self._armed = -1  # the sampled step whose optimizer step is yet to come, or -1
        self._arrivals = Arrivals()  # the two norms, labelled with the sampled step and the layers
        if optimizer is None:
            return
        if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
            wraps = " but wraps one: pass its .optimizer" if hasattr(optimizer, "optimizer") else ""
            raise ConfigError(
                f"optimizer={type(optimizer).__name__} is not a torch.optim.Optimizer{wraps}. Pass the one that "
                "fp8stack.initialize returned; a number of steps goes into every=..."
            )
        self._handles = [
            optimizer.register_step_pre_hook(self._take),
            optimizer.register_step_post_hook(self._compare),
        ]

    def arm(self, step: int) -> None:
        """Measure the next step of the optimizer, for the sample `step`."""
        self._armed, self._before = step, {}
        if getattr(self._optimizer, "release", None) is not None:  # steps in backward
            self._take()

    def remove(self) -> None:
        """Take the hooks off."""
        self._before = {}
        for handle in self._handles:
            handle.remove()

    def read(self, wait: bool = False) -> tuple[int | None, dict[str, float]]:
        """Return the last sample whose step was measured and has arrived, and the ratio of each layer."""
        self._arrivals.take(wait)
        step, names = self._arrivals.label or (None, [])
        norms = zip(names, *self._arrivals.values, strict=True) if names else ()
        return step, {name: moved / norm if norm else 0.0 for name, moved, norm in norms}

    @torch.no_grad()
    def _take(self, *_: Any) -> None:
        if self._armed < 0 or self._before or in_a_graph():
            return
        owned = {p for group in self._optimizer.param_groups for p in group["params"]}
        weights = {n: m.weight for n, m in self._layers.items() if m.weight in owned}
        if not weights:
            text = "the optimizer owns no weight of the FP8 layers: there is no update/weight ratio"
            warnings.warn(f"fp8stack: {text}", Fp8StackWarning, stacklevel=2)
        ours = isinstance(self._optimizer, BlockwiseOptimizer)
        for name, weight in weights.items():
            if local(weight).numel() and not (ours and self._optimizer.offloads(weight)):
                self._before[name] = weight, self._sample(weight)

    @torch.no_grad()
    def _compare(self, *_: Any) -> None:
        step, before = self._armed, self._before
        self._armed, self._before = -1, {}
        if len({sample.device for _, sample in before.values()}) != 1 or in_a_graph():
            return
        old = [sample for _, sample in before.values()]
        new = [self._sample(weight) for weight, _ in before.values()]
        norms = torch._foreach_norm(torch._foreach_sub(new, old)), torch._foreach_norm(old)
        values = torch.stack([torch.stack(list(n)) for n in norms])
        self._arrivals.send((step, list(before)), values)

    def _sample(self, weight: Tensor) -> Tensor:
        """Return elements of a weight, float32 [SAMPLE or fewer], in a tensor of their own."""
        part = local(weight).detach()
        stride = -(-part.numel() // SAMPLE)
        while math.gcd(stride, part.shape[-1]) > 1:
            stride += 1
        entries = local_state(self._optimizer.state.get(weight, {}))
        some = {
            key: value.reshape(-1)[::stride] if value.ndim else value
            for key, value in entries.items()
            if key in MASTER_KEYS
        }
        return decode_master(part.reshape(-1)[::stride], some)


def in_a_graph() -> bool:
    """Return whether what runs now is compiled, or captured in a CUDA graph: nothing can be read there."""
    capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    return capturing or torch.compiler.is_compiling()
