"""The operators of fp8stack, registered with torch.library under the namespace `fp8stack`.

Each operator has a schema, a shape function for FakeTensor and torch.compile, and one implementation per device: the
pure-torch reference on CPU, the Triton kernel on CUDA. Operators that have no Triton kernel yet run the reference on
both. `FP8STACK_KERNELS=reference` runs the reference on CUDA too (read at every call, or in
eager mode at the first); it also runs there, with one warning, when Triton cannot be imported.

The functions below are the typed way in. They check nothing twice: the callers in `optim`, `nn` and `tensor` hand them
contiguous tensors of the right dtype.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from importlib import import_module
from typing import Any
from typing import cast as cast_

import torch
from torch import Tensor

from fp8stack.errors import ConfigError, Fp8StackWarning
from fp8stack.formats import FORMATS, MiniFloat

from .fake import fake_blocks, fake_cast, fake_quantize_blocks, fake_quantize_tensor
from .reference import cast as matrix
from .reference import cast_blocks, gradient, quantize, swiglu
from .reference import cast_delayed as delayed
from .reference.cast_blocks import Codes
from .reference.cast_delayed import STATES
from .reference.swiglu import CURRENT, Scaling

_LIBRARY = torch.library.Library("fp8stack", "DEF")
_TRITON_MODULE = {
    "quantize_blocks": "quantize",
    "dequantize_blocks": "quantize",
    "quantize_tensor": "quantize",
    "cast": "cast",
    "recast": "cast",
    "cast_1x128": "cast_blocks",
    "cast_128x128": "cast_blocks",
    "cast_delayed": "cast_delayed",
    "matmul_blocks": "gemm",
    "swiglu_cast": "swiglu",
    "swiglu_backward_cast": "swiglu",
}


# --- the typed way in


def quantize_blocks(x: Tensor, fmt: MiniFloat) -> tuple[Tensor, Tensor]:
    """Return codes and scale (float32 [rows, ceil(cols / 128)]), to nearest; see `reference/quantize.py`."""
    if _is_eager(x):
        return _module("quantize", x.is_cuda).quantize_blocks(x, fmt)  # type: ignore[no-any-return]
    return cast_("tuple[Tensor, Tensor]", torch.ops.fp8stack.quantize_blocks(x, fmt.name))


def quantize_blocks_into(x: Tensor, fmt: MiniFloat, codes: Tensor, scale: Tensor) -> None:
    """Write codes (fmt.dtype, x's shape) and scale as `quantize_blocks` returns them; both contiguous."""
    _module("quantize", x.is_cuda).quantize_blocks_into(x, fmt, codes, scale)


def dequantize_blocks(
    codes: Tensor,
    scale: Tensor,
    fmt: MiniFloat,
    dtype: torch.dtype = torch.float32,
    shape: torch.Size | None = None,
) -> Tensor:
    """Return code × scale in `dtype`, of `shape` or that of the codes; see `reference/quantize.py`."""
    shape = torch.Size(fmt.values_shape(codes.shape)) if shape is None else shape
    if _is_eager(codes):
        kernels = _module("quantize", codes.is_cuda)
        return kernels.dequantize_blocks(codes, scale, fmt, dtype, shape)  # type: ignore[no-any-return]
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
    """Return (codes, transposed codes, scale) of a matrix, padded to multiples of 16; see `reference/cast.py`.

    `amax` is its largest magnitude, 0-d; or int32 [a power of two], the bits of those of its parts, as rmsnorm's.
    """
    if torch.compiler.is_compiling():
        result = torch.ops.fp8stack.cast(x, fmt.name, codes, transposed, amax)
        return cast_("tuple[Tensor, Tensor, Tensor]", result)
    return _module("cast", x.is_cuda).cast(x, fmt, codes, transposed, amax, True)  # type: ignore[no-any-return]


def recast(
    x: Tensor, fmt: MiniFloat, of: int, codes: bool = True, transposed: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `cast` does, with the scale of x's last such cast while that fits; see `reference/cast.py`.

    `of` is the handle of a DelayedState, which keeps that scale and needs no history.
    """
    if torch.compiler.is_compiling():
        result = torch.ops.fp8stack.recast(x, fmt.name, of, codes, transposed)
    else:
        last = STATES[of].on(x.device)
        result = _module("cast", x.is_cuda).recast(x, fmt, last, codes, transposed, True, True)
    return cast_("tuple[Tensor, Tensor, Tensor]", result)


def cast_1x128(x: Tensor, fmt: MiniFloat) -> Codes:
    """Return (codes, scale, transposed codes, their scale), a scale for each 128; see `reference/cast_blocks.py`."""
    if torch.compiler.is_compiling():
        return cast_("Codes", torch.ops.fp8stack.cast_1x128(x, fmt.name))
    return cast_("Codes", _module("cast_blocks", x.is_cuda).cast_1x128(x, fmt))


def cast_128x128(x: Tensor, fmt: MiniFloat) -> Codes:
    """Return (codes, scale, transposed codes, their scale), a scale for each square of 128; see there."""
    if torch.compiler.is_compiling():
        return cast_("Codes", torch.ops.fp8stack.cast_128x128(x, fmt.name))
    return cast_("Codes", _module("cast_blocks", x.is_cuda).cast_128x128(x, fmt))


def cast_delayed(
    x: Tensor, fmt: MiniFloat, of: int, update: bool, again: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (codes, transposed codes, scale) with a scale from the past; see `reference/cast_delayed.py`.

    `of` is the handle of a DelayedState.
    """
    if torch.compiler.is_compiling():
        result = torch.ops.fp8stack.cast_delayed(x, fmt.name, of, update, again)
    else:
        kernels = _module("cast_delayed", x.is_cuda)
        result = kernels.cast_delayed(x, fmt, STATES[of], update, again)
    return cast_("tuple[Tensor, Tensor, Tensor]", result)


def matmul_blocks(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, squares: bool, dtype: torch.dtype
) -> Tensor:
    """Return (a × a_scale) @ (b × b_scale).T in `dtype`; see `reference/cast_blocks.py`."""
    return cast_(Tensor, torch.ops.fp8stack.matmul_blocks(a, a_scale, b, b_scale, squares, dtype))


def swiglu_cast(
    gate: Tensor,
    up: Tensor,
    fmt: MiniFloat,
    of: Sequence[int] = (),
    update: bool = False,
    again: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return (codes, scale) of silu(gate) × up; see `reference/swiglu.py`. `of` has the handle of a DelayedState."""
    if torch.compiler.is_compiling():
        result = torch.ops.fp8stack.swiglu_cast(gate, up, fmt.name, of, update, again)
    else:
        kernels = _module("swiglu", gate.is_cuda)
        result = kernels.swiglu_cast(gate, up, fmt, _scaling(of, update, again))
    return cast_("tuple[Tensor, Tensor]", result)


def swiglu_backward_cast(
    dh: Tensor,
    gate: Tensor,
    up: Tensor,
    h_scale: Tensor,
    fmt: MiniFloat,
    of: Sequence[int] = (),
    update: bool = False,
) -> tuple[Tensor, ...]:
    """Return codes, transposed codes and scale of gate's gradient, those of up's, and the activation's transpose.

    See `reference/swiglu.py`. `of` has the handles of gate's DelayedState and of up's.
    """
    if torch.compiler.is_compiling():
        op = torch.ops.fp8stack.swiglu_backward_cast
        result = op(dh, gate, up, h_scale, fmt.name, of, update)
    else:
        scaling = _scaling(of, update, False)
        kernels = _module("swiglu", gate.is_cuda)
        result = kernels.swiglu_backward_cast(dh, gate, up, h_scale, fmt, scaling)
    return cast_("tuple[Tensor, ...]", result)


def _scaling(of: Sequence[int], update: bool, again: bool) -> Scaling:
    return Scaling(tuple(STATES[handle] for handle in of), update, again) if of else CURRENT


def transpose(codes: Tensor) -> Tensor:
    """Return the transpose of FP8 codes, laid out as rows; see `reference/cast.py`."""
    return _module("cast", codes.is_cuda).transpose(codes)  # type: ignore[no-any-return]


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return x / rms(x) × weight, 1 / rms(x), and what `cast` takes as amax; see `reference/rmsnorm.py`."""
    return _module("rmsnorm", x.is_cuda).rmsnorm(x, weight, eps)  # type: ignore[no-any-return]


def rmsnorm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, need_weight: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of x and, if needed, of weight; see `reference/rmsnorm.py`."""
    kernels = _module("rmsnorm", x.is_cuda)
    return kernels.rmsnorm_backward(dy, x, weight, rstd, need_weight)  # type: ignore[no-any-return]


def wire_kernels(gpu: bool) -> Any:
    """Return the module of functions on chunks for a device, `reference/wire.py` or its Triton twin."""
    return _module("wire", gpu)


def two_shot_kernels() -> tuple[Any, Any]:
    """Return the modules `two_shot` and `workspace`, which import Triton and have no twin in plain torch."""
    return import_module(".two_shot", __package__), import_module(".workspace", __package__)


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


def count(x: Tensor, scale: Tensor, fmt: MiniFloat, out: Tensor, squares: bool) -> None:
    """Add the statistics of a cast to `out` (int64 [10]); see `reference/monitor.py`. Never in a graph."""
    _module("monitor", x.is_cuda).count(x, scale, fmt, out, squares)


def triton_runs_on(device: torch.device) -> bool:
    """Return whether kernels that work on many tensors at once, through pointers, run on `device`."""
    return device.type == "cuda" and kernel_backend()[0] == "triton"


def table_kernels(name: str) -> Any:
    """Return a module of Triton kernels that work on many tensors at once, where `triton_runs_on` is true."""
    return import_module(f".{name}", __package__)


# --- registration


def _is_eager(x: Tensor) -> bool:
    """Can a kernel be called without the dispatcher, which takes 10 µs? Not by those who trace or fake tensors."""
    return type(x) is Tensor and not torch.compiler.is_compiling()


@cache
def _module(name: str, gpu: bool) -> Any:
    """Return a module of kernels for a device: eager calls by it save the dispatcher's 10 µs."""
    triton = gpu and kernel_backend()[0] == "triton"
    return import_module(f".{name}" if triton else f".reference.{name}", __package__)


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
    schema: str,
    reference: Callable[..., Any],
    fake: Callable[..., Any] | None = None,
    adapt: Callable[..., Any] = lambda function: function,
) -> None:
    name = schema.split("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, _with_format(adapt(reference)), "CPU")
    _LIBRARY.impl(name, _with_format(adapt(_on_cuda(name, reference))), "CUDA")
    torch.library.register_fake(f"fp8stack::{name}", fake or (lambda *args: None), lib=_LIBRARY)


_register(
    "quantize_blocks(Tensor x, str fmt) -> (Tensor, Tensor)",
    quantize.quantize_blocks,
    fake_quantize_blocks,
)
_register(
    "dequantize_blocks(Tensor codes, Tensor scale, str fmt, ScalarType dtype, int[] shape) -> Tensor",
    quantize.dequantize_blocks,
    lambda codes, scale, fmt, dtype, shape: torch.empty(shape, dtype=dtype, device=codes.device),
)
_register(
    "quantize_tensor(Tensor x, str fmt) -> (Tensor, Tensor)",
    quantize.quantize_tensor,
    fake_quantize_tensor,
)
_register(
    "cast(Tensor x, str fmt, bool codes, bool transposed, Tensor? amax) -> (Tensor, Tensor, Tensor)",
    matrix.cast,
    fake_cast,
)


_register(
    "cast_1x128(Tensor x, str fmt) -> (Tensor, Tensor, Tensor, Tensor)",
    cast_blocks.cast_1x128,
    fake_blocks,
)
_register(
    "cast_128x128(Tensor x, str fmt) -> (Tensor, Tensor, Tensor, Tensor)",
    cast_blocks.cast_128x128,
    lambda x, fmt: fake_blocks(x, fmt, True),
)
_register(
    "cast_delayed(Tensor x, str fmt, int of, bool update, bool again) -> (Tensor, Tensor, Tensor)",
    delayed.cast_delayed,
    lambda x, fmt, *_: fake_cast(x, fmt, True, True, None),
    lambda run: lambda x, fmt, of, *how: run(x, fmt, STATES[of], *how),
)
_register(
    "recast(Tensor x, str fmt, int of, bool codes, bool transposed) -> (Tensor, Tensor, Tensor)",
    matrix.recast,
    lambda x, fmt, of, codes, turned: fake_cast(x, fmt, codes, turned, None),
    lambda run: lambda x, fmt, of, *layouts: run(x, fmt, STATES[of].on(x.device), *layouts, True),
)
_register(
    "matmul_blocks(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, bool squares, ScalarType dtype) -> Tensor",
    cast_blocks.matmul_blocks,
    lambda a, a_scale, b, b_scale, squares, dtype: a.new_empty(
        (a.shape[0], b.shape[0]), dtype=dtype
    ),
)
_register(
    "swiglu_cast(Tensor gate, Tensor up, str fmt, int[] of, bool update, bool again) -> (Tensor, Tensor)",
    swiglu.swiglu_cast,
    lambda gate, up, fmt, *_: fake_cast(gate, fmt, True, False, None)[::2],
    lambda run: lambda gate, up, fmt, *of: run(gate, up, fmt, _scaling(*of)),
)
_register(
    "swiglu_backward_cast(Tensor dh, Tensor gate, Tensor up, Tensor h_scale, str fmt, int[] of, bool update) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    swiglu.swiglu_backward_cast,
    lambda dh, gate, up, h_scale, fmt, *_: (
        *fake_cast(gate, fmt, True, True, None),
        *fake_cast(up, fmt, True, True, None),
        fake_cast(gate, "e4m3", False, True, None)[1],
    ),
    lambda run: (
        lambda dh, gate, up, h_scale, fmt, of, update: run(
            dh, gate, up, h_scale, fmt, _scaling(of, update, False)
        )
    ),
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
