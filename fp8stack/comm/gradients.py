"""O1 on one device: gradients become block-scaled FP8 tensors during backward.

A post-accumulate-grad hook on each parameter notes that its gradient is there. Once 64 MiB of gradients are noted, and
again when backward is over, one launch casts them all to E4M3 blocks, which then are `p.grad`. So `WAITING` bytes, or
one gradient that is larger, are all that exists in full precision at any time (a compiled backward returns all of its
gradients at once). A launch for each gradient would cost the host more than the rest of a layer's backward. Until its
turn `p.grad` is what autograd wrote, and hooks of the user that come after ours see that.

Autograd itself adds a second micro-batch, through the tensor's own `add_`, which keeps a residual so that small addends
are not lost (`kernels/reference/gradient.py`).

Limits: where a backward fails, gradients that were noted stay as autograd wrote them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fp8stack.formats import E4M3
from fp8stack.kernels import ops
from fp8stack.tensor import DENSE_LAYER, BlockScaledTensor, check_dense, is_sharded, plain

WAITING = 64 * 2**20


class GradientHandle:
    """The hooks that quantize gradients; `remove()` takes them off and leaves ordinary gradients."""

    def __init__(self) -> None:
        self.hooks: dict[nn.Parameter, RemovableHandle] = {}
        self._waiting = _Waiting()

    def attach(self, parameters: Iterable[nn.Parameter], names: Mapping[nn.Parameter, str]) -> None:
        """Quantize the gradients of `parameters` from now on, those that exist already included; but not of shards."""
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


class _Waiting:
    """What the hooks note: the gradients of a backward that are not FP8 yet."""

    def __init__(self) -> None:
        # Autograd holds the batch of a backward until that is over or has failed. Held here, it would keep parameters
        # alive: Python's garbage collector does not see what hooks refer to.
        self._batch: Callable[[], _Batch | None] = lambda: None

    def note(self, name: str, parameter: Tensor) -> None:
        """Quantize the gradient of `parameter`, if it has one that is not yet: now if no backward runs, else soon.

        Raises:
            GradientError: for a sparse or complex gradient.
        """
        gradient = parameter.grad
        if gradient is None or isinstance(gradient, BlockScaledTensor):
            return
        check_dense(gradient, name, f'{DENSE_LAYER}, or initialize with gradients="keep"')
        backward = torch._C._current_graph_task_id()
        if backward == -1:
            _cast([parameter], _stream(gradient))
            return
        batch = self._batch()
        if batch is None or batch.backward != backward:
            batch = _Batch(backward)
            torch.autograd.Variable._execution_engine.queue_callback(batch.cast_all)
            self._batch = weakref.ref(batch)
        batch.add(parameter, gradient)


class _Batch:
    """Parameters whose gradients wait for one cast, by the device and the stream that those were made on."""

    def __init__(self, backward: int) -> None:
        self.backward = backward  # torch's number of it
        self._parameters: dict[tuple[int, int], list[Tensor]] = {}
        self._bytes: dict[tuple[int, int], int] = {}

    def add(self, parameter: Tensor, gradient: Tensor) -> None:
        key = gradient.get_device(), _stream(gradient)
        self._parameters.setdefault(key, []).append(parameter)
        self._bytes[key] = self._bytes.get(key, 0) + gradient.nbytes
        if self._bytes[key] >= WAITING:
            self._cast(key)

    def cast_all(self) -> None:
        """Cast the rest, on the streams of the call of backward, which by now wait for those of the gradients."""
        for key in [*self._parameters]:
            self._cast(key)

    def _cast(self, key: tuple[int, int]) -> None:
        del self._bytes[key]
        _cast(self._parameters.pop(key), key[1])


def _cast(parameters: Iterable[Tensor], stream: int) -> None:
    """Quantize gradients that were made on one stream of one device."""
    found, gradients = [], []
    for parameter in parameters:
        gradient = parameter.grad
        # A hook that came later may have freed or replaced it.
        if gradient is not None and not isinstance(gradient, BlockScaledTensor):
            if gradient.requires_grad or gradient.dtype is not parameter.dtype:
                gradient = gradient.detach().to(parameter.dtype)
            if _stream(gradient) != stream:  # its memory must last until the launch has read it
                gradient.record_stream(torch.cuda.current_stream(gradient.device))
            found.append(parameter)
            gradients.append(gradient)
    if found:
        for parameter, parts in zip(found, ops.quantize_list(gradients, E4M3), strict=True):
            parameter.grad = BlockScaledTensor(*parts, dtype=parameter.dtype)


def _stream(x: Tensor) -> int:
    """Return the handle of the current stream of the GPU that `x` is on; 0 on a CPU."""
    return int(torch._C._cuda_getCurrentRawStream(x.get_device())) if x.is_cuda else 0
