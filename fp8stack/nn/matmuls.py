"""FP8 products of models that multiply by bare parameters: `x @ self.w`, einsum, F.linear, stacks of experts.

Such a product has no layer whose class could be changed, so it is caught where it is made. The modules that
`coverage.py` chose get a subclass of their class, whose forward runs under a `TorchFunctionMode` that sees all torch
functions. The next modules inside leave the mode again, so that only the code of the chosen ones pays for it.

1. A function that is no matrix product goes on as it is, after one look-up (0.8 µs).
2. Of a product, exactly one operand must be a parameter or a view of one (`w.t()`, `w[i]`, `w.view(...)`).
3. The other one, brought to [..., in], and the view, as [in, out] or [out, in], go to `fp8_matmul`. Gradients reach the
   parameter through the view, as autograd has it. A parameter [experts, in, out] makes one product per expert, or one
   grouped over experts where that is what the model calls (`grouped.py`).
4. What does not fit is left to torch and counted with the reason, in `BareMatmuls.left`.

The mode is entered by every forward, not by the model's alone, because activation checkpointing calls forward again
in backward, when the model's has long returned. For the same reason the other methods of a module enter it while a
backward runs. In between, only a change between training and evaluation makes a nested forward enter it again.

Limits. A closure that multiplies by itself, given to `checkpoint`, is recomputed without FP8, which torch reports as a
mismatch of saved tensors: checkpoint a module or a method. `w.to(dtype)` is not a view. Composite functions are not
looked into, such as `F.multi_head_attention_forward`. Under "delayed" these products use current scaling (a head's
gradients block scales), as a graph has no place to keep their histories. What torch.compile runs is neither counted nor
named.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import string
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily

from fp8stack.formats import FLOATS
from fp8stack.levels import PRECISIONS, Recipe

from . import grouped
from .bf16_storage import autocast_is_on
from .casts import InputCodes, Products, in_backward
from .forward_code import is_of_library
from .heads import HEAD
from .linear import bf16_matmul, fp8_matmul
from .mixin import Mixin, mix
from .precision import with_products
from .select import least_rows, pays

RECIPES = ("current", "tokenwise", "rowwise", "blockwise")  # others become "current"
TOO_FEW = 'bfloat16 is faster at this size; select="all" takes it'
_ONE_PARAMETER = "neither or both operands are parameters"
_NOT_ONE_PRODUCT = "not one matrix product"
_ARGUMENTS = "arguments that FP8 products do not take"
_least_rows = functools.cache(least_rows)


def apply_matmuls(
    model: nn.Module,
    recipe: Recipe,
    chosen: Container[nn.Module],  # by `coverage.bare_modules`
    skipped: Iterable[nn.Module],  # what `convert.skipped_modules` returned
    heads: Iterable[
        nn.Module
    ] = (),  # layers that make logits; products by an embedding's weight do, too
) -> BareMatmuls:
    """Let products by bare parameters run in FP8 wherever `model` makes them; return the record of them."""
    heads = [*heads, *(m for m in model.modules() if isinstance(m, nn.Embedding))]
    bare = BareMatmuls(recipe, skipped, heads if recipe.head != "fp8" else ())
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if module in bare.skipped or id(parameter) not in bare.places:
                bare.places[id(parameter)] = module, key, f"{name}.{key}".lstrip(".")
        if module not in chosen or is_of_library(module) or isinstance(module, Mixin):
            continue
        if _has_plain_forward(module):
            mix(module, MultipliesParameters, _bare_matmuls=bare)
    watched = [m for m in model.modules() if isinstance(m, MultipliesParameters)]
    for module in (inner for outer in watched for inner in _next_inside(outer)):
        if _has_plain_forward(module) and not isinstance(module, LeavesMode):
            # A class that takes no subclass stays under the mode.
            with contextlib.suppress(Exception):
                mix(module, LeavesMode)
    return bare


def _has_plain_forward(module: nn.Module) -> bool:
    """Return whether the forward is a method in Python: no built-in, static method or partial, and of the class."""
    forward = inspect.getattr_static(type(module), "forward", None)
    return inspect.isfunction(forward) and "forward" not in vars(module)


def _next_inside(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the next modules inside with a forward of their own, which are none that look for products, nor layers."""
    for child in module.children():
        if is_of_library(child) and not isinstance(child, Mixin):
            yield from _next_inside(child)
        elif not isinstance(child, Mixin):
            yield child


