"""O1 on one device: gradients become block-scaled FP8 tensors during backward.

A post-accumulate-grad hook on each parameter notes that its gradient is there. Once 256 MiB of gradients are noted, and
again when backward is over, one launch casts them all to E4M3 blocks, which then are `p.grad`. So less than `WAITING`
bytes, and the gradient that arrives, are all that exists in full precision at any time (a compiled backward returns all
of its gradients at once). A launch for each gradient would keep the host busy for longer than the GPU. Until its turn
`p.grad` is what autograd wrote, and hooks of the user that come after ours see that.

Autograd itself adds a second micro-batch, through the tensor's own `add_`, which keeps a residual so that small addends
are not lost (`kernels/reference/gradient.py`).

Limits: where a backward fails, gradients that were noted stay as autograd wrote them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fp8stack.kernels.ops import is_traced, raw_stream
from fp8stack.tensor import BlockScaledTensor, plain
from fp8stack.tensor_kinds import DENSE_LAYER, check_dense, is_sharded

WAITING = 256 * 2**20
_REMEDY = f'{DENSE_LAYER}, or initialize with gradients="keep"'


class GradientHandle:
    """The hooks that quantize gradients; `remove()` takes them off and leaves ordinary gradients."""

    def __init__(self) -> None:
        self.hooks: dict[nn.Parameter, RemovableHandle] = {}
        self._waiting = _Waiting()

    def attach(self, parameters: Iterable[nn.Parameter], names: Mapping[nn.Parameter, str]) -> None:
        """Quantize the gradients of `parameters` from now on, also those that exist already, but not of shards."""
        for parameter in parameters:
            if parameter in self.hooks or not parameter.requires_grad or is_sharded(parameter):
                continue
            note = partial(self._waiting.note, names.get(parameter, "a parameter"))
            note(parameter)
            self.hooks[parameter] = parameter.register_post_accumulate_grad_hook(note)

    def remove(self) -> None:
        """Take the hooks off and dequantize the gradients that exist."""
        for parameter, hook in self.hooks.items():
            hook.remove()
            if isinstance(parameter.grad, BlockScaledTensor):
                parameter.grad = plain(parameter.grad)
        self.hooks.clear()
        for batch in self._waiting.batches.values():  # where a hook calls this
            batch.noted.clear()


class _Waiting:
    """What the hooks note: the gradients of a backward that are not FP8 yet."""

    def __init__(self) -> None:
        # By torch's number of the backward. Autograd holds a batch until its backward is over or has failed. Held here,
        # it would keep parameters alive: Python's garbage collector does not see what hooks refer to.
        self.batches: WeakValueDictionary[int, _Batch] = WeakValueDictionary()

    def note(self, name: str, parameter: Tensor) -> None:
        """Quantize the gradient of `parameter`, if it has one that is not yet: soon, or now if that cannot wait.

        Raises:
            GradientError: for a sparse or complex gradient.
        """
        gradient = parameter.grad
        if gradient is None or isinstance(gradient, BlockScaledTensor):
            return
        check_dense(gradient, name, _REMEDY)
        backward = -1 if is_traced(gradient) else torch._C._current_graph_task_id()
        # A part of a larger memory, such as a bucket of DDP's, may be written by others before backward is over.
        if backward == -1 or gradient.untyped_storage().nbytes() > gradient.nbytes:
            parameter.grad = BlockScaledTensor.quantize(gradient.to(parameter.dtype))
            return
        batch = self.batches.get(backward)
        if batch is None:
            batch = self.batches[backward] = _Batch()
            torch.autograd.Variable._execution_engine.queue_callback(batch.cast_all)
        batch.add(parameter, gradient)


class _Batch:
    """Parameters with gradients that wait for one cast, by dtype and the device and stream that those were made on."""

    def __init__(self) -> None:
        self.noted: dict[Any, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        self._bytes: Counter[Any] = Counter()

    def add(self, parameter: Tensor, gradient: Tensor) -> None:
        key = gradient.get_device(), raw_stream(gradient), parameter.dtype
        self.noted[key].append((parameter, gradient))
        self._bytes[key] += gradient.nbytes
        if self._bytes[key] >= WAITING:
            self._cast(key)

    def cast_all(self) -> None:
        """Cast the rest, on the streams of the call of backward, which by now wait for those of the gradients."""
        for key in [*self.noted]:
            self._cast(key)

    def _cast(self, key: tuple[int, int, torch.dtype]) -> None:
        """Quantize the gradients of one device, stream and dtype."""
        del self._bytes[key]
        # A later hook may have freed or replaced one, as DDP does.
        noted = [(p, gradient) for p, gradient in self.noted.pop(key) if p.grad is gradient]
        gradients = []
        for _, gradient in noted:
            if raw_stream(gradient) != key[1]:
                # Its memory must not be given away before the launch has read it.
                gradient.record_stream(torch.cuda.current_stream(gradient.device))
            if gradient.requires_grad or gradient.dtype is not key[2]:
                gradient = gradient.detach().to(key[2])
            gradients.append(gradient)
        made = BlockScaledTensor.quantize_list(gradients) if gradients else []
        for (parameter, _), gradient in zip(noted, made, strict=True):
            parameter.grad = gradient
