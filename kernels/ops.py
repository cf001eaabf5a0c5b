"""The operators of fp8stack, registered with torch.library under the namespace `fp8stack`.

Each operator has a schema, a shape function for FakeTensor and torch.compile, and one implementation per device: the
pure-torch reference on CPU, the Triton kernel on CUDA. Operators that have no Triton kernel yet run the reference on
both. `FP8STACK_KERNELS=reference` runs the reference on CUDA too (read at every call); it also runs there, with one
warning, when Triton cannot be imported.

The functions below are the typed way in. They check nothing twice: the callers in `optim`, `nn` and `tensor` hand them
contiguous tensors of the right dtype.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import cache, lru_cache
from importlib import import_module
from typing import Any
from typing import cast as cast_

import torch
from torch import Tensor

from fp8stack.errors import ConfigError, Fp8StackWarning
from fp8stack.formats import FORMATS, MiniFloat, scale_shape

from .reference import cast as matrix
from .reference import gradient, quantize

_LIBRARY = torch.library.Library("fp8stack", "DEF")
_TRITON_MODULE = {
    "quantize_blocks": "quantize",
    "dequantize_blocks": "quantize",
    "quantize_tensor": "quantize",
    "cast": "cast",
}


# --- the typed way in


def quantize_blocks(x: Tensor, fmt: MiniFloat) -> tuple[Tensor, Tensor]:
    """Return codes and scale (float32 [rows, ceil(cols / 128)]), to nearest; see `reference/quantize.py`."""
    return cast_("tuple[Tensor, Tensor]", torch.ops.fp8stack.quantize_blocks(x, fmt.name))


def dequantize_blocks(
    codes: Tensor,
    scale: Tensor,
    fmt: MiniFloat,
    dtype: torch.dtype = torch.float32,
    shape: torch.Size | None = None,
) -> Tensor:
    """Return code × scale in `dtype`, of `shape` or that of the codes; see `reference/quantize.py`."""
    shape = torch.Size(fmt.values_shape(codes.shape)) if shape is None else shape
    return cast_(Tensor, torch.ops.fp8stack.dequantize_blocks(codes, scale, fmt.name, dtype, shape))


def quantize_tensor(x: Tensor, fmt: MiniFloat) -> tuple[Tensor, Tensor]:
    """Return (codes: fmt.dtype, x's shape; scale: float32, 0-d); see `reference/quantize.py`."""
    return cast_("tuple[Tensor, Tensor]", torch.ops.fp8stack.quantize_tensor(x, fmt.name))


def cast(
    x: Tensor,
    fmt: MiniFloat,
    codes: bool = True,
    transposed: bool = True,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (codes, transposed codes, scale) of a matrix, padded to multiples of 16; see `reference/cast.py`."""
    if torch.compiler.is_compiling():
        result = torch.ops.fp8stack.cast(x, fmt.name, codes, transposed, amax)
        return cast_("tuple[Tensor, Tensor, Tensor]", result)
    return _casts_on(x.is_cuda).cast(x, fmt, codes, transposed, amax)  # type: ignore[no-any-return]


def transpose(codes: Tensor) -> Tensor:
    """Return the transpose of FP8 codes, laid out as rows; see `reference/cast.py`."""
    return _casts_on(codes.is_cuda).transpose(codes)  # type: ignore[no-any-return]


def accumulate_blocks(
    codes: Tensor, scale: Tensor, residual_codes: Tensor, residual_scale: Tensor, x: Tensor
) -> None:
    """Add `x` to a block-scaled gradient with a residual, in place; see `reference/gradient.py`."""
    torch.ops.fp8stack.accumulate_blocks(codes, scale, residual_codes, residual_scale, x)


def norm_blocks(codes: Tensor, scale: Tensor) -> Tensor:
    """Return the 2-norm (float32, 0-d) of a block-scaled gradient; see `reference/gradient.py`."""
    return cast_(Tensor, torch.ops.fp8stack.norm_blocks(codes, scale))


def kernel_backend() -> tuple[str, str]:
    """Return ("triton" or "reference", the reason): what CUDA tensors run on."""
    choice = os.environ.get("FP8STACK_KERNELS", "triton")
    if choice not in ("triton", "reference"):
        raise ConfigError(f'FP8STACK_KERNELS must be "triton" or "reference", got "{choice}".')
    if choice == "reference":
        return "reference", "FP8STACK_KERNELS=reference"
    error = _triton_error()
    return ("reference", error) if error else ("triton", "Triton is installed")


def triton_runs_on(device: torch.device) -> bool:
    """Return whether kernels that work on many tensors at once, through pointers, run on `device`."""
    return device.type == "cuda" and kernel_backend()[0] == "triton"


# --- registration


@cache
def _casts_on(gpu: bool) -> Any:
    """Return the module of casts for a device, without the 10 µs that the dispatcher takes; for eager mode."""
    triton = gpu and kernel_backend()[0] == "triton"
    return import_module(".cast" if triton else ".reference.cast", __package__)


@lru_cache(maxsize=1)
def _triton_error() -> str:
    """Return why Triton cannot be used, or an empty string."""
    try:
        import_module("triton")
    except ImportError as error:
        reason = f"Triton cannot be imported ({error})"
        warnings.warn(
            f"{reason}: fp8stack runs its slower torch reference on CUDA. Install it with: pip install triton",
            Fp8StackWarning,
            stacklevel=2,
        )
        return reason
    return ""


def _with_format(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let an operator pass a format by name, as a schema has no type for it."""

    def run(*args: Any) -> Any:
        return function(*(FORMATS[a] if isinstance(a, str) else a for a in args))

    return run


def _on_cuda(name: str, reference: Callable[..., Any]) -> Callable[..., Any]:
    """Return the CUDA implementation: the Triton kernel, imported at its first call, or the reference."""

    def run(*args: Any) -> Any:
        with torch.cuda.device_of(args[0]):
            if kernel_backend()[0] == "reference":
                return reference(*args)
            return getattr(import_module(f".{_TRITON_MODULE[name]}", __package__), name)(*args)

    return run if name in _TRITON_MODULE else reference


def _register(
    schema: str, reference: Callable[..., Any], fake: Callable[..., Any] | None = None
) -> None:
    name = schema.split("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, _with_format(reference), "CPU")
    _LIBRARY.impl(name, _with_format(_on_cuda(name, reference)), "CUDA")
    torch.library.register_fake(f"fp8stack::{name}", fake or (lambda *args: None), lib=_LIBRARY)


def _fake_quantize_blocks(x: Tensor, fmt: str) -> tuple[Tensor, Tensor]:
    shape = FORMATS[fmt].codes_shape(x.shape)
    codes = torch.empty(shape, dtype=FORMATS[fmt].dtype, device=x.device)
    return codes, x.new_empty(scale_shape(x.shape), dtype=torch.float32)


def _fake_quantize_tensor(x: Tensor, fmt: str) -> tuple[Tensor, Tensor]:
    codes = torch.empty(x.shape, dtype=FORMATS[fmt].dtype, device=x.device)
    return codes, x.new_empty((), dtype=torch.float32)


def _fake_cast(
    x: Tensor, fmt: str, codes: bool, transposed: bool, amax: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    cols = matrix.aligned(x.shape[-1])
    rows, dtype = matrix.aligned(x.numel() // max(x.shape[-1], 1)), FORMATS[fmt].dtype
    return (
        x.new_empty((rows, cols) if codes else (0, 0), dtype=dtype),
        x.new_empty((cols, rows) if transposed else (0, 0), dtype=dtype),
        x.new_empty((), dtype=torch.float32),
    )


_register(
    "quantize_blocks(Tensor x, str fmt) -> (Tensor, Tensor)",
    quantize.quantize_blocks,
    _fake_quantize_blocks,
)
_register(
    "dequantize_blocks(Tensor codes, Tensor scale, str fmt, ScalarType dtype, int[] shape) -> Tensor",
    quantize.dequantize_blocks,
    lambda codes, scale, fmt, dtype, shape: torch.empty(shape, dtype=dtype, device=codes.device),
)
_register(
    "quantize_tensor(Tensor x, str fmt) -> (Tensor, Tensor)",
    quantize.quantize_tensor,
    _fake_quantize_tensor,
)
_register(
    "cast(Tensor x, str fmt, bool codes, bool transposed, Tensor? amax) -> (Tensor, Tensor, Tensor)",
    matrix.cast,
    _fake_cast,
)
_register(
    "accumulate_blocks(Tensor(a!) codes, Tensor(b!) scale, Tensor(c!) residual_codes, "
    "Tensor(d!) residual_scale, Tensor x) -> ()",
    gradient.accumulate_blocks,
)
_register(
    "norm_blocks(Tensor codes, Tensor scale) -> Tensor",
    gradient.norm_blocks,
    lambda codes, scale: scale.new_empty(()),
)