class BareMatmuls:
    """The products by bare parameters of one model: their settings, and what became of them."""

    def __init__(
        self, recipe: Recipe, skipped: Iterable[nn.Module] = (), heads: Iterable[nn.Module] = ()
    ) -> None:
        usable = recipe.fp8_recipe in RECIPES
        self.recipe = recipe if usable else replace(recipe, fp8_recipe="current")
        self.skipped, self.heads = set(skipped), set(heads)
        # Module, attribute and name of each parameter that the model had then, by its id. Weak references to
        # parameters would keep torch from swapping what is in them, strong ones keep alive what was replaced.
        self.places: dict[int, tuple[nn.Module, str, str]] = {}
        self.used: set[str] = set()  # names of parameters that were multiplied in FP8
        self.left: Counter[str] = Counter()  # products that were left to torch, by reason
        self.modes = (_Mode(self, train=False), _Mode(self, train=True))
        inputs = InputCodes()
        in_bf16 = PRECISIONS["wgrad-bf16" if recipe.wgrad == "bf16" else "fp8"]
        self._products = [
            Products(self.recipe, turned=t, inputs=inputs, in_bf16=in_bf16) for t in (False, True)
        ]
        self._head_products = Products(self.recipe, in_bf16=with_products("forward", in_bf16))
        self.all_products = (*self._products, self._head_products)

    def __reduce__(self) -> Any:
        # A copy's parameters are others; its layers keep their own record of the modules to skip.
        return BareMatmuls, (self.recipe, self.skipped, self.heads), self.finished

    def __setstate__(self, finished: bool) -> None:
        if finished:
            self.finish()

    def finish(self) -> None:
        """Make products in bfloat16 from now on; grouped ones are left to torch."""
        for products in self.all_products:
            products.in_bf16 = PRECISIONS["bf16"]

    @property
    def finished(self) -> bool:
        """Whether all products are in bfloat16 by now: finishing.py."""
        return self._products[0].finished

    def products_of(self, parameter: Tensor | None, turned: bool) -> Products:
        """Return how to multiply by `parameter` or a view of it, and record that."""
        if not torch.compiler.is_compiling():
            self.used.add(self._place_of(parameter)[1])
        head = self.makes_logits(parameter, turned)
        return self._head_products if head else self._products[int(turned)]

    def _place_of(self, parameter: Tensor | None) -> tuple[nn.Module | None, str]:
        """Return the owner of `parameter` and its name; a skipped one, if there are several."""
        module, key, name = self.places.get(id(parameter), (None, "", ""))
        known = module is not None and module._parameters.get(key) is parameter
        return (module, name) if known else (None, "unnamed")  # the model did not have it then

    def makes_logits(self, parameter: Tensor | None, turned: bool) -> bool:
        """Return whether products by `parameter`, as [out, in], are those of a head that is not to be in FP8."""
        weights = (m._parameters.get("weight") for m in self.heads)
        return not turned and any(parameter is weight for weight in weights)

    def skips(self, parameter: Tensor) -> bool:
        """Return whether a module that is to be left alone owns `parameter`."""
        if not torch.compiler.is_compiling() and (module := self._place_of(parameter)[0]):
            return module in self.skipped  # one look-up, as each product asks
        return any(parameter is own for m in self.skipped for own in m._parameters.values())


