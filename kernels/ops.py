"""The way in to the kernels: one list of operators, and which implementation runs.

An entry of the list is a call of `_operator`. It names

    schema       the operator's signature for torch.library, in the namespace `fp8stack`
    reference    the function in `reference/` that defines the numbers, and has the types
    shapes       what FakeTensor and torch.compile need: empty results of the right shapes and dtypes

Arguments and defaults are the reference's. A format travels by its name, and a `DelayedState` is named by its handle
everywhere, as a schema knows no objects.

Layers that consist of operators are operators too (`define_composite`), whose parts torch.compile sees.

The Triton kernel of an operator is launched by the function of the same name in the file of the same name: for
`reference/cast.py` and its `cast` that is `cast` in `cast.py`. It is imported when a GPU first needs it. No other file
imports modules of fp8stack late; here it has to be, since those modules import Triton.

Eager calls go straight to the implementation, because torch's dispatcher takes 10 µs. Under torch.compile, and for
tensors that are fake or of a subclass, the same functions call the operator.

On a CPU the reference runs. On a GPU Triton's kernel runs, or the reference where FP8STACK_KERNELS=reference says so or
Triton cannot be imported. That is decided once, when it is first asked (`kernel_backend`): set the variable before.

Arguments are not checked again: the callers in `optim`, `nn`, `comm` and `tensor` hand over contiguous tensors of the
right dtype.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache, partial, wraps
from importlib import import_module
from typing import Any, ParamSpec, TypeVar
from typing import cast as cast_

import torch
from torch import Tensor
from torch.nn import Parameter

from fp8stack.errors import ConfigError, warn
from fp8stack.formats import E4M3, FORMATS, MiniFloat, scale_shape

from .reference import activation, monitor, norm, quantize, rows, widen, wire
from .reference import cast as matrix
from .reference import cast_blocks as blocks
from .reference import cast_delayed as delayed
from .reference import cast_rows as by_row
from .reference import cross_entropy as entropy
from .reference import expert_activation as experts
from .reference import gradient as gradients
from .reference import rmsnorm as rms
from .reference.cast import Cast

P = ParamSpec("P")
R = TypeVar("R")
Function = Callable[..., Any]

_LIBRARY = torch.library.Library("fp8stack", "DEF")
_PLAIN = frozenset({Tensor, Parameter})


# --- which implementation runs


@cache
def kernel_backend() -> tuple[str, str]:
    """Return ("triton" or "reference", the reason): what CUDA tensors run on, from the first call on."""
    choice = os.environ.get("FP8STACK_KERNELS", "triton")
    if choice not in ("triton", "reference"):
        raise ConfigError(f'FP8STACK_KERNELS must be "triton" or "reference", got "{choice}".')
    if choice == "reference":
        return "reference", "FP8STACK_KERNELS=reference"
    try:
        import_module("triton")
    except ImportError as error:
        reason = f"Triton cannot be imported ({error})"
        warn(
            f"{reason}: fp8stack runs its slower torch reference on CUDA. Install it with: pip install triton"
        )
        return "reference", reason
    return "triton", "Triton is installed"


def triton_runs_on(device: torch.device) -> bool:
    """Return whether kernels that work on many tensors at once, through pointers, run on `device`."""
    return device.type == "cuda" and kernel_backend()[0] == "triton"


def raw_stream(x: Tensor) -> int:
    """Return the handle of the current stream of the GPU that `x` is on; 0 for a tensor on the CPU."""
    device = x.get_device()
    return int(torch._C._cuda_getCurrentRawStream(device)) if device >= 0 else 0


def is_traced(x: Tensor) -> bool:
    """Return whether `x` stands for a tensor of a graph that is being made, or is of a subclass: operators only."""
    return torch.compiler.is_compiling() or type(x) not in _PLAIN


@cache
def triton_module(name: str) -> Any:
    """Return the module `name` of this package, which imports Triton: for launches that have no function here."""
    return import_module(f".{name}", __package__)


@cache
def implementation(reference: Function, gpu: bool) -> Function:
    """Return what runs for a function of `reference/`: itself, or its Triton twin, of the same name."""
    if not gpu or kernel_backend()[0] == "reference":
        return reference
    file = reference.__module__.rpartition(".")[2]
    twin: Function = getattr(triton_module(file), reference.__name__)
    return twin


def _on_each_device(reference: Callable[P, R]) -> Callable[P, R]:
    """Return a function that runs the implementation for the device of its first argument. It is for eager calls."""

    @wraps(reference)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        gpu: bool = args[0].is_cuda  # type: ignore[attr-defined]
        return cast_(R, implementation(reference, gpu)(*args, **kwargs))

    return run


def _operator(
    schema: str,
    reference: Callable[P, R],
    shapes: Function,
    captured: dict[str, Any] | None = None,  # what implementations take from the operator alone
) -> Callable[P, R]:
    """Register an operator, and return what calls it or its implementation."""
    name = schema.split("(")[0]

    def kernel(*args: Any) -> Any:
        run = implementation(reference, args[0].is_cuda)
        # a format travels by name, as a schema has no type for it
        args = tuple(FORMATS.get(a, a) if isinstance(a, str) else a for a in args)
        return run(*args, **(captured or {}))

    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, kernel, "CPU")
    _LIBRARY.impl(name, kernel, "CUDA")
    torch.library.register_fake(f"fp8stack::{name}", shapes, lib=_LIBRARY)
    operator = getattr(torch.ops.fp8stack, name)

    @wraps(reference)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_traced(args[0]):
            return operator(*[a.name if isinstance(a, MiniFloat) else a for a in args], **kwargs)
        return implementation(reference, args[0].is_cuda)(*args, **kwargs)

    return call


def define_composite(schema: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Register and return an operator that consists of others, which autograd and torch.compile see."""
    name = schema.split("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, function, "CompositeImplicitAutograd")
    return cast_("Callable[..., Tensor]", getattr(torch.ops.fp8stack, name))


# --- shapes of results


def _matrix(
    x: Tensor,
    fmt: str,
    codes: bool = True,
    transposed: bool = True,
    amax: Tensor | None = None,
    rows_to: int = matrix.ALIGNMENT,
) -> Cast:
    cols, dtype = matrix.aligned(x.shape[-1]), FORMATS[fmt].dtype
    rows = matrix.aligned(x.numel() // max(x.shape[-1], 1), rows_to)
    return (
        x.new_empty((rows, cols) if codes else (0, 0), dtype=dtype),
        x.new_empty((cols, rows) if transposed else (0, 0), dtype=dtype),
        x.new_empty((), dtype=torch.float32),
    )


_tokens = partial(_matrix, rows_to=matrix.TOKENS)


def _by_row(x: Tensor, fmt: str) -> tuple[Tensor, Tensor, Tensor]:
    codes = _tokens(x, fmt, True, False)[0]
    parts = codes.new_empty(by_row.parts_of(len(codes)), dtype=torch.int32)
    return codes, codes.new_empty(len(codes), dtype=torch.float32), parts


def _quantized(x: Tensor, fmt: str) -> tuple[Tensor, Tensor]:
    codes = x.new_empty(FORMATS[fmt].codes_shape(x.shape), dtype=FORMATS[fmt].dtype)
    return codes, x.new_empty(scale_shape(x.shape), dtype=torch.float32)


def _dequantized(
    codes: Tensor, scale: Tensor, fmt: str, dtype: torch.dtype = torch.float32, shape: Any = None
) -> Tensor:
    shape = FORMATS[fmt].values_shape(codes.shape) if shape is None else shape
    return codes.new_empty(shape, dtype=dtype)


def _activation_backward(
    dh: Tensor,
    gate: Tensor,
    up: Tensor | None,
    h_scale: Tensor,
    activation: str,
    fmt: str,
    *rest: Any,
) -> list[Tensor]:
    inputs = 1 if up is None else 2
    casts = [t for _ in range(inputs) for t in _tokens(gate, fmt)]
    casts.append(_tokens(gate, "e4m3", False)[1])
    sums = inputs if rest[2:] == (True,) else 0
    return casts + [gate.new_empty(gate.shape[1:], dtype=torch.float32) for _ in range(sums)]


# --- blocks of 128


quantize_blocks = _operator(
    "quantize_blocks(Tensor x, str fmt) -> (Tensor, Tensor)", quantize.quantize_blocks, _quantized
)
quantize_blocks_into = _on_each_device(quantize.quantize_blocks_into)
dequantize_blocks = _operator(
    "dequantize_blocks(Tensor codes, Tensor scale, str fmt, ScalarType dtype=float, int[]? shape=None) -> Tensor",
    quantize.dequantize_blocks,
    _dequantized,
)
accumulate_blocks = _operator(
    "accumulate_blocks(Tensor(a!) codes, Tensor(b!) scale, Tensor(c!) residual_codes, "
    "Tensor(d!) residual_scale, Tensor x) -> ()",
    gradients.accumulate_blocks,
    lambda *_: None,
)


def norms(gradients: Sequence[Any]) -> list[Tensor]:
    """Return the 2-norm of each of `gradients`, which have codes, scale and their addresses: float32, 0-d.

    On a GPU all are read in a few launches, which is eager work: a CUDA graph would keep the addresses of a table.
    """
    plain = all(g.pool or type(g.codes) in _PLAIN for g in gradients)  # fakes have no addresses
    if gradients and plain and _in_one_table(gradients):
        given = [(g.shape, g.addresses) for g in gradients]
        return triton_module("norm").norms(given, gradients[0].device)  # type: ignore[no-any-return]
    return [norm.sum_of_squares(g.codes, g.scale).sqrt().float() for g in gradients]


def quantize_list(tensors: Sequence[Tensor], fmt: MiniFloat) -> tuple[Tensor, Tensor, list[Any]]:
    """Do what `quantize_blocks` does for plain tensors of one device, E4M3 or E5M2: in few launches, as `norms`.

    Returns codes and scales of all, 1-d, and a pair of addresses for each: where its codes and its scales begin.
    """
    places, (codes_size, scales_size) = quantize.places_in_list(tuple(x.shape for x in tensors))
    codes = tensors[0].new_empty(codes_size, dtype=fmt.dtype)
    scales = tensors[0].new_empty(scales_size, dtype=torch.float32)
    first, first_scale = codes.data_ptr(), scales.data_ptr()
    addresses = [(first + at, first_scale + 4 * scale_at) for at, scale_at in places]
    if _in_one_table(tensors):
        triton_module("quantize").quantize_list(tensors, fmt, addresses)
    else:
        for x, (at, scale_at) in zip(tensors, places, strict=True):
            scale = quantize.part_of(scales, scale_at, scale_shape(x.shape))
            quantize_blocks_into(x, fmt, quantize.part_of(codes, at, x.shape), scale)
    return codes, scales, addresses


def clamp_list(tensors: Sequence[tuple[Tensor, Tensor]], low: float, high: float) -> None:
    """Limit the values of E4M3 tensors, codes and scales, in place: on a GPU in few launches, as `norms`."""
    if tensors and _in_one_table([codes for codes, _ in tensors]):
        triton_module("quantize").clamp_list(tensors, low, high)
        return
    for codes, scale in tensors:
        values = dequantize_blocks(codes, scale, E4M3).clamp(low, high)
        quantize_blocks_into(values, E4M3, codes, scale)


def _in_one_table(tensors: Sequence[Tensor]) -> bool:
    """Return whether one launch may read all of `tensors` by their addresses."""
    return (
        len({x.get_device() for x in tensors}) == 1  # a torch.device takes ten times as long
        and triton_runs_on(tensors[0].device)
        and not torch.cuda.is_current_stream_capturing()
    )


def wire_kernels(gpu: bool) -> Any:
    """Return the module of functions on chunks for a device, `reference/wire.py` or its Triton twin."""
    return triton_module("wire") if gpu and kernel_backend()[0] == "triton" else wire


# --- operands of matrix products


cast = _operator(
    "cast(Tensor x, str fmt, bool codes=True, bool transposed=True, Tensor? amax=None, "
    "int rows_to=16) -> (Tensor, Tensor, Tensor)",
    matrix.cast,
    _matrix,
    captured={"reuse": False},
)
recast = _operator(
    "recast(Tensor x, str fmt, int of, bool codes=True, bool transposed=True) -> (Tensor, Tensor, Tensor)",
    matrix.recast,
    lambda x, fmt, of, *layouts: _matrix(x, fmt, *layouts),
    captured={"reuse": False},
)


def recast_with(
    x: Tensor,
    fmt: MiniFloat,
    scale: Tensor,
    codes: bool = True,
    transposed: bool = True,
    exact: bool = False,
) -> Cast:
    """Return what `recast` does after a cast with `scale`, float32.

    With `exact` the result is that of `cast` whatever `scale` is, in one read of x where `scale` is x's own. Where only
    an operator will do, as in a compiled backward of eager layers, and for fake tensors, it is `cast` that runs.
    """
    if is_traced(x):
        return cast(x, fmt, codes, transposed)
    run = implementation(matrix.recast, x.is_cuda)
    return cast_("Cast", run(x, fmt, scale, codes, transposed, exact))


cast_1x128 = _operator(
    "cast_1x128(Tensor x, str fmt, bool codes=True, bool transposed=True, bool squares_t=False)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    blocks.cast_1x128,
    lambda x, fmt, codes=True, transposed=True, squares_t=False: blocks.results(
        x, FORMATS[fmt], (False, squares_t), codes, transposed
    ),
)
cast_128x128 = _operator(
    "cast_128x128(Tensor x, str fmt, bool codes=True, bool transposed=True) -> (Tensor, Tensor, Tensor, Tensor)",
    blocks.cast_128x128,
    lambda x, fmt, *layouts: blocks.results(x, FORMATS[fmt], (True, True), *layouts),
)
matmul_blocks = _operator(
    "matmul_blocks(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, ScalarType dtype) -> Tensor",
    blocks.matmul_blocks,
    lambda a, a_scale, b, b_scale, dtype: a.new_empty((len(a), len(b)), dtype=dtype),
)
cast_rows = _operator(
    "cast_rows(Tensor x, str fmt) -> (Tensor, Tensor, Tensor)", by_row.cast_rows, _by_row
)
matmul_rows = _operator(
    "matmul_rows(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, ScalarType dtype, bool fast) -> Tensor",
    by_row.matmul_rows,
    lambda a, a_scale, b, b_scale, dtype, fast: a.new_empty((len(a), len(b)), dtype=dtype),
)
cast_delayed = _operator(
    "cast_delayed(Tensor x, str fmt, int of, bool update, bool again) -> (Tensor, Tensor, Tensor)",
    delayed.cast_delayed,
    lambda x, fmt, *_: _tokens(x, fmt),
)


# --- rows of experts' tokens


route = _operator(
    "route(Tensor top_k_index, int experts) -> (Tensor, Tensor, Tensor)",
    rows.route,
    lambda ids, experts: (
        ids.new_empty(experts, dtype=torch.int32),
        ids.new_empty(rows.rows_needed(ids.numel(), experts), dtype=torch.int32),
        torch.empty_like(ids, dtype=torch.int32),
    ),
)
take_rows = _operator(
    "take_rows(Tensor codes, Tensor index, int count, bool plain=True, bool transposed=True) -> (Tensor, Tensor)",
    rows.take_rows,
    lambda codes, index, count, plain=True, transposed=True: (
        codes.new_empty((len(index), codes.shape[1]) if plain else (0, 0)),
        codes.new_empty((codes.shape[1], len(index)) if transposed else (0, 0)),
    ),
)
sum_rows = _operator(
    "sum_rows(Tensor x, Tensor places) -> Tensor",
    rows.sum_rows,
    lambda x, places: x.new_empty((len(places), x.shape[1])),
)


# --- operations that end in a cast


activation_cast = _operator(
    "activation_cast(Tensor gate, Tensor? up, str activation, str fmt, int[] of=[], bool update=False, "
    "bool again=False) -> (Tensor, Tensor)",
    activation.activation_cast,
    lambda gate, up, activation, fmt, *_: _tokens(gate, fmt, True, False)[::2],
)
activation_cast_rows = _operator(
    "activation_cast_rows(Tensor gate, Tensor? up, str activation, str fmt) -> (Tensor, Tensor)",
    by_row.activation_cast_rows,
    lambda gate, up, activation, fmt: _by_row(gate, fmt)[:2],
)
activation_backward_cast = _operator(
    "activation_backward_cast(Tensor dh, Tensor gate, Tensor? up, Tensor h_scale, str activation, str fmt, "
    "int[] of=[], bool update=False, bool sums=False) -> Tensor[]",
    activation.activation_backward_cast,
    _activation_backward,
)
expert_activation = _operator(
    "expert_activation(Tensor gate_up, Tensor weights, Tensor index, str activation) -> (Tensor, Tensor)",
    experts.expert_activation,
    lambda x, *_: _matrix(x[:, ::2], "e4m3", True, False)[::2],
)
expert_activation_backward = _operator(
    "expert_activation_backward(Tensor dh, Tensor gate_up, Tensor weights, Tensor index, Tensor h_scale, "
    "str activation) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    experts.expert_activation_backward,
    lambda dh, x, weights, index, *_: (
        *_matrix(x, "e4m3"), _matrix(dh, "e4m3", False)[1], torch.empty_like(index, dtype=torch.float32)
    ),
)  # fmt: skip
cross_entropy = _operator(
    "cross_entropy(Tensor(a!) logits, Tensor labels, Tensor scale, bool gradient) -> Tensor",
    entropy.cross_entropy,
    lambda logits, labels, scale, gradient: torch.empty_like(scale),
)
rmsnorm = _on_each_device(rms.rmsnorm)
rmsnorm_backward = _on_each_device(rms.rmsnorm_backward)
count = _on_each_device(monitor.count)
widened_sum = _on_each_device(widen.widened_sum)
