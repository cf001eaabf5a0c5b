"""O1 on one device: each gradient becomes a block-scaled FP8 tensor as soon as it is ready.

A post-accumulate-grad hook on each parameter replaces the fresh `p.grad` by its E4M3 blocks, so in eager mode at most
one gradient exists in full precision at any time (a compiled backward returns all of its gradients at once). Autograd
itself adds a second micro-batch, through the tensor's own `add_`, which keeps a residual so that small addends are not
lost (`kernels/reference/gradient.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fp8stack.tensor import DENSE_LAYER, BlockScaledTensor, check_dense, is_sharded, plain


class GradientHandle:
    """The hooks that quantize gradients; `remove()` takes them off and leaves ordinary gradients."""

    def __init__(self) -> None:
        self.hooks: dict[nn.Parameter, RemovableHandle] = {}

    def attach(self, parameters: Iterable[nn.Parameter], names: Mapping[nn.Parameter, str]) -> None:
        """Quantize the gradients of `parameters` from now on, those that exist already included; but not of shards."""
        for parameter in parameters:
            if parameter in self.hooks or not parameter.requires_grad or is_sharded(parameter):
                continue
            quantize = partial(quantize_gradient, name=names.get(parameter, "a parameter"))
            quantize(parameter)
            self.hooks[parameter] = parameter.register_post_accumulate_grad_hook(quantize)

    def remove(self) -> None:
        """Take the hooks off and dequantize the gradients that exist."""
        for parameter, hook in self.hooks.items():
            hook.remove()
            if isinstance(parameter.grad, BlockScaledTensor):
                parameter.grad = plain(parameter.grad)
        self.hooks.clear()


def quantize_gradient(parameter: Tensor, name: str) -> None:
    """Replace `parameter.grad` by its E4M3 blocks, if it has one that is not yet.

    Raises:
        GradientError: for a sparse or complex gradient.
    """
    gradient = parameter.grad
    if gradient is None or isinstance(gradient, BlockScaledTensor):
        return
    check_dense(gradient, name, f'{DENSE_LAYER}, or initialize with gradients="keep"')
    parameter.grad = BlockScaledTensor.quantize(gradient.to(parameter.dtype))