class _Mode(TorchFunctionMode):
    """Sees every torch function that a forward calls, and makes the products by parameters itself."""

    def __init__(self, bare: BareMatmuls, train: bool) -> None:
        super().__init__()
        self.bare = bare
        self.train = train

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        multiply = _SPELLINGS.get(func)
        if multiply is not None:
            result = multiply(self, *args, **(kwargs or {}))  # the mode is off meanwhile
            if not isinstance(result, str):
                return result
            if not torch.compiler.is_compiling():
                self.bare.left[result] += 1
        return func(*args, **(kwargs or {}))

    def matmul(self, a: Any, b: Any) -> Tensor | str:
        """Return a @ b where one is a parameter, or the reason to leave it."""
        if _parameter_of(b) is not None:
            return self.product(a, b, turned=True)
        if _parameter_of(a) is None:
            return _ONE_PARAMETER
        if b.dim() < 2:
            return self.product(b, a, turned=False)
        y = self.product(b.mT, a, turned=False)
        return y if isinstance(y, str) else y.mT.contiguous()  # laid out as torch's

    def product(
        self,
        x: Tensor,  # [..., in], or [..., experts, tokens, in] for a stack
        weight: Tensor,  # [in, out] if turned, else [out, in]; a stack has a dimension of experts before them
        turned: bool,
        bias: Tensor | None = None,  # [out]
    ) -> Tensor | str:  # [..., out]
        """Multiply in FP8, or return the reason to leave it."""
        if reason := self._obstacle(x, weight, turned):
            return reason
        experts = weight.unbind() if weight.dim() > 2 else [weight]
        inputs: Any = [x] * len(experts)
        if weight.dim() > 2 and x.dim() > 2:  # a single one is for all experts
            inputs = x.unbind(-3) if x.shape[-3] > 1 else [x.squeeze(-3)] * len(experts)
        if x.is_cuda and self.bare.recipe.select == "auto":
            rows, cols = weight.shape[-2:]
            least = _least_rows(rows, cols) if turned else _least_rows(cols, rows)
            if not pays(inputs[0], least):
                return TOO_FEW
        if weight.dim() == 2:
            return self._matrix(x, weight, turned, bias)
        pairs = zip(inputs, experts, strict=True)
        return torch.stack([self._matrix(i, w, turned, None) for i, w in pairs], -3)

    def grouped(self, x: Tensor, stack: Tensor, offs: Tensor) -> Tensor | str:
        """Multiply each group of x [rows, in] by its matrix of `stack` [groups, in, out], or return the reason not to.

        torch multiplies float32 by float32, also under autocast, and then FP8 always pays.
        """
        if reason := self._obstacle(x, stack, True) or grouped.obstacle(stack):
            return reason
        if self.bare.finished:
            return "fp8stack.finish was called"
        if x.is_cuda and self.bare.recipe.select == "auto" and stack.dtype is not torch.float32:
            experts, rows, cols = stack.shape
            if not pays(x, _least_rows(rows, cols, 1, experts)):
                return TOO_FEW
        products = self.bare.products_of(_parameter_of(stack), True)
        return grouped.multiply_some(x, stack, offs, products, self.train)

    def _matrix(self, x: Tensor, weight: Tensor, turned: bool, bias: Tensor | None) -> Tensor:
        parameter = _parameter_of(weight)
        if not weight.is_contiguous() and weight.t().is_contiguous():
            weight, turned = weight.t(), not turned  # casts read contiguous matrices
        if self.bare.recipe.head == "bf16" and self.bare.makes_logits(parameter, turned):
            if not torch.compiler.is_compiling():
                self.bare.left[HEAD] += 1
            return bf16_matmul(x, weight, bias, "")
        return fp8_matmul(x, weight, bias, self.bare.products_of(parameter, turned), self.train)

    def _obstacle(self, x: Any, weight: Tensor, turned: bool) -> str:
        """Return why torch makes this product, or an empty string. Torch reports what is wrong, too."""
        parameter = _parameter_of(weight)
        if parameter is None or _parameter_of(x) is not None:
            return _ONE_PARAMETER
        if torch._C._are_functorch_transforms_active():
            return "a transform of torch.func"
        if type(x) is not Tensor or x.layout is not torch.strided or x.is_nested or x.dim() == 0:
            return "the other operand is not a plain tensor"
        dtypes = {x.dtype, weight.dtype, parameter.dtype}
        # O2 stores the weight of an Embedding in bfloat16, and the model goes on in its own dtype.
        alike = weight.dtype in (x.dtype, torch.bfloat16) or autocast_is_on(x)
        if not dtypes.issubset(FLOATS) or weight.dtype is not parameter.dtype or not alike:
            return "dtypes"
        if x.device != weight.device or not (x.is_cuda or x.is_cpu):
            return "devices"
        if weight.dim() == 3:
            apart = x.dim() == 2 or (x.dim() > 2 and x.shape[-3] in (1, weight.shape[0]))
            if parameter.dim() < 3 or weight.shape[0] != parameter.shape[0] or not apart:
                return "batched, and not a stack of experts"
        elif weight.dim() != 2:
            return "the parameter is not a matrix"
        rows, cols = weight.shape[-2:]
        if x.shape[-1] != (rows if turned else cols):
            return "shapes"
        if x.numel() == 0 or weight.numel() == 0:
            return "empty"
        if rows * cols < self.bare.recipe.min_numel:
            return "smaller than min_numel"
        return "skip" if self.bare.skips(parameter) else ""


def _parameter_of(x: Any) -> Tensor | None:
    """Return the parameter that `x` is, or is a view of."""
    base = x if isinstance(x, nn.Parameter) else getattr(x, "_base", None)
    # Dynamo of torch 2.11 gives the base of a view another type.
    is_plain = type(base) is nn.Parameter or torch.compiler.is_compiling()
    return base if is_plain and isinstance(base, nn.Parameter) else None


