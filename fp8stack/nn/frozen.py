"""Frozen weights that are kept in FP8: `initialize(..., frozen="fp8")`, for adapters (LoRA) over a large base.

A `FrozenWeight` takes the place of a frozen weight of a Linear or Conv1D layer. It holds E4M3 codes and one scale, a
byte an element, and no copy in another format. Everybody sees a parameter of the shape and dtype it had before.
Layers that multiply in FP8 give its codes to both products, forward's as they lie and backward's transposed in that
moment (`casts.py`). Every other reader gets its values, made for that one operation; autograd saves the codes.

The scale is a power of two. So the values are exact in bfloat16 and float32, and quantizing them again gives the same
values: a state_dict that is saved and loaded, or `fp8stack.restore`, changes no bit. E4M3 is a floating-point format:
one scale for a matrix costs precision only below 2^-14 of its largest element, and one for each 128 × 128 helps no
more than that. Relative error in the root mean square, of normal weights and of Student's t with 5 degrees of freedom,
whose tails are heavy: 2.66 % and 2.65 %; with scales of squares 2.64 and 2.65; with scales of 1 × 128, which backward's
product cannot take, 2.57 and 2.46.

Writing: `copy_`, `load_state_dict` and `.data =` quantize what they are given. Arithmetic in place is refused, since
E4M3 would round most of a small change away: merging an adapter comes after `fp8stack.restore`. It cannot be unfrozen.

Limits: both sizes are multiples of 16; codes are padded to 128 anew for each product with block scales. A `state_dict`
holds the values, in the dtype from before, on the CPU: they would not fit beside codes on a GPU that the base in 16
bits does not fit.
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
from fp8stack.tensor import Wrapper, written_by
from fp8stack.tensor_kinds import not_plain

from .layer_kinds import kind_of

aten = torch.ops.aten
ROWS = 1024  # are cast at a time, in float32
_RESTORE = "Call fp8stack.restore(model) first"


class FrozenWeight(Wrapper):
    """E4M3 codes with one power-of-two scale, seen as a frozen parameter of `dtype`: value = code × scale."""

    _is_param = True  # to isinstance(weight, nn.Parameter), and in copies

    @staticmethod
    def __new__(cls: Any, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> FrozenWeight:
        place = codes.shape, codes.stride(), codes.storage_offset()
        made = Tensor._make_wrapper_subclass(cls, *place, dtype=dtype, device=codes.device)
        made.codes, made.scale = codes, scale
        return made  # type: ignore[no-any-return]

    codes: Tensor  # of E4M3, as uint8, which gloo and pickle take, too
    scale: Tensor  # float32, 0-d

    @classmethod
    def quantize(cls, x: Tensor, once: bool = False) -> FrozenWeight:
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
        if x.dtype is torch.float16 and not once:  # which rounds the smallest values
            return cls.quantize(made.dequantize(), once=True)
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
        if transposed:
            every = torch.arange(len(codes), device=codes.device, dtype=torch.int32)
            codes = ops.take_rows(codes, every, 1, plain=False)[1]
        if not squares:
            return codes.view(E4M3.dtype), self.scale
        if any(size % BLOCK for size in codes.shape):
            codes = pad(codes, (0, -codes.shape[1] % BLOCK, 0, -codes.shape[0] % BLOCK))
        down, across = (size // BLOCK for size in codes.shape)
        scale = pad(self.scale.expand(down, across), (0, -across % 4)).contiguous()
        return codes.view(E4M3.dtype), scale.t()

    def assign_(self, value: Tensor) -> FrozenWeight:
        """Replace the values of the whole by `value`, quantized unless it is of this class."""
        if self.codes.untyped_storage().nbytes() != self.codes.numel():
            raise ModelError(f"a part of a frozen weight in FP8 cannot be written. {_RESTORE}.")
        if not isinstance(value, FrozenWeight):
            value = self.quantize(value.to(self.device, self.dtype).expand(self.shape))
            if not value.scale.isfinite():
                raise ModelError("a frozen weight in FP8 was given values that are not finite.")
        self.codes.copy_(value.codes)
        self.scale.copy_(value.scale)
        return self

    @Wrapper.data.setter  # type: ignore[attr-defined, untyped-decorator]
    def data(self, value: Tensor) -> None:
        new = value if isinstance(value, FrozenWeight) else self.quantize(value)
        Tensor.data.__set__(self, new)  # type: ignore[attr-defined]
        self.codes, self.scale = new.codes, new.scale

    def requires_grad_(self, requires_grad: bool = True) -> FrozenWeight:
        if requires_grad:
            told = 'a weight that is kept in FP8 (frozen="fp8") cannot be trained'
            raise ModelError(f"{told}. {_RESTORE}.")
        return self

    # The getter is torch's.
    requires_grad: Any = property(Tensor.requires_grad.__get__, requires_grad_)  # type: ignore[attr-defined,arg-type]

    def share_memory_(self) -> FrozenWeight:
        self.codes.share_memory_()
        self.scale.share_memory_()
        return self

    def is_shared(self) -> bool:
        return bool(self.codes.is_shared())

    def __repr__(self) -> str:  # type: ignore[override]
        return f"FrozenWeight({self.dequantize()}, codes of e4m3)"

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
        x, kwargs = args[0] if args else None, kwargs or {}
        if isinstance(x, FrozenWeight):
            dtype, copies = (
                kwargs.get("dtype") or x.dtype,
                (aten.clone.default, aten._to_copy.default),
            )
            if func in copies and dtype in FLOATS:
                how = {name: value for name, value in kwargs.items() if name != "dtype"}
                made = FrozenWeight(func(x.codes, **how), func(x.scale, **how), dtype)
                vars(made).update(_given(x))
                return made
            if func is aten.copy_.default:
                return x.assign_(args[1])
            if func.overloadpacket is aten.to:  # in inference mode, which takes no operator apart
                return func.decompose(*args, **kwargs)
            if func.is_view and func is not aten.view.dtype:  # a view of codes is one of values
                with torch.inference_mode(x.is_inference()):  # torch wants a view to be as its base
                    views = func(x.codes, *args[1:], **kwargs)
                    return tree_map(lambda codes: FrozenWeight(codes, x.scale, x.dtype), views)
        if any(isinstance(t, FrozenWeight) for t in written_by(func, args, kwargs)):
            told = f'{func} writes to a frozen weight that is kept in FP8 (frozen="fp8")'
            lost = "Rounding to 4 bits would lose most of what is added. Averages leave out frozen weights"
            remedy = f"To merge an adapter: {_RESTORE[0].lower()}{_RESTORE[1:]}"
            raise ModelError(f"{told}. {lost}. {remedy}.")
        args, kwargs = tree_map(values_of, (args, kwargs))
        return func(*args, **kwargs)


def _given(x: Tensor) -> dict[str, Any]:
    """Return the attributes that others gave to a parameter."""
    return {name: value for name, value in vars(x).items() if name not in ("codes", "scale")}


def values_of(x: Any) -> Any:
    """Return the values of a weight that is kept in FP8; anything else as it is."""
    return x.dequantize() if isinstance(x, FrozenWeight) else x


# --- weights of a model


def choose_frozen(
    model: nn.Module, chosen: set[nn.Module], skipped: dict[str, str], compute: str
) -> list[tuple[str, nn.Parameter, str]]:
    """Return the frozen weights of layers by name, each with the reason for which it stays as it is, "" if it does not.

    chosen: the modules that are to multiply in FP8 or bfloat16. skipped: reasons of others, by name.
    """
    found = {}
    owners = defaultdict[Any, list[nn.Module]](list)
    for module in model.modules():
        for p in module._parameters.values():
            owners[p].append(module)
    for name, module in model.named_modules():
        p = module._parameters.get("weight")
        if p is None or p.requires_grad or not_plain(p) or not kind_of(module):
            continue
        reason = skipped.get(name, "")
        if compute == "te":
            reason = 'TransformerEngine reads it; compute="native" takes it'
        elif others := [m for m in owners[p] if m not in chosen and m is not module]:
            reason = f"{type(others[0]).__name__} reads it, too"
        elif any(size % ALIGNMENT for size in p.shape):
            reason = reason or f"its sizes are no multiples of {ALIGNMENT}"
        elif not reason and not can_swap(p):
            reason = "torch cannot replace it while outputs of a forward or weak references hold it"
        elif not (reason or p.is_meta or ops.is_traced(p) or p.isfinite().all()):
            reason = "it has values that are not finite"  # what stands for a tensor has none
        found[p] = f"{name}.weight".lstrip("."), p, reason
    for name, module in model.named_modules():  # experts, embeddings
        for key, p in module._parameters.items():
            if p is None or p in found or p.dim() < 2 or p.requires_grad or not_plain(p):
                continue
            reason = f"{type(module).__name__} reads it itself"
            found[p] = f"{name}.{key}".lstrip("."), p, reason
    return [*found.values()]


def can_swap(p: nn.Parameter) -> bool:
    """Return whether `swap_tensors` may give this parameter other contents; it is tried, and undone."""
    other = nn.Parameter(torch.empty(0), False)
    try:
        swap_tensors(p, other)
        swap_tensors(p, other)
    except RuntimeError:
        return False
    return True


def exchange(p: nn.Parameter, new: Tensor) -> None:
    """Give a parameter, which stays the same object, other contents."""
    vars(new).update(_given(p))
    swap_tensors(p, new)


def thaw(p: nn.Parameter) -> None:
    """Turn a weight that is kept in FP8 into an ordinary one of the same values."""
    if isinstance(p, FrozenWeight):
        exchange(p, nn.Parameter(p.dequantize(), False))


def show_values(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Put values in the place of codes into a state_dict; a hook of layers."""
    found, own = state.get(key := f"{prefix}weight"), module._parameters["weight"]
    if isinstance(found, FrozenWeight) and id(found) != id(own):  # else keep_vars=True
        state[key] = found.dequantize().cpu()


def refuse_assign(module: nn.Module, state: Any, prefix: str, metadata: Any, *_: Any) -> None:
    """Raise where load_state_dict is to put other parameters in the place of weights in FP8; a hook of layers."""
    found = state.get(f"{prefix}weight")
    if metadata.get("assign_to_params_buffers") and type(found) in (Tensor, nn.Parameter):
        told = f"load_state_dict(assign=True) would replace {prefix}weight, which is kept in FP8"
        raise ModelError(f"{told}. Leave assign out: values are quantized then.")
