"""How far an optimizer step moves the weights of layers: ‖Δw‖ / ‖w‖, of a sample of their elements.

A copy of all weights would cost as much memory as they do. So of each weight up to 2^14 elements are kept from before
the step to after it, 64 KiB a layer, taken at equal distances through the matrix; the distance has no factor in common
with the number of columns, so all of them are met. Both norms are of the same elements. Where the squares of n elements
have the kurtosis k of their elements, the norm of the sample is off by sqrt((k - 1) / n) / 2 of itself (one standard
deviation): 0.6 % for Gaussian numbers, 4 % where k is 100. A weight of up to 2^14 elements is read as a whole.

What moves is what the optimizer accumulates in: of fp8stack's own, bfloat16 weight and remainder, or another master.
The weight alone would tell mostly of its rounding. With `master="none"` that is what moves, steps of 2^-8 drawn at
random, and the ratio is larger than that of what was added.

The hooks are on the optimizer from the beginning of a sampled step to that of the next one, and the results are copied
to the host without waiting. A step that is skipped for its gradients moves nothing: 0. Left out are weights that
the optimizer does not own (DeepSpeed's ZeRO steps copies) and states in host memory (`offload="cpu"`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fp8stack.errors import ConfigError, Fp8StackWarning
from fp8stack.optim.base import BlockwiseOptimizer
from fp8stack.optim.sharded import local, local_state
from fp8stack.optim.state import MASTER_KEYS, decode_master

from .transfer import Transfer

SAMPLE = 2**14
"""Elements of a weight that are compared, at most."""


class Updates:
    """Measures the steps of an optimizer that `arm` asks for, on the weights of layers, by name.

    Raises:
        ConfigError: for what is no optimizer of torch's, or only wraps one.
    """

    def __init__(self, layers: Mapping[str, nn.Module], optimizer: Any) -> None:
        if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
            inner = getattr(optimizer, "optimizer", None)
            raise ConfigError(
                f"optimizer={type(optimizer).__name__} is not a torch.optim.Optimizer"
                + (" but wraps one: pass its .optimizer." if inner is not None else ".")
                + " Pass the one that fp8stack.initialize returned; a number of steps goes into every=..."
            )
        self.ratios: dict[str, float] = {}  # by layer, of the last measured step that has arrived
        self.step: int | None = None  # its sample
        self._layers, self._optimizer = dict(layers), optimizer
        self._handles: list[Any] = []
        self._before: dict[str, tuple[Tensor, Tensor]] = {}  # weights, and their samples
        self._armed = -1  # the sample whose step is to come
        self._transfer: tuple[int, list[str], Transfer] | None = None

    def arm(self, step: int) -> None:
        """Measure the next step of the optimizer, for the sample `step`."""
        self.remove()
        self._armed = step
        self._handles = [
            self._optimizer.register_step_pre_hook(self._take),
            self._optimizer.register_step_post_hook(self._compare),
        ]
        if getattr(self._optimizer, "release", None) is not None:  # steps in backward
            self._take()

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._before, self._armed = [], {}, -1

    def settle(self) -> None:
        """Take the hooks off if they are done; not in a hook, since torch goes through them then."""
        if self._handles and self._armed < 0:
            self.remove()

    @property
    def busy(self) -> bool:
        """Is there a step to come, or a result on its way?"""
        return self._armed >= 0 or self._transfer is not None

    def arrive(self, wait: bool = False) -> None:
        """Take the ratios of a step that have arrived, or wait for them."""
        if self._transfer is None:
            return
        step, names, transfer = self._transfer
        norms = transfer.take(wait)
        if norms is not None:
            self._transfer, self.step = None, step
            moved = zip(names, *norms, strict=True)
            self.ratios = {name: d / w if w else 0.0 for name, d, w in moved}

    @torch.no_grad()
    def _take(self, *_: Any) -> None:
        if self._armed < 0 or self._before or torch.compiler.is_compiling() or _capturing():
            return
        owned = {p for group in self._optimizer.param_groups for p in group["params"]}
        weights = {
            name: module.weight for name, module in self._layers.items() if module.weight in owned
        }
        if not weights:
            text = "the optimizer owns no weight of the FP8 layers: there is no update/weight ratio"
            warnings.warn(f"fp8stack: {text}", Fp8StackWarning, stacklevel=2)
        for name, weight in weights.items():
            assert isinstance(weight, Tensor)
            if local(weight).numel() and not self._is_offloaded(weight):
                self._before[name] = weight, self._sample(weight)

    @torch.no_grad()
    def _compare(self, *_: Any) -> None:
        step, before = self._armed, self._before
        self._armed, self._before = -1, {}
        devices = {sample.device for _, sample in before.values()}
        if len(devices) != 1 or torch.compiler.is_compiling() or _capturing():
            return
        old = [sample for _, sample in before.values()]
        new = [self._sample(weight) for weight, _ in before.values()]
        norms = torch._foreach_norm(torch._foreach_sub(new, old)), torch._foreach_norm(old)
        values = torch.stack([torch.stack(list(n)) for n in norms])
        self._transfer = step, list(before), Transfer(values)

    def _sample(self, weight: Tensor) -> Tensor:
        """Return elements of a weight, float32 [SAMPLE or fewer], in a tensor of their own."""
        part = local(weight).detach()
        stride = -(-part.numel() // SAMPLE)
        while math.gcd(stride, part.shape[-1]) > 1:
            stride += 1
        state = {}
        if isinstance(self._optimizer, BlockwiseOptimizer):
            entries = local_state(self._optimizer.state.get(weight, {}))
            state = {key: entries[key] for key in MASTER_KEYS if key in entries}
        some = {k: v.reshape(-1)[::stride] if v.ndim else v for k, v in state.items()}
        return decode_master(part.reshape(-1)[::stride], some)

    def _is_offloaded(self, weight: Tensor) -> bool:
        return isinstance(self._optimizer, BlockwiseOptimizer) and self._optimizer.offloads(weight)


def _capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
