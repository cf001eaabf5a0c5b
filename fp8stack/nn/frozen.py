"""Frozen weights that are kept in FP8: `initialize(..., frozen="fp8")`, for adapters (LoRA) over a large base.

A `FrozenWeight` takes the place of a frozen weight of a Linear or Conv1D layer. It holds E4M3 codes and one scale, a
byte an element, and no copy in another format. Everybody sees a parameter of the shape and dtype it had before.
Layers that multiply in FP8 give its codes to both products, forward's as they lie and backward's transposed in that
moment (`casts.py`). Every other reader gets its values, made for that one operation; autograd saves the codes.

The scale is a power of two. So the values are exact in bfloat16 and float32, and quantizing them again gives the same
values: a state_dict that is saved and loaded, or `fp8stack.restore`, changes no bit. E4M3 is a floating-point format:
one scale for a matrix costs precision only below 2^-14 of its largest element, and one for each 128 × 128 helps no
more than that. Relative error in the root mean square, of normal weights and of Student's t with 3 degrees of freedom
(the largest 55 × the mean square's root): 2.66 % and 2.65 %; with scales of squares 2.64 and 2.59; with scales of
1 × 128, which backward's product cannot take, 2.57 and 2.23.

Writing: `copy_`, `load_state_dict` and `.data =` quantize what they are given. Arithmetic in place is refused, since
E4M3 would round most of a small change away: merging an adapter comes after `fp8stack.restore`. It cannot be unfrozen.

Limits: both sizes are multiples of 16 (of 128 for fp8_recipe="blockwise"). A `state_dict` holds the values, in the
dtype from before, on the CPU: they would not fit beside codes on a GPU that the base in 16 bits does not fit.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils import swap_tensors
from torch.utils._pytree import tree_map

from fp8stack.errors import ModelError
from fp8stack.formats import BLOCK, E4M3, FLOATS, scale_shape
from fp8stack.kernels import ops
from fp8stack.kernels.reference.cast import ALIGNMENT
from fp8stack.kernels.reference.power_of_two import power_of_two_scale
from fp8stack.kernels.reference.quantize import encode_scaled
from fp8stack.tensor_kinds import not_plain

from .layer_kinds import kind_of

aten = torch.ops.aten
ROWS = 1024  # are cast at a time, in float32
_RESTORE = 'Call fp8stack.restore(model) first, or initialize without frozen="fp8"'


class FrozenWeight(Tensor):
    """E4M3 codes with one power-of-two scale, seen as a frozen parameter of `dtype`: value = code × scale."""

    # Everything is decided below the autograd level; no Python override per torch function is needed.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _is_param = True  # to isinstance(weight, nn.Parameter), and in copies

    @staticmethod
    def __new__(cls: Any, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> FrozenWeight:
        place = codes.shape, codes.stride(), codes.storage_offset()
        made = Tensor._make_wrapper_subclass(cls, *place, dtype=dtype, device=codes.device)  # type: ignore[attr-defined]
        made.codes, made.scale = codes, scale
        return made  # type: ignore[no-any-return]

    codes: Tensor  # of E4M3, as uint8, which gloo and pickle take, too
    scale: Tensor  # float32, 0-d

    @classmethod
    def quantize(cls, x: Tensor) -> FrozenWeight:
        """Return a matrix (float32, bfloat16 or float16) in E4M3; the result reports the dtype of x."""
        if x.ndim != 2 or any(size % ALIGNMENT for size in x.shape):
            told = f"a frozen weight in FP8 was given {tuple(x.shape)}; it takes matrices in multiples of {ALIGNMENT}"
            raise ModelError(f"{told}. {_RESTORE}.")
        x = x.detach().contiguous()
        scale = power_of_two_scale(torch.linalg.vector_norm(x, math.inf).float(), E4M3.max)
        codes = torch.empty_like(x, dtype=torch.uint8)
        for rows, out in zip(x.split(ROWS), codes.split(ROWS), strict=True):
            out.copy_(encode_scaled(rows.float(), 1 / scale, E4M3).view(torch.uint8))
        made = cls(codes, scale, x.dtype)
        if x.dtype is torch.float16 and not torch.equal(x, values := made.dequantize()):
            return cls.quantize(values)  # float16 rounds the smallest of them, so once more
        return made

    def dequantize(self) -> Tensor:
        """Return the values as an ordinary tensor."""
        turned = self.ndim == 2 and self.codes.t().is_contiguous()  # as layers hand it to a product
        codes = self.codes.t() if turned else self.codes.contiguous()
        scale = self.scale.expand(scale_shape(codes.shape)).contiguous()
        dtype = self.dtype if self.dtype in FLOATS else torch.float32
        values = ops.dequantize_blocks(codes.view(E4M3.dtype), scale, E4M3, dtype).to(self.dtype)
        return values.t() if turned else values

    def operand(self, transposed: bool, squares: bool) -> tuple[Tensor, Tensor]:
        """Return codes and scale for a product: of [n, k], k being summed over, or `transposed` of [k, n].

        `squares`: the scale is repeated for each 128 × 128, as `ops.cast_128x128` lays them out.
        """
        codes = self.codes.contiguous()
        codes = (ops.transpose(codes) if transposed else codes).view(E4M3.dtype)
        if not squares:
            return codes, self.scale
        down, across = (size // BLOCK for size in codes.shape)
        scale = self.scale.expand(down, across)
        return codes, pad(scale, (0, -across % 4)).contiguous().t()

    def assign_(self, value: Tensor) -> FrozenWeight:
        """Replace the values of the whole by `value`, quantized unless it is of this class."""
        if self.codes.untyped_storage().nbytes() != self.codes.numel():
            raise ModelError(f"a part of a frozen weight in FP8 cannot be written. {_RESTORE}.")
        if not isinstance(value, FrozenWeight):
            value = self.quantize(value.to(self.device, self.dtype).expand(self.shape))
        self.codes.copy_(value.codes)
        self.scale.copy_(value.scale)
        return self

    @property
    def data(self) -> Tensor:
        """An alias; if assigned to, the weight takes shape, dtype, device and contents of the value."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        new = value if isinstance(value, FrozenWeight) else self.quantize(value)
        Tensor.data.__set__(self, new)  # type: ignore[attr-defined]
        self.codes, self.scale = new.codes, new.scale

    def requires_grad_(self, requires_grad: bool = True) -> FrozenWeight:
        if requires_grad:
            raise ModelError(
                f"a frozen weight that is kept in FP8 (frozen='fp8') cannot be trained. {_RESTORE}."
            )
        return self

    # The getter is torch's.
    requires_grad: Any = property(Tensor.requires_grad.__get__, requires_grad_)  # type: ignore[attr-defined,arg-type]

    def __repr__(self) -> str:  # type: ignore[override]
        body = repr(self.dequantize())[len("tensor(") : -1]
        return f"FrozenWeight({body}, codes=float8_e4m3fn, scale={float(self.scale)})"

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return FrozenWeight, (self.codes, self.scale, self.dtype)

    # Graphs of torch.compile, and what moves or counts tensors, see the two it consists of.

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["codes", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: Any, dtype: Any, size: Any, stride: Any) -> FrozenWeight:
        return FrozenWeight(inner["codes"], inner["scale"], dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        x, kwargs = args[0], kwargs or {}
        if isinstance(x, FrozenWeight):
            dtype = kwargs.get("dtype") or x.dtype
            moved = func is aten._to_copy.default and dtype in FLOATS
            if func is aten.copy_.default:
                return x.assign_(args[1])
            if moved or func is aten.clone.default:
                codes, scale = (func(t, **kwargs | {"dtype": None} if moved else kwargs) for t in (x.codes, x.scale))
                return FrozenWeight(codes, scale, dtype)
            if func.overloadpacket is aten.to:  # in inference mode, which takes no operator apart
                return func.decompose(*args, **kwargs)
            if func.is_view and func is not aten.view.dtype:  # a view of codes is one of values
                with torch.inference_mode(x.is_inference()):  # torch wants a view to be as its base
                    views = func(x.codes, *args[1:], **kwargs)
                    return tree_map(lambda codes: FrozenWeight(codes, x.scale, x.dtype), views)
        for argument, given in zip(func._schema.arguments, args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            items = given if isinstance(given, (list, tuple)) else [given]
            if written and any(isinstance(item, FrozenWeight) for item in items):
                raise ModelError(
                    f"{func} writes to a frozen weight that is kept in FP8 (frozen='fp8'), which rounds to 4 bits: most "
                    f"of what an adapter adds would be lost. To merge, {_RESTORE[0].lower()}{_RESTORE[1:]}."
                )
        args, kwargs = tree_map(values_of, (args, kwargs))
        return func(*args, **kwargs)


def values_of(x: Any) -> Any:
    """Return the values of a weight that is kept in FP8; anything else as it is."""
    return x.dequantize() if isinstance(x, FrozenWeight) else x


# --- weights of a model


def choose_frozen(
    model: nn.Module, chosen: set[nn.Module], skipped: dict[str, str], compute: str, blocks: bool
) -> tuple[list[tuple[str, nn.Parameter]], list[tuple[str, nn.Parameter, str]]]:
    """Return the frozen weights of layers that are to be kept in FP8, and those that stay as they are, with reasons.

    chosen: the modules that are to multiply in FP8 or bfloat16. skipped: reasons for others, by name.
    """
    taken, left, unit = [], [], BLOCK if blocks else ALIGNMENT
    owners = defaultdict[Any, list[nn.Module]](list)
    for module in model.modules():
        for p in module._parameters.values():
            owners[p].append(module)
    weights = {
        p: name for name, module in model.named_modules()
        if kind_of(module) and (p := module._parameters.get("weight")) is not None and not p.requires_grad
    }  # fmt: skip
    for p, name in weights.items():
        others = {type(m).__name__ for m in owners[p] if not kind_of(m)}
        reason = 'TransformerEngine reads it; compute="native" takes it' if compute == "te" else ""
        reason = reason or skipped.get(name, "")
        if others:
            reason = f"{others.pop()} reads it, too"
        elif not reason and not chosen.issuperset(owners[p]):
            reason = "a layer that is left alone reads it, too"
        elif not reason and any(size % unit for size in p.shape):
            reason = f"its sizes are no multiples of {unit}"
        elif not reason and not can_swap(p):
            reason = "torch cannot replace it: the outputs of a forward, or weak references, hold it"
        if reason and not not_plain(p):
            left.append((f"{name}.weight".lstrip("."), p, reason))
        elif not reason:
            taken.append((f"{name}.weight".lstrip("."), p))
    return taken, left


def can_swap(p: nn.Parameter) -> bool:
    """Return whether `swap_tensors` may give this parameter other contents; it is tried, and undone."""
    other = nn.Parameter(torch.empty(0), False)
    try:
        swap_tensors(p, other)
        swap_tensors(p, other)
    except RuntimeError:
        return False
    return True


def freeze(p: nn.Parameter) -> None:
    """Turn a frozen weight into FP8; it stays the same object."""
    swap_tensors(p, FrozenWeight.quantize(p))


def thaw(p: nn.Parameter) -> None:
    """Turn a weight that `freeze` was given into an ordinary one, of the values that it has in FP8."""
    if isinstance(p, FrozenWeight):
        swap_tensors(p, nn.Parameter(p.dequantize(), False))


def show_values(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Put values in the place of codes into a state_dict; a hook of layers."""
    found = state.get(key := f"{prefix}weight")
    if isinstance(found, FrozenWeight) and found is not module._parameters["weight"]:  # keep_vars
        state[key] = found.dequantize().cpu()