# --- the spellings of a product, called as torch's functions are, with the mode first


def _matmul(mode: _Mode, input: Any, *others: Any, dim: int = 0, **named: Any) -> Tensor | str:
    """A product of two operands; `torch.mm` and `torch.bmm` take those of so many dimensions only."""
    others += tuple(named.values())  # other= or mat2=; out= is one too many
    fits = len(others) == 1 and (dim == 0 or input.dim() == others[0].dim() == dim)
    fits = fits and (dim != 3 or len(input) == len(others[0]))
    return mode.matmul(input, others[0]) if fits else _ARGUMENTS


def _linear(mode: _Mode, input: Any, weight: Any, bias: Any = None) -> Tensor | str:
    if weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        return _ARGUMENTS
    return mode.product(input, weight, False, bias)


def _addmm(
    mode: _Mode, input: Any, *pair: Any, beta: Any = 1, alpha: Any = 1, dim: int = 2, **named: Any
) -> Tensor | str:
    """`torch.addmm`, or `torch.baddbmm` with dim=3."""
    pair += tuple(named.pop(n) for n in ("mat1", "mat2", "batch1", "batch2") if n in named)
    if named or len(pair) != 2 or any(x.dim() != dim for x in pair):
        return _ARGUMENTS
    a, b = pair
    biased = beta == alpha == 1 and dim == 2 and input.shape == b.shape[1:]
    if biased and _parameter_of(b) is not None:
        return _linear(mode, a, b.t(), input)
    y = mode.matmul(a, b)
    if isinstance(y, str):
        return y
    y = y if alpha == 1 else y * alpha
    return y if beta == 0 else y + (input.to(y.dtype) * beta).expand_as(y)


def _einsum(mode: _Mode, equation: Any, *operands: Any) -> Tensor | str:
    """One matrix product, or one per expert, in whatever order the dimensions are named."""
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or len(operands) != 2 or equation.count(",") != 1:
        return _NOT_ONE_PRODUCT
    order = 1 if _parameter_of(operands[0]) is None else -1
    x, weight = operands[::order]
    if _parameter_of(weight) is None:
        return _ONE_PARAMETER
    terms, _, out = equation.replace(" ", "").partition("->")
    of_x, of_weight = terms.split(",")[::order]
    dots = max(x.dim() - len(of_x.replace("...", "")), 0)
    free = "".join([c for c in string.ascii_letters if c not in equation][:dots])
    of_x, out = of_x.replace("...", free), out.replace("...", free)
    experts = "".join([c for c in of_weight if c in of_x and c in out])
    inner = "".join([c for c in of_weight if c in of_x and c not in out])
    outer = "".join([c for c in of_weight if c not in of_x])
    rest = "".join([c for c in of_x if c not in of_weight])
    first = rest[:-1] + experts + rest[-1:]
    turned = of_weight == experts + inner + outer
    sizes = dict(zip(of_weight, weight.shape, strict=False))
    fits = (
        (len(of_x), len(of_weight)) == (x.dim(), weight.dim())
        and all(len(set(letters)) == len(letters) for letters in (of_x, of_weight, out))
        and sorted(out) == sorted(first + outer)  # else it sums over one operand alone, too
        and len(experts) <= min(len(rest), 1)
        and len(inner) > 0 < len(outer)
        and (turned or of_weight == experts + outer + inner)
        and all(sizes.get(c, n) == n for c, n in zip(of_x, x.shape, strict=True))
        and (len(inner + outer) == 2 or weight.is_contiguous())
    )
    if not fits:
        return _NOT_ONE_PRODUCT
    if first + inner != of_x:  # else x stays the tensor that was cast last, perhaps
        x = x.permute([of_x.index(c) for c in first + inner])
    if len(inner) > 1:
        x = x.flatten(-len(inner))
    if len(inner + outer) > 2:
        pair = (inner, outer) if turned else (outer, inner)
        matrix = [math.prod([sizes[c] for c in part]) for part in pair]
        weight = weight.view([sizes[c] for c in experts] + matrix)
    y = mode.product(x, weight, turned)
    if not isinstance(y, str) and len(outer) > 1:
        y = y.unflatten(-1, [sizes[c] for c in outer])
    made = first + outer
    return y if isinstance(y, str) or made == out else y.permute([made.index(c) for c in out])


