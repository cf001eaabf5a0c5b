"""Checks gradients before a step, and splits FP8 gradients into codes and scales."""

from __future__ import annotations

from torch import Tensor

from fp8stack.errors import GradientError
from fp8stack.formats import FLOATS
from fp8stack.tensor import DENSE_LAYER, BlockScaledTensor, check_dense, is_sharded


def gradient_parts(gradient: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return (codes, scale) of an FP8 gradient, or (gradient, None)."""
    if isinstance(gradient, BlockScaledTensor):
        return gradient.codes, gradient.scale
    return gradient, None


def check_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Raise GradientError unless a step can read the gradient.

    Raises:
        GradientError: if it is sparse or complex, or of another shape, device or dtype than a step takes.
    """
    shape = tuple(parameter.shape)
    remedy = f"{DENSE_LAYER}, or torch's own optimizer for this parameter"
    check_dense(gradient, f"a parameter of shape {shape}", remedy)
    if gradient.shape != parameter.shape or gradient.device != parameter.device:
        raise GradientError(
            f"the gradient of a parameter of shape {shape} on {parameter.device} has shape {tuple(gradient.shape)} on "
            f"{gradient.device}. Was the parameter moved or resized after backward()? Clear it: optimizer.zero_grad()."
        )
    if is_sharded(parameter) or is_sharded(gradient):
        placements = [getattr(x, "placements", None) for x in (parameter, gradient)]
        if placements[0] != placements[1]:
            raise GradientError(
                f"a parameter of shape {shape} is placed {placements[0]} and its gradient {placements[1]}. "
                "Reduce or redistribute the gradient to the parameter's placements before the step."
            )
    if gradient.dtype not in FLOATS:
        raise GradientError(
            f"the gradient of a parameter of shape {shape} is {gradient.dtype}; fp8stack's optimizers take float32, "
            "bfloat16, float16 and block-scaled FP8 gradients."
        )
