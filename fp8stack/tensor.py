"""A block-scaled FP8 tensor that behaves like the floating-point tensor it stands for.

`p.grad` is one of these at O1 and O2: E4M3 codes in the shape of the parameter and a float32 scale for each block of
128, value = code × scale, 1.03 bytes an element. It reports the dtype of the parameter, so autograd and torch's own
functions accept it.

One rule covers all operations. An operation that reads it gets its dequantized value and returns ordinary tensors. An
operation that writes it in place is computed on the dequantized value, and the result is quantized again. A few work
directly on codes and scales, exactly and on one byte an element: multiplication and division by a scalar, zeroing,
moving, cloning, the 2-norm and GradScaler's unscaling. Adding keeps a residual (see `kernels/reference/gradient.py`),
so that the sum of many micro-batches does not lose small addends.

Gradients that one launch quantized share the memory of a `Pool`. Each makes views of it, for its codes and its scale,
when they are first asked for. Clipping and the optimizer's step need only addresses, so a step makes none.

A view (`grad[0]`, `grad.view(-1)`) reads what the gradient holds at that time, and what is written to it is written to
the gradient. `grad.data = value` sets shape, dtype, device and contents, as in torch.

Limits: the codes are a copy of an ordinary tensor that is assigned to `.data`, so later writes to it do not reach the
gradient. What NumPy and DLPack get is a copy too (NumPy's cannot be written). Second derivatives are ordinary tensors.
The memory of a pool is freed with the last of its tensors: one gradient that is kept may keep 128 MiB.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from .errors import ConfigError, GradientError
from .formats import E4M3, scale_shape
from .kernels import ops
from .kernels.reference.quantize import part_of
from .tensor_kinds import check_dense

aten = torch.ops.aten


class Wrapper(torch.Tensor):
    """A tensor without memory of its own: operations read `dequantize()`, and write by `assign_` if they may."""

    # Everything is decided below the autograd level; no Python override per torch function is needed.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    assign_: Callable[[Tensor], Tensor]

    @property
    def data(self) -> Tensor:
        """An alias; if assigned to, the tensor takes shape, dtype, device and contents of the value."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        check_dense(value, "a parameter")
        new: Any = BlockScaledTensor.quantize(value.detach())  # which has no pool
        torch.Tensor.data.__set__(self, new)  # type: ignore[attr-defined]
        self.__class__, self.__dict__ = BlockScaledTensor, dict(vars(new))  # a view is one no more

    # Torch does these with a tensor's own memory.

    def numpy(self, *, force: bool = False) -> Any:
        array = self.dequantize().numpy(force=force)
        array.setflags(write=False)  # it would not be written here
        return array

    def tolist(self) -> Any:
        return self.dequantize().tolist()

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.dequantize().__dlpack__(**kwargs)

    __copy__ = torch.Tensor.detach

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dequantize().__reduce_ex__(protocol)

    def share_memory_(self) -> Any:
        raise GradientError("processes cannot share FP8 gradients: first, optimizer.zero_grad()")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        direct = None if BlockScaledView in types else _DIRECT.get(func)
        # Else it is another operand that is block-scaled.
        if direct is not None and isinstance(args[0], (BlockScaledTensor, list, tuple)):
            result = direct(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        return _through_values(func, args, kwargs)


class Pool:
    """Codes and scales of tensors that were quantized in one launch, end to end."""

    def __init__(self, codes: Tensor, scales: Tensor, count: int) -> None:
        self.codes, self.scales = codes, scales  # 1-d
        self.count = count  # of tensors


def _part_at(address: int, memory: Tensor, shape: Sequence[int]) -> Tensor:
    with _disable_current_modes():  # it is kept, so a FakeTensorMode must not make it
        return part_of(memory, (address - memory.data_ptr()) // memory.itemsize, shape)


class BlockScaledTensor(Wrapper):
    """E4M3 codes with one float32 scale for each 128 elements of a row, seen as a tensor of `dtype`.

    It has no `__tensor_flatten__`. Gradients are not inputs of a compiled forward, but Dynamo looks at them when it
    traces their parameters again, and refuses subclasses that have that method (torch 2.13).
    """

    holder: list[tuple[Tensor, Tensor] | None]  # of the residual; aliases (detach, .data) share it
    pool: Pool = None  # type: ignore[assignment]  # none if the constructor was given codes and scale

    @staticmethod
    def __new__(
        cls: type[BlockScaledTensor],
        codes: Tensor,
        scale: Tensor,
        dtype: torch.dtype = torch.float32,
        residual: tuple[Tensor, Tensor] | None = None,
    ) -> BlockScaledTensor:
        if codes.dtype is torch.uint8:  # unpickled
            codes = codes.view(E4M3.dtype)
            residual = residual and (residual[0].view(E4M3.dtype), residual[1])
        dense = codes.is_contiguous() and scale.is_contiguous()
        if codes.dtype is not E4M3.dtype or scale.shape != scale_shape(codes.shape) or not dense:
            needed = f"float8_e4m3fn codes (or their bytes) and scales of shape {scale_shape(codes.shape)}"
            got = f"{codes.dtype} and {tuple(scale.shape)}, {'' if dense else 'not '}contiguous"
            raise ConfigError(f"BlockScaledTensor needs contiguous {needed}; got {got}.")
        x = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)
        x.codes, x.scale, x.holder = codes, scale, [residual]
        return x

    @cached_property
    def codes(self) -> Tensor:
        """The codes, float8_e4m3fn, in the shape of this tensor."""
        return _part_at(self.addresses[0], self.pool.codes, self.shape)

    @cached_property
    def scale(self) -> Tensor:
        """The scales of the blocks, float32 [rows, ceil(cols / 128)]."""
        return _part_at(self.addresses[1], self.pool.scales, scale_shape(self.shape))

    @property
    def residual(self) -> tuple[Tensor, Tensor] | None:
        """Codes and scale of what rounding cut off a sum, or None where nothing was added yet."""
        return self.holder[0]

    @residual.setter
    def residual(self, value: tuple[Tensor, Tensor] | None) -> None:
        self.holder[0] = value

    @classmethod
    def quantize(cls, x: Tensor) -> BlockScaledTensor:
        """Return `x` (float32, bfloat16 or float16) in E4M3 blocks; the result reports the dtype of x."""
        if isinstance(x, cls):
            return x
        return cls(*ops.quantize_blocks(plain(x).detach(), E4M3), dtype=x.dtype)

    @classmethod
    def quantize_list(cls, tensors: Sequence[Tensor]) -> list[BlockScaledTensor]:
        """Return what `quantize` does for plain tensors of one device and dtype, which share memory: see `Pool`."""
        codes, scales, addresses = ops.quantize_list(tensors, E4M3)
        pool, device = Pool(codes, scales, len(tensors)), codes.device
        made = []
        for x, own in zip(tensors, addresses, strict=True):
            new = torch.Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype, device=device)
            new.pool, new.addresses, new.holder = pool, own, [None]
            made.append(new)
        return made

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return an ordinary tensor of the same shape, by default of the dtype this one reports."""
        return ops.dequantize_blocks(self.codes, self.scale, E4M3, dtype or self.dtype)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """The bytes in memory: codes, scales and residual."""
        return sum(t.nbytes for t in self.parts())

    @cached_property
    def addresses(self) -> tuple[int, int]:
        """Addresses of codes and scale, which stay where they are."""
        return self.codes.data_ptr(), self.scale.data_ptr()

    def parts(self) -> tuple[Tensor, ...]:
        """Return the plain tensors this one consists of."""
        return (self.codes, self.scale, *(self.residual or ()))

    def scales(self) -> tuple[Tensor, ...]:
        """Return the scale and that of the residual, if there is one."""
        return self.parts()[1::2]

    def assign_(self, value: Tensor) -> BlockScaledTensor:
        """Replace the contents by `value`, quantized; a residual is dropped."""
        if not isinstance(value, BlockScaledTensor):
            value = self.quantize(value.expand(self.shape).contiguous())
        # as bytes: not every backend copies float8
        self.codes.view(torch.uint8).copy_(value.codes.view(torch.uint8))
        self.scale.copy_(value.scale)
        self.residual = value.residual and (value.residual[0].clone(), value.residual[1].clone())
        return self

    def map_parts(self, function: Callable[[Tensor], Tensor]) -> BlockScaledTensor:
        """Return a new tensor with `function` applied to each part."""
        codes, scale, *rest = (function(t) for t in self.parts())
        return BlockScaledTensor(codes, scale, self.dtype, (rest[0], rest[1]) if rest else None)

    def __repr__(self) -> str:  # type: ignore[override]
        body = repr(self.dequantize())[len("tensor(") : -1]
        return f"BlockScaledTensor({body}, codes=float8_e4m3fn, block=128)"

    def __reduce_ex__(self, protocol: Any) -> Any:
        # as bytes: what pickle itself, without torch.save, writes of a float8 tensor cannot be read (torch 2.13)
        residual = self.residual and (self.residual[0].view(torch.uint8), self.residual[1])
        # not in the memory of a pool, all of which would be written
        codes, scale = (x if self.pool is None else x.clone() for x in (self.codes, self.scale))
        return BlockScaledTensor, (codes.view(torch.uint8), scale, self.dtype, residual)


class BlockScaledView(Wrapper):
    """A part of a block-scaled tensor, seen in any shape."""

    whole: BlockScaledTensor

    def dequantize(self, whole: Tensor | None = None) -> Tensor:
        """Return the values; with `whole`, the view of that."""
        flat = (self.whole.dequantize() if whole is None else whole).view(-1).view(self.dtype)
        return flat.as_strided(self.size(), self.stride(), self.storage_offset())

    def assign_(self, value: Tensor) -> Tensor:
        whole = self.whole.dequantize()
        self.dequantize(whole).copy_(value)
        self.whole.assign_(whole)
        return self


_BLOCK_SCALED = (BlockScaledTensor, BlockScaledView)


def plain(x: Tensor) -> Tensor:
    """Return `x` itself, or its dequantized value if it is block-scaled or a view of such a tensor."""
    return x.dequantize() if isinstance(x, _BLOCK_SCALED) else x


def _views(func: Any, x: Any, *rest: Any, **kwargs: Any) -> Any:
    """Return the view, or the views, that `func` makes of `x`."""
    # an alias of the whole, which an assignment to `.data` leaves as it is
    whole = x.whole if isinstance(x, BlockScaledView) else _detach(func, x)

    def view(part: Tensor) -> BlockScaledView:
        size = part.size(), part.stride(), part.storage_offset()
        made = torch.Tensor._make_wrapper_subclass(
            BlockScaledView, *size, dtype=part.dtype, device=whole.device
        )
        made.whole = whole
        return made

    memory = torch.empty(whole.numel(), dtype=whole.dtype, device="meta").view(x.dtype)
    return tree_map(
        view, func(memory.as_strided(x.size(), x.stride(), x.storage_offset()), *rest, **kwargs)
    )


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return what an operator writes in place, of its arguments."""
    written = [
        args[i] if i < len(args) else kwargs.get(argument.name)
        for i, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return tree_leaves(written)


def _through_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run any operator on dequantized values and quantize again what it wrote in place."""
    if func.is_view and isinstance(args[0], _BLOCK_SCALED):
        return _views(func, *args, **kwargs)
    if torch.Tag.inplace_view in func.tags:
        raise GradientError(
            f"{func} changes the shape of an FP8 gradient; assign another one: p.grad = ..."
        )
    values: dict[int, Tensor] = {}  # an argument that appears twice is dequantized once

    def value_of(x: Any) -> Any:
        if not isinstance(x, _BLOCK_SCALED):
            return x
        if id(x) not in values:
            values[id(x)] = x.dequantize()
        return values[id(x)]

    new_args, new_kwargs = tree_map(value_of, args), tree_map(value_of, kwargs)
    targets = [x for x in written_by(func, args, kwargs) if isinstance(x, _BLOCK_SCALED)]
    result = func(*new_args, **new_kwargs)
    for target in targets:
        target.assign_(values[id(target)])
    if not targets:
        return result
    owner = {id(values[id(x)]): x for x in targets}  # x.add_() returns x, not its value
    return tree_map(lambda x: owner.get(id(x), x), result)


# --- operators done on codes and scales


def _is_scalar(x: Any) -> bool:
    return not isinstance(x, Tensor) or (x.ndim == 0 and not isinstance(x, BlockScaledTensor))


def _detach(func: Any, x: BlockScaledTensor) -> BlockScaledTensor:
    alias = BlockScaledTensor(x.codes, x.scale, x.dtype)
    alias.holder = x.holder
    return alias


def _clone(func: Any, x: BlockScaledTensor, **kwargs: Any) -> BlockScaledTensor:
    return x.map_parts(torch.clone)


def _to_copy(func: Any, x: BlockScaledTensor, **kwargs: Any) -> Any:
    if kwargs.get("dtype") not in (None, x.dtype):
        return NotImplemented  # another dtype: an ordinary tensor
    device, non_blocking = kwargs.get("device"), kwargs.get("non_blocking", False)
    return x.map_parts(lambda t: t.to(device=device, non_blocking=non_blocking, copy=True))


def _copy_(func: Any, x: Any, source: Tensor, non_blocking: bool = False) -> Any:
    return x.assign_(source.to(x.device, non_blocking=non_blocking))


def _zero_(func: Any, x: BlockScaledTensor) -> BlockScaledTensor:
    x.residual = None
    x.codes.view(torch.uint8).zero_()
    x.scale.zero_()
    return x


def _zero_list_(func: Any, tensors: list[Tensor]) -> None:
    ours, others = _split(tensors)
    for x in ours:
        x.residual = None
    codes = [x.codes.view(torch.uint8) for x in ours]
    for part in filter(None, (codes, [x.scale for x in ours], others)):
        func(part)


def _mul_(func: Any, x: BlockScaledTensor, factor: Any) -> Any:
    if not _is_scalar(factor):
        return NotImplemented
    for scale in x.scales():  # exact up to their rounding
        scale.mul_(factor)
    return x


def _div_(func: Any, x: Any, divisor: Any) -> Any:
    if not _is_scalar(divisor):
        return NotImplemented
    # A tensor, so that division by zero gives infinity as in torch.
    return _mul_(func, x, 1.0 / torch.as_tensor(divisor, dtype=torch.float32))


def _mul_list_(func: Any, tensors: list[Tensor], factors: Any) -> None:
    for x, f in zip(tensors, factors, strict=True):
        x.mul_(f)


def _add_(func: Any, x: BlockScaledTensor, other: Any, *, alpha: float = 1) -> Any:
    if not isinstance(other, Tensor):
        return NotImplemented
    if x.residual is None:  # kept from the first addition on
        x.residual = torch.zeros_like(x.codes), torch.zeros_like(x.scale)
    other = plain(other)
    added = (other if alpha == 1 else other * alpha).to(x.dtype).expand(x.shape)
    ops.accumulate_blocks(x.codes, x.scale, *x.residual, added.contiguous())
    return x


def _norm(
    func: Any, x: Any, ord: float = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Any:
    if ord != 2 or dim or keepdim:
        return NotImplemented
    # float32 even for a bfloat16 face: a norm rounded to 8 bits would clip by up to 0.4 % too much or too little.
    return ops.norms([x])[0].to(dtype or torch.float32)


def _norm_list(func: Any, tensors: list[Tensor], ord: float = 2, dtype: Any = None) -> list[Tensor]:
    if ord != 2:
        return [torch.linalg.vector_norm(x, ord, dtype=dtype) for x in tensors]
    ours, others = _split(tensors)
    of_ours = iter(ops.norms(ours))
    of_others = iter(func(others, ord, dtype) if others else ())
    found = [next(of_ours if isinstance(x, BlockScaledTensor) else of_others) for x in tensors]
    return found if dtype is None else [norm.to(dtype) for norm in found]


def _clamp_list_(func: Any, tensors: list[Tensor], bound: Any) -> None:
    limits = (bound, math.inf) if func is aten._foreach_clamp_min_.Scalar else (-math.inf, bound)
    ours, others = _split(tensors)
    for x in ours:
        x.residual = None
    once = {x.codes.data_ptr(): (x.codes, x.scale) for x in ours}  # a list may hold one twice
    ops.clamp_list([*once.values()], *map(float, limits))
    if others:
        func(others, bound)


def _split(tensors: list[Tensor]) -> tuple[list[BlockScaledTensor], list[Tensor]]:
    """Return the block-scaled tensors among `tensors`, and the others."""
    ours = [x for x in tensors if isinstance(x, BlockScaledTensor)]
    return ours, [x for x in tensors if not isinstance(x, BlockScaledTensor)]


def _each(func: Any, tensors: list[Tensor], *arguments: Any) -> None:
    """Multiply block-scaled tensors, by their scales, and the others; apart, as torch takes one dtype at once."""
    ours, others = _split(tensors)
    for part in filter(None, (_scales_of(ours), others)):
        func(part, *arguments)


def _scales_of(tensors: list[BlockScaledTensor]) -> list[Tensor]:
    """Return the scales of tensors and of their residuals; those of a pool as one if all its tensors are there."""
    pools = Counter(x.pool for x in tensors if x.pool)
    once = len({*map(id, tensors)}) == len(tensors)  # one that is there twice is multiplied twice
    whole = {pool for pool, count in pools.items() if once and count == pool.count}
    scales = [pool.scales for pool in whole] + [x.scale for x in tensors if x.pool not in whole]
    return scales + [x.residual[1] for x in tensors if x.residual]


_DIRECT: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _detach,
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy_,
    aten.zero_.default: _zero_,
    aten._foreach_zero_.default: _zero_list_,
    aten.mul_.Tensor: _mul_,
    aten.mul_.Scalar: _mul_,
    aten.div_.Tensor: _div_,
    aten.div_.Scalar: _div_,
    aten._foreach_mul_.Scalar: _each,
    aten._foreach_mul_.Tensor: _each,
    aten._foreach_mul_.ScalarList: _mul_list_,
    aten._foreach_norm.Scalar: _norm_list,
    aten._foreach_clamp_min_.Scalar: _clamp_list_,
    aten._foreach_clamp_max_.Scalar: _clamp_list_,
    aten.add_.Tensor: _add_,
    aten.linalg_vector_norm.default: _norm,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _each,
}

# torch passes only lists of the types that are named there to its operators for lists.
_foreach_utils._foreach_supported_types.append(BlockScaledTensor)  # type: ignore[arg-type]
