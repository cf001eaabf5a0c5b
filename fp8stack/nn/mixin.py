"""Mix-ins that change what a module computes and nothing else: their methods come before those of its class.

The mixed class is made when it is first needed. No import finds its name, so copies and pickles of its modules name the
two parents instead. It is freed with the class below it.
"""

from __future__ import annotations

import copy
import copyreg
import types
from collections.abc import Callable, Container, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fp8stack.errors import ModelError

TESTED = "_fp8stack_tested"
"""The attribute of a fused module with what it was found to compute."""


class Mixin(nn.Module):
    """The base of all mix-ins. Not constructed."""

    mixin_prefix = ""  # the first part of the mixed class's name
    # The mixed class itself; a class that something makes over it (a parametrization) inherits that.
    mixed_class: type[nn.Module]
    _fp8stack_attributes: tuple[str, ...] = ()  # names of what its modules got with it

    def __init_subclass__(cls) -> None:
        """Do nothing: a model's own `__init_subclass__` is for the user's classes, not for mixed ones."""

    @staticmethod
    def mixin_methods(cls: type[nn.Module]) -> dict[str, Any]:
        """Return further methods of the mixed class, which replace those of `cls`."""
        return {}


class Fused(Mixin):
    """A mix-in with another `forward`; the one of the class below becomes `plain_forward`."""

    mixin_prefix = "Fused"
    plain_forward: Any

    @staticmethod
    def mixin_methods(cls: type[nn.Module]) -> dict[str, Any]:
        """Return the forward of `cls`, by the name that ours calls."""
        return {"plain_forward": cls.forward}  # Dynamo of torch 2.11 knows no super() here


def mixed_class(mixin: type[Mixin], cls: type[nn.Module]) -> type[nn.Module]:
    """Return the class that has `mixin` before `cls`; see `mix`."""
    for known in cls.__subclasses__():
        if vars(known).get("_fp8stack_mixin") is mixin:
            return known

    def reduce(self: nn.Module, protocol: Any) -> Any:
        reduced: Any = cls.__reduce_ex__(self, protocol)
        if type(self) is not mixed or reduced[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return reduced  # the user's own way of pickling
        mixins, below = [mixin], cls  # which may be a mixed class, too
        while lower := vars(below).get("_fp8stack_mixin"):
            mixins, below = [lower, *mixins], below.__bases__[1]
        return (_new, (tuple(mixins), below, *reduced[1][1:]), *reduced[2:])

    body = {"_fp8stack_mixin": mixin, "__reduce_ex__": reduce, "__doc__": cls.__doc__}
    body |= {"__module__": cls.__module__, "__qualname__": mixin.mixin_prefix + cls.__qualname__}
    body |= mixin.mixin_methods(cls)
    name = mixin.mixin_prefix + cls.__name__
    mixed: Any = types.new_class(name, (mixin, cls), None, lambda names: names.update(body))
    mixed.mixed_class = mixed
    return mixed  # type: ignore[no-any-return]


def _new(mixins: tuple[type[Mixin], ...], cls: type[nn.Module], *args: Any) -> nn.Module:
    """Return an empty module of the class with all mixins: the first half of unpickling and of deepcopy."""
    mixed = cls
    for mixin in mixins:
        mixed = mixed_class(mixin, mixed)
    return cls.__new__(mixed, *args)


def mix(
    module: nn.Module, mixin: type[Mixin], cls: type[nn.Module] | None = None, **attributes: object
) -> None:
    """Give a module the class that has `mixin` before `cls`, by default its own, and the attributes it needs."""
    mixed: Any = mixed_class(mixin, cls or type(module))
    mixed._fp8stack_attributes = (*attributes,)
    object.__setattr__(module, "__class__", mixed)  # whatever its own `__setattr__` does
    vars(module).update(attributes)


def take_off(
    model: nn.Module, mixin: type[Mixin] = Mixin, removed: Iterable[nn.Module] = ()
) -> None:
    """Give the modules that `mixin` was mixed into the classes and attributes that they had.

    removed: modules that were in the model.

    Raises:
        ModelError: if another class was made over a mixed one since. Nothing is changed.
    """
    names = dict.fromkeys(removed, "a module that was removed")
    names |= {module: name or "the model" for name, module in model.named_modules()}
    mixed: list[Any] = [module for module in names if isinstance(module, mixin)]
    for module in mixed:
        if type(module) is not module.mixed_class:
            raise ModelError(
                f"{names[module]} is a {type(module).__name__}, a class that fully_shard or a parametrization made "
                f"over {module.mixed_class.__name__}, which cannot be taken from under it. Remove the parametrization "
                "first (torch.nn.utils.parametrize.remove_parametrizations), or restore before fully_shard."
            )
    for module in mixed:
        # One may lie over another. A layer that multiplies in FP8 stays one below a fused class.
        while isinstance(module, mixin) and type(module) is module.mixed_class:
            for attribute in module._fp8stack_attributes:
                vars(module).pop(attribute, None)
            object.__setattr__(module, "__class__", type(module).__bases__[1])


def fuse_modules(
    model: nn.Module,
    mixin: type[Fused],
    formula_of: Callable[[nn.Module], Any],
    skipped: Container[nn.Module] = (),
) -> list[str]:
    """Mix `mixin` into the classes of the modules that have a formula, which is stored, and is not None.

    Returns the names of those that did not have it yet.
    """
    fused = []
    for name, module in model.named_modules():
        # If the instance itself has a forward, something has wrapped the module.
        left_alone = isinstance(module, mixin) or "forward" in vars(module) or module in skipped
        formula = None if left_alone else formula_of(module)
        if formula is not None:
            mix(module, mixin, **{TESTED: formula})
            fused.append(name)
    return fused


def has_hooks(module: nn.Module) -> bool:
    """Has somebody registered a hook on the module, or put a forward on the instance?"""
    forward = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    return bool(forward or module._backward_hooks or module._backward_pre_hooks)


def run_with(
    module: nn.Module, x: Tensor, places: dict[int, Any] | None = None, **attributes: Any
) -> Any:
    """Run the module's own forward on `x` with these attributes in place of its own; None if it fails or sets others.

    It runs with copies of its submodules, or by their id with those in `places`, in training unless told otherwise.
    """
    # the class's own __new__ would not do: FSDP's makes a module of the class below
    twin = object.__new__(type(module))
    try:
        modules = copy.deepcopy(module._modules, dict(places or {}))
        twin.__dict__.update(module.__dict__, _modules=modules, **attributes)
        nn.Module.train(twin, attributes.get("training", True))
        before = {name: id(value) for name, value in vars(twin).items()}
        with torch.random.fork_rng(devices=[]):  # dropout takes random numbers
            result = type(module).forward(twin, x)
        # What it sets, such as a loss for later, another forward would not set.
        return result if before == {name: id(value) for name, value in vars(twin).items()} else None
    except Exception:  # it cannot be copied, or wants other arguments, another device or shape
        return None