def _tensordot(mode: _Mode, a: Any, b: Any, dims: Any = 2, out: Any = None) -> Tensor | str:
    """The einsum of two operands that sums over `dims` of each: a number, or a list for each."""
    if isinstance(dims, int):
        dims = range(a.dim() - dims, a.dim()), range(dims)
    lists = isinstance(dims, (tuple, list)) and all(isinstance(of, Sequence) for of in dims)
    if out is not None or not lists or len({*map(len, dims)}) != 1 or len(dims) != 2:
        return _ARGUMENTS
    pairs = ((x, i) for x, of in zip((a, b), dims, strict=True) for i in of)
    if any(i not in range(-x.dim(), x.dim()) for x, i in pairs):
        return _ARGUMENTS
    letters = [*string.ascii_letters[: a.dim() + b.dim()]]
    of_a, of_b = letters[: a.dim()], letters[a.dim() :]
    for i, j in zip(*dims, strict=True):
        of_b[j] = of_a[i]
    kept = [c for c in of_a if c not in of_b] + [c for c in of_b if c not in of_a]
    with torch.autocast(a.device.type, enabled=autocast_is_on(a) and not a.is_cuda):
        # On a GPU autocast takes the operands' own dtype for it.
        y = _einsum(mode, f"{''.join(of_a)},{''.join(of_b)}->{''.join(kept)}", a, b)
    return y if isinstance(y, str) else y.contiguous()  # laid out as torch's


def _grouped(mode: _Mode, input: Any, mat2: Any, *, offs: Any = None, **named: Any) -> Tensor | str:
    """The rows of each group by its own matrix, of a stack [groups, in, out]."""
    plain = (input.dim(), mat2.dim()) == (2, 3) and not any(x is not None for x in named.values())
    if offs is None or not plain:
        return _ARGUMENTS
    return mode.grouped(input, mat2, offs)


_SPELLINGS: dict[Any, Callable[..., Tensor | str]] = {
    **dict.fromkeys((torch.matmul, torch.linalg.matmul, Tensor.matmul, Tensor.__matmul__), _matmul),
    **dict.fromkeys((torch.mm, Tensor.mm), functools.partial(_matmul, dim=2)),
    **dict.fromkeys((torch.bmm, Tensor.bmm), functools.partial(_matmul, dim=3)),
    **dict.fromkeys((torch.addmm, Tensor.addmm), _addmm),
    **dict.fromkeys((torch.baddbmm, Tensor.baddbmm), functools.partial(_addmm, dim=3)),
    **dict.fromkeys(
        (getattr(torch, "_grouped_mm", None), getattr(nn.functional, "grouped_mm", None)), _grouped
    ),
    torch.tensordot: _tensordot,
    Tensor.__rmatmul__: lambda mode, input, other: mode.matmul(other, input),
    nn.functional.linear: _linear,
    torch.einsum: _einsum,
}


# --- classes of modules whose forward enters the mode


class MultipliesParameters(Mixin):
    """Mixed into a class with code of its own, whose methods enter the mode."""

    @staticmethod
    def mixin_methods(cls: type[nn.Module]) -> dict[str, Any]:
        """Return forward, and the other methods that backward may call."""
        names = [name for name in dir(cls) if not hasattr(nn.Module, name)]
        functions = [n for n in names if inspect.isfunction(inspect.getattr_static(cls, n))]
        return {name: _entering(cls, name) for name in ("forward", *functions)}


class LeavesMode(Mixin):
    """Mixed into the class of a module inside one that looks for products: its forward runs without the mode."""

    @staticmethod
    def mixin_methods(cls: type[nn.Module]) -> dict[str, Any]:
        """Return the forward."""

        @functools.wraps(cls.forward, updated=())
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            # A graph has no mode that costs time.
            if torch.compiler.is_compiling() or not isinstance(_get_current_function_mode(), _Mode):
                return cls.forward(self, *args, **kwargs)
            with _pop_mode_temporarily():
                return cls.forward(self, *args, **kwargs)

        return {"forward": forward}


def _entering(cls: type[nn.Module], name: str) -> Callable[..., Any]:
    """Return the method `name` of `cls` under the mode: always for forward, else only where backward calls it."""
    always = name == "forward"

    # without the attributes of the method, in which torch.compile finds what it should not call
    @functools.wraps(getattr(cls, name), updated=())
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = getattr(cls, name)
        if always or in_backward():
            # None: made anew by its class, as slices of a Sequential are
            bare = vars(self).get("_bare_matmuls")
            mode = bare and bare.modes[int(self.training)]
            if mode and _get_current_function_mode() is not mode:
                with mode:
                    return own(self, *args, **kwargs)
        return own(self, *args, **kwargs)

    return method
