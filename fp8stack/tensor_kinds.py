"""Questions about tensors that others made: is one sharded, sparse, quantized by another library, or no dense numbers?

All of fp8stack asks them here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from .errors import Fp8StackError, GradientError
from .formats import FLOATS

DENSE_LAYER = "Use a dense layer (nn.Embedding(sparse=False))"
"""What to do where a layer makes sparse gradients."""


def check_dense(
    gradient: Tensor,
    name: str,
    remedy: str = DENSE_LAYER,
    error: type[Fp8StackError] = GradientError,
) -> None:
    """Raise `error` for a sparse or complex gradient, which has no FP8 form and which no step here takes."""
    if gradient.is_sparse or gradient.is_complex():
        kind = "sparse" if gradient.is_sparse else "complex"
        raise error(f"the gradient of {name} is {kind}; fp8stack takes dense real ones. {remedy}.")


def not_plain(parameter: Tensor) -> str:
    """Return what a parameter is that does not hold float32, bfloat16 or float16 numbers; else an empty string.

    It may be a class of another library's (torchao), packed bytes (bitsandbytes), float64, FP8 or sparse. Such a
    parameter is left alone if it is frozen, as a quantized base under LoRA is. All of fp8stack asks here.
    """
    data = parameter.data
    data = getattr(data, "_local_tensor", data)  # of a DTensor
    plain = (Tensor.__torch_dispatch__, FakeTensor.__torch_dispatch__)  # which stands for one
    if type(data).__torch_dispatch__ not in plain:
        return type(data).__name__
    if data.layout is not torch.strided:
        return str(data.layout)
    return "" if data.dtype in FLOATS else str(data.dtype)


def inner_tensors(x: Any) -> list[Tensor]:
    """Return the ordinary tensors that one of another library consists of; `x` itself if it is ordinary."""
    if type(x) is Tensor or not hasattr(x, "__tensor_flatten__"):
        return [x]
    return [part for name in x.__tensor_flatten__()[0] for part in inner_tensors(getattr(x, name))]


def renew_hooks(parameters: Iterable[Tensor]) -> None:
    """Register the post-accumulate-grad hooks of parameters again: `torch.utils.swap_tensors` leaves them behind."""
    for p in parameters:
        p._post_accumulate_grad_hooks = p._post_accumulate_grad_hooks


def fault_of(value: Tensor) -> str:
    """Return what keeps a tensor from a file from being dense numbers, each in its place; "" if nothing does.

    Only its metadata is looked at: a tensor of stride 0 has any size in a few bytes, and copying it allocates that.
    """
    if is_sharded(value):
        with torch.no_grad():
            return fault_of(value.to_local())  # type: ignore[attr-defined]
    if value.is_nested or value.layout is not torch.strided or value.is_quantized:
        return f"is no dense tensor ({value.layout}, {value.dtype})"
    if value.is_meta:
        return "has no data (it is on the meta device)"
    reach = 0  # of the dimensions inside
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1 and stride <= reach:
            return f"has elements in the same place (shape {tuple(value.shape)}, strides {value.stride()})"
        reach += (size - 1) * stride
    parts = [part for part in vars(value).values() if isinstance(part, Tensor)]  # of a subclass
    return next(filter(None, map(fault_of, parts)), "")


def is_sharded(x: Tensor) -> bool:
    """Return whether `x` is a DTensor. (Importing DTensor to ask would triple the time of `import fp8stack`.)"""
    return type(x) is not Tensor and hasattr(x, "device_mesh")


def whole_shape(parameter: Tensor) -> torch.Size:
    """Return the shape of a parameter; of one that DeepSpeed's ZeRO-3 has taken apart, as it is when gathered."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape
