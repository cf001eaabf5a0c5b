"""RMSNorms that tell the cast behind them how large their output is.

The layers behind a norm cast its output to FP8, for which they look for its largest magnitude first, although the
kernel that wrote it had every value in hand. A fused norm keeps that magnitude (`kernels/rmsnorm.py`) and leaves a note
of it for the cast (`casts.py`), which then reads its input once instead of twice. The codes are the same, bit for
bit; the norm itself is computed in float32 and rounded once, where modules that round twice give another last bit.

`fuse_norms` takes a module by what it computes: its own forward, run on a random weight, has to give the numbers of the
formula, for inputs so small that eps counts too and under autocast, and results of its input's dtype. The weight of the
formula is the module's, or 1 + that, in float32, as in Gemma. A norm that subtracts the mean, goes over other
dimensions than the last or reads more than its input is left as it is. Under torch.compile, under autocast for inputs
in 16 bits, for inputs of another dtype than the weight, and for tensors that are not torch's own, a fused norm runs its
own class's forward. Second derivatives are torch's.
"""

from __future__ import annotations

import inspect
from collections.abc import Container
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from fp8stack.formats import FLOATS
from fp8stack.kernels import ops
from fp8stack.kernels.reference.rmsnorm import MOST_COLS
from fp8stack.kernels.reference.rmsnorm import rmsnorm as formula

from .bf16_storage import autocast_is_on
from .mixin import TESTED, Fused, fuse_modules, run_with
from .notes import note

PLAIN = (Tensor, nn.Parameter, FakeTensor)


def fuse_norms(model: nn.Module, skipped: Container[nn.Module] = ()) -> list[str]:
    """Fuse the RMSNorms of a model; return their names. `take_off` undoes it."""
    return fuse_modules(model, FusedRMSNorm, _offset_of, skipped)


class FusedRMSNorm(Fused):
    """Mixed into the class of a norm, whose `forward` it replaces."""

    weight: Tensor

    def forward(self, *given: Any, **named: Any) -> Tensor:
        """Return x / rms(x) × (offset + weight) of the one argument x: [..., cols] -> [..., cols]."""
        eps, offset = _eps_of(self), vars(self).get(TESTED)  # None: made anew by its class
        other = torch.compiler.is_compiling() or None in (eps, offset) or named or len(given) != 1
        if other or not _fits(given[0], self.weight):
            result: Tensor = self.plain_forward(*given, **named)
            return result
        # Under the mode of `matmuls.py`, each torch call in here would go through Python.
        with torch._C.DisableTorchFunction():
            weight = offset + self.weight.float() if offset else self.weight
            y, parts = _apply(given[0], weight, eps)
            note(y, "parts", parts)
        return y  # type: ignore[no-any-return]


def _eps_of(module: nn.Module) -> float | None:
    own = vars(module)
    eps = own.get("eps", own.get("variance_epsilon"))
    return eps if isinstance(eps, float) else None


def _fits(x: Tensor, weight: Tensor) -> bool:
    """Can the kernel stand in for the module's own forward?"""
    return (
        type(x) in PLAIN
        and type(weight) in PLAIN
        and x.dtype is weight.dtype
        and x.dtype in FLOATS
        and x.device == weight.device
        and (x.is_cuda or x.is_cpu)
        and x.shape[-1:] == weight.shape  # [cols]
        # Autocast leaves float32 as it is in what norms are made of.
        and (x.dtype is torch.float32 or not autocast_is_on(x))
        and not torch._C._are_functorch_transforms_active()
    )


class _RMSNorm(torch.autograd.Function):
    """Saves x and 1 / rms(x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        y, rstd, parts = ops.rmsnorm(x, weight, eps)
        ctx.eps = eps
        ctx.set_materialize_grads(False)  # there is none of the parts
        ctx.save_for_backward(x, weight, rstd)
        return y, parts

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return None, None, None
        x, weight, rstd = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: torch's gradients can be differentiated
            needed = [t for t, need in zip((x, weight), ctx.needs_input_grad, strict=False) if need]
            y = nn.functional.rms_norm(x.float(), weight.shape, weight.float(), ctx.eps).to(x.dtype)
            found = iter(torch.autograd.grad(y, needed, dy, create_graph=True))
            return *(next(found) if need else None for need in ctx.needs_input_grad[:2]), None
        return *ops.rmsnorm_backward(dy, x, weight, rstd, ctx.needs_input_grad[1]), None


# What torch does in Python before it calls C++ is for functorch, see `_fits`.
_apply: Any = super(torch.autograd.Function, _RMSNorm).apply


def _offset_of(module: nn.Module) -> float | None:
    """Return 0 or 1 if the module computes the formula of its input and that plus its one parameter alone."""
    cls, eps = type(module), _eps_of(module)
    owned = {name: p for name, p in module._parameters.items() if p is not None}
    weight: Any = owned.get("weight")
    if (
        eps is None
        or not ("Norm" in cls.__name__ or isinstance(module, nn.RMSNorm))  # T5's is a T5LayerNorm
        or len(inspect.signature(cls.forward).parameters) != 2  # it takes more than x
        or owned.keys() != {"weight"}
        or module._buffers
        or module._modules
        or type(weight) not in PLAIN
        or weight.dtype not in FLOATS
        or weight.dim() != 1
        or not 0 < len(weight) <= MOST_COLS
    ):
        return None
    fitting = (o for o in (0.0, 1.0) if _computes_the_formula(module, len(weight), eps, o))
    return next(fitting, None)


@torch.no_grad()
def _computes_the_formula(module: nn.Module, cols: int, eps: float, offset: float) -> bool:
    """Run the module's own forward with a random weight in the place of its own, which may be all ones."""

    def run(x: Tensor, weight: Tensor, train: bool = True) -> Tensor | None:
        """Return the result if it is of the shape and dtype of x."""
        weights = module._parameters | {"weight": nn.Parameter(weight)}
        y = run_with(module, x, _parameters=weights, training=train)
        fits = isinstance(y, Tensor) and y.shape == x.shape and y.dtype is x.dtype
        return y if fits else None

    draw = torch.Generator().manual_seed(0)
    w = torch.randn(cols, generator=draw, device="cpu", dtype=torch.float32)
    # of four dimensions: a norm over others than the last shows
    x = torch.randn(2, 3, 5, cols, generator=draw, device="cpu", dtype=torch.float32)
    for autocast in (False, True):
        # In evaluation without autocast. Of large inputs limits of values show, of the smallest eps is no small part.
        for size in (1.0, 1e3, eps**0.5 or 1.0):
            with torch.autocast("cpu", torch.bfloat16, autocast):
                found = run(size * x, w, autocast)
            expected = formula(size * x, offset + w, eps)[0]
            if found is None or not torch.allclose(found, expected, 1e-5, 0.0):
                return False
    # The module may be cast to any of these later on.
    return all(run(x.to(dtype), w.to(dtype)) is not None for dtype in FLOATS)
