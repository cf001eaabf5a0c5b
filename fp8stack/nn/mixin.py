"""Modules that change what they compute and nothing else: a mix-in with another `forward` is put before their class.

Such a class is made when it is first needed, under a name that no import finds, so that copies and pickles of its
modules name its parents.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from fp8stack.errors import ModelError

_CLASSES: dict[tuple[type[nn.Module], type[nn.Module], str], type[nn.Module]] = {}


def mixed_class(mixin: type[nn.Module], cls: type[nn.Module], prefix: str) -> type[nn.Module]:
    """Return the class of modules that are a `cls` with the methods of `mixin`; assign it to `module.__class__`.

    It has the `forward` of `cls` as `plain_forward`.
    """
    parents = mixin, cls, prefix

    def reduce(self: nn.Module) -> Any:
        get = getattr(self, "__getstate__", None)  # which every object has since Python 3.11
        return remake, parents, get() if get else self.__dict__

    if parents not in _CLASSES:
        # Dynamo of torch 2.11 knows no super() here.
        own = {"__reduce__": reduce, "plain_forward": cls.forward}
        _CLASSES[parents] = type(prefix + cls.__name__, (mixin, cls), own)
    return _CLASSES[parents]


def remake(mixin: type[nn.Module], cls: type[nn.Module], prefix: str) -> nn.Module:
    """Make a module without its contents, which unpickling fills in."""
    module = cls.__new__(cls)
    module.__class__ = mixed_class(mixin, cls, prefix)
    return module


def class_below(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module, without the mix-in if it has one."""
    cls = type(module)
    return cls.__bases__[1] if cls in _CLASSES.values() else cls


def unmix(model: nn.Module, *mixins: type[nn.Module]) -> None:
    """Give the modules of classes mixed with any of `mixins` their classes back.

    Raises:
        ModelError: if one has a class made over the mixed one. Nothing is changed.
    """
    mixed = {name: m for name, m in model.named_modules() if isinstance(m, mixins)}
    for name, module in mixed.items():
        if type(module) not in _CLASSES.values():
            raise ModelError(
                f"{name or 'the model'} is a {type(module).__name__}, a class that fully_shard or a parametrization "
                "made over the fused one, which cannot be taken from under it: restore before you shard or "
                "parametrize a fused module, or undo that first."
            )
    for module in mixed.values():
        module.__class__ = class_below(module)
