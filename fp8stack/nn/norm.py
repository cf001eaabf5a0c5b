"""RMSNorms that tell the cast behind them how large their output is.

The layers behind a norm cast its output to FP8, for which they look for its largest magnitude first, although the
kernel that wrote it had every value in hand. A fused norm keeps that magnitude (`kernels/rmsnorm.py`) and leaves a note
of it for the cast (`operands.py`), which then reads its input once instead of twice. The codes are the same, bit for
bit; the norm itself is computed in float32 and rounded once, where modules that round twice give another last bit.

`fuse_norms` takes a module by what it computes: its own forward, run on a random weight, has to give the numbers of the
formula, for inputs so small that eps counts too. So a norm that multiplies by 1 + w, subtracts the mean or reads more
than its input is left as it is. Under torch.compile or autocast, for inputs of another dtype than the weight, and for
tensors that are not torch's own, a fused norm runs its own class's forward.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fp8stack.kernels import ops
from fp8stack.kernels.reference.rmsnorm import MOST_COLS
from fp8stack.kernels.reference.rmsnorm import rmsnorm as formula

from .mixed import mixed_class, plain_class
from .operands import note_parts

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PLAIN = (Tensor, nn.Parameter)


def fuse_norms(model: nn.Module) -> list[str]:
    """Fuse the RMSNorms of a model; return their names. `unfuse_norms` undoes it."""
    fused = []
    for name, module in model.named_modules():
        if _is_rmsnorm(module):
            module.__class__ = mixed_class(FusedRMSNorm, type(module), "Fused")
            fused.append(name)
    return fused


def unfuse_norms(model: nn.Module) -> None:
    """Give the norms of `fuse_norms` their classes back."""
    for module in model.modules():
        if isinstance(module, FusedRMSNorm):
            module.__class__ = plain_class(module)


class FusedRMSNorm(nn.Module):
    """Mixed into the class of a norm, whose `forward` it replaces."""

    weight: Tensor
    plain_forward: Any

    def forward(self, x: Tensor) -> Tensor:
        """Return x / rms(x) × weight: [..., cols] -> [..., cols]."""
        eps = _eps_of(self)
        if torch.compiler.is_compiling() or eps is None or not _fits(x, self.weight):
            result: Tensor = self.plain_forward(x)
            return result
        # Under the mode of matmuls=True, each torch call in here would go through Python.
        with torch._C.DisableTorchFunction():
            y, parts = _apply(x, self.weight, eps)
            note_parts(y, parts)
        return y  # type: ignore[no-any-return]


def _eps_of(module: nn.Module) -> float | None:
    own = vars(module)
    eps = own.get("eps", own.get("variance_epsilon"))
    return eps if isinstance(eps, float) else None


def _fits(x: Tensor, weight: Tensor) -> bool:
    """Can the kernel stand in for the module's own forward?"""
    return (
        type(x) in _PLAIN
        and type(weight) in _PLAIN
        and x.dtype is weight.dtype
        and x.dtype in _DTYPES
        and x.device == weight.device
        and (x.is_cuda or x.is_cpu)
        and x.shape[-1:] == weight.shape  # [cols]
        and not torch.is_autocast_enabled(x.device.type)
        and not torch._C._are_functorch_transforms_active()
    )


class _RMSNorm(torch.autograd.Function):
    """Saves x and 1 / rms(x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        y, rstd, parts = ops.rmsnorm(x, weight, eps)
        ctx.set_materialize_grads(False)  # there is none of the parts
        ctx.save_for_backward(x, weight, rstd)
        return y, parts

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: None) -> tuple[Tensor | None, ...]:
        # The decorator takes 5 µs to refuse second derivatives, which only a recorded backward can ask for.
        differentiate = _backward_once if torch.is_grad_enabled() else _backward
        result: tuple[Tensor | None, ...] = differentiate(ctx, dy)
        return result


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, rstd = ctx.saved_tensors
    return *ops.rmsnorm_backward(dy, x, weight, rstd, ctx.needs_input_grad[1]), None


_backward_once = once_differentiable(_backward)
# What torch does in Python before it calls C++ is for functorch, see `_fits`.
_apply: Any = super(torch.autograd.Function, _RMSNorm).apply


@torch.no_grad()
def _is_rmsnorm(module: nn.Module) -> bool:
    """Does the module compute the formula of its input and its one parameter alone?

    Its own forward is run with a random weight in the place of its own, which may be all ones.
    """
    cls, eps = type(module), _eps_of(module)
    if isinstance(module, FusedRMSNorm) or eps is None:
        return False
    if "RMSNorm" not in cls.__name__ and not isinstance(module, nn.RMSNorm):
        return False
    if "forward" in vars(module) or len(inspect.signature(cls.forward).parameters) != 2:
        return False  # a wrapper's, or one that takes more than x
    owned = {name: p for name, p in module._parameters.items() if p is not None}
    weight = owned.pop("weight", None)
    if weight is None or owned or module._buffers or module._modules:
        return False
    if type(weight) not in _PLAIN or weight.dtype not in _DTYPES:
        return False
    if weight.dim() != 1 or not 0 < len(weight) <= MOST_COLS:
        return False
    twin = cls.__new__(cls)
    twin.__dict__.update(module.__dict__)
    twin.training = True
    draw = torch.Generator().manual_seed(0)
    w, x = torch.randn(2, len(weight), generator=draw, device="cpu", dtype=torch.float32)
    with torch.random.fork_rng(devices=[]):  # dropout would show, and takes random numbers
        twin._parameters = module._parameters | {"weight": nn.Parameter(w)}
        for size in (1.0, 1e-4):  # of the second, eps is not a small part
            given = size * torch.stack([x, x.flip(0) + 1])
            try:
                found = cls.forward(twin, given.clone())
            except Exception:  # it wants another device or shape
                return False
            expected = formula(given, w, eps)[0]
            if not isinstance(found, Tensor) or found.dtype is not expected.dtype:
                return False
            if found.shape != expected.shape or not torch.allclose(found, expected, 1e-5, 0.0):
                return False
    return True
