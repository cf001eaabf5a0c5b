"""Modules that change what they compute and nothing else: a mix-in with another `forward` is put before their class.

Such a class is made when it is first needed, under a name that no import finds, so that copies and pickles of its
modules name its parents.
"""

from __future__ import annotations

from typing import Any

from torch import nn

_CLASSES: dict[tuple[type[nn.Module], type[nn.Module], str], type[nn.Module]] = {}


def mixed_class(mixin: type[nn.Module], cls: type[nn.Module], prefix: str) -> type[nn.Module]:
    """Return the class of modules that are a `cls` with the methods of `mixin`; assign it to `module.__class__`.

    It has the `forward` of `cls` as `plain_forward`.
    """
    parents = mixin, cls, prefix

    def reduce(self: nn.Module) -> Any:
        return remake, parents, self.__dict__

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


def plain_class(module: nn.Module) -> Any:
    """Return the class that a module of a mixed class had before."""
    return type(module).__bases__[1]
